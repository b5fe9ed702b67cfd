// SPDX-License-Identifier: Apache-2.0
//! Discovers the kernel of a guest that does not register, when its keys are requested.
//!
//! A kernel that registers itself is never discovered, because its requests determine when its keys
//! can be changed. Its registration replaces a discovery. After this kernel has withdrawn its
//! registration, only a different kernel is discovered (kexec).
//!
//! Checking a discovered kernel takes a few reads: a word that differs from boot to boot, the words
//! that a kernel changes when it reboots, panics or starts another kernel (kexec), and words that
//! change with each module. All these words are gates too, so a change checks them again in the
//! stopped guest.
//!
//! The memory of a kernel that has started another one often stays unchanged, so the first word
//! alone is not sufficient. But `kernel_restart_prepare()` (kernel/reboot.c) has set `system_state`
//! by then, or `panic()` and `crash_kexec()` have set `panic_cpu`.
//!
//! If the guest is busy, the discovery is repeated until the caller's deadline
//! ([`Registry::look_for_kernel`]). It does not wait for mutexes, because the code that holds one
//! may hang.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use patchbay_guest::discovery::Discoverable;
use patchbay_guest::log_limit::limited;
use patchbay_kernel_image::live::{self, DiscoveryError, Finder, Way};
pub use patchbay_kernel_image::live::{DebugFile, DebugFiles, FileUse};
use static_keys::{GateKind, GuestMemory, ListedGate};

use super::discovered::tables;
use super::{KernelLog, Registration, RegistrationPhase, Registry};
use patchbay_guest::kernel_memory::KernelMemory;

/// The maximum number of attempts while the guest changes the tables.
const ATTEMPTS: usize = 5;
/// Time between two attempts. The guest's own change of a key takes milliseconds.
const INTERVAL: Duration = Duration::from_millis(5);
/// Minimum time between a failure and the next attempt.
const REST: Duration = Duration::from_millis(500);
/// Minimum time before the next attempt if the guest is busy, or if the kernel is known and only
/// its modules have changed.
const SHORT_REST: Duration = Duration::from_millis(50);
/// The number of consecutive refusals after which a known kernel counts as unknown.
const REFUSALS: u32 = 2;

/// The maximum number of attempts to check that the vCPUs run a known kernel. A process may end and
/// free its page table after a vCPU's registers were read.
const CONFIRMATIONS: u32 = 3;

#[derive(Debug)]
pub(super) struct Discovery {
    guest: Arc<dyn Discoverable>,
    /// Held during a discovery, so that callers do not search concurrently.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    finder: Finder,
    /// Gates of the discovered kernel that close when it no longer runs.
    kernel: Vec<ListedGate>,
    /// Gates that close when the kernel's modules have changed.
    modules: Vec<ListedGate>,
    /// Gates that are closed while the kernel loads or unloads modules.
    idle: Vec<ListedGate>,
    /// Modules that the last discovery left out, with their states.
    left_out: HashSet<(u64, u32)>,
    /// Addresses of the keys that the last discovery found torn.
    torn: HashSet<u64>,
    resets: u64,
    /// The number of changes of the guest's memory before the last discovery.
    memory: u64,
    generation: u64,
    /// The time of the next attempt after a failure.
    next: Option<Instant>,
    /// The last attempt failed because the guest was busy.
    busy: bool,
    /// The number of refusals of the known kernel since the last discovery.
    refused: u32,
    /// The vCPUs did not run the discovered kernel.
    doubted: bool,
    /// The last attempt found a kernel that has panicked.
    panics: bool,
}

impl Discovery {
    pub fn new(guest: Arc<dyn Discoverable>, files: Option<DebugFiles>) -> Self {
        let state = State {
            finder: Finder::new(files),
            ..State::default()
        };
        Self {
            guest,
            state: Mutex::new(state),
        }
    }

    /// See [`Discoverable::resets`].
    pub fn resets(&self) -> u64 {
        self.guest.resets()
    }

