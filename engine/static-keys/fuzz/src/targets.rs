// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets of the engine. Each is a function of the fuzzer's bytes and panics if an invariant
//! is broken. libFuzzer calls them from `fuzz_targets/`. A test of the crate calls them over the
//! corpus and a few thousand mutations.
//!
//! The bytes describe what a hostile guest does to the memory of a kernel that started out valid,
//! so that most mutations get past the first check.

use static_keys::{
    Catalog, Directory, EntryFormat, GateKind, Image, Instruction, KeyId, Module, Nops, Op,
    Options, Plan, Range, Size, Update, disassemble, recognise_in_file,
};

use super::common::world::{Home, KeySpec, RECORD_SIZE, SiteSpec, World};

/// A target's entry point, called with the fuzzer's bytes.
pub type Target = fn(&[u8]);

pub const TARGETS: &[(&str, Target)] = &[
    ("tables", tables),
    ("modules", modules),
    ("chains", chains),
    ("names", names),
    ("instructions", instructions),
];

/// Reads numbers from the front of the bytes, and zeroes when the bytes have run out.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let take = self.0.len().min(N);
        let (now, later) = self.0.split_at(take);
        bytes[..take].copy_from_slice(now);
        self.0 = later;
        bytes
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.bytes())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn more(&self) -> bool {
        !self.0.is_empty()
    }
}

fn format(number: u8) -> EntryFormat {
    match number % 4 {
        0 => EntryFormat::Relative,
        1 => EntryFormat::Absolute64,
        2 => EntryFormat::Absolute32,
        _ => EntryFormat::None,
    }
}

/// Builds a kernel with two modules and two keys. The kernel and both modules use the first key;
/// only the kernel uses the second, a tracepoint.
fn world(format: EntryFormat, count: i32) -> World {
    let key = |class| KeySpec {
        home: Home::Kernel,
        class,
        initially: false,
        count,
    };
    let site = |key, home| SiteSpec {
        home,
        ..SiteSpec::of(key)
    };
    World::new(
        format,
        2,
        vec![
            key(static_keys::Class::Ref),
            key(static_keys::Class::Tracepoint),
        ],
        vec![
            site(0, Home::Kernel),
            site(0, Home::Kernel),
            site(1, Home::Kernel),
            site(0, Home::Module(0)),
            site(0, Home::Module(1)),
        ],
    )
}

/// Overwrites a word of the guest's tables, keys or text. The fuzzer's bytes choose the structure,
/// the offset and the value.
fn damage(world: &World, numbers: &mut Numbers<'_>) {
    let kernel = world.kernel();
    let parts = [
        (kernel.jump_table.start, 80),
        (kernel.directory.keys, 2 * RECORD_SIZE),
        (kernel.directory.names, 32),
        (world.key(0).0, 16),
        (world.tracepoint(1), 0x80),
        (world.node(0, 0), 96),
        (world.word(GateKind::SystemState), 40),
        (world.text(Home::Kernel).start, 64),
        (world.table(Home::Module(0)).start, 16),
        (world.module_image(0).directory.keys, RECORD_SIZE),
        (world.module_state(0), 4),
        (world.text(Home::Module(1)).start, 32),
    ];
    let (start, length) = parts[usize::from(numbers.u8()) % parts.len()];
    let at = start + u64::from(numbers.u8()) % length;
    let width = 1 << (numbers.u8() % 4);
    let value = numbers.u64().to_le_bytes();
    world.memory.poke(at, &value[..width]);
}

/// Plans, verifies and commits. Only counts of keys and whole sites in registered text may change,
/// the sites from NOP to JMP or back. The reverse change must restore the memory.
fn change(world: &World, catalog: &Catalog, texts: &[Range], op: Op, rip: u64) {
    let keys: Vec<KeyId> = catalog.keys().map(|key| key.id).collect();
    for key in &keys {
        let _ = catalog.enabled(&world.memory, *key);
        let _ = catalog.tracepoint(&world.memory, *key);
        for site in catalog.site_states(&world.memory, *key) {
            let _ = disassemble(&site.bytes, site.address);
        }
    }
    let start = world.memory.snapshot();
    if !commit(world, catalog, &keys, op, rip, texts) {
        assert_eq!(start, world.memory.snapshot(), "a change that failed");
        return;
    }
    let back = match op {
        Op::Inc => Op::Dec,
        Op::Dec => Op::Inc,
        Op::Enable => Op::Disable,
        Op::Disable => Op::Enable,
    };
    // `disable` does not undo `enable` of a key that was on.
    let reversible = matches!(op, Op::Inc | Op::Dec);
    if commit(world, catalog, &keys, back, u64::MAX, texts) && reversible {
        assert_eq!(start, world.memory.snapshot(), "there and back");
    }
}

