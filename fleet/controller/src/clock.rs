// SPDX-License-Identifier: Apache-2.0
//! Reads the wall clock and detects its jumps. An administrator or NTP may set it, and it jumps
//! ahead across suspend.
//!
//! Stored times are wall-clock times, because another replica may continue with them. A driver
//! compares the wall clock with the monotonic clock, and reports the difference to its rollout.

use std::time::Instant;

use crate::rollout::Millis;

/// Differences of at most this many milliseconds are ignored, because some time passes between the
/// two reads.
pub const TOLERANCE: i64 = 1000;

pub fn now() -> Millis {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Returns the time as a message's field.
pub fn timestamp(millis: Millis) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(millis / 1000).unwrap_or(i64::MAX),
        nanos: i32::try_from(millis % 1000 * 1_000_000).unwrap_or(0),
    }
}

/// The readings of both clocks at one time.
pub struct Clocks {
    wall: Millis,
    monotonic: Instant,
}

impl Clocks {
    pub fn read() -> Self {
        Self {
            wall: now(),
            monotonic: Instant::now(),
        }
    }

    /// Returns the milliseconds by which the wall clock jumped between `self` and `later`; `None`
    /// if it did not jump.
    pub fn jump_until(&self, later: &Self) -> Option<i64> {
        let elapsed = later.monotonic.saturating_duration_since(self.monotonic);
        let expected = i128::from(self.wall) + i128::try_from(elapsed.as_millis()).ok()?;
        let jump = i64::try_from(i128::from(later.wall) - expected).ok()?;
        (jump.abs() > TOLERANCE).then_some(jump)
    }

    /// Returns the wall-clock time of `later` as if the clock had not been set forward since
    /// `self`. Ages of stored times that are computed from it are never too large.
    pub fn time_until(&self, later: &Self) -> Millis {
        match self.jump_until(later) {
            Some(by) if by > 0 => later.wall.saturating_sub(by.unsigned_abs()),
            _ => later.wall,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_difference_between_the_clocks_is_a_jump() {
        let start = Clocks::read();
        let after = |wall: i64, monotonic: u64| Clocks {
            wall: start.wall.saturating_add_signed(wall),
            monotonic: start.monotonic + Duration::from_millis(monotonic),
        };
        for (wall, monotonic, jump) in [
            (0, 0, None),
            (86_400_000, 86_400_000, None),
            (1500, 2000, None),
            (86_400_000, 1000, Some(86_399_000)),
            (-3_600_000, 1000, Some(-3_601_000)),
        ] {
            let found = start.jump_until(&after(wall, monotonic));
            assert_eq!(found, jump, "{wall} {monotonic}");
        }
    }

    /// Checks that a time which was stored before or after the clock was set is not too old.
    #[test]
    fn a_clock_that_is_set_makes_no_time_older() {
        let start = Clocks {
            wall: 200_000_000,
            monotonic: Instant::now(),
        };
        for (wall, monotonic, time) in [
            (200_060_000, 60_000, 200_060_000),
            (286_460_000, 60_000, 200_060_000),
            (113_660_000, 60_000, 113_660_000),
        ] {
            let later = Clocks {
                wall,
                monotonic: start.monotonic + Duration::from_millis(monotonic),
            };
            assert_eq!(start.time_until(&later), time, "{wall}");
        }
    }
}
