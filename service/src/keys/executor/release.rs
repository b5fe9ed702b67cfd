// SPDX-License-Identifier: Apache-2.0
//! Releases and renews holds by their ids.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use patchbay_guest::guest::Guest;

use super::command::Reply;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::Transaction;
use crate::keys::audit::{Renewal, millis};
use crate::keys::draft::{Terms, Whose};
use crate::keys::error::{KeyRefusal, KeysError, RefusedKey};
use crate::keys::holds::{Hold, KeyInstance};
use crate::keys::outcome::{HoldView, UpdateOutcome};
use crate::keys::paging::{ITEM_BYTES, PAGE_BYTES};
use crate::keys::registry::Registration;
use crate::keys::request::{MAX_UPDATES, ReleaseRequest, RenewRequest, UpdateRequest};
use crate::keys::scope::Use;

/// The holds of a request.
struct Chosen {
    /// Numbers of the holds, in the order of the ids.
    numbers: Vec<u64>,
    keys: HashMap<u64, KeyInstance>,
}

impl<G: Guest> Executor<G> {
    pub(super) fn release(
        &mut self,
        request: &ReleaseRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        if let Some(earlier) = self.replayed(&request.caller, request.request_id.as_ref())? {
            return Ok(earlier);
        }
        // This adopts the ledger of an earlier process, whose holds may be released.
        let snapshot = self.snapshot()?;
        let holder = (!request.force).then_some(&*request.caller.name);
        let chosen = self.choose(&request.ids, holder)?;
        let numbers: HashSet<u64> = chosen.numbers.iter().copied().collect();
        let (mut updates, mut seen) = (Vec::new(), HashSet::new());
        for number in &chosen.numbers {
            let key = chosen.keys[number];
            if !seen.insert(key) {
                continue;
            }
            self.check_registered(&snapshot.registration, key)?;
            // One update more than the limit is enough to show that there are too many.
            let room = MAX_UPDATES + 1 - updates.len();
            let of_hold = |hold: &Hold| numbers.contains(&hold.number);
            updates.extend(self.releases(&snapshot.registration, key, room, of_hold));
        }
        if updates.len() > MAX_UPDATES {
            let message = format!(
                "the holds have more than {MAX_UPDATES} references; release them in several calls, or drop some with dec"
            );
            return Err(KeysError::invalid("ids", message));
        }
        let update = UpdateRequest {
            request_id: request.request_id.clone(),
            // The holds were taken with this permission.
            allow_guarded: true,
            force: request.force,
            summary_only: request.summary_only,
            reason: "release holds".to_owned(),
            ..UpdateRequest::new(
                updates,
                request.caller.clone(),
                request.stop_timeout,
                request.deadline,
            )
        };
        let now = self.shared.clock.now();
        let transaction = Transaction {
            request: &update,
            terms: Terms::ending(Whose::Numbered(numbers), &update, now),
            plan: None,
        };
        let outcome = self.transact(&transaction, standstill, || reply.is_closed())?;
        Ok(self.remember(&update, outcome))
    }

