// SPDX-License-Identifier: Apache-2.0
//! Makes a [`Plan`] in three steps: fold the operations, collect the gates, collect the sites.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::busy::{Busy, Gate};
use crate::catalog::{Catalog, CodeImage};
use crate::entry::{EntryFormat, JumpEntry};
use crate::gates::{Concerns, GateKind};
use crate::instruction::{Branch, Instruction, Size};
use crate::key::{Class, Key, KeyChange, KeyId};
use crate::memory::{GuestMemory, ReadError, Width, first_bytes, first_changed, read_count};
use crate::plan::{Options, Plan, PlanError, PlannedGate, PlannedSite, Suspect, Update};
use crate::refcount::{Op, Refusal, apply, crosses_zero};
use crate::users::{Users, UsersError, Watched, WatchedWord, users};

/// Plans a transaction.
pub(crate) fn plan<M: GuestMemory>(
    catalog: &Catalog,
    memory: &M,
    updates: &[Update],
    options: &Options,
) -> Result<Plan<M::Place>, PlanError> {
    let mut planner = Planner::new(catalog, memory, updates.len());
    let result = planner
        .fold(updates, options)
        .and_then(|keys| planner.collect(&keys));
    match result {
        Ok(()) => {
            let mut plan = planner.finish()?;
            plan.records = Some(catalog.records.locate(memory, plan.changed));
            Ok(plan)
        }
        // The memory may belong to a module that was just unloaded. If a gate is closed by now, the
        // guest is reported as busy instead, so that the caller tries again.
        Err(error @ PlanError::Unreadable { .. }) => {
            Err(planner.closed_gate().map_or(error, PlanError::Busy))
        }
        Err(error) => Err(error),
    }
}

/// A key and the image that lists it.
type Listed<'a> = (&'a Key, &'a CodeImage);

/// A plan under construction.
pub(crate) struct Planner<'a, M: GuestMemory> {
    catalog: &'a Catalog,
    memory: &'a M,
    pub plan: Plan<M::Place>,
    /// The changes of the plan.
    pub changes: Vec<KeyChange>,
    /// The place of the count of each changed key.
    counts: Vec<M::Place>,
    /// Modules whose state word is already a gate of the plan.
    live: HashSet<u64>,
    /// The module that was last looked up in `live`. Keys of one module usually follow each other.
    last_live: u64,
}

impl<'a, M: GuestMemory> Planner<'a, M> {
    /// Creates an empty plan with room for `room` keys.
    pub fn new(catalog: &'a Catalog, memory: &'a M, room: usize) -> Self {
        // Most keys have one site and one gate word. The kernel has a few more.
        let gates = room + catalog.gates.words().len();
        let plan = Plan {
            changes: Arc::default(),
            folded: Vec::with_capacity(room),
            sites: Vec::with_capacity(room),
            words: Vec::new(),
            changed: 0,
            suspects: Vec::new(),
            gates: Vec::with_capacity(gates),
            gate_words: Vec::with_capacity(gates),
            needs_pause: false,
            needs_rips: false,
            records: None,
        };
        Self {
            catalog,
            memory,
            plan,
            changes: Vec::with_capacity(room),
            counts: Vec::with_capacity(room),
            live: HashSet::new(),
            last_live: 0,
        }
    }

    /// Adds a key whose count does not change, and every gate of the kernel.
    pub fn open_for_repair(&mut self, key: &Key) -> Result<(), PlanError> {
        self.open(key)?;
        if self.changes[0].before < 0 {
            let key = key.full_name.clone();
            return Err(Busy::FirstReference { key }.into());
        }
        self.plan.folded.push(0);
        self.plan.needs_pause = true;
        self.gates_of(Concerns::ALL)?;
        match self.catalog.home(key.id) {
            Some(home) => self.module_gate(home),
            None => Ok(()),
        }
    }

