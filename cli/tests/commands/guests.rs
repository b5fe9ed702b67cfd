// SPDX-License-Identifier: Apache-2.0

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use patchbay_guest::guest::Machine;
use patchbay_proto::v1;
use patchbay_service::keys::registry::discovery::FileUse;
use patchbay_service::testing::Discovered;

use super::lab::{Commands, Host, Lab};

#[test]
fn guests_of_every_socket_are_listed() {
    let host = Host::new();
    drop(UnixListener::bind(host.folder().join("host/dead.sock")).expect("free"));
    let guests = host.json(&["guest", "list"]);
    let row = |at: usize| {
        let text = |field: &str| guests[at][field].as_str().unwrap_or_default().to_owned();
        (text("name"), text("state"))
    };
    let expected = [
        ("db", "running"),
        ("dead", "dead"),
        ("web-1", "running"),
        ("web-2", "running"),
    ];
    for (at, (name, state)) in expected.into_iter().enumerate() {
        assert_eq!(row(at), (name.to_owned(), state.to_owned()), "{guests}");
    }
    assert_eq!(guests[0]["details"]["vcpus"], 2);
    assert_eq!(
        host.ok(&["guest", "list", "web-*", "-o", "name"]),
        "web-1\nweb-2\n"
    );
    assert_eq!(
        host.ok(&["guest", "list", "--guest", "db", "-o", "name"]),
        "db\n"
    );
    let table = host.ok(&["guest", "list"]);
    assert!(
        table.starts_with("NAME") && table.contains("AGENT"),
        "{table}"
    );
    assert_eq!(
        host.run(&["guest", "list", "--nonsense"]).status.code(),
        Some(2)
    );
}

#[test]
fn the_real_service_lists_its_guest_and_its_status() {
    let lab = Lab::new();
    let guests = lab.json(&["guest", "list"]);
    assert_eq!(
        (&guests[0]["name"], &guests[0]["details"]["registration"]),
        (&"test".into(), &"registered".into())
    );
    assert_eq!(
        lab.ok(&["--guest", "t*", "keys", "list", "b*", "-o", "name"]),
        "test/beta\n"
    );
    let registered = ["guest", "wait", "--for", "registered", "-o", "name"];
    assert_eq!(lab.ok(&registered), "test\n");
    let waiting = lab.follow(&["guest", "wait", "--for", "paused", "-o", "name"]);
    lab.ok(&["guest", "pause"]);
    assert_eq!(waiting.output().2, Some(0));
}

/// Runs a command without root's permission to access all files.
fn unprivileged(lab: &impl Commands, words: &[&str]) -> (String, String, Option<i32>) {
    let mut before = vec!["setpriv"];
    // Users other than root ignore this option; for them the socket's mode suffices.
    if rustix::process::geteuid().is_root() {
        before.push("--bounding-set=-dac_override,-dac_read_search");
    }
    let output = lab.under(&before, words).output().expect("setpriv runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (
        text(output.stdout),
        text(output.stderr),
        output.status.code(),
    )
}