    pub(super) fn renew(&mut self, request: &RenewRequest) -> Result<Vec<HoldView>, KeysError> {
        self.adopt_ledger()?;
        let chosen = self.choose(&request.ids, Some(&request.caller.name))?;
        self.check_answer(&chosen)?;
        let names: Vec<Arc<str>> = {
            let book = self.shared.book();
            let holds = chosen.keys.values().filter_map(|key| book.holds.get(*key));
            holds.map(|holds| Arc::clone(holds.name())).collect()
        };
        let keys = || names.iter().map(|name| &**name).collect();
        self.shared.permit(&request.caller, keys, Use::Change)?;
        let now = self.shared.clock.now();
        let expires = request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl));
        self.audit.renewal(&Renewal {
            owner: &request.caller.name,
            holds: &request.ids,
            ttl_ms: request.ttl.map(millis),
        })?;
        let numbers: HashSet<u64> = chosen.numbers.iter().copied().collect();
        let keys: HashSet<KeyInstance> = chosen.keys.values().copied().collect();
        let mut book = self.shared.book();
        let before = book.holds.clone();
        let mut joined = HashMap::new();
        for key in keys {
            let mut holds = book.holds.copy(key);
            joined.extend(holds.renew(&numbers, expires));
            book.holds.put(key, holds);
        }
        drop(book);
        if let Err(error) = self.keep() {
            self.shared.book().holds = before;
            return Err(error);
        }
        let book = self.shared.book();
        let view = |number: &u64| {
            let holds = book.holds.get(chosen.keys[number])?;
            let hold = holds.find(*joined.get(number).unwrap_or(number))?;
            Some(HoldView::new(&self.shared.incarnation, holds.name(), hold))
        };
        Ok(chosen.numbers.iter().filter_map(view).collect())
    }

    /// Refuses a renewal whose answer, which lists all holds, would be too long.
    fn check_answer(&self, chosen: &Chosen) -> Result<(), KeysError> {
        let book = self.shared.book();
        let bytes = |number: &u64| {
            let holds = book.holds.get(chosen.keys[number])?;
            let hold = holds.find(*number)?;
            let view = HoldView::new(&self.shared.incarnation, holds.name(), hold);
            Some(view.text_bytes() + ITEM_BYTES)
        };
        let bytes: usize = chosen.numbers.iter().filter_map(bytes).sum();
        if bytes > PAGE_BYTES {
            let message = format!(
                "the answer would take {bytes} bytes, more than {PAGE_BYTES}; renew the holds in several calls"
            );
            return Err(KeysError::invalid("ids", message));
        }
        Ok(())
    }

    /// Finds holds by their ids. If `holder` is given, it must be the holder of each.
    fn choose(&self, ids: &[String], holder: Option<&str>) -> Result<Chosen, KeysError> {
        let mut numbers = Vec::with_capacity(ids.len());
        let mut given = HashSet::with_capacity(ids.len());
        for id in ids {
            let number = self.shared.incarnation.hold_number(id);
            let number = number.ok_or_else(|| KeysError::HoldNotFound { id: id.clone() })?;
            if !given.insert(number) {
                let message = format!("hold {id} is given twice; give each id once");
                return Err(KeysError::invalid("ids", message));
            }
            numbers.push(number);
        }
        let live = self.shared.registry.live_epochs();
        let snapshot = self.shared.registry.snapshot().ok();
        let mut book = self.shared.book();
        let mut keys = book.holds.find(&given);
        keys.retain(|_, key| live.contains(&key.epoch));
        let touched: HashSet<KeyInstance> = keys.values().copied().collect();
        for instance in touched {
            // Holds on a key that is unregistered or unreadable are kept.
            let state = snapshot.as_ref().and_then(|snapshot| {
                let registration = &snapshot.registration;
                let key = registration.catalog.key(instance.id);
                let key = key.filter(|_| registration.has(instance))?;
                registration.state(&registration.memory(self.guest.ram()), key)
            });
            if let Some(state) = state.filter(|state| state.count >= 0) {
                book.holds.follow_guest(instance, &state, |_| true);
            }
        }
        for (number, id) in numbers.iter().zip(ids) {
            let not_found = || KeysError::HoldNotFound { id: id.clone() };
            let holds = keys.get(number).and_then(|key| book.holds.get(*key));
            let holds = holds.ok_or_else(not_found)?;
            let hold = holds.find(*number).ok_or_else(not_found)?;
            if holder.is_some_and(|holder| *hold.holder != *holder) {
                return Err(KeysError::KeyRefused {
                    key: (&**holds.name()).into(),
                    reason: KeyRefusal::NotHolder,
                    message: format!(
                        "hold {id} on key {} belongs to {}; release it with force, or ask its holder",
                        holds.name(),
                        hold.holder
                    ),
                });
            }
        }
        Ok(Chosen { numbers, keys })
    }

    /// Refuses a key whose module is loaded but is not registered.
    fn check_registered(
        &self,
        registration: &Registration,
        key: KeyInstance,
    ) -> Result<(), KeysError> {
        if registration.has(key) {
            return Ok(());
        }
        let name = self.shared.book().holds.copy(key).name().to_string();
        Err(KeysError::KeyRefused {
            message: format!(
                "key {name}: its module is loaded and not registered at the moment; try again once it is"
            ),
            key: RefusedKey::Named(name),
            reason: KeyRefusal::ModuleRefused,
        })
    }
}
