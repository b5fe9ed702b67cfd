// SPDX-License-Identifier: Apache-2.0
//! `patchbay-fleet` is the controller of a fleet.
#![forbid(unsafe_code)]

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, CommandFactory, Parser, ValueEnum};
use patchbay_access::audit::{Audit, AuditLog};
use patchbay_access::connect::is_address;
use patchbay_access::folders::create_folder_of;
use patchbay_access::listen::client_cas::ClientCas;
use patchbay_access::listen::tls::{Tls, TlsFiles};
use patchbay_access::policy::LivePolicy;
use patchbay_access::scrape::MetricsAddress;
use patchbay_access::spans::Exporter;
use patchbay_fleet::api;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::gates::commands::{self, Commands};
use patchbay_fleet::hosts::{HostConfig, HostEndpoint, TlsFiles as HostTlsFiles};
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::page::Page;
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{DEFAULT_ROOT, EmbeddedStore, EtcdStore, Store, registry};
use patchbay_fleet::webhooks;
use patchbay_proto::socket::ListeningSocket;
use patchbay_store::args::EtcdTlsArgs;
use patchbay_store::registry::check_name;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// The time within which calls in progress must end once this replica has resigned.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// The time for which the end of the program waits for reads and writes of files, which may hang.
const HUNG_TIME: Duration = Duration::from_secs(1);

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
    /// Run a replica of the controller on this etcd, as http://ADDRESS:PORT, or https:// with
    /// certificates; may be repeated
    #[arg(long = "etcd", conflicts_with = "standalone")]
    etcd: Vec<String>,
    #[command(flatten)]
    etcd_tls: EtcdTlsArgs,
    /// Prefix of the controller's keys in etcd
    #[arg(long, default_value = DEFAULT_ROOT, value_parser = parse_root)]
    etcd_root: String,
    /// Seconds without a renewal by the leader until another replica leads, 1 to 300
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=300))]
    lease_seconds: u64,
    /// File of the embedded store
    #[arg(long, default_value = "/var/lib/patchbay/fleet.redb")]
    store: PathBuf,
    /// Folder to which rollouts are written before they are deleted from the store
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/lib/patchbay/archive"
    )]
    archive: PathBuf,
    /// Days after which a rollout that has ended, and whose changes no guest has, is deleted,
    /// 1 to 3650
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3650))]
    keep: u64,
    /// Folder of the commands that gates name; the file of the command NAME is NAME.yaml
    #[arg(long, value_name = "FOLDER", default_value = commands::DEFAULT_FOLDER)]
    gates: PathBuf,
    /// File with a key of at least 32 bytes that authenticates the stored records; may be repeated.
    /// The first key signs records, and each key verifies them
    #[arg(long = "record-key", value_name = "FILE")]
    record_keys: Vec<PathBuf>,
    /// Authenticate the records that were stored without --record-key, and exit. Stop all replicas
    /// first
    #[arg(long, requires = "record_keys")]
    adopt_unsigned_records: bool,
    /// Mode of the socket, octal 0 to 777. The mode determines which users can connect, and the
    /// policy determines by uid what each of them may do
    #[arg(long, value_name = "OCTAL", default_value = "600", value_parser = patchbay_proto::socket::parse_mode)]
    socket_mode: u32,
    /// YAML file of the webhooks that get the events of rollouts
    #[arg(long, value_name = "FILE")]
    webhooks: Option<PathBuf>,
    #[command(flatten)]
    remote: RemoteArguments,
    /// Policy that determines who may do what. Without it, only root and the user that the
    /// controller runs as have access, and nobody has access over TLS
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Audit log of the commands that people give. Without it, no log is kept, and --break-glass is
    /// refused
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// Serve Prometheus metrics on a loopback address or a unix socket
    #[arg(long, value_name = "127.0.0.1:PORT|unix:PATH")]
    metrics: Option<MetricsAddress>,
    /// Format of log lines on standard error; PATCHBAY_LOG filters them
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// The controller's certificate for hosts that are reached over TCP, PEM
    #[arg(long, value_name = "FILE", requires_all = ["host_key", "host_ca"])]
    host_cert: Option<PathBuf>,
    /// Private key of --host-cert, PEM
    #[arg(long, value_name = "FILE", requires = "host_cert")]
    host_key: Option<PathBuf>,
    /// CAs that must have issued hosts' certificates, PEM
    #[arg(long, value_name = "FILE", requires = "host_cert")]
    host_ca: Option<PathBuf>,
    /// A host, as NAME=SOCKET[,LABEL=VALUE...]; may be repeated. With --etcd hosts register
    /// themselves
    #[arg(long = "host", value_parser = parse_host)]
    hosts: Vec<HostConfig>,
}

