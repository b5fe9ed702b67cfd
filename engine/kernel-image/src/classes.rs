// SPDX-License-Identifier: Apache-2.0
//! The class and the name of a key, read in the same way from a running kernel and from an image.
//!
//! | class | recognised by | name |
//! |---|---|---|
//! | tracepoint | `__tracepoints_ptrs` of the kernel or the module | the tracepoint's |
//! | dyndbg | the `struct _ddebug` that holds the key | file and line: `net/core/dev.c/123` |
//! | never | the symbol `security_hook_active_*` (6.12 and later) | the symbol |
//! | guarded | all others | the symbol, `sched_feat_` and the feature, else symbol and offset |
//!
//! The branch of a key of class `never` leads to a static call that may be NULL.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::ops::Range;

use serde::Serialize;
use static_keys::Class;

use crate::btf::{Btf, Member};

/// The maximum number of tracepoints and descriptors of dynamic debug that are read. A record that
/// is read twice counts twice.
const MAX_RECORDS: u64 = static_keys::KEYS_MAX as u64;
/// The maximum size of the texts of all these records together, in bytes.
const MAX_TEXTS: usize = 32 << 20;
/// The number of bytes after which the rest of a text is not read.
const MAX_TEXT: usize = 512;

/// A tracepoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracepoint {
    /// Address of its `struct tracepoint`.
    pub address: u64,
    /// The name of the tracepoint.
    pub name: String,
}

/// A source line with a pr_debug() that dynamic debug controls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DebugLine {
    /// Name of the module, which may be built in.
    pub module: String,
    /// Path in the kernel's source.
    pub file: String,
    /// Name of the function.
    pub function: String,
    /// Line in the file.
    pub line: u32,
    /// The format string that the pr_debug() passes to printk(), with one character per byte.
    pub format: String,
    /// The line belongs to a class (`DECLARE_DYNDBG_CLASSMAP`). Only a query that names the class
    /// selects it.
    pub classed: bool,
}

impl DebugLine {
    /// Returns the name of the line's key.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.file, self.line)
    }
}

/// The memory of a kernel, addressed by virtual addresses.
pub(crate) trait Memory {
    /// Fills `bytes` from memory. Returns `None` if any of them cannot be read.
    fn read_at(&mut self, address: u64, bytes: &mut [u8]) -> Option<()>;

    /// Reads a pointer.
    fn word_at(&mut self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read_at(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Reads text up to its NUL, and replaces characters that are not printable.
    fn text_at(&mut self, address: u64) -> Option<String> {
        Some(printable(&self.bytes_at(address)?).into_owned())
    }

    /// Reads bytes up to a NUL.
    fn bytes_at(&mut self, address: u64) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        let mut at = address;
        while text.len() < MAX_TEXT {
            // Each read stays within one page, because the next page may not be mapped.
            let here = (64 - at % 64) as usize;
            let mut bytes = [0; 64];
            self.read_at(at, &mut bytes[..here])?;
            let piece = bytes[..here].split(|byte| *byte == 0).next()?;
            text.extend_from_slice(piece);
            if piece.len() < here {
                break;
            }
            at = at.checked_add(here as u64)?;
        }
        Some(text)
    }
}

/// Replaces characters of a guest's text that are not printable ASCII with `?`.
pub(crate) fn printable(text: &[u8]) -> Cow<'_, str> {
    let is_printable = |byte: &u8| matches!(byte, b' '..=b'~');
    match std::str::from_utf8(text) {
        Ok(text) if text.as_bytes().iter().all(is_printable) => Cow::Borrowed(text),
        _ => {
            let replaced = |byte| {
                if is_printable(byte) {
                    char::from(*byte)
                } else {
                    '?'
                }
            };
            Cow::Owned(text.iter().map(replaced).collect())
        }
    }
}

/// Offsets in `struct tracepoint`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracepointLayout {
    pub name: u32,
    pub key: u32,
}

/// The layout of `struct _ddebug`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DebugLayout {
    pub size: u32,
    pub key: u32,
    pub module: u32,
    pub function: u32,
    pub file: u32,
    pub format: u32,
    pub line: Member,
    /// The class of the line. All bits are set if the line has no class. `None` in kernels before
    /// 6.1.
    pub class: Option<Member>,
}

/// The number of tracepoints and descriptors, and the size of their texts, that may still be read.
/// Tables may refer to the same memory repeatedly, so the size of the guest's memory does not bound
/// the records and texts that are read.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    records: u64,
    /// Size of texts, in bytes.
    texts: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            records: MAX_RECORDS,
            texts: MAX_TEXTS,
        }
    }
}

/// The reason why records were not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// A record or a text is not mapped, or all texts together are too long.
    Memory,
    /// There are too many records.
    Records,
}

