// SPDX-License-Identifier: Apache-2.0
//! The instructions that a site may hold.
//!
//! | size | NOP, see [`Nops`] | JMP                             |
//! |------|-------------------|---------------------------------|
//! | 2    | `66 90`           | `eb` disp8 = target − code − 2  |
//! | 5    | `0f 1f 44 00 00`  | `e9` disp32 = target − code − 5 |
//!
//! (arch/x86/kernel/jump_label.c `__jump_label_patch()`; `x86_nops` in
//! arch/x86/kernel/alternative.c; Intel SDM volume 2, JMP and NOP.) The sites of a running kernel
//! hold exactly these instructions, except that a kernel before 5.13 may use another 5-byte NOP
//! ([`Nops::K8`]). The file of an older kernel may contain other 5-byte NOPs, which
//! `arch_jump_label_transform_static()` replaces at boot:
//!
//! | bytes            | instruction                                      |
//! |------------------|--------------------------------------------------|
//! | `e9 00 00 00 00` | jump to the next instruction, `JUMP_LABEL_INIT_NOP` |
//! | `66 66 66 66 90` | `K8_NOP5_ATOMIC`                                 |
//! | `3e 8d 74 26 00` | `GENERIC_NOP5_ATOMIC`, 32-bit kernels            |
//!
//! If the guest outlives the writing process, that process must not leave a partly written
//! instruction when it is killed. [`replace`] makes the site a TEST of the accumulator with an
//! immediate operand first: `a8 imm8` or `a9 imm32`. The TEST is as long as the site, accepts any
//! bytes after the first, and changes nothing but the arithmetic flags, which compilers treat as
//! clobbered by every asm statement on x86. Each byte can therefore be stored on its own, and after
//! each store the site falls through or jumps to its target.

use std::fmt;

/// The size of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    /// Two bytes, for targets within reach of an 8-bit displacement (since 5.14).
    Two,
    /// Five bytes.
    Five,
}

impl Size {
    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Five => 5,
        }
    }

    /// Returns the size of a site of `bytes` bytes; `None` if no site has that size.
    #[must_use]
    pub const fn of(bytes: usize) -> Option<Self> {
        match bytes {
            2 => Some(Self::Two),
            5 => Some(Self::Five),
            _ => None,
        }
    }

    /// Returns the opcode of a TEST of this size.
    pub(crate) const fn test(self) -> u8 {
        match self {
            Self::Two => 0xa8,
            Self::Five => 0xa9,
        }
    }
}

/// The effect of a site (`enum jump_label_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Branch {
    /// Falls through.
    Nop,
    /// Jumps to the entry's target.
    Jump,
}

impl Branch {
    /// Returns the branch of a site: a jump if `enabled ^ likely`, as in the truth table of
    /// include/linux/jump_label.h.
    #[must_use]
    pub const fn of(enabled: bool, likely: bool) -> Self {
        if enabled ^ likely {
            Self::Jump
        } else {
            Self::Nop
        }
    }
}

/// A displacement of the site's size cannot reach the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a jump of {} bytes at {code:#x} cannot reach {target:#x}", .size.bytes())]
#[allow(missing_docs, reason = "the message names the fields")]
pub struct OutOfReach {
    pub code: u64,
    pub target: u64,
    pub size: Size,
}

/// The instruction of one site: a NOP or a JMP.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Instruction {
    size: Size,
    bytes: [u8; 5],
}

const NOP2: [u8; 5] = [0x66, 0x90, 0, 0, 0];
const P6_NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
const K8_NOP5: [u8; 5] = [0x66, 0x66, 0x66, 0x66, 0x90];
const HISTORIC_NOPS: [[u8; 5]; 3] = [
    [0xe9, 0x00, 0x00, 0x00, 0x00],
    K8_NOP5,
    [0x3e, 0x8d, 0x74, 0x26, 0x00],
];

/// The NOPs that a running kernel writes to its sites.
///
/// Before 5.13 a 64-bit kernel chooses the 5-byte NOP for the processor when it boots (`ideal_nops`
/// of arch/x86/kernel/alternative.c), and has no 2-byte sites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Nops {
    /// Since 5.13: `66 90` and `0f 1f 44 00 00`.
    #[default]
    Fixed,
    /// `ideal_nops` is `p6_nops`: `0f 1f 44 00 00`.
    P6,
    /// `ideal_nops` is `k8_nops`: `66 66 66 66 90`.
    K8,
}

