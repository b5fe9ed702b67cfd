// SPDX-License-Identifier: Apache-2.0
//! Defines the saved state of a rollout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::keys::KeySet;
use super::machine::bounded;
use super::policy::Policy;

/// The text of the timeline's entry for the start.
pub(super) const STARTED: &str = "started";

/// Milliseconds since the epoch, UTC.
pub type Millis = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Guests of the wave are being changed.
    // Records of versions 1 and 2 have this alias.
    #[serde(alias = "Committing")]
    Changing,
    Baking,
    /// Waits for gates that need external information. Another driver evaluates them again.
    Gating,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Aborted,
    Undone,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    #[default]
    Planned,
    Running(Stage),
    Paused,
    Completed,
    Reverting(End),
    Ended(End),
}

impl Phase {
    /// Returns whether the rollout is being undone or has ended.
    pub fn reverts(self) -> bool {
        matches!(self, Self::Reverting(_) | Self::Ended(_))
    }

    /// Returns whether the rollout owns the keys of its guests, so that no other rollout may plan
    /// with them.
    pub fn is_active(self) -> bool {
        !matches!(self, Self::Completed | Self::Ended(_))
    }

    /// Returns whether the rollout requires that its changed guests stay changed.
    pub fn has_desired_state(self) -> bool {
        matches!(self, Self::Running(_) | Self::Paused | Self::Completed)
    }
}

/// The consequence of a failed call for the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The guest refused the claims, or some of them. It refuses a repeat too, unless it has
    /// changed.
    Refused,
    /// The guest refused temporarily, or could not be observed before the change.
    Busy,
    /// The outcome is unknown, because there was no answer or the answer did not come from the
    /// guest's service. The claims may have been made.
    Unknown,
    /// The guest has the claims, and some have no effect. They take effect when others' claims and
    /// holds end, or a person has them made again, so the guest is only asked.
    Ineffective,
    /// The guest had confirmed the claims in this boot, and its service has no record of them. The
    /// keys may be as wanted. New claims would take the old references for the guest's own, so the
    /// guest is only asked.
    NoRecord,
}

/// The progress of a guest towards the state that the rollout wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Skipped {
        why: String,
    },
    /// The guest waits for its wave, or until the caps let it change.
    Pending,
    /// The claims may have been sent in the member's generation. `again` means that an earlier
    /// generation failed: the wave does not wait for the guest any more.
    Claiming {
        again: bool,
    },
    /// The guest has confirmed every claim.
    AsWanted {
        pause_us: u64,
    },
    /// The claims or some of them were not made, or their outcome is unknown. They are sent again
    /// in a later generation, unless the guest has them all.
    NotYet {
        failure: Failure,
        why: String,
    },
    /// The rollout wants nothing of the guest any more, and the guest has not confirmed this. The
    /// empty set of claims is sent until it does. `why` is the reason why the last call failed;
    /// empty at first.
    Releasing {
        why: String,
    },
    /// The guest has confirmed that the rollout has no claims. `void` means that the claims had
    /// ended before the call (TTL, reboot).
    Released {
        void: bool,
    },
    /// The guest drifted, and an operator accepted its state. Abort and undo do not change it.
    Adopted,
    /// An operator has given the guest up. Nothing is sent to it any more.
    Forgotten,
    /// A later member of the same guest replaces this one.
    Superseded,
}

/// Why a guest that has lost its record of the claims is not released. Stored rollouts contain this
/// text, and [`Member::has_no_record`] compares it, so it must not change.
pub(crate) const NO_RECORD: &str = "the guest confirmed the claims in this boot, and has no record of them \
                         now; look at its keys, and then give it up with `rollout forget`";

/// The part of [`NO_RECORD`] that names a command.
pub(crate) const NO_RECORD_ADVICE: &str = ", and then give it up with `rollout forget`";

impl State {
    /// Returns the state of a guest that has lost its record of the claims.
    pub(crate) fn no_record() -> Self {
        let why = NO_RECORD.to_owned();
        Self::Releasing { why }
    }

    /// Returns whether the plan leaves the guest out, or a later member replaces this one.
    pub fn is_left_out(&self) -> bool {
        matches!(self, Self::Skipped { .. } | Self::Superseded)
    }

