// SPDX-License-Identifier: Apache-2.0
//! Runs hosts with guests in memory, and controllers for them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller, Leadership};
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::hosts::{HostConfig, HostEndpoint};
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{EmbeddedStore, Store, Transaction};
use patchbay_fleet::webhooks::Webhook;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::testing::GuestLog;
use patchbay_service::trace::{AgentSocket, Tracing, socket_path};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

#[path = "../processes/gate_file.rs"]
mod gate_file;

/// Timeout of the tests' waits, which no correct run reaches.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The shortest lease. The tests wait for its end when a leader ends.
pub const LEASE_TTL: Duration = Duration::from_secs(1);

pub struct Fleet {
    folder: tempfile::TempDir,
    pub hosts: Vec<HostConfig>,
    pub guests: Vec<Arc<InMemoryGuest>>,
    registries: Vec<Arc<Registry>>,
    served: Vec<Guests>,
    pub store: Arc<dyn Store>,
    _ends: Vec<oneshot::Sender<()>>,
    names: Names,
}

/// The names in a fleet.
#[derive(Clone, Copy)]
pub struct Names {
    /// The start of the guests' names.
    pub guest: &'static str,
    /// Further keys of each guest.
    pub keys: &'static [&'static str],
}

impl Fleet {
    /// Starts `hosts` hosts with `guests` guests each, named "web-0", "web-1" and so on. Even hosts
    /// are in the rack "a", odd ones in "b".
    pub async fn start(hosts: usize, guests: usize) -> Self {
        Self::start_permitting(hosts, guests, false).await
    }

    /// Starts the hosts. Their monitors permit changes of guarded keys if `allow_guarded` is set.
    pub async fn start_permitting(hosts: usize, guests: usize, allow_guarded: bool) -> Self {
        let names = Names {
            guest: "web",
            keys: &[],
        };
        Self::start_named(hosts, guests, allow_guarded, names)
    }

