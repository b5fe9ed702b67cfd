// SPDX-License-Identifier: Apache-2.0
//! Finds guests that differ from the state that a rollout set. It compares the claims and bytes of
//! the guests that are as wanted, and finds guests that the spec selects and that joined later.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use patchbay_proto::text::hex;
use patchbay_proto::v1;

use crate::authority::{Authority, Refused, operates};
use crate::hosts::{CallError, Host, Hosts};
use crate::plan::{self, Asks, FAN_OUT};
use crate::rollout::{Member, NotLegal, Phase, Plan, Rollout, State, bounded};
use crate::runner::guests::no_effect;
use crate::runner::{Command, Running, now};
use crate::spec::{LateGuests, Spec};
use crate::storage;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Report,
    /// Adds a wave that changes the drifted guests.
    Fix,
    /// Accepts the drifted guests' present state.
    Adopt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Late,
    Key,
    Bytes,
    Unreachable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    pub host: String,
    pub guest: String,
    pub cause: Cause,
    /// The key, if the drift concerns one key.
    pub key: Option<String>,
    pub desired: String,
    pub actual: String,
    /// The reason why the action could not remove this drift.
    pub left: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub drifts: Vec<Drift>,
    pub compared: usize,
    /// The names of the guests of added waves that are not changed yet.
    pub waiting: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum DriftError {
    #[error(transparent)]
    NotLegal(#[from] NotLegal),
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// The member of each guest, by host and name.
type Current = BTreeMap<(String, String), (usize, Member)>;

/// The person who gives a command.
struct By<'a> {
    authority: &'a Authority,
    principal: &'a str,
}

impl By<'_> {
    /// Checks that the rollout may be extended to the guest.
    ///
    /// # Errors
    /// The reason why not.
    fn may_extend(&self, running: &Running, member: &Member) -> Result<(), String> {
        match &member.state {
            State::Skipped { why } => Err(why.clone()),
            _ => {
                let authority = self.authority;
                authority.may_extend(self.principal, &running.rollout(), member)
            }
        }
    }

    async fn pass_on(&self, running: &Running, command: Command) -> Result<(), DriftError> {
        let authority = self.authority;
        let passed_on = authority.pass_on(self.principal, "", running, command);
        Ok(passed_on.await?)
    }
}

/// The parts of a rollout that are compared.
struct Snapshot {
    phase: Phase,
    waves: usize,
    current: Current,
    /// The guests of added waves that wait for their change, or are being changed.
    waiting: Vec<String>,
}

impl Snapshot {
    fn of(running: &Running) -> Self {
        let rollout = running.rollout();
        let header = rollout.header();
        let members = rollout.members().iter().cloned().enumerate();
        Self {
            phase: header.phase,
            waves: header.waves.len(),
            waiting: waiting(&rollout),
            current: members
                .filter(|(_, member)| member.state != State::Superseded)
                .map(|(index, member)| {
                    ((member.host.clone(), member.guest.clone()), (index, member))
                })
                .collect(),
        }
    }
}

/// Returns the guests of added waves that wait for their change, or are being changed.
fn waiting(rollout: &Rollout) -> Vec<String> {
    let waves = rollout.header().waves.iter();
    let waves = waves.filter(|wave| wave.is_added && !wave.is_taken_back);
    let members = waves.flat_map(|wave| &rollout.members()[wave.members()]);
    let waiting = members.filter(|member| member.state.is_awaited());
    waiting.map(|member| member.guest.clone()).collect()
}

/// Compares the guests with the rollout, and applies the action to the differences.
///
/// # Errors
/// [`DriftError`].
pub async fn drift(
    hosts: &Hosts,
    authority: &Authority,
    running: &Running,
    action: Action,
    principal: &str,
) -> Result<Report, DriftError> {
    let snapshot = Snapshot::of(running);
    if !snapshot.phase.has_desired_state() {
        return Err(NotLegal::Phase {
            rollout: running.rollout().header().name.clone(),
            phase: snapshot.phase.name(),
            command: "drift",
            legal: "running, paused or completed",
        }
        .into());
    }
    let mut report = compare(hosts, &running.asks, &snapshot.current).await;
    report.waiting.clone_from(&snapshot.waiting);
    for drift in &report.drifts {
        if drift.cause == Cause::Unreachable {
            // The rollout may still take the guest's last answer for its state.
            hosts.changed(&drift.host, Some(&drift.guest));
        }
    }
    for (_, member) in snapshot.current.values() {
        if let Some(why) = member.state.late() {
            let actual = format!("not yet: {why}");
            report
                .drifts
                .push(found(member, Cause::Key, None, "as wanted", &actual));
        }
    }
    let late = late(hosts, &running.spec, &snapshot.current).await;
    report
        .drifts
        .extend(late.iter().map(|(host, status)| Drift {
            host: host.config.name.clone(),
            guest: status.guest.clone(),
            cause: Cause::Late,
            key: None,
            desired: "changed".to_owned(),
            actual: "joined after the plan".to_owned(),
            left: None,
        }));
    let by = By {
        authority,
        principal,
    };
    match action {
        Action::Report => {
            // A viewer's question leaves no trace.
            let policy = authority.policy().current();
            let may_note = operates(&policy, principal, &running.rollout());
            if let Some(first) = report.drifts.first().filter(|_| may_note) {
                let text = differences(report.drifts.len(), first);
                tell(running, Command::Drifted { text }, principal).await?;
            }
        }
        Action::Fix => fix(hosts, running, &snapshot, &by, &mut report).await?,
        Action::Adopt => adopt(running, &snapshot.current, &by, &mut report).await?,
    }
    Ok(report)
}

