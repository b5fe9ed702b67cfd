// SPDX-License-Identifier: Apache-2.0

//! `patchbay-vmm`: boots one guest and serves its API.
#![forbid(unsafe_code)]

mod args;
mod logs;
mod messages;
mod terminal;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use patchbay_guest::snapshot::ControlState;
use patchbay_proto::text::hex;
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::audit::{AuditLog, AuditOutcome, Copied};
use patchbay_service::keys::claims::{CopiedHolds, Moved};
use patchbay_service::keys::declared::Declarations;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::registry::discovery::DebugFile;
use patchbay_service::keys::symbols::Symbols;
use patchbay_service::keys::{Keys, KeysConfig};
use patchbay_service::trace::{AgentSocket, TraceThread, Tracing};
use patchbay_vmm::boot::LinuxBoot;
use patchbay_vmm::config::{Payload, VmConfig};
use patchbay_vmm::guest::{FilteredThreads, VmGuest};
use patchbay_vmm::jail;
use patchbay_vmm::latency;
use patchbay_vmm::seccomp::{self, ThreadKind};
use patchbay_vmm::snapshot::Snapshot;
use patchbay_vmm::vm::{ExitReason, Vm};
use tokio::signal::unix::{SignalKind, signal as listen};
use tokio::sync::oneshot;
use vmm_sys_util::signal::{self, block_signal, unblock_signal};

use crate::args::Args;
use crate::logs::Logs;
use crate::messages::Stderr;
use crate::terminal::Terminal;

const MANUAL: patchbay_manual::Program = patchbay_manual::Program {
    name: "patchbay-vmm",
    command: Args::command,
    front: None,
};

