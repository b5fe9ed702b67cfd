// SPDX-License-Identifier: Apache-2.0
//! Compares what happens with what the design promises. A broken promise ends the run by a panic.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_fleet::rollout::{Action, Member, Millis, Phase, Rollout, State, Want};
use patchbay_fleet::runner::Command;
use patchbay_proto::v1;

use super::guest::{KEYS, Kill};
use super::world::World;

/// The known state of a rollout.
#[derive(Default)]
struct Known {
    /// The generations of the members that are stored.
    generations: Vec<u64>,
    is_reverted: bool,
    forgotten: BTreeSet<usize>,
}

#[derive(Default)]
pub struct Oracle {
    /// The rollouts by the owners of their claims.
    rollouts: BTreeMap<String, Known>,
    /// The latest generation that was answered, by guest, boot and owner.
    answered: BTreeMap<(usize, u32, String), u64>,
    /// The pauses for a generation, by guest, boot and owner.
    pauses: BTreeMap<(usize, u32, String, u64), u64>,
}

impl Oracle {
    fn of(&mut self, rollout: &Rollout) -> &mut Known {
        self.rollouts.entry(rollout.header().owner()).or_default()
    }

    /// Records a command whose success was told.
    pub fn answered(&mut self, rollout: &Rollout, command: &Command) {
        let known = self.of(rollout);
        match command {
            Command::Abort | Command::Undo => known.is_reverted = true,
            Command::Forget { member } => _ = known.forgotten.insert(*member),
            _ => {}
        }
    }

