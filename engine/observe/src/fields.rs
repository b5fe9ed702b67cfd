// SPDX-License-Identifier: Apache-2.0
//! Members of structures, found in a kernel's own types.

use crate::{KernelView, Member, Types, copy, number};

/// The maximum plausible size of one of the structures, in bytes.
const MAX_SIZE: u32 = 16_384;
/// The maximum size of a name in an array.
const MAX_NAME: u32 = 256;

/// A number in a structure: the `width` bits from bit `shift` on of the `size` bytes at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Field {
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
pub(crate) struct Name {
    offset: u32,
    size: u32,
}

impl Name {
    /// Returns the text in a copy of the structure.
    pub fn of(self, bytes: &[u8]) -> Vec<u8> {
        let field = bytes.get(self.offset as usize..).unwrap_or_default();
        until_nul(&field[..field.len().min(self.size as usize)])
    }

    /// Reads the text of the structure at an address.
    pub fn read(self, view: &(impl KernelView + ?Sized), structure: u64) -> Option<Vec<u8>> {
        let address = structure.checked_add(self.offset.into())?;
        Some(until_nul(&copy(view, address, self.size as usize)?))
    }
}

fn until_nul(field: &[u8]) -> Vec<u8> {
    let end = field.iter().position(|byte| *byte == 0);
    field[..end.unwrap_or(field.len())].to_vec()
}

/// A structure whose members are looked up. Each returned member lies within it.
pub(crate) struct Structure<'a, T: ?Sized> {
    types: &'a T,
    name: &'static str,
    /// Size in bytes.
    pub size: u32,
}

impl<'a, T: Types + ?Sized> Structure<'a, T> {
    pub fn new(types: &'a T, name: &'static str) -> Result<Self, String> {
        let size = types.size(name);
        match size.filter(|size| (1..=MAX_SIZE).contains(size)) {
            Some(size) => Ok(Self { types, name, size }),
            None => Err(format!(
                "the size of struct {name} is {size:?}, expected 1 to {MAX_SIZE}"
            )),
        }
    }

    pub fn member(&self, path: &[&str], size: u32) -> Result<Member, String> {
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
    pub fn field(&self, path: &[&str], size: u32) -> Result<Field, String> {
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

    pub fn name(&self, path: &[&str]) -> Result<Name, String> {
        let size = self.member(path, 1)?.size.unwrap_or(0).min(MAX_NAME);
        let offset = self.member(path, size)?.offset;
        Ok(Name { offset, size })
    }
}
