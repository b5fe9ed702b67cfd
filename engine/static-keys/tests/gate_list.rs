// SPDX-License-Identifier: Apache-2.0
//! The list of gates: invalid lists, the changes for which a gate is checked, and per-CPU words.

mod common;

use common::world::{Home, KeySpec, SiteSpec, World, update};
use static_keys::{
    Busy, CPUS_MAX, Catalog, Class, Concerns, EntryFormat, GATE_WORDS_MAX, GATES_MAX, Gate,
    GateError, GateKind, Gates, KernelGate, ListedGate, Op, Options, Plan, PlanError, VerifyError,
};

/// Key 0: ref. Key 1: guarded. Key 2: a tracepoint. Key 3: ref, of a module. Key 4: ref, with a
/// site in the module. Key 5: ref, on with 2 references.
fn world() -> World {
    let key = |home, class, count| KeySpec {
        home,
        class,
        initially: false,
        count,
    };
    let module = Home::Module(0);
    let keys = vec![
        key(Home::Kernel, Class::Ref, 0),
        key(Home::Kernel, Class::Guarded, 0),
        key(Home::Kernel, Class::Tracepoint, 0),
        key(module, Class::Ref, 0),
        key(Home::Kernel, Class::Ref, 0),
        key(Home::Kernel, Class::Ref, 2),
    ];
    let mut sites: Vec<SiteSpec> = (0..6).map(SiteSpec::of).collect();
    sites[3].home = module;
    sites[4].home = module;
    World::new(EntryFormat::Relative, 1, keys, sites)
}

const OTHER: GateKind = GateKind::Other(77);

fn catalog(world: &World, gates: Gates) -> Catalog {
    let mut kernel = world.kernel();
    kernel.gates = gates;
    let mut catalog = Catalog::new(&world.memory, &kernel).expect("kernel");
    catalog
        .add_module(&world.memory, &world.module_image(0))
        .expect("module");
    catalog
}

fn plan(
    world: &World,
    catalog: &Catalog,
    key: usize,
    op: Op,
) -> Result<Plan<common::memory::Place>, PlanError> {
    let options = Options {
        allow_guarded: true,
    };
    Plan::new(
        catalog,
        &world.memory,
        &[update(world.key(key), op)],
        &options,
    )
}

fn closed_gate(planned: Result<Plan<common::memory::Place>, PlanError>) -> KernelGate {
    match planned.map(|_| ()) {
        Err(PlanError::Busy(Busy::Gate {
            gate: Gate::Kernel(gate),
            ..
        })) => gate,
        other => panic!("not busy: {other:?}"),
    }
}

#[test]
fn a_gate_is_looked_at_for_what_it_concerns() {
    let inc = |key| (key, Op::Inc);
    let all = [inc(0), inc(1), inc(2), inc(3), inc(4), inc(5)];
    for (concerns, keys) in [
        (Concerns::COUNTS, &[0, 1, 2, 3, 4, 5][..]),
        (Concerns::SITES, &[0, 1, 2, 3, 4]),
        (Concerns::GUARDED, &[1]),
        (Concerns::REF, &[0, 3, 4]),
        (Concerns::TRACEPOINT, &[2]),
        (Concerns::MODULES, &[3, 4]),
        (Concerns::GUARDED.union(Concerns::TRACEPOINT), &[1, 2]),
    ] {
        let world = world();
        let mut listed = world.listed_gates();
        listed.push(world.gate(OTHER, concerns));
        let catalog = catalog(&world, Gates::new(&listed, &[]).expect("gates"));
        world.memory.poke_u64(world.word(OTHER), 0x1000);
        for (key, op) in all {
            let planned = plan(&world, &catalog, key, op);
            let concerned = keys.contains(&key);
            assert_eq!(planned.is_err(), concerned, "{concerns:?}, key {key}");
            if concerned {
                assert_eq!(closed_gate(planned).kind, OTHER);
            }
        }
    }
}

/// A rollback after this process has ended waits until the gates are open, so gates that never open
/// again must not be among those that it checks.
#[test]
fn a_record_of_a_plan_leaves_out_gates_that_never_open_again() {
    let world = world();
    let kinds = [OTHER, GateKind::ModuleList];
    let counts = kinds.map(|kind| {
        let mut listed = world.listed_gates();
        listed.push(world.gate(kind, Concerns::COUNTS));
        let catalog = catalog(&world, Gates::new(&listed, &[]).expect("gates"));
        let plan = plan(&world, &catalog, 0, Op::Inc).expect("open");
        world.memory.poke_u64(world.word(kind), 0x1000);
        assert!(plan.verify_running(&world.memory).is_err(), "{kind:?}");
        world.memory.poke_u64(world.word(kind), 0);
        plan.gates().count()
    });
    assert_eq!(counts[0], counts[1] + 1);
}

