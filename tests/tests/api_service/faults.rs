// SPDX-License-Identifier: Apache-2.0
//! Tests faults in the middle of a change: writes that fail, clients that disconnect, a monitor
//! that is killed.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use patchbay_guest::testing::Gate;
use patchbay_proto::v1::KeyOp;
use patchbay_service::keys::PauseState;
use rustix::process::{Signal, getpid, kill_process};
use tokio::sync::oneshot;
use tonic::Code;

use super::support::{PATIENCE, Served, Setup, assert_refused, audit_lines, every_kind, request};

/// The keys of the transactions in this file, with 6 sites in all.
const KEYS: [&str; 3] = ["alpha", "beta", "likely"];
const STEPS: u64 = 6 + 3;

/// Returns the state that these transactions may change: counts and the bytes of sites.
fn state(served: &Served) -> Vec<(i32, Vec<[u8; 5]>)> {
    let of = |key: &str| {
        let sites = served.guest.sites(key).into_iter();
        let bytes = sites.map(|site| served.guest.read(site));
        (served.guest.count(key), bytes.collect())
    };
    KEYS.map(of).to_vec()
}

/// A pause that lasts until the test releases it.
struct HeldPause {
    entered: oneshot::Receiver<()>,
    release: Sender<()>,
}

fn hold_next_pause(served: &Served) -> HeldPause {
    let (enter, entered) = oneshot::channel();
    let (release, released) = channel();
    let mut enter = Some(enter);
    served.guest.on_pause(move || {
        let _ = enter.take().map(|enter| enter.send(()));
        let _ = released.recv();
    });
    HeldPause { entered, release }
}

impl HeldPause {
    /// Waits until the guest is stopped. Dropping the returned sender releases the pause.
    async fn entered(self) -> Sender<()> {
        tokio::time::timeout(PATIENCE, self.entered)
            .await
            .expect("the update stops the guest")
            .expect("the guest lives");
        self.release
    }
}

/// Makes each of the writes to six sites and three counts fail in turn. A failing write stores its
/// first byte. The transaction must then have no effect on the guest, the holds, or watchers.
#[tokio::test]
async fn a_write_that_fails_at_any_place_is_undone() {
    let served = Served::start().await;
    let updates = [
        ("alpha", KeyOp::Inc),
        ("beta", KeyOp::Inc),
        ("likely", KeyOp::Dec),
    ];
    let update = || patchbay_proto::v1::UpdateStaticKeysRequest {
        force: true,
        ..request(&updates)
    };
    let before = state(&served);
    let revision = served.keys.revision();
    for step in 0..STEPS {
        let ram = Arc::clone(served.guest.memory());
        served
            .guest
            .on_pause(move || ram.fail_writes(step..step + 1));
        let result = served.update(update()).await;
        let (message, _) = assert_refused(result, Code::DataLoss, "WRITE_FAULT");
        assert!(message.contains("nothing has changed"), "{message}");
        assert_eq!(state(&served), before, "write {step}");
        assert!(served.holds().await.is_empty());
        assert_eq!(served.keys.revision(), revision);
        let lines = served.audit();
        let last = lines.last().expect("an outcome");
        assert_eq!(
            (&last["result"], &last["reason"]),
            (&"failed".into(), &"WRITE_FAULT".into())
        );
    }
    let ram = Arc::clone(served.guest.memory());
    served
        .guest
        .on_pause(move || ram.fail_writes(STEPS..STEPS + 1));
    served
        .update(update())
        .await
        .expect("no write is left to fail");
    assert_ne!(state(&served), before);
}