/// Checks that a guest of another user, whose socket denies access, is reported as running.
#[test]
fn a_socket_without_permission_is_not_called_dead() {
    use std::os::unix::fs::PermissionsExt;
    let host = Host::new();
    let closed = std::fs::Permissions::from_mode(0o0);
    let socket = host.folder().join("host/all.sock");
    std::fs::set_permissions(&socket, closed.clone()).expect("ours");
    let socket = socket.to_str().expect("text");
    let (out, said, code) = unprivileged(&host, &["guest", "list"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        out.contains("no permission") && !out.contains("dead"),
        "{out}"
    );
    for words in [
        &["keys", "list"][..],
        &["--guest", "all", "keys", "list"],
        &["--all", "keys", "list"],
        &["--socket", socket, "keys", "list"],
        &["--socket", socket, "guest", "list"],
    ] {
        let (_, said, code) = unprivileged(&host, words);
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(
            said.contains("no permission for the socket"),
            "{words:?}: {said}"
        );
    }
    for words in [
        &["--guest", "web-1", "keys", "list"][..],
        &["--guest", "web-1", "--guest", "db", "keys", "list"],
    ] {
        let (_, said, code) = unprivileged(&host, words);
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(said.contains("no permission for 1 socket;"), "{said}");
    }
    // Guests that this user may access are not affected.
    let lab = Lab::new();
    let link = host.folder().join("host/test.sock");
    std::os::unix::fs::symlink(lab.socket(), link).expect("writable");
    let (out, said, code) = unprivileged(&host, &["keys", "list", "-o", "name", "alpha"]);
    assert_eq!((out.as_str(), code), ("alpha\n", Some(0)), "{said}");
    let (out, said, code) = unprivileged(&host, &["--all", "keys", "list", "-o", "name", "alpha"]);
    assert_eq!((out.as_str(), code), ("test/alpha\n", Some(0)), "{said}");
    assert!(
        said.contains("left out: this user has no permission"),
        "{said}"
    );
}

#[test]
fn a_socket_that_is_named_must_answer() {
    let host = Host::new();
    for words in [
        &["--socket", "/nonexistent.sock", "guest", "list"][..],
        &["--socket", "/nonexistent.sock", "guest", "list", "web-*"],
        &["--socket", "/dev/null", "guest", "list"],
    ] {
        let message = host.fails(1, words);
        assert!(message.contains("no monitor answers on"), "{message}");
    }
    let mut command = host.command(&["guest", "list"]);
    let output = command.env("PATCHBAY_SOCKET", "/nonexistent.sock").output();
    assert_eq!(output.expect("starts").status.code(), Some(1));
}

#[test]
fn a_guest_that_has_stopped_is_not_resumed() {
    let lab = Lab::new();
    lab.ok(&["guest", "shutdown", "--cut-now"]);
    let message = lab.fails(1, &["guest", "resume"]);
    assert!(message.contains("has stopped"), "{message}");
    // The command prints the state of the guest after the call.
    let host = Host::with(&["only"]);
    host.fake.guest("only", |guest| guest.stays = true);
    host.fake
        .set_status("only", |status| status.set_state(v1::GuestState::Stopped));
    assert_eq!(host.ok(&["guest", "resume"]), "stopped\n");
}

#[test]
fn one_guest_is_found_by_folder_name_and_socket() {
    let lab = Lab::new();
    drop(UnixListener::bind(lab.folder().join("patchbay/dead.sock")).expect("free"));
    // The dead socket does not make the choice ambiguous.
    lab.ok(&["keys", "list"]);
    lab.ok(&["--guest", "test", "keys", "list"]);
    let socket = lab.socket();
    let socket = socket.to_str().expect("text");
    lab.ok(&["--socket", socket, "keys", "list"]);
    let message = lab.fails(1, &["--guest", "dead", "keys", "list"]);
    assert!(message.contains("dead.sock"), "{message}");
    let message = lab.fails(1, &["--guest", "none", "keys", "list"]);
    assert!(message.contains("patchbay guest list"), "{message}");
    let message = lab.fails(1, &["--socket", "/nonexistent", "keys", "list"]);
    assert!(message.contains("/nonexistent"), "{message}");
    let message = lab.fails(2, &["--guest", "../x", "guest", "run"]);
    assert!(message.contains("cannot be a guest's name"), "{message}");
}

#[test]
fn without_a_guest_the_next_step_is_named() {
    let lab = Lab::new();
    let empty = tempfile::tempdir().expect("temporary folder");
    let output = lab
        .command(&["keys", "list"])
        .env("XDG_RUNTIME_DIR", empty.path())
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("patchbay guest run"),
        "{output:?}"
    );
}

#[test]
fn guest_verbs() {
    let lab = Lab::new();
    let text = lab.ok(&["guest", "describe"]);
    assert!(
        text.starts_with("test: running\n") && text.contains("6.12.0"),
        "{text}"
    );
    let text = lab.ok(&["guest", "pause"]);
    assert!(
        text.starts_with("paused until 2") && text.ends_with("; stop 20.0 us\n"),
        "{text}"
    );
    let described = lab.json(&["guest", "describe"]);
    assert_eq!(described["state"], "paused");
    let until = &described["details"]["paused_until"];
    let renewed = lab.json(&["guest", "pause", "--ttl", "10m"]);
    assert_eq!(
        (&renewed["state"], &renewed["stop_us"]),
        (&"paused".into(), &0.0.into())
    );
    assert!(
        renewed["paused_until"].as_str() > until.as_str() && until.is_string(),
        "{renewed} {until}"
    );
    assert_eq!(lab.ok(&["guest", "resume"]), "running\n");
    assert_eq!(lab.json(&["guest", "resume"])["state"], "running");
    for verb in [&["guest", "pause"][..], &["guest", "resume"]] {
        assert_eq!(lab.ok(&[verb, &["-o", "name"]].concat()), "test\n");
    }
    let all = ["--all", "guest", "resume", "-o", "name"];
    assert_eq!(lab.ok(&all), "test\n");
    assert!(lab.json(&["guest", "describe"])["details"]["paused_until"].is_null());
    let shutdown = ["guest", "shutdown", "--cut-now", "-o", "name"];
    assert_eq!(lab.ok(&shutdown), "test\n");
}

