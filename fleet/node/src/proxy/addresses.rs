// SPDX-License-Identifier: Apache-2.0
//! Hides addresses of the guest's kernel from callers who are not operators of the guest.
//!
//! A single address reveals where KASLR has placed the kernel, which helps an attacker of the
//! guest. Sites, keys, values of events, lines of the kernel's log and errors contain addresses, so
//! every field of every answer is checked, whatever the method.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Response};
use http_body::Frame;
use patchbay_access::addresses::{
    hide_in_string, hide_in_text, is_kernel_address, is_signed_kernel_address,
};
use patchbay_proto::v1;
use prost_reflect::{DescriptorPool, Kind, MessageDescriptor};
use tonic::Status;
use tonic::body::Body;

use super::frame::{MAX_ANSWER_BYTES, PREFIX, framed};
use patchbay_proto::methods::Method;

/// Zeroes every address of 8 bytes in a raw value, at any offset, and hides addresses in its text.
fn hide_in_bytes(bytes: &[u8]) -> Bytes {
    let mut hidden = bytes.to_vec();
    // The search uses the original bytes, because the words overlap.
    for (start, word) in bytes.windows(8).enumerate() {
        let number = word
            .iter()
            .rev()
            .fold(0, |all, byte| all << 8 | u64::from(*byte));
        if is_kernel_address(number) {
            hidden[start..start + 8].fill(0);
        }
    }
    hide_in_text(&mut hidden);
    hidden.into()
}

/// The error for an answer that cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unreadable;

/// The maximum depth of nested messages.
const MAX_DEPTH: usize = 32;

/// Appends the encoded message without its addresses to `hidden`. The function works on the
/// encoding, because decoded values can be fifty times as large as the message, whose size the
/// monitor chooses.
///
/// Fields of a newer monitor that `described` does not contain cannot be checked and are left out.
fn hide_in_message(
    described: &MessageDescriptor,
    mut bytes: &[u8],
    hidden: &mut Vec<u8>,
    depth: usize,
) -> Result<(), Unreadable> {
    if depth == 0 {
        return Err(Unreadable);
    }
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let number = u32::try_from(key >> 3).map_err(|_| Unreadable)?;
        let kind = described.get_field(number).map(|field| field.kind());
        match (key & 7, kind) {
            (VARINT, kind) => {
                let number = varint(&mut bytes)?;
                if let Some(kind) = kind {
                    encode_varint(key, hidden);
                    encode_varint(hide_in_varint(&kind, number), hidden);
                }
            }
            (FIXED_64, kind) => {
                let word = take(&mut bytes, 8)?;
                if let Some(kind) = kind {
                    encode_varint(key, hidden);
                    hide_in_words(&kind, word, hidden);
                }
            }
            (FIXED_32, kind) => {
                let word = take(&mut bytes, 4)?;
                if kind.is_some() {
                    encode_varint(key, hidden);
                    hidden.extend_from_slice(word);
                }
            }
            (DELIMITED, kind) => {
                let length = varint(&mut bytes)?;
                let value = take(&mut bytes, usize::try_from(length).map_err(|_| Unreadable)?)?;
                if let Some(kind) = kind {
                    let mut found = Vec::with_capacity(value.len());
                    hide_in_delimited(&kind, value, &mut found, depth)?;
                    encode_varint(key, hidden);
                    encode_varint(found.len() as u64, hidden);
                    hidden.extend_from_slice(&found);
                }
            }
            _ => return Err(Unreadable),
        }
    }
    Ok(())
}

/// Hides the addresses in a length-delimited field, which is text, bytes, a message or packed
/// numbers.
fn hide_in_delimited(
    kind: &Kind,
    mut value: &[u8],
    hidden: &mut Vec<u8>,
    depth: usize,
) -> Result<(), Unreadable> {
    match kind {
        Kind::String => {
            hidden.extend_from_slice(value);
            hide_in_text(hidden);
        }
        Kind::Bytes => hidden.extend_from_slice(&hide_in_bytes(value)),
        Kind::Message(described) => hide_in_message(described, value, hidden, depth - 1)?,
        Kind::Fixed64 | Kind::Sfixed64 | Kind::Double => hide_in_words(kind, value, hidden),
        Kind::Fixed32 | Kind::Sfixed32 | Kind::Float => hidden.extend_from_slice(value),
        _ => {
            while !value.is_empty() {
                let number = varint(&mut value)?;
                encode_varint(hide_in_varint(kind, number), hidden);
            }
        }
    }
    Ok(())
}

fn hide_in_varint(kind: &Kind, number: u64) -> u64 {
    let is_address = match kind {
        Kind::Uint64 => is_kernel_address(number),
        Kind::Int64 => is_signed_kernel_address(number.cast_signed()),
        Kind::Sint64 => {
            let sign = (number & 1).wrapping_neg();
            is_signed_kernel_address(((number >> 1) ^ sign).cast_signed())
        }
        _ => false,
    };
    if is_address { 0 } else { number }
}

