// SPDX-License-Identifier: Apache-2.0
//! Errors of calls on keys.

use std::time::Duration;

use patchbay_guest::pause::PauseError;
use static_keys::{PatternError, PlanError, split_name};

use super::debug::parse::QueryError;
use super::gate::ClosedGate;
use super::outcome::PlanUsage;

/// A call on keys that was refused or failed. Each message says what failed and what to do next.
///
/// Unless a variant says otherwise, the guest is unchanged.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KeysError {
    /// The guest's kernel has not registered, or its registration was refused.
    #[error("{why}")]
    NotRegistered {
        /// State of the registration and the next step.
        why: String,
    },
    /// No key has this name.
    #[error("no key is named {name:?}{}", near_names(.near))]
    KeyNotFound {
        /// Name from the request.
        name: String,
        /// Keys with similar names, best first.
        near: Vec<String>,
    },
    /// No key matches.
    #[error("no key matches {patterns}; list the keys to see which there are")]
    NothingSelected {
        /// Patterns from the request, truncated if there are many.
        patterns: String,
    },
    /// No line of dynamic debug matches.
    #[error(
        "no line of dynamic debug matches {queries}; list them to see which there are. A kernel that registers its keys itself, and one without CONFIG_DYNAMIC_DEBUG, has none"
    )]
    NoDebugSite {
        /// Queries from the request.
        queries: String,
    },
    /// The policy of the host does not permit the caller to change these keys.
    #[error("{principal} may not change these keys: {why}; ask whoever keeps this host's policy")]
    NotPermitted {
        /// The caller.
        principal: String,
        /// The rule that comes closest, and what it lacks.
        why: String,
    },
    /// A field of the request is malformed.
    #[error("{field}: {message}")]
    InvalidArgument {
        /// Name of the field.
        field: &'static str,
        /// The fault.
        message: String,
    },
    /// The request id belongs to an earlier change with other content.
    #[error(
        "request_id {request_id:?} was already used for another change; give every change its own id"
    )]
    RequestIdReused {
        /// Request id from the request.
        request_id: String,
    },
    /// The request was made in part by an earlier process.
    #[error(
        "request {request_id:?} was made in part before its service was killed: {made} of its keys were changed and {unmade} were not; read the keys again, and ask for the rest with another id"
    )]
    RequestMadeInPart {
        /// Request id from the request.
        request_id: String,
        /// Number of keys whose count changed.
        made: u32,
        /// Number of keys whose change was not made.
        unmade: u32,
    },
    /// The key has changed since the caller read it.
    #[error(
        "key {key}: etag {given:?} is out of date, it is now {current:?} (count {count}); read the key again before you decide"
    )]
    EtagMismatch {
        /// Full name.
        key: String,
        /// Etag from the request.
        given: String,
        /// Current etag.
        current: String,
        /// Current count.
        count: i32,
    },
    /// A rule about one key forbids the change.
    #[error("{message}")]
    KeyRefused {
        /// The key or keys.
        key: RefusedKey,
        /// The rule that the change breaks.
        reason: KeyRefusal,
        /// The fault, and the next step.
        message: String,
    },
    /// A gate stayed closed until the deadline.
    #[error(
        "the guest was busy in all {attempts} attempts, last with {gate}; try again, or allow more time with a later deadline"
    )]
    Busy {
        /// The last closed gate.
        kind: ClosedGate,
        /// Description of the gate.
        gate: String,
        /// Number of attempts.
        attempts: u32,
        /// The gate stops every change, regardless of its keys.
        every_key: bool,
    },
    /// The monitor cannot determine where the vCPUs stopped, so one may be inside a site.
    #[error(
        "the guest's monitor cannot tell where the vCPUs stopped; change the key from inside the guest"
    )]
    VcpusUnknown,
    /// A vCPU did not stop.
    #[error("{message}")]
    NotStopped {
        /// Names the late vCPUs.
        message: String,
    },
    /// A site holds neither of its two encodings.
    #[error("{message}; the key is quarantined: {way_out}")]
    ForeignBytes {
        /// Full name.
        key: String,
        /// Names key, site, and the expected and found bytes.
        message: String,
        /// The event that ends the quarantine.
        way_out: String,
    },
    /// Guest memory could not be written or read back. The message says whether the undo is
    /// complete.
    #[error("{message}")]
    WriteFault {
        /// Message of the engine.
        message: String,
    },
    /// The audit log cannot be written. Nothing is changed without an intent.
    #[error(
        "the audit log {path} cannot be written ({error}), so nothing was changed; make room or repair it"
    )]
    AuditLogUnwritable {
        /// Path of the log.
        path: String,
        /// The I/O error.
        error: String,
    },
    /// A set of claims was refused as a whole.
    #[error("{message}")]
    ClaimsRefused {
        /// The rule that forbids the set.
        reason: ClaimRefusal,
        /// The owner's highest generation, if that is the reason.
        generation: Option<u64>,
        /// The facts that were found, and the next step.
        message: String,
    },
    /// No hold has this id.
    #[error("no hold has the id {id:?}: it is released, expired or void; list the holds")]
    HoldNotFound {
        /// Id from the request.
        id: String,
    },
    /// The caller left before anything was changed.
    #[error("the call was cancelled before anything was changed")]
    Cancelled,
    /// The command queue is full.
    #[error("{waiting} changes already wait for their turn on this guest; try again later")]
    QueueFull {
        /// Capacity of the queue.
        waiting: usize,
    },
    /// The first requested revision is no longer kept.
    #[error(
        "revision {wanted} is no longer kept, the oldest is {oldest}; list the keys and watch from the list's revision + 1"
    )]
    Compacted {
        /// Revision from the request.
        wanted: u64,
        /// Oldest revision that is kept.
        oldest: u64,
    },
    /// The first requested revision lies in the future.
    #[error("revision {wanted} has not happened yet, the next one is {next}; watch from there")]
    RevisionInFuture {
        /// Revision from the request.
        wanted: u64,
        /// Next revision.
        next: u64,
    },
    /// The watcher reads too slowly.
    #[error(
        "the watch fell behind: revision {missed} is no longer kept; list the keys, watch from there and read faster"
    )]
    WatchTooSlow {
        /// First revision that was not sent.
        missed: u64,
    },
    /// No plan has this id.
    #[error(
        "no plan is named {plan_id:?}: it expired, was discarded, died with its registration, or another incarnation made it; prepare the change again"
    )]
    PlanNotFound {
        /// Id from the request, truncated to the length of an id.
        plan_id: String,
    },
    /// Another principal prepared the plan.
    #[error(
        "plan {plan_id} was prepared by another principal, who alone may commit or discard it; prepare the change yourself"
    )]
    PlanNotOwned {
        /// Plan id.
        plan_id: String,
    },
    /// The plan differs from what a plan of the same change would be now, or from what the caller
    /// reviewed.
    #[error("plan {plan_id} is out of date: {why}; prepare the change again")]
    PlanStale {
        /// Plan id.
        plan_id: String,
        /// The difference.
        why: String,
    },
    /// Too many plans are kept, or they take too much memory.
    #[error(
        "{} plans with {} KiB are kept{} and this one takes {} KiB, of {} plans and {} MiB at most; commit or discard some, or prepare fewer keys",
        .used.plans, .used.bytes >> 10, whose(.principal.as_deref()), .needed >> 10, .max.plans, .max.bytes >> 20
    )]
    TooManyPlans {
        /// The principal whose share is used up; `None` if the plans of all principals exceed the
        /// limit.
        principal: Option<String>,
        /// The plans that are kept.
        used: PlanUsage,
        /// Bytes that this plan takes.
        needed: usize,
        /// The limit that is exceeded.
        max: PlanUsage,
    },
    /// The monitor itself failed. It is unknown whether the change was made.
    #[error("{message}")]
    Internal {
        /// The failure, and the next step.
        message: String,
    },
    /// Another process assigned the caller's revision.
    #[error(
        "the revision belongs to incarnation {given:?}, and this guest is served by incarnation {current}; list the keys again"
    )]
    IncarnationChanged {
        /// Incarnation from the request, truncated.
        given: String,
        /// Incarnation of this process.
        current: String,
    },
    /// The guest has ended.
    #[error("the guest has stopped; start it again")]
    GuestStopped,
    /// A paused guest cannot shut itself down.
    #[error(
        "the guest is paused and cannot act on its power button; resume it first, or cut its power"
    )]
    GuestPaused,
    /// The guest was asked to shut down and is still running.
    #[error(
        "the guest has not powered off within {waited:?}: {}; it runs on, allow more time or cut its power",
        match seen {
            true => "its kernel has seen the power button, and its user space (systemd-logind, acpid) has not finished or does not act on it",
            false => "its kernel does not listen to the power button (no ACPI, or no CONFIG_ACPI_BUTTON)",
        }
    )]
    NotPoweredOff {
        /// Time that the guest had.
        waited: Duration,
        /// The guest's kernel saw the power button.
        seen: bool,
    },
    /// The guest cannot be saved.
    #[error("{message}")]
    NotSaved {
        /// The reason, and the next step.
        message: String,
    },
}

