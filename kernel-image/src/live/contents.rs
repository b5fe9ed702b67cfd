// SPDX-License-Identifier: Apache-2.0
//! Modules, jump tables and keys of a kernel that was located.

use static_keys::{ENTRIES_MAX, KEYS_MAX, Nops};

use super::error::{DiscoveryError, refuse};
use super::gates::{self, Gates};
use super::layout::{Inner, Layout};
use super::locate::{Located, required};
use super::memory::PhysicalMemory;
use super::modules::{self, Loaded};
use super::parts::Clock;
use super::tables::{self, Tables};
use super::{ImageTables, Key};
use crate::classes::Classes;

/// Most symbols of all modules together.
const MAX_MODULE_SYMBOLS: usize = 1 << 20;

/// What the kernel has.
pub(super) struct Contents {
    pub nops: Nops,
    pub images: Vec<ImageTables>,
    pub keys: Vec<Key>,
}

/// Reads modules, tables and names.
pub(super) fn read<M: PhysicalMemory + ?Sized>(
    located: &mut Located<'_, M>,
    gates: &mut Gates,
    layout: &Layout,
    inner: &Inner,
    clock: &mut Clock,
) -> Result<Contents, DiscoveryError> {
    let view = &mut located.view;
    let modules = match located.named.address("modules") {
        Some(head) => {
            let modules = modules::read(view, head, layout, inner)?;
            gates::add_modules(gates, view, &located.named, layout, inner, &modules);
            modules
        }
        None => Vec::new(),
    };
    clock.part("modules", view.copied());

    let mut tables = vec![kernel_tables(located)?];
    tables.extend(modules.iter().map(Loaded::tables));
    let view = &mut located.view;
    let nops = tables::nops(view, &located.named)?;
    let mut sites = Vec::with_capacity(tables.len());
    let mut left = ENTRIES_MAX;
    for image in &tables {
        let found = tables::sites(view, image, nops, left)?;
        left -= found.len();
        sites.push(found);
    }
    let used = tables::keys(view, &tables, &sites, layout)?;
    if used.len() > KEYS_MAX {
        return refuse(format!(
            "{} keys are more than the {KEYS_MAX} that are supported",
            used.len()
        ));
    }
    clock.part("jump tables", view.copied());

    let classes = Classes::read(located, layout, inner, &modules)?;
    clock.part("classes", located.view.copied());
    let mut symbols = vec![std::mem::take(&mut located.symbols)];
    let mut room = MAX_MODULE_SYMBOLS;
    for module in &modules {
        let own = modules::symbols(&mut located.view, module, inner, room).unwrap_or_default();
        room = room.saturating_sub(own.len());
        symbols.push(own);
    }
    clock.part("symbols of modules", located.view.copied());
    let images: Vec<ImageTables> = tables
        .into_iter()
        .zip(sites)
        .zip(symbols)
        .map(|((tables, sites), symbols)| ImageTables {
            module: tables.id,
            name: tables.name,
            text: tables.text,
            init_text: tables.init,
            ro_after_init: tables.ro_after_init,
            jump_table: tables.jump_table,
            sites,
            symbols,
        })
        .collect();
    let keys = classes.keys(&mut located.view, used, &images, layout);
    clock.part("names", located.view.copied());
    Ok(Contents { nops, images, keys })
}

/// The kernel image's own.
fn kernel_tables<M: PhysicalMemory + ?Sized>(
    located: &Located<'_, M>,
) -> Result<Tables, DiscoveryError> {
    let named = &located.named;
    let range = |start: &'static str, end: &'static str| {
        let (first, last) = (required(named, start)?, required(named, end)?);
        let inside = |address| located.image.start <= address && address <= located.image.end;
        if first > last || !inside(first) || !inside(last) {
            return refuse(format!(
                "{start} and {end} are at {first:#x} and {last:#x}, outside the kernel's image or in the wrong order"
            ));
        }
        Ok(first..last)
    };
    let jump_table = range("__start___jump_table", "__stop___jump_table")?;
    if jump_table.is_empty() {
        return refuse(
            "the kernel's jump table is empty: it is built without CONFIG_JUMP_LABEL, its static keys are plain counters",
        );
    }
    Ok(Tables {
        id: 0,
        name: String::new(),
        text: range("_stext", "_etext")?,
        init: range("__init_begin", "__init_end")?,
        ro_after_init: range("__start_ro_after_init", "__end_ro_after_init")?,
        jump_table,
        areas: vec![located.image.clone()],
    })
}

impl Loaded {
    fn tables(&self) -> Tables {
        Tables {
            id: self.address,
            name: self.name.clone(),
            text: self.text.clone(),
            init: self.init_text.clone(),
            ro_after_init: self.ro_after_init.clone(),
            jump_table: self.jump_table.clone(),
            areas: self.areas.clone(),
        }
    }
}
