// SPDX-License-Identifier: Apache-2.0
//! Errors of calls on tracepoints.

use std::time::Duration;

use crate::keys::KeysError;

/// The reason why a request to the agent failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// No agent is connected.
    #[error("no agent is connected{why}; start patchbay-agent in the guest")]
    Absent {
        /// The known reason for its absence; empty, or begins with ": ".
        why: String,
    },
    /// The agent is connected and does not answer.
    #[error(
        "the agent in the guest has not answered for {waited:?}; fire and park work without it"
    )]
    Silent {
        /// Time allowed for the answer.
        waited: Duration,
    },
    /// The agent refused.
    #[error("the agent in the guest could not do it: {0}")]
    Refused(String),
    /// The answer does not belong to the request.
    #[error(
        "the agent in the guest answered something else than was asked; is it of this version?"
    )]
    Confused,
}

/// A call on tracepoints that was refused or failed. Each message says what failed and what to do
/// next.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TraceError {
    /// An error of the keys.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// An error of the agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// No event matches.
    #[error("no event matches {}; see `patchbay trace events`", list(.patterns))]
    EventNotFound {
        /// Patterns from the request that match no event.
        patterns: Vec<String>,
    },
    /// The event disappeared after it was looked up.
    #[error("event {name} is gone: {message}")]
    EventVanished {
        /// "system:name".
        name: String,
        /// Message of the agent.
        message: String,
    },
    /// The event cannot be used as requested.
    #[error("event {name} cannot be fired and parked: {why}")]
    Refused {
        /// "system:name".
        name: String,
        /// The reason, as the rest of a sentence.
        why: String,
    },
    /// Only armed events can be fired or parked.
    #[error(
        "no armed event matches {}; see `patchbay trace events --armed`",
        list(.patterns)
    )]
    NotArmed {
        /// Patterns from the request that match no armed event.
        patterns: Vec<String>,
    },
    /// Other users of the events would be silenced.
    #[error(
        "others in the guest trace {}, and parking would silence them; ask for it with even_if_others",
        list(.events)
    )]
    OthersTrace {
        /// "system:name (user)".
        events: Vec<String>,
    },
    /// The guest's kernel rejects a filter or trigger.
    #[error("the guest's kernel rejects the {what} of {name}: {message}")]
    Rejected {
        /// "filter" or "trigger".
        what: &'static str,
        /// "system:name".
        name: String,
        /// Message of the kernel.
        message: String,
    },
    /// An event has one filter for all its clients.
    #[error(
        "event {name} is armed with the filter {filter:?} by {owners}; leave the filter out, or have it disarmed"
    )]
    FilterConflict {
        /// "system:name".
        name: String,
        /// The filter that is set.
        filter: String,
        /// The clients that armed the event.
        owners: String,
    },
    /// The agent's answer about an event is unusable.
    #[error("event {name} could not be armed: {message}")]
    ArmFailed {
        /// "system:name".
        name: String,
        /// The reason.
        message: String,
    },
    /// Another client is arming or disarming the event, and the agent has not answered.
    #[error(
        "event {name} is being armed or disarmed for another client, and has been for {waited:?}; try again, or see `patchbay trace agent`"
    )]
    Busy {
        /// "system:name".
        name: String,
        /// Time that the call waited.
        waited: Duration,
    },
    /// The formats of all armed events would take too much memory.
    #[error(
        "the formats of the armed events would take {bytes} bytes, and {max} is the maximum; arm fewer events"
    )]
    TooMuchArmed {
        /// Bytes, including the events of the request.
        bytes: usize,
        /// Maximum.
        max: usize,
    },
    /// Too many streams are open.
    #[error("{max} streams are open already; end one of them")]
    TooManyStreams {
        /// Maximum.
        max: usize,
    },
    /// The principal has too many open streams.
    #[error("{principal} has {max} streams of this guest open already; end one of them")]
    TooManyStreamsOfOne {
        /// The principal that opened the streams.
        principal: String,
        /// Maximum.
        max: usize,
    },
    /// The guest has no such tracefs instance, or no longer.
    #[error("{0}")]
    InstanceNotFound(String),
    /// A field of the request is malformed.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// The problem with the field.
        message: String,
    },
}

fn list(events: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = events[..events.len().min(SHOWN)].join(", ");
    if let Some(more) = events.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

impl TraceError {
    /// Returns the machine-readable reason of `google.rpc.ErrorInfo`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Keys(error) => error.reason(),
            Self::Agent(AgentError::Absent { .. }) => "NO_AGENT",
            Self::Agent(AgentError::Silent { .. }) => "AGENT_SILENT",
            Self::Agent(AgentError::Refused(_) | AgentError::Confused) => "AGENT_FAILED",
            Self::EventNotFound { .. } | Self::EventVanished { .. } => "EVENT_NOT_FOUND",
            Self::Refused { .. } => "TRACEPOINT_REFUSED",
            Self::NotArmed { .. } => "NOT_ARMED",
            Self::OthersTrace { .. } => "OTHERS_TRACE",
            Self::Rejected { what: "filter", .. } => "FILTER_REJECTED",
            Self::Rejected { .. } => "TRIGGER_REJECTED",
            Self::FilterConflict { .. } => "FILTER_CONFLICT",
            Self::ArmFailed { .. } => "ARM_FAILED",
            Self::Busy { .. } => "EVENT_BUSY",
            Self::TooMuchArmed { .. } => "TOO_MUCH_ARMED",
            Self::TooManyStreams { .. } | Self::TooManyStreamsOfOne { .. } => "TOO_MANY_STREAMS",
            Self::InstanceNotFound(_) => "TRACE_INSTANCE_NOT_FOUND",
            Self::Invalid { .. } => "INVALID_ARGUMENT",
        }
    }
}
