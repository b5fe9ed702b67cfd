// SPDX-License-Identifier: Apache-2.0
//! Prints the status of a rollout: its waves, gates and keys, and the commands that may follow.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::print::{SHOWN_GUESTS, and_more, guests_on_hosts, head};
use super::view::{Gate, Moment, Rollout, RolloutGuest, Wave};
use crate::print::{Printable, Rows, counted, or_dash};

/// The number of names of keys that the status shows.
const SHOWN_KEYS: usize = 5;

/// A rollout with its progress at a point in time.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Status<'r> {
    rollout: &'r Rollout,
    /// The current time for countdowns, in seconds since the epoch. If it is `None`, countdowns are
    /// left out, and the text changes only when the rollout does.
    #[serde(skip)]
    now: Option<i64>,
    #[serde(skip)]
    is_wide: bool,
}

impl<'r> Status<'r> {
    /// Returns the status with countdowns as of now.
    pub fn now(rollout: &'r Rollout, is_wide: bool) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = since.map_or(0, |since| since.as_secs());
        let now = Some(i64::try_from(seconds).unwrap_or(i64::MAX));
        Self {
            rollout,
            now,
            is_wide,
        }
    }

    /// Returns the status without countdowns.
    pub fn lasting(rollout: &'r Rollout, is_wide: bool) -> Self {
        Self {
            rollout,
            now: None,
            is_wide,
        }
    }

    /// Describes the stage of a running rollout in one line.
    fn stage(&self) -> Option<String> {
        let wave = self.rollout.waves.get(self.rollout.wave as usize)?;
        let name = &wave.name;
        match (self.rollout.stage.as_str(), wave.bakes_until, self.now) {
            ("changing", ..) => Some(format!("it changes the guests of wave {name}")),
            ("baking", Some(Moment(until)), Some(now)) => {
                let left = (until - now).clamp(0, wave.bake_seconds);
                let over = lasting(wave.bake_seconds - left);
                let (bake, left) = (lasting(wave.bake_seconds), lasting(left));
                Some(format!(
                    "it bakes wave {name}: {over} of {bake} have passed, {left} are left"
                ))
            }
            ("baking", ..) => Some(format!("it bakes wave {name}")),
            ("gating", ..) => {
                let gates = self.rollout.gates.iter().enumerate();
                let waits = gates.filter(|(_, gate)| gate.state != "passed");
                let waits: Vec<String> = waits.map(|(index, _)| (index + 1).to_string()).collect();
                Some(format!(
                    "the bake time of wave {name} is over; it waits for gate {}",
                    waits.join(", ")
                ))
            }
            _ => None,
        }
    }

    /// Describes the progress of a wave in one line.
    fn wave(&self, index: usize, wave: &Wave) -> String {
        let is_its = |guest: &&RolloutGuest| guest.wave as usize == index;
        let guests: Vec<&RolloutGuest> = self.rollout.guests.iter().filter(is_its).collect();
        let is_current = matches!(self.rollout.phase.as_str(), "running" | "paused")
            && index == self.rollout.wave as usize;
        let mut text = format!(
            "{} {} wave {}: {} of {} as wanted, {} not yet",
            if is_current { ">" } else { " " },
            branch(index + 1 == self.rollout.waves.len()),
            wave.name,
            wave.as_wanted,
            guests_on_hosts(wave),
            wave.not_yet
        );
        let count = |is: fn(&RolloutGuest) -> bool| guests.iter().filter(|guest| is(guest)).count();
        for (count, what) in [
            (wave.unknown as usize, "unknown"),
            (count(RolloutGuest::is_releasing), "being released"),
            (wave.released as usize, "released"),
            (count(RolloutGuest::is_forgotten), "forgotten"),
        ] {
            if count > 0 {
                let _ = write!(text, ", {count} {what}");
            }
        }
        match (wave.bakes_until, self.now) {
            (Some(until), now) => {
                let _ = write!(text, "; it bakes until {until}");
                if let Some(now) = now {
                    let _ = write!(text, ", {} left", lasting((until.0 - now).max(0)));
                }
            }
            (None, _) if self.is_still_to_bake(index) && wave.bake_seconds > 0 => {
                let _ = write!(text, "; then it bakes for {}", lasting(wave.bake_seconds));
            }
            _ => {}
        }
        text
    }

    fn is_still_to_bake(&self, index: usize) -> bool {
        let current = self.rollout.wave as usize;
        match self.rollout.phase.as_str() {
            "planned" => true,
            "running" => index > current || index == current && self.rollout.stage == "changing",
            "paused" => index > current,
            _ => false,
        }
    }

