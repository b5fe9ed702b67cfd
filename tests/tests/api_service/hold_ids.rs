// SPDX-License-Identifier: Apache-2.0
//! Tests holds by their ids: released, renewed, and listed in pages.

use std::time::{Duration, Instant};

use patchbay_guest::testing::{Gate, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::keys::{KeyUpdate, UpdateRequest};
use static_keys::Op;
use tonic::{Code, Status};

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

async fn release(
    served: &Served,
    ids: &[&String],
    force: bool,
) -> Result<v1::ReleaseHoldsResponse, Status> {
    let request = v1::ReleaseHoldsRequest {
        ids: ids.iter().map(|&id| id.clone()).collect(),
        force,
        ..Default::default()
    };
    Ok(served.client().release_holds(request).await?.into_inner())
}

async fn renew(
    served: &Served,
    ids: &[&String],
    ttl: Option<u64>,
) -> Result<Vec<v1::Hold>, Status> {
    let request = v1::RenewHoldsRequest {
        ids: ids.iter().map(|&id| id.clone()).collect(),
        ttl: ttl.map(|seconds| Duration::from_secs(seconds).try_into().expect("short")),
        ..Default::default()
    };
    let answer = served.client().renew_holds(request).await?;
    Ok(answer.into_inner().holds)
}

async fn list(
    served: &Served,
    request: v1::ListHoldsRequest,
) -> Result<v1::ListHoldsResponse, Status> {
    Ok(served.client().list_holds(request).await?.into_inner())
}

/// Takes a reference, and returns the id of its hold.
async fn take(served: &Served, key: &str, ttl: Option<u64>) -> String {
    let mut update = request(&[(key, KeyOp::Enable)]);
    update.ttl = ttl.map(|seconds| Duration::from_secs(seconds).try_into().expect("short"));
    let mut answer = served.update(update).await.expect("can be changed");
    std::mem::take(&mut answer.results[0].hold_id)
}

/// Takes a reference as another client.
async fn take_as(served: &Served, holder: &str, key: &str) -> String {
    let update = vec![KeyUpdate::new(key, Op::Inc)];
    let deadline = Instant::now() + PATIENCE;
    let request = UpdateRequest::new(update, holder.to_owned(), PATIENCE, deadline);
    let outcome = served.keys.update(request).await.expect("a ref key");
    let taken = outcome.results[0].hold_id.as_ref().expect("taken");
    taken.text()
}

async fn later(served: &Served, seconds: u64) {
    served.clock.advance(Duration::from_secs(seconds));
    served.keys.tick().await.expect("the thread runs");
}

#[tokio::test]
async fn an_update_says_which_hold_its_references_joined() {
    let served = Served::start().await;
    let first = take(&served, "alpha", None).await;
    assert_eq!(served.holds().await[0].id, first);
    let again = served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(again.results[0].hold_id, first);
    let dropped = served.op("alpha", KeyOp::Dec).await.expect("its own");
    assert_eq!(dropped.results[0].hold_id, "");
    // A reference with another expiry gets a hold of its own. A reference that the same update
    // takes and drops gets none.
    let mut update = request(&[
        ("alpha", KeyOp::Inc),
        ("beta", KeyOp::Inc),
        ("beta", KeyOp::Dec),
    ]);
    update.ttl = Some(Duration::from_secs(9).try_into().expect("short"));
    let other = served.update(update.clone()).await.expect("ref keys");
    assert_ne!(other.results[0].hold_id, first);
    assert_eq!(other.results[1].hold_id, "");
    update.validate_only = true;
    let validated = served.update(update).await.expect("ref keys");
    assert_eq!(validated.results[0].hold_id, "");
    let incarnation = served.keys.incarnation().as_str();
    assert!(
        first.starts_with(&incarnation[..8]),
        "{first} {incarnation}"
    );
}

#[tokio::test]
async fn holds_are_released_in_one_transaction() {
    let served = Served::start().await;
    let alpha = take(&served, "alpha", None).await;
    served
        .op("alpha", KeyOp::Inc)
        .await
        .expect("two references");
    let brief = take(&served, "beta", Some(60)).await;
    let fired = take(&served, "sched_switch", None).await;
    let pauses = served.guest.pauses();
    let answer = release(&served, &[&brief, &fired, &alpha], false).await;
    let answer = answer.expect("its own");
    let keys: Vec<&str> = answer.results.iter().map(|result| &*result.name).collect();
    assert_eq!(keys, ["beta", "sched_switch", "alpha"]);
    assert_eq!(answer.summary.expect("a summary").keys_changed, 3);
    assert_eq!(answer.results[2].count_before, 2);
    assert_eq!(served.guest.pauses(), pauses + 1);
    for key in ["alpha", "beta", "sched_switch"] {
        assert!(!served.guest.jumps(key), "{key}");
    }
    assert!(served.holds().await.is_empty());
    let audit = served.audit();
    let mut intents = audit.iter().rev().filter(|line| line["event"] == "intent");
    let last = intents.next().expect("an intent");
    let uid = rustix::process::getuid().as_raw();
    assert_eq!(
        (&last["owner"], &last["updates"][0]["key"]),
        (&format!("uid:{uid}").into(), &"beta".into())
    );
    let gone = release(&served, &[&alpha], false).await;
    assert_refused(gone, Code::NotFound, "HOLD_NOT_FOUND");
}

#[tokio::test]
async fn only_the_hold_that_is_named_is_released() {
    let served = Served::start().await;
    let other = take_as(&served, "other", "alpha").await;
    let brief = {
        let mut update = request(&[("alpha", KeyOp::Inc)]);
        update.ttl = Some(Duration::from_secs(60).try_into().expect("short"));
        served.update(update).await.expect("a ref key")
    };
    let own = served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    release(&served, &[&own.results[0].hold_id], false)
        .await
        .expect("its own");
    let left: Vec<String> = served
        .holds()
        .await
        .into_iter()
        .map(|hold| hold.id)
        .collect();
    assert_eq!(left, [other, brief.results[0].hold_id.clone()]);
    assert_eq!(served.guest.count("alpha"), 2);
}

#[tokio::test]
async fn a_repeated_release_gets_the_first_answer() {
    let served = Served::start().await;
    let id = take(&served, "alpha", None).await;
    let request = v1::ReleaseHoldsRequest {
        ids: vec![id],
        request_id: "r1".into(),
        ..Default::default()
    };
    let ask = || async {
        let answer = served.client().release_holds(request.clone()).await;
        answer.expect("released").into_inner()
    };
    let first = ask().await;
    take(&served, "alpha", None).await;
    assert_eq!(ask().await, first);
    assert_eq!(served.guest.count("alpha"), 1, "nothing was released again");
    let other = v1::ReleaseHoldsRequest {
        force: true,
        ..request.clone()
    };
    let reused = served.client().release_holds(other).await;
    assert_refused(reused, Code::InvalidArgument, "REQUEST_ID_REUSED");
}

#[tokio::test]
async fn malformed_lists_of_ids_change_nothing() {
    let served = Served::start().await;
    let id = take(&served, "alpha", None).await;
    let (_, number) = id.split_once('-').expect("two parts");
    let short = &served.keys.incarnation().as_str()[..8];
    let bad = [
        (vec![], Code::InvalidArgument, "INVALID_ARGUMENT"),
        (
            vec![id.clone(); 2],
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
        ),
        (
            vec![id.clone(); 65_537],
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
        ),
        (
            vec![id.clone(), format!("{short}-h99")],
            Code::NotFound,
            "HOLD_NOT_FOUND",
        ),
        (
            vec![format!("00000000-{number}")],
            Code::NotFound,
            "HOLD_NOT_FOUND",
        ),
        (vec![format!("{id}0")], Code::NotFound, "HOLD_NOT_FOUND"),
        (
            vec![format!("{short}-h+1")],
            Code::NotFound,
            "HOLD_NOT_FOUND",
        ),
        (
            vec![format!("{short}-h01")],
            Code::NotFound,
            "HOLD_NOT_FOUND",
        ),
        (vec![String::new()], Code::NotFound, "HOLD_NOT_FOUND"),
    ];
    for (ids, code, reason) in bad {
        let ids: Vec<&String> = ids.iter().collect();
        assert_refused(release(&served, &ids, true).await, code, reason);
        assert_refused(renew(&served, &ids, Some(1)).await, code, reason);
    }
    let nothing = Duration::ZERO.try_into().expect("short");
    for ttl in [
        nothing,
        prost_types::Duration {
            seconds: 365 * 86_400 + 1,
            nanos: 0,
        },
    ] {
        let request = v1::RenewHoldsRequest {
            ids: vec![id.clone()],
            ttl: Some(ttl),
            ..Default::default()
        };
        let refused = served.client().renew_holds(request).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
    assert_eq!(served.holds().await[0].expires_at, None);
    assert_eq!(served.guest.count("alpha"), 1);
}

#[tokio::test]
async fn holds_of_others_are_released_by_force_and_renewed_by_nobody_else() {
    let served = Served::start().await;
    let own = take(&served, "beta", None).await;
    let id = take_as(&served, "other", "alpha").await;
    let refused = release(&served, &[&own, &id], false).await;
    let (message, _) = assert_refused(refused, Code::FailedPrecondition, "NOT_HOLDER");
    assert!(message.contains("other"), "{message}");
    let refused = renew(&served, &[&own, &id], Some(1)).await;
    assert_refused(refused, Code::FailedPrecondition, "NOT_HOLDER");
    assert_eq!(served.holds().await.len(), 2);
    release(&served, &[&own, &id], true).await.expect("forced");
    assert!(served.holds().await.is_empty());
}

#[tokio::test]
async fn a_renewed_hold_expires_later_or_never() {
    let served = Served::start().await;
    let alpha = take(&served, "alpha", Some(10)).await;
    let beta = take(&served, "beta", Some(10)).await;
    let pauses = served.guest.pauses();
    let renewed = renew(&served, &[&beta, &alpha], Some(100)).await;
    let renewed = renewed.expect("its own");
    let ids: Vec<&String> = renewed.iter().map(|hold| &hold.id).collect();
    assert_eq!(ids, [&beta, &alpha]);
    let last = served.audit().pop().expect("a line");
    assert_eq!(
        (&last["event"], &last["holds"][1], &last["ttl_ms"]),
        (&"renewal".into(), &alpha.clone().into(), &100_000.into())
    );
    later(&served, 99).await;
    assert_eq!(served.holds().await.len(), 2);
    renew(&served, &[&beta], None).await.expect("its own");
    later(&served, 1).await;
    let left = served.holds().await;
    assert_eq!((left.len(), &left[0].id), (1, &beta));
    assert_eq!(left[0].expires_at, None);
    assert!(!served.guest.jumps("alpha"));
    assert_eq!(served.guest.pauses(), pauses + 1, "renewing takes no pause");
}

#[tokio::test]
async fn a_renewed_hold_joins_one_that_differs_in_nothing_else() {
    let served = Served::start().await;
    let forever = take(&served, "alpha", None).await;
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.ttl = Some(Duration::from_secs(5).try_into().expect("short"));
    let brief = served.update(update).await.expect("a ref key");
    let brief = &brief.results[0].hold_id;
    let renewed = renew(&served, &[brief], None).await.expect("its own");
    assert_eq!((&renewed[0].id, renewed[0].references), (&forever, 2));
    let gone = renew(&served, &[brief], None).await;
    assert_refused(gone, Code::NotFound, "HOLD_NOT_FOUND");
}

#[tokio::test]
async fn holds_are_listed_in_pages_by_key_and_age() {
    const KEYS: usize = 25;
    let keys = (0..KEYS).map(|number| TestKey::new(&format!("key{number:02}"), 0));
    let served = Served::with(Setup {
        keys: Some(keys.collect()),
        ..Setup::default()
    })
    .await;
    for number in (0..KEYS).rev() {
        let key = format!("key{number:02}");
        take_as(&served, "other", &key).await;
        served.op(&key, KeyOp::Inc).await.expect("a ref key");
    }
    let mut request = v1::ListHoldsRequest {
        page_size: 7,
        ..Default::default()
    };
    let mut seen = vec![];
    loop {
        let page = list(&served, request.clone()).await.expect("listed");
        assert!(page.holds.len() <= 7);
        seen.extend(page.holds.into_iter().map(|hold| (hold.key, hold.holder)));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let uid = format!("uid:{}", rustix::process::getuid().as_raw());
    let all = (0..KEYS).flat_map(|number| {
        let of = |holder: &str| (format!("key{number:02}"), holder.to_owned());
        [of("other"), of(&uid)]
    });
    assert_eq!(seen, all.collect::<Vec<_>>());
    let request = v1::ListHoldsRequest {
        holder: "other".into(),
        patterns: vec!["key0?".into()],
        ..Default::default()
    };
    let others = list(&served, request).await.expect("listed").holds;
    assert_eq!(others.len(), 10);
    assert!(others.iter().all(|hold| hold.holder == "other"));
    for page_token in ["x", "x.key01", "00000000-h1.key01"] {
        let request = v1::ListHoldsRequest {
            page_token: page_token.into(),
            ..Default::default()
        };
        let refused = list(&served, request).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
    let request = v1::ListHoldsRequest {
        page_size: -1,
        ..Default::default()
    };
    let refused = list(&served, request).await;
    assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
}

#[tokio::test]
async fn holds_that_wait_for_their_kernel_or_module_are_listed_and_renewed() {
    let served = Served::start().await;
    assert_eq!(served.guest.add_module("one", &[TestKey::new("key", 1)]), 0);
    let alpha = take(&served, "alpha", Some(5)).await;
    let module = take(&served, "one:key", Some(5)).await;
    let names = async || -> Vec<String> {
        let holds = served.holds().await.into_iter();
        holds.map(|hold| hold.key).collect()
    };
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(names().await, ["alpha", "one:key"]);
    let refused = release(&served, &[&alpha], false).await;
    assert_refused(refused, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    renew(&served, &[&alpha, &module], None)
        .await
        .expect("its own");
    assert_eq!(served.guest.register_again(), 0);
    assert_eq!(names().await, ["alpha", "one:key"]);
    let refused = release(&served, &[&alpha, &module], false).await;
    assert_refused(refused, Code::FailedPrecondition, "MODULE_REFUSED");
    assert_eq!(served.guest.count("alpha"), 1, "all or nothing");
    assert_eq!(served.guest.add_module_again("one", |_| ()), 0);
    release(&served, &[&alpha, &module], false)
        .await
        .expect("both are known");
    // Another kernel has no holds.
    let id = take(&served, "alpha", None).await;
    assert_eq!(served.guest.register(&every_kind()), 0);
    assert!(names().await.is_empty());
    let gone = renew(&served, &[&id], None).await;
    assert_refused(gone, Code::NotFound, "HOLD_NOT_FOUND");
}

#[tokio::test]
async fn what_the_guest_has_voided_is_neither_listed_nor_released() {
    let served = Served::start().await;
    let id = take(&served, "alpha", None).await;
    served.guest.set_count("alpha", 0);
    assert!(served.holds().await.is_empty());
    let gone = release(&served, &[&id], false).await;
    assert_refused(gone, Code::NotFound, "HOLD_NOT_FOUND");
    assert_eq!(served.guest.count("alpha"), 0);
}

#[tokio::test]
async fn a_release_waits_for_a_busy_guest_up_to_its_deadline() {
    let served = Served::start().await;
    let id = take(&served, "alpha", None).await;
    served.guest.set_gate(Gate::JumpLabelMutex, 0x1000);
    let request = v1::ReleaseHoldsRequest {
        ids: vec![id],
        retry_timeout: Some(Duration::from_millis(5).try_into().expect("short")),
        ..Default::default()
    };
    let busy = served.client().release_holds(request.clone()).await;
    assert_refused(busy, Code::Unavailable, "GUEST_BUSY");
    assert_eq!(served.holds().await.len(), 1);
    served.guest.set_gate(Gate::JumpLabelMutex, 0);
    let patient = v1::ReleaseHoldsRequest {
        retry_timeout: None,
        ..request
    };
    let released = served.client().release_holds(patient).await;
    released.expect("the gate is open");
}
