// SPDX-License-Identifier: Apache-2.0
//! Checks at the end of a run that a rollout waits only for guests that have an obstacle.

use patchbay_fleet::rollout::{AfterReboot, Claim, Member, Phase, Rollout, State, Want};

use super::guest::{Kind, MODULE_KEY};
use super::oracle::{LONGEST_RETRY, number_of};
use super::owners::EARLY;
use super::world::World;

/// A guest that boots or reloads its module this many times, each time soon after a change, is left
/// as it is.
const MAX_LOSSES: u32 = 3;

impl World {
    /// Checks that the rollout waits for a guest only if there is a reason in the guest.
    pub fn check_progress(&self, index: usize, rollout: &Rollout, rollouts: &[Rollout]) {
        let phase = rollout.header().phase;
        let runs = matches!(phase, Phase::Running(_) | Phase::Completed);
        let Some(member) = self.member(index, rollout) else {
            return;
        };
        if runs && matches!(member.state, State::Released { .. }) {
            self.check_left(index, member, rollout);
        }
        let waits = match member.state {
            State::Claiming { .. } | State::NotYet { .. } => true,
            // A guest of a wave that was not reached has no generation.
            State::Pending => member.generation > 0,
            _ => false,
        };
        let is_asked = member.state.is_ineffective() && self.has_just_ended(index);
        let has_lost_ledger = self.guests[index].orphans.is_some();
        let is_lost = has_lost_ledger || is_asked || self.is_lost(rollout, member);
        if !runs || !waits || is_lost {
            return;
        }
        let claims = member.plan.set.claims();
        let mut claimed = claims.iter();
        let has_reason = claimed.any(|one| self.has_obstacle(index, one, rollout, rollouts));
        assert!(
            has_reason,
            "guest {index} is still {:?} in {}, and nothing keeps it from {claims:?}",
            member.state,
            rollout.header().name
        );
    }

    /// Checks a guest whose claims have ended and are not made again, in a rollout that goes on.
    fn check_left(&self, index: usize, member: &Member, rollout: &Rollout) {
        let header = rollout.header();
        let number = number_of(rollout, member);
        let wave = number.and_then(|number| header.wave_of(number));
        let is_taken_back = wave.is_some_and(|wave| header.waves[wave].is_taken_back);
        let leaves = header.policy.after_reboot == AfterReboot::Leave;
        let guest = &self.guests[index];
        let mut claims = member.plan.set.claims().iter();
        let reloads = match claims.any(|claim| claim.key == MODULE_KEY) {
            true => guest.reloads,
            false => 0,
        };
        let losses = guest.boots - 1 + reloads;
        assert!(
            is_taken_back || leaves || member.expires.is_some() || losses >= MAX_LOSSES,
            "guest {index} is given up by {} after {losses} boots and reloads",
            header.name
        );
    }

    /// Returns whether claims on the guest may have ended by themselves since the drivers asked it.
    pub fn has_just_ended(&self, index: usize) -> bool {
        let guest = &self.guests[index];
        let at = self.now - LONGEST_RETRY;
        let mut owners = guest.ends.keys();
        owners.any(|owner| guest.has_ended(owner, at) != Some(true))
    }

    /// Returns whether a claim of a rollout may not be as wanted. The newest ON or OFF decides, and
    /// each HELD keeps the key on.
    fn has_obstacle(
        &self,
        index: usize,
        claim: &Claim,
        rollout: &Rollout,
        rollouts: &[Rollout],
    ) -> bool {
        let (guest, key, header) = (&self.guests[index], &*claim.key, rollout.header());
        if !guest.can_have(key, header.policy.allow_guarded) || guest.changed.contains(key) {
            return true;
        }
        // The guest's own references are not taken away without consent.
        let can_be_off = guest.original[key] == 0;
        // A second reference to a guarded key would make the guest's own code warn.
        let is_guarded = guest.kind(key) == Kind::Guarded;
        let is_alone = claim.want == Want::Held && is_guarded;
        let opposes = |(other, is_later): (Want, bool)| match claim.want {
            Want::Held => is_alone && other != Want::Off,
            Want::On if other == Want::Held => is_guarded,
            Want::On => other == Want::Off && is_later && can_be_off,
            Want::Off => other == Want::Held || (other == Want::On && is_later),
        };
        let others = guest.others.iter();
        let others = others.filter_map(|(owner, of)| Some((*of.get(key)?, *owner != EARLY)));
        // The claim is tried again some time after the obstacle has ended.
        let at = self.now - LONGEST_RETRY;
        let rolled_out = rollouts
            .iter()
            .filter(|one| one.header().name != header.name);
        let rolled_out = rolled_out.flat_map(|other| {
            let is_later = other.header().created > header.created;
            let claimed = self.claimed_at(index, key, other, at).into_iter().flatten();
            claimed.map(move |want| (want, is_later))
        });
        let is_own = (claim.want == Want::Off || is_alone) && !can_be_off;
        is_own || others.chain(rolled_out).any(opposes)
    }
}
