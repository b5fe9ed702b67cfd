// SPDX-License-Identifier: Apache-2.0
//! Tests the decisions about a guest's slots, with made-up slots.

use patchbay_host_kernel::Protection;

use super::*;

fn slot(guest_address: u64, bytes: u64, process_address: u64) -> Slot {
    Slot {
        space: 0,
        guest_address,
        bytes,
        process_address,
        readonly: false,
        guest_memfd: false,
        logs_dirty_pages: false,
    }
}

fn vm(slots: &[Slot]) -> Vm {
    let mut vm = Vm::default();
    vm.slots = slots.to_vec();
    vm
}

#[test]
fn a_range_is_confirmed_only_as_a_whole() {
    const GIB: u64 = 1 << 30;
    let range = 4 * GIB..8 * GIB;
    let at = |slots: &[Slot]| place(&vm(slots), &range, Logging::Refuse);
    let whole = slot(4 * GIB, 4 * GIB, 1 << 40);
    assert_eq!(at(&[slot(0, GIB, 1 << 41), whole]), Some(1 << 40));
    assert_eq!(
        at(&[slot(3 * GIB, 6 * GIB, 1 << 40)]),
        Some((1 << 40) + GIB)
    );
    // The slot is shorter, in two parts, at a later address, or missing.
    let (half, rest) = (2 * GIB, slot(6 * GIB, 2 * GIB, 1 << 42));
    assert_eq!(at(&[slot(4 * GIB, half, 1 << 40)]), None);
    assert_eq!(at(&[slot(4 * GIB, half, 1 << 40), rest]), None);
    assert_eq!(at(&[slot(5 * GIB, 4 * GIB, 1 << 40)]), None);
    assert_eq!(at(&[]), None);
    let mut logged = whole;
    logged.logs_dirty_pages = true;
    assert_eq!(at(&[logged]), None);
    for logging in [Logging::Allow, Logging::Reported] {
        assert_eq!(place(&vm(&[logged]), &range, logging), Some(1 << 40));
    }
}

#[test]
fn logging_of_a_part_that_is_used_is_a_migration() {
    let ram = slot(0, 1 << 30, 1 << 40);
    let display = slot(0xe000_0000, 1 << 24, 1 << 41);
    let used = [addresses(&ram)];
    let logged = |one: Slot| Slot {
        logs_dirty_pages: true,
        ..one
    };
    let logs_any = |slots: &[Slot]| logs_any(&vm(slots), &used, Logging::Refuse);
    assert!(!logs_any(&[ram, display]));
    assert!(!logs_any(&[ram, logged(display)]));
    assert!(logs_any(&[logged(ram), display]));
    // A part of the range now has another slot.
    let part = slot(1 << 29, 1 << 20, 1 << 42);
    assert!(logs_any(&[logged(part), display]));
}

#[test]
fn a_dirty_ring_alone_is_no_migration_if_the_monitor_reports_those() {
    let ram = slot(0, 1 << 30, 1 << 40);
    let mut vm = vm(&[ram]);
    vm.dirty_ring_bytes = 1 << 16;
    for (logging, expected) in [
        (Logging::Refuse, true),
        (Logging::Allow, false),
        (Logging::Reported, false),
    ] {
        assert_eq!(logs(&vm, &ram, logging), expected, "{logging:?}");
        assert_eq!(refusal(&vm, logging).is_some(), expected, "{logging:?}");
    }
    vm.slots[0].logs_dirty_pages = true;
    assert!(logs(&vm, &vm.slots[0], Logging::Reported));
    assert_eq!(refusal(&vm, Logging::Reported), None);
}

