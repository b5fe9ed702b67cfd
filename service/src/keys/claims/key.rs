// SPDX-License-Identifier: Apache-2.0
//! The claims on one key, and the references that they need.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use static_keys::KeyId;

use super::{Owner, Verdict};
use crate::keys::holds::{KeyHolds, KeyInstance, KeyState};

/// The delay before another attempt at a key whose references could not be returned: first and
/// maximum.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(64);

/// The state of a key that a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Want {
    /// The key is on.
    On,
    /// The key is off.
    Off,
    /// The owner has a reference.
    Held,
}

impl Want {
    /// Returns the spelling in digests and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Held => "held",
        }
    }

    fn decides(self) -> bool {
        self != Self::Held
    }
}

/// One owner's claim on one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The owner, who has at most one claim on a key.
    pub owner: Owner,
    /// The wanted state of the key.
    pub want: Want,
    /// References of the guest's own code may be taken away.
    pub force: bool,
    /// Time at which the owner first wanted the claim. It orders the claims on a key.
    pub since: SystemTime,
    /// The guest has changed the key since.
    pub void: bool,
    /// The claim is void because its key is gone and another one may have the same name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
}

/// The claims on one key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyClaims {
    /// The key that the claims are bound to; `None` until the key is found, and after it is gone.
    #[serde(skip)]
    pub instance: Option<KeyInstance>,
    /// Guest-virtual address of the key, for a later process. A module that is loaded again usually
    /// has another address.
    address: Option<u64>,
    /// Oldest first, by [`Claim::since`].
    stack: Vec<Claim>,
    /// The references of the guest's own code that an OFF has taken away. On a tracepoint's key,
    /// this includes the guest's reference that holds hide.
    taken: u32,
    /// The owner in whose name an ON holds a reference.
    on: Option<Owner>,
    /// Owners whose claims have ended and whose references are still to be dropped.
    leaving: Vec<Owner>,
    /// The state that a claim wanted which decided and has ended, if the references still follow
    /// it.
    #[serde(default)]
    ended: Option<Want>,
    /// The references do not follow the claims yet, because a change of the key was refused.
    #[serde(skip)]
    retry: Option<Retry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    at: Instant,
    wait: Duration,
}

/// The references of a key that the guest has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The number of references of the guest's own code.
    pub own: u32,
    /// The number of references of holds that no claim has made.
    pub others: u32,
    /// The holders of the references that claims have taken.
    pub holders: SmallVec<[Arc<str>; 1]>,
    /// True if the key belongs to a tracepoint. Such a key is on or off, and all its holds share
    /// one reference. `own` is 1 if the key would stay on after all its holds had ended.
    pub tracepoint: bool,
    /// True if the tracepoint has no probe, so its key cannot be turned on.
    pub no_probes: bool,
}

impl Seen {
    /// Returns whether only clients keep a tracepoint on. Their holds hide a reference of the
    /// guest, and the last of them turns the tracepoint off, even if the guest had it on.
    pub fn is_on_for_clients_alone(&self) -> bool {
        self.tracepoint && self.others > 0 && self.own == 0
    }
}

/// The references that a key must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The number of references of the guest's own code.
    pub own: u32,
    /// The number of the guest's own references that an OFF has taken away.
    pub taken: u32,
    /// The owner in whose name the key is kept on.
    pub on: Option<Owner>,
    /// The owners that have one more reference each.
    pub held: Vec<Owner>,
}

impl Target {
    /// Returns the holders of the references that claims have.
    pub fn holders(&self) -> impl Iterator<Item = &Arc<str>> {
        self.held.iter().chain(&self.on).map(Owner::holder)
    }

    /// Returns the count that the key must have.
    #[must_use]
    pub fn count(&self, seen: &Seen) -> u64 {
        let claims = self.held.len() + usize::from(self.on.is_some());
        let references = u64::from(self.own) + u64::from(seen.others) + claims as u64;
        match seen.tracepoint {
            true => references.min(1),
            false => references,
        }
    }
}

/// An OFF was not made, because the guest's own code holds this many references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestHolds(pub u32);

impl KeyClaims {
    /// Returns the claims, oldest first.
    pub fn stack(&self) -> &[Claim] {
        &self.stack
    }

