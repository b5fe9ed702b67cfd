// SPDX-License-Identifier: Apache-2.0
//! Reads the fields that several requests have.

use std::time::{Duration, Instant};

use patchbay_proto::v1::{self, ResultView};
use prost::Message;
use static_keys::{MAX_PATTERNS, Op, Patterns};
use tonic::metadata::MetadataMap;

use super::convert;
use crate::keys::debug::DebugQueries;
use crate::keys::replay::RequestId;
use crate::keys::{KeyUpdate, KeysError, MAX_UPDATES, Selection, Target};

/// The maximum length of a request id, in bytes.
const MAX_REQUEST_ID_BYTES: usize = 128;
/// The maximum length of a reason, in bytes.
const MAX_REASON_BYTES: usize = 256;
/// Maximum time for one update, and the deadline of calls that give none.
const MAX_DEADLINE: Duration = Duration::from_secs(30);
/// The maximum time to live of a hold.
pub const MAX_TTL: Duration = Duration::from_secs(365 * 24 * 3600);
const MAX_STOP_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time reserved for sending the answer to the client.
const MAX_ANSWER_TIME: Duration = Duration::from_millis(250);
/// Default and maximum page size.
const DEFAULT_PAGE_SIZE: usize = 1000;
const MAX_PAGE_SIZE: usize = 10_000;

/// Returns whether the request asks for the summary only.
///
/// # Errors
/// INVALID_ARGUMENT for an unknown view.
pub fn summary_only(view: i32) -> Result<bool, KeysError> {
    match ResultView::try_from(view) {
        Ok(ResultView::Unspecified | ResultView::Full) => Ok(false),
        Ok(ResultView::Summary) => Ok(true),
        Err(_) => Err(KeysError::InvalidArgument {
            field: "result_view",
            message: format!("unknown result_view {view}; give full or summary"),
        }),
    }
}

/// Returns an INVALID_ARGUMENT about a field.
pub fn invalid(field: &'static str, message: impl Into<String>) -> KeysError {
    KeysError::InvalidArgument {
        field,
        message: message.into(),
    }
}

/// Returns the page size of a request.
///
/// # Errors
/// INVALID_ARGUMENT for a negative number.
pub fn page_size(given: i32) -> Result<usize, KeysError> {
    match usize::try_from(given) {
        Ok(0) => Ok(DEFAULT_PAGE_SIZE),
        Ok(size) => Ok(size.min(MAX_PAGE_SIZE)),
        Err(_) => Err(invalid(
            "page_size",
            "is negative; give 0 for the default or a count",
        )),
    }
}

/// Returns the duration given by a request, or `None` if it is absent. Zero is a value: a `ttl` of
/// zero must not mean "no expiry".
///
/// # Errors
/// INVALID_ARGUMENT if the duration is outside `range`.
pub fn from_proto(
    field: &'static str,
    duration: Option<prost_types::Duration>,
    range: std::ops::RangeInclusive<Duration>,
) -> Result<Option<Duration>, KeysError> {
    let Some(given) = duration else {
        return Ok(None);
    };
    match Duration::try_from(given) {
        Ok(duration) if range.contains(&duration) => Ok(Some(duration)),
        _ => Err(KeysError::InvalidArgument {
            field,
            message: format!(
                "is {given}; give {:?} to {:?}, or leave it out",
                range.start(),
                range.end()
            ),
        }),
    }
}

/// Returns the identity of a request, by which a repeat is recognised. `request` has no request id.
///
/// # Errors
/// INVALID_ARGUMENT if the id is too long.
pub fn request_id(id: String, request: &impl Message) -> Result<Option<RequestId>, KeysError> {
    if id.len() > MAX_REQUEST_ID_BYTES {
        return Err(invalid(
            "request_id",
            format!("is longer than {MAX_REQUEST_ID_BYTES} bytes"),
        ));
    }
    Ok(RequestId::new(id, || request.encode_to_vec()))
}

