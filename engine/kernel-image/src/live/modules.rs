// SPDX-License-Identifier: Apache-2.0
//! Reads the loaded modules from `modules`, a list of `struct module`.

use std::ops::Range;

use super::error::{DiscoveryError, busy, refuse};
use super::layout::{Inner, Layout, Memory};
use patchbay_memory::PhysicalMemory;

use super::memory::View;
use crate::symbols::{Symbol, SymbolKind, Symbols};

/// The maximum number of modules, the same as the engine's.
const MAX_MODULES: usize = static_keys::MODULES_MAX;
/// The maximum number of modules that are not live. The `static_key_mod` list of each key may
/// contain all of them.
const MAX_LEFT_OUT: usize = 64;
/// The maximum size of one area of a module, in bytes.
const MAX_AREA: u64 = 256 << 20;
/// The maximum number of symbols of a module.
const MAX_SYMBOLS: usize = 1 << 18;
/// The maximum number of symbols of all modules together.
const MAX_ALL_SYMBOLS: usize = 1 << 20;
/// The maximum size of the names of all modules' symbols, in bytes. Symbols may share the bytes of
/// a name, so the amount of copied memory does not bound this size.
const MAX_NAMES: usize = 32 << 20;
/// Size of `Elf64_Sym` in bytes.
const SYMBOL_SIZE: u64 = 24;

/// A loaded module, as described by its `struct module`.
#[derive(Debug)]
pub(super) struct Loaded {
    /// Address of the `struct module`.
    pub address: u64,
    pub name: String,
    pub text: Range<u64>,
    pub ro_after_init: Range<u64>,
    /// The init text, which is freed once the module is live.
    pub init_text: Range<u64>,
    /// Address ranges of the module's data and code.
    pub areas: Vec<Range<u64>>,
    pub jump_table: Range<u64>,
    /// Address range of the pointers to the module's tracepoints.
    pub tracepoints: Range<u64>,
    kallsyms: u64,
}

/// A module in the list that is not live. After an oops in its init function a module never becomes
/// live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Address of the `struct module`.
    pub address: u64,
    /// Name of the module.
    pub name: String,
    /// The kernel's name for the module's state, such as COMING.
    pub state: &'static str,
    /// The value of that state.
    pub word: u32,
}

impl Loaded {
    /// Returns whether the address lies in the module's memory.
    pub fn contains(&self, address: u64) -> bool {
        self.areas.iter().any(|area| area.contains(&address))
    }
}

/// Walks the list. Returns the modules that are live, and those that are not.
pub(super) fn read<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    head: u64,
    layout: &Layout,
    inner: &Inner,
) -> Result<(Vec<Loaded>, Vec<LeftOut>), DiscoveryError> {
    let (mut modules, mut left_out) = (Vec::new(), Vec::new());
    let Some(mut node) = view.u64(head) else {
        return refuse("the list of modules is not mapped");
    };
    while node != head {
        if modules.len() + left_out.len() == MAX_MODULES {
            return busy(format!(
                "the list of modules has more than {MAX_MODULES} elements or loops"
            ));
        }
        let address = node.wrapping_sub(u64::from(inner.module.list));
        let state = view
            .pointer(address, layout.keys.module_state)
            .map(|word| word as u32);
        match state {
            None => return busy(format!("the module at {address:#x} is not mapped")),
            Some(state)
                if state != layout.keys.module_state_live && left_out.len() == MAX_LEFT_OUT =>
            {
                return busy(format!(
                    "more than {MAX_LEFT_OUT} modules are loading or unloading, or the list of modules loops"
                ));
            }
            Some(state) if state != layout.keys.module_state_live => left_out.push(LeftOut {
                address,
                name: name(view, address, inner).unwrap_or_else(|| format!("{address:#x}")),
                state: inner.module.state_name(state),
                word: state,
            }),
            Some(_) => match module(view, address, layout, inner) {
                Some(module) => modules.push(module),
                None => {
                    return busy(format!("the struct module at {address:#x} cannot be read"));
                }
            },
        }
        match view.u64(node) {
            Some(next) => node = next,
            None => return busy("the list of modules leads to memory that is not mapped"),
        }
    }
    Ok((modules, left_out))
}

fn name<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    address: u64,
    inner: &Inner,
) -> Option<String> {
    let mut name = vec![0; inner.module.name_size as usize];
    view.read(
        address.checked_add(u64::from(inner.module.name))?,
        &mut name,
    )?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(crate::classes::printable(name).into_owned())
}

