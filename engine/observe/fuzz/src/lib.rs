// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets for the readers of a running kernel's memory.
#![forbid(unsafe_code)]

pub mod targets;