/// Checks a reason, which is printed to people and kept with holds.
///
/// # Errors
/// INVALID_ARGUMENT if the reason is too long, or has control characters.
pub fn check_reason(reason: &str) -> Result<(), KeysError> {
    if reason.len() > MAX_REASON_BYTES {
        let message = format!("is longer than {MAX_REASON_BYTES} bytes");
        return Err(invalid("reason", message));
    }
    if reason.chars().any(char::is_control) {
        let message = "has control characters; give printable ones, in one line";
        return Err(invalid("reason", message));
    }
    Ok(())
}

/// Returns the time to live of a hold.
///
/// # Errors
/// INVALID_ARGUMENT for a duration out of range.
pub fn hold_ttl(
    field: &'static str,
    ttl: Option<prost_types::Duration>,
) -> Result<Option<Duration>, KeysError> {
    from_proto(field, ttl, Duration::from_millis(1)..=MAX_TTL)
}

/// The time at which a call was received, and the deadline of its answer.
#[derive(Clone, Copy)]
pub struct CallTimes {
    received: Instant,
    pub deadline: Instant,
}

/// The time limits of a change.
pub struct Attempts {
    pub stop_timeout: Duration,
    pub deadline: Instant,
}

impl CallTimes {
    /// Returns the times of a call that is received now. The deadline leaves time to send the
    /// answer, so that the client learns which gate was closed instead of getting
    /// DEADLINE_EXCEEDED.
    pub fn of(metadata: &MetadataMap) -> Self {
        let received = Instant::now();
        Self {
            received,
            deadline: received + time_allowed(metadata),
        }
    }

    /// Returns the time limits of a change.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a duration out of range.
    pub fn attempts(
        self,
        stop_timeout: Option<prost_types::Duration>,
        retry_timeout: Option<prost_types::Duration>,
    ) -> Result<Attempts, KeysError> {
        let stop_timeout = from_proto(
            "stop_timeout",
            stop_timeout,
            Duration::from_micros(1)..=MAX_STOP_TIMEOUT,
        )?;
        let retry_timeout = from_proto(
            "retry_timeout",
            retry_timeout,
            Duration::from_millis(1)..=MAX_DEADLINE,
        )?;
        let deadline = self.deadline;
        Ok(Attempts {
            stop_timeout: stop_timeout.unwrap_or(DEFAULT_STOP_TIMEOUT),
            deadline: retry_timeout.map_or(deadline, |time| deadline.min(self.received + time)),
        })
    }
}

/// Reads guest memory on a thread that may block, because it takes milliseconds. `failed` is the
/// start of the error if `read` panics.
///
/// # Errors
/// Those of `read`; INTERNAL if it panics.
pub async fn blocking<T: Send + 'static, E: From<KeysError> + Send + 'static>(
    failed: &str,
    read: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let read = tokio::task::spawn_blocking(read).await;
    read.map_err(|error| KeysError::Internal {
        message: format!("{failed}: {error}; report it, it is a bug"),
    })?
}

/// Returns the updates of a request.
///
/// # Errors
/// INVALID_ARGUMENT for too many or malformed updates.
pub fn key_updates(updates: Vec<v1::KeyUpdate>) -> Result<Vec<KeyUpdate>, KeysError> {
    if updates.is_empty() || updates.len() > MAX_UPDATES {
        let message = format!("{} given; give 1 to {MAX_UPDATES}", updates.len());
        return Err(invalid("updates", message));
    }
    // Each pattern is matched against each key, so their number is limited.
    let patterns: usize = updates
        .iter()
        .map(|one| one.patterns.len() + one.debug_queries.len())
        .sum();
    if patterns > MAX_PATTERNS {
        let message = format!("have {patterns} patterns and queries; give up to {MAX_PATTERNS}");
        return Err(invalid("updates", message));
    }
    updates.into_iter().map(key_update).collect()
}

