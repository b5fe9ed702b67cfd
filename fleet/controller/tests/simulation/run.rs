// SPDX-License-Identifier: Apache-2.0
//! One run: a fleet is drawn, faults happen for some time, and then everything must come to rest.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use patchbay_fleet::rollout::{
    AfterReboot, AgentLimits, Caps, Claim, ErrorsOf, Freeze, Header, KeySet, Member, Millis,
    OnFailure, Phase, Plan, Policy, Rollout, State, Want, Wave, WaveGate, WaveGateKind,
};
use patchbay_fleet::spec::Spec;
use patchbay_fleet::storage;
use patchbay_fleet::store::commit_all;

use super::driver::Driver;
use super::faults::{HOSTS, WINDOW, WORLD_FAULTS, WorldFault};
use super::guest::{Guest, KEYS};
use super::owners::CREATED;
use super::people::Deed;
use super::world::{Event, World};

const SPEC: &str =
    "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";
/// Fields that let claims end by themselves. The extra 250 ms keep the ends apart from events, also
/// at half and at twice the right speed.
const TTLS: [&str; 3] = ["ttl: 60250ms", "ttl: 400250ms", "ttl: 2000250ms"];
/// The time after which everything is at rest: the longest delay of a repeat, and of a check.
const REST: Millis = 1_000_000;
/// The time after which a person plans again.
const PLAN_RETRY: Millis = 5_000;
/// The time in which an undo ends.
const UNDO: Millis = 1_000_000;

/// The course of a run.
pub struct Ran {
    pub faults: BTreeMap<&'static str, u64>,
    pub events: Vec<String>,
    /// The promise that was broken.
    pub broken: Option<String>,
}

