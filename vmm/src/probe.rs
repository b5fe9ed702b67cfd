// SPDX-License-Identifier: Apache-2.0

//! Probes which of the two transports reach user space on this host.
//!
//! KVM's capabilities are not sufficient: some hosts offer `KVM_CAP_EXIT_HYPERCALL`, but the
//! hypercall instruction never leaves the guest. Therefore a throw-away guest with two vCPUs and a
//! few instructions tries both transports.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_CAP_EXIT_HYPERCALL, KVM_CAP_X86_MSR_FILTER, KVM_CAP_X86_USER_SPACE_MSR,
    KVM_MAX_CPUID_ENTRIES, KVM_MSR_EXIT_REASON_FILTER, kvm_enable_cap,
};
use kvm_ioctls::{
    Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd, VmFd,
};
use patchbay_guest::abi;

use crate::error::VmError;
use crate::kick::{self, ImmediateExit};
use crate::memory::{GuestRam, MEMORY_MIN};
use crate::request::{HYPERCALL, MSR_INDEX};
use crate::vm::map_memory;
use crate::x86::registers::{self, Mode};

/// Time that the guest may take for its instructions before it is interrupted.
const PATIENCE: Duration = Duration::from_millis(5);

/// Maximum number of runs, each of which is interrupted after `PATIENCE`. On a busy host the guest
/// may need several; an instruction that never completes uses all of them.
const ROUNDS: u32 = 4;

/// The bit of `KVM_HC_MAP_GPA_RANGE` in `KVM_CAP_EXIT_HYPERCALL`.
const HYPERCALL_BIT: u64 = 1 << HYPERCALL;

/// Guest-physical address of the probe's code.
const CODE: u64 = 0x10_0000;

/// Transports by which a guest's requests can reach the monitor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transports {
    /// The hypercall instruction with `KVM_HC_MAP_GPA_RANGE`.
    pub hypercall: bool,
    /// WRMSR to an MSR index reserved for Patchbay.
    pub msr: bool,
}

impl Transports {
    /// Returns whether at least one transport works.
    #[must_use]
    pub fn any(self) -> bool {
        self.hypercall || self.msr
    }

    /// Returns the transports as `PATCHBAY_TRANSPORT_*` bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        let bit = |there, bit| if there { bit } else { 0 };
        bit(self.hypercall, abi::TRANSPORT_HYPERCALL) | bit(self.msr, abi::TRANSPORT_MSR)
    }
}

/// Enables the transports that KVM offers and returns them.
pub(crate) fn enable(vm: &VmFd) -> Transports {
    // The capability's value is the set of hypercalls that KVM can forward.
    let offered = vm.check_extension_raw(KVM_CAP_EXIT_HYPERCALL.into());
    let hypercall = u64::try_from(offered).is_ok_and(|offered| offered & HYPERCALL_BIT != 0)
        && enable_capability(vm, KVM_CAP_EXIT_HYPERCALL, HYPERCALL_BIT);
    let msr = vm.check_extension_raw(KVM_CAP_X86_MSR_FILTER.into()) > 0
        && enable_capability(
            vm,
            KVM_CAP_X86_USER_SPACE_MSR,
            KVM_MSR_EXIT_REASON_FILTER.into(),
        )
        && filter_msr(vm);
    Transports { hypercall, msr }
}

fn enable_capability(vm: &VmFd, capability: u32, argument: u64) -> bool {
    let mut enable = kvm_enable_cap {
        cap: capability,
        ..Default::default()
    };
    enable.args[0] = argument;
    vm.enable_cap(&enable).is_ok()
}

/// Makes KVM deny writes of our MSR index, which sends them to user space (KVM API 4.97). The other
/// indices are unaffected.
fn filter_msr(vm: &VmFd) -> bool {
    let range = MsrFilterRange {
        flags: MsrFilterRangeFlags::WRITE,
        base: MSR_INDEX,
        msr_count: 1,
        bitmap: &[0],
    };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])
        .is_ok()
}

