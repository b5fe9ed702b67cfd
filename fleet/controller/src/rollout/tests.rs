// SPDX-License-Identifier: Apache-2.0
//! Tests the machine step by step.

mod advice;
mod claims;
mod effect;
mod events;
mod gates;
mod persons;
mod standing;
mod unknown;

use super::answers::{Found, FoundClaims};
use super::*;

fn member(index: usize) -> Member {
    Member {
        domain: format!("rack-{}", index % 3),
        ..Member::new(&format!("host-{}", index / 4), &format!("guest-{index}"))
    }
}

/// Returns a rollout with waves of these sizes.
fn planned(sizes: &[usize], policy: Policy) -> Rollout {
    let mut waves: Vec<Wave> = Vec::new();
    for (index, &count) in sizes.iter().enumerate() {
        waves.push(Wave {
            name: format!("wave-{index}"),
            first: waves.last().map_or(0, |wave| wave.members().end),
            count,
            bake_ms: 1000,
            ..Wave::default()
        });
    }
    let members: Vec<Member> = (0..sizes.iter().sum()).map(member).collect();
    let header = Header {
        name: "test".to_owned(),
        digest: "digest".to_owned(),
        waves,
        policy,
        members: members.len(),
        ..Header::default()
    };
    Rollout::new(header, members)
}

/// Returns one wave without a bake time.
fn one_wave(guests: usize) -> Vec<Wave> {
    vec![Wave {
        name: "late".to_owned(),
        count: guests,
        bake_ms: 0,
        ..Wave::default()
    }]
}

fn started(sizes: &[usize], policy: Policy) -> Rollout {
    let mut rollout = planned(sizes, policy);
    rollout.start("alice", "digest", 0).expect("planned");
    rollout
}

fn claims(step: &Step) -> Vec<usize> {
    let claim = |action: &Action| match action {
        Action::Claim { member, .. } => Some(*member),
        _ => None,
    };
    step.actions.iter().filter_map(claim).collect()
}

fn releases(step: &Step) -> Vec<usize> {
    let release = |action: &Action| match action {
        Action::Release { member, .. } => Some(*member),
        _ => None,
    };
    step.actions.iter().filter_map(release).collect()
}

fn claim_all(rollout: &mut Rollout, now: Millis) -> usize {
    let mut done = 0;
    loop {
        let ready = claims(&rollout.step(now));
        if ready.is_empty() {
            return done;
        }
        for index in ready {
            claimed(rollout, index, made(10), now);
            done += 1;
        }
    }
}

/// Steps, answers for each guest that is asked that its claims hold, and steps again.
fn step_and_answer(rollout: &mut Rollout, now: Millis) -> Step {
    for action in rollout.step(now).actions {
        if let Action::Check { member, generation } = action {
            let made = found("boot-1", FoundClaims::Made);
            rollout.checked(member, generation, made, now);
        }
    }
    rollout.step(now)
}

/// Reports the outcome of the member's latest call.
fn claimed(rollout: &mut Rollout, index: usize, outcome: ClaimOutcome, now: Millis) {
    let generation = rollout.members()[index].generation;
    rollout.claimed(index, generation, outcome, now);
}

fn released(rollout: &mut Rollout, index: usize, outcome: ReleaseOutcome, now: Millis) {
    let generation = rollout.members()[index].generation;
    rollout.released(index, generation, outcome, now);
}

fn found(boot: &str, claims: FoundClaims) -> Option<Found> {
    let boot = boot.to_owned();
    let total = None;
    Some(Found {
        boot,
        record: None,
        claims,
        total,
    })
}

fn made(pause_us: u64) -> ClaimOutcome {
    ClaimOutcome::Made {
        boot: "boot-1".to_owned(),
        ledger: String::new(),
        pause_us,
        ttl: None,
    }
}

fn failed(failure: Failure) -> ClaimOutcome {
    let why = "no".to_owned();
    ClaimOutcome::Failed { failure, why }
}

fn not_released() -> ReleaseOutcome {
    let why = "no answer".to_owned();
    ReleaseOutcome::Failed { why }
}

const RELEASED: ReleaseOutcome = ReleaseOutcome::Released { void: false };

