// SPDX-License-Identifier: Apache-2.0
//! Tests rollouts of guarded keys.

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::authority::{Authority, Refused};
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::Command;

use super::support::{Fleet, is_over, spec, tell, wait_for};

fn of_guarded(key: &str, more: &str) -> String {
    spec(&format!("waves: [{{size: rest}}]\n{more}"))
        .replace("keys: [alpha]", &format!("keys: [{key}]"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guarded_key_is_changed_by_consent_only_and_undone() {
    let fleet = Fleet::start_permitting(1, 2, true).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let refused = leads.plan("net", &of_guarded("guarded", ""), "alice").await;
    let error = refused.err().expect("refused").to_string();
    for part in [
        "key guarded is guarded: only the guest knows what else depends on it",
        "the spec can allow it with `allow_guarded: true`",
    ] {
        assert!(error.contains(part), "{error}");
    }
    // A pattern leaves it out, and says so.
    let some = of_guarded("\"*a*\", \"!kmem_*\", \"!sched_*\"", "");
    let planned = leads.plan("some", &some, "alice").await;
    let planned = planned.expect("planned");
    let left_out = planned.rollout().members()[0].plan.left_out.clone();
    assert_eq!(left_out[0].reason, "KEY_GUARDED");
    assert_eq!(left_out[0].names, ["guarded"]);
    assert!(planned.rollout().members()[0].plan.set.guarded().is_empty());
    tell(&planned, Command::Abort).await;

    let text = of_guarded("\"guarded\"", "allow_guarded: true");
    let running = replica.start("net", &text).await;
    {
        let rollout = running.rollout();
        let guarded = rollout.members()[0].plan.set.guarded();
        let keys: Vec<&str> = guarded.iter().map(|guarded| &*guarded.key).collect();
        assert_eq!(keys, ["guarded"]);
        assert!(rollout.header().policy.allow_guarded);
    }
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("guarded"), [1, 1]);
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await;
    assert_eq!(fleet.counts("guarded"), [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_monitor_without_permission_refuses_a_guarded_key_in_spite_of_consent() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = of_guarded("guarded", "allow_guarded: true");
    let error = leads.plan("net", &text, "alice").await.err();
    let error = error.expect("refused").to_string();
    assert!(
        error.contains(
            "key guarded is guarded, and its monitor was started without --allow-guarded"
        ),
        "{error}"
    );
}

/// Checks that a rollout with `allow_guarded` requires the role admin for each command, and that
/// the same rollout without it requires an operator.
#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_gives_commands_for_a_rollout_of_guarded_keys() {
    let fleet = Fleet::start_permitting(1, 1, true).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("policy.yaml");
    let rules = "rules:\n\
                 - {name: all, principals: [alice], role: admin}\n\
                 - {name: some, principals: [bob], role: operator}\n\
                 - {name: glass, principals: [carol], role: break-glass}\n";
    std::fs::write(&file, rules).expect("written");
    let authority = Authority::new(LivePolicy::read(file).expect("good"), None);
    let denied = |refused: Result<(), Refused>, person: &str| {
        let refused = refused.expect_err(person);
        assert!(matches!(refused, Refused::Denied(_)), "{person}: {refused}");
    };

    let text = of_guarded("guarded", "allow_guarded: true");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    let digest = running.rollout().header().digest.clone();
    for person in ["bob", "carol"] {
        let may_plan = authority.may_plan(person, &running.rollout());
        assert!(may_plan.is_err(), "{person}: {may_plan:?}");
        for command in [
            Command::Start {
                digest: digest.clone(),
            },
            Command::StartUnapproved {
                digest: digest.clone(),
            },
            Command::Abort,
        ] {
            denied(authority.give(person, &running, command).await, person);
        }
    }
    assert!(authority.may_plan("alice", &running.rollout()).is_ok());
    let start = Command::Start { digest };
    let started = authority.give("alice", &running, start).await;
    started.expect("an admin");
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    denied(authority.give("bob", &running, Command::Undo).await, "bob");
    let undone = authority.give("alice", &running, Command::Undo).await;
    undone.expect("an admin");

    let plain = of_guarded("beta", "");
    let running = leads.plan("plain", &plain, "alice").await.expect("planned");
    assert!(authority.may_plan("bob", &running.rollout()).is_ok());
}
