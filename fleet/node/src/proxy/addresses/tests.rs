// SPDX-License-Identifier: Apache-2.0

use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt};

use super::*;
use patchbay_proto::methods::METHODS;

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
        // A digest, a user-space address, an error code and a short number.
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
        let signed = number.cast_signed();
        let zigzag = ((signed << 1) ^ (signed >> 63)).cast_unsigned();
        let hidden = hide_in_varint(&Kind::Sint64, zigzag) == 0;
        assert_eq!(hide_in_varint(&Kind::Int64, number) == 0, hidden);
        hidden
    };
    for address in [ADDRESS, 0xffff_8880_1234_5678, 0xff11_0001_0203_0405] {
        assert!(of(address) && is_kernel_address(address), "{address:#x}");
    }
    for number in [-1_i64, -4096, -1_000_000, i64::MIN, i64::MAX] {
        assert!(!of(number.cast_unsigned()), "{number}");
    }
}

/// Checks that fields that only a newer monitor describes are removed.
#[test]
fn unknown_fields_are_not_passed_on() {
    let pool = pool();
    let output = pool.get_message_by_name("patchbay.v1.GetStaticKeyResponse");
    // Field 1 is the key. The fields 1000 of the key and of the answer are unknown and contain the
    // address.
    let unknown = [&[0xc1, 0x3e][..], &ADDRESS.to_le_bytes()].concat();
    let mut key = v1::StaticKey {
        name: "k".to_owned(),
        ..Default::default()
    }
    .encode_to_vec();
    key.extend_from_slice(&unknown);
    let length = u8::try_from(key.len()).expect("short");
    let bytes = [&[0x0a, length][..], &key, &unknown].concat();
    let mut text = vec![];
    let hidden = hide_in_message(&output.expect("described"), &bytes, &mut text, MAX_DEPTH);
    hidden.expect("a message");
    assert!(!text.windows(8).any(|word| word == ADDRESS.to_le_bytes()));
    let read = v1::GetStaticKeyResponse::decode(&*text).expect("a message");
    assert_eq!(read.key.expect("a key").name, "k");
}

/// Checks that event values that are not addresses, of every kind, are forwarded unchanged.
#[test]
fn what_is_no_address_is_passed_on_as_it_is() {
    use v1::trace_field::Value;
    let field = |value| v1::TraceField {
        name: "f".to_owned(),
        value: Some(value),
    };
    let message = |values: Vec<Value>| v1::StreamTracepointEventsResponse {
        events: vec![v1::TraceEvent {
            pid: -1,
            time: Some(prost_types::Timestamp {
                seconds: -5,
                nanos: 7,
            }),
            fields: values.into_iter().map(field).collect(),
            ..Default::default()
        }],
        names: vec!["a".to_owned(), String::new()],
        ..Default::default()
    };
    let output = pool().get_message_by_name("patchbay.v1.StreamTracepointEventsResponse");
    let output = output.expect("described");
    let hidden = |values| {
        let (bytes, mut found) = (message(values).encode_to_vec(), vec![]);
        hide_in_message(&output, &bytes, &mut found, MAX_DEPTH).expect("a message");
        v1::StreamTracepointEventsResponse::decode(&*found).expect("a message")
    };
    let others = vec![
        Value::Signed(-22),
        Value::Unsigned(u64::MAX),
        Value::Hexadecimal(0x7fff_0000_1234),
        Value::Text("wörld".to_owned()),
        Value::Raw(vec![1, 2, 3]),
    ];
    assert_eq!(hidden(others.clone()), message(others));
    let addresses = vec![
        Value::Signed(ADDRESS.cast_signed()),
        Value::Unsigned(ADDRESS),
        Value::Hexadecimal(ADDRESS),
        Value::Text(format!("{ADDRESS:x}")),
        Value::Raw(ADDRESS.to_le_bytes().to_vec()),
    ];
    let zeros = vec![
        Value::Signed(0),
        Value::Unsigned(0),
        Value::Hexadecimal(0),
        Value::Text("x".repeat(16)),
        Value::Raw(vec![0; 8]),
    ];
    assert_eq!(hidden(addresses), message(zeros));
}

#[test]
fn messages_in_messages_without_end_are_refused() {
    let output = pool().get_message_by_name("patchbay.v1.StaticKey");
    let output = output.expect("described");
    let refused = hide_in_message(&output, b"\x0a\x01k", &mut vec![], 0);
    assert_eq!(refused, Err(Unreadable));
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

/// Checks that addresses are hidden wherever the frames divide the messages.
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
