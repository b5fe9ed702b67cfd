// SPDX-License-Identifier: Apache-2.0
//! Discovers the kernel of a guest that does not register, when its keys are requested.
//!
//! A kernel that registers itself is never discovered: it says by itself when its keys can be changed.
//! Its registration replaces a discovery. After it has withdrawn its registration, only a kernel that
//! differs from it is discovered (kexec).
//!
//! Checking a discovered kernel takes a few reads: a word that differs from boot to boot, and words
//! that change with each module. They are gates too, so a change checks them again in the stopped
//! guest.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use patchbay_kernel_image::live::{self, DiscoveryError, GateKind, Way};
pub use patchbay_kernel_image::live::{Cpu, PhysicalMemory};
use static_keys::GuestMemory;

use super::discovered::tables;
use super::{Registration, RegistrationPhase, Registry};

/// What a monitor provides for a discovery.
pub trait Discoverable: Send + Sync + Debug {
    /// The guest's memory. It is read while the guest runs.
    fn memory(&self) -> &dyn PhysicalMemory;

    /// Registers of the vCPUs.
    ///
    /// # Errors
    /// Why there are none. All memory is searched for the kernel then.
    fn cpus(&self) -> Result<Vec<Cpu>, String>;

    /// Changes with each reset of the guest that the monitor knows of.
    fn resets(&self) -> u64;

    /// Whether the guest is held stopped. It is not searched then, and keeps its registration.
    fn is_held(&self) -> bool;
}

/// Attempts while the guest changes the tables.
const ATTEMPTS: usize = 5;
/// Minimum time between a failure and the next attempt.
const REST: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Discovery {
    guest: Arc<dyn Discoverable>,
    /// Held during a discovery, so that callers do not search concurrently.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Words of the discovered kernel.
    words: Vec<Word>,
    resets: u64,
    generation: u64,
    failed: Option<Instant>,
}

/// A word whose change indicates another kernel or other modules.
#[derive(Clone, Copy, Debug)]
struct Word {
    address: u64,
    width: u8,
    value: u64,
}

impl Discovery {
    pub fn new(guest: Arc<dyn Discoverable>) -> Self {
        Self {
            guest,
            state: Mutex::default(),
        }
    }

    /// Updates the registry.
    pub fn look(&self, registry: &Registry) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.guest.is_held() {
            return;
        }
        let (resets, last) = (self.guest.resets(), state.resets);
        let (registered, own) = {
            let mut state = registry.state();
            if resets != last {
                // What ran before the reset decides nothing.
                state.own = None;
            }
            (state.registration.clone(), state.own.clone())
        };
        if own.is_some_and(|own| own.withdrawn.is_none()) {
            return;
        }
        if let Some(registration) = registered
            && resets == last
            && registry
                .ram()
                .is_some_and(|ram| state.holds(&registration, ram))
        {
            return;
        }
        if resets == last && state.failed.is_some_and(|failed| failed.elapsed() < REST) {
            return;
        }
        state.resets = resets;
        state.failed = None;
        if let Err(why) = self.find(registry, &mut state) {
            state.failed = Some(Instant::now());
            registry.not_discovered(why);
        }
    }

    fn find(&self, registry: &Registry, state: &mut State) -> Result<(), String> {
        let began = Instant::now();
        let mut left = ATTEMPTS;
        let kernel = loop {
            let (cpus, way) = match self.guest.cpus() {
                Ok(cpus) => (cpus, Way::Image),
                Err(why) => {
                    tracing::debug!(why, "no registers");
                    (Vec::new(), Way::Note)
                }
            };
            left -= 1;
            match live::discover(self.guest.memory(), &cpus, way) {
                Ok(kernel) => break kernel,
                Err(DiscoveryError::Busy(_)) if left > 0 => {}
                Err(error) => return Err(error.to_string()),
            }
        };
        for part in &kernel.evidence.parts {
            tracing::debug!(part = part.name, time = ?part.time, bytes = part.bytes, "discovery");
        }
        state.words = words(&kernel);
        state.generation += 1;
        let tables = tables(kernel, state.generation, began.elapsed());
        tables
            .and_then(|tables| registry.register_kernel(tables))
            .map_err(|refused| refused.to_string())
    }
}

impl State {
    /// Whether the discovered kernel and its modules are unchanged.
    fn holds(&self, registration: &Registration, ram: &crate::memory::GuestRam) -> bool {
        let memory = registration.memory(ram);
        self.words.iter().all(|word| {
            let mut bytes = [0; 8];
            let read = memory.read_gva(word.address, &mut bytes[..usize::from(word.width.min(8))]);
            read.is_ok() && u64::from_le_bytes(bytes) == word.value
        })
    }
}

impl Registry {
    /// Records why no kernel was discovered. A kernel that registers itself is not affected.
    fn not_discovered(&self, why: String) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().own.is_some() {
            return;
        }
        let had = self.state().registration.is_some();
        self.publish(RegistrationPhase::Absent, why, None);
        if had {
            self.announce_removed("");
        }
    }
}

fn words(kernel: &live::Kernel) -> Vec<Word> {
    let lasting = [
        GateKind::SameKernel,
        GateKind::ModuleCount,
        GateKind::ModuleList,
    ];
    let gates = kernel
        .gates
        .iter()
        .filter(|gate| lasting.contains(&gate.kind) && !gate.per_cpu);
    gates
        .map(|gate| Word {
            address: gate.address,
            width: gate.width,
            value: gate.wanted,
        })
        .collect()
}

#[cfg(test)]
mod tests;
