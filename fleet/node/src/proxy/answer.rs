// SPDX-License-Identifier: Apache-2.0
//! Responses: local, buffered or streamed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::future::{BoxFuture, Shared};
use http::{HeaderMap, HeaderValue, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, Limited};
use opentelemetry::KeyValue;
use patchbay_access::audit::Pending;
use patchbay_access::spans;
use patchbay_proto::TraceParent;
use patchbay_proto::text::cut;
use prost::Message;
use tokio::sync::OwnedSemaphorePermit;
use tonic::body::Body;
use tonic::{Code, Status};

use super::console::Typed;
use super::frame::{MAX_ANSWER_BYTES, framed};
use super::received::Received;
use super::status::{code_name, lost};
use crate::metrics::Metrics;

/// The maximum number of bytes of a message in the log.
const MAX_MESSAGE_BYTES: usize = 4096;

/// A future that resolves when a stream must end, with the status for the client.
pub type Ended = Shared<BoxFuture<'static, Status>>;

/// The permits and the pending records of a call. When the call ends, its permits are released, and
/// its metrics, its log line and its outcome in the audit log are written.
pub struct Finish {
    pub metrics: Metrics,
    pub method: &'static str,
    pub pending: Option<Pending>,
    /// The summary of the client's input to a console.
    pub typed: Option<Typed>,
    /// The counts of the answer so far, for a stream of records of the guest.
    pub received: Option<Received>,
    pub permits: Vec<OwnedSemaphorePermit>,
    /// The future that resolves when the call must end; only for streams.
    pub ended: Option<Ended>,
    /// The caller, the guest and the trace, for the log.
    pub caller: Caller,
    began: SystemTime,
    is_over: bool,
}

/// The parts of a log line that identify a call.
#[derive(Debug, Default)]
pub struct Caller {
    pub principal: String,
    /// The person for whom the principal makes the call; empty if it has asserted none.
    pub person: String,
    pub guest: String,
    pub trace_id: String,
    pub trace_parent: Option<TraceParent>,
    /// True if the call changes something. Other calls are logged at a lower level.
    pub changes: bool,
}

impl Finish {
    pub fn new(metrics: Metrics, method: &'static str, permit: OwnedSemaphorePermit) -> Self {
        Self {
            metrics,
            method,
            pending: None,
            typed: None,
            received: None,
            permits: vec![permit],
            caller: Caller::default(),
            ended: None,
            began: SystemTime::now(),
            is_over: false,
        }
    }

    /// Counts the call and records its outcome.
    pub fn end(&mut self, code: Code, message: &str) {
        if !std::mem::replace(&mut self.is_over, true) {
            // The monitor chooses the message, so its length is limited here.
            let message = &*cut(message, MAX_MESSAGE_BYTES);
            let (method, code_text) = (self.method, code_name(code));
            self.metrics.call(method, code_text);
            if let Some(parent) = self.caller.trace_parent {
                let attributes = vec![
                    KeyValue::new("rpc.system.name", "grpc"),
                    KeyValue::new("rpc.response.status_code", code_text),
                    KeyValue::new("patchbay.guest", self.caller.guest.clone()),
                    KeyValue::new("enduser.id", self.caller.principal.clone()),
                ];
                let error = (code != Code::Ok).then_some(message);
                spans::record(method, parent, self.began, attributes, error);
            }
            let Caller {
                principal,
                person,
                guest,
                trace_id,
                changes,
                ..
            } = &self.caller;
            if *changes || code == Code::PermissionDenied {
                tracing::info!(
                    method,
                    principal,
                    person,
                    guest,
                    trace_id,
                    code = code_text,
                    message,
                    "call"
                );
            } else {
                tracing::debug!(method, principal, guest, trace_id, code = code_text, "call");
            }
            if let Some(pending) = self.pending.take() {
                match self.summary() {
                    None => pending.finish(code_text, message),
                    Some(summary) if message.is_empty() => pending.finish(code_text, &summary),
                    Some(summary) => pending.finish(code_text, &format!("{summary}; {message}")),
                }
            }
        }
    }

    /// Counts a frame of a stream of records.
    pub fn count(&mut self, frame: &Frame<Bytes>) {
        if let (Some(received), Some(data)) = (&mut self.received, frame.data_ref()) {
            received.count(data);
        }
    }

    /// Returns the part of the outcome that the daemon counts itself.
    fn summary(&self) -> Option<String> {
        let typed = self.typed.as_ref().map(Typed::text);
        typed.or_else(|| self.received.as_ref().map(Received::text))
    }
}

impl Drop for Finish {
    fn drop(&mut self) {
        if !self.is_over {
            let code = code_name(Code::Cancelled);
            self.metrics.call(self.method, code);
            // Most consoles and streams of records end this way. For other calls, dropping
            // `pending` records the outcome.
            if let Some(summary) = self.summary()
                && let Some(pending) = self.pending.take()
            {
                pending.finish(code, &format!("{summary}; the client left"));
            }
        }
    }
}

