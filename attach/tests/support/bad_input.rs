// SPDX-License-Identifier: Apache-2.0
//! Guests that have nothing to patch, that end, or that may not be inspected.

use std::process::Command;
use std::sync::Arc;

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::{PauseWay, attach};
use patchbay_guest::guest::Guest;
use patchbay_memory::PhysicalMemory;
use patchbay_service::keys::ListQuery;
use serde_json::{Value, json};

use super::{Accelerator, BOOT_SECTOR, DEADLINE, Memory, Qemu, SCRATCH, checked, keys_of, until};

/// Counts like [`BOOT_SECTOR`], but in protected mode without paging:
///
/// ```text
/// 7c00: cli; xor ax, ax; mov ds, ax; lgdt [7c40]; mov eax, cr0; or al, 1; mov cr0, eax; jmp 8:7c17
/// 7c17: mov ax, 16; mov ds, ax; again: inc dword [COUNTER]; jmp again
/// 7c28: no descriptor, code and data of 4 GiB; 7c40: their table's limit and address
/// ```
const PROTECTED_MODE: [u8; 70] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x0f, 0x01, 0x16, 0x40, 0x7c, 0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f,
    0x22, 0xc0, 0xea, 0x17, 0x7c, 0x08, 0x00, 0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8, 0xff, 0x05, 0x00,
    0x80, 0x00, 0x00, 0xeb, 0xf8, 0x00, 0x00, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0,
    0x9a, 0xcf, 0, 0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0, 0x17, 0x00, 0x28, 0x7c, 0x00, 0x00,
];
/// The variable that makes the test's program run as an attacher without rights.
const WITHOUT_RIGHTS: &str = "PATCHBAY_TEST_WITHOUT_RIGHTS";

fn listing_fails(guest: &Arc<QemuGuest>) -> String {
    let listed = keys_of(guest).list(&ListQuery::default());
    listed.expect_err("no kernel").to_string()
}

/// Checks firmware, real mode and protected mode: no 64-bit Linux is found, and the guest keeps
/// running.
pub fn no_kernel(accelerator: Accelerator) {
    for program in [&BOOT_SECTOR[..], &PROTECTED_MODE] {
        let Some(qemu) = Qemu::start_program(accelerator, Memory::SharedMemfd, program, &[]) else {
            return;
        };
        // The guest may still be in its firmware.
        let guest = Arc::new(attach(&qemu.options(PauseWay::Freeze)).expect("attached"));
        let firmware = listing_fails(&guest);
        qemu.runs(&guest);
        let program = listing_fails(&guest);
        println!("{firmware}; then {program}");
        for error in [firmware, program] {
            assert!(error.contains("kernel"), "{error}");
        }
        drop(guest.pause(DEADLINE).expect("it can be stopped"));
        qemu.runs(&guest);
    }
}

/// Checks that writes made before a migration arrive at the destination, and that the guest can no
/// longer be stopped on this host afterwards.
pub fn moves(accelerator: Accelerator) {
    let Some(from) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let socket = from.socket("migration");
    let uri = format!("unix:{}", socket.display());
    let incoming = ["-incoming", uri.as_str()];
    let Some(to) = Qemu::start_program(accelerator, Memory::SharedMemfd, &BOOT_SECTOR, &incoming)
    else {
        return;
    };
    let guest = from.attach(PauseWay::Freeze);
    let paused = guest.pause(DEADLINE).expect("stopped");
    guest.ram().write(SCRATCH, b"written before").expect("RAM");
    checked(&paused).expect("no migration");
    drop(paused);
    let waits = attach(&to.options(PauseWay::Freeze)).expect("attached");
    let error = waits.pause(DEADLINE).expect_err("it waits for the guest");
    assert!(error.to_string().contains("inmigrate"), "{error}");
    drop(waits);

    from.other("migrate", json!({ "uri": uri }));
    let status = |qemu: &Qemu| qemu.other("query-status", Value::Null)["status"].clone();
    until("the guest has left", || status(&from) == "postmigrate");
    let error = guest.pause(DEADLINE).expect_err("it is gone");
    assert!(error.to_string().contains("has migrated away"), "{error}");
    until("the guest has arrived", || status(&to) == "running");
    let guest = to.attach(PauseWay::Freeze);
    let mut bytes = [0; 14];
    assert!(guest.memory().read(SCRATCH, &mut bytes).is_ok());
    assert_eq!(&bytes, b"written before");
    drop(guest.pause(DEADLINE).expect("it can be stopped"));
}

/// Checks that an attacher reports that it may not inspect QEMU's process.
pub fn forbidden(accelerator: Accelerator) {
    if let Ok(socket) = std::env::var(WITHOUT_RIGHTS) {
        println!("{}", attach_to(socket, accelerator));
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start a process that may connect and not look");
        return;
    }
    let Some(qemu) = Qemu::start(accelerator, Memory::Private) else {
        return;
    };
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"])
        .arg(std::env::current_exe().expect("a program"))
        .args(["--exact", "forbidden", "--nocapture"])
        .env(WITHOUT_RIGHTS, qemu.socket("qmp"))
        .output()
        .expect("util-linux is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Permission denied"), "{text}");
    assert!(text.contains("CAP_SYS_PTRACE"), "{text}");
    qemu.runs(&attach(&qemu.options(PauseWay::Freeze)).expect("with rights"));
}

fn attach_to(socket: String, accelerator: Accelerator) -> String {
    let options = super::options(socket.into(), PauseWay::Freeze, accelerator);
    attach(&options).expect_err("no rights").to_string()
}
