// SPDX-License-Identifier: Apache-2.0
//! Tests that the host's kernel, not QEMU, is believed about a guest that is attached to by QMP.

use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use patchbay_attach::flat_view::Removal;
use patchbay_attach::guest::QemuGuest;
use patchbay_attach::host::{Host, Logging};
use patchbay_attach::{Options, PauseWay, Target, attach, process};
use patchbay_guest::guest::Guest;
use serde_json::{Value, json};

use super::migration::{AFTER, BEFORE, announce};
use super::process::readable;
use super::relay::Relay;
use super::{
    Accelerator, BOOT_SECTOR, CODE, DEADLINE, Memory, Qemu, SCRATCH, begun, checked, hotplug, until,
};

/// The variable that makes the test's program run as an attacher that cannot read the host's
/// kernel: `SOCKET:PID`.
const WITHOUT_KERNEL: &str = "PATCHBAY_TEST_WITHOUT_KERNEL";

fn relay_to(qemu: &Qemu) -> (Relay, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("temporary folder");
    (Relay::start(folder.path(), qemu.socket("qmp")), folder)
}

/// Checks that a QEMU is refused if it names other threads than those in which its vCPUs run.
pub fn other_threads() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let answer = qemu.other("query-cpus-fast", Value::Null);
    let vcpus = answer.as_array().expect("a list").iter();
    let truth: Vec<u64> = vcpus
        .map(|vcpu| vcpu["thread-id"].as_u64().expect("a thread"))
        .collect();
    let main = u64::from(qemu.child.id());
    let lie = |relay: &Relay, threads: &[u64]| {
        let vcpu = |id: &u64| json!({ "thread-id": id });
        let answer = threads.iter().map(vcpu).collect();
        relay.lie("query-cpus-fast", Value::Null, answer);
    };
    let mut kernels = truth.clone();
    kernels.sort_unstable();
    let kernels = format!("{kernels:?}");
    // Without one of the vCPUs' threads, with another thread instead of it, and with one more.
    for threads in [
        vec![truth[0]],
        vec![truth[0], main],
        vec![truth[0], truth[1], main],
    ] {
        let (relay, _folder) = relay_to(&qemu);
        lie(&relay, &threads);
        let attached = attach(&relay.options(&qemu, PauseWay::Freeze));
        let error = attached.expect_err("another set of threads").to_string();
        let named = format!("are the threads {threads:?}");
        let shown = format!("they run in the threads {kernels}");
        assert!(error.contains(&named) && error.contains(&shown), "{error}");
    }
    // A QEMU that lies later is not stopped, and runs on.
    let (relay, _folder) = relay_to(&qemu);
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    lie(&relay, &[truth[0]]);
    let error = guest.pause(DEADLINE).expect_err("a vCPU would run");
    assert!(error.to_string().contains(&kernels), "{error}");
    guest.monitor().registers(DEADLINE).expect_err("the same");
    qemu.runs(&guest);
    relay.tell_the_truth();
    drop(guest.pause(DEADLINE).expect("stopped"));
    qemu.runs(&guest);
}

/// Returns whether a command asks for text of QEMU's terminal.
fn is_text(command: &str) -> bool {
    command.starts_with("info ") || command.starts_with("gpa2hva")
}

/// Checks that the memory of a guest with memory on both sides of the hole below 4 GiB, and with a
/// DIMM, is that of the kernel's slots, that no text of QEMU is read, and that QEMU is asked only
/// once while the guest is stopped, for its run state and its migration.
pub fn same_map() {
    if !readable() {
        return;
    }
    let size = ["-m", "4G,slots=2,maxmem=8G"];
    let memory = Memory::Private;
    let Some(qemu) = Qemu::start_program(Accelerator::Kvm, memory, &BOOT_SECTOR, &size) else {
        return;
    };
    let (relay, _folder) = relay_to(&qemu);
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    let dimm = hotplug::dimm(&qemu, false, "dimm");
    assert!(guest.memory_changes(true) > 0);
    let process = process::Process::open(qemu.child.id()).expect("it runs");
    let host = Host::open(&Arc::new(process), Logging::Refuse).expect("a guest");
    let kernels = host.ram(Instant::now() + DEADLINE, |_| Some(Removal::ByVcpu));
    let kernels = kernels.expect("slots");
    let addresses = |range: &Range<u64>| host.host_address(range).expect("a slot");
    let ram = guest.monitor().ram(Instant::now() + DEADLINE);
    let ram = ram.expect("slots");
    let slots: Vec<&Range<u64>> = kernels.iter().map(|range| &range.addresses).collect();
    for range in &ram {
        assert!(slots.contains(&&range.addresses), "{range:x?}");
        let piece = guest.ram().piece(range.addresses.start, 8).expect("RAM");
        let found = guest.memory().monitors_address(piece);
        assert_eq!(found, Some(addresses(&range.addresses)), "{range:x?}");
    }
    let starts: Vec<u64> = ram.iter().map(|range| range.addresses.start).collect();
    assert!(
        starts.contains(&(4 << 30)) && starts.contains(&dimm),
        "{starts:x?}"
    );
    guest.monitor().registers(DEADLINE).expect("they run");
    let commands = relay.commands();
    let asks_for_text = commands.iter().any(|command| is_text(command));
    assert!(!asks_for_text, "{commands:?}");

    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    // All of these precede the stop.
    let before = ["query-status", "query-migrate", "query-cpus-fast"];
    assert_eq!(relay.commands(), before);
    begun(&paused).expect("it runs");
    assert_eq!(relay.commands(), ["query-status", "query-migrate"]);
    for address in [SCRATCH, 4 << 30, dimm] {
        guest.ram().write(address, &AFTER).expect("RAM");
    }
    checked(&paused).expect("no slot has changed");
    drop(paused);
    assert_eq!(relay.commands(), [""; 0]);
    qemu.runs(&guest);
}

