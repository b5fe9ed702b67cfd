// SPDX-License-Identifier: Apache-2.0
//! Finds the running kernel: its page table, its image and its symbols.
//!
//! | way | starts from |
//! |---|---|
//! | image | CR3 and the IDT of a vCPU |
//! | note | a VMCOREINFO text found in memory |
//!
//! A kernel found by the first way must pass the checks in `vcpus.rs` for every vCPU. The CR3 of
//! every vCPU must also map the image, and VMCOREINFO must agree if there is one. A kernel found by
//! the second way must pass the checks in `note.rs`, and those in `vcpus.rs` for the IDT that the
//! kernel maps.
//!
//! A vCPU's page table is read once, at the start. The image is read through that copy. As soon as
//! the symbols are known, the kernel's own page table, `init_top_pgt`, is used.

use std::ops::Range;
use std::sync::Arc;

use super::contents::KernelSymbols;
use super::debug_file::{self, DebugFile};
use super::debug_folder::DebugFiles;
use super::error::{DiscoveryError, GIVE_FILE, absent, busy, refuse};
use super::layout;
use patchbay_memory::{Cpu, PhysicalMemory};

use super::debug_file::FileUse;
use super::kernel::{IMAGE_MAP, NoteFound, Way};
use super::memory::View;
use super::note::{self, Note};
use super::parts::Clock;
use super::vcpus::{Candidate, Unfit};
use crate::classes::Memory;
use crate::image::Image;
use crate::kallsyms::{self, KallsymsError};
use crate::symbols::{Named, Symbols};
use patchbay_memory::PAGE_SIZE;
use patchbay_memory::paging::{self, PageTable, Run};

/// The maximum size of an image's read-only data; a distribution kernel has 14 MiB. With
/// `rodata=off`, this limits the whole image.
const MAX_CONSTANT: u64 = 128 << 20;

/// A kernel that was found.
pub(super) struct Located<'m, M: ?Sized> {
    /// The kernel's virtual memory, through its own page table.
    pub view: View<'m, M>,
    pub anchors: Arc<Anchors>,
    pub symbols: KernelSymbols,
    /// Number of vCPUs that run this kernel.
    pub cpus: usize,
}

/// The properties of a kernel that do not change while it runs.
pub(super) struct Anchors {
    /// The kernel's own page table.
    pub table: PageTable,
    /// The table's mapping of the image.
    runs: Vec<Run>,
    pub named: Named,
    /// `_text` to `_end`.
    pub image: Range<u64>,
    /// Guest-physical minus guest-virtual addresses of the image, plus [`IMAGE_MAP`].
    pub phys_base: u64,
    pub release: String,
    pub banner: String,
    pub build_id: String,
    pub kaslr_offset: Option<u64>,
    pub note: NoteFound,
    pub file: Option<FileUse>,
}

/// The result of following the registers of a vCPU that has paging enabled.
struct Seen {
    index: usize,
    /// See [`Cpu::may_be_nested`].
    may_be_nested: bool,
    found: Result<Candidate, Unfit>,
}

