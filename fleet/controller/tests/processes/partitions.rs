// SPDX-License-Identifier: Apache-2.0
//! Tests networks between etcd and the controllers that are cut.

use std::time::Duration;

use patchbay_fleet::store::Store;
use patchbay_proto::fleet::v1;
use rustix::process::Signal;

use super::etcd::{Etcd, PORT};
use super::fleet::{PATIENCE, ProcessFleet, Replica, eventually, spec};
use super::network::{Network, Side};

/// The links that are cut. In the first two cases a majority of the members stays connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Nobody reaches the leader of etcd.
    Leader,
    /// The other members do not reach the leader of etcd, and its clients do.
    LeaderFromPeers,
    /// No member reaches another one.
    AllFromPeers,
}

/// A fleet of one host, and controllers with namespaces of their own.
struct Partitioned {
    network: Network,
    fleet: ProcessFleet,
    /// The guests whose answers are held back after each change.
    held: Vec<usize>,
}

impl Partitioned {
    /// Starts the fleet; `None` if the test is skipped, or runs in another process.
    async fn start(test: &str, guests: usize, held: &[usize]) -> Option<Self> {
        let network = Network::inside(&format!("processes::partitions::{test}"))?;
        let etcd = Etcd::start_in(network, 3).await?;
        Some(Self {
            network,
            fleet: ProcessFleet::on(etcd, &[], 1, guests, held).await,
            held: held.to_vec(),
        })
    }

    /// Starts a replica that has this number in addresses.
    fn replica(&self, number: u8, seconds: &str) -> Replica {
        let name = format!("replica-{number}");
        let mut command = self.fleet.command(&name, "fleet");
        command.args(["--lease-seconds", seconds]);
        let command = self.network.enter(number, &[Side::Clients], &command);
        Replica::spawn(command, self.fleet.path(&format!("{name}.sock")))
    }

    /// Waits until the guest is changed, and its answer is held back.
    async fn paused(&mut self, guest: usize) {
        let monitor = self.fleet.monitors[guest].as_mut();
        monitor.expect("started").paused().await;
    }

    fn go_on(&mut self, guest: usize) {
        let monitor = self.fleet.monitors[guest].as_mut();
        monitor.expect("started").go_on();
    }

    /// Lets the answers of all guests through until the future is ready.
    async fn answering<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        for guest in self.held.clone() {
            tokio::select! {
                done = &mut future => return done,
                () = self.paused(guest) => self.go_on(guest),
            }
        }
        future.await
    }

    fn cut(&self, cut: Cut, leader: usize) {
        self.each(cut, leader, Etcd::cut);
    }

    fn heal(&self, cut: Cut, leader: usize) {
        self.each(cut, leader, Etcd::heal);
    }

    fn each(&self, cut: Cut, leader: usize, change: fn(&Etcd, usize, Side)) {
        let etcd = &self.fleet.etcd;
        match cut {
            Cut::Leader => {
                change(etcd, leader, Side::Clients);
                change(etcd, leader, Side::Peers);
            }
            Cut::LeaderFromPeers => change(etcd, leader, Side::Peers),
            Cut::AllFromPeers => (0..3).for_each(|member| change(etcd, member, Side::Peers)),
        }
    }

    /// Returns the revisions of all records of rollouts.
    async fn records(&self) -> Vec<(String, u64)> {
        let records = self.fleet.etcd.store().range("rollouts/").await;
        let records = records.expect("etcd answers").entries.into_iter();
        records.map(|entry| (entry.key, entry.modified)).collect()
    }
}

/// Returns the number of bytes that a replica has sent to etcd, and that etcd's machine has not
/// acknowledged.
fn unacknowledged(replica: &Replica) -> u64 {
    let sockets = std::fs::read_to_string(format!("/proc/{}/net/tcp", replica.id()));
    let sockets = sockets.expect("it runs");
    let port = format!(":{PORT:04X}");
    let bytes = sockets.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (queue, _) = fields.get(4)?.split_once(':')?;
        let is_to_etcd = fields[2].ends_with(&port);
        is_to_etcd.then(|| u64::from_str_radix(queue, 16).expect("a number"))
    });
    bytes.sum()
}

/// Waits until one of the replicas, which then leads, shows the rollout "net" in this phase.
async fn reached(replicas: &[Replica; 2], phase: v1::Phase) -> v1::Rollout {
    tokio::select! {
        rollout = replicas[0].wait("net", phase) => rollout,
        rollout = replicas[1].wait("net", phase) => rollout,
    }
}

