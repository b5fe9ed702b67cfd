// SPDX-License-Identifier: Apache-2.0

//! Malformed jump tables and sites.

use patchbay_guest::abi;
use static_keys::Op;

use zerocopy::IntoBytes;

use super::kernel::*;
use super::rig::{BRIEF, Rig, Setup, count, site};

/// Starts a guest whose `beta` has one site, at `at`, with text around it.
fn with_site(at: u64) -> Option<Rig> {
    let rig = Rig::new(vec![])?;
    let mut descriptor = descriptor();
    descriptor.text = range(at & !0xf, at.saturating_add(0x10));
    descriptor.entry_format = abi::FORMAT_ABSOLUTE64;
    descriptor.entry_size = 24;
    descriptor.jump_table = range(TABLE, TABLE + 24);
    let entry = [at, at.wrapping_add(0x100), BETA];
    rig.memory()
        .write(TABLE, &entry.map(u64::to_le_bytes).concat());
    rig.memory().write_u64(BETA + 8, TABLE);
    // These keys have no entries any more.
    for key in [ALPHA, GUARDED, EVENT] {
        rig.memory().write_u64(key + 8, 0);
    }
    assert_eq!(
        rig.ask(abi::OP_REGISTER, &descriptor),
        0,
        "{:?}",
        rig.keys.describe().error
    );
    Some(rig)
}

#[test]
fn two_to_the_32_entries() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    let start = 0xffff_8000_0000_0000;
    descriptor.jump_table = range(start, start + (16 << 32));
    rig.refuses(&descriptor, "4294967296 jump entries");
    descriptor.jump_table = range(start, 0xffff_ffff_ffff_fff0);
    rig.refuses(&descriptor, "jump entries exceed the limit");
    rig.survives();
}

#[test]
fn half_an_entry() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    descriptor.jump_table.end += 1;
    rig.refuses(&descriptor, "not a whole number of entries");
    rig.survives();
}

/// 2 MiB of memory mapped eight times form a table with the maximum number of entries.
#[test]
fn the_most_entries_and_one_more() {
    let Some(rig) = Rig::new(vec![]) else { return };
    for page in 0..9 {
        rig.memory().map_beyond(page, 4 << 20);
    }
    let mut descriptor = descriptor();
    descriptor.jump_table = range(BEYOND, BEYOND + (16 << 20) + 16);
    rig.refuses(&descriptor, "1048577 jump entries");
    descriptor.jump_table = range(BEYOND, BEYOND + (16 << 20));
    // A registration replaces the table of the previous one. Two tables would exceed the limit.
    for _ in 0..2 {
        assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
        assert_eq!(rig.keys.describe().sites, 1 << 20);
    }
    // The keys' own words do not point to that table.
    rig.fails(
        &["beta"],
        Op::Enable,
        "GUEST_BUSY",
        "does not fit the registered tables",
    );
    rig.survives();
}

#[test]
fn a_table_that_is_not_sorted() {
    let Some(rig) = Rig::new(vec![]) else { return };
    rig.memory().entry(1, STRADDLING, TARGET, GUARDED);
    rig.refuses(&descriptor(), "not sorted by key at entry 2");
    rig.survives();
}

#[test]
fn a_table_that_is_not_there() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    descriptor.jump_table = range(BEYOND, BEYOND + 80);
    rig.refuses(&descriptor, "not present");
    // The second half is unmapped.
    descriptor.jump_table = range(BEYOND - 32, BEYOND + 32);
    rig.refuses(&descriptor, "not present");
    // Device memory.
    rig.memory().map_beyond(0, 0xfee0_0000);
    rig.refuses(&descriptor, "outside the guest's memory");
    rig.survives();
}

