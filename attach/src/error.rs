// SPDX-License-Identifier: Apache-2.0
//! Reports why a guest cannot be attached to.

use crate::qmp::error::QmpError;

/// An attachment failed. The guest is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The monitor did not answer, or its answer is invalid.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// The guest is of a kind that cannot be patched from outside.
    #[error("{0}")]
    Refused(String),
    /// A resource of the monitor's process cannot be used.
    #[error("{what}: {error}; {next}")]
    Process {
        /// The operation that failed.
        what: String,
        /// The operating system's error message.
        error: String,
        /// The next step for the user.
        next: String,
    },
}

impl AttachError {
    /// Creates an error about the monitor's process whose next step is to get more rights.
    pub(crate) fn process(what: impl Into<String>, error: impl std::fmt::Display) -> Self {
        Self::Process {
            what: what.into(),
            error: error.to_string(),
            next: "run as the monitor's user or with CAP_SYS_PTRACE, where kernel.yama.ptrace_scope allows it".to_owned(),
        }
    }
}
