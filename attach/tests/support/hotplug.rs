// SPDX-License-Identifier: Apache-2.0
//! Tests memory that is plugged in and removed while the service is attached.

use std::fs;
use std::sync::Arc;

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::memory::Access;
use patchbay_attach::{Options, PauseWay, attach};
use patchbay_guest::guest::{Guest, Intended, Machine};
use patchbay_guest::testing::conformance;
use patchbay_memory::PhysicalMemory;
use serde_json::{Value, json};

use super::relay::Relay;
use super::{Accelerator, BOOT_SECTOR, DEADLINE, Memory, Qemu, SCRATCH, begun, until};

/// Counts like `BOOT_SECTOR`. Ejects the DIMM of slot N - 1 when it finds N in [`EJECT`], even
/// without a request by QEMU:
///
/// ```text
/// cli; xor ax, ax; mov ds, ax
/// again: inc dword [COUNTER]; mov eax, [EJECT]; test eax, eax; jz again
/// dec eax; mov dx, 0a00h; out dx, eax; mov dx, 0a14h; mov al, 8; out dx, al
/// xor eax, eax; mov [EJECT], eax; jmp again
/// ```
///
/// The ports are those of docs/specs/acpi_mem_hotplug.rst of QEMU.
const EJECTOR: [u8; 41] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x66, 0xff, 0x06, 0x00, 0x80, 0x66, 0xa1, 0x04, 0x80, 0x66, 0x85,
    0xc0, 0x74, 0xf2, 0x66, 0x48, 0xba, 0x00, 0x0a, 0x66, 0xef, 0xba, 0x14, 0x0a, 0xb0, 0x08, 0xee,
    0x66, 0x31, 0xc0, 0x66, 0xa3, 0x04, 0x80, 0xeb, 0xdc,
];
const EJECT: u64 = 0x8004;
const SLOTS: [&str; 2] = ["-m", "64M,slots=4,maxmem=2G"];
pub const SIZE: u64 = 128 << 20;
/// The address that a test chooses for a DIMM.
const ELSEWHERE: u64 = 0x1_4000_0000;

fn start(accelerator: Accelerator, memory: Memory) -> Option<Qemu> {
    Qemu::start_program(accelerator, memory, &EJECTOR, &SLOTS)
}

/// Adds memory and returns its guest-physical address.
fn plug(qemu: &Qemu, shared: bool, driver: &str, id: &str, more: &Value) -> u64 {
    let kind = match shared {
        true => "memory-backend-memfd",
        false => "memory-backend-ram",
    };
    let backend = format!("mem-{id}");
    let object = json!({ "qom-type": kind, "id": backend, "size": SIZE, "share": shared });
    qemu.other("object-add", object);
    let mut device = json!({ "driver": driver, "id": id, "memdev": backend });
    for (name, value) in more.as_object().expect("properties") {
        device[name] = value.clone();
    }
    qemu.other("device_add", device);
    let device = self::device(qemu, id).expect("it is plugged in");
    let address = device["addr"].as_u64().or(device["memaddr"].as_u64());
    address.expect("an address")
}

/// Returns QEMU's description of a memory device.
fn device(qemu: &Qemu, id: &str) -> Option<Value> {
    let devices = qemu.other("query-memory-devices", Value::Null);
    let devices = devices.as_array().expect("a list").iter();
    devices
        .map(|device| device["data"].clone())
        .find(|data| data["id"] == id)
}

pub fn dimm(qemu: &Qemu, shared: bool, id: &str) -> u64 {
    plug(qemu, shared, "pc-dimm", id, &json!({}))
}

/// Makes the guest eject a DIMM, and frees its memory.
fn eject(qemu: &Qemu, guest: &QemuGuest, id: &str) {
    let slot = device(qemu, id).expect("it is plugged in")["slot"].as_u64();
    let number = u32::try_from(slot.expect("a DIMM") + 1).expect("few");
    guest
        .ram()
        .write(EJECT, &number.to_le_bytes())
        .expect("RAM");
    until("the guest ejects the DIMM", || device(qemu, id).is_none());
    qemu.other("object-del", json!({ "id": format!("mem-{id}") }));
}

/// Reads a word through QEMU.
fn word(qemu: &Qemu, address: u64) -> u64 {
    let line = json!({ "command-line": format!("xp /1gx {address:#x}") });
    let text = qemu.other("human-monitor-command", line);
    let text = text.as_str().expect("text").trim_end();
    let (_, digits) = text.rsplit_once("0x").expect("a number");
    u64::from_str_radix(digits, 16).expect("hexadecimal")
}

