// SPDX-License-Identifier: Apache-2.0
//! `patchbay-fleet`: the controller.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use patchbay_fleet::api;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::hosts::{HostConfig, HostEndpoint, TlsFiles};
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::store::{DEFAULT_ROOT, EmbeddedStore, EtcdStore, Store, registry};
use tokio::signal::unix::{SignalKind, signal};

/// Rolls changes of static keys out over the guests of many hosts.
#[derive(Parser)]
#[command(name = "patchbay-fleet", version)]
struct Arguments {
    /// Socket of the controller
    #[arg(
        long,
        env = "PATCHBAY_FLEET_SOCKET",
        default_value = "/run/patchbay-fleet/fleet.sock"
    )]
    socket: PathBuf,
    /// Run a controller with an embedded store, without etcd
    #[arg(long)]
    standalone: bool,
    /// Run a replica of the controller on this etcd, as http://ADDRESS:PORT; may be repeated
    #[arg(long = "etcd", conflicts_with = "standalone")]
    etcd: Vec<String>,
    /// Prefix of the controller's keys in etcd
    #[arg(long, default_value = DEFAULT_ROOT, value_parser = parse_root)]
    etcd_root: String,
    /// So long after the death of a leader another replica leads
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=300))]
    lease_seconds: u64,
    /// File of the embedded store
    #[arg(long, default_value = "/var/lib/patchbay/fleet.redb")]
    store: PathBuf,
    /// The controller's certificate for hosts that are reached over TCP, PEM
    #[arg(long, value_name = "FILE", requires_all = ["host_key", "host_ca"])]
    host_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "host_cert")]
    host_key: Option<PathBuf>,
    /// CAs that hosts' certificates must come from, PEM
    #[arg(long, value_name = "FILE", requires = "host_cert")]
    host_ca: Option<PathBuf>,
    /// A host, as NAME=SOCKET[,LABEL=VALUE...]; may be repeated. With --etcd hosts register themselves
    #[arg(long = "host", value_parser = parse_host)]
    hosts: Vec<HostConfig>,
}

fn parse_host(text: &str) -> Result<HostConfig, String> {
    let wrong = || format!("{text:?} is no host; write NAME=SOCKET[,LABEL=VALUE...]");
    let mut parts = text.split(',');
    let (name, socket) = parts
        .next()
        .and_then(|host| host.split_once('='))
        .ok_or_else(wrong)?;
    if name.is_empty() || socket.is_empty() {
        return Err(wrong());
    }
    let labels = parts.map(|label| {
        let (label, value) = label.split_once('=').ok_or_else(wrong)?;
        Ok((label.to_owned(), value.to_owned()))
    });
    Ok(HostConfig {
        name: name.to_owned(),
        endpoint: HostEndpoint::Socket(socket.into()),
        labels: labels.collect::<Result<_, String>>()?,
    })
}

fn parse_root(text: &str) -> Result<String, String> {
    match text.ends_with('/') {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} does not end with a slash")),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("patchbay-fleet: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(arguments: Arguments) -> anyhow::Result<()> {
    if !arguments.standalone && arguments.etcd.is_empty() {
        bail!("give --standalone, or --etcd with the address of an etcd");
    }
    if arguments.standalone && arguments.hosts.is_empty() {
        bail!("no host is given; add --host NAME=SOCKET with the socket of a patchbayd");
    }
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let store: Arc<dyn Store> = if arguments.standalone {
        Arc::new(EmbeddedStore::open(&arguments.store)?)
    } else {
        Arc::new(EtcdStore::new(&arguments.etcd, &arguments.etcd_root)?)
    };
    let tls = match (arguments.host_cert, arguments.host_key, arguments.host_ca) {
        (Some(certificate), Some(key), Some(host_ca)) => Some(TlsFiles {
            certificate,
            key,
            host_ca,
        }),
        _ => None,
    };
    if let Some(tls) = &tls {
        tls.connector().context("the certificates cannot be used")?;
    }
    let config = Config {
        reach: Reach {
            machine: registry::machine(),
            tls,
        },
        replica: format!("pid-{}", std::process::id()),
        hosts: arguments.hosts,
        lease_ttl: Duration::from_secs(arguments.lease_seconds),
    };
    let controller = Arc::new(Controller::new(config, store)?);
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    let ended = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    remove_dead_socket(&arguments.socket)?;
    let serving = api::serve(Arc::clone(&controller), &arguments.socket, ended);
    tokio::select! {
        result = serving => result,
        () = controller.run() => Ok(()),
    }
}

/// A controller that was killed leaves its socket behind.
fn remove_dead_socket(socket: &std::path::Path) -> anyhow::Result<()> {
    if !socket.exists() {
        return Ok(());
    }
    let path = socket.display();
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => bail!("another controller serves {path}"),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(socket)
                .with_context(|| format!("the dead socket {path} cannot be removed"))
        }
        Err(error) => Err(error).with_context(|| format!("{path} is no socket of a controller")),
    }
}
