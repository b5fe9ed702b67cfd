// SPDX-License-Identifier: Apache-2.0
//! Creates the errors of the host itself, with `google.rpc` details like those of the monitors
//! (AIP-193).

use std::collections::HashMap;

use patchbay_proto::ERROR_DOMAIN;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use patchbay_access::listen::admission::Refusal;

const MAX_LISTED: usize = 10;

/// Creates a status. `reason` is a name of `patchbay.v1.ErrorReason`, without the prefix.
pub fn status(code: Code, reason: &str, message: impl Into<String>) -> Status {
    with(code, reason, message, HashMap::new(), ErrorDetails::new())
}

fn with(
    code: Code,
    reason: &str,
    message: impl Into<String>,
    metadata: HashMap<String, String>,
    mut details: ErrorDetails,
) -> Status {
    details.set_error_info(reason, ERROR_DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}

/// Reports that a field of the request is malformed.
pub fn invalid(field: &str, message: &str) -> Status {
    let mut details = ErrorDetails::new();
    details.add_bad_request_violation(field, message);
    let code = Code::InvalidArgument;
    with(code, "INVALID_ARGUMENT", message, HashMap::new(), details)
}

/// Reports that a limit of the host is exceeded. `reason` identifies the limit.
pub fn exhausted(reason: &str, message: &str) -> Status {
    status(Code::ResourceExhausted, reason, message)
}

/// Reports that the policy does not allow the call; `why` is the policy's sentence.
pub fn denied(principal: &str, method: &str, guest: &str, why: &str) -> Status {
    let on = if guest.is_empty() {
        String::new()
    } else {
        format!(" on guest {guest:?}")
    };
    let message = format!(
        "{principal} may not call {method}{on}: {why}; ask whoever keeps this host's policy"
    );
    let metadata = HashMap::from([
        ("method".to_owned(), method.to_owned()),
        ("why".to_owned(), why.chars().take(1024).collect()),
    ]);
    let code = Code::PermissionDenied;
    with(code, "ROLE_MISSING", message, metadata, ErrorDetails::new())
}

/// Reports that the caller's assertion about the person is not accepted.
pub fn not_believed(principal: &str, why: &str) -> Status {
    let message = format!("the assertion by {principal} of the person for whom it calls {why}");
    status(Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED", message)
}

/// Reports that the caller's certificate is no longer accepted.
pub fn certificate_refused(principal: &str, refusal: Refusal) -> Status {
    let message = format!("{principal}: {refusal}");
    status(Code::Unauthenticated, "CERTIFICATE_REFUSED", message)
}

/// Reports that the stream must end, but that its client may open it again.
pub fn stream_expired(why: &str) -> Status {
    let message = format!("{why}; open the stream again");
    status(Code::Unavailable, "STREAM_EXPIRED", message)
}

/// Reports that there is no guest of that name. `known` are the guests that the caller may see.
pub fn guest_not_found(name: &str, known: &[String]) -> Status {
    let message = match name {
        "" => "this host has no guest; start one, then call again".to_owned(),
        name => format!("no guest {name:?} is on this host; {}", listed(known)),
    };
    let mut details = ErrorDetails::new();
    details.set_resource_info("Guest", name, "", "no such guest");
    let code = Code::NotFound;
    with(code, "GUEST_NOT_FOUND", message, HashMap::new(), details)
}

/// Reports that the request names no guest.
pub fn guest_not_named(known: &[String]) -> Status {
    let message = format!(
        "the request names no guest, and this host has several; {}",
        listed(known)
    );
    let mut details = ErrorDetails::new();
    details.add_bad_request_violation("guest", message.as_str());
    let code = Code::InvalidArgument;
    with(code, "GUEST_NOT_NAMED", message, HashMap::new(), details)
}

/// Reports that the call did not reach the monitor.
pub fn unreachable(guest: &str, error: &str) -> Status {
    let message = format!(
        "the monitor of guest {guest:?} cannot be reached: {error}; nothing was changed; see its log"
    );
    status(Code::Unavailable, "MONITOR_UNREACHABLE", message)
}

/// Reports that the connection to the monitor ended during the call.
pub fn lost(guest: &str, error: &str) -> Status {
    let message = format!(
        "the connection to the monitor of guest {guest:?} was lost during the call: {error}; \
         whether it was done is in the monitor's audit log"
    );
    status(Code::Unknown, "MONITOR_LOST", message)
}

/// Reports that the audit log cannot be written, so that no change is made.
pub fn audit_log_unwritable(error: &str) -> Status {
    let message = format!(
        "nothing is changed, and no log or event is read, without a line in this host's audit log: {error}"
    );
    status(Code::FailedPrecondition, "AUDIT_LOG_UNWRITABLE", message)
}

fn listed(known: &[String]) -> String {
    match known.split_at_checked(MAX_LISTED) {
        _ if known.is_empty() => "there is none that you may see".to_owned(),
        Some((shown, more)) if !more.is_empty() => {
            format!("give one of {} and {} more", shown.join(", "), more.len())
        }
        _ => format!("give one of {}", known.join(", ")),
    }
}

/// Returns the name of a gRPC status code as the specification writes it.
#[must_use]
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
