// SPDX-License-Identifier: Apache-2.0
//! The guest's tracepoints: the link to the agent, the events, and who armed and fires them.
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
//! Data from the guest is read and decoded on the left, in bounded memory (`link`, `hub`,
//! `stream`). Switching keys, on the right, never waits for it.
//!
//! Without an agent, the events that the guest itself records are read from its memory (`memory`).
//! A blocking thread of the API's runtime reads, decodes and encodes them, with a limit for each
//! turn.

mod backoff;
pub(crate) mod book;
mod boot_events;
mod clock;
pub mod decode;
mod error;
mod frame;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub(crate) mod hub;
mod keys;
pub(crate) mod link;
pub(crate) mod memory;
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
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

pub use self::boot_events::BootEvents;
pub use self::error::{AgentError, TraceError};
pub use self::link::{AgentLink, PORT};
pub use self::socket::{AgentSocket, socket_path};
pub use self::switch::{Boxed, Switch, TracepointFacts, TracepointKeys};
pub use self::thread::TraceThread;
pub use self::tracer::Tracer;
use self::tracer::Wakes;

/// Default time that a client's events stay armed after its stream ends.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// Options for tracing a guest.
#[derive(Debug)]
pub struct Tracing {
    /// Socket to which the agent connects, or `None` to trace without an agent.
    pub agent: Option<AgentSocket>,
    /// Runtime that reads and decodes the agent's events, or `None` for the current runtime.
    pub thread: Option<TraceThread>,
    /// Time that a client's events stay armed after its stream ends, so that it can reconnect.
    pub grace: Duration,
    /// Events that the guest's kernel records from its boot on, and that are to be parked.
    pub boot_events: BootEvents,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            agent: None,
            thread: None,
            grace: DEFAULT_GRACE,
            boot_events: BootEvents::default(),
        }
    }
}

const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);

/// Starts tracing, with or without an agent. The link and the decoder run on `decoding`, and
/// everything else runs on the current tokio runtime. Dropping the returned value stops tracing.
///
/// # Errors
/// The agent's socket cannot be used.
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
    let wakes = || Arc::clone(&tracer.wakes);
    tokio::spawn(follow_agent(Arc::downgrade(&tracer), connections, wakes()));
    tokio::spawn(fire_and_park_for_others(Arc::downgrade(&tracer), wakes()));
    tokio::spawn(disarm_expired(Arc::downgrade(&tracer), wakes()));
    Ok(tracer)
}

/// Parks events that the guest's kernel records from its boot on, once in each boot.
///
/// # Errors
/// There are too many events.
pub fn park_boot_events(tracer: &Arc<Tracer>, events: BootEvents) -> std::io::Result<()> {
    let patterns = events.into_patterns();
    if !patterns.is_empty() {
        let wanted = select::Wanted::parse(patterns, true).map_err(std::io::Error::other)?;
        tokio::spawn(boot_events::park(Arc::downgrade(tracer), wanted));
    }
    Ok(())
}

/// Reconciles the book whenever an agent connects or disconnects, and repeats every second what the
/// agent has not answered. Sleeps while there is neither.
async fn follow_agent(
    tracer: Weak<Tracer>,
    mut connections: watch::Receiver<u64>,
    wakes: Arc<Wakes>,
) {
    loop {
        let is_overdue = match tracer.upgrade() {
            Some(tracer) => !tracer.book().overdue.is_empty(),
            None => return,
        };
        let due = async {
            match is_overdue {
                true => tokio::time::sleep(CATCH_UP_INTERVAL).await,
                false => std::future::pending().await,
            }
        };
        let is_connection = tokio::select! {
            changed = connections.changed() => match changed {
                Ok(()) => true,
                Err(_) => return,
            },
            () = due => false,
            () = wakes.overdue.notified() => continue,
        };
        let Some(tracer) = tracer.upgrade() else {
            return;
        };
        match is_connection {
            true => tracer.reconcile().await,
            false => tracer.catch_up().await,
        }
    }
}

/// Fires and parks events for other users in the guest, every second while there are events to
/// check. Needs no answer from the guest.
async fn fire_and_park_for_others(tracer: Weak<Tracer>, wakes: Arc<Wakes>) {
    let mut ticks = tokio::time::interval(CATCH_UP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let is_needed = match tracer.upgrade() {
            Some(tracer) => tracer.is_checked_for_others(),
            None => return,
        };
        if !is_needed {
            let began = Instant::now();
            wakes.armed.notified().await;
            ticks.reset();
            if let Some(tracer) = tracer.upgrade() {
                tracer.pass_ticks(began.elapsed().as_secs() / CATCH_UP_INTERVAL.as_secs());
            }
            continue;
        }
        ticks.tick().await;
        match tracer.upgrade() {
            Some(tracer) => tracer.fire_and_park_for_others().await,
            None => return,
        }
    }
}

/// Disarms events whose time to live has passed.
async fn disarm_expired(tracer: Weak<Tracer>, wakes: Arc<Wakes>) {
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
            () = wakes.expiries.notified() => continue,
        }
        match tracer.upgrade() {
            Some(tracer) => tracer.disarm_expired().await,
            None => return,
        }
    }
}
