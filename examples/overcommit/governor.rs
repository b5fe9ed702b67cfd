// SPDX-License-Identifier: Apache-2.0
//! Decides which lock the guest should use.

/// The number of periods below the lower threshold after which the fair lock comes back. It is more
/// than one because each change stops the guest.
const CALM_PERIODS: u32 = 5;

/// The shares of run delay at which the lock changes.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    /// The share above which the guest should use the unfair lock.
    pub high: f64,
    /// The share below which the guest should use the fair lock, because the vCPUs seldom wait for
    /// CPUs.
    pub low: f64,
}

/// The lock that a guest should use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// The queued spinlock. Its next holder may be a vCPU that does not run, and then all others
    /// spin.
    Fair,
    /// Test-and-set. Whichever vCPU runs takes it.
    Unfair,
}

/// Follows the run delay with hysteresis.
#[derive(Debug)]
pub struct Governor {
    thresholds: Thresholds,
    lock: Lock,
    calm: u32,
}

impl Governor {
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            lock: Lock::Fair,
            calm: 0,
        }
    }

    /// Returns the lock to use after a period with this share of run delay.
    pub fn follow(&mut self, share: f64) -> Lock {
        if share > self.thresholds.high {
            self.lock = Lock::Unfair;
        }
        self.calm = if share < self.thresholds.low {
            self.calm + 1
        } else {
            0
        };
        if self.calm >= CALM_PERIODS {
            self.lock = Lock::Fair;
            self.calm = 0;
        }
        self.lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(shares: &[f64]) -> Lock {
        let mut governor = Governor::new(Thresholds {
            high: 0.2,
            low: 0.05,
        });
        shares
            .iter()
            .fold(Lock::Fair, |_, share| governor.follow(*share))
    }

    #[test]
    fn one_period_of_overcommitment_is_enough() {
        assert_eq!(after(&[0.0, 0.19]), Lock::Fair);
        assert_eq!(after(&[0.21]), Lock::Unfair);
        assert_eq!(
            after(&[0.21, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
            Lock::Unfair,
            "between the thresholds"
        );
    }

    #[test]
    fn the_fair_lock_comes_back_after_calm_periods_in_a_row() {
        let calm = [0.0; CALM_PERIODS as usize];
        assert_eq!(after(&[&[0.9], &calm[..]].concat()), Lock::Fair);
        assert_eq!(after(&[&[0.9], &calm[1..]].concat()), Lock::Unfair);
        assert_eq!(
            after(&[&[0.9], &calm[1..], &[0.06], &calm[1..]].concat()),
            Lock::Unfair
        );
    }
}
