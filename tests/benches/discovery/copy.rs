// SPDX-License-Identifier: Apache-2.0
//! A copy of a guest's memory and registers in a folder.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use serde_json::{Value, json};

const MEMORY: &str = "memory";
const REGISTERS: &str = "registers.json";

/// The parts of the memory that the guest has written, and the registers of the vCPUs.
pub struct Copy {
    parts: Vec<(u64, Vec<u8>)>,
    pub cpus: Vec<Cpu>,
}

/// Writes a copy to a folder.
pub fn write(folder: &Path, memory: &impl PhysicalMemory, cpus: &[Cpu]) -> Result<()> {
    let file = File::create(folder.join(MEMORY))?;
    let mut parts = Vec::new();
    let mut at = 0;
    for part in memory.ram() {
        let mut bytes = vec![0; usize::try_from(part.end - part.start)?];
        memory.read(part.start, &mut bytes)?;
        file.write_all_at(&bytes, at)?;
        at += bytes.len() as u64;
        parts.push(json!([part.start, part.end]));
    }
    let cpus = cpus
        .iter()
        .map(|cpu| json!([cpu.cr0, cpu.cr3, cpu.cr4, cpu.idt_base]));
    let cpus: Vec<Value> = cpus.collect();
    let registers = json!({"parts": parts, "cpus": cpus}).to_string();
    Ok(std::fs::write(folder.join(REGISTERS), registers)?)
}

impl Copy {
    /// Reads the copy in a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let file = File::open(folder.join(MEMORY))?;
        let registers: Value = serde_json::from_slice(&std::fs::read(folder.join(REGISTERS))?)?;
        let mut at = 0;
        let mut parts = Vec::new();
        for part in numbers(&registers["parts"])? {
            let [start, end] = part[..] else {
                anyhow::bail!("a part has two addresses");
            };
            let mut bytes = vec![0; usize::try_from(end - start)?];
            file.read_exact_at(&mut bytes, at)?;
            at += bytes.len() as u64;
            parts.push((start, bytes));
        }
        let cpu = |words: Vec<u64>| Cpu {
            cr0: words[0],
            cr3: words[1],
            cr4: words[2],
            idt_base: words[3],
            fred_config: None,
            may_be_nested: false,
        };
        let cpus = numbers(&registers["cpus"])?.into_iter().map(cpu).collect();
        Ok(Self { parts, cpus })
    }
}

fn numbers(lists: &Value) -> Result<Vec<Vec<u64>>> {
    let list = |list: &Value| {
        let words = list.as_array()?.iter().map(Value::as_u64);
        words.collect::<Option<Vec<u64>>>()
    };
    let lists = lists.as_array().context("a list")?;
    lists
        .iter()
        .map(|one| list(one).context("numbers"))
        .collect()
}

impl PhysicalMemory for Copy {
    fn ram(&self) -> Vec<Range<u64>> {
        let parts = self.parts.iter();
        parts
            .map(|(start, bytes)| *start..start + bytes.len() as u64)
            .collect()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        let outside = OutsideMemory { address, length };
        let end = address.checked_add(length as u64).ok_or(outside)?;
        // Memory that the guest has not written reads as zeroes.
        bytes.fill(0);
        let first = self
            .parts
            .partition_point(|(start, part)| start + part.len() as u64 <= address);
        for (start, part) in &self.parts[first..] {
            let (from, to) = (address.max(*start), end.min(start + part.len() as u64));
            if from >= to {
                break;
            }
            let place = |at: u64, of: u64| usize::try_from(at - of).map_err(|_| outside);
            let copied = &part[place(from, *start)?..place(to, *start)?];
            bytes[place(from, address)?..place(to, address)?].copy_from_slice(copied);
        }
        Ok(())
    }
}