fn module<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    address: u64,
    layout: &Layout,
    inner: &Inner,
) -> Option<Loaded> {
    let module = &inner.module;
    let name = name(view, address, inner)?;
    let entries = view.pointer(address, layout.module_jump_entries)?;
    let count = view.pointer(address, layout.module_num_jump_entries)? & 0xffff_ffff;
    let size = static_keys::EntryFormat::Relative.entry_size() as u64;
    let tracepoints = match module.tracepoints {
        None => 0..0,
        Some((pointers, count)) => {
            let count = view.pointer(address, count)? & 0xffff_ffff;
            let start = view.pointer(address, pointers)?;
            start..start.checked_add(4 * count)?
        }
    };
    let areas = areas(view, address, &module.memory)?;
    Some(Loaded {
        address,
        name,
        text: areas.text,
        ro_after_init: areas.ro_after_init,
        init_text: areas.init_text,
        areas: areas.all,
        jump_table: if count == 0 {
            0..0
        } else {
            entries..entries.checked_add(count * size)?
        },
        tracepoints,
        kallsyms: view.pointer(address, module.kallsyms)?,
    })
}

struct Areas {
    all: Vec<Range<u64>>,
    text: Range<u64>,
    ro_after_init: Range<u64>,
    init_text: Range<u64>,
}

fn areas<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    module: u64,
    memory: &Memory,
) -> Option<Areas> {
    // The members are pointers and 32-bit integers. Both are read as 64 bits, and the integers are
    // truncated.
    let mut word = |at: u32, offset: u32| view.pointer(module, at.checked_add(offset)?);
    let area = |base: u64, from: u64, to: u64| {
        (to <= MAX_AREA && from <= to)
            .then(|| Some(base.checked_add(from)?..base.checked_add(to)?))?
    };
    match *memory {
        Memory::Array {
            at,
            stride,
            count,
            base,
            size,
            text,
            ro_after_init,
            init_text,
        } => {
            let mut all = Vec::new();
            for index in 0..count {
                let element = at.checked_add(index.checked_mul(stride)?)?;
                let length = word(element, size)? & 0xffff_ffff;
                all.push(area(word(element, base)?, 0, length)?);
            }
            Some(Areas {
                text: all.get(text as usize)?.clone(),
                ro_after_init: all.get(ro_after_init as usize)?.clone(),
                init_text: all.get(init_text as usize)?.clone(),
                all,
            })
        }
        Memory::Layouts {
            core,
            init,
            base,
            size,
            text_size,
            ro_size,
            ro_after_init_size,
        } => {
            let mut half = |at: u32, offset: u32| Some(word(at, offset)? & 0xffff_ffff);
            let (size_of, text_of) = (half(core, size)?, half(core, text_size)?);
            let (ro, sealed) = (half(core, ro_size)?, half(core, ro_after_init_size)?);
            let (init_size, init_text) = (half(init, size)?, half(init, text_size)?);
            let (start, init) = (word(core, base)?, word(init, base)?);
            Some(Areas {
                text: area(start, 0, text_of)?,
                ro_after_init: area(start, ro.min(sealed), sealed)?,
                init_text: area(init, 0, init_text)?,
                all: vec![area(start, 0, size_of)?, area(init, 0, init_size)?],
            })
        }
    }
}

/// The number of symbols, and the size of their names, that may still be read from modules. Symbols
/// that are read but not kept also count.
pub(super) struct SymbolRoom {
    symbols: usize,
    names: usize,
}

impl Default for SymbolRoom {
    fn default() -> Self {
        Self {
            symbols: MAX_ALL_SYMBOLS,
            names: MAX_NAMES,
        }
    }
}

/// Returns the symbols of a module from its `struct mod_kallsyms`. Returns `None` if the symbols
/// cannot be read or take more than `room`.
pub(super) fn symbols<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    module: &Loaded,
    inner: &Inner,
    room: &mut SymbolRoom,
) -> Option<Symbols> {
    let layout = &inner.module;
    let table = view.pointer(module.kallsyms, layout.symtab)?;
    let count = view.pointer(module.kallsyms, layout.num_symtab)? & 0xffff_ffff;
    let strings = view.pointer(module.kallsyms, layout.strtab)?;
    let taken = usize::try_from(count).ok()?;
    if taken > MAX_SYMBOLS {
        return None;
    }
    room.symbols = room.symbols.checked_sub(taken)?;
    let table = view.array(table, count, SYMBOL_SIZE, u64::MAX)?;
    let mut symbols = Symbols::default();
    let (records, _) = table.as_chunks::<24>();
    // The first record is the null symbol.
    for record in records.iter().skip(1) {
        let (Some(name), Some(section), Some(value)) = (
            record.first_chunk().map(|name| u32::from_le_bytes(*name)),
            record.get(6..8),
            record
                .last_chunk::<16>()
                .and_then(|rest| rest.first_chunk()),
        ) else {
            continue;
        };
        let address = u64::from_le_bytes(*value);
        if section == [0, 0] || !module.contains(address) {
            continue;
        }
        let name = crate::classes::Memory::text_at(view, strings.checked_add(u64::from(name))?)?;
        room.names = room.names.checked_sub(name.len())?;
        let kind = SymbolKind::from_section(module.text.contains(&address));
        // The upper half of st_info is the binding; 0 is local.
        let global = record[4] >> 4 != 0;
        symbols.push(
            Symbol {
                address,
                kind,
                global,
            },
            &name,
        );
    }
    symbols.sort();
    Some(symbols)
}
