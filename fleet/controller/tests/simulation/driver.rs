// SPDX-License-Identifier: Apache-2.0
//! A driver of the rollout: step, save, send. It can be killed or stopped between any two of them,
//! as `runner::Running::run` can.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use patchbay_fleet::clock::TOLERANCE;
use patchbay_fleet::hosts::Following;
use patchbay_fleet::plan::Asks;
use patchbay_fleet::rollout::{Action, GateAnswer, Health, Millis, NotLegal, Rollout};
use patchbay_fleet::runner::guests::{Answered, Outcome, check, claim, release};
use patchbay_fleet::runner::{Command, wait};
use patchbay_fleet::spec::Spec;
use patchbay_fleet::storage;
use patchbay_fleet::store::{StoreError, Write, commit_all};

use super::reasons::{self, Fact};
use super::registry::{Changes, Told};
use super::store::Fault;
use super::terms::Term;
use super::waves::{Answer, Asked, check_jump};
use super::world::{Event, World};

/// The time between two attempts to reach the store.
const STORE_RETRY: Millis = 500;

type Task = Pin<Box<dyn Future<Output = Outcome> + Send>>;

pub enum Input {
    /// An outcome, and the right time at which it was known.
    Outcome(Outcome, Millis),
    /// A command of a person.
    Command(Command, &'static str),
    /// The registry has changed.
    Look,
}

pub enum Stage {
    Idle,
    /// The step was made at this time, and is not saved.
    Stepped {
        actions: Vec<Action>,
        at: Millis,
    },
    /// The store did not answer, so the writes are made again.
    Saving {
        actions: Vec<Action>,
        at: Millis,
        writes: Vec<Write>,
    },
    Sending {
        actions: VecDeque<Action>,
    },
}

pub struct Driver {
    pub id: u32,
    pub term: u32,
    pub rollout: Rollout,
    pub spec: Spec,
    asks: Arc<Asks>,
    pub stage: Stage,
    pub inbox: VecDeque<Input>,
    tasks: Vec<Task>,
    /// The members and generations of calls whose outcomes are not reported yet, and the number of
    /// these calls.
    pub calls: BTreeMap<(usize, u64), usize>,
    /// The answers of guests to claims, by guest and generation, whose outcomes are not reported.
    pub answers: BTreeMap<(String, u64), reasons::Told>,
    /// The facts that the latest step has used.
    pub facts: Vec<Fact>,
    /// The changes of the registry as production's code tells them.
    pub following: Following,
    /// The same changes as the world knows them.
    pub told: Told,
    /// The commands whose effects are not saved yet.
    pub replies: Vec<(Command, Result<(), NotLegal>)>,
    /// The latest answers to the gates, by wave and gate.
    pub gates: BTreeMap<(usize, usize), Asked>,
    /// The right time at which it steps again.
    wake_at: Option<Millis>,
    /// The difference of its clock from the right time when it read the clock last.
    pub clock: i64,
    /// The number of the latest entry of the timeline that is in the store.
    pub saved_entries: u64,
}

impl Driver {
    fn new(id: u32, term: u32, of: &Term, rollout: Rollout, spec: Spec) -> Self {
        Self {
            clock: of.clock,
            calls: BTreeMap::new(),
            answers: BTreeMap::new(),
            facts: Vec::new(),
            following: Following::new(&of.network.hosts),
            told: Told::default(),
            saved_entries: rollout.header().entries,
            id,
            term,
            asks: Arc::new(Asks::new(rollout.header(), &spec)),
            rollout,
            spec,
            stage: Stage::Idle,
            inbox: VecDeque::new(),
            tasks: Vec::new(),
            replies: Vec::new(),
            gates: BTreeMap::new(),
            wake_at: Some(0),
        }
    }

    /// Reports a jump of the clock to the rollout, as `Running::follow` does. It is not called
    /// between a step and its save, whose times are those of one clock.
    fn follow(&mut self, clock: i64) {
        let by = clock - std::mem::replace(&mut self.clock, clock);
        if by.abs() > TOLERANCE {
            let before = self.rollout.clone();
            self.rollout.clock_jumped(by);
            check_jump(&before, &self.rollout, by);
        }
    }

    /// Runs the calls as far as their answers allow.
    fn poll(&mut self, now: Millis) {
        let mut context = Context::from_waker(Waker::noop());
        let inbox = &mut self.inbox;
        self.tasks
            .retain_mut(|task| match task.as_mut().poll(&mut context) {
                Poll::Ready(outcome) => {
                    inbox.push_back(Input::Outcome(outcome, now));
                    false
                }
                Poll::Pending => true,
            });
    }

