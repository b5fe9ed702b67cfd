// SPDX-License-Identifier: Apache-2.0
//! Health report about the guest.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use patchbay_proto::agent::v1::{AgentHealth, AgentPressure};

use crate::kmsg::Warnings;

const LABELS_FILE: &str = "/etc/patchbay/labels";
/// Labels are given as "patchbay.label.KEY=VALUE" on the kernel's command line.
const LABEL_WORD: &str = "patchbay.label.";
const MAX_LABELS: usize = 64;
const MAX_LABEL_BYTES: usize = 256;
const MAX_FILE_BYTES: u64 = 64 << 10;

pub fn report(warnings: &mut Warnings) -> AgentHealth {
    let meminfo = text("/proc/meminfo");
    AgentHealth {
        kernel_release: line("/proc/sys/kernel/osrelease"),
        build_id: build_id(&bytes("/sys/kernel/notes")).unwrap_or_default(),
        labels: labels(&text(LABELS_FILE), &text("/proc/cmdline")),
        uptime_ms: uptime(),
        load: text("/proc/loadavg")
            .split_whitespace()
            .take(3)
            .filter_map(|word| word.parse().ok())
            .collect(),
        pressure: ["cpu", "memory", "io"]
            .into_iter()
            .flat_map(|resource| pressure(resource, &text(&format!("/proc/pressure/{resource}"))))
            .collect(),
        memory_total_bytes: kib(&meminfo, "MemTotal:"),
        memory_available_bytes: kib(&meminfo, "MemAvailable:"),
        warnings: warnings.read(),
        kernel_warnings: warnings.reports(),
        agent_memory_bytes: kib(&text("/proc/self/status"), "VmRSS:"),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

fn bytes(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        // Files that cannot be read are left out of the report.
        let _ = file.take(MAX_FILE_BYTES).read_to_end(&mut bytes);
    }
    bytes
}

fn text(path: &str) -> String {
    String::from_utf8_lossy(&bytes(path)).into_owned()
}

/// Returns the first line of a file; empty if it cannot be read.
pub fn line(path: &str) -> String {
    text(path).lines().next().unwrap_or_default().to_owned()
}

/// Returns the value in bytes of a line "Name: 123 kB".
fn kib(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| {
        line.strip_prefix(name)?
            .split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    });
    value.unwrap_or(0).saturating_mul(1024)
}

/// Returns the time since boot in milliseconds.
pub fn uptime() -> u64 {
    uptime_ms(&text("/proc/uptime"))
}

fn uptime_ms(text: &str) -> u64 {
    let (seconds, hundredths) = text
        .split_whitespace()
        .next()
        .and_then(|word| word.split_once('.'))
        .unwrap_or(("0", "0"));
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    number(seconds)
        .saturating_mul(1000)
        .saturating_add(number(hundredths).saturating_mul(10))
}

/// Parses lines like "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"
/// (`Documentation/accounting/psi.rst`).
fn pressure(resource: &str, text: &str) -> Vec<AgentPressure> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let kind = words.next()?;
        let mut average = |name: &str| words.next()?.strip_prefix(name)?.parse().ok();
        Some(AgentPressure {
            resource: format!("{resource} {kind}"),
            average_10s: average("avg10=")?,
            average_60s: average("avg60=")?,
        })
    };
    text.lines().filter_map(of_line).collect()
}

fn labels(file: &str, command_line: &str) -> HashMap<String, String> {
    let from_file = file
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'));
    let from_kernel = command_line
        .split_whitespace()
        .filter_map(|word| word.strip_prefix(LABEL_WORD));
    from_file
        .chain(from_kernel)
        .filter(|label| label.len() <= MAX_LABEL_BYTES)
        .filter_map(|label| label.split_once('='))
        .map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()))
        .filter(|(key, _)| !key.is_empty())
        .take(MAX_LABELS)
        .collect()
}

/// Returns the build ID in hexadecimal: the description of the note "GNU" of type 3,
/// `NT_GNU_BUILD_ID`.
fn build_id(mut notes: &[u8]) -> Option<String> {
    let word = |bytes: &[u8], at: usize| -> Option<usize> {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let padded = |length: usize| length.checked_next_multiple_of(4);
    loop {
        let (name_length, length, kind) = (word(notes, 0)?, word(notes, 4)?, word(notes, 8)?);
        let name_end = padded(name_length)?.checked_add(12)?;
        let description = notes.get(name_end..name_end.checked_add(length)?)?;
        if kind == 3 && notes.get(12..16) == Some(b"GNU\0") {
            return Some(
                description
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect(),
            );
        }
        notes = notes.get(name_end.checked_add(padded(length)?)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_id_is_found_behind_other_notes() {
        let mut notes = vec![6, 0, 0, 0, 4, 0, 0, 0, 1, 1, 0, 0];
        notes.extend_from_slice(b"Linux\0\0\0\0\0\0\0");
        notes.extend_from_slice(&[4, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]);
        notes.extend_from_slice(b"GNU\0\x5a\xcb\x0f\0");
        assert_eq!(build_id(&notes).as_deref(), Some("5acb0f"));
        for cut in 0..notes.len() - 1 {
            assert_eq!(build_id(&notes[..cut]), None, "{cut}");
        }
        assert_eq!(build_id(&[0xff; 64]), None);
    }

    #[test]
    fn labels_of_the_command_line_come_last_and_win() {
        let labels = labels(
            "# ours\nrack = 7\nrole=db\nnothing\n",
            "quiet patchbay.label.role=web patchbay.label.=x",
        );
        assert_eq!(labels.len(), 2);
        assert_eq!(labels["rack"], "7");
        assert_eq!(labels["role"], "web");
    }

    #[test]
    fn proc_files_are_read_as_they_are_written() {
        assert_eq!(uptime_ms("350735.47 234388.90\n"), 350_735_470);
        assert_eq!(uptime_ms(""), 0);
        assert_eq!(
            kib("MemTotal:        1000 kB\nMemFree: 1 kB\n", "MemFree:"),
            1024
        );
        let lines = "some avg10=1.50 avg60=0.25 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        let pressure = pressure("cpu", lines);
        assert_eq!(pressure.len(), 2);
        assert_eq!(pressure[0].resource, "cpu some");
        assert!((pressure[0].average_10s - 1.5).abs() < 1e-9);
        assert!(super::pressure("io", "").is_empty());
    }
}