    /// Records the state with which a driver begins.
    pub fn loaded(&mut self, rollout: &Rollout) {
        let generations = rollout.members().iter().map(|member| member.generation);
        self.of(rollout).generations = generations.collect();
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
        let known = self.oracle.of(rollout);
        for (index, member) in members.iter().enumerate() {
            let before = known.generations.get(index).copied().unwrap_or(0);
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
            if known.forgotten.contains(&index) {
                let is_given_up = matches!(member.state, State::Forgotten | State::Superseded);
                assert!(
                    is_given_up,
                    "member {index} was forgotten, and is {:?}",
                    member.state
                );
            }
        }
        known.generations = members.iter().map(|member| member.generation).collect();
        let reverts = matches!(phase, Phase::Reverting(_) | Phase::Ended(_));
        assert!(reverts || !known.is_reverted, "{phase:?} after an undo");
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
        let answered = self
            .oracle
            .answered
            .entry((index, boots, request.owner.clone()));
        let answered = answered.or_default();
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
            .entry((index, boots, request.owner.clone(), generation))
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
    fn find_lost(&mut self, rollouts: &[Rollout]) {
        self.lost.clear();
        for index in 0..self.guests.len() {
            let boot = self.boot_of(index);
            let guest = &self.guests[index];
            let is_lost = |member: &Member| {
                member.guest == guest.name
                    && member.state != State::Superseded
                    && Some(&member.host) != guest.host.as_ref()
                    && member.boot != boot
            };
            for rollout in rollouts.iter().filter(|_| !guest.is_namesake) {
                if rollout.members().iter().any(is_lost) {
                    let name = rollout.header().name.clone();
                    self.lost.insert((name, guest.name.clone()));
                }
            }
        }
    }

    /// Checks the guests after everything has come to rest. The rollouts are ordered by the times
    /// of their claims.
    pub fn check_rest(&mut self, rollouts: &[Rollout]) {
        self.find_lost(rollouts);
        for index in 0..self.guests.len() {
            let now = self.now;
            let guest = &mut self.guests[index];
            let claims = guest.claims(&self.runtime, now, "").expect("served").claims;
            for key in KEYS {
                self.check_key(index, key, rollouts);
            }
            for rollout in rollouts {
                self.check_member(index, rollout, &claims);
                self.check_progress(index, rollout, rollouts);
            }
            let guest = &self.guests[index];
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
        }
    }

    /// Returns the current member of a guest; `None` if no driver can find the guest.
    fn member<'r>(&self, index: usize, rollout: &'r Rollout) -> Option<&'r Member> {
        let guest = &self.guests[index];
        let is_latest = |member: &&Member| {
            member.guest == guest.name && !guest.is_namesake && member.state != State::Superseded
        };
        let mut members = rollout.members().iter().filter(is_latest);
        let member = members.next();
        let name = &rollout.header().name;
        assert!(
            members.next().is_none(),
            "guest {index} is in two waves of {name} that count"
        );
        member
    }

    fn is_lost(&self, rollout: &Rollout, member: &Member) -> bool {
        let name = rollout.header().name.clone();
        self.lost.contains(&(name, member.guest.clone()))
    }

    /// Returns the states that the claim of a rollout on a key of a guest may have: made, ended, or
    /// both.
    fn claimed(&self, index: usize, key: &str, rollout: &Rollout) -> Vec<Option<Want>> {
        let Some(member) = self.member(index, rollout) else {
            return vec![None];
        };
        let mut claims = member.plan.set.claims().iter();
        let Some(claim) = claims.find(|claim| claim.key == key) else {
            return vec![None];
        };
        let made = Some(claim.want);
        let is_over = matches!(rollout.header().phase, Phase::Ended(_));
        match member.state {
            _ if self.is_lost(rollout, member) => vec![made, None],
            State::Forgotten | State::Adopted => vec![made, None],
            _ if is_over => vec![None],
            State::AsWanted { .. } => vec![made],
            State::Released { .. } | State::Skipped { .. } => vec![None],
            // The guest waits for its wave.
            State::Pending if member.generation == 0 => vec![None],
            _ => vec![made, None],
        }
    }

    /// Checks the count of a key: the newest claim decides.
    fn check_key(&self, index: usize, key: &'static str, rollouts: &[Rollout]) {
        let guest = &self.guests[index];
        let (count, jumps) = (guest.vm.count(key), guest.vm.jumps(key));
        assert_eq!(jumps, count > 0, "guest {index}: {key} is {count}");
        if guest.changed.contains(key) {
            return;
        }
        let mut possible = vec![Vec::new()];
        for rollout in rollouts {
            let claimed = self.claimed(index, key, rollout);
            let each = |before: Vec<Want>| {
                let with = |one: &Option<Want>| before.iter().copied().chain(*one).collect();
                claimed.iter().map(with).collect::<Vec<_>>()
            };
            possible = possible.into_iter().flat_map(each).collect();
        }
        let is_right = |claimed: &Vec<Want>| guest.expected(key, claimed) == count;
        if possible.iter().any(is_right) {
            return;
        }
        let states = rollouts.iter().map(|rollout| {
            let state = self.member(index, rollout).map(|member| &member.state);
            let header = rollout.header();
            format!("{} is {:?}, {state:?}", header.name, header.phase)
        });
        let states: Vec<String> = states.collect();
        panic!(
            "guest {index}: {key} is {count}; claimed, oldest first: {possible:?}; original {}, \
             others {:?}; {states:?}",
            guest.original[key], guest.others
        );
    }

    /// Checks that a guest has no claims of a rollout that wants nothing of it, and that the
    /// rollout follows the guest.
    fn check_member(&self, index: usize, rollout: &Rollout, claims: &[v1::Claim]) {
        let (owner, phase) = (rollout.header().owner(), rollout.header().phase);
        let member = self.member(index, rollout);
        if member.is_some_and(|member| self.is_lost(rollout, member)) {
            return;
        }
        let state = member.map(|member| &member.state);
        let is_given_up = matches!(state, Some(State::Forgotten | State::Adopted));
        let is_released = matches!(state, None | Some(State::Released { .. }));
        let is_free = is_released || matches!(phase, Phase::Ended(_));
        let own = claims.iter().any(|claim| claim.owner == owner);
        assert!(
            !is_free || is_given_up || !own,
            "guest {index} is {state:?} and has claims of {owner}"
        );
        let is_followed =
            member.is_none_or(|one| Some(&one.host) == self.guests[index].host.as_ref());
        let is_wanted = matches!(state, Some(State::AsWanted { .. }));
        assert!(
            is_followed || !is_wanted || !phase.has_desired_state(),
            "guest {index} is not found where it is"
        );
    }

    /// Checks that the rollout waits for a guest only if there is a reason in the guest.
    fn check_progress(&self, index: usize, rollout: &Rollout, rollouts: &[Rollout]) {
        let phase = rollout.header().phase;
        let runs = matches!(phase, Phase::Running(_) | Phase::Completed);
        let Some(member) = self.member(index, rollout) else {
            return;
        };
        let waits = matches!(member.state, State::Claiming { .. } | State::NotYet { .. });
        let guest = &self.guests[index];
        let is_refused = |key: &&str| {
            let mut others = guest.others.values();
            let is_claimed = others.any(|claims| claims.contains_key(key));
            let mut other = rollouts.iter();
            let is_rolled_out = other.any(|other| {
                let is_other = other.header().name != rollout.header().name;
                is_other && self.claimed(index, key, other) != [None]
            });
            guest.changed.contains(key) || guest.original[key] > 0 || is_claimed || is_rolled_out
        };
        let has_reason = self.is_lost(rollout, member) || KEYS.iter().any(is_refused);
        assert!(
            !runs || !waits || has_reason,
            "guest {index} is still {:?} in {}",
            member.state,
            rollout.header().name
        );
    }
}
