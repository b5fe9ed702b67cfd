// SPDX-License-Identifier: Apache-2.0
//! State that outlives a registration: which kernel runs, and which of its modules are loaded.
//!
//! A kernel withdraws its registration before a hibernation. If the hibernation fails or was only a
//! test, the same kernel registers again under another generation. Its counts are unchanged and
//! still include the monitor's references. So holds and quarantines belong to a boot and, within
//! the boot, to the kernel image or to one load of a module. They continue while that image or load
//! is not registered.

use std::collections::{HashMap, HashSet};

use static_keys::MODULES_MAX;

/// A running kernel, from its first registration until another kernel registers.
#[derive(Clone, Debug)]
pub struct Boot {
    /// Random number that the guest chose.
    pub id: u64,
    /// Generation of the last registration.
    pub generation: u64,
    /// Epoch of the kernel image.
    pub epoch: u64,
    /// The loads, by address of `struct module`. An entry stays until its module is unloaded.
    loads: HashMap<u64, Load>,
}

#[derive(Clone, Copy, Debug)]
struct Load {
    /// Random number that the guest chose for this load.
    number: u64,
    epoch: u64,
}

impl Boot {
    /// Returns the state of a kernel that has just registered for the first time.
    pub fn new(id: u64, epoch: u64) -> Self {
        Self {
            id,
            generation: 0,
            epoch,
            loads: HashMap::new(),
        }
    }

    /// Returns the epoch of this load; `None` if the load was never registered.
    pub fn epoch_of(&self, module: u64, number: u64) -> Option<u64> {
        self.loads
            .get(&module)
            .filter(|load| load.number == number)
            .map(|load| load.epoch)
    }

    /// Records a load. An earlier load at the same address is replaced.
    pub fn loaded(&mut self, module: u64, number: u64, epoch: u64) {
        self.loads.insert(module, Load { number, epoch });
    }

    /// Drops unregistered loads when there are more than a guest can have.
    pub fn limit(&mut self, registered: impl Fn(u64) -> bool) {
        if self.loads.len() > MODULES_MAX {
            self.loads.retain(|module, _| registered(*module));
        }
    }

    /// Drops every load that is not in the list of loaded modules.
    pub fn retain(&mut self, loaded: impl Fn(u64) -> bool) {
        self.loads.retain(|module, _| loaded(*module));
    }

    /// Drops the load of a module that is about to be unloaded.
    pub fn unloaded(&mut self, module: u64) {
        self.loads.remove(&module);
    }

    /// Returns the epochs of the images whose keys exist, registered or not.
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

    /// The guest keeps loading modules and registering again, and never reports an unload.
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
