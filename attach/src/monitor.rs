// SPDX-License-Identifier: Apache-2.0
//! Translates this crate's queries into QEMU's commands.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::AttachError;
use crate::flat_view::{self, RamRange, Removal};
use crate::host::{self, Host};
use crate::libvirt::Domain;
use crate::nested::{self, Nesting};
use crate::qmp::{Qmp, QmpError};
use crate::registers::{self, Registers};

/// Timeout for an answer that needs only QEMU's main loop.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The connection to a QEMU's monitor.
#[derive(Debug)]
pub enum Monitor {
    /// QEMU's own socket.
    Socket(Qmp),
    /// libvirt's connection.
    Libvirt(Domain),
    /// There is no connection to a monitor. The host's kernel answers instead.
    Host(Host),
}

/// QEMU's report of the guest's last migration. If it differs, a migration has started or
/// progressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration(Value);

impl Migration {
    /// Creates the report from the answer to `query-migrate`. The answer is empty before the first
    /// migration.
    #[must_use]
    pub fn new(answer: Value) -> Self {
        Self(answer)
    }

    /// Returns whether the guest runs, or may run, at the destination.
    #[must_use]
    pub fn is_at_destination(&self) -> bool {
        self.status().starts_with("postcopy") || self.status() == "colo"
    }

    /// Returns whether the migration was cancelled, or is being cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self.status(), "cancelling" | "cancelled")
    }

    /// Returns whether `migrate_cancel` returns the guest to the source. After the switch to
    /// postcopy, the command would lose the guest.
    #[must_use]
    pub fn can_be_cancelled(&self) -> bool {
        self.is_under_way() && !self.is_at_destination() && self.status() != "cancelling"
    }

    /// Returns whether a migration copies pages, or will copy them without a further command.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        !matches!(
            self.status(),
            "" | "none" | "completed" | "failed" | "cancelled"
        )
    }

    /// Returns QEMU's name of the status.
    #[must_use]
    pub fn status(&self) -> &str {
        self.0["status"].as_str().unwrap_or_default()
    }
}

impl Monitor {
    /// Returns whether the host's kernel answers instead of a monitor.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }

