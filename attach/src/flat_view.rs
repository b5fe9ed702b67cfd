// SPDX-License-Identifier: Apache-2.0
//! Parses RAM as QEMU's `info mtree -f` prints it.
//!
//! ```text
//! FlatView #4
//!  AS "memory", root: system
//!  Root memory region: system
//!   0000000000000000-000000000009ffff (prio 0, ram): ram0
//!   00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
//!   0000000100000000-000000017fffffff (prio 0, ram): ram0 @0000000080000000 KVM
//! ```
//!
//! This is used only if the host's kernel, which knows the guest's memory slots, cannot be read,
//! and for a QEMU without KVM.

use std::collections::BTreeSet;
use std::ops::Range;

/// The maximum number of ranges in a flat view.
pub(crate) const MAX_RANGES: usize = 1024;
const PAGE: u64 = patchbay_memory::PAGE_SIZE;

/// The ways in which memory can be removed from the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Removal {
    /// The memory is the machine's own and is never removed.
    Never,
    /// A vCPU removes it by a write to the ejection register of a DIMM.
    ByVcpu,
    /// The monitor may remove it, also while no vCPU runs.
    #[default]
    ByMonitor,
}

/// RAM that is contiguous in its backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamRange {
    /// The guest-physical addresses.
    pub addresses: Range<u64>,
    /// The memory backend.
    pub backend: String,
    /// The offset of the first byte in the backend.
    pub offset: u64,
    /// The way in which the backend's memory can be removed.
    pub removal: Removal,
}

/// Returns the RAM in the flat view of the root `system`: the ranges of kind `ram` in one of
/// `backends`, sorted and not overlapping. A device's own memory is left out. `removal` returns the
/// way in which memory at an address can be removed.
///
/// # Errors
/// The text is malformed; the error is a sentence.
pub fn ram(
    text: &str,
    backends: &BTreeSet<&str>,
    removal: impl Fn(&Range<u64>) -> Removal,
) -> Result<Vec<RamRange>, String> {
    let system = text
        .split("FlatView #")
        .find(|view| {
            view.lines()
                .any(|line| line.trim() == "Root memory region: system")
        })
        .ok_or("QEMU's `info mtree -f` has no flat view of the root \"system\"")?;
    let mut found: Vec<RamRange> = Vec::new();
    for line in system.lines() {
        let Some(mut range) = range(line, backends) else {
            continue;
        };
        range.removal = removal(&range.addresses);
        if found.len() == MAX_RANGES {
            return Err(format!(
                "the guest's RAM lies in more than {MAX_RANGES} ranges"
            ));
        }
        let aligned = [range.addresses.start, range.addresses.end, range.offset]
            .iter()
            .all(|at| at.is_multiple_of(PAGE));
        let after = found
            .last()
            .is_none_or(|last| last.addresses.end <= range.addresses.start);
        if !aligned || !after {
            return Err(format!(
                "QEMU's flat view has RAM out of order, or not in whole pages: {}",
                line.trim()
            ));
        }
        found.push(range);
    }
    if found.is_empty() {
        let names: Vec<&str> = backends.iter().copied().collect();
        return Err(format!(
            "QEMU's flat view has no RAM of its memory backends ({})",
            names.join(", ")
        ));
    }
    Ok(found)
}

/// Parses a line of a flat view; `None` unless it is RAM of a backend.
fn range(line: &str, backends: &BTreeSet<&str>) -> Option<RamRange> {
    let (addresses, rest) = line.trim().split_once(" (prio ")?;
    let (first, last) = addresses.split_once('-')?;
    let (_, region) = rest.split_once(", ram): ")?;
    // The names of accelerators that have mapped the region come last.
    let region = region.trim_end_matches(" KVM");
    let (backend, offset) = match region.rsplit_once(" @") {
        Some((backend, offset)) => (backend, hexadecimal(offset)?),
        None => (region, 0),
    };
    backends.get(backend)?;
    let range = RamRange {
        addresses: hexadecimal(first)?..hexadecimal(last)?.checked_add(1)?,
        backend: backend.to_owned(),
        offset,
        removal: Removal::default(),
    };
    let size = range.addresses.end.checked_sub(range.addresses.start)?;
    offset.checked_add(size)?;
    Some(range)
}

fn hexadecimal(digits: &str) -> Option<u64> {
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of QEMU 7.2 for q35 with 4 GiB in a file and a VGA card.
    const PRINTED: &str = include_str!("../tests/data/mtree-q35-4g.txt");

    /// Returns the RAM of these backends. The machine's own ends at 4 GiB.
    fn ram_of(text: &str, backends: &[&str]) -> Result<Vec<RamRange>, String> {
        let backends = backends.iter().copied().collect();
        ram(text, &backends, |addresses| match addresses.start >> 32 {
            0 => Removal::Never,
            _ => Removal::ByVcpu,
        })
    }

    fn view(lines: &str) -> String {
        format!("FlatView #0\n AS \"memory\", root: system\n Root memory region: system\n{lines}\n")
    }

    #[test]
    fn ram_of_a_real_machine() {
        let range = |addresses, offset, removal| RamRange {
            addresses,
            backend: "ram0".to_owned(),
            offset,
            removal,
        };
        let expected = vec![
            range(0..0xa_0000, 0, Removal::Never),
            range(0x10_0000..0x8000_0000, 0x10_0000, Removal::Never),
            range(0x1_0000_0000..0x1_8000_0000, 0x8000_0000, Removal::ByVcpu),
        ];
        assert_eq!(ram_of(PRINTED, &["ram0"]), Ok(expected));
    }

    #[test]
    fn a_device_s_memory_is_no_ram() {
        let text = view(
            "  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM\n  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram KVM\n\
             \x20 0000000100000000-0000000100ffffff (prio 0, ram): mem 1 @0000000000001000 KVM",
        );
        let found = ram_of(&text, &["pc.ram", "mem 1"]).expect("RAM");
        let summary: Vec<_> = found
            .iter()
            .map(|range| (range.addresses.start, range.backend.as_str(), range.offset))
            .collect();
        assert_eq!(
            summary,
            [(0, "pc.ram", 0), (0x1_0000_0000, "mem 1", 0x1000)]
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (lines, expected) in [
            ("", "no RAM"),
            (
                "  0000000000000000-ffffffffffffffff (prio 0, ram): pc.ram",
                "no RAM",
            ),
            (
                "  0000000000002000-0000000000000fff (prio 0, ram): pc.ram",
                "no RAM",
            ),
            (
                "  0000000000000000-0000000000000fff (prio 0, ram): pc.ram @fffffffffffff000",
                "no RAM",
            ),
            (
                "  0000000000000000-00000000000007ff (prio 0, ram): pc.ram",
                "whole pages",
            ),
            (
                "  0000000000000000-0000000000001fff (prio 0, ram): pc.ram\n  0000000000001000-0000000000002fff (prio 0, ram): pc.ram",
                "out of order",
            ),
        ] {
            let error = ram_of(&view(lines), &["pc.ram"]).expect_err("nonsense");
            assert!(error.contains(expected), "{lines}: {error}");
        }
        assert!(ram_of("no view\n", &["pc.ram"]).is_err());
        let many = "  0000000000000000-0000000000000fff (prio 0, ram): pc.ram\n".repeat(2);
        assert!(ram_of(&view(&many), &["pc.ram"]).is_err());
    }
}
