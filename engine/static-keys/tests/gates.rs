// SPDX-License-Identifier: Apache-2.0
//! Closes each gate, before the plan and between plan and verify. The result is busy and nothing is
//! written.

mod common;

use common::world::{Home, KeySpec, SiteSpec, TASK, TRACEPOINT_FUNCS, World, update};
use static_keys::{
    Busy, Class, EntryFormat, Gate, GateKind, Gates, Op, Options, Plan, PlanError, Range, Size,
    Update, VerifyError,
};

/// Key 0 is the kernel's and has sites in the kernel and both modules. Key 1 is module 0's. Key 2
/// is a tracepoint. Keys 3 (kernel) and 4 (module 1) have no sites.
fn world() -> World {
    let key = |home, class, count| KeySpec {
        home,
        class,
        initially: true,
        count,
    };
    let keys = vec![
        key(Home::Kernel, Class::Ref, 0),
        key(Home::Module(0), Class::Ref, 0),
        key(Home::Kernel, Class::Tracepoint, 0),
        key(Home::Kernel, Class::Guarded, 2),
        key(Home::Module(1), Class::Ref, 2),
    ];
    let mut sites: Vec<SiteSpec> = [Home::Kernel, Home::Module(0), Home::Module(1)]
        .into_iter()
        .map(|home| SiteSpec {
            home,
            ..SiteSpec::of(0)
        })
        .collect();
    sites.push(SiteSpec {
        home: Home::Module(0),
        ..SiteSpec::of(1)
    });
    sites.push(SiteSpec::of(2));
    World::new(EntryFormat::Relative, 2, keys, sites)
}

fn one(world: &World, key: usize, op: Op) -> Vec<Update> {
    vec![update(world.key(key), op)]
}

/// Closes a gate before and after planning, and returns the gate that was found closed.
fn closed(key: usize, op: Op, close: impl Fn(&World)) -> Gate {
    let world = world();
    let plan = world.plan(&one(&world, key, op)).expect("open at first");
    close(&world);
    let before = world.memory.snapshot();
    let verified = if plan.needs_pause() {
        plan.verify(&world.memory, &[])
    } else {
        match plan.commit_running(&world.memory) {
            Err(static_keys::RunningError::Raced(error)) => Err(error),
            other => panic!("not raced: {other:?}"),
        }
    };
    let Err(VerifyError::Busy(Busy::Gate { gate, .. })) = verified else {
        panic!("not busy: {verified:?}")
    };
    assert!(
        matches!(world.plan(&one(&world, key, op)), Err(PlanError::Busy(_))),
        "planned with {gate} closed"
    );
    assert!(world.memory.snapshot() == before);
    gate
}

#[test]
fn every_gate_closes() {
    let module = |module: &str| Gate::ModuleState {
        module: module.into(),
    };
    let kernel = |key, op, kind, value| {
        let gate = closed(key, op, |w| w.memory.poke_u32(w.word(kind), value));
        let Gate::Kernel(gate) = gate else {
            panic!("{kind:?}: {gate}")
        };
        assert_eq!((gate.kind, &*gate.name, gate.cpu), (kind, "a_word", None));
    };
    kernel(0, Op::Inc, GateKind::SystemState, 4);
    kernel(3, Op::Dec, GateKind::SystemState, 2);
    kernel(0, Op::Inc, GateKind::JumpLabelMutex, 0x1000);
    kernel(0, Op::Inc, GateKind::TextMutex, 0x1001);
    kernel(0, Op::Inc, GateKind::TextPokeQueue, 1);
    kernel(0, Op::Inc, GateKind::TextPoke, 1);
    kernel(2, Op::Inc, GateKind::TracepointsMutex, 8);
    assert_eq!(
        closed(0, Op::Inc, |w| w.memory.poke_u32(w.module_state(0), 1)),
        module("alpha")
    );
    assert_eq!(
        closed(0, Op::Inc, |w| w.memory.poke_u32(w.module_state(1), 2)),
        module("beta")
    );
    assert_eq!(
        closed(1, Op::Inc, |w| w.memory.poke_u32(w.module_state(0), 2)),
        module("alpha")
    );
    assert_eq!(
        closed(4, Op::Inc, |w| w.memory.poke_u32(w.module_state(1), 2)),
        module("beta")
    );
}

