// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets of kernel images and of running kernels.
#![forbid(unsafe_code)]

#[path = "../../tests/images/craft.rs"]
mod craft;
#[path = "../../tests/live/craft_btf.rs"]
mod craft_btf;
#[path = "../../tests/live/craft_dwarf.rs"]
mod craft_dwarf;
#[path = "../../tests/live/craft_file.rs"]
mod craft_file;
#[path = "../../tests/live/craft_guest.rs"]
mod craft_guest;
#[path = "../../tests/images/craft_kallsyms.rs"]
mod craft_kallsyms;
pub mod live;
pub mod targets;
