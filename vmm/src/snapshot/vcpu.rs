// SPDX-License-Identifier: Apache-2.0

//! The state of a vCPU.
//!
//! The order of the calls matters, because some of them have effects on other state
//! (`arch/x86/kvm/x86.c`):
//!
//! | call | order | reason |
//! |---|---|---|
//! | `KVM_GET_MP_STATE` | first | it accepts a pending INIT or start-up interrupt, which sets registers |
//! | `KVM_GET_VCPU_EVENTS` | last | other calls may change what is pending |
//! | `KVM_SET_CPUID2` | first | it decides which registers and MSRs exist |
//! | `KVM_SET_REGS` | before the events | it clears pending exceptions |
//! | `KVM_SET_SREGS` | before the local APIC | it sets the APIC's base and mode |
//! | `KVM_SET_LAPIC` | before the MSRs | the APIC's timer mode decides whether the TSC deadline is kept |
//! | `IA32_TSC_DEADLINE` | after all other MSRs | the deadline is compared with the TSC |
//! | `KVM_SET_MP_STATE` | last | it decides whether the vCPU runs |

use kvm_bindings::{
    CpuId, KVM_MAX_MSR_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_mp_state, kvm_msr_entry, kvm_sregs,
    kvm_xsave,
};
use kvm_ioctls::{Error, VcpuFd};
use patchbay_guest::snapshot::SaveError;

use super::state::{from_bytes, list_from_bytes, to_bytes};
use super::{SnapshotError, VcpuState};
use crate::system_registers;

// Names and numbers of MSRs as in arch/x86/include/asm/msr-index.h.
const IA32_TSC_DEADLINE: u32 = 0x6e0;
const IA32_MTRRCAP: u32 = 0xfe;
/// The base and the mask of the first variable range.
const IA32_MTRR_PHYSBASE0: u32 = 0x200;
/// The fixed ranges, of 64 KiB, 16 KiB and 4 KiB.
const IA32_MTRR_FIXED: [u32; 11] = [
    0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f,
];
const IA32_PAT: u32 = 0x277;
const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
const IA32_MCG_CAP: u32 = 0x179;
const IA32_MCG_STATUS: u32 = 0x17a;
const IA32_MCG_CTL: u32 = 0x17b;
/// Control, status, address and information of the first bank of machine checks.
const IA32_MC0_CTL: u32 = 0x400;

/// EFER.SVME.
const EFER_SVM: u64 = 1 << 12;
/// CR4.VMXE.
const CR4_VMX: u64 = 1 << 13;

fn failed(what: &'static str) -> impl Fn(Error) -> SaveError {
    move |error| SaveError::Unable(format!("KVM does not report {what} of a vCPU ({error})"))
}

/// Reads a vCPU that is parked. `cpuid` is the table that was set, because `KVM_GET_CPUID2` may
/// return other features. `msrs` are the MSRs that KVM lists.
pub(crate) fn save(
    fd: &VcpuFd,
    cpuid: &[kvm_cpuid_entry2],
    msrs: &[u32],
) -> Result<VcpuState, SaveError> {
    let mp_state = fd.get_mp_state().map_err(failed("the state"))?.mp_state;
    let sregs = fd.get_sregs().map_err(failed("the system registers"))?;
    if runs_guests(&sregs) {
        return Err(SaveError::Unable(
            "the guest runs virtual machines of its own, whose state is not saved; end them and unload the guest's KVM modules".to_owned(),
        ));
    }
    let regs = fd.get_regs().map_err(failed("the registers"))?;
    let xsave = fd.get_xsave().map_err(failed("the extended state"))?;
    let xcrs = fd
        .get_xcrs()
        .map_err(failed("the extended control registers"))?;
    let debug_regs = fd.get_debug_regs().map_err(failed("the debug registers"))?;
    let lapic = fd.get_lapic().map_err(failed("the local APIC"))?;
    let tsc_khz = fd.get_tsc_khz().map_err(failed("the TSC's frequency"))?;
    let msrs = [msrs, &unlisted_msrs(fd, msrs)].concat();
    let msrs = read_msrs(fd, &msrs).map_err(failed("the MSRs"))?;
    let events = fd.get_vcpu_events().map_err(failed("the events"))?;
    Ok(VcpuState {
        cpuid: to_bytes(cpuid),
        tsc_khz,
        regs: to_bytes(&regs),
        sregs: to_bytes(&sregs),
        xsave: to_bytes(&xsave),
        xcrs: to_bytes(&xcrs),
        debug_regs: to_bytes(&debug_regs),
        lapic: to_bytes(&lapic),
        msrs: to_bytes(msrs.as_slice()),
        events: to_bytes(&events),
        mp_state,
    })
}