/// Makes the run of a seed. Ledgers lie in this folder.
pub fn run(seed: u64, folder: &Path, keeps_events: bool) -> Ran {
    let mut world = World::new(seed, keeps_events);
    let ran = catch_unwind(AssertUnwindSafe(|| {
        world.set_up(folder);
        world.play(folder);
    }));
    let broken = ran.err().map(|why| {
        let text = why.downcast_ref::<String>().cloned();
        let text = text.or_else(|| why.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        text.unwrap_or_else(|| "a panic".to_owned())
    });
    Ran {
        faults: std::mem::take(&mut world.faults),
        events: world.events.take().unwrap_or_default(),
        broken,
    }
}

impl World {
    fn set_up(&mut self, folder: &Path) {
        let guests = self.rng.usize(1..=4);
        for index in 0..guests {
            let host = HOSTS[self.rng.usize(0..2)];
            self.add_guest(&format!("g{index}"), host, folder);
        }
        if self.rng.u32(0..4) == 0 {
            let host = if self.guests[0].home == "h0" {
                "h1"
            } else {
                "h0"
            };
            self.add_guest("g0", host, folder);
            self.guests[guests].is_namesake = true;
        }
        self.register();
        self.elect();
        self.plan(0);
    }

    /// Plans a rollout in the same way as `Leadership::plan`, except that another rollout may
    /// change the same keys.
    pub fn plan(&mut self, number: usize) {
        let name = format!("r{number}");
        let is_planned = |driver: &Driver| driver.rollout.header().name == name;
        if self.leading().any(is_planned) {
            return;
        }
        let Some((term, fence, keys)) = self.leader_fence() else {
            self.schedule(PLAN_RETRY, Event::Plan(number));
            return;
        };
        let Some((header, members)) = self.draw_rollout(number) else {
            return;
        };
        let mut rollout = Rollout::new(header, members);
        let earlier = storage::header_deletion(&name);
        let mut spec = SPEC.to_owned();
        if self.rng.u32(0..4) == 0 {
            spec.push_str(TTLS[self.rng.usize(0..TTLS.len())]);
        }
        if rollout.header().policy.allow_guarded {
            spec.push_str("\nallow_guarded: true");
        }
        let writes = storage::planned(&mut rollout, &spec).expect("it is small");
        let writes = keys.signed(&rollout.header().run, writes);
        for writes in [vec![earlier], writes] {
            self.let_store_fail();
            let saved = commit_all(self.store.as_ref(), &fence, &writes);
            if self.runtime.block_on(saved).is_err() {
                self.schedule(PLAN_RETRY, Event::Plan(number));
                return;
            }
        }
        self.start_driver(term, rollout, Spec::parse(&spec).expect("a spec"));
    }

    fn add_guest(&mut self, name: &str, host: &str, folder: &Path) {
        let number = self.guests.len() as u64 + 1;
        let original = KEYS.map(|key| (key, i32::from(self.rng.u32(0..4) == 0)));
        let mut guest = Guest::boot(name, host, number, original.into(), folder);
        guest.has_watchdog = self.rng.bool();
        guest.speed = [1, 2, 2, 2, 4][self.rng.usize(0..5)];
        for key in KEYS {
            let want = match self.rng.u32(0..6) {
                0 => Want::On,
                1 if guest.original[key] == 0 => Want::Off,
                _ => continue,
            };
            guest.early.insert(key, want);
        }
        self.guests.push(guest);
        self.claim_early(self.guests.len() - 1);
    }

    /// Returns a rollout over the guests that answer; `None` if there are none. Later rollouts do
    /// not change all of them.
    fn draw_rollout(&mut self, number: usize) -> Option<(Header, Vec<Member>)> {
        let mut guests = Vec::new();
        for index in 0..self.guests.len() {
            let guest = &self.guests[index];
            let answers = !guest.is_namesake && guest.host.is_some() && guest.is_served();
            if answers && (number == 0 || self.rng.u32(0..4) > 0) {
                guests.push((index, self.boot_of(index)));
            }
        }
        if guests.is_empty() {
            return None;
        }
        let wants = [Want::On, Want::Off, Want::Held];
        let mut claims = Vec::new();
        for key in KEYS {
            if self.rng.bool() || key == KEYS[0] {
                let want = wants[self.rng.usize(0..3)];
                claims.push(Claim {
                    key: key.to_owned(),
                    want,
                });
            }
        }
        let keys = u32::try_from(claims.len()).expect("few");
        let set = Arc::new(KeySet::new(claims, vec![]));
        let member = |(index, boot): (usize, String)| {
            let guest = &self.guests[index];
            Member {
                domain: guest.home.clone(),
                plan: Plan {
                    keys,
                    sites: keys,
                    predicted_pause_us: 20,
                    left_out: vec![],
                    set: Arc::clone(&set),
                },
                boot,
                ..Member::new(&guest.home, &guest.name)
            }
        };
        let members: Vec<Member> = guests.into_iter().map(member).collect();
        let guests = members.len();
        let mut waves = Vec::new();
        let mut first = 0;
        while first < guests {
            let count = self.rng.usize(1..=guests - first);
            let bake_ms = self.rng.u64(0..60_000);
            let name = (waves.len() + 1).to_string();
            waves.push(Wave {
                name,
                first,
                count,
                bake_ms,
                ..Wave::default()
            });
            first += count;
        }
        let header = Header {
            name: format!("r{number}"),
            digest: "d".to_owned(),
            waves,
            policy: self.draw_policy(),
            created: if number == 0 { CREATED } else { self.now },
            members: guests,
            // A rollout that is planned again after an error of the store has another owner.
            run: format!("{:x}", self.rng.u64(..)),
            ..Header::default()
        };
        Some((header, members))
    }

    /// Returns a guest's boot, as a validation tells it.
    pub fn boot_of(&mut self, index: usize) -> String {
        let claims = self.guests[index].claims(&self.runtime, self.now, "");
        claims.expect("served").boot
    }

    fn draw_policy(&mut self) -> Policy {
        // A budget between them would make the run depend on the time of a pause.
        let budget_us = if self.rng.bool() { 0 } else { 60_000_000 };
        let of = match self.rng.bool() {
            true => ErrorsOf::Wave,
            false => ErrorsOf::Rollout,
        };
        let kinds = [
            WaveGateKind::Errors {
                max_percent: 30,
                of,
            },
            WaveGateKind::PauseP99 { budget_us },
            WaveGateKind::Command {
                argv: vec!["x".to_owned()],
                timeout_ms: 1_000,
            },
            WaveGateKind::AgentHealth {
                limits: AgentLimits::default(),
                timeout_ms: 1_000,
            },
        ];
        let mut gates = Vec::new();
        for kind in kinds {
            if self.rng.u32(0..4) == 0 {
                let on_failure = match self.rng.bool() {
                    true => OnFailure::Pause,
                    false => OnFailure::Abort,
                };
                gates.push(WaveGate {
                    kind,
                    on_failure,
                    interval_ms: 60_000,
                    patience_ms: [120_000, 600_000][self.rng.usize(0..2)],
                });
            }
        }
        let mut freezes = Vec::new();
        if self.rng.u32(0..4) == 0 {
            let from = self.now + self.rng.u64(0..WINDOW);
            let until = from + self.rng.u64(1..300_000);
            self.has_freezes = true;
            freezes.push(Freeze {
                from,
                until,
                reason: String::new(),
            });
        }
        let mut cap = || Some(self.rng.u32(1..3)).filter(|_| self.rng.bool());
        let caps = Caps {
            count: cap(),
            percent: None,
            per_domain: cap(),
        };
        let after_reboot = match self.rng.u32(0..4) {
            0 => AfterReboot::Leave,
            _ => AfterReboot::Again,
        };
        Policy {
            allow_guarded: self.rng.bool(),
            min_success: usize::from(self.rng.bool()),
            caps,
            gates,
            freezes,
            approvals: 1,
            after_reboot,
        }
    }

    fn play(&mut self, folder: &Path) {
        let begin = self.now;
        for number in 0..[1, 2, 2, 3][self.rng.usize(0..4)] {
            let plan = if number == 0 {
                0
            } else {
                self.rng.u64(0..WINDOW)
            };
            let start = plan + self.rng.u64(100..5_000);
            let name = format!("r{number}");
            self.schedule(plan, Event::Plan(number));
            if self.rights.is_some() {
                // Between two approvals and the start, somebody may lose the rights.
                for _ in 0..2 {
                    let at = plan + self.rng.u64(50..5_000);
                    self.schedule(at, Event::Deed(Deed::Approve, Some(name.clone())));
                    let at = plan + self.rng.u64(50..5_000);
                    self.schedule(at, Event::Fault(WorldFault::Rights));
                }
            }
            self.schedule(start, Event::Deed(Deed::Start, Some(name)));
        }
        let kinds = self.rng.u32(0..1 << WORLD_FAULTS.len());
        let most = [4, 12, 40][self.rng.usize(0..3)];
        for _ in 0..self.rng.u32(0..most) {
            let kind = self.rng.usize(0..WORLD_FAULTS.len());
            if kinds >> kind & 1 == 1 {
                let at = self.rng.u64(0..WINDOW);
                self.schedule(at, Event::Fault(WORLD_FAULTS[kind]));
            }
        }
        const DEEDS: [Deed; 17] = [
            Deed::Approve,
            Deed::Approve,
            Deed::Start,
            Deed::Pause,
            Deed::Resume,
            Deed::Resume,
            Deed::Promote,
            Deed::Abort,
            Deed::Undo,
            Deed::Forget,
            Deed::Extend,
            Deed::Extend,
            Deed::Adopt,
            Deed::Hurry,
            Deed::Hurry,
            Deed::Hold,
            Deed::Decide,
        ];
        for _ in 0..self.rng.u32(0..12) {
            let deed = DEEDS[self.rng.usize(0..DEEDS.len())];
            let at = self.rng.u64(0..WINDOW);
            self.schedule(at, Event::Deed(deed, None));
        }
        self.schedule(0, Event::HostsLook);
        self.run_until(begin + WINDOW);
        self.calm();
        self.run_until(self.now + 2);
        self.run_on();
        self.rest(REST);
        let rollouts = self.stored();
        self.check_rest(&rollouts);
        let is_started = |rollout: &&Rollout| rollout.header().phase != Phase::Planned;
        let started = rollouts.iter().filter(is_started);
        let mut names: Vec<String> = started.map(|one| one.header().name.clone()).collect();
        self.rng.shuffle(&mut names);
        for name in &names {
            self.undo(name);
        }
        if self.rng.u32(0..16) == 0 {
            for name in &names {
                self.delete(name, folder);
            }
        }
    }

    /// Undoes a rollout. Afterwards the claims of the other rollouts decide.
    fn undo(&mut self, name: &str) {
        self.act(Deed::Undo, Some(name));
        self.rest(UNDO);
        self.forget_lost();
        // The webhook gets the last events.
        self.run_until(self.now + 20_000);
        let rollouts = self.stored();
        let mut named = rollouts.iter().filter(|one| one.header().name == name);
        let rollout = named.next().expect("it is stored");
        let phase = rollout.header().phase;
        let states: Vec<&State> = rollout.members().iter().map(|one| &one.state).collect();
        assert!(
            matches!(phase, Phase::Ended(_)),
            "the undo of {name} does not end: {phase:?}, {states:?}"
        );
        self.check_rest(&rollouts);
    }

    /// Runs on for this time, and until every request has reached its host.
    fn rest(&mut self, time: Millis) {
        self.run_until(self.now + time);
        while self.under_way > 0 {
            self.run_until(self.now + time);
        }
    }

    /// Returns the rollouts that are stored, ordered by the times of their claims.
    fn stored(&mut self) -> Vec<Rollout> {
        let loaded = self.load_all().rollouts.into_iter();
        let mut rollouts: Vec<Rollout> = loaded.map(|(rollout, _)| rollout).collect();
        rollouts.sort_by_key(|rollout| rollout.header().created);
        rollouts
    }
}
