// SPDX-License-Identifier: Apache-2.0
//! Tests the daemon's log for people, in a file.

use std::process::{Command, Stdio};

use super::support::Host;

/// Checks that there are no colour codes, which make a log file unreadable. The fleet's controller,
/// the monitor and the attacher decide in the same way.
#[test]
fn a_log_that_is_no_terminal_has_no_colours() {
    let host = Host::new("rules: [{name: a, principals: ['*'], role: viewer}]");
    let log = host.path("log");
    let file = std::fs::File::create(&log).expect("writable");
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_patchbayd"));
    daemon.args(["--log-format", "text", "--policy"]);
    daemon.arg(host.path("policy.yaml"));
    for (option, name) in [
        ("--run-dir", "run"),
        ("--socket", "node.sock"),
        ("--audit-log", "audit.jsonl"),
    ] {
        daemon.arg(option).arg(host.path(name));
    }
    daemon.stderr(file).stdout(Stdio::null());
    let mut daemon = daemon.spawn().expect("it starts");
    let text = loop {
        let text = std::fs::read_to_string(&log).expect("text");
        let ended = daemon.try_wait().expect("its status");
        if text.contains('\n') || ended.is_some() {
            break text;
        }
        std::thread::yield_now();
    };
    daemon.kill().expect("it runs");
    daemon.wait().expect("it ends");
    assert!(text.contains("INFO"), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
}
