// SPDX-License-Identifier: Apache-2.0
//! Serves guests on a unix socket until it is asked to end.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::v1::guest_service_server::GuestServiceServer;
use patchbay_proto::v1::static_keys_service_server::StaticKeysServiceServer;
use patchbay_proto::v1::tracepoints_service_server::TracepointsServiceServer;
use tokio::sync::oneshot;
use tonic::transport::Server;

use super::access::Access;
use super::guest::GuestApi;
use super::guests::Guests;
use super::limits;
use super::static_keys::StaticKeysApi;
use super::tracepoints::TracepointsApi;
use crate::auth::{Authoriser, SocketAuthoriser};
use crate::socket::ListeningSocket;

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
    /// The socket cannot be registered with the runtime.
    #[error("the API socket cannot be served: {0}")]
    Socket(#[from] std::io::Error),
    /// HTTP/2 failed.
    #[error("the API service failed: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The interface's own description is broken.
    #[error("the reflection service cannot be built: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A socket, the guests behind it, and the policy in front of them.
pub struct Endpoint {
    socket: ListeningSocket,
    guests: Guests,
    authoriser: Arc<dyn Authoriser>,
}

impl Endpoint {
    /// Whoever can open the socket is an admin. `guests` may change while the endpoint serves.
    #[must_use]
    pub fn new(socket: ListeningSocket, guests: Guests) -> Self {
        Self {
            socket,
            guests,
            authoriser: Arc::new(SocketAuthoriser),
        }
    }

    /// Asks this policy instead.
    #[must_use]
    pub fn with_authoriser(self, authoriser: Arc<dyn Authoriser>) -> Self {
        Self { authoriser, ..self }
    }

    /// Serves until `shutdown` is ready. Streams then end with UNAVAILABLE, and calls in flight are
    /// answered.
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
                // So that stock clients can print the details of errors.
                .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
        };
        let keys_api = StaticKeysServiceServer::new(StaticKeysApi::new(access.clone()));
        let incoming = limits::incoming(self.socket.tokio_listener()?);
        let (drain, drained) = oneshot::channel::<()>();
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(limits::HTTP2_STREAMS)
            .layer(limits::CallLimit)
            .add_service(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .add_service(GuestServiceServer::new(GuestApi::new(access.clone())))
            .add_service(keys_api.max_decoding_message_size(MAX_REQUEST_BYTES))
            .add_service(TracepointsServiceServer::new(TracepointsApi::new(access)))
            .serve_with_incoming_shutdown(incoming, async move {
                // The sender is dropped, or sends: both mean the end.
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