/// The key or keys that a rule refuses to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusedKey {
    /// The key with this full name.
    Named(String),
    /// Every key that these patterns or queries select.
    Selected(String),
    /// The key or the word of the guest's tables at this address, for which no name is known.
    At(u64),
}

impl std::fmt::Display for RefusedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Named(text) | Self::Selected(text) => f.write_str(text),
            Self::At(address) => write!(f, "{address:#x}"),
        }
    }
}

impl From<&str> for RefusedKey {
    fn from(full_name: &str) -> Self {
        Self::Named(full_name.to_owned())
    }
}

/// Rules that forbid a set of claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimRefusal {
    /// A later generation of the owner was seen, or the same generation with other claims.
    GenerationStale,
    /// The claims differ from those that were approved.
    IntentMismatch,
    /// The guest has booted again.
    BootChanged,
    /// The ledger does not have the owner's earlier claims.
    LedgerLost,
    /// There are too many owners or claims.
    TooMany,
    /// The ledger cannot be written.
    LedgerUnwritable,
}

/// Rules that forbid a change of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRefusal {
    /// The kernel would WARN about the op at this count.
    WouldWarn,
    /// The key lies in `__ro_after_init` data.
    Sealed,
    /// The key is guarded: the monitor and the call must both permit it.
    Guarded,
    /// The key gates a static call that may be NULL.
    Never,
    /// The key is quarantined.
    Quarantined,
    /// The tracepoint cannot be fired or parked by its key.
    Tracepoint,
    /// The caller holds no reference that the op may drop.
    NotHolder,
    /// The registered tables are inconsistent.
    TableRefused,
    /// A module that defines or uses the key is not registered.
    ModuleRefused,
    /// A module of the guest checks the kernel's text.
    TextChecked,
}

