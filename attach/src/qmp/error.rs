// SPDX-License-Identifier: Apache-2.0
//! The errors of QEMU's monitor.

use std::path::PathBuf;
use std::time::Duration;

/// The reason why a monitor did not carry out a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// No process listens, or the caller may not connect.
    #[error("QMP socket {}: {error}; give the path of a running QEMU's -qmp socket that you may open", path.display())]
    Connect {
        /// The path that was given.
        path: PathBuf,
        /// The operating system's error message.
        error: String,
    },
    /// The peer sends nothing, or its queue of connections is full.
    #[error(
        "QMP socket {}: no greeting within {patience:?}; QEMU serves one client of a socket at a time, and this one is in use or \
         QEMU hangs; give QEMU another -qmp socket", path.display()
    )]
    NoGreeting {
        /// The path that was given.
        path: PathBuf,
        /// The timeout.
        patience: Duration,
        /// The process that listens.
        owner: Option<u32>,
    },
    /// The peer is not a QEMU monitor.
    #[error("{} does not speak QMP ({found}); give the path of a QEMU's -qmp socket", path.display())]
    NotQmp {
        /// The path that was given.
        path: PathBuf,
        /// The text that came instead of a greeting.
        found: String,
    },
    /// The connection has ended.
    #[error("the QMP connection has ended: {0}; attach again if the guest still runs")]
    Closed(String),
    /// No answer came in time. QEMU may still carry the command out later.
    #[error("QEMU did not answer {command} within {patience:?}; see whether it hangs")]
    TimedOut {
        command: String,
        /// The timeout.
        patience: Duration,
    },
    /// virsh did not answer in time. QEMU may still carry the command out later.
    #[error(
        "virsh did not answer {command} within {patience:?}; see whether libvirt or QEMU hangs"
    )]
    VirshTimedOut {
        command: String,
        /// The timeout.
        patience: Duration,
    },
    /// virsh did not forward the command or its answer.
    #[error("virsh did not carry out {command}: {why}")]
    Virsh {
        command: String,
        /// The error message of virsh, or a description of its behaviour.
        why: String,
    },
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {description}")]
    Refused {
        command: String,
        /// QEMU's error class.
        class: String,
        /// QEMU's description of the error.
        description: String,
    },
    /// A query or a command failed for a reason that the host's kernel or this process gives, not
    /// QEMU; the message is complete.
    #[error("{0}")]
    Host(String),
    /// The answer lacks a value that the command returns.
    #[error("QEMU's answer to {command} lacks {missing}; this version of QEMU is not supported")]
    Unexpected {
        command: String,
        /// The missing value.
        missing: String,
    },
}