fn commit(
    world: &World,
    catalog: &Catalog,
    keys: &[KeyId],
    op: Op,
    rip: u64,
    texts: &[Range],
) -> bool {
    let updates: Vec<Update> = keys.iter().map(|&key| Update { key, op }).collect();
    let options = Options {
        allow_guarded: true,
    };
    let Ok(plan) = Plan::new(catalog, &world.memory, &updates, &options) else {
        return false;
    };
    if plan.verify(&world.memory, &[rip]).is_err() {
        return false;
    }
    let before = world.memory.snapshot();
    let made = if plan.needs_pause() {
        plan.commit(&world.memory).is_ok()
    } else {
        plan.commit_running(&world.memory).is_ok()
    };
    let legal = |address: u64| {
        keys.iter().any(|key| (key.0..key.0 + 4).contains(&address))
            || texts.iter().any(|text| text.contains(address, 1))
    };
    let mut sites = 0;
    for ((page, old), new) in before.iter().zip(world.memory.snapshot().values()) {
        for (offset, _) in (0..)
            .zip(old.iter().zip(new.iter()))
            .filter(|(_, (a, b))| a != b)
        {
            let address = page * 4096 + offset;
            assert!(legal(address), "{address:#x} was written");
            sites += usize::from(texts.iter().any(|text| text.contains(address, 1)));
        }
    }
    assert!(sites <= plan.site_count() * 5, "more than whole sites");
    made
}

fn op(number: u8) -> Op {
    [Op::Inc, Op::Enable, Op::Dec, Op::Disable][usize::from(number % 4)]
}

/// Damages memory before and after the registration of a kernel and two modules.
pub fn tables(data: &[u8]) {
    let mut numbers = Numbers(data);
    let format = format(numbers.u8());
    let op = op(numbers.u8());
    let late = numbers.u8() % 8;
    let rip = numbers.u16();
    let world = world(format, i32::from(matches!(op, Op::Dec | Op::Disable)));
    let mut blows = 0;
    while numbers.more() && blows < 24 && numbers.0.len() > usize::from(late) * 11 {
        damage(&world, &mut numbers);
        blows += 1;
    }
    let Ok(mut catalog) = Catalog::new(&world.memory, &world.kernel()) else {
        return;
    };
    let mut texts = vec![world.text(Home::Kernel)];
    for module in 0..2 {
        if catalog
            .add_module(&world.memory, &world.module_image(module))
            .is_ok()
        {
            texts.push(world.text(Home::Module(module)));
        }
    }
    for _ in 0..late {
        damage(&world, &mut numbers);
    }
    let rip = world.text(Home::Kernel).start + u64::from(rip % 64);
    change(&world, &catalog, &texts, op, rip);
}

/// Adds and removes modules with any address, name and ranges.
pub fn modules(data: &[u8]) {
    let mut numbers = Numbers(data);
    let world = world(format(numbers.u8()), 0);
    let Ok(mut catalog) = Catalog::new(&world.memory, &world.kernel()) else {
        return;
    };
    let mut texts = vec![world.text(Home::Kernel)];
    let fresh = (catalog.key_count(), catalog.entry_count());
    for _ in 0..32 {
        if !numbers.more() {
            break;
        }
        let event = numbers.u8();
        let honest = world.module_image(usize::from(event >> 4) % 2);
        // Most parts stay close to valid values.
        let mut near = |value: u64| match numbers.u8() {
            0..192 => value,
            192..224 => value.wrapping_add(u64::from(numbers.u8())),
            _ => numbers.u64(),
        };
        let id = near(honest.id);
        if event % 4 == 0 {
            let known = catalog.modules().any(|(known, _)| known == id);
            assert_eq!(catalog.remove_module(id), known);
            continue;
        }
        let range = |near: &mut dyn FnMut(u64) -> u64, range: Range| Range {
            start: near(range.start),
            end: near(range.end),
        };
        let jump_table = range(&mut near, honest.jump_table);
        let text = range(&mut near, honest.text);
        let directory = Directory {
            keys: near(honest.directory.keys),
            names: near(honest.directory.names),
            ..honest.directory
        };
        let name = numbers.bytes::<8>();
        let module = Module {
            id,
            name: &name,
            jump_table,
            text,
            ro_after_init: Range::default(),
            directory,
        };
        let before = (
            catalog.key_count(),
            catalog.entry_count(),
            catalog.modules().count(),
        );
        match catalog.add_module(&world.memory, &module) {
            Ok(_) => texts.push(text),
            Err(error) => {
                assert!(printable(&error.to_string()), "{error}");
                let after = (
                    catalog.key_count(),
                    catalog.entry_count(),
                    catalog.modules().count(),
                );
                assert_eq!(before, after, "an error changes nothing");
            }
        }
        if event % 4 == 1 {
            change(&world, &catalog, &texts, op(event >> 2), 0);
        }
    }
    let left: Vec<u64> = catalog.modules().map(|(id, _)| id).collect();
    for id in left {
        assert!(catalog.remove_module(id));
    }
    // Kernel keys that a module listed stay registered after its removal.
    assert!(catalog.key_count() >= fresh.0);
    assert_eq!(catalog.entry_count(), fresh.1);
}