    fn keys(&self, text: &mut String) {
        for keys in &self.rollout.keys {
            let shown = if self.is_wide { usize::MAX } else { SHOWN_KEYS };
            let names: Vec<&str> = keys.names.iter().map(String::as_str).take(shown).collect();
            let more = and_more((keys.count as usize).saturating_sub(names.len()));
            let (want, names) = (&keys.want, names.join(", "));
            let _ = writeln!(text, "  keys wanted {want}: {names}{more}");
        }
    }

    fn gate(index: usize, gate: &Gate) -> String {
        let mut line = format!("  gate {}, {}: ", index + 1, gate.text);
        let asked = gate.asked.map(|time| time.to_string());
        let asked = asked.unwrap_or_default();
        let _ = match (gate.state.as_str(), asked.as_str()) {
            ("passed", "") => write!(line, "passes so far"),
            ("passed", asked) => write!(line, "passed at {asked}"),
            ("inconclusive", since) => write!(line, "inconclusive since {since}"),
            ("closed", _) => write!(line, "CLOSED"),
            _ => write!(line, "not asked yet"),
        };
        if !gate.message.is_empty() {
            let _ = write!(line, ": {}", gate.message);
        }
        line
    }

    fn guests(&self, text: &mut String) {
        if self.is_wide {
            let mut rows = Rows::new(&[
                "GUEST", "HOST", "WAVE", "STATE", "KEYS", "PAUSE", "SINCE", "WHY",
            ]);
            for guest in &self.rollout.guests {
                let wave = match guest.phase.as_str() {
                    "skipped" => None,
                    _ => self.rollout.waves.get(guest.wave as usize),
                };
                let pause = guest.pause_us.map(|us| format!("{us} us"));
                rows.push([
                    guest.guest.clone(),
                    guest.host.clone(),
                    wave.map_or("-", |wave| &wave.name).to_owned(),
                    guest.phase.clone(),
                    guest.keys.to_string(),
                    or_dash(&pause.unwrap_or_default()).to_owned(),
                    guest
                        .since
                        .map_or("-".to_owned(), |since| since.to_string()),
                    or_dash(&guest.message).to_owned(),
                ]);
            }
            *text += &rows.text();
        }
    }

    /// Adds the guests of a wave for which the rollout waits, below the line of the wave. `shown`
    /// is the number of guests that may still be shown.
    fn troubled(&self, index: usize, shown: &mut usize, text: &mut String) {
        let is_troubled = |guest: &&RolloutGuest| {
            guest.wave as usize == index && (guest.is_late() || guest.is_unknown())
        };
        let troubled: Vec<&RolloutGuest> = self.rollout.guests.iter().filter(is_troubled).collect();
        let named = troubled.len().min(*shown);
        *shown -= named;
        let mut lines: Vec<String> = Vec::new();
        for guest in &troubled[..named] {
            let (phase, name, host, why) =
                (&guest.phase, &guest.guest, &guest.host, &guest.message);
            let since = guest.since.map(|since| format!(" since {since}"));
            let since = since.unwrap_or_default();
            lines.push(format!("{phase}{since}: {name} on {host}: {why}"));
        }
        if troubled.len() > named {
            lines.push(format!("and {} more", troubled.len() - named));
        }
        let is_last_wave = index + 1 == self.rollout.waves.len();
        let trunk = if is_last_wave { " " } else { "│" };
        for (index, line) in lines.iter().enumerate() {
            let branch = branch(index + 1 == lines.len());
            let _ = writeln!(text, "  {trunk}  {branch} {line}");
        }
    }
}

/// Returns the beginning of a line in a tree.
fn branch(is_last: bool) -> &'static str {
    match is_last {
        true => "└─",
        false => "├─",
    }
}

impl Printable for Status<'_> {
    fn table(&self) -> String {
        let rollout = self.rollout;
        let mut text = head(rollout);
        if let Some(stage) = self.stage() {
            let _ = writeln!(text, "  {stage}");
        }
        if rollout.phase == "planned" {
            let (given, needed) = (rollout.approvals.len(), rollout.approvals_needed.max(1));
            let _ = writeln!(
                text,
                "  {given} of {needed} people have approved digest {}",
                rollout.digest
            );
        }
        self.keys(&mut text);
        // The wide status has all guests in a table.
        let mut shown = SHOWN_GUESTS;
        for (index, wave) in rollout.waves.iter().enumerate() {
            let _ = writeln!(text, "{}", self.wave(index, wave));
            if !self.is_wide {
                self.troubled(index, &mut shown, &mut text);
            }
        }
        if matches!(rollout.phase.as_str(), "planned" | "running" | "paused") {
            for (index, gate) in rollout.gates.iter().enumerate() {
                let _ = writeln!(text, "{}", Self::gate(index, gate));
            }
        }
        self.guests(&mut text);
        for step in &rollout.next_steps {
            let (command, effect, name) = (&step.command, &step.effect, &rollout.name);
            let guest = match &**command {
                "forget" => " GUEST",
                _ => "",
            };
            let _ = writeln!(text, "  next: `rollout {command} {name}{guest}` {effect}");
        }
        text
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.rollout.name]
    }
}

