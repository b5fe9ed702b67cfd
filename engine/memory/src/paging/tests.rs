// SPDX-License-Identifier: Apache-2.0

use std::collections::HashMap;

use super::*;
use crate::OutsideMemory;

#[derive(Default)]
struct Tables(HashMap<u64, u64>);

impl PhysicalMemory for Tables {
    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..RAM).collect()
    }

    /// Words that were not set are zero.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        let outside = OutsideMemory { address, length };
        let words = (address..RAM).step_by(8);
        for (address, word) in words.zip(bytes.chunks_exact_mut(8)) {
            let value = self.0.get(&address).copied().unwrap_or(0);
            word.copy_from_slice(&value.to_le_bytes());
        }
        (address < RAM).then_some(()).ok_or(outside)
    }
}

impl Tables {
    fn set(&mut self, table: u64, index: u64, entry: u64) {
        self.0.insert(table + index * 8, entry);
    }
}

/// The size of the memory in bytes.
const RAM: u64 = 1 << 30;
const ROOT: u64 = 0x1000;
const KERNEL: u64 = 0xffff_ffff_8100_0000;

/// PML4[511] → 0x2000[510] → 0x3000[8] → 0x4000[i].
fn kernel_tables() -> Tables {
    let mut tables = Tables::default();
    tables.set(ROOT, 511, 0x2000 | 0x63);
    tables.set(0x2000, 510, 0x3000 | 0x63);
    tables.set(0x3000, 8, 0x4000 | 0x63);
    tables
}

fn table(root: u64, levels: Levels) -> PageTable {
    PageTable { root, levels }
}

#[test]
fn four_kilobyte_page() {
    let mut tables = kernel_tables();
    tables.set(0x4000, 0, 0x8000_0000_0070_0000 | 0x63);
    assert_eq!(
        table(ROOT | 0x18, Levels::Four).translate(&tables, KERNEL + 0x123),
        Ok(Mapping {
            physical: 0x70_0123,
            remaining: 0xedd,
            writable: true,
            executable: false,
        })
    );
    assert_eq!(
        table(ROOT, Levels::Four).translate(&tables, KERNEL + 0x1000),
        Err(WalkError::NotPresent {
            address: KERNEL + 0x1000,
            level: 1
        })
    );
}

#[test]
fn two_megabyte_page_with_pat_bit() {
    let mut tables = kernel_tables();
    tables.set(0x3000, 8, 0x0260_0000 | 1 << 12 | 0xe3);
    assert_eq!(
        table(ROOT, Levels::Four).translate(&tables, KERNEL + 0x1f_fff0),
        Ok(Mapping {
            physical: 0x027f_fff0,
            remaining: 0x10,
            writable: true,
            executable: true,
        })
    );
}

#[test]
fn one_gigabyte_page() {
    let mut tables = kernel_tables();
    tables.set(0x2000, 510, 0x4000_0000 | 0xe3);
    assert_eq!(
        table(ROOT, Levels::Four).translate(&tables, KERNEL),
        Ok(Mapping {
            physical: 0x4100_0000,
            remaining: 0x3f00_0000,
            writable: true,
            executable: true,
        })
    );
}

#[test]
fn five_levels() {
    let mut tables = kernel_tables();
    tables.set(0x9000, 511, ROOT | 0x63);
    tables.set(0x4000, 0, 0x70_0000 | 0x63);
    assert_eq!(
        table(0x9000, Levels::Five)
            .translate(&tables, KERNEL)
            .map(|m| m.physical),
        Ok(0x70_0000)
    );
    // A 57-bit address is canonical with five levels, but not with four.
    let wide = 0x00ff_0000_0000_0000;
    assert_eq!(
        table(ROOT, Levels::Four).translate(&tables, wide),
        Err(WalkError::NotCanonical(wide))
    );
    assert_eq!(
        table(0x9000, Levels::Five).translate(&tables, wide),
        Err(WalkError::NotPresent {
            address: wide,
            level: 5
        })
    );
}

#[test]
fn reserved_bits_are_refused() {
    // A large page at the top level, and large pages that are not aligned.
    for (at, index, entry, level) in [
        (ROOT, 511, 0x2000 | 0xe3, 4),
        (0x2000, 510, 0x4000_0000 | 1 << 21 | 0xe3, 3),
        (0x3000, 8, 0x0020_0000 | 1 << 13 | 0xe3, 2),
    ] {
        let mut tables = kernel_tables();
        tables.set(at, index, entry);
        assert_eq!(
            table(ROOT, Levels::Four).translate(&tables, KERNEL),
            Err(WalkError::Reserved {
                address: KERNEL,
                level,
                entry
            })
        );
    }
}

