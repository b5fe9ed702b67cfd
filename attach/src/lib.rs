// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! The seams of `patchbay-service` over a guest that another monitor runs.

pub mod error;
pub mod flat_view;
pub mod libvirt;
pub mod memory;
pub mod monitor;
pub mod process;
pub mod qmp;
pub mod registers;
