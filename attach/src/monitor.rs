// SPDX-License-Identifier: Apache-2.0
//! Answers the questions about a guest, each from the source that knows best.
//!
//! | question | a QEMU with KVM | another monitor | a QEMU without KVM |
//! |---|---|---|---|
//! | memory, protection, dirty logging | the host's kernel | the host's kernel | QEMU |
//! | the vCPUs' threads | QEMU, compared with the host's kernel | the host's kernel | QEMU |
//! | registers | the run pages | the run pages | a function of the tests |
//! | name, run state, migrations, CID, events | QEMU | the command line, or nobody | QEMU |
//!
//! If the host's kernel cannot be read, QEMU also answers for it ([`crate::flat_view`]).

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::AttachError;
use crate::flat_view::{self, RamRange, Removal};
use crate::host::{self, Host, Slots};
use crate::identity::{self, Threads};
use crate::libvirt::Domain;
use crate::machine::Places;
use crate::nested::{self, Nesting};
use crate::process::Process;
use crate::qmp::{Qmp, QmpError};
use crate::registers::{Registers, Requested, Vcpus};

/// Timeout for an answer that needs only QEMU's main loop.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout for a read of the whole map of the guest's memory, which asks QEMU several questions.
pub(crate) const MAP_PATIENCE: Duration = Duration::from_secs(10);
/// The status of a migration that only KVM's dirty log shows.
const LOGGED: &str = "dirty logging";

/// The connection to a guest's monitor.
#[derive(Debug)]
pub enum Connection {
    /// QEMU's own socket.
    Socket(Qmp),
    /// libvirt's connection to QEMU.
    Libvirt(Domain),
    /// There is none. The host's kernel answers instead.
    None,
}

/// Reads the registers of a QEMU without KVM, which has no run pages.
pub type Emulated = fn(&Monitor, Duration) -> Result<Vec<Registers>, QmpError>;

/// The sources of answers about a guest.
#[derive(Debug)]
pub struct Monitor {
    connection: Connection,
    process: Arc<Process>,
    /// The process's memory, once it was opened.
    memory: OnceLock<File>,
    host: Option<Host>,
    emulated: Option<Emulated>,
}

/// The report of the guest's last migration. If it differs, a migration has started or progressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// QEMU's report; null if no QEMU is asked.
    answer: Value,
    /// The memory slots, if the host's kernel is read.
    slots: Option<Slots>,
}

impl Migration {
    /// Creates the report from the answer to `query-migrate`. The answer is empty before the first
    /// migration.
    #[must_use]
    pub fn new(answer: Value) -> Self {
        let slots = None;
        Self { answer, slots }
    }

    /// Returns this report with a later state of the memory slots.
    #[must_use]
    pub fn with(&self, slots: Slots) -> Self {
        Self {
            answer: self.answer.clone(),
            slots: Some(slots),
        }
    }

    /// Returns whether no slot has changed between two reports.
    #[must_use]
    pub fn has_same_slots(&self, other: &Self) -> bool {
        self.slots == other.slots
    }

    /// Returns whether QEMU reports the same in both.
    #[must_use]
    pub fn has_same_answer(&self, other: &Self) -> bool {
        self.answer == other.answer
    }

    /// Returns whether KVM logs the dirty pages of the guest's memory although QEMU reports no
    /// migration.
    #[must_use]
    pub fn is_contradicted(&self) -> bool {
        !self.answer.is_null() && self.status() == LOGGED
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
        is_under_way(self.status())
    }

    /// Returns QEMU's name of the status, or "dirty logging" if only KVM shows a migration.
    #[must_use]
    pub fn status(&self) -> &str {
        let status = self.reported();
        match &self.slots {
            Some(slots) if slots.is_logged && !is_under_way(status) => LOGGED,
            _ => status,
        }
    }

    /// Returns the status that QEMU reports; empty before the first migration.
    #[must_use]
    pub fn reported(&self) -> &str {
        self.answer["status"].as_str().unwrap_or_default()
    }
}

fn is_under_way(status: &str) -> bool {
    !matches!(status, "" | "none" | "completed" | "failed" | "cancelled")
}

