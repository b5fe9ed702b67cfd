// SPDX-License-Identifier: Apache-2.0

use std::process::Command;

use super::lab::{Commands, Lab};

#[test]
fn run_starts_the_monitor_with_the_socket_of_its_name() {
    let lab = Lab::new();
    let bin = lab.folder().join("bin");
    std::fs::create_dir(&bin).expect("writable");
    std::os::unix::fs::symlink("/bin/echo", bin.join("patchbay-vmm")).expect("writable");
    // If patchbay-vmm is not in the command's own folder, the command finds it on PATH. The command
    // is linked and not copied, because a copy cannot be run while a forked child of another test
    // has it open for writing.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    let run = |path: &std::path::Path, words: &str| {
        Command::new(&alone)
            .args(words.split(' '))
            .env("XDG_RUNTIME_DIR", lab.folder())
            .env("PATH", path)
            .output()
            .expect("starts")
    };
    for (words, name) in [
        ("guest run --name web1 --kernel bzImage --vcpus 2", "web1"),
        ("guest run --kernel bzImage --name web2 --vcpus 2", "web2"),
        ("guest run --kernel bzImage --vcpus 2 --name=web3", "web3"),
        ("--guest web4 guest run --kernel bzImage --vcpus 2", "web4"),
        ("guest run --kernel bzImage --vcpus 2", "default"),
    ] {
        let output = run(&bin, words);
        let socket = lab.folder().join(format!("patchbay/{name}.sock"));
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
    // PATCHBAY_SOCKET names the socket of the running monitor. A new monitor must not listen there,
    // because it would replace that socket.
    let mut command = Command::new(&alone);
    command.args(["guest", "run", "--kernel", "bzImage"]);
    command
        .env("XDG_RUNTIME_DIR", lab.folder())
        .env("PATH", &bin);
    let output = command.env("PATCHBAY_SOCKET", "/run/other.sock").output();
    let said = String::from_utf8(output.expect("starts").stdout).expect("text");
    assert!(
        said.contains("patchbay/default.sock") && !said.contains("other.sock"),
        "{said}"
    );
    let output = run(&bin, "--socket s guest run --kernel bzImage");
    assert!(String::from_utf8_lossy(&output.stdout).contains("--api-socket s "));
    let output = run(&bin, "guest run --kernel bzImage --api-socket a.sock");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("patchbay --socket PATH guest run"),
        "{output:?}"
    );
    let output = run(lab.folder(), "guest run --kernel bzImage");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("install patchbay-vmm"),
        "{output:?}"
    );
}

/// Checks that the usage messages of other programs show the command that was typed. The test
/// replaces these programs with bash, whose messages contain the name that it was started with.
#[test]
fn usage_names_the_command_that_was_typed() {
    let lab = Lab::new();
    let bin = lab.folder().join("bin");
    std::fs::create_dir(&bin).expect("writable");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    for (program, words, typed) in [
        (
            "patchbay-vmm",
            &["guest", "run"][..],
            "patchbay guest run: ",
        ),
        (
            "patchbay-attach",
            &["attach", "--nonsense"],
            "patchbay attach: ",
        ),
    ] {
        std::os::unix::fs::symlink("/bin/bash", bin.join(program)).expect("writable");
        let mut command = Command::new(&alone);
        command.args(words).env("XDG_RUNTIME_DIR", lab.folder());
        let output = command.env("PATH", &bin).output().expect("starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.starts_with(typed), "{said}");
    }
}

#[test]
fn help_shows_the_monitors_options() {
    let lab = Lab::new();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    let help = |path: &std::path::Path, words: &[&str]| {
        let mut command = Command::new(&alone);
        let output = command.args(words).env("PATH", path).output();
        let output = output.expect("starts");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let monitor = folder.path().join("bin");
    std::fs::create_dir(&monitor).expect("writable");
    std::os::unix::fs::symlink("/bin/echo", monitor.join("patchbay-vmm")).expect("writable");
    for words in [&["guest", "run", "--help"][..], &["run", "-h"]] {
        let text = help(&monitor, words);
        // The monitor is replaced by echo, whose output follows the help of the command.
        assert!(text.contains("Usage: patchbay guest run"), "{text}");
        assert!(text.contains("The monitor, patchbay-vmm:\n\n"), "{text}");
        let text = help(lab.folder(), words);
        assert!(
            text.contains("install patchbay-vmm beside patchbay"),
            "{text}"
        );
    }
}

#[test]
fn commands_about_policy_log_and_certificates_are_the_daemons() {
    let lab = Lab::new();
    let bin = lab.folder().join("bin");
    std::fs::create_dir(&bin).expect("writable");
    std::os::unix::fs::symlink("/bin/echo", bin.join("patchbayd")).expect("writable");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    for words in [
        "policy can alice enable net_* --guest web-1",
        "policy --help",
        "audit --log x verify",
        "certs issue host --host h --days 3",
    ] {
        let mut command = Command::new(&alone);
        let output = command.args(words.split(' ')).env("PATH", &bin).output();
        let output = output.expect("starts");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("{words}\n")
        );
    }
    let mut command = Command::new(&alone);
    let output = command.arg("certs").env("PATH", lab.folder()).output();
    let output = output.expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("install patchbayd"),
        "{output:?}"
    );
}
