// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay host`: the virtual machines of this host, whichever monitor runs them.

use patchbay_host_kernel::{DirtyLogging, HostKernel, ListedVm, Listing, Verdict};
use serde::Serialize;

use crate::args::output::Output;
use crate::failure::Failure;
use crate::print::{Printable, Rows, complain, print};
use crate::progress::Progress;

/// Lists the virtual machines of this host.
///
/// # Errors
/// /proc cannot be read, or the list cannot be printed. A process or property that cannot be read
/// is not an error: a message on stderr reports it.
pub async fn list(output: Output) -> Result<(), Failure> {
    let work = tokio::task::spawn_blocking(|| patchbay_host_kernel::list(HostKernel::open));
    let listing = Progress::default()
        .during("looking at this host", work)
        .await;
    let listing = listing.map_err(|error| Failure::error(error.to_string()))?;
    let listing = listing
        .map_err(|error| Failure::error(format!("/proc cannot be read: {error}; mount it")))?;
    let hidden = listing.hidden_remark();
    let Listing { vms, remarks, .. } = listing;
    let vms: Vec<HostVm> = vms.into_iter().map(HostVm::from).collect();
    print(output, &vms)?;
    for remark in remarks.into_iter().chain(hidden) {
        complain(&remark);
    }
    Ok(())
}

/// A virtual machine in the form in which it is printed.
#[derive(Debug, Serialize)]
struct HostVm {
    name: String,
    monitor: String,
    pid: u32,
    /// The VM's descriptor in the process, which distinguishes several VMs of one process.
    descriptor: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpus: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    dirty_logging: &'static str,
    attachable: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<String>,
}

impl From<ListedVm> for HostVm {
    fn from(vm: ListedVm) -> Self {
        let (attachable, reasons) = match (&vm.verdict, vm.attacher) {
            (Verdict::Yes, None) => ("yes", vec![]),
            (Verdict::Yes, Some(pid)) => ("no", vec![format!("process {pid} is attached to it")]),
            (Verdict::No(reasons), _) => ("no", reasons.clone()),
            (Verdict::Unknown(why), _) => ("unknown", vec![why.clone()]),
        };
        let known = vm.monitor.kind.name().map(str::to_owned);
        Self {
            name: vm.name(),
            monitor: known.unwrap_or(vm.monitor.program),
            pid: vm.pid,
            descriptor: vm.descriptor,
            vcpus: vm.vcpus,
            memory_bytes: vm.memory_bytes,
            dirty_logging: match vm.dirty_logging {
                None => "unknown",
                Some(DirtyLogging::Off) => "off",
                Some(DirtyLogging::Part) => "part",
                Some(DirtyLogging::All) => "all",
            },
            attachable,
            reasons,
        }
    }
}

impl HostVm {
    fn row(&self) -> [String; 7] {
        let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        // A newline in a process's text must not begin another row.
        let line = |text: &str| text.replace('\n', "\u{fffd}");
        let attach = match self.reasons.as_slice() {
            [] => self.attachable.to_owned(),
            reasons => format!("{}: {}", self.attachable, reasons.join("; ")),
        };
        [
            line(&self.name),
            line(&self.monitor),
            self.pid.to_string(),
            or_unknown(self.vcpus.map(|vcpus| vcpus.to_string())),
            or_unknown(
                self.memory_bytes
                    .map(|bytes| format!("{} MiB", bytes.div_ceil(1 << 20))),
            ),
            self.dirty_logging.replace("unknown", "-"),
            attach,
        ]
    }
}

impl Printable for Vec<HostVm> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&[
            "NAME",
            "MONITOR",
            "PID",
            "VCPUS",
            "MEMORY",
            "DIRTY LOG",
            "ATTACHABLE",
        ]);
        for vm in self {
            rows.push(vm.row());
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("virtual machines")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|vm| vm.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use patchbay_host_kernel::{Kind, Monitor};

    use super::*;

    fn vm(name: Option<&str>, verdict: Verdict) -> HostVm {
        HostVm::from(listed(name, verdict))
    }

    fn listed(name: Option<&str>, verdict: Verdict) -> ListedVm {
        let monitor = Monitor {
            kind: Kind::Other,
            program: "krunvm".to_owned(),
            name: name.map(str::to_owned),
            words: Default::default(),
        };
        ListedVm {
            pid: 7,
            started: None,
            user: None,
            is_contained: false,
            descriptor: 9,
            monitor,
            vcpus: Some(2),
            memory_bytes: None,
            dirty_logging: None,
            verdict,
            attacher: None,
        }
    }

    #[test]
    fn a_row_says_what_is_unknown() {
        let no = Verdict::No(vec!["a".to_owned(), "b".to_owned()]);
        let row = vm(None, no).row();
        assert_eq!(row, ["krunvm-7", "krunvm", "7", "2", "-", "-", "no: a; b"]);
        assert_eq!(vm(None, Verdict::Yes).row()[6], "yes");
        let mut attached = listed(None, Verdict::Yes);
        attached.attacher = Some(5);
        let row = HostVm::from(attached).row();
        assert_eq!(row[6], "no: process 5 is attached to it");
        let unknown = serde_json::to_value(vm(None, Verdict::Unknown("c".to_owned())));
        let unknown = unknown.expect("JSON");
        assert_eq!(unknown["attachable"], "unknown");
        assert_eq!(unknown["reasons"][0], "c");
        assert_eq!(unknown.get("memory_bytes"), None);
    }

    #[test]
    fn a_hostile_name_stays_in_its_row() {
        let list = vec![vm(Some("a\nb\x1b[2J"), Verdict::Yes)];
        assert_eq!(list.rows().text().lines().count(), 2);
    }
}
