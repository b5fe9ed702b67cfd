// SPDX-License-Identifier: Apache-2.0
//! Finding a guest's socket and speaking to its monitor.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use patchbay_proto::v1::ResultView;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::args::Target;
use crate::failure::Failure;

/// For calls that bring no timeout of their own.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For the answer to a change that was tried for as long as was asked.
pub const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The monitor tries no longer than this.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const KEEPALIVE: Duration = Duration::from_secs(30);
const SUFFIX: &str = "sock";
/// The socket of the guest that is meant when none is named.
const SOCKET_VARIABLE: &str = "PATCHBAY_SOCKET";

/// A connection to one monitor.
#[derive(Clone, Debug)]
pub struct Monitor {
    channel: Channel,
    timeout: Duration,
}

impl Monitor {
    /// Connects to the guest that was asked for.
    ///
    /// # Errors
    /// If none or several run, or the monitor does not answer.
    pub async fn connect(target: &Target, timeout: Option<Duration>) -> Result<Self, Failure> {
        let socket = find(target)?;
        Self::open(&socket, timeout.unwrap_or(DEFAULT_TIMEOUT)).await
    }

    /// Connects to `socket`.
    ///
    /// # Errors
    /// If nobody answers there.
    pub async fn open(socket: &Path, timeout: Duration) -> Result<Self, Failure> {
        let path = socket.to_owned();
        let channel = Endpoint::from_static("http://patchbay.invalid")
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .connect_with_connector(service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await
            .map_err(|error| Failure::unreachable(socket, &error))?;
        Ok(Self { channel, timeout })
    }

    pub fn keys(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    pub fn tracepoints(&self) -> TracepointsServiceClient<Channel> {
        TracepointsServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    pub fn guest(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel.clone())
    }

    /// How long a change may be tried.
    pub fn retry_timeout(&self) -> Duration {
        self.timeout.min(MAX_RETRY_TIMEOUT)
    }

    /// A request for a change that is tried for [`Monitor::retry_timeout`]: its answer has time to come.
    pub fn change<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.timeout + ANSWER_TIME);
        request
    }

    /// A request with the deadline of this connection.
    pub fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.timeout);
        request
    }
}

/// Folder of the sockets: `$XDG_RUNTIME_DIR/patchbay`, or `/run/patchbay` without one.
pub fn socket_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder).join("patchbay"),
        _ => PathBuf::from("/run/patchbay"),
    }
}

/// Socket of the guest `name`.
///
/// # Errors
/// If the name cannot be a file's.
pub fn socket_of(name: &str) -> Result<PathBuf, Failure> {
    let fits = !name.is_empty()
        && !name.starts_with('.')
        && name.len() <= 64
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if !fits {
        return Err(Failure::usage(format!(
            "{name:?} cannot be a guest's name; use up to 64 letters, digits, '-', '_' and '.', not first"
        )));
    }
    Ok(socket_folder().join(format!("{name}.{SUFFIX}")))
}

/// Names and sockets in the folder, by name. None if there is no folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn sockets() -> Result<Vec<(String, PathBuf)>, Failure> {
    let folder = socket_folder();
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => {
            let message = format!(
                "{} cannot be read: {error}; give the socket with --socket",
                folder.display()
            );
            return Err(Failure::error(message));
        }
    };
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_stem()?.to_str()?.to_owned();
            (path.extension()? == SUFFIX).then_some((name, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

fn find(target: &Target) -> Result<PathBuf, Failure> {
    if let Some(socket) = &target.socket {
        return Ok(socket.clone());
    }
    if let Some(name) = &target.guest {
        let socket = socket_of(name)?;
        return if socket.exists() {
            Ok(socket)
        } else {
            Err(Failure::error(format!(
                "no guest is named {name:?}; see `patchbay guests`"
            )))
        };
    }
    if let Some(socket) = std::env::var_os(SOCKET_VARIABLE).filter(|socket| !socket.is_empty()) {
        return Ok(socket.into());
    }
    // Sockets that dead monitors left do not make the choice ambiguous.
    let mut live: Vec<_> = sockets()?
        .into_iter()
        .filter(|(_, path)| std::os::unix::net::UnixStream::connect(path).is_ok())
        .collect();
    match live.len() {
        0 => Err(Failure::error(format!(
            "no guest runs (no live socket in {}); start one with `patchbay run`, or give --socket",
            socket_folder().display()
        ))),
        1 => Ok(live.remove(0).1),
        _ => {
            let names: Vec<String> = live.into_iter().map(|(name, _)| name).collect();
            Err(Failure::usage(format!(
                "several guests run: {}; choose one with --guest",
                names.join(", ")
            )))
        }
    }
}

/// How much of a change is to be told.
pub fn result_view(summary: bool) -> i32 {
    if summary {
        ResultView::Summary.into()
    } else {
        ResultView::Full.into()
    }
}
