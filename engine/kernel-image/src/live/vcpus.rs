// SPDX-License-Identifier: Apache-2.0
//! Follows the registers of a vCPU to a page table that maps a kernel image, and to the code that
//! handles exceptions.
//!
//! The page table belongs to a process, which may end at any time. The table is then freed, and its
//! page is reused. So all needed entries are read at once, and no address is translated through the
//! table later.
//!
//! | the vCPU | verified by |
//! |---|---|
//! | has an IDT | the handler of gate 0 is `asm_exc_divide_error`, before 5.8 `divide_error` |
//! | uses FRED, IA32_FRED_CONFIG is known | the entry point is `asm_fred_entrypoint_user` |
//! | uses FRED | the kernel has FRED's two entry points, and no IDT |
//!
//! With FRED, `cpu_init_fred_exceptions()` (arch/x86/kernel/fred.c) loads an IDT without gates at
//! address 0.

use std::ops::Range;

use super::error::{DiscoveryError, busy, refuse};
use super::kernel::IMAGE_MAP;
use crate::symbols::Named;
use patchbay_memory::PAGE_SIZE;
use patchbay_memory::paging::{PageTable, Run, physical};
use patchbay_memory::{Cpu, PhysicalMemory};

/// Address of the read-only mapping of the IDT (arch/x86/include/asm/cpu_entry_area.h).
const CPU_ENTRY_AREA: u64 = 0xffff_fe00_0000_0000;
/// Distance from FRED's entry point for user mode to its entry point for exceptions of the kernel
/// (Intel FRED specification, 5.1).
const FRED_KERNEL_ENTRY: u64 = 256;

/// The code that handles exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// The handler of gate 0 of the IDT.
    Idt(u64),
    /// FRED's entry point for user mode; `None` if the monitor does not report IA32_FRED_CONFIG.
    Fred(Option<u64>),
}

/// A page table that maps a kernel image, with a copy of that mapping.
#[derive(Debug)]
pub(super) struct Candidate {
    pub table: PageTable,
    /// The parts of the image that the table maps.
    pub runs: Vec<Run>,
    entry: Entry,
}

/// The reason why registers or a page table do not lead to a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unfit {
    #[error("its page table maps nothing at {IMAGE_MAP:#x}, where Linux maps its image")]
    NoImage,
    #[error("its page table is not in RAM, or maps the kernel image in too many pieces")]
    Scattered,
    #[error("it has no IDT")]
    NoIdt,
    #[error("its exceptions lead to {0:#x}, which is not in the code that it maps as kernel image")]
    NotInImage(u64),
    #[error("its page table maps no code at {IMAGE_MAP:#x} and above")]
    NoCode,
    #[error(
        "its page table maps no read-only data beside the code at {IMAGE_MAP:#x} and above, and the code is not writable, as it is \
         with rodata=off"
    )]
    NoConstants,
}

impl Candidate {
    /// Follows the registers of a vCPU.
    pub fn of_cpu<M: PhysicalMemory + ?Sized>(memory: &M, cpu: &Cpu) -> Result<Self, Unfit> {
        let (table, runs) = kernel_table(memory, cpu)?;
        let fred = Entry::Fred(cpu.fred_config.map(|config| config & !(PAGE_SIZE - 1)));
        let entry = match gate_zero(memory, table, cpu.idt_base) {
            _ if cpu.has_fred() => fred,
            Some(handler) => Entry::Idt(handler),
            // CR4.FRED is bit 32, and not every monitor reports the upper half of CR4.
            None if cpu.idt_base == 0 => fred,
            None => return Err(Unfit::NoIdt),
        };
        Self::new(table, runs, entry)
    }

