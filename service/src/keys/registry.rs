// SPDX-License-Identifier: Apache-2.0
//! What the guest has registered, published as snapshots.
//!
//! vCPU threads write (one at a time, `writer`), everybody reads. A snapshot is immutable; its
//! version says whether it is still the current one. The executor plans on a snapshot and looks at the
//! version again when the vCPUs have stopped: since a vCPU thread cannot stop inside a request, a
//! version that has not changed by then cannot change before the resume. `MODULE_DEL` returns to the
//! guest only after the version has moved on, so a plan with the module's sites is never committed
//! after it.
//!
//! A change of counts alone is made beside running vCPUs, so it looks at the version inside the fence,
//! which every new version is published through: a request waits there until the counts are written,
//! or the change finds that its version is gone.

mod discovered;
pub mod discovery;
mod requests;
mod source;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use static_keys::{Busy, Catalog, Class, GuestMemory, Key, KeyId, Probes};
use tokio::sync::watch;

use self::discovery::{Discoverable, Discovery};
pub use self::source::{Contents, KernelTables, Promises};
use super::address_space::{KernelMemory, PageTable};
use super::boot::Boot;
use super::error::KeysError;
use super::holds::{KeyInstance, KeyState};
use super::journal::{Event, Journal, Limits};
use super::near::near;
use super::refused::RefusedModules;
pub use super::registration::Refused;
use super::registration::{self as read, read_request};
use crate::log_limit::limited;
use crate::memory::GuestRam;
use crate::paging::Levels;

/// How far the registration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistrationPhase {
    /// Nothing was heard of the guest's kernel.
    #[default]
    Absent,
    /// Its keys are known.
    Registered,
    /// It has taken its registration back.
    Withdrawn,
    /// Its registration was refused.
    Refused,
}

/// A kernel's registration with its modules.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Drawn by the guest.
    pub generation: u64,
    /// The kernel's own.
    pub page_table: PageTable,
    /// Page table isolation is on.
    pub page_table_isolation: bool,
    /// Of the kernel's text, in bytes.
    pub kaslr_offset: u64,
    /// utsname release, printable.
    pub release: String,
    /// Hexadecimal; empty if unknown.
    pub build_id: String,
    /// Of the source.
    pub promises: Promises,
    /// Keys and sites.
    pub catalog: Catalog,
    /// Offset of `type` in `struct static_key`; `None` in kernels without jump labels.
    type_offset: Option<u32>,
    /// Of the kernel image.
    epoch: u64,
    /// Epochs by name.
    modules: HashMap<Arc<str>, u64>,
    /// Loaded, and not in the catalog.
    refused: RefusedModules,
}

impl Registration {
    /// The memory that its addresses are in.
    pub fn memory(&self, ram: &GuestRam) -> KernelMemory {
        KernelMemory::new(ram, self.page_table)
    }

    /// The key with this full name.
    ///
    /// # Errors
    /// [`KeysError::KeyNotFound`] with names near it; MODULE_REFUSED if the key's module was.
    pub fn find(&self, name: &str) -> Result<&Key, KeysError> {
        // ":name" is the kernel image's, as in patterns.
        let full_name = name.strip_prefix(':').unwrap_or(name);
        let not_found = || KeysError::KeyNotFound {
            name: name.to_owned(),
            near: near(name, self.catalog.keys().map(|key| &*key.full_name)),
        };
        self.catalog
            .find(full_name)
            .ok_or_else(|| self.refused.home(name).unwrap_or_else(not_found))
    }

    /// Tells what only passes from what stays for as long as a module is loaded.
    ///
    /// # Errors
    /// MODULE_REFUSED.
    pub fn check_refused(&self, busy: &Busy) -> Result<(), KeysError> {
        match busy {
            Busy::UnknownModule { key, module } => {
                self.refused.user(*module, key).map_or(Ok(()), Err)
            }
            _ => Ok(()),
        }
    }

    /// For whom the tracepoint of a key fires; `None` for other keys, and for a guest that points at
    /// what is not mapped.
    fn probes(&self, memory: &KernelMemory, key: KeyId) -> Option<Probes> {
        self.catalog.probes(memory, key).ok().flatten()
    }

    /// What decides on the holds on a key; `None` if its count cannot be read.
    pub fn state(&self, memory: &KernelMemory, key: &Key) -> Option<KeyState> {
        let count = self.catalog.enabled(memory, key.id).ok()?;
        let tracepoint = key.class == Class::Tracepoint;
        Some(self.state_at(memory, key.id, tracepoint, count))
    }

    /// The same, of a key whose count was read already.
    pub fn state_at(
        &self,
        memory: &KernelMemory,
        key: KeyId,
        tracepoint: bool,
        count: i32,
    ) -> KeyState {
        let probes = || self.probes(memory, key);
        KeyState {
            count,
            tracepoint,
            probes: tracepoint.then(probes).flatten(),
        }
    }

