// SPDX-License-Identifier: Apache-2.0

//! Malformed descriptors.

use patchbay_guest::abi;
use patchbay_guest::testing::structures;
use patchbay_service::keys::RegistrationPhase;
use static_keys::{Concerns, Op};
use zerocopy::IntoBytes;

use super::kernel::*;
use super::program::Program;
use super::rig::{Rig, count, site};

/// Corrupts a field of a descriptor.
type Damage = fn(&mut abi::Descriptor);

/// Registers descriptors with one corrupt field each. Each must be refused with an error that
/// contains the given text.
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
        ("303 bytes", |it| it.header.size = 303),
        ("4097 bytes", |it| it.header.size = 4097),
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
    ]);
}

fn set_ring(descriptor: &mut abi::Descriptor, address: u64, count: u32, size: u32) {
    descriptor.records = address;
    (descriptor.record_count, descriptor.record_size) = (count, size);
}

/// If records cannot be written, only the records are lost.
#[test]
fn a_ring_of_records_that_is_not_mapped() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    // Two of the four records lie beyond the image.
    set_ring(&mut descriptor, BEYOND - 64, 4, 32);
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    let before = rig.picture();
    for op in [Op::Enable, Op::Disable, Op::Enable] {
        rig.change(&["beta"], op).unwrap();
    }
    let ring = physical(BEYOND - 64)..physical(BEYOND);
    rig.only_changed(&before, &[site(BETA_SITE), count(BETA), ring]);
    let sequence = |slot: u64| u64::from_le_bytes(rig.memory().read(BEYOND - 64 + 32 * slot));
    assert_eq!([sequence(0), sequence(1)], [1, 2]);
    rig.memory().write_kernel();
    rig.survives();
}

/// Corrupts one field of a gate.
type GateDamage = fn(&mut abi::Gate);

#[test]
fn no_gates() {
    let Some(rig) = Rig::new(vec![]) else { return };
    for (gate, words) in [
        (Gate::SystemState, "no system_state"),
        (Gate::JumpLabelMutex, "no jump_label_mutex"),
        (Gate::TextMutex, "no text_mutex"),
    ] {
        let mut gates = structures::gates(GATE_WORDS);
        gates[gate as usize].kind = 0x7777;
        rig.memory().gates(&gates);
        rig.refuses(&descriptor(), words);
    }
    let mut none = descriptor();
    none.gate_count = 0;
    rig.refuses(&none, "no system_state");
    rig.survives();
}

#[test]
fn gates_that_cannot_be_right() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let broken: &[(&str, GateDamage)] = &[
        ("3 bytes wide", |it| it.width = 3),
        ("255 bytes wide", |it| it.width = 255),
        ("not aligned", |it| it.address += 4),
        ("mask 0x0", |it| it.mask = 0),
        ("mask 0x100", |it| (it.width, it.mask) = (1, 0x100)),
        ("wants the value 0x1", |it| it.wanted = 1),
        ("concerns 0x0", |it| it.concerns = 0),
        ("gate text_mutex concerns is 0xffffffc0", |it| {
            it.concerns = u32::MAX
        }),
        ("gate text_mutex concerns is 0x40", |it| {
            it.concerns = 1 << 6
        }),
        ("flags of gate text_mutex is 0xfe", |it| it.flags = 0xff),
        ("reserved field of gate text_mutex is 0x80", |it| {
            it.reserved[1] = 0x80;
        }),
        ("listed no CPU offsets", |it| it.flags = abi::GATE_PER_CPU),
        ("gate text_mutex is at 0x1000", |it| it.address = 0x1000),
        ("gate ?[2J???????????????????????? is at 0x1000", |it| {
            it.address = 0x1000;
            it.name = [0xff; 28];
            it.name[..4].copy_from_slice(b"\x1b[2J");
        }),
    ];
    for (words, damage) in broken {
        let mut gates = structures::gates(GATE_WORDS);
        damage(&mut gates[Gate::TextMutex as usize]);
        rig.memory().gates(&gates);
        rig.refuses(&descriptor(), words);
    }
    rig.memory().write_kernel();
    rig.survives();
}

#[test]
fn lists_of_gates_without_end() {
    refused(&[
        ("65 gates", |it| it.gate_count = 65),
        ("4294967295 gates", |it| it.gate_count = u32::MAX),
        ("a gate has 0 bytes", |it| it.gate_size = 0),
        ("a gate has 63 bytes", |it| it.gate_size = 63),
        ("a gate has 4294967295 bytes", |it| it.gate_size = u32::MAX),
        ("the gates cannot be read", |it| it.gates = u64::MAX - 8),
        ("the gates cannot be read", |it| it.gates = BEYOND - 64),
        ("4097 CPU offsets", |it| it.cpu_count = 4097),
        ("4294967295 CPU offsets", |it| it.cpu_count = u32::MAX),
        ("the CPU offsets cannot be read", |it| {
            (it.cpu_offsets, it.cpu_count) = (BEYOND - 8, 2);
        }),
    ]);
}

