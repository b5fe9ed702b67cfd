// SPDX-License-Identifier: Apache-2.0
//! One jump table entry and the instruction at its site, as a file image has them.

use serde::Serialize;

use super::image::Image;

/// How entries are laid out.
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
    /// The formats a kernel with pointers of this size may have.
    pub fn candidates(pointer_size: u64) -> [Self; 2] {
        if pointer_size == 4 {
            [Self::Relative32, Self::Absolute32]
        } else {
            [Self::Relative64, Self::Absolute64]
        }
    }

    /// Bytes of an entry.
    pub fn entry_size(self) -> u64 {
        match self {
            Self::Relative64 => 16,
            Self::Absolute64 => 24,
            Self::Relative32 | Self::Absolute32 => 12,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Relative64 => "relative, 64 bits",
            Self::Relative32 => "relative, 32 bits",
            Self::Absolute64 => "absolute, 64 bits",
            Self::Absolute32 => "absolute, 32 bits",
        }
    }

    /// Reads the entry at `address`.
    pub fn decode(self, image: &Image<'_>, address: u64) -> Option<Entry> {
        let word = |offset: u64| {
            image
                .read::<4>(address.checked_add(offset)?)
                .map(u32::from_le_bytes)
        };
        let wide = |offset: u64| {
            image
                .read::<8>(address.checked_add(offset)?)
                .map(u64::from_le_bytes)
        };
        let from =
            |offset: u64, distance: i64| address.wrapping_add(offset).wrapping_add_signed(distance);
        let distance = |offset: u64| word(offset).map(|value| i64::from(value.cast_signed()));
        let low = |value: u64| value & u64::from(u32::MAX);
        // The two low bits of the key are flags, not part of the distance: jump_entry_key() in include/linux/jump_label.h.
        Some(match self {
            Self::Relative64 => {
                let key = wide(8)?.cast_signed();
                Entry::new(
                    from(0, distance(0)?),
                    from(4, distance(4)?),
                    from(8, key & !3),
                    key & 3,
                )
            }
            Self::Relative32 => {
                let key = distance(8)?;
                Entry::new(
                    low(from(0, distance(0)?)),
                    low(from(4, distance(4)?)),
                    low(from(8, key & !3)),
                    key & 3,
                )
            }
            Self::Absolute64 => {
                let key = wide(16)?;
                Entry::new(wide(0)?, wide(8)?, key & !3, (key & 3).cast_signed())
            }
            Self::Absolute32 => {
                let key = word(8)?;
                Entry::new(
                    word(0)?.into(),
                    word(4)?.into(),
                    (key & !3).into(),
                    (key & 3).into(),
                )
            }
        })
    }
}

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the site.
    pub code: u64,
    /// Where the JMP leads.
    pub target: u64,
    /// Address of the struct static_key.
    pub key: u64,
    /// Bit 0: the branch was written with static_branch_likely().
    pub likely: bool,
    /// Bit 1. In a file it is not the init bit, which the kernel sets only at boot: since 5.14 (`CONFIG_HAVE_JUMP_LABEL_HACK`) it tells
    /// objtool that the compiler emitted a JMP only to have its size chosen, and objtool has written a NOP over it.
    pub objtool_nop: bool,
}

impl Entry {
    fn new(code: u64, target: u64, key: u64, flags: i64) -> Self {
        Self {
            code,
            target,
            key,
            likely: flags & 1 != 0,
            objtool_nop: flags & 2 != 0,
        }
    }
}

/// What the image holds at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Instruction {
    /// The branch is not taken.
    Nop,
    /// The branch is taken.
    Jmp,
    /// `e9 00 00 00 00`, a NOP that early kernels replace by the best one for the processor when they boot.
    BootNop,
}

/// NOPs that kernels have had at their sites (arch/x86/include/asm/nops.h over time), with their assembly.
const NOPS: [(&[u8], &str); 8] = [
    (&[0x66, 0x90], "xchg ax,ax"),
    (&[0x89, 0xf6], "mov esi,esi"),
    (&[0x0f, 0x1f, 0x44, 0x00, 0x00], "nop dword ptr [rax+rax]"),
    (
        &[0x66, 0x66, 0x66, 0x66, 0x90],
        "data16 data16 data16 xchg ax,ax",
    ),
    (
        &[0x66, 0x66, 0x90, 0x66, 0x90],
        "data16 xchg ax,ax; xchg ax,ax",
    ),
    (&[0x3e, 0x8d, 0x74, 0x26, 0x00], "lea esi,ds:[esi+eiz]"),
    (&[0x90, 0x8d, 0x74, 0x26, 0x00], "nop; lea esi,[esi+eiz]"),
    (&[0x8d, 0x44, 0x20, 0x00, 0x90], "lea eax,[eax+eiz]; nop"),
];

/// The instruction at a site, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub instruction: Instruction,
    /// 2 or 5 bytes.
    pub size: u8,
    /// Assembly, Intel syntax.
    pub text: String,
}

/// Decodes the bytes at a site and checks that a JMP leads where the entry says. `bytes` are up to five.
pub fn decode_site(bytes: &[u8], entry: &Entry, pointer_size: u64) -> Result<Site, String> {
    for (nop, text) in NOPS {
        if bytes.starts_with(nop) {
            return Ok(Site {
                instruction: Instruction::Nop,
                size: nop.len() as u8,
                text: text.to_owned(),
            });
        }
    }
    let (size, distance) = match *bytes {
        [0xeb, distance, ..] => (2, i64::from(distance.cast_signed())),
        [0xe9, a, b, c, d] => (5, i64::from(i32::from_le_bytes([a, b, c, d]))),
        [] => return Err("the site is not in the image".to_owned()),
        _ => {
            return Err(format!(
                "the site holds {}, neither NOP nor JMP",
                hex(bytes)
            ));
        }
    };
    let mask = if pointer_size == 4 {
        u64::from(u32::MAX)
    } else {
        u64::MAX
    };
    let leads_to = entry
        .code
        .wrapping_add(u64::from(size))
        .wrapping_add_signed(distance)
        & mask;
    if leads_to == entry.target {
        Ok(Site {
            instruction: Instruction::Jmp,
            size,
            text: format!("jmp {leads_to:#x}"),
        })
    } else if bytes == [0xe9, 0, 0, 0, 0] {
        Ok(Site {
            instruction: Instruction::BootNop,
            size,
            text: format!("jmp {leads_to:#x}"),
        })
    } else {
        Err(format!(
            "the JMP leads to {leads_to:#x}, the entry says {:#x}",
            entry.target
        ))
    }
}

/// Bytes as two digits each.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
