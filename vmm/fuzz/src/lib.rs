// SPDX-License-Identifier: Apache-2.0
//! The monitor's fuzz targets live in `patchbay_vmm::fuzzing`, beside what they try.
#![forbid(unsafe_code)]

pub use patchbay_vmm::fuzzing as targets;
