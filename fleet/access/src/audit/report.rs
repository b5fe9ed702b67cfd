// SPDX-License-Identifier: Apache-2.0
//! Reports each change of a log with its outcome.

use std::collections::HashMap;
use std::path::Path;

use patchbay_proto::text::printable;
use serde::Serialize;

use super::chain::{AuditError, Chain, verify};
use super::record::{Entry, Record};

/// The principal of events that the daemon itself causes.
const DAEMON: &str = "patchbayd";

/// A change and its outcome, a call that was denied, or another event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The number in the log.
    pub id: u64,
    /// The time, in RFC 3339 and UTC.
    pub time: String,
    /// The principal of the call.
    pub principal: String,
    /// The person for whom the principal made the call; empty if it asserted none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub person: String,
    /// The full name of the gRPC method.
    pub method: String,
    /// The guest of the call.
    pub guest: String,
    /// The rule that allowed the change; empty for a denied call.
    pub rule: String,
    /// The request; empty for a denied call.
    pub request: String,
    /// "OK", or the name of the gRPC status. It is "DENIED" for a denied call, "OPEN" if there is
    /// no outcome, "REFUSED" for a connection whose certificate was not accepted, "LEFT_OUT" for
    /// lines that came too fast to be recorded, and "REPAIRED" for an incomplete line that was
    /// removed.
    pub code: String,
    /// The outcome's message, or the reason of the denial.
    pub message: String,
}

/// Returns every change and every other event of a log, in the order of the log, and verifies the
/// chain.
///
/// # Errors
/// [`AuditError`].
pub fn changes(path: &Path) -> Result<(Vec<Change>, Chain), AuditError> {
    let mut changes: Vec<Change> = vec![];
    let mut open: HashMap<u64, usize> = HashMap::new();
    let chain = verify(path, |record| match record.entry.clone() {
        Entry::Intent {
            principal,
            person,
            method,
            guest,
            rule,
            request,
            ..
        } => {
            open.insert(record.id, changes.len());
            changes.push(Change {
                id: record.id,
                time: rfc3339(record.time_ms),
                principal,
                person,
                method,
                guest,
                rule,
                request,
                code: "OPEN".to_owned(),
                message: String::new(),
            });
        }
        Entry::Denied {
            principal,
            person,
            method,
            guest,
            why,
        } => changes.push(Change {
            person,
            method,
            guest,
            ..event(record, principal, "DENIED", why)
        }),
        Entry::Refused {
            address,
            principal,
            why,
        } => changes.push(event(
            record,
            principal,
            "REFUSED",
            format!("{address}: {why}"),
        )),
        Entry::LeftOut { denied, refused } => changes.push(event(
            record,
            DAEMON.to_owned(),
            "LEFT_OUT",
            format!(
                "too fast to be recorded: {denied} denied calls, {refused} refused certificates"
            ),
        )),
        Entry::Outcome { code, message } => {
            if let Some(index) = open.remove(&record.id) {
                changes[index].code = code;
                changes[index].message = message;
            }
        }
        Entry::Continued { .. } => {}
        Entry::Repaired {
            bytes,
            sha256,
            text,
        } => changes.push(event(
            record,
            DAEMON.to_owned(),
            "REPAIRED",
            format!("an incomplete line was removed: {bytes} bytes, sha256 {sha256}: {text}"),
        )),
    })?;
    Ok((changes, chain))
}

/// Returns the entry of the report for an event that is not a change.
fn event(record: &Record, principal: String, code: &str, message: String) -> Change {
    Change {
        id: record.id,
        time: rfc3339(record.time_ms),
        principal,
        person: String::new(),
        method: String::new(),
        guest: String::new(),
        rule: String::new(),
        request: String::new(),
        code: code.to_owned(),
        message,
    }
}

/// Formats a change as one line of text. Control characters that clients sent are escaped.
#[must_use]
pub fn show(change: &Change) -> String {
    let method = change.method.rsplit('/').next().unwrap_or(&change.method);
    let or_dash = |text: &str| match text {
        "" => "-".into(),
        text => printable(text).into_owned(),
    };
    let detail = match change.message.as_str() {
        "" => &change.request,
        message => message,
    };
    let principal = match change.person.as_str() {
        "" => or_dash(&change.principal),
        person => format!("{}({})", printable(&change.principal), printable(person)),
    };
    format!(
        "{} {:>6} {} {} {} {} {}",
        change.time,
        change.id,
        principal,
        or_dash(method),
        or_dash(&change.guest),
        printable(&change.code),
        printable(detail)
    )
}

