// SPDX-License-Identifier: Apache-2.0
//! Tests the machine against guests that apply or refuse a change and answer late or not at all,
//! and with drivers that are killed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// The next event of a run.
#[derive(Clone, Debug)]
enum Event {
    Pause,
    Resume,
    Promote,
    Abort,
    Undo,
    Advance(Millis),
    /// The driver steps, saves, and performs this many actions. The others are not performed.
    Perform(usize),
    /// An action in progress ends with this answer.
    Answer(prop::sample::Index, Answer),
    /// The driver is killed, and another one continues from the saved state.
    Kill,
    /// A call of a driver that was killed reaches its guest only now.
    Late(prop::sample::Index),
    Forget(prop::sample::Index),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ok,
    /// The action is performed, and the answer is lost.
    Lost,
    Busy,
    /// Only some of the claims are made.
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
        2 => any::<prop::sample::Index>().prop_map(Event::Late),
        1 => any::<prop::sample::Index>().prop_map(Event::Forget),
    ]
}

/// A guest with the guarantees of `patchbay.v1.SetClaims`: a call of a generation before the
/// latest one does nothing.
#[derive(Clone, Debug, Default)]
struct SimulatedGuest {
    generation: u64,
    is_claimed: bool,
}

impl SimulatedGuest {
    fn set(&mut self, generation: u64, is_claimed: bool) {
        if generation > self.generation {
            (self.generation, self.is_claimed) = (generation, is_claimed);
        }
    }
}

struct SimulatedFleet {
    rollout: Rollout,
    saved: (Header, Vec<Member>),
    /// Actions that the driver has started and whose answers it has not received.
    under_way: Vec<Action>,
    /// The calls of drivers that were killed, which may still reach their guests.
    late: Vec<Action>,
    guests: BTreeMap<usize, SimulatedGuest>,
    now: Millis,
}

