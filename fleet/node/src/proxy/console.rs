// SPDX-License-Identifier: Apache-2.0
//! Summarizes clients' input to consoles for the audit log, by length and digest. The input itself
//! is not recorded, because it may contain a password.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http_body::Frame;
use patchbay_proto::text::hex;
use patchbay_proto::v1;
use prost::Message;
use sha2::{Digest, Sha256};
use tonic::Status;
use tonic::body::Body;

use super::frame::PREFIX;
use super::status::invalid;

/// The maximum length of a message in bytes. A client splits longer input into several messages.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Counts and hashes the input of one stream.
#[derive(Clone, Debug, Default)]
pub struct Typed(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    bytes: u64,
    hash: Sha256,
}

impl Typed {
    fn add(&self, input: &[u8]) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.bytes += input.len() as u64;
        state.hash.update(input);
    }

    /// Formats the summary for the outcome of the stream.
    pub fn text(&self) -> String {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        describe(state.bytes, state.hash.clone())
    }
}

fn describe(bytes: u64, hash: Sha256) -> String {
    let digest = hex(&hash.finalize());
    format!("typed {bytes} bytes, sha256 {digest}")
}

/// Returns the request without its input, and the summary of the input; `None` if the request
/// cannot be parsed or has no input.
pub fn without_input(message: &Bytes) -> Option<(Bytes, String)> {
    let mut request = v1::StreamConsoleRequest::decode(message.clone()).ok()?;
    let input = std::mem::take(&mut request.input);
    if input.is_empty() {
        return None;
    }
    let text = describe(input.len() as u64, Sha256::new_with_prefix(&input));
    Some((request.encode_to_vec().into(), text))
}

/// The body of a stream to a console. The input in it is counted while it is forwarded.
pub struct Watched {
    body: Body,
    typed: Typed,
    /// The incomplete message so far.
    read: BytesMut,
}

impl Watched {
    pub fn new(body: Body, typed: Typed) -> Self {
        Self {
            body,
            typed,
            read: BytesMut::new(),
        }
    }

    /// Counts the messages that have arrived completely.
    fn count(&mut self, data: &[u8]) -> Result<(), Status> {
        self.read.extend_from_slice(data);
        while let Some(prefix) = self.read.get(..PREFIX) {
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if prefix[0] != 0 || length > MAX_MESSAGE_BYTES {
                let most = MAX_MESSAGE_BYTES;
                let message = format!(
                    "a message to the console is compressed or longer than {most} bytes; send shorter ones"
                );
                return Err(invalid("input", &message));
            }
            if self.read.len() < PREFIX + length {
                break;
            }
            self.read.advance(PREFIX);
            let message = self.read.split_to(length);
            let message = v1::StreamConsoleRequest::decode(message).map_err(|error| {
                invalid("input", &format!("the message cannot be read: {error}"))
            })?;
            self.typed.add(&message.input);
        }
        Ok(())
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            // A message is counted before its last byte is passed to the monitor.
            if let Some(Err(error)) = frame.data_ref().map(|data| self.count(data)) {
                return Poll::Ready(Some(Err(error)));
            }
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::super::frame::framed;
    use super::*;

    fn message(input: &[u8]) -> Bytes {
        let request = v1::StreamConsoleRequest {
            guest: "web-1".to_owned(),
            input: input.to_vec(),
            ..Default::default()
        };
        request.encode_to_vec().into()
    }

    fn watched(bytes: &[u8], size: usize, typed: &Typed) -> Watched {
        let chunks: Vec<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        let frames = chunks
            .into_iter()
            .map(|chunk| Ok::<_, Status>(Frame::data(chunk)));
        let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
        Watched::new(body, typed.clone())
    }

    #[tokio::test]
    async fn input_is_counted_and_hashed_wherever_frames_end() {
        let bytes = [&b"root\n"[..], b"", b"secret\n"].map(|input| framed(&message(input)));
        let bytes = bytes.concat();
        for size in [1, 7, bytes.len()] {
            let typed = Typed::default();
            let passed = watched(&bytes, size, &typed)
                .collect()
                .await
                .expect("whole");
            assert_eq!(passed.to_bytes(), bytes);
            let all = describe(12, Sha256::new_with_prefix(b"root\nsecret\n"));
            assert_eq!(typed.text(), all);
        }
        assert!(Typed::default().text().starts_with("typed 0 bytes"));
    }

    #[tokio::test]
    async fn what_cannot_be_counted_is_not_typed() {
        let too_long = [&[0][..], &(2_u32 << 20).to_be_bytes()].concat();
        for bytes in [&b"\x01\0\0\0\x01a"[..], b"\0\0\0\0\x02\x1a\x7f", &too_long] {
            let read = watched(bytes, 3, &Typed::default()).collect().await;
            assert_eq!(
                read.expect_err("refused").code(),
                tonic::Code::InvalidArgument
            );
        }
    }

    #[test]
    fn the_first_message_is_shown_without_its_input() {
        let (shown, text) = without_input(&message(b"secret")).expect("an input");
        let shown = v1::StreamConsoleRequest::decode(shown).expect("a message");
        assert_eq!((shown.guest.as_str(), shown.input.len()), ("web-1", 0));
        assert!(text.starts_with("typed 6 bytes, sha256 "), "{text}");
        assert!(without_input(&message(b"")).is_none());
    }
}
