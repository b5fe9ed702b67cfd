// SPDX-License-Identifier: Apache-2.0
//! Reports the contents of an image's jump table, grouped by key.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use static_keys::Class;
use static_keys::JumpEntry;

use crate::btf::Btf;
use crate::classes::{
    self, Classes, DebugLine, Memory, TracepointLayout, debug_layout, location, tell_apart,
};
use crate::container::Compression;
use crate::entry::{Instruction, decode_site};
use crate::image::Image;
use crate::symbols::{SymbolKind, Symbols};
use crate::table::{FoundBy, Table};

/// The maximum number of declared keys that are read.
const MAX_DECLARATIONS: u64 = 1 << 16;

/// The origin of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SymbolSource {
    /// The file given with --debug-file.
    File,
    /// .symtab of the ELF file.
    Elf,
    /// The kernel's own kallsyms.
    Kallsyms,
    /// There are no names: keys are listed by address.
    None,
}

/// The complete report about a file.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The file.
    pub image: ImageReport,
    /// The image's jump table.
    pub table: TableReport,
    /// Counts for the whole table.
    pub summary: Summary,
    /// The keys, ordered by name.
    pub keys: Vec<KeyReport>,
}

/// Describes the file.
#[derive(Debug, Serialize)]
pub struct ImageReport {
    /// bzimage, vmlinux or module.
    pub kind: &'static str,
    /// The compression format of the file.
    pub compression: Compression,
    /// The release from the image's banner, or from a module's `vermagic=`.
    pub release: Option<String>,
    /// Size of a pointer in bits.
    pub bits: u64,
    /// The origin of the names.
    pub symbols: SymbolSource,
    /// Number of known symbols.
    pub symbol_count: usize,
}

/// The jump table.
#[derive(Debug, Serialize)]
pub struct TableReport {
    /// Name of the entries' format, as returned by [`crate::Format::name`].
    pub format: &'static str,
    /// Size of an entry in bytes.
    pub entry_size: u64,
    /// Address of the first entry.
    #[serde(serialize_with = "address")]
    pub start: u64,
    /// Address after the last entry.
    #[serde(serialize_with = "address")]
    pub stop: u64,
    /// Number of entries.
    pub entries: usize,
    /// The way in which the table was found.
    pub found_by: FoundBy,
    /// Address of the code that loads the addresses of both ends. This code proves that a search
    /// found the whole table.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "proof")]
    pub proof: Option<u64>,
    /// objtool has set bit 1 of the keys (5.14 and later with CONFIG_HAVE_JUMP_LABEL_HACK).
    pub objtool_bit: bool,
}

/// Counts for the whole table, including keys that are not listed.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Number of keys with a site.
    pub keys: usize,
    /// Number of entries.
    pub sites: usize,
    /// Sites of two bytes.
    pub two_byte: usize,
    /// Sites of five bytes.
    pub five_byte: usize,
    /// Sites that hold a NOP.
    pub nop: usize,
    /// Sites that hold a JMP.
    pub jmp: usize,
    /// Sites that hold the NOP of early kernels, see [`Instruction::BootNop`].
    pub boot_nop: usize,
    /// Sites of branches written with static_branch_likely().
    pub likely: usize,
    /// Sites in code that is freed after boot.
    pub init: usize,
    /// Keys that cannot change after boot.
    pub ro_after_init_keys: usize,
    /// Sites whose instruction does not match their key's initial value. The kernel patches them
    /// while it boots.
    pub differ_from_initial: usize,
    /// Sites whose bytes do not agree with their entry.
    pub unexplained: usize,
}

/// A static key and its sites.
#[derive(Debug, Serialize)]
pub struct KeyReport {
    /// The key's name, the same as in a running guest: for example the symbol, symbol+offset, or
    /// the tracepoint's name.
    pub name: String,
    /// Address of its `struct static_key`.
    #[serde(serialize_with = "address")]
    pub address: u64,
    /// The class of the key.
    #[serde(serialize_with = "class")]
    pub class: Class,
    /// The line that a key of dynamic debug controls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub debug: Option<DebugLine>,
    /// `enabled` in the image; `None` if the key is not in the image (a module that uses the
    /// kernel's key).
    pub initial: Option<i32>,
    /// The key lies in .data..ro_after_init. Such keys are sealed after boot since 6.11, and are
    /// never flipped.
    pub ro_after_init: bool,
    /// The sites, ordered by address.
    pub sites: Vec<SiteReport>,
}

