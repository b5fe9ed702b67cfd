// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! `patchbay-attach`: serves the API of a guest that another monitor runs.

mod all;
mod args;
mod carry;

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use patchbay_attach::guest::QemuGuest;
use patchbay_attach::hybrid_vsock::{self, SocketFile};
use patchbay_attach::ledger::LedgerName;
use patchbay_attach::life::End;
use patchbay_attach::terminal::say;
use patchbay_attach::{Options, Target, attach, vsock, watchdog};
use patchbay_guest::guest::Machine;
use patchbay_guest::log_file::LogPath;
use patchbay_host_kernel::{HostKernel, ListedVm};
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::claims::LedgerFile;
use patchbay_service::keys::declared::Declarations;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::registry::discovery::DebugFiles;
use patchbay_service::keys::{Keys, KeysConfig};
use patchbay_service::trace::{AgentSocket, Tracing};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::args::{AgentVsock, Command, CommandLine, GuestOf, HostProcess, LedgerCommand};

const MANUAL: patchbay_manual::Program = patchbay_manual::Program {
    name: "patchbay-attach",
    command: CommandLine::command,
    front: None,
};

fn main() -> ExitCode {
    MANUAL.answer_if_asked();
    let line = CommandLine::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("PATCHBAY_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn")),
        )
        .with_ansi(patchbay_manual::stderr_takes_colours())
        .with_writer(std::io::stderr)
        .init();
    let result = match &line.command {
        Command::Watchdog {
            qemu,
            started,
            tail,
            libvirt,
            domain,
        } => watchdog::run(
            (*qemu, *started),
            *tail,
            libvirt.as_deref().zip(domain.as_deref()),
        )
        .context("the watchdog of a guest failed; check that the guest runs"),
        Command::Guest(guest) => run(guest),
        Command::Ledger(LedgerCommand::Export { guest }) => carry::export(guest),
        Command::Ledger(LedgerCommand::Import { file, guest }) => carry::import(file, guest),
        Command::All(all) => all::run(all),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("patchbay-attach: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Attaches to the guest that the command line names.
fn attach_to(guest: &GuestOf) -> anyhow::Result<Arc<QemuGuest>> {
    let target = match guest {
        GuestOf::Qemu(qemu) => qemu.target().context("give --qmp or --pid")?,
        GuestOf::Libvirt(domain) => Target::Libvirt {
            uri: domain.connect.clone(),
            domain: domain.domain.clone(),
        },
        GuestOf::Process(process) => {
            let (pid, started) = process_of(process)?;
            Target::Host {
                pid,
                started,
                dirty_logging_ok: process.dirty_logging_ok,
            }
        }
    };
    let options = guest.options();
    let guest = attach(&Options {
        target,
        name: options.name.clone(),
        access: options.shared.memory.into(),
        pause: options.pause.into(),
        watchdog: PathBuf::from(watchdog::OWN_PROGRAM),
        accept_tcg: None,
    })?;
    Ok(Arc::new(guest))
}

fn debug_files(shared: &args::Shared) -> anyhow::Result<Option<DebugFiles>> {
    let open = |path: &PathBuf| {
        DebugFiles::open(path)
            .with_context(|| format!("the debug file {} cannot be used", path.display()))
    };
    shared.debug_file.as_ref().map(open).transpose()
}

fn audit_log(shared: &args::Shared) -> anyhow::Result<AuditLog> {
    match &shared.audit_log {
        Some(path) => AuditLog::open(path).with_context(|| {
            format!(
                "the audit log {} cannot be opened; name a file in a folder that is yours",
                path.display()
            )
        }),
        None => Ok(AuditLog::default()),
    }
}

fn run(of: &GuestOf) -> anyhow::Result<()> {
    let args = of.options();
    let shared = &args.shared;
    let debug_files = debug_files(shared)?;
    let audit = audit_log(shared)?;
    // A terminal that hangs up detaches.
    let renamed = audit.place().filter(|_| !std::io::stdin().is_terminal());
    let declared = Declarations::read(shared.keys_dir.as_deref())?;
    let guest = attach_to(of)?;
    let name = guest.description().name;
    let path = match &args.api_socket {
        Some(path) => path.clone(),
        None => default_socket(&name)?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // Once the socket exists, the process that has started this one forwards SIGHUP.
    let signals = runtime.block_on(async { Signals::catch() })?;
    let socket = ApiSocket::bind(&path)?;
    // This process has the lock on the guest's process, so no other attacher writes the file.
    let kept = LedgerName::beside(&path, guest.process())?;
    kept.remove_ended();
    let ledger = LedgerFile::open(kept.path(), kept.process())?;
    guest
        .keeps_ledger(kept.path())
        .context("the watchdog has ended; attach again")?;
    // The file of the agent's socket is removed when this function returns.
    let (agent, _file) = match agent_socket(args.agent_vsock, &guest)? {
        Some(socket) => (Some(socket), None),
        None => monitors_agent_socket(&guest).unzip(),
    };
    let tracing = Tracing {
        agent,
        ..Tracing::default()
    };
    let registry = Arc::new(Registry::default());
    registry.discover(guest.clone(), debug_files);
    let config = KeysConfig {
        audit,
        ledger: Some(ledger),
        allow_guarded: shared.allow_guarded,
        allow_text_checker: shared.allow_text_checker,
        declared,
        ..KeysConfig::default()
    };
    let (keys, thread) = Keys::start(guest.clone(), registry, config)
        .context("a thread cannot be started; raise the limit on processes")?;
    let begin = || {
        say(format_args!(
            "attached to {name}; its API is at {}",
            path.display()
        ));
    };
    let until_eof = args.until_eof;
    let detached = signals.detach(renamed, keys.clone());
    let serving = serve(socket, keys, tracing, &guest, until_eof, detached, begin);
    let end = runtime.block_on(serving)?;
    drop(runtime);
    // The executor thread first ends a change in progress or a held pause. So the guest runs before
    // this process ends.
    let _ = thread.join();
    match end {
        None => Ok(()),
        Some(End::Guest) => {
            kept.remove();
            Ok(())
        }
        Some(End::Connection(why)) => {
            Err(anyhow::anyhow!("{why}; the guest runs on, attach again"))
        }
    }
}

/// Returns the process that runs a guest, and the process's start if it was found by the guest's
/// name.
fn process_of(process: &HostProcess) -> anyhow::Result<(u32, Option<u64>)> {
    if let Some(pid) = process.pid {
        return Ok((pid, process.started));
    }
    let name = process.options.name.as_deref().unwrap_or_default();
    let listing = patchbay_host_kernel::list(HostKernel::open).context("/proc cannot be read")?;
    let named = listing.vms.iter().filter(|vm| vm.name() == name);
    let own = rustix::process::geteuid().as_raw();
    let is_trusted = |vm: &&ListedVm| match vm.user {
        // A container's root is not the host's.
        Some(0) => !vm.is_contained,
        user => user == Some(own),
    };
    let (vms, others): (Vec<_>, Vec<_>) = named.partition(is_trusted);
    if let ([], [other, ..]) = (vms.as_slice(), others.as_slice()) {
        let user = other
            .user
            .map_or("unknown".to_owned(), |user| user.to_string());
        return Err(anyhow::anyhow!(
            "the virtual machine named {name:?} is that of process {} of user {user}{}, and any user can choose this name; \
             give the process id if it is the one that you mean",
            other.pid,
            if other.is_contained {
                " of a container"
            } else {
                ""
            }
        ));
    }
    let vms = vms.into_iter();
    let found: BTreeSet<(u32, Option<u64>)> = vms.map(|vm| (vm.pid, vm.started)).collect();
    let found: Vec<_> = found.into_iter().collect();
    match found.as_slice() {
        [only] => Ok(*only),
        [] => Err(anyhow::anyhow!(
            "no virtual machine of this host is named {name:?}; `patchbay host list` shows the names"
        )),
        several => {
            let pids: Vec<String> = several.iter().map(|(pid, _)| pid.to_string()).collect();
            Err(anyhow::anyhow!(
                "{} processes have a virtual machine named {name:?}; give one of the process ids {}",
                pids.len(),
                pids.join(", ")
            ))
        }
    }
}

/// The signals that this process handles.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Catches the signals from now on. The current thread must be in a tokio runtime.
    fn catch() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that detaches. SIGHUP opens the log at `audit` again; without one, it
    /// detaches.
    async fn detach(mut self, audit: Option<Arc<LogPath>>, keys: Keys) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => return,
                _ = self.terminate.recv() => return,
                _ = self.hangup.recv() => match &audit {
                    Some(place) => keys.reopen_audit_log(place),
                    None => return,
                },
            }
        }
    }
}

