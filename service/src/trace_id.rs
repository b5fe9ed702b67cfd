// SPDX-License-Identifier: Apache-2.0
//! The trace to which a call belongs (W3C Trace Context), from its metadata to the audit log.
//!
//! The trace is stored in a task-local variable, so that no method has to pass it on. A task that
//! completes a call's change continues the trace with [`carry`].

use std::fmt;
use std::task::{Context, Poll};

use patchbay_proto::TraceParent;
use serde::{Serialize, Serializer};
use tokio::task::futures::TaskLocalFuture;
use tonic::codegen::http;
use tower::{Layer, Service};

tokio::task_local! {
    static CURRENT: Option<TraceId>;
}

/// The id of a trace; it is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(u128);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for TraceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns the trace of the call that this task serves.
#[must_use]
pub fn current() -> Option<TraceId> {
    CURRENT.try_with(|current| *current).ok().flatten()
}

/// Returns a future that runs as a part of the current trace, on any task.
pub fn carry<F: Future>(future: F) -> TaskLocalFuture<Option<TraceId>, F> {
    CURRENT.scope(current(), future)
}

/// Serves each call as a part of the trace that its metadata names.
#[derive(Clone, Copy, Debug)]
pub struct TraceLayer;

impl<S> Layer<S> for TraceLayer {
    type Service = Traced<S>;

    fn layer(&self, inner: S) -> Traced<S> {
        Traced(inner)
    }
}

/// A service wrapped by [`TraceLayer`].
#[derive(Clone, Debug)]
pub struct Traced<S>(S);

impl<S, B> Service<http::Request<B>> for Traced<S>
where
    S: Service<http::Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = TaskLocalFuture<Option<TraceId>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let parent = TraceParent::of(request.headers());
        CURRENT.scope(
            parent.map(|parent| TraceId(parent.trace_id)),
            self.0.call(request),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use patchbay_proto::TRACEPARENT_METADATA;

    use super::*;

    #[tokio::test]
    async fn a_task_of_a_call_is_of_its_trace() {
        const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let traces = |parents: &'static [&'static str]| async move {
            let mut service = TraceLayer.layer(tower::service_fn(|_: http::Request<()>| async {
                let task = tokio::spawn(carry(async { current() }));
                Ok::<_, Infallible>((current(), task.await.expect("ends")))
            }));
            let mut request = http::Request::new(());
            for parent in parents {
                let value = parent.parse().expect("a value");
                request.headers_mut().append(TRACEPARENT_METADATA, value);
            }
            let (here, there) = service.call(request).await.expect("answers");
            assert_eq!(here, there);
            here.map(|trace| trace.to_string())
        };
        let trace = traces(&[PARENT]).await;
        assert_eq!(trace.as_deref(), Some("0af7651916cd43dd8448eb211c80319c"));
        for none in [&[][..], &["garbage"], &[PARENT, PARENT]] {
            assert_eq!(traces(none).await, None, "{none:?}");
        }
        assert_eq!(current(), None);
    }
}
