// SPDX-License-Identifier: Apache-2.0
//! Tests migrations from one QEMU to another that another client starts while an attacher holds the
//! guest stopped and changes it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use patchbay_attach::PauseWay::{self, Freeze, Qmp};
use patchbay_attach::attach;
use patchbay_attach::guest::QemuGuest;
use patchbay_guest::guest::{Guest, Intended, PausedGuest};
use patchbay_memory::PhysicalMemory;
use serde_json::{Value, json};
use static_keys::Write;

use super::{
    Accelerator, BOOT_SECTOR, DEADLINE, Memory, Process, Qemu, SCRATCH, begun, checked, options,
    until,
};

/// The variable that makes the test program run as an attacher that stops the guest and waits until
/// it is killed: `SOCKET:PAUSE:ACCELERATOR:HALF`.
const HOLDER: &str = "PATCHBAY_TEST_HOLDER";
/// The variable that contains the number of migrations to race.
const RACES: &str = "PATCHBAY_TEST_MIGRATIONS";
/// The number of sites of the change, each on a separate page.
const SITES: u64 = 8;
const APART: u64 = 0x1_0000;
/// Memory after the sites, which makes the migration take a while.
const FILLER: std::ops::Range<u64> = 40 << 20..60 << 20;
pub const BEFORE: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
pub const AFTER: [u8; 5] = [0xe9, 1, 2, 3, 4];

/// A guest, and a QEMU that waits for the guest's migration.
struct Pair {
    from: Qemu,
    to: Qemu,
    uri: String,
}

impl Pair {
    fn start(accelerator: Accelerator) -> Option<Self> {
        Some(Self::of(Qemu::start(accelerator, Memory::SharedMemfd)?))
    }

    /// Creates a pair of `from` and a QEMU that waits for the migration from there.
    fn of(from: Qemu) -> Self {
        let socket = from.socket("migration");
        // The previous QEMU may have left its socket.
        let _ = std::fs::remove_file(&socket);
        let uri = format!("unix:{}", socket.display());
        let incoming = ["-incoming", uri.as_str()];
        let to = Qemu::start_program(
            from.accelerator,
            Memory::SharedMemfd,
            &BOOT_SECTOR,
            &incoming,
        );
        Self {
            to: to.expect("the first one was started"),
            from,
            uri,
        }
    }

    fn set_bandwidth(&self, bytes: u64) {
        self.from
            .other("migrate-set-parameters", json!({ "max-bandwidth": bytes }));
    }

    fn migrate(&self) {
        self.from.other("migrate", json!({ "uri": self.uri }));
    }

    /// Starts a migration, and waits until the sites have been copied. The migration then continues
    /// for a long time.
    fn copies_the_sites(&self) {
        self.set_bandwidth(4 << 20);
        self.migrate();
        until("the sites are copied", || {
            let migration = self.from.other("query-migrate", Value::Null);
            assert_ne!(migration["status"], "completed");
            migration["ram"]["transferred"].as_u64() > Some(1 << 20)
        });
    }

    /// Waits for the migration's end. Returns whether it has completed.
    fn completes(&self) -> bool {
        self.set_bandwidth(10 << 30);
        let mut status = String::new();
        until("the migration ends", || {
            let migration = self.from.other("query-migrate", Value::Null);
            migration["status"]
                .as_str()
                .unwrap_or_default()
                .clone_into(&mut status);
            ["completed", "failed", "cancelled"].contains(&status.as_str())
        });
        status == "completed"
    }

    /// Returns whether the destination has a partial change.
    fn is_torn(&self) -> bool {
        until("the guest has arrived", || {
            self.to.other("query-status", Value::Null)["status"] != "inmigrate"
        });
        let guest = attach(&self.to.options(Freeze)).expect("attached");
        let sites: Vec<[u8; 5]> = addresses().map(|address| read(&guest, address)).collect();
        !sites.iter().all(|site| *site == sites[0])
    }
}

fn status(qemu: &Qemu) -> Value {
    qemu.other("query-status", Value::Null)["status"].clone()
}

fn addresses() -> impl Iterator<Item = u64> {
    (0..SITES).map(|site| SCRATCH + site * APART)
}

fn read(guest: &QemuGuest, address: u64) -> [u8; 5] {
    let mut bytes = [0; 5];
    assert!(guest.memory().read(address, &mut bytes).is_ok());
    bytes
}

fn put(guest: &QemuGuest, addresses: impl Iterator<Item = u64>, bytes: [u8; 5]) {
    for address in addresses {
        guest.ram().write(address, &bytes).expect("RAM");
    }
}

fn fill(guest: &QemuGuest) {
    put(guest, addresses(), BEFORE);
    let page: Vec<u8> = (0..4096_u32)
        .map(|at| at.wrapping_mul(0x9e37_79b9).to_be_bytes()[0])
        .collect();
    for address in FILLER.step_by(4096) {
        guest.ram().write(address, &page).expect("RAM");
    }
}

