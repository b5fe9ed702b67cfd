// SPDX-License-Identifier: Apache-2.0
//! The clock, the events, and the delivery of calls. A run is a function of its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use fastrand::Rng;
use patchbay_fleet::rollout::Millis;
use patchbay_fleet::store::{Fence, Store, Transaction};
use patchbay_proto::v1::SetClaimsRequest;
use tokio::runtime::Runtime;
use tonic::Status;

use super::driver::{Driver, Input};
use super::faults::{Rates, WorldFault};
use super::guest::{CONTROLLER, Guest, Kill};
use super::hook::Hook;
use super::network::{self, Answer, Call, Network, Sent};
use super::oracle::Oracle;
use super::people::Deed;
use super::reasons::Open;
use super::records::Signing;
use super::registry::Registered;
use super::rights::Rights;
use super::store::MemoryStore;
use super::terms::Term;

/// The time after which a call without an answer ends.
const CALL_TIMEOUT: Millis = 35_000;
const LEADER: &str = "leader";

/// The fate of an answer.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    After(Millis),
    Lost,
}

pub enum Event {
    /// A driver goes on.
    Drive(u32),
    Input(u32, Input),
    Elect,
    /// A request reaches its host.
    Deliver(Sent, Reply),
    Answer(u64, Result<Answer, Status>),
    /// A service starts that was killed.
    Serve(usize),
    /// A guest arrives at a host.
    Arrive(usize, String),
    /// The hosts write into the registry what has changed.
    Register,
    HostsLook,
    /// The `patchbayd` of a host is started again.
    Return(&'static str),
    Fault(WorldFault),
    /// A person acts on the rollout with this name, or on any.
    Deed(Deed, Option<String>),
    /// A person plans the rollout with this number.
    Plan(usize),
    /// The disk of a guest's ledger has room again.
    FreeDisk(usize),
    /// A term delivers to the webhook.
    Notify(u32),
    /// A replica that runs no rollout gives up.
    Resign(u32),
    /// A term whose watch of the registry was lost lists the registry again.
    List(u32),
}

pub struct World {
    pub rng: Rng,
    pub now: Millis,
    queue: BTreeMap<(Millis, u64), Event>,
    scheduled: u64,
    pub runtime: Runtime,
    pub store: Arc<MemoryStore>,
    pub network: Network,
    /// The terms of replicas that lead, or have not noticed yet that they no longer lead.
    pub terms: BTreeMap<u32, Term>,
    pub terms_made: u32,
    pub leader: Option<u32>,
    pub drivers: BTreeMap<u32, Driver>,
    pub drivers_made: u32,
    pub guests: Vec<Guest>,
    pub rates: Rates,
    pub keys: Signing,
    pub hook: Hook,
    pub rights: Option<Rights>,
    /// The guest whose host answers with invalid data, for ever.
    pub liar: Option<usize>,
    /// A host pretends to have all guests.
    pub has_pretender: bool,
    pub registered: Registered,
    /// A rollout waits for a time of the wall clock, so that clocks must be right in the end.
    pub has_freezes: bool,
    /// The clock of a replica was set.
    pub is_clock_set: bool,
    /// No further faults happen.
    pub is_quiet: bool,
    pub oracle: Oracle,
    /// The guests that no driver can find, by rollout and name.
    pub lost: BTreeSet<(String, String)>,
    /// The drivers that wait for answers to calls.
    open: BTreeMap<u64, Open>,
    /// Requests that have not reached their hosts.
    pub under_way: usize,
    pub faults: BTreeMap<&'static str, u64>,
    /// The events so far, if they are kept.
    pub events: Option<Vec<String>>,
}

impl World {
    pub fn new(seed: u64, keeps_events: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let rates = Rates::draw(&mut rng);
        let keys = Signing::draw(&mut rng);
        let rights = Rights::draw(&mut rng);
        let hook = Hook::draw(&mut rng);
        let liar = (rng.u32(0..8) == 0).then_some(0);
        let has_pretender = rng.u32(0..4) == 0;
        let runtime = tokio::runtime::Builder::new_current_thread();
        Self {
            rng,
            now: 100_000_000,
            queue: BTreeMap::new(),
            scheduled: 0,
            runtime: { runtime }.build().expect("a runtime"),
            store: Arc::default(),
            network: Network::new(),
            terms: BTreeMap::new(),
            terms_made: 0,
            leader: None,
            drivers: BTreeMap::new(),
            drivers_made: 0,
            guests: Vec::new(),
            rates,
            keys,
            hook,
            rights,
            liar,
            has_pretender,
            registered: Registered::default(),
            has_freezes: false,
            is_clock_set: false,
            is_quiet: false,
            oracle: Oracle::default(),
            lost: BTreeSet::new(),
            open: BTreeMap::new(),
            under_way: 0,
            faults: BTreeMap::new(),
            events: keeps_events.then(Vec::new),
        }
    }

