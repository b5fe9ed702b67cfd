// SPDX-License-Identifier: Apache-2.0
//! Reading keys while the guest runs: list, get, holds.

use patchbay_proto::v1;
use static_keys::{Branch, Class, Key, NotPatchable, SiteState, count_users, disassemble};

use super::error::KeysError;
use super::registry::{Registration, Snapshot};
use super::{Book, Keys, ListQuery, Patterns, etag};
use crate::memory::GuestRam;

/// Sites that one answer shows; a kernel's most used key has some hundred.
const SITES_SHOWN: usize = 1 << 14;

impl Keys {
    /// One page of keys, by name.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`]; [`KeysError::InvalidArgument`] for a page token of another
    /// registration.
    pub fn list(&self, query: &ListQuery) -> Result<v1::ListStaticKeysResponse, KeysError> {
        // Before the counts are read, so that a watch from the next revision misses nothing.
        let revision = self.revision();
        let Snapshot { registration, .. } = self.shared.registry.snapshot()?;
        let after = parse_page_token(&query.page_token, registration.generation)?;
        let ram = self.ram()?;
        let book = self.shared.book();
        let mut response = v1::ListStaticKeysResponse {
            revision,
            ..Default::default()
        };
        for key in registration
            .catalog
            .keys()
            .filter(|key| query.keys.has(key))
        {
            let count = count(&registration, ram, key);
            if query
                .enabled
                .is_some_and(|enabled| enabled != (count_users(count) > 0))
            {
                continue;
            }
            response.total_size = response.total_size.saturating_add(1);
            let passed = after.is_some_and(|after| *key.full_name <= *after);
            if passed || !response.next_page_token.is_empty() {
                continue;
            }
            if response.keys.len() == query.page_size {
                response.next_page_token =
                    page_token(registration.generation, response.keys.last());
                continue;
            }
            response
                .keys
                .push(to_key(&registration, ram, &book, key, count));
        }
        Ok(response)
    }

    /// One key with its sites, up to 16,384 of them.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`], [`KeysError::KeyNotFound`].
    pub fn get(&self, name: &str) -> Result<v1::StaticKey, KeysError> {
        let Snapshot { registration, .. } = self.shared.registry.snapshot()?;
        let key = registration.find(name)?;
        let ram = self.ram()?;
        let count = count(&registration, ram, key);
        let mut view = to_key(&registration, ram, &self.shared.book(), key, count);
        let memory = registration.memory(ram);
        let sites = registration.catalog.sites(&memory, key.id);
        view.sites = sites
            .take(SITES_SHOWN)
            .map(|site| self.to_site(&registration, site))
            .collect();
        Ok(view)
    }

    /// Who keeps keys on, by name.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`].
    pub fn holds(&self, patterns: &Patterns) -> Result<Vec<v1::Hold>, KeysError> {
        let Snapshot { registration, .. } = self.shared.registry.snapshot()?;
        let book = self.shared.book();
        let mut holds = vec![];
        for key in registration
            .catalog
            .keys()
            .filter(|key| patterns.select(key.module(), key.name()))
        {
            holds.extend(
                book.holds
                    .of(registration.instance(key))
                    .iter()
                    .map(|hold| v1::Hold {
                        name: key.name().to_owned(),
                        module: key.module().to_owned(),
                        owner: hold.owner.to_string(),
                        reason: hold.reason.to_string(),
                        references: hold.references,
                        since: Some(hold.since.into()),
                        expires_at: hold.expires.map(|(_, at)| at.into()),
                    }),
            );
        }
        Ok(holds)
    }

    pub(crate) fn ram(&self) -> Result<&GuestRam, KeysError> {
        // Attached before the first registration can come.
        self.shared.registry.ram().ok_or(KeysError::GuestStopped)
    }

