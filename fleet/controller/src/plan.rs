// SPDX-License-Identifier: Apache-2.0
//! Makes a planned rollout from a spec. It selects guests, validates the claims on their keys, and
//! divides them into waves.

mod asks;
pub mod diff;
mod tracepoints;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures_util::StreamExt;
use patchbay_proto::text::hex;
use patchbay_proto::v1;
use sha2::{Digest, Sha256};

pub use self::asks::{Asks, not_made};
use crate::hosts::{self, CallError, Host, Hosts};
use crate::rollout::{
    Claim, Event, Header, KeySet, KeySets, Member, Millis, Phase, Rollout, State, TimelineEntry,
    Wave, bounded,
};
use crate::spec::{Selector, Size, Spec};

/// The maximum length of a guest's name that a host may report.
const MAX_GUEST_BYTES: usize = 253;
/// The maximum number of guests that are asked at the same time. Each host has its own limit too.
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
            event: Event::Phase,
            number: 1,
            phase: Phase::Planned,
        }],
        entries: 1,
        delivered: BTreeMap::new(),
        closed_gate: None,
        members: 0,
        created: now,
        trace_id: hosts::current_trace().map_or_else(String::new, |id| format!("{id:032x}")),
        run: format!("{:016x}", fastrand::u64(..)),
        started_by: String::new(),
        ended_by: String::new(),
    };
    let asks = &Asks::new(&header, spec);
    let validated = futures_util::stream::iter(selected)
        .map(|(host, status)| async move {
            let guest = &status.guest;
            asks.validate(spec, &host, guest, 1, principal).await
        })
        .buffer_unordered(FAN_OUT);
    let mut validated = std::pin::pin!(validated);
    let (mut members, mut sets) = (Vec::<(Member, String)>::new(), KeySets::default());
    while let Some((mut member, label)) = validated.next().await {
        member.plan.set = sets.shared(member.plan.set);
        members.push((member, label));
    }
    // The order must not depend on the order of the answers.
    members.sort_by(|(a, _), (b, _)| (&a.host, &a.guest).cmp(&(&b.host, &b.guest)));
    let is_skipped = |(member, _): &(Member, String)| matches!(member.state, State::Skipped { .. });
    let (skipped, touched): (Vec<_>, Vec<_>) = members.into_iter().partition(is_skipped);
    let mut members = spread(touched);
    header.waves = waves(spec, members.len());
    let in_waves = header.waves.last().map_or(0, |wave| wave.members().end);
    for member in &mut members[in_waves..] {
        let why = "the waves end before it; a last wave with `size: rest` includes it".to_owned();
        member.state = State::Skipped { why };
    }
    members.extend(skipped.into_iter().map(|(member, _)| member));
    header.message = match &left_out[..] {
        [] => String::new(),
        [first] => bounded(&format!("left out: {first}")),
        [first, more @ ..] => {
            let more = more.len();
            format!("left out: {}; and {more} more", bounded(first))
        }
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
                let (host, why) = (&host.config.name, status.message());
                left_out.push(format!("the guests of host {host} are not known: {why}"));
                continue;
            }
        };
        let globs = &wanted.guests;
        let is_named = |status: &v1::GuestStatus| {
            globs.is_empty() || globs.iter().any(|glob| glob.matches(&status.guest))
        };
        let (list, odd): (Vec<_>, Vec<_>) = list.into_iter().partition(|status| {
            let guest = &status.guest;
            guest.len() <= MAX_GUEST_BYTES && !guest.contains(char::is_control)
        });
        if !odd.is_empty() {
            let (host, odd) = (&host.config.name, odd.len());
            left_out.push(format!("{host}: {odd} guests have malformed names"));
        }
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
        waves.push(Wave {
            name: wave.name_at(index),
            first,
            count,
            bake_ms: wave.bake.millis(),
            ..Wave::default()
        });
        first += count;
    }
    waves.retain(|wave| wave.count > 0);
    waves
}

/// Divides `guests` guests that are added to a rollout into waves: as the spec does, or one wave
/// with the bake time of the spec's last one. `name` is the beginning of the waves' names.
pub fn added_waves(spec: &Spec, name: &str, guests: usize, by_waves: bool) -> Vec<Wave> {
    if by_waves {
        let mut waves = waves(spec, guests);
        for wave in &mut waves {
            wave.name = format!("{name}/{}", wave.name);
        }
        return waves;
    }
    let bake = spec.waves.0.last().map_or(0, |wave| wave.bake.millis());
    vec![Wave {
        name: name.to_owned(),
        count: guests,
        bake_ms: bake,
        ..Wave::default()
    }]
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
        add(member.plan.set.intent_digest());
    }
    hex(&hash.finalize())
}

