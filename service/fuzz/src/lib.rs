// SPDX-License-Identifier: Apache-2.0
//! The service's fuzz targets live in `patchbay_service::fuzzing`, beside what they try.
#![forbid(unsafe_code)]

pub use patchbay_service::fuzzing as targets;
