// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets of kernel images.
#![forbid(unsafe_code)]

#[path = "../../tests/images/craft.rs"]
mod craft;
#[path = "../../tests/images/craft_kallsyms.rs"]
mod craft_kallsyms;
pub mod targets;
