// SPDX-License-Identifier: Apache-2.0
//! Tests the API over TCP: who may give which command, whose approvals count, and how a client
//! finds the leader.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use patchbay_access::certs;
use patchbay_access::connect::TlsFiles;
use patchbay_proto::fleet::v1;
use rustix::process::Signal;
use tonic::Code;
use tonic_types::StatusExt;

use super::etcd::free_address;
use super::fleet::{PATIENCE, ProcessFleet, spec};
use super::outages::issue;
use super::setup::{Client, DAY, People, abort, approve, id, plan, refused, start};

/// A lease that does not expire while a test waits.
const LONG_LEASE: &str = "--lease-seconds=300";

const POLICY: &str = "
rules:
  - {name: web, principals: ['spiffe://example.org/alice'], role: operator, guests: ['web-*'], keys: [alpha]}
  - {name: beta, principals: ['spiffe://example.org/carol'], role: operator, keys: [beta]}
  - {name: one, principals: ['spiffe://example.org/dave'], role: operator, guests: [web-0]}
  - {name: few, principals: ['spiffe://example.org/erin'], role: operator, max_guests: 1}
  - {name: looks, principals: ['spiffe://example.org/bob', 'uid:*'], role: viewer}
";

#[tokio::test(flavor = "multi_thread")]
async fn each_command_is_decided_for_the_person_who_gives_it() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let names = ["alice", "bob", "carol", "dave", "erin", "eve"];
    let people = People::new(&fleet, &names, POLICY);
    let address = free_address();
    let replica = people.replica("replica", &address, &[LONG_LEASE]);
    let mut clients = names.map(|name| people.client(name, &address));
    let [alice, bob, carol, dave, erin, eve] = &mut clients;
    let text = spec("waves: [{size: 1, bake: 1h}, {size: rest}]");

    // A person cannot plan a rollout that the person may not start.
    let planned = plan(carol, "net", &text).await;
    refused(
        planned,
        Code::PermissionDenied,
        "does not cover key \"alpha\"",
    );
    let planned = plan(dave, "net", &text).await;
    refused(
        planned,
        Code::PermissionDenied,
        "guests that you may not see",
    );
    let planned = plan(erin, "net", &text).await;
    refused(
        planned,
        Code::PermissionDenied,
        "allows 1 guests in an hour",
    );
    let planned = plan(bob, "net", &text).await;
    refused(planned, Code::PermissionDenied, "operator is needed");
    let rollout = plan(alice, "net", &text).await.expect("allowed");

    // The policy refuses each of the commands, and none has an effect.
    for (client, why) in [
        (&mut *bob, "operator is needed"),
        (&mut *carol, "does not cover key"),
        (&mut *dave, "guests that you may not see"),
    ] {
        let name = || "net".to_owned();
        let denied = Code::PermissionDenied;
        refused(approve(client, &rollout).await, denied, why);
        refused(start(client, &rollout, false).await, denied, why);
        refused(start(client, &rollout, true).await, denied, "break-glass");
        refused(abort(client, "net").await, denied, why);
        let undone = client.undo(v1::UndoRequest { rollout: name() }).await;
        refused(undone, denied, why);
        let paused = client.pause(v1::PauseRequest { rollout: name() }).await;
        refused(paused, denied, why);
        let resumed = client.resume(v1::ResumeRequest { rollout: name() }).await;
        refused(resumed, denied, why);
        let promote = v1::PromoteRequest {
            rollout: name(),
            ..Default::default()
        };
        refused(client.promote(promote).await, denied, why);
        let delete = v1::DeleteRequest {
            rollout: name(),
            unreadable: false,
        };
        refused(client.delete(delete).await, denied, why);
        let forget = v1::ForgetRequest {
            rollout: name(),
            host: String::new(),
            guest: "web-0".to_owned(),
        };
        refused(client.forget(forget).await, denied, why);
    }
    let capped = start(erin, &rollout, false).await;
    refused(capped, Code::PermissionDenied, "allows 1 guests in an hour");
    let listed = eve.list(v1::ListRequest {}).await;
    refused(
        listed,
        Code::PermissionDenied,
        "no rule of the policy names",
    );

    // A person sees the guests that the policy shows, and no others.
    let get = || v1::GetRequest {
        rollout: "net".to_owned(),
    };
    let guests = async |client: &mut Client| {
        let answer = client.get(get()).await.expect("seen").into_inner();
        let guests = answer.rollout.expect("a rollout").guests;
        guests
            .into_iter()
            .map(|guest| guest.guest)
            .collect::<Vec<_>>()
    };
    assert_eq!(guests(bob).await, ["web-0", "web-1"]);
    assert_eq!(guests(dave).await, ["web-0"]);

    let rollout = start(alice, &rollout, false).await.expect("allowed");
    assert_eq!(rollout.approvals, [id("alice")]);
    replica.as_wanted("net", 0).await;
    // A cap on changes does not prevent anybody from undoing a change.
    abort(erin, "net").await.expect("allowed");
    let rollout = replica.wait("net", v1::Phase::Aborted).await;
    let aborted = |entry: &v1::TimelineEntry| entry.text == "aborted";
    let entry = rollout.timeline.iter().find(|entry| aborted(entry));
    assert_eq!(entry.expect("recorded").principal, id("erin"));
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_no_connection() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let people = People::new(&fleet, &["alice"], POLICY);
    let address = free_address();
    let _replica = people.replica("replica", &address, &[LONG_LEASE]);
    let text = spec("waves: [{size: rest}]");
    let mut alice = people.client("alice", &address);
    plan(&mut alice, "net", &text).await.expect("allowed");

    let other = fleet.path("other");
    certs::init(&other, "example.org").expect("a CA");
    let usage = rcgen::ExtendedKeyUsagePurpose::ClientAuth;
    issue(&other, "alice", None, usage, DAY);
    let mallory = TlsFiles {
        certificate: other.join("alice.pem"),
        key: other.join("alice.key"),
        ca: people.folder.join("ca.pem"),
    };
    let mut mallory = people.client_with(mallory, &address);
    not_connected(&mallory.list(v1::ListRequest {}).await);
    people.issue("late", -time::Duration::minutes(1));
    let listed = people
        .client("late", &address)
        .list(v1::ListRequest {})
        .await;
    not_connected(&listed);
    let files = TlsFiles {
        ca: other.join("ca.pem"),
        ..people.files("alice")
    };
    let listed = people
        .client_with(files, &address)
        .list(v1::ListRequest {})
        .await;
    not_connected(&listed);
    alice.list(v1::ListRequest {}).await.expect("still served");
}

