// SPDX-License-Identifier: Apache-2.0
//! The guest's tracepoints: the agent's link, its events, and who keeps them armed and firing.
//!
//! ```text
//!               trace's thread                                         │  API's thread
//!  agent in the guest ══ vsock ══▶ AgentLink ── pages ──▶ Hub (decodes) ─── events ──▶ streams
//!                                     ▲                                │                 ▲
//!                                     └────── enable, disable ─────────┼───────────┐     │
//!                                                                      │           │     │
//!  clients ───────────────────────────────────────────────────────────▶ Tracer (book of who armed
//!                                                                      │ what) ── fire, park ──▶
//!                                                                      │ keys (ledger of holds)
//! ```
//!
//! Whatever comes from the guest is read and decoded on the left, within fixed memory (`link`, `hub`,
//! `stream`); nothing on the right that switches keys waits for it.

pub(crate) mod book;
mod clock;
pub mod decode;
mod error;
mod frame;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub(crate) mod hub;
mod keys;
pub(crate) mod link;
pub(crate) mod once;
pub(crate) mod select;
mod socket;
pub(crate) mod stream;
mod switch;
mod tasks;
#[cfg(test)]
mod tests;
mod thread;
pub(crate) mod tracer;

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

pub use self::error::{AgentError, TraceError};
pub use self::link::{AgentLink, PORT};
pub use self::socket::{AgentSocket, socket_path};
pub use self::switch::{Boxed, Switch, TracepointFacts, TracepointKeys};
pub use self::thread::TraceThread;
pub use self::tracer::Tracer;

/// How long the events of a client that streamed them stay armed after it is gone, unless said.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// How a guest is traced.
#[derive(Debug)]
pub struct Tracing {
    /// Where the agent in the guest connects; None: there is no way to the guest.
    pub agent: Option<AgentSocket>,
    /// Where the agent's events are read and decoded; None: on the current runtime.
    pub thread: Option<TraceThread>,
    /// How long the events of a client that streamed them stay armed after it is gone: time to come
    /// back after its connection broke.
    pub grace: Duration,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            agent: None,
            thread: None,
            grace: DEFAULT_GRACE,
        }
    }
}

const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);

/// Starts tracing, with an agent or without one. Link and decoder run on `decoding`, all else on the
/// current tokio runtime. All of it ends when the answer is dropped.
///
/// # Errors
/// If the agent's socket cannot be used.
pub fn start(
    keys: Arc<dyn TracepointKeys>,
    agent: Option<AgentSocket>,
    decoding: &Handle,
) -> std::io::Result<Arc<Tracer>> {
    let (sender, pages) = mpsc::unbounded_channel();
    let link = AgentLink::new(sender);
    let mut tasks = JoinSet::new();
    if let Some(socket) = &agent {
        let _there = decoding.enter();
        let listener = socket.listener()?;
        tasks.spawn(link.clone().accept(listener));
    }
    let connections = link.connections();
    let mut tracer = Tracer::new(keys, link, agent, decoding.clone());
    let hub = Arc::clone(&tracer.hub);
    tasks.spawn_on(async move { hub.run(pages).await }, decoding);
    tracer.tasks = tasks;
    let tracer = Arc::new(tracer);
    tokio::spawn(follow_agent(Arc::downgrade(&tracer), connections));
    tokio::spawn(heed_others(Arc::downgrade(&tracer)));
    let armed_anew = Arc::clone(&tracer.armed_anew);
    tokio::spawn(disarm_expired(Arc::downgrade(&tracer), armed_anew));
    Ok(tracer)
}

/// Follows the agent's comings and goings, as long as anybody has the tracer. It asks the agent, so it
/// may be held up by it.
async fn follow_agent(tracer: Weak<Tracer>, mut connections: watch::Receiver<u64>) {
    loop {
        let changed = tokio::time::timeout(CATCH_UP_INTERVAL, connections.changed()).await;
        let Some(tracer) = tracer.upgrade() else {
            return;
        };
        match changed {
            Ok(Ok(())) => tracer.reconcile().await,
            Ok(Err(_)) => return,
            Err(_) => tracer.catch_up().await,
        }
    }
}

/// Asks nobody in the guest.
async fn heed_others(tracer: Weak<Tracer>) {
    let mut ticks = tokio::time::interval(CATCH_UP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match tracer.upgrade() {
            Some(tracer) => tracer.heed_others().await,
            None => return,
        }
    }
}

/// Waits for what clients armed for some time.
async fn disarm_expired(tracer: Weak<Tracer>, armed_anew: Arc<Notify>) {
    loop {
        let next = match tracer.upgrade() {
            Some(tracer) => tracer.book().next_expiry(),
            None => return,
        };
        let over = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = over => {}
            () = armed_anew.notified() => continue,
        }
        match tracer.upgrade() {
            Some(tracer) => tracer.disarm_expired().await,
            None => return,
        }
    }
}
