// SPDX-License-Identifier: Apache-2.0
//! Classes and names of the keys of a running kernel.

use std::collections::BTreeMap;

use static_keys::KEYS_MAX;

use super::error::{DiscoveryError, busy, refuse};
use super::layout::{Inner, Layout};
use super::locate::Located;
use super::memory::{PhysicalMemory, View};
use super::modules::Loaded;
use super::tables::Used;
use super::{ImageTables, Key};
use crate::classes::{self, Classes, Tracepoint, TracepointLayout, tell_apart};
use crate::symbols::SymbolKind;

/// Most tables of dynamic debug.
const MAX_DEBUG_TABLES: usize = 1 << 14;

impl Classes {
    pub(super) fn read<M: PhysicalMemory + ?Sized>(
        located: &mut Located<'_, M>,
        layout: &Layout,
        inner: &Inner,
        modules: &[Loaded],
    ) -> Result<Self, DiscoveryError> {
        let mut found = Self::default();
        let (view, named) = (&mut located.view, &located.named);
        let unreadable = |what: &str| DiscoveryError::Busy(format!("{what} cannot be read"));
        if layout.tracepoint_size != 0 {
            let offsets = TracepointLayout {
                name: layout.tracepoint_name,
                key: layout.tracepoint_key,
            };
            let own = named.range("__start___tracepoints_ptrs", "__stop___tracepoints_ptrs");
            let of_modules = modules.iter().map(|module| module.tracepoints.clone());
            for pointers in own.into_iter().chain(of_modules) {
                found.tracepoints.extend(
                    classes::tracepoints(view, pointers, offsets)
                        .ok_or_else(|| unreadable("the tracepoints"))?,
                );
                found.check_size()?;
            }
        }
        if let Some(offsets) = inner.ddebug {
            let own = named.range("__start___dyndbg", "__stop___dyndbg");
            let mut tables: Vec<(u64, u64)> = Vec::new();
            if let Some(own) = &own {
                tables.push((own.start, (own.end - own.start) / u64::from(offsets.size)));
            }
            let own = own.unwrap_or(0..0);
            tables.extend(
                debug_tables(view, named.address("ddebug_tables"), inner)?
                    .into_iter()
                    .filter(|(start, _)| !own.contains(start)),
            );
            let mut room = classes::MAX_DEBUG_TEXTS;
            for (start, count) in tables {
                found.debug_lines.extend(
                    classes::debug_lines(view, start, count, offsets, &mut room)
                        .ok_or_else(|| unreadable("the descriptors of dynamic debug"))?,
                );
                found.check_size()?;
            }
        }
        if let (Some(keys), Some(names)) = (
            named.address("sched_feat_keys"),
            named.address("sched_feat_names"),
        ) {
            let end = names.saturating_add(located.symbols.extent(names, SymbolKind::Data));
            let size = layout.static_key_size;
            found.features =
                classes::scheduler_features(view, keys, size, names, end).unwrap_or_default();
        }
        Ok(found)
    }

    fn check_size(&self) -> Result<(), DiscoveryError> {
        if self.tracepoints.len() + self.debug_lines.len() > KEYS_MAX {
            return refuse(format!(
                "tracepoints and lines of dynamic debug are more than the {KEYS_MAX} keys that are supported"
            ));
        }
        Ok(())
    }

    /// Combines the parts. Keys of an image with equal names are distinguished by the function of their first site.
    pub(super) fn keys<M: PhysicalMemory + ?Sized>(
        mut self,
        view: &mut View<'_, M>,
        used: BTreeMap<u64, Used>,
        images: &[ImageTables],
        layout: &Layout,
    ) -> Vec<Key> {
        let mut keys: Vec<Key> = used
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
    ) -> Key {
        let symbol = images
            .get(used.home)
            .and_then(|image| image.symbols.resolve(address, SymbolKind::Data));
        let (class, name) = self.class_and_name(address, symbol);
        let tracepoint = self.tracepoints.remove(&address);
        let debug = self.debug_lines.remove(&address);
        let switched_by_function = tracepoint.as_ref().is_some_and(|tracepoint| {
            switched_by_function(view, tracepoint, layout) != Some(false)
        });
        Key {
            address,
            image: used.home,
            name,
            class,
            sealed: used.sealed,
            count: used.count,
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

/// The descriptors of the tables in the list `ddebug_tables`: {address, count}.
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

/// Whether the tracepoint has `regfunc` or `unregfunc`; none if that cannot be read.
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

/// The function of the key's first site in its own image, or in any.
fn first_function(key: &Key, images: &[ImageTables]) -> Option<String> {
    let own = key.sites.iter().find(|(image, _)| *image == key.image);
    let (image, range) = own.or(key.sites.first())?;
    let image = images.get(*image)?;
    let sites = image.sites.get(range.clone())?;
    let first = sites.iter().map(|site| site.entry.code).min()?;
    let (function, _) = image.symbols.resolve(first, SymbolKind::Text)?;
    Some(function.to_owned())
}
