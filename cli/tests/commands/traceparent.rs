// SPDX-License-Identifier: Apache-2.0
//! Tests that one trace id passes from the command through `patchbayd` to the guest's service.

use super::daemon;
use super::lab::{Commands, Lab};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// Returns the trace ids of an audit log's lines about changes.
fn traces(log: &[serde_json::Value]) -> Vec<&str> {
    let ids = log.iter().filter_map(|line| line["trace_id"].as_str());
    ids.collect()
}

#[test]
fn a_change_is_of_one_trace_in_both_audit_logs() {
    let lab = Lab::new();
    let _daemon = daemon::start(daemon::config(&lab));
    let socket = lab.folder().join("node.sock");
    let run = |words: &[&str]| {
        let mut command = lab.command(words);
        command.env("PATCHBAY_SOCKET", &socket);
        command.env("TRACEPARENT", format!("00-{TRACE}-b7ad6b7169203331-01"));
        command.output().expect("the command starts")
    };
    // patchbayd listens before it has discovered the guest.
    while !run(&["keys", "get", "alpha"]).status.success() {
        std::thread::yield_now();
    }
    for words in [
        ["keys", "inc", "alpha"],
        ["keys", "enable", "beta"],
        ["keys", "dec", "alpha"],
    ] {
        let output = run(&words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
    }
    // For each change, the log has one line for the intent and one for the outcome.
    assert_eq!(traces(&lab.audit()), [TRACE; 6]);
    let host = std::fs::read_to_string(lab.folder().join("host-audit.log")).expect("text");
    let host: Vec<serde_json::Value> = host
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(traces(&host), [TRACE; 3]);

    // Without TRACEPARENT, each run of the command has a trace of its own.
    lab.ok(&["keys", "inc", "alpha"]);
    let audit = lab.audit();
    let traces = traces(&audit);
    assert_eq!(traces.len(), 8, "{audit:?}");
    assert!(traces[6] != TRACE && traces[6] == traces[7], "{traces:?}");
}
