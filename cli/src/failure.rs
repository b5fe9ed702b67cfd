// SPDX-License-Identifier: Apache-2.0
//! Defines how a command fails: one sentence with the next step, and an exit code.

use std::path::Path;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;

/// A failure without an exit code of its own.
pub const ERROR: u8 = 1;
/// The command line or a file given with it is wrong.
pub const USAGE: u8 = 2;
/// Only part of the request was carried out.
pub const PARTLY: u8 = 3;
/// Guests differ from the state that a rollout set.
pub const DRIFT: u8 = 4;
/// A gate of the guest stayed closed.
pub const GATE: u8 = 5;
/// The exit code of timeout(1).
pub const TIMEOUT: u8 = 124;

#[derive(Clone, Debug)]
pub struct Failure {
    /// The sentence, without a full stop at its end.
    pub message: String,
    pub exit_code: u8,
    /// The name of an `ErrorReason`, without the prefix; empty if the command itself failed.
    pub reason: String,
}

impl Failure {
    pub fn new(exit_code: u8, message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code,
            reason: String::new(),
        }
    }

    /// Creates a failure with exit code 1.
    pub fn error(message: impl Into<String>) -> Self {
        Self::new(ERROR, message)
    }

    /// Creates a failure with exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    /// Creates the failure for a socket on which no process answers.
    pub fn unreachable(socket: &Path, cause: &str) -> Self {
        Self::error(format!(
            "no monitor answers on {} ({cause}); see `patchbay guest list`, or start a guest with \
             `patchbay guest run`",
            socket.display()
        ))
    }

    /// Creates the failure for a user who may not connect to `socket`.
    pub fn denied(socket: &Path) -> Self {
        Self::error(format!(
            "this user has no permission for the socket {}; run the command as the owner of the \
             socket, as a member of its group, or as root",
            socket.display()
        ))
    }

    /// Creates the failure for a stream that should have continued until the command ends, but that
    /// the service has ended.
    pub fn ended(what: &str) -> Self {
        Self::error(format!(
            "the monitor ended the {what}; see `patchbay guest list`"
        ))
    }

    /// Runs a command that prints a stream, for `limit` if there is one.
    ///
    /// # Errors
    /// The failure of the command, or a timeout if the limit has passed.
    pub async fn after<T>(
        limit: Option<Duration>,
        command: impl Future<Output = Result<T, Self>>,
    ) -> Result<T, Self> {
        let Some(limit) = limit else {
            return command.await;
        };
        let ended = tokio::time::timeout(limit, command).await;
        ended.unwrap_or_else(|_| {
            let message = format!("ended after {limit:?}, as --timeout demands");
            Err(Self::new(TIMEOUT, message))
        })
    }
}

/// Returns "; did you mean \"a\" or \"b\"?", or an empty text.
pub fn did_you_mean<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    const MOST_NAMES: usize = 3;
    const LIKENESS: f64 = 0.75;
    let mut near: Vec<(f64, &str)> = names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(wanted, name), name))
        .filter(|(likeness, _)| *likeness > LIKENESS)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let names: Vec<&str> = near
        .into_iter()
        .take(MOST_NAMES)
        .map(|(_, name)| name)
        .collect();
    suggestion(&names)
}

fn suggestion(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    match names.as_slice() {
        [] => String::new(),
        [name] => format!("; did you mean {name}?"),
        [names @ .., last] => format!("; did you mean {} or {last}?", names.join(", ")),
    }
}

/// Returns whether the error is about a page token. This program passes only tokens that it got
/// from the service, so a token is refused only if the guest has rebooted between two pages.
fn is_about_a_page(status: &Status) -> bool {
    let fields = status.get_details_bad_request();
    let fields = fields.map_or(vec![], |request| request.field_violations);
    fields
        .iter()
        .any(|violation| violation.field == "page_token")
}

/// Returns the option that sets a field of requests.
fn option_of(field: &str) -> Option<&'static str> {
    Some(match field {
        "even_if_others" => "--even-if-others",
        "filter" => "--filter",
        "first_seq" => "--from",
        "generation" => "--generation",
        "incarnation" => "--incarnation",
        "instance" => "--instance",
        "max_level" => "--level",
        "plan_ttl" => "--plan-ttl",
        "reason" => "--reason",
        "request_id" => "--request-id",
        "since" => "--since",
        "source" => "--source",
        "start_revision" => "--from-revision",
        "stop_timeout" => "--stop-timeout",
        "timeout" | "retry_timeout" => "--timeout",
        "trigger" => "--trigger",
        "ttl" | "hold_ttl" => "--ttl",
        _ => return None,
    })
}

