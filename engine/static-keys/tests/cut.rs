// SPDX-License-Identifier: Apache-2.0
//! A monitor that is killed between any two stored bytes leaves whole instructions, including
//! across pages.

mod common;

use std::cell::Cell;
use std::rc::Rc;

use common::memory::{Fault, Pages, Watcher};
use common::world::{Home, KeySpec, SiteSpec, World, update};
use proptest::prelude::*;
use static_keys::instruction::is_half_replaced;
use static_keys::{Class, EntryFormat, Op, Plan, Size, Undo, disassemble};

/// The orders in which a copy may store bytes.
const ORDERS: [fn(usize) -> Vec<usize>; 3] = [
    |length| (0..length).collect(),
    |length| (0..length).rev().collect(),
    |length| {
        let even = (0..length).step_by(2);
        even.chain((1..length).step_by(2)).collect()
    },
];

/// A key that is off and one that is on. Sites of both sizes start at each of the last five bytes
/// of a page, so that many of them straddle two pages.
fn world() -> World {
    let key = |count| KeySpec {
        home: Home::Kernel,
        class: Class::Ref,
        initially: false,
        count,
    };
    let size = |number: u16| match number % 2 {
        0 => Size::Two,
        _ => Size::Five,
    };
    // Each of the last five bytes of a page in turn, four sites in a row at the same offset.
    let offset = |number: u16| 4091 + number / 4 % 5;
    let gap = |number: u16| match number.checked_sub(1) {
        None => offset(0),
        Some(last) => 4096 + offset(number) - offset(last) - size(last).bytes() as u16,
    };
    let site = |number: u16| SiteSpec {
        size: size(number),
        gap: gap(number),
        displacement: 64,
        ..SiteSpec::of(usize::from(number / 2 % 2))
    };
    World::new(
        EntryFormat::Relative,
        0,
        vec![key(0), key(1)],
        (0..32).map(site).collect(),
    )
}

/// Returns whether the site holds its old or its new instruction, or a TEST stored by `replace`.
fn is_whole(found: &[u8], before: &[u8], after: &[u8]) -> bool {
    let is_test = match found {
        [0xa8, _] => true,
        [0xa9, ..] => found.len() == 5,
        _ => false,
    };
    found == before || found == after || is_test && is_half_replaced(found, before, after)
}

/// Checks every site after each stored byte, and counts the checks.
fn watch<P: Copy>(plan: &Plan<P>, order: fn(usize) -> Vec<usize>) -> (Watcher, Rc<Cell<usize>>) {
    let sites: Vec<_> = plan
        .sites()
        .map(|site| (site.address, site.before.to_vec(), site.after.to_vec()))
        .collect();
    let looks = Rc::new(Cell::new(0));
    let counted = Rc::clone(&looks);
    let look = move |pages: &Pages| {
        counted.set(counted.get() + 1);
        for (address, before, after) in &sites {
            let found = &pages.peek::<5>(*address)[..before.len()];
            assert!(
                is_whole(found, before, after),
                "{address:#x}: {found:02x?}, {}",
                disassemble(found, *address)
            );
        }
    };
    let look = Box::new(look);
    (Watcher { order, look }, looks)
}

#[test]
fn each_byte_that_is_stored_leaves_whole_instructions() {
    for order in ORDERS {
        let world = world();
        let straddling = (0..32)
            .filter(|site| world.site(*site) % 4096 > 4091)
            .count();
        assert_eq!(straddling, 24);
        let before = world.memory.snapshot();
        let updates = [Op::Inc, Op::Dec].into_iter().zip(0..);
        let updates: Vec<_> = updates
            .map(|(op, key)| update(world.key(key), op))
            .collect();
        let plan = world.plan(&updates).expect("planned");
        assert_eq!(plan.site_count(), 32);
        let (watcher, looks) = watch(&plan, order);
        world.memory.watch(Some(watcher));
        plan.commit(&world.memory).expect("made");
        assert_eq!(looks.get(), 16 * 4 + 16 * 7 + 2 * 4);
        assert!(world.memory.snapshot() == world.with_counts(&[1, 0]).memory.snapshot());
        assert!(plan.is_in_place(&world.memory));
        assert_eq!(plan.revert(&world.memory), Undo::Complete);
        assert!(!plan.is_in_place(&world.memory));
        assert!(world.memory.snapshot() == before);
        // The undo of a partly written site also leaves whole instructions after each byte.
        for position in 0..16 * 3 {
            world.memory.inject(position, position + 1, Fault::Refused);
            let error = plan.commit(&world.memory).expect_err("refused");
            world.memory.heal();
            assert_eq!(error.undo, Undo::Complete);
            assert!(world.memory.snapshot() == before, "write {position}");
        }
        world.memory.watch(None);
    }
}

proptest! {
    #[test]
    fn only_a_test_of_the_same_size_is_half_replaced(
        found in proptest::collection::vec(any::<u8>(), 0..7),
        before in proptest::collection::vec(any::<u8>(), 0..7),
        after in proptest::collection::vec(any::<u8>(), 0..7),
    ) {
        if is_half_replaced(&found, &before, &after) {
            prop_assert!(is_whole(&found, &before, &after));
            prop_assert!(before.len() == found.len() && after.len() == found.len());
        }
    }
}
