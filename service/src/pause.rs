// SPDX-License-Identifier: Apache-2.0
//! Why a guest could not be stopped.

use std::time::Duration;

/// What a vCPU thread is busy with, for the error about a late one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// In `KVM_RUN`: in the guest, or in the kernel on the guest's behalf.
    Guest,
    /// Carrying out an access to this I/O port.
    PortIo(u16),
    /// Carrying out an access to this guest-physical address.
    Mmio(u64),
    /// Answering the guest's Patchbay request with this operation number.
    Request(u32),
    /// Between two of the others.
    Monitor,
}

impl std::fmt::Display for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Guest => write!(f, "in the guest"),
            Self::PortIo(port) => write!(f, "in an access to port {port:#x}"),
            Self::Mmio(address) => write!(f, "in an access to device memory at {address:#x}"),
            Self::Request(op) => write!(f, "in the monitor's answer to request {op}"),
            Self::Monitor => write!(f, "in the monitor"),
        }
    }
}

/// A vCPU that did not stop in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateVcpu {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// What it was doing when the deadline passed.
    pub activity: Activity,
    /// Its instruction pointer when it last stopped, if it ever did.
    pub last_rip: Option<u64>,
}

impl std::fmt::Display for LateVcpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "vCPU {} ({}", self.vcpu, self.activity)?;
        if let Some(rip) = self.last_rip {
            write!(f, ", last stopped at {rip:#x}")?;
        }
        write!(f, ")")
    }
}

fn list(late: &[LateVcpu]) -> String {
    let names: Vec<String> = late.iter().map(LateVcpu::to_string).collect();
    names.join(", ")
}

/// Why the guest is not paused. It runs on as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PauseError {
    /// Some vCPUs had not stopped when the deadline passed.
    #[error(
        "not every vCPU stopped within {deadline:?}: {}; the guest runs on and nothing has changed, try again with a longer deadline",
        list(late)
    )]
    Late {
        /// The time they were given.
        deadline: Duration,
        /// Those that were late, in the order of their indices.
        late: Vec<LateVcpu>,
    },
    /// Somebody else holds the guest paused.
    #[error("the guest is paused already; resume it first")]
    AlreadyPaused,
    /// The guest's monitor cannot stop it at the moment, or nothing may be written meanwhile.
    #[error("{why}")]
    Unable {
        /// A sentence and the next step.
        why: String,
    },
    /// The guest has ended.
    #[error("the guest has ended; there is nothing to pause")]
    Ended,
}
