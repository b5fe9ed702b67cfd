// SPDX-License-Identifier: Apache-2.0
//! Repairs keys whose sites an interrupted writer left in the middle of a change.

mod common;

use common::world::World;
use static_keys::{Busy, GateKind, Plan, PlanError, VerifyError};

fn put(world: &World, address: u64, bytes: &[u8]) {
    for (at, byte) in (address..).zip(bytes) {
        world.memory.poke(at, &[*byte]);
    }
}

/// The bytes of site 0 with the key off and on.
fn both(world: &World) -> (Vec<u8>, Vec<u8>) {
    let bytes = |count| world.instruction(0, count).as_bytes().to_vec();
    (bytes(0), bytes(1))
}

#[test]
fn each_torn_site_is_made_what_the_count_says() {
    for count in [0, 1] {
        let world = World::simple(count, 3);
        let whole = world.memory.snapshot();
        let (off, on) = both(&world);
        let catalog = world.catalog();
        let none = Plan::repair(&catalog, &world.memory, world.key(0)).expect("read");
        assert_eq!(none.site_count(), 0, "nothing to repair");
        for mask in 0..1_u32 << off.len() {
            let mixed = off.iter().zip(&on).enumerate();
            let mixed = mixed.map(|(at, (off, on))| if mask >> at & 1 == 0 { *off } else { *on });
            let mixed: Vec<u8> = mixed.collect();
            put(&world, world.site(0), &mixed);
            let plan = Plan::repair(&catalog, &world.memory, world.key(0)).expect("a mixture");
            let right = if count == 0 { &off } else { &on };
            assert_eq!(plan.site_count(), usize::from(mixed != *right));
            assert!(plan.needs_pause());
            let is_whole = mixed == off || mixed == on;
            assert_eq!(plan.needs_rips(), !is_whole, "{mixed:x?}");
            if plan.site_count() > 0 {
                let inside = plan.verify(&world.memory, &[world.site(0) + 1]);
                let busy = matches!(inside, Err(VerifyError::Busy(Busy::InsideSite { .. })));
                assert!(busy, "{inside:?}");
            }
            plan.verify(&world.memory, &[world.site(0)])
                .expect("as planned");
            plan.commit(&world.memory).expect("written");
            assert!(world.memory.snapshot() == whole, "{count} {mixed:x?}");
        }
    }
}

#[test]
fn sites_that_contradict_the_count_follow_it() {
    let world = World::simple(0, 3);
    let whole = world.memory.snapshot();
    let catalog = world.catalog();
    for site in [0, 2] {
        let bytes = world.instruction(site, 1);
        put(&world, world.site(site), bytes.as_bytes());
    }
    let plan = Plan::repair(&catalog, &world.memory, world.key(0)).expect("read");
    assert_eq!(plan.site_count(), 2);
    plan.verify(&world.memory, &[]).expect("as planned");
    plan.commit(&world.memory).expect("written");
    assert!(world.memory.snapshot() == whole);
}

#[test]
fn foreign_bytes_and_a_guest_at_work_are_left_alone() {
    let world = World::simple(0, 2);
    let catalog = world.catalog();
    let repair = || Plan::repair(&catalog, &world.memory, world.key(0));
    let (off, _) = both(&world);
    let mut foreign = off.clone();
    foreign[0] = 0xcc;
    put(&world, world.site(0), &foreign);
    let error = repair().expect_err("somebody else's breakpoint");
    assert!(matches!(error, PlanError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("cc"), "{error}");
    put(&world, world.site(0), world.instruction(0, 1).as_bytes());
    let plan = repair().expect("read");
    // The guest has repaired the site itself.
    put(&world, world.site(0), &off);
    let moved = plan.verify(&world.memory, &[]).expect_err("moved on");
    assert!(matches!(moved, VerifyError::ForeignBytes { .. }), "{moved}");
    world.poke_pointer(world.word(GateKind::TextMutex), 0x1000);
    let error = repair().expect_err("at work");
    assert!(
        matches!(error, PlanError::Busy(Busy::Gate { .. })),
        "{error}"
    );
}
