// SPDX-License-Identifier: Apache-2.0
//! Prints rollouts for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::view::{
    Deleted, DriftReport, Explanation, Host, LeftOutKeys, ReviewedRollout, Rollout, UNREADABLE,
    Wave,
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

#[cfg(test)]
mod tests {
    use patchbay_proto::fleet::v1;

    use super::*;

    fn planned(rollout: v1::Rollout) -> String {
        let rollout = v1::Rollout {
            name: "net".to_owned(),
            phase: v1::Phase::Planned.into(),
            digest: "abc".to_owned(),
            ..rollout
        };
        ReviewedRollout(Rollout::from(rollout)).table()
    }

    fn guest(name: String) -> v1::RolloutGuest {
        v1::RolloutGuest {
            host: "h".to_owned(),
            guest: name,
            ..v1::RolloutGuest::default()
        }
    }

    #[test]
    fn a_plan_shows_tracepoints_and_the_guarded_keys_that_it_claims() {
        let event = |number: u32| format!("sched:e{number:02}");
        let [mut one, mut other] = ["a", "b"].map(|name| guest(name.to_owned()));
        one.tracepoints = (0..15).map(event).collect();
        other.tracepoints = (10..25).map(event).collect();
        let guarded = |key: &str, advice: &str| v1::GuardedKey {
            key: key.to_owned(),
            advice: advice.to_owned(),
        };
        let text = planned(v1::Rollout {
            guests: vec![one, other],
            guarded: vec![guarded("one", "it needs a restart"), guarded("two", "")],
            ..v1::Rollout::default()
        });
        let events: Vec<String> = (0..20).map(event).collect();
        for line in [
            &format!("  tracepoints: {} and 5 more\n", events.join(", ")),
            "  GUARDED key one is claimed: it needs a restart\n",
            "  GUARDED key two is claimed: only the guest knows what else depends on it\n",
            "start it with: patchbay rollout start net --digest abc\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        let none = planned(v1::Rollout::default());
        assert!(!none.contains("tracepoints") && !none.contains("GUARDED"));
    }

    #[test]
    fn a_plan_shows_what_it_leaves_out_and_why() {
        let left_out = |reason: &str, count: u32, names: &[&str]| v1::LeftOutKeys {
            reason: reason.to_owned(),
            count,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        let skipped = |index: usize| v1::RolloutGuest {
            phase: v1::GuestPhase::Skipped.into(),
            message: "no such key".to_owned(),
            ..guest(format!("g{index:02}"))
        };
        let mut guests: Vec<v1::RolloutGuest> = (0..22).map(skipped).collect();
        guests[0].left_out = vec![left_out("KEY_GUARDED", 1, &["a"])];
        guests[1].left_out = vec![
            left_out("KEY_GUARDED", 12, &["a", "b"]),
            left_out("KEY_SEALED", 1, &["c"]),
            left_out("KEY_NEVER", 1, &["d"]),
        ];
        let text = planned(v1::Rollout {
            guests,
            approvals_needed: 3,
            ..v1::Rollout::default()
        });
        for line in [
            "  not claimed, guarded: a, b and 10 more\n",
            "  not claimed, sealed: c\n",
            "  not claimed, never changed: d\n",
            "  not touched: g19 on h: no such key\n",
            "  not touched: 2 more guests\n",
            "2 others approve it with: patchbay rollout approve net --digest abc\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("g20"), "{text}");
    }
}