impl SimulatedFleet {
    fn save(&mut self) {
        let Changes {
            members: changed,
            header,
            ..
        } = self.rollout.take_changes();
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

    /// Steps and saves. Sends at most `most` of the actions, and forgets the others.
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
            if let Action::Claim {
                member: index,
                generation,
            } = action
            {
                assert_eq!(self.saved.1[*index].generation, *generation, "saved first");
                let is_new = !matches!(before[*index], State::Claiming { .. });
                let runs = matches!(phase, Phase::Running(_) | Phase::Completed);
                assert!(
                    runs || !is_new,
                    "guest {index} is changed while it is {}",
                    phase.name()
                );
                let observes = self.rollout.header().policy.observes_agents();
                let is_observed = self.saved.1[*index].health.is_some();
                assert!(is_observed || !observes, "guest {index} was not observed");
            }
        }
        let sent = step.actions.len().min(most);
        self.under_way.extend_from_slice(&step.actions[..sent]);
        if sent < step.actions.len() {
            // Only the next driver can send the actions that were not sent.
            self.kill();
        }
    }

    /// Kills the driver. Some of its calls have reached their guest, and the others may do so at
    /// any later time.
    fn kill(&mut self) {
        self.save();
        for (position, action) in std::mem::take(&mut self.under_way).into_iter().enumerate() {
            match (position as u64 + self.now).is_multiple_of(2) {
                true => self.arrive(&action),
                false => self.late.push(action),
            }
        }
        let (header, members) = self.saved.clone();
        let stored = Rollout::stored(header, members, BTreeSet::default());
        self.rollout = stored.expect("a state that this machine left");
    }

    /// Lets a call reach its guest.
    fn arrive(&mut self, action: &Action) {
        match action {
            Action::Claim { member, generation } => self.guest(*member).set(*generation, true),
            Action::Release { member, generation } => self.guest(*member).set(*generation, false),
            _ => {}
        }
    }

    fn guest(&mut self, index: usize) -> &mut SimulatedGuest {
        self.guests.entry(index).or_default()
    }

    fn check_caps(&self) {
        let caps = self.rollout.header().policy.caps;
        let mut domains: BTreeMap<&str, usize> = BTreeMap::new();
        let claiming = self.rollout.members().iter();
        let claiming = claiming.filter(|member| matches!(member.state, State::Claiming { .. }));
        let mut total = 0;
        for member in claiming {
            total += 1;
            *domains.entry(&member.domain).or_default() += 1;
        }
        assert!(total <= caps.total(self.rollout.members().len()));
        assert!(domains.values().all(|&count| count <= caps.per_domain()));
    }

    fn answer(&mut self, position: usize, answer: Answer) {
        let now = self.now;
        let action = self.under_way.swap_remove(position);
        match action {
            Action::Claim {
                member: index,
                generation,
            } => {
                if answer != Answer::Busy {
                    self.arrive(&action);
                }
                let outcome = match answer {
                    Answer::Ok => made(1),
                    Answer::Lost => failed(Failure::Unknown),
                    Answer::Busy => failed(Failure::Busy),
                    Answer::Refused => failed(Failure::Refused),
                };
                self.rollout.claimed(index, generation, outcome, now);
            }
            Action::Release {
                member: index,
                generation,
            } => {
                if matches!(answer, Answer::Ok | Answer::Lost) {
                    self.arrive(&action);
                }
                let outcome = match answer {
                    Answer::Ok => RELEASED,
                    _ => not_released(),
                };
                self.rollout.released(index, generation, outcome, now);
            }
            Action::Observe {
                member: index,
                generation,
            } => {
                let outcome = match answer {
                    Answer::Ok | Answer::Lost => Ok(Health::default()),
                    Answer::Busy | Answer::Refused => Err("no agent".to_owned()),
                };
                self.rollout.observed(index, generation, outcome, now);
            }
            Action::Check {
                member: index,
                generation,
            } => self.rollout.checked(index, generation, None, now),
            Action::RunGate { wave, gate, asked } => {
                let outcome = match answer {
                    Answer::Ok => GateAnswer::Passed,
                    _ => GateAnswer::Inconclusive("no answer".to_owned()),
                };
                self.rollout.gate_ended(wave, gate, asked, outcome, now);
            }
        }
    }

    fn apply(&mut self, event: &Event) {
        check_legality(&self.rollout, self.now);
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
            Event::Late(which) if !self.late.is_empty() => {
                let action = self.late.swap_remove(which.index(self.late.len()));
                self.arrive(&action);
            }
            Event::Late(_) => {}
            Event::Forget(which) => {
                let index = which.index(self.rollout.members().len());
                drop(self.rollout.forget(index, "alice", now));
            }
        }
        self.save();
    }

    /// Aborts, and lets every action succeed.
    fn abort_to_the_end(&mut self) {
        self.rollout.abort("alice", self.now);
        for _ in 0..1000 {
            self.perform(usize::MAX);
            while !self.under_way.is_empty() {
                self.answer(0, Answer::Ok);
            }
            self.now += 600_000;
            if matches!(self.rollout.header().phase, Phase::Ended(_)) {
                break;
            }
        }
        for action in std::mem::take(&mut self.late) {
            self.arrive(&action);
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
        observe in any::<bool>(),
        events in prop::collection::vec(event(), 0..120),
    ) {
        let on_failure = if abort { OnFailure::Abort } else { OnFailure::Pause };
        let mut policy = max_percent.map_or_else(Policy::default, |max_percent| {
            gate(WaveGateKind::Errors { max_percent, of: ErrorsOf::Wave }, on_failure)
        });
        if observe {
            let limits = AgentLimits::default();
            let kind = WaveGateKind::AgentHealth { limits, timeout_ms: 1 };
            policy.gates.push(WaveGate { kind, on_failure, interval_ms: 100, patience_ms: 1000 });
        }
        policy.caps = Caps { count, percent, per_domain };
        let rollout = started(&sizes, policy);
        let saved = (rollout.header().clone(), rollout.members().to_vec());
        let mut fleet = SimulatedFleet { rollout, saved, under_way: vec![], late: vec![], guests: BTreeMap::new(), now: 0 };
        for event in &events {
            fleet.apply(event);
            fleet.check_caps();
        }
        fleet.abort_to_the_end();
        let phase = fleet.rollout.header().phase;
        prop_assert!(matches!(phase, Phase::Ended(_)), "{phase:?}");
        for (index, guest) in &fleet.guests {
            let is_forgotten = fleet.rollout.members()[*index].state == State::Forgotten;
            prop_assert!(!guest.is_claimed || is_forgotten, "guest {} {:?}", index, guest);
        }
    }
}
