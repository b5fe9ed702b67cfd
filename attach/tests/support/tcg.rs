// SPDX-License-Identifier: Apache-2.0
//! Reads what QEMU says about its guest: its own map of memory, and the registers of a guest
//! without KVM, which has no run pages.

use std::sync::Arc;
use std::time::Duration;

use patchbay_attach::monitor::{Connection, Monitor};
use patchbay_attach::process::Process;
use patchbay_attach::qmp::{Qmp, QmpError};
use patchbay_attach::registers::Registers;
use serde_json::json;

use super::{DEADLINE, Qemu};

/// Connects as a second client, which believes QEMU.
pub fn believed(qemu: &Qemu) -> Monitor {
    let qmp = Qmp::connect(&qemu.socket("other"), DEADLINE, Box::new(|_| ()));
    let connection = Connection::Socket(qmp.expect("a second monitor"));
    let process = Process::open(qemu.child.id()).expect("it runs");
    Monitor::new(connection, Arc::new(process), None, Some(registers))
}

/// Returns the registers of each vCPU as `info registers -a` prints them.
pub fn registers(monitor: &Monitor, patience: Duration) -> Result<Vec<Registers>, QmpError> {
    let arguments = json!({ "command-line": "info registers -a" });
    let answer = monitor.execute("human-monitor-command", arguments, patience)?;
    let text = answer.as_str().unwrap_or_default();
    let vcpus = text.split("CPU#").skip(1);
    vcpus
        .map(|vcpu| {
            let word = |names: &[&str]| {
                let found = names.iter().find_map(|name| value(vcpu, name));
                found.ok_or_else(|| QmpError::Host(format!("no {names:?} in {vcpu}")))
            };
            Ok(Registers {
                rip: word(&["RIP=", "EIP="])?,
                cr0: word(&["CR0="])?,
                cr3: word(&["CR3="])?,
                cr4: word(&["CR4="])?,
                efer: word(&["EFER="])?,
                idt_base: word(&["IDT="])?,
            })
        })
        .collect()
}

/// Returns the hexadecimal number after a name that begins a word.
fn value(text: &str, name: &str) -> Option<u64> {
    let begins = |at: &usize| *at == 0 || text.as_bytes()[at - 1].is_ascii_whitespace();
    let (at, _) = text.match_indices(name).find(|(at, _)| begins(at))?;
    let digits = text[at + name.len()..].split_ascii_whitespace().next()?;
    u64::from_str_radix(digits, 16).ok()
}
