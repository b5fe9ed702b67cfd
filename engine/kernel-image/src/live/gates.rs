// SPDX-License-Identifier: Apache-2.0
//! The gates: words of an unpatched kernel that show whether it is changing its own keys.
//!
//! | kernel | no change of text is in progress if |
//! |---|---|
//! | before 6.0, in the 5.10 series before 5.10.150 | `tp_vec_nr` = 0, `bp_desc` = NULL |
//! | from then on, before 6.16 | `tp_vec_nr` = 0, `bp_desc.refs` = 0 |
//! | 6.16 and later | `text_poke_array.nr_entries` = 0, `text_poke_array_refs` of each CPU = 0 |

use std::sync::Arc;

use static_keys::{Concerns, GateKind, ListedGate};

use super::error::{DiscoveryError, GIVE_FILE, busy, refuse};
use super::layout::{Inner, Layout};
use patchbay_memory::PhysicalMemory;

use super::memory::View;
use super::modules::{LeftOut, Loaded};
use crate::symbols::{Named, SymbolKind, Symbols};

/// The maximum number of possible CPUs.
const MAX_CPUS: u64 = 8192;

/// The kernels for which a discovery is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Only kernels whose keys can be changed.
    Running,
    /// Also a kernel that has panicked, whose keys can only be read.
    Panicked,
}

/// Returns whether a discovery fails while the gate is closed. A discovery reads data that was
/// stored at boot or when a module was loaded, and reads a key again if the guest is changing the
/// key. So it need not wait for a mutex, whose holder may hang, or for a change of text. The gates
/// for which this is `false` stop only changes of the keys that they [concern](Concerns).
fn stops_discovery(kind: GateKind, wanted: Wanted) -> bool {
    match kind {
        GateKind::Panic => wanted == Wanted::Running,
        GateKind::SameKernel
        | GateKind::SystemState
        | GateKind::ModuleCount
        | GateKind::ModuleList
        | GateKind::ModuleState
        | GateKind::ModuleTable
        | GateKind::ModuleLeftOut => true,
        GateKind::JumpLabelMutex
        | GateKind::TextMutex
        | GateKind::TextPokeQueue
        | GateKind::TextPoke
        | GateKind::TracepointsMutex
        | GateKind::DynamicDebugMutex
        | GateKind::ModuleMutex
        | GateKind::Other(_) => false,
    }
}

/// The gates of a kernel.
#[derive(Clone, Debug, Default)]
pub(super) struct Gates {
    pub gates: Vec<ListedGate>,
    /// Gates for which no word was found in this kernel.
    pub missing: Vec<GateKind>,
    /// Offset of each possible CPU's per-CPU variables.
    pub per_cpu_offsets: Vec<u64>,
}

/// Returns a gate that is open while the 32-bit word at `address` is 0, and that concerns every
/// change. [`Gates::add`] sets its kind.
fn word(address: u64) -> ListedGate {
    ListedGate {
        kind: GateKind::Other(0),
        name: Arc::default(),
        address,
        per_cpu: false,
        width: 4,
        mask: 0xffff_ffff,
        wanted: 0,
        concerns: Concerns::ALL,
    }
}

impl Gates {
    fn add(&mut self, kind: GateKind, gate: Option<ListedGate>) {
        let name = Arc::from(kind.name());
        match gate {
            Some(gate) => self.gates.push(ListedGate { kind, name, ..gate }),
            None => self.missing.push(kind),
        }
    }

    /// Returns the gates that are closed, with the values found.
    fn all_closed<M: PhysicalMemory + ?Sized>(
        &self,
        view: &mut View<'_, M>,
    ) -> impl Iterator<Item = (GateKind, u64)> {
        self.gates.iter().filter_map(|gate| {
            let offsets: &[u64] = if gate.per_cpu {
                &self.per_cpu_offsets
            } else {
                &[0]
            };
            offsets.iter().find_map(|offset| {
                let found = read(view, gate.address.wrapping_add(*offset), gate.width);
                let closed = found.is_none_or(|found| found & gate.mask != gate.wanted);
                closed.then_some((gate.kind, found.unwrap_or(0)))
            })
        })
    }

