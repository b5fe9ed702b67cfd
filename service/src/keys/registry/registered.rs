// SPDX-License-Identifier: Apache-2.0
//! A kernel's registration with its modules.

use std::collections::HashMap;
use std::sync::Arc;

use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::live::LeftOut;
use static_keys::{Busy, Catalog, Class, GuestMemory, Key, KeyId, Probes};

use super::discovered;
use super::tables::{DiscoveredKernel, Promises};
use crate::keys::debug::DebugSites;
use crate::keys::declared::Declaration;
use crate::keys::error::KeysError;
use crate::keys::gate::ClosedGate;
use crate::keys::holds::{KeyInstance, KeyState};
use crate::keys::near::near;
use crate::keys::refused::RefusedModules;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_memory::paging::PageTable;

/// A kernel's registration with its modules.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Random number that the guest chose at boot.
    pub generation: u64,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Page table isolation is on.
    pub page_table_isolation: bool,
    /// KASLR offset of the kernel's text, in bytes.
    pub kaslr_offset: u64,
    /// `utsname()->release`, printable.
    pub release: String,
    /// Build id in hexadecimal; empty if unknown.
    pub build_id: String,
    /// Guarantees of the source.
    pub promises: Promises,
    /// The discovery; `None` if the kernel registered itself.
    pub discovery: Option<Arc<DiscoveredKernel>>,
    /// Keys and sites.
    pub catalog: Catalog,
    /// Descriptors of dynamic debug.
    pub debug: Arc<DebugSites>,
    /// Keys that the host declares.
    pub declared: HashMap<KeyId, Arc<Declaration>>,
    /// The reasons why declarations do not apply to this kernel.
    pub undeclared: Vec<String>,
    /// Offset of `type` in `struct static_key`; `None` in kernels without jump labels.
    pub(super) type_offset: Option<u32>,
    /// Number of the boot, from the kernel's tables.
    pub(super) boot: u64,
    /// Epoch of the kernel image. No other boot has it.
    pub(in crate::keys) epoch: u64,
    /// Epochs of modules by name.
    pub(super) modules: HashMap<Arc<str>, u64>,
    /// Modules that are loaded but not in the catalog.
    pub(super) refused: RefusedModules,
}

impl Registration {
    /// Returns the name of the boot. Another process that serves the same guest gives the boot the
    /// same name. The name of a discovered kernel's boot stays when [`Discoverable::resets`]
    /// changes, because the event may be a stop and resume by another client. It changes only if
    /// the kernel's memory does not distinguish its boots.
    ///
    /// [`Discoverable::resets`]: patchbay_guest::discovery::Discoverable::resets
    pub fn boot_identity(&self) -> String {
        match &self.discovery {
            Some(kernel) if !kernel.tells_boots_apart() => format!("{:016x}", self.boot),
            _ => self.kept_boot(),
        }
    }

    /// Returns the name of the boot for the ledger. It does not contain the resets that a discovery
    /// mixes into `boot`, because a later process counts other resets.
    pub fn kept_boot(&self) -> String {
        let resets = self.discovery.as_ref().map_or(0, |kernel| kernel.resets);
        format!("{:016x}", discovered::found_number(self.boot, resets))
    }

    /// Returns the guest's memory as this kernel maps it.
    pub fn memory(&self, ram: &GuestRam) -> KernelMemory {
        KernelMemory::new(ram, self.page_table)
    }

    /// Returns the key with this full name.
    ///
    /// # Errors
    /// [`KeysError::KeyNotFound`] with similar names; MODULE_REFUSED if the key's module was
    /// refused.
    pub fn find(&self, name: &str) -> Result<&Key, KeysError> {
        // ":name" is a key of the kernel image, as in patterns.
        let full_name = name.strip_prefix(':').unwrap_or(name);
        let not_found = || KeysError::KeyNotFound {
            name: name.to_owned(),
            near: near(name, self.catalog.keys().map(|key| &*key.full_name)),
        };
        let home = || full_name.split_once(':').map_or("", |(module, _)| module);
        match self.catalog.find(full_name) {
            Some(key) => Ok(key),
            None => match self.left_out(|module| module.name == home()) {
                Some(module) => Err(KeysError::Busy {
                    kind: ClosedGate::ModuleState,
                    gate: not_live(module),
                    attempts: 1,
                    every_key: false,
                }),
                None => Err(self.refused.home(name).unwrap_or_else(not_found)),
            },
        }
    }

