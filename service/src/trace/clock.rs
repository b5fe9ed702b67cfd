// SPDX-License-Identifier: Apache-2.0
//! Maps the guest's clock to the host's.
//!
//! The agent answers a ping with the guest's CLOCK_MONOTONIC, read between request and reply. The
//! offset is therefore known to within half of the round trip. The recent sample with the shortest
//! round trip is used.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

/// Number of samples, one per second. Older samples are wrong by the drift of the clocks.
const SAMPLES: usize = 16;

/// Estimates the guest's clock.
#[derive(Debug)]
pub struct GuestClock {
    start: (Instant, SystemTime),
    samples: VecDeque<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Nanoseconds since `start` minus the guest's nanoseconds.
    offset: i128,
    error: Duration,
}

impl Default for GuestClock {
    fn default() -> Self {
        Self {
            start: (Instant::now(), SystemTime::now()),
            samples: VecDeque::new(),
        }
    }
}

impl GuestClock {
    /// Adds the answer to a ping.
    pub fn sample(&mut self, asked: Instant, answered: Instant, guest_ns: u64) {
        let round_trip = answered.saturating_duration_since(asked);
        let middle = asked.saturating_duration_since(self.start.0) + round_trip / 2;
        let offset = i128::from(nanoseconds(middle)) - i128::from(guest_ns);
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            offset,
            error: round_trip / 2,
        });
    }

    /// Drops all samples, because the guest is gone.
    pub fn clear(&mut self) {
        self.samples.clear();
    }

    fn best(&self) -> Option<Sample> {
        self.samples
            .iter()
            .copied()
            .min_by_key(|sample| sample.error)
    }

    /// Converts a guest time to a host time; `None` if there is no sample or the time is out of
    /// range.
    pub fn host_time(&self, guest_ns: u64) -> Option<SystemTime> {
        let since_start = i128::from(guest_ns) + self.best()?.offset;
        let distance = Duration::from_nanos(u64::try_from(since_start.unsigned_abs()).ok()?);
        if since_start < 0 {
            self.start.1.checked_sub(distance)
        } else {
            self.start.1.checked_add(distance)
        }
    }

    /// Returns the largest error of the estimate.
    pub fn error(&self) -> Option<Duration> {
        self.best().map(|sample| sample.error)
    }

    /// Returns the current time of the clock that `host_time` uses. This clock does not jump when
    /// the system time is set.
    pub fn now(&self) -> SystemTime {
        self.start.1 + self.start.0.elapsed()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_sample_counts() {
        let mut clock = GuestClock::default();
        assert_eq!(clock.host_time(5), None);
        let (instant, time) = clock.start;
        let at = |ms: u64| instant + Duration::from_millis(ms);
        clock.sample(at(1000), at(3000), 500_000_000);
        assert_eq!(clock.error(), Some(Duration::from_secs(1)));
        clock.sample(at(4000), at(4002), 2_501_000_000);
        assert_eq!(clock.error(), Some(Duration::from_millis(1)));
        assert_eq!(
            clock.host_time(2_501_000_000),
            Some(time + Duration::from_millis(4001))
        );
        assert_eq!(
            clock.host_time(1_000_000_000),
            Some(time + Duration::from_millis(2500))
        );
        assert_eq!(clock.host_time(0), Some(time + Duration::from_millis(1500)));
        for second in 5..5 + SAMPLES as u64 {
            clock.sample(at(second * 1000), at(second * 1000 + 10), 0);
        }
        assert_eq!(
            clock.error(),
            Some(Duration::from_millis(5)),
            "the old one is forgotten"
        );
    }

    #[test]
    fn absurd_times_of_the_guest_are_borne() {
        let mut clock = GuestClock::default();
        let now = clock.start.0;
        clock.sample(now, now, u64::MAX);
        clock.host_time(0);
        clock.host_time(u64::MAX);
        clock.clear();
        clock.sample(now, now, 0);
        clock.host_time(u64::MAX);
    }
}
