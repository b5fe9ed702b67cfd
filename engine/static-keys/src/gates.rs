// SPDX-License-Identifier: Apache-2.0
//! The gates that a guest lists: words of its kernel that must have a known value before keys may
//! be changed.
//!
//! The words differ between kernel versions, so the guest lists them with their address, width,
//! mask and wanted value. A change reads the gates that protect what it changes ([`Concerns`]). The
//! kind and the name of a gate appear in messages.

use std::fmt;
use std::sync::Arc;

use crate::entry::EntryFormat;
use crate::error::CatalogError;
use crate::memory::Width;

/// The maximum number of gates of a guest.
pub const GATES_MAX: usize = 64;
/// The maximum number of CPU offsets of a guest. Each CPU has its own copy of a per-CPU word.
pub const CPUS_MAX: usize = 4096;
/// The maximum number of words of all gates together, including the words of each CPU. All of them
/// are read while the guest is stopped.
pub const GATE_WORDS_MAX: usize = 8192;

/// The lock or state that a gate reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateKind {
    /// `system_state`: the kernel is booting or shutting down.
    SystemState,
    /// `jump_label_mutex`: the kernel changes a key, or loads or unloads a module.
    JumpLabelMutex,
    /// `text_mutex`: the kernel changes its text.
    TextMutex,
    /// A text change is in progress: there may be a breakpoint in the text.
    TextPoke,
    /// Text changes are queued.
    TextPokeQueue,
    /// `tracepoints_mutex`: the kernel attaches or detaches a probe.
    TracepointsMutex,
    /// `module_mutex`: the kernel changes its list of modules.
    ModuleMutex,
    /// `ddebug_lock`: the kernel changes the flags of a descriptor of dynamic debug.
    DynamicDebugMutex,
    /// `panic_cpu`: a CPU panics.
    Panic,
    /// `init_task.stack_canary`, which each boot chooses at random: a different value means that
    /// another kernel runs.
    SameKernel,
    /// The sequence number of `mod_tree` is not that of the discovery: a module was inserted or
    /// removed.
    ModuleCount,
    /// The first or the last module of the list is not that of the discovery.
    ModuleList,
    /// The module is not live.
    ModuleState,
    /// The jump table of the module is not that of the discovery.
    ModuleTable,
    /// The state of a module that the discovery left out, because the module was not live, has
    /// changed.
    ModuleLeftOut,
    /// A kind that is unknown to this version.
    Other(u32),
}

impl GateKind {
    /// Returns the name of the gate, which is the kernel's own name if it has one.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SystemState => "system_state",
            Self::JumpLabelMutex => "jump_label_mutex",
            Self::TextMutex => "text_mutex",
            Self::TextPoke => "text_poke",
            Self::TextPokeQueue => "text_poke queue",
            Self::TracepointsMutex => "tracepoints_mutex",
            Self::ModuleMutex => "module_mutex",
            Self::DynamicDebugMutex => "ddebug_lock",
            Self::Panic => "panic_cpu",
            Self::SameKernel => "same kernel",
            Self::ModuleCount => "number of module changes",
            Self::ModuleList => "list of modules",
            Self::ModuleState => "state of a module",
            Self::ModuleTable => "jump table of a module",
            Self::ModuleLeftOut => "state of a module that was left out",
            Self::Other(_) => "of an unknown kind",
        }
    }

    /// Returns whether a rollback waits for the gate. It does not wait for a gate that compares the
    /// modules with those of the discovery, because such a gate stays closed after a module was
    /// loaded or unloaded. It does wait for a gate that is closed because another kernel runs:
    /// nothing may be written to that kernel.
    #[must_use]
    pub fn opens_again(self) -> bool {
        !matches!(
            self,
            Self::ModuleCount | Self::ModuleList | Self::ModuleTable
        )
    }
}

/// The kinds of change that a gate concerns, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Concerns(pub u32);

impl Concerns {
    /// Every change, including one that writes only counts.
    pub const COUNTS: Self = Self(1 << 0);
    /// Every change that needs the guest stopped.
    pub const SITES: Self = Self(1 << 1);
    /// Switching a key of class guarded on or off.
    pub const GUARDED: Self = Self(1 << 2);
    /// Switching a key of class ref on or off.
    pub const REF: Self = Self(1 << 3);
    /// Switching a key of class tracepoint on or off.
    pub const TRACEPOINT: Self = Self(1 << 4);
    /// Switching a key that a module defines or branches on.
    pub const MODULES: Self = Self(1 << 5);
    /// Switching a key of class dynamic debug on or off.
    pub const DYNAMIC_DEBUG: Self = Self(1 << 6);
    /// All defined bits.
    pub const ALL: Self = Self((1 << 7) - 1);

