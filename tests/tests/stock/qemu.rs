// SPDX-License-Identifier: Apache-2.0
//! Runs QEMU without KVM. Reads the guest's memory from a file, and the vCPUs' registers over QMP.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use patchbay_tests::Qemu;
use rustix::fs::SeekFrom;
use serde_json::json;

/// The size of RAM. All of it lies below the hole for devices.
const RAM: u64 = 1 << 30;

/// The memory of a guest, which QEMU shares.
pub struct Ram(File);

impl PhysicalMemory for Ram {
    fn ram(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut from = 0;
        // The guest has never written the holes of the file. They are skipped, because reading a
        // hole through a mapping would allocate it.
        while let Ok(start) = rustix::fs::seek(&self.0, SeekFrom::Data(from)) {
            let end = rustix::fs::seek(&self.0, SeekFrom::Hole(start)).unwrap_or(RAM);
            ranges.push(start..end);
            from = end;
        }
        ranges
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        let read = self.0.read_exact_at(bytes, address);
        read.map_err(|_| OutsideMemory { address, length })
    }
}

/// A guest of a running QEMU.
pub struct Guest {
    qemu: Qemu,
    pub ram: Ram,
    _folder: tempfile::TempDir,
}

impl Guest {
    /// Boots `vmlinuz` and `initramfs` of a folder until its init reads the console. Returns `None`
    /// without QEMU.
    pub async fn boot(folder: &Path, append: &str) -> Result<Option<Self>> {
        let own = tempfile::tempdir()?;
        let ram = own.path().join("ram");
        // QEMU uses the existing file.
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&ram)?;
        file.set_len(RAM)?;
        let object = format!(
            "memory-backend-file,id=ram,size={RAM},share=on,mem-path={}",
            ram.display()
        );
        let options = [
            &["-accel", "tcg", "-machine", "q35,memory-backend=ram"][..],
            // With two CPUs, emulated by two threads, kernels occasionally fail at their own text
            // changes. With cmpxchg16b, QEMU 7.2 leaves garbage in the flags, and a kernel
            // occasionally crashes with a double fault.
            &["-cpu", "max,-cx16", "-smp", "1", "-m", "1G"],
            &["-object", &object],
        ];
        let (kernel, initramfs) = (folder.join("vmlinuz"), folder.join("initramfs"));
        let Some(qemu) = Qemu::start(&kernel, &initramfs, append, &options.concat())? else {
            return Ok(None);
        };
        let mut guest = Self {
            qemu,
            ram: Ram(file),
            _folder: own,
        };
        guest.qemu.guest.wait_for_shell().await?;
        guest
            .shell("for module in /lib/modules/*.ko; do insmod $module; done")
            .await?;
        Ok(Some(guest))
    }

    /// Runs a line in the guest, and returns its output.
    pub async fn shell(&mut self, line: &str) -> Result<String> {
        self.qemu.guest.shell(line).await
    }

    pub async fn stop(&mut self) -> Result<()> {
        self.qemu.command("stop", json!({})).await.map(drop)
    }

    pub async fn resume(&mut self) -> Result<()> {
        self.qemu.command("cont", json!({})).await.map(drop)
    }

    pub async fn cpus(&mut self) -> Result<Vec<Cpu>> {
        let arguments = json!({"command-line": "info registers -a"});
        let text = self.qemu.command("human-monitor-command", arguments);
        let text = text.await?;
        let text = text.as_str().context("registers as text")?;
        text.split("CPU#").skip(1).map(cpu).collect()
    }
}

fn cpu(text: &str) -> Result<Cpu> {
    let register = |name: &str| {
        let word = text
            .split(name)
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next());
        let word = word.with_context(|| format!("no {name} in QEMU's registers"))?;
        Ok::<_, anyhow::Error>(u64::from_str_radix(word, 16)?)
    };
    Ok(Cpu {
        cr0: register("CR0=")?,
        cr3: register("CR3=")?,
        cr4: register("CR4=")?,
        idt_base: register("IDT=")?,
        fred_config: None,
        may_be_nested: false,
    })
}
