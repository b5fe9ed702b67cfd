// SPDX-License-Identifier: Apache-2.0
//! Hides addresses of the guest's kernel from callers who are not operators of the guest.
//!
//! One address tells where KASLR has put the kernel, and whoever attacks the guest needs that. Addresses
//! are in sites and keys, in values of events, in lines of the kernel's log and in errors; so every field
//! of every answer is looked at, whatever the method.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Response};
use http_body::Frame;
use patchbay_proto::v1;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, Value};
use tonic::Status;
use tonic::body::Body;

use super::frame::{MAX_ANSWER_BYTES, framed};
use crate::methods::Method;

/// A flag and a length come before each message.
const PREFIX: usize = 5;
/// Digits of an address of the upper half, which is the kernel's.
const DIGITS: usize = 16;

/// Whether a number is an address of the kernel, with five levels of page tables too. The last page is left
/// out: small negative numbers are there.
fn is_kernel_address(number: u64) -> bool {
    (0xff00_0000_0000_0000..0xffff_ffff_ffff_f000).contains(&number)
}

/// Like [`is_kernel_address`]. A difference is a negative number more often, and Linux maps nothing in the last
/// 2 MiB.
fn is_signed_kernel_address(number: i64) -> bool {
    let number = number.cast_unsigned();
    is_kernel_address(number) && number < 0xffff_ffff_ffe0_0000
}

/// Writes over every address that stands as a hexadecimal number in text, and over the instructions that an
/// oops shows: their operands are addresses. The length stays the same.
pub fn hide_in_text(text: &mut [u8]) {
    hide_instructions(text);
    let mut start = 0;
    while start < text.len() {
        let run = text[start..]
            .iter()
            .take_while(|byte| byte.is_ascii_hexdigit());
        let length = run.count();
        // After "0x", the zero is part of no run: x is no digit.
        if length == DIGITS {
            let digits = &mut text[start..start + DIGITS];
            let number = std::str::from_utf8(digits).map(|text| u64::from_str_radix(text, 16));
            if matches!(number, Ok(Ok(number)) if is_kernel_address(number)) {
                digits.fill(b'x');
            }
        }
        start += length.max(1);
    }
}

/// Writes over the digits after each "Code:" of a line.
fn hide_instructions(text: &mut [u8]) {
    const LABEL: &[u8] = b"Code: ";
    for line in text.split_mut(|byte| *byte == b'\n') {
        let Some(at) = line.windows(LABEL.len()).position(|word| word == LABEL) else {
            continue;
        };
        for word in line[at + LABEL.len()..].split_mut(|byte| b" <>".contains(byte)) {
            if word.len() == 2 && word.iter().all(u8::is_ascii_hexdigit) {
                word.fill(b'x');
            }
        }
    }
}

/// Like [`hide_in_text`], of a string.
fn hide_in_string(text: &mut String) {
    let mut bytes = std::mem::take(text).into_bytes();
    hide_in_text(&mut bytes);
    *text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
}

