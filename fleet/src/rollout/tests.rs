// SPDX-License-Identifier: Apache-2.0
//! The machine against guests that apply, refuse, answer late or not at all, and drivers that die.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::machine::MAX_ATTEMPTS;
use super::*;

fn member(index: usize) -> Member {
    Member {
        host: format!("host-{}", index / 4),
        guest: format!("guest-{index}"),
        domain: format!("rack-{}", index % 3),
        plan: PreparedPlan::default(),
        state: State::Pending,
    }
}

/// A rollout of waves of these sizes.
fn planned(sizes: &[usize], policy: Policy) -> Rollout {
    let mut waves: Vec<Wave> = Vec::new();
    for (index, &count) in sizes.iter().enumerate() {
        waves.push(Wave {
            name: format!("wave-{index}"),
            first: waves.last().map_or(0, |wave| wave.members().end),
            count,
            bake_ms: 1000,
            bakes_until: None,
        });
    }
    let members: Vec<Member> = (0..sizes.iter().sum()).map(member).collect();
    let header = Header {
        name: "test".to_owned(),
        title: String::new(),
        spec_digest: String::new(),
        digest: "digest".to_owned(),
        phase: Phase::Planned,
        message: String::new(),
        wave: 0,
        waves,
        policy,
        approvals: vec![],
        timeline: vec![],
        members: members.len(),
        created: 0,
    };
    Rollout::new(header, members)
}

fn started(sizes: &[usize], policy: Policy) -> Rollout {
    let mut rollout = planned(sizes, policy);
    rollout.start("alice", "digest", 0).expect("planned");
    rollout
}

fn commits(step: &Step) -> Vec<usize> {
    let commit = |action: &Action| match action {
        Action::Commit(index) => Some(*index),
        _ => None,
    };
    step.actions.iter().filter_map(commit).collect()
}

fn commit_all(rollout: &mut Rollout, now: Millis) -> usize {
    let mut done = 0;
    loop {
        let ready = commits(&rollout.step(now));
        if ready.is_empty() {
            return done;
        }
        for index in ready {
            rollout.committed(index, CommitOutcome::Committed { pause_us: 10 }, now);
            done += 1;
        }
    }
}

fn failed(failure: Failure) -> CommitOutcome {
    let why = "no".to_owned();
    CommitOutcome::Failed { failure, why }
}

fn gate(kind: GateKind, on_failure: OnFailure) -> Policy {
    Policy {
        gates: vec![Gate { kind, on_failure }],
        ..Policy::default()
    }
}