/// Finds the running kernel. Also returns the debug file if one was needed.
pub(super) fn locate<'m, 'f, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    way: Way,
    files: Option<&'f mut DebugFiles>,
    clock: &mut Clock,
) -> Result<(Located<'m, M>, Option<&'f DebugFile>), DiscoveryError> {
    let seen = see(memory, cpus);
    let proven;
    let (candidate, note) = match way {
        Way::Image => (from_cpus(&seen)?, None),
        Way::Note => {
            let (note, read) = note::find(memory, cpus)?;
            clock.part("search for VMCOREINFO", read);
            clock.restart();
            proven = from_note(memory, &note)?;
            (&proven, Some(note))
        }
    };
    let mut view = View::new(memory, candidate.table);
    view.image.clone_from(&candidate.runs);
    // The page table may have been freed while it was read, and then maps no kernel.
    let read = match read_image(&mut view, candidate, files, clock) {
        Err(DiscoveryError::Refused(why)) if !candidate.is_unchanged(memory) => busy(format!(
            "the page table of a vCPU was changed while the kernel was looked for ({why})"
        )),
        read => read,
    };
    let (symbols, named, file) = read?;
    let text = required(&named, "_stext")?;
    let image = required(&named, "_text")?..required(&named, "_end")?;
    let mapped = |name: &'static str| {
        let address = required(&named, name)?;
        match candidate.physical(address) {
            Some(physical) => Ok(physical),
            None => refuse(format!(
                "{name} at {address:#x} is not mapped: kallsyms and the page table disagree"
            )),
        }
    };
    let phys_base = mapped("_text")?.wrapping_sub(image.start.wrapping_sub(IMAGE_MAP));
    view.table.root = mapped("init_top_pgt")?;
    if view.table.runs_of_gibibyte(memory, IMAGE_MAP).as_ref() != Some(&candidate.runs) {
        return busy("the page table of a vCPU and init_top_pgt map the kernel differently");
    }
    let cpus = check_cpus(&seen, &candidate.runs, &named, text)?;
    let banner = banner(&mut view, &named)?;
    let release = banner
        .strip_prefix("Linux version ")
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default()
        .to_owned();
    let mut anchors = Anchors {
        table: view.table,
        runs: candidate.runs.clone(),
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
        symbols: KernelSymbols::whole(symbols),
        cpus,
    };
    Ok((located, file))
}

/// Finds a previously found kernel again, with the symbols that are known of it. Returns `None` if
/// a vCPU with paging enabled runs anything else, if no vCPU has paging enabled, or if the image's
/// mapping or the banner has changed.
pub(super) fn again<'m, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    anchors: &Arc<Anchors>,
    symbols: &KernelSymbols,
) -> Option<Located<'m, M>> {
    let (view, cpus) = view_again(memory, cpus, anchors)?;
    Some(Located {
        view,
        anchors: Arc::clone(anchors),
        symbols: symbols.clone(),
        cpus,
    })
}

/// Returns whether the vCPUs still run a kernel that was found before.
pub(super) fn is_again<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpus: &[Cpu],
    anchors: &Anchors,
) -> bool {
    view_again(memory, cpus, anchors).is_some()
}

/// Returns the memory of a kernel that was found before, and the number of vCPUs that run it.
fn view_again<'m, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    anchors: &Anchors,
) -> Option<(View<'m, M>, usize)> {
    let mut view = View::new(memory, anchors.table);
    // After kexec the old kernel may still be in memory unchanged, so only the vCPUs tell which
    // kernel runs.
    let text = anchors.named.address("_stext")?;
    let seen = see(memory, cpus);
    let cpus = check_cpus(&seen, &anchors.runs, &anchors.named, text).ok()?;
    let same = cpus > 0
        && view.table.runs_of_gibibyte(memory, IMAGE_MAP).as_ref() == Some(&anchors.runs)
        && banner(&mut view, &anchors.named).is_ok_and(|banner| banner == anchors.banner);
    view.image.clone_from(&anchors.runs);
    same.then_some((view, cpus))
}

/// Checks that vCPUs run a kernel that was found before. A vCPU whose registers may belong to a
/// nested guest is ignored.
pub(super) fn confirm<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpus: &[Cpu],
    anchors: &Anchors,
) -> Result<(), DiscoveryError> {
    let text = required(&anchors.named, "_stext")?;
    let mut agree = 0;
    for vcpu in see(memory, cpus) {
        let may_be_nested = vcpu.may_be_nested;
        match check_cpus(&[vcpu], &anchors.runs, &anchors.named, text) {
            Ok(_) => agree += 1,
            Err(_) if may_be_nested => {}
            Err(error) => return Err(error),
        }
    }
    match agree {
        0 => busy(
            "no vCPU runs the kernel that was discovered: the guest was reset, or is in its firmware",
        ),
        _ => Ok(()),
    }
}

