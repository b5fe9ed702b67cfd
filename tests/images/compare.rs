// SPDX-License-Identifier: Apache-2.0
//! Compares two images section by section, byte for byte, and function by function, ignoring
//! addresses. An address is ignored only if it means the same in both images: the same offset from
//! the same symbol or, if it has no name (such as the address of a string), the same content.

use std::collections::HashMap;
use std::fmt;

use anyhow::Result;
use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind, Register};

use super::image::{Function, Image, Section, Symbol};

/// The number of bytes that are compared where an address has no name.
const CONTENT: usize = 64;

/// The section with unnamed code that functions jump to and that jumps back.
const ASIDE: &str = ".altinstr_aux";

/// The maximum number of instructions between such a jump and the jump back. Kernels have three at
/// present.
const ASIDE_INSTRUCTIONS: usize = 8;

/// A function's name, and the difference.
pub type Changed = (String, Difference);

/// A section with code of the first image, compared with that of the second.
#[derive(Debug)]
pub struct SectionPair<'image> {
    /// The section's name.
    pub name: &'image str,
    /// The section's size in the first image.
    pub size: u64,
    /// The section has the same address and the same bytes in both.
    pub identical: bool,
}

/// The difference between two functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// Only the first image has it.
    Gone,
    /// Only the second image has it.
    New,
    /// The first instructions that differ; `None` where one function has ended.
    Instruction(Option<String>, Option<String>),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |side: &Option<String>| side.clone().unwrap_or_else(|| "the end".into());
        match self {
            Self::Gone => f.write_str("gone"),
            Self::New => f.write_str("new"),
            Self::Instruction(a, b) => write!(f, "{} became {}", text(a), text(b)),
        }
    }
}

/// The result of comparing the functions.
#[derive(Debug, Default)]
pub struct Comparison {
    /// The number of branch sites in the first and in the second image.
    pub sites: [usize; 2],
    /// The number of sites outside all functions of the image.
    pub elsewhere: [usize; 2],
    /// The number of functions that hold sites in the first image.
    pub with_sites: usize,
    /// The number of functions of the first image.
    pub functions: usize,
    /// Functions with sites that differ.
    pub changed_with_sites: Vec<Changed>,
    /// All other functions that differ.
    pub changed: Vec<Changed>,
}

/// Compares the sections with code, by name.
pub fn sections<'image>(first: &'image Image, second: &'image Image) -> Vec<SectionPair<'image>> {
    let of = |image: &'image Image| image.sections().iter().filter(|section| section.code);
    let pair = |section: &'image Section| SectionPair {
        name: &section.name,
        size: section.size,
        identical: of(second).any(|other| other == section),
    };
    let mut pairs: Vec<_> = of(first).map(pair).collect();
    let new = of(second).filter(|section| of(first).all(|other| other.name != section.name));
    pairs.extend(new.map(|section| SectionPair {
        name: &section.name,
        size: 0,
        identical: false,
    }));
    pairs
}

/// Compares all functions.
pub fn functions(first: &Image, second: &Image) -> Result<Comparison> {
    let images = [first, second];
    let of = images.map(Image::functions);
    let [first_sites, second_sites] = [first.sites()?, second.sites()?];
    let mut found = Comparison {
        sites: [&first_sites, &second_sites]
            .map(|(sites, elsewhere)| sites.values().sum::<usize>() + elsewhere),
        elsewhere: [first_sites.1, second_sites.1],
        with_sites: first_sites.0.len(),
        functions: of[0].len(),
        ..Comparison::default()
    };
    let mut add = |function: &Function<'_>, has_sites: bool, difference| {
        let list = if has_sites {
            &mut found.changed_with_sites
        } else {
            &mut found.changed
        };
        list.push((function.identity.0.to_owned(), difference));
    };
    let mut others: HashMap<_, _> = of[1].iter().map(|f| (f.identity, f)).collect();
    for function in &of[0] {
        let has_sites = first_sites.0.contains_key(&function.address);
        let Some(other) = others.remove(&function.identity) else {
            add(function, has_sites, Difference::Gone);
            continue;
        };
        if let Some(difference) = difference(images, [function, other]) {
            add(function, has_sites, difference);
        }
    }
    for function in &of[1] {
        if others.contains_key(&function.identity) {
            add(function, false, Difference::New);
        }
    }
    Ok(found)
}

