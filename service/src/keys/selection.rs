// SPDX-License-Identifier: Apache-2.0
//! Resolves the updates of a request to ops on keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use static_keys::{Class, Key, KeyId, Op, Patterns, PlanError, Update};

use super::debug::DebugQueries;
use super::error::{KeyRefusal, KeysError, RefusedKey};
use super::gate::ClosedGate;
use super::near::near;
use super::outcome::LeftOut;
use super::planned::{Resolved, ResolvedKey};
use super::registry::{Instances, Registration};
use super::request::{KeyUpdate, MAX_UPDATES, Selection, Target};

/// The number of keys that are compared with patterns until the clock is read again.
const KEYS_PER_LOOK: usize = 256;
/// The maximum number of names in a [`LeftOut`].
const MAX_NAMES: usize = 10;

impl Selection {
    /// Returns whether the selection matches this key.
    pub fn has(&self, key: &Key) -> bool {
        let class = self.classes.is_empty() || self.classes.contains(&key.class);
        class && self.patterns.select(key.module(), key.name())
    }

    /// Returns the classes as text.
    pub(super) fn class_names(&self) -> Vec<&'static str> {
        self.classes.iter().map(|class| class.name()).collect()
    }
}

/// Resolves the updates of a request.
///
/// # Errors
/// [`KeysError::KeyNotFound`], [`KeysError::NothingSelected`], [`KeysError::InvalidArgument`] for
/// too many keys, [`KeysError::KeyRefused`] if a selection leaves out all its keys or a key that it
/// names, [`KeysError::Busy`] if selections are compared with keys until the deadline.
pub(super) fn resolve(
    registration: &Registration,
    updates: &[KeyUpdate],
    allow_guarded: bool,
    deadline: Instant,
) -> Result<Resolved, KeysError> {
    let mut resolver = Resolver {
        registration,
        deadline,
        instances: Instances::of(registration),
        ops: Vec::with_capacity(updates.len()),
        left_out: BTreeMap::new(),
        resolved: Resolved::default(),
    };
    for KeyUpdate { keys, op } in updates {
        match keys {
            Target::Name { name, etag } => {
                let key = registration.find(name)?;
                let etag = etag.clone().map(|etag| (resolver.ops.len(), etag));
                resolver.resolved.etags.extend(etag);
                resolver.add(key, *op);
            }
            Target::Held { name, instance } => {
                let held = |key: &&Key| registration.instance(key) == *instance;
                let key = registration.catalog.key(instance.id).filter(held);
                let gone = || KeysError::KeyNotFound {
                    name: name.to_string(),
                    near: Vec::new(),
                };
                resolver.add(key.ok_or_else(gone)?, *op);
            }
            Target::Selection(selection) => resolver.select(selection, *op, allow_guarded)?,
            Target::Debug(queries) => resolver.query(queries, *op)?,
        }
    }
    let left_out = by_reason(registration, &resolver.left_out);
    let (updates, keys) = resolver.ops.into_iter().unzip();
    Ok(Resolved {
        updates,
        keys,
        left_out,
        ..resolver.resolved
    })
}

/// The reasons for which patterns leave keys out.
const REASONS: [KeyRefusal; 3] = [KeyRefusal::Guarded, KeyRefusal::Sealed, KeyRefusal::Never];

struct Resolver<'a> {
    registration: &'a Registration,
    deadline: Instant,
    instances: Instances<'a>,
    ops: Vec<(Update, ResolvedKey)>,
    /// The keys that selections matched and left out.
    left_out: BTreeMap<KeyId, KeyRefusal>,
    /// The result, without the ops and the keys that are left out.
    resolved: Resolved,
}

impl<'a> Resolver<'a> {
    fn add(&mut self, key: &'a Key, op: Op) {
        let resolved = ResolvedKey {
            instance: self.instances.instance(key),
            class: key.class,
        };
        self.ops.push((Update { key: key.id, op }, resolved));
    }

    fn select(
        &mut self,
        selection: &Selection,
        op: Op,
        allow_guarded: bool,
    ) -> Result<(), KeysError> {
        let registration = self.registration;
        let before = self.ops.len();
        let mut out = Vec::new();
        for (index, (key, is_sealed)) in registration.catalog.keys_with_seals().enumerate() {
            self.check_time(index)?;
            if !selection.has(key) {
                continue;
            }
            let full_name = || key.full_name.clone();
            let (reason, error) = match key.class {
                Class::Guarded if !allow_guarded => {
                    (KeyRefusal::Guarded, PlanError::Guarded { key: full_name() })
                }
                Class::Never => (KeyRefusal::Never, PlanError::Never { key: full_name() }),
                _ if is_sealed => (KeyRefusal::Sealed, PlanError::Sealed { key: full_name() }),
                _ => {
                    self.add(key, op);
                    continue;
                }
            };
            // A literal name means exactly that key, so it is refused like a single key.
            if selection.patterns.name(key.module(), key.name()) {
                return Err(KeysError::from(&error));
            }
            out.push((key.id, reason));
        }
        for name in selection.patterns.plain_names() {
            let known = |key: &Key| Patterns::is_named(name, key.module(), key.name());
            if !registration.catalog.keys_by_image().any(known) {
                let names = registration.catalog.keys().map(|key| &*key.full_name);
                return Err(KeysError::KeyNotFound {
                    name: name.to_owned(),
                    near: near(name, names),
                });
            }
        }
        if self.ops.len() == before {
            return Err(nothing(&selection.patterns.to_string(), &out));
        }
        self.left_out.extend(out);
        self.finish(before)
    }

