// SPDX-License-Identifier: Apache-2.0
//! Tests the systemd unit.

use std::process::Command;

#[path = "../../../../tests/unit/boot.rs"]
mod boot;

const UNIT: &str = include_str!("../../patchbayd.service");
const ATTACH: &str = include_str!("../../../../attach/patchbay-attach.service");
const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbayd");

#[test]
fn systemd_accepts_the_units() {
    for (name, unit) in [
        ("patchbayd.service", UNIT),
        ("patchbay-attach.service", ATTACH),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        // The programs are not installed on this machine.
        let lines = unit
            .lines()
            .map(|line| match line.starts_with("ExecStart=") {
                true => format!("ExecStart={PROGRAM}\n"),
                false => format!("{line}\n"),
            });
        std::fs::write(&path, lines.collect::<String>()).expect("written");
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
        let about_it = text.lines().filter(|line| line.contains(name));
        assert_eq!(about_it.collect::<Vec<_>>(), Vec::<&str>::new());
    }
}

/// Returns the capabilities of a unit, in order.
fn capabilities(unit: &str) -> Vec<&str> {
    let lines = unit.lines();
    let sets = lines.filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let mut all: Vec<&str> = sets.flat_map(str::split_whitespace).collect();
    all.sort_unstable();
    all
}

/// The daemon must not gain the rights of the attachers, whose rights must not grow either.
#[test]
fn each_unit_has_only_the_rights_that_it_needs() {
    assert_eq!(capabilities(UNIT), ["CAP_DAC_READ_SEARCH", "CAP_SETUID"]);
    assert_eq!(
        capabilities(ATTACH),
        [
            "CAP_BPF",
            "CAP_DAC_OVERRIDE",
            "CAP_PERFMON",
            "CAP_SETGID",
            "CAP_SETUID",
            "CAP_SYS_PTRACE"
        ]
    );
    let calls = |unit: &'static str| {
        let mut lines = unit.lines();
        lines.find_map(|line| line.strip_prefix("SystemCallFilter="))
    };
    assert_eq!(calls(UNIT), Some("@system-service"));
    assert_eq!(
        calls(ATTACH),
        Some("@system-service ptrace pidfd_getfd bpf")
    );
    // Whatever confines the daemon confines the attachers, with these exceptions.
    let confines = |line: &&str| {
        let names = ["Protect", "Restrict", "Private", "Memory", "Lock", "Key"];
        let others = ["NoNew", "DevicePolicy", "SystemCall", "LimitCORE", "UMask"];
        names
            .iter()
            .chain(&others)
            .any(|name| line.starts_with(name))
    };
    let missing = UNIT.lines().filter(confines);
    let missing = missing.filter(|line| !ATTACH.lines().any(|other| other == *line));
    let expected = [
        "MemoryMax=2G",
        "ProtectProc=invisible",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
        "RestrictSUIDSGID=yes",
        "SystemCallFilter=@system-service",
    ];
    assert_eq!(missing.collect::<Vec<_>>(), expected);
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
