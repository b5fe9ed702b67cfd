// SPDX-License-Identifier: Apache-2.0
//! A fleet whose processes are killed at named places. After each kill, every guest must be as
//! wanted exactly once, and in the end as before.

use std::collections::BTreeMap;
use std::time::Duration;

use patchbay_fleet::store::{Change, Revision, Store};
use patchbay_proto::fleet::v1;
use patchbay_proto::v1::KeyOp;
use tonic::Code;

use super::fleet::{Monitor, PATIENCE, ProcessFleet, Replica, eventually, spec};
use super::proxy::Proxy;
use super::setup::abort;

pub const GUESTS: u32 = 4;
/// The number of guests in the first wave of a rollout that is aborted.
const FIRST: u32 = 2;

/// The intended end of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// All guests are changed, and then the rollout is undone.
    Undone,
    /// The rollout is aborted after its first wave, which bakes for a long time.
    Aborted,
    /// The rollout is aborted as soon as a replica leads.
    AbortedAtOnce,
}

impl Goal {
    /// Returns the spec of a rollout that changes one guest at a time.
    pub fn spec(self) -> String {
        let waves = match self {
            Self::Undone | Self::AbortedAtOnce => "waves: [{size: rest}]",
            Self::Aborted => "waves: [{size: 2, bake: 1h}, {size: rest}]",
        };
        spec(&format!("{waves}\nmax_concurrent: {{count: 1}}")).replace("[alpha]", "[alpha, beta]")
    }
}

