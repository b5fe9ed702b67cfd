// SPDX-License-Identifier: Apache-2.0
//! Reads the guest and the flags of a request before it is decoded.
//!
//! The wire format allows a field to occur twice, and the last one counts. A request that names its
//! guest twice is refused, and a flag is set if any of its occurrences sets it. Therefore, no
//! parser sees fields that the policy did not check.

use tonic::Status;

use super::status::invalid;

/// The maximum number of fields of one message.
const MAX_FIELDS: usize = 70_000;
/// The number of the field with the guest, which is the same in every request.
const GUEST: u32 = 1;

/// A field of a message.
#[derive(Debug, PartialEq, Eq)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

struct Fields<'a>(&'a [u8]);

#[derive(Debug)]
struct Malformed;

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0;
        for (index, byte) in self.0.iter().take(10).enumerate() {
            let bits = u64::from(byte & 0x7f);
            if index == 9 && bits > 1 {
                return Err(Malformed);
            }
            value |= bits << (7 * index);
            if byte & 0x80 == 0 {
                self.0 = &self.0[index + 1..];
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], Malformed> {
        let length = usize::try_from(length).map_err(|_| Malformed)?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, Malformed> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).map_err(|_| Malformed)?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            // The other wire types are groups, which proto3 does not have, or are undefined.
            _ => return Err(Malformed),
        };
        match number {
            0 => Err(Malformed),
            number => Ok(Some((number, value))),
        }
    }
}

fn malformed(_: Malformed) -> Status {
    invalid(
        "guest",
        "the request is no protobuf message; it cannot be read",
    )
}

/// Returns the name in field 1; empty if there is none.
pub fn guest(message: &[u8]) -> Result<&str, Status> {
    let mut fields = Fields(message);
    let mut found = None;
    while let Some((number, value)) = fields.next().map_err(malformed)? {
        if number != GUEST {
            continue;
        }
        let Value::Bytes(bytes) = value else {
            return Err(invalid("guest", "guest is no string"));
        };
        let name = std::str::from_utf8(bytes).map_err(|_| invalid("guest", "guest is no UTF-8"))?;
        if found.replace(name).is_some() {
            return Err(invalid("guest", "guest comes twice; name one"));
        }
    }
    let name = found.unwrap_or_default();
    if name.len() > 256 {
        return Err(invalid("guest", "guest is longer than 256 bytes"));
    }
    Ok(name)
}

/// Returns whether any occurrence of the boolean field with that number is set.
pub fn is_set(message: &[u8], wanted: u32) -> Result<bool, Status> {
    let mut fields = Fields(message);
    while let Some((number, value)) = fields.next().map_err(malformed)? {
        if number == wanted && value != Value::Number(0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Refuses a message that would take many times its size when decoded.
pub fn weigh(message: &[u8]) -> Result<(), Status> {
    let mut fields = Fields(message);
    let mut count = 0;
    while fields.next().map_err(malformed)?.is_some() {
        count += 1;
        if count > MAX_FIELDS {
            return Err(invalid(
                "patterns",
                "the request has too many fields; split it",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use patchbay_proto::v1;
    use prost::Message;
    use tonic::Code;

    use super::*;

    fn update() -> v1::UpdateStaticKeysRequest {
        v1::UpdateStaticKeysRequest {
            guest: "web-1".to_owned(),
            updates: vec![v1::KeyUpdate {
                name: "net_a".to_owned(),
                ..Default::default()
            }],
            force: true,
            reason: "\n\x05db-1".to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn the_guest_is_read_wherever_it_stands() {
        let message = update().encode_to_vec();
        assert_eq!(guest(&message).expect("named"), "web-1");
        let name = &message[..7];
        let moved = [&message[7..], name].concat();
        assert_eq!(guest(&moved).expect("named"), "web-1");
        assert_eq!(guest(&message[7..]).expect("unnamed"), "");
        assert_eq!(guest(b"").expect("unnamed"), "");
    }

    #[test]
    fn a_guest_that_could_be_read_in_two_ways_is_refused() {
        let first = v1::DescribeGuestRequest {
            guest: "web-1".to_owned(),
            ..v1::DescribeGuestRequest::default()
        };
        let second = v1::DescribeGuestRequest {
            guest: "db-1".to_owned(),
            ..v1::DescribeGuestRequest::default()
        };
        let twice = [first.encode_to_vec(), second.encode_to_vec()].concat();
        let long = v1::DescribeGuestRequest {
            guest: "x".repeat(257),
            ..v1::DescribeGuestRequest::default()
        };
        for bytes in [
            &twice[..],
            &long.encode_to_vec(),
            b"\x08\x01",                                         // a number
            b"\x0a\x02\xff\xfe",                                 // no UTF-8
            b"\x0a\x05ab",                                       // cut short
            b"\x0b\x0c",                                         // a group
            b"\x02\x00",                                         // field 0
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", // a length of 11 bytes
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",         // a key beyond 64 bits
        ] {
            let status = guest(bytes).expect_err("refused");
            assert_eq!(status.code(), Code::InvalidArgument, "{bytes:?}");
        }
    }

    #[test]
    fn a_flag_is_set_if_any_occurrence_sets_it() {
        let message = update().encode_to_vec();
        assert!(is_set(&message, 6).expect("read"));
        assert!(!is_set(&message, 5).expect("read"));
        let unset_later = [&message[..], b"\x30\x00"].concat();
        assert!(is_set(&unset_later, 6).expect("read"));
        assert!(is_set(b"\x30\x80\x80\x01", 6).expect("read"));
        assert!(!is_set(b"\x30\x00", 6).expect("read"));
    }

    #[test]
    fn a_small_message_cannot_become_a_large_one() {
        let patterns = |count: usize| b"\x12\x00".repeat(count);
        assert!(weigh(&patterns(MAX_FIELDS)).is_ok());
        assert!(weigh(&patterns(MAX_FIELDS + 1)).is_err());
        assert!(weigh(b"\x0b").is_err());
    }
}