/// The site lies in the page table entry that maps the page of the keys. The flip therefore remaps
/// the key's count, which the monitor has already located.
#[test]
fn a_site_in_the_page_table_of_its_own_key() {
    const PAGE: u64 = (KEYS - IMAGE) >> 12;
    let at = BEYOND + PAGE * 8;
    let Some(rig) = with_site(at) else { return };
    rig.memory().map_beyond_by_page(0, LEAF_TABLE | PRESENT);
    // The bytes of a NOP, read as a page table entry, map this page.
    let page = 0x44_1000;
    let beta = page + (BETA - KEYS);
    rig.memory()
        .write_physical(page, &rig.memory().read::<0x40>(KEYS));
    rig.memory().map(3, PAGE, 0);
    rig.memory().write_physical(LEAF_TABLE + PAGE * 8, &NOP);
    let before = rig.picture();
    rig.change(&["beta"], Op::Enable).unwrap();
    let entry = LEAF_TABLE + PAGE * 8;
    rig.only_changed(&before, &[entry..entry + 5, beta..beta + 4]);
    // The key is now at another address, or unmapped.
    let before = rig.picture();
    rig.change_within(&["beta"], Op::Disable, BRIEF)
        .unwrap_err();
    rig.only_changed(&before, &[]);
    rig.survives();
}

#[test]
fn sites_in_device_memory() {
    for hole in [0xc000_0000, 0xd000_0000, 0xfec0_0000, 0xfee0_0000] {
        let Some(rig) = with_site(BEYOND + 0x800) else {
            return;
        };
        rig.memory().map_beyond(0, hole);
        rig.fails(
            &["beta"],
            Op::Enable,
            "TABLE_REFUSED",
            "outside the guest's memory",
        );
        rig.survives();
    }
}

#[test]
fn a_site_in_the_zero_page() {
    let Some(rig) = with_site(BEYOND) else { return };
    // Physical page 0 is ordinary memory.
    rig.memory().map_beyond(0, 0);
    rig.memory().write_physical(0, &NOP);
    rig.flips(&["beta"], &[0..5, count(BETA)]);
    rig.survives();
}

/// The last bytes below the device gap and the first bytes from 4 GiB on are in two memory slots of
/// KVM.
#[test]
fn a_site_across_memory_slots() {
    let Some(rig) = Rig::with(Setup {
        memory: Some((3 << 30) + (2 << 20)),
        ..Setup::default()
    }) else {
        return;
    };
    let memory = rig.memory();
    memory.map_beyond_by_page(0, ((3 << 30) - 0x1000) | PRESENT);
    memory.map_beyond_by_page(1, (4 << 30) | PRESENT);
    let at = BEYOND + 0x1000 - 2;
    memory.write_physical((3 << 30) - 2, &NOP[..2]);
    memory.write_physical(4 << 30, &NOP[2..]);
    let mut descriptor = descriptor();
    descriptor.text = range(BEYOND, BEYOND + 0x2000);
    memory.entry(2, at, TARGET, BETA);
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    let read = || {
        let mut bytes = [0; 5];
        rig.vm.ram().read((3 << 30) - 2, &mut bytes[..2]).unwrap();
        rig.vm.ram().read(4 << 30, &mut bytes[2..]).unwrap();
        let mut around = [0; 2];
        rig.vm.ram().read((3 << 30) - 3, &mut around[..1]).unwrap();
        rig.vm.ram().read((4 << 30) + 3, &mut around[1..]).unwrap();
        assert_eq!(around, [0, 0]);
        bytes
    };
    rig.change(&["beta"], Op::Enable).unwrap();
    assert_eq!(read(), jump(at, TARGET));
    rig.change(&["beta"], Op::Disable).unwrap();
    assert_eq!(read(), NOP);
    // With the two pages swapped, the second half of the site is in the gap.
    memory.map(4, 1, (3 << 30) | PRESENT);
    assert_eq!(
        rig.change(&["beta"], Op::Enable).unwrap_err().reason(),
        "FOREIGN_BYTES"
    );
    assert_eq!(read(), NOP);
}