    /// Whether the key was initialised as true (type bit 0, `include/linux/jump_label.h`).
    pub fn initially_true(&self, ram: &GuestRam, key: &Key) -> bool {
        const JUMP_TYPE_TRUE: u8 = 1;
        let Some(offset) = self.type_offset else {
            return false;
        };
        let mut first = [0];
        let address = key.id.0.wrapping_add(offset.into());
        // A key that cannot be read is a module's that is just going.
        self.memory(ram).read_gva(address, &mut first).is_ok() && first[0] & JUMP_TYPE_TRUE != 0
    }

    fn module_name(&self, address: u64) -> Option<&str> {
        self.catalog
            .modules()
            .find(|(id, _)| *id == address)
            .map(|(_, name)| name)
    }

    /// The key for as long as it exists.
    pub fn instance(&self, key: &Key) -> KeyInstance {
        let epoch = match key.module() {
            "" => self.epoch,
            module => self.modules.get(module).copied().unwrap_or(self.epoch),
        };
        KeyInstance { epoch, id: key.id }
    }

    /// Whether the key still exists.
    pub fn has(&self, instance: KeyInstance) -> bool {
        self.catalog
            .key(instance.id)
            .is_some_and(|key| self.instance(key) == instance)
    }
}

/// [`Registration::instance`] for many keys, of which those of one module come together.
#[derive(Debug)]
pub struct Instances<'a> {
    registration: &'a Registration,
    /// Name and epoch of the last key's module.
    last: (&'a str, u64),
}

impl<'a> Instances<'a> {
    /// Of this registration's keys.
    pub fn of(registration: &'a Registration) -> Self {
        Self {
            registration,
            last: ("", registration.epoch),
        }
    }

    /// The key for as long as it exists.
    pub fn instance(&mut self, key: &'a Key) -> KeyInstance {
        if key.module() != self.last.0 {
            self.last = (key.module(), self.registration.instance(key).epoch);
        }
        KeyInstance {
            epoch: self.last.1,
            id: key.id,
        }
    }
}

/// The registration as it was at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Of the registry at that moment.
    pub version: u64,
    /// What was registered.
    pub registration: Arc<Registration>,
}

/// For people and programs that ask what is registered.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// How far it is.
    pub phase: RegistrationPhase,
    /// Why the last request was refused; empty if it was not.
    pub error: String,
    /// As in [`Registration`].
    pub release: String,
    /// As in [`Registration`].
    pub build_id: String,
    /// As in [`Registration`].
    pub generation: u64,
    /// Number of keys.
    pub keys: u32,
    /// Number of sites.
    pub sites: u32,
    /// Number of modules.
    pub modules: u32,
    /// Whether KASLR moved the kernel.
    pub kaslr: bool,
    /// As in [`Registration`].
    pub page_table_isolation: bool,
    /// As in [`Registration`].
    pub five_level_paging: bool,
}

#[derive(Debug, Default)]
struct State {
    phase: RegistrationPhase,
    error: String,
    registration: Option<Arc<Registration>>,
    /// The kernel that is registered, or was last.
    boot: Option<Boot>,
}

/// Answers the guest's requests and publishes what it has registered.
#[derive(Debug)]
pub struct Registry {
    ram: OnceLock<GuestRam>,
    /// Serialises requests; held while a request is read and checked.
    writer: Mutex<Writer>,
    /// Held while a version is published, and while counts are changed at a version. Taken before
    /// `state`; whoever holds it waits for nothing and does no I/O.
    fence: Mutex<()>,
    /// Held for a look or a change.
    state: Mutex<State>,
    version: AtomicU64,
    journal: Arc<Journal>,
    /// Told after each change of the description.
    changes: watch::Sender<()>,
    /// Finds tables when they are asked for; without one the guest tells them.
    discovery: OnceLock<Discovery>,
}

#[derive(Debug, Default)]
struct Writer {
    epoch: u64,
}

impl Writer {
    fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }
}

