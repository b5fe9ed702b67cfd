// SPDX-License-Identifier: Apache-2.0
//! Injects a fault at every write. Either the whole transaction is made, or every byte has its
//! previous value.

mod common;

use common::memory::Fault;
use common::world::{Home, KeySpec, SiteSpec, World, update};
use static_keys::{
    Busy, Class, EntryFormat, GuestMemory, Op, RunningError, Size, Undo, Update, VerifyError,
};

/// Three keys, of which two are switched on and one off, and a key of which only the count changes,
/// with sites of both sizes across page ends and in one module.
fn world() -> World {
    let key = |home, count| KeySpec {
        home,
        class: Class::Ref,
        initially: false,
        count,
    };
    let keys = vec![
        key(Home::Kernel, 0),
        key(Home::Kernel, 1),
        key(Home::Module(0), 0),
        key(Home::Kernel, 3),
    ];
    let mut sites = Vec::new();
    for number in 0..9_u16 {
        for (key, spec) in keys.iter().enumerate().take(3) {
            sites.push(SiteSpec {
                home: if number % 3 == 0 {
                    Home::Module(0)
                } else {
                    spec.home
                },
                size: if number % 2 == 0 {
                    Size::Two
                } else {
                    Size::Five
                },
                likely: number % 4 == 1,
                gap: 4087 + number,
                displacement: 64,
                ..SiteSpec::of(key)
            });
        }
    }
    World::new(EntryFormat::Relative, 1, keys, sites)
}

fn updates(world: &World) -> Vec<Update> {
    let ops = [Op::Inc, Op::Dec, Op::Enable, Op::Inc];
    ops.into_iter()
        .enumerate()
        .map(|(key, op)| update(world.key(key), op))
        .collect()
}

#[test]
fn a_fault_at_any_write_leaves_everything_as_it_was() {
    let world = world();
    let before = world.memory.snapshot();
    let plan = world.plan(&updates(&world)).expect("planned");
    let writes = plan.site_count() + plan.changes().len();
    assert_eq!(writes, 27 + 4);
    let strides = [0, 1, 2, writes];
    let faults = [Fault::Refused, Fault::Torn, Fault::Lost];
    let cases =
        strides.map(|stride| faults.map(|fault| [false, true].map(|late| (stride, fault, late))));
    for (stride, fault, late) in cases.concat().concat() {
        world.memory.set_stride(stride);
        world.memory.set_reads_back_late(late);
        for position in 0..writes {
            plan.verify(&world.memory, &[]).expect("as it was");
            world.memory.inject(position, position + 1, fault);
            let error = plan.commit(&world.memory).expect_err("a write went wrong");
            world.memory.heal();
            assert_eq!(
                error.undo,
                Undo::Complete,
                "{fault:?} at {position}, stride {stride}: {error}"
            );
            assert!(
                world.memory.snapshot() == before,
                "{fault:?} at write {position} left something, stride {stride}"
            );
        }
    }
    plan.commit(&world.memory).expect("no fault");
    assert!(world.memory.snapshot() == world.with_counts(&[1, 0, 1, 4]).memory.snapshot());
}

#[test]
fn a_changed_word_is_found_wherever_it_is() {
    let world = world();
    let plan = world.plan(&updates(&world)).expect("planned");
    let writes: Vec<_> = plan.writes().collect();
    for stride in [0, 1, 2, writes.len()] {
        world.memory.set_stride(stride);
        for write in &writes {
            let mut changed = write.before;
            let bytes = &mut changed[..write.length];
            *bytes.last_mut().expect("a byte") ^= 0x40;
            let put = |bytes: &[u8]| world.memory.write(write.place, bytes).expect("mapped");
            put(bytes);
            let refusal = plan.verify(&world.memory, &[]).expect_err("a changed word");
            match refusal {
                VerifyError::ForeignBytes { found, length, .. } => {
                    assert_eq!(found[..length], *bytes, "stride {stride}");
                }
                VerifyError::Busy(Busy::Count { found, .. }) => {
                    assert_eq!(found.to_le_bytes(), *bytes, "stride {stride}");
                }
                other => panic!("stride {stride}: {other:?}"),
            }
            put(&write.before[..write.length]);
            plan.verify(&world.memory, &[]).expect("as it was");
        }
    }
}

#[test]
fn an_undo_that_fails_says_so_and_undoes_the_rest() {
    let world = world();
    let before = world.memory.snapshot();
    let plan = world.plan(&updates(&world)).expect("planned");
    // Writes 0..10 succeed. Write 10 fails, and so do the undo of 10 (write 11) and of 9 (write
    // 12).
    world.memory.inject(10, 13, Fault::Refused);
    let error = plan.commit(&world.memory).expect_err("a write went wrong");
    world.memory.heal();
    assert_eq!(error.undo, Undo::Incomplete { left: 2 });
    assert!(error.to_string().contains("inconsistent"), "{error}");
    let differing = world
        .memory
        .snapshot()
        .values()
        .zip(before.values())
        .flat_map(|(now, then)| {
            now.iter()
                .zip(then.iter())
                .filter(|(now, then)| now != then)
                .map(|_| ())
                .collect::<Vec<_>>()
        })
        .count();
    // Only site 9 differs, because write 10 was refused.
    assert!((1..=5).contains(&differing), "{differing} bytes differ");
}