/// Returns the service's message about a request, with options instead of the fields that they set.
fn about_options(message: &str) -> String {
    // A message may begin with a field and a colon. Elsewhere, only names with an underscore are
    // replaced, because another field's name could be an ordinary word.
    let (start, rest) = match message.split_once(':') {
        Some((field, rest)) => match option_of(field) {
            Some(option) => (format!("{option}:"), rest),
            None => (String::new(), message),
        },
        None => (String::new(), message),
    };
    let is_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    // Texts of the user stand in quotes.
    let parts = rest.split('"').enumerate().map(|(index, part)| {
        let words = part.split_inclusive(|c: char| !is_of_word(c)).map(|piece| {
            let word = piece.trim_end_matches(|c: char| !is_of_word(c));
            match option_of(word).filter(|_| word.contains('_')) {
                Some(option) => piece.replacen(word, option, 1),
                None => piece.to_owned(),
            }
        });
        match index % 2 {
            0 => words.collect(),
            _ => part.to_owned(),
        }
    });
    start + &parts.collect::<Vec<String>>().join("\"")
}

/// Returns the advice to append to the message of a refusal.
fn next_step(reason: &str) -> &'static str {
    match reason {
        "KEY_GUARDED" => " (--allow-guarded)",
        "NOT_HOLDER" => "; release what others hold with --force",
        "GUEST_BUSY" => "; try for longer with --timeout",
        "VCPU_NOT_STOPPED" => "; allow more time with --stop-timeout",
        "NOT_POWERED_OFF" => "; wait longer with --timeout, or give --cut-after-timeout",
        "GUEST_PAUSED" => "; use `patchbay guest resume`, or `patchbay guest shutdown --cut-now`",
        "GUEST_NOT_FOUND" => "; see `patchbay guest list`",
        "GUEST_NOT_NAMED" => "; choose with --guest or --all, see `patchbay guest list`",
        "PLAN_NOT_FOUND" | "PLAN_STALE" => " (--dry-run)",
        "HOLD_NOT_FOUND" => "; see `patchbay holds list`",
        _ => "",
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let info = status.get_details_error_info();
        let near = info
            .as_ref()
            .and_then(|info| info.metadata.get("near").cloned())
            .unwrap_or_default();
        let reason = info.map(|info| info.reason).unwrap_or_default();
        let timed_out = status.code() == Code::DeadlineExceeded
            || status.code() == Code::Cancelled
                && (reason == "CANCELLED" || status.message() == "Timeout expired");
        let exit_code = match reason.as_str() {
            "GUEST_BUSY" => GATE,
            _ if timed_out => TIMEOUT,
            _ if status.code() == Code::InvalidArgument && !is_about_a_page(&status) => USAGE,
            _ => ERROR,
        };
        let message = match status.code() {
            // The service gives a reason with every error; the transport gives none.
            Code::Unavailable | Code::Unknown if reason.is_empty() => format!(
                "the monitor is gone: {}; see `patchbay guest list`",
                status.message()
            ),
            Code::Unimplemented => {
                "the monitor does not know this call: it is of another version, or the socket is \
                 not that of a monitor; update it, or give another --socket"
                    .to_owned()
            }
            _ if timed_out && reason.is_empty() => {
                "the monitor has not answered in time; allow more time with --timeout; if this was \
                 a change, `patchbay keys list` shows what is done"
                    .to_owned()
            }
            _ => {
                let said = match reason.as_str() {
                    "OTHERS_TRACE" => about_options(status.message()),
                    _ if status.get_details_bad_request().is_some() => {
                        about_options(status.message())
                    }
                    _ => status.message().to_owned(),
                };
                // The service's message ends with the same names after a `;`. They are replaced by
                // the suggestion.
                let near: Vec<&str> = near.split(',').filter(|name| !name.is_empty()).collect();
                let said = match near.is_empty() {
                    true => said,
                    false => {
                        said.split(';').next().unwrap_or(&said).to_owned() + &suggestion(&near)
                    }
                };
                said + next_step(&reason)
            }
        };
        Self {
            message,
            exit_code,
            reason,
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::error(format!("input or output failed: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn refused(code: Code, reason: &str, metadata: &[(&str, &str)]) -> Failure {
        let metadata = metadata
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let metadata: std::collections::HashMap<_, _> = metadata.collect();
        let details = ErrorDetails::with_error_info(reason, "patchbay", metadata);
        Status::with_error_details(code, "it failed; the service says more", details).into()
    }

    #[test]
    fn a_reason_decides_the_exit_code_and_the_next_step() {
        let busy = refused(Code::Unavailable, "GUEST_BUSY", &[]);
        assert_eq!((busy.exit_code, busy.reason.as_str()), (GATE, "GUEST_BUSY"));
        assert!(busy.message.ends_with("--timeout"), "{}", busy.message);
        let late = refused(Code::DeadlineExceeded, "VCPU_NOT_STOPPED", &[]);
        assert_eq!(late.exit_code, TIMEOUT);
        for gone in [Status::unavailable("reset"), Status::unknown("h2 error")] {
            let gone = Failure::from(gone);
            assert_eq!(gone.exit_code, ERROR);
            assert!(gone.message.contains("gone"), "{}", gone.message);
        }
        let slow = Failure::from(Status::cancelled("Timeout expired"));
        assert_eq!(slow.exit_code, TIMEOUT);
        // The call may have been a read, which has done nothing.
        assert!(
            slow.message.contains("if this was a change"),
            "{}",
            slow.message
        );
        let foreign = Failure::from(Status::unimplemented(""));
        assert!(foreign.message.contains("--socket"), "{}", foreign.message);
        let other = refused(Code::FailedPrecondition, "KEY_SEALED", &[]);
        assert_eq!(other.exit_code, ERROR);
    }

    #[test]
    fn a_message_names_options_and_not_the_fields_that_they_set() {
        for (message, expected) in [
            (
                "request_id: is longer than 128 bytes",
                "--request-id: is longer than 128 bytes",
            ),
            (
                "hold_ttl: is 366d; give a ttl, or leave it out",
                "--ttl: is 366d; give a ttl, or leave it out",
            ),
            (
                "request_id \"request_id\" was already used",
                "--request-id \"request_id\" was already used",
            ),
            (
                "since: the agent cannot begin at a time; give first_seq",
                "--since: the agent cannot begin at a time; give --from",
            ),
            (
                "updates: key \"ttl: x\": give one of name, patterns and debug_queries",
                "updates: key \"ttl: x\": give one of name, patterns and debug_queries",
            ),
        ] {
            assert_eq!(about_options(message), expected);
        }
        let refused = |reason: &str, details: ErrorDetails| {
            let mut details = details;
            let metadata: std::collections::HashMap<String, String> = Default::default();
            details.set_error_info(reason, "patchbay", metadata);
            let message = "stop_timeout: is 31s; it is with even_if_others";
            Status::with_error_details(Code::InvalidArgument, message, details)
        };
        let of_field = ErrorDetails::with_bad_request_violation("stop_timeout", "is 31s");
        let failure = Failure::from(refused("INVALID_ARGUMENT", of_field));
        assert_eq!(failure.exit_code, USAGE);
        let expected = "--stop-timeout: is 31s; it is with --even-if-others";
        assert_eq!(failure.message, expected);
        let others = Failure::from(refused("OTHERS_TRACE", ErrorDetails::new()));
        assert_eq!(others.message, expected);
        let other = Failure::from(refused("NO_AGENT", ErrorDetails::new()));
        assert!(other.message.contains("even_if_others"));
    }

    #[test]
    fn names_near_a_misspelt_one_are_asked_for_once() {
        let near = [("near", "alpha,beta")];
        let failure = refused(Code::NotFound, "KEY_NOT_FOUND", &near);
        assert_eq!(
            failure.message,
            "it failed; did you mean \"alpha\" or \"beta\"?"
        );
        let guests = ["web-1", "web-2", "database"];
        assert_eq!(
            did_you_mean("wbe-1", guests),
            "; did you mean \"web-1\" or \"web-2\"?"
        );
        assert_eq!(did_you_mean("mail", guests), "");
    }
}