fn attach_with(qemu: &Qemu, access: Access, pause: PauseWay) -> QemuGuest {
    let options = Options {
        access,
        ..qemu.options(pause)
    };
    let guest = attach(&options).expect("attached");
    qemu.runs(&guest);
    guest
}

/// Checks that a plugged-in DIMM is noticed when an access to it fails, for each kind of QEMU's
/// memory.
pub fn plugged_in(accelerator: Accelerator) {
    for (memory, access, mapped) in [
        (Memory::SharedMemfd, Access::Auto, true),
        (Memory::SharedMemfd, Access::File, true),
        (Memory::SharedMemfd, Access::Process, false),
        (Memory::Private, Access::Auto, false),
    ] {
        let Some(qemu) = start(accelerator, memory) else {
            return;
        };
        let guest = attach_with(&qemu, access, PauseWay::Freeze);
        // Firmware has turned areas of ROM into RAM.
        let changes = guest.memory_changes(true);
        let bytes = guest.description().memory_bytes;
        let base = guest.ram().piece(SCRATCH, 8).expect("RAM");
        let address = dimm(&qemu, memory != Memory::Private, "dimm");
        assert_eq!(guest.memory_changes(false), changes, "nothing suggests it");
        assert_eq!(guest.ram().read_u64(address), None);
        assert_eq!(guest.memory_changes(false), changes + 1, "{memory:?}");
        conformance::memory(guest.ram(), address + SIZE / 2, address + SIZE);
        assert_eq!(guest.memory().is_mapped(), mapped, "{memory:?} {access:?}");
        let ours = u64::to_le_bytes(0x1122_3344_5566_7788);
        guest.ram().write(address + 8, &ours).expect("RAM");
        assert_eq!(word(&qemu, address + 8), u64::from_le_bytes(ours));
        assert!(
            guest
                .memory()
                .filled()
                .iter()
                .any(|range| range.contains(&(address + 8)))
        );
        assert_eq!(guest.description().memory_bytes, bytes + SIZE);
        assert!(
            guest.ram().read_piece(base, &mut [0; 8]),
            "it has not changed"
        );
        assert_eq!(guest.memory_changes(true), changes + 1);
        // The next discovery finds a second DIMM, although no access to it has failed.
        dimm(&qemu, memory != Memory::Private, "second");
        assert_eq!(guest.memory_changes(false), changes + 1);
        assert_eq!(guest.memory_changes(true), changes + 2);
        assert_eq!(guest.memory_changes(true), changes + 2);
    }
}

/// Checks that an ejected DIMM is neither read nor written, although the memory map was not read
/// again and QEMU has other memory at the DIMM's address.
pub fn removed(accelerator: Accelerator) {
    for (shared, pause) in [
        (true, PauseWay::Freeze),
        (false, PauseWay::Freeze),
        (false, PauseWay::Qmp),
    ] {
        let Some(qemu) = start(accelerator, Memory::SharedMemfd) else {
            return;
        };
        let guest = attach_with(&qemu, Access::Auto, pause);
        let address = dimm(&qemu, shared, "dimm");
        let changes = guest.memory_changes(true);
        let piece = guest.ram().piece(address, 4).expect("RAM");
        let base = guest.ram().piece(SCRATCH, 4).expect("RAM");
        let paused = guest.pause(DEADLINE).expect("stopped");
        assert!(guest.ram().write_piece(piece, &[1; 4]), "it is there");
        drop(paused);
        eject(&qemu, &guest, "dimm");
        let elsewhere = plug(
            &qemu,
            shared,
            "pc-dimm",
            "other",
            &json!({ "addr": ELSEWHERE }),
        );
        let paused = guest.pause(DEADLINE).expect("stopped");
        assert!(!guest.ram().write_piece(piece, &[2; 4]), "it is gone");
        assert!(!guest.ram().read_piece(piece, &mut [0; 4]));
        assert_eq!(guest.ram().compare_exchange_u32(piece, 0, 1), None);
        assert!(guest.ram().piece(address, 4).is_err());
        assert!(guest.memory().read(address, &mut [0; 4]).is_err());
        assert!(
            !guest
                .memory()
                .filled()
                .iter()
                .any(|range| range.contains(&address))
        );
        assert!(guest.ram().write_piece(base, &[2; 4]), "it stays");
        assert_eq!(guest.memory_changes(true), changes, "QEMU is not asked now");
        drop(paused);
        assert_eq!(guest.memory_changes(false), changes + 1);
        assert_eq!(guest.ram().read_u64(elsewhere), Some(0), "nothing strayed");
        // The piece of the first DIMM is not a piece of another DIMM at the same address.
        dimm(&qemu, shared, "dimm");
        assert_eq!(guest.memory_changes(true), changes + 2);
        let again = guest.ram().piece(address, 4).expect("RAM");
        drop(guest.pause(DEADLINE).expect("stopped"));
        assert!(!guest.ram().write_piece(piece, &[2; 4]));
        assert!(guest.ram().write_piece(again, &[2; 4]));
        // The event that reports the removal is sufficient.
        eject(&qemu, &guest, "dimm");
        until("the event arrives", || {
            guest.memory_changes(false) == changes + 3
        });
        assert!(!guest.ram().write_piece(again, &[2; 4]));
        assert_eq!(
            replaced(&qemu, &guest),
            0,
            "a replacement that nobody noticed is not written to"
        );
    }
}

