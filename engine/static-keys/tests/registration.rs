// SPDX-License-Identifier: Apache-2.0
//! Registrations that are invalid or too large. Each is refused as a whole. One that is too large
//! is refused before memory is allocated for it.

mod common;

use common::world::{Home, KeySpec, RECORD_SIZE, SiteSpec, World, update};
use static_keys::{
    Catalog, CatalogError, Class, Concerns, Directory, ENTRIES_MAX, EntryFormat, GateKind, Gates,
    KEYS_MAX, Kernel, ListedGate, MODULES_MAX, Module, Op, Options, Plan, Range,
};

fn refused(world: &World, change: impl Fn(&mut Kernel)) -> CatalogError {
    let mut kernel = world.kernel();
    change(&mut kernel);
    Catalog::new(&world.memory, &kernel).expect_err("refused")
}

#[test]
fn tables_of_the_wrong_shape() {
    let world = World::simple(0, 4);
    let Range { start, end } = world.kernel().jump_table;
    for range in [
        Range {
            start: end,
            end: start,
        },
        Range {
            start,
            end: end - 1,
        },
        Range {
            start,
            end: start + 8,
        },
        Range {
            start: u64::MAX,
            end: 0,
        },
    ] {
        let error = refused(&world, |kernel| kernel.jump_table = range);
        assert!(
            matches!(error, CatalogError::TableRange { .. }),
            "{range:x?}: {error}"
        );
    }
    // Without jump labels there is no table.
    assert!(matches!(
        refused(&world, |kernel| kernel.format = EntryFormat::None),
        CatalogError::TableRange { .. }
    ));
}

#[test]
fn huge_tables_are_refused_before_memory_is_taken() {
    let world = World::simple(0, 1);
    for range in [
        Range {
            start: 0,
            end: 16 << 32,
        },
        Range { start: 0, end: !15 },
        Range {
            start: 0,
            end: (ENTRIES_MAX as u64 + 1) * 16,
        },
    ] {
        let error = refused(&world, |kernel| kernel.jump_table = range);
        assert!(
            matches!(error, CatalogError::TooManyEntries { .. }),
            "{range:x?}: {error}"
        );
    }
    let error = refused(&world, |kernel| kernel.directory.key_count = u32::MAX);
    assert!(
        matches!(error, CatalogError::TooManyKeys { count } if count == u32::MAX as usize),
        "{error}"
    );
    let error = refused(&world, |kernel| {
        kernel.directory.key_count = KEYS_MAX as u32 + 1
    });
    assert!(matches!(error, CatalogError::TooManyKeys { .. }), "{error}");
    let error = refused(&world, |kernel| kernel.directory.names_size = u32::MAX);
    assert!(
        matches!(error, CatalogError::NamesTooLong { .. }),
        "{error}"
    );
    // The largest allowed size, but unmapped.
    let error = refused(&world, |kernel| {
        kernel.jump_table = Range {
            start: 0,
            end: ENTRIES_MAX as u64 * 16,
        }
    });
    assert!(matches!(error, CatalogError::Unreadable(_)), "{error}");
}

#[test]
fn tables_at_the_end_of_the_address_space() {
    let world = World::simple(0, 1);
    world.memory.map(u64::MAX - 4095, 4096);
    let start = u64::MAX - 31;
    let error = refused(&world, |kernel| {
        kernel.directory = Directory {
            keys: start,
            key_count: 2,
            key_size: 32,
            names: start,
            names_size: 4096,
        };
    });
    assert!(matches!(error, CatalogError::Unreadable(_)), "{error}");
    // Two records end at the end of the address space, so the third would wrap to address 0.
    world.memory.map(0, 4096);
    let error = refused(&world, |kernel| {
        kernel.directory = Directory {
            keys: u64::MAX - 63,
            key_count: 3,
            ..kernel.directory
        }
    });
    assert!(matches!(error, CatalogError::Unreadable(_)), "{error}");
}

#[test]
fn records_may_be_larger_and_not_smaller() {
    for key_size in [0, 1, 31, 65, u32::MAX] {
        let error = refused(&World::simple(0, 1), |kernel| {
            kernel.directory.key_size = key_size
        });
        assert_eq!(error, CatalogError::RecordSize { bytes: key_size });
    }
    // The records of a later guest may have additional fields at the end.
    let world = World::simple(0, 1);
    let mut kernel = world.kernel();
    let records = kernel.directory.keys;
    let first = world.memory.peek::<32>(records);
    world.memory.map(records, 4096);
    for (index, key) in [(0, world.key(0).0), (1, world.key(0).0 + 0x100)] {
        let record = records + 40 * index;
        world.memory.poke(record, &first);
        world.memory.poke_u64(record, key);
        world.memory.poke_u64(record + 32, u64::MAX);
    }
    kernel.directory.key_size = 40;
    kernel.directory.key_count = 2;
    let catalog = Catalog::new(&world.memory, &kernel).expect("larger records");
    let keys: Vec<u64> = catalog.keys().map(|key| key.id.0).collect();
    assert_eq!(keys, [world.key(0).0, world.key(0).0 + 0x100]);
}