/// Waits until the replica that leads has begun to undo the rollout "net".
async fn undo(replicas: &[Replica; 2]) {
    let begun = async {
        for replica in replicas.iter().cycle() {
            let rollout = "net".to_owned();
            let undo = replica.rollouts().undo(v1::UndoRequest { rollout }).await;
            match undo {
                Ok(_) => return,
                // The rollout may be undone already, because the answer of a call was lost.
                Err(status) if status.code() != tonic::Code::Unavailable => return,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let begun = tokio::time::timeout(PATIENCE, begun).await;
    begun.expect("a replica leads");
}

/// Cuts links of etcd while guests are changed. While most members reach each other, the rollout
/// continues; otherwise, it stops, and continues after the links are healed.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_while_etcd_is_partitioned() {
    const TEST: &str = "a_rollout_while_etcd_is_partitioned";
    const GUESTS: usize = 8;
    let Some(mut test) = Partitioned::start(TEST, GUESTS, &[1, 3, 5]).await else {
        return;
    };
    let first = test.replica(11, "2");
    let text = spec("waves: [{size: rest}]\nmax_concurrent: {count: 1}");
    first.start("net", &text, 8).await;
    let replicas = [first, test.replica(12, "2")];
    test.paused(1).await;

    for (cut, guest) in [(Cut::Leader, 1), (Cut::LeaderFromPeers, 3)] {
        let leader = test.fleet.etcd.leader().await;
        test.cut(cut, leader);
        test.go_on(guest);
        // The guest after the next one is changed although the links are cut.
        test.paused(guest + 2).await;
        test.heal(cut, leader);
        println!("{cut:?}: guest {} is changed during the cut", guest + 2);
    }
    let leader = test.fleet.etcd.leader().await;
    for replica in &replicas {
        replica.skip_log().await;
    }
    test.cut(Cut::AllFromPeers, leader);
    test.go_on(5);
    for replica in &replicas {
        replica.logged("this replica does not lead").await;
    }
    test.fleet
        .flip_beta(0)
        .await
        .expect("the host needs no etcd");
    let after = test.fleet.changes(6);
    assert_eq!(after, [], "nothing is begun that is not stored");
    test.heal(Cut::AllFromPeers, leader);
    let rollout = reached(&replicas, v1::Phase::Completed).await;
    assert_eq!(rollout.waves[0].as_wanted, 8, "{rollout:?}");
    let undone = async {
        undo(&replicas).await;
        reached(&replicas, v1::Phase::Undone).await
    };
    test.answering(undone).await;
    for guest in 1..GUESTS {
        assert_eq!(test.fleet.changes(guest), [(0, 1), (1, 0)], "guest {guest}");
    }
}

/// Cuts a leading controller off from etcd and stops it when it has sent a change into the cut
/// link. Another replica finishes and undoes the rollout. Then the link is healed, and the change
/// arrives at etcd.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_an_earlier_leader_that_arrives_late_is_refused() {
    const TEST: &str = "a_change_of_an_earlier_leader_that_arrives_late_is_refused";
    /// The renewal of a lease has less than this number of bytes, and a record has more.
    const RECORD: u64 = 600;
    let Some(mut test) = Partitioned::start(TEST, 4, &[1]).await else {
        return;
    };
    // The term and its lease are far from their ends, so the link gets few renewals.
    let first = test.replica(11, "60");
    let text = spec("waves: [{size: rest}]\nmax_concurrent: {count: 1}");
    first.start("net", &text, 4).await;
    test.paused(1).await;
    let term = test.fleet.etcd.term().await;
    test.network.cut(11, Side::Clients);
    test.go_on(1);
    let unsent = async |what: &str, is_reached: fn(u64) -> bool| {
        let look = async || is_reached(unacknowledged(&first)).then_some(());
        eventually(what, look).await;
    };
    unsent("it saves", |bytes| bytes > RECORD).await;
    first.signal(Signal::STOP);
    test.fleet.etcd.end_term(term).await;
    let next = test.replica(12, "1");
    next.wait("net", v1::Phase::Completed).await;
    test.answering(next.undo("net")).await;
    // The end is shown before it is saved. The next command is answered after that.
    let rollout = "net".to_owned();
    let again = next.rollouts().undo(v1::UndoRequest { rollout }).await;
    again.expect("answered");
    let before = test.records().await;
    test.network.heal(11, Side::Clients);
    // The kernel repeats what the stopped process has sent.
    unsent("the change arrives", |bytes| bytes == 0).await;
    first.signal(Signal::CONT);
    first.logged("this replica does not lead").await;
    drop(next);
    first.logged(" leads").await;
    first.wait("net", v1::Phase::Undone).await;
    assert_eq!(test.records().await, before);
    for guest in 0..4 {
        assert_eq!(test.fleet.changes(guest), [(0, 1), (1, 0)], "guest {guest}");
    }
}

/// Cuts the member of etcd off that tells a replica of the leader's end. The replica must notice
/// that the member has no leader, and ask another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_whose_member_of_etcd_is_cut_off_takes_over() {
    const TEST: &str = "a_replica_whose_member_of_etcd_is_cut_off_takes_over";
    let Some(test) = Partitioned::start(TEST, 1, &[]).await else {
        return;
    };
    let first = test.replica(11, "1");
    first.logged(" leads").await;
    // The leader watches the registry, and the other replica watches the leader's key.
    let before = test.fleet.etcd.has_watchers(1).await;
    let next = test.replica(12, "1");
    let after = test.fleet.etcd.has_watchers(2).await;
    let members: Vec<usize> = (0..3).filter(|of| before[*of] != after[*of]).collect();
    let [member] = members[..] else {
        panic!("the other replica watches one member: {before:?}, {after:?}");
    };
    test.fleet.etcd.cut(member, Side::Peers);
    drop(first);
    next.logged(" leads").await;
}