fn differences(count: usize, first: &Drift) -> String {
    // Not everybody who sees the rollout may see guests that are not in it.
    if first.cause == Cause::Late {
        return format!(
            "drift: {count} differences from the rollout; the first is a guest that joined"
        );
    }
    let (guest, host, actual) = (&first.guest, &first.host, &first.actual);
    let key = first
        .key
        .as_ref()
        .map_or(String::new(), |key| format!("key {key}: "));
    format!(
        "drift: {count} differences from the rollout; the first is guest {guest} on {host}: \
         {key}{actual}"
    )
}

/// Returns the guests that the spec selects and that are not members.
async fn late(
    hosts: &Hosts,
    spec: &Spec,
    current: &Current,
) -> Vec<(std::sync::Arc<Host>, v1::GuestStatus)> {
    let (mut selected, _) = plan::select(hosts, spec).await;
    let id = |(host, status): &(std::sync::Arc<Host>, v1::GuestStatus)| {
        (host.config.name.clone(), status.guest.clone())
    };
    let present: BTreeSet<(String, String)> = selected.iter().map(id).collect();
    // A guest that is gone from its host may be one that appears on another.
    let gone = current
        .iter()
        .filter(|(guest, (_, member))| !present.contains(guest) && member.may_be_changed());
    let gone: BTreeSet<&str> = gone.map(|((_, guest), _)| guest.as_str()).collect();
    selected.retain(|guest| {
        let (host, name) = id(guest);
        !gone.contains(name.as_str()) && !current.contains_key(&(host, name))
    });
    selected
}

async fn compare(hosts: &Hosts, asks: &Asks, current: &Current) -> Report {
    let is_changed =
        |(_, member): &&(usize, Member)| matches!(member.state, State::AsWanted { .. });
    let changed: Vec<Member> = current
        .values()
        .filter(is_changed)
        .map(|(_, member)| member.clone())
        .collect();
    let compared = changed.len();
    let drifts = futures_util::stream::iter(changed)
        .map(|member| async move {
            let Some(host) = hosts.get(&member.host) else {
                return vec![unreachable(&member, "its host is not known any more")];
            };
            match compare_guest(&host, &member, &asks.owner).await {
                Ok(drifts) => drifts,
                Err(status) => vec![unreachable(&member, &CallError::new(&status).why)],
            }
        })
        .buffered(FAN_OUT);
    let drifts: Vec<Vec<Drift>> = drifts.collect().await;
    Report {
        drifts: drifts.into_iter().flatten().collect(),
        compared,
        waiting: vec![],
    }
}

fn found(member: &Member, cause: Cause, key: Option<&str>, desired: &str, actual: &str) -> Drift {
    Drift {
        host: member.host.clone(),
        guest: member.guest.clone(),
        cause,
        key: key.map(str::to_owned),
        desired: desired.to_owned(),
        actual: actual.to_owned(),
        left: None,
    }
}

fn unreachable(member: &Member, why: &str) -> Drift {
    found(member, Cause::Unreachable, None, "compared", why)
}

