// SPDX-License-Identifier: Apache-2.0
//! Tests prepared changes: the results of a commit, and every reason for which it must be refused.

use std::time::{Duration, Instant};

use patchbay_guest::testing::{Gate, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::keys::{
    CommitRequest, DiscardRequest, KeyUpdate, PrepareRequest, UpdateRequest,
};
use static_keys::Op;
use tonic::{Code, Status};

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

/// The maximum number of plans of one principal.
const PLANS: usize = 64;

pub fn preparation(updates: &[(&str, KeyOp)]) -> v1::PrepareUpdateRequest {
    v1::PrepareUpdateRequest {
        updates: request(updates).updates,
        ..Default::default()
    }
}

pub fn commitment(plan_id: &str) -> v1::CommitUpdateRequest {
    v1::CommitUpdateRequest {
        plan_id: plan_id.to_owned(),
        ..Default::default()
    }
}

impl Served {
    pub async fn prepare(
        &self,
        request: v1::PrepareUpdateRequest,
    ) -> Result<v1::PrepareUpdateResponse, Status> {
        Ok(self.client().prepare_update(request).await?.into_inner())
    }

    /// Prepares one op on one key.
    pub async fn plan(&self, name: &str, op: KeyOp) -> v1::PrepareUpdateResponse {
        let plan = self.prepare(preparation(&[(name, op)])).await;
        plan.expect("a change that may be made")
    }

    pub async fn commit(&self, plan_id: &str) -> Result<v1::CommitUpdateResponse, Status> {
        self.commit_as(commitment(plan_id)).await
    }

    pub async fn commit_as(
        &self,
        request: v1::CommitUpdateRequest,
    ) -> Result<v1::CommitUpdateResponse, Status> {
        Ok(self.client().commit_update(request).await?.into_inner())
    }

    async fn discard(&self, plan_id: &str) -> Result<(), Status> {
        let plan_id = plan_id.to_owned();
        let request = v1::DiscardUpdateRequest {
            plan_id,
            ..Default::default()
        };
        self.client().discard_update(request).await.map(drop)
    }
}

fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

#[tokio::test]
async fn what_was_prepared_is_what_is_made() {
    let served = Served::start().await;
    let plan = preparation(&[("beta", KeyOp::Inc), ("alpha", KeyOp::Enable)]);
    let reason = "reviewed".to_owned();
    let plan = v1::PrepareUpdateRequest { reason, ..plan };
    let plan = served.prepare(plan).await.expect("ref keys");
    let told = |results: &[v1::KeyResult]| -> Vec<_> {
        let result = |of: &v1::KeyResult| {
            let counts = (of.count_before, of.count_after);
            (of.name.clone(), counts, of.sites_patched)
        };
        results.iter().map(result).collect()
    };
    let expected = [
        ("beta".to_owned(), (0, 1), 3),
        ("alpha".to_owned(), (0, 1), 1),
    ];
    assert_eq!(told(&plan.results), expected);
    let summary = plan.summary.expect("a summary");
    assert_eq!((summary.keys_changed, summary.sites_patched), (2, 4));
    assert_eq!(plan.digest.len(), 64, "{}", plan.digest);
    assert_eq!(plan.predicted_pause, None, "nothing was changed yet");
    assert_eq!(
        plan.results[0].etag,
        served.get("beta").await.expect("a key").etag
    );
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (0, 0));
    assert!(!served.guest.jumps("beta"));
    assert!(served.audit().is_empty() && served.holds().await.is_empty());

    let made = served.commit(&plan.plan_id).await.expect("as prepared");
    assert_eq!(told(&made.results), expected);
    assert_eq!(made.summary, plan.summary);
    let report = made.report.expect("a report");
    assert_eq!((report.paused, report.attempts), (true, 1));
    assert!(served.guest.jumps("beta") && served.guest.jumps("alpha"));
    assert_eq!(served.guest.pauses(), 1);
    assert_eq!(
        made.results[0].etag,
        served.get("beta").await.expect("a key").etag
    );
    let holds = served.holds().await;
    assert_eq!((holds.len(), holds[0].reason.as_str()), (2, "reviewed"));
    let audit = served.audit();
    assert_eq!(audit.len(), 2);
    assert_eq!(audit[0]["plan"]["id"], plan.plan_id.as_str());
    assert_eq!(audit[0]["plan"]["digest"], plan.digest.as_str());
    assert_eq!(audit[0]["updates"][0]["key"], "beta");
    assert_eq!(
        (&audit[1]["result"], &audit[1]["id"]),
        (&"committed".into(), &audit[0]["id"])
    );

    let next = served.plan("beta", KeyOp::Dec).await;
    assert!(next.predicted_pause.expect("from the first").nanos > 0);
    let next = served.plan("beta", KeyOp::Inc).await;
    assert_eq!(next.predicted_pause, seconds(0), "it needs no pause");
    served
        .op("beta", KeyOp::Dec)
        .await
        .expect("an own reference");
    assert_eq!(served.audit()[2].get("plan"), None, "an update has none");
}