    /// Starts the hosts, with other names.
    pub fn start_named(hosts: usize, guests: usize, allow_guarded: bool, names: Names) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = EmbeddedStore::open(&folder.path().join("fleet.redb")).expect("opens");
        let mut fleet = Self {
            folder,
            hosts: vec![],
            guests: vec![],
            registries: vec![],
            served: vec![],
            store: Arc::new(store),
            _ends: vec![],
            names,
        };
        for host in 0..hosts {
            fleet.add_host(host, guests, allow_guarded);
        }
        fleet
    }

    /// Puts a log and the state of a kernel into the memory of each guest.
    pub fn logs(&self) -> Vec<GuestLog> {
        let guests = self.guests.iter().zip(&self.registries);
        let log = |(guest, registry): (_, &Arc<Registry>)| {
            let log = GuestLog::new(guest);
            log.found_by(registry);
            log
        };
        guests.map(log).collect()
    }

    fn add_host(&mut self, index: usize, guests: usize, allow_guarded: bool) {
        let socket = self.folder.path().join(format!("{index}.sock"));
        let served = Guests::default();
        for guest in 0..guests {
            let name = self.name(index * guests + guest);
            let registry = Arc::new(Registry::default());
            let guest = InMemoryGuest::named(Arc::clone(&registry), &name);
            let mut keys = vec![
                TestKey::new("alpha", 1),
                TestKey::new("beta", 2),
                TestKey::guarded("guarded"),
                TestKey::tracepoint("sched_switch", true),
                TestKey::tracepoint("sched_waking", true),
                TestKey::tracepoint("sched_wakeup", false),
                TestKey::tracepoint("kmem_alloc", true),
            ];
            keys.extend(self.names.keys.iter().map(|name| TestKey::new(name, 1)));
            guest.run(&keys);
            self.registries.push(Arc::clone(&registry));
            let config = KeysConfig {
                allow_guarded,
                ..KeysConfig::default()
            };
            let keys = Keys::start(Arc::clone(&guest), registry, config);
            let (keys, _owner) = keys.expect("a thread");
            let tracing = Tracing {
                agent: Some(AgentSocket::bind(&self.vsock(&name)).expect("free")),
                ..Tracing::default()
            };
            let one = ServedGuest::start(keys, tracing).expect("a socket");
            served.add(one).expect("its own name");
            self.guests.push(guest);
        }
        let listening = ApiSocket::bind(&socket).expect("free");
        let endpoint = Endpoint::new(listening, served.clone());
        let (end, ended) = oneshot::channel::<()>();
        tokio::spawn(endpoint.serve(async {
            let _ = ended.await;
        }));
        self.served.push(served);
        self._ends.push(end);
        self.hosts.push(HostConfig {
            name: format!("host-{index}"),
            endpoint: HostEndpoint::Socket(socket),
            labels: [("rack".to_owned(), ["a", "b"][index % 2].to_owned())].into(),
        });
    }

    fn name(&self, guest: usize) -> String {
        format!("{}-{guest}", self.names.guest)
    }

    fn vsock(&self, guest: &str) -> PathBuf {
        self.folder.path().join(format!("{guest}.vsock"))
    }

    /// Returns the socket to which the guest's agent connects.
    pub fn agent_socket(&self, guest: &str) -> PathBuf {
        socket_path(&self.vsock(guest))
    }

    /// Makes the guest's host stop serving the guest.
    pub fn take_away(&self, guest: usize) {
        let per_host = self.guests.len() / self.hosts.len();
        assert!(self.served[guest / per_host].remove(&self.name(guest)));
    }

    pub fn replica(&self, name: &str) -> Replica {
        self.replica_with(name, LEASE_TTL)
    }

    /// Starts a replica that leads for this long after its last renewal.
    pub fn replica_with(&self, name: &str, lease_ttl: Duration) -> Replica {
        self.start_replica(Config {
            lease_ttl,
            ..self.config(name)
        })
    }

    pub fn config(&self, name: &str) -> Config {
        Config {
            replica: Leader {
                name: name.to_owned(),
                address: None,
            },
            authority: self.authority(),
            hosts: self.hosts.clone(),
            reach: Reach::default(),
            lease_ttl: LEASE_TTL,
            archive: Archive {
                folder: self.folder.path().join("archive"),
                keep: Duration::from_secs(24 * 3600),
            },
            commands: Commands::new(self.folder.path().join("gates.d")),
            keys: RecordKeys::default(),
        }
    }

    /// Writes the file of a gate's command.
    pub fn gate(&self, name: &str, text: &str) {
        gate_file::write(&self.folder.path().join("gates.d"), name, text);
    }

    /// Returns an authority that allows everything to everybody.
    fn authority(&self) -> Authority {
        let file = self.folder.path().join("policy.yaml");
        let rules = "rules: [{name: all, principals: ['*'], role: admin}]";
        std::fs::write(&file, rules).expect("written");
        Authority::new(LivePolicy::read(file).expect("good"), None)
    }

    pub fn start_replica(&self, config: Config) -> Replica {
        self.start_delivering(config, vec![])
    }

    /// Starts a replica that delivers events to webhooks.
    pub fn start_delivering(&self, config: Config, webhooks: Vec<Webhook>) -> Replica {
        let controller = Controller::new(config, Arc::clone(&self.store)).expect("own names");
        let controller = Arc::new(controller.delivering_to(webhooks));
        let runs = Arc::clone(&controller);
        let task = tokio::spawn(async move { runs.run().await });
        Replica { controller, task }
    }

    /// Stores a record.
    pub async fn put(&self, key: &str, value: &str) {
        let put = Transaction::new().put(key, value);
        self.store.commit(put).await.expect("written");
    }

    pub fn counts(&self, key: &str) -> Vec<i32> {
        self.guests.iter().map(|guest| guest.count(key)).collect()
    }
}

/// A replica of the controller, which ends on drop.
pub struct Replica {
    pub controller: Arc<Controller>,
    task: JoinHandle<()>,
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Replica {
    pub async fn lead(&self) -> Arc<Leadership> {
        let leads = tokio::time::timeout(PATIENCE, self.controller.lead());
        leads.await.expect("elected in time")
    }

    /// Plans the rollout and starts it as "alice".
    pub async fn start(&self, name: &str, spec: &str) -> Arc<Running> {
        let leads = self.lead().await;
        let running = leads.plan(name, spec, "alice").await.expect("planned");
        let digest = running.rollout().header().digest.clone();
        tell(&running, Command::Start { digest }).await;
        running
    }
}

pub async fn tell(running: &Running, command: Command) {
    let answer = running.command(command, "alice").await;
    answer.expect("it runs").expect("legal");
}

/// Waits until the rollout is in a phase that `wanted` accepts.
pub async fn wait_for(running: &Running, wanted: impl Fn(Phase) -> bool) -> Phase {
    let mut version = running.version();
    let reached = async {
        loop {
            version.mark_unchanged();
            let phase = running.rollout().header().phase;
            if wanted(phase) {
                return phase;
            }
            version.changed().await.expect("it runs");
        }
    };
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    reached.unwrap_or_else(|_| panic!("{:?}", running.rollout().header()))
}

pub fn is_over(phase: Phase) -> bool {
    matches!(phase, Phase::Completed | Phase::Ended(_))
}

/// Returns a spec that wants "alpha" held on every guest. If a guest made the change twice, the
/// count would show it.
pub fn spec(more: &str) -> String {
    format!("selector: {{guests: [\"web-*\"]}}\nclaims: [{{want: held, keys: [alpha]}}]\n{more}\n")
}
