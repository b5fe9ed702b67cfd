// SPDX-License-Identifier: Apache-2.0
//! The offsets in the kernel's structures, read from BTF, and the symbols that are looked up.

use patchbay_observe::{log, state, tasks, trace};

use super::error::{DiscoveryError, refuse};
use crate::btf::Btf;
use crate::classes::{DebugLayout, debug_layout};

/// Every symbol that is looked up by name.
pub(super) const SYMBOLS: &[&str] = &[
    "__end_ro_after_init",
    "__end_rodata",
    "__init_begin",
    "__init_end",
    "__per_cpu_offset",
    "__start_BTF",
    "__start___dyndbg",
    "__start___jump_table",
    "__start___tracepoints_ptrs",
    "__start_notes",
    "__start_ro_after_init",
    "__start_rodata",
    "__stop_BTF",
    "__stop___dyndbg",
    "__stop___jump_table",
    "__stop___tracepoints_ptrs",
    "__stop_notes",
    "_end",
    "_etext",
    "_stext",
    "_text",
    "asm_exc_divide_error",
    "asm_fred_entrypoint_kernel",
    "asm_fred_entrypoint_user",
    "boot_cpu_data",
    "bp_desc",
    "ddebug_lock",
    "ddebug_tables",
    "divide_error",
    "ideal_nops",
    "init_task",
    "init_top_pgt",
    "jump_label_mutex",
    "linux_banner",
    "mod_tree",
    "module_mutex",
    "modules",
    "__cpu_possible_mask",
    log::SYMBOL,
    state::LOAD,
    state::NO_PRESSURE,
    state::OOPSES,
    state::PANIC,
    state::PRESSURE,
    state::TAINTS,
    state::TIMEKEEPERS[0],
    state::TIMEKEEPERS[1],
    state::WARNINGS,
    tasks::CURRENT[0],
    tasks::CURRENT[1],
    tasks::CURRENT[2],
    tasks::ONLINE,
    trace::ARRAYS,
    trace::COMMON_FIELDS,
    trace::CPUS,
    trace::EVENTS,
    trace::SYSCALL_FIELDS,
    "sched_feat_keys",
    "sched_feat_names",
    "system_state",
    "text_mutex",
    "text_poke_array",
    "text_poke_array_refs",
    "tp_vec_nr",
    "tracepoints_mutex",
    "vmcoreinfo_data",
];

/// Symbols that every kernel has, but that kallsyms contains only with CONFIG_KALLSYMS_ALL.
pub(super) const DATA_SYMBOLS: &[&str] = &[
    "__end_ro_after_init",
    "__init_begin",
    "__init_end",
    "__start___jump_table",
    "__start_ro_after_init",
    "__stop___jump_table",
    "_end",
    "_etext",
    "init_top_pgt",
    "jump_label_mutex",
    "linux_banner",
    "system_state",
    "text_mutex",
];

/// Returns every type that is looked up by name.
pub(super) fn types() -> Vec<&'static str> {
    [TYPES, log::TYPES, state::TYPES, tasks::TYPES, trace::TYPES].concat()
}

/// The types that a discovery of keys looks up.
const TYPES: &[&str] = &[
    "_ddebug",
    "bp_patching_desc",
    "cpuinfo_x86",
    "ddebug_table",
    "mod_kallsyms",
    "mod_mem_type",
    "mod_tree_root",
    "module",
    "module_layout",
    "module_memory",
    "module_state",
    "mutex",
    "smp_text_poke_array",
    "static_key",
    "static_key_mod",
    "system_states",
    "task_struct",
    "text_poke_array",
    "tracepoint",
    "tracepoint_ext",
];