impl Connection {
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
            Self::None => Err(host::not_asked(command)),
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
            Self::Libvirt(_) | Self::None => {
                let deadline = Instant::now() + patience;
                Ok(commands.map(|command| {
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.execute(command, Value::Null, left)
                }))
            }
        }
    }

    /// Returns the ids of the vCPUs' threads in QEMU's PID namespace.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn vcpu_threads(&self, patience: Duration) -> Result<Vec<u32>, QmpError> {
        identity::threads_in(&self.execute("query-cpus-fast", Value::Null, patience)?)
    }

    /// Returns whether KVM runs the vCPUs.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn uses_kvm(&self) -> Result<bool, QmpError> {
        if let Self::None = self {
            return Ok(true);
        }
        let answer = self.execute("query-kvm", Value::Null, PATIENCE)?;
        answer["enabled"]
            .as_bool()
            .ok_or_else(|| unexpected("query-kvm", "enabled"))
    }

    /// Returns whether QEMU says that the guest's memory is encrypted or otherwise protected from
    /// the host.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn is_confidential(&self) -> Result<bool, QmpError> {
        if let Self::None = self {
            // The host's kernel tells.
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
}

impl Monitor {
    /// Creates the sources of a guest. `host` is `None` if the host's kernel cannot be read, and
    /// `emulated` is set if the guest runs without KVM.
    #[must_use]
    pub fn new(
        connection: Connection,
        process: Arc<Process>,
        host: Option<Host>,
        emulated: Option<Emulated>,
    ) -> Self {
        Self {
            connection,
            process,
            memory: OnceLock::new(),
            host,
            emulated,
        }
    }

