// SPDX-License-Identifier: Apache-2.0
//! Tables of a hostile guest that take little memory of the guest but could take much of the host,
//! because many of them refer to the same data.

use static_keys::KEYS_MAX;

use crate::craft_guest::{CraftedGuest, DIRECT, MODULE_DATA, MODULE_TEXT, guest};
use crate::found::image;

const PAGE: u64 = 4096;
/// Guest-physical memory that nothing else uses.
const FREE: u64 = 0x1000;
const FREE_TABLES: u64 = 0x1d_0000;
/// Start of the addresses at which the tests map pages, above the memory of the module `mod`.
const MAPPED: u64 = 0xffff_ffff_d000_0000;
/// `sizeof(struct _ddebug)` in the crafted types.
const DESCRIPTOR: u64 = 56;

/// Adds `tables` tables of dynamic debug to the list. All of them refer to the same `count`
/// descriptors with empty texts.
fn add_debug_tables(guest: &CraftedGuest, tables: u64, count: u64) {
    let (descriptors, nodes) = (FREE, 0x2_0000);
    for index in 0..count {
        for word in 0..4 {
            let at = descriptors + DESCRIPTOR * index + 8 * word;
            // Each text pointer leads to a zero byte after the last table.
            guest.put_physical(at, &(DIRECT + 0xf_0000).to_le_bytes());
        }
    }
    let head = guest.symbol("ddebug_tables");
    let mut next = head;
    for index in 0..tables {
        let table = DIRECT + nodes + 56 * index;
        guest.put_u64(table, next);
        guest.put_u32(table + 40, count as u32);
        guest.put_u64(table + 48, DIRECT + descriptors);
        next = table;
    }
    guest.put_u64(head, next);
}

#[test]
fn descriptors_count_each_time_that_they_are_read() {
    // The kernel has a tracepoint and a descriptor of its own.
    let (count, all) = (1000, KEYS_MAX as u64 - 2);
    let good = guest();
    add_debug_tables(&good, all / count, count);
    image(&good).unwrap();
    let bad = guest();
    add_debug_tables(&bad, all / count + 1, count);
    let error = image(&bad).map(drop).unwrap_err();
    assert!(error.contains("more than the 131072 keys"), "{error}");
}

#[test]
fn tracepoints_of_modules_count_before_they_are_read() {
    let guest = guest();
    guest.put_u64(MODULE_DATA + 160, MODULE_TEXT);
    guest.put_u32(MODULE_DATA + 168, KEYS_MAX as u32);
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("more than the 131072 keys"), "{error}");
    guest.put_u32(MODULE_DATA + 168, 0);
    image(&guest).unwrap();
}

/// Gives the module `count` symbols that all equal `record`. The pages of the table map the same
/// three physical pages repeatedly.
fn map_symbols(guest: &CraftedGuest, count: u64, record: &[u8; 24]) {
    let records = 3 * PAGE / 24;
    for index in 0..records {
        guest.put_physical(FREE + 24 * index, record);
    }
    let mut tables = FREE_TABLES;
    for index in 0..(24 * count).div_ceil(PAGE) {
        let physical = FREE + index % 3 * PAGE;
        guest.map(&mut tables, MAPPED + index * PAGE, physical, 1, 1 | 1 << 63);
    }
    let kallsyms = MODULE_DATA + 0x600;
    guest.put_u64(kallsyms, MAPPED);
    guest.put_u32(kallsyms + 8, count as u32);
}

/// `Elf64_Sym` of a function.
fn symbol(name: u32, section: u16, address: u64) -> [u8; 24] {
    let mut record = [0; 24];
    record[..4].copy_from_slice(&name.to_le_bytes());
    record[4] = 0x12;
    record[6..8].copy_from_slice(&section.to_le_bytes());
    record[8..16].copy_from_slice(&address.to_le_bytes());
    record
}

/// The number of symbols of the module `mod`.
fn symbols_of_module(guest: &CraftedGuest) -> usize {
    let kernel = image(guest).unwrap();
    let module = kernel.images.iter().find(|image| image.name == "mod");
    module.unwrap().symbols.len()
}

#[test]
fn names_of_module_symbols_are_bounded_where_they_share_a_text() {
    // The name has 512 bytes and a NUL.
    let text = 0x1_0000;
    for (count, expected) in [(65_537, 65_536), (65_538, 0)] {
        let guest = guest();
        guest.put_physical(text, &[b'x'; 512]);
        map_symbols(&guest, count, &symbol(text as u32, 1, MODULE_TEXT + 0x30));
        guest.put_u64(MODULE_DATA + 0x610, DIRECT);
        assert_eq!(symbols_of_module(&guest), expected, "{count}");
    }
}

/// Adds modules without a jump table before `mod`.
fn add_modules(guest: &CraftedGuest, count: u64, kallsyms: u64) {
    let mut next = MODULE_DATA + 8;
    for index in 0..count {
        let structure = DIRECT + 0x2_0000 + 256 * index;
        guest.put_u64(structure + 8, next);
        guest.put_u64(structure + 176, kallsyms);
        next = structure + 8;
    }
    guest.put_u64(guest.symbol("modules"), next);
}

/// The symbols of the other modules name no section, so they are not kept.
#[test]
fn symbols_of_modules_that_are_not_kept_count_too() {
    for (others, expected) in [(3, 2), (4, 0)] {
        let guest = guest();
        map_symbols(&guest, 1 << 18, &symbol(0, 0, 0));
        let kallsyms = DIRECT + 0x1_0000;
        guest.put_u64(kallsyms, MAPPED);
        guest.put_u32(kallsyms + 8, 1 << 18);
        // The module gets its own symbols again.
        guest.put_u64(MODULE_DATA + 0x600, MODULE_DATA + 0x640);
        guest.put_u32(MODULE_DATA + 0x608, 3);
        add_modules(&guest, others, kallsyms);
        assert_eq!(symbols_of_module(&guest), expected, "{others}");
    }
}

/// Keys may share `static_key_mod` nodes without entries, so the number of modules does not bound
/// the number of reads.
#[test]
fn the_module_list_of_a_key_has_only_its_users() {
    for (elements, expected) in [(1, true), (2, false)] {
        let guest = guest();
        add_modules(&guest, 3, DIRECT);
        // The last node in the list of `alpha`.
        let mut last = MODULE_DATA + 0x500 + 24;
        for index in 0..elements {
            let element = DIRECT + 0x1_0000 + 24 * index;
            guest.put_u64(last, element);
            last = element;
        }
        let found = image(&guest).map(drop);
        let is_long = |error: &String| error.contains("longer than the 2 images that use it");
        assert_eq!(found.is_ok(), expected, "{found:?}");
        assert!(found.err().iter().all(is_long));
    }
}