/// Checks a failed write whose undo fails too. A vCPU might execute a partially written
/// instruction, so the guest is not resumed, and none of the keys is changed again.
#[tokio::test]
async fn an_undo_that_fails_keeps_the_guest_paused() {
    let served = Served::start().await;
    let ram = Arc::clone(served.guest.memory());
    served.guest.on_pause(move || ram.fail_writes(2..u64::MAX));
    served
        .guest
        .on_resume(|| panic!("the guest was resumed with its keys in halves"));
    let update = request(&[("beta", KeyOp::Inc), ("alpha", KeyOp::Inc)]);
    let result = served.update(update).await;
    let (message, _) = assert_refused(result, Code::DataLoss, "WRITE_FAULT");
    for part in ["restart the guest", "quarantined", "held paused"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(served.keys.pause_state(), PauseState::UntilResumed);
    served.guest.memory().fail_writes(0..0);
    for key in ["alpha", "beta"] {
        assert!(served.get(key).await.expect("a key").quarantine.is_some());
        let result = served.op(key, KeyOp::Inc).await;
        assert_refused(result, Code::FailedPrecondition, "KEY_QUARANTINED");
    }
    // An operator can still resume the guest.
    served.guest.on_resume(|| {});
    served.keys.resume().await.expect("the executor lives");
    assert_eq!(served.keys.pause_state(), PauseState::Running);
}

/// Checks counts that the undo cannot write. They are wrong by a reference, which affects no
/// instruction, so the guest keeps running, and these keys are no longer changed.
#[tokio::test]
async fn counts_that_cannot_be_taken_back_are_quarantined() {
    let served = Served::start().await;
    for key in KEYS {
        served.guest.set_count(key, 1);
    }
    served.guest.memory().fail_writes(1..u64::MAX);
    let result = served
        .update(request(&KEYS.map(|key| (key, KeyOp::Inc))))
        .await;
    let (message, _) = assert_refused(result, Code::DataLoss, "WRITE_FAULT");
    assert!(
        message.contains("quarantined") && !message.contains("paused"),
        "{message}"
    );
    assert_eq!(served.keys.pause_state(), PauseState::Running);
    for key in KEYS {
        let result = served.op(key, KeyOp::Inc).await;
        assert_refused(result, Code::FailedPrecondition, "KEY_QUARANTINED");
    }
}

/// Checks that counts alone are changed, and undone, while the guest runs.
#[tokio::test]
async fn a_count_that_cannot_be_written_takes_the_others_back() {
    let served = Served::start().await;
    for key in KEYS {
        served.guest.set_count(key, 1);
    }
    let before = state(&served);
    let updates = KEYS.map(|key| (key, KeyOp::Inc));
    for step in 0..3 {
        served.guest.memory().fail_writes(step..step + 1);
        let result = served.update(request(&updates)).await;
        assert_refused(result, Code::DataLoss, "WRITE_FAULT");
        assert_eq!(state(&served), before, "count {step}");
        assert!(served.holds().await.is_empty());
    }
    assert_eq!(served.guest.pauses(), 0);
}

/// Checks that a client that disconnects before its turn changes nothing.
#[tokio::test]
async fn a_client_that_leaves_before_its_turn_changes_nothing() {
    let served = Served::start().await;
    let held = hold_next_pause(&served);
    let mut client = served.client();
    let first = tokio::spawn(async move {
        let request = request(&[("beta", KeyOp::Inc)]);
        client.update_static_keys(request).await
    });
    let release = held.entered().await;
    let mut client = served.client();
    let second = tokio::spawn(async move {
        let request = request(&[("alpha", KeyOp::Inc)]);
        client.update_static_keys(request).await
    });
    // The service answers this call after it has received the second call, which is on the same
    // connection.
    served.get("alpha").await.expect("a key");
    second.abort();
    assert!(second.await.expect_err("aborted").is_cancelled());
    served.get("alpha").await.expect("a key");
    drop(release);
    first.await.expect("no panic").expect("not disturbed");
    served.op("beta", KeyOp::Inc).await.expect("not disturbed");
    assert_eq!(
        (served.guest.count("alpha"), served.guest.count("beta")),
        (0, 2)
    );
    assert!(
        served
            .audit()
            .iter()
            .all(|line| line["updates"][0]["key"] != "alpha"),
        "nothing was about to be changed"
    );
}

/// Checks that a change that has reached the pause is completed, and that a client that reconnects
/// learns the outcome.
#[tokio::test]
async fn a_client_that_leaves_during_the_pause_finds_its_answer_later() {
    let served = Served::start().await;
    let held = hold_next_pause(&served);
    let mut update = request(&[("beta", KeyOp::Inc), ("alpha", KeyOp::Inc)]);
    update.request_id = "mine".into();
    let (mut client, repeated) = (served.client(), update.clone());
    let call = tokio::spawn(async move { client.update_static_keys(update).await });
    let release = held.entered().await;
    call.abort();
    assert!(call.await.expect_err("aborted").is_cancelled());
    drop(release);
    let answer = served.update(repeated).await.expect("it was made");
    assert_eq!(answer.results.len(), 2);
    assert_eq!(served.guest.pauses(), 1, "and not again");
    assert!(served.guest.jumps("alpha") && served.guest.jumps("beta"));
    assert_eq!(
        (served.guest.count("alpha"), served.guest.count("beta")),
        (1, 1)
    );
    let outcomes = served.audit();
    assert_eq!(outcomes[1]["result"], "committed");
}

/// The environment variable that tells a copy of this test program at which stage to end.
const STAGE: &str = "PATCHBAY_TEST_DIES_IN";
const FOLDER: &str = "PATCHBAY_TEST_FOLDER";

/// Checks that a killed monitor leaves its socket and an audit log. The log has the answered
/// changes, and an intent for a change that was interrupted once it had begun to stop the guest.
/// The next monitor takes over both files.
#[tokio::test]
async fn a_killed_monitor_leaves_the_truth_behind() {
    if let Ok(stage) = std::env::var(STAGE) {
        return die_in(&stage).await;
    }
    // The stage, and whether the log has an intent for the change that was never answered.
    for (stage, intended) in [("gate", false), ("pause", true), ("resume", true)] {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut monitor = Command::new(std::env::current_exe().expect("this program"))
            .args(["api_service::faults::a_killed_monitor_leaves_the_truth_behind"])
            .args(["--exact", "--nocapture"])
            .env(STAGE, stage)
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a copy of this program");
        if stage == "gate" {
            let lines = BufReader::new(monitor.stdout.take().expect("piped")).lines();
            assert!(
                lines
                    .map_while(Result::ok)
                    .any(|line| line == "the gate is closed"),
                "the second update was never made"
            );
            monitor.kill().expect("running");
        }
        let status = monitor.wait().expect("a child");
        assert_eq!(status.signal(), Some(9), "{stage}: {status}");

        assert!(folder.path().join("guest.sock").exists());
        let lines = audit_lines(folder.path());
        let events: Vec<&str> = lines
            .iter()
            .map(|line| line["event"].as_str().expect("text"))
            .collect();
        let expected: &[&str] = if intended {
            &["intent", "outcome", "intent"]
        } else {
            &["intent", "outcome"]
        };
        assert_eq!(events, expected, "{stage}");
        assert_eq!(lines[1]["result"], "committed");

        let next = Served::with(Setup {
            keys: Some(every_kind()),
            folder: Some(folder.path().to_owned()),
            ..Setup::default()
        })
        .await;
        next.op("alpha", KeyOp::Inc).await.expect("a new monitor");
        assert_eq!(next.audit().len(), expected.len() + 2);
    }
}

/// Makes one change and answers it. The next change kills this process at `stage`.
async fn die_in(stage: &str) {
    // A separate thread sends the signal, because the seccomp filter of the executor's thread,
    // which runs the pause, does not permit it.
    let (wish, wished) = channel::<()>();
    std::thread::spawn(move || {
        if wished.recv().is_ok() {
            kill_process(getpid(), Signal::KILL).expect("its own");
        }
    });
    let die = move || {
        wish.send(()).expect("the thread waits");
        loop {
            std::thread::park();
        }
    };
    let folder = std::env::var_os(FOLDER).expect("given");
    let served = Served::with(Setup {
        keys: Some(every_kind()),
        folder: Some(Path::new(&folder).to_owned()),
        ..Setup::default()
    })
    .await;
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    match stage {
        "gate" => {
            served.guest.set_gate(Gate::TextMutex, 0x1000);
            println!("the gate is closed");
        }
        "pause" => served.guest.on_pause(die),
        "resume" => served.guest.on_resume(die),
        other => panic!("{other} is no stage"),
    }
    let result = served.op("beta", KeyOp::Inc).await;
    panic!("it lived on, and answered {result:?}");
}

/// Checks that a panic in the service does not end the guest: clients get an error, and the guest
/// keeps running.
#[tokio::test]
async fn a_panic_of_the_keys_is_told_as_internal() {
    let served = Served::start().await;
    served.guest.on_pause(|| panic!("a bug"));
    for _ in 0..2 {
        let result = served.update(request(&[("alpha", KeyOp::Inc)])).await;
        let (message, _) = assert_refused(result, Code::Internal, "INTERNAL");
        assert!(message.contains("panicked: a bug"), "{message}");
    }
    served
        .get("alpha")
        .await
        .expect("what needs no change is answered");
}