#[test]
fn words_have_the_width_and_the_bits_that_are_listed() {
    for width in [1_u8, 2, 4, 8] {
        let world = world();
        let mut gate = world.gate(OTHER, Concerns::SITES);
        gate.width = width;
        gate.mask = 0x80 << (8 * (width - 1));
        gate.wanted = gate.mask;
        let mut listed = world.listed_gates();
        listed.push(gate);
        let catalog = catalog(&world, Gates::new(&listed, &[]).expect("gates"));
        let last = world.word(OTHER) + u64::from(width) - 1;
        // All bits are set except the compared one, in the word and next to it.
        world.memory.poke_u64(world.word(OTHER), u64::MAX);
        world.memory.poke(last, &[0x7f]);
        assert_eq!(closed_gate(plan(&world, &catalog, 0, Op::Inc)).kind, OTHER);
        world.memory.poke_u64(world.word(OTHER), 0);
        world.memory.poke(last, &[0x80]);
        let planned = plan(&world, &catalog, 0, Op::Inc).expect("open");
        planned.verify(&world.memory, &[]).expect("open");
        world.memory.poke(last, &[0]);
        assert!(planned.verify(&world.memory, &[]).is_err());
    }
}

#[test]
fn each_cpu_has_its_word() {
    const STRIDE: u64 = 0x10;
    const CPUS: usize = 3;
    let world = world();
    let mut gate = world.gate(GateKind::TextPoke, Concerns::SITES);
    // As for a per-CPU symbol, the listed value is not an address, but its sum with a CPU's offset
    // is one.
    let first = world.base() + 0x2e00_0000;
    world.memory.map(first, 64);
    gate.address = 0x1_8000;
    gate.per_cpu = true;
    let offsets: Vec<u64> = (0..CPUS as u64)
        .map(|cpu| (first + cpu * STRIDE).wrapping_sub(gate.address))
        .collect();
    let mut listed = world.listed_gates();
    listed.push(gate);
    let catalog = catalog(&world, Gates::new(&listed, &offsets).expect("gates"));
    let planned = plan(&world, &catalog, 0, Op::Inc).expect("open");
    planned.verify(&world.memory, &[]).expect("open");
    for cpu in 0..CPUS {
        let word = first + cpu as u64 * STRIDE;
        world.memory.poke_u32(word, 1);
        let found = closed_gate(plan(&world, &catalog, 0, Op::Inc));
        assert_eq!(found.cpu, Some(cpu as u32));
        assert!(
            found.to_string().ends_with(&format!("on CPU {cpu}")),
            "{found}"
        );
        let verified = planned.verify(&world.memory, &[]);
        assert!(
            matches!(&verified, Err(VerifyError::Busy(Busy::Gate { gate: Gate::Kernel(gate), .. }))
                if *gate == found),
            "{verified:?}"
        );
        world.memory.poke_u32(word, 0);
    }
    planned.verify(&world.memory, &[]).expect("open again");
}

#[test]
fn lists_that_cannot_be_right_are_refused() {
    let world = world();
    let sound = world.gate(OTHER, Concerns::SITES);
    let one = |change: &dyn Fn(&mut ListedGate)| {
        let mut gate = sound.clone();
        change(&mut gate);
        Gates::new(&[gate], &[]).map(|_| ())
    };
    assert_eq!(one(&|_| ()), Ok(()));
    for width in [0, 3, 5, 7, 9, 16, u8::MAX] {
        let refused = one(&|gate| gate.width = width);
        assert!(matches!(refused, Err(GateError::Width { .. })), "{width}");
    }
    for (width, offset) in [(2, 1), (4, 2), (8, 4)] {
        let refused = one(&|gate| {
            gate.width = width;
            gate.mask = 1;
            gate.address += offset;
        });
        assert!(
            matches!(refused, Err(GateError::Unaligned { .. })),
            "{width}"
        );
    }
    for (width, mask) in [(1, 0), (1, 0x100), (2, 0x1_0000), (4, 1 << 32), (8, 0)] {
        let refused = one(&|gate| (gate.width, gate.mask) = (width, mask));
        assert!(matches!(refused, Err(GateError::Mask { .. })), "{mask:#x}");
    }
    let refused = one(&|gate| (gate.mask, gate.wanted) = (0xf0, 0x11));
    assert!(matches!(refused, Err(GateError::Wanted { .. })));
    for concerns in [0, Concerns::ALL.0 + 1, u32::MAX] {
        let refused = one(&|gate| gate.concerns = Concerns(concerns));
        assert!(matches!(refused, Err(GateError::Concerns { .. })));
    }
}