    /// Returns the first gate that is closed, with the value found.
    pub fn closed<M: PhysicalMemory + ?Sized>(
        &self,
        view: &mut View<'_, M>,
    ) -> Option<(GateKind, u64)> {
        self.all_closed(view).next()
    }

    /// Fails if a gate that a discovery needs is closed.
    pub fn check<M: PhysicalMemory + ?Sized>(
        &self,
        view: &mut View<'_, M>,
        wanted: Wanted,
    ) -> Result<(), DiscoveryError> {
        match self
            .all_closed(view)
            .find(|(kind, _)| stops_discovery(*kind, wanted))
        {
            None => Ok(()),
            Some((GateKind::Panic, cpu)) => Err(DiscoveryError::Panics(cpu)),
            Some((kind, found)) => busy(format!(
                "the gate {} is closed (found {found:#x})",
                kind.name()
            )),
        }
    }
}

fn read<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    address: u64,
    width: u8,
) -> Option<u64> {
    match width {
        4 => view.u32(address).map(u64::from),
        _ => view.u64(address),
    }
}

/// Finds the gates. A word is read only if its present value becomes the wanted value.
pub(super) fn find<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    symbols: &Symbols,
    named: &Named,
    layout: &Layout,
    inner: &Inner,
) -> Result<Gates, DiscoveryError> {
    let mut gates = Gates::default();
    let at = |name: &str, wanted| {
        let gate = word(named.address(name)?);
        Some(ListedGate { wanted, ..gate })
    };
    let mutex = |name: &str, concerns| {
        let address = named.address(name)?;
        Some(ListedGate {
            width: 8,
            mask: layout.mutex_owner_mask,
            concerns,
            ..word(address.checked_add(u64::from(layout.mutex_owner))?)
        })
    };
    let running = u64::from(layout.system_running);
    gates.add(GateKind::SameKernel, same_kernel(view, named, inner));
    gates.add(GateKind::SystemState, at("system_state", running));
    // The wanted value is PANIC_CPU_INVALID.
    gates.add(
        GateKind::Panic,
        at(patchbay_observe::state::PANIC, 0xffff_ffff),
    );
    gates.add(
        GateKind::JumpLabelMutex,
        mutex("jump_label_mutex", Concerns::ALL),
    );
    gates.add(GateKind::TextMutex, mutex("text_mutex", Concerns::ALL));
    text_poke(&mut gates, symbols, named, inner);
    if layout.tracepoint_size != 0 {
        gates.add(
            GateKind::TracepointsMutex,
            mutex("tracepoints_mutex", Concerns::TRACEPOINT),
        );
    }
    if inner.ddebug.is_some() {
        gates.add(
            GateKind::DynamicDebugMutex,
            mutex("ddebug_lock", Concerns::DYNAMIC_DEBUG),
        );
    }
    gates.add(
        GateKind::ModuleMutex,
        mutex("module_mutex", Concerns::MODULES),
    );
    if gates.gates.iter().any(|gate| gate.per_cpu) {
        gates.per_cpu_offsets = per_cpu_offsets(view, symbols, named)?;
    }
    for needed in [
        GateKind::SystemState,
        GateKind::JumpLabelMutex,
        GateKind::TextMutex,
        GateKind::TextPoke,
    ] {
        if gates.missing.contains(&needed) {
            return refuse(format!(
                "no symbol of the kernel names a word for the gate {}, so its keys cannot be changed safely; if it is built \
                 without CONFIG_KALLSYMS_ALL, {GIVE_FILE}",
                needed.name()
            ));
        }
    }
    Ok(gates)
}

fn same_kernel<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    named: &Named,
    inner: &Inner,
) -> Option<ListedGate> {
    let canary = u64::from(inner.stack_canary?);
    let address = named.address("init_task")?.checked_add(canary)?;
    Some(ListedGate {
        width: 8,
        mask: u64::MAX,
        wanted: view.u64(address)?,
        ..word(address)
    })
}

