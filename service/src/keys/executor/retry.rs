// SPDX-License-Identifier: Apache-2.0
//! Repeats a change while the guest is busy.

use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;

use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure};
use crate::keys::error::KeysError;

const FIRST_BACKOFF: Duration = Duration::from_millis(1);
const LAST_BACKOFF: Duration = Duration::from_millis(16);

impl<G: Guest> Executor<G> {
    /// Attempts a change until it is made or refused, or until its deadline passes. Also returns
    /// the number of attempts.
    pub(super) fn persist<'g, T>(
        &mut self,
        deadline: Instant,
        standstill: &mut Standstill<'g, G>,
        cancelled: impl Fn() -> bool,
        mut attempt: impl FnMut(&mut Self, &mut Standstill<'g, G>) -> Result<T, Failure>,
    ) -> Result<(T, u32), KeysError> {
        let mut attempts = 0;
        let mut backoff = FIRST_BACKOFF;
        let mut last: Option<Blocker> = None;
        loop {
            if cancelled() {
                return Err(KeysError::Cancelled);
            }
            if Instant::now() >= deadline {
                // If there was an attempt, the wait after it took longer than planned.
                return Err(last.map_or_else(|| self.not_begun(), |gate| gate.busy_in(attempts)));
            }
            attempts += 1;
            match attempt(self, standstill) {
                Ok(done) => return Ok((done, attempts)),
                Err(Failure::Refused(error)) => return Err(error),
                // While the guest is held, a retry finds the same state.
                Err(Failure::Busy(mut gate)) if standstill.held().is_some() => {
                    gate.name += " (the guest is held paused: resume it)";
                    return Err(gate.busy_in(attempts));
                }
                Err(Failure::Busy(gate)) => {
                    let wait = with_jitter(backoff);
                    if Instant::now() + wait >= deadline {
                        return Err(gate.busy_in(attempts));
                    }
                    std::thread::sleep(wait);
                    backoff = (backoff * 2).min(LAST_BACKOFF);
                    last = Some(gate);
                }
            }
        }
    }

    /// Returns the error of a change that spent all its time in the queue or in the search for the
    /// guest's kernel.
    fn not_begun(&self) -> KeysError {
        let known = self.shared.registry.known();
        known.err().unwrap_or_else(|| {
            Blocker::time_is_over("the call's time ended before its first attempt").busy_in(0)
        })
    }
}

/// Adds up to half of the delay at random, so that attempts do not synchronise with the guest.
fn with_jitter(wait: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(wait) % 512;
    wait + wait * u32::try_from(random).unwrap_or(0) / 1024
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use static_keys::Op;

    use super::*;
    use crate::keys::{KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};
    use patchbay_guest::testing::{InMemoryGuest, TestKey};

    /// The search for a kernel and the preceding changes may use up a call's time.
    #[tokio::test]
    async fn a_call_whose_time_has_ended_is_told_the_state_of_the_guest() {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::new(Arc::clone(&registry));
        let (keys, _) =
            Keys::start(Arc::clone(&guest), registry, KeysConfig::default()).expect("a thread");
        let late = || {
            let updates = vec![KeyUpdate::new("alpha", Op::Enable)];
            let second = Duration::from_secs(1);
            keys.update(UpdateRequest::new(updates, "a", second, Instant::now()))
        };
        let refusal = late().await.expect_err("no kernel");
        assert!(
            matches!(refusal, KeysError::NotRegistered { .. }),
            "{refusal:?}"
        );
        guest.run(&[TestKey::new("alpha", 1)]);
        let refusal = late().await.expect_err("no time");
        assert!(
            matches!(refusal, KeysError::Busy { attempts: 0, .. }),
            "{refusal:?}"
        );
        assert_eq!(guest.count("alpha"), 0);
    }

    #[test]
    fn jitter_only_lengthens_by_up_to_half() {
        for _ in 0..1000 {
            let wait = with_jitter(FIRST_BACKOFF);
            assert!(
                (FIRST_BACKOFF..=FIRST_BACKOFF * 3 / 2).contains(&wait),
                "{wait:?}"
            );
        }
    }
}