/// A branch site.
#[derive(Debug, Serialize)]
pub struct SiteReport {
    /// Address of the instruction.
    #[serde(serialize_with = "address")]
    pub address: u64,
    /// Symbol and offset of the address.
    pub location: Option<String>,
    /// Size in bytes, 2 or 5; `None` if the bytes are neither a NOP nor a JMP to the target.
    pub size: Option<u8>,
    /// NOP or JMP; `None` if the bytes are neither a NOP nor a JMP to the target.
    pub instruction: Option<Instruction>,
    /// The bytes of the site, two hexadecimal digits each.
    pub bytes: String,
    /// Disassembly in Intel syntax.
    pub disassembly: Option<String>,
    /// Target of the JMP.
    #[serde(serialize_with = "address")]
    pub target: u64,
    /// Symbol and offset of the target.
    pub target_location: Option<String>,
    /// The branch is written with static_branch_likely().
    pub likely: bool,
    /// See [`static_keys::JumpEntry::objtool_nop`].
    pub objtool_nop: bool,
    /// The site lies in code that is freed after boot.
    pub init: bool,
    /// The reason why the bytes do not agree with the entry; `None` if they do.
    pub problem: Option<String>,
}

fn class<S: serde::Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(class.name())
}

fn address<S: serde::Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

fn proof<S: serde::Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => address(value, serializer),
        None => serializer.serialize_none(),
    }
}

impl Report {
    /// Groups the entries of a table by key and examines their sites. `types` is BTF for a kernel
    /// that has none of its own.
    #[must_use]
    pub fn new(
        about: ImageReport,
        image: &Image<'_>,
        symbols: &Symbols,
        types: Option<&[u8]>,
        table: &Table,
    ) -> Self {
        let reader = Reader::new(image, symbols, types, table);
        let (keys, summary) = reader.keys();
        Self {
            image: about,
            table: reader.table(),
            summary,
            keys,
        }
    }
}

/// Reads the contents of a report from the image.
struct Reader<'image, 'data> {
    image: &'image Image<'data>,
    symbols: &'image Symbols,
    table: &'image Table,
    objtool_bit: bool,
    init: Vec<Range<u64>>,
    ro_after_init: Option<Range<u64>>,
    /// Declared names by the addresses of their keys.
    declared: BTreeMap<u64, String>,
    classes: Classes,
}

impl<'image, 'data> Reader<'image, 'data> {
    fn new(
        image: &'image Image<'data>,
        symbols: &'image Symbols,
        types: Option<&[u8]>,
        table: &'image Table,
    ) -> Self {
        let between = |start: &str, end: &str| Some(symbols.address(start)?..symbols.address(end)?);
        let mut reader = Self {
            image,
            symbols,
            table,
            objtool_bit: table.entries.iter().any(|entry| entry.objtool_nop),
            // jump_label_init() uses `__init_begin` and `__init_end`. Without CONFIG_KALLSYMS_ALL,
            // kallsyms do not contain them.
            init: match between("__init_begin", "__init_end") {
                Some(init) => vec![init],
                None if !image.init_sections.is_empty() => image.init_sections.clone(),
                None => between("_sinittext", "_einittext").into_iter().collect(),
            },
            ro_after_init: between("__start_ro_after_init", "__end_ro_after_init"),
            declared: BTreeMap::new(),
            classes: classes(image, symbols, types).unwrap_or_default(),
        };
        if let Some(range) = between(
            "__start___patchbay_declarations",
            "__stop___patchbay_declarations",
        ) {
            reader.read_declarations(range);
        }
        reader
    }

