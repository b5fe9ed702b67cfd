// SPDX-License-Identifier: Apache-2.0
//! Tests plans whose guests, keys or holds have changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use patchbay_guest::testing::{Gate, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use tonic::Code;

use super::plans::{commitment, preparation};
use super::support::{Served, assert_refused};

/// A change of the guest between prepare and commit.
type Moves = fn(&Served);

#[tokio::test]
async fn a_guest_that_has_moved_on_makes_the_plan_stale() {
    let moves: [(&str, KeyOp, Moves); 6] = [
        ("beta", KeyOp::Inc, |served| {
            served.guest.set_count("beta", 1)
        }),
        ("likely", KeyOp::Inc, |served| {
            served.guest.set_count("likely", 2)
        }),
        ("beta", KeyOp::Inc, |served| {
            assert_eq!(served.guest.add_module("ext4", &[]), 0);
        }),
        ("beta", KeyOp::Inc, |served| {
            assert_eq!(served.guest.delete_module("xfs"), 0);
        }),
        ("sched_switch", KeyOp::Enable, |served| {
            served.guest.set_probes("sched_switch", &[]);
            served.guest.set_count("sched_switch", 0);
        }),
        ("siteless", KeyOp::Enable, |served| {
            served.guest.set_user("siteless", Some("xfs"));
        }),
    ];
    for (name, op, moves) in moves {
        let served = Served::start().await;
        assert_eq!(served.guest.add_module("xfs", &[TestKey::new("own", 1)]), 0);
        let plan = served.plan(name, op).await.plan_id;
        moves(&served);
        let count = served.guest.count(name);
        let stale = served.commit(&plan).await;
        let (message, _) = assert_refused(stale, Code::FailedPrecondition, "PLAN_STALE");
        assert!(message.contains("prepare the change again"), "{message}");
        assert_eq!(served.guest.pauses(), 0, "{message}");
        assert_eq!(served.guest.count(name), count);
        assert!(served.holds().await.is_empty());
    }
}

/// Checks a count that changes after the host's first checks and before the guest is stopped.
#[tokio::test]
async fn a_count_that_moves_before_the_stop_makes_the_plan_stale() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    let guest = Arc::clone(&served.guest);
    served.guest.on_pause(move || guest.set_count("beta", 1));
    let stale = served.commit(&plan).await;
    assert_refused(stale, Code::FailedPrecondition, "PLAN_STALE");
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (1, 1));
    let audit = served.audit();
    assert_eq!(audit[1]["reason"], "PLAN_STALE", "{audit:?}");
    // The guest returns to the earlier state, so the plan is valid again.
    served.guest.on_pause(|| ());
    served.guest.set_count("beta", 0);
    served.commit(&plan).await.expect("as prepared");
}

#[tokio::test]
async fn a_plan_dies_with_its_registration() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    assert_eq!(served.guest.unregister(), 0);
    let gone = served.commit(&plan).await;
    assert_refused(gone, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    assert_eq!(served.guest.register_again(), 0);
    let gone = served.commit(&plan).await;
    assert_refused(gone, Code::NotFound, "PLAN_NOT_FOUND");
    assert_eq!(served.guest.count("beta"), 0);
}

#[tokio::test]
async fn a_key_that_changed_meanwhile_fails_its_etag() {
    let served = Served::start().await;
    let etag = served.get("beta").await.expect("a key").etag;
    let mut conditional = preparation(&[("beta", KeyOp::Inc)]);
    conditional.updates[0].etag = etag;
    let plan = served.prepare(conditional.clone()).await.expect("as seen");
    let free = served.plan("beta", KeyOp::Inc).await;
    // These changes restore the earlier state, but the key's etag is a new one.
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    served
        .op("beta", KeyOp::Dec)
        .await
        .expect("an own reference");
    let refused = served.prepare(conditional).await;
    assert_refused(refused, Code::Aborted, "ETAG_MISMATCH");
    let refused = served.commit(&plan.plan_id).await;
    assert_refused(refused, Code::Aborted, "ETAG_MISMATCH");
    assert_eq!(plan.digest, free.digest);
    served
        .commit(&free.plan_id)
        .await
        .expect("without condition");
}