#[test]
fn waves_follow_each_other_after_their_bake_time() {
    let mut rollout = started(&[1, 3], Policy::default());
    assert_eq!(commits(&rollout.step(0)), [0]);
    rollout.committed(0, CommitOutcome::Committed { pause_us: 1 }, 10);
    assert_eq!(rollout.step(10).wake_at, Some(1010));
    assert_eq!(rollout.step(1009).actions, []);
    assert_eq!(commits(&rollout.step(1010)), [1, 2, 3]);
    for index in 1..4 {
        rollout.committed(index, CommitOutcome::Committed { pause_us: 1 }, 1020);
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
    let other = rollout.start("alice", "other", 0);
    assert!(matches!(other, Err(NotLegal::Digest { .. })));
    rollout.start("alice", "digest", 0).expect("the first");
    assert_eq!(rollout.header().phase, Phase::Planned);
    let again = rollout.start("alice", "digest", 0);
    assert!(matches!(again, Err(NotLegal::AlreadyApproved { .. })));
    assert!(commits(&rollout.step(0)).is_empty());
    rollout.start("bob", "digest", 0).expect("the second");
    assert_eq!(commits(&rollout.step(0)), [0]);
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
    assert_eq!(commit_all(&mut rollout, 0), 1);
    rollout.promote("alice", 150).expect("baking");
    let step = rollout.step(150);
    assert_eq!((commits(&step), step.wake_at), (vec![], Some(200)));
    let mut aborted = rollout.clone();
    aborted.abort("alice", 150);
    assert_eq!(aborted.step(150).actions, [Action::Revert(0)]);
    assert_eq!(commits(&rollout.step(200)), [1]);
}

#[test]
fn too_many_errors_close_the_gate_at_once() {
    for (on_failure, phase) in [
        (OnFailure::Pause, Phase::Paused),
        (OnFailure::Abort, Phase::Reverting(End::Aborted)),
    ] {
        let errors = GateKind::Errors { max_percent: 25 };
        let mut rollout = started(&[4], gate(errors, on_failure));
        rollout.step(0);
        rollout.committed(0, failed(Failure::Final), 0);
        assert_eq!(rollout.header().phase, Phase::Running(Stage::Committing));
        rollout.committed(1, failed(Failure::Final), 0);
        assert_eq!(rollout.header().phase, phase);
        assert!(rollout.header().message.contains("guest-0"));
    }
}

#[test]
fn a_pause_over_budget_closes_the_gate() {
    let budget = GateKind::PauseP99 { budget_us: 9 };
    let mut rollout = started(&[2, 1], gate(budget, OnFailure::Pause));
    commit_all(&mut rollout, 0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Paused);
    rollout.promote("alice", 1000).expect("paused at a gate");
    assert_eq!(commits(&rollout.step(1000)), [2]);
}

#[test]
fn a_command_decides_about_the_next_wave() {
    let command = GateKind::Command {
        argv: vec!["true".to_owned()],
        timeout_ms: 1,
    };
    let mut rollout = started(&[1, 1], gate(command, OnFailure::Abort));
    commit_all(&mut rollout, 0);
    let asked = [Action::RunGate { wave: 0, gate: 0 }];
    assert_eq!(rollout.step(1000).actions, asked);
    assert_eq!(rollout.step(1000).actions, [], "asked once");
    // Another driver asks again.
    let mut other = Rollout::new(rollout.header().clone(), rollout.members().to_vec());
    assert_eq!(other.step(1000).actions, asked);
    other.gate_ended(0, 0, Err("exit status 1".to_owned()), 1000);
    assert_eq!(other.step(1000).actions, [Action::Revert(0)]);
    rollout.gate_ended(0, 0, Ok(()), 1000);
    assert_eq!(commits(&rollout.step(1000)), [1]);
}

#[test]
fn a_busy_guest_is_tried_again_by_resume_and_a_stale_plan_is_not() {
    let mut rollout = started(&[2], Policy::default());
    rollout.step(0);
    rollout.committed(0, failed(Failure::Busy), 0);
    rollout.committed(1, failed(Failure::Final), 0);
    rollout.pause("alice", 0).expect("runs");
    rollout.resume("alice", 0).expect("paused");
    assert_eq!(commits(&rollout.step(0)), [0]);
}

#[test]
fn an_unknown_outcome_is_learned_before_it_is_reverted() {
    let mut rollout = started(&[1], Policy::default());
    let mut now = 0;
    for _ in 0..MAX_ATTEMPTS {
        let step = rollout.step(now);
        assert_eq!(commits(&step), [0]);
        rollout.committed(0, failed(Failure::Unknown), now);
        now += 3_600_000;
    }
    assert!(matches!(rollout.members()[0].state, State::Failed { .. }));
    rollout.abort("alice", now);
    assert_eq!(rollout.step(now).actions, [Action::Commit(0)]);
    rollout.committed(0, CommitOutcome::Committed { pause_us: 1 }, now);
    assert_eq!(rollout.step(now).actions, [Action::Revert(0)]);
    rollout.reverted(0, RevertOutcome::Reverted { void: false }, now);
    rollout.step(now);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Aborted));
}

#[test]
fn what_could_not_be_taken_back_is_tried_by_the_next_abort() {
    let mut rollout = started(&[1], Policy::default());
    commit_all(&mut rollout, 0);
    rollout.undo("alice", 0);
    rollout.step(0);
    let refused = RevertOutcome::Failed {
        again: false,
        why: "WOULD_WARN".to_owned(),
    };
    rollout.reverted(0, refused, 0);
    rollout.step(0);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Undone));
    assert!(rollout.header().message.contains("1 guests"));
    rollout.abort("alice", 1);
    assert_eq!(rollout.step(1).actions, [Action::Revert(0)]);
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

/// What happens next in a run.
#[derive(Clone, Debug)]
enum Event {
    Pause,
    Resume,
    Promote,
    Abort,
    Undo,
    Advance(Millis),
    /// The driver steps, saves, and performs the actions up to here; the rest is not yet done.
    Perform(usize),
    /// An action under way ends so.
    Answer(prop::sample::Index, Answer),
    /// The driver dies, and another takes up what was saved.
    Kill,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Ok,
    /// Done, and the answer is lost.
    Lost,
    Busy,
    Refused,
}

