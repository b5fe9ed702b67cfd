// SPDX-License-Identifier: Apache-2.0

//! Tests the systemd unit under a systemd booted in namespaces.

mod bare_metal;
mod program;

use std::path::{Path, PathBuf};
use std::process::Command;

use bare_metal::watchdog;
use program::{QUIET, has_kvm, kernel};

const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbay-vmm");

/// In tenths. `systemd-analyze security` calls anything below 20 OK.
const EXPOSURE: &str = "--threshold=12";

fn in_tree(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns whether systemd is installed; prints a message if not.
fn has_systemd() -> bool {
    let there = Path::new("/lib/systemd/systemd").exists();
    if !there {
        println!("SKIPPED: systemd is not installed");
    }
    there
}

#[test]
fn the_unit_is_well_formed_and_leaves_little_exposed() {
    if !has_systemd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("patchbay@.service");
    let text = std::fs::read_to_string(in_tree("patchbay@.service")).unwrap();
    // The program named in the unit must exist.
    std::fs::write(&unit, text.replace("/usr/bin/patchbay-vmm", PROGRAM)).unwrap();
    let instance = folder.path().join("patchbay@demo.service");
    let security = ["security", "--offline=yes", EXPOSURE];
    for arguments in [&["verify"][..], &security] {
        let output = Command::new("systemd-analyze")
            .args(arguments)
            .arg(&instance)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}{errors}");
        // systemd-analyze only warns about unknown settings.
        assert!(!errors.contains("patchbay@.service:"), "{errors}");
    }
}

#[test]
fn systemd_starts_reloads_and_stops_guests() {
    let _watchdog = watchdog(120);
    if !has_systemd() || !has_kvm() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root boots a systemd");
    }
    let [host, scratch] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let put = |name: &str, content: &[u8]| std::fs::write(host.path().join(name), content).unwrap();
    for folder in ["bin", "units", "etc"] {
        std::fs::create_dir(host.path().join(folder)).unwrap();
    }
    std::os::unix::fs::symlink(PROGRAM, host.path().join("bin/patchbay-vmm")).unwrap();
    put(
        "units/patchbay@.service",
        &std::fs::read(in_tree("patchbay@.service")).unwrap(),
    );
    put("etc/kernel", &kernel(QUIET));
    let guest = |kernel: &str| format!("GUEST=--kernel {kernel} --memory 4M --no-patchbay\n");
    for name in ["demo", "other"] {
        put(
            &format!("etc/{name}.conf"),
            guest("/etc/patchbay/kernel").as_bytes(),
        );
    }
    put("etc/broken.conf", guest("/nonexistent").as_bytes());
    std::fs::copy(in_tree("tests/unit/steps.sh"), host.path().join("steps.sh")).unwrap();

    let output = Command::new("unshare")
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--cgroup",
            "--ipc",
            "--uts",
            "sh",
        ])
        .arg(in_tree("../tests/unit/boot.sh"))
        .args([scratch.path(), host.path()])
        .output()
        .unwrap();
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    let log = read("log");
    if log.is_empty() {
        let why = String::from_utf8_lossy(&output.stderr);
        return println!("SKIPPED: no systemd boots in namespaces here: {why}");
    }
    assert_eq!(read("done"), "all\n", "{log}");
    // Guests run as different users.
    let users = [read("user.demo"), read("user.other")];
    assert!(
        users[0] != users[1] && !users.contains(&"root\n".to_owned()),
        "{users:?}"
    );
    let status = read("status");
    for (field, value) in [
        ("CapEff", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let line = format!("{field}:\t{value}\n");
        assert!(status.contains(&line), "{status}");
    }
    assert_eq!(read("modes"), "600\n".repeat(3));
    assert_eq!(read("broken"), "exit-code\n");
    assert_eq!(read("stopped"), "success\n");
}