#[test]
fn a_site_of_which_the_second_page_is_missing() {
    let at = BEYOND + 0x1000 - 2;
    let Some(rig) = with_site(at) else { return };
    rig.memory().map_beyond_by_page(0, (4 << 20) | PRESENT);
    rig.memory()
        .write_physical((4 << 20) + 0x1000 - 2, &NOP[..2]);
    rig.fails(&["beta"], Op::Enable, "FOREIGN_BYTES", "0f 1f");
    rig.survives();
}

#[test]
fn a_site_at_the_end_of_the_address_space() {
    for at in [u64::MAX, u64::MAX - 1, u64::MAX - 4] {
        let Some(rig) = with_site(at) else { return };
        let error = rig.change(&["beta"], Op::Enable).unwrap_err();
        assert_eq!(error.reason(), "TABLE_REFUSED", "{error}");
        rig.survives();
    }
}

#[test]
fn sites_outside_text() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    for outside in [FREE, BETA, NAMES, TEXT_END - 1, TEXT - 1, GATES] {
        rig.memory().write_kernel();
        rig.memory().entry(2, outside, TARGET, BETA);
        rig.register();
        rig.fails(
            &["beta"],
            Op::Enable,
            "TABLE_REFUSED",
            "outside the registered text",
        );
    }
    rig.survives();
}

/// Sites inside the jump table and the key directory. Text that covers them makes them legal; only
/// their five bytes are written.
#[test]
fn sites_in_the_guests_own_tables() {
    for at in [TABLE + 0x100, DIRECTORY + 0x800, FREE] {
        let Some(rig) = with_site(at) else { return };
        rig.memory().write(at, &NOP);
        rig.flips(&["beta"], &[site(at), count(BETA)]);
        rig.survives();
    }
    // The entry of the site itself starts with the bytes of a NOP.
    let at = TABLE;
    let Some(rig) = with_site(at) else { return };
    rig.memory().write(at, &NOP);
    rig.flips(&["beta"], &[site(at), count(BETA)]);
    rig.survives();
}

#[test]
fn overlapping_sites() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let memory = rig.memory();
    // The same site twice, for one key and for two.
    memory.entry(1, EXECUTED, EXECUTED_TARGET, ALPHA);
    rig.register();
    rig.fails(&["alpha"], Op::Enable, "TABLE_REFUSED", "overlaps");
    memory.write_kernel();
    memory.entry(2, STRADDLING, TARGET, BETA);
    rig.register();
    rig.fails(&["alpha", "beta"], Op::Enable, "TABLE_REFUSED", "overlaps");
    // The second site begins two bytes after the first one, whose JMP contains a two-byte NOP.
    memory.write_kernel();
    memory.write(BETA_SITE, &[0xe9, 0x00, 0x66, 0x90, 0x00]);
    memory.entry(2, BETA_SITE, BETA_SITE + 5 + 0x0090_6600, BETA);
    memory.entry(3, BETA_SITE + 2, BETA_SITE + 0x20, BETA);
    memory.write(BETA, &[1]);
    memory.write_u64(GUARDED + 8, 0);
    rig.register();
    rig.fails(&["beta"], Op::Disable, "TABLE_REFUSED", "overlaps");
    rig.survives();
}

/// Two keys own the same site. After a flip by one, the other finds foreign bytes.
#[test]
fn a_site_of_two_keys() {
    let Some(rig) = Rig::new(vec![]) else { return };
    rig.memory().entry(3, BETA_SITE, TARGET, GUARDED);
    rig.register();
    rig.change(&["beta"], Op::Enable).unwrap();
    rig.fails(&["guarded"], Op::Enable, "FOREIGN_BYTES", "guarded");
    rig.fails(
        &["guarded"],
        Op::Enable,
        "KEY_QUARANTINED",
        "restart the guest",
    );
    rig.survives();
}

