// SPDX-License-Identifier: Apache-2.0
//! The gRPC interface of Patchbay, generated from `patchbay/v1/*.proto`.
#![forbid(unsafe_code)]

/// Version 1 of the interface.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/patchbay.v1.rs"));
}

/// The encoded `FileDescriptorSet` of the interface, for the reflection service.
#[cfg(feature = "grpc")]
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patchbay.v1.bin"));
