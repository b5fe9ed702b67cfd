// SPDX-License-Identifier: Apache-2.0
//! Tests records that a user of etcd forges, and controllers with different keys.

use std::os::unix::fs::PermissionsExt;

use patchbay_fleet::rollout::{
    Header, Member, OnFailure, Phase, Rollout, Stage, WaveGate, WaveGateKind,
};
use patchbay_fleet::storage;
use patchbay_fleet::store::{Entry, Store, Transaction};
use patchbay_proto::fleet::v1;

use super::fleet::{PATIENCE, ProcessFleet, Replica, spec};
use super::samples::rollout;

impl ProcessFleet {
    /// Writes a key of these bytes, and returns the option that names it.
    fn record_key(&self, byte: u8) -> String {
        let path = self.path(&format!("{byte}.key"));
        std::fs::write(&path, [byte; 32]).expect("written");
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&path, mode).expect("its own");
        format!("--record-key={}", path.display())
    }

    async fn records(&self) -> Vec<Entry> {
        let snapshot = self.etcd.store().range("rollouts/").await;
        snapshot.expect("listed").entries
    }
}

/// Returns the rollouts that are out of service, once the replica leads.
async fn out_of_service(replica: &Replica) -> Vec<(String, String)> {
    let listed = async {
        loop {
            if let Ok(answer) = replica.rollouts().list(v1::ListRequest {}).await {
                let unreadable = answer.into_inner().unreadable.into_iter();
                return unreadable.map(|one| (one.name, one.reason)).collect();
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, listed)
        .await
        .expect("it leads")
}

/// Returns a running rollout that changes "alpha" of the guest web-0 and then runs a command that
/// writes this file.
fn forged(name: &str, file: &str) -> Rollout {
    let sample = rollout(name, 1, 1, 1);
    let claims = sample.members()[0].plan.set.claims().to_vec();
    let claims = claims.into_iter().map(|mut claim| {
        claim.key = "alpha".to_owned();
        claim
    });
    let set = patchbay_fleet::rollout::KeySet::new(claims.collect(), vec![]);
    let mut member = Member::new("host-0", "web-0");
    member.plan.set = set.into();
    let mut header = Header {
        phase: Phase::Running(Stage::Changing),
        run: "0123456789abcdef".to_owned(),
        ..sample.header().clone()
    };
    header.policy.gates = vec![WaveGate {
        kind: WaveGateKind::Command {
            argv: vec!["/usr/bin/touch".to_owned(), file.to_owned()],
            timeout_ms: 60_000,
        },
        on_failure: OnFailure::Pause,
        interval_ms: 1000,
        patience_ms: 1,
    }];
    Rollout::new(header, vec![member])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_rollout_changes_no_guest_and_runs_no_command() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let text = spec("waves: [{size: rest}]");
    let key = fleet.record_key(1);
    let replica = fleet.replica("replica-0", &[&key]);
    replica.start("net", &text, 2).await;
    replica.wait("net", v1::Phase::Completed).await;
    drop(replica);
    let marker = fleet.path("marker");
    let mut forged = forged("forged", &marker.display().to_string());
    let writes = storage::planned(&mut forged, &text).expect("fits");
    let all = writes
        .into_iter()
        .fold(Transaction::new(), Transaction::write);
    fleet.etcd.store().commit(all).await.expect("written");
    let replica = fleet.replica("replica-1", &[&key]);
    let out = out_of_service(&replica).await;
    let [(name, why)] = &out[..] else {
        panic!("{out:?}");
    };
    assert!(
        name == "forged" && why.contains("is not authenticated"),
        "{out:?}"
    );
    // The other rollout continues.
    replica.undo("net").await;
    for guest in 0..2 {
        assert_eq!(fleet.changes(guest), [(0, 1), (1, 0)], "guest {guest}");
    }
    drop(replica);
    // Without a key the controller runs the forged rollout, but not its command line.
    for record in fleet.records().await {
        if record.key.starts_with("rollouts/net/") {
            let delete = Transaction::new().delete(record.key);
            fleet.etcd.store().commit(delete).await.expect("deleted");
        }
    }
    let replica = fleet.replica("replica-2", &[]);
    let paused = replica.wait("forged", v1::Phase::Paused).await;
    assert!(paused.message.contains("touch is not run"), "{paused:?}");
    assert_eq!(fleet.changes(0).last(), Some(&(0, 1)));
    assert!(!marker.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_with_another_key_leaves_the_records_as_they_are() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let text = spec("waves: [{size: rest}]");
    let [first, second] = [1, 2].map(|byte| fleet.record_key(byte));
    let replica = fleet.replica("replica-0", &[&first]);
    replica.start("net", &text, 1).await;
    replica.wait("net", v1::Phase::Completed).await;
    drop(replica);
    // Records without a header are not deleted either.
    let half = {
        let keys = storage::RecordKeys::read(&[fleet.path("1.key")]).expect("a key");
        let writes = storage::planned(&mut rollout("half", 1, 1, 1), &text).expect("fits");
        let mut writes = keys.signed("", writes);
        writes.pop();
        writes
            .into_iter()
            .fold(Transaction::new(), Transaction::write)
    };
    fleet.etcd.store().commit(half).await.expect("written");
    let before = fleet.records().await;
    for (round, options) in [vec![second.as_str()], vec![]].into_iter().enumerate() {
        let other = fleet.replica(&format!("other-{round}"), &options);
        let out = out_of_service(&other).await;
        let names: Vec<&str> = out.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["half", "net"]);
        assert!(
            out.iter().all(|(_, why)| why.contains("--record-key")),
            "{out:?}"
        );
        let request = v1::PlanRequest {
            rollout: "net".to_owned(),
            spec: text.clone(),
        };
        let refused = other.rollouts().plan(request).await.expect_err("refused");
        assert!(refused.message().contains("cannot be read"), "{refused}");
        drop(other);
        assert_eq!(fleet.records().await, before);
    }
    let replica = fleet.replica("replica-1", &[&second, &first]);
    replica.wait("net", v1::Phase::Completed).await;
    drop(replica);
    // The leader has signed the rollout by the new first key.
    let replica = fleet.replica("replica-2", &[&second]);
    replica.wait("net", v1::Phase::Completed).await;
    replica.undo("net").await;
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_the_time_before_the_key_are_adopted() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let key = fleet.record_key(1);
    let replica = fleet.replica("replica-0", &[]);
    replica
        .start("net", &spec("waves: [{size: rest}]"), 1)
        .await;
    replica.wait("net", v1::Phase::Completed).await;
    drop(replica);
    let replica = fleet.replica("replica-1", &[&key]);
    let out = out_of_service(&replica).await;
    assert!(out[0].1.contains("--adopt-unsigned-records"), "{out:?}");
    drop(replica);
    let mut adopt = fleet.replica_command("adopt", "fleet");
    adopt.args([&key, "--adopt-unsigned-records"]);
    let adopted = tokio::task::spawn_blocking(move || adopt.output()).await;
    let adopted = adopted.expect("no panic").expect("starts");
    let said = String::from_utf8_lossy(&adopted.stdout);
    assert!(adopted.status.success(), "{adopted:?}");
    assert!(said.contains("4 records were authenticated"), "{said}");
    let replica = fleet.replica("replica-2", &[&key]);
    replica.wait("net", v1::Phase::Completed).await;
    replica.undo("net").await;
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0)]);
}