    /// Reads an array of {struct static_key *key; const char *name}.
    fn read_declarations(&mut self, range: Range<u64>) {
        let size = self.image.pointer_size;
        for at in range
            .step_by(2 * size as usize)
            .take(MAX_DECLARATIONS as usize)
        {
            let pointers = self
                .pointer(at)
                .zip(at.checked_add(size).and_then(|at| self.pointer(at)));
            if let Some((key, name)) = pointers {
                let name = self
                    .image
                    .bytes_at(name, 512)
                    .split(|byte| *byte == 0)
                    .next()
                    .unwrap_or_default();
                self.declared
                    .insert(key, String::from_utf8_lossy(name).into_owned());
            }
        }
    }

    fn pointer(&self, at: u64) -> Option<u64> {
        match self.image.pointer_size {
            4 => self
                .image
                .read(at)
                .map(|bytes| u32::from_le_bytes(bytes).into()),
            _ => self.image.read(at).map(u64::from_le_bytes),
        }
    }

    /// Groups the entries by key and checks each against the bytes at its site.
    fn keys(&self) -> (Vec<KeyReport>, Summary) {
        let mut keys: BTreeMap<u64, KeyReport> = BTreeMap::new();
        let mut summary = Summary::default();
        for entry in &self.table.entries {
            let key = keys.entry(entry.key).or_insert_with(|| self.key(entry.key));
            let site = self.site(entry);
            summary.count(&site, key.initial);
            key.sites.push(site);
        }
        let mut keys: Vec<KeyReport> = keys.into_values().collect();
        for key in &mut keys {
            key.sites.sort_by_key(|site| site.address);
        }
        tell_apart(
            &mut keys,
            |_| (),
            |key| &mut key.name,
            |key| self.function(key.sites.first()?.address),
        );
        keys.sort_by(|a, b| (&a.name, a.address).cmp(&(&b.name, b.address)));
        summary.keys = keys.len();
        summary.ro_after_init_keys = keys.iter().filter(|key| key.ro_after_init).count();
        (keys, summary)
    }

    fn key(&self, address: u64) -> KeyReport {
        let (class, name) = self.class_and_name(address);
        KeyReport {
            name,
            address,
            class,
            debug: self.classes.debug_lines.get(&address).cloned(),
            initial: self.image.read(address).map(i32::from_le_bytes),
            ro_after_init: self
                .ro_after_init
                .as_ref()
                .is_some_and(|range| range.contains(&address)),
            sites: Vec::new(),
        }
    }

    fn class_and_name(&self, address: u64) -> (Class, String) {
        let symbol = self.symbols.resolve(address, SymbolKind::Data);
        // struct tracepoint is {const char *name; struct static_key key; ...}.
        if let Some((symbol, offset)) = symbol
            && offset == self.image.pointer_size
            && let Some(tracepoint) = symbol.strip_prefix("__tracepoint_")
        {
            return (Class::Tracepoint, tracepoint.to_owned());
        }
        if let Some(name) = self.declared.get(&address) {
            return (Class::Ref, name.clone());
        }
        self.classes.class_and_name(address, symbol)
    }

    fn function(&self, address: u64) -> Option<String> {
        let (function, _) = self.symbols.resolve(address, SymbolKind::Text)?;
        Some(function.to_owned())
    }

    fn site(&self, entry: &JumpEntry) -> SiteReport {
        let bytes = self.image.bytes_at(entry.code, 5);
        let decoded = decode_site(bytes, entry);
        let problem = match &decoded {
            Err(problem) => Some(problem.clone()),
            Ok(_) if !self.image.is_executable(entry.code) => {
                Some("the site is not in code".to_owned())
            }
            Ok(_) if !self.image.is_executable(entry.target) => {
                Some("the target is not in code".to_owned())
            }
            Ok(_) if self.image.is_executable(entry.key) => Some("the key is in code".to_owned()),
            Ok(site) if entry.objtool_nop && site.instruction != Instruction::Nop => {
                Some("bit 1 of the key says that objtool wrote a NOP here".to_owned())
            }
            Ok(site)
                if self.objtool_bit
                    && !entry.objtool_nop
                    && site.instruction != Instruction::Jmp =>
            {
                Some("bit 1 of the key says that objtool left a JMP here".to_owned())
            }
            Ok(_) => None,
        };
        let decoded = decoded.ok();
        let locate = |address| {
            self.symbols
                .resolve(address, SymbolKind::Text)
                .map(location)
        };
        let length = decoded
            .as_ref()
            .map_or(bytes.len(), |site| usize::from(site.size));
        SiteReport {
            address: entry.code,
            location: locate(entry.code),
            size: decoded.as_ref().map(|site| site.size),
            instruction: decoded.as_ref().map(|site| site.instruction),
            bytes: hex(&bytes[..length]),
            disassembly: decoded.map(|site| site.text),
            target: entry.target,
            target_location: locate(entry.target),
            likely: entry.likely,
            objtool_nop: entry.objtool_nop,
            init: self.init.iter().any(|range| range.contains(&entry.code)),
            problem,
        }
    }