impl KeyRefusal {
    /// Name in `patchbay.v1.ErrorReason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WouldWarn => "WOULD_WARN",
            Self::Sealed => "KEY_SEALED",
            Self::Guarded => "KEY_GUARDED",
            Self::Never => "KEY_NEVER",
            Self::Quarantined => "KEY_QUARANTINED",
            Self::Tracepoint => "TRACEPOINT_REFUSED",
            Self::NotHolder => "NOT_HOLDER",
            Self::TableRefused => "TABLE_REFUSED",
            Self::ModuleRefused => "MODULE_REFUSED",
            Self::TextChecked => "TEXT_CHECKED",
        }
    }
}

impl KeysError {
    /// Creates the error for a guarded key that the call permits and the monitor does not.
    pub(super) fn guarded_by_monitor(key: &str) -> Self {
        Self::KeyRefused {
            key: key.into(),
            reason: KeyRefusal::Guarded,
            message: format!(
                "key {key} is guarded, and its monitor was started without --allow-guarded; start \
                 it with this option"
            ),
        }
    }

    /// Time after which a retry may succeed; `None` if a retry cannot help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { .. } => Some(Duration::from_millis(10)),
            Self::QueueFull { .. } => Some(Duration::from_millis(100)),
            _ => None,
        }
    }

    /// Returns whether the error is independent of the keys of the change.
    pub fn is_of_every_key(&self) -> bool {
        match self {
            Self::Busy { every_key, .. } => *every_key,
            Self::KeyRefused {
                reason: KeyRefusal::TextChecked,
                ..
            } => true,
            Self::KeyNotFound { .. }
            | Self::NothingSelected { .. }
            | Self::NoDebugSite { .. }
            | Self::HoldNotFound { .. }
            | Self::InvalidArgument { .. }
            | Self::RequestIdReused { .. }
            | Self::RequestMadeInPart { .. }
            | Self::EtagMismatch { .. }
            | Self::KeyRefused { .. }
            | Self::VcpusUnknown
            | Self::ForeignBytes { .. }
            | Self::WriteFault { .. }
            | Self::PlanNotFound { .. }
            | Self::PlanNotOwned { .. }
            | Self::PlanStale { .. }
            | Self::NotPermitted { .. }
            | Self::TooManyPlans { .. } => false,
            Self::NotRegistered { .. }
            | Self::NotStopped { .. }
            | Self::AuditLogUnwritable { .. }
            | Self::ClaimsRefused { .. }
            | Self::Cancelled
            | Self::QueueFull { .. }
            | Self::Compacted { .. }
            | Self::RevisionInFuture { .. }
            | Self::WatchTooSlow { .. }
            | Self::IncarnationChanged { .. }
            | Self::Internal { .. }
            | Self::GuestPaused
            | Self::NotPoweredOff { .. }
            | Self::NotSaved { .. }
            | Self::GuestStopped => true,
        }
    }

    /// Returns the machine-readable reason of `google.rpc.ErrorInfo`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotRegistered { .. } => "GUEST_NOT_REGISTERED",
            Self::KeyNotFound { .. } | Self::NothingSelected { .. } | Self::NoDebugSite { .. } => {
                "KEY_NOT_FOUND"
            }
            Self::HoldNotFound { .. } => "HOLD_NOT_FOUND",
            Self::InvalidArgument { .. } => "INVALID_ARGUMENT",
            Self::RequestIdReused { .. } | Self::RequestMadeInPart { .. } => "REQUEST_ID_REUSED",
            Self::EtagMismatch { .. } => "ETAG_MISMATCH",
            Self::KeyRefused { reason, .. } => reason.as_str(),
            Self::Busy { .. } => "GUEST_BUSY",
            Self::VcpusUnknown => "VCPUS_UNKNOWN",
            Self::NotStopped { .. } => "VCPU_NOT_STOPPED",
            Self::ForeignBytes { .. } => "FOREIGN_BYTES",
            Self::WriteFault { .. } => "WRITE_FAULT",
            Self::AuditLogUnwritable { .. } => "AUDIT_LOG_UNWRITABLE",
            Self::ClaimsRefused { reason, .. } => match reason {
                ClaimRefusal::GenerationStale => "GENERATION_STALE",
                ClaimRefusal::IntentMismatch => "INTENT_MISMATCH",
                ClaimRefusal::BootChanged => "BOOT_CHANGED",
                ClaimRefusal::LedgerLost => "LEDGER_LOST",
                ClaimRefusal::TooMany => "TOO_MANY_CLAIMS",
                ClaimRefusal::LedgerUnwritable => "LEDGER_UNWRITABLE",
            },
            Self::NotPermitted { .. } => "ROLE_MISSING",
            Self::Cancelled => "CANCELLED",
            Self::QueueFull { .. } => "QUEUE_FULL",
            Self::Compacted { .. } => "REVISION_COMPACTED",
            Self::RevisionInFuture { .. } => "REVISION_IN_FUTURE",
            Self::WatchTooSlow { .. } => "WATCH_TOO_SLOW",
            Self::PlanNotFound { .. } => "PLAN_NOT_FOUND",
            Self::PlanNotOwned { .. } => "PLAN_NOT_OWNED",
            Self::PlanStale { .. } => "PLAN_STALE",
            Self::TooManyPlans { .. } => "TOO_MANY_PLANS",
            Self::IncarnationChanged { .. } => "INCARNATION_CHANGED",
            Self::Internal { .. } => "INTERNAL",
            Self::GuestStopped => "GUEST_STOPPED",
            Self::GuestPaused => "GUEST_PAUSED",
            Self::NotPoweredOff { .. } => "NOT_POWERED_OFF",
            Self::NotSaved { .. } => "NOT_SAVED",
        }
    }
}

