// SPDX-License-Identifier: Apache-2.0
//! The tables, keys and names that registration copied from the guest.
//!
//! A catalog is a bounded copy. It is never read from the guest again, so a guest that rewrites its
//! tables later does not change it. A flip re-reads only the few words that tell whether the tables
//! are still in use (see [`crate::users`]). A catalog is cheap to clone, because images are shared.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops;
use std::sync::{Arc, OnceLock};

use foldhash::fast::RandomState;

use crate::directory::{self, Listed, ListedKeys};
use crate::entry::{EntryFormat, Image, JumpEntry};
use crate::error::CatalogError;
use crate::gates::Gates;
use crate::instruction::Nops;
use crate::kernel::{Directory, FoundKernel, Kernel, Layout, Module, Range};
use crate::key::{Class, Key, KeyId};
use crate::limits::{ENTRIES_MAX, KEYS_MAX, MODULES_MAX};
use crate::memory::GuestMemory;
use crate::records::{RecordRing, Records};

/// The kernel image or a module.
#[derive(Clone, Debug)]
pub(crate) struct CodeImage {
    /// Address of the `struct module`; 0 for the kernel.
    pub id: u64,
    /// Empty for the kernel.
    pub name: Arc<str>,
    pub text: Range,
    /// Keys in this range cannot change once the image runs.
    ro_after_init: Range,
    /// Address of the first entry.
    table: u64,
    entry_size: usize,
    /// Sorted by key.
    entries: Vec<JumpEntry>,
    /// The keys that the image defines.
    keys: Vec<Key>,
}

impl CodeImage {
    /// Returns the entries of `key` in this image.
    pub fn run(&self, key: KeyId) -> &[JumpEntry] {
        &self.entries[self.run_range(key)]
    }

    /// Returns the entries of `key` if the first of them is at `address`, which comes from the
    /// guest.
    pub fn run_at(&self, key: KeyId, address: u64) -> Option<&[JumpEntry]> {
        // The address determines the index, so the table is not searched.
        let offset = usize::try_from(address.checked_sub(self.table)?).ok()?;
        let start = offset.checked_div(self.entry_size)?;
        let is_of_key = |entry: &JumpEntry| entry.key == key.0;
        let before = start.checked_sub(1).and_then(|last| self.entries.get(last));
        if start * self.entry_size != offset || before.is_some_and(is_of_key) {
            return None;
        }
        let rest = self.entries.get(start..)?;
        if !rest.first().is_some_and(is_of_key) {
            return None;
        }
        // The entries of a key are consecutive, because the table is sorted. Most keys have few, so
        // the end is near.
        let length = rest.iter().take_while(|entry| is_of_key(entry)).count();
        Some(&rest[..length])
    }

    /// Returns whether a key lies in memory that is read-only once the image runs.
    pub fn is_ro_after_init(&self, key: KeyId) -> bool {
        self.ro_after_init.contains(key.0, 1)
    }

    fn run_range(&self, key: KeyId) -> ops::Range<usize> {
        let start = self.entries.partition_point(|entry| entry.key < key.0);
        let length = self.entries[start..].partition_point(|entry| entry.key == key.0);
        start..start + length
    }

    /// Returns the keys with entries in this image, each once.
    fn keys_used(&self) -> impl Iterator<Item = KeyId> {
        self.entries
            .chunk_by(|a, b| a.key == b.key)
            .filter_map(|run| run.first())
            .map(|entry| KeyId(entry.key))
    }
}

/// The image that lists a key, and the key's index there.
#[derive(Clone, Copy, Debug)]
struct KeyLocation {
    image: u64,
    index: usize,
}

/// Looks up keys like [`Catalog::listed`]. Keys that follow each other in an image, as most keys of
/// a selection do, are found without a search.
#[derive(Debug)]
pub(crate) struct KeyReader<'a> {
    catalog: &'a Catalog,
    /// The image of the last key, and its index there.
    last: Option<(&'a CodeImage, usize)>,
}

