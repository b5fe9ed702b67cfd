// SPDX-License-Identifier: Apache-2.0
//! Builds the requests of a rollout to a guest, and reads the answer to a validation.

use std::sync::Arc;

use patchbay_proto::v1;

use super::tracepoints;
use crate::clock::timestamp;
use crate::hosts::{CallError, Host};
use crate::rollout::{
    Claim, Guarded, Header, KeySet, LeftOut, Member, Millis, Plan, State, Tracepoint, Want, bounded,
};
use crate::spec::{ClaimOf, Duration, Spec};

/// The maximum number of reasons for which a guest may leave keys out, and of names for each.
const MAX_REASONS: usize = 8;
const MAX_NAMES: usize = 10;
/// The maximum length of a key's name that a monitor may report.
const MAX_KEY_BYTES: usize = 512;
/// The maximum length of the reason that a claim may have.
const MAX_CLAIM_REASON_BYTES: usize = 256;

/// Builds the requests of a rollout.
#[derive(Clone, Debug)]
pub struct Asks {
    /// The owner of the claims.
    pub owner: String,
    /// The time at which the rollout was planned, which orders its claims among those of others.
    pub created: Millis,
    /// The time after which the claims end by themselves, if the spec has one.
    pub ttl: Option<Duration>,
    /// The reason of the claims, in one line of at most 256 bytes.
    reason: String,
    /// The spec allows claims on guarded keys.
    allow_guarded: bool,
}

impl Asks {
    pub fn new(header: &Header, spec: &Spec) -> Self {
        let one_line = spec.reason.replace(char::is_control, " ");
        let mut reason = format!("rollout {}: {one_line}", header.name);
        reason.truncate(reason.floor_char_boundary(MAX_CLAIM_REASON_BYTES));
        Self {
            owner: header.owner(),
            created: header.created,
            ttl: spec.ttl,
            reason,
            allow_guarded: spec.allow_guarded,
        }
    }

    /// Validates the claims on the guest's keys for a person, which changes nothing. Returns the
    /// member with the host's value of the label in `spread_over`.
    pub async fn validate(
        &self,
        spec: &Spec,
        host: &Host,
        guest: &str,
        generation: u64,
        person: &str,
    ) -> (Member, String) {
        let label = |label: &String| host.config.labels.get(label).cloned().unwrap_or_default();
        let domain = spec.max_concurrent.per_domain.as_ref();
        let mut member = Member {
            domain: domain
                .map(|domain| label(&domain.label))
                .unwrap_or_default(),
            ..Member::new(&host.config.name, guest)
        };
        match self.ask(spec, host, guest, generation, person).await {
            Ok((plan, boot)) => (member.plan, member.boot) = (plan, boot),
            Err(why) => {
                let why = bounded(&why);
                member.state = State::Skipped { why };
            }
        }
        (
            member,
            spec.spread_over.as_ref().map(label).unwrap_or_default(),
        )
    }

    /// Returns the plan for the guest and the guest's boot, or the reason why the guest is left
    /// out.
    async fn ask(
        &self,
        spec: &Spec,
        host: &Host,
        guest: &str,
        generation: u64,
        person: &str,
    ) -> Result<(Plan, String), String> {
        let tracepoints = tracepoints::select(host, spec, guest).await?;
        let of_keys = spec.claims.0.iter();
        let of_keys = of_keys.filter(|claim| claim.of == ClaimOf::Keys);
        let of_keys = of_keys.map(|claim| v1::KeyClaim {
            patterns: claim.patterns.clone(),
            want: claim.want.to_proto().into(),
            ..v1::KeyClaim::default()
        });
        let of_tracepoints = tracepoints.iter().map(|(state, tracepoint)| v1::KeyClaim {
            key: tracepoint.key.clone(),
            want: state.to_proto().into(),
            ..v1::KeyClaim::default()
        });
        let mut request = self.request(guest, generation, of_keys.chain(of_tracepoints).collect());
        let mut answer = host.validate_claims(request.clone(), person).await;
        if let Err(status) = &answer
            && let Some(seen) = CallError::new(status).seen
        {
            // The rollout may have claimed the keys again since the caller read the generation.
            request.generation = seen.saturating_add(1);
            answer = host.validate_claims(request, person).await;
        }
        let answer = answer.map_err(|status| self.consented(CallError::new(&status).why))?;
        let boot = bounded(&answer.boot);
        let planned = planned(answer, tracepoints).map_err(|why| self.consented(why))?;
        Ok((planned, boot))
    }

    /// Adds a hint to the reason why a guarded key is refused: the field that allows the claim.
    fn consented(&self, why: String) -> String {
        match why.contains("KEY_GUARDED") && !self.allow_guarded {
            true => format!("{why} (the spec can allow it with `allow_guarded: true`)"),
            false => why,
        }
    }