    /// Returns the time of a claim that is made at `now` and is to be the newest. The clock may
    /// have been set back since the newest claim was made.
    pub fn newest_since(&self, now: SystemTime) -> SystemTime {
        let newest = self.stack.iter().map(|claim| claim.since).max();
        now.max(newest.unwrap_or(SystemTime::UNIX_EPOCH))
    }

    /// Returns an owner's claim.
    pub fn of(&self, owner: &Owner) -> Option<&Claim> {
        self.stack.iter().find(|claim| claim.owner == *owner)
    }

    /// Returns whether a count can contain the references that an OFF has taken away.
    pub fn is_plausible(&self) -> bool {
        i32::try_from(self.taken).is_ok()
    }

    /// Returns whether there is no claim and nothing is left to be returned.
    pub fn is_empty(&self) -> bool {
        self.stack.is_empty() && self.taken == 0 && self.on.is_none() && self.leaving.is_empty()
    }

    /// Returns the claim that decides between on and off.
    pub fn decider(&self) -> Option<&Claim> {
        let mut newest_first = self.stack.iter().rev();
        newest_first.find(|claim| claim.want.decides() && !claim.void)
    }

    /// Returns whether the deciding claim is an ON that has no hold, because the guest itself has
    /// the key on.
    pub fn is_on_without_hold(&self) -> bool {
        let wants_on = |claim: &Claim| claim.want == Want::On;
        self.on.is_none() && self.decider().is_some_and(wants_on)
    }

    /// Returns all holders in whose names the claims may have references.
    pub fn holders(&self) -> impl Iterator<Item = &Arc<str>> {
        let held = self.stack.iter().filter(|claim| !claim.want.decides());
        held.map(|claim| &claim.owner)
            .chain(&self.on)
            .chain(&self.leaving)
            .map(Owner::holder)
    }

    /// Binds the claims to the key that was found.
    pub fn bind(&mut self, instance: KeyInstance) {
        self.instance = Some(instance);
        self.address = Some(instance.id.0);
    }

    /// Returns whether the claims can be those of the key at this address.
    pub fn is_of(&self, id: KeyId) -> bool {
        self.address.is_none_or(|address| address == id.0)
    }

    /// Unbinds the claims, because the key was replaced by another one. Everything that was done to
    /// the former key is void.
    pub fn lose(&mut self) {
        self.taken = 0;
        self.on = None;
        self.leaving.clear();
        self.ended = None;
        self.retry = None;
        for claim in &mut self.stack {
            claim.replaced |= !claim.void;
            claim.void = true;
        }
    }

    /// Voids the claims that the guest has changed. `key` is the present instance of the key, and
    /// `holds` are its holds.
    pub fn follow_guest(&mut self, key: KeyInstance, mut holds: KeyHolds, state: &KeyState) {
        if self.instance.is_some_and(|of| of != key) {
            self.lose();
        }
        // A negative count: the guest is taking the first reference.
        if state.count >= 0 {
            holds.follow_guest(state);
            self.observe(&Seen::of(self, &holds, state));
        }
    }

    /// Voids the claims that the guest has changed since their references were counted.
    pub fn observe(&mut self, seen: &Seen) {
        let has = |owner: &Owner| seen.holders.contains(owner.holder());
        let lost = self.on.as_ref().is_some_and(|owner| !has(owner));
        // An ON takes no hold on a tracepoint that is on already, and clients may fire it later.
        let hides = seen.is_on_for_clients_alone();
        let mut is_hidden = false;
        let wanted = || self.decider().map(|claim| claim.want);
        let changed = match self.ended.or_else(wanted) {
            Some(Want::Off) => seen.own > 0,
            Some(Want::On) if self.on.is_some() => lost,
            Some(_) => {
                is_hidden = hides;
                seen.own == 0 && !hides
            }
            None => self.taken > 0 && seen.own > 0,
        };
        if lost {
            self.on = None;
        }
        if changed {
            self.ended = None;
        }
        // Without probes, there is nothing to turn on again.
        if changed || seen.no_probes {
            self.taken = 0;
        } else if is_hidden {
            self.taken = 1;
        }
        for claim in &mut self.stack {
            claim.void |= match claim.want.decides() {
                true => changed,
                false => !has(&claim.owner),
            };
        }
    }

