// SPDX-License-Identifier: Apache-2.0
//! A guest that libvirt manages, through `virsh`: libvirt has the only connection to its monitor.

use std::fs;
use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::AttachError;
use crate::qmp::{QmpError, message, returned};

/// A domain of the local libvirt.
#[derive(Debug)]
pub struct Domain {
    name: String,
}

impl Domain {
    /// The domain with this name.
    ///
    /// # Errors
    /// `virsh` is not installed, or no such domain runs.
    pub fn open(name: &str) -> Result<Self, AttachError> {
        let domain = Self {
            name: name.to_owned(),
        };
        domain.execute("query-status", Value::Null, Duration::from_secs(10))?;
        Ok(domain)
    }

    /// Its QEMU's process, as libvirt's file for it says.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn process(&self) -> Result<u32, AttachError> {
        let path = format!("/run/libvirt/qemu/{}.pid", self.name);
        let cannot = |error: String| AttachError::Process {
            what: format!("{path} cannot be read"),
            error,
            next: "give the QEMU's process id by --pid".to_owned(),
        };
        let text = fs::read_to_string(&path).map_err(|error| cannot(error.to_string()))?;
        text.trim()
            .parse()
            .map_err(|_| cannot(format!("it says {text:?}")))
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
            .args(["--connect", "qemu:///system", "qemu-monitor-command", &self.name])
            .arg(message(command, arguments, 0).trim_end())
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
