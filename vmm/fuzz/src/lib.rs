// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets of the monitor are in `patchbay_vmm::fuzzing`.
#![forbid(unsafe_code)]

pub use patchbay_vmm::fuzzing as targets;
