// SPDX-License-Identifier: Apache-2.0
//! The gate that stopped a change, as an enum for programs.

use static_keys::{Busy, Gate, GateKind};

/// A closed gate, which opens without intervention. The change can be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosedGate {
    /// `system_state` is not `SYSTEM_RUNNING`.
    SystemState,
    /// `jump_label_mutex` is held.
    JumpLabelMutex,
    /// `text_mutex` is held.
    TextMutex,
    /// Text changes are queued or in progress.
    TextPoke,
    /// `tracepoints_mutex` is held.
    TracepointsMutex,
    /// `module_mutex` is held.
    ModuleMutex,
    /// A module is not `MODULE_STATE_LIVE` or is not registered.
    ModuleState,
    /// The key's count, type, module chain or probes changed since the plan.
    KeyChanged,
    /// A vCPU is inside a site.
    VcpuInSite,
    /// A breakpoint exception is pending on a vCPU.
    BreakpointPending,
    /// The registration or a module changed since the plan.
    RegistrationChanged,
    /// Guest memory could not be read while the guest was stopped.
    Memory,
    /// A pause is already in progress.
    Pause,
    /// A gate of the guest's kernel that has no value of this enum.
    Other,
}

impl From<&Busy> for ClosedGate {
    fn from(busy: &Busy) -> Self {
        match busy {
            Busy::Gate { gate, .. } => match gate {
                Gate::Kernel(listed) => match listed.kind {
                    GateKind::SystemState => Self::SystemState,
                    GateKind::JumpLabelMutex => Self::JumpLabelMutex,
                    GateKind::TextMutex => Self::TextMutex,
                    GateKind::TextPokeQueue | GateKind::TextPoke => Self::TextPoke,
                    GateKind::TracepointsMutex => Self::TracepointsMutex,
                    GateKind::ModuleMutex => Self::ModuleMutex,
                    _ => Self::Other,
                },
                Gate::ModuleState { .. } => Self::ModuleState,
                Gate::KeyType { .. } | Gate::KeyChain { .. } | Gate::TracepointProbes { .. } => {
                    Self::KeyChanged
                }
            },
            Busy::InsideSite { .. } => Self::VcpuInSite,
            Busy::UnknownModule { .. } => Self::ModuleState,
            Busy::FirstReference { .. }
            | Busy::Count { .. }
            | Busy::Users { .. }
            | Busy::SiteChanging { .. } => Self::KeyChanged,
        }
    }
}
