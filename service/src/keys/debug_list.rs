// SPDX-License-Identifier: Apache-2.0
//! Lists the descriptors of dynamic debug in pages.

use std::sync::Arc;

use patchbay_kernel_image::DebugLine;
use static_keys::count_users;

use super::debug::{DebugQueries, escape};
use super::error::KeysError;
use super::handle::Keys;
use super::paging::{
    ITEM_BYTES, MALFORMED, PAGE_BYTES, invalid_token, page_token, parse_page_token,
};

/// A page of descriptors.
#[derive(Clone, Debug, Default)]
pub struct DebugPage {
    /// The lines, at most the page size.
    pub sites: Vec<DebugView>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
    /// The journal's newest revision at the read.
    pub revision: u64,
    /// Number of descriptors on all pages.
    pub total: usize,
}

/// A descriptor with the state of its key. The texts are escaped.
#[derive(Clone, Debug)]
pub struct DebugView {
    /// "name" or "module:name" of the key.
    pub key: Arc<str>,
    /// The descriptor.
    pub site: DebugLine,
    /// The key is on.
    pub enabled: bool,
    /// References that clients hold.
    pub held_references: u32,
}

/// The descriptors to list.
#[derive(Clone, Debug, Default)]
pub struct DebugListQuery {
    /// Page size, at least 1.
    pub page_size: usize,
    /// Page token; empty for the first page.
    pub page_token: String,
    /// The queries that select descriptors.
    pub queries: DebugQueries,
    /// Keys that are on or off; `None` for both.
    pub enabled: Option<bool>,
}

impl Keys {
    /// Returns one page of the descriptors of dynamic debug.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`]; [`KeysError::InvalidArgument`] for a page token of another
    /// registration.
    pub fn list_debug_sites(&self, query: &DebugListQuery) -> Result<DebugPage, KeysError> {
        let revision = self.revision();
        let (registration, _) = self.registry().to_read()?;
        let generation = registration.generation;
        let first: usize = match parse_page_token(&query.page_token, generation)? {
            None => 0,
            Some(first) => first.parse().map_err(|_| invalid_token(MALFORMED))?,
        };
        let memory = registration.memory(self.ram()?);
        let book = self.shared.book();
        let mut page = DebugPage {
            revision,
            ..DebugPage::default()
        };
        let mut bytes = 0;
        for (index, (id, site)) in registration.debug.iter().enumerate() {
            let Some(key) = registration.catalog.key(id) else {
                continue;
            };
            if !query.queries.select(site) {
                continue;
            }
            // A key that cannot be read belongs to a module that is being unloaded.
            let count = registration.catalog.enabled(&memory, id).unwrap_or(0);
            let enabled = count_users(count) > 0;
            if query.enabled.is_some_and(|wanted| wanted != enabled) {
                continue;
            }
            page.total += 1;
            if index < first || !page.next_page_token.is_empty() {
                continue;
            }
            let site = escaped(site);
            let texts = [&site.module, &site.file, &site.function, &site.format];
            let texts: usize = texts.iter().map(|text| text.len()).sum();
            bytes += key.full_name.len() + texts + ITEM_BYTES;
            if !page.sites.is_empty() && (page.sites.len() == query.page_size || bytes > PAGE_BYTES)
            {
                page.next_page_token = page_token(generation, &index.to_string());
                continue;
            }
            page.sites.push(DebugView {
                key: Arc::clone(&key.full_name),
                site,
                enabled,
                held_references: book.holds.references(registration.instance(key)),
            });
        }
        Ok(page)
    }
}

/// Escapes the texts of a line, which are the guest's and may contain any characters.
fn escaped(line: &DebugLine) -> DebugLine {
    DebugLine {
        module: escape(&line.module),
        file: escape(&line.file),
        function: escape(&line.function),
        format: escape(&line.format),
        ..*line
    }
}
