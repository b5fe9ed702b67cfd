// SPDX-License-Identifier: Apache-2.0
//! The type information (BTF) that a kernel contains: offsets of members, sizes of structures,
//! values of enumerators.
//!
//! The format is that of Documentation/bpf/btf.rst. Its types are numbered from 1 in the order in
//! which they are stored. Each type is a header of three words, followed by the data of its kind. A
//! module's type information is *split*: its type numbers and string offsets continue those of the
//! kernel's type information, and it refers to the kernel's types and strings.
//!
//! The bytes are not trusted: every read is checked, and the depth of nesting is limited.

/// The first two bytes of BTF.
const MAGIC: u16 = 0xeb9f;
/// The maximum number of types; a distribution kernel has 130,000.
const MAX_TYPES: usize = 1 << 21;
/// The maximum number of types that are remembered by name.
const MAX_NAMED: usize = 256;
/// The maximum depth to which type modifiers, arrays of arrays and anonymous members are followed.
const MAX_DEPTH: u32 = 16;
/// The maximum number of members examined for one name; `struct task_struct` has 300.
const MAX_VISITS: u32 = 4096;

const KIND_INT: u32 = 1;
const KIND_PTR: u32 = 2;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_TYPE_TAG: u32 = 18;

/// The reason why type information cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The data is not BTF, or has another version.
    #[error("it does not begin with the header of BTF version 1")]
    Header,
    /// A section or a type extends past the end of the data.
    #[error("it ends within a type or a section")]
    Truncated,
    /// The kind of a type is unknown, so its size is unknown too.
    #[error("type {number} is of the unknown kind {kind}")]
    Kind {
        /// Number of the type.
        number: usize,
        /// The unknown kind.
        kind: u32,
    },
    /// There are more types than any kernel has.
    #[error("it has more than {MAX_TYPES} types")]
    TooMany,
}

/// Type information.
#[derive(Debug)]
pub struct Btf<'data> {
    /// The type information that this one continues.
    base: Option<&'data Btf<'data>>,
    types: &'data [u8],
    strings: &'data [u8],
    /// Offset of the header of each type that is not the base's, in the order of the type numbers.
    offsets: Vec<u32>,
    /// Structures, unions and enumerations with one of the wanted names: {name, number}.
    named: Vec<(&'data [u8], u32)>,
}

/// A type's header.
#[derive(Clone, Copy)]
struct Type<'data> {
    /// The type section that contains this type.
    types: &'data [u8],
    name: u32,
    kind: u32,
    /// Number of members, enumerators or parameters.
    count: u32,
    flag: bool,
    /// A size or the number of another type.
    size_or_type: u32,
    /// Offset of the data of the type's kind, which follows the header.
    rest: usize,
}

/// A member of a structure or union.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Offset in bytes, rounded down for a bit field.
    pub offset: u32,
    /// Number of bits between `offset` and the start of a bit field.
    pub shift: u32,
    /// Width of a bit field in bits; 0 for other members.
    pub width: u32,
    /// Number of its type.
    pub of_type: u32,
}