fn runs_guests(sregs: &kvm_sregs) -> bool {
    sregs.efer & EFER_SVM != 0 || sregs.cr4 & CR4_VMX != 0
}

/// Returns the MSRs of memory types and machine checks that Linux uses and that are not in
/// `listed`. KVM_GET_MSR_INDEX_LIST omits many of them. The vCPU need not have all of them.
fn unlisted_msrs(fd: &VcpuFd, listed: &[u32]) -> Vec<u32> {
    let count = |capabilities| {
        // Both registers have the number in bits 7 to 0.
        let capabilities = system_registers::msr(fd, capabilities).unwrap_or_default();
        u32::from(capabilities.to_le_bytes()[0])
    };
    let ranges = IA32_MTRR_PHYSBASE0..IA32_MTRR_PHYSBASE0 + 2 * count(IA32_MTRRCAP);
    let banks = IA32_MC0_CTL..IA32_MC0_CTL + 4 * count(IA32_MCG_CAP);
    let single = [IA32_PAT, IA32_MTRR_DEF_TYPE, IA32_MCG_STATUS, IA32_MCG_CTL];
    let all = ranges.chain(IA32_MTRR_FIXED).chain(single).chain(banks);
    all.filter(|index| !listed.contains(index)).collect()
}

/// Reads MSRs. Those that the guest does not have are left out: KVM stops at the first of them.
fn read_msrs(fd: &VcpuFd, mut indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut found = Vec::with_capacity(indices.len());
    while !indices.is_empty() {
        let some = at_once(indices);
        let entries: Vec<_> = some.iter().map(|&index| msr(index, 0)).collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| Error::new(libc::E2BIG))?;
        let count = fd.get_msrs(&mut msrs)?;
        found.extend_from_slice(&msrs.as_slice()[..count]);
        // KVM refused the MSR after these, unless it has read all of them.
        let done = some.len().min(count + 1);
        indices = &indices[done..];
    }
    Ok(found)
}

/// Returns the beginning of a list of MSRs, as long as one call of KVM accepts. KVM refuses
/// `KVM_MAX_MSR_ENTRIES` too (`msr_io()` in `arch/x86/kvm/x86.c`).
fn at_once<T>(all: &[T]) -> &[T] {
    &all[..all.len().min(KVM_MAX_MSR_ENTRIES - 1)]
}

