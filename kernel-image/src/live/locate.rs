// SPDX-License-Identifier: Apache-2.0
//! Finds the running kernel: its page table, its image and its symbols.
//!
//! | way | starts from | proven by |
//! |---|---|---|
//! | image | CR3 and the IDT of a vCPU | gate 0 of every vCPU's IDT is `asm_exc_divide_error` of the symbols found, every vCPU's CR3 maps the image, VMCOREINFO says the same |
//! | note | a VMCOREINFO text found in memory | the tests in `note.rs`, and the same gate of the IDT that the kernel maps |
//!
//! From here on the kernel's own page table is used, `init_top_pgt`, never that of a process.

use std::ops::Range;
use std::sync::Arc;

use super::debug_file::{self, DebugFile};
use super::debug_folder::DebugFiles;
use super::error::{DiscoveryError, GIVE_FILE, busy, refuse};
use super::layout;
use super::memory::{Cpu, PhysicalMemory, View};
use super::note::{self, Note};
use super::paging::{IMAGE_MAP, PAGE, PageTable, Run};
use super::parts::Clock;
use super::{FileUse, NoteFound, Way};
use crate::classes::Memory;
use crate::image::Image;
use crate::kallsyms::{self, KallsymsError};
use crate::symbols::{Named, Symbols};

/// Address of the read-only mapping of the IDT (arch/x86/include/asm/cpu_entry_area.h).
const CPU_ENTRY_AREA: u64 = 0xffff_fe00_0000_0000;
/// Most read-only data of an image; a distribution kernel has 14 MiB.
const MAX_CONSTANT: u64 = 128 << 20;

/// A kernel that was found.
pub(super) struct Located<'m, M: ?Sized> {
    /// Through the kernel's own page table.
    pub view: View<'m, M>,
    pub anchors: Arc<Anchors>,
    /// vCPUs that run it.
    pub cpus: usize,
}

/// What does not change while the kernel runs.
pub(super) struct Anchors {
    /// The kernel's own.
    table: PageTable,
    /// What it maps of the image.
    runs: Vec<Run>,
    pub symbols: Arc<Symbols>,
    pub named: Named,
    /// `_text` to `_end`.
    pub image: Range<u64>,
    /// Guest-virtual less guest-physical addresses of the image, less the start of its mapping.
    pub phys_base: u64,
    pub release: String,
    pub banner: String,
    pub build_id: String,
    pub kaslr_offset: Option<u64>,
    pub note: NoteFound,
    pub file: Option<FileUse>,
}

/// A page table that maps a kernel image, and the handler of its gate 0.
struct Candidate {
    table: PageTable,
    runs: Vec<Run>,
    handler: u64,
}

/// Also returns the file that it needed.
pub(super) fn locate<'m, 'f, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    way: Way,
    files: Option<&'f mut DebugFiles>,
    clock: &mut Clock,
) -> Result<(Located<'m, M>, Option<&'f DebugFile>), DiscoveryError> {
    let (candidate, note) = match way {
        Way::Image => (from_cpus(memory, cpus)?, None),
        Way::Note => {
            let (note, read) = note::find(memory, cpus)?;
            clock.part("search for VMCOREINFO", read);
            clock.restart();
            (from_note(memory, &note)?, Some(note))
        }
    };
    let mut view = View::new(memory, candidate.table);
    copy_constant(&mut view, &candidate.runs)?;
    clock.part("image", view.copied());
    let mut symbols = symbols(&view, &candidate)?;
    let mut named = symbols.look_up(layout::SYMBOLS);
    clock.part("kallsyms", view.copied());
    check_gate(&named, candidate.handler, "the first vCPU")?;
    let file = complete(&mut symbols, &mut named, files, &view, &candidate)?;
    if file.is_some() {
        clock.part("debug file", view.copied());
    }

    let text = required(&named, "_stext")?;
    let image = required(&named, "_text")?..required(&named, "_end")?;
    let Some(mapping) = view.table.translate(memory, image.start) else {
        return refuse("_text is not mapped: kallsyms and the page table disagree");
    };
    let phys_base = mapping
        .physical
        .wrapping_sub(image.start.wrapping_sub(IMAGE_MAP));
    let root = required(&named, "init_top_pgt")?;
    let Some(own) = view.table.translate(memory, root) else {
        return refuse("init_top_pgt is not mapped: kallsyms and the page table disagree");
    };
    view.table.root = own.physical;
    if view.table.image_runs(memory).as_ref() != Some(&candidate.runs) {
        return busy("the page table of a vCPU and init_top_pgt map the kernel differently");
    }
    view.image.clone_from(&candidate.runs);
    let cpus = check_cpus(memory, cpus, &view, &named, text)?;
    let banner = banner(&mut view, &named)?;
    let release = banner
        .strip_prefix("Linux version ")
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default()
        .to_owned();
    let mut anchors = Anchors {
        table: view.table,
        runs: candidate.runs,
        symbols: Arc::new(symbols),
        named,
        image,
        phys_base,
        release,
        banner,
        build_id: String::new(),
        kaslr_offset: None,
        note: NoteFound::Absent,
        file: file.as_ref().map(|(_, used)| used.clone()),
    };
    let file = file.map(|(file, _)| file);
    compare_note(&mut view, &mut anchors, note, text)?;
    compare_build_id(&mut view, &mut anchors, file)?;
    clock.part("anchors", view.copied());
    let located = Located {
        view,
        anchors: Arc::new(anchors),
        cpus,
    };
    Ok((located, file))
}

