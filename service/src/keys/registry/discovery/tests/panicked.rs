// SPDX-License-Identifier: Apache-2.0
//! Tests that the keys of a kernel that has panicked are read, and not changed.

use super::*;
use crate::keys::{KeyPage, ListQuery};
use crate::trace::TracepointKeys;

/// The monitor stops the guest at the panic, so the registers of its vCPUs are not known.
#[tokio::test]
async fn the_keys_of_a_kernel_that_has_panicked_are_listed_and_not_changed() {
    let names = ["alpha", "same", "panic"];
    let guest = InMemoryGuest::boot(
        Arc::<Registry>::default(),
        &names.map(|name| TestKey::new(name, 1)),
    );
    let registry = Registry::default();
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    registry.attach(guest.ram().clone());
    let mut tables = as_discovered(&guest);
    tables.discovery = found(&guest).discovery;
    (tables.promises.fence, tables.promises.text_gates) = (false, true);
    registry.register_kernel(tables).expect("taken");
    let known = registry.snapshot().expect("taken").registration;
    let kernel = vec![
        gate(&known, GateKind::SameKernel, "same"),
        gate(&known, GateKind::Panic, "panic"),
    ];
    let discovery = registry.discovery.get().expect("just set");
    discovery.state.lock().expect("not poisoned").kernel = kernel;
    let registry = Arc::new(registry);
    let keys = keys_of(&guest, &registry);
    enable(&keys).await.expect("it runs");
    let list = || keys.list(&ListQuery::default());
    let etags = |page: KeyPage| page.keys.into_iter().map(|key| key.etag);
    let before = list().expect("it runs");
    assert!(!before.panicked);

    *empty.registers.lock().expect("no panic") = Registers::Late;
    guest.set_count("panic", 1);
    let listed = list().expect("it can be read");
    assert!(listed.panicked);
    let alpha = &listed.keys[0];
    let alpha = (&*alpha.name, alpha.count, alpha.held_references);
    assert_eq!(alpha, ("alpha", 1, 1));
    let unchanged = etags(listed)
        .zip(etags(before))
        .filter(|(now, then)| now == then);
    assert_eq!(unchanged.count(), 2, "only the count of `panic` differs");
    assert!(keys.get("alpha", 10, "").is_ok());
    assert_eq!(keys.tracepoints().expect("kept").len(), 0);
    let error = enable(&keys).await.expect_err("panicked").to_string();
    assert!(error.contains("were not discovered: "), "{error}");
    assert_eq!(guest.count("alpha"), 1);

    guest.set_count("same", 1);
    list().expect_err("another kernel runs");
    guest.set_count("same", 0);
    list().expect_err("it was forgotten");
}

/// A kernel that panicked before it was discovered is found once, and not after a reset.
#[test]
fn a_kernel_that_was_kept_is_not_that_of_another_boot() {
    let guest = InMemoryGuest::boot(Arc::<Registry>::default(), &keys());
    let registry = Registry::default();
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    registry.attach(guest.ram().clone());
    *empty.registers.lock().expect("no panic") = Registers::Late;
    registry.to_read().expect_err("nothing is known");
    let mut tables = as_discovered(&guest);
    tables.discovery = found(&guest).discovery;
    let kernel = registry.to_registration(tables).expect("whole");
    registry.keep_panicked(Arc::new(kernel));
    let (kernel, panicked) = registry.to_read().expect("kept");
    assert!(panicked && kernel.find("alpha").is_ok());
    empty.resets.fetch_add(1, Ordering::SeqCst);
    registry.to_read().expect_err("another boot");
}
