// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets of what is read from a running kernel.
#![forbid(unsafe_code)]

pub mod targets;