fn event() -> impl Strategy<Value = Event> {
    let answer = prop_oneof![
        6 => Just(Answer::Ok),
        2 => Just(Answer::Lost),
        1 => Just(Answer::Busy),
        1 => Just(Answer::Refused),
    ];
    prop_oneof![
        1 => Just(Event::Pause),
        2 => Just(Event::Resume),
        1 => Just(Event::Promote),
        1 => Just(Event::Abort),
        1 => Just(Event::Undo),
        3 => (0..3000_u64).prop_map(Event::Advance),
        8 => (0..20_usize).prop_map(Event::Perform),
        12 => (any::<prop::sample::Index>(), answer).prop_map(|(which, how)| Event::Answer(which, how)),
        2 => Just(Event::Kill),
    ]
}

/// A guest as `patchbay.v1` promises it: a plan is committed once, an inverse with one request id too.
#[derive(Clone, Debug, Default)]
struct Guest {
    commits: u32,
    reverts: u32,
}

struct Fleet {
    rollout: Rollout,
    saved: (Header, Vec<Member>),
    /// Actions that a driver has performed and not heard of.
    under_way: Vec<Action>,
    guests: BTreeMap<usize, Guest>,
    now: Millis,
}

impl Fleet {
    fn save(&mut self) {
        let (changed, header) = self.rollout.take_changes();
        for index in changed {
            self.saved.1[index] = self.rollout.members()[index].clone();
        }
        if header {
            self.saved.0 = self.rollout.header().clone();
        }
        assert_eq!(
            self.saved.0,
            *self.rollout.header(),
            "an unsaved change of the header"
        );
        assert_eq!(
            self.saved.1,
            self.rollout.members(),
            "an unsaved change of a member"
        );
    }

    /// Steps and saves; sends as many of the actions, and forgets the others.
    fn perform(&mut self, most: usize) {
        let before: Vec<State> = self
            .rollout
            .members()
            .iter()
            .map(|m| m.state.clone())
            .collect();
        let step = self.rollout.step(self.now);
        self.save();
        self.check_caps();
        let phase = self.rollout.header().phase;
        for action in &step.actions {
            if let Action::Commit(index) = action
                && before[*index] == State::Pending
            {
                let runs = matches!(phase, Phase::Running(_));
                assert!(
                    runs,
                    "guest {index} is committed while it is {}",
                    phase.name()
                );
            }
        }
        let sent = step.actions.len().min(most);
        self.under_way.extend_from_slice(&step.actions[..sent]);
        if sent < step.actions.len() {
            // What was not sent is known to the next driver alone.
            self.kill();
        }
    }

    /// The driver's calls end with it: some have reached their guest, others never will.
    fn kill(&mut self) {
        self.save();
        for (position, action) in std::mem::take(&mut self.under_way).into_iter().enumerate() {
            let has_arrived = (position as u64 + self.now).is_multiple_of(2);
            match action {
                Action::Commit(index) if has_arrived => {
                    self.guests.entry(index).or_default().commits = 1;
                }
                Action::Revert(index) if has_arrived => {
                    self.guests.entry(index).or_default().reverts = 1;
                }
                _ => {}
            }
        }
        let (header, members) = self.saved.clone();
        self.rollout = Rollout::new(header, members);
    }

    fn check_caps(&self) {
        let caps = self.rollout.header().policy.caps;
        let mut domains: BTreeMap<&str, usize> = BTreeMap::new();
        let committing = self.rollout.members().iter();
        let committing =
            committing.filter(|member| matches!(member.state, State::Committing { .. }));
        let mut total = 0;
        for member in committing {
            total += 1;
            *domains.entry(&member.domain).or_default() += 1;
        }
        assert!(total <= caps.total(self.rollout.members().len()));
        assert!(domains.values().all(|&count| count <= caps.per_domain()));
    }

