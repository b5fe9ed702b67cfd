// SPDX-License-Identifier: Apache-2.0
//! Tracks guests that were as wanted and no longer answer. Records when each guest became unknown,
//! late or stuck.

use std::collections::BTreeSet;

use super::state::{Millis, Rollout};

impl Rollout {
    /// Records that a guest that was as wanted does not answer. It is asked again after a delay
    /// that grows.
    pub(super) fn lose_sight(&mut self, index: usize, now: Millis) {
        self.put_off(index, now);
        let since = &mut self.members[index].since;
        if since.is_none() {
            *since = Some(now);
            self.run.changed.insert(index);
        }
    }

    /// Records that a guest that is as wanted answers.
    pub(super) fn regain_sight(&mut self, index: usize) {
        self.run.retries.remove(&index);
        if self.members[index].since.take().is_some() {
            self.run.changed.insert(index);
        }
    }

    /// Ends the delays of these members' queries. Another change of a guest that boots after each
    /// one has to wait, but not a query.
    pub(super) fn hurry(&mut self, members: &BTreeSet<usize>) {
        for &index in members {
            if let Some(retry) = self.run.retries.get_mut(&index)
                && self.members[index].state.has_claims()
            {
                retry.1 = 0;
            }
        }
    }

    /// Returns the members that were as wanted and do not answer.
    pub(super) fn unknown(&self) -> impl Iterator<Item = usize> {
        let members = self.members.iter().enumerate();
        let unknown = members.filter(|(_, member)| member.is_unknown());
        unknown.map(|(index, _)| index)
    }

    /// Dates the members whose calls have begun to fail since the last step.
    pub(super) fn date(&mut self, now: Millis) {
        for &index in &self.run.changed {
            let member = &mut self.members[index];
            if member.state.is_late() || member.state.is_stuck() {
                member.since.get_or_insert(now);
            }
        }
    }
}
