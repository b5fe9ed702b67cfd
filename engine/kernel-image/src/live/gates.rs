// SPDX-License-Identifier: Apache-2.0
//! The gates: words of an unpatched kernel that tell whether it is changing its own keys.
//!
//! | kernel | no change of text is under way if |
//! |---|---|
//! | before 6.16 | `tp_vec_nr` = 0, `bp_desc.refs` = 0 (or, before 5.10.150 and 6.0, `bp_desc` = NULL) |
//! | 6.16 and later | `text_poke_array.nr_entries` = 0, `text_poke_array_refs` of each CPU = 0 |

use serde::Serialize;

use super::error::{DiscoveryError, GIVE_FILE, busy, refuse};
use super::layout::{Inner, Layout};
use patchbay_memory::PhysicalMemory;

use super::memory::View;
use super::modules::{LeftOut, Loaded};
use crate::symbols::{Named, SymbolKind, Symbols};

/// The maximum number of possible CPUs.
const MAX_CPUS: u64 = 8192;

/// The lock or state that a gate reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateKind {
    /// `init_task.stack_canary` is the same: each boot chooses a new one.
    SameKernel,
    /// `system_state` is SYSTEM_RUNNING.
    SystemState,
    /// `panic_cpu`: no CPU panics.
    Panic,
    /// `jump_label_mutex` is free: no key is changed.
    JumpLabelMutex,
    /// `text_mutex` is free: no text is changed.
    TextMutex,
    /// No text change is queued.
    TextPokeQueue,
    /// No text change is under way.
    TextPoke,
    /// `tracepoints_mutex` is free: no probe is attached or detached.
    TracepointsMutex,
    /// `ddebug_lock` is free: no descriptor's flags are changed.
    DynamicDebugMutex,
    /// `module_mutex` is free: no module is loaded or unloaded.
    ModuleMutex,
    /// `mod_tree` has the same sequence number: no module was inserted or removed.
    ModuleCount,
    /// Both ends of the list of modules are the same.
    ModuleList,
    /// The module is live.
    ModuleState,
    /// The module has the jump table that was read.
    ModuleTable,
    /// The module is still in the state in which it was left out.
    ModuleLeftOut,
}

impl GateKind {
    /// Returns the name of the gate, which is the kernel's own name if it has one.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SameKernel => "same kernel",
            Self::SystemState => "system_state",
            Self::Panic => "panic_cpu",
            Self::JumpLabelMutex => "jump_label_mutex",
            Self::TextMutex => "text_mutex",
            Self::TextPokeQueue => "text_poke queue",
            Self::TextPoke => "text_poke",
            Self::TracepointsMutex => "tracepoints_mutex",
            Self::DynamicDebugMutex => "ddebug_lock",
            Self::ModuleMutex => "module_mutex",
            Self::ModuleCount => "number of module changes",
            Self::ModuleList => "list of modules",
            Self::ModuleState => "state of a module",
            Self::ModuleTable => "jump table of a module",
            Self::ModuleLeftOut => "state of a module that was left out",
        }
    }

    /// Returns whether a discovery needs the gate open. A discovery reads data that was stored at
    /// boot or with a module, and reads a key again if it is just being changed. It therefore need
    /// not wait for a mutex, whose holder may hang, or for a change of text. These gates stop
    /// changes of the keys that they [concern](Concerns).
    fn stops_discovery(self) -> bool {
        match self {
            Self::SameKernel
            | Self::SystemState
            | Self::Panic
            | Self::ModuleCount
            | Self::ModuleList
            | Self::ModuleState
            | Self::ModuleTable
            | Self::ModuleLeftOut => true,
            Self::JumpLabelMutex
            | Self::TextMutex
            | Self::TextPokeQueue
            | Self::TextPoke
            | Self::TracepointsMutex
            | Self::DynamicDebugMutex
            | Self::ModuleMutex => false,
        }
    }
}

/// The changes for which a gate must be open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Concerns {
    /// Every change.
    All,
    /// Changes of a tracepoint's key.
    Tracepoints,
    /// Changes of a key of dynamic debug.
    DynamicDebug,
    /// Changes of keys or sites of any module.
    Modules,
    /// Changes of keys or sites of the module whose `struct module` has this address.
    Module(u64),
}

/// A word of the guest and the value that it must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Gate {
    /// The lock or state that the gate reports.
    pub kind: GateKind,
    /// Guest-virtual address of the word. If `per_cpu` is set, each CPU's offset is added to it.
    pub address: u64,
    /// Width in bytes, 4 or 8. The word is little-endian.
    pub width: u8,
    /// The bits that are compared.
    pub mask: u64,
    /// The value of these bits while the gate is open.
    pub wanted: u64,
    /// The changes that a closed gate stops.
    pub concerns: Concerns,
    /// Each CPU has its own copy of the word.
    pub per_cpu: bool,
}

