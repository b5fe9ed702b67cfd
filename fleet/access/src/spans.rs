// SPDX-License-Identifier: Apache-2.0
//! Exports spans for OpenTelemetry by OTLP over gRPC if `OTEL_EXPORTER_OTLP_ENDPOINT` is set.
//!
//! Spans that are recorded without an exporter are dropped.

use std::time::SystemTime;

use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
    TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue, global};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use patchbay_proto::TraceParent;

/// The variable that turns the export on.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Exports spans until it is shut down.
#[derive(Debug)]
pub struct Exporter(Option<SdkTracerProvider>);

impl Exporter {
    /// Creates the exporter from the variables of OpenTelemetry's specification. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// The endpoint is malformed.
    pub fn from_environment(service: &'static str) -> Result<Self, ExporterBuildError> {
        if std::env::var_os(ENDPOINT).is_none_or(|endpoint| endpoint.is_empty()) {
            return Ok(Self(None));
        }
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .build()?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name(service).build())
            .build();
        global::set_tracer_provider(provider.clone());
        Ok(Self(Some(provider)))
    }

    /// Sends the remaining spans. If the collector does not answer, this takes a few seconds at
    /// most.
    pub async fn shutdown(self) {
        let Self(Some(provider)) = self else { return };
        let ended = tokio::task::spawn_blocking(move || provider.shutdown()).await;
        if let Ok(Err(error)) = ended {
            tracing::warn!("the last spans are not exported: {error}");
        }
    }
}

/// Records a span that ends now. `error` is the reason why the operation failed; `None` if it
/// succeeded.
pub fn record(
    name: &'static str,
    parent: TraceParent,
    start: SystemTime,
    attributes: Vec<KeyValue>,
    error: Option<&str>,
) {
    let parent = SpanContext::new(
        TraceId::from(parent.trace_id),
        SpanId::from(parent.span_id),
        TraceFlags::SAMPLED,
        true,
        TraceState::default(),
    );
    let context = Context::new().with_remote_span_context(parent);
    let tracer = global::tracer("patchbay");
    let builder = tracer.span_builder(name).with_kind(SpanKind::Server);
    let builder = builder.with_start_time(start).with_attributes(attributes);
    let mut span = tracer.build_with_context(builder, &context);
    if let Some(error) = error {
        span.set_status(Status::error(error.to_owned()));
    }
    span.end();
}