fn gate(kind: WaveGateKind, on_failure: OnFailure) -> Policy {
    Policy {
        gates: vec![WaveGate {
            kind,
            on_failure,
            interval_ms: 100,
            patience_ms: 1000,
        }],
        ..Policy::default()
    }
}

/// Checks that a command changes the rollout exactly if `would_change` accepts it.
fn check_legality(rollout: &Rollout, now: Millis) {
    for verb in Verb::ALL {
        let mut after = rollout.clone();
        match verb {
            Verb::Approve => drop(after.approve("bob", "digest", now)),
            Verb::Start => drop(after.start("bob", "digest", now)),
            Verb::Pause => drop(after.pause("bob", now)),
            Verb::Resume => drop(after.resume("bob", now)),
            Verb::Promote => drop(after.promote("bob", now)),
            Verb::Abort => after.abort("bob", now),
            Verb::Undo => after.undo("bob", now),
        }
        let changes = after.header() != rollout.header() || after.members() != rollout.members();
        let legal = rollout.would_change(verb, "bob");
        assert_eq!(legal.is_ok(), changes, "{} {legal:?}", verb.name());
    }
}

#[test]
fn waves_follow_each_other_after_their_bake_time() {
    let mut rollout = started(&[1, 3], Policy::default());
    assert_eq!(claims(&rollout.step(0)), [0]);
    claimed(&mut rollout, 0, made(1), 10);
    assert_eq!(rollout.step(10).wake_at, Some(1010));
    assert_eq!(rollout.step(1009).actions, []);
    assert_eq!(claims(&rollout.step(1010)), [1, 2, 3]);
    for index in 1..4 {
        claimed(&mut rollout, index, made(1), 1020);
    }
    rollout.step(1020);
    rollout.step(2020);
    assert_eq!(rollout.header().phase, Phase::Completed);
}

#[test]
fn start_pins_the_digest_and_counts_people() {
    let policy = Policy {
        approvals: 2,
        ..Policy::default()
    };
    let mut rollout = planned(&[1], policy);
    check_legality(&rollout, 0);
    let other = rollout.start("alice", "other", 0);
    assert!(matches!(other, Err(NotLegal::Digest { .. })));
    let other = rollout.approve("alice", "other", 0);
    assert!(matches!(other, Err(NotLegal::Digest { .. })));
    for _ in 0..2 {
        rollout.approve("alice", "digest", 0).expect("planned");
        let alone = rollout.start("alice", "digest", 0);
        assert_eq!(
            alone,
            Err(NotLegal::Approvals {
                given: 1,
                needed: 2
            })
        );
    }
    check_legality(&rollout, 0);
    let mut approved = rollout.clone();
    approved.approve("bob", "digest", 0).expect("planned");
    check_legality(&approved, 0);
    assert_eq!(rollout.header().phase, Phase::Planned);
    assert!(claims(&rollout.step(0)).is_empty());
    rollout.start("bob", "digest", 0).expect("the second");
    assert_eq!(rollout.header().approvals, ["alice", "bob"]);
    let late = rollout.approve("carol", "digest", 0);
    assert!(matches!(late, Err(NotLegal::Phase { .. })));
    assert_eq!(claims(&rollout.step(0)), [0]);
}

#[test]
fn a_freeze_holds_changes_and_no_reverts() {
    let policy = Policy {
        freezes: vec![Freeze {
            from: 100,
            until: 200,
            reason: "holidays".to_owned(),
        }],
        ..Policy::default()
    };
    let mut rollout = started(&[1, 1], policy);
    assert_eq!(claim_all(&mut rollout, 0), 1);
    rollout.promote("alice", 150).expect("baking");
    let step = rollout.step(150);
    assert_eq!((claims(&step), step.wake_at), (vec![], Some(200)));
    let mut aborted = rollout.clone();
    aborted.abort("alice", 150);
    assert_eq!(releases(&aborted.step(150)), [0]);
    assert_eq!(claims(&rollout.step(200)), [1]);
}

