// SPDX-License-Identifier: Apache-2.0
//! The guest's tracepoints: the agent's link, its events, and who keeps them armed and firing.
//!
//! ```text
//!  agent in the guest ══ vsock ══▶ AgentLink ── pages ──▶ Hub (decodes) ── events ──▶ streams
//!                                     ▲                                                  ▲
//!                                     │ enable, disable                                  │
//!  clients ──▶ Tracer (book of who armed and fired what) ── fire, park ──▶ keys          │
//!     └──────────────────────────────────────────────────────────────────────────────────┘
//! ```

pub(crate) mod book;
mod clock;
pub mod decode;
mod error;
mod frame;
pub(crate) mod hub;
mod keys;
pub(crate) mod link;
pub(crate) mod select;
mod switch;
#[cfg(test)]
mod tests;
pub(crate) mod tracer;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

pub use self::error::TraceError;
pub use self::link::{AgentError, AgentLink, AgentSocket, PORT, socket_path};
pub use self::switch::{Boxed, Switch, TracepointFacts, TracepointKeys};
pub use self::tracer::Tracer;

/// How long the events of a client that streamed them stay armed after it is gone, unless said.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// How a guest is traced.
#[derive(Debug)]
pub struct Tracing {
    /// Where the agent in the guest connects; None: there is no way to the guest.
    pub agent: Option<AgentSocket>,
    /// How long the events of a client that streamed them stay armed after it is gone: time to come
    /// back after its connection broke.
    pub grace: Duration,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            agent: None,
            grace: DEFAULT_GRACE,
        }
    }
}

/// Frames of pages that wait for the decoder.
const FRAMES: usize = 8;
const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);

/// Starts tracing on the current tokio runtime, with an agent or without one.
///
/// # Errors
/// If the agent's socket cannot be used.
pub fn start(
    keys: Arc<dyn TracepointKeys>,
    agent: Option<AgentSocket>,
) -> std::io::Result<Arc<Tracer>> {
    let (sender, pages) = mpsc::channel(FRAMES);
    let link = match agent {
        Some(socket) => AgentLink::listen(socket, sender)?,
        None => AgentLink::unlinked(sender),
    };
    let connections = link.connections();
    let tracer = Arc::new(Tracer::new(keys, link));
    let decoder = Arc::clone(&tracer);
    tokio::spawn(async move { decoder.hub.run(pages).await });
    tokio::spawn(attend(Arc::clone(&tracer), connections));
    Ok(tracer)
}

/// Follows the agent's comings and goings.
async fn attend(tracer: Arc<Tracer>, mut connections: watch::Receiver<u64>) {
    loop {
        match tokio::time::timeout(CATCH_UP_INTERVAL, connections.changed()).await {
            Ok(Ok(())) => tracer.reconcile().await,
            Ok(Err(_)) => return,
            Err(_) => {
                tracer.catch_up().await;
                tracer.heed_others().await;
            }
        }
    }
}