/// Returns the text in the records of guests in this state.
pub fn state(name: &str) -> String {
    format!(r#""state":{{"{name}""#)
}

/// A replica with its proxy. When it is dropped, the replica is killed, and then the requests that
/// the proxy holds are lost.
pub struct ProxiedReplica {
    pub replica: Replica,
    pub proxy: Proxy,
}

/// The kills at a place.
#[derive(Default)]
struct Row {
    kills: u32,
    lost: u32,
}

/// The fleet. Each guest's "alpha" has two references of other owners: one that was taken by hand,
/// and one of the rollout "base". Its "beta" has none, so the guest is stopped for each change.
pub struct Killing {
    pub fleet: ProcessFleet,
    replicas: u32,
    rollouts: u32,
    rows: BTreeMap<String, Row>,
    faults: Vec<String>,
    /// The number of changes of each guest's "alpha" and "beta" before the rollout.
    seen: Vec<[usize; 2]>,
}

/// Lets the answers of a guest through until the future is ready.
pub async fn answering<T>(monitor: &mut Option<Monitor>, future: impl Future<Output = T>) -> T {
    let Some(monitor) = monitor else {
        return future.await;
    };
    let mut future = std::pin::pin!(future);
    loop {
        tokio::select! {
            done = &mut future => return done,
            () = monitor.paused() => monitor.go_on(),
        }
    }
}

impl Killing {
    /// Starts the fleet and its first leader; `None` if etcd is not installed. The answers of the
    /// guest `held` are held back, and its monitor is returned.
    pub async fn start(held: Option<usize>) -> Option<(Self, ProxiedReplica, Option<Monitor>)> {
        let guests = GUESTS as usize;
        let fleet = ProcessFleet::start(1, 1, guests, held.as_slice()).await?;
        let mut killing = Self {
            fleet,
            replicas: 0,
            rollouts: 0,
            rows: BTreeMap::new(),
            faults: Vec::new(),
            seen: Vec::new(),
        };
        let mut monitor = held.and_then(|guest| killing.fleet.monitors[guest].take());
        for guest in 0..guests {
            let taken = killing.fleet.update(guest, "alpha", KeyOp::Inc);
            answering(&mut monitor, taken).await.expect("taken by hand");
        }
        let leader = killing.start_replica().await;
        let text = spec("waves: [{size: rest}]");
        leader.replica.start("base", &text, GUESTS).await;
        leader.replica.wait("base", v1::Phase::Completed).await;
        Some((killing, leader, monitor))
    }

    /// Starts a replica, which leads as soon as no other does.
    pub async fn start_replica(&mut self) -> ProxiedReplica {
        self.replicas += 1;
        let name = format!("replica-{}", self.replicas);
        let etcd = self.fleet.etcd.addresses();
        let proxy = Proxy::start(etcd.replace("http://", "")).await;
        let mut command = self.fleet.bare_command(&name);
        // A held replica must not notice that its lease has ended.
        command.args(["--lease-seconds", "60", "--etcd", &proxy.url]);
        let replica = Replica::spawn(command, self.fleet.path(&format!("{name}.sock")));
        ProxiedReplica { replica, proxy }
    }

    /// Starts the killed daemon again, and waits until it has registered the host.
    pub async fn restart_host(&mut self) {
        let store = self.fleet.etcd.store();
        let key = "registry/host-0/host";
        let created = async || {
            let record = store.get(key).await.expect("etcd runs");
            record.map(|record| record.created)
        };
        let before = created().await;
        self.fleet.start_host(0);
        let registered = async || created().await.filter(|now| Some(*now) != before);
        eventually("the host registers", registered).await;
    }

    /// Returns the name of the next rollout, which begins.
    pub fn next_name(&mut self) -> String {
        self.seen = vec![[0; 2]; GUESTS as usize];
        let seen = (0..GUESTS as usize).map(|guest| self.changes(guest).map(|of| of.len()));
        self.seen = seen.collect();
        self.rollouts += 1;
        format!("net-{}", self.rollouts)
    }

    /// Waits until etcd has stored this number of values of the rollout that contain the text.
    pub async fn stored(&self, name: &str, text: &str, count: usize) {
        let store = self.fleet.etcd.store();
        let stored = async {
            let prefix = format!("rollouts/{name}/");
            let mut changes = store.watch(&prefix, 1).await.expect("watched");
            let mut found = 0;
            while found < count {
                let changes = changes.next().await.expect("watched");
                let contains = |change: &&Change| match change {
                    Change::Put(entry) => String::from_utf8_lossy(&entry.value).contains(text),
                    Change::Deleted { .. } => false,
                };
                found += changes.iter().filter(contains).count();
            }
        };
        let stored = tokio::time::timeout(PATIENCE, stored).await;
        stored.unwrap_or_else(|_| panic!("{name} never stores {text}"));
    }

    /// Kills the leader with this term, and waits until the next replica leads.
    pub async fn take_over(&self, leader: ProxiedReplica, term: Revision, next: &ProxiedReplica) {
        drop(leader);
        self.fleet.etcd.end_term(term).await;
        next.replica.logged(" leads").await;
    }

    /// Gives the commands that a person would give until the rollout ends, and checks the guests.
    pub async fn finish(&mut self, leader: &ProxiedReplica, name: &str, goal: Goal, place: &str) {
        let row = self.rows.entry(place.to_owned()).or_default();
        row.kills += 1;
        let ended = tokio::time::timeout(PATIENCE, self.drive(leader, name, goal, place)).await;
        ended.unwrap_or_else(|_| panic!("{place}: {name} never ends"));
        self.fleet.registered(1, GUESTS as usize).await;
        knows_all_guests(&leader.replica).await;
        let once = |alpha: &[_], beta: &[_]| alpha == [(2, 3), (3, 2)] && beta == [(0, 1), (1, 0)];
        let (mut changed, mut found) = (0, Vec::new());
        for guest in 0..GUESTS as usize {
            let [alpha, beta] = self.changes(guest);
            changed += u32::from(once(&alpha, &beta));
            found.push((alpha, beta));
        }
        let touched = found
            .iter()
            .filter(|(alpha, beta)| !(alpha.is_empty() && beta.is_empty()));
        let expected = match goal {
            Goal::Undone => GUESTS..=GUESTS,
            // The abort may come before a guest is changed.
            Goal::Aborted => 0..=FIRST,
            Goal::AbortedAtOnce => 0..=GUESTS,
        };
        if touched.count() != changed as usize || !expected.contains(&changed) {
            self.lose(place, format!("{name} has made the changes {found:?}"));
        }
    }

    async fn drive(&mut self, leader: &ProxiedReplica, name: &str, goal: Goal, place: &str) {
        let replica = &leader.replica;
        let rollout = || name.to_owned();
        let mut client = replica.rollouts();
        loop {
            let found = client.get(v1::GetRequest { rollout: rollout() }).await;
            let found = match found {
                Ok(found) => found.into_inner().rollout.expect("a rollout"),
                Err(status) if status.code() == Code::NotFound => {
                    replica.plan(name, &goal.spec(), GUESTS).await;
                    continue;
                }
                Err(status) => panic!("{place}: {status:?}"),
            };
            let as_wanted: u32 = found.waves.iter().map(|wave| wave.as_wanted).sum();
            let aborts = match goal {
                Goal::Undone => false,
                Goal::Aborted => as_wanted == FIRST,
                Goal::AbortedAtOnce => true,
            };
            let made = match found.phase() {
                v1::Phase::Planned => replica.start_planned(name, found.digest).await,
                v1::Phase::Running if aborts => abort(&mut client, name).await,
                v1::Phase::Completed if as_wanted == GUESTS => {
                    for guest in 0..GUESTS as usize {
                        let changes = self.changes(guest);
                        if changes != [vec![(2, 3)], vec![(0, 1)]] {
                            let what = format!("guest {guest} of {name} has {changes:?}");
                            self.lose(place, what);
                        }
                    }
                    let rollout = rollout();
                    client.undo(v1::UndoRequest { rollout }).await.map(drop)
                }
                v1::Phase::Aborted | v1::Phase::Undone => return,
                _ => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    Ok(())
                }
            };
            // The phase may have changed meanwhile.
            if let Err(status) = made
                && status.code() != Code::FailedPrecondition
            {
                panic!("{place}: {status:?}");
            }
        }
    }

    /// Returns the changes of "alpha" and of "beta" since the rollout before.
    fn changes(&self, guest: usize) -> [Vec<(i64, i64)>; 2] {
        ["alpha", "beta"].map(|key| {
            let all = self.fleet.changes_of(guest, &[key]);
            let before = self.seen[guest][usize::from(key == "beta")];
            all[before..].to_vec()
        })
    }

    fn lose(&mut self, place: &str, what: String) {
        self.rows.entry(place.to_owned()).or_default().lost += 1;
        self.faults.push(format!("{place}: {what}"));
    }

    /// Prints the kills, ends the claims and holds of the other owners, and checks that there were
    /// no further ones.
    pub async fn end(self, leader: ProxiedReplica, monitor: &mut Option<Monitor>) {
        println!("{:<44}{:>6}{:>6}", "killed", "times", "lost");
        for (place, row) in &self.rows {
            println!("{place:<44}{:>6}{:>6}", row.kills, row.lost);
        }
        let kills: u32 = self.rows.values().map(|row| row.kills).sum();
        println!("kills by place: {kills}, lost {}", self.faults.len());
        assert_eq!(self.faults, Vec::<String>::new());
        leader.replica.undo("base").await;
        for guest in 0..GUESTS as usize {
            let dropped = self.fleet.update(guest, "alpha", KeyOp::Dec);
            answering(monitor, dropped)
                .await
                .expect("the hold by hand is left");
            let changes = self.fleet.changes_of(guest, &["alpha"]);
            assert_eq!(
                changes[changes.len() - 2..],
                [(2, 1), (1, 0)],
                "guest {guest}"
            );
        }
    }
}

/// Waits until the replica knows all guests. A host that was killed has registered them again.
async fn knows_all_guests(replica: &Replica) {
    let knows = async || {
        let hosts = replica.hosts().await.expect("it leads");
        let guests: u32 = hosts.iter().map(|host| host.guests).sum();
        (guests == GUESTS).then_some(())
    };
    eventually("the replica knows all guests", knows).await;
}
