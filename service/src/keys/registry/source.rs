// SPDX-License-Identifier: Apache-2.0
//! A source supplies the [`Registry`] with the tables of the guest's kernel. Either the guest
//! itself sends requests that the monitor passes to [`Registry::request`], or a program finds the
//! tables in guest memory and calls [`Registry::register_kernel`]. Both supply plain numbers that
//! are the guest's and may have any value, and both make the same [`Registration`].
//!
//! Every source must satisfy:
//!
//! - A guest has one source. It registers a kernel before the kernel's keys are changed, and
//!   withdraws it ([`Registry::withdraw`]) before the memory is reused.
//! - The version changes before a table can go away. The service stops the guest and checks the
//!   version; an unchanged version guarantees that no table goes away until the resume. So a call
//!   of the registry in progress must keep the guest from counting as stopped, as a vCPU's request
//!   does. A source that only observes the guest must check again while it is stopped.
//! - The caller of the registry does not hold the guest stopped.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::abi;
use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::live::{FileUse, Functions, LeftOut, Way};
use static_keys::{Catalog, EntryFormat, FoundKernel, Kernel, KeyId, Layout, Range};

use super::{
    Identity, OwnRequest, PoisonError, Refused, Registration, RegistrationPhase, Registry, read,
};
use crate::keys::address_space::KernelMemory;
use crate::keys::boot::Boot;
use crate::keys::debug::DebugSites;
use crate::keys::refused::RefusedModules;
use patchbay_memory::paging::PageTable;

/// Guarantees of a source beside its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// The version changes before a table goes away, also while the guest runs. Otherwise counts
    /// are changed only in a stopped guest.
    pub fence: bool,
    /// The gates say that the kernel changes no text, not even half: `text_mutex` is free, and no
    /// text change is queued or under way. Then no vCPU is inside a site, whether its RIP is known
    /// or not:
    ///
    /// - A site is one instruction, before a change and after it. A vCPU can be past its first byte
    ///   only by the breakpoint that the kernel writes there while it changes the site.
    /// - The kernel frees `text_mutex` after it has removed the breakpoint and every CPU has
    ///   answered an interrupt since (`text_poke_sync()`). A CPU that has met the breakpoint cannot
    ///   answer before the handler has returned: it is delivered, and handled, with interrupts off.
    ///   The same is true of one whose delivery an exit from the guest has interrupted: it comes
    ///   before any interrupt.
    /// - The breakpoint of anybody else is found as foreign bytes.
    pub text_gates: bool,
}

/// Location of the tables.
#[derive(Clone, Debug)]
pub enum Contents {
    /// In guest memory, as the descriptor says. Modules register by requests of their own.
    Described(Kernel),
    /// Already read, with all modules.
    Found(FoundKernel),
}

/// A kernel in plain numbers.
#[derive(Clone, Debug)]
pub struct KernelTables {
    /// Differs from boot to boot, and is constant while the kernel runs, however often it
    /// registers: holds outlive a registration of the same boot. Never 0.
    pub boot: u64,
    /// Differs from registration to registration; never 0.
    pub generation: u64,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Page table isolation is on.
    pub page_table_isolation: bool,
    /// KASLR offset of the kernel's text, in bytes.
    pub kaslr_offset: u64,
    /// `utsname()->release`, printable.
    pub release: String,
    /// Hexadecimal; empty if unknown.
    pub build_id: String,
    /// The jump table, the gate words, the offsets and the keys.
    pub contents: Contents,
    /// Descriptors of dynamic debug.
    pub debug: DebugSites,
    /// Guarantees of the source.
    pub promises: Promises,
    /// Set if the kernel did not register itself.
    pub discovery: Option<DiscoveredKernel>,
}

/// How a kernel was discovered, and the names of its functions.
#[derive(Clone, Debug)]
pub struct DiscoveredKernel {
    /// Resets of the guest before
    /// ([`Discoverable::resets`](patchbay_guest::discovery::Discoverable::resets)).
    pub resets: u64,
    /// How it was found.
    pub way: Way,
    /// From the first look until its tables were known.
    pub time: Duration,
    /// What a file of the host said that the kernel does not reveal.
    pub file: Option<FileUse>,
    /// Names of the gates that can be looked at.
    pub gates: Vec<&'static str>,
    /// Names of the gates that cannot.
    pub missing_gates: Vec<&'static str>,
    /// Modules that are loaded and not live: their keys and sites are not known.
    pub left_out: Vec<LeftOut>,
    /// Keys whose sites did not do what their counts say. The guest may have changed them just
    /// then.
    pub torn: HashSet<KeyId>,
    /// From the kernel's own kallsyms, and those of its modules.
    pub functions: Arc<Functions>,
}

