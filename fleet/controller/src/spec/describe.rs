// SPDX-License-Identifier: Apache-2.0
//! Describes the conditions of a spec as text, so that two specs can be compared.

use super::{LateGuests, Size, Spec};
use crate::rollout::{AfterReboot, Millis, lasting};

impl Spec {
    /// Returns the fields that decide when and how guests are changed, with their values. A field
    /// with several values is repeated. The selector and the claims are not among them.
    pub fn conditions(&self) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("title", self.title.clone()),
            ("reason", self.reason.clone()),
        ];
        for (index, wave) in self.waves.0.iter().enumerate() {
            let name = wave.name_at(index);
            let size = match wave.size {
                Size::Count(count) => count.to_string(),
                Size::Percent(percent) => format!("{percent}%"),
                Size::Rest => "rest".to_owned(),
            };
            let bake = lasting(wave.bake.millis());
            all.push(("waves", format!("{name}: size {size}, bake {bake}")));
        }
        let label = self.spread_over.clone();
        all.push(("spread_over", label.unwrap_or_default()));
        let max = &self.max_concurrent;
        let count = max.count.map(|count| count.0.to_string());
        let percent = max.percent.map(|percent| format!("{}%", percent.0));
        let domain = max.per_domain.as_ref();
        let domain = domain.map(|domain| format!("{} per {}", domain.count.0, domain.label));
        for limit in [count, percent, domain].into_iter().flatten() {
            all.push(("max_concurrent", limit));
        }
        for gate in &self.gates {
            let gate = &gate.0;
            let on_failure = format!("{:?}", gate.on_failure).to_lowercase();
            let mut text = format!("{gate}, on_failure {on_failure}");
            if let Some(timeout) = gate.kind.timeout_ms() {
                let times = [timeout, gate.interval_ms, gate.patience_ms].map(lasting);
                let [timeout, interval, patience] = times;
                text += &format!(", timeout {timeout}, interval {interval}, patience {patience}");
            }
            all.push(("gates", text));
        }
        for window in &self.freeze {
            let freeze = &window.0;
            let [from, until] = [freeze.from, freeze.until].map(instant);
            all.push(("freeze", format!("{from} to {until}: {}", freeze.reason)));
        }
        let ttl = self.ttl.map(|ttl| lasting(ttl.millis()));
        all.push(("ttl", ttl.unwrap_or_default()));
        let policy = self.policy();
        all.push(("approvals", policy.approvals.to_string()));
        all.push(("min_success", policy.min_success.to_string()));
        let late = match self.late_guests {
            LateGuests::Report => "report",
            LateGuests::Change => "change",
        };
        all.push(("late_guests", late.to_owned()));
        let again = match self.after_reboot {
            AfterReboot::Again => "again",
            AfterReboot::Leave => "leave",
        };
        all.push(("after_reboot", again.to_owned()));
        all.push(("allow_guarded", self.allow_guarded.to_string()));
        all.retain(|(_, value)| !value.is_empty());
        all
    }
}

/// Formats a time according to RFC 3339.
fn instant(time: Millis) -> String {
    crate::clock::timestamp(time).to_string()
}
