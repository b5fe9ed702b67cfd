// SPDX-License-Identifier: Apache-2.0
//! Defines the form in which rollouts are printed as JSON and YAML.

use std::collections::BTreeMap;
use std::fmt;

use patchbay_proto::fleet::v1;
use serde::{Serialize, Serializer};

use crate::view::time;

/// A time in seconds since the epoch. It is printed in RFC 3339 and UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(pub i64);

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.0, 0);
        f.write_str(&time(Some(prost_types::Timestamp { seconds, nanos })))
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Rollout {
    pub name: String,
    pub title: String,
    pub phase: String,
    /// The stage of the current wave; empty unless the rollout is running.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub stage: String,
    pub digest: String,
    pub message: String,
    pub wave: u32,
    pub waves: Vec<Wave>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<RolloutGuest>,
    pub approvals: Vec<String>,
    pub approvals_needed: u32,
    pub keys: Vec<ClaimedKeys>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub guarded: Vec<GuardedKey>,
    pub gates: Vec<Gate>,
    pub next_steps: Vec<NextStep>,
    pub timeline: Vec<TimelineEntry>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct ClaimedKeys {
    pub want: String,
    pub count: u32,
    pub names: Vec<String>,
}

/// A guarded key that the rollout claims because its spec has `allow_guarded`.
#[derive(Debug, PartialEq, Serialize)]
pub struct GuardedKey {
    pub key: String,
    pub advice: String,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct Gate {
    pub text: String,
    pub state: String,
    pub message: String,
    /// The time of the query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<Moment>,
    pub aborts: bool,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct NextStep {
    pub command: String,
    pub effect: String,
}

/// A rollout that is shown with its reviewed content instead of its progress.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct ReviewedRollout(pub Rollout);

#[derive(Debug, PartialEq, Serialize)]
pub struct Wave {
    pub name: String,
    pub guests: u32,
    pub hosts: u32,
    pub as_wanted: u32,
    /// The number of guests that were as wanted and do not answer any more.
    pub unknown: u32,
    pub not_yet: u32,
    pub released: u32,
    pub keys: u64,
    pub sites: u64,
    pub predicted_pause_us: u64,
    /// The length of the bake time.
    pub bake_seconds: i64,
    /// The end of the bake time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bakes_until: Option<Moment>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct RolloutGuest {
    pub host: String,
    pub guest: String,
    pub wave: u32,
    pub phase: String,
    /// The time since when the guest is unknown, not yet as wanted, or cannot be released.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Moment>,
    pub message: String,
    pub keys: u32,
    pub sites: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tracepoints: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOutKeys>,
}

/// Keys that the spec's patterns match and that are not claimed, for one reason.
#[derive(Debug, PartialEq, Serialize)]
pub struct LeftOutKeys {
    pub reason: String,
    pub count: u32,
    pub names: Vec<String>,
}

impl RolloutGuest {
    /// Returns whether the rollout waits until the guest confirms that the claims have ended.
    pub fn is_releasing(&self) -> bool {
        self.phase == "releasing"
    }

    /// Returns whether an attempt to change or release the guest has failed. The message says why.
    pub fn is_late(&self) -> bool {
        self.phase == "not yet" || self.is_releasing() && !self.message.is_empty()
    }

    /// Returns whether the guest was as wanted and does not answer any more.
    pub fn is_unknown(&self) -> bool {
        self.phase == "unknown"
    }

    /// Returns whether a person has given the guest up.
    pub fn is_forgotten(&self) -> bool {
        self.phase == "forgotten"
    }
}

#[derive(Debug, PartialEq, Serialize)]
pub struct TimelineEntry {
    pub time: Moment,
    pub principal: String,
    pub text: String,
    /// The phase after the event; empty in an entry of an earlier version.
    pub phase: String,
    /// The subject: phase, gate, gate closed or drift; empty for other entries.
    pub subject: String,
    pub number: u64,
}

#[derive(Debug, Serialize)]
pub struct Explanation {
    #[serde(flatten)]
    pub guest: RolloutGuest,
    pub reasons: Vec<String>,
}

/// A rollout that was deleted.
#[derive(Debug, Serialize)]
pub struct Deleted {
    pub rollout: String,
    /// The file that has it, on the controller's machine.
    pub archived: String,
}

#[derive(Debug, Serialize)]
pub struct DriftReport {
    /// The phase of the rollout.
    pub phase: String,
    /// The number of guests in the rollout's waves.
    pub guests: u32,
    /// The number of guests that were as wanted, and were therefore compared.
    pub compared: u32,
    /// The number of guests of added waves that are not changed yet.
    pub waiting: u32,
    pub drifts: Vec<Drift>,
}

#[derive(Debug, Serialize)]
pub struct Drift {
    pub host: String,
    pub guest: String,
    pub cause: String,
    pub key: String,
    pub desired: String,
    pub actual: String,
    pub left: String,
}

#[derive(Debug, Serialize)]
pub struct Host {
    pub name: String,
    pub endpoint: String,
    pub labels: BTreeMap<String, String>,
    pub guests: u32,
    pub registered: bool,
    pub unreachable: String,
}

/// Returns an enum value's name without the enum's name.
fn word(name: &str, prefix: &str) -> String {
    let word = name.strip_prefix(prefix).unwrap_or(name);
    word.to_lowercase().replace('_', " ")
}

/// Returns the word, or an empty text for the unspecified value of an enum.
fn given(word: String) -> String {
    match word == "unspecified" {
        true => String::new(),
        false => word,
    }
}

fn micros(duration: prost_types::Duration) -> u64 {
    let micros = duration.seconds.saturating_mul(1_000_000);
    u64::try_from(micros.saturating_add(i64::from(duration.nanos / 1000))).unwrap_or(0)
}

impl From<v1::Rollout> for Rollout {
    fn from(rollout: v1::Rollout) -> Self {
        Self {
            phase: word(rollout.phase().as_str_name(), "PHASE_"),
            stage: given(word(rollout.stage().as_str_name(), "STAGE_")),
            name: rollout.name,
            title: rollout.title,
            digest: rollout.digest,
            message: rollout.message,
            wave: rollout.wave,
            waves: rollout.waves.into_iter().map(Into::into).collect(),
            guests: rollout.guests.into_iter().map(Into::into).collect(),
            approvals: rollout.approvals,
            approvals_needed: rollout.approvals_needed,
            keys: rollout.keys.into_iter().map(Into::into).collect(),
            guarded: rollout
                .guarded
                .into_iter()
                .map(|guarded| GuardedKey {
                    key: guarded.key,
                    advice: guarded.advice,
                })
                .collect(),
            gates: rollout.gates.into_iter().map(Into::into).collect(),
            next_steps: rollout.next_steps.into_iter().map(Into::into).collect(),
            timeline: rollout.timeline.into_iter().map(Into::into).collect(),
        }
    }
}

/// The phase of a rollout that the controller cannot read. Its message is the reason.
pub const UNREADABLE: &str = "unreadable";

impl From<v1::UnreadableRollout> for Rollout {
    fn from(rollout: v1::UnreadableRollout) -> Self {
        Self {
            name: rollout.name,
            phase: UNREADABLE.to_owned(),
            message: rollout.reason,
            ..Self::default()
        }
    }
}

impl From<v1::ClaimedKeys> for ClaimedKeys {
    fn from(keys: v1::ClaimedKeys) -> Self {
        Self {
            want: keys.want,
            count: keys.count,
            names: keys.names,
        }
    }
}

impl From<v1::Gate> for Gate {
    fn from(gate: v1::Gate) -> Self {
        Self {
            state: word(gate.state().as_str_name(), "STATE_"),
            text: gate.text,
            message: gate.message,
            asked: gate.asked.map(|time| Moment(time.seconds)),
            aborts: gate.aborts,
        }
    }
}

impl From<v1::NextStep> for NextStep {
    fn from(step: v1::NextStep) -> Self {
        Self {
            command: step.command,
            effect: step.effect,
        }
    }
}

impl From<v1::Wave> for Wave {
    fn from(wave: v1::Wave) -> Self {
        Self {
            name: wave.name,
            guests: wave.guests,
            hosts: wave.hosts,
            as_wanted: wave.as_wanted,
            unknown: wave.unknown,
            not_yet: wave.not_yet,
            released: wave.released,
            keys: wave.keys,
            sites: wave.sites,
            predicted_pause_us: micros(wave.predicted_pause.unwrap_or_default()),
            bake_seconds: wave.bake.map_or(0, |bake| bake.seconds),
            bakes_until: wave.bakes_until.map(|time| Moment(time.seconds)),
        }
    }
}

impl From<v1::RolloutGuest> for RolloutGuest {
    fn from(guest: v1::RolloutGuest) -> Self {
        Self {
            phase: word(guest.phase().as_str_name(), "GUEST_PHASE_"),
            host: guest.host,
            guest: guest.guest,
            since: guest.since.map(|time| Moment(time.seconds)),
            wave: guest.wave,
            message: guest.message,
            keys: guest.keys,
            sites: guest.sites,
            pause_us: guest.pause.map(micros),
            tracepoints: guest.tracepoints,
            left_out: guest
                .left_out
                .into_iter()
                .map(|keys| LeftOutKeys {
                    reason: keys.reason,
                    count: keys.count,
                    names: keys.names,
                })
                .collect(),
        }
    }
}

impl From<v1::TimelineEntry> for TimelineEntry {
    fn from(entry: v1::TimelineEntry) -> Self {
        Self {
            time: Moment(entry.time.map_or(0, |time| time.seconds)),
            phase: given(word(entry.phase().as_str_name(), "PHASE_")),
            subject: given(word(entry.subject().as_str_name(), "SUBJECT_")),
            number: entry.number,
            principal: entry.principal,
            text: entry.text,
        }
    }
}

impl From<v1::ExplainResponse> for Explanation {
    fn from(answer: v1::ExplainResponse) -> Self {
        Self {
            guest: answer.guest.unwrap_or_default().into(),
            reasons: answer.reasons,
        }
    }
}

impl From<v1::DriftResponse> for DriftReport {
    fn from(answer: v1::DriftResponse) -> Self {
        let drift = |drift: v1::Drift| Drift {
            cause: word(drift.cause().as_str_name(), "CAUSE_"),
            host: drift.host,
            guest: drift.guest,
            key: drift.key,
            desired: drift.desired,
            actual: drift.actual,
            left: drift.left,
        };
        let rollout = answer.rollout.unwrap_or_default();
        Self {
            phase: word(rollout.phase().as_str_name(), "PHASE_"),
            guests: rollout.waves.iter().map(|wave| wave.guests).sum(),
            compared: answer.compared,
            waiting: answer.waiting,
            drifts: answer.drifts.into_iter().map(drift).collect(),
        }
    }
}

impl From<v1::Host> for Host {
    fn from(host: v1::Host) -> Self {
        Self {
            name: host.name,
            endpoint: host.endpoint,
            labels: host.labels.into_iter().collect(),
            guests: host.guests,
            registered: host.registered,
            unreachable: host.unreachable,
        }
    }
}