pub fn announce(guest: &QemuGuest, before: [u8; 5], after: [u8; 5]) {
    let mut writes = addresses().map(|address| Write {
        key: 0,
        place: guest.ram().piece(address, 5).expect("RAM").into(),
        length: 5,
        before,
        after,
    });
    let change = Intended {
        keys: &mut std::iter::once("key"),
        writes: &mut writes,
        gates: &mut std::iter::empty(),
        ledger: None,
    };
    guest.will_write(change).expect("kept by the watchdog");
}

/// Returns the ways to pause. While threads of TCG are frozen, no migration begins, because it
/// waits for these threads.
fn ways(accelerator: Accelerator) -> &'static [PauseWay] {
    match accelerator {
        Accelerator::Tcg => &[Qmp],
        Accelerator::Kvm => &[Freeze, Qmp],
    }
}

/// Checks that the destination does not get a part of a change that is undone because a migration
/// has begun.
pub fn undo(accelerator: Accelerator) {
    for &way in ways(accelerator) {
        let Some(pair) = Pair::start(accelerator) else {
            return;
        };
        let guest = pair.from.attach(way);
        fill(&guest);
        announce(&guest, BEFORE, AFTER);
        let paused = guest.pause(DEADLINE).expect("stopped");
        begun(&paused).expect("no migration");
        // These are the writes of a change up to its failure.
        put(&guest, addresses().step_by(2), AFTER);
        pair.copies_the_sites();
        checked(&paused).expect_err("a migration has begun");
        put(&guest, addresses().step_by(2), BEFORE);
        paused.undone();
        drop(paused);
        let arrived = pair.completes();
        assert!(!arrived || !pair.is_torn(), "{way:?}: a part of the change");
        if !arrived {
            pair.from.runs(&guest);
            drop(guest.pause(DEADLINE).expect("it is still here"));
        }
    }
}

/// Checks that a migration that begins before the first write is not cancelled.
pub fn nothing_written(accelerator: Accelerator) {
    let Some(pair) = Pair::start(accelerator) else {
        return;
    };
    let guest = pair.from.attach(ways(accelerator)[0]);
    fill(&guest);
    let paused = guest.pause(DEADLINE).expect("stopped");
    pair.copies_the_sites();
    let error = begun(&paused).expect_err("a migration has begun");
    assert!(error.contains("migration"), "{error}");
    drop(paused);
    // A stop by QMP cancels the migration, because the guest would arrive stopped.
    let arrived = pair.completes();
    assert_eq!(arrived, accelerator == Accelerator::Kvm);
    assert!(!arrived || !pair.is_torn());
}

/// Kills the attacher during a change and a migration. Checks that the watchdog's rollback keeps a
/// partial change from the destination.
pub fn rolled_back(accelerator: Accelerator, test: &str) {
    if let Ok(word) = std::env::var(HOLDER) {
        hold(&word);
    }
    for &way in ways(accelerator) {
        let Some(pair) = Pair::start(accelerator) else {
            return;
        };
        fill(&pair.from.attach(way));
        let mut holder = Holder::start(&pair.from, way, test, true);
        pair.copies_the_sites();
        holder.kill();
        let arrived = pair.completes();
        assert!(!arrived || !pair.is_torn(), "{way:?}: a part of the change");
        if !arrived {
            holder.watchdog_ends(&pair.from);
            let guest = pair.from.attach(way);
            assert!(addresses().all(|address| read(&guest, address) == BEFORE));
        }
    }
}

/// Checks that a guest that was migrated while it was stopped is continued at the source neither by
/// the attacher nor by its watchdog.
pub fn source_stays_stopped(accelerator: Accelerator, test: &str) {
    if let Ok(word) = std::env::var(HOLDER) {
        hold(&word);
    }
    for killed in [false, true] {
        let Some(pair) = Pair::start(accelerator) else {
            return;
        };
        let moves = || {
            pair.migrate();
            assert!(pair.completes());
            until("the guest has left", || status(&pair.from) == "postmigrate");
        };
        if killed {
            let mut holder = Holder::start(&pair.from, Qmp, test, false);
            moves();
            holder.kill();
            holder.watchdog_ends(&pair.from);
        } else {
            let guest = pair.from.attach(Qmp);
            let paused = guest.pause(DEADLINE).expect("stopped");
            moves();
            drop(paused);
            let error = guest.pause(DEADLINE).expect_err("it is gone");
            assert!(error.to_string().contains("has migrated away"), "{error}");
        }
        assert_eq!(status(&pair.from), "postmigrate", "killed: {killed}");
        // The migration keeps the guest stopped.
        assert_eq!(status(&pair.to), "paused");
        pair.to.other("cont", Value::Null);
        pair.to
            .runs(&attach(&pair.to.options(Freeze)).expect("attached"));
    }
}

