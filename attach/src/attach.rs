// SPDX-License-Identifier: Apache-2.0
//! Attaches to a guest, given a QEMU's socket or process id.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use patchbay_guest::guest::GuestDescription;

use crate::error::AttachError;
use crate::events::Events;
use crate::freeze::{Point, freeze};
use crate::guest::{Pauser, QemuGuest};
use crate::host::{Host, Logging};
use crate::identity::{self, Threads};
use crate::libvirt::{self, Domain};
use crate::life::{End, Life};
use crate::lock::Lock;
use crate::memory::{Access, AttachedRam};
use crate::monitor::{Connection, Emulated, MAP_PATIENCE, Monitor};
use crate::process::Process;
use crate::qmp::{Event, EventListener, Peer, Qmp, QmpError};
use crate::watchdog::{Watchdog, Way};

/// Timeout for a QEMU's greeting.
const PATIENCE: Duration = Duration::from_secs(3);
/// Timeout for the first stop, which shows whether this user may stop the guest.
const FIRST_STOP: Duration = Duration::from_secs(5);

/// Interval of checks that the VM still exists, for a guest that is attached to by its process. A
/// change notices a closed VM by itself. A new VM of the same process is found at the same
/// interval.
const BETWEEN_LOOKS: Duration = Duration::from_secs(5);

/// The guest to attach to.
#[derive(Clone, Debug)]
pub enum Target {
    /// The QEMU that listens on this socket, and its process id if QEMU does not own the socket.
    Qmp(PathBuf, Option<u32>),
    /// The QEMU with this process id, found by the socket on its command line.
    Process(u32),
    /// A running domain of a libvirt on this host.
    Libvirt {
        /// URI of the libvirt.
        uri: String,
        /// Name of the domain.
        domain: String,
    },
    /// A process that runs a guest by KVM, as the host's kernel shows it. Its monitor does not
    /// cooperate.
    Host {
        /// The process's id.
        pid: u32,
        /// The process's start, in clock ticks since the boot of the host, which excludes a later
        /// process with this id; `None` accepts any process with this id.
        started: Option<u64>,
        /// Write to memory whose dirty pages KVM logs.
        dirty_logging_ok: bool,
    },
}

/// The way in which the guest is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseWay {
    /// ptrace stops the threads of the vCPUs.
    #[default]
    Freeze,
    /// QEMU's own `stop` command.
    Qmp,
}

/// The options of an attachment.
#[derive(Clone, Debug)]
pub struct Options {
    /// The guest.
    pub target: Target,
    /// The guest's name in the API; `None` for QEMU's name of the guest, or else one made from the
    /// process id.
    pub name: Option<String>,
    /// The way to access the guest's memory.
    pub access: Access,
    /// The way to stop the guest.
    pub pause: PauseWay,
    /// The program that serves as the watchdog: [`OWN_PROGRAM`](crate::watchdog::OWN_PROGRAM), if
    /// this one does.
    pub watchdog: PathBuf,
    /// Accept a QEMU without KVM, and read its registers by this function. TCG keeps executing code
    /// that it has translated before a write, so this is for tests that only read and stop.
    pub accept_tcg: Option<Emulated>,
}

