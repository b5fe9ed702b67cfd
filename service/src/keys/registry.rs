// SPDX-License-Identifier: Apache-2.0
//! The guest's registration, published as snapshots.
//!
//! vCPU threads write, one at a time (`writer`); all threads read. A snapshot is immutable, and its
//! version tells whether it is current. The executor plans on a snapshot and checks the version
//! again when the vCPUs are stopped. A vCPU thread cannot stop inside a request. So if the version
//! is unchanged then, it cannot change before the resume. `MODULE_DEL` returns to the guest only
//! after the version has changed, so no plan with the module's sites is committed after that.
//!
//! A change of counts alone is made while vCPUs run. It checks the version inside the fence, and
//! every new version is published through the fence. So either the request waits until the counts
//! are written, or the change finds a new version.

mod declare;
pub(crate) mod discovered;
pub mod discovery;
mod install;
mod kept;
mod log;
mod registered;
mod request_memory;
pub(crate) mod requests;
mod source;
mod tables;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::live::DebugFiles;
use patchbay_memory::paging::{Levels, PageTable};
use tokio::sync::watch;

use self::discovery::Discovery;
use self::kept::KeptRequests;
use self::log::LogState;
pub use self::log::{KernelLog, Look};
pub use self::registered::{Instances, Registration};
pub use self::tables::{Contents, DiscoveredKernel, KernelTables, Promises};
use super::boot::Boot;
use super::declared::Declarations;
use super::error::KeysError;
use super::journal::{Events, Journal, Limits};
pub use super::registration::Refused;
use patchbay_guest::discovery::Discoverable;

/// State of the registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistrationPhase {
    /// No kernel has registered, and none was discovered.
    #[default]
    Absent,
    /// A kernel is registered, by itself or by a discovery.
    Registered,
    /// The kernel has withdrawn its registration.
    Withdrawn,
    /// The registration was refused.
    Refused,
}

/// A registration at one version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Version of the registry.
    pub version: u64,
    /// The registration.
    pub registration: Arc<Registration>,
}

/// Description of the registration.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// State.
    pub phase: RegistrationPhase,
    /// The reason why the last request was refused or the last discovery failed; `None` if there
    /// was no failure.
    pub error: Option<String>,
    /// The discovery; `None` if the kernel registered itself.
    pub discovery: Option<Arc<DiscoveredKernel>>,
    /// See [`Registration`].
    pub release: String,
    /// See [`Registration`].
    pub build_id: String,
    /// See [`Registration`].
    pub generation: u64,
    /// Name of the boot; empty if it is not known.
    pub boot: String,
    /// Number of keys.
    pub keys: u32,
    /// Number of sites.
    pub sites: u32,
    /// Number of modules.
    pub modules: u32,
    /// KASLR moved the kernel.
    pub kaslr: bool,
    /// See [`Registration`].
    pub page_table_isolation: bool,
    /// See [`Registration`].
    pub five_level_paging: bool,
    /// Number of keys that the host declares.
    pub declared: u32,
    /// See [`Registration`].
    pub undeclared: Vec<String>,
}

/// A kernel that has requested a registration. Such a kernel itself decides whether its keys can be
/// changed, so it is not discovered.
#[derive(Clone, Debug)]
struct OwnRequest {
    /// Set once the kernel has withdrawn its registration. Another kernel may run then.
    withdrawn: Option<Identity>,
}

/// The properties that distinguish a kernel from one that is started without a reset (kexec).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    page_table: PageTable,
    release: String,
}

#[derive(Debug, Default)]
struct State {
    phase: RegistrationPhase,
    error: Option<String>,
    registration: Option<Arc<Registration>>,
    /// The running kernel, if it has panicked. Its keys can be read, and not changed.
    panicked: Option<Arc<Registration>>,
    /// The current or last kernel.
    boot: Option<Boot>,
    /// The kernel that has requested a registration.
    own: Option<OwnRequest>,
}

