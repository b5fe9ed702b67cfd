// SPDX-License-Identifier: Apache-2.0
//! Maintains the connection to one monitor, and the list of the guests that it serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use patchbay_proto::pages::Pages;
use patchbay_proto::stream::Stream;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::{client, v1};
use patchbay_supervisor::is_socket;
use rustix::process::geteuid;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tonic::body::Body;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::{Service, ServiceExt};

use super::connect::{Connected, connect};
use super::{Directory, MAX_GUESTS};

/// The bounds of the delay between two attempts to connect.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);
/// The timeout for a monitor's list of guests.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval at which a monitor that serves several guests is asked for its list again.
const RELIST: Duration = Duration::from_secs(10);
/// The interval between pings. A monitor that does not answer a ping is considered gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum numbers of calls of all clients to one monitor at the same time. `MAX_READS` limits
/// calls that only read, and `MAX_CHANGES` limits calls that change something.
const MAX_READS: usize = 64;
const MAX_CHANGES: usize = 48;
/// The maximum length of a guest's name. The interface has the same limit.
const MAX_NAME_BYTES: usize = 256;

/// A connection to a monitor. It is never reopened, because the task of the socket creates a new
/// one.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    channel: Channel,
    /// The only guest that the monitor may serve; `None` if it runs as the same user as the host.
    bound: Option<String>,
    /// The permits for calls of all clients. The monitor serves 128 calls of one connection, and
    /// calls that only read must leave room for calls that change something.
    reads: Arc<Semaphore>,
    changes: Arc<Semaphore>,
}

impl Monitor {
    /// Returns the path of the monitor's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the channel for generated clients.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Returns a permit for one more call; `None` if no permit is left.
    #[must_use]
    pub fn admit(&self, changes: bool) -> Option<OwnedSemaphorePermit> {
        let permits = if changes { &self.changes } else { &self.reads };
        Arc::clone(permits).try_acquire_owned().ok()
    }

    /// Forwards a call unchanged.
    ///
    /// # Errors
    /// The connection is gone. The value is `true` if the call may have reached the monitor.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Body>, (bool, String)> {
        let mut channel = self.channel.clone();
        let ready = channel.ready().await;
        let ready = ready.map_err(|error| (false, chain(&error)))?;
        let answer = ready.call(request).await;
        answer.map_err(|error| (true, chain(&error)))
    }

    async fn open(path: &Path) -> Result<Self, String> {
        let connected = connect(path.to_owned()).await;
        let Connected { stream, owner } = connected.map_err(|error| error.to_string())?;
        let bound = if owner == geteuid().as_raw() {
            None
        } else {
            Some(folder_name(path).ok_or("a monitor of another user needs a folder of its own")?)
        };
        // The channel has only this connection, because a second one might lead to another monitor.
        let stream = Stream::new(stream).map_err(|error| error.to_string())?;
        let mut stream = Some(stream);
        let channel = client::endpoint()
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let stream = stream.take().map(TokioIo::new);
                let gone = || std::io::Error::other("the connection has ended");
                async move { stream.ok_or_else(gone) }
            }))
            .await
            .map_err(|error| chain(&error))?;
        Ok(Self {
            path: path.to_owned(),
            channel,
            bound,
            reads: Arc::new(Semaphore::new(MAX_READS)),
            changes: Arc::new(Semaphore::new(MAX_CHANGES)),
        })
    }

    /// Returns the names of the guests that the monitor serves.
    async fn guests(&self) -> Result<Vec<String>, String> {
        let mut client = GuestServiceClient::new(self.channel());
        let mut names = vec![];
        let mut page_token = String::new();
        let mut pages = Pages::of("guests");
        loop {
            let request = v1::ListGuestsRequest {
                page_token,
                ..Default::default()
            };
            let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.list_guests(request)).await;
            let answer = answer.map_err(|_| format!("no answer within {ANSWER_TIMEOUT:?}"))?;
            let page = answer.map_err(|status| status.to_string())?.into_inner();
            let next = pages.next(&page, &page.next_page_token);
            let next = next.map_err(|status| status.message().to_owned())?;
            names.extend(page.guests.into_iter().map(|status| status.guest));
            match next {
                Some(token) if names.len() <= MAX_GUESTS => page_token = token,
                _ => break,
            }
        }
        names.retain(|name| self.may_serve(name));
        Ok(names)
    }

    fn may_serve(&self, name: &str) -> bool {
        let well_formed = !name.is_empty()
            && name.len() <= MAX_NAME_BYTES
            && name.chars().all(|c| c.is_ascii_graphic());
        let path = self.path.display();
        if !well_formed {
            tracing::error!(monitor = %path, ?name, "a guest's name has 1 to {MAX_NAME_BYTES} printable characters and no spaces; it is left out");
        } else if self.bound.as_ref().is_some_and(|bound| bound != name) {
            tracing::error!(monitor = %path, guest = name, "a monitor of another user may serve only the guest that its folder is named after; it is left out");
            return false;
        }
        well_formed
    }
}

/// Keeps the guests of one socket in the directory until the socket's file is gone.
pub async fn keep(path: PathBuf, directory: Directory, mut scans: watch::Receiver<u64>) {
    let mut retry = RETRY_FIRST;
    let mut last_error = String::new();
    while is_socket(&path) {
        match Monitor::open(&path).await {
            Ok(monitor) => {
                let monitor = Arc::new(monitor);
                let ended = serve(&monitor, &directory, &mut scans).await;
                directory.set(&monitor, vec![]);
                match ended {
                    Ok(()) => retry = RETRY_FIRST,
                    Err(error) => warn_once(&mut last_error, &path, error),
                }
            }
            Err(error) => warn_once(&mut last_error, &path, error),
        }
        // A scan may have noticed that the file is gone or replaced.
        tokio::select! {
            () = tokio::time::sleep(retry) => {}
            _ = scans.changed() => {}
        }
        retry = (retry * 2).min(RETRY_LAST);
    }
}

/// Serves the monitor's guests until the connection ends. An error means that the guests could not
/// be listed, or that the health of the monitor could not be watched.
async fn serve(
    monitor: &Arc<Monitor>,
    directory: &Directory,
    scans: &mut watch::Receiver<u64>,
) -> Result<(), String> {
    directory.set(monitor, monitor.guests().await?);
    let request = HealthCheckRequest::default();
    let mut alive = HealthClient::new(monitor.channel())
        .watch(request)
        .await
        .map_err(|status| status.to_string())?
        .into_inner();
    let mut relist = tokio::time::interval(RELIST);
    relist.reset();
    loop {
        tokio::select! {
            // The monitor sends one message immediately, and the next one only when the connection
            // or the service ends.
            message = alive.message() => match message {
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Ok(()),
            },
            _ = relist.tick() => {
                if let Ok(names) = monitor.guests().await {
                    directory.set(monitor, names);
                }
            }
            _ = scans.changed() => {
                if !is_socket(monitor.path()) {
                    return Ok(());
                }
            }
        }
    }
}

fn warn_once(last: &mut String, path: &Path, error: String) {
    if *last != error {
        tracing::warn!(monitor = %path.display(), error, "a monitor is not served");
        *last = error;
    }
}

fn folder_name(path: &Path) -> Option<String> {
    let folder = path.parent()?.file_name()?.to_str()?;
    path.ends_with("api.sock").then(|| folder.to_owned())
}

/// Formats an error and its causes, because tonic's own message is only "transport error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