    /// Returns the images that use a key, each with its entries of the key. Fails if one of them is
    /// not live.
    pub fn all_users(&mut self, key: &'a Key) -> Result<Users<'a>, PlanError> {
        let mut found = Users::default();
        self.find_users(0, key, self.catalog.home(key.id), &mut found)?;
        for &(image, _) in &found {
            self.module_gate(image)?;
        }
        Ok(found)
    }

    /// Folds the operations into one change per key.
    fn fold(
        &mut self,
        updates: &[Update],
        options: &Options,
    ) -> Result<Vec<Listed<'a>>, PlanError> {
        // Keys in ascending order are distinct. Keys that patterns select are in this order.
        let distinct = updates.windows(2).all(|pair| pair[0].key < pair[1].key);
        let room = if distinct { 0 } else { updates.len() };
        let mut order: HashMap<KeyId, usize, RandomState> =
            HashMap::with_capacity_and_hasher(room, RandomState::default());
        let mut reader = self.catalog.reader();
        let mut keys = Vec::with_capacity(updates.len());
        for &Update { key: id, op } in updates {
            let index = match order.get(&id) {
                Some(&index) => index,
                None => {
                    let listed = reader.listed(id);
                    let (key, home) = listed.ok_or(PlanError::UnknownKey { key: id })?;
                    if key.class == Class::Never {
                        return Err(PlanError::Never {
                            key: key.full_name.clone(),
                        });
                    }
                    if key.class == Class::Guarded && !options.allow_guarded {
                        return Err(PlanError::Guarded {
                            key: key.full_name.clone(),
                        });
                    }
                    self.open(key)?;
                    keys.push((key, home));
                    if !distinct {
                        order.insert(id, keys.len() - 1);
                    }
                    keys.len() - 1
                }
            };
            self.plan.folded.push(index);
            let change = &mut self.changes[index];
            change.after = step(keys[index].0, change.after, op)?;
        }
        Ok(keys)
    }

    /// Adds a key with its current count.
    fn open(&mut self, key: &Key) -> Result<(), PlanError> {
        let (address, what) = (key.id.0, "a key's count");
        let place = self.locate(what, address, Width::U32.bytes())?;
        let count =
            read_count(self.memory, place).map_err(|fault| unreadable(what, address, fault))?;
        self.changes.push(KeyChange {
            key: key.id,
            name: key.full_name.clone(),
            before: count,
            after: count,
            sites: 0,
        });
        self.counts.push(place);
        Ok(())
    }

