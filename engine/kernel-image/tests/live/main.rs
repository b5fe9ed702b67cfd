// SPDX-License-Identifier: Apache-2.0
//! Tests discoveries in crafted guests, including hostile ones.

mod again;
mod bounds;
// Only parts of `craft` and `craft_kallsyms` are used here.
#[path = "../images/craft.rs"]
#[allow(dead_code)]
mod craft;
mod craft_btf;
mod craft_dwarf;
mod craft_file;
mod craft_guest;
#[path = "../images/craft_kallsyms.rs"]
#[allow(dead_code)]
mod craft_kallsyms;
mod file;
mod folder;
mod forged;
mod found;
mod fuzz;
mod hostile;
#[path = "../../fuzz/src/live.rs"]
mod live;
mod log;
mod races;
#[path = "../../../static-keys/fuzz/src/short_run.rs"]
mod short_run;
mod types;
mod unusual;
