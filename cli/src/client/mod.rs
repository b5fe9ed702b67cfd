// SPDX-License-Identifier: Apache-2.0
//! Makes requests to a guest behind an API socket.

pub mod lists;
pub mod selected;
pub mod sockets;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::{TraceParent, client, v1};
use tonic::transport::{Channel, Endpoint};

use crate::failure::Failure;
use crate::progress::Progress;

/// The deadline of calls without --timeout.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time by which the deadline of a change exceeds the time for which the service tries the
/// change, so that the answer can still arrive.
pub const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The longest time for which the service tries a change.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The reason why a socket cannot be connected to.
#[derive(Debug)]
pub struct Unreachable {
    /// The innermost cause.
    pub cause: String,
    /// The socket exists, but this user may not use it.
    pub is_denied: bool,
}

impl Unreachable {
    /// Returns the failure of a command that needs this socket.
    pub fn failure(&self, socket: &Path) -> Failure {
        match self.is_denied {
            true => Failure::denied(socket),
            false => Failure::unreachable(socket, &self.cause),
        }
    }
}

/// Returns an endpoint with the timeouts of this program.
pub fn endpoint() -> Endpoint {
    client::endpoint()
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE)
}

/// Connects to the socket.
pub async fn channel(socket: &Path) -> Result<Channel, Unreachable> {
    let connector = client::unix_socket(socket);
    connected(endpoint().connect_with_connector(connector).await)
}

/// Returns the connection, or the innermost cause of the failure.
pub fn connected(
    connected: Result<Channel, tonic::transport::Error>,
) -> Result<Channel, Unreachable> {
    connected.map_err(|error| {
        let mut cause: &(dyn std::error::Error + 'static) = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let io = cause.downcast_ref::<std::io::Error>();
        Unreachable {
            cause: cause.to_string(),
            is_denied: io.is_some_and(|io| io.kind() == std::io::ErrorKind::PermissionDenied),
        }
    })
}

/// One guest of an endpoint.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
    socket: PathBuf,
    /// The guest's name. An empty name stands for the only guest of the endpoint.
    guest: String,
    /// The endpoint was chosen by its socket.
    by_socket: bool,
    timeout: Duration,
    progress: Progress,
}

impl Client {
    /// Connects to `socket`, for the only guest that it serves.
    ///
    /// # Errors
    /// No process answers on the socket.
    pub async fn open(socket: &Path, timeout: Duration) -> Result<Self, Failure> {
        let opened = Self::connect(socket, timeout).await;
        opened.map_err(|why| why.failure(socket))
    }

    /// Connects like [`Client::open`], for callers that continue without this socket and need the
    /// reason.
    ///
    /// # Errors
    /// No process answers on the socket.
    pub async fn connect(socket: &Path, timeout: Duration) -> Result<Self, Unreachable> {
        let channel = channel(socket).await?;
        Ok(Self {
            channel,
            socket: socket.to_owned(),
            guest: String::new(),
            by_socket: false,
            timeout,
            progress: Progress::default(),
        })
    }

    /// Returns a client of the same endpoint for the guest `name`.
    pub fn with_guest(mut self, name: impl Into<String>) -> Self {
        self.guest = name.into();
        self
    }

    /// Records whether the caller named the socket.
    pub fn by_socket(mut self, by_socket: bool) -> Self {
        self.by_socket = by_socket;
        self
    }

    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub fn with_progress(mut self, progress: &Progress) -> Self {
        self.progress = progress.clone();
        self
    }

    /// Returns the guest's name; empty if the guest was not chosen by its name.
    pub fn guest_name(&self) -> &str {
        &self.guest
    }

    /// Returns the start of another command for this guest, such as "patchbay --guest web-1 ".
    pub fn command(&self) -> String {
        let mut command = "patchbay ".to_owned();
        if self.by_socket {
            command += &format!("--socket {} ", quoted(&self.socket.to_string_lossy()));
        }
        if !self.guest.is_empty() {
            command += &format!("--guest {} ", quoted(&self.guest));
        }
        command
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    pub fn keys(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel.clone())
    }

    pub fn tracepoints(&self) -> TracepointsServiceClient<Channel> {
        TracepointsServiceClient::new(self.channel.clone())
    }

    pub fn guest(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel.clone())
    }

    /// Returns the time for which a change may be tried.
    pub fn retry_timeout(&self) -> Duration {
        self.timeout.min(MAX_RETRY_TIMEOUT)
    }

    /// Returns a request for a change. Its deadline exceeds [`Client::retry_timeout`], so that the
    /// answer has time to arrive.
    pub fn change<T: Addressed>(&self, message: T) -> tonic::Request<T> {
        let mut request = self.stream(message);
        request.set_timeout(self.timeout + ANSWER_TIME);
        request
    }

    /// Returns a request with the deadline of this client.
    pub fn request<T: Addressed>(&self, message: T) -> tonic::Request<T> {
        let mut request = self.stream(message);
        request.set_timeout(self.timeout);
        request
    }

    /// Returns a request without a deadline, because its stream has no end.
    pub fn stream<T: Addressed>(&self, mut message: T) -> tonic::Request<T> {
        message.set_guest(&self.guest);
        traced(message)
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Returns a request that belongs to the process's trace.
pub fn traced<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let parent = TraceParent {
        trace_id: trace_id(),
        span_id: fastrand::u64(1..),
    };
    parent.insert(request.metadata_mut());
    request
}

/// Returns the trace id that all calls of this process have: the id in `TRACEPARENT` if that
/// variable is valid, otherwise a random one.
fn trace_id() -> u128 {
    static TRACE_ID: OnceLock<u128> = OnceLock::new();
    *TRACE_ID.get_or_init(|| {
        let parent = std::env::var("TRACEPARENT").ok();
        let parent = parent.as_deref().and_then(TraceParent::parse);
        parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace_id)
    })
}

/// A request with a field for the guest's name.
pub trait Addressed {
    fn set_guest(&mut self, guest: &str);
}

macro_rules! addressed {
    ($($request:ident)*) => {
        $(impl Addressed for v1::$request {
            fn set_guest(&mut self, guest: &str) {
                guest.clone_into(&mut self.guest);
            }
        })*
    };
}

addressed! {
    DescribeGuestRequest WatchGuestRequest PauseGuestRequest ResumeGuestRequest ShutdownGuestRequest
    StreamConsoleRequest SnapshotGuestRequest
    ListStaticKeysRequest GetStaticKeyRequest ListDebugSitesRequest UpdateStaticKeysRequest ListUpdateResultsRequest
    PrepareUpdateRequest CommitUpdateRequest DiscardUpdateRequest WatchStaticKeysRequest
    ListHoldsRequest ReleaseHoldsRequest RenewHoldsRequest SetClaimsRequest ListClaimsRequest
    VerifyStaticKeysRequest RepairStaticKeyRequest
    ListTracepointsRequest ArmTracepointsRequest FireTracepointsRequest ParkTracepointsRequest
    DisarmTracepointsRequest StreamTracepointEventsRequest GetTracepointStatsRequest DescribeAgentRequest
    StreamKernelLogRequest
}

/// Returns the result view to request for a change.
pub fn result_view(summary: bool) -> i32 {
    if summary {
        v1::ResultView::Summary.into()
    } else {
        v1::ResultView::Full.into()
    }
}

/// Converts a duration of the command line. Its parser limits it to the range of the message.
pub fn to_proto(duration: Option<Duration>) -> Option<prost_types::Duration> {
    duration.and_then(|duration| duration.try_into().ok())
}