    /// Returns whether the guest was asked for its release and has not confirmed it.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Releasing { why } if !why.is_empty())
    }

    /// Returns why the guest is not yet as wanted, if the wave does not wait for it any more.
    pub fn late(&self) -> Option<&str> {
        match self {
            Self::NotYet { why, .. } => Some(why),
            Self::Claiming { again: true } => Some("it is tried again"),
            _ => None,
        }
    }

    /// Returns whether the guest's wave waits for it: it waits for its change, or is being changed.
    pub fn is_awaited(&self) -> bool {
        matches!(self, Self::Pending | Self::Claiming { again: false })
    }

    /// Returns whether the guest has confirmed the claims.
    pub fn has_claims(&self) -> bool {
        matches!(self, Self::AsWanted { .. }) || self.is_ineffective()
    }

    /// Returns why the guest is not yet as wanted, if a call has failed.
    pub fn failure(&self) -> Option<Failure> {
        match self {
            Self::NotYet { failure, .. } => Some(*failure),
            _ => None,
        }
    }

    /// Returns whether the guest had confirmed the claims, and some have no effect any more, or its
    /// service has no record of them. It is only asked.
    pub fn is_ineffective(&self) -> bool {
        matches!(
            self.failure(),
            Some(Failure::Ineffective | Failure::NoRecord)
        )
    }

    /// Returns whether the guest's service has lost its record of claims that it had confirmed.
    pub fn has_lost_record(&self) -> bool {
        self.failure() == Some(Failure::NoRecord)
    }

    /// Returns whether the claims are to be sent again in a later generation.
    pub fn is_retried(&self) -> bool {
        self.failure().is_some() && !self.is_ineffective()
    }

    /// Returns whether the guest is not yet as wanted and the wave does not wait for it any more.
    pub fn is_late(&self) -> bool {
        self.late().is_some()
    }
}

/// Keys that the spec's patterns match and that are not claimed, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub reason: String,
    pub count: u32,
    /// The names of some of them.
    pub names: Vec<String>,
}

/// The claims on a guest, and their effect as a validation predicted it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The number of keys whose count would change.
    pub keys: u32,
    pub sites: u32,
    pub predicted_pause_us: u64,
    pub left_out: Vec<LeftOut>,
    /// The set is stored in a record of its own.
    #[serde(skip)]
    pub set: Arc<KeySet>,
}

/// The report of a guest's agent when the guest's wave began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub boot_id: String,
    pub kernel_warnings: u64,
}

/// The record that a guest's service has of a rollout's claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The name that the service gives it.
    pub ledger: String,
    /// The highest generation whose claims are made in it.
    pub generation: u64,
}

impl Record {
    /// Returns `None` for a service that does not name its record.
    pub fn new(ledger: &str, generation: u64) -> Option<Self> {
        let ledger = bounded(ledger);
        (!ledger.is_empty()).then_some(Self { ledger, generation })
    }
}

/// A guest of a rollout. The members of a wave are adjacent, and skipped ones come after the last
/// wave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub host: String,
    pub guest: String,
    /// The value of the host's label that names the failure domain; empty if there is none.
    pub domain: String,
    pub plan: Plan,
    /// The health before the change. It is set if a gate compares with it.
    pub health: Option<Health>,
    /// The latest generation in which claims may have been sent; 0 if none were. It is stored
    /// before a call carries it, so no call of an earlier driver has a higher one.
    pub generation: u64,
    /// The guest's boot for which claims are sent. It is stored before a call names it.
    pub boot: String,
    /// The guest has confirmed the claims in this boot.
    pub is_confirmed: bool,
    /// The record in which the claims were confirmed; `None` if the service does not name its
    /// record.
    pub record: Option<Record>,
    /// The time at which the claims end by themselves, if the spec has a time for them.
    pub expires: Option<Millis>,
    /// The time for which the latest change stopped the guest. It stays after the change is undone.
    pub pause_us: Option<u64>,
    /// The time since when the guest is not yet as wanted, cannot be released, or does not answer
    /// although it was as wanted; `None` if it is in no such state.
    pub since: Option<Millis>,
    pub state: State,
}

impl Member {
    /// Creates a pending member with an empty plan, to whose guest no call was made.
    pub fn new(host: &str, guest: &str) -> Self {
        Self {
            host: host.to_owned(),
            guest: guest.to_owned(),
            domain: String::new(),
            plan: Plan::default(),
            health: None,
            generation: 0,
            boot: String::new(),
            is_confirmed: false,
            record: None,
            expires: None,
            pause_us: None,
            since: None,
            state: State::Pending,
        }
    }

    /// Records that the guest's service has the claims in this record. Their time begins with the
    /// first such answer.
    pub(super) fn confirm(&mut self, ledger: &str, ttl: Option<Millis>, now: Millis) {
        self.is_confirmed = true;
        self.record = Record::new(ledger, self.generation);
        let expires = ttl.map(|ttl| now.saturating_add(ttl));
        self.expires = self.expires.or(expires);
    }

