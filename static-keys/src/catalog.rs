// SPDX-License-Identifier: Apache-2.0
//! Everything that was learned at registration: tables, keys, names.
//!
//! Bounded, owned, and never read from the guest again: a guest that rewrites its tables later
//! changes nothing here. What a flip does re-read is the few words that tell whether the tables are
//! still in use (see [`crate::users`]). A catalog is cheap to clone; images are shared.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops;
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::directory::{self, Key, Listed};
use crate::entry::{EntryFormat, Image, JumpEntry};
use crate::gates::Gates;
use crate::kernel::{Kernel, Layout, Module, Range};
use crate::memory::{GuestMemory, ReadError};
use crate::records::{RecordRingError, Records};
use crate::{ENTRIES_MAX, KEYS_MAX, KeyId, MODULES_MAX};

/// A registration cannot be used. The guest's mistake; nothing of it is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// See [`ReadError`].
    #[error(
        "the registered tables cannot be read: {0}; register addresses of the kernel's own page table"
    )]
    Unreadable(#[from] ReadError),
    /// The range of a table ends before it starts, or holds a part of an entry.
    #[error(
        "the jump table {start:#x}..{end:#x} is no whole number of entries of {entry_size} bytes"
    )]
    TableRange {
        /// As given.
        start: u64,
        /// As given.
        end: u64,
        /// Of the format.
        entry_size: usize,
    },
    /// Together with what is registered already.
    #[error("{count} jump entries are more than the {ENTRIES_MAX} that are supported")]
    TooManyEntries {
        /// Of this table.
        count: u64,
    },
    /// The run of a key's entries would not be found.
    #[error(
        "the jump table at {table:#x} is not sorted by key at entry {index}; register after jump_label_init()"
    )]
    NotSorted {
        /// Its address.
        table: u64,
        /// Of the first entry that is out of order.
        index: usize,
    },
    /// Together with what is registered already.
    #[error("{count} keys are more than the {KEYS_MAX} that are supported")]
    TooManyKeys {
        /// Of this directory.
        count: usize,
    },
    /// Too small for a record, or larger than any that is expected.
    #[error(
        "the directory's records have {bytes} bytes, expected {} to {}",
        directory::RECORD_SIZE,
        directory::RECORD_SIZE_MAX
    )]
    RecordSize {
        /// As given.
        bytes: u32,
    },
    /// The block of names is too large, or the names are, taken together.
    #[error(
        "{bytes} bytes of names are more than the {} that are supported",
        directory::NAMES_SIZE_MAX
    )]
    NamesTooLong {
        /// Of the block as given, or of names that lie over each other.
        bytes: u32,
    },
    /// The offset of a name.
    #[error("the name of key {address:#x} starts at {offset}, outside the block of names")]
    NameOutside {
        /// Of the key.
        address: u64,
        /// As given.
        offset: u32,
    },
    /// No NUL in time.
    #[error(
        "the name of key {address:#x} does not end within {} bytes",
        crate::NAME_MAX
    )]
    NameUnending {
        /// Of the key.
        address: u64,
    },
    /// No `struct static_key` can be there.
    #[error("no key can be at {address:#x}: misaligned, or at the end of the address space")]
    KeyAddress {
        /// Of the key.
        address: u64,
    },
    /// Counting it would change instructions.
    #[error("key {address:#x} lies in text; keys are data")]
    KeyInText {
        /// Of the key.
        address: u64,
    },
    /// Listed twice.
    #[error("key {address:#x} is listed twice; list each key once, with its image")]
    KeyTwice {
        /// Of the key.
        address: u64,
    },
    /// Newer guest?
    #[error("key {address:#x} has the unknown class {class}")]
    UnknownClass {
        /// Of the key.
        address: u64,
        /// As given.
        class: u16,
    },
    /// A newer guest asks for what is not known.
    #[error("key {address:#x} has the unknown flags {flags:#x}")]
    UnknownFlags {
        /// Of the key.
        address: u64,
        /// As given.
        flags: u16,
    },
    /// The address of the tracepoint does not fit that of its key.
    #[error("key {address:#x} is not that of the tracepoint at {tracepoint:#x}")]
    NotTheTracepointsKey {
        /// Of the key.
        address: u64,
        /// As given.
        tracepoint: u64,
    },
    /// See [`RecordRingError`].
    #[error(transparent)]
    Records(#[from] RecordRingError),
    /// Flips would not be safe without it.
    #[error("the kernel names no {what}; flips would not be safe without it")]
    GateMissing {
        /// The field.
        what: &'static str,
    },
    /// 0 stands for the kernel.
    #[error("module {name} has no address")]
    ModuleAddress {
        /// Cleaned.
        name: String,
    },
    /// Same address, or same name.
    #[error("module {name} is registered already; take it back before it is added again")]
    ModuleTwice {
        /// Cleaned.
        name: String,
    },
    /// Too many.
    #[error("more than {MODULES_MAX} modules are not supported")]
    TooManyModules,
}