#[test]
fn too_many_errors_close_the_gate_at_once() {
    for (on_failure, phase) in [
        (OnFailure::Pause, Phase::Paused),
        (OnFailure::Abort, Phase::Reverting(End::Aborted)),
    ] {
        let errors = WaveGateKind::Errors {
            max_percent: 25,
            of: ErrorsOf::Wave,
        };
        let mut rollout = started(&[4], gate(errors, on_failure));
        rollout.step(0);
        claimed(&mut rollout, 0, failed(Failure::Refused), 0);
        assert_eq!(rollout.header().phase, Phase::Running(Stage::Changing));
        claimed(&mut rollout, 1, failed(Failure::Refused), 0);
        assert_eq!(rollout.header().phase, phase);
        assert!(rollout.header().message.contains("guest-0"));
    }
}

#[test]
fn a_pause_over_budget_closes_the_gate() {
    let budget = WaveGateKind::PauseP99 { budget_us: 9 };
    let mut rollout = started(&[2, 1], gate(budget, OnFailure::Pause));
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Paused);
    rollout.promote("alice", 1000).expect("paused at a gate");
    assert_eq!(claims(&rollout.step(1000)), [2]);
}

#[test]
fn the_timeline_is_bounded() {
    let mut rollout = started(&[1], Policy::default());
    for now in 0..2000 {
        rollout.pause("alice", now).expect("runs");
        rollout.resume("alice", now).expect("paused");
    }
    let timeline = &rollout.header().timeline;
    assert!(timeline.len() <= 500);
    assert_eq!(timeline[0].text, "started");
}

