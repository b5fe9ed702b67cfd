// SPDX-License-Identifier: Apache-2.0
//! A kernel with modules, laid out in memory as the kernel's own code lays them out.

use static_keys::{
    Branch, Catalog, Class, Concerns, Directory, EntryFormat, GateKind, Gates, Instruction, Kernel,
    KeyId, Layout, ListedGate, Module, Nops, Options, Plan, PlanError, Range, RecordRing, Size,
    Update,
};

use super::memory::{Pages, Place};

/// The image that a key or a site belongs to: the kernel, or the module with this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    Kernel,
    Module(usize),
}

#[derive(Clone, Debug)]
pub struct KeySpec {
    pub home: Home,
    pub class: Class,
    /// Bit 0 of the key's `type` word: initialised as true.
    pub initially: bool,
    pub count: i32,
}

#[derive(Clone, Debug)]
pub struct SiteSpec {
    pub key: usize,
    pub home: Home,
    pub size: Size,
    pub likely: bool,
    pub init: bool,
    /// Free bytes before the site. A gap of almost a page places the site across a page boundary.
    pub gap: u16,
    pub displacement: i32,
}

/// Description of a guest, and its memory.
#[derive(Debug)]
pub struct World {
    pub format: EntryFormat,
    pub keys: Vec<KeySpec>,
    pub sites: Vec<SiteSpec>,
    pub modules: usize,
    pub memory: Pages,
}

/// Value of `system_state` in a running system.
pub const SYSTEM_RUNNING: u32 = 3;
pub const MODULE_STATE_LIVE: u32 = 0;
pub const MUTEX_FLAGS: u64 = 7;
/// Address of a task, as in the owner word of a mutex.
pub const TASK: u64 = 0x1234_5678;

const TEXT: u64 = 0x0100_0000;
const TEXT_LEN: u64 = 0x0040_0000;
const KEYS: u64 = 0x0200_0000;
const TRACEPOINTS: u64 = 0x0210_0000;
const WORDS: u64 = 0x0280_0000;
const TABLE: u64 = 0x0300_0000;
const DIRECTORY: u64 = 0x0380_0000;
const NAMES: u64 = 0x03c0_0000;
const MODULES: u64 = 0x1000_0000;
const MODULE_LEN: u64 = 0x0100_0000;
const HEAP: u64 = 0x2000_0000;

/// Size of a directory record in bytes.
pub const RECORD_SIZE: u64 = 32;
const TRACEPOINT_SIZE: u64 = 0x80;
const TRACEPOINT_KEY: u32 = 8;
pub const TRACEPOINT_FUNCS: u32 = 0x48;
const MODULE_STATE: u32 = 0;

impl World {
    pub fn new(
        format: EntryFormat,
        modules: usize,
        keys: Vec<KeySpec>,
        sites: Vec<SiteSpec>,
    ) -> Self {
        let world = Self {
            format,
            keys,
            sites,
            modules,
            memory: Pages::default(),
        };
        world.write();
        world
    }

    /// One key of the kernel with `sites` five-byte sites.
    pub fn simple(count: i32, sites: usize) -> Self {
        let key = KeySpec {
            home: Home::Kernel,
            class: Class::Ref,
            initially: false,
            count,
        };
        Self::new(
            EntryFormat::Relative,
            0,
            vec![key],
            (0..sites).map(|_| SiteSpec::of(0)).collect(),
        )
    }

    /// Returns this guest with other counts, as if its keys had always had them.
    pub fn with_counts(&self, counts: &[i32]) -> Self {
        let mut keys = self.keys.clone();
        for (key, count) in keys.iter_mut().zip(counts) {
            key.count = *count;
        }
        Self::new(self.format, self.modules, keys, self.sites.clone())
    }

    pub fn base(&self) -> u64 {
        match self.format {
            EntryFormat::Absolute32 => 0xc000_0000,
            _ => 0xffff_ffff_8000_0000,
        }
    }

    fn image(&self, home: Home) -> u64 {
        match home {
            Home::Kernel => self.base(),
            Home::Module(index) => self.base() + MODULES + index as u64 * MODULE_LEN,
        }
    }

    /// Returns the address of a part of an image. A module's parts are closer together than the
    /// kernel's.
    fn part(&self, home: Home, offset: u64) -> u64 {
        match home {
            Home::Kernel => self.image(home) + offset,
            Home::Module(_) => self.image(home) + offset / 8,
        }
    }

    pub fn text(&self, home: Home) -> Range {
        let start = self.part(home, TEXT);
        Range {
            start,
            end: start + TEXT_LEN / 8,
        }
    }