/// The options of the API over TCP and of the operators' page.
#[derive(Args)]
struct RemoteArguments {
    /// Serve the API over TCP with mutual TLS
    #[arg(long, value_name = "ADDRESS:PORT", requires = "cert")]
    listen: Option<SocketAddr>,
    /// Address at which clients reach --listen; the other replicas refer clients to it while this
    /// one leads [default: the address of --listen]
    #[arg(long, value_name = "ADDRESS:PORT", requires = "listen", value_parser = parse_address)]
    advertise: Option<String>,
    /// Serve the page on this address, which must be of the loopback interface unless --cert is
    /// given
    #[arg(long, value_name = "ADDRESS:PORT")]
    page: Option<SocketAddr>,
    /// Certificate for --listen and the page, in PEM; clients and browsers then need one too
    #[arg(long, value_name = "FILE", requires_all = ["key", "policy"])]
    cert: Option<PathBuf>,
    /// Private key of --cert, PEM
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    #[command(flatten)]
    clients: ClientCas,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    /// One JSON object per line
    Json,
    /// Text for people
    Text,
}

fn parse_host(text: &str) -> Result<HostConfig, String> {
    let wrong = || format!("{text:?} is no host; write NAME=SOCKET[,LABEL=VALUE...]");
    let mut parts = text.split(',');
    let (name, socket) = parts
        .next()
        .and_then(|host| host.split_once('='))
        .ok_or_else(wrong)?;
    if socket.is_empty() {
        return Err(wrong());
    }
    check_name(name).map_err(|error| error.to_string())?;
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

fn parse_address(text: &str) -> Result<String, String> {
    match is_address(text) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not an address; give ADDRESS:PORT")),
    }
}

fn parse_root(text: &str) -> Result<String, String> {
    match text.ends_with('/') {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} does not end with a slash")),
    }
}

const MANUAL: patchbay_manual::Program = patchbay_manual::Program {
    name: "patchbay-fleet",
    command: Arguments::command,
    front: None,
};

