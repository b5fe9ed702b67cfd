// SPDX-License-Identifier: Apache-2.0
//! Counts the bytes of an answer and the records in it, for the audit log.
//!
//! The answer is not decoded, because it is forwarded as it arrives and frames end anywhere. Only
//! the fields of a message whose field number is that of the records are counted. After data that
//! cannot be parsed, only bytes are counted.

use bytes::Buf;

use super::addresses::{DELIMITED, FIXED_32, FIXED_64, VARINT};
use super::frame::PREFIX;

/// The number of the field with the records, in the answers of all methods that stream records.
const RECORDS: u64 = 1;
/// The maximum number of bits of a varint.
const MAX_BITS: u32 = 64;

/// The counts so far, and the place in the answer.
#[derive(Debug, Default)]
pub struct Received {
    bytes: u64,
    records: u64,
    /// The rest of the message in bytes.
    left: u64,
    part: Part,
}

/// The part of a message that comes next.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The prefix: the number of its bytes that were read, and the length in them.
    Prefix(usize, u32),
    /// The number and the type of a field.
    Key(Varint),
    /// A number as a value.
    Number(Varint),
    /// The length of a value, which is a record or another one.
    Length(Varint, bool),
    /// A value, of which this number of bytes is left.
    Value(u64),
    /// Something that is not understood.
    Unknown,
}

impl Default for Part {
    fn default() -> Self {
        Self::Prefix(0, 0)
    }
}

/// A varint that is read byte by byte.
#[derive(Clone, Copy, Debug, Default)]
struct Varint {
    value: u64,
    bits: u32,
}

impl Varint {
    /// Adds a byte. Returns the value after the last byte, and an error for a varint that is too
    /// long.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, ()> {
        if self.bits >= MAX_BITS {
            return Err(());
        }
        self.value |= u64::from(byte & 0x7f) << self.bits;
        self.bits += 7;
        Ok((byte & 0x80 == 0).then_some(self.value))
    }
}

impl Received {
    /// Counts the next bytes of the answer.
    pub fn count(&mut self, mut data: &[u8]) {
        self.bytes = self.bytes.saturating_add(data.len() as u64);
        while data.has_remaining() {
            if let Part::Value(rest) = self.part {
                let passed = rest.min(data.len() as u64);
                // `passed` is at most the length of the data.
                data.advance(usize::try_from(passed).unwrap_or(data.len()));
                self.left -= passed;
                self.part = self.after_value(rest - passed);
                continue;
            }
            let byte = data.get_u8();
            self.part = self.after(byte).unwrap_or(Part::Unknown);
        }
    }

    /// Formats the counts for the outcome of the call.
    pub fn text(&self) -> String {
        format!("{} records and {} bytes read", self.records, self.bytes)
    }

    fn after(&mut self, byte: u8) -> Result<Part, ()> {
        if !matches!(self.part, Part::Prefix(..) | Part::Unknown) {
            self.left = self.left.checked_sub(1).ok_or(())?;
        }
        match self.part {
            Part::Prefix(0, _) if byte != 0 => Err(()),
            Part::Prefix(read, length) => {
                let length = length << 8 | u32::from(byte);
                if read + 1 < PREFIX {
                    return Ok(Part::Prefix(read + 1, length));
                }
                self.left = length.into();
                Ok(self.after_value(0))
            }
            Part::Key(mut key) => match key.push(byte)? {
                None => Ok(Part::Key(key)),
                Some(key) => match key & 7 {
                    VARINT => Ok(Part::Number(Varint::default())),
                    FIXED_64 => self.value(8),
                    DELIMITED => Ok(Part::Length(Varint::default(), key >> 3 == RECORDS)),
                    FIXED_32 => self.value(4),
                    _ => Err(()),
                },
            },
            Part::Number(mut number) => match number.push(byte)? {
                None => Ok(Part::Number(number)),
                Some(_) => Ok(self.after_value(0)),
            },
            Part::Length(mut length, is_record) => match length.push(byte)? {
                None => Ok(Part::Length(length, is_record)),
                Some(length) => {
                    let part = self.value(length)?;
                    self.records = self.records.saturating_add(is_record.into());
                    Ok(part)
                }
            },
            Part::Value(_) | Part::Unknown => Ok(self.part),
        }
    }