fn main() -> ExitCode {
    MANUAL.answer_if_asked();
    let args = Args::parse();
    if let Err(why) = args.check() {
        messages::say_last(&why);
        return ExitCode::from(USAGE);
    }
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("PATCHBAY_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn")),
        )
        .with_ansi(patchbay_manual::stderr_takes_colours())
        .with_writer(Stderr::new)
        .init();
    std::panic::set_hook(Box::new(messages::report_panic));
    match run(&args) {
        Ok(reason) => {
            messages::say_last(&reason.to_string());
            match reason {
                // Kernels without a better method reset a machine by a triple fault.
                ExitReason::PowerOff
                | ExitReason::Reset
                | ExitReason::TripleFault { .. }
                | ExitReason::Shutdown => ExitCode::SUCCESS,
                ExitReason::Halted | ExitReason::Failed(_) => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            messages::say_last(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// The exit code for an invalid command line, which is that of clap.
const USAGE: u8 = 2;

/// Signals that the monitor handles. All of them except SIGHUP end the monitor and the guest.
const SIGNALS: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGHUP];

/// Time allowed at the end for writing the outcome of a change in progress to the audit log.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Boots the guest and waits until it has ended.
fn run(args: &Args) -> anyhow::Result<ExitReason> {
    // Threads inherit the blocked signals. The signal handler writes to a socket, which most
    // threads' filters forbid. Only the API's thread unblocks the signals, once it can shut down in
    // order.
    for signal in SIGNALS {
        match block_signal(signal) {
            Ok(()) | Err(signal::Error::SignalAlreadyBlocked(_)) => {}
            Err(error) => anyhow::bail!("signals cannot be blocked ({error}); report it"),
        }
    }
    let linux_boot = args.linux_boot().map_err(anyhow::Error::msg)?;
    jail::confine(args.jail, &args.files())?;
    // The socket is bound before the guest is created, so that a second monitor on the same socket
    // fails first.
    let socket = args
        .api_socket
        .as_deref()
        .map(ApiSocket::bind)
        .transpose()?;
    let agent = match &args.vsock {
        Some(vsock) => {
            Some(AgentSocket::bind(&vsock.path).context("the agent's socket cannot be bound")?)
        }
        None => None,
    };
    let tracing = Tracing {
        agent,
        thread: Some(
            TraceThread::start(&FilteredThreads)
                .context("the trace thread cannot be started; raise the limit on processes")?,
        ),
        grace: Duration::from_secs(args.trace_grace.into()),
        boot_events: args.trace_events.clone().unwrap_or_default(),
    };
    let symbols = match &args.symbols {
        Some(path) => Symbols::read(path)?,
        None => Symbols::default(),
    };
    let debug_file = match &args.debug_file {
        Some(path) => Some(
            DebugFile::open(path)
                .with_context(|| format!("the debug file {} cannot be used", path.display()))?,
        ),
        None => None,
    };
    let audit = match &args.audit_log {
        Some(path) => AuditLog::open(path).with_context(|| {
            format!(
                "the audit log {} cannot be opened; use a file in a directory that you can write to",
                path.display()
            )
        })?,
        None => AuditLog::default(),
    };
    let registry = Arc::new(Registry::default());
    let snapshot = args.from.as_deref().map(Snapshot::open).transpose()?;
    let origin = snapshot.as_ref().map(Origin::of);
    let config = VmConfig {
        console: args.console.output(),
        virtio: args.virtio(),
        ..config(args, linux_boot, snapshot)?
    };
    let vm = Arc::new(Vm::new(config, registry.clone())?);
    // A copy has the transports of the guest that was saved.
    if !vm.transports().any() && !args.no_patchbay && args.from.is_none() {
        tracing::warn!(
            "neither transport works on this host, so the guest cannot register its keys and they have to be discovered; run on a host whose KVM supports KVM_CAP_EXIT_HYPERCALL or MSR filters"
        );
    }
    let guest = Arc::new(VmGuest::new(args.name.clone(), vm.clone()));
    registry.discover(guest.clone(), debug_file.map(Into::into));
    let audit_place = audit.place();
    let mut log = audit.clone();
    let copied = match &origin {
        Some(origin) => origin.holds()?,
        None => None,
    };
    let numbers = copied.as_ref().map(CopiedHolds::numbers);
    let keys_config = KeysConfig {
        audit,
        is_copy: origin.is_some(),
        copied,
        symbols,
        allow_guarded: args.allow_guarded,
        allow_text_checker: args.allow_text_checker,
        declared: Declarations::read(args.keys_dir.as_deref())?,
        threads: Arc::new(FilteredThreads),
        ..KeysConfig::default()
    };
    let (keys, _) = Keys::start(guest, registry.clone(), keys_config)
        .context("the executor of the keys cannot be started; raise the limit on processes")?;
    if let Some(origin) = origin {
        origin.begin_copy(&registry, &mut log, numbers.unwrap_or_default())?;
    }
    let logs = Logs::start(audit_place, keys.clone(), vm.console().clone())?;

    let terminal = Terminal::connect(args.console.is_terminal(), vm.console().clone())?;
    vm.start()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the API's runtime cannot be created; raise the limit on open files")?;
    // Called after the guest's threads have started, because threads that start later inherit the
    // hint.
    latency::prefer_this_thread();
    seccomp::enter(ThreadKind::Api)?;
    let signals = Signals {
        vm: vm.clone(),
        logs,
        has_terminal: terminal.is_connected(),
    };
    let reason = runtime.block_on(serve(vm, socket, tracing, keys, signals))?;
    drop(terminal);
    Ok(reason)
}

/// Returns the hardware and the payload of a guest that boots, or of a copy.
fn config(
    args: &Args,
    linux: Option<LinuxBoot>,
    snapshot: Option<Snapshot>,
) -> anyhow::Result<VmConfig> {
    if let Some(snapshot) = snapshot {
        return Ok(VmConfig::of_snapshot(snapshot));
    }
    let linux = linux.context("there is nothing to start; give --kernel or --from")?;
    Ok(VmConfig {
        memory_bytes: args.memory,
        vcpus: args.vcpus,
        offer_patchbay: !args.no_patchbay,
        ..VmConfig::new(Payload::Linux(linux))
    })
}

/// The guest that a copy is of.
struct Origin {
    control: ControlState,
    snapshot: String,
}

impl Origin {
    fn of(snapshot: &Snapshot) -> Self {
        Self {
            control: snapshot.control(),
            snapshot: hex(&snapshot.digest()),
        }
    }

    /// Returns the holds and claims of the guest that was saved.
    fn holds(&self) -> anyhow::Result<Option<CopiedHolds>> {
        CopiedHolds::decode(&self.control.ledger).map_err(|why| {
            anyhow::anyhow!(
                "the snapshot's holds and claims cannot be used: {why}; take the snapshot again"
            )
        })
    }

    /// Writes the origin to the audit log, and registers the copy's kernel if the saved one was.
    fn begin_copy(
        &self,
        registry: &Registry,
        log: &mut AuditLog,
        numbers: Moved,
    ) -> anyhow::Result<()> {
        let id = log.copied(&Copied {
            origin: &self.control.guest,
            origin_incarnation: &self.control.incarnation,
            snapshot: &self.snapshot,
            holds: numbers.holds,
            claims: numbers.claims,
        })?;
        let registered = registry.register_again(&self.control.requests);
        let registered = registered.inspect_err(|error| {
            let reason = "GUEST_NOT_REGISTERED";
            let error = error.to_string();
            log.outcome(id, &AuditOutcome::Failed { reason, error });
        });
        registered.context("the snapshot's memory lacks the tables that its kernel registered; take the snapshot again")
    }
}

/// Handles the monitor's signals.
struct Signals {
    vm: Arc<Vm>,
    logs: Logs,
    has_terminal: bool,
}

impl Signals {
    /// Unblocks the signals and handles them until the monitor has to end.
    ///
    /// # Errors
    /// The signals cannot be unblocked, or a second signal asks to end without waiting for the
    /// guest.
    async fn handle(&self) -> anyhow::Result<std::convert::Infallible> {
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        let mut quit = listen(SignalKind::quit())?;
        let mut hangup = listen(SignalKind::hangup())?;
        for signal in SIGNALS {
            unblock_signal(signal).map_err(|error| {
                anyhow::anyhow!("signals cannot be unblocked ({error}); report it")
            })?;
        }
        let mut ending = false;
        loop {
            let from_somebody = tokio::select! {
                _ = interrupt.recv() => true,
                _ = terminate.recv() => true,
                _ = quit.recv() => true,
                _ = hangup.recv() => false,
            };
            if !from_somebody && !self.has_terminal {
                self.logs.reopen();
                continue;
            }
            // The kernel may send a hang-up twice (`__tty_hangup()`, `drivers/tty/tty_io.c`).
            anyhow::ensure!(
                !(from_somebody && ending),
                "a second signal ended the monitor before its guest had ended"
            );
            ending = true;
            self.vm.shutdown();
        }
    }
}

/// Serves the API until the guest ends or a signal ends the monitor.
async fn serve(
    vm: Arc<Vm>,
    socket: Option<ApiSocket>,
    tracing: Tracing,
    keys: Keys,
    signals: Signals,
) -> anyhow::Result<ExitReason> {
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new()
        .name("wait".into())
        .spawn(move || ended.send(vm.wait()))
        .context("a thread cannot be started; raise the limit on processes")?;
    let (stop, stopped) = oneshot::channel::<()>();
    let executor = keys.clone();
    let serving = async {
        let stopped = async {
            // A message and a dropped sender both mean the end.
            let _ = stopped.await;
        };
        match socket {
            Some(socket) => api::serve(socket, keys, tracing, stopped).await?,
            None => stopped.await,
        }
        anyhow::Ok(())
    };
    let ending = async {
        let _stop = stop;
        tokio::select! {
            reason = end => reason.context("the thread that waits for the guest has ended"),
            result = signals.handle() => result.map(|never| match never {}),
        }
    };
    let (served, reason) = tokio::join!(serving, ending);
    // The executor handles this tick after the change in progress, so the audit log then contains
    // the outcome of the change.
    if tokio::time::timeout(LAST_WORDS, executor.tick())
        .await
        .is_err()
    {
        tracing::warn!("a change is still in progress; the audit log lacks its outcome");
    }
    served?;
    reason
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
