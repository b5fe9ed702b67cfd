// SPDX-License-Identifier: Apache-2.0
//! The real binary against the real service on a real unix socket, with an in-memory guest.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::guest::Machine;
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::testing::{Gate, InMemoryGuest, TestKey};
use patchbay_service::trace::Tracing;
use serde_json::Value;

/// A served guest named "test" in a runtime folder of its own.
struct Lab {
    guest: Arc<InMemoryGuest>,
    folder: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl Lab {
    fn new() -> Self {
        Self::with(&[
            TestKey::new("alpha", 1),
            TestKey::new("beta", 3),
            TestKey::guarded("guarded"),
            TestKey::tracepoint("sched_switch", true),
        ])
    }

    fn with(keys: &[TestKey]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::create_dir(folder.path().join("patchbay")).expect("writable");
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), keys);
        let (keys, _) =
            Keys::start(Arc::clone(&guest), registry, KeysConfig::default()).expect("a thread");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let runtime = runtime.expect("a runtime");
        let socket = ApiSocket::bind(&folder.path().join("patchbay/test.sock")).expect("free");
        runtime.spawn(async move {
            let guests = Guests::default();
            let guest = ServedGuest::start(keys, Tracing::default()).expect("no agent's socket");
            guests.add(guest).expect("the only one");
            let endpoint = Endpoint::new(socket, guests);
            endpoint.serve(std::future::pending()).await
        });
        Self {
            guest,
            folder,
            _runtime: runtime,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("patchbay/test.sock")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay"));
        command
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .args(words)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("the command starts")
    }

    /// Output of a command that must succeed.
    #[track_caller]
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("text")
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        let text = self.ok(&[words, &["-o", "json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The one sentence of a command that must fail with this exit code.
    #[track_caller]
    fn fails(&self, code: i32, words: &[&str]) -> String {
        let output = self.run(words);
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{words:?}: {message}");
        assert!(
            message.starts_with("patchbay: ") && message.lines().count() == 1,
            "one sentence: {message}"
        );
        assert!(output.stdout.is_empty());
        message
    }
}

#[test]
fn keys_are_listed_in_each_format() {
    let lab = Lab::new();
    let table = lab.ok(&["keys", "list"]);
    assert!(table.starts_with("NAME"), "{table}");
    assert_eq!(table.lines().count(), 5, "{table}");
    assert_eq!(
        lab.ok(&["keys", "list", "-o", "name"]),
        "alpha\nbeta\nguarded\nsched_switch\n"
    );
    let keys = lab.json(&["keys", "list", "b*"]);
    assert_eq!(
        (&keys[0]["name"], &keys[0]["site_count"]),
        (&"beta".into(), &3.into())
    );
    assert!(
        lab.ok(&["keys", "list", "-o", "yaml"])
            .contains("- name: alpha\n")
    );
    assert_eq!(
        lab.ok(&["keys", "list", "-o", "name", "*", "!a*", "!b*"]),
        "guarded\nsched_switch\n"
    );
    assert_eq!(
        lab.ok(&[
            "keys",
            "list",
            "-o",
            "name",
            "--class",
            "guarded,tracepoint"
        ]),
        "guarded\nsched_switch\n"
    );
    assert_eq!(lab.ok(&["keys", "list", "-o", "name", "--enabled"]), "");
}

#[test]
fn get_shows_sites_with_bytes_and_disassembly() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "get", "beta"]);
    assert!(
        text.starts_with("beta: off, count 0, ref class\n"),
        "{text}"
    );
    assert_eq!(text.matches("0f 1f 44 00 00").count(), 3, "{text}");
    assert!(
        text.contains("nop dword ptr [rax+rax]") && text.contains("jmp 0xffffffff81"),
        "{text}"
    );
    let keys = lab.json(&["keys", "get", "alpha", "beta"]);
    assert_eq!(keys[1]["sites"].as_array().expect("sites").len(), 3);
    assert_eq!(keys[0]["sites"][0]["bytes"], "0f 1f 44 00 00");
}

#[test]
fn updates_print_counts_sites_and_times() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "enable", "beta", "--reason", "incident 7"]);
    assert!(
        text.contains("0 -> 1") && text.contains("3 sites patched; stop 20.0 us, patch "),
        "{text}"
    );
    assert!(lab.guest.jumps("beta"));
    let text = lab.ok(&["keys", "inc", "beta"]);
    assert!(
        text.contains("1 -> 2") && text.contains("the guest was not stopped"),
        "{text}"
    );
    let holds = lab.json(&["keys", "holds"]);
    assert_eq!(
        (&holds[0]["name"], &holds[0]["reason"]),
        (&"beta".into(), &"incident 7".into())
    );
    lab.ok(&["keys", "dec", "beta"]);
    let result = lab.json(&["keys", "disable", "beta"]);
    assert_eq!(
        (&result["results"][0]["after"], &result["paused"]),
        (&0.into(), &true.into())
    );
    assert!(!lab.guest.jumps("beta"));
}

