// SPDX-License-Identifier: Apache-2.0
//! Tests the systemd unit.

#[path = "../../../tests/unit/boot.rs"]
mod boot;

const UNIT: &str = include_str!("../patchbay-fleet.service");

#[test]
fn systemd_starts_restarts_and_stops_the_controller() {
    let options = b"OPTIONS=--standalone --host local=/run/patchbayd/patchbayd.sock\n";
    let machine = boot::Machine {
        programs: &[env!("CARGO_BIN_EXE_patchbay-fleet")],
        units: &[("patchbay-fleet.service", UNIT)],
        steps: include_str!("unit/steps.sh"),
        etc: &[("fleet.conf", options)],
    };
    let Some(host) = machine.run() else { return };
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    assert_eq!(read("done"), "all\n", "{}", read("log"));
    assert_eq!(read("modes"), "600\n");
    let status = read("status");
    assert_ne!(read("uid"), "0\n");
    for line in [
        &format!("Uid:\t{}", read("uid").trim_end()),
        "CapEff:\t0000000000000000\n",
        "NoNewPrivs:\t1\n",
        "Seccomp:\t2\n",
    ] {
        assert!(status.contains(line), "{status}");
    }
    assert_eq!(read("restarted"), "restarted\n");
    assert_eq!(read("stopped"), "success\n");
}