/// Serves until the guest ends or `detached` does. With `until_eof`, the end of standard input
/// detaches too. `begin` is called before.
async fn serve(
    socket: ApiSocket,
    keys: Keys,
    tracing: Tracing,
    guest: &QemuGuest,
    until_eof: bool,
    detached: impl Future<Output = ()>,
    begin: impl FnOnce(),
) -> anyhow::Result<Option<End>> {
    let (ended, end) = oneshot::channel();
    let life = Arc::clone(guest.life());
    std::thread::Builder::new()
        .name("end".to_owned())
        .spawn(move || ended.send(life.wait()))
        .context("a thread cannot be started; raise the limit on processes")?;
    // The receiver notices that the sender is dropped.
    let (input, input_ended) = oneshot::channel::<()>();
    let mut input = Some(input);
    if until_eof {
        let input = input.take();
        std::thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || {
                // A read error also counts as the end of the input.
                let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
                drop(input);
            })
            .context("a thread cannot be started; raise the limit on processes")?;
    }
    let mut outcome = None;
    let shutdown = async {
        tokio::select! {
            end = end => outcome = end.ok(),
            _ = input_ended => {}
            () = detached => {}
        }
    };
    begin();
    api::serve(socket, keys, tracing, shutdown).await?;
    Ok(outcome)
}

