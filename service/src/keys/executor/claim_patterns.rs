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

/// Replaces the patterns of the request by the keys that they select, ordered by name. Returns the
/// keys that they leave out.
///
/// # Errors
/// The same errors as for an update by these patterns, and [`KeysError::InvalidArgument`] if a key
/// is selected with two wanted states or if there are too many keys.
pub(super) fn resolve(
    registration: &Registration,
    request: &mut ClaimsRequest,
) -> Result<Vec<LeftOut>, KeysError> {
    let update = |selection| KeyUpdate {
        keys: Target::Selection(Box::new(selection)),
        // The op is not used: only the selected keys are.
        op: Op::Enable,
    };
    let selections = std::mem::take(&mut request.selections).into_iter();
    let (updates, wants): (Vec<KeyUpdate>, Vec<Want>) = selections
        .map(|(selection, want)| (update(selection), want))
        .unzip();
    let guarded = request.allow_guarded;
    let resolved = selection::resolve(registration, &updates, guarded, request.deadline);
    let Resolved {
        updates,
        selected,
        left_out,
        ..
    } = resolved.map_err(of_claims)?;
    let claims = std::mem::take(&mut request.claims);
    let mut claims: BTreeMap<String, Want> = claims.into_iter().collect();
    let mut keys = updates
        .iter()
        .filter_map(|update| registration.catalog.key(update.key));
    for (want, selected) in wants.into_iter().zip(selected) {
        for key in keys.by_ref().take(selected) {
            let other = claims.insert(key.full_name.to_string(), want);
            if let Some(other) = other.filter(|other| *other != want) {
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
    request.claims = claims.into_iter().collect();
    Ok(left_out)
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