    /// Returns whether the host's kernel answers instead of a monitor.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self.connection, Connection::None)
    }

    /// Returns the connection to the monitor.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the guest as the host's kernel shows it, if the kernel can be read.
    #[must_use]
    pub fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// Returns whether KVM runs the vCPUs.
    #[must_use]
    pub fn uses_kvm(&self) -> bool {
        self.emulated.is_none()
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
        self.connection.execute(command, arguments, patience)
    }

    /// Returns the guest's run state and the report of the last migration.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn state(&self, patience: Duration) -> Result<(String, Migration), QmpError> {
        if self.is_host() {
            // `Point::Running` refuses a guest that its monitor has paused, so a guest that was
            // stopped runs.
            return Ok(("running".to_owned(), self.migration(patience)?));
        }
        let commands = ["query-status", "query-migrate"];
        let [status, migration] = self.connection.execute_in_turn(commands, patience)?;
        let status = string(&status?, "query-status", "status")?;
        Ok((status, self.report(migration?)?))
    }

    /// Returns what [`Self::state`] returns, for a guest whose vCPUs have stayed frozen since
    /// [`Self::state`] returned `before`. If the host's kernel is read, QEMU is not asked again. A
    /// migration that has begun meanwhile changes a slot, because it turns the dirty log on before
    /// it copies a page. A background snapshot turns no dirty log on, but first stops the vCPUs,
    /// and waits for them as long as they are frozen.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn frozen_state(
        &self,
        before: &Migration,
        patience: Duration,
    ) -> Result<(String, Migration), QmpError> {
        match &self.host {
            Some(host) => Ok(("running".to_owned(), before.with(host.slots()?))),
            None => self.state(patience),
        }
    }

    /// Adds the state of the memory slots to QEMU's report.
    fn report(&self, answer: Value) -> Result<Migration, QmpError> {
        let slots = self.host.as_ref().map(Host::slots).transpose()?;
        Ok(Migration { answer, slots })
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

    /// Returns the report of the last migration.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn migration(&self, patience: Duration) -> Result<Migration, QmpError> {
        let answer = match self.is_host() {
            true => Value::Null,
            false => self.execute("query-migrate", Value::Null, patience)?,
        };
        self.report(answer)
    }

    /// Cancels a migration and returns QEMU's report of the last migration. A migration that only
    /// the host's kernel shows cannot be cancelled.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn cancel_migration(&self, patience: Duration) -> Result<Migration, QmpError> {
        if self.is_host() {
            return self.migration(patience);
        }
        // QEMU executes commands in order: it cancels the migration before it executes
        // `query-migrate`.
        let commands = ["migrate_cancel", "query-migrate"];
        let [cancelled, migration] = self.connection.execute_in_turn(commands, patience)?;
        cancelled?;
        Ok(Migration::new(migration?))
    }

    /// Ends the guest without its help. Kills the monitor of a guest that is attached to by its
    /// process.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn quit(&self, patience: Duration) -> Result<(), QmpError> {
        match (&self.connection, &self.host) {
            (Connection::None, Some(host)) => host.kill(),
            _ => self.execute("quit", Value::Null, patience).map(drop),
        }
    }

    /// Returns the guest's name; empty if it has none.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn name(&self) -> Result<String, QmpError> {
        if let (Connection::None, Some(host)) = (&self.connection, &self.host) {
            return Ok(host.name());
        }
        Ok(self.query("query-name")?["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }

    /// Returns the CID of the guest's vhost-vsock device; `None` if it has none.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn vsock_cid(&self) -> Result<Option<u32>, QmpError> {
        if self.is_host() {
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

    /// Returns the guest's RAM. QEMU must answer all questions before the deadline.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn ram(&self, deadline: Instant) -> Result<Vec<RamRange>, AttachError> {
        if let (Connection::None, Some(host)) = (&self.connection, &self.host) {
            // Each stop confirms that KVM still has the slot. Each change confirms that no slot has
            // changed during the change.
            return host.ram(deadline, |_| Some(Removal::ByVcpu));
        }
        // A device that is plugged in after this answer is missing or is left out, which is safe.
        let places = Places::ask(&self.connection, deadline)?;
        if let Some(host) = &self.host {
            return host.ram(deadline, |addresses| match places.removal(addresses) {
                // Each stop confirms that KVM still has the slot.
                Some(Removal::Never) => Some(Removal::ByVcpu),
                removal => removal,
            });
        }
        let left = || deadline.saturating_duration_since(Instant::now());
        let view = self.text("info mtree -f", left())?;
        let answer = self.execute("query-memdev", Value::Null, left())?;
        let backends = answer
            .as_array()
            .ok_or_else(|| unexpected("query-memdev", "a list"))?;
        let names: BTreeSet<&str> = backends
            .iter()
            .filter_map(|backend| backend["id"].as_str())
            .collect();
        // The list of memory devices does not contain a device such as ivshmem that uses a backend.
        let removal = |addresses: &Range<u64>| places.removal(addresses).unwrap_or_default();
        flat_view::ram(&view, &names, removal).map_err(AttachError::Refused)
    }

    /// Translates the first address of a guest-physical range to an address in the monitor's
    /// process. The host's kernel confirms the whole range, QEMU only the first address.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn host_address(&self, range: &Range<u64>, deadline: Instant) -> Result<u64, AttachError> {
        if let Some(host) = &self.host {
            return host.host_address(range);
        }
        let address = range.start;
        let left = deadline.saturating_duration_since(Instant::now());
        let text = self.text(&format!("gpa2hva {address:#x}"), left)?;
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

    /// Returns the registers of each vCPU. The vCPUs are stopped for a moment, and must run
    /// otherwise.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn registers(&self, patience: Duration) -> Result<Vec<Registers>, QmpError> {
        if let Some(read) = self.emulated {
            return read(self, patience);
        }
        if !self.is_host() {
            let status = self.status()?;
            if status != "running" {
                return Err(QmpError::Host(format!(
                    "QEMU says that the guest is {status:?}, and the registers of its vCPUs are stored only while they run; resume it"
                )));
            }
        }
        self.vcpus(patience)?.registers(patience)
    }

    /// Requests the registers of all vCPUs, for a stop by QEMU's `stop`. Each vCPU stores them when
    /// it stops. Returns `None` if they cannot be requested.
    ///
    /// # Errors
    /// [`QmpError`].
    pub(crate) fn request_registers(
        &self,
        patience: Duration,
    ) -> Result<Option<Requested<'_>>, QmpError> {
        self.vcpus(patience)?.request(patience)
    }

    fn vcpus(&self, patience: Duration) -> Result<Vcpus<'_>, QmpError> {
        let threads = identity::vcpus(&self.process, self, &Threads::default(), patience);
        let threads = threads.map_err(|error| match error {
            AttachError::Monitor(error) => error,
            other => QmpError::Host(other.to_string()),
        })?;
        Vcpus::new(&self.process, self.memory()?, &threads.each)
    }

    /// Returns the process's memory.
    fn memory(&self) -> Result<&File, QmpError> {
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let opened = self.process.memory();
        let opened = opened.map_err(|error| QmpError::Host(error.to_string()))?;
        Ok(self.memory.get_or_init(|| opened))
    }
}

fn string(answer: &Value, command: &str, name: &str) -> Result<String, QmpError> {
    answer[name]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| unexpected(command, name))
}

pub(crate) fn unexpected(command: &str, missing: &str) -> QmpError {
    QmpError::Unexpected {
        command: command.to_owned(),
        missing: missing.to_owned(),
    }
}
