// SPDX-License-Identifier: Apache-2.0

//! Malformed descriptors.

use patchbay_service::abi;
use patchbay_service::keys::RegistrationPhase;
use zerocopy::IntoBytes;

use super::kernel::*;
use super::program::Program;
use super::rig::Rig;

/// Corrupts a field of a descriptor.
type Damage = fn(&mut abi::Descriptor);

/// Registers descriptors with one corrupt field each; each must be refused with these words.
fn refused(broken: &[(&str, Damage)]) {
    let Some(rig) = Rig::new(vec![]) else { return };
    for (words, damage) in broken {
        let mut descriptor = descriptor();
        damage(&mut descriptor);
        rig.refuses(&descriptor, words);
        assert_eq!(rig.keys.describe().phase, RegistrationPhase::Refused);
    }
    rig.survives();
}

#[test]
fn wrong_magic() {
    refused(&[("magic", |it| it.header.magic = 0xdead_beef)]);
}

#[test]
fn wrong_version() {
    refused(&[
        ("ABI version 0", |it| it.header.abi_version = 0),
        ("ABI version 65535", |it| it.header.abi_version = u16::MAX),
    ]);
}

#[test]
fn wrong_size() {
    refused(&[
        ("0 bytes", |it| it.header.size = 0),
        ("4294967295 bytes", |it| it.header.size = u32::MAX),
        ("391 bytes", |it| it.header.size = 391),
    ]);
}

#[test]
fn another_operation_in_the_header() {
    refused(&[("names operation 2", |it| it.header.op = 2)]);
}

#[test]
fn no_generation() {
    refused(&[("generation is 0", |it| it.header.generation = 0)]);
}

#[test]
fn no_boot() {
    refused(&[("boot is 0", |it| it.boot = 0)]);
}

#[test]
fn unknown_formats_and_entries_of_other_sizes() {
    refused(&[
        ("format 0", |it| it.entry_format = 0),
        ("format 4294967295", |it| it.entry_format = u32::MAX),
        ("entries have 0 bytes", |it| it.entry_size = 0),
        ("entries have 4294967295 bytes", |it| {
            it.entry_size = u32::MAX
        }),
        ("entries have 16 bytes", |it| {
            it.entry_format = abi::FORMAT_ABSOLUTE64;
        }),
    ]);
}

#[test]
fn offsets_out_of_proportion() {
    refused(&[
        ("static_key.type", |it| it.static_key_type = u32::MAX),
        ("static_key_mod.next", |it| {
            it.static_key_mod_next = u32::MAX;
        }),
        ("module.state", |it| it.module_state = 0x1_0001),
        ("tracepoint.funcs", |it| it.tracepoint_funcs = u32::MAX),
    ]);
}

#[test]
fn ranges_that_wrap_or_leave_the_kernel() {
    refused(&[
        ("the jump table ends at", |it| {
            it.jump_table = range(TABLE, TABLE - 16);
        }),
        ("text ends at", |it| it.text = range(u64::MAX, 0)),
        ("ro_after_init is at 0x0", |it| {
            it.ro_after_init = range(0, u64::MAX);
        }),
        ("text is at 0x1000", |it| it.text = range(0x1000, 0x2000)),
        ("the tracepoint pointers is at 0x8000000000000000", |it| {
            it.tracepoints = range(1 << 63, u64::MAX);
        }),
        ("system_state is at 0x500", |it| it.system_state = 0x500),
    ]);
}

#[test]
fn no_gates() {
    refused(&[
        ("no system_state", |it| it.system_state = 0),
        ("no jump_label_mutex", |it| it.jump_label_mutex_owner = 0),
        ("no text_mutex", |it| it.text_mutex_owner = 0),
        ("no mutex owner mask", |it| it.mutex_owner_mask = 0),
    ]);
}

#[test]
fn page_tables_outside_memory() {
    refused(&[
        ("outside the guest's memory", |it| it.page_table = u64::MAX),
        ("outside the guest's memory", |it| it.page_table = MEMORY),
        ("outside the guest's memory", |it| {
            it.page_table = 0xfee0_0000;
        }),
        ("not present", |it| it.page_table = SPARE_TABLE),
        // The top table of four levels is used as that of five.
        ("not present", |it| it.flags = abi::FLAG_LA57),
    ]);
}