#[test]
fn globs_are_one_transaction_and_dry_runs_change_nothing() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "enable", "*a", "--dry-run"]);
    assert!(
        text.contains("alpha") && text.contains("beta") && text.contains("dry run"),
        "{text}"
    );
    assert_eq!(lab.guest.pauses(), 0);
    lab.ok(&["keys", "enable", "*a"]);
    assert_eq!(
        (
            lab.guest.count("alpha"),
            lab.guest.count("beta"),
            lab.guest.pauses()
        ),
        (1, 1, 1)
    );
    let text = lab.ok(&["keys", "disable", "*", "--dry-run", "--summary"]);
    let left_out = "2 of 3 keys changed; 1 more match and were left out";
    assert!(text.starts_with(left_out), "{text}");
    let message = lab.fails(1, &["keys", "enable", "guard*"]);
    assert!(message.contains("--allow-guarded"), "{message}");
    // A name among globs is refused as it is alone.
    let message = lab.fails(1, &["keys", "enable", "guarded", "alph*"]);
    assert!(
        message.contains("key guarded") && message.contains("--allow-guarded"),
        "{message}"
    );
    lab.fails(2, &["keys", "enable", "alph*", "--etag", "x"]);
    let message = lab.fails(1, &["keys", "enable", "nothing*"]);
    assert!(message.contains("no key matches nothing*"), "{message}");
    let message = lab.fails(1, &["keys", "enable", "b*", "alhpa"]);
    assert!(
        message.contains("alhpa") && message.contains("alpha"),
        "{message}"
    );
}

#[test]
fn apply_takes_json_and_yaml_and_is_all_or_nothing() {
    let lab = Lab::new();
    let file = lab.folder.path().join("changes");
    let path = file.to_str().expect("text");
    std::fs::write(
        &file,
        r#"[{"key": "alpha", "op": "inc"}, {"key": "beta", "op": "enable"}]"#,
    )
    .expect("writable");
    lab.ok(&["keys", "apply", "-f", path]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 1));
    std::fs::write(
        &file,
        "- key: alpha\n  op: dec\n- key: sched_switch\n  op: dec\n",
    )
    .expect("writable");
    let message = lab.fails(1, &["keys", "apply", "-f", path]);
    assert!(message.contains("sched_switch"), "{message}");
    assert_eq!(lab.guest.count("alpha"), 1);
    for bad in [
        "",
        "[]",
        "{}",
        "- key: alpha",
        "- {key: alpha, op: toggle}",
        "- {key: a, op: inc, extra: 1}",
        "\u{1}",
    ] {
        std::fs::write(&file, bad).expect("writable");
        let message = lab.fails(2, &["keys", "apply", "-f", path]);
        assert!(message.contains(path), "{message}");
    }
    lab.fails(2, &["keys", "apply", "-f", "/nonexistent"]);
}

#[test]
fn exit_codes_tell_the_kinds_of_failure() {
    let lab = Lab::new();
    assert!(lab.fails(1, &["keys", "get", "alhpa"]).contains("alpha"));
    assert!(
        lab.fails(1, &["keys", "inc", "guarded"])
            .contains("--allow-guarded")
    );
    assert!(lab.fails(1, &["keys", "list", "["]).contains("']'"));
    lab.guest.set_count("alpha", 1);
    assert!(lab.fails(1, &["keys", "dec", "alpha"]).contains("--force"));
    lab.ok(&["keys", "dec", "alpha", "--force"]);
    lab.guest.set_late(true);
    assert!(lab.fails(124, &["keys", "inc", "alpha"]).contains("vCPU 0"));
    lab.guest.set_late(false);
    lab.guest.set_gate(Gate::JumpLabelMutex, 0x1000);
    let message = lab.fails(5, &["keys", "inc", "alpha", "--timeout", "300ms"]);
    assert!(
        message.contains("jump_label_mutex") && message.contains("--timeout"),
        "{message}"
    );
    for usage in [
        &["keys"][..],
        &["keys", "inc"],
        &["keys", "inc", "alpha", "--ttl", "soon"],
        &["keys", "list", "--enabled", "--disabled"],
        &["--socket", "a", "--guest", "b", "keys", "list"],
        &["nonsense"],
    ] {
        assert_eq!(lab.run(usage).status.code(), Some(2), "{usage:?}");
    }
    lab.fails(2, &["keys", "inc", "alpha", "beta", "--etag", "x"]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (0, 0));
}

