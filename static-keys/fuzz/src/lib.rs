// SPDX-License-Identifier: Apache-2.0
//! The engine's fuzz targets.
#![forbid(unsafe_code)]

#[path = "../../tests/common/mod.rs"]
mod common;
pub mod targets;