    /// Returns the record in which the claims were confirmed in this boot, if it has a name.
    pub fn confirmed_record(&self, boot: &str) -> Option<&Record> {
        let is_confirmed = self.is_confirmed && self.boot == boot;
        self.record.as_ref().filter(|_| is_confirmed)
    }

    /// Returns whether the claims that were confirmed in this boot are in the service's present
    /// record; `None` if one of the two has no name. A record of the same name may be an earlier
    /// state, as after a snapshot was loaded.
    pub fn is_recorded(&self, boot: &str, present: Option<&Record>) -> Option<bool> {
        let (confirmed, present) = (self.confirmed_record(boot)?, present?);
        Some(present.ledger == confirmed.ledger && present.generation >= confirmed.generation)
    }

    /// Returns whether the claims have ended by the spec's TTL.
    pub fn has_expired(&self, now: Millis) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    /// Returns the time for which the latest change stopped the guest; `None` if it was not
    /// changed.
    pub fn pause(&self) -> Option<u64> {
        match self.state {
            // Records of earlier versions contain the time only in the state.
            State::AsWanted { pause_us } => Some(pause_us),
            _ => self.pause_us,
        }
    }

    /// Returns whether the guest was as wanted, and does not answer any more.
    pub fn is_unknown(&self) -> bool {
        matches!(self.state, State::AsWanted { .. }) && self.since.is_some()
    }

    /// Returns whether the guest was asked for its release, and has lost its record of the claims.
    pub fn has_no_record(&self) -> bool {
        matches!(&self.state, State::Releasing { why } if why == NO_RECORD)
    }