    /// Collects the gates and the sites of the keys.
    fn collect(&mut self, keys: &[Listed<'a>]) -> Result<(), PlanError> {
        self.plan.needs_pause = keys.iter().zip(&self.changes).any(|((key, _), change)| {
            crosses_zero(change.before, change.after)
                && (self.catalog.format != EntryFormat::None || key.class == Class::Tracepoint)
        });
        self.kernel_gates(keys)?;
        // One value serves all keys, to save allocations.
        let mut users = Users::default();
        for (index, listed) in keys.iter().enumerate() {
            self.collect_key(index, *listed, &mut users)?;
        }
        Ok(())
    }

    /// Sorts the sites, checks that they do not overlap, and computes the writes.
    pub fn finish(mut self) -> Result<Plan<M::Place>, PlanError> {
        self.plan.sites.sort_unstable_by_key(|site| site.address);
        for pair in self.plan.sites.windows(2) {
            // No overflow: each site has been located and ends within its text.
            if pair[1].address - pair[0].address < pair[0].before.size().bytes() as u64 {
                let key = self.changes[pair[1].key].name.clone();
                return Err(PlanError::Overlap {
                    key,
                    site: pair[1].address,
                    other: pair[0].address,
                });
            }
        }
        self.plan.finish(self.changes, &self.counts);
        Ok(self.plan)
    }

    fn kernel_gates(&mut self, keys: &[Listed<'_>]) -> Result<(), PlanError> {
        let concerned = self.concerned(keys);
        self.gates_of(concerned)
    }

    fn gates_of(&mut self, concerned: Concerns) -> Result<(), PlanError> {
        let catalog = self.catalog;
        let words = catalog.gates.words().iter();
        for word in words.filter(|word| word.concerns.intersects(concerned)) {
            self.gate(
                Gate::Kernel(word.gate.clone()),
                word.address,
                word.width,
                word.mask,
                word.wanted,
            )?;
        }
        Ok(())
    }

    /// Returns the kinds of change that the plan makes.
    fn concerned(&self, keys: &[Listed<'_>]) -> Concerns {
        let mut concerned = Concerns::COUNTS;
        if !self.plan.needs_pause {
            return concerned;
        }
        concerned = concerned.union(Concerns::SITES);
        // Finding the users of a key requires a search, and most kernels have no such gate.
        let modules_matter = self.catalog.gates.concern(Concerns::MODULES);
        for ((key, _), change) in keys.iter().zip(&self.changes) {
            if !crosses_zero(change.before, change.after) {
                continue;
            }
            concerned = concerned.union(match key.class {
                Class::Guarded => Concerns::GUARDED,
                Class::Ref => Concerns::REF,
                Class::Tracepoint => Concerns::TRACEPOINT,
                Class::DynamicDebug => Concerns::DYNAMIC_DEBUG,
                // `fold` refuses such a key.
                Class::Never => Concerns::ALL,
            });
            if modules_matter
                && !concerned.intersects(Concerns::MODULES)
                && (!key.module().is_empty()
                    || self.catalog.images_using(key.id).any(|image| image.id != 0))
            {
                concerned = concerned.union(Concerns::MODULES);
            }
        }
        concerned
    }

    fn collect_key(
        &mut self,
        index: usize,
        (key, home): Listed<'a>,
        found: &mut Users<'a>,
    ) -> Result<(), PlanError> {
        self.module_gate(home)?;
        let KeyChange { before, after, .. } = self.changes[index];
        self.find_users(index, key, Some(home), found)?;
        if !crosses_zero(before, after) {
            return Ok(());
        }
        if key.class == Class::Tracepoint {
            self.tracepoint_gates(key, after)?;
        }
        for &(image, run) in &*found {
            self.module_gate(image)?;
            // jump_label_can_update() also skips init sites, because their text is freed.
            for entry in run.iter().filter(|entry| !entry.init) {
                self.site(index, image, entry, before != 0)?;
            }
        }
        Ok(())
    }

    /// Finds the users of a key, and adds a gate for each word that was read to find them.
    fn find_users(
        &mut self,
        index: usize,
        key: &'a Key,
        home: Option<&'a CodeImage>,
        found: &mut Users<'a>,
    ) -> Result<(), PlanError> {
        let plan = &mut self.plan;
        let watch = |word: WatchedWord<M::Place>| {
            let gate = match word.what {
                Watched::Type => PlannedGate::KeyType(index),
                Watched::Chain => PlannedGate::KeyChain(index),
            };
            // The value was just read, so the gate is open.
            plan.add_gate(gate, word.place, word.width, word.width.mask(), word.value);
        };
        let result = users(self.catalog, self.memory, key, home, found, watch);
        result.map_err(|error| match error {
            UsersError::Sealed => PlanError::Sealed {
                key: key.full_name.clone(),
            },
            UsersError::Busy(busy) => PlanError::Busy(busy),
            UsersError::Read { address, error } => PlanError::Unreadable {
                what: "a key's type",
                address,
                error,
            },
        })
    }

    fn tracepoint_gates(&mut self, key: &Key, after: i32) -> Result<(), PlanError> {
        let refused = |why| PlanError::Tracepoint {
            key: key.full_name.clone(),
            why,
        };
        let pointer = self.catalog.format.pointer();
        let gates = &self.catalog.gates;
        if !gates.has(
            GateKind::TracepointsMutex,
            Concerns::TRACEPOINT.union(Concerns::SITES),
        ) {
            return Err(refused(
                "the kernel registers no tracepoints_mutex, so its probes cannot be checked; update the guest's kernel",
            ));
        }
        let gate = Gate::TracepointProbes {
            key: key.full_name.clone(),
        };
        if key.switched_by_function {
            return Err(refused(
                "the kernel calls functions when its first probe is attached and its last one detached, so the key alone cannot switch it; use tracefs in the guest",
            ));
        }
        let funcs = u64::from(self.catalog.layout.tracepoint_funcs);
        let address = key.tracepoint.checked_add(funcs).ok_or_else(|| {
            refused(
                "its structure passes the end of the address space; the guest's tables are wrong",
            )
        })?;
        let funcs = self.word("a tracepoint", address, pointer)?;
        if after != 0 && funcs == 0 {
            return Err(refused(
                "no probe is attached, so switching it on has no effect; attach one in the guest first",
            ));
        }
        // Disabling needs this gate too, because the guest may attach a probe between planning and
        // commit.
        self.gate(gate, address, pointer, u64::MAX, funcs)?;
        Ok(())
    }

    fn site(
        &mut self,
        index: usize,
        image: &CodeImage,
        entry: &JumpEntry,
        enabled: bool,
    ) -> Result<(), PlanError> {
        let JumpEntry { code, target, .. } = *entry;
        let key = &self.changes[index].name;
        let outside = || PlanError::SiteOutsideText {
            key: key.clone(),
            site: code,
        };
        let out_of_reach = |source| PlanError::OutOfReach {
            key: key.clone(),
            source,
        };
        let found = read_site(self.memory, image, code)
            .map_err(|error| unreadable("a site", code, error))?;
        let found = found.ok_or_else(outside)?;
        let SiteBytes { place, length, .. } = found;
        let nops = self.catalog.nops;
        let instructions = nops.size(found.as_slice()).and_then(|size| {
            let (nop, jump) = (nops.nop(size), Instruction::jump(size, code, target));
            let held = Instruction::of_bytes(size, found.bytes);
            let is_known = held == nop || jump.as_ref().is_ok_and(|jump| held == *jump);
            is_known.then_some((nop, jump))
        });
        let Some((nop, jump)) = instructions else {
            self.plan.suspects.push(Suspect {
                address: code,
                target,
                place,
                length,
                nops,
                key: index,
            });
            return Ok(());
        };
        let jump = jump.map_err(out_of_reach)?;
        let (before, after) = match Branch::of(enabled, entry.likely) {
            Branch::Nop => (nop, jump),
            Branch::Jump => (jump, nop),
        };
        self.plan.sites.push(PlannedSite {
            address: code,
            place,
            key: index,
            before,
            after,
        });
        self.changes[index].sites += 1;
        Ok(())
    }

    fn module_gate(&mut self, image: &CodeImage) -> Result<(), PlanError> {
        if image.id == self.last_live || image.id == 0 {
            return Ok(());
        }
        self.last_live = image.id;
        if !self.live.insert(image.id) {
            return Ok(());
        }
        let gate = Gate::ModuleState {
            module: image.name.clone(),
        };
        let layout = self.catalog.layout;
        // A saturated address is unmapped.
        let address = image.id.saturating_add(u64::from(layout.module_state));
        self.gate(
            gate,
            address,
            Width::U32,
            u64::from(u32::MAX),
            u64::from(layout.module_state_live),
        )
    }

    /// Adds a gate. Fails if the gate is closed.
    fn gate(
        &mut self,
        gate: Gate,
        address: u64,
        width: Width,
        mask: u64,
        expected: u64,
    ) -> Result<(), PlanError> {
        let place = self.locate("a gate word", address, width.bytes())?;
        let mask = mask & width.mask();
        let found = self
            .memory
            .load(place, width.bytes())
            .map_err(|fault| unreadable("a gate word", address, fault))?;
        if found & mask != expected {
            return Err(Busy::Gate { gate, found }.into());
        }
        let gate = PlannedGate::Named(gate);
        self.plan.add_gate(gate, place, width, mask, expected);
        Ok(())
    }

    fn closed_gate(&self) -> Option<Busy> {
        let mut gates = self.plan.gates.iter().zip(&self.plan.gate_words);
        gates.find_map(|(gate, word)| {
            let (_, found) = first_changed(self.memory, std::slice::from_ref(word)).ok()??;
            let gate = gate.named(&self.changes);
            Some(Busy::Gate { gate, found })
        })
    }

    fn word(&self, what: &'static str, address: u64, width: Width) -> Result<u64, PlanError> {
        let place = self.locate(what, address, width.bytes())?;
        let word = self.memory.load(place, width.bytes());
        word.map_err(|fault| unreadable(what, address, fault))
    }

    fn locate(&self, what: &'static str, address: u64, len: usize) -> Result<M::Place, PlanError> {
        self.memory
            .locate(address, len)
            .map_err(|unmapped| unreadable(what, address, unmapped))
    }
}

pub(crate) fn unreadable(
    what: &'static str,
    address: u64,
    error: impl Into<ReadError>,
) -> PlanError {
    PlanError::Unreadable {
        what,
        address,
        error: error.into(),
    }
}

/// Returns the count of `key` after `op`.
fn step(key: &Key, count: i32, op: Op) -> Result<i32, PlanError> {
    let name = || key.full_name.clone();
    let after = apply(count, op).map_err(|refusal| match refusal {
        Refusal::Busy => Busy::FirstReference { key: name() }.into(),
        Refusal::WouldWarn { .. } => PlanError::WouldWarn {
            key: name(),
            refusal,
        },
    })?;
    match key.class {
        Class::Tracepoint if count.max(after) > 1 => Err(PlanError::Tracepoint {
            key: name(),
            why: "its key is a boolean, not a count: above 1 the guest could not turn it off; use enable and disable",
        }),
        // Only a rise is refused. A reference that was taken at 0 may always be dropped, even if
        // the guest has raised the count since.
        Class::Guarded | Class::DynamicDebug if after > count && after > 1 => {
            Err(PlanError::Boolean {
                key: name(),
                class: key.class,
            })
        }
        _ => Ok(after),
    }
}

/// A site that was located and read.
pub(crate) struct SiteBytes<P> {
    pub place: P,
    /// 5, or 2 if the text or the mapping has fewer than five bytes from the site on.
    pub length: usize,
    pub bytes: [u8; 5],
}

impl<P> SiteBytes<P> {
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Locates and reads the site at `code`. Returns `None` if it lies outside the image's text.
pub(crate) fn read_site<M: GuestMemory>(
    memory: &M,
    image: &CodeImage,
    code: u64,
) -> Result<Option<SiteBytes<M::Place>>, ReadError> {
    let [two, five] = [Size::Two.bytes(), Size::Five.bytes()];
    if !image.text.contains(code, two as u64) {
        return Ok(None);
    }
    let five_bytes = if image.text.contains(code, five as u64) {
        memory.locate(code, five).ok()
    } else {
        None
    };
    let (place, length) = match five_bytes {
        Some(place) => (place, five),
        None => (memory.locate(code, two)?, two),
    };
    let bytes = first_bytes(memory.load(place, length)?);
    Ok(Some(SiteBytes {
        place,
        length,
        bytes,
    }))
}
