// SPDX-License-Identifier: Apache-2.0
//! Amends a rollout for guests that drifted or joined after the plan.

use std::collections::HashMap;
use std::sync::Arc;

use super::keys::KeySets;
use super::legal::NotLegal;
use super::state::{Member, Millis, Phase, Rollout, Stage, State, Wave};

/// The number of waves from which on no further one is added, so that the header stays small.
pub(super) const MAX_WAVES: usize = 2048;

impl Rollout {
    /// Adds waves of these members after the last one. `cut` divides that many members into waves.
    /// They replace earlier members of the same guests. A guest that is being changed or waits for
    /// its wave is left out of the new waves.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout runs or is completed, and if it has [`MAX_WAVES`] waves.
    pub fn extend(
        &mut self,
        cut: impl FnOnce(usize) -> Vec<Wave>,
        mut added: Vec<Member>,
        principal: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        if !matches!(self.header.phase, Phase::Running(_) | Phase::Completed) {
            return Err(self.not_legal("drift --fix", "running or completed"));
        }
        let waves = self.header.waves.len();
        if waves >= MAX_WAVES {
            let rollout = self.header.name.clone();
            return Err(NotLegal::Waves { rollout, waves });
        }
        let current = self.current();
        added.retain_mut(|member| {
            let earlier = current.get(&guest(member));
            earlier.is_none_or(|&earlier| self.supersede(earlier, member, now))
        });
        let (first, count) = (self.members.len(), added.len());
        if count == 0 {
            return Ok(());
        }
        let mut cut = cut(count);
        // What does not fit into further waves goes into the last one.
        cut.truncate(MAX_WAVES - waves);
        let mut end = first;
        for wave in &mut cut {
            wave.first = end;
            wave.is_added = true;
            end += wave.count;
        }
        let Some(last) = cut.last_mut() else {
            return Ok(());
        };
        last.count += (first + count) - end;
        let (name, more) = (cut[0].name.clone(), cut.len() - 1);
        self.header.waves.extend(cut);
        // An empty principal is the rollout itself, which adds guests that its spec selects. They
        // are changed for the person who started it.
        if !principal.is_empty() {
            self.header
                .decide(waves..self.header.waves.len(), principal);
        }
        self.append(added);
        let text = match more {
            0 => format!("wave {name} is added, with {count} guests"),
            _ => format!("wave {name} and {more} more are added, with {count} guests"),
        };
        if self.header.phase == Phase::Completed {
            self.enter(Phase::Running(Stage::Changing), principal, now, &text);
        } else {
            self.note(principal, now, text);
        }
        Ok(())
    }

    /// Returns the members that are not superseded, by host and guest.
    fn current(&self) -> HashMap<(String, String), usize> {
        let members = self.members.iter().enumerate();
        let members = members.filter(|(_, member)| member.state != State::Superseded);
        members
            .map(|(index, member)| (guest(member), index))
            .collect()
    }

    /// Replaces the earlier member of the same guest. The new member continues its generation.
    /// Returns false and changes nothing if the earlier one is being changed or waits for its wave.
    fn supersede(&mut self, index: usize, member: &mut Member, now: Millis) -> bool {
        let earlier = &self.members[index];
        if matches!(earlier.state, State::Pending | State::Claiming { .. }) {
            return false;
        }
        member.generation = earlier.generation;
        if member.boot.is_empty() {
            member.boot.clone_from(&earlier.boot);
        }
        // If a guest that has confirmed its claims has no record of them, its release is not known.
        // Without the name of the record, nobody knows whether claims with a TTL still exist.
        let is_lasting = match earlier.record {
            Some(_) => !earlier.has_expired(now),
            None => earlier.expires.is_none(),
        };
        member.is_confirmed = earlier.is_confirmed && is_lasting && member.boot == earlier.boot;
        member.record.clone_from(&earlier.record);
        self.raise(index);
        self.run.retries.remove(&index);
        self.set(index, State::Superseded);
        true
    }

    /// Accepts the present state of guests. The rollout no longer controls the members with these
    /// indices, except those that are being changed. `joined` guests are left out permanently.
    ///
    /// # Errors
    /// [`NotLegal`] if the rollout is planned, reverts or has ended.
    pub fn adopt(
        &mut self,
        drifted: &[usize],
        joined: Vec<Member>,
        principal: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        if !self.header.phase.has_desired_state() {
            return Err(self.not_legal("drift --adopt", "running, paused or completed"));
        }
        for &index in drifted {
            // A guest that is being changed must answer first.
            let state = &self.members[index].state;
            if matches!(state, State::AsWanted { .. } | State::NotYet { .. }) {
                self.raise(index);
                self.set(index, State::Adopted);
            }
        }
        // A guest that became a member meanwhile must keep its claims until they are released.
        let known = self.current();
        let mut joined = joined;
        joined.retain(|one| !known.contains_key(&guest(one)));
        let count = drifted.len() + joined.len();
        self.append(joined);
        self.note(
            principal,
            now,
            format!("{count} guests are accepted as they are"),
        );
        Ok(())
    }

    fn append(&mut self, mut added: Vec<Member>) {
        let mut sets = KeySets::default();
        for member in self.members.iter_mut().chain(&mut added) {
            member.plan.set = sets.shared(Arc::clone(&member.plan.set));
        }
        let first = self.members.len();
        self.members.extend(added);
        self.run.changed.extend(first..self.members.len());
        self.header.members = self.members.len();
        self.run.header_changed = true;
    }
}

/// Returns the names that tell the member's guest from others.
fn guest(member: &Member) -> (String, String) {
    (member.host.clone(), member.guest.clone())
}
