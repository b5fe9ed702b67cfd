// SPDX-License-Identifier: Apache-2.0
//! Builds small type information (BTF), type by type.

/// A member: name, offset in bits, number of its type.
pub type Member<'a> = (&'a str, u32, u32);

/// BTF under construction. Type 1 is a u32, type 2 a u64, type 3 a pointer.
pub struct Types {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Offset of the first string; not 0 in a module's types.
    first_string: u32,
    count: u32,
}

pub const U32: u32 = 1;
pub const U64: u32 = 2;
pub const POINTER: u32 = 3;

impl Types {
    pub fn new() -> Self {
        let mut types = Self {
            types: Vec::new(),
            strings: vec![0],
            first_string: 0,
            count: 0,
        };
        for (name, size) in [("u32", 4), ("u64", 8)] {
            types.header(name, 1 << 24, size);
            types.words(&[8 * size]);
        }
        types.header("", 2 << 24, 0);
        types
    }

    /// The types of a module, which continue a kernel's.
    pub fn after(kernel: &Self) -> Self {
        Self {
            types: Vec::new(),
            strings: Vec::new(),
            first_string: kernel.strings.len() as u32,
            count: kernel.count,
        }
    }

    fn words(&mut self, words: &[u32]) {
        for word in words {
            self.types.extend_from_slice(&word.to_le_bytes());
        }
    }

    fn name(&mut self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        let at = self.first_string + self.strings.len() as u32;
        self.strings.extend_from_slice(name.as_bytes());
        self.strings.push(0);
        at
    }

    /// Adds a type of any kind. `info` has its kind, count and flag.
    pub fn header(&mut self, name: &str, info: u32, size_or_type: u32) -> u32 {
        let name = self.name(name);
        self.words(&[name, info, size_or_type]);
        self.count += 1;
        self.count
    }

    pub fn array(&mut self, element: u32, count: u32) -> u32 {
        let number = self.header("", 3 << 24, 0);
        self.words(&[element, U32, count]);
        number
    }

    /// Adds a structure. An anonymous structure has an empty name.
    pub fn structure(&mut self, name: &str, size: u32, members: &[Member<'_>]) -> u32 {
        let number = self.header(name, 4 << 24 | members.len() as u32, size);
        for (name, offset, of_type) in members {
            let name = self.name(name);
            self.words(&[name, *of_type, *offset]);
        }
        number
    }

    pub fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let number = self.header(name, 6 << 24 | values.len() as u32, 4);
        for (name, value) in values {
            let name = self.name(name);
            self.words(&[name, *value]);
        }
        number
    }

    pub fn finish(self) -> Vec<u8> {
        let mut out = 0x0001_eb9f_u32.to_le_bytes().to_vec();
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        for word in [24, 0, types, types, strings] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend(self.types);
        out.extend(self.strings);
        out
    }
}

