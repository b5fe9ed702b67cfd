// SPDX-License-Identifier: Apache-2.0
//! Compares what happens with what the design promises. A broken promise ends the run by a panic.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_fleet::rollout::{Action, Member, Millis, Phase, Rollout, State};
use patchbay_fleet::runner::Command;
use patchbay_proto::v1;

use super::guest::{KEYS, Kill};
use super::world::World;

#[derive(Default)]
pub struct Oracle {
    /// The generations of the members that are stored.
    pub generations: Vec<u64>,
    is_reverted: bool,
    forgotten: BTreeSet<usize>,
    /// The latest generation that was answered, by guest and boot.
    answered: BTreeMap<(usize, u32), u64>,
    /// The pauses for a generation, by guest and boot.
    pauses: BTreeMap<(usize, u32, u64), u64>,
}

impl Oracle {
    /// Records a command whose success was told.
    pub fn answered(&mut self, command: &Command) {
        match command {
            Command::Abort | Command::Undo => self.is_reverted = true,
            Command::Forget { member } => _ = self.forgotten.insert(*member),
            _ => {}
        }
    }
}

fn is_claiming(member: &Member) -> bool {
    matches!(member.state, State::Claiming { .. })
}

impl World {
    /// Checks a state that a driver has saved after a step at this time.
    pub fn check_saved(&mut self, rollout: &Rollout, at: Millis) {
        let (header, members) = (rollout.header(), rollout.members());
        let (phase, policy) = (header.phase, &header.policy);
        let is_left_out =
            |member: &&Member| matches!(member.state, State::Skipped { .. } | State::Superseded);
        let left_out = members.iter().filter(is_left_out).count();
        let claiming = members.iter().filter(|member| is_claiming(member));
        let (total, most) = (
            claiming.clone().count(),
            policy.caps.total(members.len() - left_out),
        );
        assert!(
            total <= most,
            "{total} guests are claiming, the cap is {most}"
        );
        let mut domains: BTreeMap<&str, usize> = BTreeMap::new();
        for member in claiming {
            *domains.entry(&member.domain).or_default() += 1;
        }
        let most = policy.caps.per_domain();
        assert!(
            domains.values().all(|total| *total <= most),
            "{domains:?}, the cap is {most}"
        );
        for (index, member) in members.iter().enumerate() {
            let before = self.oracle.generations.get(index).copied().unwrap_or(0);
            assert!(
                member.generation >= before,
                "member {index} goes back in generation"
            );
            if is_claiming(member) && member.generation > before {
                let runs = matches!(phase, Phase::Running(_) | Phase::Completed);
                assert!(
                    runs,
                    "member {index} is claimed anew while the rollout is {phase:?}"
                );
                assert_eq!(
                    policy.frozen(at),
                    None,
                    "member {index} is claimed in a freeze"
                );
            }
            if self.oracle.forgotten.contains(&index) {
                let is_given_up = matches!(member.state, State::Forgotten | State::Superseded);
                assert!(
                    is_given_up,
                    "member {index} was forgotten, and is {:?}",
                    member.state
                );
            }
        }
        self.oracle.generations = members.iter().map(|member| member.generation).collect();
        let reverts = matches!(phase, Phase::Reverting(_) | Phase::Ended(_));
        assert!(
            reverts || !self.oracle.is_reverted,
            "{phase:?} after an undo"
        );
    }

    /// Checks an action that a driver is about to perform against the store.
    pub fn check_action(&self, rollout: &Rollout, action: &Action) {
        let (&member, &generation, has_claims) = match action {
            Action::Claim { member, generation } => (member, generation, true),
            Action::Release { member, generation } => (member, generation, false),
            _ => return,
        };
        let name = &rollout.header().name;
        let record = self
            .store
            .value(&format!("rollouts/{name}/members/{member:08}"));
        let record: serde_json::Value =
            serde_json::from_slice(&record.expect("the member is stored")).expect("JSON");
        let stored = record["generation"].as_u64().unwrap_or(0);
        assert!(
            stored >= generation,
            "generation {generation} is sent, and {stored} is stored"
        );
        if has_claims {
            let phase = rollout.header().phase;
            let reverts = matches!(phase, Phase::Reverting(_) | Phase::Ended(_));
            assert!(!reverts, "claims are sent while the rollout is {phase:?}");
            let observes = rollout.header().policy.observes_agents();
            assert!(
                !observes || rollout.members()[member].health.is_some(),
                "the driver has no report"
            );
        }
    }

    /// Checks the effect of a request that was delivered. `before` are the counts before it.
    pub fn check_delivered(
        &mut self,
        index: usize,
        request: &v1::SetClaimsRequest,
        before: &BTreeMap<&'static str, i32>,
        pauses: u64,
        kill: Kill,
        answer: Option<&v1::SetClaimsResponse>,
    ) {
        let guest = &self.guests[index];
        let (boots, generation) = (guest.boots, request.generation);
        let answered = self.oracle.answered.entry((index, boots)).or_default();
        let after = guest.counts();
        if generation <= *answered {
            assert_eq!(
                &after, before,
                "guest {index} is changed by generation {generation}, after {answered}"
            );
            let is_stale = generation < *answered && answer.is_some();
            assert!(
                !is_stale,
                "guest {index} takes generation {generation} after {answered}"
            );
        }
        if guest.is_namesake {
            assert_eq!(&after, before, "guest {index} is not one of the rollout's");
            assert!(
                answer.is_none(),
                "guest {index} is not one of the rollout's"
            );
        }
        if answer.is_some() {
            *answered = generation.max(*answered);
        }
        let paused = self
            .oracle
            .pauses
            .entry((index, boots, generation))
            .or_default();
        if kill != Kill::BeforeChange {
            *paused += pauses;
        }
        // If the guest has changed a key since the service was killed, the service cannot tell from
        // the counts whether the change was made.
        let is_ambiguous = !guest.changed.is_empty();
        assert!(
            *paused <= 1 || is_ambiguous,
            "guest {index} is paused {paused} times for {generation}"
        );
    }