#[test]
fn guests_are_found_by_folder_name_and_socket() {
    let lab = Lab::new();
    drop(
        std::os::unix::net::UnixListener::bind(lab.folder.path().join("patchbay/dead.sock"))
            .expect("free"),
    );
    let guests = lab.json(&["guests"]);
    assert_eq!(
        (&guests[0]["name"], &guests[0]["state"]),
        (&"dead".into(), &"dead".into())
    );
    assert_eq!(
        (&guests[1]["name"], &guests[1]["state"]),
        (&"test".into(), &"running".into())
    );
    assert_eq!(guests[1]["details"]["registration"], "registered");
    // The dead one does not make the choice ambiguous.
    lab.ok(&["keys", "list"]);
    lab.ok(&["--guest", "test", "keys", "list"]);
    lab.ok(&[
        "--socket",
        lab.socket().to_str().expect("text"),
        "keys",
        "list",
    ]);
    assert!(
        lab.fails(1, &["--guest", "dead", "keys", "list"])
            .contains("dead.sock")
    );
    assert!(
        lab.fails(1, &["--guest", "none", "keys", "list"])
            .contains("patchbay guests")
    );
    assert!(
        lab.fails(2, &["--guest", "../x", "keys", "list"])
            .contains("cannot be a guest's name")
    );
    assert!(
        lab.fails(1, &["--socket", "/nonexistent", "keys", "list"])
            .contains("/nonexistent")
    );
}

#[test]
fn without_a_guest_the_next_step_is_told() {
    let lab = Lab::new();
    let empty = tempfile::tempdir().expect("temporary folder");
    let output = lab
        .command(&["keys", "list"])
        .env("XDG_RUNTIME_DIR", empty.path())
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("patchbay run"),
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
    lab.fails(1, &["guest", "pause", "--ttl", "61m"]);
    assert_eq!(lab.ok(&["guest", "resume"]), "running\n");
    assert_eq!(lab.json(&["guest", "resume"])["state"], "running");
    assert_eq!(lab.ok(&["guest", "resume", "-o", "name"]), "running\n");
    assert!(lab.json(&["guest", "describe"])["details"]["paused_until"].is_null());
}

