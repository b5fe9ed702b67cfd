// SPDX-License-Identifier: Apache-2.0
//! Errors as gRPC statuses with `google.rpc` details (AIP-193).

use std::collections::HashMap;

use patchbay_proto::ERROR_DOMAIN;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::convert;
use crate::keys::{ClaimRefusal, KeysError};
use crate::trace::{AgentError, TraceError};

/// Machine-readable facts of an error.
pub type Metadata = HashMap<String, String>;

/// Creates a status. All statuses are created here. `reason` is a name in
/// `patchbay.v1.ErrorReason`.
pub fn status(
    code: Code,
    reason: &str,
    message: impl Into<String>,
    metadata: Metadata,
    mut details: ErrorDetails,
) -> Status {
    details.set_error_info(reason, ERROR_DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}

/// Maximum length in characters of the policy's reason in the metadata of an error.
const MAX_WHY: usize = 1024;

impl From<KeysError> for Status {
    fn from(error: KeysError) -> Self {
        let mut details = ErrorDetails::new();
        let mut metadata = Metadata::new();
        match &error {
            KeysError::NotRegistered { why } => {
                details.add_precondition_failure_violation("REGISTRATION", "guest", why);
            }
            KeysError::KeyNotFound { name, near } => {
                details.set_resource_info("StaticKey", name, "", "no such key");
                metadata.insert("near".to_owned(), near.join(","));
            }
            KeysError::NothingSelected { patterns } => {
                details.set_resource_info("StaticKey", patterns, "", "no such key");
            }
            KeysError::NoDebugSite { queries } => {
                details.set_resource_info("DebugSite", queries, "", "no such line");
            }
            KeysError::NotPermitted { why, .. } => {
                metadata.insert("why".to_owned(), why.chars().take(MAX_WHY).collect());
            }
            KeysError::HoldNotFound { id } => {
                details.set_resource_info("Hold", id, "", "no such hold");
            }
            KeysError::InvalidArgument { field, message } => {
                details.add_bad_request_violation(*field, message);
            }
            KeysError::RequestIdReused { .. } | KeysError::RequestMadeInPart { .. } => {
                details.add_bad_request_violation("request_id", error.to_string());
            }
            KeysError::EtagMismatch { key, current, .. } => {
                details.add_precondition_failure_violation("ETAG", key, error.to_string());
                metadata.insert("etag".to_owned(), current.clone());
            }
            KeysError::KeyRefused {
                key,
                reason,
                message,
            } => {
                let subject = key.to_string();
                details.add_precondition_failure_violation(reason.as_str(), subject, message);
            }
            KeysError::Busy {
                kind,
                gate: message,
                attempts,
                ..
            } => {
                let gate = convert::gate(*kind).as_str_name();
                let gate = gate.strip_prefix("GATE_").unwrap_or(gate);
                details.add_precondition_failure_violation("GATE", gate, error.to_string());
                metadata.insert("gate".to_owned(), gate.to_owned());
                metadata.insert("gate_message".to_owned(), message.clone());
                metadata.insert("attempts".to_owned(), attempts.to_string());
            }
            KeysError::ForeignBytes { key, .. } => {
                details.set_resource_info("StaticKey", key, "", error.to_string());
            }
            KeysError::Compacted { oldest, .. } => {
                metadata.insert("oldest_revision".to_owned(), oldest.to_string());
            }
            KeysError::RevisionInFuture { next, .. } => {
                metadata.insert("next_revision".to_owned(), next.to_string());
            }
            KeysError::PlanNotFound { plan_id } => {
                details.set_resource_info("Plan", plan_id, "", "no such plan");
            }
            KeysError::PlanNotOwned { plan_id } => {
                details.set_resource_info("Plan", plan_id, "", "another principal's plan");
            }
            KeysError::ClaimsRefused {
                generation: Some(generation),
                ..
            } => {
                metadata.insert("generation".to_owned(), generation.to_string());
            }
            KeysError::PlanStale { plan_id, why } => {
                details.add_precondition_failure_violation("PLAN", plan_id, why);
            }
            KeysError::NotStopped { .. }
            | KeysError::VcpusUnknown
            | KeysError::TooManyPlans { .. }
            | KeysError::WriteFault { .. }
            | KeysError::AuditLogUnwritable { .. }
            | KeysError::Cancelled
            | KeysError::QueueFull { .. }
            | KeysError::WatchTooSlow { .. }
            | KeysError::IncarnationChanged { .. }
            | KeysError::GuestStopped
            | KeysError::GuestPaused
            | KeysError::ClaimsRefused { .. }
            | KeysError::Internal { .. }
            | KeysError::NotSaved { .. }
            | KeysError::NotPoweredOff { .. } => {}
        }
        if let Some(delay) = error.retry_after() {
            details.set_retry_info(Some(delay));
        }
        status(
            code(&error),
            error.reason(),
            error.to_string(),
            metadata,
            details,
        )
    }
}

fn code(error: &KeysError) -> Code {
    match error {
        KeysError::ClaimsRefused {
            reason: ClaimRefusal::TooMany,
            ..
        } => Code::ResourceExhausted,
        KeysError::NotRegistered { .. }
        | KeysError::ClaimsRefused { .. }
        | KeysError::KeyRefused { .. }
        | KeysError::VcpusUnknown
        | KeysError::GuestStopped
        | KeysError::GuestPaused
        | KeysError::PlanStale { .. }
        | KeysError::NotSaved { .. }
        | KeysError::AuditLogUnwritable { .. } => Code::FailedPrecondition,
        KeysError::KeyNotFound { .. }
        | KeysError::NothingSelected { .. }
        | KeysError::NoDebugSite { .. }
        | KeysError::HoldNotFound { .. }
        | KeysError::PlanNotFound { .. } => Code::NotFound,
        KeysError::PlanNotOwned { .. } | KeysError::NotPermitted { .. } => Code::PermissionDenied,
        KeysError::InvalidArgument { .. }
        | KeysError::RequestIdReused { .. }
        | KeysError::RequestMadeInPart { .. } => Code::InvalidArgument,
        // Client libraries retry UNAVAILABLE. That is right for a gate, which opens again, and
        // wrong for a guest that has ended.
        KeysError::Busy { .. } => Code::Unavailable,
        KeysError::EtagMismatch { .. } => Code::Aborted,
        KeysError::NotStopped { .. } | KeysError::NotPoweredOff { .. } => Code::DeadlineExceeded,
        KeysError::ForeignBytes { .. } | KeysError::WriteFault { .. } => Code::DataLoss,
        KeysError::Cancelled => Code::Cancelled,
        KeysError::QueueFull { .. }
        | KeysError::WatchTooSlow { .. }
        | KeysError::TooManyPlans { .. } => Code::ResourceExhausted,
        KeysError::Compacted { .. }
        | KeysError::RevisionInFuture { .. }
        | KeysError::IncarnationChanged { .. } => Code::OutOfRange,
        KeysError::Internal { .. } => Code::Internal,
    }
}

impl From<TraceError> for Status {
    fn from(error: TraceError) -> Self {
        let reason = error.reason();
        let mut details = ErrorDetails::new();
        match &error {
            TraceError::Keys(error) => return error.clone().into(),
            TraceError::Refused { name, why } => {
                details.add_precondition_failure_violation(reason, name, why);
            }
            TraceError::OthersTrace { events } => {
                for event in events {
                    details.add_precondition_failure_violation(reason, event, "traced by others");
                }
            }
            TraceError::Rejected { what, message, .. } => {
                details.add_bad_request_violation(*what, message);
            }
            TraceError::Invalid { field, message } => {
                details.add_bad_request_violation(*field, message);
            }
            _ => {}
        }
        let code = trace_code(&error);
        status(code, reason, error.to_string(), Metadata::new(), details)
    }
}

fn trace_code(error: &TraceError) -> Code {
    match error {
        TraceError::Keys(error) => code(error),
        TraceError::Agent(AgentError::Absent { .. } | AgentError::Silent { .. })
        | TraceError::Busy { .. } => Code::Unavailable,
        TraceError::Agent(AgentError::Confused) | TraceError::ArmFailed { .. } => Code::Internal,
        TraceError::EventNotFound { .. }
        | TraceError::EventVanished { .. }
        | TraceError::InstanceNotFound(_) => Code::NotFound,
        TraceError::Agent(AgentError::Refused(_))
        | TraceError::Refused { .. }
        | TraceError::NotArmed { .. }
        | TraceError::OthersTrace { .. }
        | TraceError::FilterConflict { .. } => Code::FailedPrecondition,
        TraceError::Rejected { .. } | TraceError::Invalid { .. } => Code::InvalidArgument,
        TraceError::TooMuchArmed { .. }
        | TraceError::TooManyStreams { .. }
        | TraceError::TooManyStreamsOfOne { .. } => Code::ResourceExhausted,
    }
}

/// Returns the status for a client that has opened too many calls or connections.
pub fn exhausted(reason: &'static str, message: String) -> Status {
    let code = Code::ResourceExhausted;
    status(code, reason, message, Metadata::new(), ErrorDetails::new())
}

/// Returns the last status of a stream whose guest is removed.
pub fn ends() -> Status {
    status(
        Code::Unavailable,
        "ENDPOINT_ENDING",
        "the guest is served here no longer: the monitor ends, or the endpoint gave the guest up",
        Metadata::new(),
        ErrorDetails::new(),
    )
}

#[cfg(test)]
mod tests;
