// SPDX-License-Identifier: Apache-2.0

use std::collections::HashMap;

use super::*;

#[derive(Default)]
struct Tables(HashMap<u64, u64>);

impl PhysicalMemory for Tables {
    fn read_u64(&self, address: u64) -> Option<u64> {
        // Memory ends at 1 GiB; what was not set is zero.
        (address < 1 << 30).then(|| self.0.get(&address).copied().unwrap_or(0))
    }
}

impl Tables {
    fn set(&mut self, table: u64, index: u64, entry: u64) {
        self.0.insert(table + index * 8, entry);
    }
}

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

#[test]
fn four_kilobyte_page() {
    let mut tables = kernel_tables();
    tables.set(0x4000, 0, 0x8000_0000_0070_0000 | 0x63);
    assert_eq!(
        translate(&tables, ROOT | 0x18, Levels::Four, KERNEL + 0x123),
        Ok(Mapping {
            physical: 0x70_0123,
            remaining: 0xedd
        })
    );
    assert_eq!(
        translate(&tables, ROOT, Levels::Four, KERNEL + 0x1000),
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
        translate(&tables, ROOT, Levels::Four, KERNEL + 0x1f_fff0),
        Ok(Mapping {
            physical: 0x027f_fff0,
            remaining: 0x10
        })
    );
}

#[test]
fn one_gigabyte_page() {
    let mut tables = kernel_tables();
    tables.set(0x2000, 510, 0x4000_0000 | 0xe3);
    assert_eq!(
        translate(&tables, ROOT, Levels::Four, KERNEL),
        Ok(Mapping {
            physical: 0x4100_0000,
            remaining: 0x3f00_0000
        })
    );
}

#[test]
fn five_levels() {
    let mut tables = kernel_tables();
    tables.set(0x9000, 511, ROOT | 0x63);
    tables.set(0x4000, 0, 0x70_0000 | 0x63);
    assert_eq!(
        translate(&tables, 0x9000, Levels::Five, KERNEL).map(|m| m.physical),
        Ok(0x70_0000)
    );
    // An address only 57 bits wide is canonical with five levels, not with four.
    let wide = 0x00ff_0000_0000_0000;
    assert_eq!(
        translate(&tables, ROOT, Levels::Four, wide),
        Err(WalkError::NotCanonical(wide))
    );
    assert_eq!(
        translate(&tables, 0x9000, Levels::Five, wide),
        Err(WalkError::NotPresent {
            address: wide,
            level: 5
        })
    );
}

#[test]
fn reserved_bits_are_refused() {
    // A large page at the top level, and large pages that are not aligned.
    for (table, index, entry, level) in [
        (ROOT, 511, 0x2000 | 0xe3, 4),
        (0x2000, 510, 0x4000_0000 | 1 << 21 | 0xe3, 3),
        (0x3000, 8, 0x0020_0000 | 1 << 13 | 0xe3, 2),
    ] {
        let mut tables = kernel_tables();
        tables.set(table, index, entry);
        assert_eq!(
            translate(&tables, ROOT, Levels::Four, KERNEL),
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
    let mapping = translate(&tables, ROOT, Levels::Four, KERNEL + 5).unwrap();
    assert_eq!(mapping.physical, ROOT + 5);
}

#[test]
fn tables_outside_memory_are_named() {
    let mut tables = kernel_tables();
    tables.set(0x3000, 8, 0xf_ffff_ffff_f000 | 1);
    assert_eq!(
        translate(&tables, ROOT, Levels::Four, KERNEL),
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
    for_each_piece(&tables, ROOT, Levels::Four, KERNEL + 0xffd, 5, |at, len| {
        pieces.push((at, len));
        Ok::<_, WalkError>(())
    })
    .unwrap();
    assert_eq!(pieces, [(0x70_0ffd, 3), (0x20_0000, 2)]);
}

#[test]
fn a_range_over_the_end_of_the_address_space_is_refused() {
    let result = for_each_piece(
        &kernel_tables(),
        ROOT,
        Levels::Four,
        u64::MAX - 1,
        3,
        |_, _| Ok::<_, WalkError>(()),
    );
    assert_eq!(
        result,
        Err(WalkError::Wraps {
            address: u64::MAX - 1,
            length: 3
        })
    );
}
