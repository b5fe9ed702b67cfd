// SPDX-License-Identifier: Apache-2.0

//! CPUID of the guest: KVM's supported features, the guest's topology (one package, one core per
//! vCPU), and Patchbay's signature.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use patchbay_guest::abi;

use crate::probe::Transports;
use crate::request::MSR_INDEX;

/// Patchbay's base leaf. Aligned to 0x100 as `hypervisor_cpuid_base()` requires; does not collide
/// with Hyper-V (0x40000000) or KVM (0x40000000, or 0x40000100 if Hyper-V's leaves are present).
pub(crate) const BASE: u32 = 0x4000_0400;

/// Leaf with KVM's paravirtual features (`Documentation/virt/kvm/x86/cpuid.rst`).
pub(crate) const KVM_FEATURES: u32 = 0x4000_0001;
/// `KVM_FEATURE_HC_MAP_GPA_RANGE`. Cleared, because it would tell a confidential guest that it can
/// report page conversions by this hypercall, which we use for Patchbay's requests.
const HC_MAP_GPA_RANGE: u32 = 1 << 16;

/// CPUID.(EAX=7,ECX=0):ECX.CET_SS (Intel SDM, volume 2A, CPUID).
const SHADOW_STACK: u32 = 1 << 7;
/// CPUID.(EAX=7,ECX=0):EDX.CET_IBT.
const INDIRECT_BRANCH_TRACKING: u32 = 1 << 20;

/// Limit on the number of vCPUs.
pub(crate) const VCPUS_MAX: u8 = 16;

fn signature_words() -> [u32; 3] {
    let s = abi::CPUID_SIGNATURE;
    [
        u32::from_le_bytes([s[0], s[1], s[2], s[3]]),
        u32::from_le_bytes([s[4], s[5], s[6], s[7]]),
        u32::from_le_bytes([s[8], s[9], s[10], s[11]]),
    ]
}

/// Builds the table of one vCPU from the features that KVM supports.
pub(crate) fn build(
    supported: &[kvm_cpuid_entry2],
    vcpu: u8,
    vcpus: u8,
    transports: Transports,
) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported
        .iter()
        .filter(|entry| {
            !matches!(
                entry.function,
                0xb | 0x1f | 0x8000_0026 | BASE..=0x4000_04ff
            )
        })
        .copied()
        .collect();
    let id = u32::from(vcpu);
    let count = u32::from(vcpus);
    // Width of an APIC id in bits.
    let width = (count - 1).checked_ilog2().map_or(0, |log| log + 1);
    for entry in &mut entries {
        match entry.function {
            1 => {
                // Local APIC id, number of logical processors.
                entry.ebx = (entry.ebx & 0xffff) | count << 16 | id << 24;
                entry.ecx |= 1 << 31;
                set_bit(&mut entry.edx, 28, count > 1);
            }
            // Intel: number of cores in the package. Only the last-level cache is shared.
            4 if entry.eax & 0x1f != 0 => {
                let level = (entry.eax >> 5) & 7;
                let sharing = if level >= 3 { count - 1 } else { 0 };
                entry.eax = (entry.eax & 0x3fff) | sharing << 14 | (count - 1) << 26;
            }
            // CET: newer KVM has the shadow-stack pointer in a register of its own, which snapshots
            // do not save.
            7 if entry.index == 0 => {
                entry.ecx &= !SHADOW_STACK;
                entry.edx &= !INDIRECT_BRANCH_TRACKING;
            }
            KVM_FEATURES => entry.eax &= !HC_MAP_GPA_RANGE,
            // AMD: number of cores in the package and width of their ids.
            0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | width << 12 | (count - 1),
            // AMD: cmp_legacy means that the logical processors are cores.
            0x8000_0001 => set_bit(&mut entry.ecx, 1, count > 1),
            0x8000_001d => {
                let level = (entry.eax >> 5) & 7;
                let sharing = if level >= 3 { count - 1 } else { 0 };
                entry.eax = (entry.eax & !(0xfff << 14)) | sharing << 14;
            }
            // AMD: APIC id, core id with one thread each, one node.
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx = 0;
            }
            _ => {}
        }
    }
    // Extended topology: a core level above a thread level with one thread.
    for (index, (shift, processors, kind)) in [(0, 1, 1), (width, count, 2), (0, 0, 0)]
        .into_iter()
        .enumerate()
    {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        entries.push(kvm_cpuid_entry2 {
            function: 0xb,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: kind << 8 | index,
            edx: id,
            ..Default::default()
        });
    }
    if transports.any() {
        let [ebx, ecx, edx] = signature_words();
        entries.push(kvm_cpuid_entry2 {
            function: BASE,
            eax: BASE + 1,
            ebx,
            ecx,
            edx,
            ..Default::default()
        });
        entries.push(kvm_cpuid_entry2 {
            function: BASE + 1,
            eax: u32::from(abi::ABI_VERSION),
            ebx: transports.bits(),
            ecx: if transports.msr { MSR_INDEX } else { 0 },
            ..Default::default()
        });
    }
    CpuId::from_entries(&entries)
}

