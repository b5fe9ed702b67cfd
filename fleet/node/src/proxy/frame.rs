// SPDX-License-Identifier: Apache-2.0
//! Reads the first message of a call as bytes, and forwards the others.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;

use super::status;

/// The maximum length in bytes of a client's message.
pub const MAX_REQUEST_BYTES: usize = 32 << 20;
/// The maximum length in bytes of a monitor's answer that is buffered.
pub const MAX_ANSWER_BYTES: usize = 4 << 20;
/// The length in bytes of the gRPC prefix of each message, which is a flag and a 32-bit length.
pub const PREFIX: usize = 5;
/// The maximum size of all clients' first messages that are held at the same time, in KiB.
const MAX_HELD_KIB: usize = 256 << 10;

/// The memory budget for first messages.
#[derive(Clone)]
pub struct Held(Arc<Semaphore>);

impl Default for Held {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_HELD_KIB)))
    }
}

/// The first message of a call, and the rest of the body.
pub struct First {
    /// The message without its prefix.
    pub message: Bytes,
    /// The further messages.
    pub rest: Rest,
    /// The permit for the message's memory in [`Held`].
    pub permit: Option<OwnedSemaphorePermit>,
}

/// The bytes that arrived together with the first message, and the body from which they came.
pub struct Rest {
    ahead: Bytes,
    body: Body,
}

/// Reads the first message of a call.
///
/// INVALID_ARGUMENT for a malformed message, UNIMPLEMENTED for a compressed one. RESOURCE_EXHAUSTED
/// for a message that is too long, or while too many messages are held.
pub async fn first_message(mut body: Body, held: &Held) -> Result<First, Status> {
    let mut read = BytesMut::new();
    let mut wanted = PREFIX;
    let mut permit = None;
    loop {
        if read.len() >= PREFIX && wanted == PREFIX {
            let length = length(&read[..PREFIX])?;
            wanted = PREFIX + length;
            let kib = u32::try_from(length >> 10).unwrap_or(u32::MAX);
            if kib > 0 {
                let found = Arc::clone(&held.0).try_acquire_many_owned(kib);
                permit = Some(found.map_err(|_| {
                    status::exhausted(
                        "QUEUE_FULL",
                        "too many large requests are in progress; try again later",
                    )
                })?);
            }
        }
        if read.len() >= wanted && read.len() >= PREFIX {
            break;
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    read.extend_from_slice(&data);
                }
            }
            Some(Err(error)) => return Err(error),
            None => {
                return Err(status::invalid(
                    "guest",
                    "the call ended before its first message; send one",
                ));
            }
        }
    }
    let mut message = read.freeze();
    let ahead = message.split_off(wanted);
    message.advance(PREFIX);
    Ok(First {
        message,
        rest: Rest { ahead, body },
        permit,
    })
}

fn length(prefix: &[u8]) -> Result<usize, Status> {
    if prefix[0] != 0 {
        let message =
            "the request is compressed, which this service does not know; send it as it is";
        return Err(Status::unimplemented(message));
    }
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    match usize::try_from(length) {
        Ok(length) if length <= MAX_REQUEST_BYTES => Ok(length),
        _ => Err(status::exhausted(
            "INVALID_ARGUMENT",
            &format!(
                "a message of {length} bytes is longer than {MAX_REQUEST_BYTES}; split the request"
            ),
        )),
    }
}

/// Returns a message with its prefix.
#[must_use]
pub fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(PREFIX + message.len());
    bytes.put_u8(0);
    // Messages are at most `MAX_REQUEST_BYTES` long, so the length fits in 32 bits.
    bytes.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    bytes.put_slice(message);
    bytes.freeze()
}

/// Returns the message of a unary answer; `None` if there is not exactly one message, or if the
/// message is compressed.
#[must_use]
pub fn unframed(body: &Bytes) -> Option<Bytes> {
    let prefix = body.get(..PREFIX)?;
    let length = length(prefix).ok()?;
    (body.len() == PREFIX + length).then(|| body.slice(PREFIX..))
}

impl Rest {
    /// Returns a body of `message` and all further messages.
    #[must_use]
    pub fn after(mut self, message: &[u8]) -> Body {
        let mut bytes = BytesMut::from(framed(message).as_ref());
        bytes.extend_from_slice(&self.ahead);
        self.ahead = bytes.freeze();
        Body::new(self)
    }
}

impl http_body::Body for Rest {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.ahead.is_empty() {
            let ahead = std::mem::take(&mut self.ahead);
            return Poll::Ready(Some(Ok(Frame::data(ahead))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{Full, StreamBody};
    use tonic::Code;

    use super::*;

    fn body(bytes: Vec<u8>) -> Body {
        Body::new(Full::new(Bytes::from(bytes)))
    }

    async fn all(body: Body) -> Vec<u8> {
        body.collect().await.expect("whole").to_bytes().to_vec()
    }

    #[tokio::test]
    async fn the_first_message_is_cut_out_wherever_frames_end() {
        let bytes = [framed(b"first"), framed(b""), framed(b"third")].concat();
        for size in 1..=bytes.len() {
            let frames: Vec<_> = bytes
                .chunks(size)
                .map(|chunk| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(chunk))))
                .collect();
            let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
            let first = first_message(body, &Held::default()).await.expect("whole");
            assert_eq!(first.message, "first");
            assert_eq!(
                all(first.rest.after(b"FIRST")).await,
                [framed(b"FIRST"), framed(b""), framed(b"third")].concat()
            );
        }
        let empty = first_message(body(framed(b"").to_vec()), &Held::default()).await;
        assert!(empty.expect("an empty message").message.is_empty());
    }

    #[tokio::test]
    async fn bad_first_messages_are_refused() {
        let length = u32::try_from(MAX_REQUEST_BYTES + 1)
            .expect("small")
            .to_be_bytes();
        let too_long = [&[0][..], &length].concat();
        for (bytes, code) in [
            (vec![], Code::InvalidArgument),
            (vec![0, 0, 0], Code::InvalidArgument),
            (vec![0, 0, 0, 0, 9, 1], Code::InvalidArgument),
            (vec![1, 0, 0, 0, 0], Code::Unimplemented),
            (vec![7, 0, 0, 0, 0], Code::Unimplemented),
            (too_long, Code::ResourceExhausted),
        ] {
            let result = first_message(body(bytes.clone()), &Held::default()).await;
            let status = result.err().unwrap_or_else(|| panic!("{bytes:?}"));
            assert_eq!(status.code(), code, "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn large_messages_share_a_budget() {
        let held = Held(Arc::new(Semaphore::new(3)));
        let message = framed(&[0; 2048]).to_vec();
        let first = first_message(body(message.clone()), &held).await;
        let first = first.unwrap_or_else(|_| panic!("room"));
        let second = first_message(body(message.clone()), &held).await;
        let status = second.err().expect("no room");
        assert_eq!(status.code(), Code::ResourceExhausted);
        drop(first);
        assert!(first_message(body(message), &held).await.is_ok());
    }

    #[test]
    fn only_a_whole_message_is_unframed() {
        assert_eq!(unframed(&framed(b"abc")).expect("whole"), "abc");
        for bytes in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x02a", b"\x01\0\0\0\0"] {
            assert!(unframed(&Bytes::copy_from_slice(bytes)).is_none());
        }
    }
}