/// The kernel image or a module.
#[derive(Clone, Debug)]
pub(crate) struct CodeImage {
    /// Address of the `struct module`; 0 for the kernel.
    pub id: u64,
    /// Empty for the kernel.
    pub name: Arc<str>,
    pub text: Range,
    /// Keys in here cannot change once the image runs.
    ro_after_init: Range,
    /// Address of the first entry.
    table: u64,
    entry_size: usize,
    /// Sorted by key.
    entries: Vec<JumpEntry>,
    /// Those that it defines.
    keys: Vec<Key>,
}

impl CodeImage {
    /// Its entries that belong to `key`.
    pub fn run(&self, key: KeyId) -> &[JumpEntry] {
        &self.entries[self.run_range(key)]
    }

    /// The entries that belong to `key`, if the first of them is at this address, as the guest's
    /// pointers have it.
    pub fn run_at(&self, key: KeyId, address: u64) -> Option<&[JumpEntry]> {
        let run = self.run_range(key);
        let start = self
            .table
            .wrapping_add((run.start * self.entry_size) as u64);
        (!run.is_empty() && start == address).then(|| &self.entries[run])
    }

    fn run_range(&self, key: KeyId) -> ops::Range<usize> {
        let start = self.entries.partition_point(|entry| entry.key < key.0);
        let length = self.entries[start..].partition_point(|entry| entry.key == key.0);
        start..start + length
    }

    /// The keys that have entries here, each once.
    fn keys_used(&self) -> impl Iterator<Item = KeyId> {
        self.entries
            .chunk_by(|a, b| a.key == b.key)
            .filter_map(|run| run.first())
            .map(|entry| KeyId(entry.key))
    }
}

/// Where a key is listed.
#[derive(Clone, Copy, Debug)]
struct Place {
    image: u64,
    index: usize,
}

/// Tables, keys and names of a guest's kernel and its modules.
#[derive(Clone, Debug)]
pub struct Catalog {
    pub(crate) format: EntryFormat,
    pub(crate) layout: Layout,
    pub(crate) gates: Gates,
    pub(crate) records: Records,
    /// By [`CodeImage::id`].
    images: BTreeMap<u64, Arc<CodeImage>>,
    keys: HashMap<KeyId, Place, RandomState>,
    names: BTreeMap<Arc<str>, KeyId>,
    /// Images in which a key has entries.
    users: HashMap<KeyId, usize, RandomState>,
    entries: usize,
}