fn set_bit(word: &mut u32, bit: u32, value: bool) {
    *word = (*word & !(1 << bit)) | u32::from(value) << bit;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(cpuid: &CpuId, function: u32) -> Option<kvm_cpuid_entry2> {
        cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function)
            .copied()
    }

    fn supported(function: u32, eax: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            eax,
            ..Default::default()
        }
    }

    #[test]
    fn no_guest_has_the_state_that_snapshots_lack() {
        let mut leaf_7 = supported(7, 0);
        (leaf_7.ecx, leaf_7.edx) = (u32::MAX, u32::MAX);
        let cpuid = build(&[leaf_7], 0, 1, Transports::default()).unwrap();
        let built = leaf(&cpuid, 7).unwrap();
        assert_eq!((built.ecx, built.edx), (!(1 << 7), !(1 << 20)));
    }

    #[test]
    fn signature_and_transports() {
        let transports = Transports {
            hypercall: false,
            msr: true,
        };
        let cpuid = build(&[], 0, 1, transports).unwrap();
        let base = leaf(&cpuid, 0x4000_0400).unwrap();
        assert_eq!(base.eax, 0x4000_0401);
        let signature: Vec<u8> = [base.ebx, base.ecx, base.edx]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert_eq!(signature, b"PatchbayKeys");
        let features = leaf(&cpuid, 0x4000_0401).unwrap();
        assert_eq!(
            (features.eax, features.ebx, features.ecx, features.edx),
            (1, 2, MSR_INDEX, 0)
        );
        let none = build(&[], 0, 1, Transports::default()).unwrap();
        assert!(leaf(&none, 0x4000_0400).is_none());
    }

    #[test]
    fn the_feature_bit_of_confidential_guests_is_hidden() {
        let cpuid = build(
            &[supported(KVM_FEATURES, 0x0101_00fb)],
            0,
            1,
            Transports::default(),
        )
        .unwrap();
        assert_eq!(leaf(&cpuid, KVM_FEATURES).unwrap().eax, 0x0100_00fb);
    }

    #[test]
    fn each_vcpu_has_its_own_id_in_one_package() {
        for (vcpus, width) in [(1, 0), (2, 1), (3, 2), (4, 2), (16, 4)] {
            for vcpu in 0..vcpus {
                let cpuid = build(&[supported(1, 0)], vcpu, vcpus, Transports::default()).unwrap();
                let one = leaf(&cpuid, 1).unwrap();
                assert_eq!(one.ebx >> 24, u32::from(vcpu));
                assert_eq!(one.ebx >> 16 & 0xff, u32::from(vcpus));
                let topology: Vec<_> = cpuid
                    .as_slice()
                    .iter()
                    .filter(|entry| entry.function == 0xb)
                    .collect();
                assert_eq!(topology.len(), 3);
                assert_eq!(
                    (topology[1].eax, topology[1].ebx),
                    (width, u32::from(vcpus))
                );
                assert!(topology.iter().all(|entry| entry.edx == u32::from(vcpu)));
            }
        }
    }
}