impl<'a> KeyReader<'a> {
    /// Looks up a key and the image that lists it.
    pub fn listed(&mut self, id: KeyId) -> Option<(&'a Key, &'a CodeImage)> {
        let next = self.last.map(|(home, index)| (home, index + 1));
        let next_is_it = |(home, index): &(&CodeImage, usize)| {
            home.keys.get(*index).is_some_and(|key| key.id == id)
        };
        self.last = next.filter(next_is_it).or_else(|| {
            let KeyLocation { image, index } = *self.catalog.keys.get(&id)?;
            Some((self.catalog.image(image)?, index))
        });
        let (home, index) = self.last?;
        Some((home.keys.get(index)?, home))
    }
}

/// Tables, keys and names of a guest's kernel and its modules.
#[derive(Clone, Debug)]
pub struct Catalog {
    pub(crate) format: EntryFormat,
    pub(crate) nops: Nops,
    pub(crate) layout: Layout,
    pub(crate) gates: Gates,
    pub(crate) records: Records,
    /// The images by [`CodeImage::id`].
    images: BTreeMap<u64, Arc<CodeImage>>,
    keys: HashMap<KeyId, KeyLocation, RandomState>,
    /// The keys by full name.
    names: HashMap<Arc<str>, KeyLocation, RandomState>,
    /// The keys ordered by full name, computed when they are first read after a change.
    ordered: OnceLock<Box<[KeyLocation]>>,
    /// The number of images with entries of each key.
    users: HashMap<KeyId, usize, RandomState>,
    entries: usize,
}

impl Catalog {
    /// Reads the tables of a kernel. The guest must wait until this call returns.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub fn new<M: GuestMemory>(memory: &M, kernel: &Kernel) -> Result<Self, CatalogError> {
        let records = Records::new(kernel.records.check()?);
        let mut catalog = Self::empty(kernel.format, kernel.layout, kernel.gates.clone(), records)?;
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

    fn empty(
        format: EntryFormat,
        layout: Layout,
        gates: Gates,
        records: Records,
    ) -> Result<Self, CatalogError> {
        gates.check_complete(format)?;
        Ok(Self {
            format,
            nops: Nops::Fixed,
            layout,
            gates,
            records,
            images: BTreeMap::new(),
            keys: HashMap::default(),
            names: HashMap::default(),
            ordered: OnceLock::new(),
            users: HashMap::default(),
            entries: 0,
        })
    }

