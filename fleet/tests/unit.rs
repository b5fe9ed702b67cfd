// SPDX-License-Identifier: Apache-2.0
//! The systemd unit.

use std::path::Path;
use std::process::Command;

const UNIT: &str = include_str!("../patchbay-fleet.service");
const UNIT_NAME: &str = "patchbay-fleet.service";
const INSTALLED: &str = "/usr/bin/patchbay-fleet";
const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbay-fleet");

/// Boots a systemd in namespaces that runs `steps.sh`; the folder with what it found out. `None` if none boots
/// here.
fn boot(etc: &[(&str, &str)]) -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root boots a systemd");
        return None;
    }
    let [host, scratch] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    for folder in ["bin", "units", "etc"] {
        std::fs::create_dir(host.path().join(folder)).expect("created");
    }
    let bin = host
        .path()
        .join("bin")
        .join(Path::new(INSTALLED).file_name().expect("a name"));
    std::os::unix::fs::symlink(PROGRAM, bin).expect("linked");
    let put =
        |name: &str, text: &str| std::fs::write(host.path().join(name), text).expect("written");
    put(&format!("units/{UNIT_NAME}"), UNIT);
    put("steps.sh", include_str!("unit/steps.sh"));
    for (name, text) in etc {
        put(&format!("etc/{name}"), text);
    }
    let namespaces = [
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--cgroup",
        "--ipc",
        "--uts",
    ];
    let output = Command::new("unshare")
        .args(namespaces)
        .arg("sh")
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/unit/boot.sh"
        ))
        .args([scratch.path(), host.path()])
        .output();
    let output = output.expect("unshare starts");
    if !host.path().join("log").exists() {
        let why = String::from_utf8_lossy(&output.stderr);
        println!("SKIPPED: no systemd boots in namespaces here: {why}");
        return None;
    }
    Some(host)
}

#[test]
fn systemd_starts_restarts_and_stops_the_controller() {
    let options = "OPTIONS=--standalone --host local=/run/patchbayd/patchbayd.sock\n";
    let Some(host) = boot(&[("fleet.conf", options)]) else {
        return;
    };
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    assert_eq!(read("done"), "all\n", "{}", read("log"));
    assert_eq!(read("modes"), "600\n");
    let status = read("status");
    for line in [
        "CapEff:\t0000000000000000\n",
        "NoNewPrivs:\t1\n",
        "Seccomp:\t2\n",
    ] {
        assert!(status.contains(line), "{status}");
    }
    assert_eq!(read("restarted"), "restarted\n");
    assert_eq!(read("stopped"), "success\n");
}
