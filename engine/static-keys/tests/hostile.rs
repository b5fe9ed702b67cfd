// SPDX-License-Identifier: Apache-2.0
//! Guests that register invalid tables or change them later. Each invalid table is detected in
//! bounded time, without a panic and without a write outside a legal site.

mod common;

use common::world::{Home, KeySpec, RECORD_SIZE, SiteSpec, World, update};
use proptest::prelude::*;
use proptest::sample::select;
use static_keys::{
    Busy, Catalog, Class, EntryFormat, GateKind, Kernel, KeyId, Op, Options, Plan, PlanError,
    Range, Size,
};

fn plan_inc(world: &World) -> Result<usize, PlanError> {
    world
        .plan(&[update(world.key(0), Op::Inc)])
        .map(|plan| plan.site_count())
}

#[test]
fn sites_outside_text() {
    for text in [
        Range::default(),
        Range {
            start: 0,
            end: 0x1000,
        },
        Range {
            start: u64::MAX,
            end: 0,
        },
        Range {
            start: World::simple(0, 1).site(0) + 1,
            end: World::simple(0, 1).site(0) + 0x100,
        },
        Range {
            start: 0,
            end: World::simple(0, 1).site(0) + 1,
        },
    ] {
        let world = World::simple(0, 1);
        let kernel = Kernel {
            text,
            ..world.kernel()
        };
        let catalog = Catalog::new(&world.memory, &kernel).expect("only the sites are bad");
        let planned = Plan::new(
            &catalog,
            &world.memory,
            &[update(world.key(0), Op::Inc)],
            &Options::default(),
        );
        assert!(
            matches!(planned, Err(PlanError::SiteOutsideText { .. })),
            "{text:x?}"
        );
    }
    // The text ends in the middle of a five-byte site, so the site's size is unknown.
    let world = World::simple(0, 1);
    let kernel = Kernel {
        text: Range {
            start: 0,
            end: world.site(0) + 4,
        },
        ..world.kernel()
    };
    let catalog = Catalog::new(&world.memory, &kernel).expect("only the site is bad");
    let plan = Plan::new(
        &catalog,
        &world.memory,
        &[update(world.key(0), Op::Inc)],
        &Options::default(),
    )
    .expect("a suspect");
    assert_eq!(plan.site_count(), 0);
    assert!(plan.verify(&world.memory, &[]).is_err());
}

#[test]
fn sites_in_the_last_bytes_of_the_address_space() {
    for (back, bytes) in [
        (0, &[0x66][..]),
        (1, &[0x66, 0x90]),
        (3, &[0x0f, 0x1f, 0x44, 0x00]),
        (4, &[0x0f, 0x1f, 0x44, 0, 0]),
    ] {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Ref,
            initially: false,
            count: 0,
        };
        let world = World::new(EntryFormat::Absolute64, 0, vec![key], vec![SiteSpec::of(0)]);
        let site = u64::MAX - back;
        world.memory.poke(site, bytes);
        world.memory.poke_u64(world.kernel().jump_table.start, site);
        let kernel = Kernel {
            text: Range {
                start: u64::MAX - 15,
                end: u64::MAX,
            },
            ..world.kernel()
        };
        let catalog = Catalog::new(&world.memory, &kernel).expect("registered");
        let plan = Plan::new(
            &catalog,
            &world.memory,
            &[update(world.key(0), Op::Inc)],
            &Options::default(),
        );
        match plan {
            Err(_) => {}
            Ok(plan) => assert!(plan.verify(&world.memory, &[u64::MAX]).is_err(), "{back}"),
        }
    }
}

#[test]
fn targets_that_no_jump_reaches() {
    for (size, target) in [
        (Size::Five, 0),
        (Size::Five, u64::MAX),
        (Size::Two, 0xffff_ffff_8200_0000),
    ] {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Ref,
            initially: false,
            count: 0,
        };
        let world = World::new(
            EntryFormat::Absolute64,
            0,
            vec![key],
            vec![SiteSpec {
                size,
                ..SiteSpec::of(0)
            }],
        );
        world
            .memory
            .poke_u64(world.kernel().jump_table.start + 8, target);
        // u64::MAX is within 2 GiB of kernel text.
        match plan_inc(&world) {
            Err(PlanError::OutOfReach { .. }) => assert_ne!(target, u64::MAX),
            other => assert!(
                other.is_ok() && target == u64::MAX,
                "{target:#x}: {other:?}"
            ),
        }
    }
}

