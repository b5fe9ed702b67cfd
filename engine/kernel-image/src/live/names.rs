// SPDX-License-Identifier: Apache-2.0
//! Determines the classes and names of the keys of a running kernel.

use std::collections::BTreeMap;
use std::ops::Range;

use static_keys::KEYS_MAX;

use super::error::{DiscoveryError, busy, refuse};
use super::layout::{Inner, Layout};
use super::locate::Located;
use patchbay_memory::PhysicalMemory;

use super::kernel::{ImageTables, ObservedKey};
use super::memory::View;
use super::modules::Loaded;
use super::tables::Used;
use crate::classes::{
    self, Classes, DebugLayout, Tracepoint, TracepointLayout, Unread, tell_apart,
};
use crate::symbols::{Named, SymbolKind};

/// The maximum number of tables of dynamic debug.
const MAX_DEBUG_TABLES: usize = 1 << 14;

impl Classes {
    /// Reads the tables of the kernel image that classify its keys.
    pub(super) fn of_kernel<M: PhysicalMemory + ?Sized>(
        located: &mut Located<'_, M>,
        layout: &Layout,
        inner: &Inner,
    ) -> Result<Self, DiscoveryError> {
        let mut found = Self::default();
        let (view, symbols) = (&mut located.view, &located.symbols.table);
        let named = &located.anchors.named;
        let pointers = named.range("__start___tracepoints_ptrs", "__stop___tracepoints_ptrs");
        if let Some(pointers) = pointers {
            found.add_tracepoints(view, pointers, layout)?;
        }
        if let Some(offsets) = inner.ddebug
            && let Some(own) = named.range("__start___dyndbg", "__stop___dyndbg")
        {
            let count = (own.end - own.start) / u64::from(offsets.size);
            found.add_debug_lines(view, own.start, count, offsets)?;
        }
        if let (Some(keys), Some(names)) = (
            named.address("sched_feat_keys"),
            named.address("sched_feat_names"),
        ) {
            let end = names.saturating_add(symbols.extent(names, SymbolKind::Data));
            let size = layout.static_key_size;
            found.features =
                classes::scheduler_features(view, keys, size, names, end).unwrap_or_default();
        }
        Ok(found)
    }

    /// Adds the tables of the modules.
    pub(super) fn add_modules<M: PhysicalMemory + ?Sized>(
        &mut self,
        view: &mut View<'_, M>,
        named: &Named,
        layout: &Layout,
        inner: &Inner,
        modules: &[Loaded],
    ) -> Result<(), DiscoveryError> {
        for module in modules {
            self.add_tracepoints(view, module.tracepoints.clone(), layout)?;
        }
        let Some(offsets) = inner.ddebug else {
            return Ok(());
        };
        let own = named.range("__start___dyndbg", "__stop___dyndbg");
        let own = own.unwrap_or(0..0);
        for (start, count) in debug_tables(view, named.address("ddebug_tables"), inner)? {
            if !own.contains(&start) {
                self.add_debug_lines(view, start, count, offsets)?;
            }
        }
        Ok(())
    }

    fn add_tracepoints<M: PhysicalMemory + ?Sized>(
        &mut self,
        view: &mut View<'_, M>,
        pointers: Range<u64>,
        layout: &Layout,
    ) -> Result<(), DiscoveryError> {
        if layout.tracepoint_size == 0 {
            return Ok(());
        }
        let offsets = TracepointLayout {
            name: layout.tracepoint_name,
            key: layout.keys.tracepoint_key,
        };
        let found = classes::tracepoints(view, pointers, offsets, &mut self.room);
        self.tracepoints
            .extend(read(found, "the tracepoints cannot be read")?);
        Ok(())
    }

    fn add_debug_lines<M: PhysicalMemory + ?Sized>(
        &mut self,
        view: &mut View<'_, M>,
        start: u64,
        count: u64,
        offsets: DebugLayout,
    ) -> Result<(), DiscoveryError> {
        let found = classes::debug_lines(view, start, count, offsets, &mut self.room);
        let why = "the descriptors of dynamic debug cannot be read";
        self.debug_lines.extend(read(found, why)?);
        Ok(())
    }