    /// Returns whether the two have a bit in common.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the bits that are set in either of the two.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A gate as a guest lists it, before it is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedGate {
    /// The lock or state that it reports.
    pub kind: GateKind,
    /// The guest's name for the word, printable; may be empty.
    pub name: Arc<str>,
    /// Guest-virtual address of the word. If `per_cpu` is set, each CPU's offset is added to it.
    pub address: u64,
    /// Each CPU has its own copy of the word.
    pub per_cpu: bool,
    /// Width in bytes: 1, 2, 4 or 8.
    pub width: u8,
    /// The bits that are compared.
    pub mask: u64,
    /// The value of these bits while the gate is open.
    pub wanted: u64,
    /// The changes that the gate concerns.
    pub concerns: Concerns,
}

/// The list of gates cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The list has more than [`GATES_MAX`] gates.
    #[error("{0} gates are more than the {GATES_MAX} that are supported")]
    TooMany(usize),
    /// The list has more than [`CPUS_MAX`] CPU offsets.
    #[error("{0} CPU offsets are more than the {CPUS_MAX} that are supported")]
    TooManyCpus(usize),
    /// The gates have more than [`GATE_WORDS_MAX`] words.
    #[error("the gates of all CPUs have more than the {GATE_WORDS_MAX} words that are supported")]
    TooManyWords,
    /// A gate has one word per CPU, but the list has no CPU offsets.
    #[error("gate {0} is one word for each CPU, but the guest listed no CPU offsets")]
    NoCpus(String),
    /// The width is not 1, 2, 4 or 8 bytes.
    #[error("gate {gate} is {width} bytes wide, expected 1, 2, 4 or 8")]
    Width {
        /// The gate.
        gate: String,
        /// Width in the guest's list.
        width: u8,
    },
    /// The word is not aligned, so it could straddle two pages.
    #[error("gate {gate} at {address:#x} is not aligned to its {width} bytes")]
    Unaligned {
        /// The gate.
        gate: String,
        /// Address of the word.
        address: u64,
        /// Width of the word in bytes.
        width: usize,
    },
    /// The mask is 0, or has bits outside the word.
    #[error("gate {gate} has the mask {mask:#x}, expected some of the bits of a {width}-byte word")]
    Mask {
        /// The gate.
        gate: String,
        /// Mask in the guest's list.
        mask: u64,
        /// Width of the word in bytes.
        width: usize,
    },
    /// The wanted value has bits outside the mask, so the gate could never open.
    #[error("gate {gate} wants the value {wanted:#x}, which its mask {mask:#x} excludes")]
    Wanted {
        /// The gate.
        gate: String,
        /// Wanted value in the guest's list.
        wanted: u64,
        /// Mask in the guest's list.
        mask: u64,
    },
    /// The gate concerns no change, or a kind of change that is unknown to this version.
    #[error("gate {gate} concerns {concerns:#x}, expected some of the bits {:#x}", Concerns::ALL.0)]
    Concerns {
        /// The gate.
        gate: String,
        /// Bits in the guest's list.
        concerns: u32,
    },
}

/// Identifies a gate of the kernel that was found closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelGate {
    /// The lock or state that it reports.
    pub kind: GateKind,
    /// The guest's name for the word; may be empty.
    pub name: Arc<str>,
    /// Index of the CPU in the list of offsets; `None` if the gate has a single word.
    pub cpu: Option<u32>,
}

impl KernelGate {
    fn new(listed: &ListedGate) -> Self {
        Self {
            kind: listed.kind,
            name: Arc::clone(&listed.name),
            cpu: None,
        }
    }

    /// Returns the guest's name, or the kind if the name is empty.
    fn label(&self) -> String {
        match (&*self.name, self.kind) {
            ("", GateKind::Other(number)) => format!("of kind {number}"),
            ("", kind) => format!("{kind:?}"),
            (name, _) => name.to_owned(),
        }
    }
}

impl fmt::Display for KernelGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.label();
        match self.kind {
            GateKind::SystemState => f.write_str("system_state is not SYSTEM_RUNNING"),
            GateKind::JumpLabelMutex => f.write_str("jump_label_mutex is held"),
            GateKind::TextMutex => f.write_str("text_mutex is held"),
            GateKind::TextPoke => write!(f, "a text change is in progress ({name})"),
            GateKind::TextPokeQueue => write!(f, "text changes are queued ({name})"),
            GateKind::TracepointsMutex => f.write_str("tracepoints_mutex is held"),
            GateKind::ModuleMutex => f.write_str("module_mutex is held"),
            _ => write!(f, "the guest's gate {name} is closed"),
        }?;
        match self.cpu {
            Some(cpu) => write!(f, " on CPU {cpu}"),
            None => Ok(()),
        }
    }
}

/// A word of a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckedGate {
    pub gate: KernelGate,
    pub address: u64,
    pub width: Width,
    pub mask: u64,
    pub wanted: u64,
    pub concerns: Concerns,
}