/// Panics if the controller has answered: that its policy does not know a person is an answer.
fn not_connected<T: std::fmt::Debug>(listed: &Result<tonic::Response<T>, tonic::Status>) {
    let status = listed.as_ref().expect_err("no connection");
    let source = std::error::Error::source(status);
    let is_of_transport = source.is_some_and(|source| source.is::<tonic::transport::Error>());
    assert!(is_of_transport, "{status:?}");
}

const APPROVED: &str = "
rules:
  - {name: ops, principals: ['spiffe://example.org/{alice,bob,dan}'], role: operator}
  - {name: on-call, principals: ['spiffe://example.org/olga'], role: break-glass}
  - {name: looks, principals: ['uid:*'], role: viewer}
approvals:
  - {keys: [alpha], min: 2, planner_may_approve: false}
";

/// Returns the policy above for these operators.
fn approved_by(operators: &[&str]) -> String {
    let ids: Vec<String> = operators
        .iter()
        .map(|name| format!("'{}'", id(name)))
        .collect();
    APPROVED.replace("'spiffe://example.org/{alice,bob,dan}'", &ids.join(", "))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_people_other_than_the_planner_approve() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let policy = approved_by(&["alice", "bob", "dan"]);
    let people = People::new(&fleet, &["alice", "bob"], &policy);
    let address = free_address();
    let replica = people.replica("replica", &address, &[LONG_LEASE]);
    let mut alice = people.client("alice", &address);
    let mut bob = people.client("bob", &address);
    let text = spec("waves: [{size: rest}]");
    let rollout = plan(&mut alice, "net", &text).await.expect("allowed");
    assert_eq!(rollout.approvals_needed, 2);
    // The approval of the planner does not count, and nobody counts twice.
    approve(&mut alice, &rollout).await.expect("legal");
    let started = start(&mut alice, &rollout, false).await;
    refused(started, Code::FailedPrecondition, "0 of 2 people");
    approve(&mut bob, &rollout).await.expect("legal");
    approve(&mut bob, &rollout).await.expect("repeated");
    for client in [&mut alice, &mut bob] {
        let started = start(client, &rollout, false).await;
        refused(started, Code::FailedPrecondition, "1 of 2 people");
    }
    let wrong = v1::Rollout {
        digest: "0".repeat(64),
        ..rollout.clone()
    };
    let approved = approve(&mut bob, &wrong).await;
    refused(approved, Code::FailedPrecondition, "review the plan");

    // Dan approves. Then his certificate expires, which also ends his access over the open
    // connection.
    people.issue("dan", time::Duration::seconds(15));
    let mut dan = people.client("dan", &address);
    approve(&mut dan, &rollout).await.expect("still valid");
    let ended = async {
        loop {
            let listed = dan.list(v1::ListRequest {}).await;
            match listed.map_err(|status| status.code()) {
                Err(Code::Unauthenticated) => return,
                Err(code) => panic!("{code}"),
                Ok(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, ended)
        .await
        .expect("it ends");
    let started = start(&mut dan, &rollout, false).await.expect_err("refused");
    let is_refused = [Code::Unauthenticated, Code::Unavailable, Code::Unknown];
    assert!(is_refused.contains(&started.code()), "{started}");

    // His approval counts as long as the policy allows him to change the rollout.
    people.write_policy(&approved_by(&["alice", "bob"]));
    replica.reload().await;
    let started = start(&mut bob, &rollout, false).await;
    refused(started, Code::FailedPrecondition, "1 of 2 people");
    people.write_policy(&policy);
    replica.reload().await;
    let rollout = start(&mut bob, &rollout, false).await.expect("approved");
    assert_eq!(rollout.approvals, [id("alice"), id("bob"), id("dan")]);
    replica.wait("net", v1::Phase::Completed).await;
}

/// Returns the lines of an audit log that contain the text.
fn lines(file: &Path, text: &str) -> Vec<String> {
    let log = std::fs::read_to_string(file).expect("a log");
    let lines = log.lines().filter(|line| line.contains(text));
    lines.map(str::to_owned).collect()
}

fn scraped(address: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).expect("listens");
    let request = "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn breaking_the_glass_needs_its_role_and_is_recorded() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let policy = approved_by(&["alice"]);
    let people = People::new(&fleet, &["alice", "olga"], &policy);
    let text = spec("waves: [{size: 1, bake: 1h}, {size: rest}]");
    let audit = fleet.path("fleet.audit");
    let recorded = format!("--audit-log={}", audit.display());
    let (address, metrics) = (free_address(), free_address());
    let scrape = format!("--metrics={metrics}");
    {
        // The glass cannot be broken without a record.
        let _replica = people.replica("silent", &address, &[]);
        let mut olga = people.client("olga", &address);
        let rollout = plan(&mut olga, "net", &text).await.expect("allowed");
        let started = start(&mut olga, &rollout, true).await;
        refused(started, Code::FailedPrecondition, "--audit-log");
    }
    let replica = people.replica("replica", &address, &[LONG_LEASE, &recorded, &scrape]);
    let mut alice = people.client("alice", &address);
    let mut olga = people.client("olga", &address);
    let rollout = plan(&mut olga, "net", &text).await.expect("a repeat");
    let started = start(&mut alice, &rollout, true).await;
    refused(started, Code::PermissionDenied, "the role break-glass");
    let started = start(&mut olga, &rollout, false).await;
    refused(started, Code::FailedPrecondition, "0 of 2 people");
    assert!(lines(&audit, "break_glass").is_empty());
    assert!(scraped(&metrics).contains("patchbay_fleet_broken_glass_total 0"));

    start(&mut olga, &rollout, true).await.expect("broken");
    let broken = lines(&audit, "break_glass");
    assert_eq!(broken.len(), 1, "{broken:?}");
    assert!(broken[0].contains(&id("olga")), "{broken:?}");
    assert!(broken[0].contains("RolloutService/Start"), "{broken:?}");
    assert!(scraped(&metrics).contains("patchbay_fleet_broken_glass_total 1"));

    replica.as_wanted("net", 0).await;
    let promote = |break_glass| v1::PromoteRequest {
        rollout: "net".to_owned(),
        break_glass,
    };
    let promoted = olga.promote(promote(false)).await;
    refused(
        promoted,
        Code::FailedPrecondition,
        "gates that were approved",
    );
    let promoted = alice.promote(promote(true)).await;
    refused(promoted, Code::PermissionDenied, "the role break-glass");
    olga.promote(promote(true)).await.expect("broken");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(lines(&audit, "break_glass").len(), 2);
    assert!(scraped(&metrics).contains("patchbay_fleet_broken_glass_total 2"));
    let texts = rollout.timeline.iter().map(|entry| entry.text.as_str());
    assert_eq!(
        texts.filter(|text| text.contains("broken glass")).count(),
        2
    );
    // Refused commands are recorded too.
    assert_eq!(lines(&audit, "\"denied\"").len(), 4);
}

/// Waits for a replica that answers that another one leads, and returns the other one's address.
async fn named_leader(client: &mut Client) -> Option<String> {
    let named = async {
        loop {
            match client.list(v1::ListRequest {}).await {
                Ok(_) => return None,
                Err(status) => {
                    let info = status.get_details_error_info();
                    let info = info.filter(|info| info.reason == "NOT_LEADER");
                    let leader = info.and_then(|mut info| info.metadata.remove("leader"));
                    if leader.is_some() {
                        return leader;
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let named = tokio::time::timeout(PATIENCE, named).await;
    named.expect("a leader is named")
}

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_names_the_leader_and_one_that_ends_resigns_first() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let people = People::new(&fleet, &["alice"], POLICY);
    let addresses = [free_address(), free_address()];
    let public = "fleet-1.example.org:7448";
    let advertise = format!("--advertise={public}");
    let first = people.replica("first", &addresses[0], &[LONG_LEASE, &advertise]);
    let mut alice = people.client("alice", &addresses[0]);
    let text = spec("waves: [{size: rest}]");
    plan(&mut alice, "net", &text).await.expect("it leads");
    let second = people.replica("second", &addresses[1], &[LONG_LEASE]);
    let mut other = people.client("alice", &addresses[1]);
    assert_eq!(named_leader(&mut other).await.as_deref(), Some(public));
    // Over the socket too, and the text says the same.
    assert_eq!(
        named_leader(&mut second.rollouts()).await.as_deref(),
        Some(public)
    );
    let refused = second.rollouts().list(v1::ListRequest {}).await;
    let refused = refused.expect_err("it does not lead");
    assert!(refused.message().contains(public), "{refused}");

    // The stream of a client that only watches does not keep the leader from ending.
    let rollout = "net".to_owned();
    let watch = alice.watch(v1::WatchRequest { rollout }).await;
    let mut watch = watch.expect("watched").into_inner();
    watch.message().await.expect("answered").expect("a state");
    first.signal(Signal::TERM);
    let status = first.ended().await;
    assert!(status.success(), "{status}");
    assert_eq!(
        named_leader(&mut other).await,
        None,
        "it leads before the lease expires"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_joins_waits_while_its_starter_may_not_change_it() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    fleet.monitors[1] = None;
    fleet.registered(1, 1).await;
    let limited = POLICY.replace("guests: ['web-*']", "guests: [web-0]");
    let address = free_address();
    let (replica, folder) = {
        let people = People::new(&fleet, &["alice"], &limited);
        let replica = people.replica("replica", &address, &[]);
        let mut alice = people.client("alice", &address);
        let text = spec("waves: [{size: rest}]\nlate_guests: change");
        let rollout = plan(&mut alice, "net", &text).await.expect("allowed");
        start(&mut alice, &rollout, false).await.expect("allowed");
        (replica, people.folder)
    };
    replica.wait("net", v1::Phase::Completed).await;
    fleet.start_monitor(1, false);
    let waits = async {
        loop {
            let rollout = replica.wait("net", v1::Phase::Completed).await;
            if rollout.message.contains("joined") {
                return rollout.message;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let message = tokio::time::timeout(PATIENCE, waits).await.expect("shown");
    assert!(
        message.contains("1 guests joined and are not changed")
            && message.contains(&id("alice"))
            && message.contains("does not cover guest \"the guest\""),
        "{message}"
    );
    assert_eq!(fleet.changes(1), []);
    // The policy that is in force then decides.
    std::fs::write(folder.join("policy.yaml"), POLICY).expect("written");
    replica.reload().await;
    let changed = async {
        while fleet.changes(1).is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, changed)
        .await
        .expect("changed");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(rollout.waves.len(), 2);
    assert!(!rollout.message.contains("joined"), "{}", rollout.message);
}

/// Checks that users of the host are different people, whose approvals count.
#[tokio::test(flavor = "multi_thread")]
async fn users_of_the_socket_are_told_apart_by_their_uid() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start processes of other users");
        return;
    }
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let policy = "
rules:
  - {name: users, principals: ['uid:0', 'uid:4242'], role: operator}
approvals: [{min: 2}]
";
    let people = People::new(&fleet, &[], policy);
    let open = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(fleet.path("."), open).expect("changed");
    let replica = people.replica(
        "replica",
        &free_address(),
        &[LONG_LEASE, "--socket-mode=666"],
    );
    let text = spec("waves: [{size: rest}]");
    let digest = replica.plan("net", &text, 1).await;
    let approve = |uid: u32| {
        let socket = fleet.path("replica.sock").display().to_string();
        let mut child = fleet.child(
            "person",
            &[("FLEET_SOCKET", socket), ("DIGEST", digest.clone())],
        );
        let output = child.uid(uid).gid(uid).stdout(std::process::Stdio::piped());
        let output = output.output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = approve(4243);
    assert!(
        said.contains("no rule of the policy names \"uid:4243\""),
        "{said}"
    );
    let said = approve(4242);
    assert!(said.contains("approved by [\"uid:4242\"]"), "{said}");
    let started = replica.start_planned("net", digest).await;
    started.expect("two approve");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(rollout.approvals, ["uid:4242", "uid:0"]);
}

/// Checks options that the controller refuses, and that it names what is wrong.
#[test]
fn options_that_do_not_fit_are_refused() {
    for (options, why) in [
        (&["--listen=127.0.0.1:0"][..], "--cert"),
        (&["--advertise=a:1"], "--listen"),
        (&["--advertise=a"], "ADDRESS:PORT"),
        (&["--socket-mode=999"], "octal"),
        (
            &[
                "--cert=x",
                "--key=x",
                "--policy=x",
                "--client-ca=example.org=x",
            ],
            "nothing uses --cert",
        ),
        (
            &["--listen=127.0.0.1:0", "--cert=x", "--key=x", "--policy=x"],
            "--client-ca",
        ),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_patchbay-fleet"));
        command.args(["--standalone", "--host=a=/nonexistent", "--store"]);
        let folder = tempfile::tempdir().expect("a folder");
        command.arg(folder.path().join("store"));
        let output = command.args(options).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(why),
            "{options:?}: {said}"
        );
    }
}
