// SPDX-License-Identifier: Apache-2.0
//! Tests updates: their effects, and every reason for which they must be refused.

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use tonic::Code;

use super::support::{Served, Setup, assert_refused, every_kind, request};

#[tokio::test]
async fn crossing_zero_patches_every_site_in_one_pause() {
    let served = Served::start().await;
    let response = served.op("beta", KeyOp::Inc).await.expect("a ref key");
    let result = &response.results[0];
    assert_eq!(
        (
            result.count_before,
            result.count_after,
            result.sites_patched
        ),
        (0, 1, 3)
    );
    let report = response.report.expect("a report");
    assert!(report.paused);
    assert_eq!((report.sites_patched, report.attempts), (3, 1));
    assert_eq!(report.stop_time.expect("told").nanos, 20_000);
    assert!(served.guest.jumps("beta"));
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (1, 1));

    served.op("beta", KeyOp::Dec).await.expect("own reference");
    assert!(!served.guest.jumps("beta"));
    assert_eq!(served.guest.count("beta"), 0);
}

#[tokio::test]
async fn counts_that_do_not_cross_zero_take_no_pause() {
    let served = Served::start().await;
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    let response = served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    assert!(!response.report.expect("a report").paused);
    served.op("alpha", KeyOp::Dec).await.expect("own reference");
    assert_eq!((served.guest.count("alpha"), served.guest.pauses()), (1, 1));
}

#[tokio::test]
async fn likely_sites_and_siteless_keys_follow_their_keys() {
    let served = Served::start().await;
    let mut off = request(&[("likely", KeyOp::Disable)]);
    off.force = true;
    served.update(off).await.expect("forced");
    assert!(
        served.guest.jumps("likely"),
        "a likely branch that is off jumps"
    );
    let response = served
        .op("siteless", KeyOp::Enable)
        .await
        .expect("a key without sites");
    assert_eq!(response.results[0].sites_patched, 0);
    assert_eq!(served.guest.count("siteless"), 1);
}

#[tokio::test]
async fn ops_of_one_key_are_folded_and_results_come_in_order() {
    let served = Served::start().await;
    let response = served
        .update(request(&[
            ("beta", KeyOp::Inc),
            ("alpha", KeyOp::Enable),
            ("beta", KeyOp::Inc),
            ("beta", KeyOp::Dec),
        ]))
        .await
        .expect("ref keys");
    let told: Vec<_> = response
        .results
        .iter()
        .map(|result| (result.name.as_str(), result.count_after))
        .collect();
    assert_eq!(told, [("beta", 1), ("alpha", 1)]);
    assert_eq!(served.guest.pauses(), 1);
    assert_eq!(served.audit().len(), 2);
}

#[tokio::test]
async fn one_bad_key_among_good_ones_changes_nothing() {
    let served = Served::start().await;
    let bad = [
        ("no_such_key", KeyOp::Inc, Code::NotFound, "KEY_NOT_FOUND"),
        ("sealed", KeyOp::Inc, Code::FailedPrecondition, "KEY_SEALED"),
        (
            "guarded",
            KeyOp::Inc,
            Code::FailedPrecondition,
            "KEY_GUARDED",
        ),
        (
            "siteless",
            KeyOp::Dec,
            Code::FailedPrecondition,
            "WOULD_WARN",
        ),
        ("likely", KeyOp::Dec, Code::FailedPrecondition, "NOT_HOLDER"),
        (
            "sched_waking",
            KeyOp::Enable,
            Code::FailedPrecondition,
            "TRACEPOINT_REFUSED",
        ),
        (
            "alpha",
            KeyOp::Unspecified,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
        ),
    ];
    for (name, op, code, reason) in bad {
        let result = served
            .update(request(&[
                ("alpha", KeyOp::Inc),
                (name, op),
                ("beta", KeyOp::Inc),
            ]))
            .await;
        let (message, _) = assert_refused(result, code, reason);
        assert!(message.contains(name), "{message}");
        assert_eq!(
            (served.guest.count("alpha"), served.guest.count("beta")),
            (0, 0),
            "{name}"
        );
    }
    assert_eq!(served.guest.pauses(), 0);
    assert!(served.holds().await.is_empty());
}