    /// Adds a claim behind the last one that is not newer. An earlier claim of the same owner keeps
    /// its place if it wants the same state and is not void; otherwise it is removed.
    pub fn put(&mut self, claim: Claim) {
        let same = |old: &&mut Claim| old.owner == claim.owner;
        match self.stack.iter_mut().find(same) {
            Some(old) if old.want == claim.want && !old.void => old.force |= claim.force,
            _ => {
                self.take(&claim.owner);
                let is_older = |other: &Claim| other.since <= claim.since;
                let at = self.stack.iter().rposition(is_older).map_or(0, |at| at + 1);
                self.stack.insert(at, claim);
            }
        }
    }

    /// Removes the claim of an owner. Returns whether there was one.
    pub fn take(&mut self, owner: &Owner) -> bool {
        let Some(at) = self.stack.iter().position(|claim| claim.owner == *owner) else {
            return false;
        };
        let is_decider = self.decider().is_some_and(|claim| claim.owner == *owner);
        let claim = self.stack.remove(at);
        if is_decider && self.ended.is_none() {
            self.ended = Some(claim.want);
        }
        if !claim.want.decides() && !claim.void {
            self.leaving.push(claim.owner);
        }
        true
    }

    /// Returns the references that the claims need. If an OFF would take away references of the
    /// guest and has no consent, it is void, unless it is the claim of `new`. An OFF on a
    /// tracepoint needs no consent, because it only parks it and the probes stay attached.
    ///
    /// # Errors
    /// [`GuestHolds`] if the claim of `new` is such an OFF.
    pub fn target(&mut self, seen: &Seen, new: Option<&Owner>) -> Result<Target, GuestHolds> {
        let original = match seen.tracepoint {
            true => seen.own.max(self.taken).min(1),
            false => seen.own.saturating_add(self.taken),
        };
        let (own, taken, on) = loop {
            let Some(claim) = self.decider() else {
                break (original, 0, None);
            };
            match claim.want {
                Want::Off if seen.own > 0 && !claim.force && !seen.tracepoint => {
                    if new == Some(&claim.owner) {
                        return Err(GuestHolds(seen.own));
                    }
                    let owner = claim.owner.clone();
                    for claim in self.stack.iter_mut().filter(|claim| claim.owner == owner) {
                        claim.void = true;
                    }
                }
                Want::Off => break (0, original, None),
                // A reference that was taken away stays so, whatever the guest has taken since.
                _ => {
                    let needed =
                        self.on.is_some() || original == 0 || seen.is_on_for_clients_alone();
                    let on = needed.then(|| claim.owner.clone());
                    break match needed && seen.tracepoint {
                        true => (0, original, on),
                        false => (original, 0, on),
                    };
                }
            }
        };
        let held = self.stack.iter();
        let held = held.filter(|claim| !claim.want.decides() && !claim.void);
        Ok(Target {
            own,
            taken,
            on,
            held: held.map(|claim| claim.owner.clone()).collect(),
        })
    }

    /// Records that the guest has these references.
    pub fn settle(&mut self, target: &Target) {
        self.taken = target.taken;
        self.on.clone_from(&target.on);
        self.leaving.clear();
        self.ended = None;
        self.retry = None;
    }

    /// Returns the state of an owner's claim at this count; `None` if the owner has no claim.
    pub fn verdict(&self, owner: &Owner, count: i32) -> Option<Verdict> {
        let claim = self.of(owner)?;
        Some(match claim.want {
            _ if claim.void => Verdict::Void,
            Want::On if count <= 0 => Verdict::HeldByOthers,
            Want::Off if count != 0 => Verdict::HeldByOthers,
            Want::On | Want::Off | Want::Held => Verdict::Made,
        })
    }

    /// Schedules another attempt to return the references, with twice the previous delay.
    pub fn put_off(&mut self, now: Instant) {
        let wait = self
            .retry
            .map_or(FIRST_RETRY, |retry| (retry.wait * 2).min(LAST_RETRY));
        let at = now.checked_add(wait).unwrap_or(now);
        self.retry = Some(Retry { at, wait });
    }

    /// Returns the time of the next attempt; `None` if the references follow the claims.
    pub fn due(&self) -> Option<Instant> {
        self.retry.map(|retry| retry.at)
    }
}
