// SPDX-License-Identifier: Apache-2.0
//! Treats the members of an etcd cluster as one connection. Calls go to one member until it does
//! not answer a call, or its answer shows that it may have no leader. Further calls then go to the
//! next member.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use patchbay_access::connect::TlsFiles;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, Uri};
use tonic::transport::{Channel, Endpoint, Error};
use tonic::{Code, Status};
use tower::{Service, ServiceExt};

use crate::store::StoreError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval between pings. etcd closes the connection of a client that pings more often than
/// every 5 s.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The members; see the module's documentation.
#[derive(Clone)]
pub struct Members {
    channels: Arc<[Channel]>,
    current: Arc<AtomicUsize>,
}

impl Members {
    /// Creates a channel to each member; none of them connects before its first call. With
    /// certificates, each address must begin with https://; without, with http://.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid address, or certificates that cannot be used.
    pub fn new(addresses: &[String], tls: Option<&TlsFiles>) -> Result<Self, StoreError> {
        if let Some(tls) = tls {
            let usable = tls.connector();
            usable.map_err(|error| {
                StoreError::Invalid(format!("the certificates for etcd cannot be used: {error}"))
            })?;
        }
        let channels = addresses.iter().map(|address| connect(address, tls));
        let channels: Vec<Channel> = channels.collect::<Result<_, _>>()?;
        if channels.is_empty() {
            return Err(StoreError::Invalid("no member of etcd is given".to_owned()));
        }
        let first = fastrand::usize(..channels.len());
        Ok(Self {
            channels: channels.into(),
            current: Arc::new(AtomicUsize::new(first)),
        })
    }
}

fn connect(address: &str, tls: Option<&TlsFiles>) -> Result<Channel, StoreError> {
    let invalid =
        |why: &str| StoreError::Invalid(format!("{address:?} is no address of etcd: {why}"));
    let endpoint = Endpoint::from_shared(address.to_owned());
    let endpoint = endpoint
        .map_err(|error| invalid(&error.to_string()))?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    match (endpoint.uri().scheme_str(), tls) {
        (Some("http"), None) => Ok(endpoint.connect_lazy()),
        (Some("https"), Some(tls)) => {
            let authority = endpoint.uri().authority().map(|at| at.as_str().to_owned());
            let authority = authority.ok_or_else(|| invalid("it has no host"))?;
            let tls = tls.clone();
            let connector = move |_: Uri| {
                let (tls, authority) = (tls.clone(), authority.clone());
                async move { tls.connect(&authority).await.map(TokioIo::new) }
            };
            Ok(endpoint.connect_with_connector_lazy(tower::service_fn(connector)))
        }
        (Some("https"), None) => Err(invalid(
            "https needs certificates; give --etcd-ca, --etcd-cert and --etcd-key",
        )),
        (Some("http"), Some(_)) => Err(invalid("certificates are given; write https://")),
        _ => Err(invalid("write http://ADDRESS:PORT or https://ADDRESS:PORT")),
    }
}

/// Returns whether the answer suggests that the member has no leader, for example because it is
/// cut off from the others. Such a member fails a call at the call's deadline, often before the
/// client gives the call up.
fn may_lack_leader<T>(answer: &Response<T>) -> bool {
    let status = Status::from_header_map(answer.headers());
    let code = status.map_or(Code::Ok, |status| status.code());
    // etcd 3.4 reports an exceeded deadline as `Unknown`.
    matches!(
        code,
        Code::Unavailable | Code::DeadlineExceeded | Code::Unknown
    )
}

impl Service<Request<Body>> for Members {
    type Response = Response<Body>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let at = self.current.load(Ordering::Relaxed);
        let channel = self.channels[at].clone();
        let (current, next) = (Arc::clone(&self.current), (at + 1) % self.channels.len());
        Box::pin(async move {
            let answer = channel.oneshot(request).await;
            if answer.as_ref().map_or(true, may_lack_leader) {
                // If several calls fail at the same time, only one of them selects the next member.
                let _ = current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
            }
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_may_have_no_leader_is_left() {
        for (status, is_left) in [
            (Status::unavailable("etcdserver: no leader"), true),
            (Status::unavailable("etcdserver: request timed out"), true),
            (Status::unknown("context deadline exceeded"), true),
            (Status::deadline_exceeded(""), true),
            (Status::not_found("etcdserver: requested lease"), false),
            (Status::out_of_range("compacted"), false),
            (Status::resource_exhausted("no space"), false),
        ] {
            let answer = status.clone().into_http::<()>();
            assert_eq!(may_lack_leader(&answer), is_left, "{status}");
        }
        assert!(!may_lack_leader(&Response::new(())));
    }
}
