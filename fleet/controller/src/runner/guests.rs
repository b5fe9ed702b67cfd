// SPDX-License-Identifier: Apache-2.0
//! Sends claims to one guest, and reports the outcomes of actions to the rollout.

use std::borrow::Cow;
use std::future::Future;

use patchbay_proto::v1;
use tonic::Status;

use crate::hosts::{Acting, CallError};
use crate::plan::{Asks, not_made};
use crate::rollout::{
    ClaimOutcome, Failure, Found, FoundClaims, GateAnswer, Header, Health, Member, Millis, Record,
    ReleaseOutcome, Rollout, bounded,
};
use crate::spec::Duration;

/// The calls that are made for a member. Tests deliver them by other ways than connections.
pub trait Calls: Sync {
    /// Replaces the claims on a guest of this host. The request is made when the call begins.
    fn set_claims(
        &self,
        host: &str,
        request: impl FnOnce() -> v1::SetClaimsRequest + Send,
    ) -> impl Future<Output = Result<v1::SetClaimsResponse, Status>> + Send;

    /// Returns the boot of a guest of this host, the number of the owner's claims on it, and the
    /// first ones that are not made.
    fn not_made(
        &self,
        host: &str,
        guest: &str,
        owner: &str,
    ) -> impl Future<Output = Result<v1::ListClaimsResponse, Status>> + Send;

    /// Returns the other hosts that have a guest of this name, according to the registry.
    fn others(&self, host: &str, guest: &str) -> Vec<String>;

    /// Returns the same hosts, but none while the registry has the guest on this host.
    fn elsewhere(&self, host: &str, guest: &str) -> Vec<String>;
}

impl Calls for Acting {
    async fn set_claims(
        &self,
        host: &str,
        request: impl FnOnce() -> v1::SetClaimsRequest + Send,
    ) -> Result<v1::SetClaimsResponse, Status> {
        match self.hosts.get(host) {
            Some(host) => host.set_claims(request, &self.person).await,
            None => Err(Status::unavailable(no_host(host))),
        }
    }

    async fn not_made(
        &self,
        host: &str,
        guest: &str,
        owner: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        match self.hosts.get(host) {
            Some(host) => host.not_made(guest, owner).await,
            None => Err(Status::unavailable(no_host(host))),
        }
    }

    fn others(&self, host: &str, guest: &str) -> Vec<String> {
        self.hosts.others(host, guest)
    }

    fn elsewhere(&self, host: &str, guest: &str) -> Vec<String> {
        self.hosts.elsewhere(host, guest)
    }
}

/// The outcome of a call for a member.
pub struct Answered<T> {
    pub member: usize,
    /// The generation that the call had.
    pub generation: u64,
    pub outcome: T,
    /// The host that has the guest, if it is not the member's.
    pub moved: Option<String>,
}

impl<T> Answered<T> {
    /// Reports the outcome by this function of the rollout, after a move of the guest.
    fn report(
        self,
        rollout: &mut Rollout,
        now: Millis,
        record: impl FnOnce(&mut Rollout, usize, u64, T, Millis),
    ) {
        // The guest may have moved again since an earlier generation.
        let counts = rollout.members()[self.member].generation == self.generation;
        if let Some(host) = self.moved.filter(|_| counts) {
            rollout.moved(self.member, host, now);
        }
        record(rollout, self.member, self.generation, self.outcome, now);
    }
}

/// The outcome of an action.
pub enum Outcome {
    Claim(Answered<ClaimOutcome>),
    Release(Answered<ReleaseOutcome>),
    Observed {
        member: usize,
        generation: u64,
        health: Result<Health, String>,
    },
    /// `None` if the guest was not found.
    Checked(Answered<Option<Found>>),
    Gate {
        wave: usize,
        gate: usize,
        /// The time at which the gate was asked.
        asked: Millis,
        answer: GateAnswer,
    },
}

