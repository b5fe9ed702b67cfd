// SPDX-License-Identifier: Apache-2.0
//! `patchbayd` serves all guests of one host behind one endpoint.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, ValueEnum};
use patchbay_access::folders::create_folder_of;
use patchbay_access::listen::DEFAULT_STREAM_AGE;
use patchbay_access::listen::client_cas::ClientCas;
use patchbay_access::listen::tls::TlsFiles;
use patchbay_access::scrape::MetricsAddress;
use patchbay_access::spans::Exporter;
use patchbay_node::attach::{Attach, program_beside};
use patchbay_node::autopsy::Autopsies;
use patchbay_node::command::{Command, default_audit_log, exit_code, run};
use patchbay_node::guests::Guests;
use patchbay_node::monitors::{RunDirs, default_run_dirs};
use patchbay_node::serve::{Config, RegistryConfig, serve};
use patchbay_store::DEFAULT_ROOT;
use patchbay_store::args::EtcdTlsArgs;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing_subscriber::EnvFilter;

/// Serve all Patchbay guests of this host: discovers their monitors, enforces the policy, and keeps
/// the host's audit log.
#[derive(Debug, Parser)]
#[command(name = "patchbayd", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Folder of monitors' sockets (DIR/*.sock, DIR/NAME/api.sock); may be given several times.
    /// [default: /run/patchbay and $XDG_RUNTIME_DIR/patchbay]
    #[arg(long, value_name = "DIR")]
    run_dir: Vec<PathBuf>,
    /// The host's own socket. [default: /run/patchbayd/patchbayd.sock for root, else
    /// $XDG_RUNTIME_DIR/patchbayd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Mode of the socket, octal 0 to 777. The policy decides by uid what each user who can connect
    /// may do.
    #[arg(long, value_name = "OCTAL", default_value = "660", value_parser = patchbay_proto::socket::parse_mode)]
    socket_mode: u32,
    /// Listen on TCP with mutual TLS.
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["cert", "key"])]
    listen: Option<SocketAddr>,
    /// The host's certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "listen")]
    cert: Option<PathBuf>,
    /// Private key of --cert, PEM.
    #[arg(long, value_name = "FILE", requires = "listen")]
    key: Option<PathBuf>,
    #[command(flatten)]
    clients: ClientCas,
    /// Policy file, which determines who may do what. Without it, only root and the user that the
    /// daemon runs as have access.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// End consoles, watches, events and logs after this time in seconds, 1 to 604800. Clients may
    /// open them again.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_STREAM_AGE.as_secs(), value_parser = clap::value_parser!(u64).range(1..=604_800))]
    max_stream_age: u64,
    /// The audit log. No change is made without a line in it.
    #[arg(long, value_name = "FILE", default_value_os_t = default_audit_log())]
    audit_log: PathBuf,
    /// Serve Prometheus metrics on a loopback address or a unix socket.
    #[arg(long, value_name = "127.0.0.1:PORT|unix:PATH")]
    metrics: Option<MetricsAddress>,
    /// Guests to run: a YAML file of names, each with a systemd unit or a monitor's command.
    #[arg(long, value_name = "FILE")]
    guests: Option<PathBuf>,
    /// Attach to every QEMU that has a QMP socket in this folder; may be given several times. No
    /// other program may use these sockets.
    #[arg(long, value_name = "FOLDER")]
    attach_qmp: Vec<PathBuf>,
    /// Attach to every running domain of a libvirt on this host.
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "qemu:///system")]
    attach_libvirt: Option<String>,
    /// Attach to the guest of every KVM monitor of this host, without the monitor's cooperation. A
    /// guest that --attach-qmp or --attach-libvirt finds is left to that option. `patchbay host
    /// list` shows the guests, and whether they can be attached to.
    #[arg(long)]
    attach_all: bool,
    /// Name the guests of the user with this uid, 0 to 4294967294, as their monitors do; may be
    /// given several times. Otherwise --attach-all names only the guests of root so, outside of
    /// containers, and all others kvm:UID:PID, because any user of /dev/kvm could give a guest the
    /// name of another one. With 0, the root of each container names its guests too.
    #[arg(long, value_name = "UID", requires = "attach_all", value_parser = clap::value_parser!(u32).range(0..=4_294_967_294))]
    attach_names_of: Vec<u32>,
    /// The program that attaches. [default: patchbay-attach beside this program, else in PATH]
    #[arg(long, value_name = "PROGRAM")]
    attach_program: Option<PathBuf>,
    /// Debug file, or folder of debug files, for the guests that this daemon attaches to. Needed
    /// for kernels that do not reveal what a discovery needs; see --debug-file of patchbay-attach.
    #[arg(long, value_name = "PATH")]
    debug_file: Option<PathBuf>,
    /// Write an autopsy of each guest whose kernel panics to this folder, as `patchbay guest
    /// autopsy` does. The folder keeps the newest 64 files, at most 1 GiB. Only the daemon's user
    /// can read them, because the log and the events of a guest are secret. The policy must make
    /// this user a viewer of the guests.
    #[arg(long, value_name = "FOLDER")]
    autopsies: Option<PathBuf>,
    /// Register the host and its guests in this etcd, http://ADDRESS:PORT, or https:// with
    /// certificates; may be given several times.
    #[arg(long, value_name = "URL")]
    etcd: Vec<String>,
    #[command(flatten)]
    etcd_tls: EtcdTlsArgs,
    /// Prefix of the fleet's keys in etcd.
    #[arg(long, value_name = "PREFIX", default_value = DEFAULT_ROOT, requires = "etcd")]
    etcd_root: String,
    /// The host's name in the registry. [default: the machine's host name]
    #[arg(long, value_name = "NAME", requires = "etcd")]
    host_name: Option<String>,
    /// A label of the host in the registry; may be given several times.
    #[arg(long = "label", value_name = "LABEL=VALUE", requires = "etcd", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Address at which controllers reach the listener. [default: the address of --listen]
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["etcd", "listen"])]
    advertise: Option<String>,
    /// Format of log lines on standard error; PATCHBAY_LOG filters them.
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Text for people.
    Text,
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((label, value)) if !label.is_empty() => Ok((label.to_owned(), value.to_owned())),
        _ => Err("give LABEL=VALUE".to_owned()),
    }
}

