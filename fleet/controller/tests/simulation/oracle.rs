// SPDX-License-Identifier: Apache-2.0
//! Compares what happens with what the design promises. A broken promise ends the run by a panic.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;

use patchbay_fleet::rollout::{Action, Member, Millis, Phase, Rollout, State, Want};
use patchbay_fleet::runner::Command;
use patchbay_proto::v1;

use super::driver::Driver;
use super::guest::{KEYS, Kill, Kind};
use super::reasons::Reasons;
use super::waves::Course;
use super::world::World;

/// The longest delay between two calls for a guest, and the time of a call.
pub const LONGEST_RETRY: Millis = 301_000;

/// The known state of a rollout.
#[derive(Default)]
pub struct Known {
    /// The generations of the members that are stored.
    generations: Vec<u64>,
    is_reverted: bool,
    forgotten: BTreeSet<usize>,
    pub course: Course,
    pub reasons: Reasons,
}

/// The part of a stored member that is compared with a call.
#[derive(serde::Deserialize)]
struct StoredMember {
    generation: u64,
}

#[derive(Default)]
pub struct Oracle {
    /// The rollouts by the owners of their claims.
    rollouts: BTreeMap<String, Known>,
    /// The latest generation that was answered, by guest, epoch and owner.
    answered: BTreeMap<(usize, u32, String), u64>,
    /// The owners, guests and generations of which a service has made every claim.
    made: BTreeSet<(String, String, u64)>,
    /// The keys that calls have claimed, by guest, epoch and owner.
    keys: BTreeMap<(usize, u32, String), BTreeSet<String>>,
    /// The pauses for a generation, by guest, epoch and owner.
    pauses: BTreeMap<(usize, u32, String, u64), u64>,
}

impl Oracle {
    pub fn of(&mut self, rollout: &Rollout) -> &mut Known {
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

    /// Returns whether a guest has answered a call of an owner after this epoch and generation.
    pub fn has_answered(&self, guest: usize, epoch: u32, owner: &str, generation: u64) -> bool {
        self.answers_of(guest)
            .any(|(at, by, latest)| by == owner && (at, latest) > (epoch, generation))
    }

    /// Returns whether a guest has answered a call.
    pub fn has_ever_answered(&self, guest: usize) -> bool {
        self.answers_of(guest).next().is_some()
    }

    /// Returns the epochs, owners and latest generations that a guest has answered.
    fn answers_of(&self, guest: usize) -> impl Iterator<Item = (u32, &str, u64)> {
        // A call without an answer leaves a 0.
        let of = self.answered.iter();
        let of = of.filter(move |((of, ..), latest)| *of == guest && **latest > 0);
        of.map(|((_, at, by), latest)| (*at, &**by, *latest))
    }

    /// Records the state with which a driver begins.
    pub fn loaded(&mut self, rollout: &Rollout) {
        let generations = rollout.members().iter().map(|member| member.generation);
        let known = self.of(rollout);
        known.generations = generations.collect();
        known.course.loaded(rollout);
        known.reasons.saved(rollout);
    }
}

/// Returns the number of a member of the rollout.
pub fn number_of(rollout: &Rollout, member: &Member) -> Option<usize> {
    let mut members = rollout.members().iter();
    members.position(|one| ptr::eq(one, member))
}

fn is_claiming(member: &Member) -> bool {
    matches!(member.state, State::Claiming { .. })
}

impl World {
    /// Checks a state that a driver has saved after a step at this time by its clock.
    pub fn check_saved(&mut self, driver: &mut Driver, at: Millis) {
        let right = at.saturating_add_signed(-driver.clock);
        let is_exact = !self.is_clock_set;
        let rollout = &driver.rollout;
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
        let liar = self.liar.map(|index| &self.guests[index].name);
        let is_made = |member: &&Member| matches!(member.state, State::AsWanted { .. });
        for member in members.iter().filter(is_made) {
            let call = (header.owner(), member.guest.clone(), member.generation);
            assert!(
                liar == Some(&member.guest) || self.oracle.made.contains(&call),
                "{} is as wanted, and has not made every claim",
                member.guest
            );
        }
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
                let ttl = driver.spec.ttl.filter(|_| is_exact);
                let has_ended = member.has_expired(at) || known.course.is_over(index, ttl, right);
                assert!(!has_ended, "member {index} is claimed after its time");
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
        self.check_reasons(driver, right);
        self.check_waves(driver, right);
    }

