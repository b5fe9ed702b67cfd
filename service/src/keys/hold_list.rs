// SPDX-License-Identifier: Apache-2.0
//! Lists holds in pages.

use std::sync::Arc;

use static_keys::Patterns;

use super::error::KeysError;
use super::handle::Keys;
use super::holds::{Hold, KeyHolds, KeyInstance};
use super::incarnation::Incarnation;
use super::outcome::HoldView;
use super::paging::{ITEM_BYTES, MALFORMED, PAGE_BYTES, invalid_token};
use super::registry::Registration;

/// A query for holds.
#[derive(Clone, Debug, Default)]
pub struct HoldQuery {
    /// Page size, at least 1.
    pub page_size: usize,
    /// Page token; empty for the first page.
    pub page_token: String,
    /// Glob patterns of key names.
    pub patterns: Patterns,
    /// Only holds of this principal; `None` for all.
    pub holder: Option<String>,
}

/// A page of holds, ordered by key and number.
#[derive(Clone, Debug, Default)]
pub struct HoldPage {
    /// The holds, at most the page size.
    pub holds: Vec<HoldView>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
}

impl Keys {
    /// Lists one page of holds, including those on keys that are not registered now.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] for a page token of another incarnation.
    pub fn holds(&self, query: &HoldQuery) -> Result<HoldPage, KeysError> {
        let after = parse_position(self.incarnation(), &query.page_token)?;
        let registry = &self.shared.registry;
        let live = registry.live_epochs();
        let snapshot = registry.snapshot().ok();
        let registration = snapshot.as_ref().map(|snapshot| &*snapshot.registration);
        let mut keys: Vec<(KeyInstance, KeyHolds)> = {
            let book = self.shared.book();
            let selected = |(key, holds): &(KeyInstance, &KeyHolds)| {
                live.contains(&key.epoch)
                    && query.patterns.select_full(holds.name())
                    && after.is_none_or(|(after, _)| **holds.name() >= *after)
            };
            let holds = book.holds.iter().filter(selected);
            holds.map(|(key, holds)| (key, holds.clone())).collect()
        };
        keys.sort_unstable_by(|(_, one), (_, other)| one.name().cmp(other.name()));
        let mut page = HoldPage::default();
        let mut bytes = 0;
        for (key, mut holds) in keys {
            if let Some(registration) = registration {
                self.follow_guest(registration, key, &mut holds);
            }
            let mut of_key: Vec<&Hold> = holds.as_slice().iter().collect();
            of_key.sort_unstable_by_key(|hold| hold.number);
            for hold in of_key {
                let is_passed =
                    |(name, number): (&str, u64)| **holds.name() == *name && hold.number <= number;
                let holder = query.holder.as_deref();
                let other = holder.is_some_and(|holder| *hold.holder != *holder);
                if other || after.is_some_and(is_passed) {
                    continue;
                }
                let view = HoldView::new(self.incarnation(), holds.name(), hold);
                bytes += view.text_bytes() + ITEM_BYTES;
                if let Some(last) = page.holds.last()
                    && (page.holds.len() == query.page_size || bytes > PAGE_BYTES)
                {
                    page.next_page_token = format!("{}.{}", last.id, last.key);
                    return Ok(page);
                }
                page.holds.push(view);
            }
        }
        Ok(page)
    }

    /// Returns the principals that hold a key. Holds that the guest has voided are ignored.
    pub(crate) fn holders(&self, registration: &Registration, name: &str) -> Vec<Arc<str>> {
        let Some(key) = registration.catalog.find(name) else {
            return Vec::new();
        };
        let instance = registration.instance(key);
        let mut holds = self.shared.book().holds.copy(instance);
        if holds.as_slice().is_empty() {
            return Vec::new();
        }
        self.follow_guest(registration, instance, &mut holds);
        let holds = holds.as_slice().iter();
        let mut holders: Vec<Arc<str>> = holds.map(|hold| Arc::clone(&hold.holder)).collect();
        holders.sort_unstable();
        holders.dedup();
        holders
    }

    /// Returns the keys that this principal holds, including those whose holds the guest has
    /// voided.
    pub(crate) fn held_keys(&self, holder: &str) -> Vec<Arc<str>> {
        let live = self.shared.registry.live_epochs();
        let book = self.shared.book();
        let holds = |(key, holds): &(KeyInstance, &KeyHolds)| {
            let mut all = holds.as_slice().iter();
            live.contains(&key.epoch) && all.any(|hold| *hold.holder == *holder)
        };
        let held = book.holds.iter().filter(holds);
        held.map(|(_, holds)| Arc::clone(holds.name())).collect()
    }

    /// Drops the holds that the guest has voided, if the key can be read.
    fn follow_guest(
        &self,
        registration: &Registration,
        instance: KeyInstance,
        holds: &mut KeyHolds,
    ) {
        let (Ok(ram), true) = (self.ram(), registration.has(instance)) else {
            return;
        };
        let key = registration.catalog.key(instance.id);
        let state = key.and_then(|key| registration.state(&registration.memory(ram), key));
        // A negative count: the guest is taking the first reference.
        if let Some(state) = state.filter(|state| state.count >= 0) {
            holds.follow_guest(&state);
        }
    }
}

/// Parses the page token "id.key". The next page starts after this hold, even if holds were added
/// or removed meanwhile.
fn parse_position<'a>(
    incarnation: &Incarnation,
    token: &'a str,
) -> Result<Option<(&'a str, u64)>, KeysError> {
    if token.is_empty() {
        return Ok(None);
    }
    let (id, key) = token
        .split_once('.')
        .ok_or_else(|| invalid_token(MALFORMED))?;
    match incarnation.hold_number(id) {
        Some(number) => Ok(Some((key, number))),
        None => Err(invalid_token(
            "belongs to another incarnation or is malformed; list from the start",
        )),
    }
}
