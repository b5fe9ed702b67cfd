// SPDX-License-Identifier: Apache-2.0
//! The gRPC service of one guest on a unix socket.
//!
//! Who can open the socket (mode 0600: the monitor's user and root) may do everything; the peer's
//! uid is recorded as the owner of what it does.

mod convert;
mod guest;
mod holds;
mod limits;
mod static_keys;
mod status;
mod tracepoints;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::v1::ResultView;
use patchbay_proto::v1::guest_service_server::GuestServiceServer;
use patchbay_proto::v1::static_keys_service_server::StaticKeysServiceServer;
use patchbay_proto::v1::tracepoints_service_server::TracepointsServiceServer;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::transport::Server;

pub(crate) use self::limits::accept;
pub(crate) use self::static_keys::time_allowed;
pub use self::tracepoints::TracepointsApi;
use crate::keys::Keys;
pub use crate::socket::{ListeningSocket as ApiSocket, SocketError};
use crate::trace::{self, Tracing};

/// Largest request in bytes: 65,536 updates with long names fit.
const MAX_REQUEST_BYTES: usize = 32 << 20;
/// A peer that has not answered a ping for this long is gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// How long calls in flight may take to end after the shutdown signal.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// Why the service ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Of the operating system.
    #[error("the API socket cannot be served: {0}")]
    Socket(#[from] std::io::Error),
    /// Of the transport.
    #[error("the API service failed: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The interface's own description is broken.
    #[error("the reflection service cannot be built: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Serves the API until `shutdown` is ready; streams then end with UNAVAILABLE, calls in flight are
/// answered.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    socket: ApiSocket,
    keys: Keys,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    serve_traced(socket, keys, Tracing::default(), shutdown).await
}

/// As [`serve`], with events of the guest's tracepoints.
///
/// # Errors
/// [`ServeError`].
pub async fn serve_traced(
    socket: ApiSocket,
    keys: Keys,
    tracing: Tracing,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (ending, ended) = watch::channel(false);
    let (health, health_service) = tonic_health::server::health_reporter();
    health
        .set_serving::<GuestServiceServer<guest::GuestApi>>()
        .await;
    health
        .set_serving::<StaticKeysServiceServer<static_keys::StaticKeysApi>>()
        .await;
    health
        .set_serving::<TracepointsServiceServer<TracepointsApi>>()
        .await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(patchbay_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // So that stock clients can print the details of errors.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };

    let keys = Arc::new(keys);
    let guest_api = guest::GuestApi::new(Arc::clone(&keys), ended.clone());
    // Kept until the service has ended.
    let decoder = tracing.thread;
    let decoding = decoder
        .as_ref()
        .map_or_else(Handle::current, |thread| thread.handle().clone());
    let tracepoints_api = TracepointsApi {
        tracer: trace::start(keys.clone(), tracing.agent, &decoding)?,
        ending: ended.clone(),
        grace: tracing.grace,
    };
    let keys_api = static_keys::StaticKeysApi {
        keys,
        ending: ended.clone(),
    };
    let incoming = limits::incoming(socket.tokio_listener()?);
    let mut drained = ended;
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(limits::HTTP2_STREAMS)
        .layer(limits::CallLimit)
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(GuestServiceServer::new(guest_api))
        .add_service(
            StaticKeysServiceServer::new(keys_api).max_decoding_message_size(MAX_REQUEST_BYTES),
        )
        .add_service(TracepointsServiceServer::new(tracepoints_api))
        .serve_with_incoming_shutdown(incoming, async move {
            wait_for_end(&mut drained).await;
        });
    let mut server = std::pin::pin!(server);
    tokio::select! {
        result = &mut server => return Ok(result?),
        () = shutdown => {}
    }
    ending.send_replace(true);
    match tokio::time::timeout(DRAIN_TIME, server).await {
        Ok(result) => Ok(result?),
        Err(_) => {
            tracing::warn!("some clients did not end their calls in time and were cut off");
            Ok(())
        }
    }
}

/// Waits until the service ends.
async fn wait_for_end(ending: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is the end as well.
    let _ = ending.wait_for(|ending| *ending).await;
}

/// "uid:N" of the peer.
pub(crate) fn owner<T>(request: &tonic::Request<T>) -> String {
    let peer = request.extensions().get::<limits::Peer>();
    match peer.and_then(|peer| peer.uid) {
        Some(uid) => format!("uid:{uid}"),
        None => "unknown".to_owned(),
    }
}

/// Whether a request wants numbers alone.
///
/// # Errors
/// INVALID_ARGUMENT for a view that this monitor does not know.
pub(crate) fn summary_only(view: i32) -> Result<bool, crate::keys::KeysError> {
    match ResultView::try_from(view) {
        Ok(ResultView::Unspecified | ResultView::Full) => Ok(false),
        Ok(ResultView::Summary) => Ok(true),
        Err(_) => Err(crate::keys::KeysError::InvalidArgument {
            field: "result_view",
            message: format!("unknown result_view {view}; give full or summary"),
        }),
    }
}

fn invalid(field: &'static str, message: impl Into<String>) -> crate::keys::KeysError {
    crate::keys::KeysError::InvalidArgument {
        field,
        message: message.into(),
    }
}

/// Items of a page when the request does not say, and at most.
const DEFAULT_PAGE_SIZE: usize = 1000;
const MAX_PAGE_SIZE: usize = 10_000;
const NEGATIVE_PAGE_SIZE: &str = "is negative; give 0 for the default or a count";

/// How many items a request wants in a page; `None` for a negative number.
fn page_size(given: i32) -> Option<usize> {
    match usize::try_from(given).ok()? {
        0 => Some(DEFAULT_PAGE_SIZE),
        size => Some(size.min(MAX_PAGE_SIZE)),
    }
}

/// A duration of a request, which says with its absence that the default is wanted. Zero is a
/// duration as any other: a `ttl` of zero must not become one without end.
///
/// # Errors
/// INVALID_ARGUMENT unless it lies within `range`.
pub(crate) fn from_proto(
    field: &'static str,
    duration: Option<prost_types::Duration>,
    range: std::ops::RangeInclusive<Duration>,
) -> Result<Option<Duration>, crate::keys::KeysError> {
    let Some(given) = duration else {
        return Ok(None);
    };
    match Duration::try_from(given) {
        Ok(duration) if range.contains(&duration) => Ok(Some(duration)),
        _ => Err(crate::keys::KeysError::InvalidArgument {
            field,
            message: format!(
                "is {given}; give {:?} to {:?}, or leave it out",
                range.start(),
                range.end()
            ),
        }),
    }
}
