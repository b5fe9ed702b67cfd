// SPDX-License-Identifier: Apache-2.0
//! What the guest has registered, published as snapshots.
//!
//! vCPU threads write (one at a time, `writer`), everybody reads. A snapshot is immutable; its
//! version says whether it is still the current one. The owner plans on a snapshot and looks at the
//! version again when the vCPUs have stopped: since a vCPU thread cannot stop inside a request, a
//! version that has not changed by then cannot change before the resume. `MODULE_DEL` returns to the
//! guest only after the version has moved on, so a plan with the module's sites is never committed
//! after it.
//!
//! A change of counts alone is made beside running vCPUs, so it looks at the version inside the fence,
//! which every new version is published through: a request waits there until the counts are written,
//! or the change finds that its version is gone.

mod source;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use static_keys::{Busy, Catalog, GuestMemory, Key, Module, Probes};
use tokio::sync::watch;

pub use self::source::KernelTables;
use super::address_space::{KernelMemory, PageTable};
use super::boot::Boot;
use super::error::KeysError;
use super::holds::KeyInstance;
use super::journal::{Event, Journal, Limits};
use super::near::near;
use super::refused::RefusedModules;
pub use super::registration::Refused;
use super::registration::{self as read, read_request};
use crate::abi;
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
    pub fn probes(&self, memory: &KernelMemory, key: &Key) -> Option<Probes> {
        self.catalog.probes(memory, key.id).ok().flatten()
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
        }
    }

    /// Changes whenever [`Self::describe`] does.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
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

    /// The registration as it is now.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] says why there is none and what to do.
    pub fn snapshot(&self) -> Result<Snapshot, KeysError> {
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

    fn register(&self, ram: &GuestRam, page: &[u8], writer: &mut Writer) -> Result<(), Refused> {
        let tables = read_request::<abi::Descriptor>(page, abi::OP_REGISTER)
            .and_then(|descriptor| tables(&descriptor));
        self.install(ram, tables, writer)
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
            Ok((source::registration(ram, tables, boot.epoch)?, boot))
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

    fn unregister(&self, page: &[u8]) -> Result<(), Refused> {
        read_request::<abi::Header>(page, abi::OP_UNREGISTER)?;
        self.take_back();
        Ok(())
    }

    /// The registration that a module request belongs to.
    fn current(&self, generation: u64) -> Result<Arc<Registration>, Refused> {
        match &self.state().registration {
            None => Err(Refused(
                "a module was told before the kernel had registered".to_owned(),
            )),
            Some(registration) if registration.generation != generation => Err(Refused(
                "a module was told under another generation than the kernel's".to_owned(),
            )),
            Some(registration) => Ok(Arc::clone(registration)),
        }
    }

    fn add_module(&self, ram: &GuestRam, page: &[u8], writer: &mut Writer) -> Result<(), Refused> {
        let request: abi::Module = read_request(page, abi::OP_MODULE_ADD)?;
        let current = self.current(request.header.generation)?;
        read::check_number("the module's load", request.load)?;
        let known = self
            .state()
            .boot
            .as_ref()
            .and_then(|boot| boot.epoch_of(request.module, request.load));
        let epoch = known.unwrap_or_else(|| writer.next_epoch());
        let mut registration = (*current).clone();
        let added = add_module(ram, &mut registration, &request, epoch);
        let (name, others) = match added {
            Ok(added) => added,
            Err(refused) => {
                self.remember_refused(&current, &request, &refused);
                return Err(refused);
            }
        };
        registration.refused.remove(request.module);
        if let Some(boot) = &mut self.state().boot {
            boot.loaded(request.module, request.load, epoch);
            boot.limit(|module| registration.module_name(module).is_some());
        }
        let error = match request.directory_error {
            0 => String::new(),
            error => format!("module {name} lists no keys: its kernel failed with error {error}"),
        };
        self.publish_modules(registration, error);
        self.announce_added(&name);
        for other in others {
            self.announce_added(&other);
        }
        Ok(())
    }

    /// So that who asks for a key of the module is told, for as long as it is loaded. A module that is
    /// registered and added again stays what it is.
    fn remember_refused(&self, current: &Registration, request: &abi::Module, refused: &Refused) {
        if current.module_name(request.module).is_some() {
            return;
        }
        let mut registration = current.clone();
        let (name, why) = (read::field_text(&request.name), refused.to_string());
        registration.refused.insert(request.module, name, &why);
        self.publish_modules(registration, why);
    }

    fn delete_module(&self, page: &[u8]) -> Result<(), Refused> {
        let request: abi::Module = read_request(page, abi::OP_MODULE_DEL)?;
        let generation = request.header.generation;
        if let Some(boot) = &mut self.state().boot
            && boot.generation == generation
        {
            boot.unloaded(request.module);
        }
        if self.state().registration.is_none() {
            return Ok(());
        }
        let current = self.current(generation)?;
        // Idempotent, and also sent for loads that were rolled back before the module was added.
        let Some(name) = current.module_name(request.module) else {
            if current.refused.has(request.module) {
                let mut registration = (*current).clone();
                registration.refused.remove(request.module);
                self.publish_modules(registration, String::new());
            }
            return Ok(());
        };
        let mut registration = (*current).clone();
        registration.catalog.remove_module(request.module);
        registration.modules.remove(name);
        self.publish_modules(registration, String::new());
        self.announce_removed(name);
        Ok(())
    }

    /// Answers one request with the registry's view of it.
    fn answer(&self, ram: &GuestRam, op: u32, page: u64) -> Result<(), Refused> {
        // Copied once: what another vCPU writes there meanwhile is not looked at.
        let mut copy = vec![0; abi::REQUEST_PAGE_SIZE];
        ram.read(page, &mut copy)
            .map_err(|error| Refused(format!("the request page cannot be read: {error}")))?;
        // Requests of other vCPUs wait here; none of them can be stopped meanwhile.
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        match op {
            abi::OP_REGISTER => self.register(ram, &copy, &mut writer),
            abi::OP_UNREGISTER => self.unregister(&copy),
            abi::OP_MODULE_ADD => self.add_module(ram, &copy, &mut writer),
            abi::OP_MODULE_DEL => self.delete_module(&copy),
            _ => Err(Refused(format!("operation {op} is unknown"))),
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Registry {
    /// Answers operation `op` of the guest (`OP_*` of [`abi`], not checked) with the page of guest
    /// memory at `page`; returns 0 or a negative errno for the guest.
    ///
    /// Called on the vCPU's thread, which must not count as stopped before this returns.
    pub fn request(&self, op: u32, page: u64) -> i32 {
        let Some(ram) = self.ram.get() else {
            return -libc::ENODEV;
        };
        match self.answer(ram, op, page) {
            Ok(()) => 0,
            Err(refused) => {
                limited!(debug, op, error = %refused, "a request of the guest was refused");
                self.state().error = refused.to_string();
                self.changes.send_replace(());
                -libc::EINVAL
            }
        }
    }
}

/// The numbers of a descriptor, checked.
fn tables(descriptor: &abi::Descriptor) -> Result<KernelTables, Refused> {
    let levels = if descriptor.flags & abi::FLAG_LA57 == 0 {
        Levels::Four
    } else {
        Levels::Five
    };
    let page_table = PageTable {
        root: descriptor.page_table,
        levels,
    };
    read::check_number("the boot", descriptor.boot)?;
    let kernel = read::kernel(descriptor, levels)?;
    Ok(KernelTables {
        boot: descriptor.boot,
        generation: descriptor.header.generation,
        page_table,
        page_table_isolation: descriptor.flags & abi::FLAG_PTI != 0,
        kaslr_offset: descriptor.kaslr_offset,
        release: read::field_text(&descriptor.release),
        build_id: read::build_id(&descriptor.build_id),
        kernel,
    })
}

/// Reads and checks all that a module's request points at; answers the module's name, and the names
/// of other images of which keys became known.
fn add_module(
    ram: &GuestRam,
    registration: &mut Registration,
    request: &abi::Module,
    epoch: u64,
) -> Result<(Arc<str>, BTreeSet<Arc<str>>), Refused> {
    let levels = registration.page_table.levels;
    read::check_address("the module", request.module, levels)?;
    read::check_range("init text", request.init_text, levels)?;
    let module = Module {
        id: request.module,
        name: read::module_name(&request.name)?,
        jump_table: read::check_range("the jump table", request.jump_table, levels)?,
        text: read::check_range("text", request.text, levels)?,
        ro_after_init: read::check_range("ro_after_init", request.ro_after_init, levels)?,
        directory: read::directory(request.directory),
    };
    let memory = registration.memory(ram);
    let others = registration
        .catalog
        .add_module(&memory, &module)
        .map_err(|error| Refused(error.to_string()))?;
    let name: Arc<str> = registration
        .module_name(request.module)
        .unwrap_or_default()
        .into();
    registration.modules.insert(Arc::clone(&name), epoch);
    Ok((name, others))
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
