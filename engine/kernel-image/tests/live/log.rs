// SPDX-License-Identifier: Apache-2.0
//! The location of a kernel's log.

use patchbay_kernel_image::live::{Finder, Log, Way};
use patchbay_observe::log::Layout;
use patchbay_observe::testing::Version;

use crate::craft_guest::{CraftedGuest, guest, guest_without};

fn find(finder: &mut Finder, guest: &CraftedGuest) -> Result<Log, String> {
    let log = finder.find_log(guest, &guest.cpus, Way::Image);
    log.map_err(|error| error.to_string())
}

#[test]
fn the_log_is_found_beside_the_keys_and_alone() {
    let guest = guest();
    let mut finder = Finder::default();
    let alone = find(&mut finder, &guest).expect("found");
    assert_eq!(alone.source.prb, guest.symbol("prb"));
    let symbol = |name| guest.symbol(name);
    let state = patchbay_observe::state::Source {
        taints: Some(symbol("tainted_mask")),
        load: Some(symbol("avenrun")),
        reports: Some([symbol("warn_count"), symbol("oops_count")]),
        pressure: Some([symbol("psi_disabled"), symbol("psi_system") + 64]),
        panic: Some(symbol("panic_cpu")),
        // The crafted kernel has no timekeeper.
        uptime: None,
    };
    assert_eq!(alone.state, state);
    let of_6_12 = Layout::read(&Version::V6_12).expect("whole");
    assert_eq!(alone.source.layout, of_6_12);
    let tasks = alone.tasks.clone().expect("found");
    let found = [tasks.cpus, tasks.online, tasks.offsets, tasks.current];
    let names = ["nr_cpu_ids", "__cpu_online_mask", "__per_cpu_offset"].map(symbol);
    // KASLR does not move the per-CPU variables of this kernel.
    assert_eq!(found, [names[0], names[1], names[2], 0x1f008]);
    // The crafted kernel has no tracing.
    let why = alone.trace.clone().expect_err("no types");
    assert!(
        why.contains("struct trace_array") && why.contains("CONFIG_TRACING"),
        "{why}"
    );
    let kernel = finder.find(&guest, &guest.cpus, Way::Image).expect("found");
    assert_eq!(kernel.log, Ok(alone.clone()));
    let note = Finder::default().find_log(&guest, &[], Way::Note);
    assert_eq!(note.expect("found"), alone);
}

/// A kernel that boots or panics has a log, although its keys cannot be changed.
#[test]
fn closed_gates_do_not_hide_the_log() {
    for (symbol, value) in [("panic_cpu", 0), ("system_state", 0)] {
        let guest = guest();
        guest.put_u32(guest.symbol(symbol), value);
        let mut finder = Finder::default();
        let keys = finder.find(&guest, &guest.cpus, Way::Image);
        assert!(keys.is_err(), "{symbol}");
        find(&mut finder, &guest).expect(symbol);
        find(&mut Finder::default(), &guest).expect(symbol);
    }
}

/// Once found, the log is confirmed by the vCPUs and the banner alone, until another kernel runs.
#[test]
fn a_known_log_is_confirmed_without_the_types() {
    let guest = guest();
    let mut finder = Finder::default();
    let first = find(&mut finder, &guest).expect("found");
    guest.put(guest.symbol("__start_BTF"), &[0; 4]);
    assert_eq!(find(&mut finder, &guest), Ok(first));
    let error = find(&mut Finder::default(), &guest).expect_err("no types");
    assert!(error.contains("BTF"), "{error}");
    // The version in the banner changes.
    guest.put(guest.symbol("linux_banner") + 14, b"9");
    find(&mut finder, &guest).expect_err("another kernel");
}

#[test]
fn a_kernel_without_the_symbol_says_so() {
    let guest = guest_without("prb");
    let error = find(&mut Finder::default(), &guest).expect_err("no symbol");
    let expected = "no single symbol prb; kernels before 5.10 have another log";
    assert!(error.contains(expected), "{error}");
    let kernel = Finder::default().find(&guest, &guest.cpus, Way::Image);
    assert!(kernel.expect("its keys are found").log.is_err());
    let guest = guest_without("current_task");
    let log = find(&mut Finder::default(), &guest).expect("found");
    let why = log.tasks.expect_err("no symbol");
    assert!(why.contains("no variable with a CPU's task"), "{why}");
}