#[tokio::test]
async fn the_digest_is_of_keys_counts_and_sites() {
    let served = Served::start().await;
    let digest = async |updates: &[(&str, KeyOp)]| {
        let plan = served.prepare(preparation(updates)).await;
        plan.expect("ref keys").digest
    };
    let both = [("beta", KeyOp::Inc), ("alpha", KeyOp::Inc)];
    let first = digest(&both).await;
    assert_eq!(digest(&both).await, first);
    let reordered = [("alpha", KeyOp::Enable), ("beta", KeyOp::Enable)];
    assert_eq!(digest(&reordered).await, first, "it does the same");
    assert_ne!(digest(&both[..1]).await, first);
    let twice = [both[0], both[1], both[1]];
    assert_ne!(digest(&twice).await, first, "another count after");
    // Turning the key on and off again restores the earlier state.
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    assert_ne!(digest(&both).await, first, "another count before");
    served
        .op("beta", KeyOp::Dec)
        .await
        .expect("an own reference");
    assert_eq!(digest(&both).await, first);
    // After a new registration, the key beta has one more site.
    let keys = every_kind().into_iter().map(|key| match &*key.name {
        "beta" => TestKey::new("beta", 4),
        _ => key,
    });
    assert_eq!(served.guest.register(&keys.collect::<Vec<_>>()), 0);
    assert_ne!(digest(&both).await, first);
}

#[tokio::test]
async fn a_second_commit_gets_the_first_answer() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await;
    let first = served.commit(&plan.plan_id).await.expect("as prepared");
    // The answer is the same even if the guest has changed since.
    assert_eq!(served.guest.add_module("ext4", &[]), 0);
    served
        .op("beta", KeyOp::Dec)
        .await
        .expect("an own reference");
    let second = served.commit(&plan.plan_id).await.expect("the same");
    assert_eq!(first, second);
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (0, 2));
    served.clock.advance(Duration::from_secs(600));
    let gone = served.commit(&plan.plan_id).await;
    assert_refused(gone, Code::NotFound, "PLAN_NOT_FOUND");
}

