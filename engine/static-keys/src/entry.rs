// SPDX-License-Identifier: Apache-2.0
//! `struct jump_entry` in its three formats.
//!
//! | format      | entry                          | bytes | kernels            |
//! |-------------|--------------------------------|-------|--------------------|
//! | relative    | {s32 code, s32 target, s64 key} | 16   | since 4.20         |
//! | absolute 64 | {u64 code, u64 target, u64 key} | 24   | before 4.20        |
//! | absolute 32 | {u32 code, u32 target, u32 key} | 12   | i386, before 4.20  |
//! | none        | –                              | –     | without jump labels |
//!
//! Each member of a relative entry is relative to its own address, modulo 2^64
//! (include/linux/jump_label.h `jump_entry_code()`). The two low bits of `key` are flags:
//!
//! | bit | in a running kernel               | in a file                                   |
//! |-----|-----------------------------------|---------------------------------------------|
//! | 0   | the branch is likely              | the same                                    |
//! | 1   | the site lies in init text        | objtool made a NOP of the compiler's JMP    |
//!
//! (`jump_label_init()` and `jump_label_add_module()` overwrite bit 1;
//! arch/x86/include/asm/jump_label.h under `CONFIG_HAVE_JUMP_LABEL_HACK`; tools/objtool/check.c
//! `handle_jump_alt()`.)

use crate::memory::Width;

/// The format in which a kernel stores its jump table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryFormat {
    /// Each member is relative to its own address.
    Relative,
    /// Each member is a 64-bit address.
    Absolute64,
    /// Each member is a 32-bit address, in i386 kernels.
    Absolute32,
    /// No jump labels: the branches test the count, and a flip writes only the count.
    None,
}

/// The origin of a table. It decides what bit 1 of `key` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    /// The memory of a running kernel or module, with init bits set.
    Live,
    /// The file of a kernel or module.
    File,
}

/// One decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JumpEntry {
    /// Address of the site.
    pub code: u64,
    /// Target of the site's JMP.
    pub target: u64,
    /// Address of the `struct static_key`.
    pub key: u64,
    /// The site falls through while the key is on.
    pub likely: bool,
    /// Live image only: the site lies in init text, which is freed after init.
    pub init: bool,
    /// File only: objtool replaced the compiler's JMP with a NOP.
    pub objtool_nop: bool,
}

impl EntryFormat {
    /// Returns the size of an entry in bytes; 0 without jump labels.
    #[must_use]
    pub const fn entry_size(self) -> usize {
        match self {
            Self::Relative => 16,
            Self::Absolute64 => 24,
            Self::Absolute32 => 12,
            Self::None => 0,
        }
    }

    /// Returns the width of a pointer in this kernel.
    pub(crate) const fn pointer(self) -> Width {
        match self {
            Self::Absolute32 => Width::U32,
            Self::Relative | Self::Absolute64 | Self::None => Width::U64,
        }
    }

    /// Decodes the entry whose bytes start at `address`. Returns `None` if there are too few bytes,
    /// or if the format is [`EntryFormat::None`]. The addresses are not checked.
    #[must_use]
    pub fn decode(self, address: u64, bytes: &[u8], image: Image) -> Option<JumpEntry> {
        let (code, target, key) = match self {
            Self::Relative => (
                address.wrapping_add_signed(i64::from(i32_at(bytes, 0)?)),
                address
                    .wrapping_add(4)
                    .wrapping_add_signed(i64::from(i32_at(bytes, 4)?)),
                // The flags are the low bits of the stored offset. They are masked out before the
                // address is added, as in jump_entry_key().
                u64_at(bytes, 8)?,
            ),
            Self::Absolute64 => (u64_at(bytes, 0)?, u64_at(bytes, 8)?, u64_at(bytes, 16)?),
            Self::Absolute32 => {
                let member = |at| i32_at(bytes, at).map(|word| u64::from(word.cast_unsigned()));
                (member(0)?, member(4)?, member(8)?)
            }
            Self::None => return None,
        };
        let flags = key & 3;
        let key = match self {
            Self::Relative => address.wrapping_add(8).wrapping_add(key & !3),
            _ => key & !3,
        };
        let bit1 = flags & 2 != 0;
        Some(JumpEntry {
            code,
            target,
            key,
            likely: flags & 1 != 0,
            init: bit1 && image == Image::Live,
            objtool_nop: bit1 && image == Image::File,
        })
    }

    /// Decodes the table whose bytes start at `address`; ignores a partial entry at the end.
    pub fn entries(
        self,
        address: u64,
        bytes: &[u8],
        image: Image,
    ) -> impl Iterator<Item = JumpEntry> {
        // Without jump labels the entry size is 0, and `decode` returns None for any chunk.
        bytes
            .chunks_exact(self.entry_size().max(1))
            .scan(address, move |next, entry| {
                let at = *next;
                *next = next.wrapping_add(entry.len() as u64);
                Some((at, entry))
            })
            .map_while(move |(at, entry)| self.decode(at, entry, image))
    }
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
