// SPDX-License-Identifier: Apache-2.0
#![allow(dead_code, reason = "each accelerator has its own test target")]
//! QEMUs whose guest only counts, and the tests that run on them with each accelerator.

pub mod adopt;
pub mod all;
pub mod bad_input;
pub mod boot_events;
pub mod cut;
pub mod daemon;
pub mod foreign;
pub mod hostile;
pub mod hotplug;
pub mod huge_pages;
pub mod hybrid_vsock;
pub mod kernel;
pub mod kill;
pub mod kill_ledger;
pub mod libvirt;
pub mod log;
pub mod migration;
pub mod nested;
pub mod process;
pub mod program;
mod programs;
mod qemu;
pub mod relay;
pub mod rollout;
pub mod stock;
mod storm;
pub mod supervised;
pub mod tcg;
pub mod trace;
mod wrapped;

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::memory::Access;
use patchbay_attach::{Options, PauseWay, Target, attach};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::{Guest, Machine, PausedGuest};
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::conformance;
use patchbay_memory::PhysicalMemory;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::{Keys, KeysConfig};
use serde_json::{Value, json};

use self::qemu::options;
pub use self::qemu::{Accelerator, Memory, Process, Qemu};

/// Timeout for a stop that must succeed, and for QEMU's answers.
const DEADLINE: Duration = Duration::from_secs(30);
/// Timeout for an event. It is long, because a lab is slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// The end of the guest's memory, and the first of two pages that the guest does not use.
const END: u64 = 64 << 20;
const SCRATCH: u64 = 32 << 20;
/// The address of the guest's counter.
const COUNTER: u64 = 0x8000;
/// The address at which firmware puts a boot sector.
const CODE: std::ops::Range<u64> = 0x7c00..0x7c10;
/// cli; xor ax, ax; mov ds, ax; again: inc dword [COUNTER]; jmp again
const BOOT_SECTOR: [u8; 12] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x66, 0xff, 0x06, 0x00, 0x80, 0xeb, 0xf9,
];

/// cli; xor ax, ax; mov ds, ax; again: inc dword [COUNTER]; mov dx, 0x402; mov cx, 0x400; xor si,
/// si; rep outsb; jmp again
const PRINTS: [u8; 22] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x66, 0xff, 0x06, 0x00, 0x80, 0xba, 0x02, 0x04, 0xb9, 0x00, 0x04,
    0x31, 0xf6, 0xf3, 0x6e, 0xeb, 0xef,
];

/// Retries until the condition holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "not seen within {PATIENCE:?}: {what}");
        std::thread::yield_now();
    }
}

/// Returns the service for the keys of a guest, without its API.
pub fn keys_of(guest: &Arc<QemuGuest>) -> Keys {
    let registry = Arc::new(Registry::default());
    registry.discover(guest.clone(), None);
    let (keys, _) = Keys::start(guest.clone(), registry, KeysConfig::default()).expect("a thread");
    keys
}

fn count(guest: &QemuGuest) -> u64 {
    guest.ram().read_u64(COUNTER).expect("RAM") & 0xffff_ffff
}

/// Waits until the guest has counted further.
fn counts_on(guest: &QemuGuest) {
    let before = count(guest);
    until("the guest counts on", || count(guest) != before);
}

/// Tests each kind of memory of QEMU.
pub fn memory(accelerator: Accelerator) {
    for (memory, mapped) in [
        (Memory::SharedMemfd, true),
        (Memory::SharedFile, true),
        (Memory::Private, false),
    ] {
        let Some(qemu) = Qemu::start(accelerator, memory) else {
            return;
        };
        let guest = qemu.attach(PauseWay::Freeze);
        assert_eq!(guest.memory().is_mapped(), mapped, "{memory:?}");
        conformance::memory(guest.ram(), SCRATCH, END);
        let mut bytes = [0xff; 8];
        assert!(guest.memory().read(SCRATCH + 4096, &mut bytes).is_ok());
        let word = guest.ram().read_u64(SCRATCH + 4096);
        assert_eq!(word, Some(u64::from_le_bytes(bytes)), "{memory:?}");
        drop(guest);
        let options = Options {
            access: Access::File,
            ..qemu.options(PauseWay::Freeze)
        };
        assert_eq!(attach(&options).is_ok(), mapped, "{memory:?}");
        if mapped {
            let options = Options {
                access: Access::Process,
                ..qemu.options(PauseWay::Freeze)
            };
            let guest = attach(&options).expect("attached");
            assert!(!guest.memory().is_mapped());
            assert_eq!(
                guest.ram().read_u64(SCRATCH + 4096),
                word,
                "both ways lead to the same memory"
            );
        }
    }
}

