// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci run` without KVM, with the guests of [`super::ci_guest`].

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::ci_guest::MONITOR_ARGUMENTS;
use super::lab::end;

/// Timeout for the end of a process. No correct run reaches it.
const PATIENCE: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

/// A folder with a kernel and a monitor.
pub(super) struct Ci {
    folder: tempfile::TempDir,
}

pub(super) struct Done {
    status: Option<i32>,
    pub(super) out: String,
    pub(super) err: String,
}

impl Ci {
    /// Creates the folder. Prints the reason and returns `None` if this machine has no static
    /// busybox.
    pub(super) fn new() -> Option<Self> {
        if !Path::new("/bin/busybox").exists() {
            println!("SKIPPED: /bin/busybox is missing; install busybox-static");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut kernel = vec![0; 4096];
        kernel[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        kernel[0x236] = 1;
        std::fs::write(folder.path().join("kernel"), kernel).expect("written");
        let this = std::env::current_exe().expect("this program");
        let script = format!(
            "#!/bin/sh\n{MONITOR_ARGUMENTS}=\"$*\" exec {} --exact commands::ci_guest::monitor --nocapture\n",
            this.display()
        );
        let monitor = folder.path().join("monitor");
        std::fs::write(&monitor, script).expect("written");
        std::fs::set_permissions(&monitor, PermissionsExt::from_mode(0o755)).expect("a mode");
        Some(Self { folder })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn command(&self, words: &[&str]) -> Command {
        self.verb("run", words)
    }

    /// Returns `patchbay ci VERB` with the kernel and the monitor.
    pub(super) fn verb(&self, verb: &str, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay"));
        command
            .args(["ci", verb, "--kernel", "kernel", "--agent", "/bin/busybox"])
            .env("PATCHBAY_VMM", self.path("monitor"))
            .args(words)
            .current_dir(self.folder.path())
            // This variable marks the lab, so the run boots its guests here even without KVM.
            .env("PATCHBAY_LAB_OUT", self.folder.path())
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Done {
        let output = self.command(words).output().expect("it starts");
        Done {
            status: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }

    /// Runs a command that must end with `status` and print `texts`.
    #[track_caller]
    pub(super) fn expect(&self, status: i32, texts: &[&str], words: &[&str]) -> Done {
        let done = self.run(words);
        assert_eq!(done.status, Some(status), "{words:?}: {}", done.err);
        for text in texts {
            assert!(
                done.err.contains(text),
                "{text:?} of {words:?}: {}",
                done.err
            );
        }
        done
    }
}

#[test]
fn output_and_status_are_the_commands() {
    let Some(ci) = Ci::new() else { return };
    let done = ci.expect(
        7,
        &["to stderr", "1 boot "],
        &["--", "say", "to stdout", "to stderr", "7"],
    );
    assert_eq!(done.out, "to stdout");
    let done = ci.expect(0, &[], &["--ktap", "--", "say", "out\nok 9 faked", "", "0"]);
    assert!(
        done.out
            .starts_with("KTAP version 1\n1..1\n# out\n# ok 9 faked\nok 1 say"),
        "{}",
        done.out
    );
}

#[test]
fn every_bad_end_is_told_apart() {
    let Some(ci) = Ci::new() else { return };
    ci.expect(
        1,
        &["the guest's kernel reported:", "kernel/x.c:1"],
        &["--", "warn"],
    );
    ci.expect(127, &["no program absent"], &["--", "absent"]);
    ci.expect(
        124,
        &["did not end within 0.2 s"],
        &["--timeout", "200ms", "--", "hang"],
    );
    ci.expect(125, &["Fatal exception"], &["--", "panic"]);
    ci.expect(125, &["powered off or reset"], &["--", "power-off"]);
    let lost = "the agent in the guest ended";
    ci.expect(125, &[lost], &["--", "lose-agent"]);
}

#[test]
fn a_guest_that_does_not_boot_says_why() {
    let Some(ci) = Ci::new() else { return };
    let with = |word| ["--append", word, "--", "true"];
    ci.expect(125, &["the kernel has no vsock"], &with("no-vsock"));
    ci.expect(
        125,
        &["No working init found", "the guest's console ends with"],
        &with("no-root"),
    );
    ci.expect(
        125,
        &["the monitor failed", "cannot be allocated"],
        &with("no-memory"),
    );
    let absent = ci.path("absent");
    let absent = absent.to_str().expect("text");
    ci.expect(
        125,
        &["does not exist", "--monitor"],
        &["--monitor", absent, "--", "true"],
    );
    ci.expect(
        125,
        &["cannot copy", "/absent"],
        &["--copy", absent, "--", "true"],
    );
    std::fs::write(ci.path("kernel"), "#!/bin/sh").expect("written");
    ci.expect(125, &["is not a kernel"], &["--", "true"]);
    let mut arm = vec![0; 4096];
    arm[56..60].copy_from_slice(b"ARM\x64");
    std::fs::write(ci.path("kernel"), arm).expect("written");
    ci.expect(125, &["a kernel for arm64"], &["--", "true"]);
    assert_eq!(ci.run(&["true"]).status, Some(2));
}

#[test]
fn files_are_collected_and_none_leaves_its_folder() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--collect",
        "/absent",
        "--collect",
        "/results",
        "--junit",
        "j.xml",
        "--",
        "true",
    ];
    ci.expect(0, &["/absent cannot be read"], &words);
    let read = |name| std::fs::read_to_string(ci.path(name)).expect("a file");
    assert_eq!(read("collected/results/one"), "text");
    assert!(read("j.xml").contains("tests=\"1\" failures=\"0\""));
    ci.expect(0, &["outside of"], &["--collect", "/hostile", "--", "true"]);
    assert!(!Path::new("/tmp/patchbay-escaped").exists());
}

#[test]
fn the_matrix_flips_each_key_alone_and_names_the_failing_ones() {
    let Some(ci) = Ci::new() else { return };
    let texts = [
        "FAIL  c=on",
        "exit status 9",
        "output of the test",
        ", 1 boot ",
        "8 passed, 1 failed",
    ];
    let words = [
        "--ktap",
        "--matrix",
        "*",
        "!guarded",
        "--",
        "fail-with",
        "c",
    ];
    let done = ci.expect(1, &texts, &words);
    assert_eq!(done.out.matches("\nnot ok ").count(), 1, "{}", done.out);
    assert!(done.out.contains("\nnot ok 4 c=on\n"), "{}", done.out);
    // Each key was restored before the next was flipped.
    let both = ["--matrix", "[a-h]", "--", "fail-with", "c", "d"];
    ci.expect(0, &["9 passed, 0 failed"], &both);
    // A guarded key is skipped if a glob selects it, and refused if it is named.
    ci.expect(
        0,
        &["skip  guarded=on", "--allow-guarded"],
        &["--matrix", "g*", "--", "true"],
    );
    ci.expect(
        0,
        &["patchbay: no key was flipped"],
        &["--matrix", "sched_*", "--", "true"],
    );
    ci.expect(125, &["guarded"], &["--matrix", "guarded", "--", "true"]);
    ci.expect(
        125,
        &["no key nothing"],
        &["--matrix", "nothing", "--", "true"],
    );
    ci.expect(
        125,
        &["no key of the guest matches"],
        &["--matrix", "no*", "--", "true"],
    );
    ci.expect(
        1,
        &["FAIL  no key flipped", "no key was flipped"],
        &["--matrix", "a", "--", "say", "", "", "3"],
    );
}

#[test]
fn a_crash_boots_anew_and_the_rest_goes_on() {
    let Some(ci) = Ci::new() else { return };
    let texts = [
        "FAIL  c=on",
        "the other side",
        "8 passed, 1 failed",
        ", 2 boots ",
    ];
    ci.expect(1, &texts, &["--matrix", "[a-h]", "--", "panic-with", "c"]);
}

/// Checks that the next key is not blamed for a guest whose agent left after a timeout.
#[test]
fn a_guest_that_is_lost_after_a_timeout_is_replaced() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--timeout", "500ms", "--matrix", "[ab]", "--"];
    let texts = ["FAIL  a=on", "within 0.5 s", "ok    b=on", ", 2 boots "];
    ci.expect(1, &texts, &[&words[..], &["leave-with", "a"]].concat());
}

/// Checks that a key, and not the next one, is blamed for a problem when it is flipped back.
#[test]
fn a_failure_of_the_way_back_belongs_to_its_key() {
    let Some(ci) = Ci::new() else { return };
    for (how, why) in [
        ("warn", "s): the kernel reported: [    8.000000] WARNING"),
        ("panic", "the kernel reported: [    8.000000] Kernel panic"),
        ("late", "s): the keys could not be flipped back: "),
    ] {
        let texts = ["FAIL  a=on", why, "ok    b=on", ", 2 boots "];
        let words = ["--matrix", "[ab]", "--", "fail-back", "a", how];
        ci.expect(1, &texts, &words);
    }
}

#[test]
fn together_finds_the_smallest_failing_set() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--matrix",
        "[a-h]",
        "--together",
        "--",
        "fail-with",
        "b",
        "g",
    ];
    let done = ci.expect(1, &["fails with b=on g=on: exit status 9"], &words);
    assert!(done.err.contains("with all 8 keys flipped"), "{}", done.err);
    let words = [
        "--matrix",
        "[a-h]",
        "--together",
        "--",
        "panic-with",
        "b",
        "g",
    ];
    ci.expect(1, &["fails with b=on g=on: Kernel panic"], &words);
    let words = ["--matrix", "g", "guarded*", "--together", "--", "true"];
    ci.expect(0, &["skip  guarded=on: guarded"], &words);
    let words = ["--matrix", "[a-h]", "--together", "--", "true"];
    ci.expect(0, &["2 passed, 0 failed"], &words);
}

