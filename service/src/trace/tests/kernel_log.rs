// SPDX-License-Identifier: Apache-2.0
//! The kernel's log as honest and hostile agents report it.

use std::time::Duration;

use patchbay_proto::agent::v1::{AgentLog, AgentLogRecord};
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{StreamKernelLogRequest, StreamKernelLogResponse};
use tokio_stream::StreamExt;
use tonic::{Request, Status};

use super::fake::Fake;
use super::tracing::{api, reason, until};

fn log(next: u64, texts: impl IntoIterator<Item = String>) -> AgentLog {
    let record = |text| AgentLogRecord {
        text,
        ..Default::default()
    };
    AgentLog {
        records: texts.into_iter().map(record).collect(),
        next,
        lost: 0,
    }
}

async fn next(
    stream: &mut (impl StreamExt<Item = Result<StreamKernelLogResponse, Status>> + Unpin),
) -> Result<StreamKernelLogResponse, Status> {
    let next = tokio::time::timeout(Duration::from_secs(30), stream.next());
    next.await.expect("in time").expect("no end")
}

/// Answers are limited to the size of a frame, even if the agent goes backwards, does not number
/// its records or sends too much.
#[tokio::test]
async fn answers_are_bounded_and_the_place_only_advances() {
    let fake = Fake::with_agent().await;
    let long = format!("\u{1b}[2J{}", "x".repeat(5000));
    *fake.script.log.lock().unwrap() = [
        log(5, []),
        log(1, [long]),
        log(0, (0..6000).map(|number| number.to_string())),
    ]
    .into();
    let request = Request::new(StreamKernelLogRequest::default());
    // The guest is served for as long as this exists.
    let api = api(&fake);
    let stream = api.stream_kernel_log(request).await;
    let mut stream = stream.expect("an agent").into_inner();
    assert!(
        next(&mut stream)
            .await
            .expect("the first")
            .records
            .is_empty()
    );
    let first = next(&mut stream).await.expect("a record");
    assert_eq!(first.records.len(), 1);
    let text = &first.records[0].text;
    assert!(text.len() < 2000 && !text.contains('\u{1b}'), "{text}");
    let many = next(&mut stream).await.expect("records");
    assert_eq!(many.records.len(), 4096);
    until(|| fake.script.log_asked.lock().unwrap().len() > 3).await;
    let asked = fake.script.log_asked.lock().unwrap()[..4].to_vec();
    assert_eq!(asked, [None, Some(5), Some(5), Some(5)]);
}

#[tokio::test]
async fn a_stream_needs_an_agent() {
    let request = Request::new(StreamKernelLogRequest::default());
    let Err(status) = api(&Fake::new()).stream_kernel_log(request).await else {
        panic!("there is no agent");
    };
    assert_eq!(reason(&status), "NO_AGENT", "{status:?}");
}