#[tokio::test]
async fn plans_that_are_not_kept_are_not_found() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    let other = "0".repeat(8) + &plan[8..];
    let long = "x".repeat(1 << 20);
    let leading_zero = plan.replace("-p", "-p0");
    for bad in ["1", &other, &leading_zero, &long, &format!("{plan} ")] {
        let (message, _) =
            assert_refused(served.commit(bad).await, Code::NotFound, "PLAN_NOT_FOUND");
        assert!(message.len() < 400, "{message}");
        served.discard(bad).await.expect("idempotent");
    }
    assert_refused(
        served.commit("").await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
    );
    assert_refused(
        served.discard("").await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
    );
    served.discard(&plan).await.expect("its own");
    served.discard(&plan).await.expect("idempotent");
    assert_refused(served.commit(&plan).await, Code::NotFound, "PLAN_NOT_FOUND");

    for ttl in [None, seconds(1), seconds(24 * 3600)] {
        let lifetime = Duration::from_secs(ttl.map_or(600, |ttl| ttl.seconds.unsigned_abs()));
        let plan = v1::PrepareUpdateRequest {
            plan_ttl: ttl,
            ..preparation(&[("beta", KeyOp::Inc)])
        };
        let plan = served.prepare(plan).await.expect("a ref key");
        let expires = plan.expires_at.expect("told").seconds;
        let now = std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .expect("after 1970");
        let left = expires.unsigned_abs().saturating_sub(now.as_secs());
        assert!(
            left <= lifetime.as_secs() && left + 60 > lifetime.as_secs(),
            "{left}"
        );
        served.clock.advance(lifetime);
        let gone = served.commit(&plan.plan_id).await;
        assert_refused(gone, Code::NotFound, "PLAN_NOT_FOUND");
    }
    assert_eq!(served.guest.count("beta"), 0);
    assert!(served.audit().is_empty());
}

#[tokio::test]
async fn another_digest_is_not_made() {
    let served = Served::start().await;
    let old = served.plan("beta", KeyOp::Inc).await;
    let plan = served.prepare(preparation(&[("beta", KeyOp::Inc), ("alpha", KeyOp::Inc)]));
    let plan = plan.await.expect("ref keys");
    let with = |digest: &str| v1::CommitUpdateRequest {
        digest: digest.to_owned(),
        ..commitment(&plan.plan_id)
    };
    for bad in [&old.digest, &"f".repeat(1 << 20)] {
        let stale = served.commit_as(with(bad)).await;
        let (message, _) = assert_refused(stale, Code::FailedPrecondition, "PLAN_STALE");
        assert!(
            message.contains(&plan.digest) && message.len() < 400,
            "{message}"
        );
    }
    assert_eq!(served.guest.pauses(), 0);
    served.commit_as(with(&plan.digest)).await.expect("its own");
    let stale = served.commit_as(with(&old.digest)).await;
    assert_refused(stale, Code::FailedPrecondition, "PLAN_STALE");
}

fn commit_by(principal: &str, plan_id: &str) -> CommitRequest {
    CommitRequest {
        plan_id: plan_id.to_owned(),
        digest: None,
        caller: principal.into(),
        summary_only: false,
        stop_timeout: PATIENCE,
        deadline: Instant::now() + PATIENCE,
    }
}

#[tokio::test]
async fn a_plan_is_its_principals() {
    let served = Served::start().await;
    let plan = served.plan("beta", KeyOp::Inc).await.plan_id;
    let refused = served.keys.commit(commit_by("uid:4711", &plan)).await;
    let refused = refused.map_err(Status::from);
    assert_refused(refused, Code::PermissionDenied, "PLAN_NOT_OWNED");
    let discard = DiscardRequest {
        plan_id: plan.clone(),
        principal: "uid:4711".to_owned(),
    };
    let refused = served.keys.discard(discard).await.map_err(Status::from);
    assert_refused(refused, Code::PermissionDenied, "PLAN_NOT_OWNED");
    assert!(served.audit().is_empty());
    served.commit(&plan).await.expect("still its own");
    // Other principals cannot get the answer either.
    let refused = served.keys.commit(commit_by("uid:4711", &plan)).await;
    let refused = refused.map_err(Status::from);
    assert_refused(refused, Code::PermissionDenied, "PLAN_NOT_OWNED");
}

fn prepare_by(principal: &str, key: &str) -> PrepareRequest {
    PrepareRequest {
        update: UpdateRequest {
            summary_only: true,
            ..UpdateRequest::new(
                vec![KeyUpdate::new(key, Op::Inc)],
                principal,
                PATIENCE,
                Instant::now() + PATIENCE,
            )
        },
        plan_ttl: Duration::from_secs(600),
    }
}