#[test]
fn tables_that_point_at_themselves_end_the_walk() {
    let mut tables = Tables::default();
    for index in 0..512 {
        tables.set(ROOT, index, ROOT | 0x63);
    }
    let mapping = table(ROOT, Levels::Four)
        .translate(&tables, KERNEL + 5)
        .unwrap();
    assert_eq!(mapping.physical, ROOT + 5);
}

#[test]
fn tables_outside_memory_are_named() {
    let mut tables = kernel_tables();
    tables.set(0x3000, 8, 0xf_ffff_ffff_f000 | 1);
    assert_eq!(
        table(ROOT, Levels::Four).translate(&tables, KERNEL),
        Err(WalkError::TableOutsideMemory {
            address: KERNEL,
            level: 1,
            table: 0xf_ffff_ffff_f000
        })
    );
}

#[test]
fn pieces_follow_pages_that_are_not_contiguous() {
    let mut tables = kernel_tables();
    tables.set(0x4000, 0, 0x70_0000 | 1);
    tables.set(0x4000, 1, 0x20_0000 | 1);
    let mut pieces = vec![];
    table(ROOT, Levels::Four)
        .for_each_piece(&tables, KERNEL + 0xffd, 5, |at, len| {
            pieces.push((at, len));
            Ok::<_, WalkError>(())
        })
        .unwrap();
    assert_eq!(pieces, [(0x70_0ffd, 3), (0x20_0000, 2)]);
}

#[test]
fn a_range_over_the_end_of_the_address_space_is_refused() {
    let tables = kernel_tables();
    let result = table(ROOT, Levels::Four)
        .for_each_piece(&tables, u64::MAX - 1, 3, |_, _| Ok::<_, WalkError>(()));
    assert_eq!(
        result,
        Err(WalkError::Wraps {
            address: u64::MAX - 1,
            length: 3
        })
    );
}

#[test]
fn a_level_that_forbids_writes_or_execution_forbids_them_below() {
    let mut tables = kernel_tables();
    tables.set(0x2000, 510, NO_EXECUTE | 0x3000 | 1);
    tables.set(0x4000, 0, 0x70_0000 | 0x63);
    let mapping = table(ROOT, Levels::Four).translate(&tables, KERNEL);
    let mapping = mapping.expect("mapped");
    assert!(!mapping.writable && !mapping.executable);
}

#[test]
fn contiguous_pages_with_the_same_permissions_are_one_run() {
    let mut tables = kernel_tables();
    // The four pages are physically contiguous. Page 2 is read-only.
    for (index, entry) in [
        (0, 0x70_0063),
        (1, 0x70_1063),
        (2, 0x70_2001),
        (3, 0x70_3063),
    ] {
        tables.set(0x4000, index, entry);
    }
    // The table of 4 KiB pages is followed by a large page.
    tables.set(0x3000, 9, 0x0280_0000 | NO_EXECUTE | 0xe3);
    let gibibyte = KERNEL - KERNEL % GIBIBYTE;
    let runs = table(ROOT, Levels::Four).runs_of_gibibyte(&tables, gibibyte);
    let runs = runs.expect("few runs");
    let expected = [
        (0..0x2000, 0x70_0000, true, true),
        (0x2000..0x3000, 0x70_2000, false, true),
        (0x3000..0x4000, 0x70_3000, true, true),
        (0x20_0000..0x40_0000, 0x0280_0000, true, false),
    ];
    let expected = expected.map(|(range, physical, writable, executable)| Run {
        range: KERNEL + range.start..KERNEL + range.end,
        physical,
        writable,
        executable,
    });
    assert_eq!(runs, expected);
    assert_eq!(physical(&runs, KERNEL + 0x2010), Some(0x70_2010));
    assert_eq!(physical(&runs, KERNEL + 0x4000), None);
    for (address, found) in [
        (KERNEL + 0x2010, 0x70_2010),
        (KERNEL + 0x20_0005, 0x0280_0005),
    ] {
        let mapping = table(ROOT, Levels::Four).translate(&tables, address);
        assert_eq!(mapping.map(|mapping| mapping.physical), Ok(found));
    }
}

#[test]
fn runs_end_at_a_table_outside_memory_and_at_their_maximum() {
    let gibibyte = KERNEL - KERNEL % GIBIBYTE;
    let four = table(ROOT, Levels::Four);
    let mut tables = kernel_tables();
    tables.set(0x3000, 8, 0xf_ffff_ffff_f000 | 1);
    assert_eq!(four.runs_of_gibibyte(&tables, gibibyte), None);
    // All entries of level 2 lead to one table, whose pages are not contiguous.
    for index in 0..512 {
        tables.set(0x3000, index, 0x4000 | 0x63);
        tables.set(0x4000, index, (1023 - 2 * (index % 2)) << 12 | 0x63);
    }
    assert_eq!(four.runs_of_gibibyte(&tables, gibibyte), None);
    assert_eq!(
        four.runs_of_gibibyte(&Tables::default(), gibibyte),
        Some(Vec::new())
    );
}