    /// Returns the part that begins a value, which must end within the message.
    fn value(&self, bytes: u64) -> Result<Part, ()> {
        match bytes <= self.left {
            true => Ok(self.after_value(bytes)),
            false => Err(()),
        }
    }

    /// Returns the next part while this number of bytes is left of a value.
    fn after_value(&self, rest: u64) -> Part {
        match (rest, self.left) {
            (0, 0) => Part::default(),
            (0, _) => Part::Key(Varint::default()),
            (rest, _) => Part::Value(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::methods::{Effect, METHODS};
    use patchbay_proto::v1;
    use prost::Message;
    use prost_reflect::{DescriptorPool, Kind};

    use super::super::frame::framed;
    use super::*;

    fn counts(chunks: &[&[u8]]) -> (u64, u64) {
        let mut received = Received::default();
        chunks.iter().for_each(|chunk| received.count(chunk));
        (received.records, received.bytes)
    }

    #[test]
    fn records_are_counted_wherever_frames_end() {
        let record = v1::KernelLogRecord {
            text: "x".repeat(300),
            ..Default::default()
        };
        let some = v1::StreamKernelLogResponse {
            records: vec![record.clone(), v1::KernelLogRecord::default(), record],
            lost: 1 << 40,
            source: 1,
            restarted: true,
        };
        let none = v1::StreamKernelLogResponse::default();
        let messages = [&some, &none, &some];
        let all = messages.map(|message| framed(&message.encode_to_vec()));
        let all = all.concat();
        for size in [1, 2, 3, 7, 300, all.len()] {
            let chunks: Vec<_> = all.chunks(size).collect();
            assert_eq!(counts(&chunks), (6, all.len() as u64), "{size}");
        }
        let events = v1::StreamTracepointEventsResponse {
            events: vec![v1::TraceEvent::default(); 5],
            losses: Some(v1::TraceLosses::default()),
            names: vec!["sched:sched_switch".to_owned()],
            ..Default::default()
        };
        let events = framed(&events.encode_to_vec());
        assert_eq!(counts(&[&events]), (5, events.len() as u64));
    }

    /// A value that ends after its message, and what is no message, is no record.
    #[test]
    fn what_is_not_understood_is_not_counted_as_a_record() {
        for bad in [
            &b"\x01\0\0\0\x02\x0a\0\x0a\0"[..],
            b"\0\0\0\0\x02\x0a\x01\x0a\0",
            b"\0\0\0\0\x02\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\0\0\0\0\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x0a\0",
            b"\0\0\0\0\x04\x0b\0\x0a\0",
            b"\0\0\0\0\x03\x09\x01\x02\x0a\0\x0a\0",
        ] {
            assert_eq!(counts(&[bad]), (0, bad.len() as u64), "{bad:?}");
        }
    }

    #[test]
    fn the_records_of_each_stream_have_the_same_number() {
        let pool = DescriptorPool::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded");
        let streams = |effect| matches!(effect, Effect::Records | Effect::Stream);
        let methods: Vec<_> = METHODS
            .iter()
            .filter(|method| streams(method.effect))
            .collect();
        assert_eq!(methods.len(), 2);
        for method in methods {
            let service = pool.get_service_by_name(&format!("patchbay.v1.{}", method.service));
            let service = service.expect("described");
            let mut found = service.methods();
            let found = found.find(|found| found.name() == method.name);
            let field = found.expect("described").output().get_field(1);
            let field = field.expect("field 1");
            assert!(field.is_list() && matches!(field.kind(), Kind::Message(_)));
        }
    }
}
