// SPDX-License-Identifier: Apache-2.0
//! A guest with a small kernel and a module, byte by byte.

use patchbay_memory::Cpu;

use crate::craft_btf;
use crate::craft_kallsyms::{Layout, Order};

#[path = "craft_memory.rs"]
mod craft_memory;
pub use craft_memory::*;

/// `_DPRINTK_CLASS_DFLT`.
const NO_CLASS: u32 = 63;

/// An area that is filled from its start.
struct Area {
    at: u64,
}

impl Area {
    fn take(&mut self, size: u64) -> u64 {
        self.at = self.at.next_multiple_of(8);
        let at = self.at;
        self.at += size;
        at
    }
}

/// A branch: the addresses of its key and of its site, and the flags of its entry.
pub struct Branch {
    pub key: u64,
    pub site: u64,
    pub flags: u64,
}

pub const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// A JMP to the address of the site plus 0x20.
pub const JMP5: [u8; 5] = [0xe9, 0x1b, 0, 0, 0];
pub const RELEASE: &str = "6.12.1-crafted";

/// Writes the jump table of these branches to `table`. The branches are sorted by key.
fn jump_table(guest: &CraftedGuest, table: u64, branches: &[Branch]) {
    for (index, branch) in (0..).zip(branches) {
        let at = table + 16 * index;
        let relative = |target: u64, own: u64| (target.wrapping_sub(own) as u32).to_le_bytes();
        guest.put(at, &relative(branch.site, at));
        guest.put(at + 4, &relative(branch.site + 0x20, at + 4));
        guest.put_u64(at + 8, branch.key.wrapping_sub(at + 8) | branch.flags);
    }
}

/// A kernel with a guarded key that a module uses too, a tracepoint, a line of dynamic debug, a
/// hook of a security module, a sealed key, a branch in init text, and a module with a key of its
/// own.
pub fn guest() -> CraftedGuest {
    craft(NOP5, false, &|_, _| true, &|name| name)
}

/// A kernel whose kallsyms lack a symbol.
pub fn guest_without(symbol: &str) -> CraftedGuest {
    craft(NOP5, false, &|_, name| name != symbol, &|name| name)
}

/// A kernel whose kallsyms have other names, letter included.
pub fn guest_renamed(rename: &dyn Fn(String) -> String) -> CraftedGuest {
    craft(NOP5, false, &|_, _| true, rename)
}

/// A kernel that handles exceptions by FRED, so that it has no IDT. `msrs` says whether the monitor
/// reads MSRs.
pub fn guest_with_fred(msrs: bool) -> CraftedGuest {
    let mut guest = guest();
    guest.put_physical(IDT_PAGE, &[0; 16]);
    for cpu in &mut guest.cpus {
        cpu.idt_base = 0;
        // QEMU's HMP shows only the lower half of CR4.
        cpu.cr4 |= if msrs { 1 << 32 } else { 0 };
        cpu.fred_config = msrs.then_some(TEXT | 0x41);
    }
    guest
}

/// A kernel that was started with `rodata=off`: all of the image except a freed page is writable
/// and executable.
pub fn guest_without_protection() -> CraftedGuest {
    let guest = guest();
    let freed = guest.symbol("__init_begin");
    for page in 0..40 {
        let address = TEXT + page * PAGE;
        let (at, entry) = guest.entry(address);
        let entry = match address == freed {
            true => entry | 2 | 1 << 63,
            false => (entry | 2) & !(1 << 63),
        };
        guest.put_physical(at, &entry.to_le_bytes());
    }
    guest
}

/// A kernel without CONFIG_KALLSYMS_ALL: its kallsyms have the symbols of text, except `_etext`.
pub fn guest_without_data_symbols() -> CraftedGuest {
    let is_text = |address, _: &str| (TEXT..ETEXT).contains(&address);
    craft(NOP5, false, &is_text, &|name| name)
}

/// A kernel before 5.13, which chose this NOP when it booted.
pub fn guest_with_ideal_nop(nop: [u8; 5]) -> CraftedGuest {
    craft(nop, true, &|_, _| true, &|name| name)
}