/// Attaches to a running guest. The guest does not notice the attachment.
///
/// # Errors
/// [`AttachError`].
pub fn attach(options: &Options) -> Result<QemuGuest, AttachError> {
    let life = Arc::new(Life::default());
    let known: Arc<OnceLock<Arc<Process>>> = Arc::default();
    let listener = {
        let (life, known) = (Arc::clone(&life), Arc::clone(&known));
        Box::new(move |event: Option<Event>| match event {
            Some(event) => life.event(&event),
            None => life.disconnected(known.get().map(|process| &**process)),
        })
    };
    let (connection, host, process) = open(&options.target, listener)?;
    let events = match &connection {
        Connection::Libvirt(domain) => Some(Events::of_domain(domain, &life)?),
        Connection::Socket(_) | Connection::None => None,
    };
    let emulated = refuse_unfit(&connection, options.accept_tcg)?;
    let host = match host {
        None if emulated.is_none() => Host::beside_monitor(&process)?,
        host => host,
    };
    let monitor = Monitor::new(connection, Arc::clone(&process), host, emulated);
    let point = match emulated {
        // Only QEMU reports whether it has paused the guest. Any other monitor's pause is
        // recognised by a vCPU that is not in `KVM_RUN`.
        None if monitor.is_host() => Point::Running,
        None => Point::Unlocked,
        Some(_) => Point::Any,
    };
    let threads = identity::vcpus(&process, &monitor, &Threads::default(), PATIENCE)?;
    let _ = known.set(Arc::clone(&process));
    let lock = process.lock()?;
    let access = match options.access {
        // A monitor that shortens its file would end this process by SIGBUS.
        Access::Auto if monitor.is_host() => Access::Process,
        access => access,
    };
    let deadline = Instant::now() + MAP_PATIENCE;
    let ranges = monitor.ram(deadline)?;
    let memory = AttachedRam::open(&process, ranges, access, deadline, |address| {
        monitor.host_address(&(address..address + 1), deadline)
    })?;
    let memory = Arc::new(memory);
    let pauser = pauser(options, &monitor, &threads.distinct(), point)?;
    let watchdog = Arc::new(Mutex::new(watchdog(options, &monitor, &process, &lock)?));
    life.tell(Arc::downgrade(&watchdog));
    let qemus = monitor.name()?;
    let name = options
        .name
        .clone()
        .or_else(|| (!qemus.is_empty()).then_some(qemus));
    let description = GuestDescription {
        name: name.unwrap_or_else(|| match monitor.is_host() {
            true => format!("{}-{}", process.program(), process.pid()),
            false => format!("qemu-{}", process.pid()),
        }),
        vcpus: u32::try_from(threads.each.len()).unwrap_or(u32::MAX),
        memory_bytes: memory.bytes(),
        transports: Vec::new(),
    };
    let monitor = Arc::new(monitor);
    watch_process(&process, &monitor, &life)?;
    Ok(QemuGuest {
        watchdog,
        _events: events,
        description,
        monitor,
        process,
        ram: memory.clone(),
        memory,
        pauser,
        life,
        held: AtomicBool::new(false),
        watch: Mutex::default(),
        _lock: lock,
    })
}

/// Connects to a QMP socket. If the socket is in use, most likely by another attacher, the error
/// names the process.
fn connect(path: &Path, listener: EventListener) -> Result<Qmp, AttachError> {
    Qmp::connect(path, PATIENCE, listener).map_err(|error| {
        let owner = match error {
            QmpError::NoGreeting { owner, .. } => owner,
            _ => None,
        };
        let lock = owner
            .and_then(|pid| Process::open(pid).ok())
            .map(|qemu| qemu.lock());
        match lock {
            Some(Err(taken @ AttachError::Refused(_))) => taken,
            _ => error.into(),
        }
    })
}