impl Room {
    fn take_records(&mut self, count: u64) -> Result<(), Unread> {
        self.records = self.records.checked_sub(count).ok_or(Unread::Records)?;
        Ok(())
    }

    fn take_text(&mut self, bytes: usize) -> Option<()> {
        self.texts = self.texts.checked_sub(bytes)?;
        Some(())
    }
}

/// Returns the tracepoints of an image by the addresses of their keys. `pointers` is an array of
/// s32, each relative to its own address.
pub(crate) fn tracepoints(
    memory: &mut impl Memory,
    pointers: Range<u64>,
    layout: TracepointLayout,
    room: &mut Room,
) -> Result<BTreeMap<u64, Tracepoint>, Unread> {
    let length = pointers.end.checked_sub(pointers.start);
    let count = length.ok_or(Unread::Memory)? / 4;
    room.take_records(count)?;
    read_tracepoints(memory, pointers.start, count, layout, room).ok_or(Unread::Memory)
}

fn read_tracepoints(
    memory: &mut impl Memory,
    pointers: u64,
    count: u64,
    layout: TracepointLayout,
    room: &mut Room,
) -> Option<BTreeMap<u64, Tracepoint>> {
    let mut found = BTreeMap::new();
    for index in 0..count {
        let at = pointers.checked_add(4 * index)?;
        let mut offset = [0; 4];
        memory.read_at(at, &mut offset)?;
        let address = at.wrapping_add_signed(i64::from(i32::from_le_bytes(offset)));
        let name = memory.word_at(address.checked_add(u64::from(layout.name))?)?;
        let name = memory.text_at(name)?;
        room.take_text(name.len())?;
        found.insert(
            address.checked_add(u64::from(layout.key))?,
            Tracepoint { address, name },
        );
    }
    Some(found)
}

/// Returns the descriptors of dynamic debug from `start` on, by the addresses of their keys.
pub(crate) fn debug_lines(
    memory: &mut impl Memory,
    start: u64,
    count: u64,
    layout: DebugLayout,
    room: &mut Room,
) -> Result<BTreeMap<u64, DebugLine>, Unread> {
    room.take_records(count)?;
    read_debug_lines(memory, start, count, layout, room).ok_or(Unread::Memory)
}

fn read_debug_lines(
    memory: &mut impl Memory,
    start: u64,
    count: u64,
    layout: DebugLayout,
    room: &mut Room,
) -> Option<BTreeMap<u64, DebugLine>> {
    let mut found = BTreeMap::new();
    for index in 0..count {
        let at = start.checked_add(index.checked_mul(u64::from(layout.size))?)?;
        let mut text = |offset: u32| {
            let pointer = memory.word_at(at.checked_add(u64::from(offset))?)?;
            let text = memory.bytes_at(pointer)?;
            room.take_text(text.len())?;
            Some(text)
        };
        let (module, file) = (text(layout.module)?, text(layout.file)?);
        let (function, format) = (text(layout.function)?, text(layout.format)?);
        let line = bits_at(memory, at, layout.line)?;
        let class = match layout.class {
            None => None,
            Some(member) => Some((bits_at(memory, at, member)?, bits(member))),
        };
        found.insert(
            at.checked_add(u64::from(layout.key))?,
            DebugLine {
                module: printable(&module).into_owned(),
                file: printable(&file).into_owned(),
                function: printable(&function).into_owned(),
                line,
                format: format.into_iter().map(char::from).collect(),
                classed: class.is_some_and(|(class, none)| class != none),
            },
        );
    }
    Some(found)
}

/// Returns the mask of a bit field that has been shifted to bit 0.
fn bits(member: Member) -> u32 {
    (1 << member.width.clamp(1, 24)) - 1
}

/// Returns the value of a bit field in the structure at `at`.
fn bits_at(memory: &mut impl Memory, at: u64, member: Member) -> Option<u32> {
    let mut word = [0; 4];
    memory.read_at(at.checked_add(u64::from(member.offset))?, &mut word)?;
    Some(u32::from_le_bytes(word) >> (member.shift % 8) & bits(member))
}

/// Returns the names of the scheduler's features by the addresses of their keys. Each element of
/// `sched_feat_keys[]` has its name at the same index of `sched_feat_names[]`.
pub(crate) fn scheduler_features(
    memory: &mut impl Memory,
    keys: u64,
    key_size: u32,
    names: u64,
    names_end: u64,
) -> Option<BTreeMap<u64, String>> {
    let count = (names_end.checked_sub(names)? / 8).min(64);
    let mut found = BTreeMap::new();
    for index in 0..count {
        let Some(name) = memory
            .word_at(names.checked_add(8 * index)?)
            .filter(|name| *name != 0)
        else {
            break;
        };
        let key = keys.checked_add(u64::from(key_size).checked_mul(index)?)?;
        found.insert(key, format!("sched_feat_{}", memory.text_at(name)?));
    }
    Some(found)
}

