// SPDX-License-Identifier: Apache-2.0
//! Resolves the updates of a request to ops on keys.

use static_keys::{Class, Key, Op, Patterns, PlanError};

use super::debug::DebugQueries;
use super::error::{KeyRefusal, KeysError};
use super::executor::flip::refused;
use super::near::near;
use super::registry::Registration;
use super::{KeyUpdate, MAX_UPDATES, Selection, Target};

/// One op on one key.
pub(super) struct KeyOp<'a> {
    pub key: &'a Key,
    pub op: Op,
    /// `None` skips the check.
    pub etag: Option<&'a str>,
}

/// The ops of a request.
#[derive(Default)]
pub(super) struct Resolved<'a> {
    /// In order.
    pub ops: Vec<KeyOp<'a>>,
    /// Number of keys of each selection, in order.
    pub selected: Vec<usize>,
    /// Keys that a selection matched and left out.
    pub left_out: usize,
}

impl Selection {
    /// Returns whether it matches this key.
    pub fn has(&self, key: &Key) -> bool {
        let class = self.classes.is_empty() || self.classes.contains(&key.class);
        class && self.patterns.select(key.module(), key.name())
    }

    /// Returns the classes as text.
    pub(super) fn class_names(&self) -> Vec<&'static str> {
        self.classes.iter().map(|class| class.name()).collect()
    }
}

impl<'a> Resolved<'a> {
    /// Resolves the updates.
    ///
    /// # Errors
    /// [`KeysError::KeyNotFound`], [`KeysError::NothingSelected`], [`KeysError::InvalidArgument`]
    /// for too many keys, [`KeysError::KeyRefused`] if a selection leaves out all its keys or a key
    /// that it names.
    pub fn new(
        registration: &'a Registration,
        updates: &'a [KeyUpdate],
        allow_guarded: bool,
    ) -> Result<Self, KeysError> {
        let mut resolved = Self {
            ops: Vec::with_capacity(updates.len()),
            ..Self::default()
        };
        for KeyUpdate { keys, op, etag } in updates {
            match keys {
                Target::Name(name) => resolved.ops.push(KeyOp {
                    key: registration.find(name)?,
                    op: *op,
                    etag: etag.as_deref(),
                }),
                Target::Held { name, instance } => {
                    let held = |key: &&Key| registration.instance(key) == *instance;
                    let key = registration.catalog.key(instance.id).filter(held);
                    let gone = || KeysError::KeyNotFound {
                        name: name.to_string(),
                        near: Vec::new(),
                    };
                    let key = key.ok_or_else(gone)?;
                    resolved.ops.push(KeyOp {
                        key,
                        op: *op,
                        etag: etag.as_deref(),
                    });
                }
                Target::Selection(selection) => {
                    resolved.select(registration, selection, *op, allow_guarded)?;
                }
                Target::Debug(queries) => resolved.query(registration, queries, *op)?,
            }
        }
        Ok(resolved)
    }

    fn select(
        &mut self,
        registration: &'a Registration,
        selection: &'a Selection,
        op: Op,
        allow_guarded: bool,
    ) -> Result<(), KeysError> {
        let before = self.ops.len();
        let mut out = LeftOut::default();
        for key in registration.catalog.keys_by_image() {
            if !selection.has(key) {
                continue;
            }
            // A literal name means that key, so it is refused as a single key is.
            let named = || selection.patterns.name(key.module(), key.name());
            if key.class == Class::Guarded && !allow_guarded {
                if named() {
                    return Err(refused(&PlanError::Guarded {
                        key: key.full_name.clone(),
                    }));
                }
                out.guarded += 1;
            } else if key.class == Class::Never {
                if named() {
                    return Err(refused(&PlanError::Never {
                        key: key.full_name.clone(),
                    }));
                }
                out.never += 1;
            } else if registration.catalog.is_ro_after_init(key.id) {
                if named() {
                    return Err(refused(&PlanError::Sealed {
                        key: key.full_name.clone(),
                    }));
                }
                out.sealed += 1;
            } else {
                self.ops.push(KeyOp {
                    key,
                    op,
                    etag: None,
                });
            }
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
            return Err(nothing(&selection.patterns.to_string(), out));
        }
        self.finish(before, out)
    }

    fn query(
        &mut self,
        registration: &'a Registration,
        queries: &DebugQueries,
        op: Op,
    ) -> Result<(), KeysError> {
        let before = self.ops.len();
        let mut out = LeftOut::default();
        let selected = registration
            .debug
            .iter()
            .filter(|(_, site)| queries.select(site));
        for key in selected.filter_map(|(id, _)| registration.catalog.key(id)) {
            if registration.catalog.is_ro_after_init(key.id) {
                out.sealed += 1;
            } else {
                self.ops.push(KeyOp {
                    key,
                    op,
                    etag: None,
                });
            }
        }
        if self.ops.len() == before {
            let queries = queries.to_string();
            return Err(match out.sealed {
                0 => KeysError::NoDebugSite { queries },
                _ => nothing(&queries, out),
            });
        }
        self.finish(before, out)
    }

    /// Sorts the ops of a selection that starts at `before`, and counts them.
    fn finish(&mut self, before: usize, out: LeftOut) -> Result<(), KeysError> {
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
        // Keys that became known later are at the end of their image.
        ops.sort_unstable_by_key(|op| op.key.id);
        self.selected.push(ops.len());
        self.left_out += out.guarded + out.sealed + out.never;
        Ok(())
    }
}

/// Numbers of keys that match and may not be changed.
#[derive(Clone, Copy, Default)]
struct LeftOut {
    guarded: usize,
    sealed: usize,
    never: usize,
}

/// Why a selection matches nothing.
fn nothing(patterns: &str, out: LeftOut) -> KeysError {
    let all_refused = |reason, message| KeysError::KeyRefused {
        key: patterns.to_owned(),
        reason,
        message,
    };
    match out {
        LeftOut {
            guarded: 0,
            sealed: 0,
            never: 0,
        } => KeysError::NothingSelected {
            patterns: patterns.to_owned(),
        },
        LeftOut {
            guarded: 0,
            sealed,
            never: 0,
        } => all_refused(
            KeyRefusal::Sealed,
            format!(
                "all {sealed} keys that match {patterns} are sealed: they cannot change after the kernel's init; set them by the kernel command line"
            ),
        ),
        LeftOut {
            guarded: 0,
            sealed,
            never,
        } => all_refused(
            KeyRefusal::Never,
            format!(
                "of the keys that match {patterns}, {never} gate a static call that may be NULL and {sealed} are sealed, and none is left: switching them would crash the guest; leave them to the guest's kernel"
            ),
        ),
        LeftOut {
            guarded,
            sealed,
            never,
        } => all_refused(
            KeyRefusal::Guarded,
            format!(
                "of the keys that match {patterns}, {guarded} are guarded, {sealed} sealed and {never} never changed, and none is left: what else depends on guarded keys is known to the guest alone; permit guarded keys if you know"
            ),
        ),
    }
}
