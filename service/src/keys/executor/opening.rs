// SPDX-License-Identifier: Apache-2.0
//! Waits until the gates of a busy guest are open, so that stopping it is worthwhile.
//!
//! A guest that changes its own keys all the time frees its mutexes only for some microseconds at a
//! time. The plan, the check before a stop and the check in the stopped guest must all find the
//! mutexes free. So the first two are repeated at short intervals while the guest runs, and the
//! guest is stopped as soon as the gates are open.

use std::thread;
use std::time::{Duration, Instant};

use static_keys::{Busy, PlanError, VerifyError};

/// Maximum time that one attempt waits for open gates. Between two attempts the executor checks
/// whether the client still waits and whether the modules are unchanged.
const PATIENCE: Duration = Duration::from_millis(50);
/// Minimum and maximum interval between two checks. Within these limits the interval is an eighth
/// of the time waited so far.
const INTERVALS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(500));

/// The clock that the wait uses.
trait Pace {
    /// Returns the time since an arbitrary moment.
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration);
}

/// The host's clock.
struct HostPace(Instant);

impl HostPace {
    fn start() -> Self {
        Self(Instant::now())
    }
}

impl Pace for HostPace {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// The result of a check while the guest runs.
pub(super) trait Found {
    /// Returns the gate that was closed.
    fn busy(&self) -> Option<&Busy>;
}

impl<T> Found for Result<T, PlanError> {
    fn busy(&self) -> Option<&Busy> {
        match self {
            Err(PlanError::Busy(busy)) => Some(busy),
            _ => None,
        }
    }
}

impl<T> Found for Result<T, VerifyError> {
    fn busy(&self) -> Option<&Busy> {
        match self {
            Err(VerifyError::Busy(busy)) => Some(busy),
            _ => None,
        }
    }
}

/// Repeats `look` until it finds no closed gate, or until it finds a fault that waiting cannot
/// remove. Gives up after a part of the time that is left for the change, so that the change has
/// several attempts. Returns the last result.
pub(super) fn await_opening<F: Found>(left: Duration, look: impl FnMut() -> F) -> F {
    await_opening_at(&HostPace::start(), PATIENCE.min(left / 8), look)
}

fn await_opening_at<F: Found>(
    pace: &impl Pace,
    patience: Duration,
    mut look: impl FnMut() -> F,
) -> F {
    let began = pace.now();
    loop {
        let before = pace.now();
        let found = look();
        let after = pace.now();
        let waited = after.saturating_sub(began);
        let opens_again = found.busy().is_some_and(|busy| !busy.outdates_plan());
        if !opens_again || waited >= patience {
            return found;
        }
        // A check of a large plan takes longer. At most half of the time is spent in checks.
        let (shortest, longest) = INTERVALS;
        let interval = (waited / 8).clamp(shortest, longest);
        pace.sleep(interval.max(after.saturating_sub(before)));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use static_keys::AccessFault;

    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// A guest in a storm of its own flips, in simulated time. Its mutexes are alternately held and
    /// free, for times that vary.
    struct Storm {
        now: Cell<Duration>,
        /// The end of the current time with held mutexes, the end of the following time with free
        /// mutexes, and the state of the random number generator.
        turn: RefCell<(Duration, Duration, u64)>,
        held: (u32, u32),
        free: (u32, u32),
    }

    impl Storm {
        fn new(seed: u64, held: (u32, u32), free: (u32, u32)) -> Self {
            Self {
                now: Cell::new(Duration::ZERO),
                turn: RefCell::new((Duration::ZERO, Duration::ZERO, seed)),
                held,
                free,
            }
        }

        fn pass(&self, time: Duration) {
            self.now.set(self.now.get() + time);
        }

        /// Draws a number from this range, by the generator of Knuth's MMIX.
        fn draw(state: &mut u64, (from, to): (u32, u32)) -> u32 {
            *state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let high = u32::try_from(*state >> 33).expect("31 bits");
            from + high % (to - from + 1)
        }

        fn is_open(&self) -> bool {
            let (held_until, free_until, state) = &mut *self.turn.borrow_mut();
            while *free_until <= self.now.get() {
                *held_until = *free_until + MICROSECOND * Self::draw(state, self.held);
                *free_until = *held_until + MICROSECOND * Self::draw(state, self.free);
            }
            *held_until <= self.now.get()
        }

        fn look(&self) -> Result<(), VerifyError> {
            self.pass(2 * MICROSECOND);
            match self.is_open() {
                true => Ok(()),
                false => Err(held()),
            }
        }

        /// Makes a change as the executor does. Returns the number of attempts, and the number of
        /// stops among them.
        fn change(&self, patience: Duration) -> (u32, u32) {
            let (mut stops, mut backoff) = (0, Duration::from_millis(1));
            for attempts in 1.. {
                // The plan, and the check before the stop.
                let mut looks = (0..2).map(|_| await_opening_at(self, patience, || self.look()));
                if looks.all(|found| found.is_ok()) {
                    stops += 1;
                    // The time that QEMU takes to stop the vCPUs.
                    self.pass(Duration::from_micros(900));
                    if self.is_open() {
                        return (attempts, stops);
                    }
                }
                self.pass(backoff);
                backoff = (backoff * 2).min(Duration::from_millis(16));
            }
            unreachable!("the attempts are not limited")
        }
    }

    impl Pace for Storm {
        fn now(&self) -> Duration {
            self.now.get()
        }

        /// The host adds its timer slack.
        fn sleep(&self, time: Duration) {
            self.pass(time + 55 * MICROSECOND);
        }
    }

    fn held() -> VerifyError {
        Busy::FirstReference { key: "key".into() }.into()
    }

    /// Returns the medians of attempts, stops and milliseconds over 101 changes.
    fn medians(patience: Duration) -> [u128; 3] {
        let mut all: [Vec<u128>; 3] = Default::default();
        for seed in 0..101 {
            let storm = Storm::new(seed, (100, 300), (10, 40));
            let (attempts, stops) = storm.change(patience);
            let time = storm.now.get().as_millis();
            for (of, value) in all.iter_mut().zip([attempts.into(), stops.into(), time]) {
                of.push(value);
            }
        }
        all.map(|mut of| {
            of.sort_unstable();
            of[of.len() / 2]
        })
    }

    #[test]
    fn a_change_in_a_storm_takes_few_attempts() {
        // A patience of zero means one check per attempt.
        let before = medians(Duration::ZERO);
        let after = medians(PATIENCE);
        eprintln!("attempts, stops, ms: {before:?} with one look per attempt, {after:?} awaited");
        assert!(5 * after[0] < before[0], "{before:?} {after:?}");
        assert!(5 * after[2] < before[2], "{before:?} {after:?}");
        // The number of stops stays about the same, because the gates may close again before the
        // guest has stopped.
        assert!(after[1] < 2 * before[1] + 5, "{before:?} {after:?}");
    }

    #[test]
    fn a_gate_that_stays_closed_ends_the_wait() {
        let storm = Storm::new(1, (1, 1), (1, 1));
        let mut looks = 0;
        let found: Result<(), _> = await_opening_at(&storm, PATIENCE, || {
            looks += 1;
            Err(held())
        });
        assert_eq!(found, Err(held()));
        assert!(storm.now.get() >= PATIENCE);
        assert!((50..300).contains(&looks), "{looks}");
    }

    #[test]
    fn what_no_wait_mends_is_found_at_once() {
        let count = Busy::Count {
            key: "key".into(),
            expected: 1,
            found: 2,
        };
        for error in [VerifyError::Busy(count), VerifyError::Fault(AccessFault)] {
            let storm = Storm::new(1, (1, 1), (1, 1));
            let found: Result<(), _> = await_opening_at(&storm, PATIENCE, || Err(error.clone()));
            assert_eq!((found, storm.now.get()), (Err(error), Duration::ZERO));
        }
    }

    /// A check of ten thousand gates must not take all of the time.
    #[test]
    fn the_time_between_looks_grows_with_what_a_look_takes() {
        let storm = Storm::new(1, (1, 1), (1, 1));
        let look = Duration::from_millis(5);
        let mut looks = 0;
        let found: Result<(), _> = await_opening_at(&storm, PATIENCE, || {
            looks += 1;
            storm.pass(look);
            Err(held())
        });
        assert_eq!(found, Err(held()));
        assert!(looks * look <= PATIENCE / 2 + look, "{looks}");
    }
}
