// SPDX-License-Identifier: Apache-2.0
//! Crafted images of every format, hostile ones, and stock kernels.

mod craft;
mod craft_kallsyms;
mod distro;
mod formats;
mod fuzz;
mod hostile;
mod kallsyms;
#[path = "../../../static-keys/fuzz/src/short_run.rs"]
mod short_run;
#[path = "../../fuzz/src/targets.rs"]
mod targets;

use std::path::Path;

use patchbay_kernel_image::live::{DebugFile, DebugFileError};

/// A System.map for an image.
fn given(map: &str) -> Result<DebugFile, DebugFileError> {
    DebugFile::parse(Path::new("System.map"), map.as_bytes())
}