/// Returns a digest that distinguishes a repeat of a plan from another plan of the same name.
pub fn spec_digest(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Returns a key that both rollouts claim on the same guest.
pub fn overlap(one: &[Member], other: &[Member]) -> Option<String> {
    let mut guests: HashMap<(&str, &str), Vec<&KeySet>> = HashMap::new();
    for Member {
        host, guest, plan, ..
    } in other
    {
        let sets = guests.entry((host, guest)).or_default();
        sets.push(&plan.set);
    }
    // Many guests have the same sets.
    let mut compared = HashMap::new();
    one.iter().find_map(|member| {
        let set = &member.plan.set;
        let mut others = guests.get(&(&*member.host, &*member.guest))?.iter();
        let claim = others.find_map(|other| {
            let digests = (set.digest(), other.digest());
            *compared
                .entry(digests)
                .or_insert_with(|| common(set, other))
        })?;
        Some(format!(
            "{} of guest {} on {}",
            claim.key, member.guest, member.host
        ))
    })
}

/// Returns the first claim of a set on a key that the other set claims too.
fn common<'s>(set: &'s KeySet, other: &KeySet) -> Option<&'s Claim> {
    let mut claims = set.claims().iter();
    claims.find(|claim| other.has(&claim.key))
}

#[cfg(test)]
mod tests {
    use super::asks::planned;
    use super::*;
    use crate::rollout::{KeySet, Want};

    fn spec(waves: &str) -> Spec {
        let rest = "selector: {guests: [\"*\"]}\nclaims: [{want: held, keys: [a]}]\nwaves: ";
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
        let member = |guest: usize| Member::new("", &guest.to_string());
        let racks = ["a", "a", "a", "b", "b", "c"];
        let members = racks.iter().enumerate();
        let members = members.map(|(index, rack)| (member(index), (*rack).to_owned()));
        let order: Vec<String> = spread(members.collect())
            .into_iter()
            .map(|m| m.guest)
            .collect();
        assert_eq!(order, ["0", "3", "5", "1", "4", "2"]);
    }

    fn answer(results: &[(&str, v1::ClaimState, i32, i32)]) -> v1::SetClaimsResponse {
        let results: Vec<v1::ClaimResult> = results
            .iter()
            .map(|(key, state, before, after)| v1::ClaimResult {
                key: (*key).to_owned(),
                want: v1::ClaimWant::On.into(),
                state: (*state).into(),
                count_before: *before,
                count_after: *after,
                ..v1::ClaimResult::default()
            })
            .collect();
        let claims = results.iter().map(|result| Claim {
            key: result.key.clone(),
            want: Want::On,
        });
        v1::SetClaimsResponse {
            intent_digest: KeySet::new(claims.collect(), vec![])
                .intent_digest()
                .to_owned(),
            results,
            sites_patched: 3,
            ..v1::SetClaimsResponse::default()
        }
    }

    #[test]
    fn a_guest_is_planned_if_every_claim_can_be_made() {
        let made = v1::ClaimState::Made;
        let plan = planned(answer(&[("b", made, 0, 1), ("a", made, 1, 1)]), vec![]);
        let plan = plan.expect("it can be made");
        assert_eq!((plan.keys, plan.sites), (1, 3));
        let keys: Vec<&str> = plan.set.claims().iter().map(|claim| &*claim.key).collect();
        assert_eq!(keys, ["a", "b"], "the key that is on already stays claimed");
        let why = |answer| planned(answer, vec![]).expect_err("left out");
        let as_wanted = planned(answer(&[("a", made, 1, 1)]), vec![]);
        assert_eq!(as_wanted.expect("it is claimed too").keys, 0);
        let refused = answer(&[("a", made, 0, 1), ("b", v1::ClaimState::Refused, 0, 0)]);
        assert!(why(refused).contains("key b: REFUSED"));
        let held = answer(&[("a", v1::ClaimState::HeldByOthers, 0, 0)]);
        assert!(why(held).contains("key a: HELD_BY_OTHERS"));
        let mut other = answer(&[("a", made, 0, 1)]);
        other.results[0].key = "b".to_owned();
        assert!(why(other).contains("is not that of the keys"));
        for name in ["", "a on\nb", &"x".repeat(513)] {
            let odd = answer(&[(name, made, 0, 1)]);
            assert!(why(odd).contains("malformed key"), "{name}");
        }
    }

    /// Checks the digest that people approve against the one that guests compute.
    #[test]
    fn the_intent_digest_is_that_of_the_service() {
        let claim = |key: &str, want| Claim {
            key: key.to_owned(),
            want,
        };
        let claims = vec![claim("m:b", Want::Off), claim("a", Want::On)];
        let keys = claims.iter().map(|claim| {
            let want = match claim.want {
                Want::On => patchbay_service::keys::claims::Want::On,
                Want::Off => patchbay_service::keys::claims::Want::Off,
                Want::Held => patchbay_service::keys::claims::Want::Held,
            };
            (claim.key.clone(), want)
        });
        let keys: Vec<_> = keys.collect();
        assert_eq!(
            KeySet::new(claims, vec![]).intent_digest(),
            patchbay_service::keys::claims::intent_digest(&keys)
        );
    }
}