/// Replaces a DIMM in a file by another DIMM at the same guest-physical address, which may also
/// have the same address in QEMU. Returns the value that a write to the first DIMM has left in the
/// second.
fn replaced(qemu: &Qemu, guest: &QemuGuest) -> u64 {
    let address = dimm(qemu, true, "first");
    let _ = guest.memory_changes(true);
    let piece = guest.ram().piece(address, 8).expect("RAM");
    eject(qemu, guest, "first");
    assert_eq!(dimm(qemu, true, "first"), address);
    let paused = guest.pause(DEADLINE).expect("stopped");
    assert!(!guest.ram().write_piece(piece, &[2; 8]), "it is gone");
    drop(paused);
    word(qemu, address)
}

/// Checks virtio-mem. QEMU alone can remove its memory, so only memory in a file is written.
pub fn virtio_mem(accelerator: Accelerator) {
    let Some(qemu) = start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let guest = attach_with(&qemu, Access::Auto, PauseWay::Freeze);
    for (shared, id) in [(true, "shared"), (false, "private")] {
        let all = json!({ "requested-size": SIZE });
        let address = plug(&qemu, shared, "virtio-mem-pci", id, &all);
        assert_eq!(guest.ram().read_u64(address), None);
        let _ = guest.memory_changes(true);
        let paused = guest.pause(DEADLINE).expect("stopped");
        let written = guest.ram().write(address, &[7; 8]).is_ok();
        drop(paused);
        assert_eq!(written, shared);
        let expected = if shared { [7; 8] } else { [0; 8] };
        assert_eq!(
            guest.ram().read_u64(address),
            Some(u64::from_le_bytes(expected))
        );
    }
}

/// Checks ivshmem. QEMU can remove its memory, so only memory in a file is written. The memory of a
/// NUMA node is never removed.
pub fn ivshmem(accelerator: Accelerator) {
    for shared in [true, false] {
        let kind = match shared {
            true => "memory-backend-memfd,share=on",
            false => "memory-backend-ram",
        };
        let arguments = [
            "-object",
            "memory-backend-ram,id=node0,size=64M",
            "-numa",
            "node,cpus=0-1,memdev=node0",
            "-object",
            &format!("{kind},id=shm,size=16M"),
            "-device",
            "ivshmem-plain,memdev=shm",
        ];
        let memory = Memory::Private;
        let Some(qemu) = Qemu::start_program(accelerator, memory, &EJECTOR, &arguments) else {
            return;
        };
        let guest = attach_with(&qemu, Access::Auto, PauseWay::Freeze);
        // Firmware has given the device an address.
        let _ = guest.memory_changes(true);
        let address = bar(&qemu, 16 << 20);
        if guest.monitor().host().is_some() {
            // It is no slot of RAM or of a memory device.
            assert_eq!(guest.ram().read_u64(address), None);
            continue;
        }
        assert_eq!(guest.ram().read_u64(address), Some(0));
        let paused = guest.pause(DEADLINE).expect("stopped");
        let written = guest.ram().write(address, &[7; 8]).is_ok();
        assert!(guest.ram().write(SCRATCH, &[7; 8]).is_ok(), "it stays");
        drop(paused);
        assert_eq!(written, shared);
        let expected = if shared { [7; 8] } else { [0; 8] };
        assert_eq!(word(&qemu, address), u64::from_le_bytes(expected));
    }
}

/// Returns the address of the only PCI BAR of this size.
fn bar(qemu: &Qemu, size: u64) -> u64 {
    let buses = qemu.other("query-pci", Value::Null);
    let devices = buses[0]["devices"].as_array().expect("a list");
    let regions = devices
        .iter()
        .filter_map(|device| device["regions"].as_array());
    let mut regions = regions.flatten().filter(|region| region["size"] == size);
    let address = regions.next().expect("a BAR")["address"].as_u64();
    address.expect("an address")
}

