// SPDX-License-Identifier: Apache-2.0
//! How the command fails: one sentence with the next step, and an exit code.

use std::path::Path;

use tonic::{Code, Status};
use tonic_types::StatusExt;

/// Anything else.
pub const ERROR: u8 = 1;
/// The command line or a file given with it.
pub const USAGE: u8 = 2;
/// Some of what was asked is done.
pub const PARTLY: u8 = 3;
/// A gate of the guest stayed closed.
pub const GATE: u8 = 5;
/// As timeout(1).
pub const TIMEOUT: u8 = 124;

/// The sentence and the exit code.
#[derive(Debug)]
pub struct Failure {
    /// Without a full stop at its end.
    pub message: String,
    /// Of the process.
    pub exit_code: u8,
}

impl Failure {
    /// With exit code 1.
    pub fn error(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code: ERROR,
        }
    }

    /// With exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code: USAGE,
        }
    }

    /// The monitor behind `socket` cannot be reached.
    pub fn unreachable(socket: &Path, error: &dyn std::error::Error) -> Self {
        let mut cause = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Self::error(format!(
            "no monitor answers on {} ({cause}); start one with `patchbay run`, or see `patchbay guests`",
            socket.display()
        ))
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let reason = status
            .get_details_error_info()
            .map(|info| info.reason)
            .unwrap_or_default();
        let timed_out = status.code() == Code::DeadlineExceeded
            || status.code() == Code::Cancelled
                && (reason == "CANCELLED" || status.message() == "Timeout expired");
        let exit_code = match reason.as_str() {
            "GUEST_BUSY" => GATE,
            _ if timed_out => TIMEOUT,
            _ => ERROR,
        };
        let hint = match reason.as_str() {
            "KEY_GUARDED" => " (--allow-guarded)",
            "NOT_HOLDER" => " (--force)",
            "OTHERS_TRACE" => " (--even-if-others)",
            "GUEST_BUSY" => " (--timeout)",
            "VCPU_NOT_STOPPED" => " (--stop-timeout)",
            "NOT_POWERED_OFF" => " (--timeout, --cut)",
            "GUEST_PAUSED" => " (patchbay guest resume, or shutdown --force)",
            _ if timed_out && reason.is_empty() => {
                "; see `patchbay keys list` for what is, and allow more --timeout"
            }
            _ => "",
        };
        let message = match status.code() {
            Code::Unavailable if reason.is_empty() => {
                format!(
                    "the monitor is gone: {}; see `patchbay guests`",
                    status.message()
                )
            }
            Code::Unimplemented => {
                "the monitor does not know this call: it is of another version; update it"
                    .to_owned()
            }
            _ => format!("{}{hint}", status.message()),
        };
        Self { message, exit_code }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::error(format!("input or output failed: {error}"))
    }
}
