// SPDX-License-Identifier: Apache-2.0
//! A guest in memory with the real service code, which a fault can kill at any write of its ledger.

mod boots;
mod ledger;
mod module;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use patchbay_fleet::rollout::{Millis, Want};
use patchbay_guest::guest::Guest as _;
use patchbay_guest::testing::{InMemoryGuest, TestKey, Told};
use patchbay_proto::v1;
use patchbay_service::keys::claims::{CopiedHolds, LedgerFile, Mark};
use patchbay_service::keys::{KernelTables, Keys, KeysConfig, Registry};
use patchbay_service::testing::{ManualClock, found, list_claims, set_claims};
use tokio::runtime::Runtime;
use tonic::{Request, Status};

use self::boots::Saved;
pub use self::module::MODULE_KEY;
use self::module::Requests;
use super::copies::Snapshot;

/// The keys of every guest.
pub const KEYS: [&str; 3] = ["alpha", "beta", MODULE_KEY];
/// The principal of the controllers' calls.
pub const CONTROLLER: &str = "controller";

/// The treatment of a key by the guest's kernel and its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// Changed only with the consent of the service and of the caller.
    Guarded,
    /// Read-only since the kernel has booted.
    Sealed,
    /// The kernel has no such key, or its module is not loaded.
    Missing,
}

/// The time at which the service is killed during a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    Never,
    /// The change is announced in the ledger, and no byte of the guest is changed.
    BeforeChange,
    /// The guest is changed, and the outcome is not in the ledger.
    AfterChange,
    /// The outcome is in the ledger, and no answer is sent.
    BeforeAnswer,
}

/// The contents of the ledger during the latest pause.
#[derive(Default)]
struct Copies {
    is_armed: bool,
    path: PathBuf,
    at_pause: Option<Vec<u8>>,
    at_resume: Option<Vec<u8>>,
}

struct Service {
    keys: Keys,
    registry: Arc<Registry>,
    thread: JoinHandle<()>,
}

pub struct Guest {
    pub name: String,
    /// The host that has it; `None` while it moves.
    pub host: Option<String>,
    /// The host that has it, or will.
    pub home: String,
    /// All hosts that have had it, or will.
    pub homes: BTreeSet<String>,
    /// Another guest of the same name as one of the rollout's, or a copy. No rollout selects it.
    pub is_namesake: bool,
    /// The state from which a copy was started; `None` for a guest that has booted.
    pub snapshot: Option<Snapshot>,
    /// The holds and claims of a copy that is about to start.
    pub copied: Option<CopiedHolds>,
    /// A watchdog marks the fate of a change in which the service is killed.
    pub has_watchdog: bool,
    pub vm: Arc<InMemoryGuest>,
    requests: Arc<Requests>,
    /// The number of times that the guest has changed a key, or loaded or unloaded the module.
    pub own_changes: u64,
    /// The number of times that the module was loaded.
    pub loads: u32,
    /// The number of those that no boot caused.
    pub reloads: u32,
    /// The keys that are not plain in the kernel that runs.
    pub kinds: BTreeMap<&'static str, Kind>,
    /// The service consents to changes of guarded keys.
    pub allows_guarded: bool,
    /// The counts of the keys at boot.
    pub original: BTreeMap<&'static str, i32>,
    /// The number of boots. Setting the guest back to an earlier boot counts as one.
    pub boots: u32,
    /// The number that identifies the boot.
    boot: u64,
    /// The state of a snapshot, to which the guest may be set back.
    saved: Option<Saved>,
    /// The boot in which the early claims were made last.
    pub claimed_in: u32,
    /// The keys that the guest has changed since it booted.
    pub changed: BTreeSet<&'static str>,
    /// The ON and OFF claims that another owner makes as soon as the guest has booted.
    pub early: BTreeMap<&'static str, Want>,
    /// The claims of other owners, by owner.
    pub others: BTreeMap<&'static str, BTreeMap<&'static str, Want>>,
    /// The times at which claims end by themselves, by owner.
    pub ends: BTreeMap<String, Ends>,
    /// The speed of the service's clock, in halves.
    pub speed: u64,
    /// The disk of the ledger is full.
    pub is_full: bool,
    /// The owners whose claims were lost with the ledger in this boot, if it was lost. Nothing can
    /// return their keys.
    pub orphans: Option<BTreeSet<String>>,
    /// The ledger in the file to which it was exported, and the boot in which this was done.
    exported: Option<(u32, Vec<u8>)>,
    /// The number of boots, and of ledgers lost or replaced by an earlier one. The service may
    /// remember nothing of an earlier one.
    pub epoch: u32,
    /// The latest generation of the other owners' claims.
    pub generation: u64,
    number: u64,
    tables: KernelTables,
    service: Option<Service>,
    clock: Arc<ManualClock>,
    shown: Millis,
    /// The service has handled everything that is due at the time that its clock shows.
    is_settled: bool,
    copies: Arc<Mutex<Copies>>,
}

