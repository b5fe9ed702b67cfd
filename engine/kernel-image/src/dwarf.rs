// SPDX-License-Identifier: Apache-2.0
//! Types from a kernel's DWARF, for kernels that are built without CONFIG_DEBUG_INFO_BTF.
//!
//! The wanted types are converted to BTF, as pahole(1) does for all types, so that one interface
//! looks up members. Pointers are not followed. The bytes are not trusted: the depth of nesting and
//! the number of types are bounded.

use std::collections::{HashMap, HashSet};

use gimli::{
    AttributeValue, DebuggingInformationEntry, Dwarf, EndianSlice, Error, LittleEndian, UnitOffset,
    constants as dw,
};

/// The maximum size in bytes of the types, and of the strings, in the BTF that is written.
const MAX_BYTES: usize = 64 << 20;
/// The maximum number of types that are written.
const MAX_TYPES: u32 = 1 << 16;
/// The maximum depth to which typedefs, arrays and structures by value are followed.
const MAX_DEPTH: u32 = 24;
/// The maximum number of entries examined; a distribution kernel has 20 million at the outermost
/// level.
const MAX_ENTRIES: u64 = 1 << 27;
/// The maximum number of definitions of all wanted types together. One name may have several
/// definitions that differ.
const MAX_DEFINITIONS: usize = 256;
/// The maximum number of members of a structure or of enumerators; BTF stores the number in 16
/// bits.
const MAX_MEMBERS: usize = 0xffff;

/// The type number of `void`, used where a type is missing.
const VOID: u32 = 0;
const INT: u32 = 1 << 24;
const POINTER: u32 = 2 << 24;
const ARRAY: u32 = 3 << 24;
/// A structure with the flag set, so the upper byte of an offset is the width of a bit field.
const STRUCTURE: u32 = 1 << 31 | 4 << 24;
const ENUMERATION: u32 = 6 << 24;

type Slice<'data> = EndianSlice<'data, LittleEndian>;
type Unit<'data> = gimli::Unit<Slice<'data>>;
type Entry<'data> = DebuggingInformationEntry<Slice<'data>>;

/// Returns the types named in `wanted` as BTF, or `None` if the file defines none of them.
/// `section` returns the bytes of a section by its name.
///
/// # Errors
/// [`Error`] if the DWARF is damaged.
pub(crate) fn types<'data>(
    section: impl Fn(&str) -> &'data [u8],
    wanted: &[&str],
) -> Result<Option<Vec<u8>>, Error> {
    let dwarf = Dwarf::load(|id| Ok::<_, Error>(Slice::new(section(id.name()), LittleEndian)))?;
    let mut writer = Writer {
        dwarf: &dwarf,
        types: Vec::new(),
        strings: vec![0],
        count: 0,
        written: HashMap::new(),
    };
    // Each unit that includes a header file repeats the types of that file. Of the types with the
    // same name, one of each size is kept.
    let mut known: HashSet<(&[u8], Option<u64>)> = HashSet::new();
    let mut left = MAX_ENTRIES;
    let mut units = dwarf.units();
    while let Some(header) = units.next()? {
        let unit = dwarf.unit(header)?;
        let mut definitions = Vec::new();
        let mut cursor = unit.entries();
        cursor.next_dfs()?;
        let mut next = cursor.next_dfs()?;
        while let Some(entry) = next.filter(|entry| entry.depth() == 1 && left > 0) {
            left -= 1;
            let is_type = matches!(
                entry.tag(),
                dw::DW_TAG_structure_type | dw::DW_TAG_union_type | dw::DW_TAG_enumeration_type
            );
            if is_type
                && !entry.has_attr(dw::DW_AT_declaration)
                && let Some(name) = name(&dwarf, &unit, entry)?
                && wanted.iter().any(|wanted| wanted.as_bytes() == name)
                && known.len() < MAX_DEFINITIONS
                && known.insert((name, number(entry, dw::DW_AT_byte_size)))
            {
                definitions.push(entry.offset());
            }
            next = cursor.next_sibling()?;
        }
        writer.written.clear();
        for offset in definitions {
            writer.write(&unit, offset, MAX_DEPTH)?;
        }
    }
    Ok((!known.is_empty()).then(|| writer.finish()))
}

