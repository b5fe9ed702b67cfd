// SPDX-License-Identifier: Apache-2.0
//! Makes a planned rollout from a spec. It selects guests, prepares their plans, and divides them
//! into waves.

mod tracepoints;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt;
use patchbay_proto::text::hex;
use patchbay_proto::v1;
use sha2::{Digest, Sha256};

use crate::hosts::{self, CallError, Host, Hosts, Verdict};
use crate::rollout::{
    Header, InverseOp, KeySet, KeySets, Member, Millis, Phase, PreparedPlan, Rollout, State,
    TimelineEntry, Tracepoint, Wave,
};
use crate::spec::{OpKind, Selector, Size, Spec};

/// The lifetime of plans. It is one day, so that a rollout may take that long.
const PLAN_TTL_SECONDS: i64 = 24 * 3600;
/// The maximum number of guests that prepare at the same time. Each host has its own limit too.
pub const FAN_OUT: usize = 1024;

/// Plans the spec on every guest that it selects.
pub async fn plan(
    hosts: &Hosts,
    name: &str,
    text: &str,
    spec: &Spec,
    principal: &str,
    now: Millis,
) -> Rollout {
    let (selected, left_out) = select(hosts, spec).await;
    let mut header = Header {
        name: name.to_owned(),
        title: spec.title.clone(),
        digest: String::new(),
        spec_digest: spec_digest(text),
        phase: Phase::Planned,
        message: String::new(),
        wave: 0,
        waves: vec![],
        policy: spec.policy(),
        approvals: vec![],
        timeline: vec![TimelineEntry {
            time: now,
            principal: principal.to_owned(),
            text: "planned".to_owned(),
        }],
        members: 0,
        created: now,
        trace_id: hosts::current_trace().map_or_else(String::new, |id| format!("{id:032x}")),
        run: format!("{:016x}", fastrand::u64(..)),
    };
    let request_id = &format!("{}/prepare", header.request_prefix());
    let prepared = futures_util::stream::iter(selected)
        .map(|(host, status)| async move { prepare(name, request_id, spec, &host, status).await })
        .buffer_unordered(FAN_OUT);
    let mut prepared = std::pin::pin!(prepared);
    let (mut members, mut sets) = (Vec::<(Member, String)>::new(), KeySets::default());
    while let Some((mut member, label)) = prepared.next().await {
        member.plan.set = sets.shared(member.plan.set);
        members.push((member, label));
    }
    // The order must not depend on which guest answered first.
    members.sort_by(|(a, _), (b, _)| (&a.host, &a.guest).cmp(&(&b.host, &b.guest)));
    let is_skipped = |(member, _): &(Member, String)| matches!(member.state, State::Skipped { .. });
    let (skipped, touched): (Vec<_>, Vec<_>) = members.into_iter().partition(is_skipped);
    let mut members = spread(touched);
    header.waves = waves(spec, members.len());
    members.extend(skipped.into_iter().map(|(member, _)| member));
    header.message = match &left_out[..] {
        [] => String::new(),
        [first] => format!("left out: {first}"),
        [first, more @ ..] => format!("left out: {first}; and {} more", more.len()),
    };
    header.digest = digest(&header.spec_digest, &header.waves, &members);
    header.members = members.len();
    Rollout::new(header, members)
}

