// SPDX-License-Identifier: Apache-2.0
//! Tests the log lines of the program.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Returns what the program writes to standard error while it adopts the records of an empty store.
fn said(variables: &[(&str, &str)]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("key"), [1; 32]).expect("written");
    let own = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path("key"), own).expect("its own");
    let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-fleet"));
    command.args([
        "--standalone",
        "--host=a=socket",
        "--adopt-unsigned-records",
    ]);
    for option in ["store", "record-key", "archive", "socket"] {
        let name = option.trim_start_matches("record-");
        command.arg(format!("--{option}={}", path(name).display()));
    }
    command.env_remove("PATCHBAY_LOG").env_remove("RUST_LOG");
    let output = command.envs(variables.iter().copied()).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

/// Checks that the variable is that of the other programs.
#[test]
fn a_variable_filters_the_log() {
    let line = "this replica waits until no other one leads";
    assert!(said(&[]).contains(line));
    assert!(said(&[("RUST_LOG", "error")]).contains(line));
    assert!(!said(&[("PATCHBAY_LOG", "error")]).contains(line));
}
