// SPDX-License-Identifier: Apache-2.0
//! Tests etcd with certificates and users.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use patchbay_access::certs;
use patchbay_fleet::store::{DEFAULT_ROOT, EtcdStore, Store, StoreError, Transaction};
use patchbay_proto::fleet::v1;

use super::etcd::Etcd;
use super::fleet::{PATIENCE, Process, ProcessFleet, spec};

#[tokio::test(flavor = "multi_thread")]
async fn hosts_and_controllers_are_users_of_etcd_by_their_certificates() {
    let Some(etcd) = Etcd::start_with_users().await else {
        return;
    };
    let fleet = ProcessFleet::on(etcd, &[], 2, 1, &[]).await;
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
    assert!(said.contains("grant the user's role"), "{said}");
}

/// Checks the roles of `etcd-roles.sh`.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_reads_and_writes_its_own_keys_alone() {
    let Some(etcd) = Etcd::start_with_users().await else {
        return;
    };
    let (host, other) = (etcd.store_of("host-0"), etcd.store_of("host-1"));
    let own = "registry/host-0/guests/web-0";
    host.commit(Transaction::new().put(own, "own"))
        .await
        .expect("its own key");
    let listed = host.range("registry/host-0/").await.expect("its own keys");
    assert_eq!(listed.entries.len(), 1);
    let lease = other.grant(PATIENCE).await.expect("granted");
    let leased = Transaction::new().put_leased("registry/host-1/host", "other", lease);
    other.commit(leased).await.expect("its own key");

    let is_denied = |refused: StoreError| match refused {
        StoreError::Invalid(why) => assert!(why.contains("etcd refuses access"), "{why}"),
        other => panic!("{other:?}"),
    };
    for key in [
        "registry/host-1/host",
        "registry/host-1/guests/web-0",
        "registry/host-00/host",
        "registry/host-0",
        "registry/host",
        "rollouts/net/header",
        "leader",
    ] {
        for write in [
            Transaction::new().put(key, "forged"),
            Transaction::new().delete(key),
            // A transaction is refused as a whole.
            Transaction::new().put(own, "forged").put(key, "forged"),
        ] {
            is_denied(host.commit(write).await.expect_err(key));
        }
        is_denied(host.get(key).await.expect_err(key));
    }
    for prefix in ["registry/", "registry/host-", "rollouts/", ""] {
        is_denied(host.range(prefix).await.expect_err(prefix));
    }
    is_denied(host.revoke(lease).await.expect_err("the other's lease"));
    let controller = etcd.store();
    let kept = controller.get("registry/host-1/host").await;
    assert_eq!(kept.expect("read").expect("there").value, b"other");
    let kept = controller.get(own).await.expect("read").expect("there");
    assert_eq!(kept.value, b"own");
    assert!(
        controller
            .range("rollouts/")
            .await
            .expect("listed")
            .entries
            .is_empty()
    );
}

#[test]
fn names_that_are_commands_or_have_all_rights_get_no_role() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/etcd-roles.sh");
    for words in [
        &[][..],
        &["fleet", "a;reboot"],
        &["fleet", "$(reboot)"],
        &["fleet", ""],
        &["fleet", "a b"],
        &["fleet", "a\nb"],
        &["fleet", "root"],
        &["fleet", "fleet"],
        &["--etcd-root", "/x", "fleet"],
        &["--etcd-root", "/x;/", "fleet"],
    ] {
        let output = Command::new("sh").arg(script).args(words).output();
        let output = output.expect("a shell");
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!printed.contains("reboot") && !output.stderr.is_empty());
    }
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