/// Zeroes every address that stands as 8 bytes in a raw value, wherever it begins, and hides those in
/// text.
fn hide_in_bytes(bytes: &[u8]) -> Bytes {
    let mut hidden = bytes.to_vec();
    // Found in the original: words overlap.
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

fn hide_in_message(message: &mut DynamicMessage) {
    // Of a newer monitor. They cannot be looked at, so they are not passed on.
    message.take_unknown_fields().for_each(drop);
    for (_, value) in message.fields_mut() {
        hide_in_value(value);
    }
}

fn hide_in_value(value: &mut Value) {
    match value {
        Value::U64(number) if is_kernel_address(*number) => *number = 0,
        Value::I64(number) if is_signed_kernel_address(*number) => *number = 0,
        Value::String(text) => hide_in_string(text),
        Value::Bytes(bytes) => *bytes = hide_in_bytes(bytes),
        Value::Message(message) => hide_in_message(message),
        Value::List(values) => values.iter_mut().for_each(hide_in_value),
        Value::Map(values) => values.values_mut().for_each(hide_in_value),
        _ => {}
    }
}

/// The status of a guest without addresses.
pub fn hide_in_status(status: &mut v1::GuestStatus) {
    hide_in_string(&mut status.registration_error);
}

/// An error without addresses, in its message and its details.
fn hide_in_error(error: &Status) -> Status {
    let mut message = error.message().to_owned();
    hide_in_string(&mut message);
    let mut details = error.details().to_vec();
    // Text of the same length, so that the lengths in the encoded details stay right.
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

/// The answer without addresses.
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
    // The messages may be shorter afterwards.
    parts.headers.remove(CONTENT_LENGTH);
    let hidden = Hidden {
        body,
        output: found.output(),
        read: BytesMut::new(),
    };
    Ok(Response::from_parts(parts, Body::new(hidden)))
}

/// A body whose messages have no addresses.
struct Hidden {
    body: Body,
    output: MessageDescriptor,
    /// The beginning of a message.
    read: BytesMut,
}

impl Hidden {
    /// The messages that are whole by now.
    fn messages(&mut self) -> Result<Bytes, Status> {
        let mut hidden = BytesMut::new();
        while let Some(prefix) = self.read.get(..PREFIX) {
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if prefix[0] != 0 || length > MAX_ANSWER_BYTES {
                return Err(Status::internal(
                    "the monitor's answer is compressed or too long to be looked at",
                ));
            }
            if self.read.len() < PREFIX + length {
                break;
            }
            self.read.advance(PREFIX);
            let message = self.read.split_to(length);
            let message = DynamicMessage::decode(self.output.clone(), message);
            let mut message = message.map_err(|error| {
                Status::internal(format!("the monitor's answer cannot be read: {error}"))
            })?;
            hide_in_message(&mut message);
            hidden.extend_from_slice(&framed(&message.encode_to_vec()));
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
mod tests {
    use http_body_util::{BodyExt, StreamBody};
    use tonic::Code;
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;
    use crate::methods::METHODS;

    const ADDRESS: u64 = 0xffff_ffff_8123_4567;

    fn hidden(text: &str) -> String {
        let mut text = text.to_owned();
        hide_in_string(&mut text);
        text
    }

    #[test]
    fn addresses_in_text_are_written_over() {
        assert_eq!(
            hidden("at 0xffffffff81234567: no"),
            "at 0xxxxxxxxxxxxxxxxx: no"
        );
        assert_eq!(hidden("FFFF888012345678"), "x".repeat(16));
        assert_eq!(hidden("ffff800000000000ü"), format!("{}ü", "x".repeat(16)));
        for other in [
            // A digest, a user's address, an error code, a short number.
            "ffffffff81234567ffffffff81234567",
            "0x00007f0012345678",
            "ffffffffffffffff",
            "ffffffff8123456",
            "",
        ] {
            assert_eq!(hidden(other), other);
        }
    }

    #[test]
    fn instructions_of_an_oops_are_written_over() {
        assert_eq!(
            hidden("RIP: f+0x1\nCode: 48 c7 c7 67 45 23 81 <0f> 0b, bad\nCS: 10"),
            "RIP: f+0x1\nCode: xx xx xx xx xx xx xx <xx> 0b, bad\nCS: 10"
        );
        assert_eq!(hidden("Code: "), "Code: ");
    }

    #[test]
    fn signed_numbers_and_five_levels_of_page_tables_are_known() {
        let of = |number: u64| {
            let mut value = Value::I64(number.cast_signed());
            hide_in_value(&mut value);
            value == Value::I64(0)
        };
        for address in [ADDRESS, 0xffff_8880_1234_5678, 0xff11_0001_0203_0405] {
            assert!(of(address) && is_kernel_address(address), "{address:#x}");
        }
        for number in [-1_i64, -4096, -1_000_000, i64::MIN, i64::MAX] {
            assert!(!of(number.cast_unsigned()), "{number}");
        }
    }

    /// A newer monitor has fields that are not described here.
    #[test]
    fn unknown_fields_are_not_passed_on() {
        let pool = pool();
        let output = pool.get_message_by_name("patchbay.v1.GetStaticKeyResponse");
        // Field 1 is the key; 1000 of it and of the answer are not known, and have the address.
        let unknown = [&[0xc1, 0x3e][..], &ADDRESS.to_le_bytes()].concat();
        let mut key = v1::StaticKey {
            name: "k".to_owned(),
            ..Default::default()
        }
        .encode_to_vec();
        key.extend_from_slice(&unknown);
        let length = u8::try_from(key.len()).expect("short");
        let bytes = [&[0x0a, length][..], &key, &unknown].concat();
        let message = DynamicMessage::decode(output.expect("described"), &*bytes);
        let mut message = message.expect("a message");
        hide_in_message(&mut message);
        let text = message.encode_to_vec();
        assert!(!text.windows(8).any(|word| word == ADDRESS.to_le_bytes()));
        let read = v1::GetStaticKeyResponse::decode(&*text).expect("a message");
        assert_eq!(read.key.expect("a key").name, "k");
    }

    #[test]
    fn addresses_in_raw_values_are_zeroed() {
        for start in 0..9 {
            let mut raw = vec![7; 24];
            raw[start..start + 8].copy_from_slice(&ADDRESS.to_le_bytes());
            let found = hide_in_bytes(&raw);
            assert_eq!(found[start..start + 8], [0; 8]);
            assert!(found[start + 8..].iter().all(|byte| *byte == 7));
        }
        assert_eq!(hide_in_bytes(&[0xff; 7]), vec![0xff; 7]);
    }

    fn method(name: &str) -> &'static Method {
        METHODS
            .iter()
            .find(|method| method.name == name)
            .expect(name)
    }

    fn pool() -> DescriptorPool {
        DescriptorPool::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded")
    }

    /// Frames may end anywhere.
    #[tokio::test]
    async fn keys_sites_and_events_lose_their_addresses() {
        let key = v1::StaticKey {
            name: "k".to_owned(),
            count: 3,
            address: ADDRESS,
            sites: vec![v1::Site {
                address: ADDRESS,
                ..Default::default()
            }],
            quarantine: Some(v1::Quarantine {
                message: format!("the site {ADDRESS:#x} holds other bytes"),
                ..Default::default()
            }),
            ..Default::default()
        };
        let message = v1::GetStaticKeyResponse {
            key: Some(key),
            ..Default::default()
        };
        let bytes = [framed(&message.encode_to_vec()), framed(b"")].concat();
        for size in [1, 7, bytes.len()] {
            let mut trailers = HeaderMap::new();
            Status::new(Code::Ok, "")
                .add_header(&mut trailers)
                .expect("added");
            let data = bytes
                .chunks(size)
                .map(|chunk| Frame::data(Bytes::copy_from_slice(chunk)));
            let frames = data.chain([Frame::trailers(trailers)]).map(Ok::<_, Status>);
            let frames: Vec<_> = frames.collect();
            let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
            let answer = hide(Response::new(body), method("GetStaticKey"), &pool());
            let answer = answer.expect("described").into_body().collect().await;
            let answer = answer.expect("whole");
            assert!(answer.trailers().is_some());
            let mut read = answer.to_bytes();
            let length = read.len() - 2 * PREFIX;
            read.advance(PREFIX);
            let read = v1::GetStaticKeyResponse::decode(&read[..length]).expect("a message");
            let key = read.key.expect("a key");
            assert_eq!((key.name.as_str(), key.count, key.address), ("k", 3, 0));
            assert_eq!((key.sites.len(), key.sites[0].address), (1, 0));
            let message = key.quarantine.expect("kept").message;
            assert_eq!(
                message,
                format!("the site 0x{} holds other bytes", "x".repeat(16))
            );
        }
    }

    #[tokio::test]
    async fn errors_lose_their_addresses_and_keep_their_reasons() {
        let mut details = ErrorDetails::new();
        let metadata = [("why".to_owned(), format!("at {ADDRESS:x}"))];
        details.set_error_info("TABLE_REFUSED", "patchbay", metadata);
        let message = format!("the entry at {ADDRESS:#x} contradicts another");
        let error = Status::with_error_details(Code::FailedPrecondition, message, details);
        let answer = hide(error.into_http(), method("ListStaticKeys"), &pool());
        let answer = answer.expect("described");
        assert!(http_body::Body::is_end_stream(answer.body()));
        let status = Status::from_header_map(answer.headers()).expect("a status");
        let info = status.get_details_error_info().expect("a reason");
        assert_eq!(info.reason, "TABLE_REFUSED");
        let text = format!("{} {:?}", status.message(), info.metadata);
        assert!(
            !text.contains("ffffffff8") && text.contains("xxxx"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn what_cannot_be_looked_at_is_not_passed_on() {
        for bytes in [
            &b"\x01\0\0\0\x01a"[..],
            b"\0\xff\0\0\0",
            b"\0\0\0\0\x02\x0a\x7f",
        ] {
            let frames = [Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(bytes)))];
            let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
            let answer = hide(Response::new(body), method("ListStaticKeys"), &pool());
            let read = answer.expect("described").into_body().collect().await;
            assert_eq!(read.expect_err("refused").code(), Code::Internal);
        }
    }
}