/// Serves the guest's requests and publishes registrations.
#[derive(Debug)]
pub struct Registry {
    ram: OnceLock<GuestRam>,
    /// Serialises requests. The lock is held while a request is read and checked.
    writer: Mutex<Writer>,
    /// Held while a version is published and while counts are changed. Taken before `state`. The
    /// thread that holds the lock does no I/O and waits for nothing.
    fence: Mutex<()>,
    /// This lock is held only briefly.
    state: Mutex<State>,
    version: AtomicU64,
    journal: Arc<Journal>,
    /// Signals changes of the description.
    changes: watch::Sender<()>,
    /// The discovery, on demand, of a kernel that does not register.
    discovery: OnceLock<Discovery>,
    /// Keys that the host declares.
    declarations: OnceLock<Declarations>,
    /// The log of the kernel that was found last.
    log: Mutex<LogState>,
    /// Held during a search for the log. Callers who wait for a search do not search again.
    log_search: Mutex<()>,
}

#[derive(Debug, Default)]
struct Writer {
    epoch: u64,
    /// The requests that make up the registration.
    kept: KeptRequests,
}

impl Writer {
    fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }
}

impl Registry {
    /// Creates a registry without a registration.
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
            declarations: OnceLock::new(),
            log: Mutex::default(),
            log_search: Mutex::default(),
        }
    }

    /// Signals changes of [`Self::describe`].
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Sets the discovery that runs when keys are requested. `files` provide what the kernel does
    /// not reveal. Only the first call has an effect.
    pub fn discover(&self, guest: Arc<dyn Discoverable>, files: Option<DebugFiles>) {
        let _ = self.discovery.set(Discovery::new(guest, files));
    }

    /// Sets the keys that the host declares. Must be called before the guest starts. Only the first
    /// call has an effect.
    pub fn declare(&self, declarations: Declarations) {
        let _ = self.declarations.set(declarations);
    }

    /// Applies the host's declarations to a registration that is about to be published.
    fn apply_declarations(&self, registration: &mut Registration) {
        if let Some(declarations) = self.declarations.get() {
            registration.declare(declarations);
        }
    }

    /// Sets the guest's memory. Must be called before the guest starts. Only the first call has an
    /// effect.
    pub fn attach(&self, ram: GuestRam) {
        let _ = self.ram.set(ram);
    }

    /// Returns the guest's memory; `None` before it is attached.
    pub fn ram(&self) -> Option<&GuestRam> {
        self.ram.get()
    }

    /// Returns the history of changes.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Returns the current version. Takes no lock, so it can be read while the guest is stopped.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Runs `change` if `version` is current, and keeps the version current meanwhile: no request
    /// that removes keys returns to the guest before `change` is done. Returns `None` if there is a
    /// newer version.
    pub fn at_version<T>(&self, version: u64, change: impl FnOnce() -> T) -> Option<T> {
        let _fence = self.fence();
        (self.version() == version).then(change)
    }

    fn fence(&self) -> MutexGuard<'_, ()> {
        self.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current registration. If the guest does not register, first checks that its
    /// kernel is still the discovered one. This may take as long as a discovery, so do not call it
    /// on a thread that serves other tasks; see [`Self::known`].
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason and the next step.
    pub fn snapshot(&self) -> Result<Snapshot, KeysError> {
        if let Some(discovery) = self.discovery.get() {
            discovery.look(self);
        }
        self.known()
    }

    /// Returns the current registration as [`Self::snapshot`] does, or that of a kernel that was
    /// discovered and has panicked, and whether it has. Use it only to read.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason and the next step.
    pub fn to_read(&self) -> Result<(Arc<Registration>, bool), KeysError> {
        let error = match self.snapshot() {
            Ok(snapshot) => return Ok((snapshot.registration, false)),
            Err(error) => error,
        };
        if let Some(discovery) = self.discovery.get() {
            discovery.find_panicked(self);
        }
        let panicked = self.panicked().filter(|kernel| self.is_same_boot(kernel));
        panicked.map(|kernel| (kernel, true)).ok_or(error)
    }

    /// Returns whether no kernel is to be discovered: the running kernel has registered, or
    /// discovery is not available.
    pub fn needs_no_discovery(&self) -> bool {
        let registered = || {
            let state = self.state();
            let registration = state.registration.as_ref();
            registration.is_some_and(|registration| registration.discovery.is_none())
        };
        self.discovery.get().is_none() || registered()
    }

    /// Discovers the kernel of a guest that does not register, unless the kernel is known. Returns
    /// the time after which another attempt may succeed; `None` if the kernel is known or if
    /// waiting does not help.
    pub fn look_for_kernel(&self) -> Option<Duration> {
        let discovery = self.discovery.get()?;
        discovery.look(self);
        match self.known() {
            Ok(_) => None,
            Err(_) => discovery.busy_for(),
        }
    }

    /// Returns the last registration or discovery. Does not wait for a discovery, so the guest may
    /// already run another kernel.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason and the next step.
    pub fn known(&self) -> Result<Snapshot, KeysError> {
        let state = self.state();
        match &state.registration {
            // The version changes only under this lock.
            Some(registration) => Ok(Snapshot {
                version: self.version(),
                registration: Arc::clone(registration),
            }),
            None => Err(KeysError::NotRegistered {
                why: not_registered(&state),
            }),
        }
    }

    /// Returns whether, according to the known events, the guest was neither reset nor set back
    /// since this kernel was discovered. Takes no lock, so it can be called while the guest is
    /// stopped.
    pub fn is_same_boot(&self, registration: &Registration) -> bool {
        let discovered = self.discovery.get().zip(registration.discovery.as_ref());
        discovered.is_none_or(|(discovery, kernel)| discovery.resets() == kernel.resets)
    }

    /// Checks that the vCPUs run this kernel, if the monitor may report a reset late.
    ///
    /// # Errors
    /// The vCPUs run something else, or their registers cannot be read.
    pub fn confirm(&self, registration: &Registration) -> Result<(), String> {
        match self.discovery.get() {
            Some(discovery) if registration.discovery.is_some() => discovery.confirm(),
            _ => Ok(()),
        }
    }

    /// Returns the number of the current or last boot. Changes that were made to an earlier boot
    /// are void.
    pub fn boot(&self) -> Option<u64> {
        self.state().boot.as_ref().map(|boot| boot.epoch)
    }

    /// Returns the epochs of the images whose keys exist, even if the registration is withdrawn.
    pub fn live_epochs(&self) -> HashSet<u64> {
        self.state()
            .boot
            .as_ref()
            .map(Boot::epochs)
            .unwrap_or_default()
    }

    /// Describes the registration.
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
        description.discovery.clone_from(&registration.discovery);
        description.release.clone_from(&registration.release);
        description.build_id.clone_from(&registration.build_id);
        description.generation = registration.generation;
        description.boot = registration.boot_identity();
        description.keys = count(registration.catalog.key_count());
        description.sites = count(registration.catalog.entry_count());
        description.modules = count(registration.modules.len());
        description.kaslr = registration.kaslr_offset != 0;
        description.page_table_isolation = registration.page_table_isolation;
        description.five_level_paging = registration.page_table.levels == Levels::Five;
        description.declared = count(registration.declared.len());
        description.undeclared.clone_from(&registration.undeclared);
        description
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change assigns whole values, so a panic leaves no partial state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(
        &self,
        phase: RegistrationPhase,
        error: Option<String>,
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

    /// Publishes a registration in which the modules, or the refused modules, have changed.
    fn publish_modules(&self, registration: Registration, error: Option<String>) {
        let registration = Some(Arc::new(registration));
        self.publish(RegistrationPhase::Registered, error, registration);
    }

    fn announce_added(&self, module: &str) {
        let module = module.to_owned();
        self.journal.append(Events::Added { module });
    }

    fn announce_removed(&self, module: &str) {
        let module = module.to_owned();
        self.journal.append(Events::Removed { module });
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

fn not_registered(state: &State) -> String {
    let error = state.error.as_deref();
    match (state.phase, error) {
        (RegistrationPhase::Absent, Some(error)) => {
            format!("the guest has not registered its static keys, and they were not discovered: {error}")
        }
        // No discovery runs for this guest.
        (RegistrationPhase::Absent, None) => "the guest has not registered its static keys: it still boots, or its kernel was \
            built without CONFIG_PATCHBAY; build one with `cargo xtask guest-kernel`"
            .to_owned(),
        (RegistrationPhase::Withdrawn, _) => {
            "the guest has taken its registration back (reboot, crash or hibernation); wait until it registers again".to_owned()
        }
        (RegistrationPhase::Refused | RegistrationPhase::Registered, error) => {
            let why = error.unwrap_or("it gave no reason");
            format!("the guest's registration was refused: {why}")
        }
    }
}