    /// Checks that the vCPUs run the discovered kernel, if the monitor requires this check. If they
    /// do not, the next call discovers the kernel again.
    ///
    /// # Errors
    /// The vCPUs run something else, or their registers cannot be read.
    pub fn confirm(&self) -> Result<(), String> {
        if !self.guest.confirms() {
            return Ok(());
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = CONFIRMATIONS;
        let confirmed = loop {
            let Some(cpus) = self.guest.cpus()? else {
                return Ok(());
            };
            left -= 1;
            let confirmed = state.finder.confirm(self.guest.memory(), &cpus);
            if confirmed.is_ok() || left == 0 {
                break confirmed;
            }
        };
        state.doubted = confirmed.is_err();
        confirmed.map_err(|error| error.to_string())
    }

    /// Checks that the known kernel still runs. If it does not, discovers the running kernel.
    /// Updates the registry.
    pub fn look(&self, registry: &Registry) {
        // The executor, which holds the guest, must resume it in time and cannot wait for a
        // discovery.
        if self.guest.is_held() {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The guest may have been stopped since the first check.
        if self.guest.is_held() {
            return;
        }
        let (resets, last) = (self.guest.resets(), state.resets);
        let doubted = std::mem::take(&mut state.doubted);
        let (registered, own) = {
            let mut state = registry.state();
            if resets != last {
                // The kernel that ran before the reset is not relevant.
                state.own = None;
            }
            (state.registration.clone(), state.own.clone())
        };
        if own.is_some() {
            registry.forget_panicked();
        }
        if own.is_some_and(|own| own.withdrawn.is_none()) {
            return;
        }
        let last_known = registered.filter(|_| resets == last && !doubted);
        // The memory of the discovered kernel, if this kernel still runs.
        let known = last_known
            .as_ref()
            .zip(registry.ram())
            .map(|(registration, ram)| registration.memory(ram))
            .filter(|memory| open(&state.kernel, memory));
        if known.is_none() {
            state.follow_panic(registry, last_known);
        }
        if known
            .as_ref()
            .is_some_and(|memory| open(&state.modules, memory))
            && self.guest.memory_changes(false) == state.memory
        {
            return;
        }
        if resets == last && state.next.is_some_and(|next| Instant::now() < next) {
            return;
        }
        state.resets = resets;
        (state.next, state.busy) = (None, false);
        if let Some(memory) = &known {
            state.wait_for_idle(memory);
        }
        let same_kernel = known.is_some();
        let attempts = if same_kernel { 2 } else { ATTEMPTS };
        match self.find(registry, &mut state, attempts) {
            Ok(()) => state.refused = 0,
            // The last discovery is kept until the modules can be read. Its gates refuse a change
            // of modules that have changed since.
            Err(DiscoveryError::Busy(why) | DiscoveryError::Absent(why)) if same_kernel => {
                tracing::debug!(why, "modules not read");
                state.next = Some(Instant::now() + SHORT_REST);
            }
            // A page that was copied during a change of text can look foreign.
            Err(DiscoveryError::Refused(why)) if same_kernel && state.refused < REFUSALS => {
                tracing::debug!(why, "modules refused");
                state.refused += 1;
                state.next = Some(Instant::now() + SHORT_REST);
            }
            Err(error) => {
                state.refused = 0;
                state.panics = matches!(error, DiscoveryError::Panics(_));
                // The registers of a guest that its monitor stops at a panic are not known.
                let is_other = matches!(
                    error,
                    DiscoveryError::Absent(_) | DiscoveryError::Refused(_)
                );
                if is_other {
                    registry.forget_panicked();
                }
                state.busy = matches!(error, DiscoveryError::Busy(_));
                let rest = if state.busy { SHORT_REST } else { REST };
                state.next = Some(Instant::now() + rest);
                registry.not_discovered(error.to_string());
            }
        }
    }

    /// Finds the log of the running kernel, whatever the kernel's state. Without registers, returns
    /// `known`, if it is given.
    ///
    /// # Errors
    /// The reason why the log is not found.
    pub fn find_log(&self, known: Option<KernelLog>) -> Result<KernelLog, String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let resets = self.guest.resets();
        let mut left = CONFIRMATIONS;
        loop {
            let cpus = self.guest.cpus()?;
            let (cpus, way) = match (cpus, &known) {
                (Some(cpus), _) => (cpus, Way::Image),
                (None, Some(known)) => return Ok(known.clone()),
                (None, None) => (Vec::new(), Way::Note),
            };
            left -= 1;
            match state.finder.find_log(self.guest.memory(), &cpus, way) {
                Ok(log) => return Ok(KernelLog { log, resets }),
                Err(error) if left == 0 => return Err(error.to_string()),
                Err(_) => {}
            }
        }
    }

    /// Discovers the running kernel to be read, if it has panicked before it was discovered.
    pub fn find_panicked(&self, registry: &Registry) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.panics || self.guest.is_held() || registry.panicked().is_some() {
            return;
        }
        let began = Instant::now();
        let Ok(Some(cpus)) = self.guest.cpus() else {
            return;
        };
        // One attempt suffices, because the memory of such a kernel changes no more.
        state.panics = false;
        let found = state
            .finder
            .find_panicked(self.guest.memory(), &cpus, Way::Image);
        state.generation += 1;
        let kept = found.map_err(|error| error.to_string()).and_then(|kernel| {
            state.kernel = same_kernel(&kernel);
            let tables = tables(kernel, state.resets, state.generation, began.elapsed());
            let registration = tables.and_then(|tables| registry.to_registration(tables));
            registration.map_err(|refused| refused.to_string())
        });
        match kept {
            Ok(registration) => registry.keep_panicked(Arc::new(registration)),
            Err(why) => tracing::debug!(why, "a kernel that has panicked cannot be read"),
        }
    }

