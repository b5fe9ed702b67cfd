// SPDX-License-Identifier: Apache-2.0
//! Registrations that lie or ask too much: refused whole, before memory is taken for them.

mod common;

use common::world::{KeySpec, Owner, SiteSpec, World};
use static_keys::{
    Catalog, CatalogError, Class, Directory, ENTRIES_MAX, EntryFormat, KEYS_MAX, Kernel,
    MODULES_MAX, Module, Range,
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
    // The largest that is allowed, but not there.
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
            names: start,
            names_size: 4096,
        };
    });
    assert!(matches!(error, CatalogError::Unreadable(_)), "{error}");
    // Whole, but the second of its last bytes would be at address 0.
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
fn unsorted_tables() {
    let key = KeySpec {
        owner: Owner::Kernel,
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
        owner: Owner::Kernel,
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
        .poke_u64(world.kernel().directory.keys + 24, world.key(0).0);
    assert!(matches!(
        refused(&world, |_| {}),
        CatalogError::KeyTwice { .. }
    ));
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
        owner: Owner::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(EntryFormat::Relative, 0, vec![key; 3], Vec::new());
    // Records 0 and 2 share a name.
    world
        .memory
        .poke_u32(world.kernel().directory.keys + 2 * 24 + 8, 0);
    let catalog = world.catalog();
    assert_eq!(catalog.find("key0#1").map(|key| key.id), Some(world.key(0)));
    assert_eq!(catalog.find("key0#2").map(|key| key.id), Some(world.key(2)));
    assert_eq!(catalog.find("key1").map(|key| key.id), Some(world.key(1)));
    assert!(catalog.find("key0").is_none());
    let names: Vec<&str> = catalog.keys().map(|key| &*key.full_name).collect();
    assert_eq!(names, ["key0#1", "key0#2", "key1"]);
}

#[test]
fn kernels_without_gates_are_refused() {
    let world = World::simple(0, 1);
    for (what, take) in [
        (
            "system_state",
            (|kernel| kernel.gates.system_state = 0) as fn(&mut Kernel),
        ),
        ("jump_label_mutex", |kernel| {
            kernel.gates.jump_label_mutex_owner = 0
        }),
        ("text_mutex", |kernel| kernel.gates.text_mutex_owner = 0),
        ("mutex owner mask", |kernel| {
            kernel.gates.mutex_owner_mask = 0
        }),
    ] {
        assert_eq!(refused(&world, take), CatalogError::GateMissing { what });
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
