// SPDX-License-Identifier: Apache-2.0

//! A guest of a few instructions around one branch site, for tests and benchmarks that need vCPUs
//! but no kernel.
//!
//! ```text
//!  0x10_0030  loop: nop …
//!  0x10_003f  site: nopl 0(%rax,%rax,1)  |  jmp taken      across a cache line
//!  0x10_0044        incq 0(%rdi) ; jmp loop                not taken
//!  0x10_444f  taken: incq 8(%rdi) ; jmp loop
//!  0x10_4463  torn: incq 16(%rdi) ; jmp loop
//! ```
//!
//! The two encodings differ only in their first two bytes. A mixture is either `e9 1f 44 00 00`,
//! which jumps to `torn`, or `0f 0b`, an undefined instruction, which ends a guest without an IDT.
//! Every torn branch is therefore detected.

#![allow(dead_code, reason = "each test binary and benchmark uses a part")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use patchbay_guest::requests::GuestRequests;
use patchbay_vmm::config::{Payload, RawCode, RawEntry, VmConfig};
use patchbay_vmm::memory::GuestRam;
use patchbay_vmm::request::NoRequests;
use patchbay_vmm::vm::{Vm, VmError};
use vm_memory::{Bytes, GuestAddress};

pub const CODE: u64 = 0x10_0000;
pub const LOOP: u64 = CODE + 0x30;
pub const SITE: u64 = CODE + 0x3f;
/// Address after the site. The code there counts a branch that is not taken.
pub const NOT_TAKEN: u64 = SITE + 5;
/// Target of the branch. The code there counts a branch that is taken.
pub const TAKEN: u64 = NOT_TAKEN + 0x440b;
/// Target of `e9 1f 44 00 00` at the site.
const TORN: u64 = NOT_TAKEN + 0x441f;

/// The site's encoding while the branch is not taken.
pub const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
/// The site's encoding while the branch is taken.
pub const JMP: [u8; 5] = [0xe9, 0x0b, 0x44, 0x00, 0x00];

/// Address of the first vCPU's counters; one page per vCPU.
const COUNTERS: u64 = 0x18_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    pub not_taken: u64,
    pub taken: u64,
    /// Rounds in which a torn branch jumped to `torn`.
    pub torn: u64,
}

pub fn counters(ram: &GuestRam, vcpu: u8) -> Counters {
    let word = |at: u64| load(ram, counters_address(vcpu) + at);
    Counters {
        not_taken: word(0),
        taken: word(8),
        torn: word(16),
    }
}

/// Reads a word that the guest may be writing.
pub fn load(ram: &GuestRam, address: u64) -> u64 {
    let memory = ram.mmap();
    memory
        .load(GuestAddress(address), Ordering::Acquire)
        .unwrap()
}

/// Address of a vCPU's counters.
pub fn counters_address(vcpu: u8) -> u64 {
    COUNTERS + u64::from(vcpu) * 4096
}

fn jump(image: &mut [u8], from: u64, to: u64) {
    let at = usize::try_from(from - CODE).unwrap();
    let distance = i32::try_from(to.cast_signed() - from.cast_signed() - 5).unwrap();
    image[at] = 0xe9;
    image[at + 1..at + 5].copy_from_slice(&distance.to_le_bytes());
}

/// Returns the code shown in this module's documentation.
pub fn branch_code() -> Vec<u8> {
    let mut image = vec![0x90; 0x5000];
    let mut put = |address: u64, bytes: &[u8]| {
        let at = usize::try_from(address - CODE).unwrap();
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(SITE, &NOP);
    put(NOT_TAKEN, &[0x48, 0xff, 0x07]);
    put(TAKEN, &[0x48, 0xff, 0x47, 0x08]);
    put(TORN, &[0x48, 0xff, 0x47, 0x10]);
    jump(&mut image, NOT_TAKEN + 3, LOOP);
    jump(&mut image, TAKEN + 4, LOOP);
    jump(&mut image, TORN + 4, LOOP);
    image
}

/// Returns the start of a vCPU of the branch guest. It runs in user mode, where code runs at full
/// speed even on a KVM that emulates kernel mode.
pub fn spinning(vcpu: u8) -> RawEntry {
    RawEntry {
        rip: LOOP,
        rsp: 0,
        argument: counters_address(vcpu),
        user_mode: true,
    }
}

/// Returns a configuration for machine code with one entry per vCPU.
pub fn raw(image: Vec<u8>, entries: Vec<Option<RawEntry>>) -> VmConfig {
    let vcpus = u8::try_from(entries.len()).unwrap();
    VmConfig {
        memory_bytes: 4 << 20,
        vcpus,
        offer_patchbay: false,
        ..VmConfig::new(Payload::Raw(RawCode {
            image,
            address: CODE,
            entries,
        }))
    }
}

/// Creates a guest, or prints why it cannot run here.
pub fn created(config: VmConfig, requests: Arc<dyn GuestRequests>) -> Option<Vm> {
    match Vm::new(config, requests) {
        Ok(vm) => Some(vm),
        Err(error @ (VmError::KvmMissing | VmError::KvmPermission | VmError::KvmLacks(_))) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Starts a guest, or prints why it cannot run here.
pub fn started(config: VmConfig, requests: Arc<dyn GuestRequests>) -> Option<Vm> {
    let vm = created(config, requests)?;
    vm.start().unwrap();
    Some(vm)
}

/// Starts the branch guest and waits until every vCPU is in its loop.
pub fn branch_guest(vcpus: u8) -> Option<Vm> {
    let entries = (0..vcpus).map(|vcpu| Some(spinning(vcpu))).collect();
    let vm = started(raw(branch_code(), entries), Arc::new(NoRequests))?;
    for vcpu in 0..vcpus {
        wait_until("every vCPU runs", || counters(vm.ram(), vcpu).not_taken > 0);
    }
    Some(vm)
}

/// Polls until a condition holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        // Yields the core, which the awaited vCPU may need.
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Ends the test process if this value is not dropped in time. Otherwise a test could wait for ever
/// for a vCPU that does not stop.
pub struct Watchdog(#[expect(dead_code, reason = "dropped to end the thread")] Sender<()>);

pub fn watchdog(seconds: u64) -> Watchdog {
    let (sender, receiver) = channel::<()>();
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    std::thread::spawn(move || {
        let timeout = std::sync::mpsc::RecvTimeoutError::Timeout;
        if receiver.recv_timeout(Duration::from_secs(seconds)) == Err(timeout) {
            eprintln!("watchdog: {test} takes longer than {seconds} s");
            std::process::abort();
        }
    });
    Watchdog(sender)
}
