// SPDX-License-Identifier: Apache-2.0
//! Tests that the controller names to hosts the persons for whom it changes their guests.

use std::time::Duration;

use patchbay_access::certs;
use patchbay_proto::fleet::v1;
use serde_json::Value;

use super::fleet::{PATIENCE, ProcessFleet, Replica, spec};

const FLEET: &str = "spiffe://example.org/fleet";

/// Waits until the only guest of the rollout is not yet as wanted for a reason with this word, and
/// returns the guest.
async fn not_yet(replica: &Replica, name: &str, word: &str) -> v1::RolloutGuest {
    let reached = async {
        loop {
            let rollout = name.to_owned();
            let answer = replica.rollouts().get(v1::GetRequest { rollout }).await;
            let rollout = answer.expect("answers").into_inner().rollout;
            let guest = rollout.expect("a rollout").guests.remove(0);
            if guest.phase() == v1::GuestPhase::NotYet && guest.message.contains(word) {
                return guest;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    reached.unwrap_or_else(|_| panic!("the guest of {name} never waits for {word:?}"))
}

/// Returns the lines of an audit log.
fn lines(fleet: &ProcessFleet, name: &str) -> Vec<Value> {
    let log = std::fs::read_to_string(fleet.path(name)).expect("a log");
    let lines = log.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_names_and_bounds_the_person_who_started_a_rollout() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let ca = fleet.path("ca");
    certs::init(&ca, "example.org").expect("a CA");
    for (name, hosts) in [("host", vec!["host-0-tls".to_owned()]), ("fleet", vec![])] {
        let request = certs::Request {
            name: name.to_owned(),
            hosts,
            days: 1,
            ..certs::Request::default()
        };
        certs::issue(&ca, &request).expect("issued");
    }
    // The person of this test may change one key in an hour, and the controller any number.
    let person = format!("uid:{}", rustix::process::geteuid().as_raw());
    let policy = format!(
        "rules:\n  - {{name: fleet, principals: ['{FLEET}'], role: operator, may_assert: true}}\n  \
         - {{name: few, principals: ['{person}'], role: operator, max_keys: 1}}\n"
    );
    std::fs::write(ca.join("policy.yaml"), policy).expect("written");
    fleet.start_host_with_tls(0, &ca).await;
    let file = |name: &str| ca.join(name).display().to_string();
    let options = [
        format!("--host-cert={}", file("fleet.pem")),
        format!("--host-key={}", file("fleet.key")),
        format!("--host-ca={}", file("ca.pem")),
    ];
    let options = options.each_ref().map(String::as_str);
    let replica = fleet.replica("replica", &options);
    let wave = spec("waves: [{size: rest}]");
    replica.start("first", &wave, 1).await;
    replica.wait("first", v1::Phase::Completed).await;
    // Each set of claims fits alone, so the plan is accepted. Both together exceed the cap.
    let beta = wave.replace("alpha", "beta");
    replica.start("second", &beta, 1).await;
    let guest = not_yet(&replica, "second", "ROLE_MISSING").await;
    for word in [person.as_str(), "rule \"few\" allows 1 keys"] {
        assert!(guest.message.contains(word), "{guest:?}");
    }
    assert_eq!(fleet.changes(0), [(0, 1)]);
    // No cap prevents the undo of a rollout.
    replica.undo("first").await;
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0)]);

    let is_set = |line: &&Value| line["method"].as_str().unwrap_or("").ends_with("SetClaims");
    let host = lines(&fleet, "host-0.audit");
    let mut rules: Vec<&str> = Vec::new();
    for line in host
        .iter()
        .filter(|line| line["event"] == "intent")
        .filter(is_set)
    {
        assert_eq!(line["principal"], FLEET, "{line}");
        assert_eq!(line["person"], person, "{line}");
        rules.push(line["rule"].as_str().expect("a rule"));
    }
    let bounded = format!("fleet; for {person}: few");
    assert!(rules.contains(&&*bounded), "{rules:?}");
    assert!(rules.contains(&"fleet"), "the undo is bounded: {rules:?}");
    let claims = lines(&fleet, "web-0.audit").into_iter();
    let claims: Vec<_> = claims
        .filter(|line| !line["generation"].is_null())
        .collect();
    assert!(claims.len() >= 2, "{claims:?}");
    for line in claims {
        assert_eq!(line["owner"], FLEET, "{line}");
        assert_eq!(line["person"], person, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_let_the_controller_assert_changes_nothing() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!("rules: [{{name: own, principals: ['uid:{uid}'], role: admin}}]");
    std::fs::write(fleet.path("policy/policy.yaml"), policy).expect("written");
    let replica = fleet.replica("replica", &[]);
    let wave = spec("waves: [{size: rest}]");
    let digest = replica.plan("net", &wave, 1).await;
    fleet.hosts[0] = None;
    fleet.start_host(0);
    let started = replica.start_planned("net", digest).await;
    started.expect("started");
    not_yet(&replica, "net", "may_assert").await;
    assert_eq!(fleet.changes(0), []);
}
