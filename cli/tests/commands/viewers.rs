// SPDX-License-Identifier: Apache-2.0
//! Tests what a viewer of a host's guests may read without an agent in the guest.

use patchbay_guest::testing::TestKey;
use patchbay_node::serve::Config;
use tokio::runtime::Runtime;

use super::daemon;
use super::lab::{Commands, Lab};
use super::trace::next_line;

/// A daemon of a host, for whose guests everybody has a role.
fn served(lab: &Lab, role: &str) -> Runtime {
    let policy = lab.folder().join("policy.yaml");
    let rules = format!("rules: [{{name: all, principals: ['**'], role: {role}}}]");
    std::fs::write(&policy, rules).expect("written");
    let socket = lab.folder().join("node.sock");
    let runtime = daemon::start(Config {
        policy: Some(policy),
        ..daemon::config(lab)
    });
    // The daemon looks for guests from time to time.
    let describe = [
        "--socket",
        socket.to_str().expect("UTF-8"),
        "guest",
        "describe",
    ];
    while !lab.run(&describe).status.success() {}
    runtime
}

/// A viewer may not arm events, so a call that would arm them is refused before an agent is looked
/// for. Where no agent is connected, the events are read in memory, which a viewer may do.
#[test]
fn a_viewer_reads_named_events_in_memory_without_an_agent() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let _daemon = served(&lab, "viewer");
    let socket = lab.folder().join("node.sock");
    let socket = socket.to_str().expect("UTF-8");
    let tail = ["--socket", socket, "trace", "tail", "test:*"];
    let said = lab.fails(1, &tail);
    assert!(
        said.contains("viewer") && said.contains("not found in its memory"),
        "{said}"
    );
    let rings = lab.rings();
    let following = lab.follow(&[&tail[..], &["-n", "1", "--timeout", "60s"]].concat());
    let (line, following) = next_line(following, &rings);
    assert!(line.contains("test:numbered"), "{line:?}");
    let (_, said, code) = following.output();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("no event is armed"), "{said}");
    // What only an agent can do stays refused.
    for option in [&["--filter", "number == 1"][..], &["--source", "agent"]] {
        let said = lab.fails(1, &[&tail, option].concat());
        assert!(
            said.contains("viewer") && !said.contains("memory"),
            "{said}"
        );
    }
    for words in [
        &["trace", "stat", "--interval", "1ms"][..],
        &["trace", "events", "--armed"],
        &["guest", "describe"],
        &["guest", "autopsy"],
    ] {
        lab.ok(&[&["--socket", socket], words].concat());
    }
}