/// Builds a guest. `keep` selects the symbols that are in kallsyms, and `rename` returns their
/// names there.
fn craft(
    nop: [u8; 5],
    ideal: bool,
    keep: &dyn Fn(u64, &str) -> bool,
    rename: &dyn Fn(String) -> String,
) -> CraftedGuest {
    let mut guest = CraftedGuest::new(nop);
    let mut constants = Area { at: RODATA };
    text_symbols(&mut guest);
    data_symbols(&mut guest);
    texts(&mut guest, &mut constants);
    if ideal {
        ideal_nops(&mut guest, &mut constants);
    }
    let table = branches(&mut guest, &mut constants);
    fill_words(&guest);
    module(&guest, table);
    note(&guest);
    let kallsyms = constants.take(0);
    guest.listed.sort();
    let mut kept = guest.listed.clone();
    // The first letter is the symbol's type.
    kept.retain(|(address, name)| keep(*address, &name[1..]));
    for (_, name) in &mut kept {
        *name = rename(std::mem::take(name));
    }
    let layout = Layout {
        pointer: 8,
        base: kallsyms,
        relative_base: TEXT,
        order: Order::After,
        percpu: true,
        seqs_between: false,
    };
    let arrays = layout.arrays(&kept);
    assert!(kallsyms + arrays.len() as u64 <= DATA);
    guest.put(kallsyms, &arrays);
    page_tables(&mut guest);
    guest
}

fn text_symbols(guest: &mut CraftedGuest) {
    for (symbol, address) in [
        ("_text", TEXT),
        ("_stext", TEXT),
        ("asm_exc_divide_error", TEXT + 0x10),
        ("function_a", TEXT + 0x100),
        ("function_b", TEXT + 0x200),
        ("trace_event_raw_event_test", TEXT + 0x7e0),
        ("probe_sched_switch", TEXT + 0x7f0),
        ("_etext", ETEXT),
        ("asm_fred_entrypoint_user", TEXT),
    ] {
        guest.name(address, 'T', symbol);
    }
    // This symbol is local, so that the site at its address resolves to the global `function_a`.
    guest.name(TEXT + 0x100, 't', "asm_fred_entrypoint_kernel");
    for index in 0..1100 {
        guest.name(TEXT + 0x800 + index, 't', &format!("filler_{index}"));
    }
}

fn data_symbols(guest: &mut CraftedGuest) {
    let mut data = Area { at: DATA };
    guest.name(data.take(PAGE), 'D', "init_top_pgt");
    for symbol in [
        "system_state",
        "panic_cpu",
        "jump_label_mutex",
        "text_mutex",
        "tracepoints_mutex",
        "ddebug_lock",
        "module_mutex",
        "tp_vec_nr",
        "bp_desc",
        "mod_tree",
        "modules",
        "init_task",
        "boot_cpu_data",
        "vmcoreinfo_data",
        "ddebug_tables",
        "alpha",
        "security_hook_active_capable_0",
        "shared",
        "__tracepoint_event",
        "prb",
        "tainted_mask",
        "avenrun",
        "warn_count",
        "oops_count",
        "psi_system",
        "psi_disabled",
        "nr_cpu_ids",
        "__cpu_online_mask",
        "__per_cpu_offset",
    ] {
        guest.name(data.take(64), 'D', symbol);
    }
    // Before 6.15, the symbols of per-CPU variables are offsets.
    guest.name(0x1f000, 'A', "cpu_variable");
    guest.name(0x1f008, 'A', "current_task");
    guest.name(RODATA, 'D', "__start_rodata");
    guest.name(DATA, 'D', "__end_rodata");
    // A second key with the name `shared`.
    guest.listed.push((data.take(64), "dshared".to_owned()));
    guest
        .symbols
        .insert("second shared".to_owned(), data.at - 64);
    guest.name(data.take(56), 'D', "__start___dyndbg");
    guest.name(data.take(0), 'D', "__stop___dyndbg");
    guest.name(data.take(0), 'D', "__start_ro_after_init");
    guest.name(data.take(64), 'D', "sealed");
    guest.name(data.take(0), 'D', "__end_ro_after_init");
    let init = (data.at | 0xfff) + 1;
    guest.name(init, 'D', "__init_begin");
    guest.name(init + PAGE, 'D', "__init_end");
    guest.name(init + PAGE, 'D', "_end");
}

/// Writes the read-only data without the jump table.
fn texts(guest: &mut CraftedGuest, constants: &mut Area) {
    let mut text = |text: &str| {
        let at = constants.take(text.len() as u64 + 1);
        guest.put(at, text.as_bytes());
        at
    };
    let banner = text(&format!("Linux version {RELEASE} (nobody@nowhere) #1\n"));
    let event = text("event");
    let words = ["mod", "function_b", "net/core/dev.c", "line %d\n"].map(text);
    let tracepoint = guest.symbol("__tracepoint_event");
    guest.put_u64(tracepoint, event);
    let line = guest.symbol("__start___dyndbg");
    for (index, word) in (0..).zip(words) {
        guest.put_u64(line + 8 * index, word);
    }
    guest.put_u32(line + 32, 123 | NO_CLASS << 18);
    let btf = craft_btf::kernel().finish();
    let btf_at = constants.take(btf.len() as u64);
    guest.put(btf_at, &btf);
    let pointers = constants.take(4);
    let notes = note_section(&[0, 0xff]);
    let notes_at = constants.take(notes.len() as u64);
    guest.put(notes_at, &notes);
    guest.put_u32(pointers, tracepoint.wrapping_sub(pointers) as u32);
    guest.name(banner, 'D', "linux_banner");
    guest.name(btf_at, 'D', "__start_BTF");
    guest.name(btf_at + btf.len() as u64, 'D', "__stop_BTF");
    guest.name(pointers, 'D', "__start___tracepoints_ptrs");
    guest.name(pointers + 4, 'D', "__stop___tracepoints_ptrs");
    guest.name(notes_at, 'R', "__start_notes");
    guest.name(notes_at + notes.len() as u64, 'R', "__stop_notes");
}

