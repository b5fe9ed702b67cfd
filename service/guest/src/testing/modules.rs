// SPDX-License-Identifier: Apache-2.0
//! The modules of the test kernel.

use std::sync::atomic::Ordering;

use crate::abi;
use zerocopy::{FromZeros, IntoBytes};

use super::image::*;
use super::{InMemoryGuest, TestKey, lock};

impl InMemoryGuest {
    /// Loads a module with these keys.
    ///
    /// # Panics
    /// If the name is longer than 63 bytes.
    pub fn add_module(&self, name: &str, keys: &[TestKey]) -> i32 {
        let slot = {
            let mut modules = lock(&self.modules);
            let slot = modules.len() as u64;
            modules.push((name.to_owned(), MODULES + slot * MODULE_BYTES));
            slot
        };
        let base = MODULES + slot * MODULE_BYTES;
        let layout = Layout {
            text: base + 0x1000,
            table: base + 0x5000,
            keys: base + 0x7000,
            directory: base + 0x8000,
            names: base + 0x9000,
            module: base,
        };
        let (jump_table, directory) = self.lay_out(&format!("{name}:"), keys, &layout);
        let mut request = self.module(abi::OP_MODULE_ADD, base);
        request.jump_table = jump_table;
        request.text = abi::Range {
            start: base + 0x1000,
            end: base + 0x5000,
        };
        request.directory = directory;
        request.load = 1 + self.loads.fetch_add(1, Ordering::SeqCst);
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        lock(&self.loaded).insert(name.to_owned(), request);
        self.request(abi::OP_MODULE_ADD, request.as_bytes())
    }

    /// Registers a module that stayed loaded, after [`InMemoryGuest::register_again`]. `change`
    /// modifies the request.
    ///
    /// # Panics
    /// If the module was never loaded.
    pub fn add_module_again(&self, name: &str, change: impl FnOnce(&mut abi::Module)) -> i32 {
        let mut request = lock(&self.loaded)[name];
        request.header = self.header(abi::OP_MODULE_ADD, size_of::<abi::Module>());
        change(&mut request);
        self.request(abi::OP_MODULE_ADD, request.as_bytes())
    }

    /// Announces that the module is about to be unloaded.
    ///
    /// # Panics
    /// If the module was never loaded.
    pub fn delete_module(&self, name: &str) -> i32 {
        let request = self.module(abi::OP_MODULE_DEL, self.module_address(name));
        self.request(abi::OP_MODULE_DEL, request.as_bytes())
    }

    fn module_address(&self, name: &str) -> u64 {
        let modules = lock(&self.modules);
        let mut newest = modules.iter().rev();
        newest.find(|(of, _)| of == name).expect("was loaded").1
    }

    /// Makes a module the only user of a key without sites, as loading the module does. With
    /// `None`, removes the user again.
    ///
    /// # Panics
    /// If the module was never loaded.
    pub fn set_user(&self, key: &str, module: Option<&str>) {
        const LINKED: u64 = 2;
        let chain = module.map_or(0, |module| {
            let base = self.module_address(module);
            let node = base + 0xa000;
            for (offset, word) in [(0, 0), (8, base + 0x5000), (16, base)] {
                self.write(node + offset, &word.to_le_bytes());
            }
            node | LINKED
        });
        let key = self.place(key, |place| place.key);
        self.write(key + 8, &chain.to_le_bytes());
    }

    fn module(&self, op: u32, address: u64) -> abi::Module {
        let mut request = abi::Module::new_zeroed();
        request.header = self.header(op, size_of::<abi::Module>());
        request.module = address;
        request
    }
}
