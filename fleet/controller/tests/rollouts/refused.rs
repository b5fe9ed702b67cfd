// SPDX-License-Identifier: Apache-2.0
//! Tests plans that are refused.

use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::rollout::{Member, State};

use super::support::{Fleet, is_over, spec, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_is_repeated_by_name_and_spec() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let first = leads.plan("net", &text, "alice").await.expect("planned");
    let again = leads.plan("net", &text, "alice").await.expect("the same");
    assert!(std::sync::Arc::ptr_eq(&first, &again));
    let other = leads
        .plan("net", &spec("waves: [{size: 1}]"), "alice")
        .await;
    let error = other.err().expect("refused").to_string();
    assert!(error.contains("exists with another spec"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overlapping_rollout_is_refused_and_the_other_named() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    leads.plan("first", &text, "alice").await.expect("planned");
    let error = leads
        .plan("second", &text, "alice")
        .await
        .err()
        .expect("refused")
        .to_string();
    assert!(
        error.starts_with("rollout first changes alpha of guest web-"),
        "{error}"
    );
    let beta = text.replace("alpha", "beta");
    leads
        .plan("third", &beta, "alice")
        .await
        .expect("another key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_touches_nothing_says_why() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    for (from, to, why) in [
        ("web-*", "db-*", "no guest matches"),
        ("alpha", "alhpa", "KEY_NOT_FOUND"),
    ] {
        let planned = leads.plan("net", &text.replace(from, to), "alice").await;
        let error = planned.err().expect("refused").to_string();
        assert!(error.contains(why), "{error}");
    }
    for name in ["", "a/b", &"a".repeat(65)] {
        let planned = leads.plan(name, &text, "alice").await;
        let error = planned.err().expect("refused").to_string();
        assert!(error.contains("is no name of a rollout"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_the_store_cannot_take_is_refused() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let freeze = "{from: \"2020-01-01T00:00:00Z\", until: \"2020-01-02T00:00:00Z\", reason: x}";
    let large = spec(&format!(
        "waves: [{{size: rest}}]\nfreeze: [{}]",
        vec![freeze; 9000].join(", ")
    ));
    assert!(large.len() < 1 << 20, "{}", large.len());
    let planned = leads.plan("net", &large, "alice").await;
    let error = planned.err().expect("refused").to_string();
    assert!(error.contains("fewer waves, gates or freezes"), "{error}");
    assert_eq!(
        fleet.store.range("rollouts/").await.expect("read").entries,
        []
    );
    let small = spec("waves: [{size: rest}]");
    leads.plan("net", &small, "alice").await.expect("planned");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hosts_with_one_name_are_refused() {
    let fleet = Fleet::start(1, 1).await;
    let hosts = vec![fleet.hosts[0].clone(), fleet.hosts[0].clone()];
    let config = Config {
        hosts,
        ..fleet.config("one")
    };
    let error = Controller::new(config, fleet.store.clone())
        .err()
        .expect("refused");
    assert!(error.to_string().contains("\"host-0\""), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_kernel_is_not_known_is_left_out_and_named() {
    let fleet = Fleet::start(1, 2).await;
    assert_eq!(fleet.guests[1].unregister(), 0);
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text =
        spec("waves: [{size: rest}]").replace("guests: [\"web-*\"]", "kernel_release: \"*\"");
    let planned = leads.plan("net", &text, "alice").await.expect("planned");
    let planned = planned.rollout();
    let names: Vec<_> = planned
        .members()
        .iter()
        .map(|member| &*member.guest)
        .collect();
    assert_eq!(names, ["web-0"]);
    let message = &planned.header().message;
    let why = "left out: the kernel of web-1 on host-0 is not known: GUEST_NOT_REGISTERED";
    assert!(message.starts_with(why), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_that_no_wave_includes_are_left_out_and_say_so() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: 1}]")).await;
    wait_for(&running, is_over).await;
    assert_eq!(fleet.counts("alpha").iter().sum::<i32>(), 1);
    let rollout = running.rollout();
    let is_told = |member: &Member| match &member.state {
        State::Skipped { why } => why.contains("size: rest"),
        _ => false,
    };
    assert!(rollout.members()[1..].iter().all(is_told));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_names_the_keys_that_patterns_leave_out() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]").replace("[alpha]", "[alpha, \"g*\"]");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    let rollout = running.rollout();
    let [guarded] = &rollout.members()[0].plan.left_out[..] else {
        panic!("{:?}", rollout.members());
    };
    assert_eq!((&*guarded.reason, guarded.count), ("KEY_GUARDED", 1));
    assert_eq!(guarded.names, ["guarded"]);
    let claims = rollout.members()[0].plan.set.claims();
    assert!(claims.iter().all(|claim| claim.key != "guarded"));
}
