// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1.StaticKeysService` on claims.

use std::collections::HashSet;
use std::time::{Instant, SystemTime};

use patchbay_proto::v1;
use prost::Message;
use static_keys::{MAX_PATTERNS, Patterns};
use tonic::Request;

use super::convert;
use super::requests::{CallTimes, blocking, check_reason, hold_ttl, invalid, page_size, selection};
use crate::keys::claims::{
    ClaimQuery, ClaimView, ClaimsOutcome, ClaimsRequest, KeyAnswer, MAX_CLAIMS, MAX_NAME_BYTES,
    Verdict, Want,
};
use crate::keys::{Caller, Keys, KeysError, LeftOut, Selection, claims};

/// The longest name of a key that can be claimed, in bytes.
const MAX_KEY_BYTES: usize = 512;

pub async fn set(
    keys: &Keys,
    request: Request<v1::SetClaimsRequest>,
    caller: Caller,
) -> Result<v1::SetClaimsResponse, KeysError> {
    let times = CallTimes::of(request.metadata());
    let request = claims_request(request.into_inner(), caller, times)?;
    let generation = request.generation;
    let outcome = keys.set_claims(request).await?;
    let ClaimsOutcome {
        boot,
        generation_before,
        intent_digest,
        plan_digest,
        keys: answers,
        report,
        sites_patched,
        predicted_pause,
        left_out: outs,
        guarded,
        repeated,
        revision,
    } = &*outcome;
    Ok(v1::SetClaimsResponse {
        results: answers.iter().map(result).collect(),
        generation,
        boot: boot.clone(),
        report: report.map(convert::report),
        intent_digest: intent_digest.clone(),
        plan_digest: plan_digest.clone(),
        repeated: *repeated,
        revision: *revision,
        incarnation: keys.incarnation().to_string(),
        ledger: keys.incarnation().ledger().to_owned(),
        generation_before: *generation_before,
        sites_patched: *sites_patched,
        predicted_pause: predicted_pause.map(convert::duration),
        left_out: outs.iter().map(left_out).collect(),
        guarded: guarded
            .iter()
            .map(|(key, known)| v1::GuardedKey {
                key: key.clone(),
                advice: known.map(convert::advice),
            })
            .collect(),
    })
}

pub async fn list(
    keys: &Keys,
    request: v1::ListClaimsRequest,
    deadline: Instant,
) -> Result<v1::ListClaimsResponse, KeysError> {
    let query = ClaimQuery {
        page_size: page_size(request.page_size)?,
        page_token: request.page_token,
        patterns: Patterns::parse(&request.patterns)?,
        principal: request.principal,
        name: request.owner,
        not_made: request.not_made,
    };
    // A kernel's modules are read with its keys.
    if query.not_made {
        keys.find_kernel(deadline).await;
    }
    keys.adopt_ledger().await?;
    let ledger = keys.incarnation().ledger().to_owned();
    let keys = keys.clone();
    // This reads the count of every claimed key.
    let page = blocking("the claims cannot be listed", move || {
        Ok::<_, KeysError>(keys.claims(&query))
    })
    .await?;
    Ok(v1::ListClaimsResponse {
        claims: page.claims.into_iter().map(claim).collect(),
        next_page_token: page.next_page_token,
        boot: page.boot,
        total: match request.not_made {
            true => convert::to_u32(page.total),
            false => 0,
        },
        ledger,
        generation_made: page.made,
    })
}

fn claims_request(
    mut request: v1::SetClaimsRequest,
    caller: Caller,
    times: CallTimes,
) -> Result<ClaimsRequest, KeysError> {
    check_reason(&request.reason)?;
    check_owner(&request.owner)?;
    if request.generation == 0 {
        return Err(invalid("generation", "is 0; give 1 or more"));
    }
    let attempts = times.attempts(request.stop_timeout.take(), request.retry_timeout.take())?;
    let ttl = hold_ttl("ttl", request.ttl)?;
    let validate_only = std::mem::take(&mut request.validate_only);
    let made_at = request.made_at.take().map(time).transpose()?;
    // The guest's name, its boot, the ledger, the reason and the times do not count when a repeat
    // is recognised, because another controller may give others.
    request.guest.clear();
    let boot = std::mem::take(&mut request.boot);
    let ledger = std::mem::take(&mut request.ledger);
    let after = std::mem::take(&mut request.after_generation);
    let reason = std::mem::take(&mut request.reason);
    request
        .claims
        .sort_unstable_by(|one, other| one.key.cmp(&other.key));
    let content = claims::content(&request.encode_to_vec());
    let (claims, selections) = wants(request.claims)?;
    if !selections.is_empty() && !validate_only {
        let message = "patterns need validate_only, because they may select other keys later; validate first, and send the keys that the answer names";
        return Err(invalid("claims", message));
    }
    Ok(ClaimsRequest {
        claims,
        selections,
        caller,
        name: request.owner,
        generation: request.generation,
        content,
        boot,
        after: Some((ledger, after)).filter(|(ledger, _)| !ledger.is_empty()),
        intent_digest: request.intent_digest,
        ttl,
        made_at,
        validate_only,
        allow_guarded: request.allow_guarded,
        force: request.force,
        reason,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
    })
}

