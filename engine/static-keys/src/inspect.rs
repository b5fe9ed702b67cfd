// SPDX-License-Identifier: Apache-2.0
//! A snapshot of the sites of a key, for display. It is read while the guest runs, so a site that
//! the guest is changing shows as foreign.

use std::sync::Arc;

use crate::busy::{Busy, Gate};
use crate::catalog::{Catalog, CodeImage};
use crate::entry::JumpEntry;
use crate::instruction::{Branch, Instruction, Nops, OutOfReach, Size};
use crate::key::{Class, KeyId};
use crate::memory::{GuestMemory, ReadError, Width, read_count, read_word_at};
use crate::planner::read_site;
use crate::users::{Users, UsersError, users};

/// The reason why a change of the key would not patch a site.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says why")]
pub enum NotPatchable {
    /// A change skips the site, as the guest does.
    #[error("it lies in init text, which the kernel has freed")]
    Init,
    #[error("it lies outside the registered text")]
    OutsideText,
    #[error("its key is sealed since the end of init")]
    Sealed,
    #[error("its key gates a static call that may be NULL, and is never changed")]
    Never,
    /// A change of the key has to wait.
    #[error("{0}")]
    Busy(Busy),
    #[error("it holds neither its NOP nor its JMP")]
    Foreign,
    #[error("{0}")]
    OutOfReach(OutOfReach),
    #[error("{0}")]
    Unreadable(ReadError),
}

/// The state of one site of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteState {
    /// Address of the site.
    pub address: u64,
    /// Target of the site's JMP.
    pub target: u64,
    /// Name of the module whose text contains the site; empty for the kernel.
    pub module: Arc<str>,
    /// The site falls through while the key is on.
    pub likely: bool,
    /// The bytes of the site: 2 or 5 by its size, up to 5 if its size is unknown, none if the site
    /// is not readable, outside text or freed.
    pub bytes: Vec<u8>,
    /// The branch that the site implements, if it holds its NOP or its JMP.
    pub branch: Option<Branch>,
    /// The NOP of the site, if its size is known.
    pub nop: Option<Instruction>,
    /// The JMP of the site, if its size is known.
    pub jump: Option<Instruction>,
    /// Result of the checks that a change of the key would make.
    pub patchable: Result<(), NotPatchable>,
}

impl SiteState {
    /// Returns the size of the site, if it is known.
    #[must_use]
    pub fn size(&self) -> Option<Size> {
        self.nop.map(|nop| nop.size())
    }
}

impl Catalog {
    /// Reads `enabled` of a key from the guest. It is −1 while the guest takes the first reference.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn enabled<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Result<i32, ReadError> {
        Ok(read_count(
            memory,
            memory.locate(key.0, Width::U32.bytes())?,
        )?)
    }

    /// Returns the sites of a key, including init sites, ordered as in the jump tables of the
    /// images.
    pub fn site_states<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Vec<SiteState> {
        self.sites(memory, key).collect()
    }

    /// Like [`Catalog::site_states`], but reads lazily, because a hostile guest may register a
    /// million sites of one key.
    pub fn sites<M: GuestMemory>(&self, memory: &M, key: KeyId) -> impl Iterator<Item = SiteState> {
        let obstacle = self.obstacle(memory, key);
        let images = self.images_using(key).map(move |image| {
            (
                image,
                obstacle.clone().or_else(|| self.not_live(memory, image)),
            )
        });
        images
            .flat_map(move |(image, obstacle)| {
                image
                    .run(key)
                    .iter()
                    .map(move |entry| (image, entry, obstacle.clone()))
            })
            .map(move |(image, entry, obstacle)| {
                site_state(memory, self.nops, image, entry, obstacle)
            })
    }

    /// Returns the reason why none of the key's sites can be changed; `None` if there is no such
    /// reason.
    fn obstacle<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Option<NotPatchable> {
        let (key, home) = self.listed(key)?;
        if key.class == Class::Never {
            return Some(NotPatchable::Never);
        }
        let mut images = Users::default();
        match users(self, memory, key, Some(home), &mut images, drop).err()? {
            UsersError::Sealed => Some(NotPatchable::Sealed),
            UsersError::Busy(busy) => Some(NotPatchable::Busy(busy)),
            UsersError::Read { error, .. } => Some(NotPatchable::Unreadable(error)),
        }
    }

    fn not_live<M: GuestMemory>(&self, memory: &M, image: &CodeImage) -> Option<NotPatchable> {
        if image.id == 0 {
            return None;
        }
        let address = image.id.saturating_add(u64::from(self.layout.module_state));
        match read_word_at(memory, address, Width::U32) {
            Err(error) => Some(NotPatchable::Unreadable(error)),
            Ok(state) if state == u64::from(self.layout.module_state_live) => None,
            Ok(found) => Some(NotPatchable::Busy(Busy::Gate {
                gate: Gate::ModuleState {
                    module: image.name.clone(),
                },
                found,
            })),
        }
    }
}

fn site_state<M: GuestMemory>(
    memory: &M,
    nops: Nops,
    image: &CodeImage,
    entry: &JumpEntry,
    obstacle: Option<NotPatchable>,
) -> SiteState {
    let JumpEntry {
        code: address,
        target,
        likely,
        ..
    } = *entry;
    let mut state = SiteState {
        address,
        target,
        module: image.name.clone(),
        likely,
        bytes: Vec::new(),
        branch: None,
        nop: None,
        jump: None,
        patchable: Ok(()),
    };
    if entry.init {
        return SiteState {
            patchable: Err(NotPatchable::Init),
            ..state
        };
    }
    match read_site(memory, image, address) {
        Ok(Some(found)) => state.bytes = found.as_slice().to_vec(),
        Ok(None) => {
            return SiteState {
                patchable: Err(NotPatchable::OutsideText),
                ..state
            };
        }
        Err(error) => {
            return SiteState {
                patchable: Err(NotPatchable::Unreadable(error)),
                ..state
            };
        }
    }
    match nops.recognise(&state.bytes, address, target) {
        None => state.patchable = Err(NotPatchable::Foreign),
        Some((size, branch)) => {
            state.bytes.truncate(size.bytes());
            state.branch = Some(branch);
            state.nop = Some(nops.nop(size));
            match Instruction::jump(size, address, target) {
                Ok(jump) => state.jump = Some(jump),
                Err(source) => state.patchable = Err(NotPatchable::OutOfReach(source)),
            }
        }
    }
    if let Some(obstacle) = obstacle {
        state.patchable = Err(obstacle);
    }
    state
}
