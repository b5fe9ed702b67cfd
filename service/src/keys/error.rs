// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a call on keys.

use std::time::Duration;

use static_keys::PatternError;

use super::gate::ClosedGate;
use crate::pause::PauseError;

/// A call on keys that was refused or failed. Each message is one sentence and the next step.
///
/// Unless a variant says otherwise, the guest is as it was.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KeysError {
    /// The guest's kernel has told nothing, or nothing usable.
    #[error("{why}")]
    NotRegistered {
        /// State of the registration and the next step.
        why: String,
    },
    /// No key has that name.
    #[error("no key is named {name:?}{}", near_names(.near))]
    KeyNotFound {
        /// As asked for.
        name: String,
        /// Keys with similar names, best first.
        near: Vec<String>,
    },
    /// No key matches.
    #[error("no key matches {patterns}; list the keys to see which there are")]
    NothingSelected {
        /// As asked for, cut short if they are many.
        patterns: String,
    },
    /// A field of the request is malformed.
    #[error("{field}: {message}")]
    InvalidArgument {
        /// Of the request message.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The request id was used for a change with another content.
    #[error(
        "request_id {request_id:?} was already used for another change; give every change its own id"
    )]
    RequestIdReused {
        /// As given.
        request_id: String,
    },
    /// The key is not what the caller saw last.
    #[error(
        "key {key}: etag {given:?} is out of date, it is now {current:?} (count {count}); read the key and decide anew"
    )]
    EtagMismatch {
        /// Full name.
        key: String,
        /// By the caller.
        given: String,
        /// Of the key now.
        current: String,
        /// Of the key now.
        count: i32,
    },
    /// A rule about one key forbids the change.
    #[error("{message}")]
    KeyRefused {
        /// Full name.
        key: String,
        /// The rule.
        reason: KeyRefusal,
        /// Sentence and next step.
        message: String,
    },
    /// A gate stayed closed up to the deadline.
    #[error(
        "the guest was busy in all {attempts} attempts, last with {gate}; try again, or allow more time with a later deadline"
    )]
    Busy {
        /// What was in the way last.
        kind: ClosedGate,
        /// The same for people.
        gate: String,
        /// Made before the deadline.
        attempts: u32,
        /// Whether it was in the way of any change, whatever its keys.
        every_key: bool,
    },
    /// A vCPU did not stop.
    #[error("{message}")]
    NotStopped {
        /// Names the late vCPUs.
        message: String,
    },
    /// A site holds what neither the kernel nor the monitor would have put there.
    #[error("{message}; the key is quarantined: {way_out}")]
    ForeignBytes {
        /// Full name.
        key: String,
        /// Names key, site, and the expected and found bytes.
        message: String,
        /// What ends the quarantine.
        way_out: String,
    },
    /// Guest memory could not be written or read back. The message says whether the undo was complete.
    #[error("{message}")]
    WriteFault {
        /// Of the engine.
        message: String,
    },
    /// Without a line in the audit log nothing is changed.
    #[error(
        "the audit log {path} cannot be written ({error}), so nothing was changed; make room or repair it"
    )]
    AuditLogUnwritable {
        /// Of the log.
        path: String,
        /// Of the operating system.
        error: String,
    },
    /// No hold has that id.
    #[error("no hold has the id {id:?}: it is released, expired or void; list the holds")]
    HoldNotFound {
        /// As asked for.
        id: String,
    },
    /// The client is gone or its deadline has passed before anything was changed.
    #[error("the call was cancelled or its deadline passed before anything was changed")]
    Cancelled,
    /// Too many calls wait for their turn.
    #[error("{waiting} changes already wait for their turn on this guest; try again later")]
    QueueFull {
        /// Capacity of the queue.
        waiting: usize,
    },
    /// The first revision asked for is no longer kept.
    #[error(
        "revision {wanted} is no longer kept, the oldest is {oldest}; list the keys and watch from the list's revision + 1"
    )]
    Compacted {
        /// By the caller.
        wanted: u64,
        /// That is still kept.
        oldest: u64,
    },
    /// The first revision asked for is far ahead.
    #[error("revision {wanted} has not happened yet, the next one is {next}; watch from there")]
    RevisionInFuture {
        /// By the caller.
        wanted: u64,
        /// That will be told.
        next: u64,
    },
    /// The watcher reads too slowly.
    #[error(
        "the watch fell behind: revision {missed} is no longer kept; list the keys and watch anew, reading faster"
    )]
    WatchTooSlow {
        /// First revision that was not sent.
        missed: u64,
    },
    /// No plan has that id.
    #[error(
        "no plan is named {plan_id:?}: it expired, was discarded, died with its registration, or another incarnation made it; prepare the change again"
    )]
    PlanNotFound {
        /// As asked for, cut short if it is longer than any id.
        plan_id: String,
    },
    /// Another principal prepared the plan.
    #[error(
        "plan {plan_id} was prepared by another principal, who alone may commit or discard it; prepare the change yourself"
    )]
    PlanNotOwned {
        /// Of the plan.
        plan_id: String,
    },
    /// The plan is not what a plan of the same change would be now, or not what the caller reviewed.
    #[error("plan {plan_id} is out of date: {why}; prepare the change again")]
    PlanStale {
        /// Of the plan.
        plan_id: String,
        /// What differs.
        why: String,
    },
    /// Too many plans, or too large ones, are kept.
    #[error(
        "{plans} plans with {} KiB are kept and this one takes {} KiB, of {} plans and {} MiB at most; commit or discard some, or prepare fewer keys",
        .bytes >> 10, .needed >> 10, .max_plans, .max_bytes >> 20
    )]
    TooManyPlans {
        /// Kept, without this one.
        plans: usize,
        /// That they take.
        bytes: usize,
        /// That this one takes.
        needed: usize,
        /// Limit.
        max_plans: usize,
        /// Limit.
        max_bytes: usize,
    },
    /// The monitor itself has failed. Whether the change was made is not known.
    #[error("{message}")]
    Internal {
        /// What failed, and the next step.
        message: String,
    },
    /// The caller's revision was given out by another process.
    #[error(
        "the revision belongs to incarnation {given:?}, and this guest is served by incarnation {current}; list the keys again"
    )]
    IncarnationChanged {
        /// By the caller, cut short.
        given: String,
        /// Of this process.
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
    /// The guest was asked to shut itself down, and runs on.
    #[error(
        "the guest has not powered off within {waited:?}: {}; it runs on, allow more time or cut its power",
        match seen {
            true => "its kernel has seen the power button, and its user space (systemd-logind, acpid) has not finished or does not act on it",
            false => "its kernel does not listen to the power button (no ACPI, or no CONFIG_ACPI_BUTTON)",
        }
    )]
    NotPoweredOff {
        /// For the guest.
        waited: Duration,
        /// Whether the guest's kernel noticed that it was asked.
        seen: bool,
    },
}