#[tokio::test]
async fn requests_out_of_bounds_are_refused() {
    let served = Served::start().await;
    let good = request(&[("alpha", KeyOp::Inc)]);
    let huge = vec![
        v1::KeyUpdate {
            name: "alpha".into(),
            op: KeyOp::Inc.into(),
            ..Default::default()
        };
        65_537
    ];
    let duration = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
    let bad = [
        (
            "updates",
            v1::UpdateStaticKeysRequest {
                updates: vec![],
                ..good.clone()
            },
        ),
        (
            "updates",
            v1::UpdateStaticKeysRequest {
                updates: huge,
                ..good.clone()
            },
        ),
        ("updates", request(&[("", KeyOp::Inc)])),
        (
            "request_id",
            v1::UpdateStaticKeysRequest {
                request_id: "x".repeat(129),
                ..good.clone()
            },
        ),
        (
            "reason",
            v1::UpdateStaticKeysRequest {
                reason: "x".repeat(257),
                ..good.clone()
            },
        ),
        (
            "ttl",
            v1::UpdateStaticKeysRequest {
                ttl: duration(-1, 0),
                ..good.clone()
            },
        ),
        (
            "ttl",
            v1::UpdateStaticKeysRequest {
                ttl: duration(0, 10),
                ..good.clone()
            },
        ),
        (
            "ttl",
            v1::UpdateStaticKeysRequest {
                ttl: duration(i64::MAX, 0),
                ..good.clone()
            },
        ),
        (
            "ttl",
            v1::UpdateStaticKeysRequest {
                ttl: duration(0, 0),
                ..good.clone()
            },
        ),
        (
            "stop_timeout",
            v1::UpdateStaticKeysRequest {
                stop_timeout: duration(0, 0),
                ..good.clone()
            },
        ),
        (
            "retry_timeout",
            v1::UpdateStaticKeysRequest {
                retry_timeout: duration(31, 0),
                ..good.clone()
            },
        ),
        (
            "stop_timeout",
            v1::UpdateStaticKeysRequest {
                stop_timeout: duration(3600, 0),
                ..good.clone()
            },
        ),
    ];
    for (field, request) in bad {
        let (message, _) = assert_refused(
            served.update(request).await,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
        );
        assert!(message.starts_with(field), "{message}");
    }
    assert_eq!(served.guest.count("alpha"), 0);
}

#[tokio::test]
async fn validate_only_answers_and_changes_nothing() {
    let served = Served::start().await;
    let mut dry = request(&[("beta", KeyOp::Enable)]);
    dry.validate_only = true;
    dry.request_id = "dry".into();
    let response = served.update(dry).await.expect("possible");
    assert_eq!(
        (
            response.results[0].count_before,
            response.results[0].count_after
        ),
        (0, 1)
    );
    assert_eq!(response.results[0].sites_patched, 3);
    assert_eq!((served.guest.count("beta"), served.guest.pauses()), (0, 0));
    assert!(served.audit().is_empty() && served.holds().await.is_empty());
    let mut impossible = request(&[("siteless", KeyOp::Dec)]);
    impossible.validate_only = true;
    assert_refused(
        served.update(impossible).await,
        Code::FailedPrecondition,
        "WOULD_WARN",
    );
    // The request id can be used again, because the dry run has changed nothing.
    let mut real = request(&[("beta", KeyOp::Enable)]);
    real.request_id = "dry".into();
    served
        .update(real)
        .await
        .expect("the first change with this id");
    assert_eq!(served.guest.count("beta"), 1);
}