fn difference(images: [&Image; 2], functions: [&Function<'_>; 2]) -> Option<Difference> {
    let mut decoders = functions.map(|function| {
        Decoder::with_ip(64, function.bytes, function.address, DecoderOptions::NONE)
    });
    loop {
        let next = [0, 1].map(|side| {
            let decoder = &mut decoders[side];
            decoder.can_decode().then(|| decoder.decode())
        });
        match next {
            [None, None] => return None,
            [Some(a), Some(b)] if same(images, functions, [&a, &b]) => {}
            [a, b] => {
                return Some(Difference::Instruction(
                    a.map(|a| text(images[0], &a)),
                    b.map(|b| text(images[1], &b)),
                ));
            }
        }
    }
}

/// Returns whether two instructions are the same, ignoring addresses that mean the same in both
/// images.
fn same(images: [&Image; 2], functions: [&Function<'_>; 2], pair: [&Instruction; 2]) -> bool {
    let [a, b] = [0, 1].map(|side| take_addresses(images[side], pair[side]));
    let inside = |side: usize, address: u64| {
        let function = functions[side];
        let offset = address.wrapping_sub(function.address);
        (offset < function.bytes.len() as u64).then_some(offset)
    };
    let alike = |(&a, &b): (&u64, &u64)| match (inside(0, a), inside(1, b)) {
        (None, None) => {
            same_place(images, [a, b])
                || same_aside(images, functions, [a, b])
                || same_switch(images, functions, [a, b])
                || (is_number(pair[0]) && is_number(pair[1]) && same_number(images, [a, b]))
        }
        offsets => offsets.0 == offsets.1,
    };
    a.rest == b.rest
        && pair[0].len() == pair[1].len()
        && a.addresses.len() == b.addresses.len()
        && a.addresses.iter().zip(&b.addresses).all(alike)
}

fn is_number(instruction: &Instruction) -> bool {
    let mut kinds = (0..instruction.op_count()).map(|operand| instruction.op_kind(operand));
    kinds.any(|kind| matches!(kind, OpKind::Immediate32to64 | OpKind::Immediate64))
}

/// Returns whether two numbers that look like addresses are equal masks. A mask is the same number
/// in both images, and no symbol begins at that address.
fn same_number(images: [&Image; 2], numbers: [u64; 2]) -> bool {
    let [a, b] = numbers;
    a == b && images.iter().all(|image| image.names(a).1 != 0)
}

/// Returns whether the jump tables of two `switch` statements lead to the same places. The tables
/// have no names. Their addresses are in the function itself or in its `.cold` part, and a table
/// ends at the first address outside of both.
fn same_switch(images: [&Image; 2], functions: [&Function<'_>; 2], tables: [u64; 2]) -> bool {
    let words = [0, 1].map(|side| {
        let words = images[side].bytes(tables[side]).chunks_exact(8);
        words.map(|word| {
            word.iter()
                .rev()
                .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
        })
    });
    let own = |side: usize, address: u64| {
        let function = functions[side];
        let (symbols, _) = images[side].names(address);
        let unlikely = format!("{}.cold", function.identity.0);
        address.wrapping_sub(function.address) < function.bytes.len() as u64
            || symbols.iter().any(|symbol| symbol.name == unlikely)
    };
    let [first, second] = words;
    let mut places = first
        .zip(second)
        .take_while(|&(a, b)| own(0, a) || own(1, b))
        .peekable();
    let offset = |side: usize, address: u64| address.wrapping_sub(functions[side].address);
    places.peek().is_some()
        && places.all(|(a, b)| offset(0, a) == offset(1, b) || same_place(images, [a, b]))
}

/// Returns whether two functions jump to equal code in the section [`ASIDE`], such as that of
/// `static_cpu_has()` before alternatives are applied. This code has no name and jumps back.
fn same_aside(images: [&Image; 2], functions: [&Function<'_>; 2], addresses: [u64; 2]) -> bool {
    let in_aside = |side: usize| {
        let section = images[side].section(addresses[side]);
        section.is_some_and(|section| section.name == ASIDE)
    };
    if !in_aside(0) || !in_aside(1) {
        return false;
    }
    let mut decoders = [0, 1].map(|side| {
        let bytes = images[side].bytes(addresses[side]);
        Decoder::with_ip(64, bytes, addresses[side], DecoderOptions::NONE)
    });
    for _ in 0..ASIDE_INSTRUCTIONS {
        let [a, b] = [0, 1].map(|side| decoders[side].decode());
        // Code that jumps within this section counts as different, so that the recursion ends.
        let stays = [(0, &a), (1, &b)].iter().any(|(side, instruction)| {
            let target = images[*side].section(instruction.near_branch64());
            instruction.is_jcc_short_or_near() | instruction.is_jmp_short_or_near()
                && target.is_some_and(|section| section.name == ASIDE)
        });
        if a.is_invalid() || stays || !same(images, functions, [&a, &b]) {
            return false;
        }
        if a.is_jmp_short_or_near() {
            return true;
        }
    }
    false
}

/// An instruction, and the addresses that were removed from it.
struct Apart {
    rest: Instruction,
    addresses: Vec<u64>,
}

fn take_addresses(image: &Image, instruction: &Instruction) -> Apart {
    let mut rest = *instruction;
    let mut addresses = Vec::new();
    for operand in 0..instruction.op_count() {
        match instruction.op_kind(operand) {
            OpKind::NearBranch64 => {
                addresses.push(instruction.near_branch64());
                rest.set_near_branch64(0);
            }
            OpKind::Memory => {
                let address = instruction.memory_displacement64();
                let certain = instruction.is_ip_rel_memory_operand();
                // Per-CPU variables have small addresses, because their section begins at 0.
                let per_cpu = instruction.segment_prefix() == Register::GS
                    && image.section(address).is_some();
                if certain || per_cpu || image.is_high(address) {
                    addresses.push(address);
                    rest.set_memory_displacement64(0);
                }
            }
            OpKind::Immediate32to64 | OpKind::Immediate64 => {
                let address = instruction.immediate(operand);
                if image.is_high(address) {
                    addresses.push(address);
                    match instruction.op_kind(operand) {
                        OpKind::Immediate64 => rest.set_immediate64(0),
                        _ => rest.set_immediate32to64(0),
                    }
                }
            }
            _ => {}
        }
    }
    Apart { rest, addresses }
}

/// Returns whether two addresses mean the same, each in its image.
fn same_place(images: [&Image; 2], addresses: [u64; 2]) -> bool {
    let [a, b] = [0, 1].map(|side| Place::of(images[side], addresses[side]));
    let named = |symbol: &Symbol, other: &Symbol| {
        (&symbol.name, &symbol.file) == (&other.name, &other.file)
    };
    let share_a_name = |a: &[Symbol], b: &[Symbol]| {
        a.iter()
            .any(|symbol| b.iter().any(|other| named(symbol, other)))
    };
    let same_content = a.section == b.section && a.content == b.content;
    if share_a_name(a.symbols, b.symbols) && a.offset == b.offset {
        return a.named && b.named || same_content;
    }
    if !a.in_code && !b.in_code && !a.content.is_empty() && same_content {
        return true;
    }
    // The address may be the last byte before a symbol.
    let [(a, before_a), (b, before_b)] =
        [0, 1].map(|side| images[side].names(addresses[side].wrapping_add(1)));
    (before_a, before_b) == (0, 0) && share_a_name(a, b)
}

/// The content of an image at an address.
struct Place<'image> {
    symbols: &'image [Symbol],
    offset: u64,
    /// A symbol covers the address.
    named: bool,
    section: &'image str,
    in_code: bool,
    /// The bytes at the address: at most [`CONTENT`], and no further than the first NUL.
    content: &'image [u8],
}

impl<'image> Place<'image> {
    fn of(image: &'image Image, address: u64) -> Self {
        let (symbols, offset) = image.names(address);
        let section = image.section(address);
        let bytes = image.bytes(address);
        let bytes = &bytes[..bytes.len().min(CONTENT)];
        let end = bytes.iter().position(|&byte| byte == 0);
        Self {
            symbols,
            offset,
            named: offset == 0 || symbols.iter().any(|symbol| offset < symbol.size),
            section: section.map_or("", |section| &section.name),
            in_code: section.is_some_and(|section| section.code),
            content: end.map_or(bytes, |end| &bytes[..=end]),
        }
    }
}

/// Formats an instruction with names for its addresses.
fn text(image: &Image, instruction: &Instruction) -> String {
    let mut text = format!("`{instruction}`");
    for address in take_addresses(image, instruction).addresses {
        let (symbols, offset) = image.names(address);
        if let Some(symbol) = symbols.first() {
            text.push_str(&format!(" <{}+{offset:#x}>", symbol.name));
        }
    }
    text
}
