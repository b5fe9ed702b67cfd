// SPDX-License-Identifier: Apache-2.0
//! Resolves the tracepoints of a spec to the keys of a guest.
//!
//! A prepared change names keys. The keys of an event depend on the guest's kernel, so each guest
//! is queried when the rollout is planned, and the plan keeps the answer.

use crate::hosts::{CallError, Host};
use crate::rollout::Tracepoint;
use crate::spec::{OpKind, Spec};

/// Returns the tracepoints that the spec's ops select on the guest. An error is the reason why the
/// guest cannot be changed. Globs skip events that cannot be switched by their keys, and `fire`
/// skips those without a probe. Literal names are passed to the guest's service, which refuses such
/// events.
pub async fn select(host: &Host, spec: &Spec, guest: &str) -> Result<Vec<Tracepoint>, String> {
    let mut selected = Vec::new();
    for (index, op) in spec.ops.0.iter().enumerate() {
        if !op.op.is_of_tracepoints() {
            continue;
        }
        let listed = host.tracepoints(guest, &op.patterns).await;
        let (listed, stale) = listed.map_err(|status| CallError::new(&status).why)?;
        let before = selected.len();
        for event in listed {
            let has_probe = op.op == OpKind::Park || event.probes.is_some_and(|probes| probes > 0);
            let is_switchable = event.refused.is_empty() && !event.key.is_empty() && has_probe;
            if !is_switchable && !is_named(&op.patterns, &event.name) {
                continue;
            }
            if event.key.is_empty() {
                return Err(format!("tracepoint {}: {}", event.name, event.refused));
            }
            selected.push(Tracepoint {
                op: index,
                event: event.name,
                key: event.key,
            });
        }
        if selected.len() == before {
            let patterns = op.patterns.join(" ");
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