#[test]
fn a_guest_is_asked_to_shut_down_or_its_power_is_cut() {
    let lab = Lab::new();
    let message = lab.fails(124, &["guest", "shutdown", "--timeout", "1ms"]);
    assert!(
        message.contains("does not listen") && message.contains("--cut"),
        "{message}"
    );
    assert_eq!(lab.json(&["guest", "describe"])["state"], "running");
    lab.ok(&["guest", "pause"]);
    let message = lab.fails(1, &["guest", "shutdown"]);
    assert!(message.contains("paused"), "{message}");
    lab.ok(&["guest", "resume"]);
    let guest = Arc::clone(&lab.guest);
    lab.guest.on_power_button(move || guest.shut_down());
    let text = lab.ok(&["guest", "shutdown"]);
    assert_eq!(text, "stopped: it powered itself off\n");
    assert_eq!(lab.json(&["guest", "describe"])["state"], "stopped");
    for words in [&["--force"][..], &["--cut", "--timeout", "1ms"]] {
        let lab = Lab::new();
        let cut = lab.json(&[&["guest", "shutdown"], words].concat());
        assert_eq!(
            (&cut["state"], &cut["power_cut"]),
            (&"stopped".into(), &true.into())
        );
    }
    assert_eq!(
        lab.run(&["guest", "shutdown", "--force", "--cut"])
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
    // Whoever names a guest means that one.
    assert_eq!(list(&["--guest", "other", "keys", "list"]), Some(1));
}

#[test]
fn the_console_is_dumped_and_typed_into() {
    let lab = Lab::new();
    lab.guest.print(b"hello from the guest\n");
    assert_eq!(lab.ok(&["console", "--dump"]), "hello from the guest\n");
}

#[test]
fn a_watch_prints_a_line_per_change() {
    use std::io::BufRead;
    let lab = Lab::new();
    let details = &lab.json(&["guest", "describe"])["details"];
    let before = details["revision"].as_u64().expect("a number");
    let incarnation = details["incarnation"].as_str().expect("text");
    lab.ok(&["keys", "inc", "alpha", "--reason", "first"]);
    lab.ok(&["keys", "inc", "beta"]);
    let from = (before + 1).to_string();
    let mut watch = lab
        .command(&[
            "keys",
            "watch",
            "--from-revision",
            &from,
            "--incarnation",
            incarnation,
            "-o",
            "json",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut lines = std::io::BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut next = || -> Value {
        serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON")
    };
    let (first, second) = (next(), next());
    assert_eq!(
        (&first["name"], &first["kind"], &first["reason"]),
        (&"alpha".into(), &"changed".into(), &"first".into())
    );
    assert_eq!(
        (&second["name"], &second["count"]),
        (&"beta".into(), &1.into())
    );
    watch.kill().expect("runs");
    watch.wait().expect("ends");
    let from = |revision, incarnation| {
        let words = ["--from-revision", revision, "--incarnation", incarnation];
        lab.fails(1, &[&["keys", "watch"][..], &words].concat())
    };
    let message = from("999", incarnation);
    assert!(message.contains("has not happened yet"), "{message}");
    let message = from("1", "0123");
    assert!(message.contains("list the keys again"), "{message}");
}

#[test]
fn run_starts_the_monitor_with_the_socket_of_its_name() {
    let lab = Lab::new();
    let bin = lab.folder.path().join("bin");
    std::fs::create_dir(&bin).expect("writable");
    std::os::unix::fs::symlink("/bin/echo", bin.join("patchbay-vmm")).expect("writable");
    // The command alone in its folder finds the monitor on PATH. Linked rather than copied: a copy
    // that is still open for writing in a child of another test's fork cannot be run.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    let run = |path: &std::path::Path, words: &str| {
        Command::new(&alone)
            .args(words.split(' '))
            .env("XDG_RUNTIME_DIR", lab.folder.path())
            .env("PATH", path)
            .output()
            .expect("starts")
    };
    for (words, name) in [
        ("run --name web1 --kernel bzImage --vcpus 2", "web1"),
        ("run --kernel bzImage --name web2 --vcpus 2", "web2"),
        ("run --kernel bzImage --vcpus 2 --name=web3", "web3"),
        ("--guest web4 run --kernel bzImage --vcpus 2", "web4"),
        ("run --kernel bzImage --vcpus 2", "default"),
    ] {
        let output = run(&bin, words);
        let socket = lab.folder.path().join(format!("patchbay/{name}.sock"));
        let expected = format!(
            "--name {name} --api-socket {} --kernel bzImage --vcpus 2\n",
            socket.display()
        );
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            expected,
            "{output:?}"
        );
    }
    let output = run(&bin, "run --kernel bzImage --api-socket a.sock");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("patchbay --socket PATH run"),
        "{output:?}"
    );
    let output = run(lab.folder.path(), "run --kernel bzImage");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("install patchbay-vmm"),
        "{output:?}"
    );
}

#[test]
fn completion_is_written_for_each_shell() {
    let lab = Lab::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            lab.ok(&["completion", shell]).contains("patchbay"),
            "{shell}"
        );
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error_message() {
    let lab = Lab::new();
    let mut list = lab
        .command(&["keys", "list"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    drop(list.stdout.take());
    let output = list.wait_with_output().expect("ends");
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// Nothing is armed, so that the recording is empty; on a full disk it cannot even begin.
#[test]
fn a_recording_is_written_to_the_named_file() {
    let lab = Lab::new();
    let file = lab.folder.path().join("t.json");
    let name = file.to_str().expect("text");
    let record = ["trace", "record", "--listen", "--duration", "1ms", "-o"];
    let said = lab.ok(&[&record[..], &[name]].concat());
    assert!(said.contains("t.json: 0 events"), "{said}");
    let timeline = std::fs::read(&file).expect("written");
    let timeline: Value = serde_json::from_slice(&timeline).expect("JSON");
    assert!(timeline["traceEvents"].is_array());
    let output = lab.run(&[&record[..], &["/dev/full"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("/dev/full: the disk is full"), "{said}");
}

#[test]
fn a_recording_that_is_refused_leaves_the_files_alone() {
    let lab = Lab::new();
    let path = |name| lab.folder.path().join(name);
    let (earlier, new, nowhere) = (path("earlier"), path("new"), path("no-folder/new"));
    std::fs::write(&earlier, "an earlier recording").expect("writable");
    let record = |file: &PathBuf| {
        let file = file.to_str().expect("text");
        // There is no agent to arm anything.
        let output = lab.run(&["trace", "record", "-o", file, "sched:*"]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = record(&earlier);
    assert!(said.contains("agent"), "{said}");
    let kept = std::fs::read_to_string(&earlier).expect("there");
    assert_eq!(kept, "an earlier recording");
    record(&new);
    assert!(!new.exists());
    let said = record(&nowhere);
    assert!(
        said.contains("no-folder/new cannot be written: No such file"),
        "{said}"
    );
}
