// SPDX-License-Identifier: Apache-2.0
//! Keeps the requests that make up the guest's registration, so that a copy of the guest, whose
//! kernel does not register again, can be registered by them.
//!
//! The guest may free the arrays that a request refers to. The gates and the CPU offsets are kept.
//! The list of the keys is made from the catalog when the guest is saved, so it takes no memory
//! before.

use std::sync::PoisonError;

use patchbay_guest::abi;
use patchbay_guest::snapshot::{KeptArray, KeptRequest};
use static_keys::{Catalog, GuestMemory, ListedKeys};
use zerocopy::IntoBytes;

use super::Registry;
use super::request_memory::RequestMemory;
use super::requests::page_table;
use crate::keys::registration::{Refused, read_request};

/// The requests of the registration: the kernel's, then one for each module that is registered,
/// with the address of its `struct module`. Their number is bounded by that of the modules.
#[derive(Debug, Default)]
pub(super) struct KeptRequests(Vec<(Option<u64>, KeptRequest)>);

impl KeptRequests {
    /// Notes a request that was served.
    pub fn note(&mut self, memory: RequestMemory<'_>, op: u32, page: &[u8], accepted: bool) {
        let keep = || {
            let arrays = match op {
                abi::OP_REGISTER => gates(memory, page),
                _ => Vec::new(),
            };
            // Pages end in zeros.
            let used = page.iter().rposition(|&byte| byte != 0);
            let page = page[..used.map_or(0, |last| last + 1)].to_vec();
            KeptRequest { op, page, arrays }
        };
        match (op, accepted) {
            // A kernel that registers withdraws what was registered before, even if it is refused.
            (abi::OP_REGISTER, _) | (abi::OP_UNREGISTER, true) => {
                self.0.clear();
                if op == abi::OP_REGISTER && accepted {
                    self.0.push((None, keep()));
                }
            }
            (abi::OP_MODULE_ADD | abi::OP_MODULE_DEL, true) => {
                let Ok(request) = read_request::<abi::Module>(page, op) else {
                    return;
                };
                let module = Some(request.module);
                self.0.retain(|(of, _)| *of != module);
                if op == abi::OP_MODULE_ADD {
                    self.0.push((module, keep()));
                }
            }
            _ => {}
        }
    }
}

/// Reads the array of gates and that of the CPU offsets, whose sizes the registration has checked.
/// The guest waits for the request, so it has not freed them yet.
fn gates(memory: RequestMemory<'_>, page: &[u8]) -> Vec<KeptArray> {
    let Ok(of) = read_request::<abi::Descriptor>(page, abi::OP_REGISTER) else {
        return Vec::new();
    };
    let memory = memory.mapped_by(page_table(&of));
    let arrays = [
        (of.gates, of.gate_count as usize * of.gate_size as usize),
        (of.cpu_offsets, of.cpu_count as usize * size_of::<u64>()),
    ];
    let arrays = arrays.into_iter().filter(|(_, length)| *length > 0);
    arrays
        .filter_map(|(address, length)| {
            let mut bytes = vec![0; length];
            memory.read_gva(address, &mut bytes).ok()?;
            Some(KeptArray { address, bytes })
        })
        .collect()
}

/// Adds the list of an image's keys to a request.
fn add_keys(request: &mut KeptRequest, catalog: &Catalog) -> Option<()> {
    let page = whole(&request.page);
    let keys = |directory: &mut abi::Directory, listed: ListedKeys| {
        directory.key_count = listed.count;
        directory.key_size = listed.record_size;
        directory.names_size = u32::try_from(listed.names.len()).ok()?;
        Some([
            (directory.keys, listed.records),
            (directory.names, listed.names),
        ])
    };
    let (page, arrays) = match request.op {
        abi::OP_REGISTER => {
            let mut of = read_request::<abi::Descriptor>(&page, request.op).ok()?;
            let arrays = keys(&mut of.directory, catalog.listed_keys(0)?)?;
            (of.as_bytes().to_vec(), arrays)
        }
        _ => {
            let mut of = read_request::<abi::Module>(&page, request.op).ok()?;
            let arrays = keys(&mut of.directory, catalog.listed_keys(of.module)?)?;
            (of.as_bytes().to_vec(), arrays)
        }
    };
    request.page = page;
    let arrays = arrays.map(|(address, bytes)| KeptArray { address, bytes });
    request.arrays.extend(arrays);
    Some(())
}

/// Returns a page with the zeros that were not kept.
fn whole(page: &[u8]) -> Vec<u8> {
    let mut page = page.to_vec();
    page.resize(abi::REQUEST_PAGE_SIZE, 0);
    page
}