/// The types that a discovery looks up, as 6.12 has them but smaller.
pub fn kernel() -> Types {
    let mut types = Types::new();
    let union = types.structure("", 8, &[("type", 0, U64), ("entries", 0, POINTER)]);
    let key = types.structure("static_key", 16, &[("enabled", 0, U32), ("", 64, union)]);
    let pointers = |names: &'static [&'static str]| -> Vec<Member<'static>> {
        (0..)
            .zip(names)
            .map(|(index, name)| (*name, 64 * index, POINTER))
            .collect()
    };
    types.structure("static_key_mod", 24, &pointers(&["next", "entries", "mod"]));
    types.structure(
        "tracepoint",
        48,
        &[
            ("name", 0, POINTER),
            ("key", 64, key),
            ("regfunc", 192, POINTER),
            ("unregfunc", 256, POINTER),
            ("funcs", 320, POINTER),
        ],
    );
    types.structure("mutex", 32, &[("owner", 0, U64)]);
    types.structure("bp_patching_desc", 16, &[("refs", 96, U32)]);
    let comm = types.array(U32, 4);
    types.structure(
        "task_struct",
        64,
        &[
            ("pid", 0, U32),
            ("tgid", 32, U32),
            ("stack_canary", 320, U64),
            ("comm", 384, comm),
        ],
    );
    types.structure("cpuinfo_x86", 64, &[("x86_capability", 0, U32)]);
    types.enumeration(
        "system_states",
        &[("SYSTEM_BOOTING", 0), ("SYSTEM_RUNNING", 3)],
    );
    types.enumeration(
        "module_state",
        &[
            ("MODULE_STATE_LIVE", 0),
            ("MODULE_STATE_COMING", 1),
            ("MODULE_STATE_UNFORMED", 3),
        ],
    );
    types.enumeration(
        "mod_mem_type",
        &[
            ("MOD_TEXT", 0),
            ("MOD_RO_AFTER_INIT", 1),
            ("MOD_INIT_TEXT", 2),
        ],
    );
    let list = types.structure("list_head", 16, &pointers(&["next", "prev"]));
    let name = types.array(U32, 14);
    let memory = types.structure(
        "module_memory",
        16,
        &[("base", 0, POINTER), ("size", 64, U32)],
    );
    let memories = types.array(memory, 4);
    types.structure(
        "module",
        256,
        &[
            ("state", 0, U32),
            ("list", 64, list),
            ("name", 192, name),
            ("mem", 640, memories),
            ("jump_entries", 1152, POINTER),
            ("num_jump_entries", 1216, U32),
            ("tracepoints_ptrs", 1280, POINTER),
            ("num_tracepoints", 1344, U32),
            ("kallsyms", 1408, POINTER),
        ],
    );
    types.structure(
        "mod_kallsyms",
        32,
        &[
            ("symtab", 0, POINTER),
            ("num_symtab", 64, U32),
            ("strtab", 128, POINTER),
        ],
    );
    let counter = types.structure("seqcount", 4, &[("sequence", 0, U32)]);
    let latch = types.structure("", 4, &[("seqcount", 0, counter)]);
    let root = types.structure("latch_tree_root", 24, &[("seq", 0, latch)]);
    types.structure("mod_tree_root", 40, &[("root", 0, root)]);
    types.structure(
        "ddebug_table",
        56,
        &[
            ("link", 0, list),
            ("num_ddebugs", 320, U32),
            ("ddebugs", 384, POINTER),
        ],
    );
    let debug = types.header("_ddebug", 1 << 31 | 4 << 24 | 7, 56);
    for (name, offset, of_type) in [
        ("modname", 0, POINTER),
        ("function", 64, POINTER),
        ("filename", 128, POINTER),
        ("format", 192, POINTER),
        ("lineno", 18 << 24 | 256, U32),
        ("class_id", 6 << 24 | 274, U32),
        ("key", 320, key),
    ] {
        let name = types.name(name);
        types.words(&[name, of_type, offset]);
    }
    assert!(debug > 0);
    log(&mut types);
    pressure(&mut types);
    types
}

/// The pressure of the kernel's tasks, as 6.12 has it without the pressure of interrupts.
fn pressure(types: &mut Types) {
    let averages = types.array(U64, 18);
    types.structure("psi_group", 208, &[("avg", 512, averages)]);
}

/// The types of the kernel's log, as 6.12 has them.
fn log(types: &mut Types) {
    let descriptors = types.structure(
        "prb_desc_ring",
        48,
        &[
            ("count_bits", 0, U32),
            ("descs", 64, POINTER),
            ("infos", 128, POINTER),
            ("head_id", 192, U64),
            ("tail_id", 256, U64),
            ("last_finalized_seq", 320, U64),
        ],
    );
    let texts = types.structure(
        "prb_data_ring",
        32,
        &[("size_bits", 0, U32), ("data", 64, POINTER)],
    );
    types.structure(
        "printk_ringbuffer",
        88,
        &[
            ("desc_ring", 0, descriptors),
            ("text_data_ring", 384, texts),
            ("fail", 640, U64),
        ],
    );
    let positions = types.structure(
        "prb_data_blk_lpos",
        16,
        &[("begin", 0, U64), ("next", 64, U64)],
    );
    types.structure(
        "prb_desc",
        24,
        &[("state_var", 0, U64), ("text_blk_lpos", 64, positions)],
    );
    let (subsystem, device) = (types.array(U32, 4), types.array(U32, 12));
    let device = types.structure(
        "dev_printk_info",
        64,
        &[("subsystem", 0, subsystem), ("device", 128, device)],
    );
    types.header("printk_info", 1 << 31 | 4 << 24 | 8, 88);
    for (name, offset, of_type) in [
        ("seq", 0, U64),
        ("ts_nsec", 64, U64),
        ("text_len", 128, U32),
        ("facility", 144, U32),
        ("flags", 5 << 24 | 152, U32),
        ("level", 3 << 24 | 157, U32),
        ("caller_id", 160, U32),
        ("dev_info", 192, device),
    ] {
        let name = types.name(name);
        types.words(&[name, of_type, offset]);
    }
}
