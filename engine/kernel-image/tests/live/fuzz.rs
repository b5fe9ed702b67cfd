// SPDX-License-Identifier: Apache-2.0
//! The short run of the fuzz targets; `cargo xtask fuzz` does the long one.

use crate::live::TARGETS;
use crate::short_run::short_run;

#[test]
fn live_guests() {
    short_run(TARGETS, "live_guests", 500);
}

#[test]
fn debug_files() {
    short_run(TARGETS, "debug_files", 500);
}

#[test]
fn type_information() {
    short_run(TARGETS, "type_information", 5000);
}
