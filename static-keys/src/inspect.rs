// SPDX-License-Identifier: Apache-2.0
//! What the sites of a key hold, for people to look at. Read while the guest runs, and so a moment's
//! picture: a site that the guest is just changing shows as foreign.

use std::sync::Arc;

use crate::KeyId;
use crate::busy::{Busy, Gate};
use crate::catalog::{Catalog, CodeImage};
use crate::entry::JumpEntry;
use crate::instruction::{Branch, Instruction, OutOfReach, Size, recognise};
use crate::memory::{GuestMemory, ReadError, Width, read_count, read_word_at};
use crate::planner::read_site;
use crate::users::{Users, UsersError, users};

/// Why a site would not be patched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPatchable {
    /// Skipped, as the guest does.
    #[error("it lies in init text, which is gone")]
    Init,
    /// Refused.
    #[error("it lies outside the registered text")]
    OutsideText,
    /// Refused.
    #[error("its key is sealed since the end of init")]
    Sealed,
    /// Not now.
    #[error("{0}")]
    Busy(Busy),
    /// Refused.
    #[error("it holds neither its NOP nor its JMP")]
    Foreign,
    /// Refused.
    #[error("{0}")]
    OutOfReach(OutOfReach),
    /// Refused.
    #[error("{0}")]
    Unreadable(ReadError),
}

/// A site of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteState {
    /// Address of the site.
    pub address: u64,
    /// Where its JMP goes.
    pub target: u64,
    /// Name of the module whose text it is in; empty for the kernel.
    pub module: Arc<str>,
    /// It falls through while the key is on.
    pub likely: bool,
    /// Its bytes: 2 or 5 as its size is, 5 (or what can be read) if that is unknown, none if it is
    /// not readable, not text or gone.
    pub bytes: Vec<u8>,
    /// What it does, if it holds its NOP or its JMP.
    pub branch: Option<Branch>,
    /// Its NOP, if its size is known.
    pub nop: Option<Instruction>,
    /// Its JMP, if its size is known.
    pub jump: Option<Instruction>,
    /// Whether a change of the key would patch it.
    pub patchable: Result<(), NotPatchable>,
}

impl SiteState {
    /// Its size, if that is known.
    #[must_use]
    pub fn size(&self) -> Option<Size> {
        self.nop.map(|nop| nop.size())
    }
}

impl Catalog {
    /// `enabled` of a key, as it is in the guest now: −1 while the guest takes the first reference.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn enabled<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Result<i32, ReadError> {
        Ok(read_count(
            memory,
            memory.locate(key.0, Width::U32.bytes())?,
        )?)
    }

    /// The sites of a key by image and address, init sites included.
    pub fn site_states<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Vec<SiteState> {
        self.sites(memory, key).collect()
    }

    /// As [`Catalog::site_states`], one after another: a hostile guest may have registered a million
    /// sites of one key.
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
            .map(move |(image, entry, obstacle)| site_state(memory, image, entry, obstacle))
    }

    /// What is in the way of all sites of the key.
    fn obstacle<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Option<NotPatchable> {
        match users(self, memory, self.key(key)?, &mut Users::default()).err()? {
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
    match recognise(&state.bytes, address, target) {
        None => state.patchable = Err(NotPatchable::Foreign),
        Some((size, branch)) => {
            state.bytes.truncate(size.bytes());
            state.branch = Some(branch);
            state.nop = Some(Instruction::nop(size));
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
