// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a call on tracepoints.

use std::time::Duration;

use crate::keys::KeysError;

/// Why the agent did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// None is connected.
    #[error("no agent is connected{why}; start patchbay-agent in the guest")]
    Absent {
        /// What is known of it; empty, or begins with ": ".
        why: String,
    },
    /// It is connected and does not answer.
    #[error(
        "the agent in the guest has not answered for {waited:?}; fire and park work without it"
    )]
    Silent {
        /// For the answer.
        waited: Duration,
    },
    /// It said so itself.
    #[error("the agent in the guest could not do it: {0}")]
    Refused(String),
    /// Not what was asked.
    #[error(
        "the agent in the guest answered something else than was asked; is it of this version?"
    )]
    Confused,
}

/// A call on tracepoints that was refused or failed. Each message is one sentence and the next step.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TraceError {
    /// Of the keys.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Of the agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// Nothing has that name.
    #[error("no event matches {patterns:?}; see `patchbay trace events`")]
    EventNotFound {
        /// As given.
        patterns: Vec<String>,
    },
    /// It was there when it was looked up.
    #[error("event {name} is gone: {message}")]
    EventVanished {
        /// "system:name".
        name: String,
        /// Of the agent.
        message: String,
    },
    /// A rule of tracepoints.
    #[error("event {name} cannot be fired and parked: {why}")]
    Refused {
        /// "system:name".
        name: String,
        /// Sentence without its subject.
        why: String,
    },
    /// Fire and park are for armed events.
    #[error(
        "no armed event matches {patterns:?}, so no probe is attached that could fire; arm it first"
    )]
    NotArmed {
        /// As given.
        patterns: Vec<String>,
    },
    /// They would be silenced.
    #[error(
        "others in the guest trace {}, and parking would silence them; ask for it with even_if_others",
        list(.events)
    )]
    OthersTrace {
        /// "system:name (who)".
        events: Vec<String>,
    },
    /// By the guest's kernel.
    #[error("the guest's kernel rejects the {what} of {name}: {message}")]
    Rejected {
        /// "filter" or "trigger".
        what: &'static str,
        /// "system:name".
        name: String,
        /// Of the kernel.
        message: String,
    },
    /// The filter of an event is one.
    #[error(
        "event {name} is armed with the filter {filter:?} by {owners}; leave the filter out, or have it disarmed"
    )]
    FilterConflict {
        /// "system:name".
        name: String,
        /// That is set.
        filter: String,
        /// Who armed it.
        owners: String,
    },
    /// Of the agent's answer.
    #[error("event {name} could not be armed: {message}")]
    ArmFailed {
        /// "system:name".
        name: String,
        /// Sentence.
        message: String,
    },
    /// By another client, whom the agent has not answered yet.
    #[error(
        "event {name} is being armed or disarmed for another client, for {waited:?} by now; try again, or see `patchbay trace agent`"
    )]
    Busy {
        /// "system:name".
        name: String,
        /// For its end.
        waited: Duration,
    },
    /// Of memory.
    #[error(
        "the formats of the armed events would take {bytes} bytes, and {max} is the maximum; arm fewer events"
    )]
    TooMuchArmed {
        /// With what was to be armed.
        bytes: usize,
        /// Maximum.
        max: usize,
    },
    /// Of streams.
    #[error("{max} streams are open already; end one of them")]
    TooManyStreams {
        /// Maximum.
        max: usize,
    },
    /// A field of the request is malformed.
    #[error("{field}: {message}")]
    Invalid {
        /// Of the request message.
        field: &'static str,
        /// What is wrong with it.
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
    /// Machine-readable reason of `google.rpc.ErrorInfo`.
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
            Self::TooManyStreams { .. } => "TOO_MANY_STREAMS",
            Self::Invalid { .. } => "INVALID_ARGUMENT",
        }
    }
}