/// Rewrites the key's type word and three nodes of its chain.
pub fn chains(data: &[u8]) {
    let mut numbers = Numbers(data);
    let world = world(format(numbers.u8() % 3), 0);
    let catalog = world.catalog();
    let op = op(numbers.u8());
    let known = [
        0,
        world.key_type(0),
        world.node(0, 0),
        world.node(0, 1),
        world.node(0, 2),
        world.table(Home::Kernel).start,
        world.table(Home::Module(0)).start,
        world.table(Home::Module(1)).start,
        world.module(Home::Module(0)),
        world.module(Home::Module(1)),
    ];
    let words: Vec<u64> = (0..3)
        .flat_map(|node| (0..3).map(move |word| (node, word)))
        .map(|(node, word)| world.node(0, node) + word * pointer(world.format))
        .chain([world.key_type(0)])
        .collect();
    while numbers.more() {
        let at = words[usize::from(numbers.u8()) % words.len()];
        let value = match numbers.u8() {
            wild @ 240.. => numbers.u64().rotate_left(u32::from(wild)),
            number => known[usize::from(number >> 2) % known.len()] | u64::from(number & 3),
        };
        world.poke_pointer(at, value);
    }
    let texts = [Home::Kernel, Home::Module(0), Home::Module(1)].map(|home| world.text(home));
    let before = world.memory.locates();
    change(&world, &catalog, &texts, op, 0);
    assert!(world.memory.locates() - before < 2000, "bounded");
}

fn pointer(format: EntryFormat) -> u64 {
    match format {
        EntryFormat::Absolute32 => 4,
        _ => 8,
    }
}

/// Registers a directory of up to 16 records over one block of names.
pub fn names(data: &[u8]) {
    let mut numbers = Numbers(data);
    let world = World::simple(0, 1);
    let mut kernel = world.kernel();
    let count = numbers.u8() % 17;
    for index in 0..u64::from(count) {
        let record = kernel.directory.keys + index * RECORD_SIZE;
        let [offset, class] = numbers.bytes();
        let key = world.key(0).0 + u64::from(numbers.u8() % 32) * 16;
        world.memory.poke_u64(record, key);
        world.memory.poke_u32(record + 8, u32::from(offset));
        world.memory.poke_u32(record + 12, u32::from(class % 3));
        // The tracepoint whose key this is.
        world.memory.poke_u64(record + 16, key - 8);
    }
    world.memory.map(kernel.directory.names, 0x1000);
    let block = &numbers.0[..numbers.0.len().min(0x1000)];
    world.memory.poke(kernel.directory.names, block);
    kernel.directory.key_count = count.into();
    kernel.directory.names_size = u32::try_from(block.len()).unwrap_or(0);
    let catalog = match Catalog::new(&world.memory, &kernel) {
        Ok(catalog) => catalog,
        Err(error) => return assert!(printable(&error.to_string()), "{error}"),
    };
    assert_eq!(
        catalog.keys().count(),
        usize::from(count),
        "no two share a name"
    );
    for key in catalog.keys() {
        assert!(key.full_name.bytes().all(|byte| byte.is_ascii_graphic()));
        assert_eq!(key.module(), "");
        assert_eq!(key.name(), &*key.full_name);
        assert!(!key.name().is_empty());
        let found = catalog.find(&key.full_name).map(|found| found.id);
        assert_eq!(found, Some(key.id));
    }
}

fn printable(text: &str) -> bool {
    text.chars().all(|letter| !letter.is_control())
}

/// Decodes bytes at an address as an entry and as a site.
pub fn instructions(data: &[u8]) {
    let mut numbers = Numbers(data);
    let (code, target) = (numbers.u64(), numbers.u64());
    let bytes = numbers.0;
    for nops in [Nops::Fixed, Nops::P6, Nops::K8] {
        if let Some((size, branch)) = nops.recognise(bytes, code, target) {
            assert!(nops.has(size));
            let encoded = nops.encode(branch, size, code, target);
            assert!(encoded.is_ok_and(|encoded| bytes.starts_with(encoded.as_bytes())));
        }
    }
    if let Some((size, _)) = recognise_in_file(bytes, code, target) {
        assert!(bytes.len() >= size.bytes());
    }
    for size in [Size::Two, Size::Five] {
        if let Ok(jump) = Instruction::jump(size, code, target) {
            let found = Nops::Fixed.recognise(jump.as_bytes(), code, target);
            assert!(found.is_some());
            let shown = disassemble(jump.as_bytes(), code);
            assert_eq!(shown, format!("jmp {target:#x}"));
        }
    }
    let _ = disassemble(bytes, code);
    for format in [0, 1, 2, 3].map(format) {
        for image in [Image::Live, Image::File] {
            let whole = format.entry_size().max(1);
            let entries = format.entries(code, bytes, image);
            assert!(entries.count() <= bytes.len() / whole);
        }
    }
}