#[test]
fn page_tables_with_loops() {
    let Some(rig) = Rig::new(vec![]) else { return };
    // Every entry of the only table points to the table itself, so every address maps to it.
    let mut descriptor = descriptor();
    descriptor.page_table = SPARE_TABLE;
    for index in 0..512 {
        rig.memory().map(4, index, SPARE_TABLE | PRESENT);
    }
    // The entries of that table are read as the directory's records.
    rig.refuses(&descriptor, "no key can be at 0x154003");
    // The jump table is read through it too.
    descriptor.directory = abi::Directory::default();
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    rig.survives();
}

#[test]
fn page_tables_that_the_processor_would_refuse() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let top = (IMAGE >> 39) & 511;
    rig.memory().map(0, top, PAGE_TABLES | LARGE | PRESENT);
    rig.refuses(&descriptor(), "reserved bits");
    rig.memory().write_kernel();
    // A misaligned large page.
    let page = (IMAGE >> 21) & 511;
    rig.memory()
        .map(2, page, (IMAGE_PHYSICAL + 0x4000) | LARGE | PRESENT);
    rig.refuses(&descriptor(), "reserved bits");
    // Addresses that no processor supports.
    rig.memory().map(2, page, (0xf_ffff_ffff << 12) | PRESENT);
    rig.refuses(&descriptor(), "outside the guest's memory");
    rig.survives();
}

#[test]
fn a_descriptor_at_the_end_of_memory() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let last = MEMORY - 0x1000;
    rig.memory().write_physical(last, descriptor().as_bytes());
    assert_eq!(rig.ask_with_page(abi::OP_REGISTER, last), 0);
    let before = rig.picture();
    for page in [MEMORY, u64::MAX - 0xfff, 1 << 63] {
        rig.write_msr(page | u64::from(abi::OP_REGISTER));
    }
    rig.only_changed(&before, &[]);
    assert_eq!(rig.keys.describe().phase, RegistrationPhase::Registered);
    rig.survives();
}

#[test]
fn a_descriptor_in_a_hole() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let before = rig.picture();
    for page in [0xd000_0000, 0xfec0_0000, 0xfee0_0000, 0xfffb_d000, 4 << 30] {
        rig.write_msr(page | u64::from(abi::OP_REGISTER));
    }
    rig.only_changed(&before, &[]);
    assert_eq!(rig.keys.describe().phase, RegistrationPhase::Absent);
    rig.survives();
}

#[test]
fn a_descriptor_that_is_not_aligned() {
    let Some(rig) = Rig::new(vec![]) else { return };
    // The low bits of the MSR are the operation, so only whole pages can be named.
    rig.memory()
        .write_physical(REQUEST + 0x100, descriptor().as_bytes());
    rig.write_msr((REQUEST + 0x100) | u64::from(abi::OP_REGISTER));
    assert_eq!(rig.keys.describe().phase, RegistrationPhase::Absent);
    assert!(rig.keys.describe().error.contains("operation 257"));
    rig.survives();
}

#[test]
fn a_descriptor_in_its_own_page_table() {
    let Some(rig) = Rig::new(vec![]) else { return };
    // The status is written to the entry that maps the second page of the image.
    let mut descriptor = descriptor();
    descriptor.page_table = PAGE_TABLES;
    let bytes = descriptor.as_bytes();
    rig.memory().write_physical(LEAF_TABLE, bytes);
    rig.write_msr(LEAF_TABLE | u64::from(abi::OP_REGISTER));
    rig.look_at_everything();
    rig.survives();
}

#[test]
fn a_descriptor_that_changes_with_each_read() {
    let word = |at: u64| REQUEST + at;
    let toggle = Program::toggle(&[
        // Magic and version, size, generation, the end of the table, and the page table.
        (word(0), [0x0003_0001_5941_4250, 0x0001_0001_5941_4250]),
        (word(16), [1, 2]),
        (word(56), [TABLE + 80, TABLE + 64]),
        (word(136), [PAGE_TABLES, u64::MAX]),
    ]);
    let Some(rig) = Rig::new(vec![toggle]) else {
        return;
    };
    let mut outcomes = [0, 0];
    for _ in 0..300 {
        let status = rig.ask(abi::OP_REGISTER, &descriptor());
        assert!(status == 0 || status == -22, "{status}");
        outcomes[usize::from(status == 0)] += 1;
        // It was read once, so what is registered is consistent.
        let description = rig.keys.describe();
        if description.phase == RegistrationPhase::Registered {
            assert!([1, 2, 0x1234].contains(&description.generation));
            assert!([4, 5].contains(&description.sites));
        }
    }
    println!("{} refused, {} registered", outcomes[0], outcomes[1]);
    rig.vm.shutdown();
}