/// The layout of the kernel's structures: offsets and sizes in bytes, and values of enumerators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The offsets that the engine needs to change keys.
    pub keys: static_keys::Layout,
    /// Size of `struct static_key`.
    pub static_key_size: u32,
    /// Size of `struct tracepoint`. Without tracepoints, this and all other fields for tracepoints
    /// are 0 or `None`.
    pub tracepoint_size: u32,
    /// `tracepoint.name`.
    pub tracepoint_name: u32,
    /// `tracepoint.ext`, which since 6.14 is NULL or points to a `struct tracepoint_ext`.
    pub tracepoint_ext: Option<u32>,
    /// `regfunc`, in `struct tracepoint_ext` if the kernel has one, else in `struct tracepoint`.
    pub tracepoint_regfunc: u32,
    /// `unregfunc`, in the same structure as `tracepoint_regfunc`.
    pub tracepoint_unregfunc: u32,
    /// `module.jump_entries`.
    pub module_jump_entries: u32,
    /// `module.num_jump_entries`.
    pub module_num_jump_entries: u32,
    /// The word in `struct mutex` that holds the owner.
    pub mutex_owner: u32,
    /// The bits of the owner word of a `struct mutex` that identify the owner.
    pub mutex_owner_mask: u64,
    /// `SYSTEM_RUNNING`.
    pub system_running: u32,
}

/// The parts of the layout that only a discovery needs.
#[derive(Clone, Debug)]
pub(super) struct Inner {
    pub ddebug: Option<DebugLayout>,
    pub ddebug_table: Option<DdebugTable>,
    pub module: Module,
    pub stack_canary: Option<u32>,
    pub cpu_capability: Option<u32>,
    pub mod_tree_sequence: Option<u32>,
    /// `refs` of the structure of `bp_desc`.
    pub bp_desc_refs: Option<u32>,
    /// `nr_entries` of `text_poke_array`.
    pub text_poke_array_nr: Option<u32>,
    /// The kernel's log, or the reason why it cannot be read.
    pub log: Result<log::Layout, String>,
    /// Offset of the averages in the `struct psi_group`.
    pub pressure: Option<u64>,
    /// Offsets of the time in a timekeeper.
    pub timekeeper: Option<state::Timekeeper>,
    /// The kernel's tasks, or the reason why they cannot be read.
    pub tasks: Result<tasks::Layout, String>,
    /// The kernel's trace events, or the reason why they cannot be read.
    pub trace: Result<trace::Layout, String>,
}

/// `struct ddebug_table`.
#[derive(Clone, Copy, Debug)]
pub(super) struct DdebugTable {
    pub link: u32,
    pub descriptors: u32,
    pub count: u32,
}

/// `struct module`.
#[derive(Clone, Debug, Default)]
pub(super) struct Module {
    pub list: u32,
    pub name: u32,
    pub name_size: u32,
    /// Values of states that are not live.
    pub states: Vec<(u32, &'static str)>,
    pub kallsyms: u32,
    pub symtab: u32,
    pub num_symtab: u32,
    pub strtab: u32,
    pub tracepoints: Option<(u32, u32)>,
    pub memory: Memory,
}

impl Module {
    /// Returns the kernel's name for a state of a module.
    pub fn state_name(&self, state: u32) -> &'static str {
        let mut states = self.states.iter();
        states
            .find(|(value, _)| *value == state)
            .map_or("of an unknown state", |(_, name)| name)
    }
}

/// Members of `struct module` that describe the module's memory.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    /// `mem[]`, since 6.4: the offset of the array, the size and the number of its elements, the
    /// offsets of `base` and `size` in an element, and the indices of text, ro-after-init data and
    /// init text.
    Array {
        at: u32,
        stride: u32,
        count: u32,
        base: u32,
        size: u32,
        text: u32,
        ro_after_init: u32,
        init_text: u32,
    },
    /// `core_layout` and `init_layout`, and the offsets of the members of each.
    Layouts {
        core: u32,
        init: u32,
        base: u32,
        size: u32,
        text_size: u32,
        ro_size: u32,
        ro_after_init_size: u32,
    },
}

impl Default for Memory {
    fn default() -> Self {
        Self::Layouts {
            core: 0,
            init: 0,
            base: 0,
            size: 0,
            text_size: 0,
            ro_size: 0,
            ro_after_init_size: 0,
        }
    }
}