/// Opens the connection to the monitor of a guest, or the guest in the host's kernel, and the
/// monitor's process.
fn open(
    target: &Target,
    listener: EventListener,
) -> Result<(Connection, Option<Host>, Arc<Process>), AttachError> {
    match target {
        Target::Qmp(path, pid) => {
            let qmp = connect(path, listener)?;
            let peer = peer(&qmp, path)?;
            let user = peer.user;
            let process = match pid {
                Some(pid) => Process::open(*pid)?,
                None => identity::listener(peer, path)?,
            };
            identity::same_user(&process, user)?;
            Ok((Connection::Socket(qmp), None, Arc::new(process)))
        }
        Target::Process(pid) => {
            let process = Process::open(*pid)?;
            let path = qmp_socket_of(&process)?;
            let qmp = connect(&path, listener)?;
            // The command line is not proof, because a process can set it.
            let owner = identity::listener(peer(&qmp, &path)?, &path)?.pid();
            if owner != *pid {
                return Err(AttachError::Refused(format!(
                    "the command line of process {pid} names the QMP socket {}, but process {owner} listens there; give the right socket with --qmp",
                    path.display()
                )));
            }
            Ok((Connection::Socket(qmp), None, Arc::new(process)))
        }
        Target::Libvirt { uri, domain } => {
            let name = domain;
            let connection = Connection::Libvirt(Domain::open(uri, name)?);
            let process = libvirt::process(name, &connection.vcpu_threads(PATIENCE)?)?;
            Ok((connection, None, Arc::new(process)))
        }
        Target::Host {
            pid,
            started,
            dirty_logging_ok,
        } => {
            let process = Arc::new(match started {
                Some(started) => Process::open_started(*pid, *started)?,
                None => Process::open(*pid)?,
            });
            let logging = match dirty_logging_ok {
                true => Logging::Allow,
                false => Logging::Refuse,
            };
            let host = Host::open(&process, logging)?;
            Ok((Connection::None, Some(host), process))
        }
    }
}

fn peer(qmp: &Qmp, path: &Path) -> Result<Peer, AttachError> {
    qmp.peer().map_err(|error| AttachError::Process {
        what: format!(
            "the process that listens on {} is not known",
            path.display()
        ),
        error: error.to_string(),
        next: "attach again".to_owned(),
    })
}

/// Refuses a guest that cannot be patched from outside. Returns the way to read the registers of a
/// guest that does not use KVM.
fn refuse_unfit(
    connection: &Connection,
    accept_tcg: Option<Emulated>,
) -> Result<Option<Emulated>, AttachError> {
    let kvm = connection.uses_kvm()?;
    let emulated = accept_tcg.filter(|_| !kvm);
    if !kvm && emulated.is_none() {
        return Err(AttachError::Refused(
            "QEMU runs this guest without KVM: what is written to its memory does not reach the code that QEMU has translated; start it \
             with -accel kvm"
                .to_owned(),
        ));
    }
    if connection.is_confidential()? {
        return Err(AttachError::Refused(
            "the guest's memory is encrypted or closed to its host (SEV, TDX): its keys can only be changed from inside".to_owned(),
        ));
    }
    Ok(emulated)
}

fn pauser(
    options: &Options,
    monitor: &Monitor,
    vcpus: &[u32],
    point: Point,
) -> Result<Pauser, AttachError> {
    match (options.pause, monitor.connection()) {
        (PauseWay::Freeze, _) => {
            // The guest is stopped once now, so that a missing right is reported at the start.
            let what = match monitor.is_host() {
                true => "the vCPUs cannot be stopped by ptrace; grant that right, and see that the monitor has not paused the guest",
                false => "the vCPUs cannot be stopped by ptrace; grant that right, or give --pause qmp",
            };
            freeze(vcpus, point, Instant::now() + FIRST_STOP)
                .map_err(|error| AttachError::process(what, error))?;
            Ok(Pauser::Freeze(Mutex::new(Threads::default()), point))
        }
        (PauseWay::Qmp, Connection::Socket(_)) => Ok(Pauser::Qmp),
        (PauseWay::Qmp, Connection::None) => Err(AttachError::Refused(
            "the guest is attached to by its process alone, so no monitor can stop it; give --pause freeze".to_owned(),
        )),
        (PauseWay::Qmp, Connection::Libvirt(_)) => Err(AttachError::Refused(
            "libvirt owns the QMP connection, so a stop over it cannot be ended if this process dies; give --pause freeze".to_owned(),
        )),
    }
}

