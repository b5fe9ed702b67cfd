// SPDX-License-Identifier: Apache-2.0
//! Tests updates by patterns, and answers with only numbers.

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use patchbay_proto::v1::{KeyClass, KeyOp, ResultView};
use tonic::Code;

use super::support::{Served, Setup, assert_refused, every_kind, request};

fn matching(patterns: &[&str], op: KeyOp) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        updates: vec![v1::KeyUpdate {
            op: op.into(),
            patterns: patterns.iter().map(|&text| text.to_owned()).collect(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn of_classes(
    mut request: v1::UpdateStaticKeysRequest,
    classes: &[KeyClass],
) -> v1::UpdateStaticKeysRequest {
    request.updates[0].classes = classes.iter().map(|&class| class.into()).collect();
    request
}

fn summary(
    mut request: v1::UpdateStaticKeysRequest,
    view: ResultView,
) -> v1::UpdateStaticKeysRequest {
    request.result_view = view.into();
    request
}

/// Checks that matching keys that may not be changed are left out, and that the summary has their
/// number.
#[tokio::test]
async fn a_pattern_changes_what_it_may_in_one_pause() {
    let served = Served::start().await;
    let update = matching(&["*", "!sched_*", "!likely"], KeyOp::Inc);
    let response = served.update(update).await.expect("ref keys");
    let mut names: Vec<&str> = response.results.iter().map(|key| &*key.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["alpha", "beta", "siteless"]);
    let expected = v1::UpdateSummary {
        keys: 3,
        keys_changed: 3,
        sites_patched: 4,
        keys_left_out: 2,
    };
    assert_eq!(response.summary, Some(expected));
    assert!(served.guest.jumps("alpha") && served.guest.jumps("beta"));
    assert_eq!(served.guest.pauses(), 1);
    assert_eq!(
        (served.guest.count("guarded"), served.guest.count("likely")),
        (0, 1)
    );
    assert_eq!(served.holds().await.len(), 3);
}

#[tokio::test]
async fn classes_and_permission_choose_among_the_keys_that_match() {
    let setup = || Setup {
        keys: Some(every_kind()),
        allow_guarded: true,
        ..Setup::default()
    };
    let served = Served::with(setup()).await;
    let update = of_classes(
        matching(&["*_switch", "a*"], KeyOp::Enable),
        &[KeyClass::Tracepoint],
    );
    let response = served.update(update).await.expect("a probe is attached");
    assert_eq!(response.results[0].name, "sched_switch");
    assert_eq!(response.results.len(), 1);
    let mut update = matching(&["guarded", "alpha"], KeyOp::Inc);
    update.allow_guarded = true;
    let response = served.update(update).await.expect("permitted");
    assert_eq!(response.summary.expect("told").keys, 2);
    assert_eq!(
        (served.guest.count("guarded"), served.guest.count("alpha")),
        (1, 1)
    );
    // The request allows guarded keys but the monitor does not, so they are refused as if they were
    // given by name.
    let served = Served::start().await;
    let mut update = matching(&["*a*"], KeyOp::Inc);
    update.allow_guarded = true;
    let result = served.update(update).await;
    assert_refused(result, Code::FailedPrecondition, "KEY_GUARDED");
    assert_eq!(served.guest.count("alpha"), 0);
}

#[tokio::test]
async fn a_selection_of_nothing_is_an_error() {
    let served = Served::start().await;
    let refused = [
        (
            &["nothing*"][..],
            Code::NotFound,
            "KEY_NOT_FOUND",
            "nothing*",
        ),
        (&["alpha", "!a*"], Code::NotFound, "KEY_NOT_FOUND", "!a*"),
        (&["b*", "alhpa"], Code::NotFound, "KEY_NOT_FOUND", "alpha"),
        (
            &["guard*"],
            Code::FailedPrecondition,
            "KEY_GUARDED",
            "1 are guarded",
        ),
        (
            &["seal*"],
            Code::FailedPrecondition,
            "KEY_SEALED",
            "all 1 keys",
        ),
    ];
    for (patterns, code, reason, part) in refused {
        let result = served.update(matching(patterns, KeyOp::Inc)).await;
        let (message, _) = assert_refused(result, code, reason);
        assert!(message.contains(part), "{message}");
    }
    let none = of_classes(matching(&["a*"], KeyOp::Inc), &[KeyClass::Tracepoint]);
    assert_refused(served.update(none).await, Code::NotFound, "KEY_NOT_FOUND");
    assert_eq!(served.guest.pauses(), 0);
    assert!(served.audit().is_empty());
}

/// Checks that a key that is given by its literal name is refused and not left out. Only keys that
/// a glob matches are left out.
#[tokio::test]
async fn a_name_among_patterns_is_refused_and_not_left_out() {
    let element = TestKey::guarded("per_cpu[3]");
    let keys = every_kind().into_iter().chain([element]);
    let served = Served::with(Setup {
        keys: Some(keys.collect()),
        ..Setup::default()
    })
    .await;
    for (patterns, reason, key) in [
        (&["guarded", "a*"][..], "KEY_GUARDED", "guarded"),
        (&["a*", ":guarded"], "KEY_GUARDED", "guarded"),
        (&["a*", "per_cpu[3]"], "KEY_GUARDED", "per_cpu[3]"),
        (&["sealed", "a*"], "KEY_SEALED", "sealed"),
        (&["*", "sealed", "!sched*"], "KEY_SEALED", "sealed"),
    ] {
        let result = served.update(matching(patterns, KeyOp::Inc)).await;
        let (message, _) = assert_refused(result, Code::FailedPrecondition, reason);
        assert!(message.contains(&format!("key {key} ")), "{message}");
    }
    assert_eq!((served.guest.count("alpha"), served.guest.pauses()), (0, 0));
    // Keys that the request excludes are not checked.
    for patterns in [&["g*", "a*"][..], &["guarded", "a*", "!g*"]] {
        let response = served.update(matching(patterns, KeyOp::Inc)).await;
        assert_eq!(response.expect("alpha").summary.expect("told").keys, 1);
    }
}

#[tokio::test]
async fn malformed_selections_are_refused() {
    let served = Served::start().await;
    let changed = |change: fn(&mut v1::KeyUpdate)| {
        let mut request = matching(&["a*"], KeyOp::Inc);
        change(&mut request.updates[0]);
        request
    };
    let mut named = request(&[("alpha", KeyOp::Inc)]);
    named.updates[0].classes = vec![KeyClass::Ref.into()];
    let mut view = request(&[("alpha", KeyOp::Inc)]);
    view.result_view = 99;
    let mut many = matching(&["a*"], KeyOp::Enable);
    many.updates = vec![many.updates[0].clone(); 1025];
    let bad = [
        (
            "patterns",
            changed(|update| update.patterns = vec!["a[".into()]),
        ),
        (
            "patterns",
            changed(|update| update.patterns.push(String::new())),
        ),
        ("classes", changed(|update| update.classes = vec![7])),
        ("updates", changed(|update| update.name = "alpha".into())),
        ("updates", changed(|update| update.etag = "1-0".into())),
        ("updates", changed(|update| update.op = 0)),
        ("updates", named),
        ("updates", many),
        ("result_view", view),
    ];
    for (field, request) in bad {
        let result = served.update(request).await;
        let (message, _) = assert_refused(result, Code::InvalidArgument, "INVALID_ARGUMENT");
        assert!(message.starts_with(field), "{message}");
    }
    assert_eq!(served.guest.count("alpha"), 0);
}

/// Checks that the limit applies to the number of selected keys, not to the number of updates.
#[tokio::test]
async fn selections_count_as_many_updates_as_they_have_keys() {
    let keys: Vec<TestKey> = (0..1000)
        .map(|n| TestKey::new(&format!("key{n:03}"), 0))
        .collect();
    let served = Served::with(Setup {
        keys: Some(keys),
        ..Setup::default()
    })
    .await;
    let mut update = summary(matching(&["key*"], KeyOp::Enable), ResultView::Summary);
    let one = update.updates[0].clone();
    update.updates = vec![one.clone(); 66];
    let result = served.update(update.clone()).await;
    let (message, _) = assert_refused(result, Code::InvalidArgument, "INVALID_ARGUMENT");
    assert!(message.contains("65536"), "{message}");
    assert_eq!(served.guest.count("key000"), 0);
    update.updates = vec![one; 65];
    let response = served.update(update).await.expect("65,000 ops");
    assert_eq!(response.summary.expect("told").keys, 1000);
    assert!(response.results.is_empty());
}

/// Checks that one selected key that cannot be changed refuses the whole selection, as it would be
/// refused by its name.
#[tokio::test]
async fn one_refused_key_refuses_the_selection() {
    let served = Served::start().await;
    let result = served.update(matching(&["*"], KeyOp::Enable)).await;
    let (message, _) = assert_refused(result, Code::FailedPrecondition, "TRACEPOINT_REFUSED");
    assert!(message.contains("sched_waking"), "{message}");
    let result = served.update(matching(&["*l*"], KeyOp::Disable)).await;
    let (message, _) = assert_refused(result, Code::FailedPrecondition, "NOT_HOLDER");
    assert!(message.contains("likely"), "{message}");
    assert_eq!(served.guest.pauses(), 0);
}

#[tokio::test]
async fn a_selection_is_replayed_validated_and_folded_as_names_are() {
    let served = Served::start().await;
    let mut dry = summary(
        matching(&["*eta", "alpha"], KeyOp::Inc),
        ResultView::Summary,
    );
    dry.validate_only = true;
    let response = served.update(dry.clone()).await.expect("possible");
    assert!(response.results.is_empty() && response.report.is_none());
    assert_eq!(response.summary.expect("told").sites_patched, 4);
    assert_eq!(served.guest.pauses(), 0);

    let mut once = v1::UpdateStaticKeysRequest {
        validate_only: false,
        request_id: "once".into(),
        ..dry
    };
    once.updates
        .push(request(&[("beta", KeyOp::Inc)]).updates.remove(0));
    let answer = served.update(once.clone()).await.expect("ref keys");
    assert_eq!(answer.summary.expect("told").keys, 2);
    assert_eq!(served.update(once.clone()).await.expect("replayed"), answer);
    assert_eq!(
        (served.guest.count("alpha"), served.guest.count("beta")),
        (1, 2)
    );
    // The result view is part of the request's content.
    let other = summary(once, ResultView::Full);
    let result = served.update(other).await;
    assert_refused(result, Code::InvalidArgument, "REQUEST_ID_REUSED");
}

/// Checks that the intent has the patterns and the number of selected keys, and that the outcome
/// names each key.
#[tokio::test]
async fn the_audit_log_names_what_a_pattern_changed() {
    let served = Served::start().await;
    let update = of_classes(matching(&["*a", "!z*"], KeyOp::Inc), &[KeyClass::Ref]);
    let mut update = summary(update, ResultView::Summary);
    update
        .updates
        .push(request(&[("siteless", KeyOp::Inc)]).updates.remove(0));
    served.update(update).await.expect("ref keys");
    let lines = served.audit();
    assert_eq!(
        lines[0]["updates"],
        serde_json::json!([
            {"patterns": ["*a", "!z*"], "classes": ["ref"], "keys": 2, "op": "inc"},
            {"key": "siteless", "op": "inc"},
        ])
    );
    let changes = lines[1]["changes"].as_array().expect("a list");
    let mut names: Vec<&str> = changes
        .iter()
        .filter_map(|one| one["key"].as_str())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["alpha", "beta", "siteless"]);
    assert!(changes.iter().all(|one| one["after"] == 1));
}

/// Checks that watchers get each changed key even if the client requested only a summary.
#[tokio::test]
async fn watchers_see_each_key_of_a_selection() {
    let served = Served::start().await;
    let watch = v1::WatchStaticKeysRequest::default();
    let mut stream = served
        .client()
        .watch_static_keys(watch)
        .await
        .expect("watches")
        .into_inner();
    stream.message().await.expect("begins").expect("at once");
    let mut update = summary(matching(&["*a"], KeyOp::Enable), ResultView::Summary);
    update.reason = "incident 7".into();
    served.update(update).await.expect("ref keys");
    let change = stream.message().await.expect("goes on").expect("a change");
    let mut names: Vec<&str> = change.events.iter().map(|event| &*event.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["alpha", "beta"]);
    let told = |event: &v1::KeyEvent| event.count == 1 && event.reason == "incident 7";
    assert!(change.events.iter().all(told), "{change:?}");
}
