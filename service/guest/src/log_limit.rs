// SPDX-License-Identifier: Apache-2.0

//! Rate limit for log lines that a guest can cause, separate for each call site in the source.
//! Without a limit, a hostile guest could fill the host's log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of lines per second and call site.
const LINES: u32 = 5;
const WINDOW: Duration = Duration::from_secs(1);

/// The counters of one call site. [`limited!`](crate::limited) creates them.
#[derive(Debug)]
pub struct LineLimit(Mutex<Window>);

#[derive(Debug)]
struct Window {
    began: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl LineLimit {
    /// Creates the counters of a call site that has not written a line.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "made by the macro, in a static")]
    pub const fn new() -> Self {
        Self(Mutex::new(Window {
            began: None,
            written: 0,
            left_out: 0,
        }))
    }

    /// Returns `None` if no line may be written now. Otherwise returns the number of lines that
    /// were suppressed since the last line.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        // The state consists of plain numbers, which stay usable if a thread panicked with the lock
        // held.
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |began| now.saturating_duration_since(began) >= WINDOW;
        if window.began.is_none_or(over) {
            window.began = Some(now);
            window.written = 0;
        }
        if window.written == LINES {
            window.left_out = window.left_out.saturating_add(1);
            return None;
        }
        window.written += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

/// Logs a line that a guest can cause: `limited!(warn, "...")` is `tracing::warn!("...")`, at most
/// 5 times per second. If lines were suppressed, their number is logged before the next line.
#[macro_export]
macro_rules! limited {
    ($level:ident, $($line:tt)+) => {{
        static LIMIT: $crate::log_limit::LineLimit = $crate::log_limit::LineLimit::new();
        if let Some(left_out) = LIMIT.admit(::std::time::Instant::now()) {
            if left_out > 0 {
                ::tracing::$level!(left_out, "lines like the next were left out");
            }
            ::tracing::$level!($($line)+);
        }
    }};
}
pub use limited;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_so_many_lines_per_second_and_counts_the_others() {
        let limit = LineLimit::new();
        let start = Instant::now();
        let admitted = (0..1000).filter(|_| limit.admit(start) == Some(0)).count();
        assert_eq!(admitted, 5);
        assert_eq!(limit.admit(start + WINDOW - Duration::from_nanos(1)), None);
        assert_eq!(limit.admit(start + WINDOW), Some(996));
        assert_eq!(limit.admit(start + WINDOW), Some(0));
    }
}
