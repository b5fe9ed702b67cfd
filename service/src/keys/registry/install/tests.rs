// SPDX-License-Identifier: Apache-2.0
//! Discovered kernels and kernels that register themselves lead to the same registration.

use std::time::{Duration, Instant};

use patchbay_guest::abi;
use patchbay_guest::guest::Guest;
use static_keys::{
    Class, Concerns, FoundImage, FoundKey, GateKind, Gates, Kernel, ListedGate, Op, Range,
};
use zerocopy::FromBytes;

use super::*;
use crate::keys::{KeyUpdate, Keys, KeysConfig, UpdateRequest};
use crate::testing::found as as_discovered;
use patchbay_guest::testing::{InMemoryGuest, TestKey};

fn found(guest: &InMemoryGuest) -> KernelTables {
    let (descriptor, _) =
        abi::Descriptor::read_from_prefix(&guest.last_request()).expect("a whole page");
    super::super::requests::tables(guest.ram(), &descriptor)
        .expect("a kernel that follows the rules")
}

type Damage = fn(&mut KernelTables);

fn user_mode_gate() -> Gates {
    let gate = ListedGate {
        kind: GateKind::SystemState,
        name: "system_state".into(),
        address: 0x1000,
        per_cpu: false,
        width: 4,
        mask: 1,
        wanted: 0,
        concerns: Concerns::COUNTS,
    };
    Gates::new(&[gate], &[]).expect("a list that could be right")
}

fn described(tables: &mut KernelTables) -> &mut Kernel {
    match &mut tables.contents {
        Contents::Described(kernel) => kernel,
        Contents::Found(_) => panic!("the guest described it"),
    }
}

fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let keys = [TestKey::new("alpha", 2), TestKey::tracepoint("event", true)];
    (InMemoryGuest::boot(Arc::clone(&registry), &keys), registry)
}

/// Discovered numbers make the same registration as the guest's own request.
#[test]
fn found_tables_and_the_guests_request_make_the_same_registration() {
    let (guest, by_request) = guest();
    let by_search = Registry::default();
    by_search.attach(guest.ram().clone());
    by_search.register_kernel(found(&guest)).expect("taken");
    assert_eq!(by_search.version(), 1);
    let texts = [&*by_request, &by_search].map(|registry| {
        let registration = registry.snapshot().expect("registered").registration;
        let keys = registration.catalog.keys().map(|key| format!("{key:?}"));
        (
            format!("{:?}", registry.describe()),
            keys.collect::<Vec<_>>(),
        )
    });
    assert_eq!(texts[0], texts[1]);
    by_search.withdraw();
    assert_eq!(by_search.version(), 2);
    assert!(by_search.snapshot().is_err());
    by_search.withdraw();
    assert_eq!(by_search.version(), 2);
}

/// A module that was loaded again has new keys. The earlier holds do not apply to them.
#[test]
fn a_module_with_other_keys_is_another_load() {
    let (guest, _) = guest();
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    let epochs = |moved: u64, generation: u64| {
        let mut tables = as_discovered(&guest);
        tables.generation = generation;
        let Contents::Found(kernel) = &mut tables.contents else {
            panic!("just made")
        };
        for (index, name) in [(1, "stays"), (2, "moves")] {
            let at = 0xffff_ffff_c000_0000 + index * 0x1_0000;
            let nothing = Range { start: 0, end: 0 };
            kernel.images.push(FoundImage {
                id: at,
                name: name.to_owned(),
                text: nothing,
                ro_after_init: nothing,
                jump_table: nothing,
                entries: Vec::new(),
                keys: vec![FoundKey {
                    address: at + 0x100 + if index == 2 { moved } else { 0 },
                    name: "own".to_owned(),
                    class: Class::Guarded,
                    tracepoint: 0,
                    switched_by_function: false,
                }],
            });
        }
        registry.register_kernel(tables).expect("taken");
        let registration = registry.snapshot().expect("taken").registration;
        ["stays", "moves"].map(|name| registration.modules[name])
    };
    let first = epochs(0, 1);
    assert_eq!(epochs(0, 2), first);
    let second = epochs(16, 3);
    assert_eq!(second[0], first[0]);
    assert_ne!(second[1], first[1]);
}

fn keys(guest: &Arc<InMemoryGuest>, registry: Registry) -> Keys {
    let registry = Arc::new(registry);
    Keys::start(Arc::clone(guest), registry, KeysConfig::default())
        .expect("a thread")
        .0
}

fn update(op: Op) -> UpdateRequest {
    let second = Duration::from_secs(1);
    let updates = vec![KeyUpdate::new("alpha", op)];
    let mut request =
        UpdateRequest::new(updates, "test".to_owned(), second, Instant::now() + second);
    request.allow_guarded = true;
    request
}

