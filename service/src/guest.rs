// SPDX-License-Identifier: Apache-2.0
//! What the key owner and the service need of a guest, so that both can be tested without KVM.

use std::time::Duration;

use crate::console::Console;
use crate::memory::GuestRam;
use crate::pause::PauseError;

/// Way of the guest's requests to the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `KVM_HC_MAP_GPA_RANGE` with `KVM_CAP_EXIT_HYPERCALL`.
    Hypercall,
    /// WRMSR behind `KVM_CAP_X86_USER_SPACE_MSR`.
    Msr,
}

/// What does not change while the monitor runs.
#[derive(Clone, Debug)]
pub struct GuestDescription {
    /// Name that the operator gave it.
    pub name: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// Transports that the probe at start found working, most preferred first.
    pub transports: Vec<Transport>,
}

/// A guest as the service sees it.
pub trait Machine: Send + Sync {
    /// What does not change.
    fn description(&self) -> GuestDescription;

    /// Whether the guest has powered off, reset or crashed.
    fn has_ended(&self) -> bool;

    /// Ends the guest; the monitor ends after it.
    fn shut_down(&self);

    /// The guest's serial console.
    fn console(&self) -> &dyn Console;
}

/// A guest as the key owner sees it.
pub trait Guest: Machine + 'static {
    /// The guest, stopped; dropping it resumes it.
    type Paused<'a>: PausedGuest
    where
        Self: 'a;

    /// The guest's memory.
    fn ram(&self) -> &GuestRam;

    /// Stops every vCPU within `timeout`.
    ///
    /// # Errors
    /// [`PauseError`]; the guest then runs on.
    fn pause(&self, timeout: Duration) -> Result<Self::Paused<'_>, PauseError>;
}

/// Where the vCPUs stopped.
pub trait PausedGuest {
    /// Instruction pointers of the vCPUs.
    fn rips(&self) -> &[u64];
    /// Whether a breakpoint exception waits to be delivered on any vCPU.
    fn breakpoint_pending(&self) -> bool;
    /// From the request to stop until the last vCPU had stopped.
    fn stop_time(&self) -> Duration;
}