/// Returns the guests that the spec selects, and the reasons for guests and hosts that could not be
/// checked.
pub async fn select(
    hosts: &Hosts,
    spec: &Spec,
) -> (Vec<(Arc<Host>, v1::GuestStatus)>, Vec<String>) {
    let wanted = &spec.selector;
    let has_labels = |host: &Arc<Host>| {
        let labels = &host.config.labels;
        let mut wanted = wanted.labels.iter();
        wanted.all(|(label, value)| labels.get(label) == Some(value))
    };
    let mut asked = hosts.all();
    asked.retain(has_labels);
    let lists = futures_util::stream::iter(asked)
        .map(|host| async move {
            let list = host.list_guests().await;
            (host, list)
        })
        .buffer_unordered(FAN_OUT);
    let lists: Vec<_> = lists.collect().await;
    let (mut selected, mut left_out) = (Vec::new(), Vec::new());
    let mut found = Vec::new();
    for (host, list) in lists {
        let list = match list {
            Ok(list) => list,
            Err(status) => {
                left_out.push(format!("{}: {}", host.config.name, status.message()));
                continue;
            }
        };
        let globs = &wanted.guests;
        let is_named = |status: &v1::GuestStatus| {
            globs.is_empty() || globs.iter().any(|glob| glob.matches(&status.guest))
        };
        let list = list.into_iter().filter(is_named);
        found.extend(list.map(|status| (Arc::clone(&host), status)));
    }
    let kernels = futures_util::stream::iter(found)
        .map(|(host, status)| async move { (with_kernel(wanted, &host, status).await, host) })
        .buffer_unordered(FAN_OUT);
    let kernels: Vec<_> = kernels.collect().await;
    let release = wanted.kernel_release.as_ref();
    let build_id = wanted.kernel_build_id.as_ref();
    for (kernel, host) in kernels {
        match kernel {
            Ok(status)
                if release.is_none_or(|glob| glob.matches(&status.kernel_release))
                    && build_id.is_none_or(|build_id| *build_id == status.kernel_build_id) =>
            {
                selected.push((host, status));
            }
            Ok(_) => {}
            Err(why) => left_out.push(why),
        }
    }
    left_out.sort();
    (selected, left_out)
}

/// Returns the status with the guest's kernel, if the selector requires one. A kernel that does not
/// register is discovered by the first call for its keys.
async fn with_kernel(
    wanted: &Selector,
    host: &Host,
    status: v1::GuestStatus,
) -> Result<v1::GuestStatus, String> {
    let asks = wanted.kernel_release.is_some() || wanted.kernel_build_id.is_some();
    // A monitor that does not answer has reported nothing about its guest.
    let answers = status.registration() != v1::RegistrationState::Unspecified;
    if !asks || !answers || !status.kernel_release.is_empty() {
        return Ok(status);
    }
    let discovered = host.discover(&status.guest).await;
    discovered.map_err(|error| {
        let (host, why) = (&host.config.name, CallError::new(&error).why);
        format!(
            "the kernel of {} on {host} is not known: {why}",
            status.guest
        )
    })
}

/// Prepares the guest's plan, and returns the member with the host's value of the label in
/// `spread_over`.
pub async fn prepare(
    name: &str,
    request_id: &str,
    spec: &Spec,
    host: &Host,
    status: v1::GuestStatus,
) -> (Member, String) {
    let label = |label: &String| host.config.labels.get(label).cloned().unwrap_or_default();
    let domain = spec.max_concurrent.per_domain.as_ref();
    let mut member = Member {
        host: host.config.name.clone(),
        guest: status.guest.clone(),
        domain: domain
            .map(|domain| label(&domain.label))
            .unwrap_or_default(),
        plan: PreparedPlan::default(),
        health: None,
        state: State::Pending,
    };
    let skip = |why: &str| State::Skipped {
        why: why.to_owned(),
    };
    let spread = || spec.spread_over.as_ref().map(label).unwrap_or_default();
    let tracepoints = match tracepoints::select(host, spec, &status.guest).await {
        Ok(tracepoints) => tracepoints,
        Err(why) => {
            member.state = skip(&why);
            return (member, spread());
        }
    };
    match host
        .prepare(request(name, request_id, spec, &status.guest, &tracepoints))
        .await
    {
        Ok(plan)
            if plan
                .results
                .iter()
                .all(|key| key.count_before == key.count_after) =>
        {
            member.state = skip("every key is as the spec wants it");
            let discard = v1::DiscardUpdateRequest {
                guest: status.guest,
                plan_id: plan.plan_id,
            };
            // If this fails, the plan expires.
            let _ = host.discard(discard).await;
        }
        Ok(plan) => match impossible(spec, &plan.results) {
            Some(why) => member.state = skip(&why),
            None => {
                member.plan = prepared_plan(spec, request_id, tracepoints, plan);
            }
        },
        Err(status) => member.state = skip(&CallError::new(&status).why),
    }
    (member, spread())
}

