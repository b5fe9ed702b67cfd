// SPDX-License-Identifier: Apache-2.0
//! Resolves the tracepoints of a spec to the keys of a guest.
//!
//! Claims name keys. The keys of an event depend on the guest's kernel, so each guest is queried
//! when the rollout is planned, and the plan keeps the answer.

use crate::hosts::{CallError, Host};
use crate::rollout::{Tracepoint, Want};
use crate::spec::{ClaimOf, Spec};

/// Returns the tracepoints that the spec's claims select on the guest, and the wanted state of
/// each. An error is the reason why the guest cannot be changed. Globs skip events that cannot be
/// switched by their keys, and `on` skips those without a probe. A literal name of such an event is
/// not skipped: an event without a key is an error, and the guest's service refuses the others.
pub async fn select(
    host: &Host,
    spec: &Spec,
    guest: &str,
) -> Result<Vec<(Want, Tracepoint)>, String> {
    let mut selected = Vec::new();
    for claim in &spec.claims.0 {
        if claim.of != ClaimOf::Tracepoints {
            continue;
        }
        let listed = host.tracepoints(guest, &claim.patterns).await;
        let (listed, stale) = listed.map_err(|status| CallError::new(&status).why)?;
        let before = selected.len();
        for event in listed {
            let has_probe =
                claim.want == Want::Off || event.probes.is_some_and(|probes| probes > 0);
            let is_switchable = event.refused.is_empty() && !event.key.is_empty() && has_probe;
            if !is_switchable && !is_named(&claim.patterns, &event.name) {
                continue;
            }
            if event.key.is_empty() {
                return Err(format!("tracepoint {}: {}", event.name, event.refused));
            }
            let tracepoint = Tracepoint {
                event: event.name,
                key: event.key,
            };
            selected.push((claim.want, tracepoint));
        }
        if selected.len() == before {
            let patterns = claim.patterns.join(" ");
            let stale = if stale.is_empty() {
                String::new()
            } else {
                format!("; {stale}")
            };
            return Err(format!(
                "no tracepoint with a probe matches {patterns}; arm it first with patchbay trace arm{stale}"
            ));
        }
    }
    Ok(selected)
}

/// Returns whether a pattern is the event's name, with its system or without.
fn is_named(patterns: &[String], event: &str) -> bool {
    let name = event.split_once(':').map_or(event, |(_, name)| name);
    patterns
        .iter()
        .any(|pattern| pattern == event || pattern == name)
}
