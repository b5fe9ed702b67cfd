// SPDX-License-Identifier: Apache-2.0
//! Serves guests on a unix socket until shutdown.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::socket::ListeningSocket;
use patchbay_proto::v1::guest_service_server::GuestServiceServer;
use patchbay_proto::v1::static_keys_service_server::StaticKeysServiceServer;
use patchbay_proto::v1::tracepoints_service_server::TracepointsServiceServer;
use tokio::sync::oneshot;
use tonic::service::Routes;
use tonic::transport::Server;

use super::access::Access;
use super::guest::GuestApi;
use super::guests::{AddError, Guests, ServedGuest};
use super::limits;
use super::services::Services;
use super::static_keys::StaticKeysApi;
use super::tracepoints::TracepointsApi;
use crate::auth::{Authoriser, SocketAuthoriser};
use crate::keys::Keys;
use crate::trace::Tracing;
use crate::trace_id::TraceLayer;

/// Maximum size of a request in bytes, which is enough for 65,536 updates with long names.
const MAX_REQUEST_BYTES: usize = 32 << 20;
/// Maximum size of the headers of a request in bytes, which is enough for the longest scope in
/// base64.
const MAX_HEADER_BYTES: u32 = 256 << 10;
/// A peer that does not answer a ping within this time is disconnected.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time allowed for calls in progress to end after shutdown.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// The reason why serving failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket cannot be registered with the runtime.
    #[error("the API socket cannot be served")]
    Socket(#[from] std::io::Error),
    /// An HTTP/2 error.
    #[error("the API service failed")]
    Transport(#[from] tonic::transport::Error),
    /// The socket of the guest's agent cannot be registered with the runtime.
    #[error("the agent's socket cannot be served: {0}")]
    Agent(std::io::Error),
    /// The guest cannot be added to the endpoint.
    #[error(transparent)]
    Guest(#[from] AddError),
    /// The embedded descriptors are invalid.
    #[error("the reflection service cannot be built")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Serves one guest until `shutdown` is ready, on the current tokio runtime. Every caller that can
/// open the socket is an admin.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    socket: ListeningSocket,
    keys: Keys,
    tracing: Tracing,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let guest = ServedGuest::start(keys, tracing).map_err(ServeError::Agent)?;
    let guests = Guests::default();
    guests.add(guest)?;
    Endpoint::new(socket, guests).serve(shutdown).await
}

/// A socket, its guests and its access policy.
pub struct Endpoint {
    socket: ListeningSocket,
    guests: Guests,
    authoriser: Arc<dyn Authoriser>,
}

impl Endpoint {
    /// Creates an endpoint at which every caller that can open the socket is an admin. `guests` may
    /// change while it serves.
    #[must_use]
    pub fn new(socket: ListeningSocket, guests: Guests) -> Self {
        Self {
            socket,
            guests,
            authoriser: Arc::new(SocketAuthoriser),
        }
    }

    /// Replaces the access policy.
    #[must_use]
    pub fn with_authoriser(self, authoriser: Arc<dyn Authoriser>) -> Self {
        Self { authoriser, ..self }
    }

    /// Serves until `shutdown` is ready. Streams then end with UNAVAILABLE, and calls in progress
    /// are answered.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let access = Access::new(self.guests.clone(), self.authoriser, self.socket.owner());
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<GuestServiceServer<GuestApi>>().await;
        health
            .set_serving::<StaticKeysServiceServer<StaticKeysApi>>()
            .await;
        health
            .set_serving::<TracepointsServiceServer<TracepointsApi>>()
            .await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(patchbay_proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                // Server reflection lets stock clients print error details.
                .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
        };
        let keys = StaticKeysServiceServer::new(StaticKeysApi::new(access.clone()));
        let others = Routes::new(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        let services = Services {
            guest: GuestServiceServer::new(GuestApi::new(access.clone())),
            keys: keys.max_decoding_message_size(MAX_REQUEST_BYTES),
            tracepoints: TracepointsServiceServer::new(TracepointsApi::new(access)),
            others: others.prepare(),
        };
        let incoming = limits::incoming(self.socket.tokio_listener()?);
        let (drain, drained) = oneshot::channel::<()>();
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(limits::HTTP2_STREAMS)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .layer(limits::CallLimit)
            .layer(TraceLayer)
            .serve_with_incoming_shutdown(services, incoming, async move {
                // A dropped sender means shutdown too.
                let _ = drained.await;
            });
        let mut server = std::pin::pin!(server);
        tokio::select! {
            result = &mut server => return Ok(result?),
            () = shutdown => {}
        }
        self.guests.end();
        drop(drain);
        match tokio::time::timeout(DRAIN_TIME, server).await {
            Ok(result) => Ok(result?),
            Err(_) => {
                tracing::warn!("some clients did not end their calls in time and were cut off");
                Ok(())
            }
        }
    }
}