fn msr(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

/// Returns the CPUID table of a saved vCPU.
pub(super) fn cpuid(state: &VcpuState) -> Result<Vec<kvm_cpuid_entry2>, SnapshotError> {
    list_from_bytes("the CPUID of a vCPU", &state.cpuid)
}

/// Sets the state of a new vCPU, and returns its CPUID table.
pub(crate) fn restore(fd: &VcpuFd, state: &VcpuState) -> Result<CpuId, SnapshotError> {
    let set = SnapshotError::kvm;
    let cpuid = CpuId::from_entries(&cpuid(state)?)
        .map_err(|_| SnapshotError::Invalid("the CPUID of a vCPU"))?;
    fd.set_cpuid2(&cpuid).map_err(set("set a vCPU's CPUID"))?;
    if fd.get_tsc_khz() != Ok(state.tsc_khz) {
        fd.set_tsc_khz(state.tsc_khz)
            .map_err(set("set the TSC's frequency"))?;
    }
    let regs = from_bytes("the registers of a vCPU", &state.regs)?;
    fd.set_regs(&regs).map_err(set("set a vCPU's registers"))?;
    let sregs: kvm_sregs = from_bytes("the system registers of a vCPU", &state.sregs)?;
    if runs_guests(&sregs) {
        return Err(SnapshotError::Invalid("a vCPU runs guests"));
    }
    fd.set_sregs(&sregs)
        .map_err(set("set a vCPU's system registers"))?;
    let xsave: kvm_xsave = from_bytes("the extended state of a vCPU", &state.xsave)?;
    // SAFETY: KVM copies 4096 bytes, the size of the structure, because the monitor enables no
    // dynamic feature (`ARCH_REQ_XCOMP_GUEST_PERM`) for which it would copy more.
    unsafe { fd.set_xsave(&xsave) }.map_err(set("set a vCPU's extended state"))?;
    let xcrs = from_bytes("the extended control registers of a vCPU", &state.xcrs)?;
    fd.set_xcrs(&xcrs)
        .map_err(set("set a vCPU's extended control registers"))?;
    let debug_regs = from_bytes("the debug registers of a vCPU", &state.debug_regs)?;
    fd.set_debug_regs(&debug_regs)
        .map_err(set("set a vCPU's debug registers"))?;
    let lapic = from_bytes("the local APIC of a vCPU", &state.lapic)?;
    fd.set_lapic(&lapic).map_err(set("set a local APIC"))?;
    let msrs: Vec<kvm_msr_entry> = list_from_bytes("the MSRs of a vCPU", &state.msrs)?;
    let (last, first): (Vec<_>, Vec<_>) = msrs
        .into_iter()
        .partition(|msr| msr.index == IA32_TSC_DEADLINE);
    write_msrs(fd, &first)?;
    write_msrs(fd, &last)?;
    let events = from_bytes("the events of a vCPU", &state.events)?;
    fd.set_vcpu_events(&events)
        .map_err(set("set a vCPU's events"))?;
    // Tells the guest's watchdogs that time was lost. KVM refuses it for a guest without kvmclock.
    let _ = fd.kvmclock_ctrl();
    let mp_state = state.mp_state;
    fd.set_mp_state(kvm_mp_state { mp_state })
        .map_err(set("set whether a vCPU runs"))?;
    Ok(cpuid)
}

/// Writes MSRs. A value that KVM refuses is accepted if the new vCPU has it already.
fn write_msrs(fd: &VcpuFd, mut entries: &[kvm_msr_entry]) -> Result<(), SnapshotError> {
    while !entries.is_empty() {
        let some = at_once(entries);
        let msrs =
            Msrs::from_entries(some).map_err(|_| SnapshotError::Invalid("the MSRs of a vCPU"))?;
        let count = fd
            .set_msrs(&msrs)
            .map_err(SnapshotError::kvm("set the MSRs of a vCPU"))?;
        let Some(refused) = some.get(count) else {
            entries = &entries[some.len()..];
            continue;
        };
        if system_registers::msr(fd, refused.index) != Some(refused.data) {
            return Err(SnapshotError::Msr(refused.index));
        }
        entries = &entries[count + 1..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KVM refuses 256 MSRs, although kvm-bindings accepts them.
    #[test]
    fn no_call_has_more_msrs_than_kvm_accepts() {
        let mut left = &[0; 600][..];
        let mut calls = vec![];
        while !left.is_empty() {
            calls.push(at_once(left).len());
            left = &left[at_once(left).len()..];
        }
        assert_eq!(calls, [255, 255, 90]);
    }
}
