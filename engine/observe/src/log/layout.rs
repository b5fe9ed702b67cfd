// SPDX-License-Identifier: Apache-2.0
//! The layout of the log's structures, from a kernel's own types.
//!
//! | kernel | last member of `prb_desc_ring` | size of `printk_info` |
//! |---|---|---|
//! | 5.10 | `tail_id` | 88 |
//! | 6.1 | `last_finalized_id` | 88 |
//! | 6.12 | `last_finalized_seq` | 88 |
//! | 7.3 | `last_finalized_seq` | 112 |
//!
//! No reader needs the members that differ.

use crate::{Member, Types, number};

/// The symbol of the pointer to the ring.
pub const SYMBOL: &str = "prb";

/// Every type that [`Layout::read`] looks up.
pub const TYPES: &[&str] = &[
    "dev_printk_info",
    "prb_data_blk_lpos",
    "prb_data_ring",
    "prb_desc",
    "prb_desc_ring",
    "printk_info",
    "printk_ringbuffer",
];

/// The maximum plausible size of one of the structures, in bytes.
const MAX_SIZE: u32 = 1024;
/// The maximum size of a name in `struct dev_printk_info`.
const MAX_NAME: u32 = 256;

/// A number in a structure: the `width` bits from bit `shift` on of the `size` bytes at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    offset: u32,
    size: u32,
    shift: u32,
    width: u32,
}

impl Field {
    /// Returns the number in a copy of the structure.
    pub fn of(self, bytes: &[u8]) -> Option<u64> {
        let whole = number(bytes, self.offset, self.size as usize)?;
        let mask = u64::MAX.checked_shr(64 - self.width)?;
        Some(whole >> self.shift & mask)
    }

    pub fn offset(self) -> u64 {
        self.offset.into()
    }
}

/// A text in an array of fixed size, which ends at the first NUL or fills the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    offset: u32,
    size: u32,
}

impl Name {
    /// Returns the text in a copy of the structure.
    pub fn of(self, bytes: &[u8]) -> Vec<u8> {
        let field = bytes.get(self.offset as usize..).unwrap_or_default();
        let field = &field[..field.len().min(self.size as usize)];
        let end = field.iter().position(|byte| *byte == 0);
        field[..end.unwrap_or(field.len())].to_vec()
    }
}

/// The layout of a kernel's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(super) ring: RingLayout,
    pub(super) descriptor: DescriptorLayout,
    pub(super) info: InfoLayout,
}

/// `struct printk_ringbuffer`, with the members of the two rings in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingLayout {
    pub size: usize,
    pub count_bits: Field,
    pub descriptors: Field,
    pub infos: Field,
    pub head: Field,
    pub tail: Field,
    pub text_bits: Field,
    pub text: Field,
}

/// `struct prb_desc`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DescriptorLayout {
    pub size: usize,
    pub state: Field,
    pub begin: Field,
    pub next: Field,
}

/// `struct printk_info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InfoLayout {
    pub size: usize,
    pub seq: Field,
    pub time: Field,
    pub text_length: Field,
    pub facility: Field,
    pub flags: Field,
    pub level: Field,
    pub caller: Field,
    pub subsystem: Name,
    pub device: Name,
}

/// A structure whose members are looked up. Each returned member lies within it.
struct Structure<'a, T: ?Sized> {
    types: &'a T,
    name: &'static str,
    size: u32,
}

impl<'a, T: Types + ?Sized> Structure<'a, T> {
    fn new(types: &'a T, name: &'static str) -> Result<Self, String> {
        let size = types.size(name);
        match size.filter(|size| (1..=MAX_SIZE).contains(size)) {
            Some(size) => Ok(Self { types, name, size }),
            None => Err(format!(
                "the size of struct {name} is {size:?}, expected 1 to {MAX_SIZE}"
            )),
        }
    }

    fn member(&self, path: &[&str], size: u32) -> Result<Member, String> {
        let member = self.types.member(self.name, path);
        let ends = |member: &Member| member.offset.checked_add(size);
        let inside = |member: &Member| ends(member).is_some_and(|end| end <= self.size);
        match member.filter(inside) {
            Some(member) => Ok(member),
            None => Err(format!(
                "struct {} has no member {} within it",
                self.name,
                path.join(".")
            )),
        }
    }

    /// Returns a number of `size` bytes.
    fn field(&self, path: &[&str], size: u32) -> Result<Field, String> {
        let member = self.member(path, size)?;
        let bits = 8 * size;
        let width = match member.width {
            0 => bits,
            width => width,
        };
        match member.shift.checked_add(width) {
            Some(end) if end <= bits => Ok(Field {
                offset: member.offset,
                size,
                shift: member.shift,
                width,
            }),
            _ => Err(format!(
                "{} of struct {} is {width} bits from bit {} on, expected at most {bits}",
                path.join("."),
                self.name,
                member.shift
            )),
        }
    }

    fn name(&self, path: &[&str]) -> Result<Name, String> {
        let size = self.member(path, 1)?.size.unwrap_or(0).min(MAX_NAME);
        let offset = self.member(path, size)?.offset;
        Ok(Name { offset, size })
    }
}

impl Layout {
    /// Reads the layout from a kernel's types.
    ///
    /// # Errors
    /// A sentence that names the structure or member that is missing or implausible. Kernels before
    /// 5.10 have none of them.
    pub fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let ring = Structure::new(types, "printk_ringbuffer")?;
        let descriptor = Structure::new(types, "prb_desc")?;
        let info = Structure::new(types, "printk_info")?;
        let descriptors = |name, size| ring.field(&["desc_ring", name], size);
        let texts = |name, size| ring.field(&["text_data_ring", name], size);
        Ok(Self {
            ring: RingLayout {
                size: ring.size as usize,
                count_bits: descriptors("count_bits", 4)?,
                descriptors: descriptors("descs", 8)?,
                infos: descriptors("infos", 8)?,
                head: descriptors("head_id", 8)?,
                tail: descriptors("tail_id", 8)?,
                text_bits: texts("size_bits", 4)?,
                text: texts("data", 8)?,
            },
            descriptor: DescriptorLayout {
                size: descriptor.size as usize,
                state: descriptor.field(&["state_var"], 8)?,
                begin: descriptor.field(&["text_blk_lpos", "begin"], 8)?,
                next: descriptor.field(&["text_blk_lpos", "next"], 8)?,
            },
            info: InfoLayout {
                size: info.size as usize,
                seq: info.field(&["seq"], 8)?,
                time: info.field(&["ts_nsec"], 8)?,
                text_length: info.field(&["text_len"], 2)?,
                facility: info.field(&["facility"], 1)?,
                flags: info.field(&["flags"], 1)?,
                level: info.field(&["level"], 1)?,
                caller: info.field(&["caller_id"], 4)?,
                subsystem: info.name(&["dev_info", "subsystem"])?,
                device: info.name(&["dev_info", "device"])?,
            },
        })
    }
}
