// SPDX-License-Identifier: Apache-2.0
//! The trace that a call belongs to (W3C Trace Context).

use std::fmt;

use tonic::codegen::http::HeaderMap;
use tonic::metadata::MetadataMap;

/// Metadata key of the W3C trace context.
pub const TRACEPARENT_METADATA: &str = "traceparent";

/// The ids in a value of [`TRACEPARENT_METADATA`]. None is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace that the call belongs to.
    pub trace_id: u128,
    /// The span that made the call.
    pub span_id: u64,
}

/// The value of a call that is logged.
impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-01", self.trace_id, self.span_id)
    }
}

impl TraceParent {
    /// Reads a value; `None` if the value is malformed. A version after 00 may have more parts, and
    /// is malformed here.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.splitn(5, '-').collect();
        let is_hex = |part: &&str| {
            part.bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let [version, trace, span, flags] = parts[..] else {
            return None;
        };
        let lengths = [version, trace, span, flags].map(str::len);
        if lengths != [2, 32, 16, 2] || !parts.iter().all(is_hex) || version == "ff" {
            return None;
        }
        let span_id = u64::from_str_radix(span, 16).ok()?;
        let trace_id = u128::from_str_radix(trace, 16).ok()?;
        (trace_id != 0 && span_id != 0).then_some(Self { trace_id, span_id })
    }

    /// The value of a call. Two values, or a malformed one, count as none (section 4.3 of the
    /// specification).
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut given = headers.get_all(TRACEPARENT_METADATA).iter();
        match (given.next(), given.next()) {
            (Some(value), None) => value.to_str().ok().and_then(Self::parse),
            _ => None,
        }
    }

    /// Adds the value to a call.
    pub fn insert(self, metadata: &mut MetadataMap) {
        if let Ok(value) = self.to_string().parse() {
            metadata.insert(TRACEPARENT_METADATA, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: TraceParent = TraceParent {
        trace_id: 0xabc,
        span_id: 7,
    };

    #[test]
    fn a_value_is_read_as_it_is_written_and_nothing_else_is() {
        assert_eq!(TraceParent::parse(&PARENT.to_string()), Some(PARENT));
        for bad in [
            "",
            "00-0-0-0",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-1",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_call_has_one_value() {
        let mut headers = HeaderMap::new();
        assert_eq!(TraceParent::of(&headers), None);
        let value = PARENT.to_string().parse().expect("ASCII");
        headers.append(TRACEPARENT_METADATA, value);
        assert_eq!(TraceParent::of(&headers), Some(PARENT));
        let value = PARENT.to_string().parse().expect("ASCII");
        headers.append(TRACEPARENT_METADATA, value);
        assert_eq!(TraceParent::of(&headers), None);
    }
}
