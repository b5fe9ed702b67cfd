// SPDX-License-Identifier: Apache-2.0

use patchbay_proto::v1;
use patchbay_proto::v1::key_event::Kind;
use tonic::Code;

use super::fake::{INCARNATION, refuse};
use super::lab::{Commands, Host, Lab};

fn changed(revision: u64, name: &str, count: i32) -> v1::WatchStaticKeysResponse {
    v1::WatchStaticKeysResponse {
        revision,
        incarnation: INCARNATION.to_owned(),
        events: vec![v1::KeyEvent {
            kind: Kind::Changed.into(),
            name: name.to_owned(),
            count,
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[test]
fn a_watch_prints_a_line_per_change() {
    let lab = Lab::new();
    let described = lab.json(&["guest", "describe"]);
    let before = described["details"]["revision"].as_u64().expect("a number");
    let incarnation = described["details"]["incarnation"].as_str().expect("text");
    lab.ok(&["keys", "inc", "alpha", "--reason", "first"]);
    lab.ok(&["keys", "inc", "beta"]);
    let from = (before + 1).to_string();
    let mut watch = lab.follow(&[
        "keys",
        "watch",
        "--from-revision",
        &from,
        "--incarnation",
        incarnation,
        "-o",
        "json",
    ]);
    let (first, second) = (watch.json(), watch.json());
    assert_eq!(
        (&first["name"], &first["kind"], &first["reason"]),
        (&"alpha".into(), &"changed".into(), &"first".into())
    );
    assert_eq!(
        (&second["name"], &second["count"]),
        (&"beta".into(), &1.into())
    );
    watch.end();
}

/// Checks that the service refuses a revision of another incarnation and a future revision, and
/// that the watch then lists the keys.
#[test]
fn a_watch_from_nowhere_lists_the_keys_of_the_real_service() {
    let lab = Lab::new();
    let described = lab.json(&["guest", "describe"]);
    let incarnation = described["details"]["incarnation"].as_str().expect("text");
    for (revision, incarnation) in [("1", "0123"), ("999", incarnation)] {
        let mut watch = lab.follow(&[
            "keys",
            "watch",
            "a*",
            "--from-revision",
            revision,
            "--incarnation",
            incarnation,
            "-o",
            "json",
        ]);
        assert_eq!(watch.json()["kind"], "resync");
        assert_eq!(watch.json()["name"], "alpha");
        lab.ok(&["keys", "inc", "alpha"]);
        let changed = watch.json();
        assert_eq!(
            (&changed["kind"], &changed["name"]),
            (&"changed".into(), &"alpha".into())
        );
        let (said, _) = watch.end();
        assert!(said.contains("the keys as they are now follow"), "{said}");
    }
}

#[test]
fn a_watch_that_lost_revisions_lists_anew() {
    let losses = [
        (Code::OutOfRange, "REVISION_COMPACTED"),
        (Code::OutOfRange, "REVISION_IN_FUTURE"),
        (Code::OutOfRange, "INCARNATION_CHANGED"),
        (Code::ResourceExhausted, "WATCH_TOO_SLOW"),
    ];
    for (code, reason) in losses {
        let host = Host::with(&["only"]);
        host.fake.guest("only", |guest| {
            guest.set_count("beta", 2);
            let lost = refuse(code, reason, "revision 3 is lost");
            guest
                .watches
                .push_back(vec![Ok(changed(2, "alpha", 1)), Err(lost)]);
            guest.watches.push_back(vec![Ok(changed(12, "gamma", 1))]);
        });
        let watch = [
            "keys",
            "watch",
            "--from-revision",
            "2",
            "--incarnation",
            "old",
        ];
        let mut watch = host.follow(&[&watch[..], &["-o", "json"]].concat());
        assert_eq!(watch.json()["name"], "alpha");
        let resync = watch.json();
        assert_eq!(
            (&resync["kind"], &resync["revision"], &resync["incarnation"]),
            (&"resync".into(), &11.into(), &INCARNATION.into())
        );
        for (name, count) in [("alpha", 0), ("beta", 2), ("gamma", 0)] {
            let listed = watch.json();
            assert_eq!(
                (&listed["kind"], &listed["name"], &listed["count"]),
                (&"listed".into(), &name.into(), &count.into())
            );
        }
        assert_eq!(watch.json()["revision"], 12);
        let (said, _) = watch.end();
        assert!(
            said.contains("revision 3 is lost; the keys as they are now follow"),
            "{said}"
        );
        let asked = host.fake.seen("start_revision: 12");
        assert_eq!(asked.len(), 1);
        assert!(
            asked[0].contains(&format!("incarnation: {INCARNATION:?}")),
            "{asked:?}"
        );
    }
}

#[test]
fn a_watch_ends_with_other_errors_and_does_not_list_for_ever() {
    let host = Host::with(&["only"]);
    let other = || {
        refuse(
            Code::FailedPrecondition,
            "GUEST_STOPPED",
            "the guest has ended",
        )
    };
    host.fake
        .guest("only", |guest| guest.watches.push_back(vec![Err(other())]));
    let message = host.fails(1, &["keys", "watch"]);
    assert!(message.contains("the guest has ended"), "{message}");
    let lost = || refuse(Code::OutOfRange, "REVISION_COMPACTED", "revision 3 is lost");
    host.fake.guest("only", |guest| {
        guest.watches.extend((0..20).map(|_| vec![Err(lost())]));
    });
    let (_, said, code) = host.all(&["keys", "watch"]);
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn wait_returns_at_once_or_after_the_change() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "wait", "alpha", "--for", "off"]);
    assert_eq!(text, "alpha: off, count 0\n");
    let message = lab.fails(
        124,
        &["keys", "wait", "alpha", "--for", "on", "--timeout", "50ms"],
    );
    assert!(message.contains("alpha is not on after 50ms"), "{message}");
    assert!(
        lab.fails(1, &["keys", "wait", "alhpa", "--for", "on"])
            .contains("alpha")
    );
}

/// Checks that `keys wait` does not miss a change between reading the key and starting the watch:
/// the watch starts after the revision that was read.
#[test]
fn wait_misses_no_change() {
    for (awaited, events, count) in [
        (
            "on",
            vec![
                changed(11, "alpha", 0),
                changed(12, "alpha", 2),
                changed(13, "alpha", 0),
            ],
            2,
        ),
        (
            "changed",
            vec![changed(11, "beta", 1), changed(12, "alpha", 0)],
            0,
        ),
    ] {
        let host = Host::with(&["only"]);
        host.fake.guest("only", |guest| {
            guest
                .watches
                .push_back(events.into_iter().map(Ok).collect());
        });
        let state = host.json(&["keys", "wait", "alpha", "--for", awaited]);
        assert_eq!(
            (&state["revision"], &state["count"]),
            (&12.into(), &count.into())
        );
        let asked = host.fake.seen("start_revision: 11");
        assert!(
            asked[0].contains(&format!("incarnation: {INCARNATION:?}")),
            "{asked:?}"
        );
    }
}

#[test]
fn wait_looks_again_after_lost_revisions() {
    let host = Host::with(&["only"]);
    host.fake.guest("only", |guest| {
        let lost = refuse(Code::OutOfRange, "INCARNATION_CHANGED", "another process");
        guest.watches.push_back(vec![Err(lost)]);
        guest.watches.push_back(vec![Ok(changed(11, "alpha", 3))]);
    });
    assert_eq!(
        host.json(&["keys", "wait", "alpha", "--for", "on"])["count"],
        3
    );
    // A quarantined key no longer changes.
    host.fake.guest("only", |guest| {
        guest.keys[1].quarantine = Some(v1::Quarantine {
            cause: 1,
            message: "foreign bytes".to_owned(),
        });
    });
    let message = host.fails(1, &["keys", "wait", "beta", "--for", "on"]);
    assert!(message.contains("quarantined: foreign bytes"), "{message}");
}