#[test]
fn a_guest_is_asked_to_shut_down_or_its_power_is_cut() {
    let lab = Lab::new();
    let message = lab.fails(124, &["guest", "shutdown", "--timeout", "1ms"]);
    assert!(
        message.contains("does not listen") && message.contains("--cut-after-timeout"),
        "{message}"
    );
    assert_eq!(lab.json(&["guest", "describe"])["state"], "running");
    lab.ok(&["guest", "pause"]);
    let message = lab.fails(1, &["guest", "shutdown"]);
    assert!(
        message.contains("paused") && message.contains("--cut-now"),
        "{message}"
    );
    lab.ok(&["guest", "resume"]);
    let guest = Arc::clone(&lab.guest);
    lab.guest.on_power_button(move || guest.shut_down());
    let text = lab.ok(&["guest", "shutdown"]);
    assert_eq!(text, "stopped: it powered itself off\n");
    assert_eq!(lab.json(&["guest", "describe"])["state"], "stopped");
    for words in [
        &["--cut-now"][..],
        &["--cut-after-timeout", "--timeout", "1ms"],
    ] {
        let lab = Lab::new();
        let cut = lab.json(&[&["guest", "shutdown"], words].concat());
        assert_eq!(
            (&cut["state"], &cut["power_cut"]),
            (&"stopped".into(), &true.into())
        );
    }
    assert_eq!(
        lab.run(&["guest", "shutdown", "--cut-now", "--cut-after-timeout"])
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn the_environment_names_a_socket() {
    let lab = Lab::new();
    let elsewhere = tempfile::tempdir().expect("temporary folder");
    let list = |words: &[&str]| {
        let mut command = lab.command(words);
        command.env("PATCHBAY_SOCKET", lab.socket());
        command.env("XDG_RUNTIME_DIR", elsewhere.path());
        command.output().expect("starts").status.code()
    };
    assert_eq!(list(&["keys", "list"]), Some(0));
    // With a socket, --guest selects among the guests behind that socket.
    assert_eq!(list(&["--guest", "test", "keys", "list"]), Some(0));
    assert_eq!(list(&["--all", "keys", "list"]), Some(0));
    assert_eq!(list(&["--guest", "other", "keys", "list"]), Some(1));
}

#[test]
fn a_description_searches_for_the_kernels_state() {
    let host = Host::with(&["only"]);
    let described = host.json(&["guest", "describe"]);
    assert_eq!(described["name"], "only");
    assert!(described["details"].get("uptime").is_none(), "{described}");
    host.fake.guest("only", |guest| guest.has_kernel_log = true);
    let described = host.json(&["guest", "describe"]);
    assert_eq!(described["details"]["uptime"], "0 d 00:01:01");
    let missing = described["details"]["not_in_memory"].as_array();
    let missing = missing.expect("a list");
    assert!(missing.contains(&"tasks".into()), "{described}");
    let listed = host.json(&["guest", "list"]);
    let missing = &listed[0]["details"]["not_in_memory"];
    assert!(!missing.to_string().contains("tasks"), "not read: {listed}");
    // A list describes every guest, and a search may take as long as a discovery.
    let before = host.fake.seen("find_kernel_state: true").len();
    host.ok(&["guest", "list"]);
    assert_eq!(host.fake.seen("find_kernel_state: true").len(), before);
}

/// A guest that has panicked may boot again soon, and then its log and rings are lost.
#[test]
fn an_autopsy_reads_the_rings_before_the_lists() {
    let host = Host::with(&["only"]);
    host.fake.guest("only", |guest| guest.has_kernel_log = true);
    host.json(&["guest", "autopsy"]);
    let seen = host.fake.seen("Request");
    let calls: Vec<&str> = seen
        .iter()
        .filter_map(|call| call.split_whitespace().next())
        .collect();
    let of = |call: &str| calls.iter().position(|seen| *seen == call);
    let rings = of("StreamTracepointEventsRequest");
    assert!(rings.is_some(), "{calls:?}");
    for call in [
        "ListStaticKeysRequest",
        "ListHoldsRequest",
        "ListClaimsRequest",
        "ListTracepointsRequest",
    ] {
        assert!(of(call) > rings, "{calls:?}");
    }
}

#[test]
fn the_console_is_dumped() {
    let lab = Lab::new();
    lab.guest.print(b"hello from the guest\n");
    assert_eq!(
        lab.ok(&["guest", "console", "--dump"]),
        "hello from the guest\n"
    );
}

#[test]
fn a_guest_is_watched() {
    let host = Host::with(&["only"]);
    let mut watch = host.follow(&["guest", "watch"]);
    assert_eq!(watch.line(), "only: running, absent, no agent connected");
    host.fake
        .set_status("only", |status| status.agent_connected = true);
    assert_eq!(watch.line(), "only: running, absent, agent connected");
    watch.end();
}

#[test]
fn a_guest_is_awaited() {
    use v1::{GuestState, RegistrationState};
    type Change = fn(&mut v1::GuestStatus);
    let changes: [(&str, Change); 5] = [
        ("registered", |status| {
            status.set_registration(RegistrationState::Registered)
        }),
        ("agent", |status| status.agent_connected = true),
        ("paused", |status| status.set_state(GuestState::Paused)),
        ("running", |status| status.set_state(GuestState::Running)),
        ("stopped", |status| status.set_state(GuestState::Stopped)),
    ];
    let host = Host::with(&["only"]);
    for (state, change) in changes {
        if state != "running" {
            let wait = ["guest", "wait", "--for", state, "--timeout", "20ms"];
            let message = host.fails(124, &wait);
            assert!(message.contains("after 20ms"), "{message}");
        } else {
            host.fake
                .set_status("only", |status| status.set_state(GuestState::Paused));
        }
        let waiting = host.follow(&["guest", "wait", "--for", state, "-o", "name"]);
        host.fake.set_status("only", change);
        let (out, said, code) = waiting.output();
        assert_eq!((out.as_str(), code), ("only\n", Some(0)), "{state}: {said}");
    }
    for usage in [&["guest", "wait"][..], &["guest", "wait", "--for", "ever"]] {
        assert_eq!(host.run(usage).status.code(), Some(2), "{usage:?}");
    }
}

#[test]
fn a_state_that_cannot_come_any_more_is_not_awaited() {
    let host = Host::with(&["only"]);
    host.fake.set_status("only", |status| {
        status.set_registration(v1::RegistrationState::Refused);
        status.registration_error = "no such version".to_owned();
    });
    let message = host.fails(1, &["guest", "wait", "--for", "registered"]);
    assert!(message.contains("no such version"), "{message}");
    host.fake
        .set_status("only", |status| status.set_state(v1::GuestState::Stopped));
    let message = host.fails(1, &["guest", "wait", "--for", "agent"]);
    assert!(message.contains("has stopped"), "{message}");
}

/// Checks that a guest counts as stopped if its monitor ends before it sends the last status.
#[test]
fn a_monitor_that_is_gone_has_stopped() {
    let host = Host::with(&["only"]);
    let waits = ["stopped", "agent"]
        .map(|state| host.follow(&["guest", "wait", "--for", state, "-o", "json"]));
    while host.fake.seen("WatchGuestRequest").len() < 2 {
        std::thread::yield_now();
    }
    host.end();
    let [stopped, agent] = waits;
    let (out, said, code) = stopped.output();
    assert!(out.contains("\"state\": \"gone\""), "{out}{said}");
    assert_eq!(code, Some(0));
    let (_, said, code) = agent.output();
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn what_a_discovery_used_is_shown() {
    let lab = Lab::new();
    let details = &lab.json(&["guest", "describe"])["details"];
    for field in ["debug_file", "gates", "missing_gates", "left_out_modules"] {
        assert!(details.get(field).is_none(), "{details}");
    }
    lab.guest.discover_with(
        &lab.registry,
        FileUse {
            path: "/usr/lib/debug/boot/vmlinux".into(),
            data_symbols: true,
            types: false,
            compared: 1000,
            build_id: true,
        },
    );
    let details = &lab.json(&["guest", "describe"])["details"];
    assert_eq!(details["discovered_by"], "image", "{details}");
    let file = serde_json::json!({
        "path": "/usr/lib/debug/boot/vmlinux",
        "symbols": true,
        "types": false,
        "same_build_id": true,
    });
    assert_eq!(details["debug_file"], file);
    let gates = serde_json::json!(["system_state", "text_mutex"]);
    assert_eq!(details["gates"], gates);
    let table = lab.ok(&["guest", "describe"]);
    for line in [
        "  debug file            /usr/lib/debug/boot/vmlinux, same build id, symbols\n",
        "  gates                 system_state, text_mutex\n",
        "  missing gates         number of module changes\n",
        "  left out modules      stuck (COMING)\n",
    ] {
        assert!(table.contains(line), "{table}");
    }
}
