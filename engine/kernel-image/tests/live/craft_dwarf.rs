// SPDX-License-Identifier: Apache-2.0
//! The types of a small BTF as DWARF 5, which is what a compiler writes.

/// An abbreviation: a tag, 1 if it has children, and pairs of {attribute, form}.
type Abbreviation = (u8, u8, &'static [(u8, u8)]);

/// The abbreviations, numbered from 1.
const ABBREVIATIONS: &[Abbreviation] = &[
    (0x11, 1, &[]),
    (0x24, 0, &[(0x0b, 6)]),
    (0x0f, 0, &[]),
    (0x01, 1, &[(0x49, 0x13)]),
    (0x21, 0, &[(0x37, 6)]),
    (0x13, 1, &[(0x03, 8), (0x0b, 6)]),
    // A member with its offset in bits and the width of a bit field.
    (0x0d, 0, &[(0x03, 8), (0x49, 0x13), (0x6b, 6), (0x0d, 0x0b)]),
    // A member with its offset in bytes.
    (0x0d, 0, &[(0x03, 8), (0x49, 0x13), (0x38, 6)]),
    (0x04, 1, &[(0x03, 8), (0x0b, 6)]),
    (0x28, 0, &[(0x03, 8), (0x1c, 6)]),
];
const UNIT: u8 = 1;
const BASE: u8 = 2;
const POINTER: u8 = 3;
const ARRAY: u8 = 4;
const RANGE: u8 = 5;
const STRUCTURE: u8 = 6;
const BIT_FIELD: u8 = 7;
const MEMBER: u8 = 8;
const ENUMERATION: u8 = 9;
const ENUMERATOR: u8 = 10;

struct Info {
    bytes: Vec<u8>,
    /// Positions at which `bytes` holds the number of a type instead of the offset of its entry.
    references: Vec<usize>,
}

impl Info {
    fn word(&mut self, word: u32) {
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
    }

    fn reference(&mut self, number: u32) {
        self.references.push(self.bytes.len());
        self.word(number);
    }
}

/// Returns the sections `.debug_info` and `.debug_abbrev`.
pub fn dwarf(btf: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let word = |at: usize| u32::from_le_bytes(*btf[at..].first_chunk().unwrap());
    let (types, strings) = (24, 24 + word(12) as usize);
    let text = |at: usize| {
        let rest = &btf[strings + word(at) as usize..];
        rest.split(|byte| *byte == 0).next().unwrap()
    };
    let mut info = Info {
        bytes: Vec::new(),
        references: Vec::new(),
    };
    // Length, version 5, compilation unit, 8 bytes per address, abbreviations at 0.
    info.word(0);
    info.bytes
        .extend_from_slice(&[5, 0, 1, 8, 0, 0, 0, 0, UNIT]);
    let mut entries = vec![0];
    let mut at = types;
    while at < strings {
        entries.push(info.bytes.len() as u32);
        let (head, size) = (word(at + 4), word(at + 8));
        let (count, flag) = (head as usize & 0xffff, head >> 31 != 0);
        let rest = at + 12;
        match head >> 24 & 0x1f {
            1 => {
                info.bytes.push(BASE);
                info.word(size);
                at = rest + 4;
            }
            2 => {
                info.bytes.push(POINTER);
                at = rest;
            }
            3 => {
                info.bytes.push(ARRAY);
                info.reference(word(rest));
                info.bytes.push(RANGE);
                info.word(word(rest + 8));
                info.bytes.push(0);
                at = rest + 12;
            }
            4 => {
                info.bytes.push(STRUCTURE);
                info.text(text(at));
                info.word(size);
                for member in (rest..).step_by(12).take(count) {
                    let bits = word(member + 8);
                    let width = if flag { bits >> 24 } else { 0 };
                    info.bytes.push(if width > 0 { BIT_FIELD } else { MEMBER });
                    info.text(text(member));
                    info.reference(word(member + 4));
                    if width > 0 {
                        info.word(bits & 0xff_ffff);
                        info.bytes.push(width as u8);
                    } else {
                        info.word(bits / 8);
                    }
                }
                info.bytes.push(0);
                at = rest + 12 * count;
            }
            6 => {
                info.bytes.push(ENUMERATION);
                info.text(text(at));
                info.word(size);
                for value in (rest..).step_by(8).take(count) {
                    info.bytes.push(ENUMERATOR);
                    info.text(text(value));
                    info.word(word(value + 4));
                }
                info.bytes.push(0);
                at = rest + 8 * count;
            }
            kind => panic!("{kind}"),
        }
    }
    info.bytes.push(0);
    for at in &info.references {
        let number = u32::from_le_bytes(*info.bytes[*at..].first_chunk().unwrap());
        let entry = entries[number as usize].to_le_bytes();
        info.bytes[*at..*at + 4].copy_from_slice(&entry);
    }
    let length = info.bytes.len() as u32 - 4;
    info.bytes[..4].copy_from_slice(&length.to_le_bytes());
    let mut abbreviations = Vec::new();
    for (code, (tag, children, attributes)) in (1..).zip(ABBREVIATIONS) {
        abbreviations.extend_from_slice(&[code, *tag, *children]);
        for (attribute, form) in *attributes {
            abbreviations.extend_from_slice(&[*attribute, *form]);
        }
        abbreviations.extend_from_slice(&[0, 0]);
    }
    abbreviations.push(0);
    (info.bytes, abbreviations)
}