#[test]
fn targets_out_of_reach() {
    let Some(rig) = with_site(BETA_SITE) else {
        return;
    };
    for target in [0, 0xffff_8000_0000_0000, BETA_SITE - (1 << 31) - 6] {
        rig.memory().write(
            TABLE,
            &[BETA_SITE, target, BETA].map(u64::to_le_bytes).concat(),
        );
        let mut descriptor = descriptor();
        descriptor.entry_format = abi::FORMAT_ABSOLUTE64;
        descriptor.entry_size = 24;
        descriptor.jump_table = range(TABLE, TABLE + 24);
        assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
        rig.fails(&["beta"], Op::Enable, "TABLE_REFUSED", "cannot reach");
    }
    rig.survives();
}

/// The branch that vCPU 0 executes jumps to itself: the guest hangs, and a flip releases it.
#[test]
fn a_site_that_jumps_to_itself() {
    let Some(rig) = Rig::new(vec![]) else { return };
    rig.memory().entry(0, EXECUTED, EXECUTED, ALPHA);
    rig.register();
    rig.change(&["alpha"], Op::Enable).unwrap();
    assert_eq!(rig.memory().read(EXECUTED), jump(EXECUTED, EXECUTED));
    rig.change(&["alpha"], Op::Disable).unwrap();
    rig.survives();
}

#[test]
fn bytes_that_are_no_site() {
    for bytes in [
        [0; 5],
        [0xff; 5],
        [0xcc, 0x1f, 0x44, 0, 0],
        [0xe9, 0, 0, 0, 0],
        [0x66, 0x90, 0x66, 0x90, 0x66],
        jump(BETA_SITE, TARGET + 1),
    ] {
        let Some(rig) = Rig::registered(vec![]) else {
            return;
        };
        rig.memory().write(BETA_SITE, &bytes);
        let before = rig.picture();
        let result = rig.change(&["beta"], Op::Enable);
        match bytes[0] {
            // A two-byte NOP, whose two-byte JMP cannot reach the target.
            0x66 => assert_eq!(result.unwrap_err().reason(), "TABLE_REFUSED"),
            _ => assert_eq!(result.unwrap_err().reason(), "FOREIGN_BYTES"),
        }
        rig.only_changed(&before, &[]);
        rig.survives();
    }
}

#[test]
fn counts_that_no_key_has() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    for (found, op, reason) in [
        (-1, Op::Enable, "GUEST_BUSY"),
        (-1, Op::Inc, "GUEST_BUSY"),
        (-2, Op::Inc, "WOULD_WARN"),
        (i32::MIN, Op::Disable, "WOULD_WARN"),
        (i32::MAX, Op::Inc, "WOULD_WARN"),
        (0, Op::Dec, "WOULD_WARN"),
        (2, Op::Enable, "WOULD_WARN"),
    ] {
        rig.memory().write(BETA, &i32::to_le_bytes(found));
        rig.fails(&["beta"], op, reason, "beta");
    }
    // A count that does not match the sites.
    rig.memory().write(BETA, &1_i32.to_le_bytes());
    rig.fails(&["beta"], Op::Disable, "FOREIGN_BYTES", "expected e9");
    rig.survives();
}