    fn table(&self) -> TableReport {
        TableReport {
            format: self.table.format.name(),
            entry_size: self.table.format.entry_size(),
            start: self.table.start,
            stop: self.table.stop,
            entries: self.table.entries.len(),
            found_by: self.table.found_by,
            proof: self.table.proof,
            objtool_bit: self.objtool_bit,
        }
    }
}

impl Summary {
    fn count(&mut self, site: &SiteReport, initial: Option<i32>) {
        self.sites += 1;
        self.two_byte += usize::from(site.size == Some(2));
        self.five_byte += usize::from(site.size == Some(5));
        self.nop += usize::from(site.instruction == Some(Instruction::Nop));
        self.jmp += usize::from(site.instruction == Some(Instruction::Jmp));
        self.boot_nop += usize::from(site.instruction == Some(Instruction::BootNop));
        self.likely += usize::from(site.likely);
        self.init += usize::from(site.init);
        self.unexplained += usize::from(site.problem.is_some());
        if let (Some(instruction), Some(initial)) = (site.instruction, initial) {
            // The table in include/linux/jump_label.h: JMP if enabled ^ branch.
            let asked = (initial > 0) ^ site.likely;
            self.differ_from_initial += usize::from(asked != (instruction == Instruction::Jmp));
        }
    }
}

impl Memory for &Image<'_> {
    fn read_at(&mut self, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.read_into(address, bytes)
    }
}

/// Reads the tables of a kernel that classify its keys. The offsets come from its BTF, or else from
/// `types`. Returns `None` if neither exists. For a module only `types` is used, because a module
/// has no `__start_BTF`.
fn classes(mut image: &Image<'_>, symbols: &Symbols, types: Option<&[u8]>) -> Option<Classes> {
    let between = |start, end| Some(symbols.address(start)?..symbols.address(end)?);
    let types = match between("__start_BTF", "__stop_BTF").filter(|_| image.pointer_size == 8) {
        Some(range) => image.bytes_at(range.start, range.end.checked_sub(range.start)?),
        None => types?,
    };
    let btf = Btf::parse(types, &["_ddebug", "static_key", "tracepoint"]).ok()?;
    let mut found = Classes::default();
    if let (Some(pointers), Some(name), Some(key)) = (
        between("__start___tracepoints_ptrs", "__stop___tracepoints_ptrs"),
        btf.offset("tracepoint", &["name"]),
        btf.offset("tracepoint", &["key"]),
    ) {
        let layout = TracepointLayout { name, key };
        found.tracepoints =
            classes::tracepoints(&mut image, pointers, layout, &mut found.room).unwrap_or_default();
    }
    if let Some(lines) = between("__start___dyndbg", "__stop___dyndbg")
        && let Some(layout) = debug_layout(&btf)
    {
        let count = lines.end.saturating_sub(lines.start) / u64::from(layout.size);
        found.debug_lines =
            classes::debug_lines(&mut image, lines.start, count, layout, &mut found.room)
                .unwrap_or_default();
    }
    if let (Some(keys), Some(names), Some(size)) = (
        symbols.address("sched_feat_keys"),
        symbols.address("sched_feat_names"),
        btf.size("static_key"),
    ) {
        let end = names.saturating_add(symbols.extent(names, SymbolKind::Data));
        found.features =
            classes::scheduler_features(&mut image, keys, size, names, end).unwrap_or_default();
    }
    Some(found)
}

/// Formats bytes as two hexadecimal digits each.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