/// The times between which the claims of an owner end by themselves.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    ttl: Millis,
    earliest: Millis,
    latest: Millis,
}

/// The inaccuracy of those times.
const TICK: Millis = 1_000;

/// The reported time for which a change stops a guest, if it does.
const PAUSE_NANOS: i32 = 20_000;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the right time that passes while a clock of this speed, in halves, advances by `ttl`.
fn in_time(ttl: Millis, speed: u64) -> Millis {
    ttl * 2 / speed
}

impl Guest {
    /// Boots a guest whose service keeps its ledger in this folder.
    pub fn boot(
        name: &str,
        host: &str,
        number: u64,
        original: BTreeMap<&'static str, i32>,
        folder: &Path,
    ) -> Self {
        let mut guest = Self::off(
            name,
            host,
            number,
            number << 16,
            BTreeMap::new(),
            original,
            folder,
        );
        guest.load_module();
        guest.start(0);
        guest
    }

    /// Returns a guest with the kernel of this one in the same boot. No service runs.
    pub fn twin(&self, name: &str, host: &str, number: u64) -> Self {
        // The boot advances when the kernel registers.
        let boot = self.boot - 1;
        let path = locked(&self.copies).path.clone();
        let folder = path.parent().expect("it lies in a folder");
        let (kinds, original) = (self.kinds.clone(), self.original.clone());
        let mut twin = Self::off(name, host, number, boot, kinds, original, folder);
        twin.is_namesake = true;
        if self.kind(MODULE_KEY) != Kind::Missing {
            // The module of the twin has the same place.
            (0..self.loads).for_each(|_| twin.load_module());
        }
        (twin.boots, twin.claimed_in) = (self.boots, self.boots);
        twin.allows_guarded = self.allows_guarded;
        twin.speed = self.speed;
        twin
    }

    fn off(
        name: &str,
        host: &str,
        number: u64,
        boot: u64,
        kinds: BTreeMap<&'static str, Kind>,
        original: BTreeMap<&'static str, i32>,
        folder: &Path,
    ) -> Self {
        let requests = Arc::<Requests>::default();
        let vm = InMemoryGuest::named(Arc::clone(&requests), name);
        vm.set_boot(boot);
        vm.run(&keys(&original, &kinds));
        let copies = Arc::new(Mutex::new(Copies {
            path: folder.join(format!("{number}.ledger")),
            ..Copies::default()
        }));
        let at = Arc::clone(&copies);
        vm.on_pause(move || locked(&at).copy(|copies| &mut copies.at_pause));
        let at = Arc::clone(&copies);
        vm.on_resume(move || locked(&at).copy(|copies| &mut copies.at_resume));
        let _ = std::fs::remove_file(&locked(&copies).path);
        let mut guest = Self {
            name: name.to_owned(),
            number,
            homes: BTreeSet::from([host.to_owned()]),
            snapshot: None,
            copied: None,
            has_watchdog: false,
            host: Some(host.to_owned()),
            home: host.to_owned(),
            is_namesake: false,
            tables: found(&vm),
            vm,
            requests,
            own_changes: 0,
            loads: 0,
            reloads: 0,
            kinds,
            allows_guarded: number % 2 == 0,
            original,
            boots: 1,
            boot: boot + 1,
            saved: None,
            claimed_in: 0,
            changed: BTreeSet::new(),
            early: BTreeMap::new(),
            others: BTreeMap::new(),
            ends: BTreeMap::new(),
            speed: 2,
            is_full: false,
            orphans: None,
            exported: None,
            epoch: 1,
            generation: 0,
            service: None,
            clock: ManualClock::new(),
            shown: 0,
            is_settled: false,
            copies,
        };
        // An earlier seed that ended early leaves a full disk.
        guest.fill_disk(false);
        guest
    }

    /// Returns the service, if it runs.
    pub fn service(&self) -> Option<&Keys> {
        self.service.as_ref().map(|service| &service.keys)
    }

