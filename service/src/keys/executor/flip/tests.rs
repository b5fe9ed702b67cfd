// SPDX-License-Identifier: Apache-2.0
//! Guests that act between the plan and the change.

use std::sync::Arc;
use std::sync::mpsc::channel;

use patchbay_guest::abi;
use rustix::thread::gettid;
use static_keys::{KeyId, Op};
use zerocopy::IntoBytes;

use static_keys::Options;

use super::*;
use crate::keys::audit::AuditLog;
use crate::keys::draft::Terms;
use crate::keys::executor::Settings;
use crate::keys::request::UpdateRequest;
use crate::keys::shared::Shared;
use crate::keys::symbols::Symbols;
use crate::keys::{Registry, SystemClock};
use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};

fn executor(guest: &Arc<InMemoryGuest>, registry: &Arc<Registry>) -> Executor<InMemoryGuest> {
    let clock = Arc::new(SystemClock);
    let shared = Shared::new(Arc::clone(registry), Symbols::default(), clock);
    Executor::new(
        Arc::clone(guest),
        Arc::new(shared),
        AuditLog::default(),
        Settings::default(),
    )
}

/// A key without sites, as in a kernel without jump labels.
fn counted(name: &str, count: i32) -> TestKey {
    TestKey {
        count,
        ..TestKey::new(name, 0)
    }
}

/// Boots a kernel, with or without jump labels, and a module, each with one key.
fn boot(jump_labels: bool, count: i32) -> (Arc<InMemoryGuest>, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    registry.attach(guest.ram().clone());
    let mut kernel = guest.descriptor(&[counted("alpha", count)]);
    if !jump_labels {
        kernel.entry_format = abi::FORMAT_NONE;
    }
    assert_eq!(guest.request(abi::OP_REGISTER, kernel.as_bytes()), 0);
    guest.set_gate(Gate::SystemState, 2);
    assert_eq!(guest.add_module("ext4", &[counted("own", count)]), 0);
    (guest, registry)
}

/// The guest frees the key's page meanwhile. The new content looks like the key, because zero also
/// means MODULE_STATE_LIVE and is the type word of a key without sites.
#[test]
fn counts_are_not_written_once_their_registration_is_gone() {
    type TakeBack = fn(&InMemoryGuest) -> i32;
    let take_back: [(&str, TakeBack); 2] = [
        ("ext4:own", |guest| guest.delete_module("ext4")),
        ("alpha", InMemoryGuest::unregister),
    ];
    for (jump_labels, count) in [(true, 1), (false, 0)] {
        for (name, take_back) in take_back {
            let (guest, registry) = boot(jump_labels, count);
            let executor = executor(&guest, &registry);
            let snapshot = registry.snapshot().expect("registered");
            let memory = snapshot.registration.memory(guest.ram());
            let key: KeyId = snapshot.registration.find(name).expect("a key").id;
            let update = Update { key, op: Op::Inc };
            let catalog = &snapshot.registration.catalog;
            let plan = Plan::new(catalog, &memory, &[update], &Options::default())
                .expect("a change of a count");
            assert!(!plan.needs_pause());

            assert_eq!(take_back(&guest), 0);
            let mut running = Standstill::none(&*guest);
            let made = executor.make(
                Duration::from_secs(1),
                &snapshot,
                &memory,
                &plan,
                None,
                &mut running,
            );
            assert!(
                matches!(made, Err(Obstacle::Version)),
                "{name}, jump labels: {jump_labels}: {made:?}"
            );
            assert_eq!(guest.count(name), count);
        }
    }
}

/// Returns whether a thread of this process sleeps.
fn sleeps(thread: rustix::thread::Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    // The state follows the name, which may contain spaces: proc_pid_stat(5).
    std::fs::read_to_string(path).is_ok_and(|stat| stat.contains(") S "))
}

#[test]
fn a_request_waits_while_counts_are_written() {
    let (guest, registry) = boot(true, 1);
    let version = registry.version();
    let (tell, told) = channel();
    let request = registry.at_version(version, || {
        let request = std::thread::spawn(move || {
            tell.send(gettid()).expect("awaited");
            guest.delete_module("ext4")
        });
        let thread = told.recv().expect("it has begun");
        while !sleeps(thread) {
            assert!(!request.is_finished(), "MODULE_DEL did not wait");
            std::thread::yield_now();
        }
        assert_eq!(registry.version(), version);
        request
    });
    let request = request.expect("still that version");
    assert_eq!(request.join().expect("no panic"), 0);
    assert_eq!(registry.at_version(version, || ()), None);
}

/// A hibernation fails: the kernel registers again with the same counts.
#[test]
fn references_are_taken_back_once_the_guest_has_registered_again() {
    let (guest, registry) = boot(true, 2);
    let executor = executor(&guest, &registry);
    let snapshot = registry.snapshot().expect("registered");
    let registration = Arc::clone(&snapshot.registration);
    let key = registration.find("alpha").expect("a key").id;
    // The descriptor is sent by the test, so the test guest does not keep it.
    let mut again = guest.descriptor(&[counted("alpha", 2)]);
    again.header.generation += 1;
    assert_eq!(guest.unregister(), 0);
    let (tell, told) = channel();
    let taking = std::thread::spawn(move || {
        tell.send(gettid()).expect("awaited");
        let request = UpdateRequest::new(vec![], "a", Duration::from_secs(1), Instant::now());
        let transaction = Transaction {
            terms: Terms::new(&request, Instant::now()),
            request: &request,
            plan: None,
        };
        let left = vec![Update { key, op: Op::Dec }];
        let mut running = Standstill::none(&*executor.guest);
        executor.roll_back(&registration, &transaction, &mut running, left)
    });
    let thread = told.recv().expect("it has begun");
    while !sleeps(thread) {
        assert!(!taking.is_finished(), "it gave up");
        std::thread::yield_now();
    }
    assert_eq!(guest.request(abi::OP_REGISTER, again.as_bytes()), 0);
    taking.join().expect("no panic").expect("rolled back");
    assert_eq!(guest.count("alpha"), 1);
}
