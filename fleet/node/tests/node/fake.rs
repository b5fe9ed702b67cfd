// SPDX-License-Identifier: Apache-2.0
//! A monitor that records the calls that it gets, and gives the answers that the test sets.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use patchbay_proto::v1;
use prost::Message;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::UdsConnectInfo;
use tower::Service;

/// A call as the monitor received it.
#[derive(Clone, Debug)]
pub struct Received {
    /// The call's method, without package and service.
    pub method: String,
    pub headers: HeaderMap,
    /// The user that connected.
    pub uid: u32,
    /// The message without its prefix.
    pub message: Bytes,
}

type Answer = Box<dyn FnMut(&[u8]) -> Result<Vec<u8>, Status> + Send>;

/// The monitor's received calls and its answers.
#[derive(Clone, Default)]
pub struct Fake {
    received: Arc<Mutex<Vec<Received>>>,
    /// No further calls are recorded.
    is_forgetful: Arc<AtomicBool>,
    answers: Arc<Mutex<HashMap<&'static str, Answer>>>,
    /// Methods that never answer. The sender is dropped when the method's client disconnects.
    hanging: Arc<Mutex<HashMap<&'static str, tokio::sync::oneshot::Sender<()>>>>,
}

impl Fake {
    /// Serves guests with these names on a socket.
    pub async fn start(path: &Path, names: &[&str]) -> Self {
        Self::serve(UnixListener::bind(path).expect("free"), names).await
    }

    /// Serves on a socket that is already bound.
    pub async fn serve(listener: UnixListener, names: &[&str]) -> Self {
        let fake = Self::default();
        let status = |name: &&str| v1::GuestStatus {
            guest: (*name).to_owned(),
            ..Default::default()
        };
        let guests: Vec<_> = names.iter().map(status).collect();
        fake.answer("ListGuests", move |_: v1::ListGuestsRequest| {
            Ok(v1::ListGuestsResponse {
                guests: guests.clone(),
                next_page_token: String::new(),
            })
        });
        listener.set_nonblocking(true).expect("set");
        let listener = tokio::net::UnixListener::from_std(listener).expect("registered");
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<Fakes<0>>().await;
        let server = tonic::transport::Server::builder()
            .add_service(health)
            .add_service(Fakes::<0>(fake.clone()))
            .add_service(Fakes::<1>(fake.clone()))
            .add_service(Fakes::<2>(fake.clone()));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        fake
    }

    /// Sets the answer of a method from now on.
    pub fn answer<M: Message + Default, A: Message>(
        &self,
        method: &'static str,
        mut answer: impl FnMut(M) -> Result<A, Status> + Send + 'static,
    ) {
        let answer: Answer = Box::new(move |bytes| {
            let message = M::decode(bytes).expect("a request of the method");
            answer(message).map(|answer| answer.encode_to_vec())
        });
        self.answers.lock().expect("free").insert(method, answer);
    }

    /// Stops recording calls, because a measurement makes a great many.
    #[allow(dead_code, reason = "the example `load` calls it")]
    pub fn forget_calls(&self) {
        self.is_forgetful.store(true, Ordering::Relaxed);
    }

    /// Makes a method never answer. The receiver resolves when the call is cancelled.
    pub fn hang(&self, method: &'static str) -> tokio::sync::oneshot::Receiver<()> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.hanging.lock().expect("free").insert(method, sender);
        receiver
    }

    /// Returns the calls of a method, in order.
    pub fn received(&self, method: &str) -> Vec<Received> {
        let received = self.received.lock().expect("free");
        let of_method = received.iter().filter(|call| call.method == method);
        of_method.cloned().collect()
    }

    async fn handle(self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let method = parts
            .uri
            .path()
            .rsplit('/')
            .next()
            .expect("a path")
            .to_owned();
        let peer = parts.extensions.get::<UdsConnectInfo>();
        let uid = peer.and_then(|peer| peer.peer_cred).expect("a peer").uid();
        let body = body
            .collect()
            .await
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        let message = body
            .get(5..)
            .map(Bytes::copy_from_slice)
            .unwrap_or_default();
        if !self.is_forgetful.load(Ordering::Relaxed) {
            self.received.lock().expect("free").push(Received {
                method: method.clone(),
                uid,
                headers: parts.headers,
                message: message.clone(),
            });
        }
        let hanging = self.hanging.lock().expect("free").remove(method.as_str());
        if let Some(_until_dropped) = hanging {
            return std::future::pending().await;
        }
        let mut answers = self.answers.lock().expect("free");
        let answer = match answers.get_mut(method.as_str()) {
            Some(answer) => answer(&message),
            None => Err(Status::unimplemented(method)),
        };
        match answer {
            Err(status) => status.into_http(),
            Ok(message) => {
                let mut bytes = BytesMut::new();
                bytes.put_u8(0);
                bytes.put_u32(u32::try_from(message.len()).expect("short"));
                bytes.put_slice(&message);
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                let body = Full::new(bytes.freeze());
                let body = body.with_trailers(async { Some(Ok(trailers)) });
                let mut response = Response::new(Body::new(body));
                let grpc = HeaderValue::from_static("application/grpc");
                response.headers_mut().insert("content-type", grpc);
                response
            }
        }
    }
}

#[derive(Clone)]
struct Fakes<const SERVICE: usize>(Fake);

impl<const SERVICE: usize> NamedService for Fakes<SERVICE> {
    const NAME: &'static str = [
        "patchbay.v1.GuestService",
        "patchbay.v1.StaticKeysService",
        "patchbay.v1.TracepointsService",
    ][SERVICE];
}

impl<const SERVICE: usize> Service<Request<Body>> for Fakes<SERVICE> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let fake = self.0.clone();
        Box::pin(async move { Ok(fake.handle(request).await) })
    }
}