impl Registry {
    /// A registry that has heard nothing yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            ram: OnceLock::new(),
            writer: Mutex::default(),
            fence: Mutex::default(),
            state: Mutex::default(),
            version: AtomicU64::new(0),
            journal: Arc::new(Journal::new(limits)),
            changes: watch::Sender::new(()),
            discovery: OnceLock::new(),
        }
    }

    /// Changes whenever [`Self::describe`] does.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Has the guest's kernel looked for when its keys are asked for. Later calls change nothing.
    pub fn discover(&self, guest: Arc<dyn Discoverable>) {
        let _ = self.discovery.set(Discovery::new(guest));
    }

    /// Gives it the guest's memory, before the guest starts. Later calls change nothing.
    pub fn attach(&self, ram: GuestRam) {
        let _ = self.ram.set(ram);
    }

    /// The guest's memory, once attached.
    pub fn ram(&self) -> Option<&GuestRam> {
        self.ram.get()
    }

    /// The history of changes.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Advances with each change. Takes no lock, so it may be asked while the guest is stopped.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Makes a change if `version` is still the current one, and keeps it so meanwhile: no request that
    /// takes keys away returns to the guest before the change is made. `None` if there is a newer one.
    pub fn at_version<T>(&self, version: u64, change: impl FnOnce() -> T) -> Option<T> {
        let _fence = self.fence();
        (self.version() == version).then(change)
    }

    fn fence(&self) -> MutexGuard<'_, ()> {
        self.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The registration as it is now. Of a guest that does not register, looks first whether its kernel
    /// is still the one that was found, which may take as long as a discovery.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] says why there is none and what to do.
    pub fn snapshot(&self) -> Result<Snapshot, KeysError> {
        if let Some(discovery) = self.discovery.get() {
            discovery.look(self);
        }
        let state = self.state();
        match &state.registration {
            // The version changes under this lock only.
            Some(registration) => Ok(Snapshot {
                version: self.version(),
                registration: Arc::clone(registration),
            }),
            None => Err(KeysError::NotRegistered {
                why: not_registered(&state),
            }),
        }
    }

    /// Number of the kernel that runs, or ran last: what was done to another one is no more.
    pub fn boot(&self) -> Option<u64> {
        self.state().boot.as_ref().map(|boot| boot.epoch)
    }

    /// Epochs of images whose keys exist, even if the guest has taken its registration back.
    pub fn live_epochs(&self) -> HashSet<u64> {
        self.state()
            .boot
            .as_ref()
            .map(Boot::epochs)
            .unwrap_or_default()
    }

    /// What is registered.
    pub fn describe(&self) -> Description {
        let state = self.state();
        let mut description = Description {
            phase: state.phase,
            error: state.error.clone(),
            ..Description::default()
        };
        let Some(registration) = &state.registration else {
            return description;
        };
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        description.release.clone_from(&registration.release);
        description.build_id.clone_from(&registration.build_id);
        description.generation = registration.generation;
        description.keys = count(registration.catalog.key_count());
        description.sites = count(registration.catalog.entry_count());
        description.modules = count(registration.modules.len());
        description.kaslr = registration.kaslr_offset != 0;
        description.page_table_isolation = registration.page_table_isolation;
        description.five_level_paging = registration.page_table.levels == Levels::Five;
        description
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change assigns whole values.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(
        &self,
        phase: RegistrationPhase,
        error: String,
        registration: Option<Arc<Registration>>,
    ) {
        let fence = self.fence();
        let mut state = self.state();
        state.phase = phase;
        state.error = error;
        state.registration = registration;
        self.version.fetch_add(1, Ordering::SeqCst);
        drop((state, fence));
        self.changes.send_replace(());
    }

    /// Publishes a registration whose modules have changed.
    fn publish_modules(&self, registration: Registration, error: String) {
        let registration = Some(Arc::new(registration));
        self.publish(RegistrationPhase::Registered, error, registration);
    }

    fn announce_added(&self, module: &str) {
        let module = module.to_owned();
        self.journal.append(vec![Event::Added { module }]);
    }

    fn announce_removed(&self, module: &str) {
        let module = module.to_owned();
        self.journal.append(vec![Event::Removed { module }]);
    }

    /// Publishes the registration of a kernel, or why there is none.
    fn install(
        &self,
        ram: &GuestRam,
        tables: Result<KernelTables, Refused>,
        writer: &mut Writer,
    ) -> Result<(), Refused> {
        let (had, last) = {
            let state = self.state();
            (state.registration.is_some(), state.boot.clone())
        };
        let result = tables.and_then(|tables| {
            let mut boot = last
                .filter(|boot| boot.id == tables.boot)
                .unwrap_or_else(|| Boot::new(tables.boot, writer.next_epoch()));
            boot.generation = tables.generation;
            // A kernel that registers tells its modules afterwards, each with its load.
            let with_modules = matches!(tables.contents, Contents::Found(..));
            let mut registration = source::registration(ram, tables, boot.epoch)?;
            if with_modules {
                source::add_epochs(&mut registration, &mut boot, || writer.next_epoch());
            }
            Ok((registration, boot))
        });
        if had {
            // Whatever comes now, the earlier registration is over.
            self.announce_removed("");
        }
        match result {
            Ok((registration, boot)) => {
                self.state().boot = Some(boot);
                limited!(
                    info,
                    release = registration.release,
                    keys = registration.catalog.key_count(),
                    "the guest registered"
                );
                self.publish(
                    RegistrationPhase::Registered,
                    String::new(),
                    Some(Arc::new(registration)),
                );
                self.announce_added("");
                Ok(())
            }
            Err(refused) => {
                self.publish(RegistrationPhase::Refused, refused.to_string(), None);
                Err(refused)
            }
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

fn not_registered(state: &State) -> String {
    match state.phase {
        RegistrationPhase::Absent => "the guest has not registered its static keys: it still boots, or its kernel was \
            built without CONFIG_PATCHBAY; build one with `cargo xtask guest-kernel`"
            .to_owned(),
        RegistrationPhase::Withdrawn => {
            "the guest has taken its registration back (reboot, crash or hibernation); wait until it registers again".to_owned()
        }
        RegistrationPhase::Refused | RegistrationPhase::Registered => {
            format!("the guest's registration was refused: {}", state.error)
        }
    }
}