    /// Address of the `struct module`; 0 for the kernel.
    pub fn module(&self, home: Home) -> u64 {
        match home {
            Home::Kernel => 0,
            Home::Module(_) => self.image(home) + 0x1000,
        }
    }

    pub fn module_state(&self, index: usize) -> u64 {
        self.module(Home::Module(index)) + u64::from(MODULE_STATE)
    }

    pub fn key(&self, index: usize) -> KeyId {
        match self.keys[index].class {
            Class::Tracepoint => KeyId(self.tracepoint(index) + u64::from(TRACEPOINT_KEY)),
            _ => KeyId(self.part(self.keys[index].home, KEYS) + index as u64 * 16),
        }
    }

    pub fn tracepoint(&self, index: usize) -> u64 {
        self.part(self.keys[index].home, TRACEPOINTS) + index as u64 * TRACEPOINT_SIZE
    }

    pub fn key_type(&self, index: usize) -> u64 {
        self.key(index).0 + u64::from(self.layout().static_key_type)
    }

    fn pointer(&self) -> usize {
        if self.format == EntryFormat::Absolute32 {
            4
        } else {
            8
        }
    }

    pub fn poke_pointer(&self, address: u64, value: u64) {
        self.memory
            .poke(address, &value.to_le_bytes()[..self.pointer()]);
    }

    pub fn layout(&self) -> Layout {
        let pointer = self.pointer() as u32;
        Layout {
            static_key_type: pointer,
            static_key_mod_next: 0,
            static_key_mod_entries: pointer,
            static_key_mod_mod: 2 * pointer,
            module_state: MODULE_STATE,
            module_state_live: MODULE_STATE_LIVE,
            tracepoint_key: TRACEPOINT_KEY,
            tracepoint_funcs: TRACEPOINT_FUNCS,
        }
    }

    /// Flags the tracepoint of a key as one with functions that run when the tracepoint is
    /// switched.
    pub fn set_regfunc(&self, index: usize) {
        let home = self.keys[index].home;
        let slot = self.keys[..index]
            .iter()
            .filter(|key| key.home == home)
            .count();
        let record = self.directory(home).keys + slot as u64 * RECORD_SIZE;
        self.memory.poke(record + 14, &[1, 0]);
    }

    /// Address of a gate's word.
    pub fn word(&self, kind: GateKind) -> u64 {
        let offset = match kind {
            GateKind::SystemState => 0,
            GateKind::JumpLabelMutex => 8,
            GateKind::TextMutex => 16,
            GateKind::TracepointsMutex => 24,
            GateKind::TextPokeQueue => 32,
            GateKind::TextPoke => 36,
            GateKind::ModuleMutex => 40,
            _ => 48,
        };
        self.base() + WORDS + offset
    }

    /// Returns a gate of this kind; a mutex if no other word is defined for the kind.
    pub fn gate(&self, kind: GateKind, concerns: Concerns) -> ListedGate {
        let pointer = if self.pointer() == 8 {
            u64::MAX
        } else {
            u64::from(u32::MAX)
        };
        let (width, mask, wanted) = match kind {
            GateKind::SystemState => (4, u64::from(u32::MAX), SYSTEM_RUNNING.into()),
            GateKind::TextPoke | GateKind::TextPokeQueue => (4, u64::from(u32::MAX), 0),
            _ => (self.pointer() as u8, pointer & !MUTEX_FLAGS, 0),
        };
        ListedGate {
            kind,
            name: "a_word".into(),
            address: self.word(kind),
            per_cpu: false,
            width,
            mask,
            wanted,
            concerns,
        }
    }

    /// Returns the gates that the kernel lists.
    pub fn listed_gates(&self) -> Vec<ListedGate> {
        let mut gates = vec![
            self.gate(GateKind::SystemState, Concerns::COUNTS),
            self.gate(GateKind::TracepointsMutex, Concerns::TRACEPOINT),
        ];
        if self.format != EntryFormat::None {
            let kinds = [
                GateKind::JumpLabelMutex,
                GateKind::TextMutex,
                GateKind::TextPokeQueue,
                GateKind::TextPoke,
            ];
            gates.extend(kinds.map(|kind| self.gate(kind, Concerns::SITES)));
        }
        gates
    }

    pub fn gates(&self) -> Gates {
        Gates::new(&self.listed_gates(), &[]).expect("gates")
    }

    pub fn kernel(&self) -> Kernel {
        Kernel {
            format: self.format,
            jump_table: self.table(Home::Kernel),
            text: self.text(Home::Kernel),
            ro_after_init: Range::default(),
            layout: self.layout(),
            gates: self.gates(),
            directory: self.directory(Home::Kernel),
            records: RecordRing::default(),
        }
    }

