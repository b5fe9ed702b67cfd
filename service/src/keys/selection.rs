// SPDX-License-Identifier: Apache-2.0
//! Resolves the updates of a request to ops on keys.

use static_keys::{Class, Key, Op, Patterns, PlanError};

use super::error::{KeyRefusal, KeysError};
use super::flip::refused;
use super::near::near;
use super::registry::Registration;
use super::{KeyUpdate, MAX_UPDATES, Selection, Target};

/// One op on one key.
pub(super) struct KeyOp<'a> {
    pub key: &'a Key,
    pub op: Op,
    /// Checked unless empty.
    pub etag: &'a str,
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
    /// Whether it matches this key.
    pub fn has(&self, key: &Key) -> bool {
        let class = self.classes.is_empty() || self.classes.contains(&key.class);
        class && self.patterns.select(key.module(), key.name())
    }

    /// The classes as text.
    pub(super) fn class_names(&self) -> Vec<&'static str> {
        let name = |class: &Class| match class {
            Class::Guarded => "guarded",
            Class::Ref => "ref",
            Class::Tracepoint => "tracepoint",
        };
        self.classes.iter().map(name).collect()
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
                    etag,
                }),
                Target::Held { name, instance } => {
                    let held = |key: &&Key| registration.instance(key) == *instance;
                    let key = registration.catalog.key(instance.id).filter(held);
                    let gone = || KeysError::KeyNotFound {
                        name: name.to_string(),
                        near: Vec::new(),
                    };
                    let key = key.ok_or_else(gone)?;
                    resolved.ops.push(KeyOp { key, op: *op, etag });
                }
                Target::Selection(selection) => {
                    resolved.select(registration, selection, *op, allow_guarded)?;
                }
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
        let (mut guarded, mut sealed) = (0, 0);
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
                guarded += 1;
            } else if registration.catalog.is_ro_after_init(key.id) {
                if named() {
                    return Err(refused(&PlanError::Sealed {
                        key: key.full_name.clone(),
                    }));
                }
                sealed += 1;
            } else {
                self.ops.push(KeyOp { key, op, etag: "" });
            }
        }
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
        if ops.is_empty() {
            return Err(nothing(selection, guarded, sealed));
        }
        // Keys that became known later are at the end of their image.
        ops.sort_unstable_by_key(|op| op.key.id);
        self.selected.push(ops.len());
        self.left_out += guarded + sealed;
        Ok(())
    }
}

/// Why a selection matches nothing.
fn nothing(selection: &Selection, guarded: usize, sealed: usize) -> KeysError {
    let patterns = selection.patterns.to_string();
    let all_refused = |reason, message| KeysError::KeyRefused {
        key: patterns.clone(),
        reason,
        message,
    };
    match (guarded, sealed) {
        (0, 0) => KeysError::NothingSelected { patterns },
        (0, sealed) => all_refused(
            KeyRefusal::Sealed,
            format!(
                "all {sealed} keys that match {patterns} are sealed: they cannot change after the kernel's init; set them by the kernel command line"
            ),
        ),
        (guarded, sealed) => all_refused(
            KeyRefusal::Guarded,
            format!(
                "of the keys that match {patterns}, {guarded} are guarded and {sealed} sealed, and none is left: what else depends on guarded keys is known to the guest alone; permit guarded keys if you know"
            ),
        ),
    }
}