#[tokio::test]
async fn a_repeated_request_id_gets_the_first_answer() {
    let served = Served::start().await;
    let mut first = request(&[("alpha", KeyOp::Inc)]);
    first.request_id = "once".into();
    let answer = served.update(first.clone()).await.expect("a ref key");
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(
        served.update(first.clone()).await.expect("replayed"),
        answer
    );
    assert_eq!(served.guest.count("alpha"), 2);
    let mut other = request(&[("beta", KeyOp::Inc)]);
    other.request_id = "once".into();
    assert_refused(
        served.update(other).await,
        Code::InvalidArgument,
        "REQUEST_ID_REUSED",
    );
    assert_eq!(served.guest.count("beta"), 0);
}

#[tokio::test]
async fn a_failed_request_id_may_be_tried_again() {
    let served = Served::start().await;
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.request_id = "again".into();
    served.guest.set_late(true);
    assert_refused(
        served.update(update.clone()).await,
        Code::DeadlineExceeded,
        "VCPU_NOT_STOPPED",
    );
    served.guest.set_late(false);
    served.update(update).await.expect("the vCPU stops now");
    assert_eq!(served.guest.count("alpha"), 1);
}

#[tokio::test]
async fn etags_guard_against_what_one_has_not_seen() {
    let served = Served::start().await;
    let seen = served.get("alpha").await.expect("exists").etag;
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.updates[0].etag.clone_from(&seen);
    let answer = served
        .update(update.clone())
        .await
        .expect("unchanged since");
    let (_, metadata) = assert_refused(served.update(update).await, Code::Aborted, "ETAG_MISMATCH");
    assert_eq!(metadata["etag"], answer.results[0].etag);
    assert_eq!(
        served.get("alpha").await.expect("exists").etag,
        answer.results[0].etag
    );
    assert_eq!(served.guest.count("alpha"), 1);
    // This is another registration with the same count.
    assert_eq!(served.guest.register(&every_kind()), 0);
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.updates[0].etag = seen;
    assert_refused(served.update(update).await, Code::Aborted, "ETAG_MISMATCH");
}

/// Checks that an earlier etag is refused even if the count has returned to its earlier value or
/// the module was loaded again, because its client has missed a change.
#[tokio::test]
async fn etags_tell_a_change_there_and_back_and_a_module_loaded_again() {
    let served = Served::start().await;
    let module = || served.guest.add_module("ext4", &[TestKey::new("own", 1)]);
    assert_eq!(module(), 0);
    let guarded = |name: &str, etag: &str| {
        let mut update = request(&[(name, KeyOp::Inc)]);
        etag.clone_into(&mut update.updates[0].etag);
        update
    };
    let seen = served.get("alpha").await.expect("exists").etag;
    served.op("beta", KeyOp::Inc).await.expect("another key");
    assert_eq!(served.get("alpha").await.expect("exists").etag, seen);
    served.op("alpha", KeyOp::Inc).await.expect("there");
    let back = served.op("alpha", KeyOp::Dec).await.expect("and back");
    let result = served.update(guarded("alpha", &seen)).await;
    let (_, metadata) = assert_refused(result, Code::Aborted, "ETAG_MISMATCH");
    assert_eq!(metadata["etag"], back.results[0].etag);

    let seen = served.get("ext4:own").await.expect("exists").etag;
    assert_eq!(served.guest.delete_module("ext4"), 0);
    assert_eq!(module(), 0);
    let result = served.update(guarded("ext4:own", &seen)).await;
    assert_refused(result, Code::Aborted, "ETAG_MISMATCH");

    // The etag that a validation returns is valid for the change.
    let mut dry = request(&[("alpha", KeyOp::Inc)]);
    dry.validate_only = true;
    let tried = served.update(dry).await.expect("possible");
    let update = guarded("alpha", &tried.results[0].etag);
    served.update(update).await.expect("not changed since");
}