/// Builds a request that is equal for equal arguments, so that a repeat gets the plan that the
/// guest has kept.
pub fn request(
    name: &str,
    request_id: &str,
    spec: &Spec,
    guest: &str,
    tracepoints: &[Tracepoint],
) -> v1::PrepareUpdateRequest {
    let updates = spec.ops.0.iter().enumerate().flat_map(|(index, op)| {
        let update = |name: &str, patterns: &[String]| v1::KeyUpdate {
            name: name.to_owned(),
            op: op.op.to_proto().into(),
            patterns: patterns.to_vec(),
            ..v1::KeyUpdate::default()
        };
        if !op.op.is_of_tracepoints() {
            return vec![update("", &op.patterns)];
        }
        let selected = tracepoints.iter().filter(|selected| selected.op == index);
        selected
            .map(|selected| update(&selected.key, &[]))
            .collect()
    });
    let ttl = spec.ttl.map(|ttl| prost_types::Duration {
        seconds: i64::try_from(ttl.0.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(ttl.0.subsec_nanos()).unwrap_or(0),
    });
    v1::PrepareUpdateRequest {
        guest: guest.to_owned(),
        updates: updates.collect(),
        reason: reason(name, spec),
        hold_ttl: ttl,
        plan_ttl: Some(prost_types::Duration {
            seconds: PLAN_TTL_SECONDS,
            nanos: 0,
        }),
        request_id: request_id.to_owned(),
        ..v1::PrepareUpdateRequest::default()
    }
}

/// Returns the prefix of the reason of every reference that the rollout takes.
pub fn reason_prefix(name: &str) -> String {
    format!("rollout {name}:")
}

/// Returns the reason of the rollout's references, in one line and cut to 256 bytes.
fn reason(name: &str, spec: &Spec) -> String {
    let one_line = spec.reason.replace(char::is_control, " ");
    let mut reason = format!("{} {one_line}", reason_prefix(name));
    while reason.len() > 256 {
        reason.pop();
    }
    reason
}

fn prepared_plan(
    spec: &Spec,
    request_id: &str,
    tracepoints: Vec<Tracepoint>,
    plan: v1::PrepareUpdateResponse,
) -> PreparedPlan {
    let counts = spec.ops.0.iter().any(|op| op.op.counts());
    let pause = plan.predicted_pause.unwrap_or_default();
    let pause_us = pause.seconds.saturating_mul(1_000_000) + i64::from(pause.nanos / 1000);
    let summary = plan.summary.unwrap_or_default();
    PreparedPlan {
        plan_id: plan.plan_id,
        request_id: request_id.to_owned(),
        digest: plan.digest,
        incarnation: plan.incarnation,
        keys: summary.keys_changed,
        sites: summary.sites_patched,
        predicted_pause_us: u64::try_from(pause_us).unwrap_or(0),
        set: Arc::new(KeySet::new(tracepoints, inverse(counts, &plan.results))),
    }
}

/// Returns the reason why the results contradict the spec; `None` if they do not. Each op changes a
/// key's count by at most one. The check bounds the size of an undo, which has one op for each
/// reference.
fn impossible(spec: &Spec, results: &[v1::KeyResult]) -> Option<String> {
    let ops = spec.ops.0.len() as u64;
    let counts = spec.ops.0.iter().any(|op| op.op.counts());
    let change = |key: &v1::KeyResult| i64::from(key.count_after) - i64::from(key.count_before);
    let key = results
        .iter()
        .find(|key| counts && change(key).unsigned_abs() > ops)?;
    Some(format!(
        "the monitor reports that the count of {} changes from {} to {}, which {ops} ops cannot cause; see the monitor's log",
        key.name, key.count_before, key.count_after
    ))
}

/// Returns the ops that undo the results. `counts` means that the ops were inc and dec.
fn inverse(counts: bool, results: &[v1::KeyResult]) -> Vec<InverseOp> {
    let inverse = |key: &v1::KeyResult| {
        let change = i64::from(key.count_after) - i64::from(key.count_before);
        let op = match (counts, change) {
            (_, 0) => return None,
            (true, 1..) => OpKind::Dec,
            (true, _) => OpKind::Inc,
            (false, 1..) => OpKind::Disable,
            (false, _) => OpKind::Enable,
        };
        let times = if counts { change.unsigned_abs() } else { 1 };
        Some(InverseOp {
            key: key.name.clone(),
            op: op.to_proto().into(),
            times: u32::try_from(times).unwrap_or(u32::MAX),
        })
    };
    results.iter().filter_map(inverse).collect()
}

/// Orders members so that consecutive members take all values of the label in turn.
fn spread(members: Vec<(Member, String)>) -> Vec<Member> {
    let mut turns: BTreeMap<String, u32> = BTreeMap::new();
    let mut placed: Vec<(u32, String, Member)> = Vec::with_capacity(members.len());
    for (member, value) in members {
        let turn = turns.entry(value.clone()).or_default();
        placed.push((*turn, value, member));
        *turn += 1;
    }
    placed.sort_by(|(a, x, _), (b, y, _)| (a, x).cmp(&(b, y)));
    placed.into_iter().map(|(_, _, member)| member).collect()
}

/// Splits `members` members into waves. A percentage refers to all members, and gives at least one
/// member if any is left. If the spec has no wave for the rest, the remaining members are in no
/// wave.
fn waves(spec: &Spec, members: usize) -> Vec<Wave> {
    let mut waves: Vec<Wave> = Vec::new();
    let mut first = 0;
    for (index, wave) in spec.waves.0.iter().enumerate() {
        let left = members - first;
        let wanted = match wave.size {
            Size::Count(count) => count as usize,
            Size::Percent(percent) => (members * percent as usize / 100).max(1),
            Size::Rest => left,
        };
        let count = wanted.min(left);
        let name = wave.name.clone();
        waves.push(Wave {
            name: name.unwrap_or_else(|| (index + 1).to_string()),
            first,
            count,
            bake_ms: wave.bake.millis(),
            bakes_until: None,
        });
        first += count;
    }
    waves.retain(|wave| wave.count > 0);
    waves
}

fn digest(spec: &str, waves: &[Wave], members: &[Member]) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(spec);
    for wave in waves {
        add(&format!("{} {}", wave.first, wave.count));
    }
    for member in members {
        add(&member.host);
        add(&member.guest);
        add(&member.plan.digest);
    }
    hex(&hash.finalize())
}

