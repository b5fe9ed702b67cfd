// SPDX-License-Identifier: Apache-2.0
//! Runs `keys claims` and `keys claim`.

use patchbay_proto::v1;
use serde::Serialize;
use tonic::Status;
use tonic_types::StatusExt;

use crate::args::claims::{
    ClaimClearArgs, ClaimCommand, ClaimOptions, ClaimSetArgs, ClaimsListArgs,
};
use crate::client::{Client, lists, to_proto};
use crate::failure::{Failure, PARTLY};
use crate::names;
use crate::print::{Answer, Printable, Rows, counted, or_dash};
use crate::view;

/// The number of attempts to find the next generation while others set claims of the same owner.
const ATTEMPTS: usize = 4;

/// A claim as it is printed.
#[derive(Debug, Serialize)]
pub struct Claim {
    key: String,
    want: &'static str,
    state: &'static str,
    decides: bool,
    principal: String,
    owner: String,
    generation: u64,
    since: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    /// The claim is void because the key's module was unloaded.
    key_replaced: bool,
    /// The owner whose claim decides against this one, if this one is held by others.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_by: Option<Decider>,
}

/// The owner of a claim that decides.
#[derive(Debug, Serialize)]
pub struct Decider {
    principal: String,
    owner: String,
}

/// The answer to a request that sets claims, as it is printed.
#[derive(Debug, Serialize)]
pub struct Claimed {
    owner: String,
    generation: u64,
    boot: String,
    intent_digest: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    plan_digest: String,
    dry_run: bool,
    repeated: bool,
    keys: Vec<ClaimedKey>,
}

/// The answer about one key.
#[derive(Debug, Serialize)]
pub struct ClaimedKey {
    key: String,
    want: &'static str,
    state: &'static str,
    count_before: i32,
    count_after: i32,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
}

/// Lists claims.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn list(
    client: &Client,
    arguments: &ClaimsListArgs,
) -> Result<Answer<Vec<Claim>>, Failure> {
    let request = v1::ListClaimsRequest {
        patterns: names::expand(arguments.patterns.clone())?,
        principal: arguments.principal.clone().unwrap_or_default(),
        owner: arguments.owner.clone().unwrap_or_default(),
        not_made: arguments.not_made,
        ..Default::default()
    };
    let claims = lists::claims(client, request).await?;
    let claims: Vec<Claim> = claims.into_iter().map(Into::into).collect();
    Ok(claims.into())
}

/// Returns the set of claims that a command makes.
///
/// # Errors
/// A usage [`Failure`] if an argument is not a claim.
pub fn request(command: ClaimCommand) -> Result<v1::SetClaimsRequest, Failure> {
    let common = |owner: String, options: ClaimOptions| v1::SetClaimsRequest {
        owner,
        generation: options.generation.unwrap_or_default(),
        validate_only: options.dry_run,
        reason: options.reason,
        stop_timeout: to_proto(options.stop_timeout),
        ..Default::default()
    };
    match command {
        ClaimCommand::Clear(ClaimClearArgs { owner, options }) => Ok(common(owner, options)),
        ClaimCommand::Set(arguments) => {
            let ClaimSetArgs {
                owner,
                claims,
                ttl,
                allow_guarded,
                force,
                intent_digest,
                options,
            } = arguments;
            let claims = names::expand(claims)?;
            let claims: Result<_, Failure> = claims.iter().map(|word| claim(word)).collect();
            Ok(v1::SetClaimsRequest {
                claims: claims?,
                ttl: to_proto(ttl),
                allow_guarded,
                force: force.force,
                intent_digest: intent_digest.unwrap_or_default(),
                ..common(owner, options)
            })
        }
    }
}

fn claim(word: &str) -> Result<v1::KeyClaim, Failure> {
    let usage = || {
        Failure::usage(format!(
            "{word:?} is no claim; give KEY=on, KEY=off or KEY=held"
        ))
    };
    let (key, want) = word.rsplit_once('=').ok_or_else(usage)?;
    let want = match want {
        "on" => v1::ClaimWant::On,
        "off" => v1::ClaimWant::Off,
        "held" => v1::ClaimWant::Held,
        _ => return Err(usage()),
    };
    Ok(v1::KeyClaim {
        key: key.to_owned(),
        want: want.into(),
        ..v1::KeyClaim::default()
    })
}

/// Sets claims. If the request has no generation, uses the one after the owner's current
/// generation.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn set(
    client: &Client,
    mut request: v1::SetClaimsRequest,
) -> Result<Answer<Claimed>, Failure> {
    let given = request.generation > 0;
    request.generation = request.generation.max(1);
    request.retry_timeout = client.retry_timeout().try_into().ok();
    let mut left = ATTEMPTS;
    loop {
        let answer = client
            .keys()
            .set_claims(client.change(request.clone()))
            .await;
        left -= 1;
        match answer {
            // The service repeats the recorded answer if this owner has set the same claims in this
            // generation. The next generation applies the claims again.
            Ok(answer) if !given && answer.get_ref().repeated && left > 0 => {
                request.generation = request.generation.saturating_add(1);
            }
            Ok(answer) => {
                let value = claimed(&request, answer.into_inner());
                let undone = value.undone();
                return Ok(Answer {
                    undone,
                    ..value.into()
                });
            }
            Err(status) => match current(&status) {
                Some(current) if !given && left > 0 => {
                    request.generation = current.saturating_add(1);
                }
                _ => return Err(status.into()),
            },
        }
    }
}