/// `patchbay` starts this program for its hidden commands.
const MANUAL: patchbay_manual::Program = patchbay_manual::Program {
    name: "patchbayd",
    command: Cli::command,
    front: Some("patchbay"),
};

fn main() -> ExitCode {
    MANUAL.answer_if_asked();
    let cli = Cli::parse();
    let cli_command = cli.command.is_some();
    let done = match &cli.command {
        Some(command) => run(
            command,
            &mut std::io::stdout().lock(),
            &mut std::io::stderr(),
        ),
        None => start(cli.serve).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if cli_command => {
            // `patchbay` started this process, so errors carry the name that the operator typed.
            eprintln!("patchbay: {error:#}");
            ExitCode::from(exit_code(&error))
        }
        Err(error) => {
            eprintln!("patchbayd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(args: ServeArgs) -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_env("PATCHBAY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(patchbay_manual::stderr_takes_colours())
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Json => log.json().flatten_event(true).init(),
        LogFormat::Text => log.init(),
    }
    let config = config(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime cannot be started")?;
    let served = runtime.block_on(async {
        let exporter = Exporter::from_environment("patchbayd")?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (reload, reloads) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(()) = hangup.recv().await {
                // One pending reload is sufficient, because it reads the files as they are at that
                // time.
                let _ = reload.try_send(());
            }
        });
        serve(config, reloads, async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
        .await?;
        exporter.shutdown().await;
        Ok(())
    });
    // A folder of autopsies on a file system that hangs must not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

fn config(args: ServeArgs) -> anyhow::Result<Config> {
    let socket = match args.socket {
        Some(socket) => socket,
        None => default_socket()?,
    };
    for path in [&socket, &args.audit_log] {
        create_folder_of(path)?;
    }
    if args.listen.is_some() == args.clients.is_empty() {
        anyhow::bail!(
            "--listen and the clients' CAs are only valid together; give --listen with --client-ca DOMAIN=FILE or \
             --common-name-ca FILE"
        );
    }
    let listen = match (args.listen, args.cert, args.key) {
        (Some(address), Some(certificate), Some(key)) => Some((
            address,
            TlsFiles {
                certificate,
                key,
                clients: args.clients,
            },
        )),
        _ => None,
    };
    let registry = match args.etcd.is_empty() {
        true => None,
        false => Some(RegistryConfig {
            etcd: args.etcd,
            etcd_tls: args.etcd_tls.files(),
            root: args.etcd_root,
            name: args.host_name.unwrap_or_else(|| {
                let name = rustix::system::uname();
                name.nodename().to_string_lossy().into_owned()
            }),
            labels: args.labels.into_iter().collect(),
            address: match (args.advertise, args.listen) {
                (Some(address), _) => Some(address),
                // A client cannot connect to a wildcard address.
                (None, Some(address)) if address.ip().is_unspecified() || address.port() == 0 => {
                    anyhow::bail!(
                        "{address} is no address that a controller could connect to; give --advertise"
                    )
                }
                (None, address) => address.map(|address| address.to_string()),
            },
        }),
    };
    let guests = match &args.guests {
        Some(file) => Guests::read(file)?,
        None => Guests::default(),
    };
    if let Some(path) = &args.debug_file {
        std::fs::metadata(path)
            .with_context(|| format!("--debug-file {} cannot be used", path.display()))?;
    }
    Ok(Config {
        guests,
        attach: Attach {
            qmp: args.attach_qmp,
            libvirt: args.attach_libvirt,
            all: args.attach_all,
            names_of: args.attach_names_of.into_iter().collect(),
            program: args.attach_program,
            debug_file: args.debug_file,
        },
        autopsies: args.autopsies.map(|folder| Autopsies {
            folder,
            program: program_beside("patchbay"),
        }),
        registry,
        run_dirs: match args.run_dir.as_slice() {
            [] => default_run_dirs(),
            dirs => RunDirs(dirs.to_vec()),
        },
        socket,
        socket_mode: args.socket_mode,
        listen,
        policy: args.policy,
        max_stream_age: Duration::from_secs(args.max_stream_age),
        audit_log: args.audit_log,
        metrics: args.metrics,
    })
}

fn default_socket() -> anyhow::Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from("/run/patchbayd/patchbayd.sock"));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let folder = folder.context("XDG_RUNTIME_DIR is not set; give --socket PATH")?;
    Ok(PathBuf::from(folder).join("patchbayd.sock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_names_every_option() {
        assert_eq!(MANUAL.missing_options(), Vec::<String>::new());
        assert_eq!(MANUAL.without_range(), Vec::<String>::new());
        let pages = MANUAL.page_names();
        for page in ["policy-check", "policy-can", "audit-export", "certs-issue"] {
            let page = format!("patchbay-{page}.1");
            assert!(pages.contains(&page), "{page}");
        }
    }
}