/// The whole answer of a call that is not streamed.
pub struct Whole {
    parts: http::response::Parts,
    pub body: Bytes,
    trailers: HeaderMap,
}

impl Whole {
    /// Reads the answer of `guest` to its end.
    pub async fn read(answer: Response<Body>, guest: &str) -> Result<Self, Status> {
        let (parts, body) = answer.into_parts();
        let most = MAX_ANSWER_BYTES + 64;
        let collected = Limited::new(body, most).collect().await;
        let collected = collected.map_err(|error| lost(guest, &error.to_string()))?;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        let body = collected.to_bytes();
        Ok(Self {
            parts,
            body,
            trailers,
        })
    }

    /// Returns the status, which is in the headers if there is no message.
    pub fn status(&self) -> Status {
        Status::from_header_map(&self.trailers)
            .or_else(|| Status::from_header_map(&self.parts.headers))
            .unwrap_or_else(|| Status::unknown("the answer has no status"))
    }

    /// Returns the response to the client.
    pub fn into_response(self) -> Response<Body> {
        // A status without a message is sent as one block of headers that ends the stream (gRPC's
        // Trailers-Only). If the headers did not end the stream, grpc-go would wait for trailers
        // and report INTERNAL without them.
        if self.body.is_empty() && self.trailers.is_empty() {
            return Response::from_parts(self.parts, Body::empty());
        }
        let trailers = (!self.trailers.is_empty()).then_some(Ok(self.trailers));
        let body = Full::new(self.body).with_trailers(async { trailers });
        Response::from_parts(self.parts, Body::new(body))
    }
}

/// Creates a local answer of one message.
pub fn unary<M: Message>(message: &M) -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let body = Full::new(framed(&message.encode_to_vec()));
    let body = Body::new(body.with_trailers(async { Some(Ok(trailers)) }));
    let mut response = Response::new(body);
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert("content-type", grpc);
    response
}

/// Forwards an answer, and ends `finish` when the answer ends.
pub fn observed(answer: Response<Body>, mut finish: Finish) -> Response<Body> {
    // A response without messages has the status in its headers.
    if let Some(status) = Status::from_header_map(answer.headers()) {
        finish.end(status.code(), status.message());
    }
    answer.map(|body| Body::new(Observed { body, finish }))
}

struct Observed {
    body: Body,
    finish: Finish,
}

impl http_body::Body for Observed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.finish.count(frame);
                if let Some(status) = frame.trailers_ref().and_then(Status::from_header_map) {
                    self.finish.end(status.code(), status.message());
                }
            }
            Poll::Ready(Some(Err(error))) => {
                // An error of the body would reset the stream, and the client would get no status.
                let status = lost(&self.finish.caller.guest, error.message());
                self.finish.end(status.code(), status.message());
                self.body = Body::empty();
                let mut trailers = HeaderMap::new();
                let added = status.add_header(&mut trailers);
                return Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))));
            }
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http_body_util::StreamBody;
    use tokio::sync::Semaphore;
    use tonic_types::StatusExt;

    use super::*;

    #[tokio::test]
    async fn a_status_without_a_message_ends_the_stream_with_its_headers() {
        let refused = Status::not_found("no such key").into_http();
        let whole = Whole::read(refused, "web-1").await.expect("whole");
        let response = whole.into_response();
        assert!(http_body::Body::is_end_stream(response.body()));
        let status = Status::from_header_map(response.headers()).expect("in the headers");
        assert_eq!(status.code(), Code::NotFound);
        let answer = Whole::read(unary(&String::new()), "web-1").await;
        let response = answer.expect("whole").into_response();
        assert!(!http_body::Body::is_end_stream(response.body()));
        let body = response.into_body().collect().await.expect("whole");
        assert!(body.trailers().is_some());
    }

    #[tokio::test]
    async fn a_stream_that_breaks_ends_with_a_status() {
        let calls = Arc::new(Semaphore::new(1));
        let permit = calls.try_acquire_owned().expect("free");
        let mut finish = Finish::new(Metrics::default(), "WatchGuests", permit);
        finish.caller.guest = "web-1".to_owned();
        let frames = [
            Ok(Frame::data(framed(b"first"))),
            Err(Status::internal("the connection is reset")),
        ];
        let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
        let answer = observed(Response::new(body), finish).into_body();
        let answer = answer.collect().await.expect("no error of the body");
        let status = Status::from_header_map(answer.trailers().expect("a status"));
        let status = status.expect("a status");
        let reason = status.get_details_error_info().expect("a reason").reason;
        assert_eq!(
            (status.code(), reason.as_str()),
            (Code::Unknown, "MONITOR_LOST")
        );
        assert!(
            status.message().contains("the connection is reset"),
            "{status}"
        );
        assert_eq!(answer.to_bytes(), framed(b"first"));
    }
}
