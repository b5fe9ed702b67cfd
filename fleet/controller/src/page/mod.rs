// SPDX-License-Identifier: Apache-2.0
//! Serves the page on which operators see the fleet in a browser and control its rollouts.
//!
//! ```text
//!  browser ══ loopback, or mutual TLS ══▶ access: identifies and authorizes the caller
//!                                            │
//!      GET /, /assets/*   embedded files; nothing is loaded from another origin
//!      GET /api/events    the state, and again after each change (events)
//!      GET /api/…         parts of the state that are too large for events (rows, heat)
//!      POST /api/rollouts/NAME/COMMAND    has the effect of the gRPC method of that name
//! ```
//!
//! The page reads everything from the running rollouts and from guests, and stores nothing.

mod access;
mod events;
mod heat;
mod holders;
mod routes;
mod rows;
mod standing;
mod state;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::StreamExt;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use patchbay_access::identity::Identity;
use patchbay_access::listen::Incoming;
use patchbay_access::listen::admission::Admission;
use patchbay_access::listen::slots::Slots;
use patchbay_access::listen::tls::Tls;
use patchbay_access::policy::LivePolicy;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tonic::transport::server::Connected;

use crate::authority::Authority;
use crate::controller::Controller;
use crate::sight;

/// The maximum number of browser connections on the loopback interface. Each browser has one stream
/// of events and makes few other requests.
const MAX_CONNECTIONS: usize = 256;
/// The maximum number of connections of one user. It does not apply to root and the controller's
/// own user.
const MAX_USER_CONNECTIONS: usize = 64;
/// The number of connections that are reserved for root and the controller's own user.
const RESERVED_CONNECTIONS: usize = 32;
/// The maximum number of connections whose user is being looked up. Further connections wait to be
/// accepted.
const MAX_LOOKUPS: usize = 32;
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The timeout for a client's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration of the page.
pub struct Config {
    pub address: SocketAddr,
    /// The certificates for TLS. Without them, the address must be a loopback address.
    pub tls: Option<Tls>,
    pub policy: LivePolicy,
}

/// A page whose address is bound.
pub struct Page {
    listener: TcpListener,
    tls: Option<Tls>,
    shared: Arc<Shared>,
}

/// The state that all requests share.
struct Shared {
    controller: Arc<Controller>,
    admission: Admission,
    authority: Authority,
    /// True if the page is served on the loopback interface without TLS.
    is_plain: bool,
    /// A value that differs between processes, so that the id of an event of another process is not
    /// taken for an id of this process.
    incarnation: u64,
    heat: watch::Sender<Arc<heat::Observed>>,
    viewers: watch::Sender<usize>,
}

impl Page {
    /// Binds the page's address.
    ///
    /// # Errors
    /// The address is not a loopback address and there are no certificates, or the address cannot
    /// be bound.
    pub async fn bind(config: Config, controller: Arc<Controller>) -> anyhow::Result<Self> {
        let Config {
            address,
            tls,
            policy,
        } = config;
        if tls.is_none() && !address.ip().is_loopback() {
            bail!(
                "the page cannot be served on {address} without certificates, because other hosts \
                 reach it; give a loopback address, or --cert, --key and --client-ca"
            );
        }
        let listener = TcpListener::bind(address).await;
        let listener = listener
            .with_context(|| format!("the page cannot be served on {address}; give another"))?;
        let shared = Shared {
            authority: controller.authority().with_policy(policy.clone()),
            controller,
            admission: Admission::new(policy, tls.clone()),
            is_plain: tls.is_none(),
            incarnation: fastrand::u64(..),
            heat: watch::Sender::default(),
            viewers: watch::Sender::new(0),
        };
        Ok(Self {
            listener,
            tls,
            shared: Arc::new(shared),
        })
    }

    /// Returns the URL of the page for display.
    ///
    /// # Errors
    /// The operating system's error if the local address cannot be read.
    pub fn link(&self) -> std::io::Result<String> {
        let address = self.listener.local_addr()?;
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{address}/"))
    }

    /// Serves the page until the future is dropped.
    pub async fn run(self) {
        let Self {
            listener,
            tls,
            shared,
        } = self;
        let observing = heat::observe(Arc::clone(&shared));
        let serving = async {
            match tls {
                Some(tls) => serve_tls(listener, tls, shared).await,
                None => serve_plain(listener, shared).await,
            }
        };
        tokio::join!(observing, serving);
    }
}

async fn serve_tls(listener: TcpListener, tls: Tls, shared: Arc<Shared>) {
    let (incoming, mut connections) = Incoming::new(shared.admission.clone());
    let incoming = incoming.recording(shared.authority.audit().cloned());
    let accepting = incoming.serve_tcp(listener, tls);
    let serving = async {
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                Some(connection) = connections.next() => {
                    let Ok(connection) = connection else { continue };
                    let identity = Arc::clone(&connection.connect_info().identity);
                    let shared = Arc::clone(&shared);
                    tasks.spawn(serve_connection(connection, identity, shared));
                }
                Some(_) = tasks.join_next() => {}
            }
        }
    };
    tokio::join!(accepting, serving);
}

async fn serve_plain(listener: TcpListener, shared: Arc<Shared>) {
    let slots = Slots::new(MAX_CONNECTIONS, MAX_USER_CONNECTIONS, RESERVED_CONNECTIONS);
    let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &lookups) => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, lookup) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection of a browser cannot be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let (shared, slots) = (Arc::clone(&shared), slots.clone());
        tasks.spawn(async move {
            let Some(uid) = peer(&stream).await else {
                tracing::warn!(
                    "the user of a loopback connection cannot be found; the connection is closed"
                );
                return;
            };
            drop(lookup);
            let is_privileged = uid == 0 || uid == geteuid().as_raw();
            match slots.take(uid, is_privileged) {
                Ok(_slot) => {
                    let identity = Arc::new(Identity::of_uid(uid));
                    serve_connection(stream, identity, shared).await;
                }
                Err(full) => tracing::warn!(uid, "a browser's connection is closed: {full}"),
            }
        });
    }
}

async fn accept(
    listener: &TcpListener,
    lookups: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(lookups).acquire_owned().await;
    let permit = permit.map_err(std::io::Error::other)?;
    Ok((listener.accept().await?.0, permit))
}

/// Returns the user at the other end of a loopback connection.
async fn peer(stream: &TcpStream) -> Option<u32> {
    let (theirs, ours) = (stream.peer_addr().ok()?, stream.local_addr().ok()?);
    let uid = tokio::task::spawn_blocking(move || access::loopback_uid(theirs, ours));
    uid.await.ok()?
}

async fn serve_connection<S>(stream: S, identity: Arc<Identity>, shared: Arc<Shared>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| {
        let (shared, identity) = (Arc::clone(&shared), Arc::clone(&identity));
        async move {
            let answer = routes::answer(&shared, &identity, request).await;
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new());
    if let Err(error) = builder
        .serve_connection(TokioIo::new(stream), service)
        .await
    {
        tracing::debug!(%error, "a browser's connection has ended");
    }
}

impl Shared {
    /// Returns whether the request may use this name for the page. With TLS, it may use any name.
    /// Without TLS, it may use only a name of the loopback interface, because an attacker can make
    /// any other name resolve to the loopback interface (DNS rebinding).
    fn is_own_host(&self, host: Option<&str>) -> bool {
        if !self.is_plain {
            return true;
        }
        let Some(host) = host else { return false };
        if let Ok(address) = host.parse::<SocketAddr>() {
            return address.ip().is_loopback();
        }
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}