async fn compare_guest(
    host: &Host,
    member: &Member,
    owner: &str,
) -> Result<Vec<Drift>, tonic::Status> {
    // Claims that have ended by the spec's TTL are not drift. The time begins when the guest makes
    // them, which may be long after the plan.
    let has_expired = member.has_expired(now());
    let (claims, boot) = host.claims(&member.guest, owner).await?;
    if boot.is_empty() {
        // The claims of a kernel that has panicked, or is not known, tell nothing.
        let why = "its kernel is not known, or has panicked";
        return Ok(vec![unreachable(member, why)]);
    }
    let claimed: BTreeMap<&str, &v1::Claim> = claims
        .iter()
        .map(|claim| (claim.key.as_str(), claim))
        .collect();
    let has_booted = boot != member.boot;
    let mut drifts = Vec::new();
    for claim in member.plan.set.claims() {
        let found_claim = claimed.get(claim.key.as_str()).copied();
        if let Some(actual) = differs(found_claim, has_booted, has_expired) {
            let desired = format!("claimed {}", claim.want.name());
            drifts.push(found(
                member,
                Cause::Key,
                Some(&claim.key),
                &desired,
                &actual,
            ));
        }
        let key = host.key(&member.guest, &claim.key).await?;
        let foreign = i32::from(v1::SiteObstacle::ForeignBytes);
        if let Some(site) = key.sites.iter().find(|site| site.obstacle == foreign) {
            let bytes = hex(&site.current_bytes);
            let actual = format!("{bytes} at {:#x} {}", site.address, site.symbol);
            let desired = "its NOP or its JMP";
            drifts.push(found(
                member,
                Cause::Bytes,
                Some(&claim.key),
                desired,
                actual.trim_end(),
            ));
        }
    }
    Ok(drifts)
}

/// Returns how the claim's state on the guest differs from a claim that is made; `None` if it does
/// not.
fn differs(
    claim: Option<&v1::Claim>,
    has_booted: bool,
    has_expired: bool,
) -> Option<Cow<'static, str>> {
    match claim {
        Some(claim) if claim.state() == v1::ClaimState::Made => None,
        Some(claim) => Some(no_effect(claim)),
        // Only a claim that is not listed can have ended. A guest that booted again makes its
        // claims later than the stored time assumes.
        None if has_expired => None,
        None if has_booted => Some("not claimed: the guest has booted again".into()),
        None => Some("not claimed".into()),
    }
}

/// Validates the spec again on each drifted guest, and adds these guests in waves.
async fn fix(
    hosts: &Hosts,
    running: &Running,
    snapshot: &Snapshot,
    by: &By<'_>,
    report: &mut Report,
) -> Result<(), DriftError> {
    for drift in &mut report.drifts {
        drift.left = match drift.cause {
            Cause::Late | Cause::Key => None,
            Cause::Bytes => Some("a flip does not write over foreign bytes; boot the guest again"),
            Cause::Unreachable => Some("its state is unknown"),
        }
        .map(str::to_owned);
        let guest = (drift.host.clone(), drift.guest.clone());
        let member = snapshot.current.get(&guest).map(|(_, member)| member);
        if member.is_some_and(|member| member.state.has_lost_record()) {
            let why =
                "new claims would take the old references for the guest's own; look at its keys";
            drift.left = Some(why.to_owned());
        }
    }
    let wanted: BTreeSet<(String, String)> = report
        .drifts
        .iter()
        .filter(|drift| drift.left.is_none())
        .map(|drift| (drift.host.clone(), drift.guest.clone()))
        .collect();
    let wave = format!("fix-{}", snapshot.waves + 1);
    let validated = futures_util::stream::iter(wanted)
        .map(|guest| async move {
            let host = hosts.get(&guest.0)?;
            let member = snapshot.current.get(&guest);
            let generation = member.map_or(1, |(_, member)| member.generation.saturating_add(1));
            Some(validate(running, &host, &guest.1, generation, by.principal).await)
        })
        .buffered(FAN_OUT);
    let validated: Vec<Option<Member>> = validated.collect().await;
    let (mut added, mut reasons) = (Vec::new(), BTreeMap::new());
    for member in validated.into_iter().flatten() {
        match by.may_extend(running, &member) {
            Ok(()) => added.push(member),
            Err(why) => {
                reasons.insert((member.host, member.guest), why);
            }
        }
    }
    for drift in &mut report.drifts {
        if let Some(why) = reasons.get(&(drift.host.clone(), drift.guest.clone())) {
            drift.left = Some(why.clone());
        }
    }
    if added.is_empty() {
        return Ok(());
    }
    let command = Command::Extend {
        name: wave,
        added,
        by_waves: true,
    };
    by.pass_on(running, command).await
}

/// Validates the claims on a guest's keys. A guest whose claims do not fit into the store is left
/// out.
async fn validate(
    running: &Running,
    host: &Host,
    guest: &str,
    generation: u64,
    person: &str,
) -> Member {
    let (asks, spec) = (&running.asks, &running.spec);
    let validated = asks.validate(spec, host, guest, generation, person);
    let (mut member, _) = validated.await;
    if let Err(error) = storage::check_member(&member) {
        let why = bounded(&error.to_string());
        member.plan = Plan::default();
        member.state = State::Skipped { why };
    }
    member
}