impl Outcome {
    /// Reports the outcome to the rollout.
    pub fn report(self, rollout: &mut Rollout, now: Millis) {
        match self {
            Self::Claim(answered) => answered.report(rollout, now, Rollout::claimed),
            Self::Release(answered) => answered.report(rollout, now, Rollout::released),
            Self::Checked(answered) => answered.report(rollout, now, Rollout::checked),
            Self::Observed {
                member,
                generation,
                health,
            } => {
                rollout.observed(member, generation, health, now);
            }
            Self::Gate {
                wave,
                gate,
                asked,
                answer,
            } => rollout.gate_ended(wave, gate, asked, answer, now),
        }
    }
}

/// Sends the member's claims. Returns the guest's new host too, if it has moved.
pub async fn claim(
    hosts: &impl Calls,
    asks: &Asks,
    member: &Member,
    generation: u64,
) -> (ClaimOutcome, Option<String>) {
    let request = || asks.claim(member, generation);
    let (answer, moved) = send(hosts, &asks.owner, member, request).await;
    let outcome = match answer {
        Ok(answer) => made(&answer, asks.ttl.map(Duration::millis)),
        Err(error) if error.has_booted => booted(hosts, asks, member, error).await,
        Err(error) => match error.seen {
            Some(seen) => ClaimOutcome::Stale { seen },
            None => ClaimOutcome::Failed {
                failure: error.failure,
                why: error.why,
            },
        },
    };
    (outcome, moved)
}

/// Sends the empty set of claims. Returns the guest's new host too, if it has moved.
pub async fn release(
    hosts: &impl Calls,
    asks: &Asks,
    member: &Member,
    generation: u64,
) -> (ReleaseOutcome, Option<String>) {
    let request = || asks.release(&member.guest, generation);
    let (answer, moved) = send(hosts, &asks.owner, member, request).await;
    let outcome = match answer {
        Ok(answer) => ended(member, &answer),
        Err(error) => match error.seen {
            Some(seen) => ReleaseOutcome::Stale { seen },
            None => ReleaseOutcome::Failed { why: error.why },
        },
    };
    (outcome, moved)
}

/// Sends the request to the member's guest, and to another host if the guest runs there now.
async fn send(
    hosts: &impl Calls,
    owner: &str,
    member: &Member,
    request: impl Fn() -> v1::SetClaimsRequest + Send + Sync,
) -> (Result<v1::SetClaimsResponse, CallError>, Option<String>) {
    let mut here = match hosts.set_claims(&member.host, &request).await {
        Ok(answer) if answer.boot == member.boot => return (Ok(answer), None),
        // Another guest may have answered, which has nothing of this owner.
        Ok(answer) => Ok(answer),
        Err(status) => Err(CallError::new(&status)),
    };
    if let Err(error) = &here
        && !error.may_have_moved
        && !error.has_booted
    {
        return (here, None);
    }
    if let Some((name, ..)) = found_elsewhere(hosts, owner, member).await {
        let answer = hosts.set_claims(&name, &request).await;
        return (answer.map_err(|status| CallError::new(&status)), Some(name));
    }
    if let Err(error) = &mut here
        && error.may_have_moved
        && let Some(name) = hosts.elsewhere(&member.host, &member.guest).first()
    {
        error.why = format!(
            "{}; host {name} has a guest of that name now: plan another rollout for it",
            error.why
        );
    }
    (here, None)
}

/// Returns the other host that has the member's guest in the boot that the rollout knows, which
/// tells the guest from another one of the same name. Such a guest may also have been started on
/// the member's host after the member's guest had left it. Returns what was found there, too.
async fn found_elsewhere(
    hosts: &impl Calls,
    owner: &str,
    member: &Member,
) -> Option<(String, Found)> {
    if member.boot.is_empty() {
        return None;
    }
    for name in hosts.others(&member.host, &member.guest) {
        let found = hosts.not_made(&name, &member.guest, owner).await;
        if let Ok(found) = found
            && found.boot == member.boot
        {
            return Some((name, Found::of(found)));
        }
    }
    None
}

