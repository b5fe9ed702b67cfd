// SPDX-License-Identifier: Apache-2.0
//! Counts for the audit log what a client reads of the guest's log or events.

use std::pin::Pin;
use std::task::{Context, Poll};

use patchbay_proto::v1;
use prost::Message;
use tokio_stream::Stream;
use tonic::Status;

use super::guests::ServedGuest;
use crate::keys::Caller;
use crate::keys::audit::{Reader, Reading};
use crate::trace::TraceError;

/// A message with records of the guest.
pub trait Records: Message {
    /// Returns the number of records.
    fn records(&self) -> usize;
}

impl Records for v1::StreamKernelLogResponse {
    fn records(&self) -> usize {
        self.records.len()
    }
}

impl Records for v1::StreamTracepointEventsResponse {
    fn records(&self) -> usize {
        self.events.len()
    }
}

/// A stream that is counted until the client leaves it.
pub type Counted<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Opens a stream of records. Its start is in the audit log before it is opened.
///
/// # Errors
/// [`KeysError::AuditLogUnwritable`](crate::keys::KeysError::AuditLogUnwritable): nothing is read;
/// those of `open`.
pub async fn recorded<T, S>(
    guest: &ServedGuest,
    caller: &Caller,
    reads: &'static str,
    instance: &str,
    open: impl Future<Output = Result<S, TraceError>>,
) -> Result<Counted<T>, TraceError>
where
    T: Records,
    S: Stream<Item = Result<T, Status>> + Send + Unpin + 'static,
{
    let reader = Reader {
        owner: caller.name.clone(),
        person: caller.person.as_deref().map(str::to_owned),
        reads,
        instance: instance.chars().take(MAX_INSTANCE_CHARS).collect(),
    };
    let mut reading = guest.keys.begin_reading(reader).await?;
    match open.await {
        Ok(stream) => Ok(Box::pin(Recorded { stream, reading })),
        Err(error) => {
            reading.fail(error.reason(), error.to_string());
            Err(error)
        }
    }
}

/// The maximum length of an instance's name in the audit log. Longer names are refused later.
const MAX_INSTANCE_CHARS: usize = 256;

struct Recorded<S> {
    stream: S,
    reading: Reading,
}