    pub fn trace(&mut self, event: impl FnOnce() -> String) {
        if let Some(events) = &mut self.events {
            events.push(format!("{:>9} {}", self.now, event()));
        }
    }

    pub fn count(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    /// Returns whether a fault with this chance in a thousand happens, and counts it.
    pub fn strikes(&mut self, fault: &'static str, rate: u32) -> bool {
        let strikes = !self.is_quiet && self.rng.u32(0..1000) < rate;
        if strikes {
            self.count(fault);
        }
        strikes
    }

    pub fn schedule(&mut self, wait: Millis, event: Event) {
        self.schedule_at(self.now + wait, event);
    }

    pub fn schedule_at(&mut self, at: Millis, event: Event) {
        // A driver that was stopped may be late.
        let at = at.max(self.now);
        self.scheduled += 1;
        self.under_way += usize::from(matches!(event, Event::Deliver(..)));
        self.queue.insert((at, self.scheduled), event);
    }

    /// Runs until this time.
    pub fn run_until(&mut self, end: Millis) {
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), event) = entry.remove_entry();
            self.now = at;
            self.happen(event);
        }
        self.now = end;
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Drive(id) => self.drive(id),
            Event::Input(id, input) => self.input(id, input),
            Event::Elect => self.elect(),
            Event::Deliver(sent, reply) => {
                self.under_way -= 1;
                self.deliver(sent, reply);
            }
            Event::Answer(call, answer) => {
                if let Some(open) = self.open.remove(&call) {
                    self.hear(&open, &answer);
                    self.network.answer(call, answer);
                    self.drive(open.driver);
                }
            }
            Event::Serve(index) => self.serve(index),
            Event::Arrive(index, host) => self.arrive(index, host),
            Event::Register => self.register(),
            Event::HostsLook => self.look_at_guests(),
            Event::Return(host) => self.host_returns(host),
            Event::Fault(fault) => self.strike(fault),
            Event::Deed(deed, rollout) => self.act(deed, rollout.as_deref()),
            Event::Plan(number) => self.plan(number),
            Event::FreeDisk(index) => self.free_disk(index),
            Event::Notify(term) => self.notify(term),
            Event::Resign(term) => self.resign(term),
            Event::List(term) => self.list_again(term),
        }
    }

    /// Gives a driver an input.
    pub fn input(&mut self, id: u32, input: Input) {
        if let Some(driver) = self.drivers.get_mut(&id) {
            driver.inbox.push_back(input);
            self.drive(id);
        }
    }

    /// Decides what becomes of the calls that a driver has sent.
    pub fn dispatch(&mut self, driver: &Driver) {
        for sent in self.network.take_sent() {
            self.check_sent(driver, &sent);
            let id = sent.id;
            let request = match &sent.call {
                Call::SetClaims(request) if !request.claims.is_empty() => Some(request.clone()),
                _ => None,
            };
            let driver = driver.id;
            self.open.insert(id, Open { driver, request });
            self.schedule(CALL_TIMEOUT, Event::Answer(id, Err(network::timed_out())));
            if self.strikes("connection refused", self.rates.refuse) {
                let wait = self.delay();
                self.schedule(wait, Event::Answer(id, Err(network::refused())));
                continue;
            }
            if self.strikes("request repeated", self.rates.repeat) {
                let wait = self.long_delay();
                self.schedule(wait, Event::Deliver(sent.clone(), Reply::Lost));
            }
            if self.strikes("request lost", self.rates.lose) {
                continue;
            }
            let reply = match self.strikes("answer lost", self.rates.lose) {
                true => Reply::Lost,
                false => Reply::After(self.delay()),
            };
            let wait = self.delay();
            self.schedule(wait, Event::Deliver(sent, reply));
        }
    }

    fn delay(&mut self) -> Millis {
        if self.strikes("message delayed for long", self.rates.delay) {
            return self.long_delay();
        }
        self.rng.u64(1..50)
    }

    pub fn long_delay(&mut self) -> Millis {
        let most = [2_000, 60_000, 1_200_000][self.rng.usize(0..3)];
        self.rng.u64(1_000..most)
    }

    fn deliver(&mut self, sent: Sent, reply: Reply) {
        let answer = match &sent.call {
            Call::SetClaims(request) => self.deliver_claims(&sent.host, request.clone()),
            Call::NotMade { guest, owner } => self.deliver_not_made(&sent.host, guest, owner),
        };
        let answer = self.distort(&sent, answer);
        self.trace(|| {
            let shown = match &answer {
                Ok(answer) => short(answer),
                Err(status) => format!("{:?} {}", status.code(), status.message()),
            };
            let call = match &sent.call {
                Call::SetClaims(request) => format!(
                    "{} claims of {} in generation {}",
                    request.claims.len(),
                    request.guest,
                    request.generation
                ),
                Call::NotMade { guest, .. } => format!("claims of {guest}"),
            };
            format!(
                "{} gets call {}, {call}: {shown}; reply {reply:?}",
                sent.host, sent.id
            )
        });
        if let Reply::After(wait) = reply {
            self.schedule(wait, Event::Answer(sent.id, answer));
        }
    }

    fn find(&mut self, host: &str, name: &str) -> Result<usize, Status> {
        if self.registered.gone.contains(host) {
            return Err(network::refused());
        }
        let mut guests = self.guests.iter();
        let found =
            guests.position(|guest| guest.host.as_deref() == Some(host) && guest.name == name);
        let index = found.ok_or_else(|| network::not_found(name))?;
        match self.guests[index].is_served() {
            true => Ok(index),
            false => Err(Status::unavailable("the monitor does not listen")),
        }
    }

    fn deliver_claims(&mut self, host: &str, request: SetClaimsRequest) -> Result<Answer, Status> {
        let index = self.find(host, &request.guest)?;
        let is_busy = self.strikes("guest busy", self.rates.busy);
        let mut kill = Kill::Never;
        if self.strikes("service killed in a call", self.rates.kill_service) {
            let kills = [Kill::BeforeChange, Kill::AfterChange, Kill::BeforeAnswer];
            kill = kills[self.rng.usize(0..3)];
            // The service of a copy lives as long as the copy.
            if self.guests[index].snapshot.is_some() {
                kill = Kill::Never;
            }
            let wait = self.rng.u64(500..20_000);
            self.schedule(wait, Event::Serve(index));
            self.register_soon();
        }
        let guest = &mut self.guests[index];
        // Claims may end now.
        guest.show(&self.runtime, self.now);
        guest.may_end(&request, self.now);
        let (before, pauses) = (guest.counts(), guest.vm.pauses());
        let (runtime, now) = (&self.runtime, self.now);
        let answer = guest.set_claims(runtime, now, CONTROLLER, request.clone(), is_busy, kill);
        let pauses = guest.vm.pauses() - pauses;
        self.check_delivered(index, &request, &before, pauses, kill, answer.as_ref().ok());
        answer.map(|answer| Answer::SetClaims(Box::new(answer)))
    }

    fn deliver_not_made(&mut self, host: &str, guest: &str, owner: &str) -> Result<Answer, Status> {
        let index = self.find(host, guest)?;
        let page = self.guests[index].not_made(&self.runtime, self.now, owner)?;
        self.check_not_made(index, owner, &page);
        Ok(Answer::NotMade(page))
    }

    fn serve(&mut self, index: usize) {
        let guest = &mut self.guests[index];
        if guest.host.is_some() && !guest.is_served() {
            guest.start(self.now);
            self.claim_early(index);
            self.trace(|| format!("guest {index} is served again"));
            self.register_soon();
        }
    }

    fn arrive(&mut self, index: usize, host: String) {
        if self.guests[index].host.is_none() {
            self.trace(|| format!("guest {index} arrives at {host}"));
            self.guests[index].host = Some(host);
            self.serve(index);
            self.register_soon();
        }
    }

    /// Deletes the leader's key and creates it again, so that fences of earlier leaders fail.
    pub fn new_fence(&mut self) -> Fence {
        let delete = Transaction::new().delete(LEADER);
        let put = Transaction::new().put(LEADER, "replica");
        let commits = async {
            self.store.commit(delete).await?;
            self.store.commit(put).await
        };
        let created = self
            .runtime
            .block_on(commits)
            .expect("the store is reached");
        Fence {
            key: LEADER.to_owned(),
            created,
        }
    }

    /// Ends all faults: what was stopped, killed or moving goes on.
    pub fn calm(&mut self) {
        self.is_quiet = true;
        self.trace(|| "the faults end".to_owned());
        self.change_rights();
        for host in std::mem::take(&mut self.registered.gone) {
            self.host_returns(host);
        }
        for index in 0..self.guests.len() {
            self.free_disk(index);
            if self.guests[index].host.is_none() {
                let host = self.guests[index].home.clone();
                self.arrive(index, host);
            }
            self.serve(index);
        }
        let terms: Vec<u32> = self.terms.keys().copied().collect();
        for term in terms {
            self.list_again(term);
        }
        for term in self.terms.values_mut() {
            term.stopped_until = term.stopped_until.min(self.now);
            if self.has_freezes {
                term.clock = 0;
            }
        }
        // The drivers step, by the clocks as they are now.
        let drivers: Vec<u32> = self.leading().map(|driver| driver.id).collect();
        for driver in drivers {
            self.input(driver, Input::Look);
        }
        self.notify_again();
        let stopped: Vec<u32> = self.drivers.keys().copied().collect();
        for id in stopped {
            self.schedule(1, Event::Drive(id));
        }
        match self.leader {
            None => self.elect(),
            Some(term) if self.is_blind() => self.resign(term),
            Some(_) => {}
        }
    }
}

fn short(answer: &Answer) -> String {
    match answer {
        Answer::NotMade(answer) => {
            // The rest of the name of a copy's boot is random.
            let boot: String = answer.boot.chars().take(16).collect();
            let claims = answer.claims.iter();
            let claims = claims.map(|one| format!("{} {:?}", one.key, one.state()));
            let claims: Vec<String> = claims.collect();
            format!("boot {boot}, {} claims, not made: {claims:?}", answer.total)
        }
        Answer::SetClaims(answer) => {
            let results = answer.results.iter();
            let results = results.map(|one| {
                let (before, after) = (one.count_before, one.count_after);
                format!("{} {:?} {before} to {after}", one.key, one.state())
            });
            let results: Vec<String> = results.collect();
            let repeated = if answer.repeated { ", repeated" } else { "" };
            format!("boot {}, {}{repeated}", answer.boot, results.join(", "))
        }
    }
}

/// Returns a folder in memory, if this machine has one.
pub fn folder() -> tempfile::TempDir {
    let shared = Path::new("/dev/shm");
    match shared.is_dir() {
        true => tempfile::tempdir_in(shared),
        false => tempfile::tempdir(),
    }
    .expect("a temporary folder")
}
