// SPDX-License-Identifier: Apache-2.0
//! Kills an attacher that patchbayd has started, and checks what the next one does by itself.
//!
//! The attacher is the test's program, because `patchbay-attach` refuses a QEMU without KVM, and
//! because the kernel's tables are made up. It attaches, keeps its ledger and serves its API as
//! `patchbay-attach` does.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use patchbay_attach::PauseWay;
use patchbay_attach::ledger::LedgerName;
use patchbay_guest::guest::Guest;
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::claims::LedgerFile;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::{Keys, KeysConfig};
use patchbay_service::trace::Tracing;
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::cut::{kernel_of, write_image};
use super::daemon::{Daemon, Programs};
use super::{Accelerator, BOOT_SECTOR, Memory, PATIENCE, Qemu, options, until};

/// The variable that makes the test's program run as an attacher with these arguments.
const ATTACHER: &str = "PATCHBAY_TEST_SUPERVISED";
const KEYS: [(&str, u64); 2] = [("alpha", 2), ("beta", 1)];

/// A daemon. Dropping it also kills its last attacher.
struct Ending(Daemon);

impl Drop for Ending {
    fn drop(&mut self) {
        // A daemon that lives would start another attacher.
        self.0.kill();
        if let Some(attacher) = self.0.attacher() {
            let _ = kill_process(attacher, Signal::KILL);
        }
    }
}

/// Kills the attacher by SIGKILL while two owners have claims, one of them for a limited time. The
/// daemon must start another attacher, which ends these claims in time and keeps the others.
pub async fn ends_a_claim_in_time(accelerator: Accelerator, test: &str) {
    if let Ok(words) = std::env::var(ATTACHER) {
        attacher(&words, accelerator).await;
    }
    let Some(programs) = Programs::built() else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let (script, monitors) = (folder.join("attacher"), folder.join("qmp"));
    fs::create_dir(&monitors).expect("room");
    let program = std::env::current_exe().expect("a program");
    let program = program.display();
    let text = format!("#!/bin/sh\n{ATTACHER}=\"$*\" exec {program} --exact {test} --nocapture\n");
    fs::write(&script, text).expect("room");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("its own");
    let programs = Programs {
        attacher: script,
        ..programs
    };
    let monitor = monitors.join("web-1");
    let monitor = format!("unix:{},server=on,wait=off", monitor.display());
    let memory = Memory::SharedMemfd;
    let more = ["-qmp", &monitor];
    let Some(qemu) = Qemu::start_program(accelerator, memory, &BOOT_SECTOR, &more) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    write_image(guest.ram(), &kernel_of(&KEYS).1);
    drop(guest);
    let host = folder.join("host.sock");
    let options = ["--attach-qmp", &monitors.display().to_string()];
    let daemon = Ending(Daemon::start(&programs, folder, &options));

    let list = ["keys", "list", "-o", "json"];
    let is_served = || programs.patchbay(&host, &list).status.success();
    until("the guest is served", is_served);
    let claim = |owner: &str, more: &[&str]| {
        let words = [&["keys", "claim", "set", owner, "alpha=held"], more].concat();
        println!("{}", programs.succeeds(&host, &words));
    };
    claim("kept", &[]);
    claim("timed", &["--ttl", "60s", "beta=on"]);
    let owners = || {
        let claims = programs.succeeds(&host, &["keys", "claims", "-o", "json"]);
        let claims: Value = serde_json::from_str(&claims).expect("JSON");
        let claims = claims.as_array().expect("a list").iter();
        let owners = claims.map(|of| of["owner"].as_str().expect("a name").to_owned());
        owners.collect::<Vec<_>>()
    };
    let counts = || {
        let keys: Value = serde_json::from_str(&programs.succeeds(&host, &list)).expect("JSON");
        ["alpha", "beta"].map(|name| {
            let mut keys = keys.as_array().expect("a list").iter();
            let key = keys.find(|key| key["name"] == name).expect("there");
            key["count"].as_i64().expect("a number")
        })
    };
    assert_eq!(owners(), ["kept", "timed", "timed"]);
    // So it is not the first attacher that ends the claim.
    assert_eq!(counts(), [2, 1]);
    let first = daemon.0.attacher().expect("it serves the guest");
    kill_process(first, Signal::KILL).expect("it runs");

    until("another attacher serves the guest", || {
        daemon.0.attacher() != Some(first) && is_served()
    });
    until("the claims end", || owners() == ["kept"]);
    assert_eq!(counts(), [1, 0]);
}

/// Serves the guest as `patchbay-attach` with these arguments does.
async fn attacher(words: &str, accelerator: Accelerator) -> ! {
    let after = |option: &str| {
        let mut words = words.split(' ').skip_while(|word| *word != option);
        PathBuf::from(words.nth(1).expect(option))
    };
    let options = options(after("--qmp"), PauseWay::Freeze, accelerator);
    let guest = super::qemu::attached(&options, PATIENCE, "the attacher");
    let path = after("--api-socket");
    let kept = LedgerName::beside(Path::new(&path), guest.process()).expect("QEMU runs");
    guest.keeps_ledger(kept.path()).expect("the watchdog lives");
    let ledger = LedgerFile::open(kept.path(), kept.process());
    let config = KeysConfig {
        ledger: Some(ledger.expect("whole, or not there yet")),
        ..KeysConfig::default()
    };
    let registry = Arc::new(Registry::default());
    let (keys, _) = Keys::start(Arc::new(guest), Arc::clone(&registry), config).expect("a thread");
    registry.register_kernel(kernel_of(&KEYS).0).expect("taken");
    let socket = ApiSocket::bind(&path).expect("free");
    let served = api::serve(socket, keys, Tracing::default(), std::future::pending());
    served.await.expect("it never ends");
    unreachable!("the test kills it")
}