    fn to_site(&self, registration: &Registration, site: SiteState) -> v1::Site {
        let name = |address: u64| match &*site.module {
            "" => self
                .shared
                .symbols
                .name(address.wrapping_sub(registration.kaslr_offset)),
            // The symbol file is the kernel image's.
            _ => String::new(),
        };
        let other = match site.branch {
            Some(Branch::Nop) => site.jump,
            Some(Branch::Jump) => site.nop,
            None => None,
        };
        v1::Site {
            address: site.address,
            symbol: name(site.address),
            target: site.target,
            target_symbol: name(site.target),
            size: site.size().map_or(0, |size| to_u32(size.bytes())),
            disassembly: match site.bytes.as_slice() {
                [] => String::new(),
                bytes => disassemble(bytes, site.address),
            },
            other_bytes: other
                .map(|other| other.as_bytes().to_vec())
                .unwrap_or_default(),
            other_disassembly: other
                .map(|other| disassemble(other.as_bytes(), site.address))
                .unwrap_or_default(),
            likely: site.likely,
            not_patchable: site
                .patchable
                .err()
                .map(|why| why.to_string())
                .unwrap_or_default(),
            module: site.module.to_string(),
            current_bytes: site.bytes,
        }
    }
}

/// The raw count. A key that cannot be read (its module is just going) counts as off.
fn count(registration: &Registration, ram: &GuestRam, key: &Key) -> i32 {
    registration
        .catalog
        .enabled(&registration.memory(ram), key.id)
        .unwrap_or(0)
}

fn to_key(
    registration: &Registration,
    ram: &GuestRam,
    book: &Book,
    key: &Key,
    count: i32,
) -> v1::StaticKey {
    let instance = registration.instance(key);
    let memory = registration.memory(ram);
    let mut sealed = registration.catalog.is_ro_after_init(key.id);
    let (mut site_count, mut patchable_sites) = (0, 0);
    for site in registration.catalog.sites(&memory, key.id) {
        site_count += 1;
        patchable_sites += usize::from(site.patchable.is_ok());
        sealed |= site.patchable == Err(NotPatchable::Sealed);
    }
    v1::StaticKey {
        name: key.name().to_owned(),
        module: key.module().to_owned(),
        class: to_class(key.class).into(),
        count: count_users(count),
        enabled: count_users(count) > 0,
        address: key.id.0,
        patchable_sites: to_u32(patchable_sites),
        site_count: to_u32(site_count),
        initially_true: registration.initially_true(ram, key),
        sealed,
        quarantine: book.quarantine.get(&instance).cloned().unwrap_or_default(),
        etag: etag(
            registration.generation,
            instance,
            book.revision(instance),
            count,
        ),
        holds: book.holds.references(instance),
        sites: vec![],
    }
}

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The class as the API tells it.
pub(super) fn to_class(class: Class) -> v1::KeyClass {
    match class {
        Class::Guarded => v1::KeyClass::Guarded,
        Class::Ref => v1::KeyClass::Ref,
        Class::Tracepoint => v1::KeyClass::Tracepoint,
    }
}

/// "generation.last name": a page goes on after that name, whatever has come or gone meanwhile.
fn page_token(generation: u64, last: Option<&v1::StaticKey>) -> String {
    let Some(last) = last else {
        return String::new();
    };
    match last.module.as_str() {
        "" => format!("{generation:x}.{}", last.name),
        module => format!("{generation:x}.{module}:{}", last.name),
    }
}

fn parse_page_token(token: &str, generation: u64) -> Result<Option<&str>, KeysError> {
    let invalid = |message: &str| KeysError::InvalidArgument {
        field: "page_token",
        message: message.to_owned(),
    };
    if token.is_empty() {
        return Ok(None);
    }
    let (of, after) = token
        .split_once('.')
        .ok_or_else(|| invalid("is malformed; give one from an answer"))?;
    match u64::from_str_radix(of, 16) {
        Ok(of) if of == generation => Ok(Some(after)),
        Ok(_) => Err(invalid(
            "is of an earlier registration of the guest; list from the start",
        )),
        Err(_) => Err(invalid("is malformed; give one from an answer")),
    }
}