/// Checks that nothing is changed while KVM logs dirty pages, although QEMU denies a migration.
pub fn denied_migration() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let (relay, _folder) = relay_to(&qemu);
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    relay.lie("query-migrate", Value::Null, json!({}));
    drop(guest.pause(DEADLINE).expect("nothing is logged"));
    qemu.other("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    qemu.other("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    until("KVM logs dirty pages", || guest.pause(DEADLINE).is_err());
    let error = guest.pause(DEADLINE).expect_err("logged").to_string();
    assert!(error.contains("QEMU reports no migration"), "{error}");
    qemu.runs(&guest);
    qemu.other("migrate_cancel", Value::Null);
    until("the log is off", || guest.pause(DEADLINE).is_ok());
}

/// Checks that nothing is changed if a background snapshot begins between QEMU's answers and the
/// freeze. It turns no dirty log on, and copies pages while the vCPUs are frozen.
pub fn background_snapshot() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::Private) else {
        return;
    };
    let qemu = Arc::new(qemu);
    let capability = json!([{ "capability": "background-snapshot", "state": true }]);
    let capability = json!({ "capabilities": capability });
    if let Err(error) = qemu.try_other("migrate-set-capabilities", capability) {
        eprintln!("SKIPPED: QEMU makes no background snapshots here ({error})");
        return;
    }
    qemu.other("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    let (relay, _folder) = relay_to(&qemu);
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    announce(&guest, BEFORE, AFTER);
    let snapshots = Arc::clone(&qemu);
    relay.before_vcpus(move || {
        snapshots.other("migrate", json!({ "uri": "exec:cat > /dev/null" }));
        until("the snapshot copies pages", || {
            let migration = snapshots.other("query-migrate", Value::Null);
            let status = snapshots.other("query-status", Value::Null);
            assert_ne!(migration["status"], "failed", "{migration}");
            migration["status"] == "active" && status["status"] == "running"
        });
    });
    let paused = guest.pause(DEADLINE).expect("no slot has changed");
    let error = begun(&paused).expect_err("a snapshot is being made");
    assert!(error.contains("migration \"active\""), "{error}");
    drop(paused);
    let error = guest.pause(DEADLINE).expect_err("the same").to_string();
    assert!(error.contains("in progress"), "{error}");
    qemu.other("migrate_cancel", Value::Null);
    until("the snapshot ends", || guest.pause(DEADLINE).is_ok());

    // A snapshot that has already ended is noticed by the other answer.
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    relay.lie(
        "query-migrate",
        Value::Null,
        json!({ "status": "completed" }),
    );
    let error = begun(&paused).expect_err("another answer");
    assert!(error.contains("migration \"completed\""), "{error}");
    drop(paused);
    relay.tell_the_truth();
    qemu.runs(&guest);
}

/// Checks that the registers of a guest that another client has paused are unknown until it runs.
pub fn registers_of_a_paused_guest() {
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    let runs = |guest: &QemuGuest| {
        let found = guest.monitor().registers(DEADLINE).expect("they run");
        assert_eq!(found.len(), 2);
        assert!(CODE.contains(&found[0].rip), "{found:x?}");
    };
    runs(&guest);
    qemu.other("stop", Value::Null);
    let error = guest.monitor().registers(DEADLINE).expect_err("paused");
    assert!(error.to_string().contains("\"paused\""), "{error}");
    qemu.other("cont", Value::Null);
    runs(&guest);
}

/// Checks that an attacher without rights over the host's kernel takes the map from QEMU, and the
/// registers from the run pages.
pub fn without_kernel(test: &str) {
    if let Ok(word) = std::env::var(WITHOUT_KERNEL) {
        return believes(&word);
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start a process with fewer rights");
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let rights = "-sys_admin,-sys_rawio,-bpf,-perfmon";
    let output = Command::new("setpriv")
        .args(["--bounding-set", rights, "--inh-caps", rights])
        .arg(std::env::current_exe().expect("a program"))
        .args(["--exact", test, "--nocapture"])
        .env(
            WITHOUT_KERNEL,
            format!("{}:{}", qemu.socket("qmp").display(), qemu.child.id()),
        )
        .output()
        .expect("util-linux is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("believed"), "{text}{errors}");
}

/// Runs in the process without rights.
fn believes(word: &str) {
    let (socket, pid) = word.rsplit_once(':').expect("two words");
    let pid = pid.parse().expect("a number");
    assert!(!readable(), "it has no rights");
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), socket.into());
    let options = Options {
        target: Target::Qmp(relay.path().to_owned(), Some(pid)),
        ..super::options(socket.into(), PauseWay::Freeze, Accelerator::Kvm)
    };
    let guest = attach(&options).expect("attached");
    super::counts_on(&guest);
    let found = guest.monitor().registers(DEADLINE).expect("they run");
    assert!(CODE.contains(&found[0].rip), "{found:x?}");
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    begun(&paused).expect("it runs");
    guest.ram().write(SCRATCH, &AFTER).expect("RAM");
    checked(&paused).expect("no migration");
    drop(paused);
    let commands = relay.commands();
    let asked = |line: &str| commands.iter().any(|command| command == line);
    assert!(asked("info mtree -f"), "{commands:?}");
    assert!(!asked("info registers -a") && !asked("info mtree"));
    println!("believed");
}