    /// Creates the keys. Keys of an image with equal names are distinguished by the function of
    /// their first site.
    pub(super) fn keys<M: PhysicalMemory + ?Sized>(
        mut self,
        view: &mut View<'_, M>,
        used: BTreeMap<u64, Used>,
        images: &[ImageTables],
        layout: &Layout,
    ) -> Vec<ObservedKey> {
        let mut keys: Vec<ObservedKey> = used
            .into_iter()
            .map(|(address, used)| self.key(view, address, used, images, layout))
            .collect();
        tell_apart(
            &mut keys,
            |key| key.image,
            |key| &mut key.name,
            |key| first_function(key, images),
        );
        keys
    }

    fn key<M: PhysicalMemory + ?Sized>(
        &mut self,
        view: &mut View<'_, M>,
        address: u64,
        used: Used,
        images: &[ImageTables],
        layout: &Layout,
    ) -> ObservedKey {
        let symbol = images
            .get(used.home)
            .and_then(|image| image.symbols.resolve(address, SymbolKind::Data));
        let (class, name) = self.class_and_name(address, symbol);
        let tracepoint = self.tracepoints.remove(&address);
        let debug = self.debug_lines.remove(&address);
        let switched_by_function = tracepoint.as_ref().is_some_and(|tracepoint| {
            switched_by_function(view, tracepoint, layout) != Some(false)
        });
        ObservedKey {
            address,
            image: used.home,
            name,
            class,
            sealed: used.sealed,
            count: used.count,
            torn: used.torn,
            tracepoint,
            switched_by_function,
            debug,
            sites: used
                .runs
                .into_iter()
                .map(|(image, _, range)| (image, range))
                .collect(),
        }
    }
}

fn read<T>(found: Result<T, Unread>, why: &str) -> Result<T, DiscoveryError> {
    match found {
        Ok(found) => Ok(found),
        Err(Unread::Memory) => busy(why),
        Err(Unread::Records) => refuse(format!(
            "tracepoints and lines of dynamic debug are more than the {KEYS_MAX} keys that are supported"
        )),
    }
}

/// Returns the address and the number of the descriptors of each table in the list `ddebug_tables`.
fn debug_tables<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    head: Option<u64>,
    inner: &Inner,
) -> Result<Vec<(u64, u64)>, DiscoveryError> {
    let mut tables = Vec::new();
    let (Some(head), Some(layout)) = (head, inner.ddebug_table) else {
        return Ok(tables);
    };
    let mut node = view.u64(head);
    while let Some(at) = node {
        if at == head {
            return Ok(tables);
        }
        let table = at.wrapping_sub(u64::from(layout.link));
        let descriptors = view.pointer(table, layout.descriptors);
        let count = view.pointer(table, layout.count);
        let (Some(descriptors), Some(count)) = (descriptors, count) else {
            break;
        };
        tables.push((descriptors, count & 0xffff_ffff));
        if tables.len() > MAX_DEBUG_TABLES {
            break;
        }
        node = view.u64(at);
    }
    busy("the list of dynamic debug's tables loops or leads to memory that is not mapped")
}

/// Returns whether the tracepoint has `regfunc` or `unregfunc`; `None` if this cannot be read.
fn switched_by_function<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    tracepoint: &Tracepoint,
    layout: &Layout,
) -> Option<bool> {
    let holder = match layout.tracepoint_ext {
        None => tracepoint.address,
        Some(ext) => match view.pointer(tracepoint.address, ext)? {
            0 => return Some(false),
            ext => ext,
        },
    };
    let register = view.pointer(holder, layout.tracepoint_regfunc)?;
    let unregister = view.pointer(holder, layout.tracepoint_unregfunc)?;
    Some(register != 0 || unregister != 0)
}

/// Returns the function of the key's first site in the image that defines the key. If this image
/// has no site of the key, returns the function of the first site in another image.
fn first_function(key: &ObservedKey, images: &[ImageTables]) -> Option<String> {
    let own = key.sites.iter().find(|(image, _)| *image == key.image);
    let (image, range) = own.or(key.sites.first())?;
    let image = images.get(*image)?;
    let sites = image.sites.get(range.clone())?;
    let first = sites.iter().map(|site| site.entry.code).min()?;
    let (function, _) = image.symbols.resolve(first, SymbolKind::Text)?;
    Some(function.to_owned())
}