impl KeysError {
    /// Creates the error of a malformed field.
    pub(super) fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::InvalidArgument {
            field,
            message: message.into(),
        }
    }
}

fn near_names(near: &[String]) -> String {
    match near {
        [] => "; list the keys to see which there are".to_owned(),
        [name] => format!("; did you mean {name}?"),
        [names @ .., last] => format!("; did you mean {} or {last}?", names.join(", ")),
    }
}

fn whose(principal: Option<&str>) -> String {
    principal.map_or_else(String::new, |principal| format!(" for {principal}"))
}

impl From<PatternError> for KeysError {
    fn from(error: PatternError) -> Self {
        Self::InvalidArgument {
            field: "patterns",
            message: error.to_string(),
        }
    }
}

impl From<QueryError> for KeysError {
    fn from(error: QueryError) -> Self {
        Self::InvalidArgument {
            field: "debug_queries",
            message: error.to_string(),
        }
    }
}

impl From<PauseError> for KeysError {
    fn from(error: PauseError) -> Self {
        match error {
            PauseError::Late { .. } => Self::NotStopped {
                message: error.to_string(),
            },
            PauseError::AlreadyPaused | PauseError::Unable { .. } => Self::Busy {
                kind: ClosedGate::Pause,
                gate: error.to_string(),
                attempts: 1,
                every_key: true,
            },
            PauseError::Ended => Self::GuestStopped,
        }
    }
}

