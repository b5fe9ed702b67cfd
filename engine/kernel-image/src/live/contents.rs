// SPDX-License-Identifier: Apache-2.0
//! Reads the modules, jump tables and keys of a kernel that was located.

use std::sync::Arc;

use static_keys::{ENTRIES_MAX, JumpEntry, Nops};

use super::error::{DiscoveryError, refuse};
use super::functions::probes;
use super::gates::{self, Gates};
use super::kernel::{ImageTables, ObservedKey};
use super::layout::{Inner, Layout};
use super::locate::{Anchors, Located, required};
use super::modules::{self, LeftOut, Loaded, SymbolRoom};
use super::parts::Clock;
use super::tables::{self, Looks, Tables};
use crate::classes::Classes;
use crate::symbols::Symbols;
use patchbay_memory::PhysicalMemory;

/// The contents of the kernel image, which stay the same while it runs.
pub(super) struct Own {
    pub nops: Nops,
    tables: Tables,
    entries: Vec<JumpEntry>,
    classes: Classes,
}

impl Own {
    pub fn read<M: PhysicalMemory + ?Sized>(
        located: &mut Located<'_, M>,
        layout: &Layout,
        inner: &Inner,
        clock: &mut Clock,
    ) -> Result<Self, DiscoveryError> {
        let tables = kernel_tables(&located.anchors)?;
        let view = &mut located.view;
        let nops = tables::nops(view, &located.anchors.named)?;
        let entries = tables::entries(view, &tables, ENTRIES_MAX)?;
        clock.part("jump table of the kernel", view.copied());
        let classes = Classes::of_kernel(located, layout, inner)?;
        clock.part("classes of the kernel", located.view.copied());
        Ok(Self {
            nops,
            tables,
            entries,
            classes,
        })
    }
}

/// The contents of the kernel and its modules.
pub(super) struct Contents {
    pub images: Vec<ImageTables>,
    pub keys: Vec<ObservedKey>,
    pub left_out: Vec<LeftOut>,
}

/// Reads modules, tables and names. Returns `None` if the symbols were reduced and do not name a
/// key.
pub(super) fn read<M: PhysicalMemory + ?Sized>(
    located: &mut Located<'_, M>,
    own: &Own,
    gates: &mut Gates,
    layout: &Layout,
    inner: &Inner,
    clock: &mut Clock,
) -> Result<Option<Contents>, DiscoveryError> {
    let anchors = Arc::clone(&located.anchors);
    let view = &mut located.view;
    let (modules, left_out) = match anchors.named.address("modules") {
        Some(head) => {
            let (modules, left_out) = modules::read(view, head, layout, inner)?;
            let named = &anchors.named;
            gates::add_modules(gates, view, named, layout, inner, &modules, &left_out);
            (modules, left_out)
        }
        None => Default::default(),
    };
    clock.part("modules", view.copied());

    let mut looks = Looks::default();
    let own_sites = tables::sites(view, &own.tables, own.nops, &own.entries, &mut looks)?;
    let mut sites = vec![own_sites];
    let mut tables = vec![own.tables.clone()];
    let mut left = ENTRIES_MAX - own.entries.len();
    for image in modules.iter().map(Loaded::tables) {
        let entries = tables::entries(view, &image, left)?;
        left -= entries.len();
        sites.push(tables::sites(view, &image, own.nops, &entries, &mut looks)?);
        tables.push(image);
    }
    let absent = left_out.iter().map(|module| module.address).collect();
    let used = tables::keys(
        view, &tables, &mut sites, &absent, own.nops, layout, &mut looks,
    )?;
    clock.part("jump tables", view.copied());

    let mut classes = own.classes.clone();
    classes.add_modules(view, &anchors.named, layout, inner, &modules)?;
    clock.part("classes", view.copied());
    let mut of_kernel = used.iter().filter(|(_, used)| used.home == 0);
    if of_kernel.any(|(key, _)| !classes.has(*key) && !located.symbols.names(*key)) {
        return Ok(None);
    }
    let mut symbols = vec![Arc::clone(&located.symbols.table)];
    let mut room = SymbolRoom::default();
    for module in &modules {
        let own = modules::symbols(view, module, inner, &mut room).unwrap_or_default();
        symbols.push(Arc::new(own));
    }
    clock.part("symbols of modules", view.copied());
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
    let keys = classes.keys(view, used, &images, layout);
    clock.part("names", view.copied());
    Ok(Some(Contents {
        images,
        keys,
        left_out,
    }))
}

/// The symbols of the kernel image. Most of them name nothing that a discovery looks up.
#[derive(Clone)]
pub(super) struct KernelSymbols {
    pub table: Arc<Symbols>,
    /// The keys that the table names, sorted; `None` if it is whole.
    keys: Option<Arc<[u64]>>,
}

impl KernelSymbols {
    pub fn whole(table: Symbols) -> Self {
        Self {
            table: Arc::new(table),
            keys: None,
        }
    }

    fn names(&self, key: u64) -> bool {
        let keys = self.keys.as_ref();
        keys.is_none_or(|keys| keys.binary_search(&key).is_ok())
    }

    /// Drops the symbols that name neither a key of the kernel image, a site of its table nor a
    /// probe that [`super::functions`] names. A later discovery may find keys that only a new
    /// module uses.
    pub fn reduce(&mut self, own: &Own, keys: &[ObservedKey]) {
        if self.keys.is_some() {
            return;
        }
        let of_kernel = keys.iter().filter(|key| key.image == 0);
        let mut keys: Vec<u64> = of_kernel.map(|key| key.address).collect();
        keys.sort_unstable();
        let sites = own.entries.iter();
        let sites = sites.flat_map(|entry| [entry.code, entry.target]);
        let named = sites.chain(keys.iter().copied());
        let named = named.chain(probes(&self.table));
        self.table = Arc::new(self.table.only(named.collect()));
        self.keys = Some(keys.into());
    }
}

/// Returns the tables of the kernel image.
fn kernel_tables(anchors: &Anchors) -> Result<Tables, DiscoveryError> {
    let named = &anchors.named;
    let range = |start: &'static str, end: &'static str| {
        let (first, last) = (required(named, start)?, required(named, end)?);
        let inside = |address| anchors.image.start <= address && address <= anchors.image.end;
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
        areas: vec![anchors.image.clone()],
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