#[test]
fn lists_without_end_are_refused() {
    let world = world();
    let sound = world.gate(OTHER, Concerns::SITES);
    let per_cpu = ListedGate {
        per_cpu: true,
        ..sound.clone()
    };
    let new = |gate: &ListedGate, gates, cpus| {
        Gates::new(&vec![gate.clone(); gates], &vec![0; cpus]).map(|_| ())
    };
    assert_eq!(new(&sound, GATES_MAX, CPUS_MAX), Ok(()));
    assert_eq!(
        new(&sound, GATES_MAX + 1, 0),
        Err(GateError::TooMany(GATES_MAX + 1))
    );
    assert_eq!(
        new(&sound, 1, CPUS_MAX + 1),
        Err(GateError::TooManyCpus(CPUS_MAX + 1))
    );
    assert!(matches!(new(&per_cpu, 1, 0), Err(GateError::NoCpus(_))));
    let fits = GATE_WORDS_MAX / CPUS_MAX;
    assert_eq!(new(&per_cpu, fits, CPUS_MAX), Ok(()));
    assert_eq!(
        new(&per_cpu, fits + 1, CPUS_MAX),
        Err(GateError::TooManyWords)
    );
    // An offset of 0 is accepted. An offset of u64::MAX wraps the address, which is then unaligned.
    assert_eq!(new(&per_cpu, 1, 1), Ok(()));
    let odd = Gates::new(&[per_cpu], &[0, u64::MAX]);
    assert!(matches!(odd, Err(GateError::Unaligned { .. })));
}

/// Two gates on one word, and gates that contradict each other, harm only the guest.
#[test]
fn gates_may_overlap_and_contradict_each_other() {
    let world = world();
    let mut listed = world.listed_gates();
    let gate = |mask, wanted| ListedGate {
        mask,
        wanted,
        ..world.gate(OTHER, Concerns::SITES)
    };
    listed.extend([gate(0xf0, 0x10), gate(0x3f, 0x11)]);
    let with = |listed: &[ListedGate]| catalog(&world, Gates::new(listed, &[]).expect("gates"));
    let both = with(&listed);
    for (word, open) in [(0x11, true), (0x10, false), (0x01, false), (0, false)] {
        world.memory.poke_u64(world.word(OTHER), word);
        assert_eq!(plan(&world, &both, 0, Op::Inc).is_ok(), open, "{word:#x}");
    }
    listed.push(gate(0xf0, 0x20));
    let never = with(&listed);
    for word in [0x10, 0x20, 0x30] {
        world.memory.poke_u64(world.word(OTHER), word);
        assert!(plan(&world, &never, 0, Op::Inc).is_err(), "{word:#x}");
    }
}

#[test]
fn a_word_that_is_not_mapped_is_named() {
    let world = world();
    for nowhere in [u64::MAX - 7, 0xffff_8000_0000_0000] {
        let mut listed = world.listed_gates();
        let mut gate = world.gate(OTHER, Concerns::SITES);
        gate.address = nowhere;
        listed.push(gate);
        let catalog = catalog(&world, Gates::new(&listed, &[]).expect("gates"));
        let planned = plan(&world, &catalog, 0, Op::Inc).map(|_| ());
        let address = match planned {
            Err(PlanError::Unreadable { address, .. }) => address,
            other => panic!("{other:?}"),
        };
        assert_eq!(address, nowhere);
    }
}

#[test]
fn kinds_that_are_not_known_are_named_by_name_or_number() {
    let gate = |name: &str, kind, cpu| KernelGate {
        kind,
        name: name.into(),
        cpu,
    };
    for (gate, text) in [
        (
            gate("x_lock", OTHER, None),
            "the guest's gate x_lock is closed",
        ),
        (
            gate("", OTHER, None),
            "the guest's gate of kind 77 is closed",
        ),
        (
            gate("", OTHER, Some(3)),
            "the guest's gate of kind 77 is closed on CPU 3",
        ),
        (
            gate("tp_vec_nr", GateKind::TextPokeQueue, None),
            "text changes are queued (tp_vec_nr)",
        ),
    ] {
        assert_eq!(gate.to_string(), text);
    }
}