fn hide_in_words(kind: &Kind, words: &[u8], hidden: &mut Vec<u8>) {
    for word in words.chunks(8) {
        let number = <[u8; 8]>::try_from(word).map_or(0, u64::from_le_bytes);
        let is_address = !matches!(kind, Kind::Double) && is_kernel_address(number);
        hidden.extend_from_slice(if is_address { &[0; 8] } else { word });
    }
}

// These are the wire types of the protobuf encoding.
pub(super) const VARINT: u64 = 0;
pub(super) const FIXED_64: u64 = 1;
pub(super) const DELIMITED: u64 = 2;
pub(super) const FIXED_32: u64 = 5;

fn varint(bytes: &mut &[u8]) -> Result<u64, Unreadable> {
    prost::encoding::decode_varint(bytes).map_err(|_| Unreadable)
}

fn encode_varint(number: u64, to: &mut Vec<u8>) {
    prost::encoding::encode_varint(number, to);
}

fn take<'b>(bytes: &mut &'b [u8], length: usize) -> Result<&'b [u8], Unreadable> {
    let (taken, rest) = bytes.split_at_checked(length).ok_or(Unreadable)?;
    *bytes = rest;
    Ok(taken)
}

/// Hides addresses in the status of a guest.
pub fn hide_in_status(status: &mut v1::GuestStatus) {
    hide_in_string(&mut status.registration_error);
}

/// Returns a copy of the error without addresses in its message and its details.
fn hide_in_error(error: &Status) -> Status {
    let mut message = error.message().to_owned();
    hide_in_string(&mut message);
    let mut details = error.details().to_vec();
    // The text keeps its length, so the lengths in the encoded details remain correct.
    hide_in_text(&mut details);
    Status::with_details(error.code(), message, details.into())
}

fn hide_in_headers(headers: &mut HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => {
            for name in ["grpc-status", "grpc-message", "grpc-status-details-bin"] {
                headers.remove(name);
            }
            hide_in_error(&status).add_header(headers)
        }
        _ => Ok(()),
    }
}

/// Returns the answer without addresses.
///
/// # Errors
/// The interface does not describe the method.
pub fn hide(
    answer: Response<Body>,
    method: &Method,
    descriptors: &DescriptorPool,
) -> Result<Response<Body>, Status> {
    let service = format!("patchbay.v1.{}", method.service);
    let found = descriptors.get_service_by_name(&service).and_then(|found| {
        let mut methods = found.methods();
        methods.find(|found| found.name() == method.name)
    });
    let Some(found) = found else {
        return Err(Status::internal(format!(
            "{} is not described",
            method.path
        )));
    };
    let (mut parts, body) = answer.into_parts();
    hide_in_headers(&mut parts.headers)?;
    if http_body::Body::is_end_stream(&body) {
        return Ok(Response::from_parts(parts, body));
    }
    // The messages may become shorter.
    parts.headers.remove(CONTENT_LENGTH);
    let hidden = Hidden {
        body,
        output: found.output(),
        read: BytesMut::new(),
    };
    Ok(Response::from_parts(parts, Body::new(hidden)))
}

/// A body whose messages lose their addresses.
struct Hidden {
    body: Body,
    output: MessageDescriptor,
    /// The incomplete message so far.
    read: BytesMut,
}

impl Hidden {
    /// Removes the messages that have arrived completely from the buffer, and returns them without
    /// their addresses.
    fn messages(&mut self) -> Result<Bytes, Status> {
        let mut hidden = BytesMut::new();
        while let Some(prefix) = self.read.get(..PREFIX) {
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if prefix[0] != 0 || length > MAX_ANSWER_BYTES {
                return Err(Status::internal(
                    "the monitor's answer is compressed or too long, so addresses in it cannot be hidden",
                ));
            }
            if self.read.len() < PREFIX + length {
                break;
            }
            self.read.advance(PREFIX);
            let message = self.read.split_to(length);
            let mut found = Vec::with_capacity(message.len());
            let looked = hide_in_message(&self.output, &message, &mut found, MAX_DEPTH);
            looked.map_err(|Unreadable| Status::internal("the monitor's answer cannot be read"))?;
            hidden.extend_from_slice(&framed(&found));
        }
        Ok(hidden.freeze())
    }
}

impl http_body::Body for Hidden {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                other => return other,
            };
            match frame.into_data() {
                Ok(data) => {
                    self.read.extend_from_slice(&data);
                    match self.messages() {
                        Ok(hidden) if hidden.is_empty() => {}
                        hidden => return Poll::Ready(Some(hidden.map(Frame::data))),
                    }
                }
                Err(frame) => {
                    let Ok(mut trailers) = frame.into_trailers() else {
                        continue;
                    };
                    let hidden = hide_in_headers(&mut trailers);
                    return Poll::Ready(Some(hidden.map(|()| Frame::trailers(trailers))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
