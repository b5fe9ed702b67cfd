// SPDX-License-Identifier: Apache-2.0
//! Tests calls to guests, and what their answers mean.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt};

use super::*;
use crate::rollout::{Record, State};
use crate::spec::Spec;

/// Checks the memory of an action that waits for its turn. There may be one for each guest of a
/// fleet.
#[test]
fn an_action_that_waits_is_small() {
    fn size<F>(_: impl Fn(&'static Acting, &'static Asks, &'static Member) -> F) -> usize {
        size_of::<F>()
    }
    let sizes = [
        size(|hosts, asks, member| claim(hosts, asks, member, 1)),
        size(|hosts, asks, member| release(hosts, asks, member, 1)),
        size(|hosts, asks, member| check(hosts, &asks.owner, member)),
    ];
    assert!(sizes.iter().all(|size| *size < 4096), "{sizes:?}");
}

/// Hosts that have a guest of one name in different boots.
struct Namesakes {
    boots: BTreeMap<&'static str, &'static str>,
    /// The hosts whose guest got claims.
    called: Mutex<Vec<String>>,
}

impl Calls for Namesakes {
    async fn set_claims(
        &self,
        host: &str,
        request: impl FnOnce() -> v1::SetClaimsRequest + Send,
    ) -> Result<v1::SetClaimsResponse, Status> {
        let request = request();
        let boot = self.boots[host].to_owned();
        if !request.boot.is_empty() && request.boot != boot {
            let domain = patchbay_proto::ERROR_DOMAIN;
            let details = ErrorDetails::with_error_info("BOOT_CHANGED", domain, HashMap::new());
            let code = Code::FailedPrecondition;
            return Err(Status::with_error_details(code, "", details));
        }
        self.called.lock().expect("whole").push(host.to_owned());
        let state = v1::ClaimState::Made.into();
        let result = v1::ClaimResult {
            key: "alpha".to_owned(),
            state,
            ..v1::ClaimResult::default()
        };
        Ok(v1::SetClaimsResponse {
            boot,
            results: vec![result],
            ..v1::SetClaimsResponse::default()
        })
    }

    async fn not_made(
        &self,
        host: &str,
        _: &str,
        _: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        Ok(v1::ListClaimsResponse {
            boot: self.boots[host].to_owned(),
            ..v1::ListClaimsResponse::default()
        })
    }

    fn others(&self, host: &str, _: &str) -> Vec<String> {
        let names = self.boots.keys().filter(|name| **name != host);
        names.map(|name| (*name).to_owned()).collect()
    }

    fn elsewhere(&self, _: &str, _: &str) -> Vec<String> {
        vec![]
    }
}

#[tokio::test]
async fn a_guest_that_has_moved_is_told_from_a_namesake_on_its_former_host() {
    let spec =
        "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";
    let asks = Asks::new(&Header::default(), &Spec::parse(spec).expect("a spec"));
    let member = Member {
        boot: "boot-1".to_owned(),
        is_confirmed: true,
        ..Member::new("host-0", "web-0")
    };
    let hosts = |boots| Namesakes {
        boots: BTreeMap::from(boots),
        called: Mutex::default(),
    };
    let moved = hosts([("host-0", "boot-9"), ("host-1", "boot-1")]);
    let there = Some("host-1".to_owned());
    let (found, host) = check(&moved, "owner", &member).await;
    assert_eq!(
        (found.map(|found| found.boot), host),
        (Some("boot-1".to_owned()), there.clone())
    );
    let (outcome, host) = claim(&moved, &asks, &member, 1).await;
    assert!(matches!(outcome, ClaimOutcome::Made { .. }), "{outcome:?}");
    assert_eq!(host, there);
    assert_eq!(*moved.called.lock().expect("whole"), ["host-1"]);
    let (outcome, host) = release(&moved, &asks, &member, 2).await;
    assert_eq!(
        (outcome, host),
        (ReleaseOutcome::Released { void: false }, there)
    );
    assert_eq!(
        moved.called.lock().expect("whole").last().expect("called"),
        "host-1"
    );

    // The guest has booted again, and the other guest is another one.
    let booted = hosts([("host-0", "boot-2"), ("host-1", "boot-9")]);
    let (found, host) = check(&booted, "owner", &member).await;
    assert_eq!(
        (found.map(|found| found.boot), host),
        (Some("boot-2".to_owned()), None)
    );
    let (outcome, host) = claim(&booted, &asks, &member, 1).await;
    let boot = "boot-2".to_owned();
    assert_eq!((outcome, host), (ClaimOutcome::Booted { boot }, None));
    let (_, host) = release(&booted, &asks, &member, 2).await;
    assert_eq!(host, None);
}

#[test]
fn a_guest_that_makes_no_claim_has_no_record() {
    let outcome = |states: &[v1::ClaimState]| {
        let result = |state: &v1::ClaimState| v1::ClaimResult {
            key: "alpha".to_owned(),
            want: v1::ClaimWant::On.into(),
            state: (*state).into(),
            reason: "KEY_GUARDED".to_owned(),
            ..v1::ClaimResult::default()
        };
        let answer = v1::SetClaimsResponse {
            results: states.iter().map(result).collect(),
            ..v1::SetClaimsResponse::default()
        };
        made(&answer, Some(7))
    };
    use v1::ClaimState::{HeldByOthers, Made, Missing, Refused};
    for (states, expected) in [
        (&[Refused, Refused][..], (false, false)),
        (&[Refused, Made], (true, false)),
        (&[HeldByOthers], (true, true)),
        (&[HeldByOthers, Made], (true, true)),
        (&[HeldByOthers, Refused], (true, false)),
        (&[Missing], (false, false)),
        (&[Missing, Made], (true, false)),
    ] {
        match outcome(states) {
            ClaimOutcome::NotMade {
                has_claims,
                is_ineffective,
                ttl,
                why,
                ..
            } => {
                let found = ((has_claims, is_ineffective), ttl);
                assert_eq!(found, (expected, Some(7)), "{states:?}: {why}");
                assert!(why.starts_with("key alpha: "), "{why}");
            }
            other => panic!("{states:?}: {other:?}"),
        }
    }
    assert!(matches!(outcome(&[Made, Made]), ClaimOutcome::Made { .. }));
}

#[test]
fn claims_without_effect_are_told_from_those_that_are_gone() {
    use v1::ClaimState::{HeldByOthers, Made, Missing, Void};
    let claim = |(state, key_replaced): &(v1::ClaimState, bool)| v1::Claim {
        key: "m:a".to_owned(),
        state: (*state).into(),
        key_replaced: *key_replaced,
        ..v1::Claim::default()
    };
    let found = |total, claims: &[_]| {
        let answer = v1::ListClaimsResponse {
            claims: claims.iter().map(claim).collect(),
            boot: "boot-1".to_owned(),
            total,
            ..v1::ListClaimsResponse::default()
        };
        Found::of(answer).claims
    };
    assert_eq!(found(0, &[]), FoundClaims::None);
    assert_eq!(found(2, &[]), FoundClaims::Made);
    // A service of an earlier version, which lists the first claims in any state.
    assert_eq!(found(0, &[(Made, false)]), FoundClaims::Made);
    let cut = v1::ListClaimsResponse {
        claims: vec![claim(&(Made, false))],
        next_page_token: "m:b".to_owned(),
        ..v1::ListClaimsResponse::default()
    };
    assert_eq!(Found::of(cut).claims, FoundClaims::Unclear);
    let ineffective = |why: &str| FoundClaims::Ineffective(format!("key m:a: {why}"));
    for (state, why) in [
        (HeldByOthers, "another claim or a hold decides"),
        (Missing, "the kernel has no such key now"),
        (Void, "the guest or an operator has changed the key since"),
    ] {
        assert_eq!(found(2, &[(state, false)]), ineffective(why));
        let two = [(Made, false), (state, false), (state, false)];
        assert_eq!(found(3, &two), ineffective(&format!("{why}; and 1 more")));
    }
    let by = |principal: &str, owner: &str| {
        let decided_by = Some(v1::ClaimOwner {
            principal: "uid:0".to_owned(),
            owner: owner.to_owned(),
        });
        let claim = v1::Claim {
            principal: principal.to_owned(),
            decided_by,
            ..claim(&(HeldByOthers, false))
        };
        no_effect(&claim).into_owned()
    };
    let later = "the claim of rollout off decides";
    assert_eq!(by("uid:0", "rollout/off/00ff"), later);
    let forged = "the claim of rollout/off/00ff (uid:0) decides";
    assert_eq!(by("uid:1", "rollout/off/00ff"), forged);
    assert_eq!(by("uid:0", "ours"), "the claim of ours (uid:0) decides");
    assert_eq!(by("uid:0", "a\nb"), "the claim of a b (uid:0) decides");
    let replaced = found(3, &[(HeldByOthers, false), (Void, true)]);
    let why = "the module of key m:a was loaded again".to_owned();
    assert_eq!(replaced, FoundClaims::Replaced(why));
    // An operator has turned another key of the set off by force.
    let forced = found(3, &[(Void, false), (Void, true)]);
    let changed = "the guest or an operator has changed the key since; and 1 more";
    assert_eq!(forced, ineffective(changed));
    assert_eq!(
        found(1, &[(Missing, true)]),
        ineffective("the kernel has no such key now")
    );
}

#[test]
fn an_end_of_claims_that_the_guest_knows_nothing_of_is_not_confirmed() {
    let member = |boot: &str, expires| Member {
        is_confirmed: !boot.is_empty(),
        generation: 2,
        boot: boot.to_owned(),
        expires,
        state: State::Releasing { why: String::new() },
        ..Member::new("host-0", "web-0")
    };
    let result = |state: v1::ClaimState| v1::ClaimResult {
        state: state.into(),
        ..v1::ClaimResult::default()
    };
    let answer = |results, repeated| v1::SetClaimsResponse {
        boot: "boot-1".to_owned(),
        results,
        repeated,
        ..v1::SetClaimsResponse::default()
    };
    let released = |void| ReleaseOutcome::Released { void };
    let made = || vec![result(v1::ClaimState::Made)];
    let here = &member("boot-1", None);
    let lost = ended(here, &answer(vec![], false));
    assert_eq!(lost, ReleaseOutcome::Unknown);
    assert_eq!(ended(here, &answer(made(), false)), released(false));
    let void = vec![result(v1::ClaimState::Void)];
    assert_eq!(ended(here, &answer(void, false)), released(true));
    assert_eq!(ended(here, &answer(vec![], true)), released(false));
    // The answer to the repeat of a call that found no record either.
    let again = Member {
        state: State::no_record(),
        ..here.clone()
    };
    let repeat = ended(&again, &answer(vec![], true));
    assert_eq!(repeat, ReleaseOutcome::Unknown);
    let other_boot = v1::SetClaimsResponse {
        boot: "boot-2".to_owned(),
        ..answer(vec![], true)
    };
    assert_eq!(ended(&again, &other_boot), released(false));
    for other in [
        member("boot-0", None),
        member("boot-1", Some(1)),
        member("", None),
    ] {
        assert_eq!(ended(&other, &answer(vec![], false)), released(true));
    }
}

#[test]
fn the_record_tells_whether_the_claims_that_were_confirmed_are_gone() {
    let member = Member {
        is_confirmed: true,
        generation: 4,
        boot: "boot-1".to_owned(),
        record: Some(Record {
            ledger: "record-1".to_owned(),
            generation: 2,
        }),
        state: State::Releasing { why: String::new() },
        ..Member::new("host-0", "web-0")
    };
    let answer = |boot: &str, ledger: &str, before, results| v1::SetClaimsResponse {
        boot: boot.to_owned(),
        ledger: ledger.to_owned(),
        generation_before: before,
        results,
        ..v1::SetClaimsResponse::default()
    };
    let made = || {
        vec![v1::ClaimResult {
            state: v1::ClaimState::Made.into(),
            ..v1::ClaimResult::default()
        }]
    };
    let released = |void| ReleaseOutcome::Released { void };
    // A later generation, whose answer was lost, was refused for every key.
    let refused = answer("boot-1", "record-1", 3, vec![]);
    assert_eq!(ended(&member, &refused), released(true));
    let repeated = v1::SetClaimsResponse {
        repeated: true,
        ..refused
    };
    assert_eq!(ended(&member, &repeated), released(false));
    // An earlier state of the record, as after a snapshot was loaded or an old export imported.
    for before in [0, 1] {
        let mut earlier = answer("boot-1", "record-1", before, vec![]);
        assert_eq!(ended(&member, &earlier), ReleaseOutcome::Unknown);
        earlier.repeated = true;
        assert_eq!(ended(&member, &earlier), ReleaseOutcome::Unknown);
    }
    let kept = answer("boot-1", "record-1", 2, made());
    assert_eq!(ended(&member, &kept), released(false));
    // An earlier state has some of the claims.
    let partly = answer("boot-1", "record-1", 1, made());
    assert_eq!(ended(&member, &partly), ReleaseOutcome::Unknown);
    // A late message has made the claims in the record of another service.
    let lost = answer("boot-1", "record-2", 2, made());
    assert_eq!(ended(&member, &lost), ReleaseOutcome::Unknown);
    let booted = answer("boot-2", "record-2", 0, vec![]);
    assert_eq!(ended(&member, &booted), released(true));
    let unnamed = answer("boot-1", "", 0, vec![]);
    assert_eq!(ended(&member, &unnamed), ReleaseOutcome::Unknown);
}

/// Checks that claims are made only where the earlier ones were confirmed, and nothing of that in a
/// boot in which none were.
#[test]
fn claims_name_the_record_of_those_that_were_confirmed() {
    let spec =
        "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";
    let asks = Asks::new(&Header::default(), &Spec::parse(spec).expect("a spec"));
    let mut member = Member {
        is_confirmed: true,
        boot: "boot-1".to_owned(),
        record: Some(Record {
            ledger: "record-1".to_owned(),
            generation: 2,
        }),
        ..Member::new("host-0", "web-0")
    };
    let request = asks.claim(&member, 3);
    assert_eq!(
        (request.ledger.as_str(), request.after_generation),
        ("record-1", 2)
    );
    let request = asks.release(&member.guest, 4);
    assert_eq!((request.ledger.as_str(), request.after_generation), ("", 0));
    member.is_confirmed = false;
    let request = asks.claim(&member, 5);
    assert_eq!((request.ledger.as_str(), request.after_generation), ("", 0));
}