#[test]
fn mutex_flags_are_not_an_owner() {
    let world = world();
    for word in [
        world.word(GateKind::JumpLabelMutex),
        world.word(GateKind::TextMutex),
    ] {
        world.memory.poke_u64(word, 7);
    }
    world
        .plan(&one(&world, 0, Op::Inc))
        .expect("free")
        .verify(&world.memory, &[])
        .expect("free");
}

#[test]
fn locks_do_not_matter_where_they_protect_nothing() {
    let world = world();
    world
        .memory
        .poke_u64(world.word(GateKind::TracepointsMutex), TASK);
    world
        .plan(&one(&world, 0, Op::Inc))
        .expect("no tracepoint")
        .verify(&world.memory, &[])
        .expect("no tracepoint");
    world
        .memory
        .poke_u64(world.word(GateKind::JumpLabelMutex), TASK);
    let plan = world.plan(&one(&world, 3, Op::Dec)).expect("only counts");
    plan.commit_running(&world.memory).expect("only counts");
}

#[test]
fn a_change_of_the_words_behind_a_key_is_noticed() {
    for (address, what) in [
        (world().key_type(0), Gate::KeyType { key: "key0".into() }),
        (world().node(0, 0), Gate::KeyChain { key: "key0".into() }),
        (
            world().node(0, 0) + 8,
            Gate::KeyChain { key: "key0".into() },
        ),
        (
            world().node(0, 2) + 16,
            Gate::KeyChain { key: "key0".into() },
        ),
    ] {
        let world = world();
        let plan = world.plan(&one(&world, 0, Op::Inc)).expect("planned");
        world.memory.poke_u64(
            address,
            u64::from_le_bytes(world.memory.peek(address)) ^ 0x10,
        );
        let verified = plan.verify(&world.memory, &[]);
        assert!(
            matches!(&verified, Err(VerifyError::Busy(Busy::Gate { gate, .. })) if *gate == what),
            "{verified:?}"
        );
    }
}

#[test]
fn a_count_that_has_moved_is_noticed() {
    let world = world();
    let plan = world.plan(&one(&world, 0, Op::Inc)).expect("planned");
    world.memory.poke_u32(world.key(0).0, u32::MAX);
    let moved = Busy::Count {
        key: "key0".into(),
        expected: 0,
        found: -1,
    };
    assert_eq!(
        plan.verify(&world.memory, &[]),
        Err(VerifyError::Busy(moved))
    );
}

#[test]
fn no_vcpu_may_stand_inside_a_site() {
    for size in [Size::Two, Size::Five] {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Ref,
            initially: false,
            count: 0,
        };
        let spec = SiteSpec {
            size,
            displacement: 20,
            ..SiteSpec::of(0)
        };
        let world = World::new(
            EntryFormat::Relative,
            0,
            vec![key],
            vec![spec.clone(), spec],
        );
        let plan = world.plan(&one(&world, 0, Op::Inc)).expect("planned");
        for site in [0, 1].map(|site| world.site(site)) {
            let end = site + size.bytes() as u64;
            for rip in site - 1..=end + 1 {
                let inside = site < rip && rip < end;
                let verified = plan.verify(&world.memory, &[0, rip, u64::MAX]);
                let expected = if inside {
                    Err(VerifyError::Busy(Busy::InsideSite { rip, site }))
                } else {
                    Ok(())
                };
                assert_eq!(verified, expected, "{size:?} at {site:#x}, rip {rip:#x}");
            }
        }
    }
}