#[test]
fn overlapping_sites() {
    for distance in 0..=5 {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Ref,
            initially: false,
            count: 0,
        };
        let world = World::new(
            EntryFormat::Absolute64,
            0,
            vec![key],
            vec![SiteSpec::of(0), SiteSpec::of(0)],
        );
        let other = world.site(0) + distance;
        world.memory.poke(world.site(0), &[0x0f, 0x1f, 0x44, 0, 0]);
        if distance >= 5 {
            world.memory.poke(other, &[0x0f, 0x1f, 0x44, 0, 0]);
        }
        let table = world.kernel().jump_table.start;
        world.memory.poke_u64(table + 24, other);
        world.memory.poke_u64(table + 24 + 8, other + 0x100);
        let planned = world.plan(&[update(world.key(0), Op::Inc)]);
        match distance {
            // The same site twice.
            0 => assert!(matches!(planned, Err(PlanError::Overlap { .. }))),
            5 => assert_eq!(planned.expect("neighbours").site_count(), 2),
            _ => assert!(
                planned.is_err()
                    || planned.is_ok_and(|plan| plan.verify(&world.memory, &[]).is_err())
            ),
        }
    }
    // A two-byte NOP inside a five-byte JMP: two bytes of the displacement are 66 90.
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 1,
    };
    let world = World::new(
        EntryFormat::Absolute64,
        0,
        vec![key],
        vec![SiteSpec::of(0), SiteSpec::of(0)],
    );
    let site = world.site(0);
    let displacement = 0x0090_6600_i64;
    let mut jump = vec![0xe9];
    jump.extend_from_slice(&(displacement as i32).to_le_bytes());
    world.memory.poke(site, &jump);
    let table = world.kernel().jump_table.start;
    world
        .memory
        .poke_u64(table + 8, site + 5 + displacement as u64);
    world.memory.poke_u64(table + 24, site + 2);
    world.memory.poke_u64(table + 32, site + 4);
    let planned = world.plan(&[update(world.key(0), Op::Dec)]);
    assert!(
        matches!(planned, Err(PlanError::Overlap { .. })),
        "{:?}",
        planned.map(|plan| plan.site_count())
    );
}

/// A key with users in the kernel and two modules.
fn chained() -> World {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let sites = [Home::Kernel, Home::Module(0), Home::Module(1)];
    let sites = sites
        .into_iter()
        .map(|home| SiteSpec {
            home,
            ..SiteSpec::of(0)
        })
        .collect();
    World::new(EntryFormat::Relative, 2, vec![key], sites)
}

#[test]
fn chains_that_lie() {
    let users = |change: fn(&World)| {
        let world = chained();
        assert_eq!(plan_inc(&world), Ok(3));
        change(&world);
        let before = world.memory.locates();
        let planned = plan_inc(&world);
        assert!(
            matches!(
                planned,
                Err(PlanError::Busy(
                    Busy::Users { .. } | Busy::UnknownModule { .. }
                ))
            ),
            "{planned:?}"
        );
        assert!(world.memory.locates() - before < 1000, "bounded");
    };
    users(|w| w.memory.poke_u64(w.node(0, 0), w.node(0, 0)));
    users(|w| w.memory.poke_u64(w.node(0, 2), w.node(0, 0)));
    users(|w| w.memory.poke_u64(w.node(0, 1), 0));
    users(|w| w.memory.poke_u64(w.node(0, 1), !7));
    users(|w| w.memory.poke_u64(w.node(0, 1), 0x10));
    users(|w| w.memory.poke_u64(w.node(0, 0) + 8, 0));
    users(|w| w.memory.poke_u64(w.node(0, 0) + 8, 0xffff_ffff_8300_0008));
    users(|w| w.memory.poke_u64(w.node(0, 0) + 16, 0xdead_0000));
    users(|w| w.memory.poke_u64(w.node(0, 0) + 16, 0));
    users(|w| w.memory.poke_u64(w.key_type(0), 0));
    users(|w| {
        w.memory
            .poke_u64(w.key_type(0), w.kernel().jump_table.start)
    });
    users(|w| w.memory.poke_u64(w.key_type(0), u64::MAX));
    // The right number of modules, but one occurs twice and one is missing.
    users(|w| {
        for word in [8, 16] {
            let first = w.memory.peek::<8>(w.node(0, 0) + word);
            w.memory.poke(w.node(0, 1) + word, &first);
        }
    });
    // A ring of nodes without entries.
    users(|w| {
        w.memory.poke_u64(w.node(0, 0) + 8, 0);
        w.memory.poke_u64(w.node(0, 0), w.node(0, 0));
    });
}

#[test]
fn an_unlinked_key_names_its_own_run() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let world = World::new(
        EntryFormat::Relative,
        0,
        vec![key.clone(), key],
        vec![SiteSpec::of(0), SiteSpec::of(0), SiteSpec::of(1)],
    );
    let table = world.kernel().jump_table.start;
    assert_eq!(plan_inc(&world), Ok(2));
    // The second entry of the key, the other key's entry, NULL, and the address after the last
    // entry.
    for entries in [table + 16, table + 32, 0, table + 48] {
        world.memory.poke_u64(world.key_type(0), entries);
        assert!(
            matches!(plan_inc(&world), Err(PlanError::Busy(Busy::Users { .. }))),
            "{entries:#x}"
        );
    }
}

