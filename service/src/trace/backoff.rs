// SPDX-License-Identifier: Apache-2.0
//! Limits how often an event is switched for other users in the guest.

/// The maximum interval for parking an event without other users is 2^9 ticks (9 minutes).
const SELDOM: u32 = 9;
/// The maximum interval for retrying a failed firing is 2^6 ticks.
const SELDOM_AGAIN: u32 = 6;
/// Ticks without a change after which the interval of an event is halved.
const QUIET: u32 = 128;

/// Backoff of one event. The event is parked in ticks that are multiples of a power of two. This
/// power doubles each time and halves in quiet times.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    shift: u32,
    quiet: u32,
    /// Number of times that firing failed in succession, at most [`SELDOM_AGAIN`].
    failures: u32,
}

impl Backoff {
    /// Returns whether the event may be fired in this tick.
    pub fn allows_firing(&mut self, tick: u64) -> bool {
        self.quiet = 0;
        tick.is_multiple_of(1 << self.failures)
    }

    /// Records an attempt to fire the event.
    pub fn fired(&mut self, done: bool) {
        self.failures = match done {
            true => 0,
            false => (self.failures + 1).min(SELDOM_AGAIN),
        };
    }

    /// Returns whether the event may be parked in this tick.
    pub fn allows_parking(&mut self, tick: u64, wanted: bool) -> bool {
        if wanted {
            self.quiet = 0;
            return tick.is_multiple_of(1 << self.shift);
        }
        self.quiet += 1;
        if self.quiet >= QUIET {
            self.quiet = 0;
            self.shift = self.shift.saturating_sub(1);
        }
        false
    }

    /// Records that the event was parked.
    pub fn parked(&mut self) {
        self.shift = (self.shift + 1).min(SELDOM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_frequent_changes_events_are_parked_less_often_until_it_is_quiet() {
        let mut backoff = Backoff::default();
        let mut at = vec![];
        for tick in 1..4096 {
            if backoff.allows_parking(tick, true) {
                backoff.parked();
                at.push(tick);
            }
        }
        assert_eq!(at[..9], [1, 2, 4, 8, 16, 32, 64, 128, 256]);
        assert_eq!(at[9..], [512, 1024, 1536, 2048, 2560, 3072, 3584]);
        for tick in 0..u64::from(QUIET * SELDOM) {
            assert!(!backoff.allows_parking(tick, false));
        }
        assert!(backoff.allows_parking(1, true));
    }

    #[test]
    fn only_failures_delay_firing() {
        let mut backoff = Backoff::default();
        for _ in 0..20 {
            backoff.parked();
        }
        assert!((1..100).all(|tick| backoff.allows_firing(tick)));
        for _ in 0..20 {
            backoff.fired(false);
        }
        let allowed = (1..=128).filter(|tick| backoff.allows_firing(*tick));
        assert_eq!(allowed.collect::<Vec<_>>(), [64, 128]);
        backoff.fired(true);
        assert!(backoff.allows_firing(1));
    }
}
