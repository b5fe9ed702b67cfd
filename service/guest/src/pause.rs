// SPDX-License-Identifier: Apache-2.0
//! The reasons why a guest could not be stopped.

use std::time::Duration;

/// Activity of a vCPU thread, for the error about a late vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The thread is in `KVM_RUN`: in the guest, or in the kernel on the guest's behalf.
    Guest,
    /// Emulating an access to this I/O port.
    PortIo(u16),
    /// Emulating an access to this guest-physical address.
    Mmio(u64),
    /// Serving the guest's Patchbay request with this operation number.
    Request(u32),
    /// The thread is between two of these activities.
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
    /// Activity when the deadline passed.
    pub activity: Activity,
    /// The vCPU's RIP at its last stop; `None` if it never stopped.
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

/// The reason why the guest could not be paused. The attempt leaves the guest as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PauseError {
    /// Some vCPUs did not stop before the deadline.
    #[error(
        "not every vCPU stopped within {deadline:?}: {}; the guest runs on and nothing has changed, try again with a longer deadline",
        list(late)
    )]
    Late {
        /// The timeout.
        deadline: Duration,
        /// The late vCPUs, by index.
        late: Vec<LateVcpu>,
    },
    /// The guest is paused already.
    #[error("the guest is paused already; resume it first")]
    AlreadyPaused,
    /// The monitor cannot stop the guest now, or must not change it once it is stopped.
    #[error("{why}")]
    Unable {
        /// The reason and the next step.
        why: String,
    },
    /// The guest has ended.
    #[error("the guest has ended; there is nothing to pause")]
    Ended,
}