    /// Carries out a command.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(
        &self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        match self {
            Self::Socket(qmp) => qmp.execute(command, arguments, patience),
            Self::Libvirt(domain) => domain.execute(command, arguments, patience),
            Self::Host(_) => Err(host::not_asked(command)),
        }
    }

    /// Carries out commands in turn, as [`Qmp::execute_in_turn`] does. Through libvirt they are
    /// sent one by one.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute_in_turn<const N: usize>(
        &self,
        commands: [&str; N],
        patience: Duration,
    ) -> Result<[Result<Value, QmpError>; N], QmpError> {
        match self {
            Self::Socket(qmp) => {
                qmp.execute_in_turn(commands.map(|command| (command, Value::Null)), patience)
            }
            Self::Libvirt(domain) => {
                let deadline = Instant::now() + patience;
                Ok(commands.map(|command| {
                    let left = deadline.saturating_duration_since(Instant::now());
                    domain.execute(command, Value::Null, left)
                }))
            }
            Self::Host(_) => Ok(commands.map(|command| Err(host::not_asked(command)))),
        }
    }

    /// Returns QEMU's run state and the state of the last migration.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn state(&self, patience: Duration) -> Result<(String, Migration), QmpError> {
        if let Self::Host(host) = self {
            // `Point::Running` refuses a guest that its monitor has paused, so a guest that was
            // stopped runs.
            return Ok(("running".to_owned(), host.migration()?));
        }
        let [status, migration] =
            self.execute_in_turn(["query-status", "query-migrate"], patience)?;
        let status = string(&status?, "query-status", "status")?;
        Ok((status, Migration(migration?)))
    }

    fn query(&self, command: &str) -> Result<Value, QmpError> {
        self.execute(command, Value::Null, PATIENCE)
    }

    fn text(&self, command_line: &str, patience: Duration) -> Result<String, QmpError> {
        let arguments = json!({ "command-line": command_line });
        let answer = self.execute("human-monitor-command", arguments, patience)?;
        answer
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| unexpected(command_line, "text"))
    }

    /// Returns QEMU's run state: "running", "paused", "prelaunch"…
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn status(&self) -> Result<String, QmpError> {
        string(&self.query("query-status")?, "query-status", "status")
    }

    /// Returns whether KVM runs the vCPUs.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn uses_kvm(&self) -> Result<bool, QmpError> {
        if let Self::Host(_) = self {
            return Ok(true);
        }
        let answer = self.query("query-kvm")?;
        answer["enabled"]
            .as_bool()
            .ok_or_else(|| unexpected("query-kvm", "enabled"))
    }

    /// Returns whether the guest's memory is encrypted or otherwise protected from the host.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn is_confidential(&self) -> Result<bool, QmpError> {
        if let Self::Host(_) = self {
            // A protected guest was refused when its VM was opened.
            return Ok(false);
        }
        // QEMU before 6.0 has the second property.
        for property in ["confidential-guest-support", "memory-encryption"] {
            let arguments = json!({ "path": "/machine", "property": property });
            match self.execute("qom-get", arguments, PATIENCE) {
                Ok(Value::String(path)) if path.is_empty() => {}
                Ok(Value::Null) => {}
                Ok(_) => return Ok(true),
                // The machine has no such property.
                Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Returns QEMU's report of the last migration.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn migration(&self, patience: Duration) -> Result<Migration, QmpError> {
        if let Self::Host(host) = self {
            return host.migration();
        }
        self.execute("query-migrate", Value::Null, patience)
            .map(Migration)
    }

    /// Cancels a migration and returns the report of the last migration. A migration that only the
    /// host's kernel shows cannot be cancelled.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn cancel_migration(&self, patience: Duration) -> Result<Migration, QmpError> {
        if let Self::Host(host) = self {
            return host.migration();
        }
        // QEMU executes commands in order: it cancels the migration before it executes
        // `query-migrate`.
        let commands = ["migrate_cancel", "query-migrate"];
        let [cancelled, migration] = self.execute_in_turn(commands, patience)?;
        cancelled?;
        Ok(Migration(migration?))
    }

    /// Ends the guest without its help. Kills the monitor of a guest that is attached to by its
    /// process.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn quit(&self, patience: Duration) -> Result<(), QmpError> {
        match self {
            Self::Host(host) => host.kill(),
            _ => self.execute("quit", Value::Null, patience).map(drop),
        }
    }

    /// Returns the guest's name; empty if it has none.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn name(&self) -> Result<String, QmpError> {
        if let Self::Host(host) = self {
            return Ok(host.name());
        }
        Ok(self.query("query-name")?["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }

    /// Returns the ids of the vCPUs' threads. QEMU gives the ids in its own PID namespace; the
    /// host's kernel gives them in this process's PID namespace.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn vcpu_threads(&self, patience: Duration) -> Result<Vec<u32>, QmpError> {
        if let Self::Host(host) = self {
            return host.vcpu_threads();
        }
        let answer = self.execute("query-cpus-fast", Value::Null, patience)?;
        let missing = || unexpected("query-cpus-fast", "thread-id");
        let vcpus = answer
            .as_array()
            .filter(|vcpus| !vcpus.is_empty())
            .ok_or_else(missing)?;
        let id = |vcpu: &Value| u32::try_from(vcpu["thread-id"].as_u64()?).ok();
        vcpus
            .iter()
            .map(|vcpu| id(vcpu).ok_or_else(missing))
            .collect()
    }

    /// Returns the CID of the guest's vhost-vsock device; `None` if it has none.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn vsock_cid(&self) -> Result<Option<u32>, QmpError> {
        if let Self::Host(_) = self {
            return Ok(None);
        }
        // Devices with an id are in the first folder, devices without an id in the second.
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let devices = self.execute("qom-list", json!({ "path": folder }), PATIENCE)?;
            for device in devices.as_array().into_iter().flatten() {
                let vsock = device["type"]
                    .as_str()
                    .is_some_and(|kind| kind.starts_with("child<vhost-vsock-"));
                let (true, Some(name)) = (vsock, device["name"].as_str()) else {
                    continue;
                };
                let arguments =
                    json!({ "path": format!("{folder}/{name}"), "property": "guest-cid" });
                let cid = self.execute("qom-get", arguments, PATIENCE)?;
                let cid = cid.as_u64().and_then(|cid| u32::try_from(cid).ok());
                return cid
                    .map(Some)
                    .ok_or_else(|| unexpected("qom-get", "guest-cid"));
            }
        }
        Ok(None)
    }

    /// Returns the guest's RAM.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn ram(&self) -> Result<Vec<RamRange>, AttachError> {
        if let Self::Host(host) = self {
            return host.ram();
        }
        // The view is read first. A device that is plugged in meanwhile is then missing, which is
        // safe. In the other order, its memory could be taken for the machine's own.
        let view = self.text("info mtree -f", PATIENCE)?;
        let answer = self.query("query-memdev")?;
        let backends = answer
            .as_array()
            .ok_or_else(|| unexpected("query-memdev", "a list"))?;
        let names = backends.iter().filter_map(|backend| backend["id"].as_str());
        // The list of memory devices does not contain a device such as ivshmem that uses a backend.
        let mut removals: BTreeMap<String, Removal> = names
            .map(|name| (name.to_owned(), Removal::default()))
            .collect();
        for own in flat_view::machines_own(&self.text("info mtree", PATIENCE)?) {
            if let Some(removal) = removals.get_mut(own) {
                *removal = Removal::Never;
            }
        }
        let answer = self.query("query-memory-devices")?;
        let devices = answer
            .as_array()
            .ok_or_else(|| unexpected("query-memory-devices", "a list"))?;
        for device in devices {
            // The property is the path of the backend's object.
            let backend = device["data"]["memdev"].as_str().unwrap_or_default();
            let backend = backend.rsplit('/').next().unwrap_or_default();
            let dimm = matches!(device["type"].as_str(), Some("dimm" | "nvdimm"));
            if let Some(removal) = removals.get_mut(backend).filter(|_| dimm) {
                *removal = Removal::ByVcpu;
            }
        }
        flat_view::ram(&view, &removals).map_err(AttachError::Refused)
    }

    /// Translates the first address of a guest-physical range to an address in the monitor's
    /// process. The host's kernel confirms the whole range, QEMU only the first address.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn host_address(&self, range: &Range<u64>, patience: Duration) -> Result<u64, AttachError> {
        if let Self::Host(host) = self {
            return host.host_address(range);
        }
        let address = range.start;
        let text = self.text(&format!("gpa2hva {address:#x}"), patience)?;
        let found = text
            .trim_end()
            .rsplit_once(" is 0x")
            .map(|(_, digits)| u64::from_str_radix(digits, 16));
        match found {
            Some(Ok(found)) => Ok(found),
            _ => Err(AttachError::Refused(format!(
                "QEMU does not say where it has guest-physical {address:#x} (it says {:?}); this version is not supported",
                text.trim()
            ))),
        }
    }

    /// Returns KVM's counts about nested guests; `None` if QEMU does not report them, as before
    /// 7.1. Like [`Self::registers`], this call may wait for the vCPUs' threads.
    #[must_use]
    pub fn nesting(&self, patience: Duration) -> Option<Nesting> {
        let provider = json!({ "provider": "kvm", "names": nested::STATISTICS });
        let arguments = json!({ "target": "vcpu", "providers": [provider] });
        let answer = self.execute("query-stats", arguments, patience).ok()?;
        Nesting::of_statistics(&answer)
    }

    /// Returns the registers of each vCPU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn registers(&self, patience: Duration) -> Result<Vec<Registers>, QmpError> {
        if let Self::Host(host) = self {
            return host.registers(patience);
        }
        let arguments = json!({ "command-line": "info registers -a" });
        let answer = self.execute("human-monitor-command", arguments, patience)?;
        let text = answer.as_str().unwrap_or_default();
        registers::parse(text).map_err(|missing| unexpected("info registers -a", &missing))
    }
}

fn string(answer: &Value, command: &str, name: &str) -> Result<String, QmpError> {
    answer[name]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| unexpected(command, name))
}

fn unexpected(command: &str, missing: &str) -> QmpError {
    QmpError::Unexpected {
        command: command.to_owned(),
        missing: missing.to_owned(),
    }
}
