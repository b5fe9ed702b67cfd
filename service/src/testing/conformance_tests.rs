// SPDX-License-Identifier: Apache-2.0
//! The guest in memory keeps the promises of the seams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::memory::GuestRam;
use patchbay_guest::testing::conformance::{lifecycle, memory, pause};
use patchbay_guest::testing::{InMemoryGuest, Memory, TestKey};
use static_keys::Op;

use crate::keys::{KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};

const DEADLINE: Duration = Duration::from_secs(30);

fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 2)]);
    (guest, registry)
}

#[test]
fn memory_in_memory() {
    let ram = Memory::ram(4 << 20);
    memory(&ram, 3 << 20, 4 << 20);
}

#[test]
fn memory_without_exchange() {
    let ram = Memory::new(4 << 20);
    ram.forbid_exchange(true);
    memory(&(ram as GuestRam), 3 << 20, 4 << 20);
}

#[test]
fn pause_in_memory() {
    pause(&*guest().0, Vec::new);
}

#[test]
fn lifecycle_in_memory() {
    lifecycle(&guest().0);
}

/// The text is not patched if the monitor does not know where its vCPUs stopped.
#[tokio::test]
async fn unknown_is_not_taken_for_no() {
    let (guest, registry) = guest();
    let config = KeysConfig::default();
    let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
    let enable = || {
        let updates = vec![KeyUpdate::new("alpha", Op::Enable)];
        let deadline = Instant::now() + DEADLINE;
        UpdateRequest::new(updates, "test".to_owned(), DEADLINE, deadline)
    };
    guest.hide_vcpus(true);
    let error = keys.update(enable()).await.expect_err("unknown");
    assert_eq!(error.reason(), "VCPUS_UNKNOWN", "{error}");
    assert!(
        error.to_string().contains("where the vCPUs stopped"),
        "{error}"
    );
    assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (0, false));
    guest.hide_vcpus(false);
    keys.update(enable()).await.expect("the key is flipped");
    assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (1, true));
}