/// The section `.notes`: a note of another kind, and the build id.
pub fn note_section(build_id: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, kind, content) in [
        (&b"Linux\0"[..], 0x100_u32, &[1, 0, 0][..]),
        (b"GNU\0", 3, build_id),
    ] {
        let lengths = [name.len() as u32, content.len() as u32, kind];
        out.extend(lengths.into_iter().flat_map(u32::to_le_bytes));
        for bytes in [name, content] {
            out.extend_from_slice(bytes);
            out.resize(out.len().next_multiple_of(4), 0);
        }
    }
    out
}

/// Writes `ideal_nops`, which points to an array of pointers to NOPs.
fn ideal_nops(guest: &mut CraftedGuest, constants: &mut Area) {
    let (nop, array) = (constants.take(5), constants.take(10 * 8));
    guest.put(nop, &guest.nop);
    guest.put_u64(array + 9 * 8, nop);
    let pointer = constants.take(8);
    guest.put_u64(pointer, array);
    guest.name(pointer, 'r', "ideal_nops");
}

/// Writes the kernel's sites and its jump table. Returns the address of the table.
fn branches(guest: &mut CraftedGuest, constants: &mut Area) -> u64 {
    let (alpha, init) = (guest.symbol("alpha"), guest.symbol("__init_begin"));
    let mut branches = vec![
        (alpha, TEXT + 0x100, 0),
        // These two sites lie in init text, whose freed page may hold anything. The second entry
        // has no init bit, like that of a site in `.exit.text`.
        (alpha, init + 0x40, 2),
        (alpha, init + 0x80, 0),
        (
            guest.symbol("security_hook_active_capable_0"),
            TEXT + 0x140,
            0,
        ),
        (guest.symbol("shared"), TEXT + 0x180, 0),
        (guest.symbol("__tracepoint_event") + 8, TEXT + 0x200, 0),
        (guest.symbol("second shared"), TEXT + 0x240, 0),
        (guest.symbol("__start___dyndbg") + 40, TEXT + 0x280, 0),
        (guest.symbol("sealed"), TEXT + 0x2c0, 0),
    ];
    branches.sort_unstable();
    let branches: Vec<Branch> = branches
        .into_iter()
        .map(|(key, site, flags)| Branch { key, site, flags })
        .collect();
    let table = constants.take(16 * branches.len() as u64);
    jump_table(guest, table, &branches);
    guest.name(table, 'D', "__start___jump_table");
    guest.name(
        table + 16 * branches.len() as u64,
        'D',
        "__stop___jump_table",
    );
    for branch in branches.iter().filter(|branch| branch.site < init) {
        guest.put(branch.site, &guest.nop);
        let mut others = branches.iter();
        let first = others.position(|other| other.key == branch.key).unwrap();
        guest.put_u64(branch.key + 8, table + 16 * first as u64);
    }
    guest.put(TEXT + 0x2c0, &JMP5);
    guest.put_u32(guest.symbol("sealed"), 1);
    table
}

fn fill_words(guest: &CraftedGuest) {
    guest.put_u32(guest.symbol("system_state"), 3);
    guest.put_u32(guest.symbol("panic_cpu"), u32::MAX);
    guest.put_u64(guest.symbol("init_task") + 40, 0x1234_5678_9abc_de00);
    for list in ["modules", "ddebug_tables"] {
        let head = guest.symbol(list);
        guest.put_u64(head, head);
        guest.put_u64(head + 8, head);
    }
}

