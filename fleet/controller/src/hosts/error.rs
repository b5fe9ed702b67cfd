// SPDX-License-Identifier: Apache-2.0
//! Tells the errors of a guest's service by their consequence for a change.

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::rollout::Failure;

/// An error of a guest's service, and its consequence for a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    pub failure: Failure,
    /// True if the host does not accept the controller's certificate or its assertion.
    pub is_identity_refused: bool,
    /// True if the host does not have the guest, or does not answer.
    pub may_have_moved: bool,
    /// True if the guest has booted since the boot that the call names.
    pub has_booted: bool,
    /// The generation that the guest has seen, if the call's is lower.
    pub seen: Option<u64>,
    pub why: String,
}

impl CallError {
    pub fn new(status: &Status) -> Self {
        let info = status.get_details_error_info();
        let info = info.filter(|info| info.domain == patchbay_proto::ERROR_DOMAIN);
        let Some(info) = info else {
            return Self {
                failure: Failure::Unknown,
                is_identity_refused: false,
                may_have_moved: true,
                has_booted: false,
                seen: None,
                why: match patchbay_access::connect::explain(status) {
                    Some(words) => format!("{:?}: {words}", status.code()),
                    None => format!("{:?}: {}", status.code(), innermost(status)),
                },
            };
        };
        let failure = match info.reason.as_str() {
            "GUEST_BUSY"
            | "QUEUE_FULL"
            | "VCPU_NOT_STOPPED"
            | "TOO_MANY_CALLS"
            | "TOO_MANY_CONNECTIONS" => Failure::Busy,
            // The call is repeated with the certificate that is present at that time.
            "CERTIFICATE_REFUSED" | "PRINCIPAL_NOT_TRUSTED" => Failure::Unknown,
            // The guest may be on its way to another host, or its daemon is just starting.
            "GUEST_NOT_FOUND" => Failure::Unknown,
            "LEDGER_LOST" => Failure::NoRecord,
            "INTERNAL" | "CANCELLED" | "ENDPOINT_ENDING" | "WRITE_FAULT" => Failure::Unknown,
            _ if status.code() == Code::Unavailable => Failure::Unknown,
            _ => Failure::Refused,
        };
        Self {
            failure,
            is_identity_refused: matches!(
                info.reason.as_str(),
                "CERTIFICATE_REFUSED" | "PRINCIPAL_NOT_TRUSTED"
            ),
            may_have_moved: info.reason == "GUEST_NOT_FOUND",
            has_booted: info.reason == "BOOT_CHANGED",
            seen: (info.reason == "GENERATION_STALE")
                .then(|| info.metadata.get("generation")?.parse().ok())
                .flatten(),
            why: format!("{}: {}", info.reason, status.message()),
        }
    }
}

/// Returns the innermost cause of an error, because "transport error" alone is not informative.
fn innermost(status: &Status) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}
