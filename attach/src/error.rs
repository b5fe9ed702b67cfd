// SPDX-License-Identifier: Apache-2.0
//! Why a guest cannot be attached to.

use crate::qmp::QmpError;

/// Why there is no attachment. The guest is as it was.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The monitor did not answer, or not as it should.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// The guest is of a kind that cannot be patched from outside.
    #[error("{0}")]
    Refused(String),
    /// Something of the monitor's process cannot be used.
    #[error("{what}: {error}; {next}")]
    Process {
        /// What cannot be done.
        what: String,
        /// The operating system's words.
        error: String,
        /// What to do.
        next: String,
    },
}

impl AttachError {
    /// An error about the monitor's process that rights would remove.
    pub(crate) fn process(what: impl Into<String>, error: impl std::fmt::Display) -> Self {
        Self::Process {
            what: what.into(),
            error: error.to_string(),
            next: "run as the monitor's user or with CAP_SYS_PTRACE, where kernel.yama.ptrace_scope allows it".to_owned(),
        }
    }
}
