// SPDX-License-Identifier: Apache-2.0
//! The guest's record of changes.

mod common;

use common::world::{Home, KeySpec, SiteSpec, World, update};
use static_keys::{
    Catalog, CatalogError, Class, EntryFormat, Op, Options, Plan, RECORDS_MAX, RecordRing,
    RecordRingError, Update,
};

const COUNT: u32 = 4;

/// Six keys with a site each, of which the last two are on.
fn world() -> World {
    let key = |index| KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: if index < 4 { 0 } else { 2 },
    };
    let keys = (0..6).map(key).collect();
    let sites = (0..6).map(SiteSpec::of).collect();
    World::new(EntryFormat::Relative, 0, keys, sites)
}

fn ring(world: &World) -> RecordRing {
    // The ring lies above everything else in the world, and its records straddle a page.
    let address = world.base() + 0x2e00_0fe8;
    world.memory.map(address, u64::from(COUNT) * 40);
    RecordRing {
        address,
        count: COUNT,
        size: 40,
    }
}

fn catalog(world: &World, records: RecordRing) -> Result<Catalog, CatalogError> {
    let mut kernel = world.kernel();
    kernel.records = records;
    Catalog::new(&world.memory, &kernel)
}

fn plan(world: &World, catalog: &Catalog, updates: &[Update]) -> Plan<common::memory::Place> {
    let plan = Plan::new(catalog, &world.memory, updates, &Options::default());
    plan.expect("planned")
}

/// Sequence number, key, and counts.
fn record(world: &World, ring: RecordRing, slot: u32) -> (u64, u64, i32, i32) {
    let at = ring.address + u64::from(slot * ring.size);
    let word = |offset| u64::from_le_bytes(world.memory.peek(at + offset));
    let count = |offset| i32::from_le_bytes(world.memory.peek(at + offset));
    (word(0), word(8), count(24), count(28))
}

#[test]
fn each_change_is_recorded_once_it_is_made() {
    let world = world();
    let ring = ring(&world);
    let catalog = catalog(&world, ring).expect("a ring");
    let key = |index| world.key(index).0;
    let off = plan(&world, &catalog, &[update(world.key(0), Op::Inc)]);
    off.verify(&world.memory, &[]).expect("open");
    assert_eq!(record(&world, ring, 0), (0, 0, 0, 0), "only planned");
    off.commit(&world.memory).expect("committed");
    assert_eq!(record(&world, ring, 0), (1, key(0), 0, 1));
    let time = u64::from_le_bytes(world.memory.peek(ring.address + 16));
    assert!(
        time > 1_700_000_000_000_000_000,
        "{time} is no time of today"
    );
    // These operations are committed while the guest runs, and one of them has no effect.
    let running = [
        update(world.key(4), Op::Dec),
        update(world.key(1), Op::Disable),
        update(world.key(5), Op::Inc),
    ];
    let running = plan(&world, &catalog, &running);
    running.commit_running(&world.memory).expect("committed");
    assert_eq!(record(&world, ring, 1), (2, key(4), 2, 1));
    assert_eq!(record(&world, ring, 2), (3, key(5), 2, 3));
    assert_eq!(record(&world, ring, 3), (0, 0, 0, 0));
    // The bytes between records are not changed.
    assert_eq!(world.memory.peek(ring.address + 32), [0; 8]);
}

#[test]
fn of_more_changes_than_the_ring_holds_the_last_are_kept() {
    let world = world();
    let ring = ring(&world);
    let catalog = catalog(&world, ring).expect("a ring");
    let updates: Vec<Update> = (0..6).map(|key| update(world.key(key), Op::Inc)).collect();
    let plan = plan(&world, &catalog, &updates);
    plan.verify(&world.memory, &[]).expect("open");
    plan.commit(&world.memory).expect("committed");
    let numbers = [0, 1, 2, 3].map(|slot| record(&world, ring, slot).0);
    assert_eq!(numbers, [5, 6, 3, 4]);
    assert_eq!(record(&world, ring, 1), (6, world.key(5).0, 2, 3));
}

#[test]
fn an_overtaken_plan_is_recorded_where_it_is_located_again() {
    let world = world();
    let ring = ring(&world);
    let catalog = catalog(&world, ring).expect("a ring");
    let mut early = plan(&world, &catalog, &[update(world.key(4), Op::Inc)]);
    let unlocated = plan(&world, &catalog, &[update(world.key(5), Op::Inc)]);
    let first = plan(&world, &catalog, &[update(world.key(0), Op::Inc)]);
    first.verify(&world.memory, &[]).expect("open");
    first.commit(&world.memory).expect("committed");
    early.locate_records(&world.memory);
    early.commit_running(&world.memory).expect("committed");
    assert_eq!(record(&world, ring, 1), (2, world.key(4).0, 2, 3));
    // No record is written, because it would overwrite that of another change.
    unlocated.commit_running(&world.memory).expect("committed");
    assert_eq!(record(&world, ring, 0).0, 1);
    assert_eq!(record(&world, ring, 2).0, 0);
}

#[test]
fn a_change_that_fails_is_not_recorded() {
    let world = world();
    let ring = ring(&world);
    let catalog = catalog(&world, ring).expect("a ring");
    let running = plan(&world, &catalog, &[update(world.key(4), Op::Dec)]);
    world.memory.poke_u32(world.key(4).0, 7);
    running.commit_running(&world.memory).expect_err("raced");
    assert_eq!(record(&world, ring, 0), (0, 0, 0, 0));
}

#[test]
fn a_ring_that_cannot_be_written_fails_no_change() {
    let world = world();
    let ring = RecordRing {
        address: world.base() + 0x2f00_0000,
        ..ring(&world)
    };
    let catalog = catalog(&world, ring).expect("a ring");
    let plan = plan(&world, &catalog, &[update(world.key(0), Op::Inc)]);
    plan.verify(&world.memory, &[]).expect("open");
    let before = world.memory.snapshot();
    plan.commit(&world.memory).expect("committed");
    assert_ne!(world.memory.snapshot(), before);
}

#[test]
fn rings_that_cannot_be_right_are_refused() {
    let world = world();
    let sound = ring(&world);
    let refused = |ring: RecordRing| match catalog(&world, ring) {
        Err(CatalogError::Records(error)) => error,
        other => panic!("{ring:?}: {other:?}"),
    };
    for size in [0, 8, 31, 36, 72, u32::MAX] {
        let error = refused(RecordRing { size, ..sound });
        assert_eq!(error, RecordRingError::Size(size));
    }
    for count in [RECORDS_MAX + 1, u32::MAX] {
        let error = refused(RecordRing { count, ..sound });
        assert_eq!(error, RecordRingError::TooMany(count));
    }
    for address in [sound.address + 4, u64::MAX - 7, u64::MAX - 159] {
        let error = refused(RecordRing { address, ..sound });
        assert_eq!(error, RecordRingError::Address(address));
    }
    let none = RecordRing {
        address: 3,
        count: 0,
        size: 1,
    };
    catalog(&world, none).expect("no ring at all");
}