    /// Reads the page table of a kernel that VMCOREINFO names.
    pub fn of_table<M: PhysicalMemory + ?Sized>(
        memory: &M,
        table: PageTable,
    ) -> Result<Self, Unfit> {
        let runs = table
            .runs_of_gibibyte(memory, IMAGE_MAP)
            .ok_or(Unfit::Scattered)?;
        let entry = gate_zero(memory, table, CPU_ENTRY_AREA);
        Self::new(table, runs, entry.map_or(Entry::Fred(None), Entry::Idt))
    }

    fn new(table: PageTable, runs: Vec<Run>, entry: Entry) -> Result<Self, Unfit> {
        let mut code = runs.iter().filter(|run| run.executable);
        match entry {
            _ if runs.is_empty() => return Err(Unfit::NoImage),
            Entry::Idt(at) | Entry::Fred(Some(at)) if !code.any(|run| run.range.contains(&at)) => {
                return Err(Unfit::NotInImage(at));
            }
            Entry::Fred(None) if code.next().is_none() => return Err(Unfit::NoCode),
            _ => {}
        }
        let found = Self { table, runs, entry };
        if !found.runs.iter().any(Run::is_constant) && !found.is_writable() {
            return Err(Unfit::NoConstants);
        }
        Ok(found)
    }

    /// Reads the mapping of the image again. Returns `false` if the table has been changed or
    /// freed, so that results obtained through it are invalid.
    pub fn is_unchanged<M: PhysicalMemory + ?Sized>(&self, memory: &M) -> bool {
        self.table.runs_of_gibibyte(memory, IMAGE_MAP).as_ref() == Some(&self.runs)
    }

    /// Returns the guest-physical address to which the page table maps this address.
    pub fn physical(&self, address: u64) -> Option<u64> {
        physical(&self.runs, address)
    }

    /// Returns the contiguous executable pages around the entry point.
    pub fn code(&self) -> Range<u64> {
        let mut executable = self.runs.iter().filter(|run| run.executable);
        let at = match self.entry {
            Entry::Idt(at) | Entry::Fred(Some(at)) => at,
            // The first executable run belongs to the image, because no module lies before the
            // image.
            Entry::Fred(None) => executable.next().map_or(IMAGE_MAP, |run| run.range.start),
        };
        let executable = self.runs.iter().filter(|run| run.executable);
        joined(executable).find_or_empty(at)
    }

    /// Returns whether the kernel maps nothing read-only, not even its code. Such a kernel was
    /// started with `rodata=off`, or is still booting (`mark_readonly()` in init/main.c).
    pub fn is_writable(&self) -> bool {
        let code = self.code().start;
        let holds_code = |run: &&Run| run.range.contains(&code);
        !self.runs.iter().any(Run::is_constant)
            && self
                .runs
                .iter()
                .find(holds_code)
                .is_some_and(|run| run.writable)
    }

    /// Returns whether the run may hold the kernel's tables, because it is mapped read-only and not
    /// executable. If no run is mapped in this way, any part of the image may hold the tables. The
    /// read-only data precedes the writable data, so the first tables found are still the kernel's
    /// own.
    pub fn may_hold_tables(&self, run: &Run) -> bool {
        if !self.is_writable() {
            return run.is_constant();
        }
        let image = joined(self.runs.iter()).find_or_empty(self.code().start);
        image.contains(&run.range.start)
    }

    /// Checks the entry point against the symbols of the discovered kernel. Errors name the vCPU
    /// `whose`.
    pub fn check_entry(&self, symbols: &Named, whose: &str) -> Result<(), DiscoveryError> {
        match self.entry {
            Entry::Idt(handler) => {
                let names = ["asm_exc_divide_error", "divide_error"];
                if names
                    .iter()
                    .any(|name| symbols.address(name) == Some(handler))
                {
                    return Ok(());
                }
                busy(format!(
                    "gate 0 of {whose} leads to {handler:#x}, which is not asm_exc_divide_error of this kernel"
                ))
            }
            Entry::Fred(found) => self.check_fred(found, symbols, whose),
        }
    }

