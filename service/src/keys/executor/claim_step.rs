// SPDX-License-Identifier: Apache-2.0
//! Computes the effect of a change of claims on one key.

use std::collections::HashMap;
use std::sync::Arc;

use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use smallvec::{SmallVec, smallvec};
use static_keys::{Class, Key, Op, PlanError, split_name};

use super::claims::Wanted;
use super::state::Executor;
use super::transaction::{Blocker, Failure};
use crate::keys::claims::{
    Claim, GuestHolds, KeyAnswer, KeyClaims, Owner, Seen, Verdict, Want, look,
};
use crate::keys::error::{KeyRefusal, KeysError};
use crate::keys::gate::ClosedGate;
use crate::keys::holds::{KeyHolds, KeyInstance, KeyState};
use crate::keys::registry::Registration;
use crate::keys::request::{KeyUpdate, Target};

/// The largest difference by which claims change a count.
const MAX_STEPS: u64 = 64;

/// The reason why a key is left out.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    reason: &'static str,
    message: String,
    /// The key cannot be changed at all, so it stays as it is even when a claim ends.
    pub blocked: bool,
}

impl Refused {
    /// Returns the reason why the error's key is left out; `None` if the error is not about one
    /// key.
    pub fn of(error: &KeysError) -> Option<Self> {
        let of_key = matches!(
            error,
            KeysError::KeyRefused { .. } | KeysError::ForeignBytes { .. }
        );
        (of_key && !error.is_of_every_key()).then(|| Self {
            reason: error.reason(),
            message: error.to_string(),
            blocked: false,
        })
    }
}

/// A change of the claims on one key, and of the references that follow from them.
pub(super) struct Step<'a> {
    pub name: &'a str,
    /// The state that the owner wants; `None` if its claim ends.
    pub want: Option<Want>,
    /// The key; `None` if the kernel has no such key, or if the key cannot be changed.
    pub instance: Option<KeyInstance>,
    pub state: Option<KeyState>,
    pub before: i32,
    pub after: i32,
    pub ops: SmallVec<[Op; 1]>,
    /// The claims after the change.
    pub claims: KeyClaims,
    /// The holds after the change.
    pub holds: KeyHolds,
    /// The claim that ends was void.
    was_void: bool,
    refused: Option<Refused>,
}

impl Step<'_> {
    /// Returns the updates of the key.
    pub fn updates(&self) -> impl Iterator<Item = KeyUpdate> {
        let ops = self.ops.iter().zip(self.instance.into_iter().cycle());
        ops.map(|(op, instance)| KeyUpdate {
            keys: Target::Held {
                name: Arc::clone(self.holds.name()),
                instance,
            },
            op: *op,
        })
    }

    /// Returns the answer to the owner.
    pub fn answer(&self, owner: &Owner) -> KeyAnswer {
        let standing = self.claims.verdict(owner, self.after);
        let (verdict, reason, message) = match (&self.refused, standing) {
            (Some(why), _) => (Verdict::Refused, why.reason.to_owned(), why.message.clone()),
            (None, _) if self.state.is_none() => {
                let message = "the running kernel has no key of this name".to_owned();
                (Verdict::Missing, String::new(), message)
            }
            (None, Some(Verdict::HeldByOthers)) => {
                let message = self.decided_by(owner);
                (Verdict::HeldByOthers, String::new(), message)
            }
            (None, Some(verdict)) => (verdict, String::new(), String::new()),
            (None, None) if self.was_void => {
                let message = "the guest has changed the key since it was claimed, and it stays so"
                    .to_owned();
                (Verdict::Void, String::new(), message)
            }
            (None, None) => (Verdict::Made, String::new(), String::new()),
        };
        KeyAnswer {
            key: self.name.to_owned(),
            want: self.want,
            verdict,
            reason,
            message,
            count_before: self.before,
            count_after: self.after,
        }
    }

    fn decided_by(&self, owner: &Owner) -> String {
        match self.claims.decider() {
            Some(claim) if claim.owner != *owner => {
                let (holder, want) = (claim.owner.holder(), claim.want.name());
                format!("the claim of {holder} decides, which is {want}")
            }
            _ => {
                let holds = self.holds.as_slice().iter();
                let mut holders: Vec<&str> = holds.map(|hold| &*hold.holder).collect();
                holders.dedup();
                format!("it is held by {}", holders.join(", "))
            }
        }
    }
}

impl<G: Guest> Executor<G> {
    /// Returns an owner's claim on a key. The claim is void if the guest has changed the key since.
    pub(super) fn observed(
        &self,
        registration: &Registration,
        memory: &KernelMemory,
        owner: &Owner,
        name: &str,
    ) -> Option<Claim> {
        let mut claims = self.shared.book().claims.key(name)?.clone();
        claims.of(owner)?;
        let holds = |instance| self.shared.book().holds.copy(instance);
        look(registration, memory, name, &mut claims, holds);
        claims.of(owner).cloned()
    }