    /// Returns the time until the next attempt, if the last one found the guest busy.
    pub fn busy_for(&self) -> Option<Duration> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let next = state.next.filter(|_| state.busy)?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn find(
        &self,
        registry: &Registry,
        state: &mut State,
        attempts: usize,
    ) -> Result<(), DiscoveryError> {
        let began = Instant::now();
        let memory = self.guest.memory_changes(true);
        let mut left = attempts;
        let mut was_refused = false;
        let kernel = loop {
            // An error ends the attempts, because the monitor has already had its full time to
            // answer.
            let cpus = self.guest.cpus().map_err(|why| {
                DiscoveryError::Busy(format!("the registers of its vCPUs are not known: {why}"))
            })?;
            let (cpus, way) = match cpus {
                Some(cpus) => (cpus, Way::Image),
                None => (Vec::new(), Way::Note),
            };
            left -= 1;
            match state.finder.find(self.guest.memory(), &cpus, way) {
                // The guest may just have been reset, so only a second refusal counts.
                Err(DiscoveryError::Refused(_)) if !was_refused && left > 0 => was_refused = true,
                Err(DiscoveryError::Busy(_) | DiscoveryError::Absent(_)) if left > 0 => {}
                // Most modules become live soon after they are loaded, and most keys that seem torn
                // are just being changed.
                Ok(kernel) if left > 0 && !state.knows(&kernel) => {}
                found => break found?,
            }
            thread::sleep(INTERVAL);
        };
        if let Ok(log) = kernel.log.clone() {
            registry.remember_log(KernelLog {
                log,
                resets: state.resets,
            });
        }
        for part in &kernel.evidence.parts {
            tracing::debug!(part = part.name, time = ?part.time, bytes = part.bytes, "discovery");
        }
        for (key, why) in torn(&kernel) {
            limited!(warn, key = key.name, why, "a key was changed in part");
        }
        let torn = torn(&kernel).map(|(key, _)| key.address).collect();
        if let Some(used) = &kernel.evidence.file {
            tracing::debug!(?used, "debug file");
        }
        let same_kernel = same_kernel(&kernel);
        let modules = gates_of(
            &kernel,
            &[
                GateKind::ModuleCount,
                GateKind::ModuleList,
                GateKind::ModuleLeftOut,
            ],
        );
        let idle = gates_of(&kernel, &[GateKind::JumpLabelMutex, GateKind::ModuleMutex]);
        let left_out = kernel.left_out.iter();
        let left_out = left_out
            .map(|module| (module.address, module.word))
            .collect();
        state.generation += 1;
        let tables = tables(kernel, state.resets, state.generation, began.elapsed());
        tables
            .and_then(|tables| registry.register_kernel(tables))
            .map_err(|refused| DiscoveryError::Refused(refused.to_string()))?;
        (state.memory, state.left_out, state.torn) = (memory, left_out, torn);
        (state.kernel, state.modules, state.idle) = (same_kernel, modules, idle);
        Ok(())
    }
}