fn key_update(update: v1::KeyUpdate) -> Result<KeyUpdate, KeysError> {
    let v1::KeyUpdate {
        name,
        op,
        etag,
        patterns,
        classes,
        debug_queries,
    } = update;
    let op = match v1::KeyOp::try_from(op) {
        Ok(v1::KeyOp::Inc) => Op::Inc,
        Ok(v1::KeyOp::Dec) => Op::Dec,
        Ok(v1::KeyOp::Enable) => Op::Enable,
        Ok(v1::KeyOp::Disable) => Op::Disable,
        Ok(v1::KeyOp::Unspecified) | Err(_) => {
            let message =
                format!("unknown op {op} on key {name:?}; give inc, dec, enable or disable");
            return Err(invalid("updates", message));
        }
    };
    let given = [
        !name.is_empty(),
        !patterns.is_empty(),
        !debug_queries.is_empty(),
    ];
    let message = match given {
        [false, false, false] => "one of them has no key name".to_owned(),
        [_, false, _] if !classes.is_empty() => {
            format!("key {name:?} comes with classes; give patterns with them")
        }
        [true, false, false] => {
            // In the message an empty etag means none.
            let etag = Some(etag).filter(|etag| !etag.is_empty());
            let keys = Target::Name { name, etag };
            return Ok(KeyUpdate { keys, op });
        }
        [false, true, false] | [false, false, true] if !etag.is_empty() => {
            "an etag comes with patterns or debug_queries; it belongs to one key, give its name"
                .to_owned()
        }
        [false, true, false] => {
            let keys = Target::Selection(Box::new(selection(&patterns, &classes)?));
            return Ok(KeyUpdate { keys, op });
        }
        [false, false, true] => {
            let keys = Target::Debug(DebugQueries::parse(&debug_queries)?);
            return Ok(KeyUpdate { keys, op });
        }
        _ => format!("key {name:?}: give one of name, patterns and debug_queries, not several"),
    };
    Err(invalid("updates", message))
}

/// Returns the keys that patterns and classes select.
///
/// # Errors
/// INVALID_ARGUMENT for a malformed pattern or an unknown class.
pub fn selection(patterns: &[String], classes: &[i32]) -> Result<Selection, KeysError> {
    Ok(Selection {
        patterns: Patterns::parse(patterns)?,
        classes: classes
            .iter()
            .map(|&class| convert::class_from_proto(class))
            .collect::<Result<_, _>>()?,
    })
}

/// Returns the time until the deadline of the call (`grpc-timeout`), minus the time needed to send
/// the answer.
fn time_allowed(metadata: &MetadataMap) -> Duration {
    let given = metadata
        .get("grpc-timeout")
        .and_then(|value| value.to_str().ok())
        .and_then(parse_timeout);
    match given {
        Some(given) => (given - (given / 4).min(MAX_ANSWER_TIME)).min(MAX_DEADLINE),
        None => MAX_DEADLINE,
    }
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(parse_timeout("30S"), Some(Duration::from_secs(30)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(
            parse_timeout("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "S", "1", "1x", "-1S", "999999999S", "é"] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_answer_comes_before_the_deadline_and_the_maximum_holds() {
        let mut metadata = MetadataMap::new();
        assert_eq!(time_allowed(&metadata), MAX_DEADLINE);
        metadata.insert("grpc-timeout", "1S".parse().expect("a value"));
        assert_eq!(time_allowed(&metadata), Duration::from_millis(750));
        metadata.insert("grpc-timeout", "1H".parse().expect("a value"));
        assert_eq!(time_allowed(&metadata), MAX_DEADLINE);
    }

    #[test]
    fn a_reason_is_one_short_line() {
        for good in [
            "",
            "incident 7: é \"quoted\"",
            &"x".repeat(MAX_REASON_BYTES),
        ] {
            check_reason(good).expect("printable");
        }
        let bad = ["two\nlines", "\u{1}", "\u{1b}[31m", "\u{85}", "\0"];
        for bad in bad.into_iter().chain([&*"x".repeat(MAX_REASON_BYTES + 1)]) {
            let error = check_reason(bad).expect_err("refused");
            assert_eq!(error.reason(), "INVALID_ARGUMENT", "{bad:?}");
        }
    }
}
