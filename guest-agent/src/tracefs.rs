// SPDX-License-Identifier: Apache-2.0
//! The agent's tracefs instance (`Documentation/trace/ftrace.rst`, "Instances", and `events.rst`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use patchbay_proto::agent::v1::{AgentBufferStats, AgentEnabledEvent, AgentEvent, AgentInstance};
use rustix::fs::{Mode, OFlags};

const INSTANCE: &str = "patchbay";
const MOUNT_POINT: &str = "/sys/kernel/tracing";
/// Total buffer size of all CPUs in KiB. The ring buffer uses guest memory.
const BUFFER_KIB: usize = 16 << 10;
const MAX_CPU_BUFFER_KIB: usize = 1 << 10;
/// Limit on the size of a file that is read. No file of tracefs is longer in practice.
const MAX_FILE_BYTES: usize = 512 << 10;
const READ_BYTES: usize = 64 << 10;
/// Limit on messages quoted from the kernel.
const MAX_MESSAGE_BYTES: usize = 1 << 10;

/// Events cannot be traced in this guest.
#[derive(Debug, thiserror::Error)]
pub enum TracefsError {
    #[error(
        "tracefs cannot be mounted at {MOUNT_POINT} ({0}); the kernel needs CONFIG_FTRACE and the agent needs root"
    )]
    NotMounted(io::Error),
    #[error(
        "the tracefs instance {path} cannot be set up ({error}); the agent needs root and a kernel that is not locked down"
    )]
    Instance { path: String, error: io::Error },
}

/// The tracefs mount and the agent's instance.
#[derive(Debug)]
pub struct Tracefs {
    root: PathBuf,
    instance: PathBuf,
}

/// A checked "system:name", which can only name the directory of an event.
struct EventName<'a> {
    system: &'a str,
    name: &'a str,
}

impl<'a> EventName<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (system, name) = text.split_once(':')?;
        let plain = |part: &str| {
            !part.is_empty()
                && part.len() <= 128
                && part
                    .bytes()
                    .all(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'-')
        };
        (plain(system) && plain(name)).then_some(Self { system, name })
    }
}

