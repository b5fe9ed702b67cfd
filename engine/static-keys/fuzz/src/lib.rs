// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets of the static key engine.
#![forbid(unsafe_code)]

#[path = "../../tests/common/mod.rs"]
mod common;
pub mod targets;
