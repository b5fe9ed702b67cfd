// SPDX-License-Identifier: Apache-2.0
//! One jump table entry and the instruction at its site, as they are in a file image.

use serde::Serialize;

use static_keys::{Branch, EntryFormat, Hex, JumpEntry, Nops, disassemble};

use crate::image::Image;

/// The layout of jump table entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// {s32 code, s32 target, s64 key}, each relative to its own address: x86-64 since 4.20.
    Relative64,
    /// {s32 code, s32 target, s32 key}, each relative to its own address: i386 since 4.20.
    Relative32,
    /// {u64 code, u64 target, u64 key}: x86-64 before 4.20.
    Absolute64,
    /// {u32 code, u32 target, u32 key}: i386 before 4.20.
    Absolute32,
}

impl Format {
    /// Returns the formats that a kernel with pointers of this size may have.
    #[must_use]
    pub fn candidates(pointer_size: u64) -> [Self; 2] {
        if pointer_size == 4 {
            [Self::Relative32, Self::Absolute32]
        } else {
            [Self::Relative64, Self::Absolute64]
        }
    }

    /// Returns the size of an entry in bytes.
    #[must_use]
    pub fn entry_size(self) -> u64 {
        match self {
            Self::Relative64 => 16,
            Self::Absolute64 => 24,
            Self::Relative32 | Self::Absolute32 => 12,
        }
    }

    /// Returns the name for display.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Relative64 => "relative, 64 bits",
            Self::Relative32 => "relative, 32 bits",
            Self::Absolute64 => "absolute, 64 bits",
            Self::Absolute32 => "absolute, 32 bits",
        }
    }

    /// Returns the engine's format; `None` for the newer format of i386, whose keys the engine does
    /// not flip.
    fn engine(self) -> Option<EntryFormat> {
        match self {
            Self::Relative64 => Some(EntryFormat::Relative),
            Self::Absolute64 => Some(EntryFormat::Absolute64),
            Self::Absolute32 => Some(EntryFormat::Absolute32),
            Self::Relative32 => None,
        }
    }

    /// Reads the entry at `address`. Bit 1 of its key is the one that objtool sets: the kernel
    /// overwrites the bit only at boot.
    #[must_use]
    pub fn decode(self, image: &Image<'_>, address: u64) -> Option<JumpEntry> {
        if let Some(format) = self.engine() {
            let mut bytes = [0; 24];
            let bytes = &mut bytes[..format.entry_size()];
            image.read_into(address, bytes)?;
            return format.decode(address, bytes, static_keys::Image::File);
        }
        // The addresses are computed modulo 2^32: jump_entry_code() in include/linux/jump_label.h.
        let word = |offset: u64| {
            let bytes = image.read(address.checked_add(offset)?)?;
            Some((
                address.wrapping_add(offset) as u32,
                u32::from_le_bytes(bytes),
            ))
        };
        let from = |(own, distance): (u32, u32)| u64::from(own.wrapping_add(distance));
        let (own, key) = word(8)?;
        Some(JumpEntry {
            code: from(word(0)?),
            target: from(word(4)?),
            key: from((own, key & !3)),
            likely: key & 1 != 0,
            init: false,
            objtool_nop: key & 2 != 0,
        })
    }
}

/// The instruction that the image holds at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Instruction {
    /// The branch is not taken.
    Nop,
    /// The branch is taken.
    Jmp,
    /// `e9 00 00 00 00`, a NOP that early kernels replace by the best NOP for the processor when
    /// they boot.
    BootNop,
}

/// NOPs that older kernels have at their sites, besides those of [`Nops::Fixed`], with their
/// disassembly (former versions of arch/x86/include/asm/nops.h).
const HISTORIC_NOPS: [(&[u8], &str); 6] = [
    (&[0x89, 0xf6], "mov esi, esi"),
    (
        &[0x66, 0x66, 0x66, 0x66, 0x90],
        "data16 data16 data16 xchg ax, ax",
    ),
    (
        &[0x66, 0x66, 0x90, 0x66, 0x90],
        "data16 xchg ax, ax; xchg ax, ax",
    ),
    (&[0x3e, 0x8d, 0x74, 0x26, 0x00], "lea esi, ds:[esi+eiz]"),
    (&[0x90, 0x8d, 0x74, 0x26, 0x00], "nop; lea esi, [esi+eiz]"),
    (&[0x8d, 0x44, 0x20, 0x00, 0x90], "lea eax, [eax+eiz]; nop"),
];

/// The instruction at a site, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The kind of instruction: a NOP or a JMP.
    pub instruction: Instruction,
    /// Size in bytes, 2 or 5.
    pub size: u8,
    /// Disassembly in Intel syntax.
    pub text: String,
}

/// Decodes the bytes at a site and checks that a JMP leads to the entry's target. `bytes` has at
/// most five bytes.
///
/// # Errors
/// A message that describes what the site holds instead.
pub fn decode_site(bytes: &[u8], entry: &JumpEntry) -> Result<Site, String> {
    if let Some((size, branch)) = Nops::Fixed.recognise(bytes, entry.code, entry.target) {
        return Ok(Site {
            instruction: match branch {
                Branch::Nop => Instruction::Nop,
                Branch::Jump => Instruction::Jmp,
            },
            size: size.bytes() as u8,
            text: disassemble(bytes, entry.code),
        });
    }
    if let Some((nop, text)) = HISTORIC_NOPS.iter().find(|(nop, _)| bytes.starts_with(nop)) {
        return Ok(Site {
            instruction: Instruction::Nop,
            size: nop.len() as u8,
            text: (*text).to_owned(),
        });
    }
    match *bytes {
        [0xe9, 0, 0, 0, 0, ..] => Ok(Site {
            instruction: Instruction::BootNop,
            size: 5,
            text: disassemble(bytes, entry.code),
        }),
        [0xeb, _, ..] | [0xe9, _, _, _, _, ..] => Err(format!(
            "the site holds `{}`, the entry says {:#x}",
            disassemble(bytes, entry.code),
            entry.target
        )),
        [] => Err("the site is not in the image".to_owned()),
        _ => Err(format!(
            "the site holds {}, neither NOP nor JMP",
            Hex(bytes)
        )),
    }
}