/// Opens the socket that the guest's agent connects to, if the guest has a vhost-vsock device. If
/// the command line gives the agent's address, the socket must open, and the CID is trusted to be
/// the guest's.
fn agent_socket(
    given: Option<AgentVsock>,
    guest: &QemuGuest,
) -> anyhow::Result<Option<AgentSocket>> {
    let bind = |AgentVsock { guest, port }: AgentVsock| {
        AgentSocket::bind_vsock(guest, port).with_context(|| {
            format!("cannot listen on port {port} of the host's AF_VSOCK; give --agent-vsock {guest}:PORT and start the agent with --connect vsock:2:PORT")
        })
    };
    if let Some(address) = given {
        return bind(address).map(Some);
    }
    let Some(cid) = guest.monitor().vsock_cid()? else {
        return Ok(None);
    };
    let process = Arc::clone(guest.process());
    let confirm = move || {
        vsock::is_only_device_of(&process).map_err(|why| {
            format!("only QEMU says that CID {cid} is this guest's, and the host cannot confirm it, because {why}; if it is right, give --agent-vsock {cid}")
        })
    };
    let bound = confirm().map_err(anyhow::Error::msg);
    match bound.and_then(|()| bind(AgentVsock::of(cid))) {
        // A guest that starts later may claim the same CID.
        Ok(socket) => Ok(Some(socket.admitting(confirm))),
        Err(error) => {
            tracing::warn!("the guest's agent is not served: {error:#}");
            Ok(None)
        }
    }
}

/// Binds the socket that the guest's agent reaches through the vsock device in the monitor, if the
/// monitor has one. The file of the socket is removed when the second value is dropped.
fn monitors_agent_socket(guest: &QemuGuest) -> Option<(AgentSocket, SocketFile)> {
    if !guest.monitor().is_host() {
        return None;
    }
    let process = guest.process();
    let bound = hybrid_vsock::find(process).and_then(|vsock| match vsock {
        Some(vsock) => hybrid_vsock::bind_beside(process, &vsock).map(Some),
        // The ioctls of the device do not return its CID.
        None if vsock::has_device(process).unwrap_or_default() => Err(
            "the monitor has a vhost-vsock device, and the host does not show its CID; give --agent-vsock CID".to_owned(),
        ),
        None => Ok(None),
    });
    match bound {
        Ok(bound) => {
            let (listener, file) = bound?;
            Some((AgentSocket::of_monitor(listener, process.pid()), file))
        }
        Err(why) => {
            tracing::warn!("the guest's agent is not served: {why}");
            None
        }
    }
}

/// Returns the path at which `patchbay` looks for the socket.
fn default_socket(name: &str) -> anyhow::Result<PathBuf> {
    let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
    anyhow::ensure!(
        plain,
        "{name:?} cannot be the name of a socket; give --name or --api-socket"
    );
    let folder = run_folder().context("give --api-socket")?;
    Ok(folder.join(format!("{name}.sock")))
}

/// Returns the folder in which `patchbay` looks for sockets, and creates it.
fn run_folder() -> anyhow::Result<PathBuf> {
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) => Path::new(&folder).join("patchbay"),
        None => PathBuf::from("/run/patchbay"),
    };
    created(folder)
}

/// Creates a folder if it does not exist.
fn created(folder: PathBuf) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("{} cannot be made", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_names_every_option() {
        assert_eq!(MANUAL.missing_options(), Vec::<String>::new());
        assert_eq!(MANUAL.without_range(), Vec::<String>::new());
    }
}
