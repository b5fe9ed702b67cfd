// SPDX-License-Identifier: Apache-2.0
//! Writes the files of gates' commands for tests.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// Writes the file of a command, which only its owner can write, whatever the umask is.
pub fn write(folder: &Path, name: &str, text: &str) {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(folder).expect("created");
    let file = folder.join(format!("{name}.yaml"));
    fs::write(&file, text).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its own");
}