impl Catalog {
    /// Reads the tables of a kernel. To be called while the guest waits for it.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub fn new<M: GuestMemory>(memory: &M, kernel: &Kernel) -> Result<Self, CatalogError> {
        kernel.gates.check_complete(kernel.format)?;
        let mut catalog = Self {
            format: kernel.format,
            layout: kernel.layout,
            gates: kernel.gates.clone(),
            records: Records::new(kernel.records.check()?),
            images: BTreeMap::new(),
            keys: HashMap::default(),
            names: BTreeMap::new(),
            users: HashMap::default(),
            entries: 0,
        };
        let image = Module {
            id: 0,
            name: b"",
            jump_table: kernel.jump_table,
            text: kernel.text,
            ro_after_init: kernel.ro_after_init,
            directory: kernel.directory,
        };
        catalog.add(memory, &image, "")?;
        Ok(catalog)
    }

    /// Reads the tables of a module. To be called while the guest waits for it. On an error the
    /// catalog is as it was.
    ///
    /// Returns the names of other images ("" for the kernel) of which keys became known: those that
    /// only this module branches on.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub fn add_module<M: GuestMemory>(
        &mut self,
        memory: &M,
        module: &Module<'_>,
    ) -> Result<BTreeSet<Arc<str>>, CatalogError> {
        let name = module
            .name
            .split(|&byte| byte == 0)
            .next()
            .unwrap_or_default();
        let name = match &name[..name.len().min(crate::NAME_MAX)] {
            [] => format!("{:#x}", module.id),
            name => directory::clean(name),
        };
        if module.id == 0 {
            return Err(CatalogError::ModuleAddress { name });
        }
        if self
            .images
            .values()
            .any(|image| image.id == module.id || *image.name == *name)
        {
            return Err(CatalogError::ModuleTwice { name });
        }
        // The kernel is one of the images.
        if self.images.len() > MODULES_MAX {
            return Err(CatalogError::TooManyModules);
        }
        self.add(memory, module, &name)
    }

    fn add<M: GuestMemory>(
        &mut self,
        memory: &M,
        image: &Module<'_>,
        name: &str,
    ) -> Result<BTreeSet<Arc<str>>, CatalogError> {
        let entries = self.read_table(memory, image.jump_table)?;
        let listed = directory::read(
            memory,
            &image.directory,
            image.id,
            self.layout.tracepoint_key,
            KEYS_MAX.saturating_sub(self.keys.len()),
        )?;
        let twice = |key: &&Listed| key.home == image.id && self.keys.contains_key(&key.id);
        if let Some(key) = listed.iter().find(twice) {
            return Err(CatalogError::KeyTwice { address: key.id.0 });
        }
        if let Some(key) = self.key_in_text(image.text, &listed) {
            return Err(CatalogError::KeyInText { address: key.0 });
        }
        let (own, others): (Vec<_>, Vec<_>) =
            listed.into_iter().partition(|key| key.home == image.id);
        let keys: Vec<Key> = own.into_iter().map(|key| key.into_key(name)).collect();
        for (index, key) in keys.iter().enumerate() {
            self.keys.insert(
                key.id,
                Place {
                    image: image.id,
                    index,
                },
            );
            self.names.insert(Arc::clone(&key.full_name), key.id);
        }
        self.entries += entries.len();
        let image = CodeImage {
            id: image.id,
            name: name.into(),
            text: image.text,
            ro_after_init: image.ro_after_init,
            table: image.jump_table.start,
            entry_size: self.format.entry_size(),
            entries,
            keys,
        };
        for key in image.keys_used() {
            *self.users.entry(key).or_default() += 1;
        }
        self.images.insert(image.id, Arc::new(image));
        Ok(others
            .into_iter()
            .filter_map(|key| self.adopt(key))
            .collect())
    }

    /// Adds a key to the image that defines it, unless it is known or that image is not; the image's
    /// name.
    fn adopt(&mut self, listed: Listed) -> Option<Arc<str>> {
        if self.keys.contains_key(&listed.id) {
            return None;
        }
        let home = Arc::make_mut(self.images.get_mut(&listed.home)?);
        let mut key = listed.into_key(&home.name);
        if self.names.contains_key(&key.full_name) {
            // Names of a directory have no '#' of their own, and numbers no "0x".
            key.full_name = format!("{}#{:#x}", key.full_name, key.id.0).into();
        }
        let place = Place {
            image: home.id,
            index: home.keys.len(),
        };
        self.keys.insert(key.id, place);
        self.names.insert(Arc::clone(&key.full_name), key.id);
        home.keys.push(key);
        Some(Arc::clone(&home.name))
    }

    /// A key whose count lies in text: of `keys` in that of any image, or of any image in `text`.
    fn key_in_text(&self, text: Range, keys: &[Listed]) -> Option<KeyId> {
        let images = || self.images.values();
        images()
            .map(|image| image.text)
            .chain([text])
            .find_map(|text| first_in(text, keys))
            .or_else(|| {
                let mut known = images().flat_map(|image| &image.keys).map(|key| key.id);
                known.find(|key| text.overlaps(key.0, COUNT_SIZE))
            })
    }

    /// Forgets a module with its keys and sites; whether there was one.
    pub fn remove_module(&mut self, id: u64) -> bool {
        if id == 0 {
            return false;
        }
        let Some(image) = self.images.remove(&id) else {
            return false;
        };
        self.entries -= image.entries.len();
        for key in &image.keys {
            self.keys.remove(&key.id);
            self.names.remove(&key.full_name);
        }
        for key in image.keys_used() {
            if let Some(users) = self.users.get_mut(&key) {
                *users -= 1;
                if *users == 0 {
                    self.users.remove(&key);
                }
            }
        }
        true
    }

    fn read_table<M: GuestMemory>(
        &self,
        memory: &M,
        range: Range,
    ) -> Result<Vec<JumpEntry>, CatalogError> {
        let entry_size = self.format.entry_size();
        let whole = range
            .len()
            .filter(|len| *len == 0 || entry_size != 0 && len % entry_size as u64 == 0);
        let len = whole.ok_or(CatalogError::TableRange {
            start: range.start,
            end: range.end,
            entry_size,
        })?;
        if len == 0 {
            return Ok(Vec::new());
        }
        let count = len / entry_size as u64;
        let room = (ENTRIES_MAX - self.entries) as u64;
        let bytes = usize::try_from(len).ok().filter(|_| count <= room);
        let mut bytes = vec![0; bytes.ok_or(CatalogError::TooManyEntries { count })?];
        memory.read_gva(range.start, &mut bytes)?;
        let entries: Vec<JumpEntry> = self
            .format
            .entries(range.start, &bytes, Image::Live)
            .collect();
        match entries
            .windows(2)
            .position(|pair| pair[0].key > pair[1].key)
        {
            Some(before) => Err(CatalogError::NotSorted {
                table: range.start,
                index: before + 1,
            }),
            None => Ok(entries),
        }
    }

    /// A key by its address.
    #[must_use]
    pub fn key(&self, id: KeyId) -> Option<&Key> {
        let listed = self.keys.get(&id)?;
        self.images.get(&listed.image)?.keys.get(listed.index)
    }

    /// A key by its full name.
    #[must_use]
    pub fn find(&self, full_name: &str) -> Option<&Key> {
        self.key(*self.names.get(full_name)?)
    }

    /// All keys by full name.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.names.values().filter_map(|id| self.key(*id))
    }

    /// All keys, image by image; mostly by address, and faster than by name.
    pub fn keys_by_image(&self) -> impl Iterator<Item = &Key> {
        self.images.values().flat_map(|image| &image.keys)
    }

    /// Number of keys.
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.keys.len()
    }

    /// Number of entries in all tables.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entries
    }

    /// Number of entries of a key in all tables, init sites included.
    #[must_use]
    pub fn site_count(&self, id: KeyId) -> usize {
        match self.users.get(&id) {
            None => 0,
            Some(_) => self.images.values().map(|image| image.run(id).len()).sum(),
        }
    }

    /// Format of the tables.
    #[must_use]
    pub fn format(&self) -> EntryFormat {
        self.format
    }

    /// The modules' addresses and names.
    pub fn modules(&self) -> impl Iterator<Item = (u64, &str)> {
        self.images
            .values()
            .filter(|image| image.id != 0)
            .map(|image| (image.id, &*image.name))
    }

    /// 0 is the kernel.
    pub(crate) fn image(&self, id: u64) -> Option<&CodeImage> {
        self.images.get(&id).map(|image| &**image)
    }

    /// The image that lists a key.
    pub(crate) fn home(&self, id: KeyId) -> Option<&CodeImage> {
        self.image(self.keys.get(&id)?.image)
    }

    /// Whether a key lies in memory of its image that is read-only once that runs.
    #[must_use]
    pub fn is_ro_after_init(&self, id: KeyId) -> bool {
        self.home(id)
            .is_some_and(|home| home.ro_after_init.contains(id.0, 1))
    }

    /// How many images have entries of a key.
    pub(crate) fn user_count(&self, id: KeyId) -> usize {
        self.users.get(&id).copied().unwrap_or(0)
    }

    /// All images with entries of a key.
    pub(crate) fn images_using(&self, id: KeyId) -> impl Iterator<Item = &CodeImage> {
        self.images
            .values()
            .map(|image| &**image)
            .filter(move |image| !image.run(id).is_empty())
    }
}

/// Of a key's count, in bytes.
const COUNT_SIZE: u64 = 4;

/// The first of `keys`, which are sorted, whose count lies in `text`.
fn first_in(text: Range, keys: &[Listed]) -> Option<KeyId> {
    let before = keys.partition_point(|key| key.id.0.saturating_add(COUNT_SIZE) <= text.start);
    let first = keys.get(before)?.id;
    text.overlaps(first.0, COUNT_SIZE).then_some(first)
}
