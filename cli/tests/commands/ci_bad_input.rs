// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci run` with files that cannot be copied, without disk space, and with signals
//! at various times.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::ci::Ci;
use super::lab::end;

/// Returns the command of a run whose temporary files are in the test's folder.
pub(super) fn with_own_tmp(ci: &Ci, words: &[&str]) -> Command {
    verb_with_own_tmp(ci, "run", words)
}

/// Returns `patchbay ci VERB` whose temporary files are in the test's folder.
pub(super) fn verb_with_own_tmp(ci: &Ci, verb: &str, words: &[&str]) -> Command {
    std::fs::create_dir_all(ci.path("tmp")).expect("a folder");
    let mut command = ci.verb(verb, words);
    command.env("TMPDIR", ci.path("tmp"));
    command
}

#[track_caller]
fn assert_nothing_is_left(ci: &Ci) {
    let left: Vec<_> = std::fs::read_dir(ci.path("tmp"))
        .expect("it is there")
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

pub(super) fn make_pipe(ci: &Ci, name: &str) {
    let made = Command::new("mkfifo").arg(ci.path(name)).status();
    assert!(made.expect("mkfifo runs").success());
}

#[test]
fn what_cannot_be_copied_is_named() {
    let Some(ci) = Ci::new() else { return };
    // The program is linked against a library that no machine has.
    let program = std::fs::read("/bin/ls").expect("this machine has it");
    let (name, other) = (b"libc.so.6", b"libQ.so.6");
    let mut program = program;
    let places: Vec<usize> = (0..program.len() - name.len())
        .filter(|&at| program[at..].starts_with(name))
        .collect();
    assert!(!places.is_empty(), "/bin/ls is static");
    for at in places {
        program[at..at + name.len()].copy_from_slice(other);
    }
    std::fs::write(ci.path("program"), program).expect("written");
    let texts = ["program needs the library libQ.so.6", "LD_LIBRARY_PATH"];
    ci.expect(125, &texts, &["--copy", "program", "--", "./program"]);

    make_pipe(&ci, "pipe");
    let texts = ["pipe: it is neither a file nor a folder"];
    ci.expect(125, &texts, &["--copy", "pipe", "--", "true"]);
    ci.expect(
        125,
        &["cannot copy /dev/zero"],
        &["--copy", "/dev/zero", "--", "true"],
    );
    ci.expect(
        125,
        &["absent is no lib/modules/VERSION"],
        &["--modules", "absent", "--", "true"],
    );
}

#[test]
fn a_killed_agent_is_told_from_a_guest_that_ended() {
    let Some(ci) = Ci::new() else { return };
    ci.expect(
        125,
        &["the agent in the guest ended, or was killed"],
        &["--", "kill-agent"],
    );
}

#[test]
fn no_space_is_an_error_that_names_the_file() {
    let Some(ci) = Ci::new() else { return };
    // Writes beyond this limit fail, as they do on a full disk.
    let fresh = [
        "--append", "savable", "--matrix", "a", "--fresh", "--", "true",
    ];
    // The unit of the limit is 512 bytes. The memory of the saved guest has 64 MiB.
    for (limit, words, why) in [
        ("200", &["--", "true"][..], "cannot write the initramfs"),
        ("100000", &fresh, "/snapshot: File too large"),
    ] {
        let limited = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$0\" \"$@\"");
        let run = with_own_tmp(&ci, words);
        let mut shell = Command::new("sh");
        shell.args(["-c", &limited]).arg(run.get_program());
        shell.args(run.get_args()).stdin(Stdio::null());
        shell.current_dir(run.get_current_dir().expect("set"));
        let variables = run.get_envs();
        shell.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        let output = shell.output().expect("sh runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{error}");
        assert!(error.contains(why), "{error}");
        assert!(!error.contains(".patchbay-snapshot-"), "{error}");
        // A simulated monitor that is killed leaves a folder of its own.
        if !words.contains(&"--fresh") {
            assert_nothing_is_left(&ci);
        }
    }

    let texts = ["cannot write /dev/full", "No space left"];
    ci.expect(125, &texts, &["--junit", "/dev/full", "--", "true"]);
}

/// Checks that the error is reported before the lab boots, which takes minutes on a machine whose
/// KVM cannot run Linux.
#[test]
fn files_are_checked_before_the_lab_boots() {
    if patchbay_lab::kvm::Kvm::probe().runs_linux() {
        println!("SKIPPED: guests run on this machine's KVM");
        return;
    }
    let Some(ci) = Ci::new() else { return };
    let nowhere = ci.path("nowhere/junit.xml");
    let nowhere = nowhere.to_str().expect("text");
    for (words, why) in [
        (
            &["--copy", "/nonexistent", "--", "true"][..],
            "/nonexistent",
        ),
        (&["--initrd", "/nonexistent", "--", "true"], "/nonexistent"),
        (&["--modules", "/nonexistent", "--", "true"], "/nonexistent"),
        (&["--monitor", "/nonexistent", "--", "true"], "/nonexistent"),
        (&["--junit", nowhere, "--", "true"], "is not a folder"),
    ] {
        let mut run = with_own_tmp(&ci, words);
        // If the run tried to prepare the lab, it would fail, because the cache is empty and
        // nothing can be downloaded.
        run.env_remove("PATCHBAY_LAB_OUT")
            .env("XDG_CACHE_HOME", ci.path("cache"))
            .env("http_proxy", "http://127.0.0.1:1");
        let output = run.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {said}");
        assert!(
            said.contains(why) && !said.contains("in the lab"),
            "{words:?}: {said}"
        );
        assert_nothing_is_left(&ci);
    }
}