#[tokio::test]
async fn tables_that_were_read_already_are_flipped_like_others() {
    let (guest, by_request) = guest();
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    let mut tables = as_discovered(&guest);
    let Contents::Found(kernel) = &mut tables.contents else {
        panic!("just made")
    };
    let unsorted = kernel.images[0].entries.clone();
    kernel.images[0].entries.reverse();
    registry
        .register_kernel(tables.clone())
        .expect_err("not sorted");
    let Contents::Found(kernel) = &mut tables.contents else {
        panic!("just made")
    };
    kernel.images[0].entries = unsorted;
    registry.register_kernel(tables).expect("taken");
    let [ours, theirs] = [&registry, &*by_request].map(|registry| {
        let registration = registry.snapshot().expect("registered").registration;
        let keys = registration.catalog.keys().map(|key| format!("{key:?}"));
        (keys.collect::<Vec<_>>(), registration.catalog.entry_count())
    });
    assert_eq!(ours, theirs);
    let keys = keys(&guest, registry);
    keys.update(update(Op::Enable)).await.expect("flipped");
    assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (1, true));
}

/// Gates that exclude a vCPU inside a site replace the check of RIPs.
#[tokio::test]
async fn gates_of_text_are_enough_if_the_source_says_so() {
    for text_gates in [false, true] {
        let (guest, _) = guest();
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        let mut tables = found(&guest);
        tables.promises.text_gates = text_gates;
        registry.register_kernel(tables).expect("taken");
        guest.hide_vcpus(true);
        let keys = keys(&guest, registry);
        let flipped = keys.update(update(Op::Enable)).await;
        assert_eq!(flipped.is_ok(), text_gates, "{flipped:?}");
        assert_eq!(guest.jumps("alpha"), text_gates);
    }
}

/// Counts are changed while the guest runs only if there is a fence and atomic exchange.
#[tokio::test]
async fn counts_alone_need_a_fence_and_an_exchange() {
    for (fence, exchange, pauses) in [(true, true, 0), (false, true, 1), (true, false, 1)] {
        let (guest, _) = guest();
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        let mut tables = found(&guest);
        tables.promises.fence = fence;
        registry.register_kernel(tables).expect("taken");
        guest.memory().forbid_exchange(!exchange);
        let keys = keys(&guest, registry);
        keys.update(update(Op::Inc)).await.expect("flipped");
        let before = guest.pauses();
        keys.update(update(Op::Inc)).await.expect("counted");
        assert_eq!(guest.count("alpha"), 2);
        assert_eq!(guest.pauses() - before, pauses, "{fence} {exchange}");
    }
}

/// A change that would be lost is undone before the guest is resumed.
#[tokio::test]
async fn writes_that_do_not_stay_are_undone() {
    let (guest, _) = guest();
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    registry.register_kernel(found(&guest)).expect("taken");
    let keys = keys(&guest, registry);
    guest.lose_writes(true);
    let error = keys
        .update(update(Op::Enable))
        .await
        .expect_err("they would be lost");
    assert!(error.to_string().contains("another host"), "{error}");
    assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (0, false));
    guest.lose_writes(false);
    keys.update(update(Op::Enable)).await.expect("flipped");
    assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (1, true));
}

#[test]
fn found_tables_are_checked_like_a_descriptor() {
    let (guest, _) = guest();
    let registry = Registry::default();
    assert!(
        registry.register_kernel(found(&guest)).is_err(),
        "no memory"
    );
    registry.attach(guest.ram().clone());
    let wrong: [(&str, Damage); 7] = [
        ("the boot", |tables| tables.boot = 0),
        ("generation", |tables| tables.generation = 0),
        ("text is at 0x1000", |tables| {
            described(tables).text.start = 0x1000;
        }),
        ("jump table", |tables| described(tables).jump_table.end = 0),
        ("no system_state", |tables| {
            described(tables).gates = Gates::default();
        }),
        ("gate system_state is at 0x1000", |tables| {
            described(tables).gates = user_mode_gate();
        }),
        ("module.state", |tables| {
            described(tables).layout.module_state = u32::MAX;
        }),
    ];
    for (words, change) in wrong {
        let mut tables = found(&guest);
        change(&mut tables);
        let refused = registry.register_kernel(tables).expect_err(words);
        assert!(refused.to_string().contains(words), "{refused}");
        assert!(registry.snapshot().is_err(), "{words}");
    }
    registry.register_kernel(found(&guest)).expect("as found");
    let snapshot = registry.snapshot().expect("registered");
    assert!(snapshot.registration.find("alpha").is_ok());
}
