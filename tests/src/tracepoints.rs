// SPDX-License-Identifier: Apache-2.0
//! Switches all tracepoints of a guest that has attached probes itself.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest, UpdateStaticKeysRequest,
};
use patchbay_testing::Guest;

/// Returns a request that changes all these tracepoints. `force` is set, because the guest itself
/// holds the references.
#[must_use]
pub fn switch_tracepoints(names: &[String], op: KeyOp) -> UpdateStaticKeysRequest {
    let updates = names.iter().map(|name| KeyUpdate {
        name: name.clone(),
        op: op.into(),
        ..Default::default()
    });
    UpdateStaticKeysRequest {
        updates: updates.collect(),
        force: true,
        // Emulated vCPUs are slow to stop.
        stop_timeout: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        ..Default::default()
    }
}

/// Returns the tracepoints that are on.
///
/// # Errors
/// A call fails, or more keys are on than a page lists.
pub async fn enabled_tracepoints(guest: &mut Guest) -> Result<Vec<String>> {
    let request = ListStaticKeysRequest {
        page_size: 10_000,
        classes: vec![KeyClass::Tracepoint.into()],
        enabled: Some(true),
        ..Default::default()
    };
    let listed = guest.static_keys().list_static_keys(request).await?;
    let listed = listed.into_inner();
    ensure!(listed.next_page_token.is_empty(), "there are more pages");
    Ok(listed.keys.into_iter().map(|key| key.name).collect())
}

/// Returns these tracepoints, except those for which the kernel calls functions in addition to
/// switching the key (TRACE_EVENT_FN).
///
/// # Errors
/// A call fails.
pub async fn without_functions(guest: &mut Guest, mut names: Vec<String>) -> Result<Vec<String>> {
    while let Some(refused) = switched_by_functions(guest, &names).await? {
        names.retain(|name| *name != refused);
    }
    Ok(names)
}

/// Returns the first of these tracepoints that the host refuses because the kernel calls functions
/// in addition to switching the key.
async fn switched_by_functions(guest: &mut Guest, names: &[String]) -> Result<Option<String>> {
    let request = UpdateStaticKeysRequest {
        validate_only: true,
        ..switch_tracepoints(names, KeyOp::Disable)
    };
    let Err(refusal) = guest.static_keys().update_static_keys(request).await else {
        return Ok(None);
    };
    let name = refusal
        .message()
        .strip_prefix("tracepoint ")
        .and_then(|rest| rest.split_once(": the kernel calls functions"))
        .map(|(name, _)| name.to_owned());
    Ok(Some(name.with_context(|| format!("{refusal:?}"))?))
}