    /// Returns a loaded module that `which` selects and that was not live when the kernel was
    /// discovered.
    fn left_out(&self, which: impl Fn(&LeftOut) -> bool) -> Option<&LeftOut> {
        let left_out = &self.discovery.as_ref()?.left_out;
        left_out.iter().find(|module| which(module))
    }

    /// Returns a module that uses the key but is not registered, if the reason for this is known.
    pub fn name_user(&self, busy: &Busy) -> Option<String> {
        let Busy::UnknownModule { key, module } = busy else {
            return None;
        };
        let user = self.left_out(|left_out| left_out.address == *module)?;
        Some(format!(
            "key {key} waits for a module that uses it: {}",
            not_live(user)
        ))
    }

    /// Returns an error if a refused module uses the key, because a retry does not help while this
    /// module is loaded.
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

    /// Returns the names of modules that are loaded and not in the catalog, because their
    /// registration was refused or because they were not live.
    pub fn other_modules(&self) -> impl Iterator<Item = &str> {
        let left_out = self.discovery.iter().flat_map(|kernel| &kernel.left_out);
        let left_out = left_out.map(|module| module.name.as_str());
        self.refused.names().chain(left_out)
    }

    /// Returns the probes of a key's tracepoint; `None` for other keys, or if the guest's pointer
    /// is unmapped.
    fn probes(&self, memory: &KernelMemory, key: KeyId) -> Option<Probes> {
        self.catalog.probes(memory, key).ok().flatten()
    }

    /// Returns the state on which a key's holds depend; `None` if its count cannot be read.
    pub fn state(&self, memory: &KernelMemory, key: &Key) -> Option<KeyState> {
        let count = self.catalog.enabled(memory, key.id).ok()?;
        Some(self.state_at(memory, key.id, key.class, count))
    }

    /// Like [`Self::state`], with a count that was already read.
    #[inline]
    pub fn state_at(
        &self,
        memory: &KernelMemory,
        key: KeyId,
        class: Class,
        count: i32,
    ) -> KeyState {
        let tracepoint = class == Class::Tracepoint;
        let probes = || self.probes(memory, key);
        KeyState {
            count,
            tracepoint,
            probes: tracepoint.then(probes).flatten(),
        }
    }

    /// Returns whether the key was initialised as true (type bit 0, `include/linux/jump_label.h`).
    pub fn initially_true(&self, ram: &GuestRam, key: &Key) -> bool {
        const JUMP_TYPE_TRUE: u8 = 1;
        let Some(offset) = self.type_offset else {
            return false;
        };
        let mut first = [0];
        let address = key.id.0.wrapping_add(offset.into());
        // A key that cannot be read belongs to a module that is being unloaded.
        self.memory(ram).read_gva(address, &mut first).is_ok() && first[0] & JUMP_TYPE_TRUE != 0
    }

    pub(super) fn module_name(&self, address: u64) -> Option<&str> {
        self.catalog
            .modules()
            .find(|(id, _)| *id == address)
            .map(|(_, name)| name)
    }

    /// Returns the instance of a key.
    pub fn instance(&self, key: &Key) -> KeyInstance {
        let epoch = match key.module() {
            "" => self.epoch,
            module => self.modules.get(module).copied().unwrap_or(self.epoch),
        };
        KeyInstance { epoch, id: key.id }
    }

    /// Returns whether the key instance still exists.
    pub fn has(&self, instance: KeyInstance) -> bool {
        self.catalog
            .key(instance.id)
            .is_some_and(|key| self.instance(key) == instance)
    }
}

/// [`Registration::instance`] for many keys. Caches the last module, because keys of one module are
/// adjacent.
#[derive(Debug)]
pub struct Instances<'a> {
    registration: &'a Registration,
    /// Name and epoch of the last key's module.
    last: (&'a str, u64),
}

impl<'a> Instances<'a> {
    /// Resolves the keys of this registration.
    pub fn of(registration: &'a Registration) -> Self {
        Self {
            registration,
            last: ("", registration.epoch),
        }
    }

    /// Returns the instance of a key.
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

fn not_live(module: &LeftOut) -> String {
    format!("module {} is not LIVE ({})", module.name, module.state)
}