    /// Reports an outcome with the time at which it was known, as `Running::report` does.
    fn report(&mut self, outcome: Outcome, at: Millis) {
        self.note(&outcome);
        if let Some(call) = call_of(&outcome)
            && let Some(count) = self.calls.get_mut(&call)
        {
            *count -= 1;
            if *count == 0 {
                self.calls.remove(&call);
            }
        }
        let at = at.saturating_add_signed(self.clock);
        outcome.report(&mut self.rollout, at);
    }

    /// Takes the inputs that go into one step, at this right time. Returns the guests that have
    /// changed in the registry, if they are among the inputs.
    fn take_inputs(&mut self, right: Millis) -> Changes {
        let now = right.saturating_add_signed(self.clock);
        self.facts.clear();
        let Some(first) = self.inbox.pop_front() else {
            return Changes::default();
        };
        match first {
            Input::Outcome(outcome, at) => {
                self.report(outcome, at);
                while let Some(Input::Outcome(..)) = self.inbox.front() {
                    if let Some(Input::Outcome(outcome, at)) = self.inbox.pop_front() {
                        self.report(outcome, at);
                    }
                }
            }
            Input::Command(command, person) => {
                let result = command
                    .clone()
                    .apply(&mut self.rollout, &self.spec, person, now);
                self.replies.push((command, result));
            }
            Input::Look => {
                // Without a change, `Running::run` does not look.
                if self.following.has_changed() {
                    let news = self.following.take();
                    self.rollout.look_again(&news);
                }
                return self.told.take(right);
            }
        }
        Changes::default()
    }
}

/// Returns the member and the generation of a call that has this outcome.
fn call_of(outcome: &Outcome) -> Option<(usize, u64)> {
    match outcome {
        Outcome::Claim(of) => Some((of.member, of.generation)),
        Outcome::Release(of) => Some((of.member, of.generation)),
        Outcome::Checked(of) => Some((of.member, of.generation)),
        Outcome::Observed {
            member, generation, ..
        } => Some((*member, *generation)),
        Outcome::Gate { .. } => None,
    }
}

impl World {
    /// Lets a driver go on by one part of its loop.
    pub fn drive(&mut self, id: u32) {
        let Some(mut driver) = self.drivers.remove(&id) else {
            return;
        };
        let term = &self.terms[&driver.term];
        let stopped_until = term.stopped_until;
        if self.now < stopped_until {
            self.drivers.insert(id, driver);
            return;
        }
        if term.ends_at.is_some_and(|at| at <= self.now) {
            self.trace(|| format!("term {} has lost its lease and ends", driver.term));
            self.end_term(driver.term);
            return;
        }
        driver.poll(self.now);
        self.dispatch(&driver);
        let is_idle = matches!(driver.stage, Stage::Idle);
        let is_due = driver.wake_at.is_some_and(|at| at <= self.now);
        if is_idle && driver.inbox.is_empty() && !is_due {
            self.drivers.insert(id, driver);
            return;
        }
        if self.is_hit(&driver) {
            return;
        }
        let stopped_until = self.terms[&driver.term].stopped_until;
        if self.now >= stopped_until && !self.proceed(&mut driver) {
            self.end_term(driver.term);
            return;
        }
        let at = match driver.stage {
            Stage::Idle if driver.inbox.is_empty() => driver.wake_at,
            Stage::Saving { .. } => Some(self.now + STORE_RETRY),
            _ => Some(self.now),
        };
        if let Some(at) = at {
            self.schedule_at(at.max(stopped_until), Event::Drive(id));
        }
        self.drivers.insert(id, driver);
    }

    /// Makes the next part of the loop. Returns false if the driver ends.
    fn proceed(&mut self, driver: &mut Driver) -> bool {
        if matches!(driver.stage, Stage::Idle) {
            driver.follow(self.terms[&driver.term].clock);
        }
        let now = self.now.saturating_add_signed(driver.clock);
        driver.stage = match std::mem::replace(&mut driver.stage, Stage::Idle) {
            Stage::Idle => {
                let changed = driver.take_inputs(self.now);
                self.learn(driver);
                let step = driver.rollout.step(now);
                self.check_look(driver, &changed, &step, now);
                // A wait is measured by the monotonic clock.
                driver.wake_at = step.wake_at.map(|at| self.now + wait(at, now));
                Stage::Stepped {
                    actions: step.actions,
                    at: now,
                }
            }
            Stage::Stepped { actions, at } => {
                let writes = storage::changed(&mut driver.rollout);
                let run = &driver.rollout.header().run;
                let writes = self.terms[&driver.term].keys.signed(run, writes);
                return self.save(driver, actions, at, writes);
            }
            Stage::Saving {
                actions,
                at,
                writes,
            } => {
                return self.save(driver, actions, at, writes);
            }
            Stage::Sending { mut actions } => match actions.pop_front() {
                Some(action) => {
                    self.perform(driver, action);
                    driver.poll(self.now);
                    self.dispatch(driver);
                    Stage::Sending { actions }
                }
                None => Stage::Idle,
            },
        };
        true
    }

