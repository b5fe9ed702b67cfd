// SPDX-License-Identifier: Apache-2.0
//! What tracing needs of the guest's keys, so that it can be tested without a guest.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use crate::keys::{FlipReport, KeysError};

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
    /// Fire or park.
    pub on: bool,
    /// Who asks.
    pub owner: String,
    /// Kept in the audit log.
    pub reason: &'static str,
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

    /// Switches all or none.
    ///
    /// # Errors
    /// As the change of any key.
    fn switch(&self, switch: Switch) -> Boxed<'_, Result<Option<FlipReport>, KeysError>>;
}