/// Looks whether the vCPUs run a kernel that was found before; none if any runs something else.
pub(super) fn again<'m, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    anchors: &Arc<Anchors>,
) -> Option<Located<'m, M>> {
    let mut view = View::new(memory, anchors.table);
    // After kexec the old kernel may lie in memory unchanged. Only the vCPUs tell.
    let text = anchors.named.address("_stext")?;
    let cpus = check_cpus(memory, cpus, &view, &anchors.named, text).ok()?;
    let same = cpus > 0
        && view.table.image_runs(memory).as_ref() == Some(&anchors.runs)
        && banner(&mut view, &anchors.named).is_ok_and(|banner| banner == anchors.banner);
    view.image.clone_from(&anchors.runs);
    same.then(|| Located {
        view,
        anchors: Arc::clone(anchors),
        cpus,
    })
}

/// The address of a symbol that every kernel has.
pub(super) fn required(symbols: &Named, name: &'static str) -> Result<u64, DiscoveryError> {
    match symbols.address(name) {
        Some(address) => Ok(address),
        None if symbols.is_completed() => refuse(format!(
            "neither the kernel's kallsyms nor the debug file has a single symbol {name}; {GIVE_FILE}, whole and not stripped"
        )),
        None => refuse(format!(
            "the kernel's kallsyms have no single symbol {name}: it is built without CONFIG_KALLSYMS_ALL; {GIVE_FILE}"
        )),
    }
}

/// Adds what the file has and the kernel does not reveal. None if the file is not needed.
fn complete<'f, M: PhysicalMemory + ?Sized>(
    symbols: &mut Symbols,
    named: &mut Named,
    files: Option<&'f mut DebugFiles>,
    view: &View<'_, M>,
    candidate: &Candidate,
) -> Result<Option<(&'f DebugFile, FileUse)>, DiscoveryError> {
    let lacks = |name: &&str| named.address(name).is_none();
    let data_symbols = layout::DATA_SYMBOLS.iter().any(lacks);
    let btf = |named: &Named| named.range("__start_BTF", "__stop_BTF").is_some();
    let Some(files) = files.filter(|_| data_symbols || !btf(named)) else {
        return Ok(None);
    };
    let option = if data_symbols {
        "CONFIG_KALLSYMS_ALL"
    } else {
        "CONFIG_DEBUG_INFO_BTF"
    };
    let lacks = format!("the kernel is built without {option}");
    let file = files.of(view.data(), &lacks)?;
    let slide = file.compare(symbols, named)?;
    let compared = symbols.len();
    if data_symbols {
        named.complete(file.named(), |address| slide.to_guest(address));
        symbols.merge(file.symbols(), |address| slide.to_guest(address));
        let code = code_around(&candidate.runs, candidate.handler);
        symbols.classify(|address| code.contains(&address));
    }
    let used = FileUse {
        path: file.path().to_owned(),
        data_symbols,
        types: !btf(named),
        compared,
        build_id: false,
    };
    Ok(Some((file, used)))
}