impl KernelTables {
    /// Checks the numbers like a descriptor's.
    fn check(&self) -> Result<(), Refused> {
        let levels = self.page_table.levels;
        read::check_number("the boot", self.boot)?;
        if self.generation == 0 {
            return Err(Refused("the generation is 0".to_owned()));
        }
        let ranges = |jump_table: Range, text: Range, ro_after_init: Range| {
            for (what, range) in [
                ("the jump table", jump_table),
                ("text", text),
                ("ro_after_init", ro_after_init),
            ] {
                let (start, end) = (range.start, range.end);
                read::check_range(what, abi::Range { start, end }, levels)?;
            }
            Ok(())
        };
        let (layout, gates) = match &self.contents {
            Contents::Described(kernel) => {
                ranges(kernel.jump_table, kernel.text, kernel.ro_after_init)?;
                (kernel.layout, &kernel.gates)
            }
            Contents::Found(kernel) => {
                for image in &kernel.images {
                    ranges(image.jump_table, image.text, image.ro_after_init)?;
                }
                (kernel.layout, &kernel.gates)
            }
        };
        read::check_layout(layout)?;
        read::check_gates(gates.clone(), levels)?;
        Ok(())
    }

    fn layout(&self) -> Option<Layout> {
        match &self.contents {
            Contents::Described(kernel) if kernel.format == EntryFormat::None => None,
            Contents::Described(kernel) => Some(kernel.layout),
            Contents::Found(kernel) => Some(kernel.layout),
        }
    }
}

/// Reads everything that the numbers point at.
pub(super) fn registration(
    ram: &GuestRam,
    tables: KernelTables,
    epoch: u64,
) -> Result<Registration, Refused> {
    let memory = KernelMemory::new(ram, tables.page_table);
    let type_offset = tables.layout().map(|layout| layout.static_key_type);
    let catalog = match tables.contents {
        Contents::Described(kernel) => Catalog::new(&memory, &kernel),
        Contents::Found(kernel) => Catalog::found(kernel),
    };
    let catalog = catalog.map_err(|error| Refused(error.to_string()))?;
    Ok(Registration {
        generation: tables.generation,
        page_table: tables.page_table,
        page_table_isolation: tables.page_table_isolation,
        kaslr_offset: tables.kaslr_offset,
        release: tables.release,
        build_id: tables.build_id,
        promises: tables.promises,
        discovery: tables.discovery.map(Arc::new),
        catalog,
        debug: Arc::new(tables.debug),
        declared: HashMap::new(),
        undeclared: Vec::new(),
        type_offset,
        epoch,
        modules: HashMap::new(),
        refused: RefusedModules::default(),
    })
}

/// Assigns epochs to the modules that came with the kernel. A module with the same name and the
/// same tables at the same addresses is the same load.
pub(super) fn add_epochs(
    registration: &mut Registration,
    boot: &mut Boot,
    mut next_epoch: impl FnMut() -> u64,
) {
    let modules = registration.catalog.modules();
    let modules: Vec<(u64, Arc<str>)> = modules.map(|(id, name)| (id, name.into())).collect();
    boot.retain(|id| modules.iter().any(|(module, _)| *module == id));
    let numbers = fingerprints(&registration.catalog);
    for ((id, name), number) in modules.into_iter().zip(numbers) {
        let epoch = boot.epoch_of(id, number).unwrap_or_else(&mut next_epoch);
        boot.loaded(id, number, epoch);
        registration.modules.insert(name, epoch);
    }
}

/// Returns a number for each module, which its keys' addresses, its id and its name make up; never
/// 0. The keys are read once, because a kernel may have 131,072 keys and 4,096 modules.
fn fingerprints(catalog: &Catalog) -> Vec<u64> {
    let mut hashes: HashMap<&str, DefaultHasher> = HashMap::new();
    for key in catalog.keys_by_image() {
        key.id.0.hash(hashes.entry(key.module()).or_default());
    }
    let numbers = catalog.modules().map(|module| {
        let mut hash = hashes.remove(module.1).unwrap_or_default();
        module.hash(&mut hash);
        hash.finish().max(1)
    });
    numbers.collect()
}

