// SPDX-License-Identifier: Apache-2.0

//! Tests the systemd unit under a systemd booted in namespaces.

#[path = "../../tests/bare_metal/mod.rs"]
mod bare_metal;
#[path = "../../../tests/unit/boot.rs"]
mod boot;
mod program;

use std::path::Path;
use std::process::Command;

use bare_metal::watchdog;
use program::{QUIET, has_kvm, kernel};

const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbay-vmm");
const UNIT: &str = include_str!("../../patchbay@.service");

/// Limit on the exposure in tenths. `systemd-analyze security` rates anything below 20 as OK.
const EXPOSURE: &str = "--threshold=12";

#[test]
fn the_unit_is_well_formed_and_leaves_little_exposed() {
    if !Path::new("/lib/systemd/systemd").exists() {
        return println!("SKIPPED: systemd is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("patchbay@.service");
    // The program named in the unit must exist.
    std::fs::write(&unit, UNIT.replace("/usr/bin/patchbay-vmm", PROGRAM)).unwrap();
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
    if !has_kvm() {
        return;
    }
    let kernel = kernel(QUIET);
    let guest = |kernel: &str| format!("GUEST=--kernel {kernel} --memory 4M --no-patchbay\n");
    let [good, broken] = ["/etc/patchbay/kernel", "/nonexistent"].map(guest);
    let machine = boot::Machine {
        programs: &[PROGRAM],
        units: &[("patchbay@.service", UNIT)],
        steps: include_str!("unit/steps.sh"),
        etc: &[
            ("kernel", &kernel),
            ("demo.conf", good.as_bytes()),
            ("other.conf", good.as_bytes()),
            ("broken.conf", broken.as_bytes()),
        ],
    };
    let Some(host) = machine.run() else { return };
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    assert_eq!(read("done"), "all\n", "{}", read("log"));
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
