// SPDX-License-Identifier: Apache-2.0
//! The interfaces of Patchbay, generated from `patchbay/*/*.proto`.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

/// The gRPC interface of guests, `patchbay.v1`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/patchbay.v1.rs"));
}

#[cfg(feature = "grpc")]
impl v1::DescribeGuestResponse {
    /// The status, or the default if the service sent none.
    pub fn guest_status(&self) -> v1::GuestStatus {
        self.status.clone().unwrap_or_default()
    }
}

/// The gRPC interface of the fleet's controller.
#[cfg(feature = "grpc")]
pub mod fleet {
    /// Version 1: `patchbay.fleet.v1`.
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/patchbay.fleet.v1.rs"));
    }
}

/// The protocol between the agent in the guest and the service, `patchbay.agent.v1`.
pub mod agent {
    /// Version 1 of the messages.
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/patchbay.agent.v1.rs"));
    }
}

pub mod agent_frame;
#[cfg(feature = "grpc")]
pub mod client;
#[cfg(feature = "grpc")]
pub mod codec;
#[cfg(feature = "grpc")]
pub mod methods;
#[cfg(feature = "grpc")]
pub mod pages;
#[cfg(feature = "grpc")]
pub mod scope;
#[cfg(feature = "grpc")]
pub mod snapshot;
#[cfg(feature = "grpc")]
pub mod socket;
#[cfg(feature = "grpc")]
pub mod stream;
pub mod text;
#[cfg(feature = "grpc")]
mod trace_context;

#[cfg(feature = "grpc")]
pub use trace_context::{TRACEPARENT_METADATA, TraceParent};

/// The longest page that an agent may send.
pub const AGENT_PAGE_MAX_BYTES: u64 = 64 << 10;
/// A page costs the agent this much credit in addition to its bytes, regardless of its size.
pub const AGENT_PAGE_OVERHEAD: u64 = 128;

/// The host's vsock port to which an agent connects that may run commands.
pub const EXEC_PORT: u32 = 1025;
/// Word on the kernel's command line without which the agent runs no commands.
pub const EXEC_WORD: &str = "patchbay.exec";
/// The version of the messages with which commands are run.
pub const EXEC_VERSION: u32 = 1;

/// The beginnings of messages in which the kernel reports an error of its own: `WARN()`, `BUG()`,
/// the handlers of exceptions, the detectors of hung tasks and stalls, the checks of lists and
/// reference counts.
pub const KERNEL_REPORTS: &[&str] = &[
    "WARNING: ",
    "BUG: ",
    "watchdog: BUG: ",
    "kernel BUG at ",
    "Oops: ",
    "Internal error: ",
    "general protection fault",
    "invalid opcode: ",
    "divide error: ",
    "stack segment: ",
    "double fault: ",
    "PANIC: ",
    "Kernel panic - not syncing",
    "INFO: task ",
    "rcu: INFO: ",
    "UBSAN: ",
    "unchecked MSR access error: ",
    "refcount_t: ",
    "list_add corruption",
    "list_del corruption",
];

/// The encoded `FileDescriptorSet` of `patchbay.v1`, for the reflection service.
#[cfg(feature = "grpc")]
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patchbay.v1.bin"));

/// Name of the file with the guest's memory in the folder of a snapshot. A client of
/// `SnapshotGuest` writes the folder, and the monitor starts copies from it.
pub const SNAPSHOT_MEMORY: &str = "memory";
/// Name of the file with the rest of the guest's state in this folder.
pub const SNAPSHOT_STATE: &str = "state";

/// Metadata key by which a trusted proxy names the principal that it acts for.
pub const PRINCIPAL_METADATA: &str = "patchbay-principal";
/// Metadata key by which a trusted proxy limits a call to a role: "viewer", "operator" or "admin".
pub const ROLE_METADATA: &str = "patchbay-role";
/// Metadata key by which a trusted proxy names the person for whom the principal makes the call.
pub const PERSON_METADATA: &str = "patchbay-person";
/// Metadata key of an encoded [`fleet::v1::SignedAssertion`], in which a controller names the
/// person for whom it calls a host's daemon.
pub const ASSERTION_METADATA: &str = "patchbay-assertion-bin";
/// The maximum size of an encoded [`fleet::v1::SignedAssertion`], in bytes.
pub const MAX_ASSERTION_BYTES: usize = 4096;
/// `google.rpc.ErrorInfo.domain` of every error.
pub const ERROR_DOMAIN: &str = "patchbay";
