// SPDX-License-Identifier: Apache-2.0
//! The module that guests load and unload.

use std::sync::{Arc, Mutex};

use patchbay_guest::abi;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::requests::GuestRequests;
use patchbay_guest::testing::TestKey;
use patchbay_service::keys::Registry;

use super::{Guest, Kind, locked};

/// The key of the module.
pub const MODULE_KEY: &str = "mod:gamma";
const MODULE: &str = "mod";
/// The maximum number of times that a guest loads the module: each time it has another place.
const MAX_LOADS: u32 = 24;

/// The requests of the kernel. Services find the kernel, and only the requests about the module
/// are served, by the service that runs.
#[derive(Default)]
pub struct Requests(pub Mutex<Option<Arc<Registry>>>);

impl GuestRequests for Requests {
    fn attach(&self, _: GuestRam) {}

    fn request(&self, op: u32, page: u64) -> i32 {
        match &*locked(&self.0) {
            Some(registry) if op != abi::OP_REGISTER => registry.request(op, page),
            _ => 0,
        }
    }
}

impl Guest {
    /// Loads the module. Its key has no claims and the count with which it is loaded.
    pub fn load_module(&mut self) {
        if self.loads == MAX_LOADS {
            self.kinds.insert(MODULE_KEY, Kind::Missing);
            return;
        }
        self.loads += 1;
        self.own_changes += 1;
        self.is_settled = false;
        self.kinds.remove(MODULE_KEY);
        let (_, name) = MODULE_KEY.split_once(':').expect("it has a module");
        let key = TestKey {
            count: self.original[MODULE_KEY],
            ..TestKey::new(name, 1)
        };
        assert_eq!(self.vm.add_module(MODULE, &[key]), 0);
    }

    /// Unloads the module, which ends everybody's claims on its key.
    pub fn unload_module(&mut self) {
        self.own_changes += 1;
        self.is_settled = false;
        assert_eq!(self.vm.delete_module(MODULE), 0);
        self.kinds.insert(MODULE_KEY, Kind::Missing);
        // Without a record of the claims, nobody knows that they are gone.
        if self.orphans.is_none() {
            self.changed.remove(MODULE_KEY);
        }
        for wants in self.others.values_mut() {
            wants.remove(MODULE_KEY);
        }
    }

    /// Tells a new service of the module, if it is loaded.
    pub fn register_module(&self) {
        if self.kind(MODULE_KEY) != Kind::Missing {
            assert_eq!(self.vm.add_module_again(MODULE, |_| {}), 0);
        }
    }
}