impl<T, S> Stream for Recorded<S>
where
    T: Records,
    S: Stream<Item = Result<T, Status>> + Unpin,
{
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = Pin::new(&mut self.stream).poll_next(context);
        match &polled {
            Poll::Ready(Some(Ok(message))) => {
                self.reading.count(message.records(), message.encoded_len());
            }
            Poll::Ready(Some(Err(status))) => self.reading.end_with(status.message()),
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use patchbay_guest::testing::{InMemoryGuest, TestKey};
    use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
    use serde_json::Value;
    use tokio_stream::StreamExt;
    use tonic::{Code, Request};
    use tonic_types::StatusExt;

    use super::super::access::Access;
    use super::super::guests::Guests;
    use super::super::tracepoints::TracepointsApi;
    use super::*;
    use crate::api::limits::Peer;
    use crate::auth::{Authoriser, Denied, Principal, Role};
    use crate::keys::audit::AuditLog;
    use crate::keys::{Keys, KeysConfig, Registry};
    use crate::testing::{GuestRings, numbered};
    use crate::trace::Tracing;

    /// Admits `uid:0` as a viewer, and nobody else.
    struct Viewers;

    impl Authoriser for Viewers {
        fn may(&self, who: &Principal, needed: Role, _: &str, _: &str) -> Result<(), Denied> {
            match who.as_str() == "uid:0" && needed == Role::Viewer {
                true => Ok(()),
                false => Err(Denied { found: None }),
            }
        }
    }

    struct Lab {
        api: TracepointsApi,
        folder: tempfile::TempDir,
        rings: GuestRings,
    }

    impl Lab {
        /// Serves a guest with two records in its log and three events in its ring buffer.
        fn new(audit: Option<&Path>) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let own = folder.path().join("audit.jsonl");
            let registry = Arc::new(Registry::default());
            let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
            let rings = GuestRings::new(&guest);
            rings.found_by(&registry);
            rings.log().print(6, "one");
            rings.log().print(6, "two");
            for number in 0..3 {
                let payload = numbered(number);
                rings.write(|writer| writer.event(0, 1000 * number, &payload));
            }
            let config = KeysConfig {
                audit: AuditLog::open(audit.unwrap_or(&own)).expect("opens"),
                ..KeysConfig::default()
            };
            let (keys, _) = Keys::start(guest, registry, config).expect("a thread");
            let guests = Guests::default();
            let served = ServedGuest::start(keys, Tracing::default()).expect("served");
            guests.add(served).expect("the only one");
            let api = TracepointsApi::new(Access::new(guests, Arc::new(Viewers), 0));
            Self { api, folder, rings }
        }

        fn lines(&self) -> Vec<Value> {
            let text = std::fs::read_to_string(self.folder.path().join("audit.jsonl"));
            let text = text.expect("the log");
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let lines = whole.lines();
            lines
                .map(|line| serde_json::from_str(line).expect("JSON"))
                .collect()
        }

        /// Returns the refusals of both streams for a user.
        async fn refusals(&self, uid: u32) -> [Status; 2] {
            let records = self.api.stream_kernel_log(by(uid, log())).await.err();
            let events = self.api.stream_tracepoint_events(by(uid, events()));
            [records, events.await.err()].map(|refused| refused.expect("refused"))
        }

        /// Returns the two lines of a call, once the second one is written.
        async fn both_lines(&self) -> [Value; 2] {
            let wait = async {
                loop {
                    if let Ok(lines) = <[Value; 2]>::try_from(self.lines()) {
                        return lines;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let waited = tokio::time::timeout(std::time::Duration::from_secs(30), wait).await;
            waited.unwrap_or_else(|_| panic!("not two lines: {:?}", self.lines()))
        }
    }

    fn by<T>(uid: u32, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.extensions_mut().insert(Peer::with_uid(Some(uid)));
        request
    }

    fn log() -> v1::StreamKernelLogRequest {
        v1::StreamKernelLogRequest {
            start: Some(v1::stream_kernel_log_request::Start::FirstSeq(0)),
            no_follow: true,
            ..Default::default()
        }
    }

    fn events() -> v1::StreamTracepointEventsRequest {
        v1::StreamTracepointEventsRequest {
            source: v1::TraceSource::Memory.into(),
            buffered: true,
            no_follow: true,
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn the_begin_and_the_end_of_a_reading_are_recorded() {
        let lab = Lab::new(None);
        let mut request = by(0, log());
        let metadata = request.metadata_mut();
        metadata.insert(
            patchbay_proto::PERSON_METADATA,
            "alice".parse().expect("ASCII"),
        );
        let stream = lab.api.stream_kernel_log(request).await.expect("allowed");
        let mut stream = stream.into_inner();
        let begun = lab.lines();
        assert_eq!(begun.len(), 1, "before the first record is sent: {begun:?}");
        let (mut records, mut bytes) = (0, 0);
        while let Some(message) = stream.next().await {
            let message = message.expect("no error");
            records += message.records.len();
            bytes += message.encoded_len();
        }
        drop(stream);
        assert_eq!(records, 2);
        let [begin, end] = lab.both_lines().await;
        for (field, value) in [
            ("event", Value::from("reading")),
            ("owner", "uid:0".into()),
            ("person", "alice".into()),
            ("reads", "kernel log".into()),
        ] {
            assert_eq!(begin[field], value, "{begin}");
        }
        for (field, value) in [
            ("event", Value::from("outcome")),
            ("id", begin["id"].clone()),
            ("result", "read".into()),
            ("records", 2.into()),
            ("bytes", bytes.into()),
        ] {
            assert_eq!(end[field], value, "{end}");
        }
    }

    #[tokio::test]
    async fn a_client_that_leaves_has_read_what_was_sent() {
        let lab = Lab::new(None);
        let follow = v1::StreamTracepointEventsRequest {
            no_follow: false,
            ..events()
        };
        let stream = lab.api.stream_tracepoint_events(by(0, follow)).await;
        let mut stream = stream.expect("allowed").into_inner();
        let mut read = 0;
        while read < 3 {
            let message = stream.next().await.expect("no end").expect("no error");
            read += message.events.len();
        }
        assert_eq!(lab.lines().len(), 1);
        drop(stream);
        let [begin, end] = lab.both_lines().await;
        assert_eq!(begin["reads"], "trace events");
        assert_eq!(
            (&end["result"], &end["records"]),
            (&"read".into(), &3.into())
        );
    }

    #[tokio::test]
    async fn a_reading_that_fails_is_recorded_with_the_reason() {
        let lab = Lab::new(None);
        let none = v1::StreamTracepointEventsRequest {
            instance: "none\u{1b}".to_owned(),
            ..events()
        };
        let refused = lab.api.stream_tracepoint_events(by(0, none)).await;
        assert!(refused.is_err());
        let [begin, end] = lab.both_lines().await;
        assert_eq!(begin["instance"], "none\u{1b}");
        let file = std::fs::read(lab.folder.path().join("audit.jsonl"));
        assert!(
            !file.expect("the log").contains(&0x1b),
            "it steers a terminal"
        );
        assert_eq!(end["result"], "failed", "{end}");
    }

    #[tokio::test]
    async fn who_is_refused_reads_nothing_and_is_not_recorded_here() {
        let lab = Lab::new(None);
        for refused in lab.refusals(7).await {
            assert_eq!(refused.code(), Code::PermissionDenied);
        }
        assert!(lab.lines().is_empty());
    }

    /// A disk that is full.
    #[tokio::test]
    async fn without_a_line_in_the_log_nothing_is_read() {
        let lab = Lab::new(Some(Path::new("/dev/full")));
        lab.rings.log().print(6, "secret");
        for refused in lab.refusals(0).await {
            let reason = refused.get_details_error_info().expect("a reason").reason;
            assert_eq!(reason, "AUDIT_LOG_UNWRITABLE");
        }
    }
}
