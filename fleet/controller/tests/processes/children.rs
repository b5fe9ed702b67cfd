// SPDX-License-Identifier: Apache-2.0
//! Code of the child processes. Each is a test that does nothing without the environment variables
//! that its parent sets.

use std::path::PathBuf;

use patchbay_fleet::hosts::TlsFiles;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_node::monitors::RunDirs;
use patchbay_node::serve::{Config, RegistryConfig};
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;

fn etcd_tls() -> TlsFiles {
    let folder = PathBuf::from(variable("ETCD_CERTS"));
    let host = variable("HOST_NAME");
    TlsFiles {
        certificate: folder.join(format!("{host}.pem")),
        key: folder.join(format!("{host}.key")),
        ca: folder.join("ca.pem"),
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Serves a guest until this process is killed. With HOLD, prints "paused" after each pause and
/// waits for a line.
#[tokio::test(flavor = "multi_thread")]
async fn monitor() {
    if variable("GUEST").is_empty() {
        return;
    }
    let registry = std::sync::Arc::new(Registry::default());
    let guest = InMemoryGuest::named(std::sync::Arc::clone(&registry), &variable("GUEST"));
    guest.run(&[TestKey::new("alpha", 1), TestKey::new("beta", 2)]);
    if !variable("HOLD").is_empty() {
        guest.on_resume(|| {
            println!("paused");
            // The input ends when the parent ends.
            let _ = std::io::stdin().read_line(&mut String::new());
        });
    }
    let config = KeysConfig {
        audit: AuditLog::open(&PathBuf::from(variable("AUDIT"))).expect("the audit log opens"),
        ..KeysConfig::default()
    };
    let (keys, _owner) = Keys::start(guest, registry, config).expect("a thread");
    let socket = ApiSocket::bind(&PathBuf::from(variable("SOCKET"))).expect("free");
    let served = api::serve(socket, keys, Tracing::default(), std::future::pending());
    served.await.expect("never ends");
}

/// Serves the monitors of a run directory until SIGTERM.
#[tokio::test(flavor = "multi_thread")]
async fn patchbayd() {
    if variable("RUN_DIR").is_empty() {
        return;
    }
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .try_init();
    let etcd = variable("ETCD");
    let registry = (!etcd.is_empty()).then(|| RegistryConfig {
        etcd: etcd.split(',').map(str::to_owned).collect(),
        etcd_tls: etcd.starts_with("https").then(etcd_tls),
        root: patchbay_fleet::store::DEFAULT_ROOT.to_owned(),
        name: variable("HOST_NAME"),
        labels: [("rack".to_owned(), variable("RACK"))].into(),
        address: Some(variable("LISTEN")).filter(|address| !address.is_empty()),
    });
    let certs = PathBuf::from(variable("CERTS"));
    let listen = Some(variable("LISTEN")).filter(|address| !address.is_empty());
    let listen = listen.map(|address| {
        let files = patchbay_access::listen::tls::TlsFiles {
            certificate: certs.join("host.pem"),
            key: certs.join("host.key"),
            clients: patchbay_access::listen::client_cas::ClientCas {
                domains: vec![("example.org".to_owned(), certs.join("ca.pem"))],
                common_names: None,
            },
        };
        (address.parse().expect("an address"), files)
    });
    let policy = certs.join("policy.yaml");
    let config = Config {
        run_dirs: RunDirs(vec![variable("RUN_DIR").into()]),
        socket: variable("SOCKET").into(),
        socket_mode: 0o600,
        listen,
        policy: policy.exists().then_some(policy),
        max_stream_age: patchbay_access::listen::DEFAULT_STREAM_AGE,
        audit_log: variable("AUDIT").into(),
        metrics: None,
        guests: patchbay_node::guests::Guests::default(),
        attach: patchbay_node::attach::Attach::default(),
        autopsies: None,
        registry,
    };
    let terminate = tokio::signal::unix::SignalKind::terminate();
    let mut terminate = tokio::signal::unix::signal(terminate).expect("a handler");
    let (_reload, reloads) = tokio::sync::mpsc::channel(1);
    let ended = async move {
        terminate.recv().await;
    };
    let served = patchbay_node::serve::serve(config, reloads, ended).await;
    served.expect("ends cleanly");
}

/// Approves the rollout "net" over a controller's socket, and prints the answer.
#[tokio::test(flavor = "multi_thread")]
async fn person() {
    let socket = variable("FLEET_SOCKET");
    if socket.is_empty() {
        return;
    }
    let channel = super::fleet::channel(std::path::Path::new(&socket));
    let mut client = RolloutServiceClient::new(channel);
    let request = v1::ApproveRequest {
        rollout: "net".to_owned(),
        digest: variable("DIGEST"),
    };
    match client.approve(request).await {
        Ok(answer) => {
            let rollout = answer.into_inner().rollout.expect("a rollout");
            println!("approved by {:?}", rollout.approvals);
        }
        Err(status) => println!("{}", status.message()),
    }
}