impl From<&PlanError> for KeysError {
    fn from(error: &PlanError) -> Self {
        let (key, reason) = match error {
            PlanError::Guarded { key } => ((&**key).into(), KeyRefusal::Guarded),
            PlanError::Never { key } => ((&**key).into(), KeyRefusal::Never),
            PlanError::WouldWarn { key, .. } | PlanError::Boolean { key, .. } => {
                ((&**key).into(), KeyRefusal::WouldWarn)
            }
            PlanError::Sealed { key } => ((&**key).into(), KeyRefusal::Sealed),
            PlanError::Tracepoint { key, .. } => ((&**key).into(), KeyRefusal::Tracepoint),
            PlanError::SiteOutsideText { key, .. }
            | PlanError::OutOfReach { key, .. }
            | PlanError::Overlap { key, .. } => ((&**key).into(), KeyRefusal::TableRefused),
            PlanError::Foreign { key, .. } => {
                return Self::ForeignBytes {
                    key: key.to_string(),
                    message: error.to_string(),
                    way_out: way_out(split_name(key).0),
                };
            }
            PlanError::UnknownKey { key } => (RefusedKey::At(key.0), KeyRefusal::TableRefused),
            PlanError::Unreadable { address, .. } => {
                (RefusedKey::At(*address), KeyRefusal::TableRefused)
            }
            PlanError::Busy(busy) => {
                return Self::Busy {
                    kind: busy.into(),
                    gate: busy.to_string(),
                    attempts: 1,
                    every_key: busy.blocks_every_key(),
                };
            }
        };
        Self::KeyRefused {
            key,
            reason,
            message: error.to_string(),
        }
    }
}

/// Describes the event that ends the quarantine of a key of this module or of the kernel image.
pub(super) fn way_out(module: &str) -> String {
    match module {
        "" => "find out what patches the kernel, and restart the guest".to_owned(),
        module => format!(
            "find out what patches the kernel, and load module {module} again or restart the guest"
        ),
    }
}
