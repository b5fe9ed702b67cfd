// SPDX-License-Identifier: Apache-2.0
#![allow(dead_code, reason = "each place has its own test target")]
//! Compares the host's kernel with a QEMU, which prints on its terminal the address of its guest's
//! memory.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use patchbay_host_kernel::{
    Bpf, DirtyLogging, HostKernel, Kcore, KernelMemory, Kind, Slot, TransportError, Verdict, Vm,
    list,
};

/// The size of the memory below 4 GiB, and that of the memory above 4 GiB.
const HALF: u64 = 256 << 20;
/// The start of the memory above 4 GiB.
const HIGH: u64 = 4 << 30;

/// A QEMU whose guest has not been started, with its terminal.
pub struct Qemu {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    /// Starts a QEMU. Prints a message and returns `None` if QEMU is not installed.
    fn start() -> Option<Self> {
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            "kvm",
            "-machine",
            "pc,max-ram-below-4g=256M",
            "-m",
            "512M",
            "-smp",
            "3",
            "-nodefaults",
            "-S",
        ]);
        command.args(["-display", "none", "-name", "slots", "-monitor", "stdio"]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                eprintln!("SKIPPED: qemu-system-x86_64 cannot be started ({error})");
                return None;
            }
        };
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Some(Self {
            child,
            input,
            output,
        })
    }

    /// Sends a command and returns the first line of the answer that contains this text.
    fn asks(&mut self, command: &str, answer: &str) -> String {
        self.input
            .write_all(format!("{command}\n").as_bytes())
            .expect("it runs");
        loop {
            let mut line = String::new();
            assert_ne!(
                self.output.read_line(&mut line).expect("text"),
                0,
                "it has ended"
            );
            // The terminal repeats the command before the answer.
            if line.contains(answer) && !line.contains("(qemu)") {
                return line;
            }
        }
    }

    /// Returns the address in QEMU's process of a guest-physical address.
    fn host_address(&mut self, address: u64) -> u64 {
        let line = self.asks(&format!("gpa2hva {address:#x}"), "Host virtual address for");
        let digits = line.trim().rsplit_once(" is 0x").expect("an address").1;
        u64::from_str_radix(digits, 16).expect("an address")
    }

    fn descriptor(&self) -> u32 {
        let folder = format!("/proc/{}/fd", self.child.id());
        let entries = fs::read_dir(folder).expect("it runs").flatten();
        let mut vms = entries.filter(|entry| {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            target.as_os_str() == "anon_inode:kvm-vm"
        });
        let name = vms.next().expect("a VM").file_name();
        name.to_str().expect("a number").parse().expect("a number")
    }
}

fn slot(vm: &Vm, address: u64) -> Option<&Slot> {
    vm.ram()
        .find(|slot| address.wrapping_sub(slot.guest_address) < slot.bytes)
}

/// Compares a page of each MiB, in a guest with memory on both sides of the hole below 4 GiB.
fn compare(qemu: &mut Qemu, mut kernel: HostKernel) {
    let (pid, descriptor) = (qemu.child.id(), qemu.descriptor());
    let vm = kernel.vm(pid, descriptor).expect("a VM");
    let mut pages = 0;
    for range in [1 << 20..HALF, HIGH..HIGH + HALF] {
        for address in range.clone().step_by(1 << 20).chain([range.end - 4096]) {
            let found = slot(&vm, address).expect("RAM");
            let found = found.process_address + (address - found.guest_address);
            assert_eq!(found, qemu.host_address(address), "{address:#x}");
            pages += 1;
        }
    }
    assert!(slot(&vm, HALF).is_none() && slot(&vm, HIGH + HALF).is_none());
    assert_eq!(vm.vcpus.len(), 3);
    assert_eq!(vm.dirty_logging(), DirtyLogging::Off);
    assert_eq!(vm.refusals(), []);
    assert_eq!(kernel.is_unchanged(pid, descriptor, &vm), Ok(true));
    println!("{}: {pages} addresses agree", kernel.transport());
    kernel.vm(pid, 0).expect_err("it is no VM");
    kernel
        .vm(std::process::id(), descriptor)
        .expect_err("this process has none");
}

fn boxed<M: KernelMemory + 'static>(
    opened: Result<M, TransportError>,
) -> Result<Box<dyn KernelMemory>, TransportError> {
    Ok(Box::new(opened?))
}

/// Reads the VM of a QEMU through each transport that this host has.
pub fn the_map_is_qemus() {
    let Some(mut qemu) = Qemu::start() else {
        return;
    };
    qemu.asks("info status", "VM status:");
    for memory in [boxed(Kcore::open()), boxed(Bpf::open())] {
        match memory {
            Ok(memory) => match HostKernel::over(memory) {
                Ok(kernel) => compare(&mut qemu, kernel),
                Err(error) => eprintln!("SKIPPED: {error}"),
            },
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
    }
}

/// Finds a QEMU among all VMs of this host for as long as it runs.
pub fn a_vm_is_listed() {
    let Some(mut qemu) = Qemu::start() else {
        return;
    };
    qemu.asks("info status", "VM status:");
    let pid = qemu.child.id();
    let is_readable = HostKernel::open().is_ok();
    let listing = list(HostKernel::open).expect("mounted");
    let found: Vec<_> = listing.vms.iter().filter(|vm| vm.pid == pid).collect();
    let [vm] = found[..] else {
        panic!("{listing:?}");
    };
    assert_eq!((vm.monitor.kind, vm.name().as_str()), (Kind::Qemu, "slots"));
    assert_eq!(vm.vcpus, Some(3));
    assert_eq!(vm.dirty_logging.is_some(), is_readable);
    let memory = vm.memory_bytes.unwrap_or(2 * HALF);
    // The memory below firmware is read-only at first, and option ROMs have memory of their own.
    assert!(memory.abs_diff(2 * HALF) < 1 << 20, "{memory}");
    println!("{:?}", vm.verdict);
    assert!(!matches!(&vm.verdict, Verdict::Yes if !is_readable));
    drop(qemu);
    let listing = list(HostKernel::open).expect("mounted");
    assert!(listing.vms.iter().all(|vm| vm.pid != pid));
}