fn from_cpus<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpus: &[Cpu],
) -> Result<Candidate, DiscoveryError> {
    let running = || cpus.iter().filter(|cpu| cpu.has_paging());
    if running().next().is_some() && running().all(|cpu| cpu.may_be_nested) {
        return busy(
            "VMX or SVM is on in every vCPU, so the registers may be those of a guest that the guest runs",
        );
    }
    let found = running()
        .filter(|cpu| !cpu.may_be_nested)
        .flat_map(|cpu| cpu.page_tables().map(|table| (table, cpu.idt_base)))
        .find_map(|(table, idt)| candidate(memory, table, idt));
    match found {
        Some(found) => Ok(found),
        None => busy(
            "no vCPU's page table and IDT lead to a Linux kernel of 64 bits: it boots, is in its firmware, or runs another system",
        ),
    }
}

fn from_note<M: PhysicalMemory + ?Sized>(
    memory: &M,
    note: &Note,
) -> Result<Candidate, DiscoveryError> {
    let found = note
        .table()
        .and_then(|table| candidate(memory, table, CPU_ENTRY_AREA));
    match found {
        Some(found) => Ok(found),
        None => busy("the page table that VMCOREINFO names maps no kernel image or no IDT"),
    }
}

fn candidate<M: PhysicalMemory + ?Sized>(
    memory: &M,
    table: PageTable,
    idt: u64,
) -> Option<Candidate> {
    let handler = gate_zero(memory, table, idt)?;
    let runs = table.image_runs(memory)?;
    let in_code = |run: &Run| run.executable && run.range.contains(&handler);
    (runs.iter().any(in_code) && runs.iter().any(Run::is_constant)).then_some(Candidate {
        table,
        runs,
        handler,
    })
}

/// The handler of gate 0, the divide error (Intel SDM volume 3, 6.14.1).
fn gate_zero<M: PhysicalMemory + ?Sized>(memory: &M, table: PageTable, idt: u64) -> Option<u64> {
    // A gate never straddles a page: the IDT is page-aligned.
    let mapping = table.translate(memory, idt)?;
    let mut gate = [0; 16];
    memory.read(mapping.physical, &mut gate).then_some(())?;
    let gate = u128::from_le_bytes(gate);
    let present = gate >> 47 & 1 != 0;
    let handler = gate & 0xffff | (gate >> 32 & 0xffff_ffff_ffff_0000);
    present.then_some(handler as u64)
}

/// Before 5.8 the handler was `divide_error`.
fn check_gate(symbols: &Named, handler: u64, whose: &str) -> Result<(), DiscoveryError> {
    let names = ["asm_exc_divide_error", "divide_error"];
    if names
        .iter()
        .any(|name| symbols.address(name) == Some(handler))
    {
        return Ok(());
    }
    busy(format!(
        "gate 0 of {whose} leads to {handler:#x}, which is not asm_exc_divide_error of this kernel"
    ))
}

/// Every vCPU that has paging runs this kernel; returns how many do.
fn check_cpus<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpus: &[Cpu],
    view: &View<'_, M>,
    symbols: &Named,
    text: u64,
) -> Result<usize, DiscoveryError> {
    let physical = view.table.translate(memory, text).map(|at| at.physical);
    let mut running = 0;
    for (index, cpu) in cpus.iter().enumerate() {
        if !cpu.has_paging() {
            continue;
        }
        let own = cpu.page_tables().into_iter().find(|table| {
            let mapped = table.translate(memory, text).map(|at| at.physical);
            mapped.is_some() && mapped == physical
        });
        let Some(table) = own else {
            return busy(format!(
                "the page table of vCPU {index} does not map this kernel: it runs a guest of its own, or another kernel"
            ));
        };
        let Some(handler) = gate_zero(memory, table, cpu.idt_base) else {
            return busy(format!("vCPU {index} has no IDT"));
        };
        check_gate(symbols, handler, &format!("vCPU {index}"))?;
        running += 1;
    }
    Ok(running)
}

/// Copies what is mapped read-only and not executable: no vCPU changes it, and it holds the tables.
fn copy_constant<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    runs: &[Run],
) -> Result<(), DiscoveryError> {
    let mut left = MAX_CONSTANT;
    for run in runs.iter().filter(|run| run.is_constant()) {
        let length = run.range.end - run.range.start;
        let Some(rest) = left.checked_sub(length) else {
            return refuse(format!(
                "the kernel maps more than {} MiB of read-only data: refused",
                MAX_CONSTANT >> 20
            ));
        };
        left = rest;
        if !view.copy_run(run) {
            return busy(format!(
                "the kernel's read-only data at {:#x} is not in RAM",
                run.range.start
            ));
        }
    }
    Ok(())
}

