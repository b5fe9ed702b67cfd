// SPDX-License-Identifier: Apache-2.0
//! Reads keys while the guest runs: list and get.

use std::sync::Arc;

use patchbay_guest::memory::GuestRam;
use static_keys::{Branch, Class, Key, NotPatchable, SiteState, count_users, disassemble};

use super::advice::{self, Known};
use super::error::KeysError;
use super::handle::Keys;
use super::paging::{
    ITEM_BYTES, MALFORMED, PAGE_BYTES, invalid_token, page_token, parse_page_token,
};
use super::quarantine::Quarantine;
use super::registry::Registration;
use super::request::ListQuery;
use super::shared::Book;

/// A page of keys, ordered by name.
#[derive(Clone, Debug, Default)]
pub struct KeyPage {
    /// The keys, at most the page size.
    pub keys: Vec<KeyView>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
    /// The journal's newest revision at the read. A watch from the next revision misses nothing.
    pub revision: u64,
    /// Number of keys on all pages.
    pub total: usize,
    /// The kernel has panicked, and its keys cannot be changed.
    pub panicked: bool,
}

/// A key in the state in which it was read.
#[derive(Clone, Debug)]
pub struct KeyView {
    /// "name" or "module:name".
    pub name: Arc<str>,
    /// Class, which says how dangerous a change is.
    pub class: Class,
    /// `static_key_count()`
    pub count: i32,
    /// Guest-virtual address of the `struct static_key`.
    pub address: u64,
    /// Number of sites that a flip patches.
    pub patchable_sites: usize,
    /// Number of all sites.
    pub site_count: usize,
    /// Type bit 0: the key was initialised as true.
    pub initially_true: bool,
    /// The key lies in `__ro_after_init` data, or its jump entries were freed.
    pub sealed: bool,
    /// Set while the key is quarantined.
    pub quarantine: Option<Quarantine>,
    /// Etag for a conditional change.
    pub etag: String,
    /// References that clients hold.
    pub held_references: u32,
    /// The catalogue's entry for a guarded key.
    pub known: Option<Known>,
}

/// A key with a page of its sites.
#[derive(Clone, Debug)]
pub struct KeyDetails {
    /// The key.
    pub key: KeyView,
    /// The sites, at most the page size.
    pub sites: Vec<SiteView>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
    /// The journal's newest revision at the read.
    pub revision: u64,
}

/// A site in the state in which it was read, with the names of its functions, and its instructions
/// in Intel syntax.
#[derive(Clone, Debug)]
pub struct SiteView {
    /// The engine's view of the site.
    pub state: SiteState,
    /// Function of the site; empty if unknown.
    pub symbol: String,
    /// Function of the target; empty if unknown.
    pub target_symbol: String,
    /// Current instruction.
    pub disassembly: String,
    /// Bytes in the other state; empty if unknown.
    pub other_bytes: Vec<u8>,
    /// Instruction in the other state; empty if unknown.
    pub other_disassembly: String,
}

impl Keys {
    /// Returns one page of keys.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`]; [`KeysError::InvalidArgument`] for a page token of another
    /// registration.
    pub fn list(&self, query: &ListQuery) -> Result<KeyPage, KeysError> {
        // The revision is read before the counts, so that a watch from the next revision misses
        // nothing.
        let revision = self.revision();
        let (registration, panicked) = self.shared.registry.to_read()?;
        let after = parse_page_token(&query.page_token, registration.generation)?;
        let ram = self.ram()?;
        // The first call after a change of the tables sorts the names, which takes too long for the
        // lock of the book.
        let matching = registration.catalog.keys();
        let book = self.shared.book();
        let mut page = KeyPage {
            revision,
            panicked,
            ..KeyPage::default()
        };
        let mut bytes = 0;
        for key in matching.filter(|key| query.keys.has(key)) {
            let count = count(&registration, ram, key);
            let enabled = count_users(count) > 0;
            if query.enabled.is_some_and(|wanted| wanted != enabled) {
                continue;
            }
            page.total += 1;
            let passed = after.is_some_and(|after| *key.full_name <= *after);
            if passed || !page.next_page_token.is_empty() {
                continue;
            }
            let view = to_view(self, &registration, ram, &book, key, count);
            let message = view.quarantine.as_ref().map_or(0, |why| why.message.len());
            let known = view.known.map_or(0, Known::text_bytes);
            bytes += view.name.len() + message + known + ITEM_BYTES;
            if let Some(last) = page.keys.last()
                && (page.keys.len() == query.page_size || bytes > PAGE_BYTES)
            {
                page.next_page_token = page_token(registration.generation, &last.name);
                continue;
            }
            page.keys.push(view);
        }
        Ok(page)
    }