impl Registry {
    /// Registers a kernel whose tables were found. It replaces an earlier one.
    ///
    /// # Errors
    /// [`Refused`], also if the registry has no memory yet. Then nothing is registered, except that
    /// an earlier kernel stays if a discovery is refused.
    pub fn register_kernel(&self, tables: KernelTables) -> Result<(), Refused> {
        let ram = self
            .ram
            .get()
            .ok_or_else(|| Refused("the guest's memory is not attached".to_owned()))?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let discovered = tables.discovery.is_some();
        if discovered {
            self.check_own(&tables)?;
        }
        let checked = tables.check().map(|()| tables);
        self.install(ram, checked, discovered, &mut writer)
    }

    /// Refuses the discovery of a kernel that registers itself.
    fn check_own(&self, tables: &KernelTables) -> Result<(), Refused> {
        let mut state = self.state();
        let found = Identity {
            page_table: tables.page_table,
            release: tables.release.clone(),
        };
        match &state.own {
            None => return Ok(()),
            Some(OwnRequest {
                withdrawn: Some(withdrawn),
            }) if *withdrawn != found => {}
            Some(_) => return Err(Refused("the kernel registers itself".to_owned())),
        }
        state.own = None;
        Ok(())
    }

    /// Withdraws the registration. Does nothing if there is none.
    pub fn withdraw(&self) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_back();
    }

    pub(super) fn take_back(&self) {
        let registration = self.state().registration.clone();
        if let Some(registration) = registration {
            if let Some(own) = &mut self.state().own {
                own.withdrawn = Some(Identity {
                    page_table: registration.page_table,
                    release: registration.release.clone(),
                });
            }
            self.publish(RegistrationPhase::Withdrawn, String::new(), None);
            self.announce_removed("");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use static_keys::{Class, Concerns, FoundImage, FoundKey, GateKind, Gates, ListedGate, Op};
    use zerocopy::FromBytes;

    use super::*;
    use crate::keys::{KeyUpdate, Keys, KeysConfig, UpdateRequest};
    use crate::testing::{InMemoryGuest, TestKey};
    use patchbay_guest::guest::Guest;

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

    fn described(tables: &mut KernelTables) -> &mut Kernel {
        match &mut tables.contents {
            Contents::Described(kernel) => kernel,
            Contents::Found(_) => panic!("the guest described it"),
        }
    }

    fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
        let registry = Arc::new(Registry::default());
        let keys = [TestKey::new("alpha", 2), TestKey::tracepoint("event", true)];
        (InMemoryGuest::boot(Arc::clone(&registry), &keys), registry)
    }

    /// Discovered numbers make the same registration as the guest's own request.
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

    /// Keys and holds of a module that was loaded again are others.
    #[test]
    fn a_module_with_other_keys_is_another_load() {
        let (guest, _) = guest();
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        let epochs = |moved: u64, generation: u64| {
            let mut tables = guest.found();
            tables.generation = generation;
            let Contents::Found(kernel) = &mut tables.contents else {
                panic!("just made")
            };
            for (index, name) in [(1, "stays"), (2, "moves")] {
                let at = 0xffff_ffff_c000_0000 + index * 0x1_0000;
                let nothing = Range { start: 0, end: 0 };
                kernel.images.push(FoundImage {
                    id: at,
                    name: name.to_owned(),
                    text: nothing,
                    ro_after_init: nothing,
                    jump_table: nothing,
                    entries: Vec::new(),
                    keys: vec![FoundKey {
                        address: at + 0x100 + if index == 2 { moved } else { 0 },
                        name: "own".to_owned(),
                        class: Class::Guarded,
                        tracepoint: 0,
                        switched_by_function: false,
                    }],
                });
            }
            registry.register_kernel(tables).expect("taken");
            let registration = registry.snapshot().expect("taken").registration;
            ["stays", "moves"].map(|name| registration.modules[name])
        };
        let first = epochs(0, 1);
        assert_eq!(epochs(0, 2), first);
        let second = epochs(16, 3);
        assert_eq!(second[0], first[0]);
        assert_ne!(second[1], first[1]);
    }

    fn keys(guest: &Arc<InMemoryGuest>, registry: Registry) -> Keys {
        let registry = Arc::new(registry);
        Keys::start(Arc::clone(guest), registry, KeysConfig::default())
            .expect("a thread")
            .0
    }

    fn update(op: Op) -> UpdateRequest {
        let second = Duration::from_secs(1);
        let updates = vec![KeyUpdate::new("alpha", op)];
        let mut request =
            UpdateRequest::new(updates, "test".to_owned(), second, Instant::now() + second);
        request.allow_guarded = true;
        request
    }

    #[tokio::test]
    async fn tables_that_were_read_already_are_flipped_like_others() {
        let (guest, by_request) = guest();
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        let mut tables = guest.found();
        let Contents::Found(kernel) = &mut tables.contents else {
            panic!("just made")
        };
        let unsorted = kernel.images[0].entries.clone();
        kernel.images[0].entries.reverse();
        registry
            .register_kernel(tables.clone())
            .expect_err("not sorted");
        let Contents::Found(kernel) = &mut tables.contents else {
            panic!("just made")
        };
        kernel.images[0].entries = unsorted;
        registry.register_kernel(tables).expect("taken");
        let [ours, theirs] = [&registry, &*by_request].map(|registry| {
            let registration = registry.snapshot().expect("registered").registration;
            let keys = registration.catalog.keys().map(|key| format!("{key:?}"));
            (keys.collect::<Vec<_>>(), registration.catalog.entry_count())
        });
        assert_eq!(ours, theirs);
        let keys = keys(&guest, registry);
        keys.update(update(Op::Enable)).await.expect("flipped");
        assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (1, true));
    }

    /// Gates that exclude a vCPU inside a site replace the check of RIPs.
    #[tokio::test]
    async fn gates_of_text_are_enough_if_the_source_says_so() {
        for text_gates in [false, true] {
            let (guest, _) = guest();
            let registry = Registry::default();
            registry.attach(guest.ram().clone());
            let mut tables = found(&guest);
            tables.promises.text_gates = text_gates;
            registry.register_kernel(tables).expect("taken");
            guest.hide_vcpus(true);
            let keys = keys(&guest, registry);
            let flipped = keys.update(update(Op::Enable)).await;
            assert_eq!(flipped.is_ok(), text_gates, "{flipped:?}");
            assert_eq!(guest.jumps("alpha"), text_gates);
        }
    }

    /// Counts are changed beside the running guest only with a fence and with atomic exchange.
    #[tokio::test]
    async fn counts_alone_need_a_fence_and_an_exchange() {
        for (fence, exchange, pauses) in [(true, true, 0), (false, true, 1), (true, false, 1)] {
            let (guest, _) = guest();
            let registry = Registry::default();
            registry.attach(guest.ram().clone());
            let mut tables = found(&guest);
            tables.promises.fence = fence;
            registry.register_kernel(tables).expect("taken");
            guest.memory().forbid_exchange(!exchange);
            let keys = keys(&guest, registry);
            keys.update(update(Op::Inc)).await.expect("flipped");
            let before = guest.pauses();
            keys.update(update(Op::Inc)).await.expect("counted");
            assert_eq!(guest.count("alpha"), 2);
            assert_eq!(guest.pauses() - before, pauses, "{fence} {exchange}");
        }
    }

    /// A change that would be lost is undone before the guest runs.
    #[tokio::test]
    async fn writes_that_do_not_stay_are_undone() {
        let (guest, _) = guest();
        let registry = Registry::default();
        registry.attach(guest.ram().clone());
        registry.register_kernel(found(&guest)).expect("taken");
        let keys = keys(&guest, registry);
        guest.lose_writes(true);
        let error = keys
            .update(update(Op::Enable))
            .await
            .expect_err("they would be lost");
        assert!(error.to_string().contains("another host"), "{error}");
        assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (0, false));
        guest.lose_writes(false);
        keys.update(update(Op::Enable)).await.expect("flipped");
        assert_eq!((guest.count("alpha"), guest.jumps("alpha")), (1, true));
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
                described(tables).text.start = 0x1000;
            }),
            ("jump table", |tables| described(tables).jump_table.end = 0),
            ("no system_state", |tables| {
                described(tables).gates = Gates::default();
            }),
            ("gate system_state is at 0x1000", |tables| {
                described(tables).gates = user_mode_gate();
            }),
            ("module.state", |tables| {
                described(tables).layout.module_state = u32::MAX;
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