impl Tracefs {
    /// Opens or creates the instance. Events that are enabled in it stay enabled.
    pub fn open(root: Option<PathBuf>) -> Result<Self, TracefsError> {
        let root = match root {
            Some(root) => root,
            None => mounted().map_err(TracefsError::NotMounted)?,
        };
        let instance = root.join("instances").join(INSTANCE);
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |error| TracefsError::Instance { path, error }
        };
        let this = Self { root, instance };
        match fs::create_dir(&this.instance) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(&this.instance)(error));
            }
            _ => {}
        }
        this.leave_out_command_names()
            .map_err(failed(&this.instance.join("trace_options")))?;
        let cpus = this.cpus().len().max(1);
        let buffer_kib = (BUFFER_KIB / cpus).clamp(64, MAX_CPU_BUFFER_KIB);
        // "mono" is comparable with clock_gettime(). Selecting a clock empties the buffer, even if
        // it is already selected (`tracing_set_clock()`, `kernel/trace/trace.c`), and would lose
        // the events recorded while no agent ran.
        let clock = this.instance.join("trace_clock");
        if !read(&clock).is_ok_and(|clocks| clocks.contains("[mono]")) {
            write(&clock, "mono").map_err(failed(&clock))?;
        }
        for (file, value) in [
            ("buffer_size_kb", buffer_kib.to_string()),
            // This wakes readers at the first event instead of when the buffer is half full.
            ("buffer_percent", "0".to_owned()),
            ("tracing_on", "1".to_owned()),
        ] {
            let path = this.instance.join(file);
            write(&path, &value).map_err(failed(&path))?;
        }
        Ok(this)
    }

    /// Turns off the recording of command names. Otherwise enabling any event attaches probes to
    /// sched_switch and two more tracepoints (`tracing_start_cmdline_record()`,
    /// `kernel/trace/trace_sched_switch.c`), and the guest would pay for their calls even while the
    /// enabled events do not fire.
    ///
    /// Clearing the option stops the recording for the whole system. If the option was set at the
    /// top level, it is set again there, which restarts the recording for the events of others.
    fn leave_out_command_names(&self) -> io::Result<()> {
        let top = self.root.join("trace_options");
        let others_record =
            read(&top).is_ok_and(|options| options.lines().any(|option| option == "record-cmd"));
        write(&self.instance.join("trace_options"), "norecord-cmd")?;
        if others_record {
            write(&top, "norecord-cmd")?;
            write(&top, "record-cmd")?;
        }
        Ok(())
    }

    /// Returns all events, as "system:name".
    pub fn events(&self) -> io::Result<Vec<String>> {
        Ok(read(&self.root.join("available_events"))?
            .lines()
            .map(str::to_owned)
            .collect())
    }

    /// Returns the events that are enabled in the agent's instance.
    pub fn enabled(&self) -> Vec<String> {
        enabled_events(&self.instance)
    }

    /// Returns the events that are enabled outside the agent's instance.
    pub fn others(&self) -> Vec<AgentInstance> {
        let mut folders = vec![(String::new(), self.root.clone())];
        if let Ok(instances) = fs::read_dir(self.root.join("instances")) {
            for instance in instances.flatten() {
                let name = instance.file_name().to_string_lossy().into_owned();
                if name != INSTANCE {
                    folders.push((name, instance.path()));
                }
            }
        }
        folders
            .into_iter()
            .map(|(name, folder)| AgentInstance {
                name,
                events: enabled_events(&folder),
            })
            .filter(|other| !other.events.is_empty())
            .collect()
    }

    /// Enables one event with its filter and trigger.
    pub fn enable(&self, event: &AgentEvent) -> AgentEnabledEvent {
        let mut result = AgentEnabledEvent {
            name: event.name.clone(),
            ..Default::default()
        };
        match self.try_enable(event, &mut result.vanished) {
            Ok(format) => result.format = format,
            Err(error) => result.error = error,
        }
        result
    }

    fn try_enable(&self, event: &AgentEvent, vanished: &mut bool) -> Result<String, String> {
        let folder = self.folder(&event.name, vanished)?;
        if !event.filter.is_empty() {
            let file = folder.join("filter");
            write(&file, &event.filter).map_err(|error| {
                // The kernel's error message can be read from the file.
                let message = read(&file).unwrap_or_default();
                let _ = write(&file, "0");
                format!("filter: {}", said(&message, &error))
            })?;
        }
        if !event.trigger.is_empty() {
            write(&folder.join("trigger"), &event.trigger)
                .map_err(|error| format!("trigger: {}", said(&self.last_error(), &error)))?;
        }
        write(&folder.join("enable"), "1").map_err(|error| error.to_string())?;
        let name = event.name.replacen(':', "/", 1);
        read(&self.root.join("events").join(name).join("format"))
            .map_err(|error| format!("format: {error}"))
    }

    /// Disables one event and removes its filter and triggers.
    pub fn disable(&self, name: &str) -> AgentEnabledEvent {
        let mut result = AgentEnabledEvent {
            name: name.to_owned(),
            ..Default::default()
        };
        let outcome = self.folder(name, &mut result.vanished).and_then(|folder| {
            write(&folder.join("enable"), "0").map_err(|error| error.to_string())?;
            // Failures are harmless: the event is disabled, and the next filter replaces this one.
            let _ = write(&folder.join("filter"), "0");
            let triggers = read(&folder.join("trigger")).unwrap_or_default();
            for trigger in triggers.lines().filter(|line| !line.starts_with('#')) {
                let _ = write(&folder.join("trigger"), &removal(trigger));
            }
            Ok(())
        });
        if let Err(error) = outcome {
            result.error = error;
        }
        result
    }

    fn folder(&self, name: &str, vanished: &mut bool) -> Result<PathBuf, String> {
        let event = EventName::parse(name).ok_or_else(|| format!("{name:?} is not system:name"))?;
        let folder = self
            .instance
            .join("events")
            .join(event.system)
            .join(event.name);
        *vanished = !folder.is_dir();
        if *vanished {
            Err(format!(
                "there is no event {name}; load the module that defines it"
            ))
        } else {
            Ok(folder)
        }
    }

    /// Stops or starts the recording of all events of the instance.
    pub fn record(&self, on: bool) -> io::Result<()> {
        write(
            &self.instance.join("tracing_on"),
            if on { "1" } else { "0" },
        )
    }

    /// Returns the most recent entry of the error log.
    fn last_error(&self) -> String {
        let log = read(&self.instance.join("error_log")).unwrap_or_default();
        log.rfind("] ")
            .map_or(String::new(), |at| log[at + 2..].to_owned())
    }

    /// Returns the numbers and directories of the CPUs.
    fn cpus(&self) -> Vec<(u32, PathBuf)> {
        let Ok(folders) = fs::read_dir(self.instance.join("per_cpu")) else {
            return vec![];
        };
        let mut cpus: Vec<_> = folders
            .flatten()
            .filter_map(|folder| {
                let number = folder
                    .file_name()
                    .to_str()?
                    .strip_prefix("cpu")?
                    .parse()
                    .ok()?;
                Some((number, folder.path()))
            })
            .collect();
        cpus.sort();
        cpus
    }

    /// Returns the CPUs' raw pages, for non-blocking reads.
    pub fn pages(&self) -> Vec<(u32, File)> {
        let open = |(cpu, folder): (u32, PathBuf)| {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let fd = rustix::fs::open(folder.join("trace_pipe_raw"), flags, Mode::empty()).ok()?;
            Some((cpu, File::from(fd)))
        };
        self.cpus().into_iter().filter_map(open).collect()
    }

    /// Returns buffer statistics summed over the CPUs.
    pub fn stats(&self) -> AgentBufferStats {
        let mut stats = AgentBufferStats::default();
        for (_, folder) in self.cpus() {
            for line in read(&folder.join("stats")).unwrap_or_default().lines() {
                let Some((name, value)) = line.split_once(": ") else {
                    continue;
                };
                let sum = match name {
                    "entries" => &mut stats.entries,
                    "overrun" => &mut stats.overrun,
                    "dropped events" => &mut stats.dropped,
                    "read events" => &mut stats.read,
                    _ => continue,
                };
                *sum = sum.saturating_add(value.trim().parse().unwrap_or(0));
            }
        }
        let total = read(&self.instance.join("buffer_total_size_kb")).unwrap_or_default();
        // An unused buffer reads "1408 (expanded: 2048)".
        let kib: u64 = total
            .split_whitespace()
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        stats.buffer_bytes = kib << 10;
        stats
    }
}

