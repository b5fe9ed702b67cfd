// SPDX-License-Identifier: Apache-2.0
//! Tests that spans arrive at a collector as parts of the caller's trace.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use patchbay_proto::v1;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::fake::Fake;
use super::support::{Host, PATIENCE};

struct Collector(mpsc::UnboundedSender<Span>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.expect("described").attributes;
            let is_named = attributes.iter().any(|attribute| {
                attribute.key == "service.name"
                    && format!("{:?}", attribute.value).contains("patchbayd")
            });
            assert!(is_named, "{attributes:?}");
            for span in resource
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans)
            {
                // The test may have ended.
                let _ = self.0.send(span);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test]
async fn calls_are_exported_as_parts_of_the_callers_trace() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let (sender, mut spans) = mpsc::unbounded_channel();
    let collector = TraceServiceServer::new(Collector(sender));
    let server = Server::builder().add_service(collector);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

    let host = Host::start_with(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_BSP_SCHEDULE_DELAY", "10"),
    ])
    .await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    fake.answer("PauseGuest", |_: v1::PauseGuestRequest| {
        Ok(v1::PauseGuestResponse::default())
    });
    host.list_until(1).await;
    for guest in ["web-1", "nobody"] {
        let mut request = Request::new(v1::PauseGuestRequest {
            guest: guest.to_owned(),
            ..Default::default()
        });
        let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
        let parent = parent.parse().expect("a value");
        request.metadata_mut().insert("traceparent", parent);
        let _ = host.guests().await.pause_guest(request).await;
    }
    for status in [StatusCode::Unset, StatusCode::Error] {
        let span = tokio::time::timeout(PATIENCE, spans.recv()).await;
        let span = span.expect("in time").expect("the collector runs");
        let hex = |bytes: &[u8]| {
            bytes
                .iter()
                .fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
        };
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(hex(&span.parent_span_id), "b7ad6b7169203331");
        assert_eq!(span.name, "PauseGuest");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        assert_eq!(span.status.unwrap_or_default().code(), status);
    }
}