impl patchbay_observe::Types for Btf<'_> {
    fn member(&self, structure: &str, path: &[&str]) -> Option<patchbay_observe::Member> {
        let member = self.member(structure, path)?;
        Some(patchbay_observe::Member {
            offset: member.offset,
            shift: member.shift,
            width: member.width,
            size: self.size_of_member(member),
        })
    }

    fn size(&self, structure: &str) -> Option<u32> {
        self.size(structure)
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl<'data> Btf<'data> {
    /// Reads the types and remembers those structures, unions and enumerations that are named in
    /// `wanted`.
    ///
    /// # Errors
    /// [`BtfError`].
    pub fn parse(data: &'data [u8], wanted: &[&str]) -> Result<Self, BtfError> {
        Self::parse_on(None, data, wanted)
    }

    /// Reads a module's types, which continue those of its kernel. Names are looked up in the
    /// module first, then in the kernel.
    ///
    /// # Errors
    /// [`BtfError`].
    pub fn parse_split(
        base: &'data Btf<'data>,
        data: &'data [u8],
        wanted: &[&str],
    ) -> Result<Self, BtfError> {
        Self::parse_on(Some(base), data, wanted)
    }

    fn parse_on(
        base: Option<&'data Btf<'data>>,
        data: &'data [u8],
        wanted: &[&str],
    ) -> Result<Self, BtfError> {
        let header = |at| word(data, at).ok_or(BtfError::Header);
        if header(0)? & 0xff_ffff != u32::from(MAGIC) | 1 << 16 {
            return Err(BtfError::Header);
        }
        let length = header(4)? as usize;
        let section = |offset: u32, size: u32| {
            let start = length.checked_add(offset as usize)?;
            data.get(start..)?.get(..size as usize)
        };
        let types = section(header(8)?, header(12)?).ok_or(BtfError::Truncated)?;
        let strings = section(header(16)?, header(20)?).ok_or(BtfError::Truncated)?;
        let mut btf = Self {
            base,
            types,
            strings,
            offsets: Vec::new(),
            named: Vec::new(),
        };
        let mut at = 0;
        while at < types.len() {
            if btf.offsets.len() == MAX_TYPES {
                return Err(BtfError::TooMany);
            }
            let number = btf.first_number() + btf.offsets.len();
            let header = btf.header_at(at).ok_or(BtfError::Truncated)?;
            let next = header
                .rest
                .checked_add(header.extra().ok_or(BtfError::Kind {
                    number,
                    kind: header.kind,
                })?)
                .filter(|next| *next <= types.len())
                .ok_or(BtfError::Truncated)?;
            if matches!(header.kind, KIND_STRUCT | KIND_UNION | KIND_ENUM)
                && btf.named.len() < MAX_NAMED
                && let Some(name) = btf.string(header.name)
                && wanted.iter().any(|wanted| wanted.as_bytes() == name)
            {
                btf.named.push((name, number as u32));
            }
            btf.offsets.push(at as u32);
            at = next;
        }
        Ok(btf)
    }

    /// Returns the number of the first type that is not the base's.
    fn first_number(&self) -> usize {
        self.base
            .map_or(1, |base| base.first_number() + base.offsets.len())
    }

    /// Returns the offset of the first string that is not the base's.
    fn first_string(&self) -> usize {
        self.base
            .map_or(0, |base| base.first_string() + base.strings.len())
    }

    fn header_at(&self, at: usize) -> Option<Type<'data>> {
        let info = word(self.types, at + 4)?;
        Some(Type {
            types: self.types,
            name: word(self.types, at)?,
            kind: info >> 24 & 0x1f,
            count: info & 0xffff,
            flag: info >> 31 != 0,
            size_or_type: word(self.types, at + 8)?,
            rest: at + 12,
        })
    }

    fn header(&self, number: u32) -> Option<Type<'data>> {
        match (number as usize).checked_sub(self.first_number()) {
            Some(index) => self.header_at(*self.offsets.get(index)? as usize),
            None => self.base?.header(number),
        }
    }

    fn string(&self, offset: u32) -> Option<&'data [u8]> {
        let Some(own) = (offset as usize).checked_sub(self.first_string()) else {
            return self.base?.string(offset);
        };
        let rest = self.strings.get(own..)?;
        let length = rest.iter().take(512).position(|byte| *byte == 0)?;
        Some(&rest[..length])
    }

    /// Returns the types with this name, those of the base last.
    fn named(&self, name: &str) -> impl Iterator<Item = u32> {
        let base = self.base.map_or(&[][..], |base| &base.named);
        let all = self.named.iter().chain(base);
        all.filter(move |(named, _)| *named == name.as_bytes())
            .map(|(_, number)| *number)
    }

    /// Returns the offset of a member of a structure, in bytes. Each further name in `path` names a
    /// member of the previous member. Members of anonymous structures and unions count as members
    /// of the outer structure.
    pub fn offset(&self, structure: &str, path: &[&str]) -> Option<u32> {
        self.member(structure, path).map(|member| member.offset)
    }

    /// Like [`Btf::offset`], but returns the whole member, with its type.
    pub fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
        self.named(structure)
            .find_map(|number| self.member_of(number, path))
    }

    /// Returns a member of the type with the number `structure`.
    pub fn member_of(&self, structure: u32, path: &[&str]) -> Option<Member> {
        let mut found = Member {
            offset: 0,
            shift: 0,
            width: 0,
            of_type: structure,
        };
        for name in path {
            let mut budget = MAX_VISITS;
            let inner = self.find(
                self.plain(found.of_type)?,
                name.as_bytes(),
                MAX_DEPTH,
                &mut budget,
            )?;
            found = Member {
                offset: found.offset.checked_add(inner.offset)?,
                ..inner
            };
        }
        Some(found)
    }

    fn find(&self, structure: u32, name: &[u8], depth: u32, budget: &mut u32) -> Option<Member> {
        let header = self.header(structure)?;
        if !matches!(header.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        for index in 0..header.count as usize {
            *budget = budget.checked_sub(1)?;
            let at = header.rest + 12 * index;
            let of_type = word(header.types, at + 4)?;
            let bits = word(header.types, at + 8)?;
            // If the flag is set, the upper byte is the size of a bit field.
            let (width, bits) = match header.flag {
                true => (bits >> 24, bits & 0xff_ffff),
                false => (0, bits),
            };
            let (member, offset) = (self.string(word(header.types, at)?)?, bits / 8);
            if member == name {
                return Some(Member {
                    offset,
                    shift: bits % 8,
                    width,
                    of_type,
                });
            }
            // Each visited member counts against the budget, so the search ends even in a structure
            // that contains itself.
            if member.is_empty()
                && depth > 0
                && let Some(inner) = self
                    .plain(of_type)
                    .and_then(|inner| self.find(inner, name, depth - 1, budget))
            {
                return Some(Member {
                    offset: offset.checked_add(inner.offset)?,
                    ..inner
                });
            }
        }
        None
    }

    /// Returns the type behind typedefs and qualifiers.
    fn plain(&self, mut number: u32) -> Option<u32> {
        for _ in 0..MAX_DEPTH {
            let header = self.header(number)?;
            if !matches!(
                header.kind,
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG
            ) {
                return Some(number);
            }
            number = header.size_or_type;
        }
        None
    }

    /// Returns the size of a structure, in bytes.
    pub fn size(&self, structure: &str) -> Option<u32> {
        self.named(structure)
            .find_map(|number| self.size_of(number, MAX_DEPTH))
    }

    /// Returns the size of a type, in bytes.
    pub fn size_of_member(&self, member: Member) -> Option<u32> {
        self.size_of(member.of_type, MAX_DEPTH)
    }

    fn size_of(&self, number: u32, depth: u32) -> Option<u32> {
        let header = self.header(self.plain(number)?)?;
        match header.kind {
            KIND_PTR => Some(8),
            KIND_INT | KIND_STRUCT | KIND_UNION | KIND_ENUM => Some(header.size_or_type),
            KIND_ARRAY if depth > 0 => {
                let element = word(header.types, header.rest)?;
                let count = word(header.types, header.rest + 8)?;
                self.size_of(element, depth - 1)?.checked_mul(count)
            }
            _ => None,
        }
    }

    /// Returns the value of an enumerator.
    pub fn enumerator(&self, enumeration: &str, name: &str) -> Option<u32> {
        self.named(enumeration).find_map(|number| {
            let header = self.header(number)?;
            (header.kind == KIND_ENUM).then_some(())?;
            (0..header.count as usize).find_map(|index| {
                let at = header.rest + 8 * index;
                let found = self.string(word(header.types, at)?)?;
                (found == name.as_bytes()).then(|| word(header.types, at + 4))?
            })
        })
    }
}

impl Type<'_> {
    /// Returns the size of the data after the header, in bytes; `None` if the kind is unknown.
    fn extra(&self) -> Option<usize> {
        let count = self.count as usize;
        Some(match self.kind {
            // Int, variable, tag of a declaration.
            1 | 14 | 17 => 4,
            KIND_ARRAY => 12,
            // Structures, unions, data sections, enumerations of 64 bits.
            4 | 5 | 15 | 19 => 12 * count,
            // Enumerations, parameters.
            6 | 13 => 8 * count,
            // Pointers, forward declarations, typedefs, qualifiers, functions, floats, tags.
            2 | 7..=12 | 16 | 18 => 0,
            _ => return None,
        })
    }
}