fn symbols<M: PhysicalMemory + ?Sized>(
    view: &View<'_, M>,
    candidate: &Candidate,
) -> Result<Symbols, DiscoveryError> {
    let code = code_around(&candidate.runs, candidate.handler);
    let constant = view
        .data()
        .iter()
        .map(|(start, bytes)| (*start..*start + bytes.len() as u64, bytes.as_slice()));
    // What is not copied counts as part of the image: most symbols lie there.
    let others = candidate
        .runs
        .iter()
        .filter(|run| !run.is_constant())
        .map(|run| (run.range.clone(), [].as_slice()));
    let found = Image::from_pieces(constant.chain(others), vec![code.clone()])
        .map_or(Err(KallsymsError::Absent), |image| kallsyms::read(&image));
    let mut symbols = match found {
        Ok(symbols) => symbols,
        Err(error) => {
            return refuse(format!(
                "{error}; a discovery needs kallsyms, and no debug file replaces them"
            ));
        }
    };
    symbols.classify(|address| code.contains(&address));
    Ok(symbols)
}

/// The contiguous executable pages around an address.
fn code_around(runs: &[Run], address: u64) -> Range<u64> {
    let mut code = address..address;
    for run in runs.iter().filter(|run| run.executable) {
        if code.end == run.range.start && code.start != code.end {
            code.end = run.range.end;
        } else if code.start == code.end || !code.contains(&address) {
            code = run.range.clone();
        }
    }
    code
}

/// `linux_banner`, in read-only data.
fn banner<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    symbols: &Named,
) -> Result<String, DiscoveryError> {
    let address = required(symbols, "linux_banner")?;
    let text = view.text_at(address).unwrap_or_default();
    if !text.starts_with("Linux version ") {
        return refuse(format!(
            "linux_banner at {address:#x} does not say \"Linux version\": kallsyms and the memory disagree"
        ));
    }
    Ok(text.trim_end_matches('?').to_owned())
}

/// Compares what was found with VMCOREINFO, which `vmcoreinfo_data` points at.
fn compare_note<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    anchors: &mut Anchors,
    found: Option<Note>,
    text: u64,
) -> Result<(), DiscoveryError> {
    let searched = found.is_some();
    let note = match found {
        Some(note) => note,
        None => match own_note(view, &anchors.named) {
            Some(Ok(note)) => note,
            Some(Err(encrypted)) => return refuse(encrypted),
            None => return Ok(()),
        },
    };
    let root = required(&anchors.named, "init_top_pgt")?;
    let agreements = [
        ("the release", note.release == anchors.release),
        ("init_top_pgt", note.root == root),
        ("_stext", note.stext == text),
        ("phys_base", note.phys_base == anchors.phys_base),
        (
            "the levels of the page table",
            note.five_levels == view.table.five_levels,
        ),
    ];
    if let Some((what, _)) = agreements.iter().find(|(_, agrees)| !agrees) {
        return refuse(format!(
            "VMCOREINFO of the kernel {} and its image disagree about {what}",
            anchors.release
        ));
    }
    anchors.build_id = note.build_id;
    anchors.kaslr_offset = note.kaslr_offset;
    anchors.note = if searched {
        NoteFound::Searched
    } else {
        NoteFound::Agrees
    };
    Ok(())
}

/// Compares the build ids of the kernel with the file's, if the file is used.
fn compare_build_id<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    anchors: &mut Anchors,
    file: Option<&DebugFile>,
) -> Result<(), DiscoveryError> {
    let notes = anchors
        .named
        .range("__start_notes", "__stop_notes")
        .and_then(|range| view.array(range.start, range.end - range.start, 1, PAGE))
        .and_then(|notes| debug_file::build_id(&notes))
        .unwrap_or_default();
    if let (Some(used), Some(file)) = (&mut anchors.file, file) {
        for own in [&anchors.build_id, &notes] {
            used.build_id |= file.compare_build_id(own)?;
        }
    }
    if anchors.build_id.is_empty() {
        anchors.build_id = notes;
    }
    Ok(())
}

/// None on a kernel without VMCOREINFO.
fn own_note<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    named: &Named,
) -> Option<Result<Note, String>> {
    let pointer = named.address("vmcoreinfo_data")?;
    let address = view.u64(pointer)?;
    let mut text = vec![0; PAGE as usize];
    view.read(address, &mut text)?;
    Note::parse(&text)
}