/// Checks that another client's stop during the attacher's own stop is left to that client.
pub fn stop_of_another(accelerator: Accelerator, test: &str) {
    if let Ok(word) = std::env::var(HOLDER) {
        hold(&word);
    }
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let again = || {
        qemu.other("cont", Value::Null);
        qemu.other("stop", Value::Null);
    };
    let guest = qemu.attach(Qmp);
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    again();
    until("its end is noticed", || paused.begin_writes().is_err());
    drop(paused);
    assert_eq!(status(&qemu), "paused", "the stop is another's");
    drop(guest);
    assert_eq!(status(&qemu), "paused", "the attacher has ended");
    qemu.other("cont", Value::Null);

    let mut holder = Holder::start(&qemu, Qmp, test, false);
    again();
    holder.kill();
    holder.watchdog_ends(&qemu);
    assert_eq!(status(&qemu), "paused", "the attacher was killed");
}

/// Makes changes at full speed while migrations at full bandwidth begin at random times, and checks
/// that no destination has a partial change.
pub fn races(accelerator: Accelerator) {
    let tries = std::env::var(RACES).ok();
    let tries: u64 = tries.map_or(6, |tries| tries.parse().expect("a number"));
    let Some(mut from) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let (mut arrived, mut torn) = (0, 0);
    let counts = Counts::default();
    for number in 0..tries {
        let way = if number % 2 == 0 { Freeze } else { Qmp };
        let pair = Pair::of(from);
        pair.set_bandwidth(10 << 30);
        let guest = pair.from.attach(way);
        if arrived == 0 {
            fill(&guest);
        }
        let ends = AtomicBool::new(false);
        let completed = std::thread::scope(|scope| {
            scope.spawn(|| changes(&guest, &counts, &ends));
            // The migration's start time is random relative to the change.
            std::thread::sleep(Duration::from_micros(number * 7919 % 20_000));
            pair.migrate();
            let completed = pair.completes();
            ends.store(true, Ordering::SeqCst);
            completed
        });
        if completed {
            drop(guest);
            arrived += 1;
            torn += u64::from(pair.is_torn());
            if status(&pair.to) == "paused" {
                pair.to.other("cont", Value::Null);
            }
            from = pair.to;
        } else {
            pair.from.runs(&guest);
            from = pair.from;
        }
    }
    println!("{accelerator:?}: {tries} migrations, {arrived} arrived, {torn} torn; {counts:?}");
    assert_eq!(torn, 0, "of {arrived} that arrived");
}

#[derive(Debug, Default)]
struct Counts {
    made: AtomicU64,
    refused: AtomicU64,
    undone: AtomicU64,
}

/// Changes the sites back and forth.
fn changes(guest: &QemuGuest, counts: &Counts, ends: &AtomicBool) {
    let count = |count: &AtomicU64| {
        count.fetch_add(1, Ordering::SeqCst);
    };
    let mut turn = 0;
    while !ends.load(Ordering::SeqCst) {
        let before = read(guest, SCRATCH);
        let after = if before == BEFORE { AFTER } else { BEFORE };
        announce(guest, before, after);
        let Ok(paused) = guest.pause(DEADLINE) else {
            count(&counts.refused);
            continue;
        };
        if paused.begin_writes().is_err() {
            count(&counts.refused);
            continue;
        }
        put(guest, addresses(), after);
        // Some changes take long.
        turn += 1;
        std::thread::sleep(Duration::from_millis(turn % 4 * 10));
        if paused.check_writes().is_ok() {
            count(&counts.made);
            continue;
        }
        put(guest, addresses(), before);
        paused.undone();
        count(&counts.undone);
    }
}

/// A process of the same program that holds the guest stopped.
struct Holder(Process);

impl Holder {
    fn start(qemu: &Qemu, way: PauseWay, test: &str, half: bool) -> Self {
        let socket = qemu.socket("qmp");
        let word = format!("{}:{way:?}:{:?}:{half}", socket.display(), qemu.accelerator);
        let mut child: Child = Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", test, "--nocapture"])
            .env(HOLDER, word)
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let output = child.stdout.take().expect("piped");
        let held = BufReader::new(output).lines().map_while(Result::ok);
        let holder = Self(Process(child));
        assert!(
            held.into_iter().any(|line| line.ends_with("HELD")),
            "it fails"
        );
        holder
    }

    fn kill(&mut self) {
        self.0.kill().expect("it lives");
        self.0.wait().expect("its own");
    }

    /// Waits for the end of the watchdog, which keeps the monitor's socket until then.
    fn watchdog_ends(&self, qemu: &Qemu) {
        until("the watchdog ends", || {
            patchbay_attach::qmp::Qmp::connect(&qemu.socket("qmp"), DEADLINE, Box::new(|_| ()))
                .is_ok()
        });
    }
}

/// Runs the attacher to kill.
fn hold(word: &str) -> ! {
    let mut words = word.split(':');
    let mut next = || words.next().expect("four words");
    let socket = next().into();
    let way = if next() == "Qmp" { Qmp } else { Freeze };
    let accelerator = if next() == "Tcg" {
        Accelerator::Tcg
    } else {
        Accelerator::Kvm
    };
    let half = next() == "true";
    let guest: Arc<QemuGuest> =
        Arc::new(attach(&options(socket, way, accelerator)).expect("attached"));
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    if half {
        begun(&paused).expect("noted by the watchdog");
        put(&guest, addresses().step_by(2), AFTER);
    }
    println!("HELD");
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
