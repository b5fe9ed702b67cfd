// SPDX-License-Identifier: Apache-2.0
//! Tests the audit log of calls that read a guest's log, its events or its console.

use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use prost::Message;
use serde_json::Value;
use tonic::Code;

use super::fake::Fake;
use super::support::{Host, assert_refused, own_uid};

/// Asserts that neither the log nor the events of web-1 can be read.
pub async fn assert_no_records(host: &Host, code: Code, reason: &str) {
    let mut tracepoints = TracepointsServiceClient::new(host.channel().await);
    let log = v1::StreamKernelLogRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    assert_refused(tracepoints.stream_kernel_log(log).await, code, reason);
    let events = v1::StreamTracepointEventsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let refused = tracepoints.stream_tracepoint_events(events).await;
    assert_refused(refused, code, reason);
}

/// Waits for the outcome of the call, checks both lines of it, and returns the log.
async fn assert_recorded(
    host: &Host,
    method: &str,
    records: usize,
    answer: &impl Message,
) -> Vec<Value> {
    host.audit_until(2).await;
    let log = host.audit();
    let method = format!("/patchbay.v1.TracepointsService/{method}");
    assert_eq!(
        (&log[0]["method"], &log[0]["guest"], &log[0]["principal"]),
        (&method.into(), &"web-1".into(), &own_uid().into())
    );
    // gRPC puts 5 bytes before each message.
    let bytes = 5 + answer.encoded_len();
    let read = format!("{records} records and {bytes} bytes read");
    assert_eq!(
        (&log[1]["code"], &log[1]["message"]),
        (&"OK".into(), &read.into())
    );
    log
}

#[tokio::test]
async fn a_log_that_is_read_is_recorded_with_its_records_and_bytes() {
    let host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    let answer = v1::StreamKernelLogResponse {
        records: vec![v1::KernelLogRecord::default(); 2],
        ..Default::default()
    };
    fake.answer("StreamKernelLog", {
        let answer = answer.clone();
        move |_: v1::StreamKernelLogRequest| Ok(answer.clone())
    });
    host.list_until(1).await;
    let mut tracepoints = TracepointsServiceClient::new(host.channel().await);
    let request = v1::StreamKernelLogRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let stream = tracepoints.stream_kernel_log(request).await;
    let mut stream = stream.expect("allowed").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    assert_recorded(&host, "StreamKernelLog", 2, &answer).await;
}

/// Checks that only a viewer of the guest reads its log and its events, and that each refusal is in
/// the log of the host.
#[tokio::test]
async fn who_may_not_view_a_guest_reads_neither_its_log_nor_its_events() {
    let own = own_uid();
    let mut host = Host::new(&format!(
        "rules: [{{name: db, principals: ['{own}'], role: admin, guests: ['db-*']}}]"
    ));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1", "db-1"]).await;
    host.list_until(1).await;
    assert_no_records(&host, Code::PermissionDenied, "ROLE_MISSING").await;
    for method in ["StreamKernelLog", "StreamTracepointEvents"] {
        assert!(fake.received(method).is_empty(), "{method}");
    }
    host.audit_until(2).await;
    for line in host.audit() {
        let (event, principal) = (&line["event"], &line["principal"]);
        assert_eq!((event, principal), (&"denied".into(), &own.as_str().into()));
    }
}

#[tokio::test]
async fn events_that_are_read_in_memory_are_recorded_with_their_bytes() {
    let host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    let answer = v1::StreamTracepointEventsResponse {
        source: v1::TraceSource::Memory.into(),
        events: vec![v1::TraceEvent::default(); 3],
        ..Default::default()
    };
    fake.answer("StreamTracepointEvents", {
        let answer = answer.clone();
        move |_: v1::StreamTracepointEventsRequest| Ok(answer.clone())
    });
    host.list_until(1).await;
    let mut tracepoints = TracepointsServiceClient::new(host.channel().await);
    let request = v1::StreamTracepointEventsRequest {
        guest: "web-1".to_owned(),
        source: v1::TraceSource::Memory.into(),
        instance: "foo".to_owned(),
        ..Default::default()
    };
    let stream = tracepoints.stream_tracepoint_events(request).await;
    let mut stream = stream.expect("allowed").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    let log = assert_recorded(&host, "StreamTracepointEvents", 3, &answer).await;
    let request = log[0]["request"].as_str().expect("text");
    assert!(request.contains("foo"), "{request}");
}

#[tokio::test]
async fn what_is_typed_into_a_console_is_recorded_by_digest_and_length() {
    let host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    fake.answer("StreamConsole", |request: v1::StreamConsoleRequest| {
        assert_eq!(request.input, b"secret\n");
        Ok(v1::StreamConsoleResponse::default())
    });
    host.list_until(1).await;
    let typed = v1::StreamConsoleRequest {
        guest: "web-1".to_owned(),
        input: b"secret\n".to_vec(),
        ..Default::default()
    };
    let mut guests = host.guests().await;
    let stream = guests.stream_console(tokio_stream::iter([typed])).await;
    let mut stream = stream.expect("allowed").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    host.audit_until(2).await;
    let log = host.audit();
    // The SHA-256 of "secret\n".
    let digest = "b37e50cedcd3e3f1ff64f4afc0422084ae694253cf399326868e07a35f4a45fb";
    let wanted = format!("typed 7 bytes, sha256 {digest}");
    let request = log[0]["request"].as_str().expect("text");
    assert!(
        request.contains(&wanted) && request.contains("web-1"),
        "{request}"
    );
    // The input in base64.
    assert!(!request.contains("c2VjcmV0"), "{request}");
    assert_eq!(
        (&log[1]["code"], &log[1]["message"]),
        (&"OK".into(), &wanted.into())
    );
}