/// The types of a kernel. A lookup fails if a type or member that every kernel has is missing.
struct Required<'data> {
    btf: Btf<'data>,
    /// The origin of the types, for errors.
    whose: &'static str,
}

impl Required<'_> {
    fn offset(&self, structure: &str, path: &[&str]) -> Result<u32, DiscoveryError> {
        match self.btf.offset(structure, path) {
            Some(offset) => Ok(offset),
            None => refuse(format!(
                "{} has no member {} in struct {structure}",
                self.whose,
                path.join(".")
            )),
        }
    }

    fn enumerator(&self, enumeration: &str, name: &str) -> Result<u32, DiscoveryError> {
        match self.btf.enumerator(enumeration, name) {
            Some(value) => Ok(value),
            None => refuse(format!("{} has no enumerator {name}", self.whose)),
        }
    }
}

/// Reads the offsets from BTF. `whose` names the origin of the BTF in errors. `has_modules` is true
/// if `struct module` is required.
pub(super) fn read(
    data: &[u8],
    whose: &'static str,
    has_modules: bool,
) -> Result<(Layout, Inner), DiscoveryError> {
    let types = match Btf::parse(data, &types()) {
        Ok(btf) => Required { btf, whose },
        Err(error) => return refuse(format!("{whose} cannot be read: {error}")),
    };
    let offset = |structure: &str, path: &[&str]| types.offset(structure, path);
    let btf = &types.btf;
    // PREEMPT_RT's mutex is an rt_mutex, whose owner has one flag instead of three
    // (kernel/locking/mutex.h, rtmutex_common.h).
    let (mutex_owner, mutex_owner_mask) = match btf.offset("mutex", &["owner"]) {
        Some(owner) => (owner, !7),
        None => (offset("mutex", &["rtmutex", "owner"])?, !1),
    };
    let mut layout = Layout {
        keys: static_keys::Layout {
            static_key_type: offset("static_key", &["type"])?,
            static_key_mod_next: offset("static_key_mod", &["next"])?,
            static_key_mod_entries: offset("static_key_mod", &["entries"])?,
            static_key_mod_mod: offset("static_key_mod", &["mod"])?,
            ..static_keys::Layout::default()
        },
        static_key_size: btf.size("static_key").unwrap_or(0),
        mutex_owner,
        mutex_owner_mask,
        system_running: types.enumerator("system_states", "SYSTEM_RUNNING")?,
        ..Layout::default()
    };
    if has_modules {
        layout.keys.module_state = offset("module", &["state"])?;
        layout.keys.module_state_live = types.enumerator("module_state", "MODULE_STATE_LIVE")?;
        layout.module_jump_entries = offset("module", &["jump_entries"])?;
        layout.module_num_jump_entries = offset("module", &["num_jump_entries"])?;
    }
    if let Some(size) = btf.size("tracepoint") {
        layout.tracepoint_size = size;
        layout.tracepoint_name = offset("tracepoint", &["name"])?;
        layout.keys.tracepoint_key = offset("tracepoint", &["key"])?;
        layout.keys.tracepoint_funcs = offset("tracepoint", &["funcs"])?;
        layout.tracepoint_ext = btf.offset("tracepoint", &["ext"]);
        let holder = match layout.tracepoint_ext {
            Some(_) => "tracepoint_ext",
            None => "tracepoint",
        };
        layout.tracepoint_regfunc = offset(holder, &["regfunc"])?;
        layout.tracepoint_unregfunc = offset(holder, &["unregfunc"])?;
    }
    let inner = Inner {
        ddebug: debug_layout(btf),
        ddebug_table: ddebug_table(btf),
        module: match has_modules {
            true => module(&types)?,
            false => Module::default(),
        },
        stack_canary: btf.offset("task_struct", &["stack_canary"]),
        cpu_capability: btf.offset("cpuinfo_x86", &["x86_capability"]),
        mod_tree_sequence: btf
            .offset("mod_tree_root", &["root", "seq", "seqcount", "sequence"])
            .or_else(|| btf.offset("mod_tree_root", &["root", "seq", "sequence"])),
        bp_desc_refs: btf.offset("bp_patching_desc", &["refs"]),
        text_poke_array_nr: btf
            .offset("smp_text_poke_array", &["nr_entries"])
            .or_else(|| btf.offset("text_poke_array", &["nr_entries"])),
        log: log::Layout::read(btf).map_err(|why| format!("{whose} does not describe it: {why}")),
        pressure: state::averages(btf),
        timekeeper: state::Timekeeper::find(btf),
        tasks: tasks::Layout::read(btf),
        trace: trace::Layout::read(btf)
            .map_err(|why| format!("{whose} does not describe them: {why}; kernels that are built without CONFIG_TRACING have none")),
    };
    Ok((layout, inner))
}

