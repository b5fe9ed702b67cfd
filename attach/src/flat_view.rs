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
//! The machine's own RAM is never removed. `info mtree` prints it below the target of the alias
//! `ram-below-4g`: one backend, or one for each NUMA node.
//!
//! ```text
//! address-space: memory
//!     0000000000000000-000000007fffffff (prio 0, i/o): alias ram-below-4g @pc.ram 0000000000000000-000000007fffffff
//!
//! memory-region: pc.ram
//!   0000000000000000-00000000ffffffff (prio 0, i/o): pc.ram
//!     0000000000000000-00000000bfffffff (prio 0, ram): node0
//!     00000000c0000000-00000000ffffffff (prio 0, ram): node1
//! ```

use std::collections::{BTreeMap, BTreeSet};
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
/// `backends`, sorted and not overlapping. A device's own memory is left out.
///
/// # Errors
/// The text is malformed; the error is a sentence.
pub fn ram(text: &str, backends: &BTreeMap<String, Removal>) -> Result<Vec<RamRange>, String> {
    let system = text
        .split("FlatView #")
        .find(|view| {
            view.lines()
                .any(|line| line.trim() == "Root memory region: system")
        })
        .ok_or("QEMU's `info mtree -f` has no flat view of the root \"system\"")?;
    let mut found: Vec<RamRange> = Vec::new();
    for line in system.lines() {
        let Some(range) = range(line, backends) else {
            continue;
        };
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
        let names: Vec<&str> = backends.keys().map(String::as_str).collect();
        return Err(format!(
            "QEMU's flat view has no RAM of its memory backends ({})",
            names.join(", ")
        ));
    }
    Ok(found)
}

/// Returns the backends of the machine's own RAM in the output of `info mtree`; empty if the output
/// does not show this RAM.
#[must_use]
pub fn machines_own(tree: &str) -> BTreeSet<&str> {
    let Some(machine) = tree.lines().find_map(target_of_low_memory) else {
        return BTreeSet::new();
    };
    let heading = |line: &&str| line.strip_prefix("memory-region: ") == Some(machine);
    let lines = tree.lines().skip_while(|line| !heading(line)).skip(1);
    let lines = lines.take_while(|line| line.starts_with(' '));
    lines
        .filter_map(|line| line.split_once(", ram): "))
        .map(|(_, region)| region)
        .filter(|region| !region.starts_with("alias "))
        .collect()
}

fn target_of_low_memory(line: &str) -> Option<&str> {
    let (_, alias) = line.split_once("): alias ram-below-4g @")?;
    let (region, _) = alias.split_once(" 0000000000000000-")?;
    Some(region)
}

/// Parses a line of a flat view; `None` unless it is RAM of a backend.
fn range(line: &str, backends: &BTreeMap<String, Removal>) -> Option<RamRange> {
    let (addresses, rest) = line.trim().split_once(" (prio ")?;
    let (first, last) = addresses.split_once('-')?;
    let (_, region) = rest.split_once(", ram): ")?;
    // The names of accelerators that have mapped the region come last.
    let region = region.trim_end_matches(" KVM");
    let (backend, offset) = match region.rsplit_once(" @") {
        Some((backend, offset)) => (backend, hexadecimal(offset)?),
        None => (region, 0),
    };
    let range = RamRange {
        addresses: hexadecimal(first)?..hexadecimal(last)?.checked_add(1)?,
        backend: backend.to_owned(),
        offset,
        removal: *backends.get(backend)?,
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

    /// Parts of the output of QEMU 7.2 for a q35 with 4 GiB in two NUMA nodes, and 16 MiB of
    /// ivshmem.
    const TREE: &str = "\
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000007fffffff (prio 0, i/o): alias ram-below-4g @pc.ram 0000000000000000-000000007fffffff
    0000000000000000-ffffffffffffffff (prio -1, i/o): pci
      00000000fd000000-00000000fdffffff (prio 1, ram): shm
    0000000100000000-000000017fffffff (prio 0, i/o): alias ram-above-4g @pc.ram 0000000080000000-00000000ffffffff

memory-region: pc.ram
  0000000000000000-00000000ffffffff (prio 0, i/o): pc.ram
    0000000000000000-00000000bfffffff (prio 0, ram): n0
    00000000c0000000-00000000ffffffff (prio 0, ram): n1

memory-region: pc.bios
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
";

    fn backends(names: &[&str]) -> BTreeMap<String, Removal> {
        let removal = |name: &&str| match *name {
            "dimm" => Removal::ByVcpu,
            _ => Removal::Never,
        };
        names
            .iter()
            .map(|name| ((*name).to_owned(), removal(name)))
            .collect()
    }

    fn view(lines: &str) -> String {
        format!("FlatView #0\n AS \"memory\", root: system\n Root memory region: system\n{lines}\n")
    }

    #[test]
    fn ram_of_a_real_machine() {
        let range = |addresses, offset| RamRange {
            addresses,
            backend: "ram0".to_owned(),
            offset,
            removal: Removal::Never,
        };
        let expected = vec![
            range(0..0xa_0000, 0),
            range(0x10_0000..0x8000_0000, 0x10_0000),
            range(0x1_0000_0000..0x1_8000_0000, 0x8000_0000),
        ];
        assert_eq!(ram(PRINTED, &backends(&["ram0"])), Ok(expected));
    }

    #[test]
    fn the_machine_s_own_ram_is_below_the_alias_of_low_memory() {
        let own = |text| machines_own(text).into_iter().collect::<Vec<_>>();
        assert_eq!(own(TREE), ["n0", "n1"]);
        let one = TREE
            .replace(
                "  0000000000000000-00000000ffffffff (prio 0, i/o): pc.ram\n",
                "",
            )
            .replace("@pc.ram", "@n0 x")
            .replace("region: pc.ram", "region: n0 x");
        assert_eq!(own(&one), ["n0", "n1"]);
        // A text that does not show the machine's own RAM has no such backend.
        for text in [
            "",
            "memory-region: pc.ram\n  0000000000000000-0000000000000fff (prio 0, ram): pc.ram\n",
            &TREE.replace("ram-below-4g", "low"),
            &TREE.replace("memory-region: pc.ram", "memory-region: other"),
            &TREE.replace(
                "ram-below-4g @pc.ram 0000000000000000-",
                "ram-below-4g @pc.ram",
            ),
        ] {
            assert_eq!(own(text), [""; 0], "{text}");
        }
    }

    #[test]
    fn a_device_s_memory_is_no_ram() {
        let text = view(
            "  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM\n  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram KVM\n\
             \x20 0000000100000000-0000000100ffffff (prio 0, ram): mem 1 @0000000000001000 KVM",
        );
        let found = ram(&text, &backends(&["pc.ram", "mem 1"])).expect("RAM");
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
            let error = ram(&view(lines), &backends(&["pc.ram"])).expect_err("nonsense");
            assert!(error.contains(expected), "{lines}: {error}");
        }
        assert!(ram("no view\n", &backends(&["pc.ram"])).is_err());
        let many = "  0000000000000000-0000000000000fff (prio 0, ram): pc.ram\n".repeat(2);
        assert!(ram(&view(&many), &backends(&["pc.ram"])).is_err());
    }
}