/// Writes the module `mod` with the key `own`, a site of it, and one of the kernel's `alpha`.
fn module(guest: &CraftedGuest, kernel_table: u64) {
    let (structure, own) = (MODULE_DATA, MODULE_DATA + 0x200);
    let (table, chain) = (MODULE_DATA + 0x400, MODULE_DATA + 0x500);
    let (kallsyms, symtab, strtab) = (
        MODULE_DATA + 0x600,
        MODULE_DATA + 0x640,
        MODULE_DATA + 0x700,
    );
    let alpha = guest.symbol("alpha");
    let head = guest.symbol("modules");
    for (address, value) in [
        (head, structure + 8),
        (head + 8, structure + 8),
        (structure + 8, head),
        (structure + 16, head),
        // mem[]: text, sealed, init text, data.
        (structure + 80, MODULE_TEXT),
        (structure + 88, PAGE),
        (structure + 96, MODULE_DATA + 0x800),
        (structure + 104, 0x100),
        (structure + 128, MODULE_DATA),
        (structure + 136, 0x800),
        (structure + 144, table),
        (structure + 152, 2),
        (structure + 176, kallsyms),
        (kallsyms, symtab),
        (kallsyms + 8, 3),
        (kallsyms + 16, strtab),
        // alpha: first the module's entries, then the kernel's.
        (alpha + 8, chain | 2),
        (chain, chain + 24),
        (chain + 8, table),
        (chain + 16, structure),
        (chain + 32, kernel_table),
    ] {
        guest.put_u64(address, value);
    }
    guest.put(structure + 24, b"mod\0");
    let branches = [
        Branch {
            key: alpha,
            site: MODULE_TEXT + 0x40,
            flags: 0,
        },
        Branch {
            key: own,
            site: MODULE_TEXT + 0x80,
            flags: 1,
        },
    ];
    jump_table(guest, table, &branches);
    guest.put_u64(own + 8, (table + 16) | 1);
    guest.put_u32(own, 1);
    for branch in &branches {
        guest.put(branch.site, &guest.nop);
    }
    guest.put(strtab, b"\0own\0module_function\0");
    for (index, (name, info, address)) in
        (1..).zip([(1_u32, 0x11_u8, own), (5, 0x12, MODULE_TEXT + 0x30)])
    {
        let at = symtab + 24 * index;
        guest.put_u32(at, name);
        guest.put(at + 4, &[info, 0, 1, 0]);
        guest.put_u64(at + 8, address);
    }
}

/// The VMCOREINFO text of the kernel.
pub fn note_text(guest: &CraftedGuest) -> String {
    let (root, phys_base) = (
        guest.symbol("init_top_pgt"),
        IMAGE.wrapping_sub(0x100_0000).cast_signed(),
    );
    format!(
        "OSRELEASE={RELEASE}\nBUILD-ID=00ff\nSYMBOL(init_top_pgt)={root:x}\nSYMBOL(_stext)={TEXT:x}\n\
         SYMBOL(kallsyms_names)={RODATA:x}\nNUMBER(phys_base)={phys_base}\nNUMBER(pgtable_l5_enabled)=0\nKERNELOFFSET=0\n\
         NUMBER(sme_mask)=0\n"
    )
}

fn note(guest: &CraftedGuest) {
    guest.put_physical(NOTE, note_text(guest).as_bytes());
    guest.put_u64(guest.symbol("vmcoreinfo_data"), DIRECT + NOTE);
}

fn page_tables(guest: &mut CraftedGuest) {
    const CONSTANT: u64 = 1 | 1 << 63;
    const WRITABLE: u64 = 3 | 1 << 63;
    let mut tables = TABLES;
    guest.map(&mut tables, TEXT, IMAGE, 1, 1);
    guest.map(&mut tables, RODATA, physical(RODATA), 31, CONSTANT);
    guest.map(&mut tables, DATA, physical(DATA), 8, WRITABLE);
    guest.map(&mut tables, MODULE_TEXT, MODULE, 1, 1);
    guest.map(&mut tables, MODULE_DATA, MODULE + PAGE, 1, WRITABLE);
    guest.map(&mut tables, IDT, IDT_PAGE, 1, CONSTANT);
    // One page of 1 GiB maps all of RAM at [`DIRECT`].
    let (root, level_3) = (physical(guest.symbol("init_top_pgt")), tables);
    let index = DIRECT >> 39 & 0x1ff;
    guest.put_physical(root + 8 * index, &(level_3 | 3).to_le_bytes());
    guest.put_physical(level_3, &(WRITABLE | 1 << 7).to_le_bytes());
    assert!(level_3 + PAGE <= RAM);

    let handler = u128::from(guest.symbol("asm_exc_divide_error"));
    let gate = handler & 0xffff | (handler >> 16) << 48 | 0x8e00 << 32 | 0x10 << 16;
    guest.put_physical(IDT_PAGE, &gate.to_le_bytes());
    guest.cpus = vec![
        Cpu {
            cr0: 0x8005_0033,
            cr3: root,
            cr4: 0x20,
            idt_base: IDT,
            fred_config: None,
            may_be_nested: false,
        };
        2
    ];
}