    /// Checks an action that a driver is about to perform against the store.
    pub fn check_action(&self, rollout: &Rollout, action: &Action) {
        let (&member, &generation, has_claims) = match action {
            Action::Claim { member, generation } => (member, generation, true),
            Action::Release { member, generation } => (member, generation, false),
            _ => return,
        };
        let name = &rollout.header().name;
        let key = format!("rollouts/{name}/members/{member:08}");
        let record = self.store.value(&key).expect("the member is stored");
        let keys = self.keys.right();
        let opened = keys.open(&key, &record).expect("it is authentic");
        let StoredMember { generation: stored } =
            serde_json::from_slice(opened.value).expect("JSON");
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
        let guest = &mut self.guests[index];
        if let Some(orphans) = &mut guest.orphans {
            if !request.claims.is_empty() && (answer.is_some() || kill != Kill::Never) {
                // The service has a record of the claims again, or may have one.
                orphans.remove(&request.owner);
            }
        }
        let (epoch, generation) = (guest.epoch, request.generation);
        let answered = self
            .oracle
            .answered
            .entry((index, epoch, request.owner.clone()));
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
        if let Some(answer) = answer {
            *answered = generation.max(*answered);
            let is_made = |claim: &v1::KeyClaim| {
                let mut of = answer.results.iter();
                let result = of.find(|result| result.key == claim.key);
                result.is_some_and(|result| result.state() == v1::ClaimState::Made)
            };
            if request.claims.iter().all(is_made) {
                let (owner, guest) = (request.owner.clone(), request.guest.clone());
                self.oracle.made.insert((owner, guest, generation));
            }
        }
        let paused = self
            .oracle
            .pauses
            .entry((index, epoch, request.owner.clone(), generation))
            .or_default();
        if kill != Kill::BeforeChange {
            *paused += pauses;
        }
        let keys = self
            .oracle
            .keys
            .entry((index, epoch, request.owner.clone()));
        let keys = keys.or_default();
        keys.extend(request.claims.iter().map(|claim| claim.key.clone()));
        // If the guest has changed such a key since the service was killed, the service cannot tell
        // from the counts whether the change was made.
        let is_ambiguous = guest.changed.iter().any(|key| keys.contains(*key));
        assert!(
            *paused <= 1 || is_ambiguous,
            "guest {index} is paused {paused} times for {generation}"
        );
    }

    /// Records what a guest answers about the claims of an owner.
    pub fn check_not_made(&mut self, index: usize, owner: &str, page: &v1::ListClaimsResponse) {
        let all = self.guests[index].claims(&self.runtime, self.now, owner);
        let all = all.expect("it has just answered").claims;
        assert_eq!(page.total as usize, all.len(), "guest {index}: {all:?}");
        let is_made = |claim: &&v1::Claim| claim.state() == v1::ClaimState::Made;
        assert_eq!(
            page.claims.len(),
            all.iter().filter(|claim| !is_made(claim)).count(),
            "guest {index}: {all:?}"
        );
        if let (true, Some(claim)) = (page.claims.is_empty(), all.first()) {
            let guest = self.guests[index].name.clone();
            let made = (owner.to_owned(), guest, claim.generation);
            self.oracle.made.insert(made);
        }
    }

