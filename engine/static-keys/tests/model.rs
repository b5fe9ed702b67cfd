// SPDX-License-Identifier: Apache-2.0
//! Random guests and random transactions, compared with a simple model: a list of counts. The
//! memory after a transaction must equal, byte for byte, a guest built with the model's counts.

mod common;

use common::world::{Home, KeySpec, SiteSpec, World, update};
use proptest::prelude::*;
use proptest::sample::select;
use static_keys::{Class, EntryFormat, Op, PlanError, Size, Update, crosses_zero};

fn home(modules: usize) -> impl Strategy<Value = Home> {
    (0..=modules).prop_map(|index| index.checked_sub(1).map_or(Home::Kernel, Home::Module))
}

fn key(modules: usize) -> impl Strategy<Value = KeySpec> {
    let class = select(&[Class::Guarded, Class::Ref, Class::Tracepoint][..]);
    let count = prop_oneof![4 => 0_i32..4, 1 => Just(i32::MAX), 1 => Just(-1)];
    (home(modules), class, any::<bool>(), count).prop_map(
        |(home, class, initially, count): (_, _, _, i32)| {
            let count = if class == Class::Tracepoint {
                count.clamp(0, 1)
            } else {
                count
            };
            KeySpec {
                home,
                class,
                initially,
                count,
            }
        },
    )
}

fn site(
    keys: usize,
    modules: usize,
    size: impl Strategy<Value = Size>,
) -> impl Strategy<Value = SiteSpec> {
    let gap = prop_oneof![0_u16..16, 4080_u16..4096];
    let displacement = prop_oneof![any::<i32>(), -3..3];
    (
        0..keys,
        home(modules),
        size,
        any::<bool>(),
        prop::bool::weighted(0.1),
        gap,
        displacement,
    )
        .prop_map(
            |(key, home, size, likely, init, gap, displacement)| SiteSpec {
                key,
                home,
                size,
                likely,
                init,
                gap,
                displacement,
            },
        )
}

fn world() -> impl Strategy<Value = World> {
    let format = select(
        &[
            EntryFormat::Relative,
            EntryFormat::Absolute64,
            EntryFormat::Absolute32,
            EntryFormat::None,
        ][..],
    );
    (format, 0_usize..4, 1_usize..8).prop_flat_map(|(format, modules, keys)| {
        let size = select(&[Size::Two, Size::Five][..]);
        // Without jump labels there are no sites.
        let sites = if format == EntryFormat::None {
            0..1
        } else {
            0..24
        };
        (
            prop::collection::vec(key(modules), keys),
            prop::collection::vec(site(keys, modules, size), sites),
        )
            .prop_map(move |(keys, sites)| World::new(format, modules, keys, sites))
    })
}

fn op() -> impl Strategy<Value = Op> {
    select(&[Op::Inc, Op::Dec, Op::Enable, Op::Disable][..])
}

/// The count after an operation; `None` if it is refused. Written from the guest's documented
/// behaviour, not from the engine.
fn model(class: Class, count: i32, op: Op) -> Option<i32> {
    let after = match (op, count) {
        (_, i32::MIN..0) => None,
        (Op::Inc, count) => count.checked_add(1),
        (Op::Dec, 0) => None,
        (Op::Dec, count) => Some(count - 1),
        (Op::Enable, 0 | 1) => Some(1),
        (Op::Disable, 0 | 1) => Some(0),
        (Op::Enable | Op::Disable, _) => None,
    };
    after.filter(|&after| match class {
        Class::Ref => true,
        Class::Tracepoint => after <= 1,
        Class::Guarded | Class::DynamicDebug | Class::Never => after <= 1 || after < count,
    })
}

fn model_all(world: &World, updates: &[(usize, Op)]) -> Option<Vec<i32>> {
    let mut counts: Vec<i32> = world.keys.iter().map(|key| key.count).collect();
    for &(key, op) in updates {
        counts[key] = model(world.keys[key].class, counts[key], op)?;
    }
    Some(counts)
}

