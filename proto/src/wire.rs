// SPDX-License-Identifier: Apache-2.0
//! prost, with another way to decode a string.
//!
//! The generated messages refer to this module. A message arrives in one piece of memory, see
//! [`crate::codec`], so a string is copied from it at once. prost copies it through the general
//! buffer of gRPC, which takes about 100 instructions more for each string.

pub use prost::*;

/// `prost::encoding`.
pub mod encoding {
    pub use prost::encoding::*;

    /// `prost::encoding::string`.
    pub mod string {
        use prost::DecodeError;
        use prost::bytes::Buf;
        pub use prost::encoding::string::*;
        use prost::encoding::{DecodeContext, WireType, decode_varint};

        /// Decodes a string.
        ///
        /// # Errors
        /// Those of prost.
        pub fn merge(
            wire_type: WireType,
            value: &mut String,
            buffer: &mut impl Buf,
            context: DecodeContext,
        ) -> Result<(), DecodeError> {
            if wire_type == WireType::LengthDelimited
                && let Some((text, length)) = whole(buffer.chunk())
            {
                *value = text.to_owned();
                buffer.advance(length);
                return Ok(());
            }
            // The string is in several pieces, or malformed.
            prost::encoding::string::merge(wire_type, value, buffer, context)
        }

        /// Returns the string at the start of `bytes`, which follows its length, and the number of
        /// bytes of both. Returns `None` if not all of them are there, or if it is not UTF-8.
        fn whole(bytes: &[u8]) -> Option<(&str, usize)> {
            let mut rest = bytes;
            let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
            let text = str::from_utf8(rest.get(..length)?).ok()?;
            Some((text, bytes.len() - rest.len() + length))
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::bytes::Buf;
    use prost::encoding::{DecodeContext, WireType};

    use super::encoding::string;

    /// Decodes a string by this module and by prost. Returns what both result in: the string, and
    /// the number of bytes that are left.
    fn decode<B: Buf>(wire_type: WireType, buffer: impl Fn() -> B) -> Option<(String, usize)> {
        let (mut ours, mut theirs) = ("before".to_owned(), "before".to_owned());
        let (mut rest, mut same) = (buffer(), buffer());
        let context = DecodeContext::default();
        let by_us = string::merge(wire_type, &mut ours, &mut rest, context.clone());
        let by_prost = prost::encoding::string::merge(wire_type, &mut theirs, &mut same, context);
        assert_eq!(by_us, by_prost);
        assert_eq!((&ours, rest.remaining()), (&theirs, same.remaining()));
        by_us.ok().map(|()| (ours, rest.remaining()))
    }

    #[test]
    fn strings_are_decoded_as_prost_decodes_them() {
        const DELIMITED: WireType = WireType::LengthDelimited;
        for text in ["", "key", "é", &"long".repeat(100)] {
            let mut bytes = Vec::new();
            string::encode(1, &text.to_owned(), &mut bytes);
            bytes.extend(b"next");
            // The first byte is the field's tag.
            let bytes = &bytes[1..];
            let decoded = Some((text.to_owned(), 4));
            assert_eq!(decode(DELIMITED, || bytes), decoded);
            assert_eq!(decode(WireType::Varint, || bytes), None);
            for cut in 0..bytes.len() - 4 {
                let (head, tail) = bytes.split_at(cut);
                assert_eq!(decode(DELIMITED, || head), None);
                assert_eq!(decode(DELIMITED, || head.chain(tail)), decoded);
            }
        }
        for malformed in [&b"\x02\xff\xff"[..], &[0xff; 12]] {
            assert_eq!(decode(DELIMITED, || malformed), None);
        }
    }
}
