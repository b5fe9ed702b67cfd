// SPDX-License-Identifier: Apache-2.0
//! Tests etcd with certificates and users.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use patchbay_access::certs;
use patchbay_fleet::store::{DEFAULT_ROOT, EtcdStore, Store, StoreError};
use patchbay_proto::fleet::v1;

use super::etcd::Etcd;
use super::fleet::{Process, ProcessFleet, spec};

#[tokio::test(flavor = "multi_thread")]
async fn hosts_and_controllers_are_users_of_etcd_by_their_certificates() {
    let Some(etcd) = Etcd::start_with_users().await else {
        return;
    };
    let fleet = ProcessFleet::on(etcd, &[], 1, 2, &[]).await;
    let replica = fleet.replica("replica", &[]);
    replica
        .start("net", &spec("waves: [{size: rest}]"), 2)
        .await;
    replica.wait("net", v1::Phase::Completed).await;
    for guest in 0..2 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
    // The error of a user without the role names the missing right, and the user's replica does not
    // lead.
    let refused = fleet.etcd.store_of("stranger").get("leader").await;
    let refused = refused.expect_err("no permission");
    assert!(matches!(refused, StoreError::Invalid(_)), "{refused}");
    let mut stranger = fleet.replica_command("stranger", "stranger");
    let mut stranger = Process(stranger.stderr(Stdio::piped()).spawn().expect("starts"));
    let log = BufReader::new(stranger.0.stderr.take().expect("piped"));
    let said = tokio::task::spawn_blocking(move || {
        let mut lines = log.lines().map_while(Result::ok);
        lines.find(|line| line.contains("does not lead"))
    });
    let said = tokio::time::timeout(super::fleet::PATIENCE, said).await;
    let said = said.expect("in time").expect("read").expect("it says so");
    assert!(said.contains("grant the controller's role"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_is_not_taken_for_another_and_takes_no_other() {
    let Some(etcd) = Etcd::start_with_users().await else {
        return;
    };
    let members: Vec<String> = etcd.addresses().split(',').map(str::to_owned).collect();
    let foreign = tempfile::tempdir().expect("a folder");
    let folder = foreign.path().join("ca");
    certs::init(&folder, certs::DEFAULT_TRUST_DOMAIN).expect("a CA");
    let request = certs::Request {
        name: "fleet".to_owned(),
        days: 1,
        ..certs::Request::default()
    };
    certs::issue(&folder, &request).expect("issued");
    let own = etcd.tls("fleet").expect("certificates");
    let mut not_its_ca = own.clone();
    not_its_ca.ca = folder.join("ca.pem");
    let mut not_our_ca = own.clone();
    not_our_ca.certificate = folder.join("fleet.pem");
    not_our_ca.key = folder.join("fleet.key");
    for tls in [not_its_ca, not_our_ca] {
        let store = EtcdStore::new(&members, DEFAULT_ROOT, Some(&tls)).expect("readable");
        let error = store.get("leader").await.expect_err("another CA");
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    }
    let plain: Vec<String> = members
        .iter()
        .map(|at| at.replace("https", "http"))
        .collect();
    let mut missing = own.clone();
    missing.key = folder.join("absent.key");
    for (members, tls, expected) in [
        (&members, None, "--etcd-ca"),
        (&plain, Some(&own), "https://"),
        (&members, Some(&missing), "absent.key"),
    ] {
        let error = EtcdStore::new(members, DEFAULT_ROOT, tls).err();
        let error = error.expect("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
