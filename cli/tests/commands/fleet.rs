// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay rollout` over TCP: certificates, and the search for the leader.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use patchbay_access::certs::{self, Request};
use patchbay_access::listen::client_cas::ClientCas;
use patchbay_access::listen::tls::{Tls, TlsFiles};
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::api;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::hosts::{HostConfig, HostEndpoint};
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{EmbeddedStore, Store, Transaction};
use patchbay_proto::socket::ListeningSocket;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::lab::{Commands, Lab, runtime};

const DOMAIN: &str = "example.org";
const SPEC: &str =
    "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";

/// Replicas on the loopback interface, and the certificates of people.
struct Replicas {
    lab: Lab,
    runtime: Runtime,
}

impl Commands for Replicas {
    fn folder(&self) -> &Path {
        self.lab.folder()
    }
}

impl Replicas {
    fn new() -> Self {
        let (lab, runtime) = (Lab::new(), runtime());
        let replicas = Self { lab, runtime };
        certs::init(&replicas.file("ca"), DOMAIN).expect("a CA");
        certs::init(&replicas.file("other"), DOMAIN).expect("a CA");
        for (ca, name, host) in [
            ("ca", "fleet", Some("127.0.0.1")),
            ("ca", "alice", None),
            ("ca", "bob", None),
            ("other", "alice", None),
        ] {
            let request = Request {
                name: name.to_owned(),
                hosts: host.into_iter().map(str::to_owned).collect(),
                days: 1,
                ..Request::default()
            };
            certs::issue(&replicas.file(ca), &request).expect("issued");
        }
        let rules = "rules:\n  - {name: a, principals: ['spiffe://example.org/alice'], role: operator}\n  - {name: b, principals: ['spiffe://example.org/bob'], role: viewer}\n  - {name: c, principals: ['uid:*'], role: viewer}\n";
        std::fs::write(replicas.file("policy.yaml"), rules).expect("written");
        replicas
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    fn store(&self, name: &str) -> Arc<dyn Store> {
        let _entered = self.runtime.enter();
        Arc::new(EmbeddedStore::open(&self.file(name)).expect("opens"))
    }

    fn listener(&self) -> (TcpListener, String) {
        let listener = self.runtime.block_on(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("free");
        let address = listener.local_addr().expect("bound").to_string();
        (listener, address)
    }

    /// Starts a replica.
    fn start(&self, name: &str, store: &Arc<dyn Store>, listener: TcpListener) -> Arc<Controller> {
        let entered = self.runtime.enter();
        let config = Config {
            replica: Leader {
                name: name.to_owned(),
                address: Some(listener.local_addr().expect("bound").to_string()),
            },
            authority: Authority::new(
                LivePolicy::read(self.file("policy.yaml")).expect("good"),
                None,
            ),
            hosts: vec![HostConfig {
                name: "here".to_owned(),
                endpoint: HostEndpoint::Socket(self.lab.socket()),
                labels: [].into(),
            }],
            reach: Reach::default(),
            lease_ttl: Duration::from_secs(300),
            archive: Archive {
                folder: self.file("archive"),
                keep: Duration::from_secs(24 * 3600),
            },
            commands: patchbay_fleet::gates::commands::Commands::default(),
            keys: RecordKeys::default(),
        };
        let tls = Tls::read(TlsFiles {
            certificate: self.file("ca/fleet.pem"),
            key: self.file("ca/fleet.key"),
            clients: ClientCas {
                domains: vec![(DOMAIN.to_owned(), self.file("ca/ca.pem"))],
                common_names: None,
            },
        });
        let tcp = Some((listener, tls.expect("good")));
        let controller = Arc::new(Controller::new(config, Arc::clone(store)).expect("own names"));
        let socket = ListeningSocket::bind(&self.file(&format!("{name}.sock"))).expect("free");
        let (runs, serves) = (Arc::clone(&controller), Arc::clone(&controller));
        self.runtime.spawn(async move { runs.run().await });
        self.runtime
            .spawn(async move { api::serve(serves, &socket, tcp, std::future::pending()).await });
        drop(entered);
        controller
    }

    /// Waits until the replica knows that another one leads.
    fn follows(&self, controller: &Controller) {
        while controller.leader_address().is_none() {
            std::thread::yield_now();
        }
    }

    fn variables(&self, ca: &str, name: &str) -> [(&'static str, PathBuf); 3] {
        [
            (
                "PATCHBAY_FLEET_CERT",
                self.file(&format!("{ca}/{name}.pem")),
            ),
            ("PATCHBAY_FLEET_KEY", self.file(&format!("{ca}/{name}.key"))),
            ("PATCHBAY_FLEET_CA", self.file("ca/ca.pem")),
        ]
    }

    /// Runs a command of `patchbay rollout` as this person.
    fn by(&self, name: &str, words: &[&str]) -> (String, String, Option<i32>) {
        let mut command = self.command(words);
        command.envs(self.variables("ca", name));
        let output = command.output().expect("it starts");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        let code = output.status.code();
        (text(output.stdout), text(output.stderr), code)
    }
}

#[test]
fn a_command_finds_the_leader_through_any_replica() {
    let fleet = Replicas::new();
    let store = fleet.store("fleet.redb");
    let (listener, first) = fleet.listener();
    let leads = fleet.start("first", &store, listener);
    fleet.runtime.block_on(leads.lead());
    let (listener, second) = fleet.listener();
    let follows = fleet.start("second", &store, listener);
    fleet.follows(&follows);
    let spec = fleet.file("net.yaml").display().to_string();
    std::fs::write(&spec, SPEC).expect("written");

    let (out, said, code) = fleet.by("alice", &["--fleet", &second, "rollout", "plan", &spec]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        out.contains("patchbay rollout start net --digest "),
        "{out}"
    );
    // The option may follow the subcommand, and the variable replaces it.
    let (out, said, code) = fleet.by("bob", &["rollout", "list", "--fleet", &second]);
    assert_eq!(
        (code, out.contains("net   planned")),
        (Some(0), true),
        "{out}{said}"
    );
    let mut command = fleet.command(&["rollout", "list"]);
    command.envs(fleet.variables("ca", "bob"));
    // The first of these does not answer.
    command.env("PATCHBAY_FLEET", format!("127.0.0.1:1,{second}"));
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{output:?}");

    let (_, said, code) = fleet.by("bob", &["--fleet", &second, "rollout", "abort", "net"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("spiffe://example.org/bob may not do this"),
        "{said}"
    );
    let abort = &["--fleet", &second, "rollout", "abort", "net"];
    let (_, said, code) = fleet.by("alice", abort);
    assert_eq!(code, Some(0), "{said}");

    // A user of the other replica's machine learns the address.
    let socket = fleet.file("second.sock").display().to_string();
    let said = fleet.fails(1, &["rollout", "list", "--fleet-socket", &socket]);
    assert!(said.contains(&format!("give --fleet {first}")), "{said}");
}

#[test]
fn replicas_that_name_each_other_are_not_followed_for_ever() {
    let fleet = Replicas::new();
    let mut listeners: Vec<_> = (0..6).map(|_| fleet.listener()).collect();
    let addresses: Vec<String> = listeners
        .iter()
        .map(|(_, address)| address.clone())
        .collect();
    // The first two name each other, and each of the others names the next one.
    for (index, (listener, _)) in listeners.drain(..).enumerate() {
        let named = match index {
            0 | 1 => 1 - index,
            5 => 0,
            _ => index + 1,
        };
        let store = fleet.store(&format!("{index}.redb"));
        let record = serde_json::json!({ "name": "x", "address": addresses[named] });
        let planted = Transaction::new().put("leader", record.to_string());
        fleet
            .runtime
            .block_on(store.commit(planted))
            .expect("written");
        let replica = fleet.start(&index.to_string(), &store, listener);
        fleet.follows(&replica);
    }
    let (_, said, code) = fleet.by("bob", &["--fleet", &addresses[0], "rollout", "list"]);
    let path = format!("{0} names {1} names {0}", addresses[0], addresses[1]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("do not agree on the leader") && said.contains(&path),
        "{said}"
    );
    let (_, said, code) = fleet.by("bob", &["--fleet", &addresses[2], "rollout", "list"]);
    assert_eq!(code, Some(1), "{said}");
    // The command follows three addresses.
    let path = [2, 3, 4, 5, 0]
        .map(|index| addresses[index].as_str())
        .join(" names ");
    assert!(said.contains(&path), "{said}");
}

#[test]
fn a_leader_that_cannot_be_reached_is_named() {
    let fleet = Replicas::new();
    for (index, (named, why)) in [
        ("127.0.0.1:1", "no controller answers at 127.0.0.1:1"),
        // The command makes no connection and sends no control characters to the terminal.
        ("\u{1b}[2J:1", "this replica does not lead"),
    ]
    .into_iter()
    .enumerate()
    {
        let store = fleet.store(&format!("{index}.redb"));
        let record = serde_json::json!({ "name": "x", "address": named });
        let planted = Transaction::new().put("leader", record.to_string());
        fleet
            .runtime
            .block_on(store.commit(planted))
            .expect("written");
        let (listener, address) = fleet.listener();
        let replica = fleet.start(&index.to_string(), &store, listener);
        if index == 0 {
            fleet.follows(&replica);
        }
        let (_, said, code) = fleet.by("bob", &["--fleet", &address, "rollout", "list"]);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(why) && !said.contains('\u{1b}'), "{said}");
    }
}

#[test]
fn certificates_are_needed_and_checked() {
    let fleet = Replicas::new();
    let store = fleet.store("fleet.redb");
    let (listener, address) = fleet.listener();
    let leads = fleet.start("one", &store, listener);
    fleet.runtime.block_on(leads.lead());
    let list = ["--fleet", &address, "rollout", "list"];
    let said = fleet.fails(2, &list);
    assert!(
        said.contains("--fleet-cert, --fleet-key and --fleet-ca"),
        "{said}"
    );
    let said = fleet.fails(2, &["--fleet", "fleet", "rollout", "list"]);
    assert!(said.contains("ADDRESS:PORT"), "{said}");
    let (_, said, code) = fleet.by("bob", &["--fleet", &address, "guest", "list"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("only `patchbay rollout` takes --fleet"),
        "{said}"
    );
    let (_, said, code) = fleet.by("bob", &["--fleet", "127.0.0.1:1", "rollout", "list"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("no controller answers at 127.0.0.1:1"),
        "{said}"
    );
    // The name of another address is not in the certificate.
    let port = address.rsplit(':').next().expect("a port");
    let other = format!("localhost:{port}");
    let (_, said, code) = fleet.by("bob", &["--fleet", &other, "rollout", "list"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("certificate is for this address"), "{said}");

    let mut foreign = fleet.command(&list);
    foreign.envs(fleet.variables("other", "alice"));
    let mut not_our_ca = fleet.command(&list);
    not_our_ca.envs(fleet.variables("ca", "alice"));
    not_our_ca.env("PATCHBAY_FLEET_CA", fleet.file("other/ca.pem"));
    let mut missing = fleet.command(&list);
    missing.envs(fleet.variables("ca", "nobody"));
    // Over TLS 1.3 only the first call fails, with an error that depends on its timing.
    let output = foreign.output().expect("it starts");
    assert!(!output.status.success() && output.stdout.is_empty());
    for (mut command, why) in [
        (not_our_ca, "a CA that is not among those given"),
        (missing, "nobody.key"),
    ] {
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(why), "{said}");
    }
    let (_, said, code) = fleet.by("bob", &list);
    assert_eq!(code, Some(0), "{said}");
}