    fn save(
        &mut self,
        driver: &mut Driver,
        actions: Vec<Action>,
        at: Millis,
        writes: Vec<Write>,
    ) -> bool {
        if !writes.is_empty() {
            self.let_store_fail();
            let saved = commit_all(
                self.store.as_ref(),
                &self.terms[&driver.term].fence,
                &writes,
            );
            match self.runtime.block_on(saved) {
                Ok(()) => {
                    driver.saved_entries = driver.rollout.header().entries;
                    self.check_saved(driver, at);
                    self.notify_soon(driver.term);
                }
                Err(StoreError::Unavailable(_)) => {
                    driver.stage = Stage::Saving {
                        actions,
                        at,
                        writes,
                    };
                    return true;
                }
                Err(error) => {
                    self.count("save of a deposed controller refused");
                    self.trace(|| format!("term {} ends: {error}", driver.term));
                    return false;
                }
            }
        }
        for (command, result) in driver.replies.drain(..) {
            self.trace(|| format!("{command:?} is answered: {result:?}"));
            if result.is_ok() {
                self.oracle.answered(&driver.rollout, &command);
            }
        }
        driver.stage = Stage::Sending {
            actions: actions.into(),
        };
        true
    }

    /// Lets the next commit fail at random, with a known or an unknown outcome.
    pub fn let_store_fail(&mut self) {
        if self.strikes("store not reached", self.rates.store) {
            let fault = match self.rng.bool() {
                true => Fault::Applied,
                false => Fault::NotApplied,
            };
            self.store.fail(fault);
        }
    }

    fn perform(&mut self, driver: &mut Driver, action: Action) {
        self.trace(|| format!("driver {} performs {action:?}", driver.id));
        self.check_action(&driver.rollout, &action);
        let (asks, network) = (
            Arc::clone(&driver.asks),
            self.terms[&driver.term].network.clone(),
        );
        if let Action::Claim { member, generation }
        | Action::Release { member, generation }
        | Action::Check { member, generation }
        | Action::Observe { member, generation } = action
        {
            *driver.calls.entry((member, generation)).or_default() += 1;
        }
        let member = |index: usize| driver.rollout.members()[index].clone();
        match action {
            Action::Claim {
                member: index,
                generation,
            } => {
                let member = member(index);
                driver.tasks.push(Box::pin(async move {
                    let (outcome, moved) = claim(&network, &asks, &member, generation).await;
                    Outcome::Claim(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::Release {
                member: index,
                generation,
            } => {
                let member = member(index);
                driver.tasks.push(Box::pin(async move {
                    let (outcome, moved) = release(&network, &asks, &member, generation).await;
                    Outcome::Release(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::Check {
                member: index,
                generation,
            } => {
                let member = member(index);
                driver.tasks.push(Box::pin(async move {
                    let (outcome, moved) = check(&network, &asks.owner, &member).await;
                    Outcome::Checked(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::Observe { member, generation } => {
                let health = match self.strikes("agent does not report", self.rates.gate) {
                    true => Err("no report".to_owned()),
                    false => Ok(Health::default()),
                };
                let outcome = Outcome::Observed {
                    member,
                    generation,
                    health,
                };
                self.hand_in(driver.id, outcome);
            }
            Action::RunGate { wave, gate, asked } => {
                let (known, answer) = match self.strikes("gate failed", self.rates.gate) {
                    true => (Answer::Failed, GateAnswer::Failed("closed".to_owned())),
                    false if self.strikes("gate inconclusive", self.rates.unclear) => {
                        let why = "no answer".to_owned();
                        (Answer::Inconclusive, GateAnswer::Inconclusive(why))
                    }
                    false => (Answer::Passed, GateAnswer::Passed),
                };
                let at = asked.saturating_add_signed(-driver.clock);
                self.asked(driver, (wave, gate), at, known);
                let outcome = Outcome::Gate {
                    wave,
                    gate,
                    asked,
                    answer,
                };
                self.hand_in(driver.id, outcome);
            }
        }
    }

    /// Lets a driver get an outcome after a short time.
    fn hand_in(&mut self, driver: u32, outcome: Outcome) {
        let wait = self.rng.u64(1..2_000);
        let input = Input::Outcome(outcome, self.now + wait);
        self.schedule(wait, Event::Input(driver, input));
    }

    /// Lets a term run a rollout.
    pub fn start_driver(&mut self, term: u32, rollout: Rollout, spec: Spec) {
        let id = self.drivers_made;
        self.drivers_made += 1;
        self.trace(|| {
            let header = rollout.header();
            format!(
                "driver {id} runs {}, which is {:?}",
                header.name, header.phase
            )
        });
        let driver = Driver::new(id, term, &self.terms[&term], rollout, spec);
        self.drivers.insert(id, driver);
        self.schedule(0, Event::Drive(id));
    }
}
