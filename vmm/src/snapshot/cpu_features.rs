// SPDX-License-Identifier: Apache-2.0

//! Compares the processor of a snapshot with the host's.

use kvm_bindings::kvm_cpuid_entry2;

use super::SnapshotError;
use crate::x86::cpuid::KVM_FEATURES;

const ALL: u32 = u32::MAX;

/// Leaves with a bit per feature, and the bits to compare in eax, ebx, ecx and edx (Intel SDM
/// volume 2A, CPUID; AMD64 APM volume 3, appendix E; `Documentation/virt/kvm/x86/cpuid.rst`). Bits
/// that KVM derives from the guest's own registers or that the monitor always sets are left out.
const FEATURES: &[(u32, u32, [u32; 4])] = &[
    // Without OSXSAVE, the hypervisor and HTT.
    (1, 0, [0, 0, !(1 << 27 | 1 << 31), !(1 << 28)]),
    // Without OSPKE.
    (7, 0, [0, ALL, !(1 << 4), ALL]),
    (7, 1, [ALL, ALL, ALL, ALL]),
    (7, 2, [0, 0, 0, ALL]),
    (0xd, 0, [ALL, 0, 0, ALL]),
    (0xd, 1, [ALL, 0, ALL, ALL]),
    (KVM_FEATURES, 0, [ALL, 0, 0, 0]),
    // Without CMP_LEGACY.
    (0x8000_0001, 0, [0, 0, !(1 << 1), ALL]),
    (0x8000_0007, 0, [0, 0, 0, ALL]),
    (ADDRESS_SIZES, 0, [0, ALL, 0, 0]),
    (0x8000_000a, 0, [0, 0, 0, ALL]),
    (0x8000_0021, 0, [ALL, 0, 0, 0]),
];

/// The leaf whose eax has the number of bits of physical addresses (MAXPHYADDR) in bits 7 to 0. It
/// decides which bits of page tables are reserved.
const ADDRESS_SIZES: u32 = 0x8000_0008;

const REGISTERS: [&str; 4] = ["eax", "ebx", "ecx", "edx"];

fn leaf(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let found = entries
        .iter()
        .find(|entry| (entry.function, entry.index) == (function, index));
    found.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
}

fn address_bits(entries: &[kvm_cpuid_entry2]) -> u8 {
    let [eax, ..] = leaf(entries, ADDRESS_SIZES, 0);
    eax.to_le_bytes()[0]
}

fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let [_, ebx, ecx, edx] = leaf(entries, 0, 0);
    let bytes = [ebx, edx, ecx].map(u32::to_le_bytes).concat();
    bytes.escape_ascii().to_string()
}

/// Checks that the host offers every feature that the snapshot's guest was offered, and all of its
/// physical addresses.
pub(crate) fn check(
    saved: &[kvm_cpuid_entry2],
    here: &[kvm_cpuid_entry2],
) -> Result<(), SnapshotError> {
    let vendors = [vendor(saved), vendor(here)];
    if vendors[0] != vendors[1] {
        let [saved, here] = vendors;
        return Err(SnapshotError::Vendor { saved, here });
    }
    let [bits, offered] = [saved, here].map(address_bits);
    if bits > offered {
        return Err(SnapshotError::AddressBits {
            saved: bits,
            here: offered,
        });
    }
    for &(function, index, masks) in FEATURES {
        let [saved, here] = [saved, here].map(|entries| leaf(entries, function, index));
        for (register, name) in REGISTERS.iter().enumerate() {
            let bits = saved[register] & !here[register] & masks[register];
            if bits != 0 {
                return Err(SnapshotError::Features {
                    leaf: function,
                    index,
                    register: name,
                    bits,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn processor(vendor: &[u8; 12], features: u32) -> Vec<kvm_cpuid_entry2> {
        let (words, _) = vendor.as_chunks();
        let word = |at: usize| u32::from_le_bytes(words[at]);
        vec![
            entry(0, [1, word(0), word(2), word(1)]),
            entry(1, [0, 0, features, 0]),
        ]
    }

    #[test]
    fn another_vendor_is_refused() {
        let saved = processor(b"GenuineIntel", 0);
        let error = check(&saved, &processor(b"AuthenticAMD", 0)).expect_err("refused");
        let text = error.to_string();
        assert!(
            text.contains("GenuineIntel") && text.contains("AuthenticAMD"),
            "{text}"
        );
    }

    #[test]
    fn the_host_may_have_more_address_bits_and_not_fewer() {
        let with_bits = |bits: u32| {
            let mut entries = processor(b"GenuineIntel", 0);
            // The other bytes of eax are not compared.
            entries.push(entry(ADDRESS_SIZES, [0x3939_0000 | bits, 0, 0, 0]));
            entries
        };
        let saved = with_bits(46);
        for bits in [46, 52] {
            assert!(check(&saved, &with_bits(bits)).is_ok());
        }
        for here in [with_bits(39), processor(b"GenuineIntel", 0)] {
            let error = check(&saved, &here).expect_err("refused");
            assert!(error.to_string().contains("46 bits"), "{error}");
        }
    }

    #[test]
    fn the_host_may_have_more_features_and_not_fewer() {
        let saved = processor(b"AuthenticAMD", 0b0110);
        assert!(check(&saved, &processor(b"AuthenticAMD", 0b1110)).is_ok());
        let error = check(&saved, &processor(b"AuthenticAMD", 0b1100)).expect_err("refused");
        assert!(
            error.to_string().contains("CPUID 0x1.0, ecx 0x2"),
            "{error}"
        );
        // The guest itself sets OSXSAVE.
        let saved = processor(b"AuthenticAMD", 1 << 27);
        assert!(check(&saved, &processor(b"AuthenticAMD", 0)).is_ok());
    }
}