/// Returns the address of a symbol that every kernel has.
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

/// Adds those symbols of the debug file that the kernel does not reveal. Returns `None` if no file
/// is needed.
fn complete<'f, M: PhysicalMemory + ?Sized>(
    symbols: &mut Symbols,
    named: &mut Named,
    files: Option<&'f mut DebugFiles>,
    view: &View<'_, M>,
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

/// Follows the registers of each vCPU that has paging enabled.
fn see<M: PhysicalMemory + ?Sized>(memory: &M, cpus: &[Cpu]) -> Vec<Seen> {
    let running = cpus.iter().enumerate().filter(|(_, cpu)| cpu.has_paging());
    running
        .map(|(index, cpu)| Seen {
            index,
            may_be_nested: cpu.may_be_nested,
            found: Candidate::of_cpu(memory, cpu),
        })
        .collect()
}

/// Returns the kernel of the first vCPU whose registers lead to a kernel.
fn from_cpus(seen: &[Seen]) -> Result<&Candidate, DiscoveryError> {
    let mut unfit = None;
    for vcpu in seen.iter().filter(|vcpu| !vcpu.may_be_nested) {
        match &vcpu.found {
            Ok(candidate) => return Ok(candidate),
            Err(why) => unfit = unfit.or(Some((vcpu.index, why))),
        }
    }
    let why = match unfit {
        Some((index, why)) => format!("vCPU {index}: {why}"),
        None if seen.is_empty() => "none has turned on paging".to_owned(),
        None => {
            return absent(
                "VMX or SVM is on in every vCPU, so the registers may be those of a guest that the guest runs",
            );
        }
    };
    absent(format!(
        "no vCPU's page table and IDT lead to a Linux kernel of 64 bits ({why}): it boots, is in its firmware, or runs another system"
    ))
}

fn from_note<M: PhysicalMemory + ?Sized>(
    memory: &M,
    note: &Note,
) -> Result<Candidate, DiscoveryError> {
    let Some(table) = note.table() else {
        return absent("the page table that VMCOREINFO names is not in the kernel's image");
    };
    match Candidate::of_table(memory, table) {
        Ok(found) => Ok(found),
        Err(why) => absent(format!(
            "the page table that VMCOREINFO names leads to no kernel: {why}"
        )),
    }
}

/// Checks that every vCPU that has paging enabled runs this kernel. Returns the number of these
/// vCPUs.
fn check_cpus(
    seen: &[Seen],
    runs: &[Run],
    symbols: &Named,
    text: u64,
) -> Result<usize, DiscoveryError> {
    let physical = paging::physical(runs, text);
    for vcpu in seen {
        let index = vcpu.index;
        let own = match &vcpu.found {
            Ok(own) if physical.is_some() && own.physical(text) == physical => own,
            Ok(_) => {
                return busy(format!(
                    "the page table of vCPU {index} does not map this kernel: it runs a guest of its own, or another kernel"
                ));
            }
            Err(why) => {
                return busy(format!(
                    "vCPU {index} does not run this kernel, but a guest of its own or another kernel: {why}"
                ));
            }
        };
        own.check_entry(symbols, &format!("vCPU {index}"))?;
    }
    Ok(seen.len())
}

