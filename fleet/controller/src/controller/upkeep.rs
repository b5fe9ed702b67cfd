// SPDX-License-Identifier: Apache-2.0
//! Performs the leader's periodic work: late guests and the archive.

use std::time::Duration;

use super::Leadership;
use crate::drift;
use crate::rollout::{Millis, Phase, Rollout};
use crate::runner::now;
use crate::spec::{LateGuests, Spec};

/// The interval at which [`change_late_guests`] queries configured hosts.
const LATE_INTERVAL: Duration = Duration::from_secs(30);
/// The longest interval at which [`archive_ended`] looks for rollouts.
const ARCHIVE_INTERVAL: Duration = Duration::from_secs(600);
/// The shortest interval, for rollouts that are kept for less than that.
const MIN_ARCHIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Changes guests that joined after their rollout was planned, if its spec requires that. It checks
/// for them whenever the registry changes. Configured hosts do not report new guests, so they are
/// also queried at an interval.
pub async fn change_late_guests(leadership: &Leadership) {
    let (hosts, authority) = (leadership.hosts(), &leadership.authority);
    let (mut changes, mut policy) = (hosts.changes(), authority.policy().subscribe());
    loop {
        for running in leadership.rollouts() {
            if let Err(error) = drift::change_late(hosts, authority, &running).await {
                tracing::warn!("guests that joined are not changed: {error}");
            }
        }
        tokio::select! {
            _ = changes.changed() => {}
            _ = policy.changed() => {}
            () = tokio::time::sleep(LATE_INTERVAL) => {}
        }
    }
}

/// Deletes rollouts when they have been over for the time of `--keep`.
pub async fn archive_ended(leadership: &Leadership) {
    let keep = leadership.context.archive.keep;
    let interval = keep.clamp(MIN_ARCHIVE_INTERVAL, ARCHIVE_INTERVAL);
    let keep = Millis::try_from(keep.as_millis()).unwrap_or(Millis::MAX);
    loop {
        // The first scan is delayed too, so that an operator whose clock or --keep is wrong has
        // time to stop the program.
        tokio::time::sleep(interval).await;
        for running in leadership.rollouts() {
            let is_due = is_due(&running.rollout(), &running.spec, keep, now());
            if is_due && let Ok(Err(error)) = running.delete("").await {
                tracing::error!("{error}");
            }
        }
    }
}

/// Returns whether the rollout has been over for this time and may be deleted.
fn is_due(rollout: &Rollout, spec: &Spec, keep: Millis, now: Millis) -> bool {
    let header = rollout.header();
    // Such a rollout still changes guests that join later.
    if header.phase == Phase::Completed && spec.late_guests == LateGuests::Change {
        return false;
    }
    let last = header.timeline.last();
    let last = last.map_or(header.created, |entry| entry.time);
    last.saturating_add(keep) <= now && rollout.check_deletable().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::{End, Header};
    use crate::storage::tests::{SPEC, rollout};

    #[test]
    fn a_rollout_is_not_deleted_while_it_changes_guests_that_join() {
        let change = format!("{SPEC}late_guests: change\n");
        for (phase, text, expected) in [
            (Phase::Completed, SPEC, true),
            (Phase::Completed, &change, false),
            (Phase::Ended(End::Undone), &change, true),
            (Phase::Planned, SPEC, false),
        ] {
            let header = Header {
                phase,
                created: 100,
                ..rollout("net", 1, 1).header().clone()
            };
            let one = Rollout::new(header, vec![]);
            let spec = Spec::parse(text).expect("a spec");
            assert_eq!(is_due(&one, &spec, 10, 110), expected, "{phase:?}");
            assert!(!is_due(&one, &spec, 10, 109), "it is kept");
        }
    }
}
