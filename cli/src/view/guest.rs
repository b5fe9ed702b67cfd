// SPDX-License-Identifier: Apache-2.0
//! The printed form of guests.

use std::time::Duration;

use patchbay_proto::v1;
use serde::Serialize;

use super::discovery::Discovery;
use super::{micros, time};
use crate::text::harmless;

#[derive(Debug, Serialize)]
pub struct GuestDetails {
    pub name: String,
    pub socket: String,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

/// The task that a CPU runs.
#[derive(Debug, Serialize)]
pub struct Task {
    pub cpu: u32,
    pub pid: u32,
    pub process: u32,
    pub name: String,
}

impl From<v1::CpuTask> for Task {
    fn from(task: v1::CpuTask) -> Self {
        Self {
            cpu: task.cpu,
            pid: task.pid,
            process: task.process,
            name: task.name,
        }
    }
}

/// The result of `guest pause`, `resume` or `shutdown`.
#[derive(Debug, Serialize)]
pub struct Power {
    /// The guest's name. It may be empty unless the output format is `name`.
    #[serde(skip)]
    pub guest: String,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_cut: Option<bool>,
}

#[derive(Debug, Serialize)]
pub struct Details {
    pub vcpus: u32,
    pub memory_bytes: u64,
    pub monitor_pid: u32,
    pub monitor_version: String,
    pub started_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<String>,
    pub registration: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub registration_error: String,
    pub tables: &'static str,
    #[serde(flatten)]
    pub discovery: Option<Discovery>,
    pub agent_connected: bool,
    pub transport: &'static str,
    pub transports: Vec<&'static str>,
    pub kernel_release: String,
    pub kernel_build_id: String,
    pub generation: String,
    pub keys: u32,
    pub sites: u32,
    pub modules: u32,
    pub revision: u64,
    pub incarnation: String,
    pub kaslr: bool,
    pub page_table_isolation: bool,
    pub five_level_paging: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub panicked: Option<bool>,
    /// Days, hours, minutes and seconds since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uptime: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taints: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_warnings: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oopses: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure: Option<String>,
    /// The newest messages of an error and of a panic, as `dmesg` shows them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_warning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_panic: Option<String>,
    /// Number of records that the log no longer holds, and that it had no room for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_overwritten: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_refused: Option<u64>,
    /// The task that each CPU runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<Task>,
    /// Names of the tracefs instances in the guest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trace_instances: Vec<String>,
    /// Names of the values that cannot be read from the memory of a kernel that was discovered or
    /// whose log was found.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_in_memory: Vec<&'static str>,
    #[serde(skip_serializing_if = "is_zero")]
    pub declared_keys: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub declaration_errors: Vec<String>,
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl Power {
    pub fn is(guest: String, state: &'static str) -> Self {
        Self {
            guest,
            state,
            stop_us: None,
            paused_until: None,
            power_cut: None,
        }
    }

    pub fn paused(guest: String, response: v1::PauseGuestResponse) -> Self {
        Self {
            stop_us: Some(micros(response.stop_time)),
            paused_until: response.expires_at.map(|at| time(Some(at))),
            ..Self::is(guest, "paused")
        }
    }

    pub fn off(guest: String, response: v1::ShutdownGuestResponse) -> Self {
        Self {
            power_cut: Some(response.power_cut),
            ..Self::is(guest, "stopped")
        }
    }
}

impl GuestDetails {
    /// Returns the entry of a guest that did not answer.
    pub fn silent(name: String, socket: String, state: &'static str) -> Self {
        Self {
            name,
            socket,
            state,
            details: None,
        }
    }