fn ddebug_table(btf: &Btf<'_>) -> Option<DdebugTable> {
    let offset = |path: &[&str]| btf.offset("ddebug_table", path);
    Some(DdebugTable {
        link: offset(&["link"])?,
        descriptors: offset(&["ddebugs"])?,
        count: offset(&["num_ddebugs"])?,
    })
}

fn module(types: &Required<'_>) -> Result<Module, DiscoveryError> {
    let btf = &types.btf;
    let offset = |structure: &str, path: &[&str]| types.offset(structure, path);
    let name_size = btf
        .member("module", &["name"])
        .and_then(|name| btf.size_of_member(name));
    Ok(Module {
        list: offset("module", &["list"])?,
        name: offset("module", &["name"])?,
        name_size: name_size.unwrap_or(0).min(256),
        states: [
            ("MODULE_STATE_COMING", "COMING"),
            ("MODULE_STATE_GOING", "GOING"),
            ("MODULE_STATE_UNFORMED", "UNFORMED"),
        ]
        .into_iter()
        .filter_map(|(enumerator, name)| Some((btf.enumerator("module_state", enumerator)?, name)))
        .collect(),
        kallsyms: offset("module", &["kallsyms"])?,
        symtab: offset("mod_kallsyms", &["symtab"])?,
        num_symtab: offset("mod_kallsyms", &["num_symtab"])?,
        strtab: offset("mod_kallsyms", &["strtab"])?,
        tracepoints: btf
            .offset("module", &["tracepoints_ptrs"])
            .zip(btf.offset("module", &["num_tracepoints"])),
        memory: memory(types)?,
    })
}

fn memory(types: &Required<'_>) -> Result<Memory, DiscoveryError> {
    let btf = &types.btf;
    let offset = |structure: &str, path: &[&str]| types.offset(structure, path);
    let enumerator = |name: &str| types.enumerator("mod_mem_type", name);
    let Some(array) = btf.member("module", &["mem"]) else {
        return Ok(Memory::Layouts {
            core: offset("module", &["core_layout"])?,
            init: offset("module", &["init_layout"])?,
            base: offset("module_layout", &["base"])?,
            size: offset("module_layout", &["size"])?,
            text_size: offset("module_layout", &["text_size"])?,
            ro_size: offset("module_layout", &["ro_size"])?,
            ro_after_init_size: offset("module_layout", &["ro_after_init_size"])?,
        });
    };
    let sizes = btf.size_of_member(array).zip(btf.size("module_memory"));
    let Some((total, stride)) = sizes.filter(|(_, stride)| *stride > 0) else {
        return refuse(format!(
            "{} does not tell the size of struct module_memory",
            types.whose
        ));
    };
    Ok(Memory::Array {
        at: array.offset,
        stride,
        count: (total / stride).min(16),
        base: offset("module_memory", &["base"])?,
        size: offset("module_memory", &["size"])?,
        text: enumerator("MOD_TEXT")?,
        ro_after_init: enumerator("MOD_RO_AFTER_INIT")?,
        init_text: enumerator("MOD_INIT_TEXT")?,
    })
}