#[test]
fn gates_of_more_cpus_than_there_can_be() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    (descriptor.cpu_offsets, descriptor.cpu_count) = (CPU_OFFSETS, 4096);
    descriptor.gate_count = 9;
    let mut gates = structures::gates(GATE_WORDS).to_vec();
    let per_cpu = abi::Gate {
        flags: abi::GATE_PER_CPU,
        ..structures::gate(99, "refs", FREE, Concerns::SITES)
    };
    gates.extend([per_cpu; 3]);
    rig.memory().gates(&gates);
    rig.refuses(&descriptor, "more than the 8192 words");
    // The offset of one CPU leads out of the kernel's half of the address space.
    descriptor.gate_count = 7;
    rig.memory().write_u64(CPU_OFFSETS + 8 * 4095, 1 << 63);
    rig.refuses(&descriptor, "gate refs is at 0x7fffffff811f0000");
    rig.memory().write_kernel();
    rig.survives();
}

#[test]
fn fields_that_must_be_zero() {
    refused(&[
        ("unknown flags is 0x4", |it| it.flags = 4),
        ("the descriptor's reserved field is 0x1", |it| {
            it.reserved = 1;
        }),
        ("the directory's reserved field is 0x8", |it| {
            it.directory.reserved = 8;
        }),
        ("records have 0 bytes", |it| it.directory.key_size = 0),
        ("records have 65 bytes", |it| it.directory.key_size = 65),
    ]);
}

#[test]
fn rings_of_records_that_cannot_be() {
    refused(&[
        ("129 records", |it| set_ring(it, FREE, 129, 32)),
        ("4294967295 records", |it| set_ring(it, FREE, u32::MAX, 32)),
        ("records have 0 bytes", |it| set_ring(it, FREE, 1, 0)),
        ("records have 31 bytes", |it| set_ring(it, FREE, 1, 31)),
        ("records have 36 bytes", |it| set_ring(it, FREE, 1, 36)),
        ("records have 72 bytes", |it| set_ring(it, FREE, 1, 72)),
        ("can be at 0xffffffffffffffe8", |it| {
            set_ring(it, u64::MAX - 23, 1, 32);
        }),
        ("can be at", |it| set_ring(it, FREE + 4, 1, 32)),
        ("the ring of records is at 0x1000", |it| {
            set_ring(it, 0x1000, 1, 32);
        }),
    ]);
}

/// Bytes that a newer guest appends to the structure are ignored.
#[test]
fn a_larger_descriptor() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut page = [0xee; abi::REQUEST_PAGE_SIZE];
    let mut descriptor = descriptor();
    descriptor.header.size = 4096;
    page[..size_of::<abi::Descriptor>()].copy_from_slice(descriptor.as_bytes());
    assert_eq!(rig.ask(abi::OP_REGISTER, &page), 0);
    rig.survives();
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
        // The top table of a four-level walk is used for a five-level walk.
        ("not present", |it| it.flags = abi::FLAG_LA57),
    ]);
}

#[test]
fn page_tables_with_loops() {
    let Some(rig) = Rig::new(vec![]) else { return };
    // Every entry of a table points to the table itself, so every address that is translated
    // through the table leads to it.
    for index in 0..512 {
        rig.memory().map(4, index, SPARE_TABLE | PRESENT);
    }
    let mut descriptor = descriptor();
    descriptor.page_table = SPARE_TABLE;
    // The entries of that table are read as the list of gates.
    rig.refuses(&descriptor, "flags of gate");
    // The entries are read as the directory's records.
    descriptor.page_table = PAGE_TABLES;
    rig.memory().map_beyond_by_page(0, SPARE_TABLE | PRESENT);
    descriptor.directory.keys = BEYOND;
    rig.refuses(&descriptor, "no key can be at 0x154003");
    // The jump table is read through the same mapping.
    descriptor.directory = abi::Directory::default();
    descriptor.jump_table = range(BEYOND, BEYOND + 5 * 16);
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    rig.memory().write_kernel();
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
    // An address that no processor supports.
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
    // The low bits of the MSR's value are the operation, so only whole pages can be named.
    rig.memory()
        .write_physical(REQUEST + 0x100, descriptor().as_bytes());
    rig.write_msr((REQUEST + 0x100) | u64::from(abi::OP_REGISTER));
    assert_eq!(rig.keys.describe().phase, RegistrationPhase::Absent);
    assert!(
        rig.keys
            .describe()
            .error
            .is_some_and(|error| error.contains("operation 257"))
    );
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
        // The operation, the generation, the end of the jump table, the page table, and the offsets
        // of `type` and `next`.
        (word(0), [0x0003_0001_5941_4250, 0x0001_0001_5941_4250]),
        (word(16), [1, 2]),
        (word(56), [TABLE + 80, TABLE + 64]),
        (word(96), [PAGE_TABLES, u64::MAX]),
        (word(136), [8, u64::MAX]),
    ]);
    let Some(rig) = Rig::new(vec![toggle]) else {
        return;
    };
    let mut outcomes = [0, 0];
    for _ in 0..300 {
        let status = rig.ask(abi::OP_REGISTER, &descriptor());
        assert!(status == 0 || status == -22, "{status}");
        outcomes[usize::from(status == 0)] += 1;
        // The descriptor was read once, so the registered values are consistent.
        let description = rig.keys.describe();
        if description.phase == RegistrationPhase::Registered {
            assert!([1, 2, 0x1234].contains(&description.generation));
            assert!([4, 5].contains(&description.sites));
        }
    }
    println!("{} refused, {} registered", outcomes[0], outcomes[1]);
    rig.vm.shutdown();
}
