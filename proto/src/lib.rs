// SPDX-License-Identifier: Apache-2.0
//! The gRPC interface of Patchbay, generated from `patchbay/v1/*.proto`.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

/// Version 1 of the interface.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/patchbay.v1.rs"));
}

/// Longest page that an agent may send.
pub const AGENT_PAGE_MAX_BYTES: u64 = 64 << 10;
/// What a page costs of the agent's credit beside its bytes, however short it is.
pub const AGENT_PAGE_OVERHEAD: u64 = 128;
/// A longer frame between agent and monitor ends the connection.
pub const AGENT_FRAME_MAX_BYTES: usize = 512 << 10;

/// The encoded `FileDescriptorSet` of the interface, for the reflection service.
#[cfg(feature = "grpc")]
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patchbay.v1.bin"));