fn number(entry: &Entry<'_>, attribute: gimli::DwAt) -> Option<u64> {
    entry.attr(attribute)?.udata_value()
}

fn name<'data>(
    dwarf: &Dwarf<Slice<'data>>,
    unit: &Unit<'data>,
    entry: &Entry<'data>,
) -> Result<Option<&'data [u8]>, Error> {
    match entry.attr_value(dw::DW_AT_name) {
        Some(value) => Ok(Some(dwarf.attr_string(unit, value)?.slice())),
        None => Ok(None),
    }
}

/// Returns the offset of the entry's type in the same unit.
fn type_of(entry: &Entry<'_>) -> Option<UnitOffset> {
    match entry.attr_value(dw::DW_AT_type)? {
        AttributeValue::UnitRef(offset) => Some(offset),
        _ => None,
    }
}

fn children<'data>(unit: &Unit<'data>, offset: UnitOffset) -> Result<Vec<Entry<'data>>, Error> {
    let mut cursor = unit.entries_at_offset(offset)?;
    let mut children = Vec::new();
    if cursor.next_dfs()?.is_none_or(|entry| !entry.has_children()) {
        return Ok(children);
    }
    let mut next = cursor.next_dfs()?;
    while let Some(entry) = next.filter(|entry| entry.depth() == 1) {
        if children.len() == MAX_MEMBERS {
            break;
        }
        children.push(entry.clone());
        next = cursor.next_sibling()?;
    }
    Ok(children)
}

/// Returns the offset of a member as BTF encodes it: the bit at which it begins, with the width of
/// a bit field in the upper byte. Returns `None` if BTF cannot express the offset or the width.
fn place(entry: &Entry<'_>) -> Option<u32> {
    let width = number(entry, dw::DW_AT_bit_size).unwrap_or(0);
    let bits = match entry.attr(dw::DW_AT_data_bit_offset) {
        Some(offset) => offset.udata_value()?,
        None => {
            let bytes = match entry.attr(dw::DW_AT_data_member_location) {
                Some(location) => location.udata_value()?,
                None => 0,
            };
            // Before DWARF 4, bits were counted from the upper end of the integer that holds them.
            let skipped = match entry.attr(dw::DW_AT_bit_offset) {
                Some(offset) => {
                    let holder = number(entry, dw::DW_AT_byte_size)?.checked_mul(8)?;
                    let behind = offset.udata_value()?.checked_add(width)?;
                    holder.checked_sub(behind)?
                }
                None => 0,
            };
            bytes.checked_mul(8)?.checked_add(skipped)?
        }
    };
    let fits = bits <= 0xff_ffff && width <= 0xff;
    fits.then_some((width as u32) << 24 | bits as u32)
}

/// Writes types as BTF.
struct Writer<'dwarf, 'data> {
    dwarf: &'dwarf Dwarf<Slice<'data>>,
    types: Vec<u8>,
    strings: Vec<u8>,
    count: u32,
    /// Numbers of the types of the current unit that were written.
    written: HashMap<UnitOffset, u32>,
}

