// SPDX-License-Identifier: Apache-2.0
//! Tests the configuration, the signature, and the choice of the next event.

use futures_util::FutureExt;

use super::config::{ConfigError, read};
use super::*;
use crate::rollout::Phase;

const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3";

/// Reads a file with this text, in a folder with a secret.
fn parsed(text: &str, secret: &str) -> Result<Vec<Webhook>, ConfigError> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("secret");
    std::fs::write(&file, secret).expect("written");
    let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&file, own).expect("permitted");
    let path = folder.path().join("webhooks.yaml");
    let text = text.replace("SECRET", &file.display().to_string());
    std::fs::write(&path, text).expect("written");
    read(&path)
}

#[test]
fn a_file_names_webhooks_with_their_secrets() {
    let text = "webhooks:\n- {name: pager, url: \"https://hooks.example.org/a?b=c\", secret_file: SECRET}\n\
                - {name: chat, url: \"http://127.0.0.1:9/\", secret_file: SECRET, timeout: 2s, ca: /ca.pem}\n";
    let read = parsed(text, SECRET).expect("right");
    let names: Vec<&str> = read.iter().map(|webhook| &*webhook.name).collect();
    assert_eq!(names, ["pager", "chat"]);
    assert_eq!(read[0].timeout, Duration::from_secs(10));
    assert_eq!(read[1].timeout, Duration::from_secs(2));
    assert_eq!(read[1].ca.to_str(), Some("/ca.pem"));
}

#[test]
fn a_wrong_file_is_refused_without_showing_the_secret() {
    let one = |fields: &str| format!("webhooks: [{{{fields}, secret_file: SECRET}}]\n");
    let twice = "{name: a, url: \"http://a\", secret_file: SECRET}";
    for (text, secret, why) in [
        (
            one("name: a, url: \"ftp://a/\""),
            SECRET,
            "not a URL of the form",
        ),
        (one("name: a, url: /path"), SECRET, "not a URL of the form"),
        (
            one("name: a, url: \"http://me:word@a/\""),
            SECRET,
            "not a URL of the form",
        ),
        (
            one("name: a b, url: \"http://a\""),
            SECRET,
            "not a name of a webhook",
        ),
        (
            one("name: a, url: \"http://a\", timeout: 2m"),
            SECRET,
            "up to 60 s",
        ),
        (
            one("name: a, url: \"http://a\", timeout: 0s"),
            SECRET,
            "more than 0 s",
        ),
        (
            one("name: a, url: \"http://a\", retries: 3"),
            SECRET,
            "unknown field",
        ),
        (
            format!("webhooks: [{twice}, {twice}]"),
            SECRET,
            "two webhooks",
        ),
        (
            one("name: a, url: \"http://a\""),
            "plain",
            "it has no secret",
        ),
        (
            one("name: a, url: \"http://a\""),
            "whsec_c2hvcnQ=",
            "it has no secret",
        ),
        (
            one("name: a, url: \"http://a\""),
            "whsec_%",
            "it has no secret",
        ),
        ("webhooks: 7".to_owned(), SECRET, "invalid type"),
    ] {
        let error = parsed(&text, secret).expect_err(&text).to_string();
        assert!(error.contains(why), "{text}: {error}");
        assert!(!error.contains(secret), "{error}");
    }
    let missing = read(std::path::Path::new("/nowhere.yaml"));
    let missing = missing.expect_err("missing").to_string();
    assert!(missing.contains("cannot be read"), "{missing}");
    let many =
        (0..17).map(|index| format!("{{name: a{index}, url: \"http://a\", secret_file: SECRET}}"));
    let many = format!("webhooks: [{}]", many.collect::<Vec<_>>().join(", "));
    let error = parsed(&many, SECRET).expect_err("too many").to_string();
    assert!(error.contains("at most 16"), "{error}");
}

/// Checks the example of the specification of Standard Webhooks.
#[test]
fn the_signature_is_that_of_standard_webhooks() {
    use base64::Engine as _;
    let secret = base64::engine::general_purpose::STANDARD
        .decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        .expect("base64");
    let signature = send::signature(
        &secret,
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1_614_265_330,
        "{\"test\": 2432232314}",
    );
    assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}