    /// Returns the request that makes a member's claims in the boot that the rollout knows. A guest
    /// that boots again forgets the generations that it has seen, so that without the boot it would
    /// make the claims of a late call.
    pub fn claim(&self, member: &Member, generation: u64) -> v1::SetClaimsRequest {
        let set = &member.plan.set;
        let claims = set.claims().iter().map(|claim| v1::KeyClaim {
            key: claim.key.clone(),
            want: claim.want.to_proto().into(),
            ..v1::KeyClaim::default()
        });
        // New claims would take the references of lost ones for the guest's own.
        let record = member.confirmed_record(&member.boot);
        v1::SetClaimsRequest {
            intent_digest: set.intent_digest().to_owned(),
            boot: member.boot.clone(),
            ledger: record
                .map(|record| record.ledger.clone())
                .unwrap_or_default(),
            after_generation: record.map_or(0, |record| record.generation),
            ..self.request(&member.guest, generation, claims.collect())
        }
    }

    /// Returns the request that ends a member's claims.
    pub fn release(&self, guest: &str, generation: u64) -> v1::SetClaimsRequest {
        self.request(guest, generation, vec![])
    }

    fn request(
        &self,
        guest: &str,
        generation: u64,
        claims: Vec<v1::KeyClaim>,
    ) -> v1::SetClaimsRequest {
        let ttl = self.ttl.filter(|_| !claims.is_empty());
        let ttl = ttl.map(|ttl| prost_types::Duration {
            seconds: i64::try_from(ttl.0.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(ttl.0.subsec_nanos()).unwrap_or(0),
        });
        v1::SetClaimsRequest {
            guest: guest.to_owned(),
            allow_guarded: self.allow_guarded && !claims.is_empty(),
            owner: self.owner.clone(),
            generation,
            claims,
            ttl,
            made_at: Some(timestamp(self.created)),
            reason: self.reason.clone(),
            ..v1::SetClaimsRequest::default()
        }
    }
}

/// Returns the plan that a validation describes, or the reason why the guest is left out.
pub(super) fn planned(
    answer: v1::SetClaimsResponse,
    tracepoints: Vec<(Want, Tracepoint)>,
) -> Result<Plan, String> {
    let mut claims = Vec::with_capacity(answer.results.len());
    let mut changed = 0_u32;
    for result in &answer.results {
        let want = match result.want() {
            v1::ClaimWant::On => Want::On,
            v1::ClaimWant::Off => Want::Off,
            v1::ClaimWant::Held => Want::Held,
            // A claim of an earlier set, which this set ends.
            v1::ClaimWant::Unspecified => continue,
        };
        if let Some(why) = not_made(result) {
            return Err(why);
        }
        // No key has another name. A line of the digest's text could be made of one.
        let is_name = result.key.bytes().all(|byte| byte.is_ascii_graphic());
        if result.key.is_empty() || result.key.len() > MAX_KEY_BYTES || !is_name {
            return Err("the monitor names a malformed key; see the monitor's log".to_owned());
        }
        changed += u32::from(result.count_before != result.count_after);
        let key = result.key.clone();
        claims.push(Claim { key, want });
    }
    let set = KeySet::new(
        claims,
        tracepoints.into_iter().map(|(_, one)| one).collect(),
    );
    let guarded = answer.guarded.into_iter();
    let guarded = guarded.filter(|one| set.has(&one.key));
    let guarded = guarded.map(|one| Guarded {
        key: one.key,
        advice: bounded(&one.advice.unwrap_or_default().message),
    });
    let guarded = guarded.collect();
    let set = set.with_guarded(guarded);
    if set.intent_digest() != answer.intent_digest {
        let digest = &answer.intent_digest;
        return Err(format!(
            "the monitor's digest {digest} is not that of the keys it names; see the monitor's log"
        ));
    }
    let left_out = answer.left_out.into_iter().take(MAX_REASONS);
    let left_out = left_out.map(|keys| LeftOut {
        reason: bounded(&keys.reason),
        count: keys.count,
        names: keys
            .names
            .iter()
            .take(MAX_NAMES)
            .map(|name| bounded(name))
            .collect(),
    });
    let left_out = left_out.collect();
    let pause = answer.predicted_pause.unwrap_or_default();
    let pause_us = pause.seconds.saturating_mul(1_000_000);
    let pause_us = pause_us.saturating_add(i64::from(pause.nanos / 1000));
    Ok(Plan {
        keys: changed,
        sites: answer.sites_patched,
        left_out,
        predicted_pause_us: u64::try_from(pause_us).unwrap_or(0),
        set: Arc::new(set),
    })
}

/// Returns the reason why a key does not have the claimed state; `None` if it has.
pub fn not_made(result: &v1::ClaimResult) -> Option<String> {
    let state = match result.state() {
        v1::ClaimState::Made => return None,
        v1::ClaimState::HeldByOthers => "HELD_BY_OTHERS",
        v1::ClaimState::Missing => "MISSING",
        v1::ClaimState::Void => "VOID",
        v1::ClaimState::Refused | v1::ClaimState::Unspecified => match &*result.reason {
            "" => "REFUSED",
            reason => reason,
        },
    };
    Some(format!("key {}: {state}: {}", result.key, result.message))
}