fn main() -> ExitCode {
    MANUAL.answer_if_asked();
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("patchbay-fleet: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("the threads cannot be started")?;
    let served = runtime.block_on(serve(arguments));
    // An archive or a secret on a file system that hangs must not delay the end.
    runtime.shutdown_timeout(HUNG_TIME);
    served
}

async fn serve(arguments: Arguments) -> anyhow::Result<()> {
    if !arguments.standalone && arguments.etcd.is_empty() {
        bail!("give --standalone, or --etcd with the address of an etcd");
    }
    if arguments.standalone && arguments.hosts.is_empty() {
        bail!("no host is given; add --host NAME=SOCKET with the socket of a patchbayd");
    }
    start_log(arguments.log_format);
    let exporter = Exporter::from_environment("patchbay-fleet")?;
    let store: Arc<dyn Store> = if arguments.standalone {
        Arc::new(EmbeddedStore::open(&arguments.store)?)
    } else {
        let tls = arguments.etcd_tls.clone().files();
        let (members, root) = (&arguments.etcd, &arguments.etcd_root);
        Arc::new(EtcdStore::new(members, root, tls.as_ref())?)
    };
    let tls = match (
        &arguments.host_cert,
        &arguments.host_key,
        &arguments.host_ca,
    ) {
        (Some(certificate), Some(key), Some(host_ca)) => Some(HostTlsFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            ca: host_ca.clone(),
        }),
        _ => None,
    };
    if let Some(tls) = &tls {
        tls.connector().context("the certificates cannot be used")?;
    }
    let people = People::read(&arguments)?;
    let tcp = match (arguments.remote.listen, &people.tls) {
        (Some(address), Some(tls)) => Some((listen(address).await?, tls.clone())),
        _ => None,
    };
    let address = match &tcp {
        Some((listener, _)) => Some(advertised(&arguments, listener.local_addr()?)?),
        None => None,
    };
    let config = Config {
        reach: Reach {
            machine: registry::machine(),
            tls,
        },
        replica: Leader {
            name: format!("pid-{}", std::process::id()),
            address,
        },
        authority: people.authority.clone(),
        hosts: arguments.hosts.clone(),
        lease_ttl: Duration::from_secs(arguments.lease_seconds),
        archive: Archive {
            folder: arguments.archive.clone(),
            keep: Duration::from_secs(arguments.keep * 24 * 3600),
        },
        commands: Commands::new(arguments.gates.clone()),
        keys: RecordKeys::read(&arguments.record_keys)?,
    };
    if config.keys.is_empty() && !arguments.standalone {
        tracing::warn!(
            "records are not authenticated, so everyone who can write the store can start rollouts; \
             give --record-key"
        );
    }
    let webhooks = arguments.webhooks.as_deref().map(webhooks::read);
    let webhooks = webhooks
        .transpose()
        .context("the webhooks cannot be used")?;
    let mut controller = Controller::new(config, store)?;
    if arguments.standalone {
        controller = controller.alone();
    }
    let controller = Arc::new(controller.delivering_to(webhooks.unwrap_or_default()));
    if arguments.adopt_unsigned_records {
        return adopt(&controller).await;
    }
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    let asked_to_end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        controller.end();
        std::future::pending::<()>().await;
    };
    let page = page(&arguments, &people, Arc::clone(&controller)).await?;
    let metrics = scrape(arguments.metrics.as_ref(), Arc::clone(&controller)).await?;
    create_folder_of(&arguments.socket)?;
    let socket = ListeningSocket::bind_with_mode(&arguments.socket, arguments.socket_mode)?;
    let (drain, drained) = oneshot::channel::<()>();
    let serving = api::serve(Arc::clone(&controller), &socket, tcp, async {
        // A dropped sender means that the program ends.
        let _ = drained.await;
    });
    let mut serving = std::pin::pin!(serving);
    let audit = people.authority.audit().cloned();
    let watching = async {
        match audit.clone() {
            Some(audit) => audit.watch().await,
            None => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        result = &mut serving => result,
        // This replica has resigned, so another one can lead while calls in progress end.
        () = controller.run() => {
            drop(drain);
            let ended = tokio::time::timeout(DRAIN_TIME, serving).await;
            ended.unwrap_or(Ok(()))
        }
        () = page => Ok(()),
        () = metrics => Ok(()),
        () = asked_to_end => Ok(()),
        () = watching => Ok(()),
        result = people.reload() => result,
    };
    if let Some(audit) = audit {
        within_hung_time(audit.flush()).await;
    }
    exporter.shutdown().await;
    result
}

/// Waits for a write, unless its file system hangs.
async fn within_hung_time(write: impl Future<Output = ()>) {
    let _ = tokio::time::timeout(HUNG_TIME, write).await;
}

/// Authenticates the records of the store, and prints the result.
async fn adopt(controller: &Controller) -> anyhow::Result<()> {
    tracing::info!("this replica waits until no other one leads");
    let (count, unreadable) = controller.adopt().await?;
    for one in &unreadable {
        println!("rollout {} is left as it is: {}", one.name, one.why);
    }
    println!(
        "{count} records were authenticated; start the controller without --adopt-unsigned-records"
    );
    Ok(())
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    let listener = listener
        .with_context(|| format!("the API cannot be served on {address}; give another address"))?;
    tracing::info!(address = %listener.local_addr()?, "listening with mutual TLS");
    Ok(listener)
}