/// The information about keys in an image's own tables, by the keys' addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Classes {
    pub tracepoints: BTreeMap<u64, Tracepoint>,
    pub debug_lines: BTreeMap<u64, DebugLine>,
    pub features: BTreeMap<u64, String>,
    /// The limits that remain for the tables of other images.
    pub room: Room,
}

impl Classes {
    /// Returns whether the key has a name in these tables, so that no symbol is needed.
    pub fn has(&self, key: u64) -> bool {
        self.tracepoints.contains_key(&key)
            || self.debug_lines.contains_key(&key)
            || self.features.contains_key(&key)
    }

    /// Returns the class and the name of a key, given the symbol that contains it.
    pub fn class_and_name(&self, address: u64, symbol: Option<(&str, u64)>) -> (Class, String) {
        if let Some(tracepoint) = self.tracepoints.get(&address) {
            return (Class::Tracepoint, tracepoint.name.clone());
        }
        if let Some(line) = self.debug_lines.get(&address) {
            return (Class::DynamicDebug, line.name());
        }
        if let Some(feature) = self.features.get(&address) {
            return (Class::Guarded, feature.clone());
        }
        let name = symbol.map_or_else(|| format!("{address:#x}"), location);
        if name.starts_with("security_hook_active_") {
            return (Class::Never, name);
        }
        (Class::Guarded, name)
    }
}

/// Makes equal names of keys in one image distinct by adding the functions of their first sites:
/// `name@function`.
pub(crate) fn tell_apart<K, I: Hash + Eq>(
    keys: &mut [K],
    image: impl Fn(&K) -> I,
    name: impl Fn(&mut K) -> &mut String,
    function: impl Fn(&K) -> Option<String>,
) {
    let mut times: HashMap<(I, String), usize> = HashMap::new();
    for key in &mut *keys {
        let image = image(key);
        *times.entry((image, name(key).clone())).or_default() += 1;
    }
    for key in keys {
        let in_image = (image(key), name(key).clone());
        if times.get(&in_image).is_some_and(|times| *times > 1)
            && let Some(function) = function(key)
        {
            *name(key) = format!("{}@{function}", in_image.1);
        }
    }
}

/// Returns the layout of `struct _ddebug`; `None` without dynamic debug.
pub(crate) fn debug_layout(btf: &Btf<'_>) -> Option<DebugLayout> {
    let offset = |path: &[&str]| btf.offset("_ddebug", path);
    Some(DebugLayout {
        size: btf.size("_ddebug").filter(|size| *size >= 16)?,
        key: offset(&["key"])?,
        module: offset(&["modname"])?,
        function: offset(&["function"])?,
        file: offset(&["filename"])?,
        format: offset(&["format"])?,
        line: btf.member("_ddebug", &["lineno"])?,
        class: btf.member("_ddebug", &["class_id"]),
    })
}

/// Formats a symbol and an offset into it.
pub(crate) fn location((symbol, offset): (&str, u64)) -> String {
    match offset {
        0 => symbol.to_owned(),
        _ => format!("{symbol}+{offset:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory in which every word is a pointer to a text without end.
    struct Endless;

    impl Memory for Endless {
        fn read_at(&mut self, _address: u64, bytes: &mut [u8]) -> Option<()> {
            bytes.fill(b'x');
            Some(())
        }
    }

    #[test]
    fn texts_of_descriptors_are_bounded() {
        let member = |offset| Member {
            offset,
            shift: 0,
            width: 18,
            of_type: 0,
        };
        let layout = DebugLayout {
            size: 56,
            key: 40,
            module: 0,
            function: 8,
            file: 16,
            format: 24,
            line: member(32),
            class: None,
        };
        let room_for = |texts| Room {
            texts,
            ..Room::default()
        };
        let mut room = room_for(10 * 4 * 2 * MAX_TEXT);
        let lines = debug_lines(&mut Endless, 0, 10, layout, &mut room).expect("they fit");
        assert_eq!(lines.len(), 10);
        assert!(lines.values().all(|line| line.format.len() < 2 * MAX_TEXT));
        let mut room = room_for(10 * MAX_TEXT);
        let lines = debug_lines(&mut Endless, 0, 10, layout, &mut room);
        assert_eq!(lines, Err(Unread::Memory));
    }

    #[test]
    fn names_of_tracepoints_are_bounded() {
        let layout = TracepointLayout { name: 0, key: 8 };
        let mut room = Room::default();
        let many = MAX_TEXTS as u64 / MAX_TEXT as u64 + 1;
        let found = tracepoints(&mut Endless, 0..4 * (many / 2), layout, &mut room);
        assert!(found.is_ok());
        let found = tracepoints(&mut Endless, 0..4 * (many - many / 2), layout, &mut room);
        assert_eq!(found, Err(Unread::Memory));
    }
}