/// Sends a signal while the program looks up the lab's packages, when no temporary file exists yet.
#[test]
fn a_signal_before_the_lab_starts_leaves_nothing() {
    let Some(ci) = Ci::new() else { return };
    let programs = ci.path("programs");
    std::fs::create_dir(&programs).expect("a folder");
    make_pipe(&ci, "asked");
    let script = format!(
        "#!/bin/sh\necho >{}\nexec sleep 600\n",
        ci.path("asked").display()
    );
    let stub = programs.join("dpkg-query");
    std::fs::write(&stub, script).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&stub, mode).expect("ours");
    let path = std::env::var("PATH").expect("a path");
    let path = format!("{}:{path}", programs.display());
    for signal in ["INT", "TERM", "HUP"] {
        // If the tests run under nohup, the processes that they start inherit an ignored SIGHUP.
        let mut run = Command::new("env");
        run.args(["--default-signal=HUP,INT", env!("CARGO_BIN_EXE_patchbay")]);
        run.args(["lab", "--", "true"]).env("PATH", &path);
        std::fs::create_dir_all(ci.path("tmp")).expect("a folder");
        run.env("TMPDIR", ci.path("tmp"))
            .env_remove("PATCHBAY_LAB_OUT");
        let run = run.stdin(Stdio::null()).spawn().expect("it starts");
        std::fs::read_to_string(ci.path("asked")).expect("a pipe");
        end(run, signal);
        assert_nothing_is_left(&ci);
    }
}

#[test]
fn a_signal_during_the_preparation_leaves_nothing() {
    let Some(ci) = Ci::new() else { return };
    make_pipe(&ci, "initrd");
    for (signal, status) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let run = with_own_tmp(&ci, &["--initrd", "initrd", "--", "true"]).spawn();
        let run = run.expect("it starts");
        // Opening blocks until the run opens the pipe for reading. The run then waits until the
        // pipe is closed.
        let pipe = std::fs::OpenOptions::new()
            .write(true)
            .open(ci.path("initrd"));
        let pipe = pipe.expect("a pipe");
        assert_eq!(end(run, signal), Some(status), "{signal}");
        assert_nothing_is_left(&ci);
        drop(pipe);
    }
}

#[test]
fn a_signal_during_the_boot_leaves_nothing() {
    let Some(ci) = Ci::new() else { return };
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let words = ["--show-console", "--append", "silent", "--", "true"];
        let mut run = with_own_tmp(&ci, &words);
        let mut run = run.stderr(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(run.stderr.take().expect("piped")).lines();
        let booting = |line: &std::io::Result<String>| {
            line.as_ref()
                .is_ok_and(|line| line.contains("no more is said"))
        };
        assert!(lines.into_iter().any(|line| booting(&line)));
        let pid = run.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(children).expect("it has a monitor");
        let monitors: Vec<&str> = children.split_whitespace().collect();
        assert!(!monitors.is_empty());
        assert_eq!(end(run, signal), Some(status), "{signal}");
        for monitor in monitors {
            // There is no event for the end of a process that is not a child.
            while Path::new(&format!("/proc/{monitor}")).exists() {
                std::thread::yield_now();
            }
        }
        assert_nothing_is_left(&ci);
    }
}

/// Checks a run on a machine whose KVM cannot run Linux: its guest boots in the lab, which must end
/// with the run.
#[test]
fn a_signal_ends_a_run_in_the_lab_and_leaves_nothing() {
    if patchbay_lab::kvm::Kvm::probe().runs_linux() {
        println!("SKIPPED: guests run on this machine's KVM");
        return;
    }
    // `cargo xtask test` sets this variable if it has fetched the lab.
    if std::env::var_os("PATCHBAY_TEST_DISTRO_KERNELS").is_none() {
        println!("SKIPPED: the lab is not fetched; run `cargo xtask test`");
        return;
    }
    let Some(ci) = Ci::new() else { return };
    for (signal, status) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let mut run = with_own_tmp(&ci, &["--", "true"]);
        let mut run = run
            .env_remove("PATCHBAY_LAB_OUT")
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        // The lab's files exist while it boots. Without inotify, there is no event for the creation
        // of a folder.
        let booting = || {
            let files = std::fs::read_dir(ci.path("tmp")).expect("a folder");
            let mut names = files.map(|file| file.expect("a name").file_name());
            names.any(|name| name.to_string_lossy().starts_with("patchbay-lab-"))
        };
        while !booting() {
            assert!(run.try_wait().expect("its status").is_none());
            std::thread::yield_now();
        }
        assert_eq!(end(run, signal), Some(status), "{signal}");
        assert_nothing_is_left(&ci);
    }
}