#[test]
fn only_a_rollout_that_is_over_and_has_changed_no_guest_is_deletable() {
    let deletable = |rollout: &Rollout| rollout.check_deletable();
    let mut rollout = planned(&[3], Policy::default());
    assert!(matches!(deletable(&rollout), Err(NotLegal::Phase { .. })));
    rollout.start("alice", "digest", 0).expect("planned");
    rollout.step(0);
    claimed(&mut rollout, 0, made(1), 0);
    claimed(&mut rollout, 1, made(1), 0);
    claimed(&mut rollout, 2, failed(Failure::Refused), 0);
    rollout.step(0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    let changed = deletable(&rollout);
    assert!(
        matches!(changed, Err(NotLegal::Changed { guests: 3, .. })),
        "{changed:?}"
    );
    rollout.undo("alice", 2000);
    assert!(matches!(deletable(&rollout), Err(NotLegal::Phase { .. })));
    for index in releases(&rollout.step(2000)) {
        released(&mut rollout, index, RELEASED, 2000);
    }
    rollout.step(2000);
    assert_eq!(deletable(&rollout), Ok(()));
}

/// Checks that a rollout cannot grow beyond what the store takes for its header and for a guest.
#[test]
fn texts_from_outside_and_the_number_of_waves_are_bounded() {
    let long = format!("a\n{}", "ä".repeat(1 << 20));
    let mut rollout = started(&[1, 1], Policy::default());
    for now in 0..500 {
        rollout.note(&long[..100], now, long.clone());
    }
    rollout.step(0);
    let outcome = ClaimOutcome::Failed {
        failure: Failure::Refused,
        why: long.clone(),
    };
    claimed(&mut rollout, 0, outcome, 0);
    let State::NotYet { why, .. } = &rollout.members()[0].state else {
        panic!("{:?}", rollout.members()[0].state);
    };
    assert!(why.len() <= 1024 && why.starts_with("a ä") && why.ends_with("ä..."));
    let timeline = &rollout.header().timeline;
    let bytes: usize = timeline.iter().map(|entry| entry.text.len()).sum();
    assert!(bytes <= 256 << 10, "{bytes}");
    assert_eq!(timeline[0].text, "started");
    while rollout.header().waves.len() < super::amend::MAX_WAVES {
        let guest = rollout.members().len();
        let added = rollout.extend(one_wave, vec![member(guest)], "", 0);
        added.expect("room for another");
    }
    let more = rollout.extend(one_wave, vec![member(9999)], "", 0);
    assert!(matches!(more, Err(NotLegal::Waves { .. })), "{more:?}");
}

#[test]
fn an_added_wave_is_changed_under_the_caps_and_replaces_earlier_members() {
    let policy = Policy {
        caps: Caps {
            count: Some(1),
            ..Caps::default()
        },
        ..Policy::default()
    };
    let mut rollout = started(&[1], policy);
    let early = planned(&[1], Policy::default()).extend(one_wave, vec![member(1)], "", 0);
    assert!(matches!(early, Err(NotLegal::Phase { .. })));
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    rollout.take_changes();
    // One of the guests drifted, and the others joined.
    let added = vec![member(0), member(1), member(2)];
    rollout
        .extend(one_wave, added, "alice", 2000)
        .expect("completed");
    let changes = rollout.take_changes();
    assert_eq!((changes.members, changes.header), (vec![0, 1, 2, 3], true));
    assert_eq!(rollout.members()[0].state, State::Superseded);
    for index in [1, 2, 3] {
        assert_eq!(claims(&rollout.step(2000)), [index]);
        claimed(&mut rollout, index, made(1), 2000);
    }
    // The guest has seen the earlier member's generation.
    assert_eq!(rollout.members()[1].generation, 2);
    rollout.step(2000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    rollout.abort("alice", 3000);
    assert_eq!(releases(&rollout.step(3000)), [1, 2, 3], "each guest once");
}

#[test]
fn abort_leaves_an_adopted_guest() {
    let mut rollout = started(&[2], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.adopt(&[0], vec![], "alice", 0).expect("baking");
    rollout.abort("alice", 0);
    assert_eq!(releases(&rollout.step(0)), [1]);
    released(&mut rollout, 1, RELEASED, 0);
    rollout.step(0);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Aborted));
    let late = rollout.adopt(&[1], vec![], "alice", 0);
    assert!(matches!(late, Err(NotLegal::Phase { .. })));
}

#[test]
fn a_clock_that_jumps_between_drivers_costs_at_most_one_bake_time_or_backoff() {
    let mut rollout = started(&[1, 1], Policy::default());
    assert_eq!(claims(&rollout.step(10_000_000)), [0]);
    claimed(&mut rollout, 0, failed(Failure::Unknown), 10_000_000);
    assert_eq!(rollout.step(10_000_000).wake_at, Some(10_000_500));
    // After the clock jumps back, the call must not wait for hours.
    assert_eq!(claims(&rollout.step(0)), [0]);
    claimed(&mut rollout, 0, made(1), 10_000_000);
    assert_eq!(rollout.step(10_000_000).wake_at, Some(10_001_000));
    assert_eq!(rollout.step(0).wake_at, Some(1000));
    // After the clock jumps forward, the bake time ends early, and only the next wave is started.
    assert_eq!(claims(&rollout.step(20_000_000)), [1]);
}

#[test]
fn what_waits_when_the_clock_jumps_waits_as_long_as_before() {
    const DAY: i64 = 86_400_000;
    let freeze = Freeze {
        from: 0,
        until: 100_000_000,
        reason: String::new(),
    };
    for by in [DAY, -DAY] {
        let mut rollout = started(&[2, 1], Policy::default());
        let mut now = 1_000_000_000;
        rollout.step(now);
        claimed(&mut rollout, 0, failed(Failure::Unknown), now);
        claimed(&mut rollout, 1, made(1), now);
        now = now.saturating_add_signed(by);
        rollout.clock_jumped(by);
        assert_eq!(rollout.step(now).wake_at, Some(now + 500));
        assert!(claims(&rollout.step(now + 499)).is_empty());
        assert_eq!(claims(&rollout.step(now + 500)), [0]);
        claimed(&mut rollout, 0, made(1), now);
        rollout.step(now);
        rollout.take_changes();
        now = now.saturating_add_signed(by);
        rollout.clock_jumped(by);
        assert!(rollout.take_changes().header, "another driver knows it");
        assert!(claims(&rollout.step(now + 999)).is_empty());
        let mut aborted = rollout.clone();
        assert_eq!(claims(&rollout.step(now + 1000)), [2]);
        aborted.abort("alice", now);
        aborted.step(now);
        released(&mut aborted, 0, not_released(), now);
        now = now.saturating_add_signed(by);
        aborted.clock_jumped(by);
        assert_eq!(aborted.step(now + 499).actions, []);
        assert_eq!(releases(&aborted.step(now + 500)), [0]);
    }
    let policy = Policy {
        freezes: vec![freeze],
        ..Policy::default()
    };
    let mut frozen = started(&[1], policy);
    assert!(claims(&frozen.step(1)).is_empty());
    frozen.clock_jumped(100_000_000);
    assert_eq!(claims(&frozen.step(100_000_001)), [0]);
}
