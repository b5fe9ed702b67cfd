// SPDX-License-Identifier: Apache-2.0
//! Resolves the patterns of a validation of claims to the keys of the running kernel.

use std::collections::BTreeMap;

use static_keys::Op;

use crate::keys::claims::{ClaimsRequest, MAX_CLAIMS, Want};
use crate::keys::error::KeysError;
use crate::keys::outcome::LeftOut;
use crate::keys::planned::Resolved;
use crate::keys::registry::Registration;
use crate::keys::request::{KeyUpdate, Target};
use crate::keys::selection;

/// Returns the same request for the keys that its patterns select, ordered by name, and the keys
/// that they leave out.
///
/// # Errors
/// The same errors as for an update by these patterns, and [`KeysError::InvalidArgument`] if a key
/// is selected with two wanted states or if there are too many keys.
pub(super) fn resolve(
    registration: &Registration,
    request: &ClaimsRequest,
) -> Result<(ClaimsRequest, Vec<LeftOut>), KeysError> {
    let update = |selection| KeyUpdate {
        keys: Target::Selection(Box::new(selection)),
        // The op is not used: only the selected keys are.
        op: Op::Enable,
    };
    let selections = request.selections.iter();
    let updates: Vec<KeyUpdate> = selections
        .map(|(selection, _)| update(selection.clone()))
        .collect();
    let guarded = request.allow_guarded;
    let resolved = selection::resolve(registration, &updates, guarded, request.deadline);
    let Resolved {
        updates,
        selected,
        left_out,
        ..
    } = resolved.map_err(of_claims)?;
    let mut claims: BTreeMap<String, Want> = request.claims.iter().cloned().collect();
    let mut keys = updates
        .iter()
        .filter_map(|update| registration.catalog.key(update.key));
    for ((_, want), selected) in request.selections.iter().zip(selected) {
        for key in keys.by_ref().take(selected) {
            let other = claims.insert(key.full_name.to_string(), *want);
            if let Some(other) = other.filter(|other| other != want) {
                let (key, other, want) = (&key.full_name, other.name(), want.name());
                let message =
                    format!("key {key} is claimed {other} and {want}; claim each key once");
                return Err(KeysError::invalid("claims", message));
            }
        }
    }
    if claims.len() > MAX_CLAIMS {
        let message = format!(
            "the patterns select {} keys; claim up to {MAX_CLAIMS}",
            claims.len()
        );
        return Err(KeysError::invalid("claims", message));
    }
    let request = ClaimsRequest {
        claims: claims.into_iter().collect(),
        selections: Vec::new(),
        ..request.clone()
    };
    Ok((request, left_out))
}

/// Replaces the field name in an error about updates by that of this request.
fn of_claims(error: KeysError) -> KeysError {
    match error {
        KeysError::InvalidArgument {
            field: "updates",
            message,
        } => KeysError::invalid("claims", message),
        error => error,
    }
}
