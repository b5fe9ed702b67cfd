// SPDX-License-Identifier: Apache-2.0
//! Runs the daemon with its listeners, its server and its other tasks.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use patchbay_access::audit::{Audit, AuditError, AuditLog};
use patchbay_access::listen::admission::Admission;
use patchbay_access::listen::tls::{Tls, TlsError, TlsFiles};
use patchbay_access::listen::{Incoming, MAX_CALLS};
use patchbay_access::policy::{LivePolicy, PolicyError};
use patchbay_access::scrape::{self, ListenError, MetricsAddress, ScrapeError};
use patchbay_proto::socket::{ListeningSocket, SocketError};
use patchbay_store::registry::{HostRecord, RegisterError, machine};
use rustix::process::geteuid;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tonic::transport::Server;
use tonic::transport::server::Router;

use crate::attach::{self, Attach};
use crate::autopsy::{self, Autopsies};
use crate::guests::{self, Guests};
use crate::metrics::Metrics;
use crate::monitors::{self, Directory, RunDirs};
use crate::proxy::{Node, Proxy};
use crate::registry;
use crate::samples;

/// The time after which a peer that has not answered a ping is considered gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// The time within which calls in progress must end after the shutdown signal. Then the remaining
/// streams are cut off.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// The maximum number of HTTP/2 streams of one connection. It exceeds the limit on calls, so that a
/// call beyond that limit arrives and can be refused.
const HTTP2_STREAMS: u32 = 160;
const _: () = assert!(HTTP2_STREAMS as usize > MAX_CALLS);

/// The configuration of the daemon.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folders of the sockets of monitors.
    pub run_dirs: RunDirs,
    /// The host's own socket.
    pub socket: PathBuf,
    /// The socket's mode.
    pub socket_mode: u32,
    /// The TCP listener, with its certificates.
    pub listen: Option<(SocketAddr, TlsFiles)>,
    /// The policy file. Without one, only root and the daemon's own user have access.
    pub policy: Option<PathBuf>,
    /// The maximum age of a stream.
    pub max_stream_age: Duration,
    /// The path of the audit log.
    pub audit_log: PathBuf,
    /// The address that serves metrics.
    pub metrics: Option<MetricsAddress>,
    /// The guests that the host runs.
    pub guests: Guests,
    /// The places that are searched for guests of other monitors.
    pub attach: Attach,
    /// The folder of the autopsies of panicked guests, if they are written.
    pub autopsies: Option<Autopsies>,
    /// The registry, and this host's record in it.
    pub registry: Option<RegistryConfig>,
}

/// The fleet's registry, and this host's record in it.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// The members of etcd, as http://ADDRESS:PORT, or https with certificates.
    pub etcd: Vec<String>,
    /// The certificates for etcd.
    pub etcd_tls: Option<patchbay_access::connect::TlsFiles>,
    /// The prefix of the fleet's keys.
    pub root: String,
    /// The host's name.
    pub name: String,
    /// The host's labels, for selectors and failure domains.
    pub labels: BTreeMap<String, String>,
    /// The ADDRESS:PORT at which controllers reach the TCP listener.
    pub address: Option<String>,
}