/// Checks that holes of a sparse file are neither read nor filled.
pub fn holes(accelerator: Accelerator) {
    use std::os::unix::fs::MetadataExt;
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedFile) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    let blocks = || fs::metadata(qemu.socket("ram")).expect("a file").blocks();
    let paused = guest.pause(DEADLINE).expect("stopped");
    let before = blocks();
    let filled = guest.memory().filled();
    assert!(
        filled.iter().any(|range| range.contains(&COUNTER)),
        "{filled:x?}"
    );
    assert!(
        !filled.iter().any(|range| range.contains(&SCRATCH)),
        "{filled:x?}"
    );
    let mut bytes = vec![0xff; 1 << 20];
    assert!(guest.memory().read(SCRATCH, &mut bytes).is_ok());
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_eq!(blocks(), before);
    drop(paused);
}

/// Tests both ways to pause.
pub fn pause(accelerator: Accelerator, way: PauseWay) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(way);
    assert_eq!(guest.description().name, "counter");
    conformance::pause(&*guest, || vec![count(&guest)]);
    if way == PauseWay::Qmp {
        // On a busy machine QEMU is sometimes late with the registers of one pause.
        until("the registers are shown in a pause", || {
            let paused = guest.pause(DEADLINE).expect("stopped");
            let Some(rips) = paused.rips() else {
                return false;
            };
            assert_eq!(rips.len(), 2);
            assert!(CODE.contains(&rips[0]), "{rips:x?}");
            true
        });
    }
    let paused = guest.pause(DEADLINE).expect("stopped");
    let registers = guest.cpus().expect_err("QEMU would not answer");
    assert!(registers.contains("held stopped"), "{registers}");
    if way == PauseWay::Freeze {
        assert_eq!(paused.rips(), None);
    }
    assert_eq!(checked(&paused), Ok(()));
    drop(paused);
    qemu.runs(&guest);
    // A guest that another client has stopped is left to that client.
    qemu.other("stop", Value::Null);
    assert_eq!(guest.pause(DEADLINE).err(), Some(PauseError::AlreadyPaused));
    assert_eq!(qemu.other("query-status", Value::Null)["status"], "paused");
    qemu.other("cont", Value::Null);
    qemu.runs(&guest);
}

/// Checks that QEMU answers while the vCPUs' threads are stopped, although the guest accesses a
/// device all the time.
pub fn answers_while_frozen(accelerator: Accelerator) {
    let device = ["-debugcon", "file:/dev/null"];
    let memory = Memory::SharedMemfd;
    let Some(qemu) = Qemu::start_program(accelerator, memory, &PRINTS, &device) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    for _ in 0..200 {
        let paused = guest.pause(DEADLINE).expect("stopped");
        guest.monitor().migration(DEADLINE).expect("answered");
        drop(paused);
        qemu.runs(&guest);
    }
}

/// Returns the result of the check before a resume.
pub fn checked(paused: &impl PausedGuest) -> Result<(), String> {
    answered(|| paused.check_writes())
}

/// Returns the result of the check before the first write.
pub fn begun(paused: &impl PausedGuest) -> Result<(), String> {
    answered(|| paused.begin_writes())
}

/// Asks again if QEMU or virsh was late, as on a busy machine.
fn answered(ask: impl Fn() -> Result<(), String>) -> Result<(), String> {
    let end = Instant::now() + DEADLINE;
    loop {
        match ask() {
            Err(late) if late.contains("did not answer") && Instant::now() < end => {}
            answer => return answer,
        }
    }
}

/// Checks that a migration prevents changes, even if it begins while the guest is stopped.
pub fn migration(accelerator: Accelerator, way: PauseWay) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(way);
    qemu.other("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    let migrate = || qemu.other("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    let paused = guest.pause(DEADLINE).expect("stopped");
    migrate();
    // The change is undone once pages may be copied.
    until("the check fails", || checked(&paused).is_err());
    let error = checked(&paused).expect_err("a migration has begun");
    assert!(error.contains("migration"), "{error}");
    drop(paused);
    qemu.runs(&guest);
    let status = || qemu.other("query-migrate", Value::Null)["status"].clone();
    if way == PauseWay::Qmp {
        // The migration would have left the guest stopped at the destination.
        assert_eq!(status(), "cancelled");
        migrate();
    }
    let error = guest.pause(DEADLINE).expect_err("it is under way");
    assert!(error.to_string().contains("migration"), "{error}");
    qemu.runs(&guest);
    qemu.other("migrate_cancel", Value::Null);
    until("the migration is cancelled", || status() == "cancelled");
    let paused = guest.pause(DEADLINE).expect("it is over");
    assert_eq!(checked(&paused), Ok(()));
}