    /// Computes the step of one key. `refused` contains the keys that the planner has refused.
    pub(super) fn step<'a>(
        &self,
        registration: &Registration,
        memory: &KernelMemory,
        wanted: &Wanted<'a>,
        (name, want): (&'a str, Option<Want>),
        refused: &HashMap<String, Refused>,
    ) -> Result<Step<'a>, Failure> {
        let claims = self.shared.book().claims.key(name).cloned();
        let mut step = Step {
            name,
            want,
            instance: None,
            state: None,
            before: 0,
            after: 0,
            ops: SmallVec::new(),
            claims: claims.unwrap_or_default(),
            holds: KeyHolds::default(),
            was_void: false,
            refused: None,
        };
        let Some(key) = registration.catalog.find(name) else {
            let error = self.absent(registration, &step);
            self.leave(wanted, &mut step, &error);
            return Ok(step);
        };
        let instance = registration.instance(key);
        if step.claims.instance.is_some_and(|of| of != instance) {
            step.claims.lose();
        }
        step.claims.bind(instance);
        let Some(state) = registration.state(memory, key) else {
            let error = KeysError::KeyRefused {
                key: name.into(),
                reason: KeyRefusal::TableRefused,
                message: format!("the count of key {name} cannot be read"),
            };
            self.leave(wanted, &mut step, &error);
            return Ok(step);
        };
        if state.count < 0 {
            return Err(Blocker {
                kind: ClosedGate::KeyChanged,
                name: format!("the guest is taking the first reference of key {name}"),
                every_key: false,
                outdates_plan: true,
            }
            .into());
        }
        step.instance = Some(instance);
        step.state = Some(state);
        (step.before, step.after) = (state.count, state.count);
        step.holds = self.shared.book().holds.copy(instance);
        step.holds.set_name(&key.full_name);
        step.holds.follow_guest(&state);
        let seen = Seen::of(&step.claims, &step.holds, &state);
        step.claims.observe(&seen);
        let earlier = refused.get(name).cloned();
        let refusal = earlier.or_else(|| self.refuses(registration, key, wanted, want));
        self.replace(wanted, &mut step, &seen, refusal);
        Ok(step)
    }

    /// Replaces the owner's claim, and computes the references that follow.
    fn replace(
        &self,
        wanted: &Wanted<'_>,
        step: &mut Step<'_>,
        seen: &Seen,
        mut refusal: Option<Refused>,
    ) {
        let old = wanted.owner.and_then(|owner| step.claims.of(owner));
        step.was_void = old.is_some_and(|claim| claim.void);
        let count = u64::from(step.before.unsigned_abs());
        let mut target = None;
        if let (Some(owner), Some(want), None) = (wanted.owner, step.want, &refusal) {
            let observed = step.claims.clone();
            let newest = || step.claims.newest_since(wanted.now);
            let since = wanted.made_at.unwrap_or_else(newest);
            step.claims.put(Claim {
                owner: owner.clone(),
                want,
                force: wanted.force,
                since,
                void: false,
                replaced: false,
            });
            match step.claims.target(seen, Some(owner)) {
                Ok(found) if found.count(seen).abs_diff(count) <= MAX_STEPS => {
                    target = Some(found);
                }
                Ok(_) => refusal = Some(too_far(step.name, step.before)),
                Err(GuestHolds(own)) => refusal = Some(guest_holds(step.name, own)),
            }
            if target.is_none() {
                step.claims = observed;
            }
        }
        let target = match target {
            Some(target) => target,
            None => {
                // The set is replaced as a whole, so an earlier claim ends even if the new one is
                // refused.
                if let Some(owner) = wanted.owner {
                    step.claims.take(owner);
                }
                match step.claims.target(seen, None) {
                    Ok(target) => target,
                    Err(GuestHolds(own)) => {
                        step.refused = Some(guest_holds(step.name, own));
                        return;
                    }
                }
            }
        };
        let blocked = refusal.as_ref().is_some_and(|why| why.blocked);
        step.refused = refusal;
        if blocked {
            step.claims.put_off(self.shared.clock.now());
            return;
        }
        step.after = i32::try_from(target.count(seen)).unwrap_or(i32::MAX);
        step.ops = ops(step.before, step.after);
        let is_kept = |holder: &Arc<str>| target.holders().any(|kept| kept == holder);
        for holder in step.claims.holders().filter(|holder| !is_kept(holder)) {
            while step.holds.drop_one(|hold| hold.holder == *holder) {}
        }
        for holder in target.holders() {
            if !seen.holders.contains(holder) {
                step.holds.take(&wanted.hold(holder));
            }
        }
        step.claims.settle(&target);
        // The remaining holds are bound to the current probes, as when a client parks it.
        let decider = step.claims.decider();
        let is_parked = seen.tracepoint && decider.is_some_and(|claim| claim.want == Want::Off);
        if let Some(state) = step.state.filter(|_| is_parked) {
            step.holds.set_probes(state.probes);
        }
        // The guest's reference stays when the remaining holds end.
        if seen.is_on_for_clients_alone() && target.own > 0 {
            step.holds.set_probes(None);
        }
    }

    /// Returns the reason why a key is not in the catalog. Similar names are not searched for,
    /// because a set may have thousands of keys.
    fn absent(&self, registration: &Registration, step: &Step<'_>) -> KeysError {
        let name = step.name;
        let live = self.shared.registry.live_epochs();
        let is_live = |instance: KeyInstance| live.contains(&instance.epoch);
        if step.claims.instance.is_some_and(is_live) {
            return KeysError::KeyRefused {
                key: name.into(),
                reason: KeyRefusal::ModuleRefused,
                message: format!(
                    "key {name}: its module is loaded and not registered at the moment; try again once it is"
                ),
            };
        }
        let (module, _) = split_name(name);
        let is_known = registration.other_modules().any(|other| other == module);
        let error = is_known.then(|| registration.find(name).err()).flatten();
        error.unwrap_or_else(|| KeysError::KeyNotFound {
            name: name.to_owned(),
            near: Vec::new(),
        })
    }

    /// Leaves a key unchanged that does not exist or cannot be read.
    fn leave(&self, wanted: &Wanted<'_>, step: &mut Step<'_>, error: &KeysError) {
        if let Some(owner) = wanted.owner {
            step.was_void = step.claims.of(owner).is_some_and(|claim| claim.void);
            step.claims.take(owner);
        }
        match error {
            // The references ended with the key.
            KeysError::KeyNotFound { .. } => step.claims.lose(),
            error => {
                step.refused = Some(Refused {
                    reason: error.reason(),
                    message: error.to_string(),
                    blocked: true,
                });
                if !step.claims.is_empty() {
                    step.claims.put_off(self.shared.clock.now());
                }
            }
        }
    }

    /// Returns the reason why a key may not be claimed.
    fn refuses(
        &self,
        registration: &Registration,
        key: &Key,
        wanted: &Wanted<'_>,
        want: Option<Want>,
    ) -> Option<Refused> {
        let want = want?;
        let name = || key.full_name.clone();
        let permitted = wanted.allow_guarded && self.settings.allow_guarded;
        let error = match key.class {
            Class::Tracepoint if want == Want::Held => KeysError::KeyRefused {
                key: (&*name()).into(),
                reason: KeyRefusal::Tracepoint,
                message: format!(
                    "key {} belongs to a tracepoint, so it is not counted; claim on or off",
                    name()
                ),
            },
            Class::Never => KeysError::from(&PlanError::Never { key: name() }),
            Class::Guarded if !permitted => match wanted.allow_guarded {
                true => KeysError::guarded_by_monitor(&key.full_name),
                false => KeysError::from(&PlanError::Guarded { key: name() }),
            },
            _ if registration.catalog.is_ro_after_init(key.id) => {
                KeysError::from(&PlanError::Sealed { key: name() })
            }
            Class::Ref | Class::Guarded | Class::Tracepoint | Class::DynamicDebug => return None,
        };
        Refused::of(&error)
    }
}

fn guest_holds(name: &str, own: u32) -> Refused {
    Refused {
        reason: KeyRefusal::NotHolder.as_str(),
        message: format!(
            "key {name} has {own} references of the guest's own code; an off claim takes them away only with force"
        ),
        blocked: false,
    }
}

fn too_far(name: &str, count: i32) -> Refused {
    Refused {
        reason: KeyRefusal::WouldWarn.as_str(),
        message: format!(
            "key {name} has {count} references, and a claim changes at most {MAX_STEPS} of them"
        ),
        blocked: false,
    }
}

/// Returns the ops that change a count as the guest's own code would.
fn ops(before: i32, after: i32) -> SmallVec<[Op; 1]> {
    match (before, after) {
        (0, 1) => smallvec![Op::Enable],
        (1, 0) => smallvec![Op::Disable],
        _ => {
            let op = match after > before {
                true => Op::Inc,
                false => Op::Dec,
            };
            smallvec![op; after.abs_diff(before) as usize]
        }
    }
}