impl Nops {
    /// Returns the NOPs of a kernel that has `ideal_nops`, given its atomic 5-byte NOP; `None` if
    /// no 64-bit kernel chooses that NOP.
    #[must_use]
    pub const fn ideal(nop: [u8; 5]) -> Option<Self> {
        match nop {
            P6_NOP5 => Some(Self::P6),
            K8_NOP5 => Some(Self::K8),
            _ => None,
        }
    }

    /// Returns whether the kernel has sites of `size`.
    #[must_use]
    pub const fn has(self, size: Size) -> bool {
        matches!(size, Size::Five) || matches!(self, Self::Fixed)
    }

    /// Returns the size of the instructions of a site that begin with the first of these bytes.
    /// Returns `None` if there are none, or if they are longer than `bytes`.
    pub(crate) fn size(self, bytes: &[u8]) -> Option<Size> {
        // The 5-byte NOP of K8 and the 2-byte NOP start with the same byte. No kernel has both.
        let size = match bytes.first()? {
            0x66 if !self.has(Size::Two) => Size::Five,
            0x66 | 0xeb => Size::Two,
            0x0f | 0xe9 => Size::Five,
            _ => return None,
        };
        (self.has(size) && bytes.len() >= size.bytes()).then_some(size)
    }

    /// Returns the NOP of `size`.
    #[must_use]
    pub const fn nop(self, size: Size) -> Instruction {
        let bytes = match (size, self) {
            (Size::Two, _) => NOP2,
            (Size::Five, Self::Fixed | Self::P6) => P6_NOP5,
            (Size::Five, Self::K8) => K8_NOP5,
        };
        Instruction { size, bytes }
    }

    /// Returns the instruction that implements `branch`.
    ///
    /// # Errors
    /// [`OutOfReach`].
    pub fn encode(
        self,
        branch: Branch,
        size: Size,
        code: u64,
        target: u64,
    ) -> Result<Instruction, OutOfReach> {
        match branch {
            Branch::Nop => Ok(self.nop(size)),
            Branch::Jump => Instruction::jump(size, code, target),
        }
    }

    /// Returns the size and the branch of the site at `code`; `None` unless `bytes` starts with
    /// exactly its NOP or its JMP to `target`. `bytes` may be longer than the site.
    #[must_use]
    pub fn recognise(self, bytes: &[u8], code: u64, target: u64) -> Option<(Size, Branch)> {
        let size = self.size(bytes)?;
        let found = &bytes[..size.bytes()];
        if found == self.nop(size).as_bytes() {
            Some((size, Branch::Nop))
        } else if found == Instruction::jump(size, code, target).ok()?.as_bytes() {
            Some((size, Branch::Jump))
        } else {
            None
        }
    }
}

impl Instruction {
    /// Returns the JMP of `size` from `code` to `target`.
    ///
    /// # Errors
    /// [`OutOfReach`] if the displacement does not fit, or the site ends past the address space.
    #[inline]
    pub fn jump(size: Size, code: u64, target: u64) -> Result<Self, OutOfReach> {
        let out_of_reach = OutOfReach { code, target, size };
        let next = code.checked_add(size.bytes() as u64).ok_or(out_of_reach)?;
        let displacement = i128::from(target) - i128::from(next);
        let mut bytes = [0; 5];
        match size {
            Size::Two => {
                let [disp8] = i8::try_from(displacement)
                    .map_err(|_| out_of_reach)?
                    .to_le_bytes();
                bytes[..2].copy_from_slice(&[0xeb, disp8]);
            }
            Size::Five => {
                let disp32 = i32::try_from(displacement).map_err(|_| out_of_reach)?;
                bytes[0] = 0xe9;
                bytes[1..].copy_from_slice(&disp32.to_le_bytes());
            }
        }
        Ok(Self { size, bytes })
    }

    /// Wraps the bytes that a site holds. They need not be a complete instruction.
    #[inline]
    pub(crate) fn of_bytes(size: Size, bytes: [u8; 5]) -> Self {
        let [first, second, ..] = bytes;
        let bytes = match size {
            Size::Two => [first, second, 0, 0, 0],
            Size::Five => bytes,
        };
        Self { size, bytes }
    }