#[test]
fn foreign_bytes_are_told_apart_from_a_busy_guest() {
    let foreign: [(&str, [u8; 5]); 4] = [
        ("int3", [0xcc, 0x1f, 0x44, 0x00, 0x00]),
        ("a call", [0xe8, 0x00, 0x01, 0x00, 0x00]),
        ("a jump elsewhere", [0xe9, 0x00, 0x02, 0x00, 0x00]),
        (
            "the jump, but the key is off",
            [0xe9, 0x00, 0x01, 0x00, 0x00],
        ),
    ];
    for (what, bytes) in foreign {
        for before_the_plan in [true, false] {
            let world = World::simple(0, 3);
            let poke = || world.memory.poke(world.site(1), &bytes);
            if before_the_plan {
                poke();
            }
            let plan = world
                .plan(&one(&world, 0, Op::Inc))
                .expect("only a stopped guest can tell");
            poke();
            // While the guest is busy, foreign bytes are not reported.
            let mutex = world.word(GateKind::TextMutex);
            world.memory.poke_u64(mutex, TASK);
            assert!(
                matches!(plan.verify(&world.memory, &[]), Err(VerifyError::Busy(_))),
                "{what}"
            );
            world.memory.poke_u64(mutex, 0);
            match plan.verify(&world.memory, &[]) {
                Err(VerifyError::ForeignBytes {
                    key,
                    site,
                    length,
                    expected,
                    found,
                }) => {
                    assert_eq!((&*key, site, length), ("key0", world.site(1), 5), "{what}");
                    assert_eq!(
                        (expected, found),
                        ([0x0f, 0x1f, 0x44, 0x00, 0x00], bytes),
                        "{what}"
                    );
                }
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_site_caught_in_the_middle_of_a_change_is_busy() {
    let world = World::simple(0, 1);
    world.memory.poke(world.site(0), &[0xcc]);
    let plan = world.plan(&one(&world, 0, Op::Inc)).expect("planned");
    world.memory.poke(world.site(0), &[0x0f]);
    let changing = Busy::SiteChanging {
        key: "key0".into(),
        site: world.site(0),
    };
    assert_eq!(
        plan.verify(&world.memory, &[]),
        Err(VerifyError::Busy(changing))
    );
}

#[test]
fn tracepoints_are_booleans_with_probes() {
    let refused = |world: &World, op| match world.plan(&one(world, 2, op)) {
        Err(PlanError::Tracepoint { why, .. }) => why,
        other => panic!("{op}: {:?}", other.map(|plan| plan.site_count())),
    };
    let fired = || {
        let world = world();
        world.with_counts(&[0, 0, 1, 2])
    };
    // A tracepoint's count never exceeds 1.
    assert!(refused(&fired(), Op::Inc).contains("not a count"));
    assert!(refused(&world().with_counts(&[0, 0, 2, 2]), Op::Dec).contains("not a count"));
    // Without a probe a tracepoint cannot be enabled, but it can be disabled.
    for (world, op, possible) in [(world(), Op::Enable, false), (fired(), Op::Disable, true)] {
        world
            .memory
            .poke_u64(world.tracepoint(2) + u64::from(TRACEPOINT_FUNCS), 0);
        assert_eq!(world.plan(&one(&world, 2, op)).is_ok(), possible, "{op}");
    }
    // The kernel calls regfunc and unregfunc when it switches a tracepoint. A flip would skip these
    // calls.
    for (world, op) in [(world(), Op::Enable), (fired(), Op::Disable)] {
        world.set_regfunc(2);
        assert!(refused(&world, op).contains("functions"), "{op}");
    }
    // The probes must not change before the commit, in either direction.
    for (world, op) in [(world(), Op::Enable), (fired(), Op::Disable)] {
        let plan = world.plan(&one(&world, 2, op)).expect("planned");
        let funcs = world.tracepoint(2) + u64::from(TRACEPOINT_FUNCS);
        world.memory.poke_u64(funcs, 0x1000);
        let verified = plan.verify(&world.memory, &[]);
        let noticed = matches!(
            &verified,
            Err(VerifyError::Busy(Busy::Gate {
                gate: Gate::TracepointProbes { .. },
                ..
            }))
        );
        assert!(noticed, "{op}: {verified:?}");
    }
}

/// Probes are distinguished by the address of their array, and by the functions and data in it.
#[test]
fn probes_are_told_apart_by_address_and_contents() {
    let world = world();
    let catalog = world.catalog();
    let funcs = world.tracepoint(2) + u64::from(TRACEPOINT_FUNCS);
    // An address above everything in the world.
    let arrays = world.base() + 0x2e00_0000;
    let set = |at: u64, probes: &[(u64, u64)]| {
        for (index, &(func, data)) in (0..).zip(probes) {
            for (offset, word) in [(0, func), (8, data), (16, 10)] {
                world.memory.poke_u64(at + 24 * index + offset, word);
            }
        }
        let end = at + 24 * probes.len() as u64;
        (end..end + 24)
            .step_by(8)
            .for_each(|word| world.memory.poke_u64(word, 0));
        world.memory.poke_u64(funcs, at);
        let probes = catalog.probes(&world.memory, world.key(2));
        probes.expect("readable").expect("a tracepoint")
    };
    let one = set(arrays, &[(0x1000, 1)]);
    assert_eq!(one, set(arrays, &[(0x1000, 1)]));
    for (at, probes) in [
        (arrays, &[(0x1000, 2)][..]),
        (arrays, &[(0x2000, 1)]),
        (arrays, &[(0x1000, 1), (0x2000, 1)]),
        (arrays, &[]),
        (arrays + 0x200, &[(0x1000, 1)]),
    ] {
        assert_ne!(one, set(at, probes), "{at:#x} {probes:?}");
    }
    set(arrays, &[(0x1000, 1), (0x2000, 1)]);
    let functions = |key| catalog.probe_functions(&world.memory, world.key(key));
    assert_eq!(functions(2), Ok(vec![0x1000, 0x2000]));
    assert_eq!(functions(0), Ok(vec![]));
    world.memory.poke_u64(funcs, 0);
    assert_eq!(functions(2), Ok(vec![]));
    assert!(catalog.probes(&world.memory, world.key(2)).is_ok());
    world.memory.poke_u64(funcs, u64::MAX - 7);
    assert!(functions(2).is_err());
    assert!(catalog.probes(&world.memory, world.key(2)).is_err());
    assert_eq!(catalog.probes(&world.memory, world.key(0)), Ok(None));
}

#[test]
fn a_tracepoint_needs_its_mutex_and_a_pause() {
    let world = world();
    let mut kernel = world.kernel();
    let mut gates = world.listed_gates();
    gates.retain(|gate| gate.kind != GateKind::TracepointsMutex);
    kernel.gates = Gates::new(&gates, &[]).expect("gates");
    let catalog = static_keys::Catalog::new(&world.memory, &kernel).expect("kernel");
    let planned = Plan::new(
        &catalog,
        &world.memory,
        &one(&world, 2, Op::Enable),
        &Options::default(),
    );
    assert!(matches!(planned, Err(PlanError::Tracepoint { .. })));

    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Tracepoint,
        initially: false,
        count: 0,
    };
    let world = World::new(EntryFormat::None, 0, vec![key], Vec::new());
    assert!(
        world
            .plan(&one(&world, 0, Op::Enable))
            .expect("planned")
            .needs_pause()
    );
}

#[test]
fn guarded_keys_need_permission() {
    let world = world();
    let plan = |allow_guarded| {
        Plan::new(
            &world.catalog(),
            &world.memory,
            &one(&world, 3, Op::Dec),
            &Options { allow_guarded },
        )
        .map(|_| ())
    };
    assert_eq!(plan(false), Err(PlanError::Guarded { key: "key3".into() }));
    assert_eq!(plan(true), Ok(()));
}

#[test]
fn sealed_keys_are_refused() {
    // Since 6.11, the `type` word of a sealed key has the linked bit and no pointer.
    for type_word in [2, 3] {
        let world = World::simple(0, 1);
        world.memory.poke_u64(world.key_type(0), type_word);
        assert!(matches!(
            world.plan(&one(&world, 0, Op::Inc)),
            Err(PlanError::Sealed { .. })
        ));
        let state = &world.catalog().site_states(&world.memory, world.key(0))[0];
        assert_eq!(state.patchable, Err(static_keys::NotPatchable::Sealed));
    }
    // Before 6.11, only its address shows that a key is sealed. A change that writes only the count
    // is refused too.
    for count in [0, 5] {
        let world = World::simple(count, 1);
        let mut kernel = world.kernel();
        kernel.ro_after_init = Range {
            start: world.key(0).0,
            end: world.key(0).0 + 16,
        };
        let catalog = static_keys::Catalog::new(&world.memory, &kernel).expect("kernel");
        let planned = Plan::new(
            &catalog,
            &world.memory,
            &one(&world, 0, Op::Inc),
            &Options::default(),
        );
        assert!(matches!(planned, Err(PlanError::Sealed { .. })));
    }
    // The same holds for a key in a module.
    let mut world = World::simple(0, 1);
    world.keys[0].home = Home::Module(0);
    world.sites[0].home = Home::Module(0);
    let world = World::new(world.format, 1, world.keys, world.sites);
    let mut module = world.module_image(0);
    module.ro_after_init = Range {
        start: world.key(0).0,
        end: world.key(0).0 + 16,
    };
    let mut catalog = static_keys::Catalog::new(&world.memory, &world.kernel()).expect("kernel");
    catalog.add_module(&world.memory, &module).expect("fits");
    let inc = one(&world, 0, Op::Inc);
    let planned = Plan::new(&catalog, &world.memory, &inc, &Options::default());
    assert!(matches!(planned, Err(PlanError::Sealed { .. })));
}

#[test]
fn init_sites_are_left_alone() {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 0,
    };
    let sites = vec![
        SiteSpec::of(0),
        SiteSpec {
            init: true,
            ..SiteSpec::of(0)
        },
    ];
    let world = World::new(EntryFormat::Relative, 0, vec![key], sites);
    // Init text is freed and reused.
    world.memory.poke(world.site(1), b"data!");
    let plan = world.plan(&one(&world, 0, Op::Inc)).expect("planned");
    assert_eq!(plan.site_count(), 1);
    plan.verify(&world.memory, &[]).expect("verified");
    plan.commit(&world.memory).expect("committed");
    assert_eq!(&world.memory.peek(world.site(1)), b"data!");
}

#[test]
fn modules_come_and_go() {
    let world = world();
    let mut catalog = world.catalog();
    let plan = |catalog: &static_keys::Catalog, key| {
        Plan::new(
            catalog,
            &world.memory,
            &one(&world, key, Op::Inc),
            &Options::default(),
        )
        .map(|plan| plan.site_count())
    };
    assert_eq!(plan(&catalog, 0), Ok(3));
    assert_eq!(
        catalog
            .find("alpha:key1")
            .map(|key| (key.id, key.module(), key.name())),
        Some((world.key(1), "alpha", "key1"))
    );

    assert!(catalog.remove_module(world.module(Home::Module(0))));
    assert!(
        !catalog.remove_module(world.module(Home::Module(0))),
        "once"
    );
    assert!(!catalog.remove_module(0), "the kernel is no module");
    assert!(catalog.find("alpha:key1").is_none());
    assert_eq!(catalog.key_count(), 4);
    assert_eq!(
        plan(&catalog, 1),
        Err(PlanError::UnknownKey { key: world.key(1) })
    );
    // The guest's chain still names the module.
    let unknown = Busy::UnknownModule {
        key: "key0".into(),
        module: world.module(Home::Module(0)),
    };
    assert_eq!(plan(&catalog, 0), Err(PlanError::Busy(unknown)));

    catalog
        .add_module(&world.memory, &world.module_image(0))
        .expect("again");
    assert_eq!(plan(&catalog, 0), Ok(3));
    // The module is registered, but the chain no longer names it.
    world.memory.poke_u64(world.node(0, 0), world.node(0, 2));
    assert!(matches!(
        plan(&catalog, 0),
        Err(PlanError::Busy(Busy::Users { .. }))
    ));
}

#[test]
fn a_module_that_has_gone_leaves_nothing_behind() {
    let world = world();
    let mut catalog = static_keys::Catalog::new(&world.memory, &world.kernel()).expect("kernel");
    // The iteration order of maps may differ, but not the length of the output.
    let size = |catalog: &static_keys::Catalog| format!("{catalog:?}").len();
    let before = size(&catalog);
    for _ in 0..3 {
        for index in 0..2 {
            catalog
                .add_module(&world.memory, &world.module_image(index))
                .expect("module");
        }
        assert!(size(&catalog) > before);
        for index in [0, 1] {
            assert!(catalog.remove_module(world.module(Home::Module(index))));
        }
        assert_eq!(size(&catalog), before);
    }
}
