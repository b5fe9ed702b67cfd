// SPDX-License-Identifier: Apache-2.0
//! What an image's jump table says, key by key.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use static_keys::JumpEntry;

use crate::btf::Btf;
use crate::classes::{
    self, Class, Classes, DebugLine, Memory, TracepointLayout, debug_layout, location, tell_apart,
};
use crate::container::Compression;
use crate::entry::{Instruction, decode_site};
use crate::image::Image;
use crate::symbols::{SymbolKind, Symbols};
use crate::table::{FoundBy, Table};

/// Most declared keys looked at.
const MAX_DECLARATIONS: u64 = 1 << 16;

/// Origin of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SymbolSource {
    /// The file given with --debug-file.
    File,
    /// .symtab of the ELF file.
    Elf,
    /// The kernel's own table.
    Kallsyms,
    /// Nowhere: keys are listed by address.
    None,
}

/// The whole answer.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The file.
    pub image: ImageReport,
    /// Its jump table.
    pub table: TableReport,
    /// Counts.
    pub summary: Summary,
    /// Ordered by name.
    pub keys: Vec<Key>,
}

/// What kind of file it is.
#[derive(Debug, Serialize)]
pub struct ImageReport {
    /// bzimage, vmlinux or module.
    pub kind: &'static str,
    /// How the file was packed.
    pub compression: Compression,
    /// From the image's banner.
    pub release: Option<String>,
    /// Size of a pointer.
    pub bits: u64,
    /// Origin of the names.
    pub symbols: SymbolSource,
    /// Names known.
    pub symbol_count: usize,
}

/// The jump table.
#[derive(Debug, Serialize)]
pub struct TableReport {
    /// [`crate::Format::name`].
    pub format: &'static str,
    /// In bytes.
    pub entry_size: u64,
    /// Address of the first entry.
    #[serde(serialize_with = "address")]
    pub start: u64,
    /// Address behind the last entry.
    #[serde(serialize_with = "address")]
    pub stop: u64,
    /// Their number.
    pub entries: usize,
    /// How it was found.
    pub found_by: FoundBy,
    /// Address of the code that loads the addresses of both ends. It proves that a search found the
    /// whole table.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "proof")]
    pub proof: Option<u64>,
    /// Whether bit 1 of the keys is objtool's (5.14 and later with CONFIG_HAVE_JUMP_LABEL_HACK).
    pub objtool_bit: bool,
}

/// Counts over the whole table, whatever keys are listed.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Keys with a site.
    pub keys: usize,
    /// Entries.
    pub sites: usize,
    /// Sites of two bytes.
    pub two_byte: usize,
    /// Sites of five bytes.
    pub five_byte: usize,
    /// Sites that hold a NOP.
    pub nop: usize,
    /// Sites that hold a JMP.
    pub jmp: usize,
    /// Sites that hold a NOP for early kernels, see [`Instruction::BootNop`].
    pub boot_nop: usize,
    /// Sites of branches written with static_branch_likely().
    pub likely: usize,
    /// Sites in code that is freed after boot.
    pub init: usize,
    /// Keys that cannot change after boot.
    pub ro_after_init_keys: usize,
    /// Sites that hold something else than their key's initial value asks for; the kernel patches
    /// them while it boots.
    pub differ_from_initial: usize,
    /// Sites whose bytes and entry do not agree.
    pub unexplained: usize,
}

/// A static key and its sites.
#[derive(Debug, Serialize)]
pub struct Key {
    /// Its name in a running guest: symbol, symbol+offset, or that of the tracepoint.
    pub name: String,
    /// Address of its `struct static_key`.
    #[serde(serialize_with = "address")]
    pub address: u64,
    /// What it is for.
    pub class: Class,
    /// What it prints, for a key of dynamic debug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub debug: Option<DebugLine>,
    /// `enabled` in the image; none if the key is not in the image (a module that uses the kernel's
    /// key).
    pub initial: Option<i32>,
    /// In .data..ro_after_init: sealed after boot since 6.10, never flipped.
    pub ro_after_init: bool,
    /// Ordered by address.
    pub sites: Vec<SiteReport>,
}

/// A branch site.
#[derive(Debug, Serialize)]
pub struct SiteReport {
    /// Address of the instruction.
    #[serde(serialize_with = "address")]
    pub address: u64,
    /// Symbol and offset.
    pub location: Option<String>,
    /// 2 or 5; none if not explained.
    pub size: Option<u8>,
    /// NOP or JMP; none if not explained.
    pub instruction: Option<Instruction>,
    /// Two digits each.
    pub bytes: String,
    /// Intel syntax.
    pub disassembly: Option<String>,
    /// Target of the JMP.
    #[serde(serialize_with = "address")]
    pub target: u64,
    /// Symbol and offset.
    pub target_location: Option<String>,
    /// Written with static_branch_likely().
    pub likely: bool,
    /// See [`static_keys::JumpEntry::objtool_nop`].
    pub objtool_nop: bool,
    /// In code that is freed after boot.
    pub init: bool,
    /// Why bytes and entry do not agree.
    pub problem: Option<String>,
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
    /// Groups the entries of a table by key and looks at their sites. `types` is BTF for a kernel
    /// without its own.
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

/// Reads everything a report says from the image.
struct Reader<'image, 'data> {
    image: &'image Image<'data>,
    symbols: &'image Symbols,
    table: &'image Table,
    objtool_bit: bool,
    init: Vec<Range<u64>>,
    ro_after_init: Option<Range<u64>>,
    /// Key address to declared name.
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
            // The rule of jump_label_init(). Without KALLSYMS_ALL there is no `__init_begin`.
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

    /// Rows of {struct static_key *key; const char *name}.
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
    fn keys(&self) -> (Vec<Key>, Summary) {
        let mut keys: BTreeMap<u64, Key> = BTreeMap::new();
        let mut summary = Summary::default();
        for entry in &self.table.entries {
            let key = keys.entry(entry.key).or_insert_with(|| self.key(entry.key));
            let site = self.site(entry);
            summary.count(&site, key.initial);
            key.sites.push(site);
        }
        let mut keys: Vec<Key> = keys.into_values().collect();
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

    fn key(&self, address: u64) -> Key {
        let (class, name) = self.class_and_name(address);
        Key {
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

/// What a kernel's own tables say, with the offsets from its BTF, else from `types`. None for a
/// module and without types.
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

/// Bytes as two digits each.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