fn time(at: prost_types::Timestamp) -> Result<SystemTime, KeysError> {
    SystemTime::try_from(at).map_err(|_| invalid("made_at", "is no time of this host's clock"))
}

fn check_owner(name: &str) -> Result<(), KeysError> {
    let printable = name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !printable {
        let message = format!(
            "has {} bytes; give 1 to {MAX_NAME_BYTES} of printable ASCII, such as rollout/net-canary",
            name.len()
        );
        return Err(invalid("owner", message));
    }
    Ok(())
}

/// The keys and the selections of a set, and the wanted state of each.
type Wants = (Vec<(String, Want)>, Vec<(Selection, Want)>);

fn wants(claims: Vec<v1::KeyClaim>) -> Result<Wants, KeysError> {
    if claims.len() > MAX_CLAIMS {
        let message = format!("{} given; give up to {MAX_CLAIMS}", claims.len());
        return Err(invalid("claims", message));
    }
    // Each pattern is matched against each key, so their number is limited.
    let patterns: usize = claims.iter().map(|claim| claim.patterns.len()).sum();
    if patterns > MAX_PATTERNS {
        let message = format!("have {patterns} patterns; give up to {MAX_PATTERNS}");
        return Err(invalid("claims", message));
    }
    let mut seen = HashSet::with_capacity(claims.len());
    let mut wants = Vec::with_capacity(claims.len());
    let mut selections = Vec::new();
    for claim in claims {
        let want = match claim.want() {
            v1::ClaimWant::On => Want::On,
            v1::ClaimWant::Off => Want::Off,
            v1::ClaimWant::Held => Want::Held,
            v1::ClaimWant::Unspecified => {
                let message = format!("key {:?}: give on, off or held", claim.key);
                return Err(invalid("claims", message));
            }
        };
        if !claim.patterns.is_empty() {
            if !claim.key.is_empty() {
                let message = format!(
                    "key {:?} is given together with patterns; give only one of the two",
                    claim.key
                );
                return Err(invalid("claims", message));
            }
            selections.push((selection(&claim.patterns, &[])?, want));
            continue;
        }
        // ":name" is a key of the kernel image, as in patterns.
        let key = claim.key.strip_prefix(':').unwrap_or(&claim.key).to_owned();
        // No key of a kernel has another kind of name. The intent digest separates a name from the
        // claimed state by a space, and keys by newlines, so a name must contain neither.
        let printable = key.bytes().all(|byte| byte.is_ascii_graphic());
        if key.is_empty() || key.len() > MAX_KEY_BYTES || !printable {
            let message = format!(
                "a key's name has {} bytes; give 1 to {MAX_KEY_BYTES} of printable ASCII without spaces",
                key.len()
            );
            return Err(invalid("claims", message));
        }
        if !seen.insert(key.clone()) {
            let message = format!("key {key} is given twice; give each key once");
            return Err(invalid("claims", message));
        }
        wants.push((key, want));
    }
    Ok((wants, selections))
}

fn want(want: Want) -> v1::ClaimWant {
    match want {
        Want::On => v1::ClaimWant::On,
        Want::Off => v1::ClaimWant::Off,
        Want::Held => v1::ClaimWant::Held,
    }
}

fn state(verdict: Verdict) -> v1::ClaimState {
    match verdict {
        Verdict::Made => v1::ClaimState::Made,
        Verdict::HeldByOthers => v1::ClaimState::HeldByOthers,
        Verdict::Refused => v1::ClaimState::Refused,
        Verdict::Missing => v1::ClaimState::Missing,
        Verdict::Void => v1::ClaimState::Void,
    }
}

fn result(answer: &KeyAnswer) -> v1::ClaimResult {
    v1::ClaimResult {
        key: answer.key.clone(),
        want: answer.want.map_or(0, |it| want(it).into()),
        state: state(answer.verdict).into(),
        reason: answer.reason.clone(),
        message: answer.message.clone(),
        count_before: answer.count_before,
        count_after: answer.count_after,
    }
}

fn left_out(keys: &LeftOut) -> v1::LeftOut {
    v1::LeftOut {
        reason: keys.reason.as_str().to_owned(),
        count: convert::to_u32(keys.count),
        names: keys.names.iter().map(ToString::to_string).collect(),
    }
}