#[test]
fn keys_are_set_in_every_guest() {
    let Some(ci) = Ci::new() else { return };
    let done = ci.expect(0, &[], &["--set", "b=on", "--set", "d=on", "--", "count"]);
    assert_eq!(done.out, "0 1 0 1 0 0 0 0");
    ci.expect(125, &["nothing"], &["--set", "nothing=on", "--", "true"]);
    assert_eq!(ci.run(&["--set", "b=yes", "--", "true"]).status, Some(2));
}

#[test]
fn no_monitor_outlives_its_run() {
    let Some(ci) = Ci::new() else { return };
    for signal in ["INT", "TERM", "KILL"] {
        let mut command = ci.command(&["--timeout", "1000s", "--", "say", "ready\n", "", "x"]);
        let mut run = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut ready = [0; 6];
        let mut out = run.stdout.take().expect("piped");
        out.read_exact(&mut ready).expect("it runs");
        let pid = run.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(children).expect("it has a monitor");
        let monitor = children.trim().parse().ok().and_then(Pid::from_raw);
        let monitor = monitor.unwrap_or_else(|| panic!("one child: {children:?}"));
        let monitor = pidfd_open(monitor, PidfdFlags::empty()).expect("it runs");
        end(run, signal);
        // The pidfd becomes readable when the process ends, whichever process reaps it.
        let ended = &mut [PollFd::new(&monitor, PollFlags::IN)];
        let ends = poll(ended, Some(&PATIENCE)).expect("polled");
        if ends == 0 {
            let _ = pidfd_send_signal(&monitor, Signal::KILL);
            panic!("the monitor runs on after SIG{signal}");
        }
    }
}
