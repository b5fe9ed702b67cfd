// SPDX-License-Identifier: Apache-2.0
//! Prints rollouts for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::view::{
    Deleted, DriftReport, Explanation, Host, LeftOutKeys, ReviewedRollout, Rollout, TimelineEntry,
    UNREADABLE, Wave,
};
use crate::print::{Printable, Rows, counted, or_dash};

/// The number of tracepoints that are shown. JSON has all of them.
const SHOWN_TRACEPOINTS: usize = 20;
/// The maximum number of guests that are listed with a reason.
pub const SHOWN_GUESTS: usize = 20;

pub fn head(rollout: &Rollout) -> String {
    let message = match rollout.message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    format!("{} is {}{message}\n", rollout.name, rollout.phase)
}

pub fn guests_on_hosts(wave: &Wave) -> String {
    format!(
        "{} on {}",
        counted(wave.guests.into(), "guest"),
        counted(wave.hosts.into(), "host")
    )
}

impl Printable for Rollout {
    fn table(&self) -> String {
        super::status::Status::now(self, false).table()
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}

/// Returns the end of a list that leaves out this many elements.
pub fn and_more(left_out: usize) -> String {
    match left_out {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

/// Returns the keys that the patterns match and that are not claimed, by reason: those of the guest
/// with the most of them.
fn left_out(rollout: &Rollout) -> BTreeMap<&str, &LeftOutKeys> {
    let mut most: BTreeMap<&str, &LeftOutKeys> = BTreeMap::new();
    for keys in rollout.guests.iter().flat_map(|guest| &guest.left_out) {
        let reason = match keys.reason.as_str() {
            "KEY_GUARDED" => "guarded",
            "KEY_SEALED" => "sealed",
            "KEY_NEVER" => "never changed",
            other => other,
        };
        let known = most.entry(reason).or_insert(keys);
        if known.count < keys.count {
            *known = keys;
        }
    }
    most
}

impl Printable for ReviewedRollout {
    fn table(&self) -> String {
        let rollout = &self.0;
        let mut text = head(rollout);
        for wave in &rollout.waves {
            let pause = match wave.predicted_pause_us {
                0 => "pause not known yet".to_owned(),
                micros => format!("pause up to {micros} us"),
            };
            let (guests, keys, sites) = (
                guests_on_hosts(wave),
                counted(wave.keys, "key"),
                counted(wave.sites, "site"),
            );
            let _ = writeln!(
                text,
                "  wave {}: {guests}, {keys}, {sites}, {pause}",
                wave.name
            );
        }
        let tracepoints: BTreeSet<&str> = rollout
            .guests
            .iter()
            .flat_map(|guest| guest.tracepoints.iter().map(String::as_str))
            .collect();
        if !tracepoints.is_empty() {
            let shown: Vec<&str> = tracepoints
                .iter()
                .take(SHOWN_TRACEPOINTS)
                .copied()
                .collect();
            let more = and_more(tracepoints.len() - shown.len());
            let _ = writeln!(text, "  tracepoints: {}{more}", shown.join(", "));
        }
        for guarded in &rollout.guarded {
            let (key, advice) = (&guarded.key, &guarded.advice);
            let advice = match advice.as_str() {
                "" => "only the guest knows what else depends on it",
                advice => advice,
            };
            let _ = writeln!(text, "  GUARDED key {key} is claimed: {advice}");
        }
        for (reason, keys) in left_out(rollout) {
            let more = and_more((keys.count as usize).saturating_sub(keys.names.len()));
            let names = keys.names.join(", ");
            let _ = writeln!(text, "  not claimed, {reason}: {names}{more}");
        }
        let skipped = rollout
            .guests
            .iter()
            .filter(|guest| guest.phase == "skipped");
        for guest in skipped.clone().take(SHOWN_GUESTS) {
            let (name, host, why) = (&guest.guest, &guest.host, &guest.message);
            let _ = writeln!(text, "  not touched: {name} on {host}: {why}");
        }
        let more = skipped.skip(SHOWN_GUESTS).count();
        if more > 0 {
            let _ = writeln!(text, "  not touched: {more} more guests");
        }
        let (name, digest) = (&rollout.name, &rollout.digest);
        // A repeated plan returns the rollout that the first one made, in its present phase.
        if rollout.phase != "planned" {
            let phase = &rollout.phase;
            let _ = writeln!(
                text,
                "it was planned before and is {phase}; to plan the spec again, give another --name"
            );
            return text;
        }
        if rollout.approvals_needed > 1 {
            let others = rollout.approvals_needed - 1;
            let _ = writeln!(
                text,
                "{others} others approve it with: patchbay rollout approve {name} --digest {digest}"
            );
        }
        let _ = writeln!(
            text,
            "start it with: patchbay rollout start {name} --digest {digest}"
        );
        text
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.0.name]
    }
}

impl Printable for Vec<Rollout> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "PHASE", "AS WANTED", "UNKNOWN", "NOT YET", "TITLE"]);
        for rollout in self {
            let sum = |count: fn(&Wave) -> u32| rollout.waves.iter().map(count).sum::<u32>();
            rows.push([
                rollout.name.clone(),
                rollout.phase.clone(),
                format!("{}/{}", sum(|wave| wave.as_wanted), sum(|wave| wave.guests)),
                sum(|wave| wave.unknown).to_string(),
                sum(|wave| wave.not_yet).to_string(),
                or_dash(&rollout.title).to_owned(),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        let unreadable = self.iter().filter(|rollout| rollout.phase == UNREADABLE);
        unreadable.fold(String::new(), |mut text, rollout| {
            let (name, why) = (&rollout.name, &rollout.message);
            let _ = writeln!(
                text,
                "{name} is out of service, and its guests stay as they are: {why}"
            );
            text
        })
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("rollouts")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|rollout| rollout.name.as_str()).collect()
    }
}

