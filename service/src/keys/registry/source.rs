// SPDX-License-Identifier: Apache-2.0
//! Where a registration comes from.
//!
//! A source is whoever tells the [`Registry`] what the guest's kernel has: today the guest itself, by
//! requests that the monitor hands to [`Registry::request`], or somebody who has found the tables in
//! the guest's memory, by [`Registry::register_kernel`]. Both give plain numbers, which are the guest's
//! and may say anything, and both make the same [`Registration`].
//!
//! What every source owes:
//!
//! - A guest has one source. It tells of a kernel before the kernel's keys are to be changed, and of its
//!   end ([`Registry::withdraw`]) before that memory is used for anything else.
//! - The registry's version has moved on before a table can go away. The service stops the guest, looks
//!   at the version, and takes one that has not changed for a promise that no table goes until the
//!   resume. So a call of the registry that is in progress must keep the guest from counting as stopped,
//!   as a vCPU's request does; a source that only watches the guest must look again while it is stopped.
//! - No call of the registry is made while the caller holds the guest stopped.

use std::collections::HashMap;

use static_keys::{Catalog, EntryFormat, Kernel};

use super::{PoisonError, Refused, Registration, RegistrationPhase, Registry, read};
use crate::abi;
use crate::keys::address_space::{KernelMemory, PageTable};
use crate::keys::refused::RefusedModules;
use crate::memory::GuestRam;

/// A kernel in plain numbers.
#[derive(Clone, Debug)]
pub struct KernelTables {
    /// Differs from boot to boot, and stays for as long as the kernel runs, however often it registers:
    /// holds outlive a registration of the same boot. Never 0.
    pub boot: u64,
    /// Differs from registration to registration; never 0.
    pub generation: u64,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Page table isolation is on.
    pub page_table_isolation: bool,
    /// How far KASLR moved the kernel's text, in bytes.
    pub kaslr_offset: u64,
    /// `utsname()->release`, printable.
    pub release: String,
    /// Hexadecimal; empty if unknown.
    pub build_id: String,
    /// The jump table, the gate words, the offsets and the keys.
    pub kernel: Kernel,
}

impl KernelTables {
    /// As a descriptor is checked.
    fn check(&self) -> Result<(), Refused> {
        let levels = self.page_table.levels;
        read::check_number("the boot", self.boot)?;
        if self.generation == 0 {
            return Err(Refused("the generation is 0".to_owned()));
        }
        let kernel = &self.kernel;
        for (what, range) in [
            ("the jump table", kernel.jump_table),
            ("text", kernel.text),
            ("ro_after_init", kernel.ro_after_init),
        ] {
            let (start, end) = (range.start, range.end);
            read::check_range(what, abi::Range { start, end }, levels)?;
        }
        read::check_layout(kernel.layout)?;
        read::check_gates(kernel.gates.clone(), levels)?;
        Ok(())
    }
}

/// Reads all that the numbers point at.
pub(super) fn registration(
    ram: &GuestRam,
    tables: KernelTables,
    epoch: u64,
) -> Result<Registration, Refused> {
    let memory = KernelMemory::new(ram, tables.page_table);
    let kernel = &tables.kernel;
    let catalog = Catalog::new(&memory, kernel).map_err(|error| Refused(error.to_string()))?;
    Ok(Registration {
        generation: tables.generation,
        page_table: tables.page_table,
        page_table_isolation: tables.page_table_isolation,
        kaslr_offset: tables.kaslr_offset,
        release: tables.release,
        build_id: tables.build_id,
        catalog,
        type_offset: (kernel.format != EntryFormat::None).then_some(kernel.layout.static_key_type),
        epoch,
        modules: HashMap::new(),
        refused: RefusedModules::default(),
    })
}

impl Registry {
    /// Takes a kernel whose tables were found, in the place of an earlier one.
    ///
    /// # Errors
    /// [`Refused`], also if the registry has no memory yet; nothing is registered then.
    pub fn register_kernel(&self, tables: KernelTables) -> Result<(), Refused> {
        let ram = self
            .ram
            .get()
            .ok_or_else(|| Refused("the guest's memory is not attached".to_owned()))?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let checked = tables.check().map(|()| tables);
        self.install(ram, checked, &mut writer)
    }