#[test]
fn the_error_names_key_address_and_bytes() {
    let world = World::simple(0, 1);
    let plan = world
        .plan(&[update(world.key(0), Op::Enable)])
        .expect("planned");
    world.memory.inject(0, 1, Fault::Lost);
    let text = plan.commit(&world.memory).expect_err("lost").to_string();
    for part in [
        "key0",
        &format!("{:#x}", world.site(0)),
        "0f 1f 44 00 00",
        "e9 00 01 00 00",
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Keys at count 2 and a transaction that increments each.
fn counting(keys: usize) -> (World, Vec<Update>) {
    let key = KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count: 2,
    };
    let world = World::new(
        EntryFormat::Relative,
        0,
        vec![key; keys],
        vec![SiteSpec::of(0)],
    );
    let updates = (0..keys)
        .map(|key| update(world.key(key), Op::Inc))
        .collect();
    (world, updates)
}

#[test]
fn a_lost_race_at_any_key_gives_back_the_others() {
    for loser in 0..4 {
        let (world, updates) = counting(4);
        let plan = world.plan(&updates).expect("planned");
        assert!(!plan.needs_pause());
        let address = world.key(loser).0;
        world.memory.interfere(Box::new(move |memory, exchange| {
            if exchange == loser {
                memory.poke_u32(address, 7);
            }
        }));
        let error = plan
            .commit_running(&world.memory)
            .expect_err("the guest was faster");
        let raced = VerifyError::Busy(Busy::Count {
            key: format!("key{loser}").into(),
            expected: 2,
            found: 7,
        });
        assert_eq!(error, RunningError::Raced(raced));
        let mut counts = [2; 4];
        counts[loser] = 7;
        assert!(
            world.memory.snapshot() == world.with_counts(&counts).memory.snapshot(),
            "race at key {loser}"
        );
    }
}

#[test]
fn what_the_guest_counted_meanwhile_is_kept() {
    let (world, updates) = counting(2);
    let plan = world.plan(&updates).expect("planned");
    let (first, second) = (world.key(0).0, world.key(1).0);
    world.memory.interfere(Box::new(move |memory, exchange| {
        // Key 0 went from 2 to 3. The guest now takes five more references to key 0, and changes
        // key 1 before the commit does.
        if exchange == 1 {
            memory.poke_u32(first, 8);
            memory.poke_u32(second, 9);
        }
    }));
    plan.commit_running(&world.memory)
        .expect_err("the guest was faster");
    assert!(world.memory.snapshot() == world.with_counts(&[7, 9]).memory.snapshot());
}

#[test]
fn a_reference_is_not_given_back_across_zero() {
    let (world, updates) = counting(2);
    let plan = world.plan(&updates).expect("planned");
    let (first, second) = (world.key(0).0, world.key(1).0);
    world.memory.interfere(Box::new(move |memory, exchange| {
        if exchange == 1 {
            memory.poke_u32(first, 1);
            memory.poke_u32(second, 9);
        }
    }));
    let error = plan
        .commit_running(&world.memory)
        .expect_err("the guest was faster");
    assert_eq!(
        error,
        RunningError::Entangled {
            key: "key1".into(),
            left: vec![update(world.key(0), Op::Dec)],
        }
    );
    assert_eq!(
        world.memory.peek(first),
        1_u32.to_le_bytes(),
        "its sites are those of a key that is on"
    );
}

/// A count of −1 means that a change by the guest is in progress. The guest then overwrites the
/// count.
#[test]
fn a_negative_count_is_left_to_the_guest() {
    let (world, _) = counting(2);
    let world = world.with_counts(&[4, 2]);
    let (first, second) = (world.key(0), world.key(1));
    let updates = [
        update(first, Op::Dec),
        update(first, Op::Dec),
        update(second, Op::Inc),
    ];
    let plan = world.plan(&updates).expect("planned");
    world.memory.interfere(Box::new(move |memory, exchange| {
        // Key 0 went from 4 to 2. The guest drops both references and is taking the first one
        // again.
        if exchange == 1 {
            memory.poke_u32(first.0, u32::MAX);
            memory.poke_u32(second.0, 9);
        }
    }));
    let error = plan
        .commit_running(&world.memory)
        .expect_err("the guest was faster");
    assert_eq!(
        error,
        RunningError::Entangled {
            key: "key1".into(),
            left: vec![update(first, Op::Inc), update(first, Op::Inc)],
        }
    );
    assert_eq!(world.memory.peek(first.0), u32::MAX.to_le_bytes());
}

#[test]
fn a_plan_that_needs_a_pause_is_not_made_without() {
    let world = World::simple(0, 1);
    let plan = world
        .plan(&[update(world.key(0), Op::Inc)])
        .expect("planned");
    let before = world.memory.snapshot();
    assert!(plan.commit_running(&world.memory).is_err());
    assert!(world.memory.snapshot() == before);
}

#[test]
fn memory_that_is_gone_is_a_fault_and_no_panic() {
    let world = World::simple(0, 1);
    let plan = world
        .plan(&[update(world.key(0), Op::Inc)])
        .expect("planned");
    world.memory.unmap(world.site(0));
    assert!(matches!(
        plan.verify(&world.memory, &[]),
        Err(VerifyError::Fault(_))
    ));
    assert!(world.memory.locate(world.site(0), 5).is_err());
}
