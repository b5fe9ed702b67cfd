// SPDX-License-Identifier: Apache-2.0
//! Finds the programs of other monitors, for the tests of several packages.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with the programs `firecracker` and `cloud-hypervisor`, which may be compressed by xz.
const MONITORS: &str = "PATCHBAY_TEST_MONITORS";

/// Returns the path of a monitor's program. Prints a message and returns `None` if there is no such
/// program.
pub fn program(name: &str, folder: &Path) -> Option<PathBuf> {
    let monitors = std::env::var_os(MONITORS).map(PathBuf::from);
    let found = monitors.and_then(|monitors| {
        let program = monitors.join(name);
        if program.is_file() {
            return Some(program);
        }
        let packed = monitors.join(format!("{name}.xz"));
        packed.is_file().then(|| {
            let program = folder.join(name);
            let output = File::create(&program).expect("room");
            let mut xz = Command::new("xz");
            let unpacked = xz.arg("-dc").arg(packed).stdout(output).status();
            assert!(unpacked.expect("xz").success());
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("own file");
            program
        })
    });
    if found.is_none() {
        eprintln!("SKIPPED: {MONITORS} names no folder with {name}");
    }
    found
}

/// Returns the program that runs a guest with libkrun, or the reason why there is none.
///
/// # Errors
/// The program is not built.
pub fn libkrun() -> Result<PathBuf, String> {
    let program = std::env::var_os("PATCHBAY_TEST_LIBKRUN").map(PathBuf::from);
    program.ok_or_else(|| {
        let reason = std::env::var("PATCHBAY_TEST_NO_LIBKRUN");
        reason.unwrap_or_else(|_| "PATCHBAY_TEST_LIBKRUN is not set".to_owned())
    })
}
