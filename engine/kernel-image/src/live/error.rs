// SPDX-License-Identifier: Apache-2.0
//! The errors of a discovery.

/// The reason why a discovery failed.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The guest is booting, or changing its own keys or modules. This is temporary.
    #[error("the guest is busy: {0}; look again")]
    Busy(String),
    /// No vCPU runs a kernel that could be read. The guest may be about to boot one, or may run
    /// another system.
    #[error("no kernel was found: {0}; look again once the guest has booted")]
    Absent(String),
    /// The guest's kernel has panicked on this CPU.
    #[error("its kernel panics on CPU {0}, and its keys cannot be changed until it is reset")]
    Panics(u64),
    /// Another discovery would fail in the same way.
    #[error("{0}")]
    Refused(String),
}

/// The next step for the user if the kernel does not reveal enough.
pub(super) const GIVE_FILE: &str =
    "give --debug-file FILE with the vmlinux or System.map of this very kernel";
/// The next step for the user if types are missing. A System.map contains no types.
pub(super) const GIVE_TYPES: &str =
    "give --debug-file FILE with the vmlinux of this very kernel, with its debug information";

pub(super) fn busy<T>(sentence: impl Into<String>) -> Result<T, DiscoveryError> {
    Err(DiscoveryError::Busy(sentence.into()))
}

pub(super) fn absent<T>(sentence: impl Into<String>) -> Result<T, DiscoveryError> {
    Err(DiscoveryError::Absent(sentence.into()))
}

pub(super) fn refuse<T>(sentence: impl Into<String>) -> Result<T, DiscoveryError> {
    Err(DiscoveryError::Refused(sentence.into()))
}