    /// Starts the service, which adopts the ledger of the one before it.
    pub fn start(&mut self, now: Millis) {
        if self.service.is_some() {
            return;
        }
        // The ledger has the host's wall clock, which the simulation does not advance: it is as if
        // that clock was set back by the time since the claims were made.
        self.clock = ManualClock::new();
        self.shown = now / TICK * TICK;
        self.is_settled = false;
        let speed = self.speed;
        for ends in self.ends.values_mut() {
            ends.latest = ends.latest.max(now + in_time(ends.ttl, speed));
        }
        let registry = Arc::new(Registry::default());
        registry.attach(self.vm.ram().clone());
        registry
            .register_kernel(self.tables.clone())
            .expect("taken");
        *locked(&self.requests.0) = Some(Arc::clone(&registry));
        self.register_module();
        let ledger = LedgerFile::open(&locked(&self.copies).path, "monitor").expect("opens");
        let config = KeysConfig {
            // The service of a copy lives as long as the copy.
            ledger: Some(ledger).filter(|_| self.snapshot.is_none()),
            is_copy: self.snapshot.is_some(),
            copied: self.copied.take(),
            clock: Arc::<ManualClock>::clone(&self.clock),
            allow_guarded: self.allows_guarded,
            ..KeysConfig::default()
        };
        let vm = Arc::clone(&self.vm);
        let (keys, thread) = Keys::start(vm, Arc::clone(&registry), config).expect("a thread");
        self.service = Some(Service {
            keys,
            registry,
            thread,
        });
    }

    /// Ends the service.
    pub fn stop(&mut self) {
        if let Some(service) = self.service.take() {
            *locked(&self.requests.0) = None;
            drop(service.keys);
            service.thread.join().expect("the executor does not panic");
        }
    }

    pub fn is_served(&self) -> bool {
        self.service.is_some()
    }

    /// Changes a key as the guest's own code does.
    pub fn change(&mut self, key: &'static str, count: i32) {
        self.vm.set_count(key, count);
        self.own_changes += 1;
        self.changed.insert(key);
    }

    pub fn kind(&self, key: &str) -> Kind {
        self.kinds.get(key).copied().unwrap_or(Kind::Plain)
    }

    /// Returns whether a claim on the key can be made, with the caller's consent to guarded keys or
    /// without it.
    pub fn can_have(&self, key: &str, consents: bool) -> bool {
        match self.kind(key) {
            Kind::Plain => true,
            Kind::Guarded => self.allows_guarded && consents,
            Kind::Sealed | Kind::Missing => false,
        }
    }

