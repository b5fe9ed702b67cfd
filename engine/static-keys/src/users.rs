// SPDX-License-Identifier: Apache-2.0
//! Finds the tables with entries of a key, as `jump_label_update()` finds them through the key's
//! `type` word.
//!
//! | `type`                         | entries                                                    |
//! |--------------------------------|------------------------------------------------------------|
//! | bit 1 clear, no pointer        | none                                                       |
//! | bit 1 clear, pointer           | in the table of the key's own image, from the pointer on   |
//! | bit 1 set, pointer             | of each `static_key_mod` of the chain: in the table of     |
//! |                                | `mod` (NULL: the kernel), unless its `entries` are NULL    |
//! | bit 1 set, no pointer          | unknown: sealed after init (since 6.11; before, such keys  |
//! |                                | are known only by their address in `__ro_after_init`)      |
//!
//! The guest's words must match the registered tables: they name each image with entries of the key
//! once, by the address of its first entry. The guest runs meanwhile and may change or free what is
//! read here, so a mismatch only means "try again". Each word read is passed on as a
//! [`WatchedWord`], to be checked again when the guest is stopped.

use crate::busy::Busy;
use crate::catalog::{Catalog, CodeImage};
use crate::entry::{EntryFormat, JumpEntry};
use crate::key::Key;
use crate::memory::{GuestMemory, ReadError, Width};

/// Bit 0: the key was initialised as true. Bit 1: linked.
const TYPE_LINKED: u64 = 2;
const TYPE_MASK: u64 = 3;

/// The part of the guest's memory that a word belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Watched {
    /// The `type` word of the key.
    Type,
    /// The chain of `static_key_mod`.
    Chain,
}

/// A word of the guest and the value that was read.
#[derive(Debug)]
pub(crate) struct WatchedWord<P> {
    pub what: Watched,
    pub place: P,
    pub width: Width,
    pub value: u64,
}

/// The images with entries of a key, each with these entries.
pub(crate) type Users<'a> = Vec<(&'a CodeImage, &'a [JumpEntry])>;

/// The reason why the users of a key cannot be determined.
#[derive(Debug)]
pub(crate) enum UsersError {
    Sealed,
    Busy(Busy),
    Read { address: u64, error: ReadError },
}

/// Finds the users of `key` and checks that it is not sealed. `home` is the image that lists it.
///
/// `found` is overwritten. Callers reuse it for all keys of a transaction to save allocations.
/// `watch` gets each word that is read, also before an error.
pub(crate) fn users<'a, M: GuestMemory>(
    catalog: &'a Catalog,
    memory: &M,
    key: &Key,
    home: Option<&'a CodeImage>,
    found: &mut Users<'a>,
    watch: impl FnMut(WatchedWord<M::Place>),
) -> Result<(), UsersError> {
    found.clear();
    if home.is_some_and(|home| home.is_ro_after_init(key.id)) {
        return Err(UsersError::Sealed);
    }
    if catalog.format == EntryFormat::None {
        return Ok(());
    }
    let mut follower = Follower {
        catalog,
        memory,
        key,
        users: found,
        watch,
    };
    let word = follower.read(key.id.0, catalog.layout.static_key_type, Watched::Type)?;
    match (word & TYPE_LINKED != 0, word & !TYPE_MASK) {
        (true, 0) => return Err(UsersError::Sealed),
        (true, chain) => follower.follow(chain)?,
        (false, 0) => {}
        (false, entries) => {
            let home = home.ok_or_else(|| follower.busy("its own image is not registered"))?;
            follower.add(home, entries)?;
        }
    }
    if follower.users.len() != catalog.user_count(key.id) {
        return Err(
            follower.busy("its module chain does not name all modules with sites of the key")
        );
    }
    Ok(())
}

struct Follower<'a, 'b, M, W> {
    catalog: &'a Catalog,
    memory: &'b M,
    key: &'b Key,
    users: &'b mut Users<'a>,
    watch: W,
}

impl<'a, M: GuestMemory, W: FnMut(WatchedWord<M::Place>)> Follower<'a, '_, M, W> {
    /// Walks a chain. The number of its nodes is bounded, so a looping chain is detected.
    fn follow(&mut self, mut node: u64) -> Result<(), UsersError> {
        let layout = self.catalog.layout;
        // The chain may also have a node without entries for the image that defines the key.
        let mut left = self.catalog.user_count(self.key.id) + 1;
        while node != 0 {
            if left == 0 {
                return Err(self.busy("its module chain is longer than the number of its users"));
            }
            left -= 1;
            let next = self.read(node, layout.static_key_mod_next, Watched::Chain)?;
            let entries = self.read(node, layout.static_key_mod_entries, Watched::Chain)?;
            let module = self.read(node, layout.static_key_mod_mod, Watched::Chain)?;
            if entries != 0 {
                let image = self.catalog.image(module).ok_or_else(|| {
                    let key = self.key.full_name.clone();
                    UsersError::Busy(Busy::UnknownModule { key, module })
                })?;
                self.add(image, entries)?;
            }
            node = next;
        }
        Ok(())
    }

    fn add(&mut self, image: &'a CodeImage, entries: u64) -> Result<(), UsersError> {
        let Some(run) = image.run_at(self.key.id, entries) else {
            return Err(
                self.busy("its module chain names entries that are not in the registered table")
            );
        };
        let mut known = self.users.iter();
        if known.any(|(known, _)| known.id == image.id) {
            return Err(self.busy("its module chain names a module twice"));
        }
        self.users.push((image, run));
        Ok(())
    }

    /// Reads a pointer and records it as a word to check again.
    fn read(&mut self, base: u64, offset: u32, what: Watched) -> Result<u64, UsersError> {
        let width = self.catalog.format.pointer();
        let address = base
            .checked_add(u64::from(offset))
            .ok_or_else(|| self.busy("its module chain leads past the address space"))?;
        let read = || {
            let place = self.memory.locate(address, width.bytes())?;
            Ok((place, self.memory.load(place, width.bytes())?))
        };
        match read() {
            Ok((place, value)) => {
                (self.watch)(WatchedWord {
                    what,
                    place,
                    width,
                    value,
                });
                Ok(value)
            }
            // The guest may have freed the chain while it was read.
            Err(_) if base != self.key.id.0 => {
                Err(self.busy("its module chain leads to unmapped memory"))
            }
            Err(error) => Err(UsersError::Read { address, error }),
        }
    }

    fn busy(&self, why: &'static str) -> UsersError {
        UsersError::Busy(Busy::Users {
            key: self.key.full_name.clone(),
            why,
        })
    }
}