/// Checks that an invalid flat view changes nothing, and that the next valid one is applied.
pub fn second_view(accelerator: Accelerator) {
    let Some(qemu) = start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), qemu.socket("qmp"));
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    let changes = guest.memory_changes(true);
    let piece = guest.ram().piece(SCRATCH, 4).expect("RAM");
    let address = dimm(&qemu, true, "dimm");
    let system = "FlatView #0\n AS \"memory\", root: system\n Root memory region: system\n";
    for lines in [
        "",
        "  0000000000000000-0000000003ffffff (prio 0, ram): ram0\n  0000000000001000-0000000000001fff (prio 0, ram): ram0\n",
        // The ranges lie beyond the file, or are no longer RAM for QEMU.
        "  0000000000000000-000000007fffffff (prio 0, ram): ram0\n",
        "  0000000000000000-0000000000000fff (prio 0, ram): ram0\n  0000000300000000-0000000300000fff (prio 0, ram): ram0\n",
    ] {
        relay.replace(Some(&format!("{system}{lines}")));
        assert_eq!(guest.memory_changes(true), changes, "{lines}");
        assert!(guest.ram().piece(address, 8).is_err());
        drop(guest.pause(DEADLINE).expect("stopped"));
        assert!(guest.ram().write_piece(piece, &[1; 4]), "{lines}");
    }
    relay.replace(Some("nothing of the kind"));
    assert_eq!(guest.memory_changes(true), changes);
    relay.replace(None);
    assert_eq!(guest.memory_changes(true), changes + 1);
    assert_eq!(guest.ram().read_u64(address), Some(0));
    assert!(guest.ram().write_piece(piece, &[1; 4]));
}

/// Checks that memory that is not shared cannot be accessed as a file, and that this does not
/// affect other memory.
pub fn not_shared(accelerator: Accelerator) {
    let Some(qemu) = start(accelerator, Memory::SharedFile) else {
        return;
    };
    let guest = attach_with(&qemu, Access::File, PauseWay::Freeze);
    let changes = guest.memory_changes(true);
    let address = dimm(&qemu, false, "dimm");
    assert_eq!(guest.memory_changes(true), changes);
    assert!(guest.ram().piece(address, 4).is_err());
    assert!(guest.ram().read_u64(SCRATCH).is_some());
    assert!(fs::metadata(qemu.socket("ram")).is_ok());
    eject(&qemu, &guest, "dimm");
    let address = dimm(&qemu, true, "dimm");
    assert_eq!(guest.memory_changes(true), changes + 1);
    assert_eq!(guest.ram().read_u64(address), Some(0));
}

/// Checks that a vCPU is stopped even if it is plugged in after the attacher has read the list of
/// vCPUs.
pub fn vcpu(accelerator: Accelerator) {
    let arguments = ["-smp", "2,maxcpus=3,sockets=3", "-cpu", "qemu64"];
    let memory = Memory::SharedMemfd;
    let Some(qemu) = Qemu::start_program(accelerator, memory, &BOOT_SECTOR, &arguments) else {
        return;
    };
    let qemu = Arc::new(qemu);
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), qemu.socket("qmp"));
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    let threads = {
        let qemu = Arc::clone(&qemu);
        move || -> Vec<u64> {
            let vcpus = qemu.other("query-cpus-fast", Value::Null);
            let vcpus = vcpus.as_array().expect("a list").iter();
            vcpus
                .map(|vcpu| vcpu["thread-id"].as_u64().expect("a thread"))
                .collect()
        }
    };
    assert_eq!(threads().len(), 2);
    let plug = Arc::clone(&qemu);
    relay.before_vcpus(move || {
        let device = json!({
            "driver": "qemu64-x86_64-cpu", "id": "third",
            "socket-id": 2, "core-id": 0, "thread-id": 0,
        });
        plug.other("device_add", device);
    });
    let nothing = Intended {
        keys: &mut std::iter::empty(),
        writes: &mut std::iter::empty(),
        gates: &mut std::iter::empty(),
        ledger: None,
    };
    guest.will_write(nothing).expect("kept by the watchdog");
    let paused = guest.pause(DEADLINE).expect("stopped");
    let all = threads();
    assert_eq!(all.len(), 3);
    begun(&paused).expect("the watchdog still knows what will be written");
    for thread in all {
        let path = format!("/proc/{}/task/{thread}/status", qemu.child.id());
        let status = fs::read_to_string(path).expect("a thread of QEMU");
        let state = status.lines().find(|line| line.starts_with("State:"));
        assert_eq!(state, Some("State:\tt (tracing stop)"), "{thread}");
    }
    drop(paused);
    qemu.runs(&guest);
    drop(guest.pause(DEADLINE).expect("the list is known"));
}