/// Checks that attempts whose file hangs use one thread, and that the attempt after them reads the
/// file again.
#[test]
fn attempts_at_a_file_that_hangs_do_not_add_threads() {
    // With one thread, all work that was started has ended before the last one begins.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.max_blocking_threads(1).build().expect("a runtime");
    let (returns, hangs) = std::sync::mpsc::channel::<()>();
    let mut hangs = Some(hangs);
    let (ran, runs) = std::sync::mpsc::channel();
    let mut files = send::OneAtATime::default();
    runtime.block_on(async {
        for attempt in 0..4 {
            let (ran, hangs) = (ran.clone(), hangs.take());
            let read = files.run(move || {
                let _ = hangs.map(|hangs| hangs.recv());
                let _ = ran.send(attempt);
                attempt
            });
            assert!(read.now_or_never().is_none(), "{attempt}");
        }
        returns.send(()).expect("it waits");
        let last = files.run(move || 9).await;
        assert_eq!(last.expect("no panic"), 9);
        assert_eq!(runs.try_iter().collect::<Vec<_>>(), [0]);
    });
}

fn header(entries: &[(u64, Event)]) -> Header {
    Header {
        name: "net".to_owned(),
        run: "89abcdef".to_owned(),
        timeline: entries
            .iter()
            .map(|&(number, event)| TimelineEntry {
                time: 1000 * number,
                number,
                event,
                phase: Phase::Paused,
                text: format!("entry \"{number}\""),
                ..TimelineEntry::default()
            })
            .collect(),
        ..Header::default()
    }
}

#[test]
fn events_come_in_order_after_the_last_one_that_was_accepted() {
    let entries = [
        (1, Event::Phase),
        (2, Event::Gate),
        (3, Event::Other),
        (4, Event::GateClosed),
        (5, Event::Drift),
    ];
    let mut header = header(&entries);
    for (done, next) in [(0, Some(1)), (1, Some(4)), (4, Some(5)), (5, None)] {
        header.delivered = [("pager".to_owned(), done)].into();
        let found = first_of(&header, "pager", u64::MAX, 5000);
        assert_eq!(found.map(|(entry, _)| entry.number), next, "{done}");
        let other = first_of(&header, "chat", u64::MAX, 5000);
        assert_eq!(
            other.map(|(entry, _)| entry.number),
            Some(1),
            "each has its own"
        );
    }
    // Entries without numbers, which earlier versions wrote, are not delivered.
    let old = self::header(&[(0, Event::Phase)]);
    assert!(first_of(&old, "pager", u64::MAX, 0).is_none());
}

#[test]
fn what_the_timeline_has_dropped_is_counted_and_what_is_too_old_for_a_new_webhook_is_not() {
    let mut header = header(&[(7, Event::Phase), (8, Event::Phase)]);
    let late = MAX_AGE + 7500;
    let found = first_of(&header, "pager", u64::MAX, late).expect("due");
    assert_eq!((found.0.number, found.1), (8, 0));
    header.delivered = [("pager".to_owned(), 3)].into();
    let found = first_of(&header, "pager", u64::MAX, late).expect("due");
    assert_eq!((found.0.number, found.1), (7, 3), "it was tried before");
    header.delivered = [("pager".to_owned(), 0)].into();
    let found = first_of(&header, "pager", u64::MAX, late).expect("due");
    assert_eq!((found.0.number, found.1), (7, 6), "and accepted nothing");
}

#[test]
fn the_body_of_a_repeat_is_the_same() {
    let mut header = header(&[(1, Event::GateClosed)]);
    let first = body(&header, &header.timeline[0]);
    header.phase = Phase::Completed;
    header.message = "completed".to_owned();
    assert_eq!(body(&header, &header.timeline[0]), first);
    let value: serde_json::Value = serde_json::from_str(&first).expect("JSON");
    assert_eq!(value["type"], "rollout.gate_closed");
    assert_eq!(value["timestamp"], "1970-01-01T00:00:01Z");
    assert_eq!(value["data"]["phase"], "paused");
    assert_eq!(value["data"]["text"], "entry \"1\"");
}