/// Starts the watchdog, which recovers the guest if this process is killed during a stop.
fn watchdog(
    options: &Options,
    monitor: &Monitor,
    process: &Process,
    lock: &Lock,
) -> Result<Watchdog, AttachError> {
    let way = match (monitor.connection(), &options.target) {
        (Connection::Libvirt(_), Target::Libvirt { uri, domain }) => {
            Ok(Way::Libvirt { uri, domain })
        }
        (Connection::Libvirt(_), _) => Err(io::ErrorKind::InvalidInput.into()),
        (Connection::None, _) => Ok(Way::Nobody),
        (Connection::Socket(qmp), _) => qmp.share().map(Way::Connection),
    };
    let started = process.started()?;
    way.and_then(|way| {
        Watchdog::start(
            &options.watchdog,
            (process.pid(), started),
            way,
            lock.files(),
        )
    })
    .map_err(|error| AttachError::Process {
        what: format!(
            "the watchdog {} cannot be started",
            options.watchdog.display()
        ),
        error: error.to_string(),
        next: "see that the program is there".to_owned(),
    })
}

/// Starts a thread that waits for the end of the process, or of its VM if no monitor reports it.
fn watch_process(
    process: &Arc<Process>,
    monitor: &Arc<Monitor>,
    life: &Arc<Life>,
) -> Result<(), AttachError> {
    let watched = Arc::clone(process);
    let life = Arc::clone(life);
    let interval = match monitor.is_host() {
        true => BETWEEN_LOOKS,
        false => Duration::from_secs(3600),
    };
    let monitor = Arc::downgrade(monitor);
    let watch = move || {
        let is_closed = || {
            let monitor = monitor.upgrade();
            let host = monitor.as_ref().and_then(|monitor| monitor.host());
            host.is_some_and(Host::is_closed)
        };
        while !watched.has_ended_within(interval) && !is_closed() {}
        life.set_end(End::Guest);
    };
    let spawned = std::thread::Builder::new()
        .name("process".to_owned())
        .spawn(watch);
    spawned.map(drop).map_err(|error| AttachError::Process {
        what: "a thread cannot be started".to_owned(),
        error: error.to_string(),
        next: "raise the limit on processes".to_owned(),
    })
}

/// Returns the QMP socket on the command line of a QEMU.
///
/// # Errors
/// This user may not inspect the process, or its command line names no socket.
pub fn qmp_socket_of(process: &Process) -> Result<PathBuf, AttachError> {
    let line = process.command_line()?;
    let words: Vec<String> = line
        .split(|byte| *byte == 0)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let path = qmp_path(&words).ok_or_else(|| {
        AttachError::Refused(format!(
            "the command line of process {} names no QMP socket; start QEMU with -qmp unix:PATH,server=on,wait=off, or name its domain \
             if libvirt manages it",
            process.pid()
        ))
    })?;
    if path.is_absolute() {
        return Ok(path);
    }
    Ok(process.working_folder()?.join(path))
}

/// Returns the path in `-qmp unix:PATH,…`, or in the `-chardev socket,path=PATH,…` that a
/// `-mon …,mode=control` names.
fn qmp_path(words: &[String]) -> Option<PathBuf> {
    let option = |names: [&str; 2], value: &dyn Fn(&str) -> Option<PathBuf>| {
        let pairs = words.windows(2).filter(|pair| {
            let name = pair[0].trim_start_matches('-');
            pair[0].starts_with('-') && names.contains(&name)
        });
        pairs.filter_map(|pair| value(&pair[1])).next()
    };
    let path = |text: &str| {
        (!text.is_empty())
            .then(|| Path::new(std::ffi::OsStr::from_bytes(text.as_bytes())).to_owned())
    };
    let unix = option(["qmp", "qmp-pretty"], &|value| {
        path(value.strip_prefix("unix:")?.split(',').next()?)
    });
    unix.or_else(|| {
        option(["mon", "mon"], &|monitor| {
            let chardev = property(monitor, "chardev").or_else(|| {
                monitor
                    .split(',')
                    .next()
                    .filter(|first| !first.contains('='))
            })?;
            (property(monitor, "mode") == Some("control")).then_some(())?;
            option(["chardev", "chardev"], &|value| {
                let is_it = value.starts_with("socket,") && property(value, "id") == Some(chardev);
                is_it
                    .then(|| property(value, "path"))
                    .flatten()
                    .and_then(path)
            })
        })
    })
}

