// SPDX-License-Identifier: Apache-2.0
//! Events that the guest's kernel records from its boot on, because its command line says so, and
//! that are parked as soon as the kernel is known.

use std::sync::Weak;
use std::time::Duration;

use patchbay_guest::log_limit::limited;
use tokio::time::MissedTickBehavior;

use super::error::TraceError;
use super::select::Wanted;
use super::tracer::Tracer;
use crate::keys::KeysError;

/// Time between two attempts, and between two checks for another boot.
const INTERVAL: Duration = Duration::from_secs(1);
/// The number of attempts in one boot that find no event with a probe.
const ATTEMPTS: u32 = 30;
/// The maximum number of intervals between two attempts that fail.
const LAST_DELAY: u32 = 64;

/// The events, as the command line has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootEvents(Vec<String>);

impl BootEvents {
    /// Parses "SYSTEM:NAME" or "SYSTEM:*", separated by commas.
    ///
    /// The kernel knows `*` only as a whole name (`ftrace_set_clr_event()`), and takes a name
    /// without a colon for that of a system or of an event. Both would arm other events than are
    /// parked.
    ///
    /// # Errors
    /// A sentence that names the wrong part.
    pub fn parse(text: &str) -> Result<Self, String> {
        let is_name = |name: &str| {
            let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
            !name.is_empty() && name.bytes().all(is_part)
        };
        let is_event = |event: &str| {
            let parts = event.split_once(':');
            parts.is_some_and(|(system, name)| is_name(system) && (name == "*" || is_name(name)))
        };
        let events = text.split(',').map(|event| match is_event(event) {
            true => Ok(event.to_owned()),
            false => Err(format!(
                "{event:?} is not SYSTEM:NAME or SYSTEM:*; the kernel's command line knows no other globs"
            )),
        });
        events.collect::<Result<_, _>>().map(Self)
    }

    /// Returns the word of the kernel's command line.
    #[must_use]
    pub fn word(&self) -> String {
        format!("trace_event={}", self.0.join(","))
    }

    /// Returns whether a command line has this word already. Kernels differ in whether they take
    /// all such words or only the last one.
    #[must_use]
    pub fn is_in(command_line: &str) -> bool {
        let mut words = command_line.split_ascii_whitespace();
        // The kernel takes hyphens and underscores for the same.
        words.any(|word| word.replace('-', "_").starts_with("trace_event="))
    }

    pub(super) fn into_patterns(self) -> Vec<String> {
        self.0
    }
}

/// The attempts in one boot.
#[derive(Debug, Default)]
struct Attempts {
    boot: Option<u64>,
    /// The events are parked, or there are none.
    is_over: bool,
    /// Number of attempts that found no event with a probe.
    empty: u32,
    /// Number of intervals between the last failed attempt and the next one.
    delay: u32,
    /// Number of intervals to let pass before the next attempt.
    wait: u32,
}

impl Attempts {
    /// Returns whether the events are to be parked now. Called once per interval.
    fn is_due(&mut self, boot: Option<u64>) -> bool {
        if self.boot != boot {
            *self = Self {
                boot,
                ..Self::default()
            };
        }
        let left = self.wait.checked_sub(1);
        self.wait = left.unwrap_or(0);
        left.is_none() && !self.is_over
    }

    /// Counts an attempt that found no event. Returns whether it was the last one of this boot.
    fn found_none(&mut self) -> bool {
        self.empty += 1;
        self.is_over = self.empty > ATTEMPTS;
        self.is_over
    }

    /// Delays the next attempt, because each one may occupy the executor of the guest's keys for a
    /// second. Returns whether the attempts have failed for so long that this is worth a warning.
    fn failed(&mut self) -> bool {
        self.delay = (self.delay * 2).clamp(1, LAST_DELAY);
        self.wait = self.delay - 1;
        self.delay >= ATTEMPTS
    }
}

/// Parks the events once in each boot, as soon as the kernel is known.
pub(super) async fn park(tracer: Weak<Tracer>, wanted: Wanted) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut attempts = Attempts::default();
    loop {
        ticks.tick().await;
        let Some(tracer) = tracer.upgrade() else {
            return;
        };
        // The guest may boot again during the attempt, which then belongs to the earlier boot.
        if !attempts.is_due(tracer.keys.boot()) {
            continue;
        }
        let events = wanted.texts();
        match tracer.park_own(&wanted).await {
            Ok(None | Some(0)) if !attempts.found_none() => {}
            Ok(None) => limited!(
                warn,
                ?events,
                "the events of the guest's kernel are not found in its memory, so those of --trace-events fire"
            ),
            Ok(Some(0)) => limited!(
                warn,
                ?events,
                "the guest's kernel records none of these events"
            ),
            Ok(Some(events)) => {
                attempts.is_over = true;
                // If the boot was unknown, this attempt has discovered the kernel. The next tick
                // sees its boot and repeats the attempt.
                if attempts.boot.is_some() {
                    tracing::info!(events, "events of the guest's kernel are parked");
                }
            }
            // The guest boots.
            Err(TraceError::Keys(KeysError::NotRegistered { why })) => {
                tracing::debug!(why, "events of the guest's kernel are not parked yet");
            }
            Err(error) if attempts.failed() => limited!(
                warn,
                ?events,
                %error,
                "the events of --trace-events are not parked, so they fire"
            ),
            // A mutex is held.
            Err(error) => {
                tracing::debug!(%error, "events of the guest's kernel are not parked yet");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_forms_that_mean_the_same_to_the_kernel_are_taken() {
        let events = BootEvents::parse("sched:*,irq:softirq_entry").expect("both forms");
        assert_eq!(events.word(), "trace_event=sched:*,irq:softirq_entry");
        let wrong = [
            "",
            "sched",
            "sched_switch",
            "*:*",
            "sched:",
            ":x",
            "sched:sched_*",
            "a:b c",
            "a:b,",
            "a:b:c",
            "!a:b",
            "a:b\nquiet",
        ];
        for wrong in wrong {
            let error = BootEvents::parse(wrong).expect_err(wrong);
            assert!(error.contains("SYSTEM:NAME or SYSTEM:*"), "{error}");
        }
    }

    #[test]
    fn a_word_on_the_command_line_is_noticed() {
        assert!(BootEvents::is_in("quiet trace_event=sched:*"));
        assert!(BootEvents::is_in("trace-event=a:b quiet"));
        assert!(!BootEvents::is_in("quiet trace_events=1 my.trace_event=x"));
    }

    #[test]
    fn failed_attempts_are_made_less_and_less_often_until_another_boot() {
        let mut attempts = Attempts::default();
        let (mut at, mut warned) = (vec![], vec![]);
        for second in 0..256 {
            if attempts.is_due(Some(1)) {
                at.push(second);
                warned.extend(attempts.failed().then_some(second));
            }
        }
        assert_eq!(at, [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]);
        assert_eq!(warned, [31, 63, 127, 191, 255]);
        assert!(attempts.is_due(Some(2)), "another boot");
        assert!(!attempts.failed());
        assert!(attempts.is_due(Some(2)));
    }

    #[test]
    fn each_boot_has_its_own_attempts() {
        let mut attempts = Attempts::default();
        for boot in 1..3 {
            for _ in 0..ATTEMPTS {
                assert!(attempts.is_due(Some(boot)) && !attempts.found_none());
            }
            // The first boot ends before its last attempt.
            if boot == 1 {
                continue;
            }
            assert!(attempts.is_due(Some(boot)) && attempts.found_none());
            assert!(!attempts.is_due(Some(boot)));
        }
        assert!(attempts.is_due(Some(3)));
    }
}
