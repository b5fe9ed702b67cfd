// SPDX-License-Identifier: Apache-2.0
//! Finds guests that differ from the state that a rollout set. It compares the keys, references and
//! bytes of the guests that the rollout changed, and finds guests that its spec selects and that
//! joined later.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use patchbay_proto::text::hex;
use patchbay_proto::v1;

use crate::hosts::{CallError, Host, Hosts};
use crate::plan::{self, FAN_OUT};
use crate::rollout::{InverseOp, Member, Millis, NotLegal, Phase, PreparedPlan, State};
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
}

#[derive(Debug, thiserror::Error)]
pub enum DriftError {
    #[error("{0}")]
    NotLegal(#[from] NotLegal),
    #[error("this replica does not lead any more")]
    Deposed,
}

/// The last member of each guest, by host and name.
type Current = BTreeMap<(String, String), (usize, Member)>;

/// The parts of a rollout that are compared.
struct Snapshot {
    name: String,
    request_prefix: String,
    phase: Phase,
    created: Millis,
    waves: usize,
    current: Current,
}

impl Snapshot {
    fn of(running: &Running) -> Self {
        let rollout = running.rollout();
        let header = rollout.header();
        let members = rollout.members().iter().cloned().enumerate();
        Self {
            name: header.name.clone(),
            request_prefix: header.request_prefix(),
            phase: header.phase,
            created: header.created,
            waves: header.waves.len(),
            current: members
                .map(|(index, member)| {
                    ((member.host.clone(), member.guest.clone()), (index, member))
                })
                .collect(),
        }
    }
}

/// Compares the guests with the rollout, and applies the action to the differences.
///
/// # Errors
/// [`DriftError`].
pub async fn drift(
    hosts: &Hosts,
    running: &Running,
    action: Action,
    principal: &str,
) -> Result<Report, DriftError> {
    let snapshot = Snapshot::of(running);
    if !snapshot.phase.has_desired_state() {
        return Err(NotLegal::Phase {
            rollout: snapshot.name,
            phase: snapshot.phase.name(),
            command: "drift",
            legal: "running, paused or completed",
        }
        .into());
    }
    let mut report = compare(hosts, &running.spec, &snapshot).await;
    for (_, member) in snapshot.current.values() {
        if let State::Failed { why, .. } = &member.state {
            let drift = found(
                member,
                Cause::Key,
                None,
                "changed",
                &format!("failed: {why}"),
            );
            report.drifts.push(drift);
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
    match action {
        Action::Report => {}
        Action::Fix => {
            fix(hosts, running, &snapshot, principal, &mut report).await?;
        }
        Action::Adopt => adopt(running, &snapshot.current, principal, &mut report).await?,
    }
    Ok(report)
}

/// Returns the guests that the spec selects and that are not members.
async fn late(
    hosts: &Hosts,
    spec: &Spec,
    current: &Current,
) -> Vec<(std::sync::Arc<Host>, v1::GuestStatus)> {
    let (mut selected, _) = plan::select(hosts, spec).await;
    selected.retain(|(host, status)| {
        !current.contains_key(&(host.config.name.clone(), status.guest.clone()))
    });
    selected
}

async fn compare(hosts: &Hosts, spec: &Spec, snapshot: &Snapshot) -> Report {
    let is_changed =
        |(_, member): &&(usize, Member)| matches!(member.state, State::Committed { .. });
    let changed: Vec<Member> = snapshot
        .current
        .values()
        .filter(is_changed)
        .map(|(_, member)| member.clone())
        .collect();
    let compared = changed.len();
    // References that have expired by the TTL of the spec are not drift.
    let has_expired = spec
        .ttl
        .is_some_and(|ttl| snapshot.created.saturating_add(ttl.millis()) <= now());
    let reason = &plan::reason_prefix(&snapshot.name);
    let drifts = futures_util::stream::iter(changed)
        .map(|member| async move {
            let Some(host) = hosts.get(&member.host) else {
                let why = "its host is not known any more";
                return vec![found(&member, Cause::Unreachable, None, "compared", why)];
            };
            match compare_guest(&host, &member, spec, reason, has_expired).await {
                Ok(drifts) => drifts,
                Err(status) => {
                    let why = CallError::new(&status).why;
                    vec![found(&member, Cause::Unreachable, None, "compared", &why)]
                }
            }
        })
        .buffered(FAN_OUT);
    let drifts: Vec<Vec<Drift>> = drifts.collect().await;
    Report {
        drifts: drifts.into_iter().flatten().collect(),
        compared,
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

async fn compare_guest(
    host: &Host,
    member: &Member,
    spec: &Spec,
    reason: &str,
    has_expired: bool,
) -> Result<Vec<Drift>, tonic::Status> {
    let mut held: BTreeMap<String, u32> = BTreeMap::new();
    for hold in host.holds(&member.guest).await? {
        if hold.reason.starts_with(reason) {
            *held.entry(hold.key).or_default() += hold.references;
        }
    }
    let counts = spec.ops.0.iter().any(|op| op.op.counts());
    let mut drifts = Vec::new();
    for op in member.plan.set.inverse() {
        let key = host.key(&member.guest, &op.key).await?;
        let held = held.get(&op.key).copied().unwrap_or(0);
        if !has_expired {
            drifts.extend(compare_key(member, op, &key, held, counts));
        }
        let foreign = i32::from(v1::SiteObstacle::ForeignBytes);
        if let Some(site) = key.sites.iter().find(|site| site.obstacle == foreign) {
            let bytes = hex(&site.current_bytes);
            let actual = format!("{bytes} at {:#x} {}", site.address, site.symbol);
            let desired = "its NOP or its JMP";
            drifts.push(found(
                member,
                Cause::Bytes,
                Some(&op.key),
                desired,
                actual.trim_end(),
            ));
        }
    }
    Ok(drifts)
}

/// Compares a key. `held` is the number of references with the rollout's reason. If the inverse
/// drops references, the rollout has taken them.
fn compare_key(
    member: &Member,
    op: &InverseOp,
    key: &v1::StaticKey,
    held: u32,
    counts: bool,
) -> Option<Drift> {
    let state = |enabled| if enabled { "enabled" } else { "disabled" };
    let took = op.op == i32::from(v1::KeyOp::Dec) || op.op == i32::from(v1::KeyOp::Disable);
    if took && held < op.times {
        let desired = format!("{} references of the rollout", op.times);
        let actual = format!("{held}, and the key is {}", state(key.enabled));
        return Some(found(member, Cause::Key, Some(&op.key), &desired, &actual));
    }
    if !counts && key.enabled != took {
        return Some(found(
            member,
            Cause::Key,
            Some(&op.key),
            state(took),
            state(key.enabled),
        ));
    }
    None
}

/// Prepares the spec again on each drifted guest, and adds these guests as a wave.
async fn fix(
    hosts: &Hosts,
    running: &Running,
    snapshot: &Snapshot,
    principal: &str,
    report: &mut Report,
) -> Result<(), DriftError> {
    for drift in &mut report.drifts {
        drift.left = match drift.cause {
            Cause::Late | Cause::Key => None,
            Cause::Bytes => Some("a flip does not write over foreign bytes; boot the guest again"),
            Cause::Unreachable => Some("nothing is known of it"),
        }
        .map(str::to_owned);
    }
    let wanted: BTreeSet<(String, String)> = report
        .drifts
        .iter()
        .filter(|drift| drift.left.is_none())
        .map(|drift| (drift.host.clone(), drift.guest.clone()))
        .collect();
    let (name, wave) = (&snapshot.name, format!("fix-{}", snapshot.waves + 1));
    let request_id = &format!("{}/{wave}/prepare", snapshot.request_prefix);
    let prepared = futures_util::stream::iter(wanted)
        .map(|(host, guest)| async move {
            let host = hosts.get(&host)?;
            let status = v1::GuestStatus {
                guest,
                ..v1::GuestStatus::default()
            };
            Some(prepare(name, request_id, &running.spec, &host, status).await)
        })
        .buffered(FAN_OUT);
    let prepared: Vec<Option<Member>> = prepared.collect().await;
    let (skipped, added): (Vec<Member>, Vec<Member>) = prepared
        .into_iter()
        .flatten()
        .partition(|member| matches!(member.state, State::Skipped { .. }));
    for member in skipped {
        let State::Skipped { why } = member.state else {
            continue;
        };
        let is_its = |drift: &&mut Drift| drift.host == member.host && drift.guest == member.guest;
        for drift in report.drifts.iter_mut().filter(is_its) {
            drift.left = Some(why.clone());
        }
    }
    if added.is_empty() {
        return Ok(());
    }
    tell(running, Command::Extend { wave, added }, principal).await
}

/// Prepares the guest's plan. A plan that does not fit into the store is left out.
async fn prepare(
    name: &str,
    request_id: &str,
    spec: &Spec,
    host: &Host,
    status: v1::GuestStatus,
) -> Member {
    let (mut member, _) = plan::prepare(name, request_id, spec, host, status).await;
    if let Err(error) = storage::check_member(&member) {
        let why = error.to_string();
        let plan = PreparedPlan::default();
        let state = State::Skipped { why };
        member = Member {
            plan,
            state,
            ..member
        };
    }
    member
}

async fn adopt(
    running: &Running,
    current: &Current,
    principal: &str,
    report: &mut Report,
) -> Result<(), DriftError> {
    let (mut drifted, mut joined) = (BTreeSet::new(), Vec::new());
    for drift in &mut report.drifts {
        let guest = (drift.host.clone(), drift.guest.clone());
        match drift.cause {
            Cause::Unreachable => drift.left = Some("nothing is known of it".to_owned()),
            Cause::Late => joined.push(Member {
                host: guest.0,
                guest: guest.1,
                domain: String::new(),
                plan: PreparedPlan::default(),
                health: None,
                state: State::Skipped {
                    why: "it joined after the plan and was taken as it is".to_owned(),
                },
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
    tell(running, Command::Adopt { drifted, joined }, principal).await
}

async fn tell(running: &Running, command: Command, principal: &str) -> Result<(), DriftError> {
    match running.command(command, principal).await {
        Some(result) => Ok(result?),
        None => Err(DriftError::Deposed),
    }
}

/// Changes the guests that joined since the plan, if the spec requires that and the rollout is
/// completed.
pub async fn change_late(hosts: &Hosts, running: &Running) -> Result<(), DriftError> {
    if running.spec.late_guests != LateGuests::Change {
        return Ok(());
    }
    let snapshot = Snapshot::of(running);
    if snapshot.phase != Phase::Completed {
        return Ok(());
    }
    let (name, wave) = (&snapshot.name, format!("late-{}", snapshot.waves + 1));
    let request_id = &format!("{}/{wave}/prepare", snapshot.request_prefix);
    let prepared = futures_util::stream::iter(late(hosts, &running.spec, &snapshot.current).await)
        .map(|(host, status)| async move {
            prepare(name, request_id, &running.spec, &host, status).await
        })
        .buffered(FAN_OUT);
    let mut added: Vec<Member> = prepared.collect().await;
    // A guest that refuses now may not have booted yet, so it remains drift.
    added.retain(|member| !matches!(member.state, State::Skipped { .. }));
    if added.is_empty() {
        return Ok(());
    }
    tell(running, Command::Extend { wave, added }, "").await
}