    /// Finds the guests that have moved and booted again before a driver saw them on their hosts.
    /// Nothing tells them from other guests of the same names, so a person has to forget them.
    fn find_lost(&mut self, rollouts: &[Rollout], pages: &[v1::ListClaimsResponse]) {
        self.lost.clear();
        for (guest, page) in self.guests.iter().zip(pages) {
            let is_lost = |member: &Member| {
                member.guest == guest.name
                    && member.state != State::Superseded
                    && Some(&member.host) != guest.host.as_ref()
                    && member.boot != page.boot
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
        let pages = self.guests.iter_mut().map(|guest| {
            let page = guest.claims(&self.runtime, self.now, "");
            page.expect("served")
        });
        let pages: Vec<v1::ListClaimsResponse> = pages.collect();
        self.find_lost(rollouts, &pages);
        self.check_hook(rollouts);
        for rollout in rollouts {
            let header = rollout.header();
            let waits = matches!(header.phase, Phase::Running(_));
            assert!(!waits, "{} is {:?} for too long", header.name, header.phase);
        }
        for (index, page) in pages.iter().enumerate() {
            let claims = &page.claims;
            if self.liar == Some(index) {
                continue;
            }
            if self.guests[index].snapshot.is_some() {
                self.guests[index].check_copy(page);
                continue;
            }
            for key in KEYS {
                self.check_key(index, key, rollouts);
            }
            for rollout in rollouts {
                self.check_member(index, rollout, claims);
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
    pub fn member<'r>(&self, index: usize, rollout: &'r Rollout) -> Option<&'r Member> {
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

    pub fn is_lost(&self, rollout: &Rollout, member: &Member) -> bool {
        let name = rollout.header().name.clone();
        self.lost.contains(&(name, member.guest.clone()))
    }

    /// Returns the states that the claim of a rollout on a key of a guest may have: made, ended, or
    /// both.
    pub fn claimed(&self, index: usize, key: &str, rollout: &Rollout) -> Vec<Option<Want>> {
        self.claimed_at(index, key, rollout, self.now)
    }

    /// Returns those states, with the claims that have ended by themselves before this time.
    pub fn claimed_at(
        &self,
        index: usize,
        key: &str,
        rollout: &Rollout,
        at: Millis,
    ) -> Vec<Option<Want>> {
        let Some(member) = self.member(index, rollout) else {
            return vec![None];
        };
        let mut claims = member.plan.set.claims().iter();
        let Some(claim) = claims.find(|claim| claim.key == key) else {
            return vec![None];
        };
        if !self.guests[index].can_have(key, rollout.header().policy.allow_guarded) {
            return vec![None];
        }
        let made = Some(claim.want);
        let is_over = matches!(rollout.header().phase, Phase::Ended(_));
        let has_ended = self.guests[index].has_ended(&rollout.header().owner(), at);
        match member.state {
            _ if has_ended == Some(true) => vec![None],
            // The controller may expect the end of the claims earlier than the guest.
            State::Released { void: true } if !is_over => vec![made, None],
            _ if has_ended.is_none() && !is_over => vec![made, None],
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
        if guest.kind(key) == Kind::Missing {
            return;
        }
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
        if let Some(orphans) = &self.guests[index].orphans {
            // A call that was late may have made claims again, because the generations are lost.
            let is_taken_back = member.is_some_and(|member| {
                let is_released = matches!(member.state, State::Released { .. });
                is_released && member.is_confirmed && member.expires.is_none()
            });
            assert!(
                !is_taken_back || !orphans.contains(&owner),
                "guest {index} has lost its ledger, and its claims of {owner} are taken back"
            );
            return;
        }
        let state = member.map(|member| &member.state);
        let is_given_up = matches!(state, Some(State::Forgotten | State::Adopted));
        let is_released = matches!(state, None | Some(State::Released { .. }));
        // The controller may expect the end of the claims earlier than the guest.
        let may_end = self.guests[index].ends.contains_key(&owner);
        let is_free = (is_released && !may_end) || matches!(phase, Phase::Ended(_));
        let mut own = claims.iter().filter(|claim| claim.owner == owner);
        let not_made = own
            .clone()
            .find(|claim| claim.state() != v1::ClaimState::Made);
        let own = own.next().is_some();
        assert!(
            !is_free || is_given_up || !own,
            "guest {index} is {state:?} and has claims of {owner}"
        );
        let is_followed =
            member.is_none_or(|one| Some(&one.host) == self.guests[index].host.as_ref());
        if matches!(state, Some(State::AsWanted { .. })) && phase.has_desired_state() {
            let consents = rollout.header().policy.allow_guarded;
            let mut claims = member.iter().flat_map(|member| member.plan.set.claims());
            let refused = claims.find(|one| !self.guests[index].can_have(&one.key, consents));
            let refused = refused.map(|one| &one.key);
            assert!(
                may_end || refused.is_none(),
                "guest {index} is {state:?}, and its key {refused:?} cannot be changed"
            );
            assert!(is_followed, "guest {index} is not found where it is");
            assert!(
                may_end || not_made.is_none() || self.has_just_ended(index),
                "guest {index} is {state:?}, and has {not_made:?}"
            );
        }
    }
}
