// SPDX-License-Identifier: Apache-2.0
//! Tests that foreign text in messages does not control the terminal.

use std::process::Command;

#[test]
fn an_error_does_not_control_the_terminal() {
    let output = Command::new(env!("CARGO_BIN_EXE_patchbay-attach"))
        .args(["qemu", "--qmp", "/nonexistent/\u{1b}]0;title\u{7}\u{9b}2J"])
        .output()
        .expect("a program");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains(r"\u{1b}]0;title\u{7}\u{9b}2J"), "{said:?}");
    assert!(!said.trim_end().contains(char::is_control), "{said:?}");
}