/// Tests the lifecycle: reset, and the end of the monitor's process.
pub fn lifecycle(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::Private) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    qemu.other("system_reset", Value::Null);
    until("the reset is noticed", || guest.life().resets() != 0);
    conformance::lifecycle(&guest);
    drop(guest);
    let Some(mut qemu) = Qemu::start(accelerator, Memory::Private) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Qmp);
    let (closed, seen) = channel();
    guest.console().on_output(Box::new(move || {
        let _ = closed.send(());
    }));
    qemu.child.kill().expect("it lives");
    seen.recv_timeout(DEADLINE).expect("the end is seen");
    assert!(guest.has_ended());
    assert_eq!(guest.pause(DEADLINE).err(), Some(PauseError::Ended));
}

/// Checks that another client's stop and resume count as a reset, because the guest may have been
/// set back to an earlier state, and that this process's own stops do not.
pub fn set_back(accelerator: Accelerator, way: PauseWay) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut sector = BOOT_SECTOR.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    fs::write(path("raw"), sector).expect("room");
    // Only a qcow2 disk can hold snapshots.
    let made = Command::new("qemu-img")
        .args([
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &path("raw"),
            &path("disk"),
        ])
        .status();
    let Some(_) = made.ok().filter(|status| status.success()) else {
        eprintln!("SKIPPED: qemu-img is not installed");
        return;
    };
    let disk = format!(
        "if=ide,format=qcow2,node-name=snapshots,file={}",
        path("disk")
    );
    let Some(qemu) = Qemu::start_with(accelerator, Memory::Private, "64M", &["-drive", &disk])
    else {
        return;
    };
    let guest = qemu.attach(way);
    let resets = || guest.life().resets();
    for _ in 0..20 {
        drop(guest.pause(DEADLINE).expect("stopped"));
        qemu.runs(&guest);
    }
    assert_eq!(resets(), 0, "its own stops");

    let becomes_more = |what: &str, before: u64| until(what, || resets() > before);
    let before = resets();
    qemu.other("stop", Value::Null);
    becomes_more("a foreign stop", before);
    let before = resets();
    qemu.other("cont", Value::Null);
    becomes_more("a foreign resume", before);

    let job = |name: &str| {
        let arguments =
            json!({ "job-id": name, "tag": "s", "vmstate": "snapshots", "devices": ["snapshots"] });
        qemu.other(&format!("snapshot-{name}"), arguments);
        until("the job ends", || {
            let jobs = qemu.other("query-jobs", Value::Null);
            let job = jobs
                .as_array()
                .into_iter()
                .flatten()
                .find(|job| job["id"] == name);
            let job = job.expect("it stays");
            assert!(job["error"].is_null(), "{job}");
            job["status"] == "concluded"
        });
        qemu.other("job-dismiss", json!({ "id": name }));
    };
    job("save");
    qemu.runs(&guest);
    let before = resets();
    job("load");
    becomes_more("a snapshot that is loaded", before);
    qemu.runs(&guest);
    if way == PauseWay::Qmp {
        // No STOP arrives, because the guest is stopped already.
        let paused = guest.pause(DEADLINE).expect("stopped");
        let before = resets();
        job("load");
        becomes_more("a job in a stop", before);
        drop(paused);
        qemu.runs(&guest);
    }
}

/// Checks the refusals of guests that cannot be attached to.
pub fn refusals(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let strict = Options {
        accept_tcg: None,
        ..qemu.options(PauseWay::Freeze)
    };
    match accelerator {
        Accelerator::Tcg => {
            let error = attach(&strict).expect_err("TCG");
            assert!(error.to_string().contains("without KVM"), "{error}");
        }
        Accelerator::Kvm => drop(attach(&strict).expect("KVM")),
    }
    let guest = qemu.attach(PauseWay::Freeze);
    let attached = format!("another process {} is attached", std::process::id());
    // QEMU queues two connections, so further ones must not block.
    for _ in 0..5 {
        let error = attach(&qemu.options(PauseWay::Freeze)).expect_err("the socket is in use");
        assert!(error.to_string().contains(&attached), "{error}");
    }
    let other = Options {
        target: Target::Qmp(qemu.socket("other"), None),
        ..qemu.options(PauseWay::Freeze)
    };
    let error = attach(&other).expect_err("the guest is attached to");
    assert!(error.to_string().contains(&attached), "{error}");
    let wrong = Options {
        target: Target::Qmp(qemu.socket("other"), Some(std::process::id())),
        ..qemu.options(PauseWay::Freeze)
    };
    let error = attach(&wrong).expect_err("another process");
    assert!(error.to_string().contains("--pid"), "{error}");
    drop(guest);
    let by_pid = Options {
        target: Target::Process(qemu.child.id()),
        ..qemu.options(PauseWay::Freeze)
    };
    qemu.runs(&attach(&by_pid).expect("the socket is on the command line"));
    let _client = UnixStream::connect(qemu.socket("qmp")).expect("QEMU listens");
    let error = attach(&qemu.options(PauseWay::Freeze)).expect_err("the socket is in use");
    assert!(error.to_string().contains("in use"), "{error}");
}
