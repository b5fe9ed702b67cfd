// SPDX-License-Identifier: Apache-2.0
//! Controls a guest that libvirt manages through `virsh`, because libvirt has the only connection
//! to the guest's monitor.

use std::fs;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::AttachError;
use crate::identity::named;
use crate::process::Process;
use crate::qmp::{MAX_MESSAGE, QmpError, message, returned};
use crate::virsh::{Failure, Virsh};

/// The URI of this host's libvirt that runs as root.
pub const SYSTEM: &str = "qemu:///system";

/// Timeout for the first answer, which includes the start of `virsh` and its connection.
pub(crate) const START: Duration = Duration::from_secs(30);

/// The command line of virsh; the URI replaces the empty word.
const VIRSH: [&str; 4] = ["virsh", "--quiet", "--connect", ""];

/// The prefix of each of virsh's errors.
const ERROR: &str = "error: ";

/// A domain of a libvirt on this host.
#[derive(Debug)]
pub struct Domain {
    command_line: Vec<String>,
    name: String,
    virsh: Mutex<Option<Virsh>>,
}

impl Domain {
    /// Opens the domain with this name, of the libvirt with this URI.
    ///
    /// # Errors
    /// `virsh` is not installed, or no such domain runs.
    pub fn open(uri: &str, name: &str) -> Result<Self, AttachError> {
        let domain = Self::of(uri, name);
        domain.execute("query-status", Value::Null, START)?;
        Ok(domain)
    }

    /// Creates the connection without checking it. The first command starts `virsh`.
    pub(crate) fn of(uri: &str, name: &str) -> Self {
        Self::new(
            &VIRSH.map(|word| if word.is_empty() { uri } else { word }),
            name,
        )
    }

    fn new(command_line: &[&str], name: &str) -> Self {
        Self {
            command_line: command_line.iter().map(|&word| word.to_owned()).collect(),
            name: name.to_owned(),
            virsh: Mutex::new(None),
        }
    }

    /// Returns the name of the domain.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the command line of a `virsh` for the domain's libvirt.
    pub(crate) fn command_line(&self) -> &[String] {
        &self.command_line
    }

    /// Carries out a command of QEMU's monitor. If `virsh` has ended, a new one is started.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(
        &self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        let failed = |why: String| QmpError::Virsh {
            command: command.to_owned(),
            why,
        };
        let deadline = Instant::now() + patience;
        let mut slot = self.virsh.lock().unwrap_or_else(PoisonError::into_inner);
        let start = || Virsh::start(&self.command_line).map_err(|error| failed(unstarted(&error)));
        let kept = slot
            .take()
            .and_then(|mut virsh| virsh.runs().then_some(virsh));
        let is_kept = kept.is_some();
        let mut virsh = kept.map_or_else(start, Ok)?;
        let message = message(command, arguments, None);
        let words = [
            "qemu-monitor-command",
            "--domain",
            &self.name,
            "--",
            message.trim_end(),
        ];
        let mut printed = virsh.run(&words, deadline);
        if is_kept && matches!(&printed, Err(Failure::Ended(text)) if text.is_empty()) {
            // A virsh that is being killed counts as running until the last of its threads has
            // ended, so its end may become visible only now. Every command of this crate may be
            // carried out twice.
            virsh = start()?;
            printed = virsh.run(&words, deadline);
        }
        if matches!(
            printed,
            Ok(_) | Err(Failure::NotACommand(_) | Failure::Late)
        ) {
            *slot = Some(virsh);
        }
        let text = printed.map_err(|failure| match failure {
            Failure::NotACommand(why) => failed(why),
            Failure::Late | Failure::Hangs => QmpError::VirshTimedOut {
                command: command.to_owned(),
                patience,
            },
            Failure::Ended(text) => failed(complaint(&text, "has ended without an answer")),
            Failure::TooLong => failed(format!("it printed more than {MAX_MESSAGE} bytes")),
        })?;
        let mut answers = text.lines().filter(|line| line.starts_with('{'));
        match answers.find_map(|line| serde_json::from_str(line).ok()) {
            Some(answer) => returned(command, answer),
            None => Err(failed(complaint(&text, "printed no answer"))),
        }
    }
}

pub(crate) fn unstarted(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "it is not installed; install libvirt-clients, or attach by --pid to a QEMU with a QMP socket".to_owned()
        }
        _ => format!("it cannot be started ({error})"),
    }
}

/// Returns the errors that virsh printed; if there are none, a description with `otherwise`.
fn complaint(text: &str, otherwise: &str) -> String {
    let line = text.find(&format!("\n{ERROR}")).map(|found| found + 1);
    let start = text.starts_with(ERROR).then_some(0).or(line);
    match start {
        Some(start) => format!("it says {:?}", text[start..].trim()),
        None => format!("it {otherwise}"),
    }
}