#[test]
fn unsorted_tables() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(
        EntryFormat::Absolute64,
        0,
        vec![key.clone(), key],
        vec![SiteSpec::of(0), SiteSpec::of(1)],
    );
    let table = world.kernel().jump_table.start;
    world.memory.poke_u64(table + 16, world.key(1).0 + 16);
    assert_eq!(
        refused(&world, |_| {}),
        CatalogError::NotSorted { table, index: 1 }
    );
}

#[test]
fn records_that_make_no_sense() {
    let broken = |at: u64, bytes: &[u8]| {
        let world = World::simple(0, 1);
        world.memory.poke(world.kernel().directory.keys + at, bytes);
        refused(&world, |_| {})
    };
    assert!(
        matches!(
            broken(0, &2_u64.to_le_bytes()),
            CatalogError::KeyAddress { .. }
        ),
        "misaligned"
    );
    assert!(
        matches!(
            broken(0, &(u64::MAX - 7).to_le_bytes()),
            CatalogError::KeyAddress { .. }
        ),
        "wraps"
    );
    assert!(matches!(
        broken(8, &17_u32.to_le_bytes()),
        CatalogError::NameOutside { .. }
    ));
    assert!(matches!(
        broken(8, &u32::MAX.to_le_bytes()),
        CatalogError::NameOutside { .. }
    ));
    assert!(matches!(
        broken(12, &3_u32.to_le_bytes()),
        CatalogError::UnknownClass { class: 3, .. }
    ));
    for tracepoint in [0, 0xffff_ffff_8200_0000, u64::MAX] {
        let mut bytes = 2_u32.to_le_bytes().to_vec();
        bytes.extend_from_slice(&u64::to_le_bytes(tracepoint));
        assert!(
            matches!(
                broken(12, &bytes),
                CatalogError::NotTheTracepointsKey { .. }
            ),
            "{tracepoint:#x}"
        );
    }
}

#[test]
fn the_same_key_twice() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(EntryFormat::Relative, 1, vec![key.clone(), key], Vec::new());
    let mut catalog = Catalog::new(&world.memory, &world.kernel()).expect("kernel");
    let stolen = Module {
        directory: world.kernel().directory,
        ..world.module_image(0)
    };
    for record in 0..2 {
        // Makes the record say that the module itself defines the key.
        let defined_by = stolen.directory.keys + record * RECORD_SIZE + 24;
        world.memory.poke_u64(defined_by, stolen.id);
    }
    let error = catalog
        .add_module(&world.memory, &stolen)
        .expect_err("a key of the kernel");
    assert!(matches!(error, CatalogError::KeyTwice { .. }), "{error}");
    assert_eq!(
        (catalog.key_count(), catalog.modules().count()),
        (2, 0),
        "nothing of it is kept"
    );

    world
        .memory
        .poke_u64(world.kernel().directory.keys + RECORD_SIZE, world.key(0).0);
    assert!(matches!(
        refused(&world, |_| {}),
        CatalogError::KeyTwice { .. }
    ));
}

/// Keys that alpha defines but does not branch on, so that only beta lists them.
fn lent(keys: usize) -> (World, Module<'static>, Module<'static>) {
    let key = KeySpec {
        home: Home::Module(0),
        class: Class::Guarded,
        initially: false,
        count: 0,
    };
    let sites = (0..keys).map(|key| SiteSpec {
        home: Home::Module(1),
        ..SiteSpec::of(key)
    });
    let world = World::new(EntryFormat::Relative, 2, vec![key; keys], sites.collect());
    let (mut alpha, mut beta) = (world.module_image(0), world.module_image(1));
    beta.directory = std::mem::take(&mut alpha.directory);
    (world, alpha, beta)
}