/// The rules about one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRefusal {
    /// The kernel would WARN about the op at this count.
    WouldWarn,
    /// The key lies in `ro_after_init` data.
    Sealed,
    /// The key needs permission at the monitor's start and in the call.
    Guarded,
    /// The key is quarantined.
    Quarantined,
    /// The tracepoint cannot be fired or parked by its key.
    Tracepoint,
    /// The caller holds no reference that the op could drop.
    NotHolder,
    /// The monitor cannot say where the vCPUs stopped.
    VcpusUnknown,
    /// The registered tables contradict each other.
    TableRefused,
    /// A module that has the key, or uses it, is not registered.
    ModuleRefused,
}

impl KeyRefusal {
    /// The name of the reason, as in `patchbay.v1.ErrorReason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WouldWarn => "WOULD_WARN",
            Self::Sealed => "KEY_SEALED",
            Self::Guarded => "KEY_GUARDED",
            Self::Quarantined => "KEY_QUARANTINED",
            Self::Tracepoint => "TRACEPOINT_REFUSED",
            Self::NotHolder => "NOT_HOLDER",
            Self::VcpusUnknown => "VCPUS_UNKNOWN",
            Self::TableRefused => "TABLE_REFUSED",
            Self::ModuleRefused => "MODULE_REFUSED",
        }
    }
}

impl KeysError {
    /// Whether trying again at once may help, and after how long.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { .. } => Some(Duration::from_millis(10)),
            Self::QueueFull { .. } => Some(Duration::from_millis(100)),
            _ => None,
        }
    }

    /// Whether the same change of other keys would have failed as well.
    pub fn is_of_every_key(&self) -> bool {
        match self {
            Self::Busy { every_key, .. } => *every_key,
            Self::KeyNotFound { .. }
            | Self::NothingSelected { .. }
            | Self::HoldNotFound { .. }
            | Self::InvalidArgument { .. }
            | Self::RequestIdReused { .. }
            | Self::EtagMismatch { .. }
            | Self::KeyRefused { .. }
            | Self::ForeignBytes { .. }
            | Self::WriteFault { .. }
            | Self::PlanNotFound { .. }
            | Self::PlanNotOwned { .. }
            | Self::PlanStale { .. }
            | Self::TooManyPlans { .. } => false,
            Self::NotRegistered { .. }
            | Self::NotStopped { .. }
            | Self::AuditLogUnwritable { .. }
            | Self::Cancelled
            | Self::QueueFull { .. }
            | Self::Compacted { .. }
            | Self::RevisionInFuture { .. }
            | Self::WatchTooSlow { .. }
            | Self::IncarnationChanged { .. }
            | Self::Internal { .. }
            | Self::GuestPaused
            | Self::NotPoweredOff { .. }
            | Self::GuestStopped => true,
        }
    }

    /// Machine-readable reason of `google.rpc.ErrorInfo`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotRegistered { .. } => "GUEST_NOT_REGISTERED",
            Self::KeyNotFound { .. } | Self::NothingSelected { .. } => "KEY_NOT_FOUND",
            Self::HoldNotFound { .. } => "HOLD_NOT_FOUND",
            Self::InvalidArgument { .. } => "INVALID_ARGUMENT",
            Self::RequestIdReused { .. } => "REQUEST_ID_REUSED",
            Self::EtagMismatch { .. } => "ETAG_MISMATCH",
            Self::KeyRefused { reason, .. } => reason.as_str(),
            Self::Busy { .. } => "GUEST_BUSY",
            Self::NotStopped { .. } => "VCPU_NOT_STOPPED",
            Self::ForeignBytes { .. } => "FOREIGN_BYTES",
            Self::WriteFault { .. } => "WRITE_FAULT",
            Self::AuditLogUnwritable { .. } => "AUDIT_LOG_UNWRITABLE",
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
        }
    }
}

fn near_names(near: &[String]) -> String {
    match near {
        [] => "; list the keys to see which there are".to_owned(),
        names => format!("; near it are {}", names.join(", ")),
    }
}

impl From<PatternError> for KeysError {
    fn from(error: PatternError) -> Self {
        Self::InvalidArgument {
            field: "patterns",
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
