// SPDX-License-Identifier: Apache-2.0
//! Tests the reports about plans: differences, guests without a wave, and rollouts that have ended.

use patchbay_fleet::plan::diff::{self, DiffError};
use patchbay_fleet::rollout::{Phase, Stage, State};
use patchbay_fleet::runner::Command;

use super::support::{Fleet, is_over, spec, tell, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_names_the_guests_that_no_wave_includes() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let planned = leads
        .plan("net", &spec("waves: [{size: 1}]"), "alice")
        .await;
    let running = planned.expect("planned");
    let rollout = running.rollout();
    let left = rollout
        .members()
        .iter()
        .filter_map(|member| match &member.state {
            State::Skipped { why } => Some((&*member.guest, &**why)),
            _ => None,
        });
    let left: Vec<_> = left.collect();
    let why = "the waves end before it; a last wave with `size: rest` includes it";
    assert_eq!(left, [("web-1", why), ("web-2", why)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_that_has_ended_is_not_planned_again() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]");
    let running = replica.start("net", &text).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    let leads = replica.lead().await;
    leads.plan("net", &text, "alice").await.expect("the same");
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await;
    for text in [text.clone(), spec("waves: [{size: 1}]")] {
        let error = leads.plan("net", &text, "alice").await.err();
        assert_eq!(
            error.expect("refused").to_string(),
            "rollout net has ended and is undone; delete it with `rollout delete net`, or give \
             the new one another --name"
        );
    }
    let error = diff::compare(leads.hosts(), &running, &text, "alice", |_| Ok(())).await;
    assert!(matches!(error, Err(DiffError::Over { .. })), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spec_is_compared_with_the_rollout_that_runs() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{name: canary, size: 1, bake: 1h}, {name: all, size: rest}]");
    let running = replica.start("net", &text).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    let leads = replica.lead().await;
    let same = diff::compare(leads.hosts(), &running, &text, "alice", |_| Ok(())).await;
    assert_eq!(same.expect("compared"), diff::Diff::default());
    let error = diff::compare(leads.hosts(), &running, "title: 7", "alice", |_| Ok(())).await;
    assert!(matches!(error, Err(DiffError::Spec(_))), "{error:?}");

    let other = text
        .replace(
            "{want: held, keys: [alpha]}",
            "{want: on, keys: [alpha, beta]}",
        )
        .replace("web-*", "web-[01]")
        .replace("canary, size: 1", "canary, size: 2")
        + "ttl: 1h\n";
    let diff = diff::compare(leads.hosts(), &running, &other, "alice", |_| Ok(())).await;
    let diff = diff.expect("compared");
    let keys = diff.keys.iter().map(|(key, guests)| {
        let (before, after) = (key.before.as_deref(), key.after.as_deref());
        (&*key.what, before, after, *guests)
    });
    let keys: Vec<_> = keys.collect();
    assert_eq!(
        keys,
        [
            ("alpha", Some("held"), Some("on"), 2),
            ("beta", None, Some("on"), 2)
        ]
    );
    let guests = diff.guests.iter().map(|guest| {
        (
            &*guest.what.1,
            guest.before.as_deref(),
            guest.after.as_deref(),
        )
    });
    let guests: Vec<_> = guests.collect();
    assert_eq!(
        guests,
        [
            ("web-1", Some("all"), Some("canary")),
            ("web-2", Some("all"), None)
        ]
    );
    let fields = diff
        .conditions
        .iter()
        .map(|field| (field.what, field.before.as_deref(), field.after.as_deref()));
    let fields: Vec<_> = fields.collect();
    assert_eq!(
        fields,
        [
            ("ttl", None, Some("1h")),
            ("waves", Some("canary: size 1, bake 1h"), None),
            ("waves", None, Some("canary: size 2, bake 1h")),
        ]
    );
    // Nothing was stored or changed.
    assert_eq!(leads.rollouts().len(), 1);
    assert_eq!(fleet.counts("alpha"), [1, 0, 0]);
    assert_eq!(fleet.counts("beta"), [0; 3]);
}