fn number_of_writes(world: &World, counts: &[i32], touched: &[usize]) -> usize {
    let changed = |key: usize| crosses_zero(world.keys[key].count, counts[key]);
    let sites = world
        .sites
        .iter()
        .filter(|site| touched.contains(&site.key) && changed(site.key) && !site.init);
    sites.count() + touched.len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_guest_is_as_if_it_had_done_it_itself(
        world in world(),
        ops in prop::collection::vec((any::<prop::sample::Index>(), op()), 1..10),
    ) {
        let updates: Vec<(usize, Op)> = ops.iter().map(|(key, op)| (key.index(world.keys.len()), *op)).collect();
        let requested: Vec<Update> = updates.iter().map(|&(key, op)| update(world.key(key), op)).collect();
        let mut touched: Vec<usize> = updates.iter().map(|(key, _)| *key).collect();
        touched.sort_unstable();
        touched.dedup();
        let before = world.memory.snapshot();
        let planned = world.plan(&requested);
        let Some(counts) = model_all(&world, &updates) else {
            prop_assert!(planned.is_err(), "the guest would warn, or is busy");
            prop_assert!(world.memory.snapshot() == before);
            return Ok(());
        };
        let plan = match planned {
            Ok(plan) => plan,
            Err(error) => return Err(TestCaseError::fail(format!("refused: {error}"))),
        };
        prop_assert!(world.memory.snapshot() == before, "planning has changed the guest");
        for change in plan.changes().iter() {
            let key = (0..world.keys.len()).find(|&key| world.key(key) == change.key).expect("a key of the guest");
            prop_assert_eq!((change.before, change.after), (world.keys[key].count, counts[key]));
        }

        let writes = world.memory.writes();
        let locates = world.memory.locates();
        if plan.needs_pause() {
            prop_assert!(touched.iter().any(|&key| crosses_zero(world.keys[key].count, counts[key])));
            prop_assert_eq!(plan.verify(&world.memory, &[]), Ok(()));
            prop_assert!(plan.commit(&world.memory).is_ok());
            prop_assert_eq!(world.memory.writes() - writes, number_of_writes(&world, &counts, &touched));
        } else {
            prop_assert!(plan.commit_running(&world.memory).is_ok());
            prop_assert_eq!(world.memory.writes(), writes);
        }
        prop_assert_eq!(world.memory.locates(), locates, "page walks belong before the pause");
        let expected = world.with_counts(&counts);
        prop_assert!(world.memory.snapshot() == expected.memory.snapshot());
        for (index, count) in counts.into_iter().enumerate() {
            prop_assert_eq!(world.catalog().enabled(&world.memory, world.key(index)), Ok(count));
        }
    }

    /// If one operation is refused, so is the whole transaction.
    #[test]
    fn one_refusal_refuses_all(world in world(), position in any::<prop::sample::Index>()) {
        let Some(bad) = (0..world.keys.len()).find(|&key| world.keys[key].count == 0) else { return Ok(()) };
        let mut updates: Vec<Update> = (0..world.keys.len())
            .filter(|&key| key != bad && model(world.keys[key].class, world.keys[key].count, Op::Inc).is_some())
            .map(|key| update(world.key(key), Op::Inc))
            .collect();
        let at = position.index(updates.len() + 1);
        updates.insert(at, update(world.key(bad), Op::Dec));
        let refused = matches!(world.plan(&updates), Err(PlanError::WouldWarn { .. }));
        prop_assert!(refused);
    }

    /// The site states match the guest's memory.
    #[test]
    fn sites_are_shown_as_they_are(world in world()) {
        let catalog = world.catalog();
        for index in 0..world.keys.len() {
            let states = catalog.site_states(&world.memory, world.key(index));
            let sites: Vec<usize> = (0..world.sites.len()).filter(|&site| world.sites[site].key == index).collect();
            prop_assert_eq!(states.len(), sites.len());
            prop_assert_eq!(states.len(), catalog.site_count(world.key(index)));
            for site in sites {
                let state = states.iter().find(|state| state.address == world.site(site)).expect("listed");
                prop_assert_eq!(state.patchable.is_ok(), !world.sites[site].init, "{:?}", state.patchable);
                if !world.sites[site].init {
                    let expected = world.instruction(site, world.keys[index].count);
                    prop_assert_eq!(&state.bytes[..], expected.as_bytes());
                    prop_assert_eq!(state.size(), Some(world.sites[site].size));
                    prop_assert_eq!(state.target, world.target(site));
                }
            }
        }
    }
}
