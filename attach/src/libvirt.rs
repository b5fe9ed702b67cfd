// SPDX-License-Identifier: Apache-2.0
//! A guest that libvirt manages, through `virsh`: libvirt has the only connection to its monitor.

use std::fs;
use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::AttachError;
use crate::qmp::{QmpError, message, returned};

/// The libvirt of this host that runs as root.
pub const SYSTEM: &str = "qemu:///system";

/// Time allowed for `virsh` itself, which starts and connects for each command, beside that for QEMU's answer.
const START: Duration = Duration::from_secs(10);

/// A domain of a libvirt on this host.
#[derive(Debug)]
pub struct Domain {
    uri: String,
    name: String,
}

impl Domain {
    /// The domain with this name, of the libvirt with this URI.
    ///
    /// # Errors
    /// `virsh` is not installed, or no such domain runs.
    pub fn open(uri: &str, name: &str) -> Result<Self, AttachError> {
        let domain = Self {
            uri: uri.to_owned(),
            name: name.to_owned(),
        };
        domain.execute("query-status", Value::Null, Duration::from_secs(5))?;
        Ok(domain)
    }

    /// Its QEMU's process: the one whose threads its vCPUs are. Where libvirt keeps its own note of the process depends on the URI.
    ///
    /// # Errors
    /// There is none on this host, or it is not this domain's.
    pub fn process(&self, vcpus: &[u32]) -> Result<u32, AttachError> {
        let process = vcpus.first().and_then(|thread| process_of(*thread));
        let is_it = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            names_guest(&line, &self.name)
        };
        process.filter(is_it).ok_or_else(|| {
            AttachError::Refused(format!(
                "the QEMU of domain {} is not found by its vCPUs' threads {vcpus:?}; is it on this host, and in this PID namespace?",
                self.name
            ))
        })
    }

    /// Carries out a command of QEMU's monitor.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(
        &self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        let refused = |description: String| QmpError::Refused {
            command: command.to_owned(),
            class: String::new(),
            description,
        };
        let mut child = Command::new("virsh")
            .args([
                "--connect",
                &self.uri,
                "qemu-monitor-command",
                "--domain",
                &self.name,
                "--",
            ])
            .arg(message(command, arguments, None).trim_end())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => refused("virsh is not installed; install libvirt-clients, or attach by --pid to a QEMU with a QMP socket".to_owned()),
                _ => refused(format!("virsh cannot be started ({error})")),
            })?;
        let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
        let reader = std::thread::spawn(move || {
            let mut text = [String::new(), String::new()];
            let [output, errors] = &mut text;
            // What is no text is no answer either.
            let _ = out.as_mut().map(|out| out.read_to_string(output));
            let _ = err.as_mut().map(|err| err.read_to_string(errors));
            text
        });
        let patience = START + patience;
        let deadline = Instant::now() + patience;
        while !reader.is_finished() {
            if Instant::now() >= deadline {
                let _ = child.kill();
                let _ = child.wait();
                return Err(QmpError::TimedOut {
                    command: command.to_owned(),
                    patience,
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = child.wait().map_err(|error| refused(error.to_string()))?;
        let [output, errors] = reader.join().unwrap_or_default();
        if !status.success() {
            return Err(refused(format!("virsh says {:?}", errors.trim())));
        }
        let answer = serde_json::from_str(&output)
            .map_err(|error| refused(format!("virsh's output is no answer ({error})")))?;
        returned(command, answer)
    }
}

/// The process of a thread.
fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let id = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    id?.trim().parse().ok()
}

/// Whether the command line is of the QEMU that libvirt started for this domain: `-name guest=NAME,…`, with commas in NAME doubled.
fn names_guest(line: &[u8], name: &str) -> bool {
    let wanted = format!("guest={}", name.replace(',', ",,"));
    let mut words = line.split(|byte| *byte == 0);
    let value = words
        .by_ref()
        .find(|word| *word == b"-name")
        .and(words.next());
    value
        .and_then(|value| value.strip_prefix(wanted.as_bytes()))
        .is_some_and(|rest| rest.is_empty() || (rest[0] == b',' && rest.get(1) != Some(&b',')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_is_recognised_by_the_domains_name() {
        let line = |value: &str| format!("/usr/bin/qemu\0-name\0{value}\0-S\0").into_bytes();
        for value in ["guest=a", "guest=a,debug-threads=on"] {
            assert!(names_guest(&line(value), "a"), "{value}");
        }
        assert!(names_guest(&line("guest=a,,b,debug-threads=on"), "a,b"));
        for value in ["a", "guest=ab", "guest=b", "guest=a,,b", ""] {
            assert!(!names_guest(&line(value), "a"), "{value}");
        }
        assert!(!names_guest(b"qemu\0guest=a\0-name", "a"));
        assert!(!names_guest(b"", "a"));
    }

    #[test]
    fn a_thread_leads_to_its_process() {
        let id = rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned();
        assert_eq!(process_of(id), Some(std::process::id()));
        assert_eq!(process_of(u32::MAX), None);
    }
}
