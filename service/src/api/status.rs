// SPDX-License-Identifier: Apache-2.0
//! Errors as gRPC statuses with `google.rpc` details (AIP-193).

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::convert;
use crate::keys::KeysError;

impl From<KeysError> for Status {
    fn from(error: KeysError) -> Self {
        let mut details = ErrorDetails::new();
        let mut metadata = Vec::new();
        match &error {
            KeysError::NotRegistered { why } => {
                details.add_precondition_failure_violation("REGISTRATION", "guest", why);
            }
            KeysError::KeyNotFound { name, near } => {
                details.set_resource_info("StaticKey", name, "", "no such key");
                metadata.push(("near".to_owned(), near.join(",")));
            }
            KeysError::NothingSelected { patterns } => {
                details.set_resource_info("StaticKey", patterns, "", "no such key");
            }
            KeysError::HoldNotFound { id } => {
                details.set_resource_info("Hold", id, "", "no such hold");
            }
            KeysError::InvalidArgument { field, message } => {
                details.add_bad_request_violation(*field, message);
            }
            KeysError::RequestIdReused { .. } => {
                details.add_bad_request_violation("request_id", error.to_string());
            }
            KeysError::EtagMismatch { key, current, .. } => {
                details.add_precondition_failure_violation("ETAG", key, error.to_string());
                metadata.push(("etag".to_owned(), current.clone()));
            }
            KeysError::KeyRefused {
                key,
                reason,
                message,
            } => {
                details.add_precondition_failure_violation(reason.as_str(), key, message);
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
                metadata.push(("gate".to_owned(), gate.to_owned()));
                metadata.push(("gate_message".to_owned(), message.clone()));
                metadata.push(("attempts".to_owned(), attempts.to_string()));
            }
            KeysError::ForeignBytes { key, .. } => {
                details.set_resource_info("StaticKey", key, "", error.to_string());
            }
            KeysError::Compacted { oldest, .. } => {
                metadata.push(("oldest_revision".to_owned(), oldest.to_string()));
            }
            KeysError::RevisionInFuture { next, .. } => {
                metadata.push(("next_revision".to_owned(), next.to_string()));
            }
            KeysError::NotStopped { .. }
            | KeysError::WriteFault { .. }
            | KeysError::AuditLogUnwritable { .. }
            | KeysError::Cancelled
            | KeysError::QueueFull { .. }
            | KeysError::WatchTooSlow { .. }
            | KeysError::GuestStopped
            | KeysError::GuestPaused
            | KeysError::Internal { .. }
            | KeysError::NotPoweredOff { .. } => {}
        }
        if let Some(delay) = error.retry_after() {
            details.set_retry_info(Some(delay));
        }
        details.set_error_info(
            error.reason(),
            patchbay_proto::ERROR_DOMAIN,
            metadata
                .into_iter()
                .collect::<std::collections::HashMap<_, _>>(),
        );
        Status::with_error_details(code(&error), error.to_string(), details)
    }
}

fn code(error: &KeysError) -> Code {
    match error {
        KeysError::NotRegistered { .. }
        | KeysError::KeyRefused { .. }
        | KeysError::GuestStopped
        | KeysError::GuestPaused
        | KeysError::AuditLogUnwritable { .. } => Code::FailedPrecondition,
        KeysError::KeyNotFound { .. }
        | KeysError::NothingSelected { .. }
        | KeysError::HoldNotFound { .. } => Code::NotFound,
        KeysError::InvalidArgument { .. } | KeysError::RequestIdReused { .. } => {
            Code::InvalidArgument
        }
        // Client libraries repeat UNAVAILABLE by themselves: right for a gate, which opens again,
        // and wrong for a guest that has ended.
        KeysError::Busy { .. } => Code::Unavailable,
        KeysError::EtagMismatch { .. } => Code::Aborted,
        KeysError::NotStopped { .. } | KeysError::NotPoweredOff { .. } => Code::DeadlineExceeded,
        KeysError::ForeignBytes { .. } | KeysError::WriteFault { .. } => Code::DataLoss,
        KeysError::Cancelled => Code::Cancelled,
        KeysError::QueueFull { .. } | KeysError::WatchTooSlow { .. } => Code::ResourceExhausted,
        KeysError::Compacted { .. } | KeysError::RevisionInFuture { .. } => Code::OutOfRange,
        KeysError::Internal { .. } => Code::Internal,
    }
}