fn claim(view: ClaimView) -> v1::Claim {
    v1::Claim {
        key: view.key,
        principal: view.claim.owner.principal.clone(),
        owner: view.claim.owner.name.clone(),
        generation: view.generation,
        want: want(view.claim.want).into(),
        state: state(view.verdict).into(),
        decides: view.decides,
        since: Some(view.claim.since.into()),
        expires_at: view.expires_at.map(Into::into),
        key_replaced: view.claim.replaced,
        decided_by: view.decided_by.map(|owner| v1::ClaimOwner {
            principal: owner.principal.clone(),
            owner: owner.name.clone(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use patchbay_guest::testing::{InMemoryGuest, TestKey};
    use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
    use tonic::metadata::MetadataMap;
    use tonic_types::StatusExt;

    use super::*;
    use crate::api::{ApiSocket, serve};
    use crate::keys::{KeysConfig, Registry};
    use crate::trace::Tracing;

    fn request(keys: &[(&str, v1::ClaimWant)]) -> v1::SetClaimsRequest {
        v1::SetClaimsRequest {
            owner: "rollout/a".to_owned(),
            generation: 1,
            claims: keys
                .iter()
                .map(|(key, want)| v1::KeyClaim {
                    key: (*key).to_owned(),
                    want: (*want).into(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        }
    }

    fn parsed(request: v1::SetClaimsRequest) -> Result<ClaimsRequest, KeysError> {
        let times = CallTimes::of(&MetadataMap::new());
        claims_request(request, "uid:0".into(), times)
    }

    #[test]
    fn malformed_sets_are_refused_by_field() {
        let good = || request(&[("alpha", v1::ClaimWant::On)]);
        let field = |change: &dyn Fn(&mut v1::SetClaimsRequest)| {
            let mut request = good();
            change(&mut request);
            match parsed(request).expect_err("malformed") {
                KeysError::InvalidArgument { field, .. } => field,
                other => panic!("{other}"),
            }
        };
        parsed(good()).expect("well-formed");
        assert_eq!(field(&|request| request.generation = 0), "generation");
        assert_eq!(field(&|request| request.owner.clear()), "owner");
        assert_eq!(field(&|request| request.owner = "x".repeat(129)), "owner");
        // A holder's name: the client and the owner, separated by a middle dot. An owner must not
        // contain one.
        assert_eq!(
            field(&|request| request.owner = "a \u{b7} b".into()),
            "owner"
        );
        assert_eq!(field(&|request| request.owner = "a\nb".into()), "owner");
        assert_eq!(field(&|request| request.reason = "x".repeat(257)), "reason");
        let zero = prost_types::Duration::default();
        assert_eq!(field(&|request| request.ttl = Some(zero)), "ttl");
        let claims =
            |change: fn(&mut v1::KeyClaim)| field(&|request| change(&mut request.claims[0]));
        assert_eq!(claims(|claim| claim.want = 0), "claims");
        assert_eq!(claims(|claim| claim.want = 9), "claims");
        assert_eq!(claims(|claim| claim.key.clear()), "claims");
        assert_eq!(claims(|claim| claim.key = "k".repeat(513)), "claims");
        for name in ["a on\nb", "a b", "\u{1}", "\u{e9}"] {
            assert_eq!(
                field(&|request| request.claims[0].key = name.into()),
                "claims"
            );
        }
        let twice = [("alpha", v1::ClaimWant::On), (":alpha", v1::ClaimWant::Off)];
        let error = parsed(request(&twice)).expect_err("twice");
        assert!(error.to_string().contains("twice"), "{error}");
        // Patterns.
        let patterns = |count: usize| vec!["net_*".to_owned(); count];
        let selects = |request: &mut v1::SetClaimsRequest, count: usize| {
            request.validate_only = true;
            request.claims[0].key.clear();
            request.claims[0].patterns = patterns(count);
        };
        let mut valid = good();
        selects(&mut valid, MAX_PATTERNS);
        let selected = parsed(valid).expect("well-formed");
        assert_eq!((selected.claims.len(), selected.selections.len()), (0, 1));
        let too_many = |request: &mut v1::SetClaimsRequest| {
            selects(request, 512);
            let same = request.claims[0].clone();
            request.claims.extend([same.clone(), same]);
        };
        assert_eq!(field(&too_many), "claims");
        let both = |request: &mut v1::SetClaimsRequest| {
            selects(request, 1);
            request.claims[0].key = "alpha".to_owned();
        };
        assert_eq!(field(&both), "claims");
        let malformed = |request: &mut v1::SetClaimsRequest| {
            selects(request, 1);
            request.claims[0].patterns[0] = "[".to_owned();
        };
        assert_eq!(field(&malformed), "patterns");
        let mut made = good();
        selects(&mut made, 1);
        made.validate_only = false;
        let error = parsed(made).expect_err("not validated");
        assert!(error.to_string().contains("validate first"), "{error}");
        let many = vec![good().claims[0].clone(); MAX_CLAIMS + 1];
        assert_eq!(field(&|request| request.claims.clone_from(&many)), "claims");
    }

    /// Checks that a repeat is recognised regardless of the fields that do not count and of the
    /// order of its claims.
    #[test]
    fn the_same_set_has_the_same_content() {
        let keys = [("a", v1::ClaimWant::On), ("b", v1::ClaimWant::Off)];
        let one = parsed(request(&keys)).expect("well-formed");
        let mut again = request(&[keys[1], keys[0]]);
        again.guest = "web-1".to_owned();
        again.boot = "0123456789abcdef".to_owned();
        again.validate_only = true;
        again.made_at = Some(prost_types::Timestamp::default());
        again.reason = "the next leader goes on".to_owned();
        again.stop_timeout = Some(prost_types::Duration {
            seconds: 1,
            nanos: 0,
        });
        assert_eq!(parsed(again).expect("well-formed").content, one.content);
        let mut other = request(&keys);
        other.force = true;
        assert_ne!(parsed(other).expect("well-formed").content, one.content);
    }

    /// Checks the methods over a socket, and the errors that clients see.
    #[tokio::test]
    async fn clients_set_and_list_claims() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let registry = Arc::new(Registry::default());
        let [alpha, beta] = ["alpha", "beta"].map(|name| TestKey::new(name, 1));
        let all = [alpha, beta, TestKey::guarded("guarded")];
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &all);
        let (keys, _) =
            Keys::start(Arc::clone(&guest), registry, KeysConfig::default()).expect("a thread");
        let path = folder.path().join("api.sock");
        let socket = ApiSocket::bind(&path).expect("free");
        let served = serve(socket, keys, Tracing::default(), std::future::pending());
        tokio::spawn(served);
        let channel = patchbay_proto::client::endpoint()
            .connect_with_connector(patchbay_proto::client::unix_socket(&path))
            .await
            .expect("it listens");
        let mut client = StaticKeysServiceClient::new(channel);
        let mut wanted = request(&[("alpha", v1::ClaimWant::On), ("beta", v1::ClaimWant::Held)]);
        wanted.generation = 2;
        let answer = client
            .set_claims(wanted.clone())
            .await
            .expect("made")
            .into_inner();
        assert_eq!(answer.results.len(), 2);
        assert_eq!(answer.results[0].state(), v1::ClaimState::Made);
        assert!(answer.report.is_some_and(|report| report.paused));
        assert_eq!((answer.generation, answer.boot.len()), (2, 16));
        assert_eq!(guest.count("alpha"), 1);
        assert_eq!(answer.sites_patched, 2);
        assert_eq!((answer.predicted_pause, answer.left_out.len()), (None, 0));
        // A validation of patterns.
        let mut dry = v1::SetClaimsRequest {
            generation: 3,
            validate_only: true,
            ..wanted.clone()
        };
        dry.claims = vec![v1::KeyClaim {
            want: v1::ClaimWant::Off.into(),
            patterns: vec!["*".to_owned()],
            ..Default::default()
        }];
        let dry = client.set_claims(dry).await.expect("valid").into_inner();
        let named: Vec<&str> = dry.results.iter().map(|result| &*result.key).collect();
        assert_eq!((named, dry.sites_patched), (vec!["alpha", "beta"], 2));
        assert!(dry.predicted_pause.is_some() && dry.report.is_none());
        let guarded = v1::LeftOut {
            reason: "KEY_GUARDED".to_owned(),
            count: 1,
            names: vec!["guarded".to_owned()],
        };
        assert_eq!(dry.left_out, [guarded]);
        wanted.generation = 1;
        let stale = client.set_claims(wanted).await.expect_err("late");
        let info = stale.get_details_error_info().expect("a reason");
        assert_eq!(stale.code(), tonic::Code::FailedPrecondition);
        assert_eq!(
            (info.reason.as_str(), &*info.metadata["generation"]),
            ("GENERATION_STALE", "2")
        );
        // One key a page.
        let (mut list, mut owners) = (v1::ListClaimsRequest::default(), Vec::new());
        list.page_size = 1;
        loop {
            let page = client
                .list_claims(list.clone())
                .await
                .expect("listed")
                .into_inner();
            assert_eq!((page.claims.len(), &page.boot), (1, &answer.boot));
            owners.extend(
                page.claims
                    .into_iter()
                    .map(|claim| (claim.key, claim.owner)),
            );
            match page.next_page_token.is_empty() {
                true => break,
                false => list.page_token = page.next_page_token,
            }
        }
        let owner = "rollout/a".to_owned();
        assert_eq!(
            owners,
            [
                ("alpha".to_owned(), owner.clone()),
                ("beta".to_owned(), owner)
            ]
        );
    }
}
