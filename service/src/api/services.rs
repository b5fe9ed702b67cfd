// SPDX-License-Identifier: Apache-2.0
//! Passes each call to its service.
//!
//! The services of Patchbay are found by comparing their names, and only the calls of other
//! services go through tonic's general router, whose search and boxes cost thousands of
//! instructions for each call.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use patchbay_proto::v1::guest_service_server::GuestServiceServer;
use patchbay_proto::v1::static_keys_service_server::StaticKeysServiceServer;
use patchbay_proto::v1::tracepoints_service_server::TracepointsServiceServer;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::Service;

use super::guest::GuestApi;
use super::static_keys::StaticKeysApi;
use super::tracepoints::TracepointsApi;

/// The services of an endpoint.
#[derive(Clone)]
pub struct Services {
    pub guest: GuestServiceServer<GuestApi>,
    pub keys: StaticKeysServiceServer<StaticKeysApi>,
    pub tracepoints: TracepointsServiceServer<TracepointsApi>,
    /// Health and reflection. Answers the calls of unknown services.
    pub others: Routes,
}

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // All services are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        fn name<S: NamedService>(_: &S) -> &'static str {
            S::NAME
        }
        let service = request.uri().path().strip_prefix('/');
        let service = service.and_then(|path| path.split_once('/'));
        match service {
            Some((service, _)) if service == name(&self.keys) => self.keys.call(request),
            Some((service, _)) if service == name(&self.guest) => self.guest.call(request),
            Some((service, _)) if service == name(&self.tracepoints) => {
                self.tracepoints.call(request)
            }
            _ => Box::pin(self.others.call(request)),
        }
    }
}