/// Polls a call once, so that its command is sent to the executor, and then drops the call.
fn abandon(call: impl Future) {
    let mut call = Box::pin(call);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let _ = call.as_mut().poll(&mut context);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_call_with_it() {
    let served = Served::start().await;
    let plan = served.keys.prepare(prepare_by("a", "beta")).await;
    let plan = plan.expect("a ref key").plan_id.clone();
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    abandon(served.keys.commit(commit_by("a", &plan)));
    // The executor answers this call after it has handled the dropped call.
    served.keys.tick().await.expect("served");
    let audit = served.audit();
    let waited = |line: &serde_json::Value| line["reason"] == "GUEST_BUSY";
    assert!(
        !audit.iter().any(waited),
        "not up to its deadline: {audit:?}"
    );
    served.guest.set_gate(Gate::TextMutex, 0);
    assert_eq!(served.guest.count("beta"), 0);
    served
        .keys
        .commit(commit_by("a", &plan))
        .await
        .expect("kept");
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    for _ in 0..2 * PLANS {
        abandon(served.keys.prepare(prepare_by("a", "alpha")));
        served.keys.tick().await.expect("served");
    }
    served.guest.set_gate(Gate::TextMutex, 0);
    // No plan is kept for a call that was dropped.
    let plans = async || served.keys.prepare(prepare_by("a", "alpha")).await;
    for _ in 0..PLANS {
        plans().await.expect("room for it");
    }
}

#[tokio::test]
async fn plans_are_bounded_and_make_room_when_they_end() {
    let served = Served::start().await;
    let prepare = async || {
        let plan = served.keys.prepare(prepare_by("a", "beta")).await;
        plan.map(|plan| plan.plan_id.clone()).map_err(Status::from)
    };
    let mut plans = vec![];
    for _ in 0..PLANS {
        plans.push(prepare().await.expect("room for it"));
    }
    let refused = prepare().await;
    let (message, _) = assert_refused(refused, Code::ResourceExhausted, "TOO_MANY_PLANS");
    assert!(
        message.contains("kept for a ") && message.contains("64 plans"),
        "{message}"
    );
    let other = served.keys.prepare(prepare_by("b", "beta")).await;
    other.expect("another principal has its own share");
    let commit = served.keys.commit(commit_by("a", &plans[9])).await;
    commit.expect("as prepared");
    prepare().await.expect("committed ones make room");
    assert_refused(prepare().await, Code::ResourceExhausted, "TOO_MANY_PLANS");
    let (plan_id, principal) = (plans[3].clone(), "a".to_owned());
    let discard = DiscardRequest { plan_id, principal };
    served.keys.discard(discard).await.expect("its own");
    prepare().await.expect("room for it");
    assert_refused(prepare().await, Code::ResourceExhausted, "TOO_MANY_PLANS");
    // A new module makes all these plans stale. Stale plans are discarded and make room.
    assert_eq!(served.guest.add_module("ext4", &[]), 0);
    prepare().await.expect("room for it");
    served.clock.advance(Duration::from_secs(600));
    for _ in 0..PLANS {
        prepare().await.expect("the others have expired");
    }
}

#[tokio::test]
async fn a_hold_counts_from_the_commit() {
    let served = Served::start().await;
    let plan = v1::PrepareUpdateRequest {
        hold_ttl: seconds(60),
        ..preparation(&[("beta", KeyOp::Inc)])
    };
    let plan = served.prepare(plan).await.expect("a ref key").plan_id;
    served.clock.advance(Duration::from_secs(59));
    served.commit(&plan).await.expect("as prepared");
    served.clock.advance(Duration::from_secs(59));
    served.keys.tick().await.expect("served");
    assert_eq!(served.guest.count("beta"), 1);
    served.clock.advance(Duration::from_secs(1));
    served.keys.tick().await.expect("served");
    assert_eq!(served.guest.count("beta"), 0);
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_plan_while_it_is_kept() {
    let served = Served::start().await;
    let with_id = |key| v1::PrepareUpdateRequest {
        request_id: "r1".to_owned(),
        ..preparation(&[(key, KeyOp::Inc)])
    };
    let first = served.prepare(with_id("beta")).await.expect("a ref key");
    let again = served.prepare(with_id("beta")).await.expect("a ref key");
    assert_eq!(first, again);
    let other = served.prepare(with_id("alpha")).await;
    assert_refused(other, Code::InvalidArgument, "REQUEST_ID_REUSED");
    served.commit(&first.plan_id).await.expect("as prepared");
    let again = served.prepare(with_id("beta")).await.expect("kept");
    assert_eq!(first, again, "the client that repeats it commits once");
    served.discard(&first.plan_id).await.expect("its own");
    let fresh = served.prepare(with_id("beta")).await.expect("a ref key");
    assert_ne!(first.plan_id, fresh.plan_id);
}

#[tokio::test]
async fn prepares_are_refused_as_updates_are() {
    let served = Served::start().await;
    let invalid = (Code::InvalidArgument, "INVALID_ARGUMENT");
    let failed = Code::FailedPrecondition;
    let good = preparation(&[("beta", KeyOp::Inc)]);
    let bad = [
        (preparation(&[]), invalid),
        (preparation(&[("beta", KeyOp::Unspecified)]), invalid),
        (
            preparation(&[("none", KeyOp::Inc)]),
            (Code::NotFound, "KEY_NOT_FOUND"),
        ),
        (
            preparation(&[("sealed", KeyOp::Inc)]),
            (failed, "KEY_SEALED"),
        ),
        (
            preparation(&[("guarded", KeyOp::Inc)]),
            (failed, "KEY_GUARDED"),
        ),
        (
            preparation(&[("likely", KeyOp::Dec)]),
            (failed, "NOT_HOLDER"),
        ),
        (
            preparation(&[("siteless", KeyOp::Dec)]),
            (failed, "WOULD_WARN"),
        ),
    ];
    let fields: [fn(&mut v1::PrepareUpdateRequest); 8] = [
        |request| request.plan_ttl = seconds(0),
        |request| request.plan_ttl = seconds(24 * 3600 + 1),
        |request| request.plan_ttl = seconds(-1),
        |request| request.hold_ttl = seconds(0),
        |request| request.hold_ttl = seconds(366 * 24 * 3600),
        |request| request.result_view = 7,
        |request| request.reason = "x".repeat(257),
        |request| request.request_id = "x".repeat(129),
    ];
    let bad = bad.into_iter().chain(fields.map(|change| {
        let mut request = good.clone();
        change(&mut request);
        (request, invalid)
    }));
    for (request, (code, reason)) in bad {
        assert_refused(served.prepare(request).await, code, reason);
    }
    let plan = served.prepare(good).await.expect("a ref key").plan_id;
    let fields: [fn(&mut v1::CommitUpdateRequest); 3] = [
        |request| request.result_view = 7,
        |request| request.stop_timeout = seconds(31),
        |request| request.retry_timeout = seconds(0),
    ];
    for change in fields {
        let mut request = commitment(&plan);
        change(&mut request);
        assert_refused(served.commit_as(request).await, invalid.0, invalid.1);
    }
    assert!(served.audit().is_empty());
}

#[tokio::test]
async fn guarded_keys_are_permitted_in_the_prepare() {
    let served = Served::with(Setup {
        keys: Some(every_kind()),
        allow_guarded: true,
        ..Setup::default()
    })
    .await;
    let plan = v1::PrepareUpdateRequest {
        allow_guarded: true,
        result_view: v1::ResultView::Summary.into(),
        ..preparation(&[("guarded", KeyOp::Enable)])
    };
    let plan = served.prepare(plan).await.expect("permitted");
    assert!(plan.results.is_empty());
    assert_eq!(plan.summary.expect("a summary").keys, 1);
    served.commit(&plan.plan_id).await.expect("as prepared");
    assert!(served.guest.jumps("guarded"));
}