#[test]
fn a_key_that_only_another_module_uses_belongs_to_the_one_that_defines_it() {
    let (world, alpha, beta) = lent(1);
    let mut catalog = Catalog::new(&world.memory, &world.kernel()).expect("kernel");
    let add = |catalog: &mut Catalog, module| {
        let homes = catalog.add_module(&world.memory, module).expect("fits");
        homes.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(add(&mut catalog, &alpha).is_empty());
    assert_eq!(catalog.key_count(), 0);
    assert_eq!(add(&mut catalog, &beta), ["alpha"]);
    let key = catalog.find("alpha:key0").expect("listed by beta");
    assert_eq!((key.id, key.module()), (world.key(0), "alpha"));
    assert_eq!(catalog.site_count(world.key(0)), 1);
    let options = Options {
        allow_guarded: true,
    };
    let flip = [update(world.key(0), Op::Inc)];
    let planned = Plan::new(&catalog, &world.memory, &flip, &options).expect("can be flipped");
    assert_eq!(planned.site_count(), 1);

    // The key stays registered, and may be on, when no module uses it.
    catalog.remove_module(beta.id);
    assert!(catalog.find("alpha:key0").is_some());
    assert_eq!(catalog.site_count(world.key(0)), 0);
    assert!(add(&mut catalog, &beta).is_empty(), "known already");
    catalog.remove_module(beta.id);
    catalog.remove_module(alpha.id);
    assert_eq!(catalog.key_count(), 0);

    // The defining module is not registered, so its key is not registered either.
    assert!(add(&mut catalog, &beta).is_empty());
    assert_eq!(catalog.key_count(), 0);
}

#[test]
fn a_key_that_comes_late_takes_no_name() {
    let (world, mut alpha, beta) = lent(2);
    let records = beta.directory.keys;
    // alpha lists only the first key. The record of the second key has the name of the first.
    alpha.directory = Directory {
        key_count: 1,
        ..beta.directory
    };
    world.memory.poke_u32(records + RECORD_SIZE + 8, 0);
    let mut catalog = Catalog::new(&world.memory, &world.kernel()).expect("kernel");
    for module in [&alpha, &beta] {
        catalog.add_module(&world.memory, module).expect("fits");
    }
    let found = |name: &str| catalog.find(name).map(|key| key.id);
    assert_eq!(found("alpha:key0"), Some(world.key(0)));
    let late = world.key(1);
    assert_eq!(found(&format!("alpha:key0#{:#x}", late.0)), Some(late));
}

#[test]
fn names_cannot_harm_a_terminal_or_pose_as_others() {
    let name = |bytes: &[u8]| {
        let world = World::simple(0, 1);
        world.memory.poke(world.kernel().directory.names, bytes);
        let catalog = world.catalog();
        catalog
            .key(world.key(0))
            .expect("listed")
            .full_name
            .to_string()
    };
    assert_eq!(name(b"\x1b[2Jx\xff\n y\0"), "?[2Jx???y");
    assert_eq!(name(b"alpha:key#1\0"), "alpha?key?1");
    assert_eq!(name(b"\0"), format!("{}", World::simple(0, 1).key(0)));

    let world = World::simple(0, 1);
    world
        .memory
        .poke(world.kernel().directory.names, &[b'n'; 1000]);
    let error = refused(&world, |kernel| kernel.directory.names_size = 1000);
    assert!(
        matches!(error, CatalogError::NameUnending { .. }),
        "{error}"
    );
}

#[test]
fn names_that_occur_twice_are_numbered_by_address() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(EntryFormat::Relative, 0, vec![key; 3], Vec::new());
    // Records 0 and 2 share a name.
    world
        .memory
        .poke_u32(world.kernel().directory.keys + 2 * RECORD_SIZE + 8, 0);
    let catalog = world.catalog();
    assert_eq!(catalog.find("key0#1").map(|key| key.id), Some(world.key(0)));
    assert_eq!(catalog.find("key0#2").map(|key| key.id), Some(world.key(2)));
    assert_eq!(catalog.find("key1").map(|key| key.id), Some(world.key(1)));
    assert!(catalog.find("key0").is_none());
    let names: Vec<&str> = catalog.keys().map(|key| &*key.full_name).collect();
    assert_eq!(names, ["key0#1", "key0#2", "key1"]);

    // The list that is made from the catalog gives the same keys.
    let listed = catalog.listed_keys(0).expect("the kernel is an image");
    let mut kernel = world.kernel();
    assert_eq!(
        (listed.count, u64::from(listed.record_size)),
        (3, RECORD_SIZE)
    );
    kernel.directory.names_size = u32::try_from(listed.names.len()).expect("short");
    world.memory.poke(kernel.directory.keys, &listed.records);
    world.memory.poke(kernel.directory.names, &listed.names);
    let again = Catalog::new(&world.memory, &kernel).expect("a kernel");
    let keys = |catalog: &Catalog| catalog.keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&again), keys(&catalog));
    assert!(catalog.listed_keys(1).is_none());
}

#[test]
fn kernels_without_gates_are_refused() {
    let world = World::simple(0, 1);
    for (what, kind) in [
        ("system_state", GateKind::SystemState),
        ("jump_label_mutex", GateKind::JumpLabelMutex),
        ("text_mutex", GateKind::TextMutex),
    ] {
        let missing = CatalogError::GateMissing { what };
        let mut gates = world.listed_gates();
        // The gate is listed, but concerns other changes.
        for gate in gates.iter_mut().filter(|gate| gate.kind == kind) {
            gate.concerns = Concerns::TRACEPOINT;
        }
        let take = |gates: &[ListedGate]| {
            let gates = Gates::new(gates, &[]).expect("gates");
            refused(&world, |kernel| kernel.gates = gates.clone())
        };
        assert_eq!(take(&gates), missing);
        gates.retain(|gate| gate.kind != kind);
        assert_eq!(take(&gates), missing);
    }
}