    pub fn module_image(&self, index: usize) -> Module<'static> {
        const NAMES: [&[u8]; 4] = [b"alpha\0junk", b"beta", b"gamma\0", b"delta"];
        let home = Home::Module(index);
        Module {
            id: self.module(home),
            name: NAMES[index],
            jump_table: self.table(home),
            text: self.text(home),
            ro_after_init: Range::default(),
            directory: self.directory(home),
        }
    }

    pub fn catalog(&self) -> Catalog {
        let mut catalog = Catalog::new(&self.memory, &self.kernel()).expect("kernel");
        for index in 0..self.modules {
            catalog
                .add_module(&self.memory, &self.module_image(index))
                .expect("module");
        }
        catalog
    }

    pub fn plan(&self, updates: &[Update]) -> Result<Plan<Place>, PlanError> {
        Plan::new(
            &self.catalog(),
            &self.memory,
            updates,
            &Options {
                allow_guarded: true,
            },
        )
    }

    /// The sites of an image in the order of its table: by key, then by address.
    fn sites_of(&self, home: Home) -> Vec<usize> {
        let mut sites: Vec<usize> = (0..self.sites.len())
            .filter(|&site| self.sites[site].home == home)
            .collect();
        sites.sort_by_key(|&site| (self.key(self.sites[site].key), self.site(site)));
        sites
    }

    pub fn table(&self, home: Home) -> Range {
        let start = self.part(home, TABLE);
        let entries = if self.format == EntryFormat::None {
            0
        } else {
            self.sites_of(home).len()
        };
        Range {
            start,
            end: start + (entries * self.format.entry_size()) as u64,
        }
    }

    fn directory(&self, home: Home) -> Directory {
        let keys = self.keys.iter().filter(|key| key.home == home).count();
        Directory {
            keys: self.part(home, DIRECTORY),
            key_count: keys as u32,
            key_size: RECORD_SIZE as u32,
            names: self.part(home, NAMES),
            names_size: keys as u32 * 16,
        }
    }

    pub fn site(&self, site: usize) -> u64 {
        let home = self.sites[site].home;
        let before = self.sites[..site].iter().filter(|other| other.home == home);
        let used: u64 = before
            .map(|other| u64::from(other.gap) + other.size.bytes() as u64)
            .sum();
        self.text(home).start + used + u64::from(self.sites[site].gap)
    }

    pub fn target(&self, site: usize) -> u64 {
        let spec = &self.sites[site];
        let displacement = match spec.size {
            Size::Two => i64::from(spec.displacement as i8),
            Size::Five => i64::from(spec.displacement % 0x10_0000),
        };
        (self.site(site) + spec.size.bytes() as u64).wrapping_add_signed(displacement)
    }

    /// The instruction that a site has at a count.
    pub fn instruction(&self, site: usize, count: i32) -> Instruction {
        let spec = &self.sites[site];
        let branch = if (count != 0) == spec.likely {
            Branch::Nop
        } else {
            Branch::Jump
        };
        Nops::Fixed
            .encode(branch, spec.size, self.site(site), self.target(site))
            .expect("within reach")
    }

    fn write(&self) {
        self.memory.map(self.base() + WORDS, 64);
        let state = self.word(GateKind::SystemState);
        self.memory.poke_u32(state, SYSTEM_RUNNING);
        // A free mutex with flag bits set.
        self.poke_pointer(self.word(GateKind::TextMutex), 1);
        for index in 0..self.keys.len() {
            self.write_key(index);
        }
        let homes = || std::iter::once(Home::Kernel).chain((0..self.modules).map(Home::Module));
        for home in homes() {
            self.write_directory(home);
            if home != Home::Kernel {
                self.memory.poke_u32(
                    self.module(home) + u64::from(MODULE_STATE),
                    MODULE_STATE_LIVE,
                );
            }
            for (index, &site) in self.sites_of(home).iter().enumerate() {
                self.write_entry(self.part(home, TABLE), index, site);
            }
        }
        for site in 0..self.sites.len() {
            let key = &self.keys[self.sites[site].key];
            let count = if self.sites[site].init {
                i32::from(key.initially)
            } else {
                key.count
            };
            self.memory.map(self.site(site), 16);
            self.memory
                .poke(self.site(site), self.instruction(site, count).as_bytes());
        }
    }

    fn write_key(&self, index: usize) {
        let spec = &self.keys[index];
        self.memory.map(self.key(index).0, 16);
        self.memory
            .poke(self.key(index).0, &spec.count.to_le_bytes());
        if spec.class == Class::Tracepoint {
            self.memory.map(self.tracepoint(index), TRACEPOINT_SIZE);
            self.poke_pointer(
                self.tracepoint(index) + u64::from(TRACEPOINT_FUNCS),
                self.base() + HEAP + 0x0f00_0000,
            );
        }
        if self.format != EntryFormat::None {
            self.poke_pointer(self.key_type(index), self.type_word(index));
        }
    }

    /// Address of the first entry of a key in each image with entries of it.
    fn runs(&self, index: usize) -> Vec<(Home, u64)> {
        let mut runs = Vec::new();
        for home in std::iter::once(Home::Kernel).chain((0..self.modules).map(Home::Module)) {
            if let Some(first) = self
                .sites_of(home)
                .iter()
                .position(|&site| self.sites[site].key == index)
            {
                runs.push((
                    home,
                    self.part(home, TABLE) + (first * self.format.entry_size()) as u64,
                ));
            }
        }
        runs
    }

    /// Address of a node of a key's chain: the latest module first, the key's own image last.
    pub fn node(&self, key: usize, node: usize) -> u64 {
        self.base() + HEAP + key as u64 * 0x1000 + node as u64 * 32
    }

    /// Builds the type word like jump_label_add_module().
    fn type_word(&self, index: usize) -> u64 {
        let flag = u64::from(self.keys[index].initially);
        let home = self.keys[index].home;
        let runs = self.runs(index);
        let own = runs
            .iter()
            .find(|(user, _)| *user == home)
            .map_or(0, |(_, entries)| *entries);
        let others: Vec<_> = runs
            .iter()
            .filter(|(user, _)| *user != home)
            .copied()
            .rev()
            .collect();
        if others.is_empty() {
            return own | flag;
        }
        let pointer = self.pointer() as u64;
        let nodes: Vec<_> = others.into_iter().chain([(home, own)]).collect();
        for (number, (user, entries)) in nodes.iter().enumerate() {
            let next = if number + 1 == nodes.len() {
                0
            } else {
                self.node(index, number + 1)
            };
            for (word, value) in [next, *entries, self.module(*user)].into_iter().enumerate() {
                self.poke_pointer(self.node(index, number) + word as u64 * pointer, value);
            }
        }
        self.node(index, 0) | 2 | flag
    }

    fn write_entry(&self, table: u64, index: usize, site: usize) {
        let spec = &self.sites[site];
        let (code, target, key) = (self.site(site), self.target(site), self.key(spec.key).0);
        let flags = u64::from(spec.likely) | u64::from(spec.init) << 1;
        let at = table + (index * self.format.entry_size()) as u64;
        match self.format {
            EntryFormat::Relative => {
                self.memory.poke_u32(at, code.wrapping_sub(at) as u32);
                self.memory
                    .poke_u32(at + 4, target.wrapping_sub(at + 4) as u32);
                self.memory
                    .poke_u64(at + 8, key.wrapping_sub(at + 8) | flags);
            }
            EntryFormat::Absolute64 => {
                for (member, value) in [code, target, key | flags].into_iter().enumerate() {
                    self.memory.poke_u64(at + member as u64 * 8, value);
                }
            }
            EntryFormat::Absolute32 => {
                for (member, value) in [code, target, key | flags].into_iter().enumerate() {
                    self.memory.poke_u32(at + member as u64 * 4, value as u32);
                }
            }
            EntryFormat::None => {}
        }
    }

    fn write_directory(&self, home: Home) {
        let directory = self.directory(home);
        let keys = (0..self.keys.len()).filter(|&key| self.keys[key].home == home);
        for (slot, index) in keys.enumerate() {
            let class = self.keys[index].class;
            let record = directory.keys + slot as u64 * RECORD_SIZE;
            self.memory.poke_u64(record, self.key(index).0);
            self.memory.poke_u32(record + 8, slot as u32 * 16);
            let (number, tracepoint) = match class {
                Class::Guarded => (0, 0),
                Class::Ref => (1, 0),
                Class::Tracepoint => (2, self.tracepoint(index)),
                Class::DynamicDebug | Class::Never => panic!("a guest does not list these"),
            };
            self.memory.poke_u32(record + 12, number);
            self.memory.poke_u64(record + 16, tracepoint);
            self.memory.poke_u64(record + 24, self.module(home));
            let mut name = format!("key{index}").into_bytes();
            name.resize(16, 0);
            self.memory.poke(directory.names + slot as u64 * 16, &name);
        }
    }
}

impl SiteSpec {
    /// An unlikely five-byte site of the kernel.
    pub fn of(key: usize) -> Self {
        Self {
            key,
            home: Home::Kernel,
            size: Size::Five,
            likely: false,
            init: false,
            gap: 11,
            displacement: 0x100,
        }
    }
}

pub fn update(key: KeyId, op: static_keys::Op) -> Update {
    Update { key, op }
}