impl<'data> Writer<'_, 'data> {
    /// Writes a type after the types that it contains. Returns its number.
    fn write(&mut self, unit: &Unit<'data>, offset: UnitOffset, depth: u32) -> Result<u32, Error> {
        if let Some(number) = self.written.get(&offset) {
            return Ok(*number);
        }
        let room = self.count < MAX_TYPES && self.types.len() < MAX_BYTES;
        let Some(inner) = depth.checked_sub(1).filter(|_| room) else {
            return Ok(VOID);
        };
        let entry = unit.entry(offset)?;
        let size = number(&entry, dw::DW_AT_byte_size);
        let size = size.and_then(|size| size.try_into().ok()).unwrap_or(0);
        let number = match entry.tag() {
            dw::DW_TAG_pointer_type => self.record(&[], POINTER, 0, &[]),
            dw::DW_TAG_structure_type | dw::DW_TAG_union_type => {
                self.structure(unit, &entry, size, inner)?
            }
            dw::DW_TAG_enumeration_type => self.enumeration(unit, &entry, size)?,
            dw::DW_TAG_array_type => self.array(unit, &entry, inner)?,
            dw::DW_TAG_typedef
            | dw::DW_TAG_const_type
            | dw::DW_TAG_volatile_type
            | dw::DW_TAG_restrict_type
            | dw::DW_TAG_atomic_type => match type_of(&entry) {
                Some(of_type) => self.write(unit, of_type, inner)?,
                None => self.opaque(0),
            },
            _ => self.opaque(size),
        };
        self.written.insert(offset, number);
        Ok(number)
    }

    fn structure(
        &mut self,
        unit: &Unit<'data>,
        entry: &Entry<'data>,
        size: u32,
        depth: u32,
    ) -> Result<u32, Error> {
        let mut members = Vec::new();
        for member in children(unit, entry.offset())? {
            if member.tag() == dw::DW_TAG_member
                && let Some(of_type) = type_of(&member)
                && let Some(place) = place(&member)
            {
                let name = name(self.dwarf, unit, &member)?.unwrap_or_default();
                let name = self.string(name);
                members.extend([name, self.write(unit, of_type, depth)?, place]);
            }
        }
        let name = name(self.dwarf, unit, entry)?.unwrap_or_default();
        let info = STRUCTURE | (members.len() / 3) as u32;
        Ok(self.record(name, info, size, &members))
    }

    fn enumeration(
        &mut self,
        unit: &Unit<'data>,
        entry: &Entry<'data>,
        size: u32,
    ) -> Result<u32, Error> {
        let mut values = Vec::new();
        for value in children(unit, entry.offset())? {
            let number = value.attr(dw::DW_AT_const_value).and_then(|value| {
                let unsigned = value.udata_value().map(|value| value as u32);
                unsigned.or_else(|| value.sdata_value().map(|value| value as u32))
            });
            if let Some(name) = name(self.dwarf, unit, &value)?
                && let Some(number) = number
            {
                values.extend([self.string(name), number]);
            }
        }
        let name = name(self.dwarf, unit, entry)?.unwrap_or_default();
        let info = ENUMERATION | (values.len() / 2) as u32;
        Ok(self.record(name, info, size, &values))
    }

    /// Writes an array type, with all dimensions combined into one. Returns its number.
    fn array(
        &mut self,
        unit: &Unit<'data>,
        entry: &Entry<'data>,
        depth: u32,
    ) -> Result<u32, Error> {
        let mut count = 1_u64;
        for range in children(unit, entry.offset())? {
            let own = number(&range, dw::DW_AT_count).or_else(|| {
                number(&range, dw::DW_AT_upper_bound).and_then(|last| last.checked_add(1))
            });
            count = count.saturating_mul(own.unwrap_or(0));
        }
        let element = match type_of(entry) {
            Some(of_type) => self.write(unit, of_type, depth)?,
            None => self.opaque(0),
        };
        let count = u32::try_from(count).unwrap_or(0);
        Ok(self.record(&[], ARRAY, 0, &[element, element, count]))
    }

    /// Writes a type of which only the size is known. Returns its number.
    fn opaque(&mut self, size: u32) -> u32 {
        self.record(&[], INT, size, &[0])
    }

    fn string(&mut self, name: &[u8]) -> u32 {
        if name.is_empty() || self.strings.len() + name.len() >= MAX_BYTES {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend_from_slice(name);
        self.strings.push(0);
        at
    }

    fn record(&mut self, name: &[u8], info: u32, size: u32, rest: &[u32]) -> u32 {
        let name = self.string(name);
        for word in [name, info, size].iter().chain(rest) {
            self.types.extend_from_slice(&word.to_le_bytes());
        }
        self.count += 1;
        self.count
    }

    fn finish(self) -> Vec<u8> {
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        let header = [0x0001_eb9f, 24, 0, types, types, strings];
        let mut out: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
        out.extend(self.types);
        out.extend(self.strings);
        out
    }
}
