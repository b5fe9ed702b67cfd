// SPDX-License-Identifier: Apache-2.0
//! The operations on keys that tracing needs. Tests implement them without a guest.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_observe::trace::Enabled;

use crate::keys::{Caller, FlipReport, KeysError, TracepointUpdate, Use};

/// Stands for a probe whose name was not kept.
pub const UNKNOWN_PROBE: &str = "unknown";

/// State of one tracepoint in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracepointFacts {
    /// Full name of its key: "name" or "module:name".
    pub key: String,
    /// True if the key is on.
    pub enabled: bool,
    /// Number of attached probes, including those of other users, or `None` if they could not be
    /// read.
    pub probes: Option<u32>,
    /// True if the tracepoint has a `regfunc` or `unregfunc` (`struct tracepoint`), which must run
    /// when the tracepoint is switched.
    pub switched_by_function: bool,
    /// Names of the functions of the attached probes; [`UNKNOWN_PROBE`] for one whose name is not
    /// known. Empty if no names are known.
    pub functions: Vec<String>,
    /// The probes that [`TracepointKeys::also_serves`] returns.
    pub also_serves: Vec<&'static str>,
}

impl TracepointFacts {
    /// Returns whether a probe is known to be attached.
    #[must_use]
    pub fn has_probe(&self) -> bool {
        self.probes.is_some_and(|probes| probes > 0)
    }
}

/// Keys to switch in one transaction.
#[derive(Clone, Debug)]
pub struct Switch {
    /// Full names of the keys.
    pub keys: Vec<String>,
    /// The change to the keys and to the holds on them.
    pub update: TracepointUpdate,
    /// The principal or stream that holds the keys.
    pub holder: String,
    /// Reason, for the holds and the audit log.
    pub reason: &'static str,
    /// Time after which new references expire.
    pub ttl: Option<Duration>,
    /// Only check the request.
    pub validate_only: bool,
    /// Time allowed for the vCPUs to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

/// A boxed future, so that the trait is object-safe.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The keys of tracepoints.
pub trait TracepointKeys: Send + Sync + 'static {
    /// Reads the facts of all tracepoints. May take as long as a discovery.
    ///
    /// # Errors
    /// The guest has not registered.
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError>;

    /// Reads the number of probes on the tracepoints of these keys; `None` for an unknown or
    /// unreadable key. May take as long as a discovery.
    ///
    /// # Errors
    /// The guest has not registered.
    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError>;

    /// Reads the names of the kernel's events, "system:name", in the guest's memory; empty if the
    /// events are not found there. May take as long as a discovery.
    fn events(&self) -> Vec<String> {
        vec![]
    }

    /// Reads which instances have enabled which events, in the guest's memory; empty if this is not
    /// found there. May take as long as a discovery.
    fn enabled_in(&self) -> Enabled {
        Enabled::default()
    }

    /// Returns the probes on the tracepoint of this key that belong to no event. They are silent,
    /// too, while the key is off. Empty if they cannot be read. Never waits for a discovery.
    fn also_serves(&self, key: &str) -> Vec<&'static str>;

    /// Returns the holders of each of these keys; empty for an unknown key. Never waits for a
    /// discovery.
    ///
    /// # Errors
    /// The guest has not registered.
    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError>;

    /// Returns the tracepoint keys that this client holds. Never waits for a discovery.
    ///
    /// # Errors
    /// The guest has not registered.
    fn held_by(&self, client: &str) -> Result<Vec<String>, KeysError>;

    /// Checks whether a caller may use these keys, and counts changed keys against the caps.
    ///
    /// # Errors
    /// [`KeysError::NotPermitted`].
    fn permit(&self, caller: &Caller, keys: &[String], how: Use) -> Result<(), KeysError>;

    /// Returns the number of the current or last boot, or `None` if no kernel has registered.
    fn boot(&self) -> Option<u64>;

    /// Switches all keys or none.
    ///
    /// # Errors
    /// Fails with the errors of an update of keys.
    fn switch(&self, switch: Switch) -> Boxed<'_, Result<Option<FlipReport>, KeysError>>;
}