    /// The kernel is gone, or its tables may no longer be used. Does nothing if none is registered.
    pub fn withdraw(&self) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_back();
    }

    pub(super) fn take_back(&self) {
        if self.state().registration.is_some() {
            self.publish(RegistrationPhase::Withdrawn, String::new(), None);
            self.announce_removed("");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use static_keys::{Concerns, GateKind, Gates, ListedGate};
    use zerocopy::FromBytes;

    use super::*;
    use crate::guest::Guest;
    use crate::testing::{InMemoryGuest, TestKey};

    fn found(guest: &InMemoryGuest) -> KernelTables {
        let (descriptor, _) =
            abi::Descriptor::read_from_prefix(&guest.last_request()).expect("a whole page");
        super::super::requests::tables(guest.ram(), &descriptor)
            .expect("a kernel that follows the rules")
    }

    type Damage = fn(&mut KernelTables);

    fn user_mode_gate() -> Gates {
        let gate = ListedGate {
            kind: GateKind::SystemState,
            name: "system_state".into(),
            address: 0x1000,
            per_cpu: false,
            width: 4,
            mask: 1,
            wanted: 0,
            concerns: Concerns::COUNTS,
        };
        Gates::new(&[gate], &[]).expect("a list that could be right")
    }

    fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
        let registry = Arc::new(Registry::default());
        let keys = [TestKey::new("alpha", 2), TestKey::tracepoint("event", true)];
        (InMemoryGuest::boot(Arc::clone(&registry), &keys), registry)
    }

    /// Numbers that were found make the registration that the guest's own request makes.
    #[test]
    fn found_tables_and_the_guests_request_make_the_same_registration() {
        let (guest, by_request) = guest();
        let by_search = Registry::default();
        by_search.attach(guest.ram().clone());
        by_search.register_kernel(found(&guest)).expect("taken");
        assert_eq!(by_search.version(), 1);
        let texts = [&*by_request, &by_search].map(|registry| {
            let registration = registry.snapshot().expect("registered").registration;
            let keys = registration.catalog.keys().map(|key| format!("{key:?}"));
            (
                format!("{:?}", registry.describe()),
                keys.collect::<Vec<_>>(),
            )
        });
        assert_eq!(texts[0], texts[1]);
        by_search.withdraw();
        assert_eq!(by_search.version(), 2);
        assert!(by_search.snapshot().is_err());
        by_search.withdraw();
        assert_eq!(by_search.version(), 2);
    }

    #[test]
    fn found_tables_are_checked_like_a_descriptor() {
        let (guest, _) = guest();
        let registry = Registry::default();
        assert!(
            registry.register_kernel(found(&guest)).is_err(),
            "no memory"
        );
        registry.attach(guest.ram().clone());
        let wrong: [(&str, Damage); 7] = [
            ("the boot", |tables| tables.boot = 0),
            ("generation", |tables| tables.generation = 0),
            ("text is at 0x1000", |tables| {
                tables.kernel.text.start = 0x1000;
            }),
            ("jump table", |tables| tables.kernel.jump_table.end = 0),
            ("no system_state", |tables| {
                tables.kernel.gates = Gates::default();
            }),
            ("gate system_state is at 0x1000", |tables| {
                tables.kernel.gates = user_mode_gate();
            }),
            ("module.state", |tables| {
                tables.kernel.layout.module_state = u32::MAX;
            }),
        ];
        for (words, change) in wrong {
            let mut tables = found(&guest);
            change(&mut tables);
            let refused = registry.register_kernel(tables).expect_err(words);
            assert!(refused.to_string().contains(words), "{refused}");
            assert!(registry.snapshot().is_err(), "{words}");
        }
        registry.register_kernel(found(&guest)).expect("as found");
        let snapshot = registry.snapshot().expect("registered");
        assert!(snapshot.registration.find("alpha").is_ok());
    }
}