    /// Returns whether the guest may have claims that an abort or undo has to end.
    pub fn may_be_changed(&self) -> bool {
        let answers = matches!(
            self.state,
            State::Pending
                | State::Claiming { .. }
                | State::AsWanted { .. }
                | State::NotYet { .. }
                | State::Releasing { .. }
        );
        answers && self.generation > 0
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wave {
    pub name: String,
    /// The index of the wave's first member.
    pub first: usize,
    pub count: usize,
    pub bake_ms: u64,
    /// The end of the bake time, set when the members have settled for the first time.
    pub bakes_until: Option<Millis>,
    /// The wave was added for guests that joined or drifted. If one of its gates closes, only the
    /// wave itself is taken back.
    pub is_added: bool,
    /// The rollout wants nothing of the wave's guests any more.
    pub is_taken_back: bool,
    /// The principal whose command decided that the wave's guests are changed; empty for the
    /// principal that started the rollout.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub decided_by: String,
}

impl Wave {
    pub fn members(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}

/// The subject of a timeline's entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The entry has another subject, or was written by an earlier version.
    #[default]
    Other,
    /// The rollout entered another phase.
    Phase,
    /// The first result of a gate in a wave, or one that differs from the previous one.
    Gate,
    /// A gate paused or aborted the rollout.
    GateClosed,
    /// Guests differ from the state that the rollout set.
    Drift,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineEntry {
    pub time: Millis,
    /// The principal; empty for the controller's own actions.
    pub principal: String,
    pub text: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub event: Event,
    /// The position among all entries that the timeline ever had, from 1; 0 in an entry of an
    /// earlier version.
    #[serde(default, skip_serializing_if = "is_default")]
    pub number: u64,
    /// The phase after the event.
    #[serde(default, skip_serializing_if = "is_default")]
    pub phase: Phase,
}

/// Returns whether the field has its default value and is therefore not stored.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The stored state of a rollout without its members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub name: String,
    pub title: String,
    /// The digest of the spec's text, by which a repeated request is recognized.
    pub spec_digest: String,
    /// The digest of the spec, the waves and each guest's intent digest.
    pub digest: String,
    pub phase: Phase,
    /// The reason why the rollout is in this phase; empty if there is none.
    pub message: String,
    /// The index of the present wave.
    pub wave: usize,
    pub waves: Vec<Wave>,
    pub policy: Policy,
    pub approvals: Vec<String>,
    pub timeline: Vec<TimelineEntry>,
    /// The number of all entries that the timeline ever had, including those it has dropped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub entries: u64,
    /// The numbers of the latest entries that webhooks have accepted, by the webhooks' names. If a
    /// webhook was tried and has accepted none, the number of the entry before the first one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delivered: BTreeMap<String, u64>,
    /// The gate of the current wave that has paused the rollout.
    #[serde(default, skip_serializing_if = "is_default")]
    pub closed_gate: Option<usize>,
    pub members: usize,
    pub created: Millis,
    /// The trace of the call that planned the rollout, 32 hexadecimal digits; empty if the call had
    /// none.
    pub trace_id: String,
    /// A random text that distinguishes the claims of rollouts with the same name.
    pub run: String,
    /// The principal that started the rollout; empty before the start, and in records of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub started_by: String,
    /// The principal that aborted or undid the rollout; empty if nobody did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ended_by: String,
}

impl Header {
    /// Returns the index of the member's wave; `None` if it is in no wave.
    pub fn wave_of(&self, member: usize) -> Option<usize> {
        let mut waves = self.waves.iter();
        waves.position(|wave| wave.members().contains(&member))
    }

    /// Returns the name of the owner of the rollout's claims.
    pub fn owner(&self) -> String {
        format!("rollout/{}/{}", self.name, self.run)
    }

    /// Returns the name of the rollout whose claims have this owner; `None` if the owner is no
    /// rollout.
    pub fn rollout_of(owner: &str) -> Option<&str> {
        let (name, _run) = owner.strip_prefix("rollout/")?.split_once('/')?;
        Some(name)
    }

    /// Returns the principal that started the rollout; empty if nobody did.
    pub fn starter(&self) -> &str {
        let mut timeline = self.timeline.iter();
        match self.started_by.as_str() {
            "" => timeline
                .find(|entry| entry.text == STARTED)
                .map_or("", |entry| entry.principal.as_str()),
            starter => starter,
        }
    }

    /// Records the principal whose command decided that the guests of these waves are changed.
    pub(super) fn decide(&mut self, waves: std::ops::Range<usize>, principal: &str) {
        let by = match principal == self.starter() {
            true => String::new(),
            false => principal.to_owned(),
        };
        for wave in self.waves.get_mut(waves).into_iter().flatten() {
            wave.decided_by.clone_from(&by);
        }
    }

    /// Returns the principal that planned the rollout.
    pub fn planned_by(&self) -> &str {
        // The first entry of a timeline is never removed.
        let first = self.timeline.first();
        first.map_or("", |entry| entry.principal.as_str())
    }

    /// Returns the trace that all changes of the rollout belong to. It is the trace of the call
    /// that planned the rollout, or else the first half of the rollout's digest.
    pub fn trace(&self) -> u128 {
        let id = match self.trace_id.as_str() {
            "" => self.digest.get(..32).unwrap_or_default(),
            id => id,
        };
        u128::from_str_radix(id, 16).unwrap_or(0)
    }
}

/// The header, the members, and the state that only the present driver has.
#[derive(Clone, Debug)]
pub struct Rollout {
    pub(super) header: Header,
    pub(super) members: Vec<Member>,
    pub(super) run: Run,
}

/// The state that is not stored. It is empty when a driver starts.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// The members for which `step` has returned an action whose outcome is not reported yet, with
    /// the generation of the action.
    pub(super) in_flight: BTreeMap<usize, u64>,
    /// The gates of the wave for which `step` has returned an action whose outcome is not reported
    /// yet, and the times of the actions.
    pub(super) asked: BTreeMap<usize, Millis>,
    /// The gates of the wave that have answered, the times at which they were asked, and whether
    /// they have passed.
    pub(super) answered: BTreeMap<usize, (Millis, bool)>,
    /// The gates of the wave whose latest results are inconclusive. For each, the time of the first
    /// such result, and the latest reason.
    pub(super) inconclusive: BTreeMap<usize, (Millis, String)>,
    /// The number of consecutive calls for a member that failed, and the time of the next one.
    pub(super) retries: BTreeMap<usize, (u32, Millis)>,
    /// The time of the next query whether the guests still have the claims.
    pub(super) check_from: Option<Millis>,
    /// The members whose guests are asked at once.
    pub(super) check_now: BTreeSet<usize>,
    /// The members that are as wanted and on which claims had no effect when they were asked last.
    pub(super) suspects: BTreeSet<usize>,
    /// The wave whose guests were asked after its bake time.
    pub(super) looked_at: Option<usize>,
    /// The time of a member's latest change, and the number of times that its claims were lost soon
    /// after one, by a boot or a module's reload.
    pub(super) made: BTreeMap<usize, (Millis, u32)>,
    /// The reason why guests that joined are not changed; empty if there is none.
    pub(super) late: String,
    /// The parts that are to be stored.
    pub(super) changed: BTreeSet<usize>,
    pub(super) header_changed: bool,
    /// The digests of the sets of keys that are stored, and the number of members.
    pub(super) stored_sets: BTreeSet<String>,
    pub(super) stored_members: usize,
}

/// The parts of a rollout that are to be stored.
#[derive(Debug, Default)]
pub struct Changes {
    /// Sets of keys that no earlier change contained.
    pub sets: Vec<Arc<KeySet>>,
    /// The indices of members.
    pub members: Vec<usize>,
    /// The number of members that were stored before.
    pub stored_members: usize,
    pub header: bool,
}