impl Printable for Vec<TimelineEntry> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["TIME", "WHO", "PHASE", "WHAT"]);
        for entry in self {
            let who = match entry.principal.as_str() {
                "" => "controller",
                principal => principal,
            };
            rows.push([
                entry.time.to_string(),
                who.to_owned(),
                or_dash(&entry.phase).to_owned(),
                entry.text.clone(),
            ]);
        }
        rows
    }

    fn names(&self) -> Vec<&str> {
        vec![]
    }
}

impl Printable for Deleted {
    fn table(&self) -> String {
        let (rollout, archived) = (&self.rollout, &self.archived);
        format!("{rollout} is deleted; the controller keeps it in {archived}\n")
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.rollout]
    }
}

impl Printable for Explanation {
    fn table(&self) -> String {
        let mut text = String::new();
        for reason in &self.reasons {
            let _ = writeln!(text, "{reason}");
        }
        text
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.guest.guest]
    }
}

impl Printable for DriftReport {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["HOST", "GUEST", "CAUSE", "KEY", "DESIRED", "ACTUAL", "LEFT"]);
        for drift in &self.drifts {
            let cells = [&drift.key, &drift.desired, &drift.actual, &drift.left];
            let cells = cells.map(|cell| or_dash(cell).to_owned());
            let first = [&drift.host, &drift.guest, &drift.cause].map(Clone::clone);
            rows.push(first.into_iter().chain(cells));
        }
        rows
    }

    fn footer(&self) -> String {
        let compared = counted(self.compared.into(), "guest");
        let others = self.guests.saturating_sub(self.compared + self.waiting);
        let mut text = match self.drifts.is_empty() {
            false => format!("{compared} compared"),
            true => format!("{compared} compared: as the rollout wants them"),
        };
        if self.waiting > 0 {
            let verb = if self.waiting == 1 { "waits" } else { "wait" };
            let waiting = counted(self.waiting.into(), "guest");
            let _ = write!(text, "; {waiting} {verb} in an added wave for the change");
        }
        if self.drifts.is_empty() && others > 0 {
            let _ = write!(
                text,
                "; {others} more are not changed yet, or are released, adopted or forgotten"
            );
        }
        text + "\n"
    }

    fn names(&self) -> Vec<&str> {
        self.drifts
            .iter()
            .map(|drift| drift.guest.as_str())
            .collect()
    }
}

impl Printable for Vec<Host> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "GUESTS", "SOURCE", "ENDPOINT", "LABELS", "STATE"]);
        for host in self {
            let labels: Vec<String> = host
                .labels
                .iter()
                .map(|(label, value)| format!("{label}={value}"))
                .collect();
            let state = match host.unreachable.as_str() {
                "" => "answers".to_owned(),
                why => format!("unreachable: {why}"),
            };
            rows.push([
                host.name.clone(),
                host.guests.to_string(),
                if host.registered {
                    "registered"
                } else {
                    "configured"
                }
                .to_owned(),
                host.endpoint.clone(),
                or_dash(&labels.join(",")).to_owned(),
                state,
            ]);
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("hosts")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|host| host.name.as_str()).collect()
    }
}