#[tokio::test]
async fn guarded_keys_need_the_monitors_and_the_calls_permission() {
    for (monitor, call) in [(false, false), (false, true), (true, false), (true, true)] {
        let setup = Setup {
            keys: Some(vec![TestKey::guarded("guarded")]),
            allow_guarded: monitor,
            ..Setup::default()
        };
        let served = Served::with(setup).await;
        let mut update = request(&[("guarded", KeyOp::Inc)]);
        update.allow_guarded = call;
        let result = served.update(update).await;
        if monitor && call {
            assert_eq!(result.expect("permitted").results[0].count_after, 1);
        } else {
            assert_refused(result, Code::FailedPrecondition, "KEY_GUARDED");
            assert_eq!(served.guest.count("guarded"), 0);
        }
    }
}

#[tokio::test]
async fn tracepoints_fire_and_park() {
    let served = Served::start().await;
    served
        .op("sched_switch", KeyOp::Enable)
        .await
        .expect("a probe is attached");
    assert!(served.guest.jumps("sched_switch"));
    let again = served.op("sched_switch", KeyOp::Inc).await;
    assert_refused(again, Code::FailedPrecondition, "TRACEPOINT_REFUSED");
    served
        .op("sched_switch", KeyOp::Disable)
        .await
        .expect("own reference");
    assert_eq!(served.guest.count("sched_switch"), 0);
}

#[tokio::test]
async fn without_its_audit_log_the_monitor_changes_nothing() {
    let setup = Setup {
        keys: Some(every_kind()),
        audit: Some("/dev/full".into()),
        ..Setup::default()
    };
    let served = Served::with(setup).await;
    let result = served.op("alpha", KeyOp::Inc).await;
    let (message, _) = assert_refused(result, Code::FailedPrecondition, "AUDIT_LOG_UNWRITABLE");
    assert!(message.contains("/dev/full"), "{message}");
    assert_eq!((served.guest.count("alpha"), served.guest.pauses()), (0, 0));
}

#[tokio::test]
async fn the_audit_log_tells_who_what_and_why() {
    let served = Served::start().await;
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.reason = "incident 7".into();
    update.request_id = "id-7".into();
    served.update(update).await.expect("a ref key");
    let lines = served.audit();
    let uid = rustix::process::getuid().as_raw();
    assert_eq!(lines[0]["event"], "intent");
    assert_eq!(lines[0]["owner"], format!("uid:{uid}"));
    assert_eq!(
        (&lines[0]["reason"], &lines[0]["request_id"]),
        (&"incident 7".into(), &"id-7".into())
    );
    assert_eq!(
        lines[0]["updates"][0],
        serde_json::json!({"key": "alpha", "op": "inc"})
    );
    assert_eq!(lines[1]["changes"][0]["after"], 1);
}

#[tokio::test]
async fn a_guest_that_has_ended_is_told() {
    let served = Served::start().await;
    served
        .guest_client()
        .shutdown_guest(v1::ShutdownGuestRequest {
            force: true,
            ..Default::default()
        })
        .await
        .expect("shut down");
    assert_refused(
        served.op("alpha", KeyOp::Inc).await,
        Code::FailedPrecondition,
        "GUEST_STOPPED",
    );
}

/// Checks that all keys of a guest change in one transaction.
#[tokio::test]
async fn a_thousand_keys_take_one_pause() {
    let keys: Vec<TestKey> = (0..1000)
        .map(|n| TestKey::new(&format!("key{n:04}"), 2))
        .collect();
    let served = Served::with(Setup {
        keys: Some(keys.clone()),
        ..Setup::default()
    })
    .await;
    let updates: Vec<(&str, KeyOp)> = keys
        .iter()
        .map(|key| (key.name.as_str(), KeyOp::Enable))
        .collect();
    let response = served.update(request(&updates)).await.expect("ref keys");
    assert_eq!(response.results.len(), 1000);
    assert_eq!(response.report.expect("a report").sites_patched, 2000);
    assert_eq!(served.guest.pauses(), 1);
    assert!(keys.iter().all(|key| served.guest.jumps(&key.name)));
}