    fn check_fred(
        &self,
        found: Option<u64>,
        symbols: &Named,
        whose: &str,
    ) -> Result<(), DiscoveryError> {
        let entries = symbols
            .address("asm_fred_entrypoint_user")
            .zip(symbols.address("asm_fred_entrypoint_kernel"));
        let Some((user, kernel)) = entries else {
            return busy(format!(
                "{whose} has no IDT, and the kernel that it maps has no asm_fred_entrypoint_user: it boots or ends, or another kernel runs"
            ));
        };
        if let Some(found) = found.filter(|found| *found != user) {
            return busy(format!(
                "IA32_FRED_CONFIG of {whose} leads to {found:#x}, which is not asm_fred_entrypoint_user of this kernel"
            ));
        }
        if user % PAGE_SIZE != 0
            || kernel.checked_sub(user) != Some(FRED_KERNEL_ENTRY)
            || !self.code().contains(&kernel)
        {
            return refuse(format!(
                "{whose} uses FRED, and asm_fred_entrypoint_user and asm_fred_entrypoint_kernel at {user:#x} and {kernel:#x} are no entry \
                 points: kallsyms and the memory disagree"
            ));
        }
        Ok(())
    }
}

/// Returns the table that maps the kernel, and the parts of the image that it maps.
///
/// With page table isolation, bit 12 of CR3 selects the user's half of a pair of tables, which maps
/// a part of the memory that the kernel's half maps. Without isolation, bit 12 is a bit of the
/// address, and the preceding page may be another process's table or a freed page.
fn kernel_table<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpu: &Cpu,
) -> Result<(PageTable, Vec<Run>), Unfit> {
    let [pair, own] = cpu.page_tables();
    let runs = own
        .runs_of_gibibyte(memory, IMAGE_MAP)
        .ok_or(Unfit::Scattered)?;
    if runs.is_empty() {
        return Err(Unfit::NoImage);
    }
    if pair == own {
        return Ok((own, runs));
    }
    let size =
        |runs: &[Run]| -> u64 { runs.iter().map(|run| run.range.end - run.range.start).sum() };
    let maps = |whole: &[Run]| {
        runs.iter().all(|run| {
            let last = run.range.end - 1;
            physical(whole, run.range.start) == Some(run.physical)
                && physical(whole, last) == Some(run.physical + (last - run.range.start))
        })
    };
    match pair.runs_of_gibibyte(memory, IMAGE_MAP) {
        Some(whole) if size(&whole) > size(&runs) && maps(&whole) => Ok((pair, whole)),
        _ => Ok((own, runs)),
    }
}

/// Returns the handler of gate 0, the divide error (Intel SDM volume 3, 6.14.1).
fn gate_zero<M: PhysicalMemory + ?Sized>(memory: &M, table: PageTable, idt: u64) -> Option<u64> {
    // A gate never straddles a page: the IDT is page-aligned.
    let mapping = table.translate(memory, idt).ok()?;
    let mut gate = [0; 16];
    memory.read(mapping.physical, &mut gate).ok()?;
    let gate = u128::from_le_bytes(gate);
    let present = gate >> 47 & 1 != 0;
    let handler = gate & 0xffff | (gate >> 32 & 0xffff_ffff_ffff_0000);
    present.then_some(handler as u64)
}

/// Address ranges of runs. Adjacent ranges are joined.
struct Joined(Vec<Range<u64>>);

fn joined<'a>(runs: impl Iterator<Item = &'a Run>) -> Joined {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match ranges.last_mut() {
            Some(last) if last.end == run.range.start => last.end = run.range.end,
            _ => ranges.push(run.range.clone()),
        }
    }
    Joined(ranges)
}

impl Joined {
    fn find_or_empty(self, address: u64) -> Range<u64> {
        let mut ranges = self.0.into_iter();
        ranges
            .find(|range| range.contains(&address))
            .unwrap_or(address..address)
    }
}