/// Finds the process of a domain's QEMU by the threads of its vCPUs. libvirt's own record of the
/// process would not help, because its path depends on the URI.
///
/// # Errors
/// No such QEMU runs on this host, or not in this PID namespace.
pub fn process(domain: &str, vcpus: &[u32]) -> Result<Process, AttachError> {
    let process = vcpus.first().and_then(|thread| process_of(*thread));
    let process = process.and_then(|pid| Process::open(pid).ok());
    let is_it = |process: &Process| {
        let line = process.command_line().unwrap_or_default();
        names_guest(&line, domain)
    };
    process.filter(is_it).ok_or_else(|| {
        AttachError::Refused(format!(
            "no process has the vCPU threads {} of domain {domain}; attach on the domain's host and in the PID namespace of its QEMU",
            named(vcpus)
        ))
    })
}

/// Returns the process of a thread.
fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let id = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    id?.trim().parse().ok()
}

/// Returns whether the command line is that of the QEMU that libvirt started for this domain:
/// `-name guest=NAME,…`, with commas in NAME doubled.
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

    /// Returns a domain whose virsh is this shell script.
    fn scripted(script: &str) -> Domain {
        Domain::new(&["sh", "-c", script], "web")
    }

    fn refusal(domain: &Domain, patience: Duration) -> String {
        let refusal = domain.execute("query-status", Value::Null, patience);
        refusal.expect_err("no answer").to_string()
    }

    /// A shell script that answers each command with the number of its process.
    const ANSWERS: &str = r#"while read -r command; do read -r mark; echo "virsh # $command"
        echo "{\"return\": $$}"; echo "virsh # $mark"; eval "$mark"; printf 'virsh # '; done"#;

    #[test]
    fn commands_use_one_virsh_until_it_ends() {
        let domain = scripted(ANSWERS);
        let process = || {
            domain
                .execute("query-status", Value::Null, START)
                .expect("an answer")
        };
        let first = process();
        assert!((0..20).all(|_| process() == first));
        *domain.virsh.lock().expect("unpoisoned") = None;
        assert_ne!(process(), first);

        // A virsh that ends after its first command must not get a second one.
        let domain = scripted(&ANSWERS.replace("done", "exit; done"));
        let process = || {
            let answer = domain.execute("query-status", Value::Null, START);
            let mut slot = domain.virsh.lock().expect("unpoisoned");
            slot.as_mut().expect("kept").wait();
            answer.expect("an answer")
        };
        assert_ne!(process(), process());
    }

    #[test]
    fn a_virsh_that_ends_between_two_commands_is_started_again() {
        let one = r#"read -r command; read -r mark; echo "{\"return\": $$}"; eval "$mark"
            exec >&- 2>&-; cat >/dev/null"#;
        let domain = scripted(one);
        let process = || {
            domain
                .execute("query-status", Value::Null, START)
                .expect("an answer")
        };
        assert_ne!(process(), process());
    }

    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn a_virsh_that_does_not_answer_twice_is_killed() {
        let domain = scripted("echo '{\"return\": 1}'; cat >/dev/null");
        let is_kept = || domain.virsh.lock().expect("unpoisoned").is_some();
        for kept in [true, false] {
            let error = refusal(&domain, SHORT);
            assert!(
                error.starts_with("virsh did not answer query-status within 50ms"),
                "{error}"
            );
            assert_eq!(is_kept(), kept);
        }
    }

    #[test]
    fn an_answer_that_comes_late_is_not_the_next_commands() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("go");
        let waits = format!(
            "n=$((n + 1)); until [ -e '{}' ]; do :; done; echo \"{{\\\"return\\\": $n}}\"",
            file.display()
        );
        let domain = scripted(&ANSWERS.replace(r#"echo "{\"return\": $$}""#, &waits));
        refusal(&domain, SHORT);
        fs::write(file, "").expect("room");
        let answer = domain.execute("query-status", Value::Null, START);
        assert_eq!(answer.expect("an answer"), 2);
    }

    #[test]
    fn what_virsh_says_is_passed_on_in_one_line() {
        let says = |script: &str| refusal(&scripted(script), START);
        let ends = says("echo one; echo 'error: two' >&2; echo 'error: three \"'; exit 1");
        assert_eq!(
            ends,
            r#"virsh did not carry out query-status: it says "error: two\nerror: three \"""#
        );
        let mute = says("exit 1");
        assert_eq!(
            mute,
            "virsh did not carry out query-status: it has ended without an answer"
        );
        let refuses = says(&ANSWERS.replace(r#"echo "{\"return\": $$}""#, "echo 'error: no'"));
        assert_eq!(
            refuses,
            r#"virsh did not carry out query-status: it says "error: no""#
        );
        let unclear = says(&ANSWERS.replace(r#"echo "{\"return\": $$}""#, "echo '{'"));
        assert_eq!(
            unclear,
            "virsh did not carry out query-status: it printed no answer"
        );
        let flood = says("yes");
        assert_eq!(
            flood,
            "virsh did not carry out query-status: it printed more than 16777216 bytes"
        );
        let missing = refusal(&Domain::new(&["/nonexistent"], "web"), START);
        assert!(missing.contains("install libvirt-clients"), "{missing}");
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