fn rfc3339(time_ms: u64) -> String {
    let nanoseconds = i128::from(time_ms) * 1_000_000;
    time::OffsetDateTime::from_unix_timestamp_nanos(nanoseconds)
        .ok()
        .and_then(|time| {
            time.format(&time::format_description::well_known::Rfc3339)
                .ok()
        })
        .unwrap_or_else(|| format!("{time_ms} ms"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::AuditLog;

    #[test]
    fn a_change_is_joined_with_its_outcome() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let mut log = AuditLog::open(&path).expect("new");
        let intent = |guest: &str| Entry::Intent {
            principal: "uid:0".to_owned(),
            person: String::new(),
            method: "/patchbay.v1.GuestService/PauseGuest".to_owned(),
            guest: guest.to_owned(),
            rule: "r".to_owned(),
            request: "{\"guest\":\"a\"}".to_owned(),
            trace_id: String::new(),
        };
        let first = log.intent(intent("a")).expect("written");
        log.intent(intent("b")).expect("written");
        log.intent(Entry::Denied {
            principal: "uid:7".to_owned(),
            person: String::new(),
            method: "/patchbay.v1.GuestService/PauseGuest".to_owned(),
            guest: "a".to_owned(),
            why: "no rule".to_owned(),
        })
        .expect("written");
        log.intent(Entry::Refused {
            address: "192.0.2.1:7".to_owned(),
            principal: String::new(),
            why: "UnknownIssuer".to_owned(),
        })
        .expect("written");
        let (denied, refused) = (3, 4);
        log.intent(Entry::LeftOut { denied, refused })
            .expect("written");
        log.outcome(first, "UNAVAILABLE", "busy\nguest")
            .expect("written");
        drop(log);
        let (changes, chain) = changes(&path).expect("whole");
        assert_eq!(chain.records, 6);
        let codes: Vec<_> = changes.iter().map(|change| change.code.as_str()).collect();
        assert_eq!(
            codes,
            ["UNAVAILABLE", "OPEN", "DENIED", "REFUSED", "LEFT_OUT"]
        );
        assert!(
            show(&changes[3]).ends_with(" - - - REFUSED 192.0.2.1:7: UnknownIssuer"),
            "{changes:?}"
        );
        assert!(
            changes[4].message.contains("3 denied calls, 4 refused"),
            "{changes:?}"
        );
        let line = show(&changes[0]);
        assert!(
            line.contains("PauseGuest a UNAVAILABLE busy\\nguest"),
            "{line}"
        );
    }

    #[test]
    fn nothing_of_a_client_reaches_the_terminal_unescaped() {
        let hostile = "a\u{1b}[2J\n\u{9b}1m\u{202e}";
        let change = Change {
            id: 1,
            time: rfc3339(0),
            principal: hostile.to_owned(),
            person: hostile.to_owned(),
            method: hostile.to_owned(),
            guest: hostile.to_owned(),
            rule: hostile.to_owned(),
            request: "{\"guest\":\"web-1\"}".to_owned(),
            code: hostile.to_owned(),
            message: String::new(),
        };
        let line = show(&change);
        assert!(!line.chars().any(char::is_control), "{line:?}");
        assert!(!line.contains('\u{202e}'), "{line:?}");
        assert!(line.ends_with("{\"guest\":\"web-1\"}"), "{line}");
        let line = show(&Change {
            message: hostile.to_owned(),
            ..change
        });
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }

    #[test]
    fn a_request_is_shown_as_it_is_written() {
        let change = Change {
            id: 7,
            time: "2026".to_owned(),
            principal: "uid:0".to_owned(),
            person: String::new(),
            method: "/patchbay.v1.GuestService/PauseGuest".to_owned(),
            guest: "a".to_owned(),
            rule: "r".to_owned(),
            request: "{\"guest\":\"a\"}".to_owned(),
            code: "OPEN".to_owned(),
            message: String::new(),
        };
        assert!(show(&change).ends_with("PauseGuest a OPEN {\"guest\":\"a\"}"));
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(rfc3339(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
        assert!(rfc3339(u64::MAX).ends_with("ms"));
    }
}