fn mounted() -> io::Result<PathBuf> {
    let usual = PathBuf::from(MOUNT_POINT);
    let debug = PathBuf::from("/sys/kernel/debug/tracing");
    if let Some(found) = [&usual, &debug]
        .into_iter()
        .find(|path| path.join("available_events").exists())
    {
        return Ok(found.clone());
    }
    rustix::mount::mount(
        "tracefs",
        &usual,
        "tracefs",
        rustix::mount::MountFlags::empty(),
        None,
    )?;
    Ok(usual)
}

/// Returns the command that removes a trigger listed as "traceoff:unlimited if pid > 1" or
/// "hist:keys=pid:size=2048 [active]". `:unlimited` and the state in brackets are not part of it.
fn removal(listed: &str) -> String {
    let command = listed.split(" [").next().unwrap_or(listed);
    format!("!{}", command.replacen(":unlimited", "", 1))
}

fn enabled_events(folder: &Path) -> Vec<String> {
    read(&folder.join("set_event"))
        .unwrap_or_default()
        .lines()
        .map(str::to_owned)
        .collect()
}

/// Returns the kernel's message, truncated, or the text of the error if there is no message.
fn said(message: &str, error: &io::Error) -> String {
    let mut end = message.len().min(MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    match message[..end].trim() {
        "" | "none" => error.to_string(),
        message => message.to_owned(),
    }
}

/// Reads in large pieces: some files, such as an event's filter, return everything in the first
/// read or nothing (`event_filter_read()`, `kernel/trace/trace_events.c`).
fn read(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut bytes = Vec::new();
    let mut piece = vec![0; READ_BYTES];
    while bytes.len() < MAX_FILE_BYTES {
        match file.read(&mut piece)? {
            0 => break,
            read => bytes.extend_from_slice(&piece[..read]),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes in one system call, as the kernel's files require.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let written = OpenOptions::new()
        .write(true)
        .open(path)?
        .write(text.as_bytes())?;
    if written < text.len() {
        Err(io::ErrorKind::WriteZero.into())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_events_are_nothing_else() {
        assert!(EventName::parse("sched:sched_switch").is_some());
        for bad in [
            "sched_switch",
            "sched:",
            ":x",
            "../..:x",
            "a:b/c",
            "a:b:c",
            "a:..",
            "a:b\n",
            "a:*",
        ] {
            assert!(EventName::parse(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn triggers_are_removed_as_they_were_set() {
        for (listed, removal) in [
            ("stacktrace:unlimited", "!stacktrace"),
            ("traceoff:count=0", "!traceoff:count=0"),
            ("traceoff:unlimited if pid > 1", "!traceoff if pid > 1"),
            (
                "hist:keys=pid:size=2048 [active]",
                "!hist:keys=pid:size=2048",
            ),
        ] {
            assert_eq!(super::removal(listed), removal);
        }
    }

    #[test]
    fn the_kernels_message_is_preferred_and_bounded() {
        let error = io::Error::from_raw_os_error(22);
        assert_eq!(
            said(
                "badfield == 1\n         ^\nparse_error: Field not found\n",
                &error
            )
            .lines()
            .count(),
            3
        );
        assert!(said("none\n", &error).contains("Invalid argument"));
        assert!(said(&"é".repeat(1000), &error).len() <= MAX_MESSAGE_BYTES);
    }
}
