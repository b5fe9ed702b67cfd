// SPDX-License-Identifier: Apache-2.0
//! Tests the systemd unit.

use std::process::Command;

#[path = "../../../../tests/unit/boot.rs"]
mod boot;

const UNIT: &str = include_str!("../../patchbayd.service");
const DROP_IN: &str = include_str!("../../patchbayd-attach.conf");
const INSTALLED: &str = "/usr/bin/patchbayd";
const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbayd");

#[test]
fn systemd_accepts_the_unit_and_its_drop_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("patchbayd.service");
    let drop_ins = folder.path().join("patchbayd.service.d");
    std::fs::create_dir(&drop_ins).expect("created");
    std::fs::write(drop_ins.join("attach.conf"), DROP_IN).expect("written");
    // The program is not installed on this machine.
    let unit = UNIT.replace(INSTALLED, PROGRAM);
    std::fs::write(&path, unit).expect("written");
    let verify = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output();
    let output = match verify {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: systemd-analyze cannot be run: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let about_it = text
        .lines()
        .filter(|line| line.contains("patchbayd.service"));
    assert_eq!(about_it.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn the_program_has_the_options_of_the_unit() {
    let help = Command::new(PROGRAM).arg("--help").output();
    let help = help.expect("it runs").stdout;
    let help = String::from_utf8_lossy(&help);
    let options = UNIT
        .split_whitespace()
        .filter(|word| word.starts_with("--"));
    let missing: Vec<_> = options.filter(|option| !help.contains(option)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}

#[test]
fn systemd_starts_reloads_restarts_and_stops_the_daemon() {
    let policy = b"rules: [{name: root, principals: ['uid:0'], role: admin}]\n";
    let machine = boot::Machine {
        programs: &[PROGRAM],
        units: &[("patchbayd.service", UNIT)],
        steps: include_str!("../unit/steps.sh"),
        etc: &[("policy.yaml", policy)],
    };
    let Some(host) = machine.run() else { return };
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    assert_eq!(read("done"), "all\n", "{}", read("log"));
    assert_eq!(read("modes"), "660 root patchbay\n600 root\n");
    // CAP_DAC_READ_SEARCH and CAP_SETUID.
    let status = read("status");
    for line in [
        "CapEff:\t0000000000000084\n",
        "NoNewPrivs:\t1\n",
        "Seccomp:\t2\n",
    ] {
        assert!(status.contains(line), "{status}");
    }
    assert_eq!(read("restarted"), "restarted\n");
    assert_eq!(read("stopped"), "success\n");
}