/// Returns a digest that distinguishes a repeat of a plan from another plan of the same name.
pub fn spec_digest(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Returns a key that both rollouts change on one guest.
pub fn overlap(one: &[Member], other: &[Member]) -> Option<String> {
    let mut keys = std::collections::BTreeSet::new();
    for member in other {
        for op in member.plan.set.inverse() {
            keys.insert((&member.host, &member.guest, &op.key));
        }
    }
    one.iter().find_map(|member| {
        let mut ops = member.plan.set.inverse().iter();
        let op = ops.find(|op| keys.contains(&(&member.host, &member.guest, &op.key)))?;
        Some(format!(
            "{} of guest {} on {}",
            op.key, member.guest, member.host
        ))
    })
}

/// Builds one update from these ops of a member's inverse. The request id makes sure that a repeat
/// changes nothing.
pub fn revert_request(
    name: &str,
    guest: &str,
    ops: &[InverseOp],
    request_id: String,
) -> v1::UpdateStaticKeysRequest {
    let update = |op: &InverseOp| {
        let update = v1::KeyUpdate {
            name: op.key.clone(),
            op: op.op,
            ..v1::KeyUpdate::default()
        };
        std::iter::repeat_n(update, op.times as usize)
    };
    v1::UpdateStaticKeysRequest {
        guest: guest.to_owned(),
        updates: ops.iter().flat_map(update).collect(),
        request_id,
        reason: format!("rollout {name} is taken back"),
        result_view: v1::ResultView::Summary.into(),
        ..v1::UpdateStaticKeysRequest::default()
    }
}

/// Returns the kind of failure of a commit that ended with this error.
pub fn commit_failure(error: &CallError) -> crate::rollout::Failure {
    match error.verdict {
        Verdict::Busy => crate::rollout::Failure::Busy,
        Verdict::Unknown => crate::rollout::Failure::Unknown,
        Verdict::Refused | Verdict::NotHolder | Verdict::WouldWarn => {
            crate::rollout::Failure::Final
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(waves: &str) -> Spec {
        let rest = "selector: {guests: [\"*\"]}\nops: [{op: inc, keys: [a]}]\nwaves: ";
        Spec::parse(&format!("{rest}{waves}\n")).expect("right")
    }

    fn counts(waves: &str, members: usize) -> Vec<usize> {
        let found = super::waves(&spec(waves), members);
        found.iter().map(|wave| wave.count).collect()
    }

    #[test]
    fn waves_cut_all_members_and_no_more() {
        let text = "[{size: 1}, {size: 10%}, {size: rest}]";
        assert_eq!(counts(text, 100), [1, 10, 89]);
        assert_eq!(counts(text, 2), [1, 1]);
        assert_eq!(counts(text, 0), [0; 0]);
        assert_eq!(counts("[{size: 60%}, {size: 60%}]", 10), [6, 4]);
    }

    #[test]
    fn members_are_spread_over_the_label() {
        let member = |guest: usize| Member {
            host: String::new(),
            guest: guest.to_string(),
            domain: String::new(),
            plan: PreparedPlan::default(),
            health: None,
            state: State::Pending,
        };
        let racks = ["a", "a", "a", "b", "b", "c"];
        let members = racks.iter().enumerate();
        let members = members.map(|(index, rack)| (member(index), (*rack).to_owned()));
        let order: Vec<String> = spread(members.collect())
            .into_iter()
            .map(|m| m.guest)
            .collect();
        assert_eq!(order, ["0", "3", "5", "1", "4", "2"]);
    }

    #[test]
    fn the_inverse_undoes_each_change_and_nothing_else() {
        let key = |name: &str, before, after| v1::KeyResult {
            name: name.to_owned(),
            count_before: before,
            count_after: after,
            ..v1::KeyResult::default()
        };
        let found = |counts, before, after| {
            let inverse = inverse(counts, &[key("k", before, after)]);
            inverse
                .first()
                .map(|op| (v1::KeyOp::try_from(op.op).expect("known"), op.times))
        };
        assert_eq!(found(false, 0, 1), Some((v1::KeyOp::Disable, 1)));
        assert_eq!(found(false, 1, 0), Some((v1::KeyOp::Enable, 1)));
        assert_eq!(found(true, 1, 3), Some((v1::KeyOp::Dec, 2)));
        assert_eq!(found(true, 3, 2), Some((v1::KeyOp::Inc, 1)));
        assert_eq!(found(false, 1, 1), None);
    }

    #[test]
    fn a_count_that_no_op_can_reach_is_refused() {
        let key = |before, after| v1::KeyResult {
            name: "k".to_owned(),
            count_before: before,
            count_after: after,
            ..v1::KeyResult::default()
        };
        let of = |op: &str, before, after| {
            let text = format!(
                "selector: {{guests: [\"*\"]}}\nops: [{{op: {op}, keys: [k]}}]\nwaves: [{{size: rest}}]\n"
            );
            let spec = Spec::parse(&text).expect("a spec");
            impossible(&spec, &[key(0, 0), key(before, after)])
        };
        assert_eq!(of("inc", 0, 1), None);
        assert_eq!(of("inc", i32::MAX - 1, i32::MAX), None);
        for (before, after) in [(0, i32::MAX), (i32::MIN, i32::MAX), (2, 0)] {
            let why = of("inc", before, after).expect("impossible");
            assert!(why.contains(&format!("from {before} to {after}")), "{why}");
        }
        // The undo of `disable` is a single op, so any change of the count is possible.
        assert_eq!(of("disable", i32::MAX, 0), None);
    }
}
