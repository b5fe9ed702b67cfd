// SPDX-License-Identifier: Apache-2.0
//! What tracing needs of the guest's keys, so that it can be tested without a guest.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::keys::{FlipReport, KeysError, TracepointUpdate};

/// What the guest's memory says of one tracepoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracepointFacts {
    /// Full name of its key: "name" or "module:name".
    pub key: String,
    /// Whether the key is on.
    pub enabled: bool,
    /// Probes that are attached, by whomever; None if they could not be read just now.
    pub probes: Option<u32>,
    /// It has a function of its own that must run when it is switched (`regfunc`, `unregfunc` in
    /// `struct tracepoint`).
    pub switched_by_function: bool,
}

/// Keys to switch in one transaction.
#[derive(Clone, Debug)]
pub struct Switch {
    /// Full names.
    pub keys: Vec<String>,
    /// What becomes of them, and of the holds on them.
    pub update: TracepointUpdate,
    /// The principal or stream that holds the keys it fires.
    pub holder: String,
    /// Kept with the holds and in the audit log.
    pub reason: &'static str,
    /// When the references taken expire.
    pub ttl: Option<Duration>,
    /// Check and change nothing.
    pub validate_only: bool,
    /// How long the vCPUs may take to stop.
    pub stop_timeout: Duration,
    /// When to stop trying.
    pub deadline: Instant,
}

/// A future on the heap.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The keys of tracepoints.
pub trait TracepointKeys: Send + Sync + 'static {
    /// Of all tracepoints, read now. Takes milliseconds.
    ///
    /// # Errors
    /// If the guest has not registered.
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError>;

    /// Probes attached to the tracepoints of these keys, read now; None where there is no such key,
    /// or it could not be read.
    ///
    /// # Errors
    /// If the guest has not registered.
    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError>;

    /// Who holds each of these keys, read now; nobody where there is no such key.
    ///
    /// # Errors
    /// If the guest has not registered.
    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError>;

    /// The keys of tracepoints that this client holds.
    ///
    /// # Errors
    /// If the guest has not registered.
    fn held_by(&self, client: &str) -> Result<Vec<String>, KeysError>;

    /// Number of the kernel that runs, or ran last; `None` if none has registered.
    fn boot(&self) -> Option<u64>;

    /// Switches all or none.
    ///
    /// # Errors
    /// As the change of any key.
    fn switch(&self, switch: Switch) -> Boxed<'_, Result<Option<FlipReport>, KeysError>>;
}
