// SPDX-License-Identifier: Apache-2.0
//! Checks the refcount table row by row: for `apply`, and for a whole flip on a guest.

mod common;

use common::world::{Home, KeySpec, SiteSpec, World, update};
use static_keys::Op::{Dec, Disable, Enable, Inc};
use static_keys::{Busy, Class, EntryFormat, Op, PlanError, Refusal, apply, count_users};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Busy,
    Warn,
    /// The new count, without a change of the sites.
    Count(i32),
    /// The new count, with a change of the sites.
    Patch(i32),
}

use Cell::{Count, Patch, Warn};

const N: i32 = 5;
const MAX: i32 = i32::MAX;

/// The behaviour of kernel/jump_label.c. The same table is in the documentation of `refcount`.
#[rustfmt::skip]
const TABLE: [(Op, [(i32, Cell); 6]); 4] = [
    (Inc,     [(-1, Cell::Busy), (0, Patch(1)), (1, Count(2)), (2, Count(3)), (N, Count(N + 1)), (MAX, Warn)]),
    (Dec,     [(-1, Cell::Busy), (0, Warn),     (1, Patch(0)), (2, Count(1)), (N, Count(N - 1)), (MAX, Count(MAX - 1))]),
    (Enable,  [(-1, Cell::Busy), (0, Patch(1)), (1, Count(1)), (2, Warn),     (N, Warn),         (MAX, Warn)]),
    (Disable, [(-1, Cell::Busy), (0, Count(0)), (1, Patch(0)), (2, Warn),     (N, Warn),         (MAX, Warn)]),
];

#[test]
fn apply_follows_the_table() {
    for (op, row) in TABLE {
        for (count, cell) in row {
            let expected = match cell {
                Cell::Busy => Err(Refusal::Busy),
                Warn => Err(Refusal::WouldWarn { op, count }),
                Count(after) | Patch(after) => Ok(after),
            };
            assert_eq!(apply(count, op), expected, "{op} at {count}");
        }
    }
}

#[test]
fn a_flip_follows_the_table() {
    for (op, row) in TABLE {
        for (count, cell) in row {
            let world = World::simple(count, 3);
            let before = world.memory.snapshot();
            let planned = world.plan(&[update(world.key(0), op)]);
            match cell {
                Cell::Busy => {
                    assert!(
                        matches!(planned, Err(PlanError::Busy(Busy::FirstReference { .. }))),
                        "{op} at {count}"
                    );
                }
                Warn => assert!(
                    matches!(planned, Err(PlanError::WouldWarn { .. })),
                    "{op} at {count}"
                ),
                Count(after) => {
                    let plan = planned.expect("not refused");
                    assert!(!plan.needs_pause(), "{op} at {count}");
                    plan.commit_running(&world.memory).expect("committed");
                    assert!(
                        world.memory.snapshot() == world.with_counts(&[after]).memory.snapshot(),
                        "{op} at {count}"
                    );
                    continue;
                }
                Patch(after) => {
                    let plan = planned.expect("not refused");
                    assert!(plan.needs_pause(), "{op} at {count}");
                    plan.verify(&world.memory, &[]).expect("verified");
                    assert_eq!(plan.commit(&world.memory).expect("committed").sites, 3);
                    assert!(
                        world.memory.snapshot() == world.with_counts(&[after]).memory.snapshot(),
                        "{op} at {count}"
                    );
                    continue;
                }
            }
            assert!(
                world.memory.snapshot() == before,
                "{op} at {count} was refused, and changed something"
            );
        }
    }
}

#[test]
fn counts_that_no_kernel_writes_are_refused() {
    for op in [Inc, Dec, Enable, Disable] {
        for count in [-2, i32::MIN] {
            assert_eq!(apply(count, op), Err(Refusal::WouldWarn { op, count }));
        }
    }
}

#[test]
fn users_as_the_guest_reads_them() {
    for (enabled, users) in [(-1, 1), (0, 0), (1, 1), (N, N), (MAX, MAX), (i32::MIN, 1)] {
        assert_eq!(count_users(enabled), users);
    }
}

/// `static_key_disable()` at a count of 2 warns and leaves the key on. Therefore a second reference
/// is never taken from outside, and a reference taken from outside can always be dropped.
#[test]
fn a_guarded_key_is_counted_by_the_guest_alone() {
    let at = |count| {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Guarded,
            initially: false,
            count,
        };
        World::new(EntryFormat::Relative, 0, vec![key], vec![SiteSpec::of(0)])
    };
    for (count, ops, after) in [
        (0, &[Inc][..], Some(1)),
        (0, &[Inc, Inc], None),
        (0, &[Inc, Inc, Dec], None),
        (0, &[Enable, Enable], Some(1)),
        (1, &[Inc], None),
        (1, &[Disable], Some(0)),
        (2, &[Inc], None),
        // The guest took a reference while one from outside was held.
        (2, &[Dec], Some(1)),
    ] {
        let world = at(count);
        let updates: Vec<_> = ops.iter().map(|&op| update(world.key(0), op)).collect();
        let planned = world.plan(&updates);
        match after {
            Some(after) => {
                let plan = planned.expect("possible");
                assert_eq!(plan.changes().first().expect("one key").after, after);
            }
            None => assert!(
                matches!(planned, Err(PlanError::Boolean { .. })),
                "{ops:?} at {count}"
            ),
        }
    }
}

#[test]
fn operations_on_one_key_fold_in_order() {
    let world = World::simple(0, 2);
    let key = world.key(0);
    let ops = |ops: &[Op]| ops.iter().map(|&op| update(key, op)).collect::<Vec<_>>();

    let plan = world
        .plan(&ops(&[Inc, Inc, Dec, Inc]))
        .expect("possible in this order");
    let change = plan.changes().first().expect("one key");
    assert_eq!((change.before, change.after, change.sites), (0, 2, 2));
    assert_eq!(plan.changes().len(), 1);

    let plan = world.plan(&ops(&[Enable, Disable])).expect("possible");
    assert!(!plan.needs_pause(), "nothing changes in the end");
    assert_eq!(plan.site_count(), 0);

    assert!(
        matches!(
            world.plan(&ops(&[Dec, Inc])),
            Err(PlanError::WouldWarn { .. })
        ),
        "not in this order"
    );
    assert!(matches!(
        world.plan(&ops(&[Inc, Inc, Enable])),
        Err(PlanError::WouldWarn { .. })
    ));
}