/// The list of rollouts with more columns.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct WideList(pub Vec<Rollout>);

impl Printable for WideList {
    fn rows(&self) -> Rows {
        let mut rows = self.0.rows();
        rows.header.extend([
            "STAGE",
            "WAVE",
            "KEYS",
            "APPROVALS",
            "PLANNED",
            "BY",
            "MESSAGE",
        ]);
        for (row, rollout) in rows.rows.iter_mut().zip(&self.0) {
            let wave = rollout.waves.get(rollout.wave as usize);
            let keys: u32 = rollout.keys.iter().map(|keys| keys.count).sum();
            let planned = rollout.timeline.first();
            let (given, needed) = (rollout.approvals.len(), rollout.approvals_needed.max(1));
            row.extend([
                or_dash(&rollout.stage).to_owned(),
                wave.map_or("-", |wave| &wave.name).to_owned(),
                keys.to_string(),
                format!("{given}/{needed}"),
                planned.map_or_else(|| "-".to_owned(), |first| first.time.to_string()),
                planned
                    .map_or("-", |first| or_dash(&first.principal))
                    .to_owned(),
                or_dash(&rollout.message).to_owned(),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        self.0.footer()
    }

    fn names(&self) -> Vec<&str> {
        self.0.names()
    }

    fn nouns(&self) -> Option<&'static str> {
        self.0.nouns()
    }
}

/// Formats a duration.
fn lasting(seconds: i64) -> String {
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m {rest}s"),
        (1..48, _) => format!("{hours}h {minutes}m"),
        _ => counted(u64::try_from(hours / 24).unwrap_or(0), "day"),
    }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::fleet::v1;

    use super::*;

    fn guest(name: &str, wave: u32, phase: v1::GuestPhase, since: Option<i64>) -> v1::RolloutGuest {
        v1::RolloutGuest {
            host: "h".to_owned(),
            guest: name.to_owned(),
            wave,
            phase: phase.into(),
            message: "why".to_owned(),
            since: since.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
            ..v1::RolloutGuest::default()
        }
    }

    fn wave(name: &str) -> v1::Wave {
        v1::Wave {
            name: name.to_owned(),
            guests: 3,
            hosts: 1,
            unknown: 1,
            ..v1::Wave::default()
        }
    }

    #[test]
    fn the_waves_are_a_tree_with_the_guests_that_the_rollout_waits_for() {
        use v1::GuestPhase::{AsWanted, NotYet, Pending, Releasing, Unknown};
        let releasing = v1::RolloutGuest {
            message: String::new(),
            ..guest("e", 1, Releasing, None)
        };
        let rollout = v1::Rollout {
            name: "net".to_owned(),
            phase: v1::Phase::Running.into(),
            wave: 1,
            waves: vec![wave("canary"), wave("all")],
            guests: vec![
                guest("a", 0, Unknown, Some(60)),
                guest("b", 0, NotYet, None),
                guest("c", 0, AsWanted, None),
                guest("d", 1, Pending, None),
                releasing,
                guest("f", 1, Releasing, Some(3600)),
            ],
            ..v1::Rollout::default()
        };
        let rollout = Rollout::from(rollout);
        let text = Status::now(&rollout, false).table();
        let tree = "  ├─ wave canary: 0 of 3 guests on 1 host as wanted, 0 not yet, 1 unknown\n  \
                    │  ├─ unknown since 1970-01-01T00:01:00Z: a on h: why\n  \
                    │  └─ not yet: b on h: why\n\
                    > └─ wave all: 0 of 3 guests on 1 host as wanted, 0 not yet, 1 unknown, 2 being \
                    released\n     \
                    └─ releasing since 1970-01-01T01:00:00Z: f on h: why\n";
        assert!(text.contains(tree), "{text}");
        let wide = Status::now(&rollout, true).table();
        assert!(!wide.contains("unknown since"), "{wide}");
        assert!(wide.contains("1970-01-01T00:01:00Z"), "{wide}");
    }

    #[test]
    fn a_tree_of_many_guests_is_cut() {
        let guests = |wave| (0..15).map(move |_| guest("g", wave, v1::GuestPhase::NotYet, None));
        let rollout = Rollout::from(v1::Rollout {
            waves: vec![wave("one"), wave("two")],
            guests: guests(0).chain(guests(1)).collect(),
            ..v1::Rollout::default()
        });
        let text = Status::now(&rollout, false).table();
        assert_eq!(text.matches("not yet: g on h").count(), SHOWN_GUESTS);
        assert!(text.contains("     └─ and 10 more\n"), "{text}");
    }
}