impl Found {
    fn of(answer: v1::ListClaimsResponse) -> Self {
        // A service of an earlier version does not count the claims, and lists those that are made
        // too.
        let has_claims = answer.total > 0 || !answer.claims.is_empty();
        let is_made = |claim: &&v1::Claim| claim.state() == v1::ClaimState::Made;
        let is_cut = !answer.next_page_token.is_empty();
        let mut not_made = answer.claims.iter().filter(|claim| !is_made(claim));
        let count = not_made.clone().count();
        let is_replaced =
            |claim: &&v1::Claim| claim.state() == v1::ClaimState::Void && claim.key_replaced;
        // A new set makes all claims again, including those voided because the guest or an operator
        // changed the key. So the set is not sent if there is such a claim.
        let is_changed =
            |claim: &v1::Claim| claim.state() == v1::ClaimState::Void && !claim.key_replaced;
        let may_be_changed = is_cut || not_made.clone().any(is_changed);
        let claims = match (not_made.clone().find(is_replaced), not_made.next()) {
            (Some(claim), _) if !may_be_changed => {
                FoundClaims::Replaced(format!("the module of key {} was loaded again", claim.key))
            }
            (_, Some(claim)) => {
                let why = format!("key {}: {}", claim.key, no_effect(claim));
                FoundClaims::Ineffective(match count - 1 {
                    0 => why,
                    more => format!("{why}; and {more} more"),
                })
            }
            (_, None) if answer.total == 0 && is_cut => FoundClaims::Unclear,
            (_, None) if has_claims => FoundClaims::Made,
            (_, None) => FoundClaims::None,
        };
        // A service of an earlier version always says 0.
        let total = usize::try_from(answer.total)
            .ok()
            .filter(|total| *total > 0);
        Self {
            boot: answer.boot,
            record: Record::new(&answer.ledger, answer.generation_made),
            claims,
            total,
        }
    }
}

/// Returns why a claim that is not made has no effect.
pub fn no_effect(claim: &v1::Claim) -> Cow<'static, str> {
    let why = match claim.state() {
        v1::ClaimState::HeldByOthers => match claim.decided_by.as_ref() {
            Some(by) => return Cow::Owned(decides(by, &claim.principal)),
            None => "another claim or a hold decides",
        },
        v1::ClaimState::Missing => "the kernel has no such key now",
        v1::ClaimState::Void => "the guest or an operator has changed the key since",
        v1::ClaimState::Made | v1::ClaimState::Refused | v1::ClaimState::Unspecified => "not made",
    };
    Cow::Borrowed(why)
}

/// Returns a sentence that names the owner of the claim that decides. A rollout of the same
/// principal has the name that commands take. Others may give their owners any name.
fn decides(by: &v1::ClaimOwner, principal: &str) -> String {
    let rollout = Header::rollout_of(&by.owner).filter(|_| by.principal == principal);
    bounded(&match rollout {
        Some(name) => format!("the claim of rollout {name} decides"),
        None => format!("the claim of {} ({}) decides", by.owner, by.principal),
    })
}

/// Returns the guest's boot, and what it has of the owner's claims. Returns the guest's new host
/// too, if it has moved.
pub async fn check(
    hosts: &impl Calls,
    owner: &str,
    member: &Member,
) -> (Option<Found>, Option<String>) {
    let here = match hosts.not_made(&member.host, &member.guest, owner).await {
        Ok(found) if found.boot.is_empty() || found.boot == member.boot => {
            return (Some(Found::of(found)), None);
        }
        // Either the guest has booted again, or this is another guest.
        Ok(found) => Some(Found::of(found)),
        Err(status) if CallError::new(&status).may_have_moved => None,
        Err(_) => return (None, None),
    };
    match found_elsewhere(hosts, owner, member).await {
        Some((name, found)) => (Some(found), Some(name)),
        None => (here, None),
    }
}