    fn query(&mut self, queries: &DebugQueries, op: Op) -> Result<(), KeysError> {
        let registration = self.registration;
        let before = self.ops.len();
        let mut out = Vec::new();
        for (index, (id, site)) in registration.debug.iter().enumerate() {
            self.check_time(index)?;
            let key = queries.select(site).then(|| registration.catalog.key(id));
            let Some(key) = key.flatten() else {
                continue;
            };
            if registration.catalog.is_ro_after_init(key.id) {
                out.push((key.id, KeyRefusal::Sealed));
            } else {
                self.add(key, op);
            }
        }
        if self.ops.len() == before {
            let queries = queries.to_string();
            return Err(match out.is_empty() {
                true => KeysError::NoDebugSite { queries },
                false => nothing(&queries, &out),
            });
        }
        self.left_out.extend(out);
        self.finish(before)
    }

    /// Ends the comparison with keys at the deadline. A caller chooses its patterns, and the
    /// executor serves no other call meanwhile.
    fn check_time(&self, index: usize) -> Result<(), KeysError> {
        if !index.is_multiple_of(KEYS_PER_LOOK) || Instant::now() < self.deadline {
            return Ok(());
        }
        Err(KeysError::Busy {
            kind: ClosedGate::RegistrationChanged,
            gate: "the patterns were compared with keys until the deadline".to_owned(),
            attempts: 1,
            every_key: true,
        })
    }

    /// Sorts the ops of a selection that starts at `before`, and counts them.
    fn finish(&mut self, before: usize) -> Result<(), KeysError> {
        // The API limits the number of names; embedding programs may pass more.
        if self.ops.len() > MAX_UPDATES {
            return Err(KeysError::InvalidArgument {
                field: "updates",
                message: format!(
                    "the patterns select more than {MAX_UPDATES} keys; change them in several requests"
                ),
            });
        }
        let ops = &mut self.ops[before..];
        // Restores the order by address: keys that became known later are at the end of their
        // image.
        ops.sort_unstable_by_key(|(update, _)| update.key);
        let selected = ops.len();
        self.resolved.selected.push(selected);
        Ok(())
    }
}

/// Returns the keys that are left out, by reason.
fn by_reason(registration: &Registration, keys: &BTreeMap<KeyId, KeyRefusal>) -> Vec<LeftOut> {
    let of = |reason: KeyRefusal| {
        let keys = keys.iter().filter(|(_, why)| **why == reason);
        let keys = keys.filter_map(|(id, _)| registration.catalog.key(*id));
        let mut names: Vec<&Arc<str>> = keys.map(|key| &key.full_name).collect();
        names.sort_unstable();
        LeftOut {
            reason,
            count: names.len(),
            names: names.into_iter().take(MAX_NAMES).cloned().collect(),
        }
    };
    let all = REASONS.into_iter().map(of);
    all.filter(|left_out| left_out.count > 0).collect()
}

/// Returns the error for a selection of which no key is left.
fn nothing(patterns: &str, out: &[(KeyId, KeyRefusal)]) -> KeysError {
    let all_refused = |reason, message| KeysError::KeyRefused {
        key: RefusedKey::Selected(patterns.to_owned()),
        reason,
        message,
    };
    let count = |of| out.iter().filter(|(_, reason)| *reason == of).count();
    match REASONS.map(count) {
        [0, 0, 0] => KeysError::NothingSelected {
            patterns: patterns.to_owned(),
        },
        [0, sealed, 0] => all_refused(
            KeyRefusal::Sealed,
            format!(
                "all {sealed} keys that match {patterns} are sealed: they cannot change after the kernel's init; set them by the kernel command line"
            ),
        ),
        [0, sealed, never] => all_refused(
            KeyRefusal::Never,
            format!(
                "of the keys that match {patterns}, {never} gate a static call that may be NULL and {sealed} are sealed, and none is left: switching them would crash the guest; leave them to the guest's kernel"
            ),
        ),
        [guarded, sealed, never] => all_refused(
            KeyRefusal::Guarded,
            format!(
                "of the keys that match {patterns}, {guarded} are guarded, {sealed} sealed and {never} never changed, and none is left: what else depends on guarded keys is known to the guest alone; permit guarded keys if you know"
            ),
        ),
    }
}