#[test]
fn modules_without_end_or_address() {
    let world = World::simple(0, 1);
    let mut catalog = world.catalog();
    let empty = |id, name| Module {
        id,
        name,
        jump_table: Range::default(),
        text: Range::default(),
        ro_after_init: Range::default(),
        directory: Directory::default(),
    };
    assert!(matches!(
        catalog.add_module(&world.memory, &empty(0, b"x")),
        Err(CatalogError::ModuleAddress { .. })
    ));
    for id in 1..=MODULES_MAX as u64 {
        catalog
            .add_module(&world.memory, &empty(id, b""))
            .expect("room");
    }
    assert_eq!(
        catalog.add_module(&world.memory, &empty(u64::MAX, b"")),
        Err(CatalogError::TooManyModules)
    );
    catalog.remove_module(7);
    catalog
        .add_module(&world.memory, &empty(u64::MAX, b"last"))
        .expect("room again");
    catalog.remove_module(8);
    for again in [empty(u64::MAX, b"other"), empty(8, b"last\0junk")] {
        assert!(matches!(
            catalog.add_module(&world.memory, &again),
            Err(CatalogError::ModuleTwice { .. })
        ));
    }
}

#[test]
fn module_tables_share_one_limit() {
    let world = World::simple(0, 1);
    let mut catalog = world.catalog();
    let module = Module {
        id: 1,
        name: b"m",
        jump_table: Range {
            start: 0,
            end: ENTRIES_MAX as u64 * 16,
        },
        text: Range::default(),
        ro_after_init: Range::default(),
        directory: Directory::default(),
    };
    let error = catalog.add_module(&world.memory, &module);
    assert_eq!(
        error,
        Err(CatalogError::TooManyEntries {
            count: ENTRIES_MAX as u64
        }),
        "one is taken by the kernel"
    );
}

#[test]
fn keys_in_text_are_refused_whichever_came_first() {
    let key = KeySpec {
        home: Home::Module(0),
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(EntryFormat::Relative, 1, vec![key], vec![]);
    let address = world.key(0).0;
    let around = |start, end| Range { start, end };
    for (text, in_text) in [
        (around(address, address + 1), true),
        (around(address + 3, address + 4), true),
        (around(0, u64::MAX), true),
        (around(address + 4, address + 100), false),
        (around(0, address), false),
        (around(address + 1, address + 1), false),
    ] {
        let expected = match in_text {
            true => Err(CatalogError::KeyInText { address }),
            false => Ok(()),
        };
        let module = world.module_image(0);
        // The three catalogs in turn give `text` to the key's own module, to the kernel, and to a
        // module that is added later.
        let mut catalog = Catalog::new(&world.memory, &world.kernel()).expect("no keys");
        let own = catalog.add_module(&world.memory, &Module { text, ..module });
        assert_eq!(own.map(drop), expected, "{text:x?}");
        let kernel = Kernel {
            text,
            ..world.kernel()
        };
        let mut catalog = Catalog::new(&world.memory, &kernel).expect("no keys");
        assert_eq!(
            catalog.add_module(&world.memory, &module).map(drop),
            expected
        );
        let mut catalog = world.catalog();
        let later = Module {
            id: 1,
            name: b"later",
            jump_table: Range::default(),
            text,
            ro_after_init: Range::default(),
            directory: Directory::default(),
        };
        assert_eq!(
            catalog.add_module(&world.memory, &later).map(drop),
            expected
        );
    }
}

/// The records of many keys may refer to the same bytes, but the memory for the copied names is
/// bounded.
#[test]
fn names_over_each_other() {
    const COUNT: u32 = 40_000;
    let world = World::simple(0, 1);
    let mut kernel = world.kernel();
    for index in 0..COUNT {
        let record = kernel.directory.keys + u64::from(index) * RECORD_SIZE;
        world
            .memory
            .poke_u64(record, world.key(0).0 + u64::from(index) * 16);
        world.memory.map(record + 8, 24);
    }
    world.memory.poke(kernel.directory.names, &[b'n'; 500]);
    kernel.directory.key_count = COUNT;
    kernel.directory.names_size = 501;
    let result = Catalog::new(&world.memory, &kernel);
    assert!(
        matches!(result, Err(CatalogError::NamesTooLong { .. })),
        "{:?}",
        result.map(|catalog| catalog.key_count())
    );
}
