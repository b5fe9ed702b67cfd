// SPDX-License-Identifier: Apache-2.0
//! Runs QEMU without KVM, and accesses its guest's memory as a file, its vCPUs' registers, and the
//! guest's console.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use patchbay_tests::SHELL_READS;
use rustix::fs::SeekFrom;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The size of RAM. All of it lies below the hole for devices.
const RAM: u64 = 1 << 30;

/// The memory of a guest, which QEMU shares.
pub struct Ram(File);

impl PhysicalMemory for Ram {
    fn ram(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut from = 0;
        // A hole was never written. It is skipped, because reading it through a mapping would fill
        // it.
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

/// A running QEMU. It ends on drop.
pub struct Guest {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    qmp: BufReader<UnixStream>,
    pub ram: Ram,
    _folder: TempDir,
}

impl Guest {
    /// Boots `vmlinuz` and `initramfs` of a folder until its init reads the console. Returns `None`
    /// without QEMU.
    pub fn boot(folder: &Path, append: &str) -> Result<Option<Self>> {
        let own = tempfile::tempdir()?;
        let (ram, socket) = (own.path().join("ram"), own.path().join("qmp"));
        let listener = UnixListener::bind(&socket)?;
        // QEMU uses the existing file.
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&ram)?;
        file.set_len(RAM)?;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-accel", "tcg", "-machine", "q35,memory-backend=ram"])
            // With two CPUs, emulated by two threads, kernels occasionally fail at their own text
            // changes. With cmpxchg16b, QEMU 7.2 leaves garbage in the flags, and a kernel
            // occasionally crashes with a double fault.
            .args(["-cpu", "max,-cx16", "-smp", "1", "-m", "1G"])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=ram,size={RAM},share=on,mem-path={}",
                ram.display()
            ))
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-qmp"])
            .arg(format!("unix:{}", socket.display()))
            .arg("-kernel")
            .arg(folder.join("vmlinuz"))
            .arg("-initrd")
            .arg(folder.join("initramfs"))
            .args(["-append", &format!("console=ttyS0 panic=-1 {append}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            process => process?,
        };
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("QEMU has no standard input or output");
        };
        let (qmp, _) = listener.accept()?;
        let mut guest = Self {
            process,
            input,
            output: BufReader::new(output),
            qmp: BufReader::new(qmp),
            ram: Ram(file),
            _folder: own,
        };
        guest.answer()?;
        guest.command("qmp_capabilities", json!({}))?;
        guest.wait_for(SHELL_READS)?;
        guest.shell("for module in /lib/modules/*.ko; do insmod $module; done")?;
        Ok(Some(guest))
    }

    /// Runs a line in the guest, and returns its output.
    pub fn shell(&mut self, line: &str) -> Result<String> {
        // The quotes keep an echo of the line from looking like the mark at the end.
        writeln!(self.input, "{line}\necho 'init: do''ne'")?;
        self.wait_for("init: done")
    }

    fn wait_for(&mut self, text: &str) -> Result<String> {
        let mut seen = String::new();
        while !seen.contains(text) {
            let mut bytes = Vec::new();
            if self.output.read_until(b'\n', &mut bytes)? == 0 {
                bail!("QEMU ended before the guest said {text:?}:\n{seen}");
            }
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
        Ok(seen)
    }

    /// Returns a message of QEMU that is not an event.
    fn answer(&mut self) -> Result<Value> {
        loop {
            let mut line = String::new();
            let longest = 1 << 20;
            (&mut self.qmp).take(longest).read_line(&mut line)?;
            ensure!(line.ends_with('\n'), "QEMU closed its QMP socket");
            let message: Value = serde_json::from_str(&line)?;
            if message.get("event").is_none() {
                return Ok(message);
            }
        }
    }

    fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": name, "arguments": arguments});
        writeln!(self.qmp.get_mut(), "{request}")?;
        let mut answer = self.answer()?;
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => bail!("QEMU refuses {name}: {answer}"),
        }
    }

    pub fn stop(&mut self) -> Result<()> {
        self.command("stop", json!({})).map(drop)
    }

    pub fn resume(&mut self) -> Result<()> {
        self.command("cont", json!({})).map(drop)
    }

    pub fn cpus(&mut self) -> Result<Vec<Cpu>> {
        let arguments = json!({"command-line": "info registers -a"});
        let text = self.command("human-monitor-command", arguments)?;
        let text = text.as_str().context("registers as text")?;
        text.split("CPU#").skip(1).map(cpu).collect()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
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
