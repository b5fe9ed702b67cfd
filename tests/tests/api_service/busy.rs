// SPDX-License-Identifier: Apache-2.0
//! Tests updates of a busy guest: closed gates, late vCPUs, foreign bytes, concurrent changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use patchbay_guest::testing::{Gate, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use tonic::Code;

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

/// Returns the update with this time limit for its retries. The call itself has no deadline.
fn within(request: v1::UpdateStaticKeysRequest, timeout: Duration) -> v1::UpdateStaticKeysRequest {
    let retry_timeout = Some(timeout.try_into().expect("short"));
    v1::UpdateStaticKeysRequest {
        retry_timeout,
        ..request
    }
}

#[tokio::test]
async fn a_closed_gate_is_named_at_the_deadline() {
    let served = Served::start().await;
    let gates = [
        (Gate::JumpLabelMutex, 0x1000, 0, "JUMP_LABEL_MUTEX"),
        (Gate::TextMutex, 0x1000, 0, "TEXT_MUTEX"),
        (Gate::SystemState, 0, 2, "SYSTEM_STATE"),
        (Gate::TextPokeQueue, 1, 0, "TEXT_POKE"),
        (Gate::TextPoke, 1, 0, "TEXT_POKE"),
    ];
    for (gate, closed, open, name) in gates {
        served.guest.set_gate(gate, closed);
        let call = within(request(&[("alpha", KeyOp::Inc)]), Duration::from_secs(1));
        let result = served.client().update_static_keys(call).await;
        let (message, metadata) = assert_refused(result, Code::Unavailable, "GUEST_BUSY");
        assert_eq!(metadata["gate"], name, "{message}");
        assert!(message.contains(&metadata["gate_message"]), "{message}");
        assert!(
            metadata["attempts"].parse::<u32>().expect("a number") > 1,
            "{message}"
        );
        assert_eq!(served.guest.count("alpha"), 0);
        served.guest.set_gate(gate, open);
    }
    assert!(served.audit().is_empty(), "nothing was about to be changed");
}

/// Checks a gate that closes only while the host stops the guest. The audit log then has one intent
/// and one outcome.
#[tokio::test]
async fn a_gate_that_closes_before_the_stop_is_seen_under_it() {
    let served = Served::start().await;
    let guest = Arc::clone(&served.guest);
    served
        .guest
        .on_pause(move || guest.set_gate(Gate::JumpLabelMutex, 0x1000));
    let call = within(request(&[("alpha", KeyOp::Inc)]), Duration::from_secs(1));
    let result = served.client().update_static_keys(call).await;
    assert_refused(result, Code::Unavailable, "GUEST_BUSY");
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

/// Checks the low bits of a mutex's owner word, which are flags (MUTEX_FLAGS in
/// kernel/locking/mutex.h) and not part of the owner.
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
        Code::Unavailable,
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
        served
            .get("beta")
            .await
            .expect("exists")
            .quarantine
            .is_some()
    );

    // Repairing the bytes does not lift the quarantine, but a new registration does.
    served.guest.set_count("beta", 0);
    let result = served.op("beta", KeyOp::Inc).await;
    assert_refused(result, Code::FailedPrecondition, "KEY_QUARANTINED");
    served.op("alpha", KeyOp::Inc).await.expect("another key");
    assert_eq!(served.guest.register(&every_kind()), 0);
    served
        .op("beta", KeyOp::Inc)
        .await
        .expect("registered again");
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
            // The hypercall with which a vCPU unloads the module completes while the host stops the
            // vCPUs.
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