/// Tries the transports in a throw-away guest.
pub(crate) fn probe(kvm: &Kvm) -> Result<Transports, VmError> {
    kick::install_handler();
    let vm = kvm.create_vm().map_err(VmError::kvm("create a VM"))?;
    let ram = GuestRam::new(MEMORY_MIN)?;
    map_memory(&vm, &ram)?;
    registers::write_tables(&ram).map_err(crate::boot::BootError::from)?;
    let offered = enable(&vm);
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(VmError::kvm("report its CPUID"))?;
    let mut works = Transports::default();
    let [low, mid, high, top] = MSR_INDEX.to_le_bytes();
    // mov ecx, MSR_INDEX; xor eax, eax; xor edx, edx; wrmsr; hlt
    let wrmsr = [
        0xb9, low, mid, high, top, 0x31, 0xc0, 0x31, 0xd2, 0x0f, 0x30, 0xf4,
    ];
    if offered.msr {
        works.msr = attempt(
            (&vm, &ram, &cpuid),
            0,
            &wrmsr,
            |exit| matches!(exit, VcpuExit::X86Wrmsr(write) if write.index == MSR_INDEX),
        )?;
    }
    let [low, mid, high, top] = abi::HYPERCALL_MAGIC.to_le_bytes();
    // mov eax, 12; xor ebx, ebx; mov ecx, 1; mov edx, magic; shl rdx, 32; xor esi, esi;
    // vmcall or vmmcall; hlt
    let [call_0, call_1, call_2] = hypercall_instruction();
    let hypercall = [
        0xb8, 12, 0, 0, 0, 0x31, 0xdb, 0xb9, 1, 0, 0, 0, 0xba, low, mid, high, top, 0x48, 0xc1,
        0xe2, 32, 0x31, 0xf6, call_0, call_1, call_2, 0xf4,
    ];
    if offered.hypercall {
        works.hypercall = attempt(
            (&vm, &ram, &cpuid),
            1,
            &hypercall,
            |exit| matches!(exit, VcpuExit::Hypercall(call) if call.nr == HYPERCALL),
        )?;
    }
    Ok(works)
}

/// VMMCALL on AMD and Hygon processors, VMCALL on all others, like Linux
/// (`arch/x86/kernel/cpu/amd.c`, `X86_FEATURE_VMMCALL`).
fn hypercall_instruction() -> [u8; 3] {
    let vendor = std::arch::x86_64::__cpuid(0);
    if vendor.ecx == u32::from_le_bytes(*b"cAMD") || vendor.ecx == u32::from_le_bytes(*b"uine") {
        [0x0f, 0x01, 0xd9]
    } else {
        [0x0f, 0x01, 0xc1]
    }
}

/// Runs `code` on a new vCPU and returns whether its exit is the expected one. A vCPU that does not
/// leave the guest is abandoned after a while.
fn attempt(
    (vm, ram, cpuid): (&VmFd, &GuestRam, &CpuId),
    id: u64,
    code: &[u8],
    expected: impl Fn(&VcpuExit<'_>) -> bool,
) -> Result<bool, VmError> {
    ram.write(CODE, code)
        .map_err(crate::boot::BootError::from)?;
    let mut vcpu = vm.create_vcpu(id).map_err(VmError::kvm("create a vCPU"))?;
    // Without CPUID there is no 64-bit mode.
    vcpu.set_cpuid2(cpuid)
        .map_err(VmError::kvm("set a vCPU's CPUID"))?;
    let mut sregs = vcpu
        .get_sregs()
        .map_err(VmError::kvm("read a vCPU's registers"))?;
    registers::system_registers(&mut sregs, Mode::Long);
    vcpu.set_sregs(&sregs)
        .map_err(VmError::kvm("set a vCPU's registers"))?;
    vcpu.set_regs(&registers::general_registers(CODE))
        .map_err(VmError::kvm("set a vCPU's registers"))?;
    let immediate_exit = ImmediateExit::map(&vcpu).map_err(VmError::Map)?;
    for _ in 0..ROUNDS {
        match run_briefly(&mut vcpu, &immediate_exit, &expected)? {
            Some(answer) => return Ok(answer),
            None => immediate_exit.set(false),
        }
    }
    Ok(false)
}

/// Runs the vCPU for a short time. Returns `None` if the vCPU was interrupted before it left the
/// guest by itself.
fn run_briefly(
    vcpu: &mut VcpuFd,
    immediate_exit: &ImmediateExit,
    expected: impl Fn(&VcpuExit<'_>) -> bool,
) -> Result<Option<bool>, VmError> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watchdog = std::thread::Builder::new()
            .name("probe-watchdog".into())
            .spawn_scoped(scope, || {
                std::thread::park_timeout(PATIENCE);
                if !finished.load(Ordering::SeqCst) {
                    immediate_exit.set(true);
                    kick::kick_thread(thread);
                }
            })
            .map_err(VmError::Thread)?;
        let answer = match vcpu.run() {
            Ok(exit) => Ok(Some(expected(&exit))),
            Err(error) if error.errno() == libc::EINTR => Ok(None),
            // KVM cannot emulate the instruction at all.
            Err(_) => Ok(Some(false)),
        };
        finished.store(true, Ordering::SeqCst);
        watchdog.thread().unpark();
        answer
    })
}