/// Adds the gates for the words of arch/x86/kernel/alternative.c.
fn text_poke(gates: &mut Gates, symbols: &Symbols, named: &Named, inner: &Inner) {
    let field = |name: &str, offset: Option<u32>| {
        let address = named.address(name)?.checked_add(u64::from(offset?))?;
        Some(word(address))
    };
    if named.address("text_poke_array").is_some() {
        gates.add(
            GateKind::TextPokeQueue,
            field("text_poke_array", inner.text_poke_array_nr),
        );
        gates.add(
            GateKind::TextPoke,
            field("text_poke_array_refs", Some(0)).map(|gate| ListedGate {
                per_cpu: true,
                ..gate
            }),
        );
        return;
    }
    gates.add(GateKind::TextPokeQueue, field("tp_vec_nr", Some(0)));
    let is_pointer = named
        .address("bp_desc")
        .is_some_and(|address| symbols.extent(address, SymbolKind::Data) <= 8);
    let gate = if is_pointer {
        field("bp_desc", Some(0)).map(|gate| ListedGate {
            width: 8,
            mask: u64::MAX,
            ..gate
        })
    } else {
        field("bp_desc", inner.bp_desc_refs)
    };
    gates.add(GateKind::TextPoke, gate);
}

/// Returns the offsets of the CPUs in `__cpu_possible_mask`.
fn per_cpu_offsets<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    symbols: &Symbols,
    named: &Named,
) -> Result<Vec<u64>, DiscoveryError> {
    let mut offsets = Vec::new();
    if let Some(mask) = named.address("__cpu_possible_mask")
        && let Some(array) = named.address("__per_cpu_offset")
    {
        let longest = symbols.extent(mask, SymbolKind::Data).min(MAX_CPUS / 8);
        for (index, byte) in (0..).zip(view.array(mask, longest, 1, longest).unwrap_or_default()) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 != 0) {
                let at = array.checked_add(8 * (8 * index + bit));
                match at.and_then(|at| view.u64(at)) {
                    Some(offset) => offsets.push(offset),
                    None => return refuse("__per_cpu_offset is not mapped"),
                }
            }
        }
    }
    if offsets.is_empty() {
        return refuse("the kernel has no possible CPU: the per-CPU gates cannot be found");
    }
    Ok(offsets)
}

/// Adds the gates that show whether the modules are still those that were read.
pub(super) fn add_modules<M: PhysicalMemory + ?Sized>(
    gates: &mut Gates,
    view: &mut View<'_, M>,
    named: &Named,
    layout: &Layout,
    inner: &Inner,
    modules: &[Loaded],
    left_out: &[LeftOut],
) {
    let mut keep = |address: Option<u64>, width: u8| {
        let address = address?;
        Some(ListedGate {
            width,
            mask: if width == 4 { 0xffff_ffff } else { u64::MAX },
            wanted: read(view, address, width)?,
            concerns: Concerns::MODULES,
            ..word(address)
        })
    };
    let sequence = inner
        .mod_tree_sequence
        .zip(named.address("mod_tree"))
        .and_then(|(offset, tree)| tree.checked_add(u64::from(offset)));
    gates.add(GateKind::ModuleCount, keep(sequence, 4));
    let head = named.address("modules");
    gates.add(GateKind::ModuleList, keep(head, 8));
    gates.add(
        GateKind::ModuleList,
        keep(head.and_then(|head| head.checked_add(8)), 8),
    );
    for module in modules {
        let member = |offset: u32| module.address.checked_add(u64::from(offset));
        gates.add(
            GateKind::ModuleState,
            member(layout.keys.module_state).map(|address| ListedGate {
                wanted: u64::from(layout.keys.module_state_live),
                concerns: Concerns::MODULES,
                ..word(address)
            }),
        );
        gates.add(
            GateKind::ModuleTable,
            keep(member(layout.module_jump_entries), 8),
        );
    }
    for module in left_out {
        let address = module.address;
        let Some(state) = address.checked_add(u64::from(layout.keys.module_state)) else {
            continue;
        };
        let gate = ListedGate {
            wanted: u64::from(module.word),
            concerns: Concerns::MODULES,
            ..word(state)
        };
        gates.add(GateKind::ModuleLeftOut, Some(gate));
    }
}
