// SPDX-License-Identifier: Apache-2.0
//! Reads the fields that several requests have.

use std::time::{Duration, Instant};

use patchbay_proto::v1::{self, ResultView};
use prost::Message;
use static_keys::{MAX_PATTERNS, Patterns};
use tonic::metadata::MetadataMap;

use super::convert;
use crate::keys::debug::DebugQueries;
use crate::keys::{KeyUpdate, KeysError, MAX_UPDATES, Selection, Target, replay};

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

/// Returns whether the request wants only the summary.
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
/// INVALID_ARGUMENT if it is outside `range`.
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

/// Returns the digest of a request, by which a repeat is recognised. `request` has no request id.
///
/// # Errors
/// INVALID_ARGUMENT if the id is too long.
pub fn content(request_id: &str, request: &impl Message) -> Result<replay::Content, KeysError> {
    if request_id.len() > MAX_REQUEST_ID_BYTES {
        return Err(invalid(
            "request_id",
            format!("is longer than {MAX_REQUEST_ID_BYTES} bytes"),
        ));
    }
    // Without a request id nothing is replayed.
    Ok(match request_id {
        "" => replay::Content::default(),
        _ => replay::content(&request.encode_to_vec()),
    })
}

/// Checks the length of a reason.
///
/// # Errors
/// INVALID_ARGUMENT if the reason is too long.
pub fn check_reason(reason: &str) -> Result<(), KeysError> {
    if reason.len() > MAX_REASON_BYTES {
        let message = format!("is longer than {MAX_REASON_BYTES} bytes");
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

/// The time limits of a change.
pub struct Attempts {
    pub stop_timeout: Duration,
    pub deadline: Instant,
}

/// Returns the time limits of a change that was received at `received`.
///
/// # Errors
/// INVALID_ARGUMENT for a duration out of range.
pub fn attempts(
    stop_timeout: Option<prost_types::Duration>,
    retry_timeout: Option<prost_types::Duration>,
    received: Instant,
    deadline: Instant,
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
    Ok(Attempts {
        stop_timeout: stop_timeout.unwrap_or(DEFAULT_STOP_TIMEOUT),
        deadline: retry_timeout.map_or(deadline, |timeout| deadline.min(received + timeout)),
    })
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
    let Some(op) = convert::op_from_proto(update.op) else {
        let message = format!(
            "unknown op {} on key {:?}; give inc, dec, enable or disable",
            update.op, update.name
        );
        return Err(invalid("updates", message));
    };
    let keys = target(
        update.name,
        &update.patterns,
        &update.classes,
        &update.debug_queries,
    )?;
    // In the message an empty etag means none.
    let etag = Some(update.etag).filter(|etag| !etag.is_empty());
    if etag.is_some() && !matches!(keys, Target::Name(_)) {
        let message =
            "an etag comes with patterns or debug_queries; it belongs to one key, give its name";
        return Err(invalid("updates", message));
    }
    Ok(KeyUpdate { keys, op, etag })
}

fn target(
    name: String,
    patterns: &[String],
    classes: &[i32],
    queries: &[String],
) -> Result<Target, KeysError> {
    match (name.is_empty(), patterns.is_empty(), queries.is_empty()) {
        (true, true, true) => Err(invalid("updates", "one of them has no key name")),
        (_, true, _) if !classes.is_empty() => {
            let message = format!("key {name:?} comes with classes; give patterns with them");
            Err(invalid("updates", message))
        }
        (false, true, true) => Ok(Target::Name(name)),
        (true, false, true) => Ok(Target::Selection(selection(patterns, classes)?)),
        (true, true, false) => Ok(Target::Debug(DebugQueries::parse(queries)?)),
        _ => {
            let message =
                format!("key {name:?}: give one of name, patterns and debug_queries, not several");
            Err(invalid("updates", message))
        }
    }
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

/// Returns the deadline of the call (`grpc-timeout`) minus the time needed to send the answer. The
/// client then learns which gate was closed instead of getting DEADLINE_EXCEEDED.
pub fn time_allowed(metadata: &MetadataMap) -> Duration {
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
}