    /// Creates a catalog from the tables that were found in the guest's memory.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub fn found(kernel: FoundKernel) -> Result<Self, CatalogError> {
        let records = Records::new(RecordRing::default());
        let mut catalog = Self::empty(kernel.format, kernel.layout, kernel.gates, records)?;
        catalog.nops = kernel.nops;
        for (index, image) in kernel.images.into_iter().enumerate() {
            let name = match index {
                0 => String::new(),
                _ => catalog.module_name(image.id, image.name.as_bytes())?,
            };
            let listed = directory::found(
                image.keys,
                image.id,
                catalog.layout.tracepoint_key,
                KEYS_MAX.saturating_sub(catalog.keys.len()),
            )?;
            let room = ENTRIES_MAX - catalog.entries;
            if image.entries.len() > room {
                let count = image.entries.len() as u64;
                return Err(CatalogError::TooManyEntries { count });
            }
            check_sorted(image.jump_table, &image.entries)?;
            let module = Module {
                id: image.id,
                name: b"",
                jump_table: image.jump_table,
                text: image.text,
                ro_after_init: image.ro_after_init,
                directory: Directory::default(),
            };
            catalog.insert(&module, &name, image.entries, listed)?;
        }
        Ok(catalog)
    }

    /// Reads the tables of a module. The guest must wait until this call returns. On an error the
    /// catalog is unchanged.
    ///
    /// A module may list keys that it only branches on. Returns the names of the images ("" for the
    /// kernel) that gained such keys.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub fn add_module<M: GuestMemory>(
        &mut self,
        memory: &M,
        module: &Module<'_>,
    ) -> Result<BTreeSet<Arc<str>>, CatalogError> {
        let name = self.module_name(module.id, module.name)?;
        self.add(memory, module, &name)
    }

    /// Returns the sanitised name of a module. Fails if the address is 0, if a module with this
    /// name or address is registered, or if there are too many modules.
    fn module_name(&self, id: u64, name: &[u8]) -> Result<String, CatalogError> {
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let name = match &name[..name.len().min(crate::NAME_MAX)] {
            [] => format!("{id:#x}"),
            name => directory::clean(name),
        };
        if id == 0 {
            return Err(CatalogError::ModuleAddress { name });
        }
        if self
            .images
            .values()
            .any(|image| image.id == id || *image.name == *name)
        {
            return Err(CatalogError::ModuleTwice { name });
        }
        // The images include the kernel, so with MODULES_MAX modules there is one more image.
        if self.images.len() > MODULES_MAX {
            return Err(CatalogError::TooManyModules);
        }
        Ok(name)
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
        self.insert(image, name, entries, listed)
    }

    fn insert(
        &mut self,
        image: &Module<'_>,
        name: &str,
        entries: Vec<JumpEntry>,
        listed: Vec<Listed>,
    ) -> Result<BTreeSet<Arc<str>>, CatalogError> {
        let twice = |key: &&Listed| key.home == image.id && self.keys.contains_key(&key.id);
        if let Some(key) = listed.iter().find(twice) {
            return Err(CatalogError::KeyTwice { address: key.id.0 });
        }
        if let Some(key) = self.key_in_text(image.text, &listed) {
            return Err(CatalogError::KeyInText { address: key.0 });
        }
        self.ordered.take();
        let (own, others): (Vec<_>, Vec<_>) =
            listed.into_iter().partition(|key| key.home == image.id);
        let keys: Vec<Key> = own.into_iter().map(|key| key.into_key(name)).collect();
        for (index, key) in keys.iter().enumerate() {
            let location = KeyLocation {
                image: image.id,
                index,
            };
            self.keys.insert(key.id, location);
            self.names.insert(Arc::clone(&key.full_name), location);
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

    /// Adds a key to the image that defines it and returns that image's name. Does nothing if the
    /// key is already registered, or if that image is not registered.
    fn adopt(&mut self, listed: Listed) -> Option<Arc<str>> {
        if self.keys.contains_key(&listed.id) {
            return None;
        }
        let home = Arc::make_mut(self.images.get_mut(&listed.home)?);
        let mut key = listed.into_key(&home.name);
        if self.names.contains_key(&key.full_name) {
            // The new name is unique: names in a directory contain no '#', and the numbers of
            // duplicates contain no "0x".
            key.full_name = format!("{}#{:#x}", key.full_name, key.id.0).into();
        }
        let location = KeyLocation {
            image: home.id,
            index: home.keys.len(),
        };
        self.keys.insert(key.id, location);
        self.names.insert(Arc::clone(&key.full_name), location);
        home.keys.push(key);
        Some(Arc::clone(&home.name))
    }

    /// Finds a key whose count lies in text: one of the new `keys` in the text of a registered
    /// image or in the new image's `text`, or a registered key in `text`.
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

    /// Lists the keys of an image as its guest listed them; `None` if the image is not registered.
    /// The guest may have freed its own list.
    #[must_use]
    pub fn listed_keys(&self, image: u64) -> Option<ListedKeys> {
        let image = self.images.get(&image)?;
        Some(directory::list(&image.keys, image.id))
    }

    /// Removes a module with its keys and sites. Returns `false` if it is not registered.
    pub fn remove_module(&mut self, id: u64) -> bool {
        if id == 0 {
            return false;
        }
        let Some(image) = self.images.remove(&id) else {
            return false;
        };
        self.ordered.take();
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
        check_sorted(range, &entries)?;
        Ok(entries)
    }

    /// Looks up a key by address.
    #[must_use]
    pub fn key(&self, id: KeyId) -> Option<&Key> {
        self.listed(id).map(|(key, _)| key)
    }

    /// Looks up a key and the image that lists it.
    pub(crate) fn listed(&self, id: KeyId) -> Option<(&Key, &CodeImage)> {
        self.at(*self.keys.get(&id)?)
    }

    fn at(&self, location: KeyLocation) -> Option<(&Key, &CodeImage)> {
        let home = self.image(location.image)?;
        Some((home.keys.get(location.index)?, home))
    }

    /// Returns a reader that looks up keys one after the other.
    pub(crate) fn reader(&self) -> KeyReader<'_> {
        KeyReader {
            catalog: self,
            last: None,
        }
    }

    /// Changes the class of a key. Does nothing if there is no such key.
    pub fn set_class(&mut self, id: KeyId, class: Class) {
        if let Some(listed) = self.keys.get(&id)
            && let Some(image) = self.images.get_mut(&listed.image)
            && let Some(key) = Arc::make_mut(image).keys.get_mut(listed.index)
        {
            key.class = class;
        }
    }

    /// Looks up a key by its full name.
    #[must_use]
    pub fn find(&self, full_name: &str) -> Option<&Key> {
        self.at(*self.names.get(full_name)?).map(|(key, _)| key)
    }

    /// Returns all keys, ordered by full name.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        let ordered = self.ordered.get_or_init(|| {
            let mut names: Vec<(&Arc<str>, &KeyLocation)> = self.names.iter().collect();
            names.sort_unstable_by_key(|(name, _)| *name);
            names.into_iter().map(|(_, location)| *location).collect()
        });
        let keys = ordered.iter().filter_map(|location| self.at(*location));
        keys.map(|(key, _)| key)
    }

    /// Returns all keys, grouped by image. The keys of an image are ordered by address, except that
    /// the keys that only later modules list come last. Faster than [`Catalog::keys`].
    pub fn keys_by_image(&self) -> impl Iterator<Item = &Key> {
        self.images.values().flat_map(|image| &image.keys)
    }

    /// Returns the same keys, and for each whether it is
    /// [read-only after init](Self::is_ro_after_init).
    pub fn keys_with_seals(&self) -> impl Iterator<Item = (&Key, bool)> {
        self.images.values().flat_map(|image| {
            let keys = image.keys.iter();
            keys.map(move |key| (key, image.is_ro_after_init(key.id)))
        })
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.keys.len()
    }

    /// Returns the number of entries in all tables.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entries
    }

    /// Returns the number of entries of a key in all tables, including init sites.
    #[must_use]
    pub fn site_count(&self, id: KeyId) -> usize {
        match self.users.get(&id) {
            None => 0,
            Some(_) => self.images.values().map(|image| image.run(id).len()).sum(),
        }
    }

    /// Returns the format of the jump tables.
    #[must_use]
    pub fn format(&self) -> EntryFormat {
        self.format
    }

    /// Returns the addresses and the names of the modules.
    pub fn modules(&self) -> impl Iterator<Item = (u64, &str)> {
        self.images
            .values()
            .filter(|image| image.id != 0)
            .map(|image| (image.id, &*image.name))
    }

    /// Returns the image with this id; 0 is the kernel.
    pub(crate) fn image(&self, id: u64) -> Option<&CodeImage> {
        self.images.get(&id).map(|image| &**image)
    }

    /// Returns the image that lists a key.
    pub(crate) fn home(&self, id: KeyId) -> Option<&CodeImage> {
        self.image(self.keys.get(&id)?.image)
    }

    /// Returns whether a key lies in memory that is read-only once its image runs.
    #[must_use]
    pub fn is_ro_after_init(&self, id: KeyId) -> bool {
        self.home(id).is_some_and(|home| home.is_ro_after_init(id))
    }

    /// Returns the number of images with entries of a key.
    pub(crate) fn user_count(&self, id: KeyId) -> usize {
        self.users.get(&id).copied().unwrap_or(0)
    }

    /// Returns all images with entries of a key.
    pub(crate) fn images_using(&self, id: KeyId) -> impl Iterator<Item = &CodeImage> {
        self.images
            .values()
            .map(|image| &**image)
            .filter(move |image| !image.run(id).is_empty())
    }
}

fn check_sorted(table: Range, entries: &[JumpEntry]) -> Result<(), CatalogError> {
    let falls = |pair: &[JumpEntry]| pair[0].key > pair[1].key;
    match entries.windows(2).position(falls) {
        Some(before) => Err(CatalogError::NotSorted {
            table: table.start,
            index: before + 1,
        }),
        None => Ok(()),
    }
}

/// Size of a key's count in bytes.
const COUNT_SIZE: u64 = 4;

/// Returns the first of the sorted `keys` whose count lies in `text`.
fn first_in(text: Range, keys: &[Listed]) -> Option<KeyId> {
    let before = keys.partition_point(|key| key.id.0.saturating_add(COUNT_SIZE) <= text.start);
    let first = keys.get(before)?.id;
    text.overlaps(first.0, COUNT_SIZE).then_some(first)
}