/// Reads symbols from the image, and symbols that the image lacks from a debug file. Also returns
/// the file if one was needed.
#[allow(clippy::type_complexity, reason = "taken apart at once")]
fn read_image<'f, M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    candidate: &Candidate,
    files: Option<&'f mut DebugFiles>,
    clock: &mut Clock,
) -> Result<(Symbols, Named, Option<(&'f DebugFile, FileUse)>), DiscoveryError> {
    copy_constant(view, candidate)?;
    clock.part("image", view.copied());
    let mut symbols = symbols(view, candidate)?;
    let mut named = symbols.look_up(layout::SYMBOLS);
    clock.part("kallsyms", view.copied());
    candidate.check_entry(&named, "the first vCPU")?;
    let file = complete(&mut symbols, &mut named, files, view)?;
    if file.is_some() {
        clock.part("debug file", view.copied());
    }
    let code = code(candidate, &named);
    symbols.classify(|address| code.contains(&address));
    if candidate.is_writable() {
        keep_constant(view, &named)?;
    }
    Ok((symbols, named, file))
}

/// Returns the code of the image. With `rodata=off` the page attributes do not distinguish code
/// from data.
fn code(candidate: &Candidate, named: &Named) -> Range<u64> {
    match named.range("_stext", "_etext") {
        Some(text) if candidate.is_writable() => text,
        _ => candidate.code(),
    }
}

/// Drops all copies except those of read-only data, so that later reads see current values.
fn keep_constant<M: ?Sized>(view: &mut View<'_, M>, named: &Named) -> Result<(), DiscoveryError> {
    let Some(constant) = named.range("__start_rodata", "__end_rodata") else {
        return refuse(format!(
            "the kernel maps nothing read-only (rodata=off on its command line, or it still boots), and its kallsyms have no \
             __start_rodata and __end_rodata; start it without rodata=off, or {GIVE_FILE}"
        ));
    };
    view.keep_data(&constant);
    Ok(())
}

/// Copies the parts of the image that are mapped read-only and not executable. The kernel does not
/// change these parts, and they hold the tables.
fn copy_constant<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    candidate: &Candidate,
) -> Result<(), DiscoveryError> {
    let mut left = MAX_CONSTANT;
    let runs = candidate.runs.iter();
    for run in runs.filter(|run| candidate.may_hold_tables(run)) {
        let length = run.range.end - run.range.start;
        let Some(rest) = left.checked_sub(length) else {
            let what = match candidate.is_writable() {
                true => "image, of which nothing is read-only (rodata=off)",
                false => "read-only data",
            };
            return refuse(format!(
                "the kernel maps more than {} MiB of {what}: refused",
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
    let copied = view
        .data()
        .iter()
        .map(|(start, bytes)| (*start..*start + bytes.len() as u64, bytes.as_slice()));
    // The runs that are not copied are also part of the image, because most symbols lie in them.
    let others = candidate
        .runs
        .iter()
        .filter(|run| !candidate.may_hold_tables(run))
        .map(|run| (run.range.clone(), [].as_slice()));
    let found = Image::from_pieces(copied.chain(others), vec![candidate.code()])
        .map_or(Err(KallsymsError::Absent), |image| kallsyms::read(&image));
    match found {
        Ok(symbols) => Ok(symbols),
        Err(error) => refuse(format!(
            "{error}; a discovery needs kallsyms, and no debug file replaces them"
        )),
    }
}

/// Returns `linux_banner`, which is in read-only data.
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

/// Compares the anchors with VMCOREINFO: with the text that was found, or with the text that
/// `vmcoreinfo_data` points to.
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
            note.levels == view.table.levels,
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

/// Compares the kernel's build ids, in VMCOREINFO and in its ELF notes, with the build id of the
/// debug file, if one is used.
fn compare_build_id<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    anchors: &mut Anchors,
    file: Option<&DebugFile>,
) -> Result<(), DiscoveryError> {
    let notes = anchors
        .named
        .range("__start_notes", "__stop_notes")
        .and_then(|range| view.array(range.start, range.end - range.start, 1, PAGE_SIZE))
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

/// Reads the VMCOREINFO that `vmcoreinfo_data` points to. Returns `None` if the kernel has none.
fn own_note<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    named: &Named,
) -> Option<Result<Note, String>> {
    let pointer = named.address("vmcoreinfo_data")?;
    let address = view.u64(pointer)?;
    let mut text = vec![0; PAGE_SIZE as usize];
    view.read(address, &mut text)?;
    Note::parse(&text)
}