    pub fn described(name: String, socket: String, guest: v1::DescribeGuestResponse) -> Self {
        let status = guest.status.clone().unwrap_or_default();
        let kernel = guest.kernel_state.clone().unwrap_or_default();
        let details = Details {
            vcpus: guest.vcpus,
            memory_bytes: guest.memory_bytes,
            monitor_pid: guest.monitor_pid,
            monitor_version: guest.monitor_version.clone(),
            started_at: time(guest.started_at),
            paused_until: status.paused_until.map(|at| time(Some(at))),
            registration: registration(status.registration()),
            registration_error: status.registration_error.clone(),
            tables: match status.table_source() {
                v1::TableSource::Unspecified => "none",
                v1::TableSource::Registered => "registered",
                v1::TableSource::Discovered => "discovered",
            },
            discovery: guest.discovery.clone().map(Discovery::from),
            agent_connected: status.agent_connected,
            transport: transport(guest.transport()),
            transports: guest.transports().map(transport).collect(),
            kernel_release: status.kernel_release.clone(),
            kernel_build_id: status.kernel_build_id.clone(),
            generation: format!("{:#x}", status.generation),
            keys: guest.keys,
            sites: guest.sites,
            modules: guest.modules,
            revision: guest.revision,
            incarnation: status.incarnation.clone(),
            kaslr: guest.kaslr,
            page_table_isolation: guest.page_table_isolation,
            five_level_paging: guest.five_level_paging,
            panicked: kernel.panicked,
            uptime: kernel.uptime_seconds.map(uptime),
            taints: kernel.taints.map(taints),
            load: load(&kernel.load_hundredths),
            kernel_warnings: kernel.warnings,
            oopses: kernel.oopses,
            pressure: pressure(&kernel.pressure),
            last_warning: kernel.last_warning.map(message),
            last_panic: kernel.panic.map(message),
            log_overwritten: kernel.log_overwritten,
            log_refused: kernel.log_refused,
            tasks: kernel.tasks.into_iter().map(Into::into).collect(),
            trace_instances: kernel.trace_instances,
            not_in_memory: guest.kernel_state.as_ref().map_or(vec![], missing),
            declared_keys: guest.declared_keys,
            declaration_errors: guest.declaration_errors.clone(),
        };
        Self {
            name,
            socket,
            state: state(status.state()),
            details: Some(details),
        }
    }
}

/// The letters and meanings of the taints, from bit 0 on, as
/// Documentation/admin-guide/tainted-kernels.rst has them.
const TAINTS: [(char, &str); 20] = [
    ('P', "proprietary module"),
    ('F', "module loaded by force"),
    ('S', "kernel on a processor out of specification"),
    ('R', "module unloaded by force"),
    ('M', "machine check exception"),
    ('B', "bad page"),
    ('U', "requested by user space"),
    ('D', "oops or BUG"),
    ('A', "ACPI table overridden"),
    ('W', "warning issued"),
    ('C', "staging driver"),
    ('I', "workaround for a firmware bug"),
    ('O', "module built out of the tree"),
    ('E', "unsigned module"),
    ('L', "soft lockup"),
    ('K', "live patch"),
    ('X', "defined by the distribution"),
    ('T', "randomized structures"),
    ('N', "test module"),
    ('J', "firmware changed by fwctl"),
];

/// Names the taints that are set.
fn taints(bits: u64) -> Vec<String> {
    let set = (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1);
    let known = |bit: u32| TAINTS.get(usize::try_from(bit).ok()?);
    set.map(|bit| match known(bit) {
        Some((letter, meaning)) => format!("{letter} ({meaning})"),
        None => format!("bit {bit}"),
    })
    .collect()
}

/// Formats the load averages as /proc/loadavg does.
fn load(hundredths: &[u64]) -> Option<String> {
    let [one, five, fifteen] = *hundredths else {
        return None;
    };
    let average = |hundredths: u64| format!("{}.{:02}", hundredths / 100, hundredths % 100);
    Some([one, five, fifteen].map(average).join(" "))
}

/// Formats an uptime as days, and hours, minutes and seconds.
fn uptime(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (hours, rest) = (rest / 3600, rest % 3600);
    format!("{days} d {hours:02}:{:02}:{:02}", rest / 60, rest % 60)
}

/// Formats a message of the kernel as `dmesg` does. It is one line.
fn message(message: v1::KernelMessage) -> String {
    let time = Duration::try_from(message.time.unwrap_or_default()).unwrap_or_default();
    let text = harmless(&message.text).replace('\n', " ");
    format!("[{:5}.{:06}] {text}", time.as_secs(), time.subsec_micros())
}

/// Names the parts of the state that cannot be read in the kernel's memory.
fn missing(kernel: &v1::KernelState) -> Vec<&'static str> {
    let parts = [
        ("panicked", kernel.panicked.is_none()),
        ("uptime", kernel.uptime_seconds.is_none()),
        ("taints", kernel.taints.is_none()),
        ("load", load(&kernel.load_hundredths).is_none()),
        ("kernel_warnings", kernel.warnings.is_none()),
        ("oopses", kernel.oopses.is_none()),
        ("pressure", kernel.pressure.is_empty()),
    ];
    let missing = parts.into_iter().filter(|(_, is_missing)| *is_missing);
    missing.map(|(name, _)| name).collect()
}

/// Formats the part of the last 60 s in which tasks waited for each resource.
fn pressure(pressure: &[v1::Pressure]) -> Option<String> {
    let one = |one: &v1::Pressure| format!("{} {:.2} %", one.resource, one.average_60s);
    let all: Vec<String> = pressure.iter().map(one).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// A guest's status, as `guest watch` prints it.
#[derive(Debug, Serialize)]
pub struct Status {
    pub guest: String,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<String>,
    /// The state of the registration; empty if the monitor has ended.
    pub registration: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub registration_error: String,
    pub kernel_release: String,
    pub agent_connected: bool,
    pub incarnation: String,
}

impl Status {
    /// Returns the status of a guest whose monitor has ended. The guest has ended with it.
    pub fn gone(guest: &str) -> Self {
        Self {
            guest: guest.to_owned(),
            state: "gone",
            paused_until: None,
            registration: "",
            registration_error: String::new(),
            kernel_release: String::new(),
            agent_connected: false,
            incarnation: String::new(),
        }
    }
}

impl From<v1::GuestStatus> for Status {
    fn from(status: v1::GuestStatus) -> Self {
        Self {
            state: state(status.state()),
            paused_until: status.paused_until.map(|at| time(Some(at))),
            registration: registration(status.registration()),
            guest: status.guest,
            registration_error: status.registration_error,
            kernel_release: status.kernel_release,
            agent_connected: status.agent_connected,
            incarnation: status.incarnation,
        }
    }
}

pub fn state(state: v1::GuestState) -> &'static str {
    match state {
        v1::GuestState::Unspecified => "unknown",
        v1::GuestState::Running => "running",
        v1::GuestState::Paused => "paused",
        v1::GuestState::Stopped => "stopped",
    }
}

fn registration(registration: v1::RegistrationState) -> &'static str {
    match registration {
        v1::RegistrationState::Unspecified => "unknown",
        v1::RegistrationState::Absent => "absent",
        v1::RegistrationState::Registered => "registered",
        v1::RegistrationState::Withdrawn => "withdrawn",
        v1::RegistrationState::Refused => "refused",
    }
}

fn transport(transport: v1::Transport) -> &'static str {
    match transport {
        v1::Transport::Unspecified => "none",
        v1::Transport::Hypercall => "hypercall",
        v1::Transport::Msr => "msr",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taints_and_load_are_named() {
        assert_eq!(taints(0), Vec::<String>::new());
        let named = ["D (oops or BUG)", "W (warning issued)", "bit 63"];
        assert_eq!(taints(1 << 63 | 1 << 9 | 1 << 7), named);
        assert_eq!(load(&[5, 100, 1234]).as_deref(), Some("0.05 1.00 12.34"));
        assert_eq!(load(&[]), None);
    }

    #[test]
    fn a_message_is_one_line_that_does_not_act_on_a_terminal() {
        let text = "WARNING: \u{1b}[2J\na".to_owned();
        let shown = message(v1::KernelMessage {
            text,
            ..Default::default()
        });
        assert_eq!(shown, "[    0.000000] WARNING: \u{fffd}[2J a");
    }
}