    /// Returns the encoded bytes, 2 or 5 of them.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.size.bytes()]
    }

    /// Returns the bytes as a little-endian number.
    pub(crate) fn number(self) -> u64 {
        // The bytes after a 2-byte instruction are zero.
        let [a, b, c, d, e] = self.bytes;
        u64::from_le_bytes([a, b, c, d, e, 0, 0, 0])
    }

    /// Returns the size of the instruction.
    #[must_use]
    pub const fn size(&self) -> Size {
        self.size
    }
}

impl fmt::Debug for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(self.as_bytes()).fmt(f)
    }
}

/// Formats bytes as `0f 1f 44 00 00`.
#[derive(Clone, Copy, Debug)]
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// Replaces the instruction of a site by `new` so that the site holds a complete instruction after
/// each stored byte. `write` stores the bytes that it is given from the start of the site on, in
/// any order and in pieces of any size. The caller must have stopped the vCPUs. A vCPU can execute
/// an intermediate state only if the caller is killed.
///
/// # Errors
/// The error of `write`. The site holds the old instruction, the new one or a TEST.
pub fn replace<E>(new: &[u8], mut write: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    let (mut test, length) = ([0; 5], new.len());
    let Some(size) = Size::of(length) else {
        return write(new);
    };
    test[..length].copy_from_slice(new);
    test[0] = size.test();
    write(&test[..1])?;
    // This stores the first byte again, unchanged.
    write(&test[..length])?;
    write(&new[..1])
}

/// Returns whether a site holds an intermediate state of [`replace`]: neither `before` nor `after`,
/// but a TEST whose operand bytes are from `before` or `after`.
#[must_use]
pub fn is_half_replaced(found: &[u8], before: &[u8], after: &[u8]) -> bool {
    let Some(size) = Size::of(found.len()) else {
        return false;
    };
    let operand = || found.iter().zip(before.iter().zip(after)).skip(1);
    before.len() == found.len()
        && after.len() == found.len()
        && found[0] == size.test()
        && operand().all(|(found, (before, after))| found == before || found == after)
}

/// Like [`Nops::recognise`], but for the file of a kernel: also accepts the NOPs that older kernels
/// replace at boot. A jump to the next instruction is a NOP unless the entry's target is that
/// instruction.
#[must_use]
pub fn recognise_in_file(bytes: &[u8], code: u64, target: u64) -> Option<(Size, Branch)> {
    let fixed = Nops::Fixed.recognise(bytes, code, target);
    fixed.or_else(|| {
        HISTORIC_NOPS
            .iter()
            .any(|nop| bytes.starts_with(nop))
            .then_some((Size::Five, Branch::Nop))
    })
}

/// Disassembles the instruction at `address` in Intel syntax. Supports the instructions that sites
/// may hold: NOPs, near jumps, int3 and TEST. Returns "unknown" for any other.
#[must_use]
pub fn disassemble(bytes: &[u8], address: u64) -> String {
    let jump = |length: u64, displacement: i64| {
        format!(
            "jmp {:#x}",
            address
                .wrapping_add(length)
                .wrapping_add_signed(displacement)
        )
    };
    match *bytes {
        [0x66, 0x90, ..] => "xchg ax, ax".to_owned(),
        [0x66, 0x66, 0x66, 0x66, 0x90, ..] => "data16 data16 data16 xchg ax, ax".to_owned(),
        [0x0f, 0x1f, 0x44, 0x00, 0x00, ..] => "nop dword ptr [rax+rax]".to_owned(),
        [0xeb, disp8, ..] => jump(2, i64::from(disp8.cast_signed())),
        [0xe9, a, b, c, d, ..] => jump(5, i64::from(i32::from_le_bytes([a, b, c, d]))),
        [0xcc, ..] => "int3".to_owned(),
        [0xa8, immediate, ..] => format!("test al, {immediate:#x}"),
        [0xa9, a, b, c, d, ..] => {
            format!("test eax, {:#x}", u32::from_le_bytes([a, b, c, d]))
        }
        _ => "unknown".to_owned(),
    }
}