impl Registry {
    /// Returns the requests of the current registration.
    pub(in crate::keys) fn kept_requests(&self) -> Vec<KeptRequest> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let registration = self.state().registration.clone();
        let Some(registration) = registration.filter(|of| of.discovery.is_none()) else {
            return Vec::new();
        };
        let kept = writer.kept.0.iter().map(|(_, kept)| kept.clone());
        let whole = kept.filter_map(|mut request| {
            add_keys(&mut request, &registration.catalog)?;
            Some(request)
        });
        whole.collect()
    }

    /// Registers the kernel of a copy by the requests of the guest that was saved. The tables are
    /// read from the copy's memory and checked as those of a new request are. Must be called before
    /// the guest starts.
    ///
    /// # Errors
    /// A request is refused, so the memory does not have the tables that it had when it was saved.
    pub fn register_again(&self, requests: &[KeptRequest]) -> Result<(), Refused> {
        let ram = self.ram.get();
        let ram = ram.ok_or_else(|| Refused("the guest has no memory yet".to_owned()))?;
        for request in requests {
            let memory = RequestMemory::of_copy(ram, &request.arrays);
            self.serve(memory, request.op, &whole(&request.page))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use patchbay_guest::guest::Guest;
    use patchbay_guest::testing::{InMemoryGuest, TestKey};
    use patchbay_memory::paging::PageTable;

    use super::*;

    fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 2)]);
        (guest, registry)
    }

    /// Returns the registry of a copy, which has the same memory.
    fn copy(guest: &InMemoryGuest) -> Registry {
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        registry
    }

    #[test]
    fn a_copy_is_registered_by_the_kept_requests() {
        let (guest, registry) = guest();
        guest.set_count("alpha", 1);
        let kept = registry.kept_requests();
        assert_eq!(kept.len(), 1);
        let copy = copy(&guest);
        assert!(copy.known().is_err());
        copy.register_again(&kept).expect("registered");
        let [first, second] = [&*registry, &copy].map(|registry| {
            let described = registry.describe();
            let known = registry.known().expect("registered");
            (
                described.keys,
                described.sites,
                known.registration.generation,
            )
        });
        assert_eq!(first, second);
        // A copy can be copied.
        assert_eq!(copy.kept_requests(), kept);
    }

    /// Overwrites the arrays of a request, as a kernel does which frees them.
    fn free(guest: &InMemoryGuest, table: PageTable, arrays: &[(u64, usize)]) {
        let memory = RequestMemory::from(guest.ram()).mapped_by(table);
        for &(address, length) in arrays {
            for at in (address..address + length as u64).step_by(8) {
                let place = memory.locate(at, 8).expect("mapped");
                memory.write(place, &[0x5a; 8]).expect("written");
            }
        }
    }

    /// Returns every key with its class and its module.
    fn keys(registry: &Registry) -> Vec<String> {
        let known = registry.known().expect("registered");
        let keys = known.registration.catalog.keys();
        let mut keys: Vec<String> = keys.map(|key| format!("{key:?}")).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn a_copy_is_registered_although_the_guest_has_freed_its_arrays() {
        let registry = Arc::new(Registry::default());
        let image = [
            TestKey::new("alpha", 2),
            TestKey::guarded("beta"),
            TestKey::tracepoint("gamma", false),
        ];
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &image);
        let added = guest.add_module("mod", &[TestKey::new("delta", 1), TestKey::guarded("eps")]);
        assert_eq!(added, 0);
        let kept = registry.kept_requests();
        let page = whole(&kept[0].page);
        let of = read_request::<abi::Descriptor>(&page, abi::OP_REGISTER).expect("whole");
        let page = whole(&kept[1].page);
        let module = read_request::<abi::Module>(&page, abi::OP_MODULE_ADD).expect("whole");
        let mut arrays = vec![
            (of.gates, of.gate_count as usize * of.gate_size as usize),
            (of.cpu_offsets, of.cpu_count as usize * 8),
        ];
        for listed in [of.directory, module.directory] {
            arrays.push((
                listed.keys,
                listed.key_count as usize * listed.key_size as usize,
            ));
            arrays.push((listed.names, listed.names_size as usize));
        }
        free(&guest, page_table(&of), &arrays);
        let second = copy(&guest);
        second.register_again(&kept).expect("registered");
        assert_eq!(keys(&second), keys(&registry));
        assert_eq!(keys(&second).len(), 5);
        // Without the arrays, the copy finds what the guest has written there since.
        let mut without = kept.clone();
        without[0].arrays.clear();
        assert!(copy(&guest).register_again(&without).is_err());
        // A copy of the copy has them too.
        assert_eq!(second.kept_requests(), kept);
    }

    #[test]
    fn only_the_current_registration_is_kept() {
        let (guest, registry) = guest();
        assert_eq!(guest.register_again(), 0);
        assert_eq!(registry.kept_requests().len(), 1);
        assert_eq!(guest.unregister(), 0);
        assert_eq!(registry.kept_requests(), []);
        assert_eq!(guest.register_again(), 0);
        assert_eq!(registry.kept_requests().len(), 1);
        // A kernel that is refused is not registered any longer.
        assert_ne!(guest.request(abi::OP_REGISTER, &[0; 64]), 0);
        assert_eq!(registry.kept_requests(), []);
    }

    #[test]
    fn a_request_that_does_not_fit_the_memory_is_refused() {
        let (guest, registry) = guest();
        let kept = registry.kept_requests();
        for at in 0..64 {
            let mut changed = kept.clone();
            changed[0].page[at] ^= 0xff;
            // Some fields, such as the generation, may have any value.
            let _ = copy(&guest).register_again(&changed);
        }
        let mut changed = kept.clone();
        changed[0].page[0] ^= 0xff;
        assert!(copy(&guest).register_again(&changed).is_err());
        changed[0].page.clear();
        assert!(copy(&guest).register_again(&changed).is_err());
        assert!(Registry::default().register_again(&kept).is_err());
    }
}
