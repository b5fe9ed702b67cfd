// SPDX-License-Identifier: Apache-2.0
//! What outlives a registration: which kernel runs, and which of its modules are loaded.
//!
//! A kernel takes its registration back before a hibernation. If that fails, or is only a test, the
//! same kernel registers again, under another generation. Its counts are what they were, and the
//! monitor's references are among them. So holds and quarantines belong to a boot, and within it to
//! the kernel image or to one load of a module, whether that is registered at the moment or not.

use std::collections::{HashMap, HashSet};

use static_keys::MODULES_MAX;

/// A running kernel, from its first registration until another kernel registers.
#[derive(Clone, Debug)]
pub struct Boot {
    /// Drawn by the guest.
    pub id: u64,
    /// Generation of the last registration.
    pub generation: u64,
    /// Of the kernel image.
    pub epoch: u64,
    /// By address of the `struct module`. A module is here until it is unloaded.
    loads: HashMap<u64, Load>,
}

#[derive(Clone, Copy, Debug)]
struct Load {
    /// Drawn by the guest.
    number: u64,
    epoch: u64,
}

impl Boot {
    /// A kernel that has just registered for the first time.
    pub fn new(id: u64, epoch: u64) -> Self {
        Self {
            id,
            generation: 0,
            epoch,
            loads: HashMap::new(),
        }
    }

    /// Epoch of this load of a module, if it was registered before.
    pub fn epoch_of(&self, module: u64, number: u64) -> Option<u64> {
        self.loads
            .get(&module)
            .filter(|load| load.number == number)
            .map(|load| load.epoch)
    }

    /// Remembers a load. One that was at the same address is gone.
    pub fn loaded(&mut self, module: u64, number: u64, epoch: u64) {
        self.loads.insert(module, Load { number, epoch });
    }

    /// Forgets loads of modules that are not registered if there are more than a guest can have.
    pub fn limit(&mut self, registered: impl Fn(u64) -> bool) {
        if self.loads.len() > MODULES_MAX {
            self.loads.retain(|module, _| registered(*module));
        }
    }

    /// Forgets the loads of all modules that are not loaded any more.
    pub fn retain(&mut self, loaded: impl Fn(u64) -> bool) {
        self.loads.retain(|module, _| loaded(*module));
    }

    /// The module is about to be unloaded.
    pub fn unloaded(&mut self, module: u64) {
        self.loads.remove(&module);
    }

    /// Epochs of the images whose keys exist.
    pub fn epochs(&self) -> HashSet<u64> {
        let loads = self.loads.values().map(|load| load.epoch);
        loads.chain([self.epoch]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_known_by_address_and_number() {
        let mut boot = Boot::new(7, 1);
        boot.loaded(0x1000, 1, 2);
        assert_eq!(boot.epoch_of(0x1000, 1), Some(2));
        assert_eq!(boot.epoch_of(0x1000, 2), None);
        assert_eq!(boot.epoch_of(0x2000, 1), None);
        boot.loaded(0x1000, 2, 3);
        assert_eq!(boot.epochs(), HashSet::from([1, 3]));
        boot.unloaded(0x1000);
        assert_eq!(boot.epochs(), HashSet::from([1]));
    }

    /// A guest that loads without end and unloads nothing, registering anew in between.
    #[test]
    fn loads_are_bounded() {
        let mut boot = Boot::new(7, 1);
        for number in 0..3 * MODULES_MAX as u64 {
            boot.loaded(number, number, number);
            boot.limit(|module| module == number);
            assert!(boot.epoch_of(number, number).is_some());
            assert!(boot.loads.len() <= MODULES_MAX);
        }
    }
}
