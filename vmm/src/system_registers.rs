// SPDX-License-Identifier: Apache-2.0

//! Reads the system registers of running vCPUs.
//!
//! KVM reports a vCPU's registers only to the vCPU's own thread. The reader sets a request for each
//! thread and kicks it. The thread answers, without waiting, before it enters the guest again. The
//! guest is not paused, so a change of keys may be in progress at the same time. No request is
//! lost, for the reason given in [`pause`](crate::pause): the reader sets the request and then
//! `immediate_exit`; the vCPU clears `immediate_exit` and then reads the request.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_sregs};
use kvm_ioctls::VcpuFd;

use crate::thread::lock;

/// Registers that identify the kernel that a vCPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the architecture")]
pub struct SystemRegisters {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    /// IDTR.base.
    pub idt_base: u64,
    /// `IA32_FRED_CONFIG`, or `None` if CR4.FRED is clear.
    pub fred_config: Option<u64>,
}

/// CR4.FRED.
const CR4_FRED: u64 = 1 << 32;
/// `MSR_IA32_FRED_CONFIG` (arch/x86/include/asm/msr-index.h).
const IA32_FRED_CONFIG: u32 = 0x1d4;

impl SystemRegisters {
    /// Reads the registers. Must be called on the vCPU's own thread. Returns `None` if KVM does not
    /// report them.
    pub(crate) fn read(vcpu: &VcpuFd) -> Option<Self> {
        let mut registers = Self::from(vcpu.get_sregs().ok()?);
        if registers.cr4 & CR4_FRED != 0 {
            registers.fred_config = msr(vcpu, IA32_FRED_CONFIG);
        }
        Some(registers)
    }
}

/// Reads an MSR. Returns `None` if KVM has no MSR with this number.
pub(crate) fn msr(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let entry = kvm_msr_entry {
        index,
        ..kvm_msr_entry::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).ok()?;
    (vcpu.get_msrs(&mut msrs) == Ok(1)).then(|| msrs.as_slice()[0].data)
}

impl From<kvm_sregs> for SystemRegisters {
    fn from(sregs: kvm_sregs) -> Self {
        Self {
            cr0: sregs.cr0,
            cr3: sregs.cr3,
            cr4: sregs.cr4,
            efer: sregs.efer,
            idt_base: sregs.idt.base,
            fred_config: None,
        }
    }
}

/// The registers of the vCPUs could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum RegistersError {
    #[error("vCPU {vcpu} did not report its registers within {timeout:?}; the guest may be paused")]
    Late { vcpu: usize, timeout: Duration },
    #[error("no vCPU runs")]
    NoVcpu,
}

/// The answer of one vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Awaited,
    Known(SystemRegisters),
    /// The vCPU has not started or has ended, or KVM does not report its registers.
    None,
}

/// Requests and answers of one guest's vCPUs.
#[derive(Debug)]
pub(crate) struct RegisterReader {
    wanted: Box<[AtomicBool]>,
    answers: Mutex<Vec<Answer>>,
    answered: Condvar,
    /// Held by the reader, so that only one request is made at a time.
    asking: Mutex<()>,
}

impl RegisterReader {
    pub fn new(vcpus: usize) -> Self {
        Self {
            wanted: (0..vcpus).map(|_| AtomicBool::new(false)).collect(),
            answers: Mutex::new(vec![Answer::None; vcpus]),
            answered: Condvar::new(),
            asking: Mutex::new(()),
        }
    }

    /// Reads the registers of every vCPU for which `kick` returns true. `kick` forces the vCPU's
    /// thread out of the guest, if the thread has started and has not ended.
    pub fn read(
        &self,
        timeout: Duration,
        kick: impl Fn(usize) -> bool,
    ) -> Result<Vec<SystemRegisters>, RegistersError> {
        let _asking = lock(&self.asking);
        lock(&self.answers).fill(Answer::Awaited);
        for (vcpu, wanted) in self.wanted.iter().enumerate() {
            wanted.store(true, SeqCst);
            if !kick(vcpu) {
                self.answer(vcpu, None);
            }
        }
        let awaited = |answers: &mut Vec<Answer>| answers.contains(&Answer::Awaited);
        let (answers, _) = self
            .answered
            .wait_timeout_while(lock(&self.answers), timeout, awaited)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(vcpu) = answers.iter().position(|answer| *answer == Answer::Awaited) {
            return Err(RegistersError::Late { vcpu, timeout });
        }
        let known = answers.iter().filter_map(|answer| match answer {
            Answer::Known(registers) => Some(*registers),
            Answer::Awaited | Answer::None => None,
        });
        let known: Vec<SystemRegisters> = known.collect();
        match known.is_empty() {
            true => Err(RegistersError::NoVcpu),
            false => Ok(known),
        }
    }

    /// Returns whether the vCPU's thread must answer, and clears the request.
    pub fn take_request(&self, vcpu: usize) -> bool {
        let wanted = &self.wanted[vcpu];
        wanted.load(SeqCst) && wanted.swap(false, SeqCst)
    }

    /// Stores a vCPU's answer; `None` means that there are no registers.
    pub fn answer(&self, vcpu: usize, registers: Option<SystemRegisters>) {
        lock(&self.answers)[vcpu] = registers.map_or(Answer::None, Answer::Known);
        self.answered.notify_all();
    }
}