/// Returns the owner's current generation if the call was refused for a stale generation.
fn current(status: &Status) -> Option<u64> {
    let info = status.get_details_error_info()?;
    let generation = info.metadata.get("generation")?;
    (info.reason == "GENERATION_STALE").then(|| generation.parse().ok())?
}

fn want(want: v1::ClaimWant) -> &'static str {
    match want {
        v1::ClaimWant::Unspecified => "",
        v1::ClaimWant::On => "on",
        v1::ClaimWant::Off => "off",
        v1::ClaimWant::Held => "held",
    }
}

fn state(state: v1::ClaimState) -> &'static str {
    match state {
        v1::ClaimState::Unspecified => "unknown",
        v1::ClaimState::Made => "made",
        v1::ClaimState::HeldByOthers => "held-by-others",
        v1::ClaimState::Refused => "refused",
        v1::ClaimState::Missing => "missing",
        v1::ClaimState::Void => "void",
    }
}

impl From<v1::Claim> for Claim {
    fn from(claim: v1::Claim) -> Self {
        Self {
            want: want(claim.want()),
            state: state(claim.state()),
            key: claim.key,
            decides: claim.decides,
            principal: claim.principal,
            owner: claim.owner,
            generation: claim.generation,
            since: view::time(claim.since),
            expires_at: claim.expires_at.map(|at| view::time(Some(at))),
            key_replaced: claim.key_replaced,
            decided_by: claim.decided_by.map(|by| Decider {
                principal: by.principal,
                owner: by.owner,
            }),
        }
    }
}

impl Claim {
    fn shown_state(&self) -> String {
        match (&self.decided_by, self.key_replaced) {
            (Some(by), _) if by.principal == self.principal => {
                format!("{} ({} decides)", self.state, by.owner)
            }
            (Some(by), _) => format!("{} ({} of {} decides)", self.state, by.owner, by.principal),
            (None, true) if self.state == "void" => "void (the module was unloaded)".to_owned(),
            (None, _) => self.state.to_owned(),
        }
    }
}

fn claimed(request: &v1::SetClaimsRequest, answer: v1::SetClaimsResponse) -> Claimed {
    let key = |result: v1::ClaimResult| ClaimedKey {
        want: want(result.want()),
        state: state(result.state()),
        key: result.key,
        count_before: result.count_before,
        count_after: result.count_after,
        reason: result.reason,
        message: result.message,
    };
    Claimed {
        owner: request.owner.clone(),
        generation: answer.generation,
        boot: answer.boot,
        intent_digest: answer.intent_digest,
        plan_digest: answer.plan_digest,
        dry_run: request.validate_only,
        repeated: answer.repeated,
        keys: answer.results.into_iter().map(key).collect(),
    }
}

impl Claimed {
    /// Returns a failure that names the keys whose state is not the claimed one; `None` if there
    /// are none.
    fn undone(&self) -> Option<Failure> {
        let keys = self.keys.iter().filter(|key| key.state != "made");
        let keys: Vec<&str> = keys.map(|key| key.key.as_str()).collect();
        let (first, count) = (keys.first()?, keys.len());
        let others = match count {
            1 => String::new(),
            _ => format!(" and {} others", count - 1),
        };
        Some(Failure::new(
            PARTLY,
            format!("not as wanted: {first}{others}; see the messages, and `patchbay keys claims`"),
        ))
    }
}

impl Printable for Vec<Claim> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&[
            "KEY",
            "WANT",
            "STATE",
            "DECIDES",
            "PRINCIPAL",
            "OWNER",
            "GENERATION",
            "EXPIRES",
        ]);
        for claim in self {
            rows.push([
                claim.key.as_str(),
                claim.want,
                &claim.shown_state(),
                if claim.decides { "yes" } else { "" },
                &claim.principal,
                &claim.owner,
                &claim.generation.to_string(),
                claim.expires_at.as_deref().unwrap_or("never"),
            ]);
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("claims")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|claim| claim.key.as_str()).collect()
    }
}

impl Printable for Claimed {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["KEY", "WANT", "STATE", "COUNT", "MESSAGE"]);
        for key in &self.keys {
            rows.push([
                key.key.clone(),
                or_dash(key.want).to_owned(),
                key.state.to_owned(),
                match key.count_before == key.count_after {
                    true => key.count_after.to_string(),
                    false => format!("{} -> {}", key.count_before, key.count_after),
                },
                key.message.clone(),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        let keys = counted(self.keys.len() as u64, "key");
        let how = match (self.dry_run, self.repeated) {
            (true, _) => "nothing was changed",
            (_, true) => "made before",
            _ => "done",
        };
        format!(
            "{}, generation {}: {keys}, {how}; intent {}\n",
            self.owner, self.generation, self.intent_digest
        )
    }

    fn names(&self) -> Vec<&str> {
        self.keys.iter().map(|key| key.key.as_str()).collect()
    }
}
