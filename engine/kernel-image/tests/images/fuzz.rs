// SPDX-License-Identifier: Apache-2.0
//! The short run of the fuzz targets; `cargo xtask fuzz` does the long one.

use crate::{short_run::short_run, targets::TARGETS};

#[test]
fn image_files() {
    short_run(TARGETS, "image_files", 2000);
}

#[test]
fn images() {
    short_run(TARGETS, "images", 1000);
}