/// All words of a guest's gates, in the order that the guest listed them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gates(Arc<[CheckedGate]>);

impl Gates {
    /// Checks the list and expands each per-CPU gate to one word for each CPU. `cpu_offsets` has
    /// one offset per CPU, which is added to the address of such a gate.
    ///
    /// # Errors
    /// [`GateError`] names the gate.
    pub fn new(listed: &[ListedGate], cpu_offsets: &[u64]) -> Result<Self, GateError> {
        if listed.len() > GATES_MAX {
            return Err(GateError::TooMany(listed.len()));
        }
        if cpu_offsets.len() > CPUS_MAX {
            return Err(GateError::TooManyCpus(cpu_offsets.len()));
        }
        let each = |gate: &ListedGate| if gate.per_cpu { cpu_offsets.len() } else { 1 };
        // Cannot overflow: both lists are bounded.
        let total = listed.iter().map(each).sum();
        if total > GATE_WORDS_MAX {
            return Err(GateError::TooManyWords);
        }
        let mut words = Vec::with_capacity(total);
        for gate in listed {
            let word = check(gate)?;
            if !gate.per_cpu {
                words.push(aligned(word)?);
                continue;
            }
            if cpu_offsets.is_empty() {
                return Err(GateError::NoCpus(word.gate.label()));
            }
            for (cpu, offset) in (0..).zip(cpu_offsets) {
                let mut word = word.clone();
                word.gate.cpu = Some(cpu);
                // Linux adds modulo 2^64. If per-CPU symbols have addresses in the kernel image,
                // the offset is the distance from the symbol to the CPU's copy.
                word.address = word.address.wrapping_add(*offset);
                words.push(aligned(word)?);
            }
        }
        Ok(Self(words.into()))
    }

    pub(crate) fn words(&self) -> &[CheckedGate] {
        &self.0
    }

    /// Returns the name and the address of each word.
    pub fn addresses(&self) -> impl Iterator<Item = (String, u64)> {
        self.0.iter().map(|word| (word.gate.label(), word.address))
    }

    /// Returns whether a gate of this kind concerns one of the given kinds of change.
    pub(crate) fn has(&self, kind: GateKind, concerns: Concerns) -> bool {
        self.0
            .iter()
            .any(|word| word.gate.kind == kind && word.concerns.intersects(concerns))
    }

    /// Returns whether any gate concerns one of the given kinds of change.
    pub(crate) fn concern(&self, concerns: Concerns) -> bool {
        self.0.iter().any(|word| word.concerns.intersects(concerns))
    }

    /// Checks that the list has the gates that every kernel with this format has. An incomplete
    /// list would permit a change while the kernel itself is making one.
    pub(crate) fn check_complete(&self, format: EntryFormat) -> Result<(), CatalogError> {
        let has_jump_labels = format != EntryFormat::None;
        for (kind, concerns, what, needed) in [
            (
                GateKind::SystemState,
                Concerns::COUNTS,
                "system_state",
                true,
            ),
            (
                GateKind::JumpLabelMutex,
                Concerns::SITES,
                "jump_label_mutex",
                has_jump_labels,
            ),
            (
                GateKind::TextMutex,
                Concerns::SITES,
                "text_mutex",
                has_jump_labels,
            ),
        ] {
            if needed && !self.has(kind, concerns) {
                return Err(CatalogError::GateMissing { what });
            }
        }
        Ok(())
    }
}

fn check(listed: &ListedGate) -> Result<CheckedGate, GateError> {
    let kernel_gate = KernelGate::new(listed);
    let gate = || kernel_gate.label();
    let &ListedGate { mask, wanted, .. } = listed;
    let width = Width::of(listed.width).ok_or_else(|| GateError::Width {
        gate: gate(),
        width: listed.width,
    })?;
    if mask == 0 || mask & !width.mask() != 0 {
        return Err(GateError::Mask {
            gate: gate(),
            mask,
            width: width.bytes(),
        });
    }
    if wanted & !mask != 0 {
        return Err(GateError::Wanted {
            gate: gate(),
            wanted,
            mask,
        });
    }
    let concerns = listed.concerns;
    if concerns.0 == 0 || concerns.0 & !Concerns::ALL.0 != 0 {
        return Err(GateError::Concerns {
            gate: gate(),
            concerns: concerns.0,
        });
    }
    Ok(CheckedGate {
        gate: kernel_gate,
        address: listed.address,
        width,
        mask,
        wanted,
        concerns,
    })
}

fn aligned(word: CheckedGate) -> Result<CheckedGate, GateError> {
    if word.address.is_multiple_of(word.width.bytes() as u64) {
        return Ok(word);
    }
    Err(GateError::Unaligned {
        gate: word.gate.label(),
        address: word.address,
        width: word.width.bytes(),
    })
}
