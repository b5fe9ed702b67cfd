// SPDX-License-Identifier: Apache-2.0
//! Tests invalid certificates, keys, clocks and specs.

use std::path::Path;

use patchbay_access::certs;
use patchbay_fleet::store::{EtcdStore, Store, Transaction};
use patchbay_proto::fleet::v1;

use super::fleet::{LIBFAKETIME, PATIENCE, ProcessFleet, Replica, spec};
use super::outages::issue;

/// Issues the host's certificate for `hosts`, valid for this long.
fn issue_host(folder: &Path, host: &str, valid: time::Duration) {
    let usage = rcgen::ExtendedKeyUsagePurpose::ServerAuth;
    issue(folder, "host", Some(host), usage, valid);
}

/// Waits until the controller reports this error about its only host. An empty text means that the
/// controller reaches the host.
async fn unreachable(replica: &Replica, why: &str) {
    let mut last = String::new();
    let found = async {
        loop {
            if let Ok(hosts) = replica.hosts().await
                && let [host] = &hosts[..]
            {
                last.clone_from(&host.unreachable);
                if last.contains(why) && last.is_empty() == why.is_empty() {
                    return;
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, found).await;
    found.unwrap_or_else(|_| panic!("never {why:?}: {last:?}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_certificate_is_expired_or_anothers_is_not_reached() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let ca = fleet.path("ca");
    certs::init(&ca, "example.org").expect("a CA");
    let policy = "rules: [{name: fleet, principals: ['spiffe://example.org/fleet'], role: admin, may_assert: true}]";
    std::fs::write(ca.join("policy.yaml"), policy).expect("written");
    let request = certs::Request {
        name: "fleet".to_owned(),
        days: 1,
        ..certs::Request::default()
    };
    certs::issue(&ca, &request).expect("issued");
    let file = |name: &str| ca.join(name).display().to_string();
    let options = [
        format!("--host-cert={}", file("fleet.pem")),
        format!("--host-key={}", file("fleet.key")),
        format!("--host-ca={}", file("ca.pem")),
    ];
    let options = options.each_ref().map(String::as_str);
    let hour = time::Duration::hours(1);
    for (round, (host, valid, why)) in [
        ("elsewhere.example", hour, "not valid for name"),
        // The certificate is valid for the address, but does not prove the host's name.
        ("127.0.0.1", hour, "must be for the name \"host-0-tls\""),
        ("host-0-tls", -time::Duration::minutes(1), "expired"),
        ("host-0-tls", hour, ""),
    ]
    .into_iter()
    .enumerate()
    {
        issue_host(&ca, host, valid);
        fleet.start_host_with_tls(0, &ca).await;
        let replica = fleet.replica(&format!("replica-{round}"), &options);
        unreachable(&replica, why).await;
        if why.is_empty() {
            replica
                .start("net", &spec("waves: [{size: rest}]"), 1)
                .await;
            replica.wait("net", v1::Phase::Completed).await;
            assert_eq!(fleet.changes(0), [(0, 1)]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_keys_in_etcd_are_neither_used_nor_deleted() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let members: Vec<String> = fleet
        .etcd
        .addresses()
        .split(',')
        .map(str::to_owned)
        .collect();
    let others = EtcdStore::new(&members, "/patchbay/", None).expect("addresses");
    let put = async |key: &str, value: &str| {
        let foreign = Transaction::new().put(key, value);
        others.commit(foreign).await.expect("written");
    };
    // These entries exist before the controller lists the registry, and others appear while it
    // watches.
    put("fleet/registry/garbage/host", "not JSON").await;
    put("fleet/registry/notes", "x").await;
    put("fleet/rollouts/notes", "x").await;
    put("fleet/notes", "x").await;
    let replica = fleet.replica("replica", &[]);
    let digest = replica.plan("net", &spec("waves: [{size: rest}]"), 2).await;
    put("fleet/registry/late/host", "{\"machine\": 1}").await;
    put("fleet/registry/host-0/guests/web-9/x", "x").await;
    let started = replica.start_planned("net", digest).await;
    started.expect("started");
    replica.wait("net", v1::Phase::Completed).await;
    let hosts = replica.hosts().await.expect("listed");
    let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    assert_eq!(names, ["host-0"]);
    for key in [
        "registry/garbage/host",
        "registry/late/host",
        "rollouts/notes",
        "notes",
    ] {
        let kept = others.get(&format!("fleet/{key}")).await.expect("read");
        assert!(kept.is_some(), "{key} is kept");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_whose_clock_is_a_day_ahead_changes_the_guests_all_the_same() {
    if !Path::new(LIBFAKETIME).exists() {
        eprintln!("SKIPPED: no libfaketime on this machine; apt-get install faketime");
        return;
    }
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    for (name, offset) in [("ahead", "+1d"), ("behind", "-1d")] {
        let mut command = fleet.replica_command(name, "fleet");
        command
            .env("LD_PRELOAD", LIBFAKETIME)
            .env("FAKETIME", offset);
        command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        let replica = Replica::spawn(command, fleet.path(&format!("{name}.sock")));
        let text = spec("waves: [{size: 1}, {size: rest}]\nttl: 1h");
        replica.start(name, &text, 2).await;
        replica.wait(name, v1::Phase::Completed).await;
        let drift = v1::DriftRequest {
            rollout: name.to_owned(),
            action: v1::DriftAction::Report.into(),
        };
        let drift = replica.rollouts().drift(drift).await.expect("compared");
        assert_eq!(drift.into_inner().drifts, [], "the holds are there");
        replica.undo(name).await;
    }
    for guest in 0..2 {
        assert_eq!(fleet.changes(guest), [(0, 1), (1, 0)].repeat(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spec_of_ten_megabytes_is_refused_and_the_controller_goes_on() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]");
    let digest = replica.plan("net", &text, 1).await;
    for bytes in [2 << 20, 10 << 20] {
        let request = v1::PlanRequest {
            rollout: "large".to_owned(),
            spec: format!("# {}\n{text}", "x".repeat(bytes)),
        };
        let refused = replica.rollouts().plan(request).await;
        let refused = refused.expect_err("too large");
        let known = [tonic::Code::InvalidArgument, tonic::Code::OutOfRange];
        assert!(known.contains(&refused.code()), "{refused}");
    }
    let started = replica.start_planned("net", digest).await;
    started.expect("started");
    replica.wait("net", v1::Phase::Completed).await;
}