/// The reason why the daemon ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The policy cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The audit log cannot be used.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The host's socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A TCP listener cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The metrics cannot be served.
    #[error(transparent)]
    Scrape(#[from] ScrapeError),
    /// The registry cannot be used.
    #[error(transparent)]
    Registry(#[from] RegisterError),
    /// The operating system's error.
    #[error("the service cannot be started")]
    Start(#[from] io::Error),
    /// The interface's compiled-in description is invalid.
    #[error("the interface's description cannot be used: {0}")]
    Description(String),
    /// HTTP/2 failed.
    #[error("the service failed")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `shutdown` is ready. Each message of `reloads` causes the policy and the
/// certificates to be read again.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    config: Config,
    reloads: mpsc::Receiver<()>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let policy = match &config.policy {
        Some(file) => LivePolicy::read(file.clone())?,
        None => LivePolicy::own_user_only(geteuid().as_raw()),
    };
    let tls = match &config.listen {
        Some((_, files)) => Some(Tls::read(files.clone())?),
        None => None,
    };
    let audit = Audit::start(AuditLog::open(&config.audit_log)?)?;
    let socket = ListeningSocket::bind_with_mode(&config.socket, config.socket_mode)?;
    let (directory, metrics) = (Directory::default(), Metrics::default());
    let admission = Admission::new(policy.clone(), tls.clone());
    let node = Node::new(
        directory.clone(),
        admission.clone(),
        audit.clone(),
        metrics.clone(),
        config.max_stream_age,
    );
    let node = Arc::new(node.map_err(|error| ServeError::Description(error.to_string()))?);
    let mut tasks = JoinSet::new();
    if let Some(address) = &config.metrics {
        let node = Arc::clone(&node);
        let text = move || {
            let node = Arc::clone(&node);
            async move {
                let guests = samples::look(&node.directory).await;
                node.metrics.text(guests, &node.audit)
            }
        };
        tasks.spawn(scrape::serve(address, text).await?);
    }
    let (incoming, connections) = Incoming::new(admission);
    let incoming = Arc::new(incoming.recording(audit.clone()));
    if let (Some((address, _)), Some(tls)) = (&config.listen, &tls) {
        let listener = listen(*address).await?;
        tracing::info!(address = %listener.local_addr()?, "listening with mutual TLS");
        let (incoming, tls) = (Arc::clone(&incoming), tls.clone());
        tasks.spawn(async move { incoming.serve_tcp(listener, tls).await });
    }
    let own = config.socket.canonicalize().ok();
    let path = own.as_deref().unwrap_or(&config.socket);
    let registered = match &config.registry {
        Some(registry) => Some(registered(registry, path)?),
        None => None,
    };
    if let Some(run_dir) = config.run_dirs.0.first() {
        for guest in config.guests.guests {
            tasks.spawn(guests::keep(guest, run_dir.clone()));
        }
        if config.attach.is_given() {
            tasks.spawn(attach::run(
                config.attach,
                run_dir.clone(),
                directory.clone(),
            ));
        }
    }
    if let Some(autopsies) = config.autopsies {
        let (directory, metrics) = (directory.clone(), metrics.clone());
        tasks.spawn(autopsy::run(autopsies, path.to_owned(), directory, metrics));
    }
    tasks.spawn(audit.clone().watch());
    tasks.spawn(monitors::run(directory, config.run_dirs, own));
    tasks.spawn(reload(reloads, policy, tls, metrics));
    tracing::info!(socket = %socket.path().display(), "listening");
    tasks.spawn(async move {
        if let Err(error) = incoming.serve_unix(&socket).await {
            tracing::error!(%error, "the socket cannot be served");
        }
    });

    let (leave, left) = oneshot::channel::<()>();
    let registered = registered.map(|host| {
        let directory = node.directory.clone();
        tokio::spawn(registry::run(host, directory, async {
            // A message and a dropped sender both mean that the service ends.
            let _ = left.await;
        }))
    });
    let (drain, drained) = oneshot::channel::<()>();
    let server = router(node)
        .await?
        .serve_with_incoming_shutdown(connections, async move {
            // A message and a dropped sender both mean that the service ends.
            let _ = drained.await;
        });
    let mut server = std::pin::pin!(server);
    tokio::select! {
        result = &mut server => return Ok(result?),
        () = shutdown => {}
    }
    drop(drain);
    // The registry reports the removal to controllers before the calls in progress are cut off.
    drop(leave);
    if let Some(registered) = registered {
        let _ = tokio::time::timeout(DRAIN_TIME, registered).await;
    }
    let ended = tokio::time::timeout(DRAIN_TIME, server).await;
    audit.flush().await;
    Ok(ended.unwrap_or(Ok(()))?)
}

fn registered(config: &RegistryConfig, socket: &Path) -> Result<registry::Host, ServeError> {
    Ok(registry::Host {
        store: registry::open(config)?,
        name: config.name.clone(),
        record: HostRecord {
            machine: machine(),
            socket: socket.display().to_string(),
            address: config.address.clone(),
            labels: config.labels.clone(),
            lease: 0,
        },
    })
}

/// Returns a router with every service of the host.
async fn router(node: Arc<Node>) -> Result<Router, ServeError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<Proxy<0>>().await;
    health.set_serving::<Proxy<1>>().await;
    health.set_serving::<Proxy<2>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(patchbay_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    let broken =
        |error: tonic_reflection::server::Error| ServeError::Description(error.to_string());
    Ok(Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(HTTP2_STREAMS)
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(broken)?)
        .add_service(reflection().build_v1alpha().map_err(broken)?)
        .add_service(Proxy::<0>::new(Arc::clone(&node)))
        .add_service(Proxy::<1>::new(Arc::clone(&node)))
        .add_service(Proxy::<2>::new(node)))
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let listener = TcpListener::bind(address).await;
    listener.map_err(|error| ListenError { address, error })
}

/// Reads the policy and the certificates again. An invalid file is refused as a whole, and the old
/// content stays in force.
async fn reload(
    mut reloads: mpsc::Receiver<()>,
    policy: LivePolicy,
    tls: Option<Tls>,
    metrics: Metrics,
) {
    while let Some(()) = reloads.recv().await {
        match policy.reload() {
            Ok(()) => tracing::info!("policy read again"),
            Err(error) => {
                metrics.reload_failed("policy");
                tracing::error!(%error, "the new policy is refused, and the old one stays in force; correct it and send SIGHUP");
            }
        }
        match tls.as_ref().map(Tls::reload) {
            None => {}
            Some(Ok(())) => tracing::info!("certificates read again"),
            Some(Err(error)) => {
                metrics.reload_failed("certificates");
                tracing::error!(%error, "the new certificates are refused, and the old ones stay in use; correct them and send SIGHUP");
            }
        }
    }
}
