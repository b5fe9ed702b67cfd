// SPDX-License-Identifier: Apache-2.0
//! Records a transaction that was made, and builds its answer.

use std::sync::Arc;

use patchbay_guest::guest::Guest;
use static_keys::KeyChange;

use super::state::Executor;
use super::transaction::{Flip, Transaction};
use crate::keys::advice;
use crate::keys::audit::{AuditOutcome, AuditedChange};
use crate::keys::claims::MadeRequest;
use crate::keys::holds::KeyInstance;
use crate::keys::journal::{Author, Events};
use crate::keys::outcome::{FlipReport, KeyOutcome, UpdateOutcome, UpdateSummary};
use crate::keys::request::UpdateRequest;

impl<G: Guest> Executor<G> {
    /// Records a transaction that was made, and builds the answer.
    pub(super) fn report(
        &mut self,
        transaction: &Transaction<'_>,
        flip: Flip,
        attempts: u32,
        intent: Option<u64>,
    ) -> UpdateOutcome {
        let summary = summary(&flip);
        let journal = self.shared.registry.journal();
        if transaction.request.validate_only {
            return UpdateOutcome {
                results: self.predicted(transaction, &flip),
                summary,
                revision: journal.latest(),
                report: None,
            };
        }
        let request_id = transaction.request.request_id.as_ref();
        let by = Author {
            principal: transaction.request.caller.name.clone(),
            reason: transaction.request.reason.clone(),
            request_id: request_id.map(|id| id.as_str().to_owned()),
        };
        let mut book = self.shared.book();
        let Flip {
            changes,
            draft,
            report,
            ..
        } = flip;
        let keys = draft.book(&mut book.holds, &transaction.terms);
        let revision = if summary.keys_changed == 0 {
            journal.latest()
        } else {
            let is_change = |change: &&KeyChange| change.before != change.after;
            // The journal's limit counts all keys that it is given.
            let changes = match summary.keys_changed == summary.keys {
                true => Arc::clone(&changes),
                false => changes.iter().filter(is_change).cloned().collect(),
            };
            journal.append(Events::Changed { changes, by })
        };
        let changed = changes.iter().zip(&keys);
        let changed = changed.filter(|(change, _)| change.before != change.after);
        let revisions = changed.map(|(_, (key, _))| (*key, revision));
        book.revisions.extend(revisions);
        drop(book);
        let results = self.results(transaction, &changes, keys, Some(revision));
        if let Some(id) = intent {
            let changes = changes.iter().map(|change| AuditedChange {
                key: &change.name,
                before: change.before,
                after: change.after,
                sites: change.sites,
            });
            let changes = changes.collect();
            self.audit.outcome(id, &AuditOutcome::Committed { changes });
        }
        let report = report.map(|report| FlipReport { attempts, ..report });
        if let Some(times) = report.and_then(|report| report.pause) {
            self.pauses.observe(times, summary.sites_patched);
        }
        UpdateOutcome {
            results,
            summary,
            revision,
            report,
        }
    }

    /// Returns the result of each key of a transaction that is not made.
    pub(super) fn predicted(&self, transaction: &Transaction<'_>, flip: &Flip) -> Vec<KeyOutcome> {
        let keys = flip.draft.keys().map(|key| (key, None));
        self.results(transaction, &flip.changes, keys, None)
    }

    /// Returns the result of each key. The etag is the new one, or the current one if nothing was
    /// changed. `keys` contains the number of the hold that took each key's references. `revision`
    /// is the one in which the keys were changed.
    fn results(
        &self,
        transaction: &Transaction<'_>,
        changes: &[KeyChange],
        keys: impl IntoIterator<Item = (KeyInstance, Option<u64>)>,
        revision: Option<u64>,
    ) -> Vec<KeyOutcome> {
        if transaction.request.summary_only {
            return Vec::new();
        }
        let book = self.shared.book();
        // Most keys share an etag.
        let mut last: Option<(_, Arc<str>)> = None;
        let mut etag_of = |key: KeyInstance, change: &KeyChange, count| {
            let changed = revision.filter(|_| change.before != change.after);
            let revision = changed.unwrap_or_else(|| book.revision(key));
            let of = (key.epoch, revision, count);
            match &last {
                Some((same, etag)) if *same == of => Arc::clone(etag),
                _ => {
                    let etag = self.shared.incarnation.etag(key, of.1, count);
                    let etag: Arc<str> = etag.into();
                    last = Some((of, Arc::clone(&etag)));
                    etag
                }
            }
        };
        // Without permission, no key is guarded, and only guarded keys have advice.
        let registration = match transaction.request.allow_guarded {
            true => self.shared.registry.known().ok(),
            false => None,
        };
        let registration = registration.as_ref().map(|known| &*known.registration);
        let known = |key: KeyInstance| {
            let registration = registration?;
            advice::of(registration.catalog.key(key.id)?, &registration.release)
        };
        let result = |(change, (key, hold)): (&KeyChange, (KeyInstance, Option<u64>))| {
            let count = if transaction.request.validate_only {
                change.before
            } else {
                change.after
            };
            KeyOutcome {
                key: Arc::clone(&change.name),
                count_before: change.before,
                count_after: change.after,
                sites_patched: change.sites,
                etag: etag_of(key, change, count),
                hold_id: hold.map(|number| self.shared.incarnation.hold_id(number)),
                known: known(key),
            }
        };
        changes.iter().zip(keys).map(result).collect()
    }
}

/// Returns the part of a request that the ledger keeps after the change; `None` if the request has
/// no id.
pub(super) fn made(request: &UpdateRequest, summary: UpdateSummary) -> Option<MadeRequest> {
    let id = request.request_id.as_ref()?;
    Some(MadeRequest {
        principal: request.caller.name.clone(),
        request: id.clone(),
        summary,
        unmade: 0,
    })
}

/// Returns the totals.
pub(super) fn summary(flip: &Flip) -> UpdateSummary {
    let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let changed = |change: &&KeyChange| change.before != change.after;
    UpdateSummary {
        keys: to_u32(flip.changes.len()),
        keys_changed: to_u32(flip.changes.iter().filter(changed).count()),
        sites_patched: flip.changes.iter().map(|change| change.sites).sum(),
        keys_left_out: to_u32(flip.left_out),
    }
}