#[test]
fn guests_that_cannot_be_patched_are_refused() {
    let slot = slot(0, 1 << 20, 1 << 30);
    let mut vm = Vm::default();
    assert!(refusal(&vm, Logging::Allow).is_some_and(|refusal| why(refusal).contains("no memory")));
    vm.slots = vec![slot];
    assert_eq!(refusal(&vm, Logging::Refuse), None);
    vm.slots[0].logs_dirty_pages = true;
    let logged = why(refusal(&vm, Logging::Refuse).expect("logged"));
    assert!(logged.contains("--dirty-logging-ok"), "{logged}");
    assert_eq!(refusal(&vm, Logging::Allow), None);
    vm.slots[0].guest_memfd = true;
    assert!(
        refusal(&vm, Logging::Allow).is_some_and(|refusal| why(refusal).contains("guest_memfd"))
    );
    for protection in [
        Protection::Protected("a test"),
        Protection::Unknown("a test"),
    ] {
        vm.slots = vec![slot];
        vm.protection = protection;
        assert!(
            refusal(&vm, Logging::Allow).is_some_and(|refusal| why(refusal).contains("a test"))
        );
        // QEMU has said that it is not, which decides if the kernel does not tell.
        let is_protected = matches!(protection, Protection::Protected(_));
        assert_eq!(refusal(&vm, Logging::Reported).is_some(), is_protected);
    }
}

#[test]
fn a_process_without_a_vm_is_refused() {
    let sleep = std::process::Command::new("sleep").arg("1000").spawn();
    let mut sleep = sleep.expect("coreutils");
    let process = Arc::new(Process::open(sleep.id()).expect("it runs"));
    let error = Host::open(&process, Logging::Refuse)
        .expect_err("no VM")
        .to_string();
    sleep.kill().expect("it runs");
    sleep.wait().expect("it has ended");
    assert!(error.contains("has no KVM VM"), "{error}");
}

#[test]
fn registers_of_devices_are_not_ram() {
    for device in [
        "/dev/vfio/7",
        "anon_inode:[vfio-device]",
        "/sys/bus/pci/resource0",
    ] {
        assert!(is_device(device), "{device}");
    }
    for ram in [
        "",
        "[heap]",
        "/memfd:ram (deleted)",
        "/dev/zero (deleted)",
        "/dev/shm/ram",
        "/dev/hugepages/vm-1",
    ] {
        assert!(!is_device(ram), "{ram}");
    }
}

/// Returns the RAM of these slots, and calls `removal` for each. No slot is mapped.
fn ram(
    slots: &[Slot],
    logging: Logging,
    removal: impl Fn(&Range<u64>) -> Option<Removal>,
) -> Result<Vec<Range<u64>>, AttachError> {
    let mappings = |_| Ok(Mappings::default());
    let found = ram_of(&vm(slots), &[], logging, removal, mappings)?;
    Ok(found.into_iter().map(|range| range.addresses).collect())
}

#[test]
fn slots_that_are_too_many_are_not_looked_up() {
    const SIZE: u64 = 1 << 20;
    let slots = |count: usize| -> Vec<Slot> {
        let slots = (0..count as u64).map(|at| slot(at * SIZE, SIZE, at * SIZE));
        slots.collect()
    };
    let never = |_| -> Result<Mappings, AttachError> { panic!("the mappings are read") };
    let vm = vm(&slots(MAX_RANGES + 1));
    let found = ram_of(&vm, &[], Logging::Reported, |_| Some(Removal::Never), never);
    let error = found.expect_err("too many").to_string();
    assert!(error.contains("more than 1024 memory slots"), "{error}");
    let most = slots(MAX_RANGES);
    let found = ram(&most, Logging::Reported, |_| Some(Removal::Never));
    assert_eq!(found.expect("as many as are supported").len(), MAX_RANGES);
    // The memory of devices does not count.
    let found = ram(&slots(MAX_RANGES + 1), Logging::Reported, |range| {
        (range.start != 0).then_some(Removal::Never)
    });
    assert_eq!(found.expect("a device's").len(), MAX_RANGES);
}

#[test]
fn the_largest_slot_is_one_of_the_ram() {
    let ram_slot = slot(0, 1 << 30, 1 << 40);
    let mut display = slot(8 << 30, 4 << 30, 1 << 42);
    display.logs_dirty_pages = true;
    let mut small = slot(4 << 30, 1 << 20, 1 << 41);
    small.logs_dirty_pages = true;
    let is_own = |range: &Range<u64>| (range.start < 8 << 30).then_some(Removal::Never);
    for logging in [Logging::Refuse, Logging::Reported] {
        // The log of a larger display does not make it a migration, during which also a smaller
        // slot that is logged would be taken for RAM.
        let found = ram(&[ram_slot, small, display], logging, is_own);
        assert_eq!(found.expect("RAM"), [addresses(&ram_slot)], "{logging:?}");
    }
}