/// Checks a module whose registration was refused. Its sites stay unknown for as long as it is
/// loaded, so the update is refused without retries.
#[tokio::test]
async fn a_module_whose_registration_was_refused_is_named() {
    let served = Served::start().await;
    let unknown_class = TestKey {
        class: 99,
        ..TestKey::new("own", 1)
    };
    assert_ne!(served.guest.add_module("ext4", &[unknown_class]), 0);
    served.guest.set_user("siteless", Some("ext4"));
    for key in ["siteless", "ext4:own"] {
        let result = served.op(key, KeyOp::Inc).await;
        let (message, _) = assert_refused(result, Code::FailedPrecondition, "MODULE_REFUSED");
        let told = message.contains("module ext4") && message.contains("class 99");
        assert!(told, "{message}");
    }
    served.op("alpha", KeyOp::Inc).await.expect("not its user");
    // The key still has sites in a module that is not registered now, so the update is retried
    // until its limit.
    assert_eq!(served.guest.delete_module("ext4"), 0);
    let call = within(
        request(&[("siteless", KeyOp::Inc)]),
        Duration::from_millis(100),
    );
    let result = served.update(call).await;
    let (message, _) = assert_refused(result, Code::Unavailable, "GUEST_BUSY");
    assert!(message.contains("not registered"), "{message}");
    served.guest.set_user("siteless", None);
    served.op("siteless", KeyOp::Inc).await.expect("it is gone");
    let result = served.op("ext4:own", KeyOp::Inc).await;
    assert_refused(result, Code::NotFound, "KEY_NOT_FOUND");
}

/// Checks that adding a registered module again is refused and does not affect its registration.
#[tokio::test]
async fn a_module_that_is_added_twice_stays_registered() {
    let served = Served::start().await;
    let own = || vec![TestKey::new("own", 1)];
    assert_eq!(served.guest.add_module("ext4", &own()), 0);
    let address = served.guest.last_request();
    let again = served
        .guest
        .request(patchbay_guest::abi::OP_MODULE_ADD, &address);
    assert_ne!(again, 0);
    served.op("ext4:own", KeyOp::Inc).await.expect("registered");
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

/// Checks that an update changes nothing after its client has disconnected while the update waits
/// for the guest, and that the next client is served.
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
    // The service takes this call only after it has given up the first one, which would take 30 s
    // without the cancellation.
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

/// Checks the undo of a reference that has become the last one. The guest drops its reference on
/// the first key after the host has taken one, and takes a reference on the last key before the
/// host writes that key's count. The host must then undo its change. The host's reference on the
/// first key is now the last one, so dropping it changes the sites and needs a pause.
#[tokio::test]
async fn a_reference_that_became_the_last_goes_back_under_a_pause() {
    const KEYS: usize = 400;
    let names: Vec<String> = (0..KEYS).map(|number| format!("key{number}")).collect();
    let on = |name: &String| TestKey {
        count: 1,
        ..TestKey::new(name, 1)
    };
    let served = Served::with(Setup {
        keys: Some(names.iter().map(on).collect()),
        ..Setup::default()
    })
    .await;
    let (first, last) = (&*names[0], &*names[KEYS - 1]);
    let updates: Vec<_> = names.iter().map(|name| (&**name, KeyOp::Inc)).collect();

    // The guest must act between the host's writes of the first key and of the last one. Sometimes
    // the guest is too slow, so this is repeated.
    for _ in 0..1000 {
        let seen = Arc::new(AtomicBool::new(false));
        let over = Arc::new(AtomicBool::new(false));
        let racing = {
            let guest = Arc::clone(&served.guest);
            let (seen, over) = (Arc::clone(&seen), Arc::clone(&over));
            let (first, last) = (first.to_owned(), last.to_owned());
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    if guest.count(&first) == 2 {
                        let faster = guest.count(&last) == 1;
                        guest.set_count(&first, 1);
                        guest.set_count(&last, guest.count(&last) + 1);
                        seen.store(faster, Ordering::Relaxed);
                        return;
                    }
                }
            })
        };
        let pauses = served.guest.pauses();
        let result = served.update(request(&updates)).await;
        over.store(true, Ordering::Relaxed);
        racing.join().expect("no panic");
        let response = result.expect("made at another attempt");
        let report = response.report.expect("a report");
        if !seen.load(Ordering::Relaxed) || report.attempts == 1 {
            for name in &names {
                served.guest.set_count(name, 1);
            }
            continue;
        }
        // Each count is 1 plus the host's reference, plus or minus the guest's.
        assert_eq!(served.guest.count(first), 1);
        assert_eq!(served.guest.count(last), 3);
        assert_eq!(served.guest.count(&names[1]), 2);
        assert!(served.guest.jumps(first) && served.guest.jumps(last));
        assert_eq!(
            served.guest.pauses(),
            pauses + 2,
            "one to give the reference back, one to take it again"
        );
        return;
    }
    panic!("the guest was never faster");
}