/// Returns the outcome of claims that a guest refused because it has booted again.
async fn booted(
    hosts: &impl Calls,
    asks: &Asks,
    member: &Member,
    error: CallError,
) -> ClaimOutcome {
    let found = hosts.not_made(&member.host, &member.guest, &asks.owner);
    match found.await.map(|found| found.boot) {
        Ok(boot) if !boot.is_empty() && boot != member.boot => ClaimOutcome::Booted { boot },
        _ => ClaimOutcome::Failed {
            failure: Failure::Unknown,
            why: error.why,
        },
    }
}

/// Returns the outcome of the end of a member's claims.
fn ended(member: &Member, answer: &v1::SetClaimsResponse) -> ReleaseOutcome {
    let present = Record::new(&answer.ledger, answer.generation_before);
    let is_lost = match member.is_recorded(&answer.boot, present.as_ref()) {
        // An empty record of a later generation is right: the guest may have refused all claims,
        // and the answer was lost.
        Some(is_recorded) => !is_recorded,
        // The service does not name its record.
        None => {
            let is_confirmed = member.is_confirmed && answer.boot == member.boot;
            // Claims that end by themselves may have ended.
            let are_kept = is_confirmed && member.expires.is_none();
            // A repeat has no results if the service has dropped them, or if there were none to
            // begin with.
            let may_be_dropped = answer.repeated && !member.has_no_record();
            answer.results.is_empty() && are_kept && !may_be_dropped
        }
    };
    if is_lost {
        return ReleaseOutcome::Unknown;
    }
    // The guest's service retries by itself the keys that it could not return at once.
    let is_void = |result: &v1::ClaimResult| result.state() == v1::ClaimState::Void;
    ReleaseOutcome::Released {
        void: !answer.repeated && answer.results.iter().all(is_void),
    }
}

fn made(answer: &v1::SetClaimsResponse, ttl: Option<Millis>) -> ClaimOutcome {
    let claimed = answer.results.iter();
    let claimed = claimed.filter(|result| result.want() != v1::ClaimWant::Unspecified);
    let count = claimed.clone().count();
    if answer.repeated && count == 0 {
        return ClaimOutcome::Failed {
            failure: Failure::Refused,
            why: "the guest's service no longer has its answer to this call".to_owned(),
        };
    }
    let has_record = |result: &v1::ClaimResult| {
        use v1::ClaimState::{Missing, Refused, Unspecified};
        !matches!(result.state(), Refused | Missing | Unspecified)
    };
    let has_claims = claimed.clone().any(has_record);
    let is_ineffective = claimed.clone().all(has_record);
    let partly = |why| ClaimOutcome::NotMade {
        has_claims,
        is_ineffective,
        ledger: answer.ledger.clone(),
        ttl,
        why,
    };
    let not_made: Vec<String> = claimed.filter_map(not_made).collect();
    match &not_made[..] {
        [] => ClaimOutcome::Made {
            boot: answer.boot.clone(),
            ledger: answer.ledger.clone(),
            pause_us: answer.report.as_ref().map_or(0, pause_us),
            ttl,
        },
        [first] => partly(first.clone()),
        [first, more @ ..] => partly(format!("{first}; and {} more of {count}", more.len())),
    }
}

pub fn no_host(name: &str) -> String {
    format!("host {name} is neither registered nor configured; start its patchbayd")
}

/// Returns the time in microseconds for which all vCPUs were stopped.
fn pause_us(report: &v1::FlipReport) -> u64 {
    let times = [&report.stop_time, &report.patch_time, &report.resume_time];
    let micros = times.into_iter().flatten().map(|time| {
        let micros = time.seconds.saturating_mul(1_000_000);
        let micros = micros.saturating_add(i64::from(time.nanos / 1000));
        u64::try_from(micros).unwrap_or(0)
    });
    micros.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests;
