// SPDX-License-Identifier: Apache-2.0

//! Token buckets that limit a guest's use of the host's disk.

use std::time::{Duration, Instant};

/// Rate and size of a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Tokens per second; 0 counts as 1.
    pub per_second: u64,
    /// Size of the bucket: the tokens available after idle time.
    pub burst: u64,
}

/// Limits of one disk; `None` means unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskLimits {
    /// Bytes read and written.
    pub bytes: Option<Rate>,
    /// Requests of any type.
    pub operations: Option<Rate>,
}

/// A token bucket. A request proceeds unless the bucket is in debt, and may take more tokens than
/// there are. The next request waits until the debt is paid. Requests of any size can therefore
/// proceed, and the rate is kept.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    /// Time at which the bucket is full again.
    full_at: Instant,
}

impl Bucket {
    fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, full_at: now }
    }

    /// Returns the time in which `tokens` are refilled.
    fn time_for(&self, tokens: u64) -> Duration {
        let nanos = u128::from(tokens) * 1_000_000_000 / u128::from(self.rate.per_second.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Returns the time until the bucket is out of debt.
    fn wait(&self, now: Instant) -> Duration {
        let until_full = self.full_at.saturating_duration_since(now);
        until_full.saturating_sub(self.time_for(self.rate.burst))
    }

    fn take(&mut self, now: Instant, tokens: u64) {
        let from = self.full_at.max(now);
        // The longest refill time is 584 years, and `Instant` counts seconds in 64 bits, so the sum
        // does not overflow.
        self.full_at = from.checked_add(self.time_for(tokens)).unwrap_or(from);
    }
}

/// The buckets of one disk.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl Limiter {
    pub fn new(limits: DiskLimits, now: Instant) -> Self {
        Self {
            bytes: limits.bytes.map(|rate| Bucket::new(rate, now)),
            operations: limits.operations.map(|rate| Bucket::new(rate, now)),
        }
    }

    /// Admits a request of `bytes` bytes, or returns when to try again.
    pub fn admit(&mut self, now: Instant, bytes: u64) -> Result<(), Instant> {
        let wait = [&self.bytes, &self.operations]
            .into_iter()
            .flatten()
            .map(|bucket| bucket.wait(now))
            .max()
            .unwrap_or_default();
        if !wait.is_zero() {
            return Err(now + wait);
        }
        for (bucket, tokens) in [(&mut self.bytes, bytes), (&mut self.operations, 1)] {
            if let Some(bucket) = bucket {
                bucket.take(now, tokens);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limiter(bytes: Option<(u64, u64)>, operations: Option<(u64, u64)>) -> (Limiter, Instant) {
        let rate = |(per_second, burst)| Rate { per_second, burst };
        let limits = DiskLimits {
            bytes: bytes.map(rate),
            operations: operations.map(rate),
        };
        let now = Instant::now();
        (Limiter::new(limits, now), now)
    }

    #[test]
    fn without_limits_every_request_proceeds() {
        let (mut limiter, now) = limiter(None, None);
        assert!((0..1000).all(|_| limiter.admit(now, u64::MAX).is_ok()));
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let (mut limiter, mut now) = limiter(None, Some((100, 10)));
        let burst = (0..100).take_while(|_| limiter.admit(now, 0).is_ok());
        // Ten requests use the tokens, and another one goes into debt.
        assert_eq!(burst.count(), 11);
        let start = now;
        for _ in 0..500 {
            now = limiter.admit(now, 0).expect_err("to wait");
            assert_eq!(limiter.admit(now, 0), Ok(()));
        }
        assert_eq!(now - start, 5 * SECOND);
        // Idle time fills the bucket and no more.
        now += 100 * SECOND;
        let burst = (0..100).take_while(|_| limiter.admit(now, 0).is_ok());
        assert_eq!(burst.count(), 11);
    }

    #[test]
    fn a_request_larger_than_the_bucket_is_paid_for_afterwards() {
        let (mut limiter, now) = limiter(Some((1000, 100)), None);
        assert_eq!(limiter.admit(now, 10_000), Ok(()));
        let at = limiter.admit(now, 1).expect_err("in debt");
        assert_eq!(at - now, 10 * SECOND - SECOND / 10);
        assert_eq!(limiter.admit(at, 1), Ok(()));
    }

    #[test]
    fn the_slower_of_both_counts_and_a_refusal_costs_nothing() {
        let (mut limiter, now) = limiter(Some((1000, 1000)), Some((1, 1)));
        assert_eq!(limiter.admit(now, 1), Ok(()));
        assert_eq!(limiter.admit(now, 1), Ok(()));
        for _ in 0..100 {
            assert_eq!(limiter.admit(now, 1), Err(now + SECOND));
        }
        assert_eq!(limiter.admit(now + SECOND, 1), Ok(()));
    }

    #[test]
    fn numbers_at_the_edge_do_not_overflow() {
        let (mut limiter, now) = limiter(Some((0, 0)), Some((u64::MAX, u64::MAX)));
        assert_eq!(limiter.admit(now, u64::MAX), Ok(()));
        let _ = limiter.admit(now, u64::MAX);
    }
}