/// Returns the address at which clients reach the API of this replica.
fn advertised(arguments: &Arguments, bound: SocketAddr) -> anyhow::Result<String> {
    match &arguments.remote.advertise {
        Some(address) => Ok(address.clone()),
        None if bound.ip().is_unspecified() => bail!(
            "clients cannot connect to {bound}; give this machine's address with --advertise \
             ADDRESS:PORT"
        ),
        None => Ok(bound.to_string()),
    }
}

fn start_log(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PATCHBAY_LOG");
    let filter = filter.unwrap_or_else(|_| "info".into());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(patchbay_manual::stderr_takes_colours())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Json => log.json().flatten_event(true).init(),
        LogFormat::Text => log.init(),
    }
}

type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The authority and the certificates of the API and of the page.
struct People {
    authority: Authority,
    tls: Option<Tls>,
}

impl People {
    fn read(arguments: &Arguments) -> anyhow::Result<Self> {
        let RemoteArguments {
            listen,
            page,
            cert,
            key,
            clients,
            ..
        } = &arguments.remote;
        if cert.is_some() == clients.is_empty() {
            bail!(
                "--cert and the clients' CAs are only valid together; give --cert with --client-ca DOMAIN=FILE or \
                 --common-name-ca FILE"
            );
        }
        if cert.is_some() && listen.is_none() && page.is_none() {
            bail!("nothing uses --cert; give --listen or --page");
        }
        let policy = match &arguments.policy {
            Some(file) => LivePolicy::read(file.clone())?,
            None => LivePolicy::own_user_only(rustix::process::geteuid().as_raw()),
        };
        let tls = match (cert, key) {
            (Some(certificate), Some(key)) => Some(Tls::read(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                clients: clients.clone(),
            })?),
            _ => None,
        };
        let audit = match &arguments.audit_log {
            Some(file) => Some(Audit::start(AuditLog::open(file)?)?),
            None => None,
        };
        let authority = Authority::new(policy, audit);
        Ok(Self { authority, tls })
    }

    /// Reads the policy and the certificates again on each SIGHUP.
    async fn reload(&self) -> anyhow::Result<()> {
        let mut hangup = signal(SignalKind::hangup()).context("SIGHUP cannot be handled")?;
        while let Some(()) = hangup.recv().await {
            match self.authority.policy().reload() {
                Ok(()) => tracing::info!("policy read again"),
                Err(error) => {
                    tracing::error!(%error, "the new policy is refused, and the old one stays in force; correct it and send SIGHUP");
                }
            }
            if let Some(Err(error)) = self.tls.as_ref().map(Tls::reload) {
                tracing::error!(%error, "the new certificates are refused, and the old ones stay in use; correct them and send SIGHUP");
            }
        }
        Ok(())
    }
}

async fn page(
    arguments: &Arguments,
    people: &People,
    controller: Arc<Controller>,
) -> anyhow::Result<Task<()>> {
    let Some(address) = arguments.remote.page else {
        return Ok(Box::pin(std::future::pending()));
    };
    let config = patchbay_fleet::page::Config {
        address,
        tls: people.tls.clone(),
        policy: people.authority.policy().clone(),
    };
    let page = Page::bind(config, controller).await?;
    tracing::info!("the page is at {}", page.link()?);
    Ok(Box::pin(page.run()))
}

async fn scrape(
    address: Option<&MetricsAddress>,
    controller: Arc<Controller>,
) -> anyhow::Result<Task<()>> {
    let Some(address) = address else {
        return Ok(Box::pin(std::future::pending()));
    };
    let text = move || std::future::ready(patchbay_fleet::scrape::text(&controller));
    Ok(Box::pin(
        patchbay_access::scrape::serve(address, text).await?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_names_every_option() {
        assert_eq!(MANUAL.missing_options(), Vec::<String>::new());
        assert_eq!(MANUAL.without_range(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_file_system_that_hangs_does_not_hold_up_the_end() {
        let write = within_hung_time(std::future::pending());
        let ended = tokio::time::timeout(Duration::from_secs(60), write).await;
        ended.expect("it is left");
    }
}