#[tokio::test]
async fn a_hold_that_was_released_meanwhile_is_not_dropped_again() {
    let served = Served::start().await;
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    let plan = served.plan("beta", KeyOp::Dec).await.plan_id;
    served
        .op("beta", KeyOp::Dec)
        .await
        .expect("an own reference");
    let stale = served.commit(&plan).await;
    assert_refused(stale, Code::FailedPrecondition, "NOT_HOLDER");
    // The count is as planned, but the guest holds the reference.
    served.guest.set_count("beta", 1);
    let refused = served.commit(&plan).await;
    assert_refused(refused, Code::FailedPrecondition, "NOT_HOLDER");
    assert_eq!(served.guest.count("beta"), 1);
}

#[tokio::test]
async fn a_key_that_was_quarantined_meanwhile_is_left_alone() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    let other = served.plan("beta", KeyOp::Inc).await.plan_id;
    let site = served.guest.sites("beta")[1];
    served.guest.write(site, &[0xcc; 5]);
    let refused = served.commit(&plan).await;
    assert_refused(refused, Code::DataLoss, "FOREIGN_BYTES");
    let (message, _) = assert_refused(
        served.commit(&other).await,
        Code::FailedPrecondition,
        "KEY_QUARANTINED",
    );
    assert!(message.contains("key beta "), "{message}");
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (0, 1));
}

/// Checks that prepare refuses bytes that are neither a NOP nor a jump. They may be the guest's own
/// patching in progress, which only a stopped guest could show.
#[tokio::test]
async fn a_site_that_is_neither_nop_nor_jump_is_not_planned() {
    let served = Served::start().await;
    let site = served.guest.sites("beta")[1];
    let bytes: [u8; 5] = served.guest.read(site);
    served.guest.write(site, &[0xcc; 5]);
    let mut call = tonic::Request::new(preparation(&[("beta", KeyOp::Inc)]));
    call.set_timeout(Duration::from_millis(400));
    let refused = served.client().prepare_update(call).await;
    let (message, metadata) = assert_refused(refused, Code::Unavailable, "GUEST_BUSY");
    assert_eq!(metadata["gate"], "KEY_CHANGED");
    assert!(message.contains(&format!("{site:#x}")), "{message}");
    assert_eq!(served.guest.pauses(), 0);
    served.guest.write(site, &bytes);
    served.plan("beta", KeyOp::Inc).await;
}

#[tokio::test]
async fn a_commit_waits_for_a_closed_gate() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    let hasty = v1::CommitUpdateRequest {
        retry_timeout: Some(Duration::from_secs(1).try_into().expect("short")),
        ..commitment(&plan)
    };
    let (_, metadata) = assert_refused(
        served.commit_as(hasty).await,
        Code::Unavailable,
        "GUEST_BUSY",
    );
    assert_eq!(metadata["gate"], "TEXT_MUTEX");
    assert_eq!(served.guest.pauses(), 0);
    // The host stops the guest only while the gate is open. So the gate closes during the first
    // pause and opens at its resume, and the second attempt succeeds.
    served.guest.set_gate(Gate::TextMutex, 0);
    let guest = Arc::clone(&served.guest);
    let closed = AtomicBool::new(true);
    let held = Arc::clone(&served.guest);
    served.guest.on_pause(move || {
        let value = u64::from(closed.swap(false, Ordering::SeqCst)) << 12;
        guest.set_gate(Gate::TextMutex, value);
    });
    served
        .guest
        .on_resume(move || held.set_gate(Gate::TextMutex, 0));
    let made = served.commit(&plan).await.expect("the gate opens");
    assert_eq!(made.report.expect("a report").attempts, 2);
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (1, 2));
}

/// Checks a count of -1: the guest is taking the first reference and may still fail.
#[tokio::test]
async fn a_commit_waits_while_the_guest_takes_the_first_reference() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    let address = served.get("beta").await.expect("a key").address;
    let guest = Arc::clone(&served.guest);
    let resumed = Arc::clone(&served.guest);
    let first = AtomicBool::new(true);
    served.guest.on_pause(move || {
        if first.swap(false, Ordering::SeqCst) {
            guest.write(address, &(-1_i32).to_le_bytes());
        }
    });
    served.guest.on_resume(move || {
        if resumed.count("beta") < 0 {
            resumed.write(address, &0_i32.to_le_bytes());
        }
    });
    let made = served.commit(&plan).await.expect("the guest gives up");
    assert_eq!(made.report.expect("a report").attempts, 2);
}