#[test]
fn chains_that_lie() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let memory = rig.memory();
    let node = |at: u64, words: [u64; 3]| {
        memory.write(at, &words.map(u64::to_le_bytes).concat());
    };
    let entries = TABLE + 32;
    for (words, why) in [
        // A node that is its own next, with and without entries.
        ([CHAIN, entries, 0], "twice"),
        ([CHAIN, 0, 0], "longer"),
        // A node that is unmapped.
        ([BEYOND, entries, 0], "unmapped"),
        ([u64::MAX - 3, entries, 0], "unmapped"),
        // Entries of another key, of no table, and of an unknown module.
        ([0, TABLE, 0], "not in the registered table"),
        ([0, 0x10, 0], "not in the registered table"),
        ([0, entries, MODULES], "not registered"),
        // A node without entries.
        ([0, 0, 0], "does not name all"),
    ] {
        node(CHAIN, words);
        memory.write_u64(BETA + 8, CHAIN | 2);
        rig.fails(&["beta"], Op::Enable, "GUEST_BUSY", why);
    }
    // Two nodes in a ring, with the kernel twice.
    node(CHAIN, [CHAIN + 24, entries, 0]);
    node(CHAIN + 24, [CHAIN, entries, 0]);
    rig.fails(&["beta"], Op::Enable, "GUEST_BUSY", "twice");
    // Type words that point nowhere.
    for (word, why) in [
        (BEYOND | 2, "unmapped"),
        (0xfee0_0002, "unmapped"),
        (!3 | 2, "unmapped"),
        (BEYOND, "not in the registered table"),
        (0, "does not name all"),
    ] {
        memory.write_u64(BETA + 8, word);
        rig.fails(&["beta"], Op::Enable, "GUEST_BUSY", why);
    }
    memory.write_u64(BETA + 8, 2);
    rig.fails(&["beta"], Op::Enable, "KEY_SEALED", "sealed");
    // A valid chain works.
    node(CHAIN, [0, entries, 0]);
    memory.write_u64(BETA + 8, CHAIN | 2);
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}

#[test]
fn tracepoints_that_lead_nowhere() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    // The array of probes is unmapped. Only the guest would read it when the tracepoint fires.
    for funcs in [BEYOND, u64::MAX, 0xfee0_0000, 8] {
        rig.memory().write_u64(TRACEPOINT + 40, funcs);
        rig.look_at_everything();
        rig.flips(&["event"], &[site(EVENT_SITE), count(EVENT)]);
    }
    // An array without a terminator.
    let end = (4 << 20) - physical(TRACEPOINT) - 0x100;
    let probes = vec![0x41; usize::try_from(end).unwrap()];
    rig.memory().write(TRACEPOINT + 0x100, &probes);
    rig.memory().write_u64(TRACEPOINT + 40, TRACEPOINT + 0x100);
    rig.look_at_everything();
    rig.memory().write_kernel();
    let event = abi::Key {
        flags: abi::KEY_REGFUNC,
        ..record(EVENT, 19, abi::KEY_TRACEPOINT, TRACEPOINT)
    };
    rig.memory().write(DIRECTORY + 3 * 32, event.as_bytes());
    rig.register();
    rig.fails(&["event"], Op::Enable, "TRACEPOINT_REFUSED", "tracefs");
    rig.memory().write_kernel();
    rig.register();
    rig.memory().write_u64(TRACEPOINT + 40, 0);
    rig.fails(&["event"], Op::Enable, "TRACEPOINT_REFUSED", "no probe");
    rig.survives();
}

/// Far more sites of one key than any kernel has, all on the same few bytes. The key can be
/// inspected but not changed.
#[test]
fn one_key_with_too_many_sites() {
    const SITES: usize = 1 << 16;
    let Some(rig) = Rig::new(vec![]) else { return };
    rig.memory().map_beyond(0, 4 << 20);
    let entry = [BETA_SITE, TARGET, BETA].map(u64::to_le_bytes).concat();
    rig.memory().write_physical(4 << 20, &entry.repeat(SITES));
    rig.memory().write_u64(BETA + 8, BEYOND);
    let mut descriptor = descriptor();
    descriptor.entry_format = abi::FORMAT_ABSOLUTE64;
    descriptor.entry_size = 24;
    descriptor.jump_table = range(BEYOND, BEYOND + 24 * SITES as u64);
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    let details = rig.details("beta");
    assert_eq!(details.key.site_count, SITES);
    assert_eq!(details.sites.len(), 10_000);
    assert!(!details.next_page_token.is_empty());
    let error = rig.change(&["beta"], Op::Enable).unwrap_err();
    assert_eq!(error.reason(), "TABLE_REFUSED", "{error}");
    rig.survives();
}
