// SPDX-License-Identifier: Apache-2.0
//! Registers the test kernel as discovery finds it: with tables that have already been read, and
//! with classes that a guest does not declare.

use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::abi;
use patchbay_guest::guest::Guest;
use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::live::{FileUse, LeftOut, Way};
use static_keys::{Class, FoundImage, FoundKernel, FoundKey, GuestMemory, Image, Nops};
use zerocopy::FromBytes;

use crate::keys::debug::DebugSites;
use crate::keys::registry::discovered::boot_number;
use crate::keys::registry::{Contents, DiscoveredKernel, KernelTables, Registry, requests};
use patchbay_guest::testing::InMemoryGuest;
use patchbay_kernel_image::DebugLine;

/// Returns the kernel that registered last, as discovery finds it.
///
/// # Panics
/// If no kernel is registered.
pub fn found(guest: &InMemoryGuest) -> KernelTables {
    let (descriptor, _) =
        abi::Descriptor::read_from_prefix(&guest.last_request()).expect("a whole page");
    found_in(guest.ram(), &descriptor)
}

/// Returns the kernel that a descriptor describes, as discovery finds it in this memory.
///
/// # Panics
/// If the tables are refused.
pub fn found_in(ram: &GuestRam, descriptor: &abi::Descriptor) -> KernelTables {
    let mut tables = requests::tables(ram, descriptor).expect("it follows the rules");
    let registry = Registry::default();
    registry.attach(ram.clone());
    registry.register_kernel(tables.clone()).expect("taken");
    let Contents::Described(kernel) = tables.contents else {
        panic!("the guest described it")
    };
    let registration = registry.snapshot().expect("registered").registration;
    let length = kernel.jump_table.end - kernel.jump_table.start;
    let mut bytes = vec![0; usize::try_from(length).expect("a small table")];
    let memory = registration.memory(ram);
    memory
        .read_gva(kernel.jump_table.start, &mut bytes)
        .expect("mapped");
    let entries = kernel
        .format
        .entries(kernel.jump_table.start, &bytes, Image::Live);
    let keys = registration.catalog.keys().map(|key| FoundKey {
        address: key.id.0,
        name: key.name().to_owned(),
        class: key.class,
        tracepoint: key.tracepoint,
        switched_by_function: key.switched_by_function,
    });
    tables.contents = Contents::Found(FoundKernel {
        format: kernel.format,
        nops: Nops::Fixed,
        layout: kernel.layout,
        gates: kernel.gates,
        images: vec![FoundImage {
            id: 0,
            name: String::new(),
            text: kernel.text,
            ro_after_init: kernel.ro_after_init,
            jump_table: kernel.jump_table,
            entries: entries.collect(),
            keys: keys.collect(),
        }],
    });
    tables
}

/// Returns the kernel that registered last, as discovery finds it after this many resets of the
/// guest, or stops and resumes by other clients.
///
/// # Panics
/// If no kernel is registered.
pub fn found_after(guest: &InMemoryGuest, resets: u64) -> KernelTables {
    let mut tables = found(guest);
    tables.boot = boot_number(tables.boot, resets);
    tables.discovery = Some(discovered_after(resets));
    tables
}

/// Returns the discovery of a kernel without gates, after this many resets of the guest.
pub fn discovered_after(resets: u64) -> DiscoveredKernel {
    DiscoveredKernel {
        resets,
        way: Way::Image,
        time: Duration::from_millis(30),
        file: None,
        gates: Vec::new(),
        missing_gates: Vec::new(),
        left_out: Vec::new(),
        functions: Arc::default(),
        torn: std::collections::HashSet::new(),
    }
}

/// Replaces the registration of a guest in memory by a discovery.
pub trait Discovered {
    /// Replaces the registration by a discovered kernel, in which some keys belong to lines of
    /// dynamic debug and others gate static calls.
    ///
    /// # Panics
    /// If the tables are refused.
    fn discover(&self, registry: &Registry, debug: &[(&str, DebugLine)], never: &[&str]);

    /// Replaces the registration by a discovered kernel that does not register, with this file of
    /// the host.
    ///
    /// # Panics
    /// If the tables are refused.
    fn discover_with(&self, registry: &Registry, file: FileUse);
}

impl Discovered for InMemoryGuest {
    fn discover(&self, registry: &Registry, debug: &[(&str, DebugLine)], never: &[&str]) {
        let mut tables = found(self);
        tables.generation = self.next_generation();
        let Contents::Found(kernel) = &mut tables.contents else {
            panic!("just made")
        };
        let mut sites = Vec::new();
        for key in kernel.images.iter_mut().flat_map(|image| &mut image.keys) {
            if let Some((_, site)) = debug.iter().find(|(name, _)| *name == key.name) {
                key.class = Class::DynamicDebug;
                sites.push((key.address, site.clone()));
            }
            if never.contains(&key.name.as_str()) {
                key.class = Class::Never;
            }
        }
        tables.debug = DebugSites::new(sites).expect("few");
        registry.register_kernel(tables).expect("taken");
    }

    fn discover_with(&self, registry: &Registry, file: FileUse) {
        let mut tables = found(self);
        assert_eq!(self.unregister(), 0);
        tables.boot ^= 1;
        tables.generation = self.next_generation();
        tables.release += "-other";
        tables.discovery = Some(DiscoveredKernel {
            resets: 0,
            way: Way::Image,
            time: Duration::from_millis(30),
            file: Some(file),
            gates: vec!["system_state", "text_mutex"],
            missing_gates: vec!["number of module changes"],
            left_out: vec![LeftOut {
                address: 0xffff_ffff_c0ff_0000,
                name: "stuck".to_owned(),
                state: "COMING",
                word: 1,
            }],
            torn: std::collections::HashSet::new(),
            functions: Arc::default(),
        });
        registry.register_kernel(tables).expect("taken");
    }
}