/// Returns a property in QEMU's `name=value,…`.
fn property<'a>(value: &'a str, name: &str) -> Option<&'a str> {
    value
        .split(',')
        .find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::fake::Fake;

    fn path_in(line: &str) -> Option<PathBuf> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        qmp_path(&words)
    }

    #[test]
    fn the_socket_is_found_on_a_command_line() {
        for line in [
            "qemu -m 1G -qmp unix:/run/q,server=on,wait=off -S",
            "qemu --qmp unix:/run/q",
            "qemu -chardev pty,id=a -chardev socket,id=b,path=/run/q,server=on -mon chardev=b,mode=control",
            "qemu -mon b,mode=control -chardev socket,path=/run/q,id=b",
        ] {
            assert_eq!(path_in(line), Some("/run/q".into()), "{line}");
        }
        for line in [
            "",
            "qemu -qmp",
            "qemu -qmp stdio",
            "qemu -qmp unix:",
            "qemu -chardev socket,id=b,path=/run/q -mon chardev=b,mode=readline",
            "qemu -chardev socket,id=b,path=/run/q -mon chardev=c,mode=control",
            // libvirt starts QEMU like this.
            "qemu -chardev socket,id=b,fd=25,server=on -mon chardev=b,id=m,mode=control",
        ] {
            assert_eq!(path_in(line), None, "{line}");
        }
    }

    /// Returns the reason why a QEMU with KVM is refused if its machine has these properties.
    fn refusal(properties: &'static [(&str, &str)]) -> String {
        let fake = Fake::new(|mut session| {
            session.greet();
            while let Some(command) = session.next() {
                let property = command["arguments"]["property"].as_str();
                let value = properties.iter().find(|(name, _)| property == Some(name));
                let answer = match (command["execute"].as_str(), value) {
                    (Some("query-kvm"), _) => r#""return": {"enabled": true}"#.to_owned(),
                    (Some("qom-get"), Some((_, value))) => format!("\"return\": {value}"),
                    _ => r#""error": {"class": "GenericError", "desc": "not in the script"}"#
                        .to_owned(),
                };
                session.say(&format!("{{{answer}, \"id\": {}}}", command["id"]));
            }
        });
        let options = Options {
            target: Target::Qmp(fake.path(), None),
            name: None,
            access: Access::Auto,
            pause: PauseWay::Freeze,
            watchdog: PathBuf::new(),
            accept_tcg: None,
        };
        attach(&options).expect_err("refused").to_string()
    }

    #[test]
    fn encrypted_memory_is_refused() {
        for properties in [
            &[("confidential-guest-support", r#""/objects/sev0""#)][..],
            // QEMU 7.2 and later has both properties.
            &[
                ("confidential-guest-support", r#""/objects/tdx0""#),
                ("memory-encryption", r#""tdx0""#),
            ],
            // QEMU before 6.0 has only this one.
            &[("memory-encryption", r#""sev0""#)],
        ] {
            let error = refusal(properties);
            assert!(error.contains("encrypted"), "{properties:?}: {error}");
        }
        for properties in [
            &[][..],
            &[
                ("confidential-guest-support", r#""""#),
                ("memory-encryption", r#""""#),
            ],
        ] {
            let error = refusal(properties);
            // The fake has no VM.
            assert!(!error.contains("encrypted"), "{properties:?}: {error}");
        }
    }

    #[test]
    fn a_process_without_a_socket_is_refused() {
        let process = Process::open(std::process::id()).expect("it runs");
        let error = qmp_socket_of(&process).expect_err("no QEMU");
        assert!(error.to_string().contains("names no QMP socket"), "{error}");
    }
}