/// The gates of a kernel.
#[derive(Clone, Debug, Default)]
pub(super) struct Gates {
    pub gates: Vec<Gate>,
    /// Gates for which no word was found in this kernel.
    pub missing: Vec<GateKind>,
    /// Offset of each possible CPU's per-CPU variables.
    pub per_cpu_offsets: Vec<u64>,
}

const WORD: Gate = Gate {
    kind: GateKind::SystemState,
    address: 0,
    width: 4,
    mask: 0xffff_ffff,
    wanted: 0,
    concerns: Concerns::All,
    per_cpu: false,
};

impl Gates {
    fn add(&mut self, kind: GateKind, gate: Option<Gate>) {
        match gate {
            Some(gate) => self.gates.push(Gate { kind, ..gate }),
            None => self.missing.push(kind),
        }
    }

    /// Returns the gates that are closed, with the value found.
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
    ) -> Result<(), DiscoveryError> {
        match self
            .all_closed(view)
            .find(|(kind, _)| kind.stops_discovery())
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

/// Finds the gates. Reads a word only if its present value must stay the same.
pub(super) fn find<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    symbols: &Symbols,
    named: &Named,
    layout: &Layout,
    inner: &Inner,
) -> Result<Gates, DiscoveryError> {
    let mut gates = Gates::default();
    let at = |name: &str, gate: Gate| {
        let address = named.address(name)?;
        Some(Gate { address, ..gate })
    };
    let mutex = |name: &str, concerns| {
        let address = named.address(name)?;
        Some(Gate {
            address: address.checked_add(u64::from(layout.mutex_owner))?,
            width: 8,
            mask: layout.mutex_owner_mask,
            concerns,
            ..WORD
        })
    };
    let running = u64::from(layout.system_running);
    gates.add(GateKind::SameKernel, same_kernel(view, named, inner));
    gates.add(
        GateKind::SystemState,
        at("system_state", WORD).map(|gate| Gate {
            wanted: running,
            ..gate
        }),
    );
    // The wanted value is PANIC_CPU_INVALID.
    gates.add(
        GateKind::Panic,
        at("panic_cpu", WORD).map(|gate| Gate {
            wanted: 0xffff_ffff,
            ..gate
        }),
    );
    gates.add(
        GateKind::JumpLabelMutex,
        mutex("jump_label_mutex", Concerns::All),
    );
    gates.add(GateKind::TextMutex, mutex("text_mutex", Concerns::All));
    text_poke(&mut gates, symbols, named, inner);
    if layout.tracepoint_size != 0 {
        gates.add(
            GateKind::TracepointsMutex,
            mutex("tracepoints_mutex", Concerns::Tracepoints),
        );
    }
    if inner.ddebug.is_some() {
        gates.add(
            GateKind::DynamicDebugMutex,
            mutex("ddebug_lock", Concerns::DynamicDebug),
        );
    }
    gates.add(
        GateKind::ModuleMutex,
        mutex("module_mutex", Concerns::Modules),
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
) -> Option<Gate> {
    let canary = u64::from(inner.stack_canary?);
    let address = named.address("init_task")?.checked_add(canary)?;
    Some(Gate {
        address,
        width: 8,
        mask: u64::MAX,
        wanted: view.u64(address)?,
        ..WORD
    })
}

/// Adds the gates for the words of arch/x86/kernel/alternative.c.
fn text_poke(gates: &mut Gates, symbols: &Symbols, named: &Named, inner: &Inner) {
    let field = |name: &str, offset: Option<u32>| {
        let address = named.address(name)?.checked_add(u64::from(offset?))?;
        Some(Gate { address, ..WORD })
    };
    if named.address("text_poke_array").is_some() {
        gates.add(
            GateKind::TextPokeQueue,
            field("text_poke_array", inner.text_poke_array_nr),
        );
        gates.add(
            GateKind::TextPoke,
            field("text_poke_array_refs", Some(0)).map(|gate| Gate {
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
        field("bp_desc", Some(0)).map(|gate| Gate {
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

/// Adds the gates that tell whether the modules are still those that were read.
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
        Some(Gate {
            address,
            width,
            mask: if width == 4 { 0xffff_ffff } else { u64::MAX },
            wanted: read(view, address, width)?,
            concerns: Concerns::Modules,
            ..WORD
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
        let concerns = Concerns::Module(module.address);
        let member = |offset: u32| module.address.checked_add(u64::from(offset));
        gates.add(
            GateKind::ModuleState,
            member(layout.module_state).map(|address| Gate {
                address,
                wanted: u64::from(layout.module_state_live),
                concerns,
                ..WORD
            }),
        );
        gates.add(
            GateKind::ModuleTable,
            keep(member(layout.module_jump_entries), 8).map(|gate| Gate { concerns, ..gate }),
        );
    }
    for module in left_out {
        let address = module.address.checked_add(u64::from(layout.module_state));
        let concerns = Concerns::Module(module.address);
        gates.gates.extend(address.map(|address| Gate {
            kind: GateKind::ModuleLeftOut,
            address,
            wanted: u64::from(module.word),
            concerns,
            ..WORD
        }));
    }
}