    fn answer(&mut self, position: usize, answer: Answer) {
        let lost = |why: &str| why.to_owned();
        match self.under_way.swap_remove(position) {
            Action::Commit(index) => {
                let guest = self.guests.entry(index).or_default();
                let refused =
                    guest.commits == 0 && matches!(answer, Answer::Busy | Answer::Refused);
                if !refused {
                    guest.commits = 1;
                }
                let outcome = match answer {
                    Answer::Lost => failed(Failure::Unknown),
                    Answer::Busy if refused => failed(Failure::Busy),
                    Answer::Refused if refused => failed(Failure::Final),
                    _ => CommitOutcome::Committed { pause_us: 1 },
                };
                self.rollout.committed(index, outcome, self.now);
            }
            Action::Revert(index) => {
                let guest = self.guests.entry(index).or_default();
                assert_eq!(
                    guest.commits, 1,
                    "guest {index} is reverted and was never changed"
                );
                if !matches!(answer, Answer::Busy | Answer::Refused) {
                    guest.reverts = 1;
                }
                let outcome = match answer {
                    Answer::Ok => RevertOutcome::Reverted { void: false },
                    Answer::Lost | Answer::Busy => RevertOutcome::Failed {
                        again: true,
                        why: lost("lost"),
                    },
                    Answer::Refused => RevertOutcome::Failed {
                        again: false,
                        why: lost("refused"),
                    },
                };
                self.rollout.reverted(index, outcome, self.now);
            }
            Action::RunGate { wave, gate } => {
                self.rollout.gate_ended(wave, gate, Ok(()), self.now);
            }
        }
    }

    /// A command that `would_change` accepts changes the rollout, and one that it refuses does not.
    fn check_legality(&self, verb: Verb) {
        let mut after = self.rollout.clone();
        match verb {
            Verb::Start => drop(after.start("bob", "digest", self.now)),
            Verb::Pause => drop(after.pause("bob", self.now)),
            Verb::Resume => drop(after.resume("bob", self.now)),
            Verb::Promote => drop(after.promote("bob", self.now)),
            Verb::Abort => after.abort("bob", self.now),
            Verb::Undo => after.undo("bob", self.now),
        }
        let changes =
            after.header() != self.rollout.header() || after.members() != self.rollout.members();
        let legal = self.rollout.would_change(verb, "bob");
        assert_eq!(legal.is_ok(), changes, "{} {legal:?}", verb.name());
    }

    fn apply(&mut self, event: &Event) {
        Verb::ALL
            .into_iter()
            .for_each(|verb| self.check_legality(verb));
        let now = self.now;
        match event {
            Event::Pause => drop(self.rollout.pause("alice", now)),
            Event::Resume => drop(self.rollout.resume("alice", now)),
            Event::Promote => drop(self.rollout.promote("alice", now)),
            Event::Abort => self.rollout.abort("alice", now),
            Event::Undo => self.rollout.undo("alice", now),
            Event::Advance(time) => self.now += time,
            Event::Perform(most) => self.perform(*most),
            Event::Answer(which, answer) if !self.under_way.is_empty() => {
                self.answer(which.index(self.under_way.len()), *answer);
            }
            Event::Answer(..) => {}
            Event::Kill => self.kill(),
        }
        self.save();
    }

    /// Aborts, and lets everything end well.
    fn abort_to_the_end(&mut self) {
        self.rollout.abort("alice", self.now);
        // Reverting may end with failures; a second abort takes them back.
        for _ in 0..2 {
            for _ in 0..10_000 {
                self.perform(usize::MAX);
                while !self.under_way.is_empty() {
                    self.answer(0, Answer::Ok);
                }
                self.now += 60_000;
                if matches!(self.rollout.header().phase, Phase::Ended(_)) {
                    break;
                }
            }
            self.rollout.abort("alice", self.now);
        }
    }
}

proptest! {
    #[test]
    fn any_order_of_events_keeps_the_promises(
        sizes in prop::collection::vec(1..6_usize, 1..4),
        count in prop::option::of(1..4_u32),
        percent in prop::option::of(1..60_u32),
        per_domain in prop::option::of(1..3_u32),
        max_percent in prop::option::of(0..100_u32),
        abort in any::<bool>(),
        events in prop::collection::vec(event(), 0..120),
    ) {
        let on_failure = if abort { OnFailure::Abort } else { OnFailure::Pause };
        let mut policy = max_percent.map_or_else(Policy::default, |max_percent| {
            gate(GateKind::Errors { max_percent }, on_failure)
        });
        policy.caps = Caps { count, percent, per_domain };
        let rollout = started(&sizes, policy);
        let saved = (rollout.header().clone(), rollout.members().to_vec());
        let mut fleet = Fleet { rollout, saved, under_way: vec![], guests: BTreeMap::new(), now: 0 };
        for event in &events {
            fleet.apply(event);
            fleet.check_caps();
        }
        fleet.abort_to_the_end();
        let phase = fleet.rollout.header().phase;
        prop_assert!(matches!(phase, Phase::Ended(_)), "{phase:?}");
        for (index, guest) in &fleet.guests {
            prop_assert_eq!(guest.commits, guest.reverts, "guest {}", index);
        }
    }
}
