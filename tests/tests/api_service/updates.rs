// SPDX-License-Identifier: Apache-2.0
//! Updates: what they do, and everything that must keep them from doing it.

use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_vmm::keys::testing::{Gate, TestKey};
use tonic::{Code, Request};

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

fn within(
    request: v1::UpdateStaticKeysRequest,
    timeout: Duration,
) -> Request<v1::UpdateStaticKeysRequest> {
    let mut request = Request::new(request);
    request.set_timeout(timeout);
    request
}

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
            etag: String::new()
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
    // Its id is free: nothing was changed with it.
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
    // Another registration, the same count.
    assert_eq!(served.guest.register(&every_kind()), 0);
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.updates[0].etag = seen;
    assert_refused(served.update(update).await, Code::Aborted, "ETAG_MISMATCH");
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
async fn a_closed_gate_is_named_at_the_deadline() {
    let served = Served::start().await;
    let gates = [
        (Gate::JumpLabelMutex, 0x1000, 0, "jump_label_mutex"),
        (Gate::TextMutex, 0x1000, 0, "text_mutex"),
        (Gate::SystemState, 0, 2, "system_state"),
        (Gate::TextPokeQueue, 1, 0, "tp_vec_nr"),
        (Gate::TextPokeReferences, 1, 0, "bp_desc"),
    ];
    for (gate, closed, open, name) in gates {
        served.guest.set_gate(gate, closed);
        let call = within(
            request(&[("alpha", KeyOp::Inc)]),
            Duration::from_millis(300),
        );
        let result = served.client().update_static_keys(call).await;
        let (message, metadata) = assert_refused(result, Code::Aborted, "GUEST_BUSY");
        assert!(
            message.contains(name) && metadata["gate"].contains(name),
            "{message}"
        );
        assert!(
            metadata["attempts"].parse::<u32>().expect("a number") > 1,
            "{message}"
        );
        assert_eq!(served.guest.count("alpha"), 0);
        served.guest.set_gate(gate, open);
    }
    assert!(served.audit().is_empty(), "nothing was about to be changed");
}

/// Closed only once the guest stands still: the intent is on record then, and so is what became of it.
#[tokio::test]
async fn a_gate_that_closes_before_the_stop_is_seen_under_it() {
    let served = Served::start().await;
    let guest = Arc::clone(&served.guest);
    served
        .guest
        .on_pause(move || guest.set_gate(Gate::JumpLabelMutex, 0x1000));
    let call = within(
        request(&[("alpha", KeyOp::Inc)]),
        Duration::from_millis(300),
    );
    let result = served.client().update_static_keys(call).await;
    assert_refused(result, Code::Aborted, "GUEST_BUSY");
    assert_eq!((served.guest.count("alpha"), served.guest.pauses()), (0, 1));
    let lines = served.audit();
    assert_eq!(
        lines.len(),
        2,
        "an intent and an outcome, not one per attempt"
    );
    assert_eq!(
        (&lines[1]["result"], &lines[1]["reason"]),
        (&"failed".into(), &"GUEST_BUSY".into())
    );
}

/// Bits below the owner's are flags (MUTEX_FLAGS in kernel/locking/mutex.h).
#[tokio::test]
async fn flag_bits_of_a_free_mutex_do_not_close_the_gate() {
    let served = Served::start().await;
    served.guest.set_gate(Gate::JumpLabelMutex, 1);
    served
        .op("alpha", KeyOp::Inc)
        .await
        .expect("free, with waiters");
}

#[tokio::test]
async fn an_update_gets_through_once_the_guest_is_out_of_the_way() {
    let served = Served::start().await;
    let guest = Arc::clone(&served.guest);
    let site = served.guest.sites("alpha")[0];
    let mut left = 3;
    served.guest.on_pause(move || {
        left -= 1;
        guest.set_rips(vec![if left == 0 { site } else { site + 1 }]);
    });
    let response = served
        .op("alpha", KeyOp::Inc)
        .await
        .expect("out of the way");
    assert_eq!(response.report.expect("a report").attempts, 3);
}

#[tokio::test]
async fn a_vcpu_inside_a_site_is_waited_for() {
    let served = Served::start().await;
    let site = served.guest.sites("alpha")[0];
    served.guest.set_rips(vec![site + 2]);
    let call = within(
        request(&[("alpha", KeyOp::Inc)]),
        Duration::from_millis(200),
    );
    assert_refused(
        served.client().update_static_keys(call).await,
        Code::Aborted,
        "GUEST_BUSY",
    );
    for rip in [site, site + 5] {
        served.guest.set_rips(vec![rip]);
        served
            .op("alpha", KeyOp::Inc)
            .await
            .expect("beside the site");
        served
            .op("alpha", KeyOp::Dec)
            .await
            .expect("beside the site");
    }
}