    /// Finds the guests that have moved and booted again before a driver saw them on their hosts.
    /// Nothing tells them from other guests of the same names, so a person has to forget them.
    fn find_lost(&mut self, rollout: &Rollout) {
        self.lost.clear();
        for index in 0..self.guests.len() {
            let boot = self.boot_of(index);
            let guest = &self.guests[index];
            let is_lost = |member: &&Member| {
                member.guest == guest.name
                    && member.state != State::Superseded
                    && Some(&member.host) != guest.host.as_ref()
                    && member.boot != boot
            };
            if !guest.is_namesake && rollout.members().iter().any(|member| is_lost(&member)) {
                self.lost.insert(guest.name.clone());
            }
        }
    }

    /// Checks the guests after everything has come to rest.
    pub fn check_rest(&mut self, rollout: &Rollout) {
        self.find_lost(rollout);
        let owner = rollout.header().owner();
        let phase = rollout.header().phase;
        for index in 0..self.guests.len() {
            let now = self.now;
            let guest = &mut self.guests[index];
            let claims = guest.claims(&self.runtime, now, "").expect("served").claims;
            let guest = &self.guests[index];
            let members = rollout.members().iter();
            let is_latest = |member: &&Member| {
                member.guest == guest.name
                    && !guest.is_namesake
                    && member.state != State::Superseded
            };
            let mut members = members.filter(is_latest);
            let member = members.next();
            assert!(
                members.next().is_none(),
                "guest {index} is in two waves that count"
            );
            let is_over = matches!(phase, Phase::Ended(_));
            let is_lost = member.is_some_and(|member| self.lost.contains(&member.guest));
            let state = member.map(|member| &member.state).filter(|_| !is_lost);
            let wants = |key: &str| {
                let mut claims = member?.plan.set.claims().iter();
                claims
                    .find(|claim| claim.key == key)
                    .map(|claim| claim.want)
            };
            for key in KEYS {
                let (count, jumps) = (guest.vm.count(key), guest.vm.jumps(key));
                assert_eq!(jumps, count > 0, "guest {index}: {key} is {count}");
                if guest.changed.contains(key) {
                    continue;
                }
                let without = guest.expected(key, None, true);
                let with = [true, false].map(|newest| guest.expected(key, wants(key), newest));
                let right = match state {
                    _ if is_lost => count == without || with.contains(&count),
                    Some(State::Forgotten | State::Adopted) => {
                        count == without || with.contains(&count)
                    }
                    _ if is_over => count == without,
                    Some(State::AsWanted { .. }) => with.contains(&count),
                    Some(State::Released { .. }) | None => count == without,
                    // The guest waits for its wave.
                    Some(State::Pending) if member.is_some_and(|one| one.generation == 0) => {
                        count == without
                    }
                    _ => count == without || with.contains(&count),
                };
                let others = &guest.others;
                assert!(
                    right,
                    "guest {index} is {state:?} and {key} is {count}: {without} without the \
                     rollout, {with:?} with {:?}; original {}, others {others:?}",
                    wants(key),
                    guest.original[key],
                );
            }
            let is_given_up = matches!(state, Some(State::Forgotten | State::Adopted));
            let is_released = matches!(state, None | Some(State::Released { .. }));
            let is_free = !is_lost && !is_given_up && (is_released || is_over);
            let own = claims.iter().any(|claim| claim.owner == owner);
            assert!(
                !is_free || !own,
                "guest {index} is {state:?} and has claims of the rollout"
            );
            for (other, wants) in &guest.others {
                for key in wants.keys().filter(|key| !guest.changed.contains(*key)) {
                    let mut of = claims.iter().filter(|claim| claim.key == **key);
                    let claim = of.find(|claim| claim.owner == **other);
                    let is_void = claim.is_none_or(|one| one.state() == v1::ClaimState::Void);
                    assert!(
                        !is_void,
                        "guest {index}: the claim of {other} on {key} is {claim:?}"
                    );
                }
            }
            let is_followed =
                member.is_none_or(|one| Some(&one.host) == self.guests[index].host.as_ref());
            let is_wanted = matches!(state, Some(State::AsWanted { .. }));
            assert!(
                is_followed || !is_wanted || !phase.has_desired_state(),
                "guest {index} is not found where it is"
            );
            self.check_progress(index, phase, state);
        }
    }

    /// Checks that the rollout waits for a guest only if there is a reason in the guest.
    fn check_progress(&self, index: usize, phase: Phase, state: Option<&State>) {
        let runs = matches!(phase, Phase::Running(_) | Phase::Completed);
        let waits = matches!(state, Some(State::Claiming { .. } | State::NotYet { .. }));
        let guest = &self.guests[index];
        let is_refused = |key: &&str| {
            let mut others = guest.others.values();
            let is_claimed = others.any(|claims| claims.contains_key(key));
            guest.changed.contains(key) || guest.original[key] > 0 || is_claimed
        };
        let has_reason = KEYS.iter().any(is_refused);
        assert!(
            !runs || !waits || has_reason,
            "guest {index} is still {state:?}"
        );
    }
}