    /// Returns one key with a page of its sites, ordered by their position among the key's sites.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`], [`KeysError::KeyNotFound`]; [`KeysError::InvalidArgument`] for
    /// a page token of another registration.
    pub fn get(&self, name: &str, page_size: usize, token: &str) -> Result<KeyDetails, KeysError> {
        let revision = self.revision();
        let (registration, _) = self.shared.registry.to_read()?;
        let first: usize = match parse_page_token(token, registration.generation)? {
            None => 0,
            Some(first) => first.parse().map_err(|_| invalid_token(MALFORMED))?,
        };
        let key = registration.find(name)?;
        let ram = self.ram()?;
        let count = count(&registration, ram, key);
        let memory = registration.memory(ram);
        let (mut sites, mut bytes) = (Vec::new(), 0);
        let mut next_page_token = String::new();
        for site in registration.catalog.sites(&memory, key.id).skip(first) {
            let site = self.to_site(&registration, site);
            bytes += site.text_bytes() + ITEM_BYTES;
            if !sites.is_empty() && (sites.len() == page_size || bytes > PAGE_BYTES) {
                let next = (first + sites.len()).to_string();
                next_page_token = page_token(registration.generation, &next);
                break;
            }
            sites.push(site);
        }
        Ok(KeyDetails {
            key: to_view(self, &registration, ram, &self.shared.book(), key, count),
            sites,
            next_page_token,
            revision,
        })
    }

    fn to_site(&self, registration: &Registration, state: SiteState) -> SiteView {
        let name = |address: u64| match (&registration.discovery, &*state.module) {
            // Only the guest's own symbols are used, because a file may belong to another kernel.
            (Some(found), _) => found.functions.name(address).unwrap_or_default(),
            (None, "") => self
                .shared
                .symbols
                .name(address.wrapping_sub(registration.kaslr_offset)),
            // The symbol file describes the kernel image only.
            (None, _) => String::new(),
        };
        let other = match state.branch {
            Some(Branch::Nop) => state.jump,
            Some(Branch::Jump) => state.nop,
            None => None,
        };
        let other_bytes = other.map(|other| other.as_bytes().to_vec());
        let other_bytes = other_bytes.unwrap_or_default();
        let text = |bytes: &[u8]| match bytes {
            [] => String::new(),
            bytes => disassemble(bytes, state.address),
        };
        SiteView {
            symbol: name(state.address),
            target_symbol: name(state.target),
            disassembly: text(&state.bytes),
            other_disassembly: text(&other_bytes),
            other_bytes,
            state,
        }
    }
}

impl SiteView {
    fn text_bytes(&self) -> usize {
        self.symbol.len()
            + self.target_symbol.len()
            + self.disassembly.len()
            + self.other_disassembly.len()
            + self.state.module.len()
    }
}

/// Returns the raw count. A key that cannot be read counts as off, because its module is being
/// unloaded.
fn count(registration: &Registration, ram: &GuestRam, key: &Key) -> i32 {
    registration
        .catalog
        .enabled(&registration.memory(ram), key.id)
        .unwrap_or(0)
}

fn to_view(
    keys: &Keys,
    registration: &Registration,
    ram: &GuestRam,
    book: &Book,
    key: &Key,
    count: i32,
) -> KeyView {
    let instance = registration.instance(key);
    let memory = registration.memory(ram);
    let mut sealed = registration.catalog.is_ro_after_init(key.id);
    let (mut site_count, mut patchable_sites) = (0, 0);
    for site in registration.catalog.sites(&memory, key.id) {
        site_count += 1;
        patchable_sites += usize::from(site.patchable.is_ok());
        sealed |= site.patchable == Err(NotPatchable::Sealed);
    }
    let revision = book.revision(instance);
    KeyView {
        name: Arc::clone(&key.full_name),
        class: key.class,
        count: count_users(count),
        address: key.id.0,
        patchable_sites,
        site_count,
        initially_true: registration.initially_true(ram, key),
        sealed,
        quarantine: book
            .quarantine
            .get(&instance)
            .cloned()
            .or_else(|| registration.torn_quarantine(ram, key)),
        etag: keys.incarnation().etag(instance, revision, count),
        held_references: book.holds.references(instance),
        known: advice::of(key, &registration.release),
    }
}