async fn adopt(
    running: &Running,
    current: &Current,
    by: &By<'_>,
    report: &mut Report,
) -> Result<(), DriftError> {
    let (mut drifted, mut joined) = (BTreeSet::new(), Vec::new());
    for drift in &mut report.drifts {
        let guest = (drift.host.clone(), drift.guest.clone());
        let member = current.get(&guest).map(|(_, member)| member.clone());
        let member = member.unwrap_or_else(|| Member::new(&guest.0, &guest.1));
        if let Err(why) = by
            .authority
            .may_adopt(by.principal, &running.rollout(), &member)
        {
            drift.left = Some(why);
            continue;
        }
        match drift.cause {
            Cause::Unreachable => drift.left = Some("its state is unknown".to_owned()),
            Cause::Late => joined.push(Member {
                state: State::Skipped {
                    why: "it joined after the plan and was taken as it is".to_owned(),
                },
                ..Member::new(&guest.0, &guest.1)
            }),
            Cause::Key | Cause::Bytes => {
                drifted.extend(current.get(&guest).map(|(index, _)| *index))
            }
        }
    }
    if drifted.is_empty() && joined.is_empty() {
        return Ok(());
    }
    let drifted = drifted.into_iter().collect();
    let command = Command::Adopt { drifted, joined };
    by.pass_on(running, command).await
}

/// Changes the guests that joined since the plan. This requires that the spec asks for it, that the
/// rollout is completed, and that the policy still allows the principal that started the rollout to
/// change them. Other guests wait, and the rollout's message gives the reason.
pub async fn change_late(
    hosts: &Hosts,
    authority: &Authority,
    running: &Running,
) -> Result<(), DriftError> {
    if running.spec.late_guests != LateGuests::Change {
        return Ok(());
    }
    let snapshot = Snapshot::of(running);
    if snapshot.phase != Phase::Completed {
        return Ok(());
    }
    let wave = format!("late-{}", snapshot.waves + 1);
    let starter = &running.rollout().header().starter().to_owned();
    let by = By {
        authority,
        principal: starter,
    };
    let late = late(hosts, &running.spec, &snapshot.current).await;
    let validated =
        futures_util::stream::iter(late)
            .map(|(host, status)| async move {
                validate(running, &host, &status.guest, 1, starter).await
            })
            .buffered(FAN_OUT);
    let mut added: Vec<Member> = validated.collect().await;
    let mut waiting = Vec::new();
    // A guest that is left out may not have booted yet, so it remains drift.
    added.retain(|member| {
        let may = by.may_extend(running, member);
        may.map_err(|why| waiting.push((member.guest.clone(), why)))
            .is_ok()
    });
    set_waiting(running, starter, &waiting);
    if added.is_empty() {
        return Ok(());
    }
    let command = Command::Extend {
        name: wave,
        added,
        by_waves: false,
    };
    tell(running, command, "").await
}

async fn tell(running: &Running, command: Command, principal: &str) -> Result<(), DriftError> {
    match running.command(command, principal).await {
        Ok(result) => Ok(result?),
        Err(lost) => Err(Refused::from(lost).into()),
    }
}

/// Sets the rollout's message to the number of guests that joined and wait, and the first reason.
/// Only the log names the guests, because not everybody who sees the rollout may see them.
fn set_waiting(running: &Running, by: &str, waiting: &[(String, String)]) {
    let mut rollout = running.rollout();
    let text = waiting.first().map_or_else(String::new, |(guest, why)| {
        format!(
            "{} guests joined and are not changed for {by:?}, who started the rollout; the \
             controller's log names them: {}",
            waiting.len(),
            why.replace(guest.as_str(), "the guest")
        )
    });
    let text = bounded(&text);
    if rollout.late() == text {
        return;
    }
    for (guest, why) in waiting {
        tracing::warn!(rollout = rollout.header().name, guest, "not changed: {why}");
    }
    rollout.set_late(text);
    drop(rollout);
    running.changed();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_claim_that_has_ended_may_have_expired() {
        use v1::ClaimState::{HeldByOthers, Made, Missing, Refused, Void};
        let claim = |state: v1::ClaimState| v1::Claim {
            state: state.into(),
            ..v1::Claim::default()
        };
        for state in [HeldByOthers, Missing, Refused, Void] {
            let found = differs(Some(&claim(state)), true, true);
            assert!(found.is_some(), "{state:?}");
        }
        assert_eq!(differs(Some(&claim(Made)), false, false), None);
        for has_booted in [false, true] {
            assert_eq!(differs(None, has_booted, true), None);
            assert!(differs(None, has_booted, false).is_some());
        }
    }
}