#[test]
fn a_key_does_not_begin_in_the_run_of_an_earlier_one() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let sites = [0, 1, 1, 1, 1, 1].map(SiteSpec::of);
    let world = World::new(
        EntryFormat::Relative,
        0,
        vec![key.clone(), key],
        sites.into(),
    );
    let planned = || {
        let plan = world.plan(&[update(world.key(1), Op::Inc)]);
        plan.map(|plan| plan.site_count())
    };
    assert_eq!(planned(), Ok(5));
    // A search from this entry on would find the second key's entries after it.
    let table = world.kernel().jump_table.start;
    world.memory.poke_u64(world.key_type(1), table);
    assert!(matches!(
        planned(),
        Err(PlanError::Busy(Busy::Users { .. }))
    ));
}

#[test]
fn tables_rewritten_after_registration_change_nothing() {
    let world = World::simple(0, 2);
    let catalog = world.catalog();
    let Range { start, end } = world.kernel().jump_table;
    world
        .memory
        .poke(start, &vec![0xff; (end - start) as usize]);
    let plan = Plan::new(
        &catalog,
        &world.memory,
        &[update(world.key(0), Op::Inc)],
        &Options::default(),
    )
    .expect("planned");
    plan.verify(&world.memory, &[]).expect("verified");
    plan.commit(&world.memory).expect("committed");
    for site in 0..2 {
        assert_eq!(
            world.memory.peek::<5>(world.site(site)),
            *world.instruction(site, 1).as_bytes()
        );
    }
}

#[test]
fn keys_and_words_that_are_not_mapped() {
    let world = World::simple(0, 1);
    let catalog = world.catalog();
    let plan = |key| {
        Plan::new(
            &catalog,
            &world.memory,
            &[update(key, Op::Inc)],
            &Options::default(),
        )
        .map(|_| ())
    };
    assert_eq!(plan(KeyId(4)), Err(PlanError::UnknownKey { key: KeyId(4) }));
    world.memory.unmap(world.site(0));
    assert!(matches!(
        plan(world.key(0)),
        Err(PlanError::Unreadable { what: "a site", .. })
    ));
    world.memory.unmap(world.word(GateKind::SystemState));
    assert!(matches!(
        plan(world.key(0)),
        Err(PlanError::Unreadable { .. })
    ));
    world.memory.unmap(world.key(0).0);
    assert!(matches!(
        plan(world.key(0)),
        Err(PlanError::Unreadable {
            what: "a key's count",
            ..
        })
    ));
    assert!(catalog.enabled(&world.memory, world.key(0)).is_err());
    assert_eq!(catalog.site_states(&world.memory, world.key(0)).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random damage to everything that the guest owns, at registration and after it. There is no
    /// panic, and only whole sites within text and counts of keys are written.
    #[test]
    fn any_damage_is_survived(
        damage in prop::collection::vec((0_usize..6, any::<prop::sample::Index>(), any::<u8>()), 0..12),
        late in prop::collection::vec((0_usize..6, any::<prop::sample::Index>(), any::<u8>()), 0..12),
        op in select(&[Op::Inc, Op::Enable, Op::Dec][..]),
    ) {
        let world = chained();
        let kernel = world.kernel();
        let hit = |hits: &[(usize, prop::sample::Index, u8)]| {
            for (where_, index, byte) in hits {
                let (start, len) = match where_ {
                    0 => (kernel.jump_table.start, 16),
                    1 => (kernel.directory.keys, RECORD_SIZE as usize),
                    2 => (kernel.directory.names, 16),
                    3 => (world.key(0).0, 16),
                    4 => (world.node(0, 0), 96),
                    _ => (world.word(GateKind::SystemState), 48),
                };
                world.memory.poke(start + index.index(len) as u64, &[*byte]);
            }
        };
        hit(&damage);
        let Ok(mut catalog) = Catalog::new(&world.memory, &kernel) else { return Ok(()) };
        for module in 0..2 {
            let _ = catalog.add_module(&world.memory, &world.module_image(module));
        }
        let keys: Vec<KeyId> = catalog.keys().map(|key| key.id).collect();
        let updates: Vec<_> = keys.iter().map(|key| update(*key, op)).collect();
        let planned = Plan::new(&catalog, &world.memory, &updates, &Options { allow_guarded: true });
        for key in &keys {
            let _ = catalog.site_states(&world.memory, *key);
        }
        let Ok(plan) = planned else { return Ok(()) };
        hit(&late);
        if plan.verify(&world.memory, &[]).is_err() {
            return Ok(());
        }
        let before = world.memory.snapshot();
        prop_assert!(plan.commit(&world.memory).is_ok());
        let after = world.memory.snapshot();
        let legal = |address: u64| {
            keys.iter().any(|key| (key.0..key.0 + 4).contains(&address))
                || [Home::Kernel, Home::Module(0), Home::Module(1)].iter().any(|home| world.text(*home).contains(address, 1))
        };
        for ((page, old), new) in before.iter().zip(after.values()) {
            for (offset, _) in old.iter().zip(new.iter()).enumerate().filter(|(_, (old, new))| old != new) {
                prop_assert!(legal(page * 4096 + offset as u64));
            }
        }
    }
}