#[tokio::test]
async fn a_late_vcpu_is_named_and_nothing_changes() {
    let served = Served::start().await;
    served.guest.set_late(true);
    let result = served.op("alpha", KeyOp::Inc).await;
    let (message, _) = assert_refused(result, Code::DeadlineExceeded, "VCPU_NOT_STOPPED");
    assert!(message.contains("vCPU 0"), "{message}");
    assert_eq!(served.guest.count("alpha"), 0);
}

#[tokio::test]
async fn foreign_bytes_quarantine_their_key_alone() {
    let served = Served::start().await;
    served
        .guest
        .write(served.guest.sites("beta")[1], &[0xde, 0xad, 0xbe, 0xef, 0]);
    let result = served
        .update(request(&[("alpha", KeyOp::Inc), ("beta", KeyOp::Inc)]))
        .await;
    let (message, _) = assert_refused(result, Code::DataLoss, "FOREIGN_BYTES");
    assert!(
        message.contains("beta") && message.contains("de ad be ef"),
        "{message}"
    );
    assert_eq!(
        (served.guest.count("alpha"), served.guest.count("beta")),
        (0, 0)
    );
    assert!(
        !served
            .get("beta")
            .await
            .expect("exists")
            .quarantine
            .is_empty()
    );

    // Repairing the bytes does not lift the quarantine; a registration does.
    served.guest.set_count("beta", 0);
    let result = served.op("beta", KeyOp::Inc).await;
    assert_refused(result, Code::FailedPrecondition, "KEY_QUARANTINED");
    served.op("alpha", KeyOp::Inc).await.expect("another key");
    assert_eq!(served.guest.register(&every_kind()), 0);
    served
        .op("beta", KeyOp::Inc)
        .await
        .expect("registered anew");
}

#[tokio::test]
async fn a_module_that_goes_during_the_pause_is_not_patched() {
    let served = Served::start().await;
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("own", 1)]),
        0
    );
    let site = served.guest.sites("ext4:own")[0];
    let guest = Arc::clone(&served.guest);
    let mut gone = false;
    served.guest.on_pause(move || {
        if !gone {
            gone = true;
            // The vCPU was in the hypercall when it was asked to stop.
            assert_eq!(guest.delete_module("ext4"), 0);
        }
    });
    assert_refused(
        served.op("ext4:own", KeyOp::Inc).await,
        Code::NotFound,
        "KEY_NOT_FOUND",
    );
    assert_eq!(served.guest.read::<5>(site)[0], 0x0f, "untouched");
}

#[tokio::test]
async fn a_count_that_the_guest_changes_meanwhile_is_planned_anew() {
    let served = Served::start().await;
    let guest = Arc::clone(&served.guest);
    let mut raced = false;
    served.guest.on_pause(move || {
        if !raced {
            raced = true;
            guest.set_count("alpha", 1);
        }
    });
    let response = served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(
        (
            response.results[0].count_before,
            response.results[0].count_after
        ),
        (1, 2)
    );
    assert!(served.guest.jumps("alpha"));
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

/// A client that disconnects while its update waits for the guest: nothing happens later, and the
/// next client is served.
#[tokio::test]
async fn a_client_that_goes_away_cancels_its_update() {
    let served = Served::start().await;
    served
        .guest
        .set_rips(vec![served.guest.sites("alpha")[0] + 2]);
    let mut client = served.client();
    let call = tokio::spawn(async move {
        let request = request(&[("alpha", KeyOp::Inc)]);
        client.update_static_keys(request).await
    });
    let deadline = std::time::Instant::now() + PATIENCE;
    while served.guest.pauses() == 0 {
        assert!(
            std::time::Instant::now() < deadline,
            "the update was never tried"
        );
        tokio::task::yield_now().await;
    }
    call.abort();
    assert!(call.await.expect_err("aborted").is_cancelled());
    // Its turn comes only when the first is given up, which otherwise is after 30 s.
    let call = within(request(&[("beta", KeyOp::Inc)]), Duration::from_secs(10));
    served
        .client()
        .update_static_keys(call)
        .await
        .expect("another key");
    served.guest.set_rips(vec![]);
    served.op("beta", KeyOp::Inc).await.expect("another key");
    assert_eq!(served.guest.count("alpha"), 0);
    assert!(
        served
            .audit()
            .iter()
            .any(|line| line["reason"] == "CANCELLED")
    );
}

#[tokio::test]
async fn a_guest_that_has_ended_is_told() {
    let served = Served::start().await;
    served
        .guest_client()
        .shutdown_guest(v1::ShutdownGuestRequest {})
        .await
        .expect("shut down");
    assert_refused(
        served.op("alpha", KeyOp::Inc).await,
        Code::Unavailable,
        "GUEST_STOPPED",
    );
}

/// All keys of a guest in one transaction.
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