impl State {
    /// Keeps the discovered kernel to be read if it has panicked. Forgets a kernel that was kept
    /// and no longer runs.
    fn follow_panic(&self, registry: &Registry, discovered: Option<Arc<Registration>>) {
        let Some(ram) = registry.ram() else { return };
        let is_panic = |gate: &&ListedGate| gate.kind == GateKind::Panic;
        let (panic, others): (Vec<_>, Vec<_>) = self.kernel.iter().partition(is_panic);
        let memory = |registration: &Registration| registration.memory(ram);
        let runs = |registration: &Registration| open(others.clone(), &memory(registration));
        if let Some(kept) = registry.panicked()
            && !runs(&kept)
        {
            registry.forget_panicked();
        }
        if let Some(discovered) = discovered
            && runs(&discovered)
            && !open(panic, &memory(&discovered))
        {
            registry.keep_panicked(discovered);
        }
    }

    /// Waits briefly while the guest changes its modules. These reads take far less time than a
    /// discovery that must be repeated.
    fn wait_for_idle(&self, memory: &KernelMemory) {
        for _ in 1..ATTEMPTS {
            if open(&self.idle, memory) {
                return;
            }
            thread::sleep(INTERVAL);
        }
    }

    /// Returns whether the last discovery left out the same modules in the same states, and found
    /// the same keys torn.
    fn knows(&self, kernel: &live::Kernel) -> bool {
        let mut left_out = kernel.left_out.iter();
        left_out.all(|module| self.left_out.contains(&(module.address, module.word)))
            && torn(kernel).all(|(key, _)| self.torn.contains(&key.address))
    }
}

fn open<'g>(gates: impl IntoIterator<Item = &'g ListedGate>, memory: &KernelMemory) -> bool {
    gates.into_iter().all(|gate| {
        let mut bytes = [0; 8];
        let read = memory.read_gva(gate.address, &mut bytes[..usize::from(gate.width.min(8))]);
        read.is_ok() && u64::from_le_bytes(bytes) & gate.mask == gate.wanted
    })
}

impl Registry {
    /// Records why no kernel was discovered. A kernel that registers itself is not affected.
    fn not_discovered(&self, why: String) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().own.is_some() {
            return;
        }
        let had = self.state().registration.is_some();
        let is_published = {
            let state = self.state();
            state.phase == RegistrationPhase::Absent && state.error.as_ref() == Some(&why)
        };
        if is_published && !had {
            return;
        }
        self.publish(RegistrationPhase::Absent, Some(why), None);
        if had {
            self.announce_removed("");
        }
    }
}

/// Returns the torn keys, with the reasons.
fn torn(kernel: &live::Kernel) -> impl Iterator<Item = (&live::ObservedKey, &str)> {
    let keys = kernel.keys.iter();
    keys.filter_map(|key| Some((key, key.torn.as_deref()?)))
}

/// Returns the gates that close when the kernel no longer runs.
fn same_kernel(kernel: &live::Kernel) -> Vec<ListedGate> {
    gates_of(
        kernel,
        &[GateKind::SameKernel, GateKind::SystemState, GateKind::Panic],
    )
}

fn gates_of(kernel: &live::Kernel, kinds: &[GateKind]) -> Vec<ListedGate> {
    let gates = kernel.gates.iter();
    gates
        .filter(|gate| kinds.contains(&gate.kind) && !gate.per_cpu)
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests;