    /// Returns the counts of the keys that the kernel has.
    pub fn counts(&self) -> BTreeMap<&'static str, i32> {
        let keys = KEYS.into_iter();
        let present = keys.filter(|key| self.kind(key) != Kind::Missing);
        present.map(|key| (key, self.vm.count(key))).collect()
    }

    /// Records a call that may have made claims with a time to live.
    pub fn may_end(&mut self, request: &v1::SetClaimsRequest, now: Millis) {
        let Some(ttl) = &request.ttl else {
            return;
        };
        let ttl = super::waves::millis(ttl);
        let at = now + in_time(ttl, self.speed);
        let ends = self.ends.entry(request.owner.clone()).or_insert(Ends {
            ttl,
            earliest: at,
            latest: at,
        });
        ends.latest = ends.latest.max(at);
        ends.earliest = ends.earliest.min(at);
    }

    /// Returns whether the claims of an owner have ended by themselves; `None` if it is not
    /// certain.
    pub fn has_ended(&self, owner: &str, now: Millis) -> Option<bool> {
        let Some(ends) = self.ends.get(owner) else {
            return Some(false);
        };
        let margin = 3 * in_time(TICK, self.speed);
        match now {
            _ if now > ends.latest + margin => Some(true),
            _ if now + margin < ends.earliest => Some(false),
            _ => None,
        }
    }

    /// Sets the service's clock, which shows whole seconds, so that the ends of claims do not
    /// depend on the duration of a call.
    pub fn show(&mut self, runtime: &Runtime, now: Millis) {
        let shown = now / TICK * TICK;
        if self.is_settled && shown == self.shown {
            return;
        }
        let by = (shown - self.shown) * self.speed / 2;
        self.clock.advance(Duration::from_millis(by));
        self.shown = shown;
        if let Some(service) = &self.service {
            runtime.block_on(service.keys.tick()).expect("it runs");
            self.is_settled = true;
        }
    }

    /// Makes a call to the service, which must run. `in_no_time` gives it no time for the change.
    pub fn set_claims(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        principal: &str,
        request: v1::SetClaimsRequest,
        in_no_time: bool,
        kill: Kill,
    ) -> Result<v1::SetClaimsResponse, Status> {
        self.show(runtime, now);
        let before = self.counts();
        {
            let mut copies = locked(&self.copies);
            copies.is_armed = kill != Kill::Never;
            (copies.at_pause, copies.at_resume) = (None, None);
        }
        self.vm.told();
        let mut request = Request::new(request);
        if in_no_time {
            let time = "0n".parse().expect("a value");
            request.metadata_mut().insert("grpc-timeout", time);
        }
        self.is_settled = false;
        let service = self.service.as_ref().expect("it runs");
        let mut answer = runtime.block_on(set_claims(&service.keys, request, principal));
        if kill == Kill::Never {
            // The measured times would differ from run to run of one seed.
            if let Ok(v1::SetClaimsResponse {
                report: Some(report),
                ..
            }) = &mut answer
                && report.paused
            {
                report.stop_time = Some(prost_types::Duration {
                    seconds: 0,
                    nanos: PAUSE_NANOS,
                });
                (report.patch_time, report.resume_time) = (None, None);
            }
            return answer;
        }
        self.stop();
        let mut copies = locked(&self.copies);
        let (at_pause, at_resume) = (copies.at_pause.take(), copies.at_resume.take());
        let ledger = match kill {
            Kill::BeforeChange => at_pause,
            Kill::AfterChange => at_resume,
            Kill::Never | Kill::BeforeAnswer => None,
        };
        if let Some(ledger) = ledger {
            std::fs::write(&copies.path, ledger).expect("room");
            if kill == Kill::BeforeChange {
                for (key, count) in before {
                    self.vm.set_count(key, count);
                }
            }
            if self.has_watchdog {
                mark(&self.vm.told(), kill == Kill::AfterChange, &copies.path);
            }
        }
        Err(Status::unavailable("the connection ended"))
    }

    /// Returns the claims of an owner, and the guest's boot. The service must run.
    pub fn claims(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        owner: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        self.list(runtime, now, owner, false)
    }

    /// Returns the number of claims of an owner, those that are not made, and the guest's boot. The
    /// service must run.
    pub fn not_made(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        owner: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        self.list(runtime, now, owner, true)
    }

    fn list(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        owner: &str,
        not_made: bool,
    ) -> Result<v1::ListClaimsResponse, Status> {
        self.show(runtime, now);
        let service = self.service.as_ref().expect("it runs");
        let request = v1::ListClaimsRequest {
            owner: owner.to_owned(),
            not_made,
            ..v1::ListClaimsRequest::default()
        };
        runtime.block_on(list_claims(&service.keys, request))
    }
}

impl Copies {
    fn copy(&mut self, to: fn(&mut Self) -> &mut Option<Vec<u8>>) {
        if self.is_armed {
            let bytes = std::fs::read(&self.path).ok();
            *to(self) = bytes;
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Marks the fate of the change that the service has announced last, as an attacher's watchdog
/// does.
fn mark(told: &[Told], made: bool, ledger: &Path) {
    let announced = told.iter().rev().find_map(|told| match told {
        Told::WillWrite(ledger) => *ledger,
        Told::WillWriteRunning(ledger) => Some(*ledger),
        _ => None,
    });
    if let Some(digest) = announced {
        let mark = Mark::new(&digest, made, Vec::new());
        mark.write(ledger).expect("room");
    }
}

/// Returns the keys of a kernel, those that are not plain by their kinds.
fn keys(
    original: &BTreeMap<&'static str, i32>,
    kinds: &BTreeMap<&'static str, Kind>,
) -> Vec<TestKey> {
    let key = |name: &'static str| {
        let key = match kinds.get(name) {
            Some(Kind::Missing) => return None,
            Some(Kind::Guarded) => TestKey::guarded(name),
            Some(Kind::Sealed) => TestKey {
                sealed: true,
                ..TestKey::guarded(name)
            },
            Some(Kind::Plain) | None => TestKey::new(name, 1),
        };
        Some(TestKey {
            count: original[name],
            ..key
        })
    };
    let of_kernel = KEYS.into_iter().filter(|name| *name != MODULE_KEY);
    of_kernel.filter_map(key).collect()
}
