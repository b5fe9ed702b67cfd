// SPDX-License-Identifier: Apache-2.0
//! Writes files for trace-cmd and KernelShark, in version 7 of trace-cmd.dat(5).
//!
//! Events are packed into pages of a ring buffer, one CPU in each page. While events arrive, the
//! pages that are full are appended to the file in any order. At the end, the sections that
//! describe them follow, and the pages are sorted by CPU in place, which takes no further space on
//! the disk. If the disk is full, the sections replace the newest pages.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, SeekFrom};

use patchbay_proto::v1;

use super::timeline::Storage;

/// The size of a page in the file in bytes, and of its header.
const PAGE: usize = 4096;
const PAGE_HEADER: usize = 16;
/// The size of the number of lost events, which follows the events of a page.
const LOST: usize = 8;
/// `struct ring_buffer_event`: a data event without a delta, at most with a time extension before
/// it and with its length beside it.
const EVENT_HEADER: usize = 16;
/// The size of the longest record that fits into any page.
const MAX_RECORD: usize = PAGE - PAGE_HEADER - LOST - EVENT_HEADER;
/// The size of the common fields of a record.
const COMMON: usize = 8;

/// `enum ring_buffer_type` and the time delta, `include/linux/ring_buffer.h`.
const MAX_WORDS: usize = 28;
const TIME_EXTEND: u32 = 30;
const DELTA_BITS: u32 = 27;
const EXTENDED_BITS: u32 = DELTA_BITS + 32;
/// `RB_MISSED_EVENTS` and `RB_MISSED_STORED`, `kernel/trace/ring_buffer.c`.
const MISSED: u64 = 1 << 31 | 1 << 30;

/// The layout of a page and of an event, as in tracefs.
const HEADER_PAGE: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
    \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
    \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
    \tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;\n";
const HEADER_EVENT: &str = "# compressed entry header\n\
    \ttype_len    :    5 bits\n\
    \ttime_delta  :   27 bits\n\
    \tarray       :   32 bits\n\n\
    \tpadding     : type == 29\n\
    \ttime_extend : type == 30\n\
    \ttime_stamp : type == 31\n\
    \tdata max type_len  == 28\n";

/// The start of a file: the version, little-endian numbers, 8 bytes in a long, the page size, and
/// no compression. The offset of the first option follows.
const START: &[u8] = b"\x17\x08\x44tracing7\0\x00\x08\x00\x10\x00\x00none\0\0";
/// The size of the start with the offset.
const START_BYTES: u64 = START.len() as u64 + 8;

/// Sections, and the options with their offsets, by the same numbers.
mod section {
    pub const OPTIONS: u16 = 0;
    pub const BUFFER: u16 = 3;
    pub const HEADER_INFO: u16 = 16;
    pub const FTRACE_EVENTS: u16 = 17;
    pub const EVENT_FORMATS: u16 = 18;
    pub const CMDLINES: u16 = 21;
}

/// Options without a section.
const DONE: u16 = 0;
const CPUCOUNT: u16 = 8;

/// The maximum number of bytes of formats, and of names of tasks. The guest chooses both.
const MAX_FORMATS: usize = 64 << 20;
const MAX_TASKS: usize = 1 << 18;

/// A file that is being written.
pub struct TraceDat<S> {
    storage: S,
    /// The CPU and the number of events of each page of the file, in the order of the file.
    pages: Vec<(u32, u64)>,
    open: BTreeMap<u32, Page>,
    /// The events of each CPU that were lost after the last one that was written.
    lost: BTreeMap<u32, u64>,
    formats: BTreeMap<u32, Format>,
    formats_bytes: usize,
    tasks: BTreeMap<i32, String>,
    left_out: u64,
}

struct Format {
    name: String,
    text: String,
    /// An event with another format has its id now.
    is_reused: bool,
}

/// A page that is not full.
struct Page {
    /// The header, then the events.
    bytes: Vec<u8>,
    time: u64,
    lost: u64,
    events: u64,
}

impl Page {
    fn begin(time: u64, lost: u64) -> Self {
        let mut bytes = Vec::with_capacity(PAGE);
        bytes.extend_from_slice(&time.to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        Self {
            bytes,
            time,
            lost,
            events: 0,
        }
    }

    /// Adds an event. Returns false if it must be in another page: there is no room for it, or its
    /// time is before that of the previous event or too long after it.
    fn add(&mut self, time: u64, record: &[u8]) -> bool {
        let length = record.len().next_multiple_of(4);
        let Some(delta) = time.checked_sub(self.time) else {
            return false;
        };
        if self.bytes.len() + EVENT_HEADER + length + LOST > PAGE || delta >> EXTENDED_BITS != 0 {
            return false;
        }
        let (low, high) = (delta & ((1 << DELTA_BITS) - 1), delta >> DELTA_BITS);
        let mut word = |word: u64| {
            self.bytes
                .extend_from_slice(&u32::try_from(word).unwrap_or(u32::MAX).to_le_bytes());
        };
        let delta = match high {
            0 => low << 5,
            _ => {
                word(u64::from(TIME_EXTEND) | low << 5);
                word(high);
                0
            }
        };
        match length / 4 {
            words @ 1..=MAX_WORDS => word(words as u64 | delta),
            _ => {
                word(delta);
                word(length as u64 + 4);
            }
        }
        self.bytes.extend_from_slice(record);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.time = time;
        self.events += 1;
        true
    }

    fn finish(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        let mut commit = (bytes.len() - PAGE_HEADER) as u64;
        if self.lost > 0 {
            commit |= MISSED;
            bytes.extend_from_slice(&self.lost.to_le_bytes());
        }
        bytes[8..PAGE_HEADER].copy_from_slice(&commit.to_le_bytes());
        bytes.resize(PAGE, 0);
        bytes
    }
}

impl<S: Storage + Read> TraceDat<S> {
    /// Begins the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(storage: S) -> io::Result<Self> {
        let mut file = Self {
            storage,
            pages: vec![],
            open: BTreeMap::new(),
            lost: BTreeMap::new(),
            formats: BTreeMap::new(),
            formats_bytes: 0,
            tasks: BTreeMap::new(),
            left_out: 0,
        };
        // A file without events is complete, and shows that the disk has room for one.
        file.finish()?;
        Ok(file)
    }

    /// Returns the number of events in the file.
    pub fn events(&self) -> u64 {
        self.pages.iter().map(|(_, events)| events).sum()
    }

    /// Returns the number of events that the file cannot hold: they are longer than a page, or they
    /// have the id of an event with another format.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, batch: v1::StreamTracepointEventsResponse) -> io::Result<()> {
        for format in batch.formats {
            self.add_format(format);
        }
        for event in batch.events {
            self.add_event(event)?;
        }
        Ok(())
    }

    fn add_format(&mut self, format: v1::TraceFormat) {
        let v1::TraceFormat { id, name, text } = format;
        match self.formats.get_mut(&id) {
            Some(known) => known.is_reused = (&known.name, &known.text) != (&name, &text),
            None if self.formats_bytes + text.len() <= MAX_FORMATS => {
                self.formats_bytes += text.len();
                let format = Format {
                    name,
                    text,
                    is_reused: false,
                };
                self.formats.insert(id, format);
            }
            None => {}
        }
    }

    fn add_event(&mut self, event: v1::TraceEvent) -> io::Result<()> {
        let v1::TraceEvent {
            cpu, record, pid, ..
        } = event;
        let lost = self.lost.entry(cpu).or_default();
        *lost = lost.saturating_add(event.lost_before);
        let id = record.first_chunk().map(|&id| u16::from_le_bytes(id));
        let format = id.and_then(|id| self.formats.get(&id.into()));
        let is_known = format.is_some_and(|format| !format.is_reused);
        if !is_known || !(COMMON..=MAX_RECORD).contains(&record.len()) {
            *lost = lost.saturating_add(1);
            self.left_out += 1;
            return Ok(());
        }
        if !event.comm.is_empty() && (self.tasks.len() < MAX_TASKS || self.tasks.contains_key(&pid))
        {
            let comm = event.comm.replace(char::is_control, "\u{fffd}");
            self.tasks.insert(pid, comm);
        }
        let time = event.guest_time_ns;
        let lost = std::mem::take(lost);
        if let Some(page) = self.open.get_mut(&cpu)
            && lost == 0
            && page.add(time, &record)
        {
            return Ok(());
        }
        if let Some(full) = self.open.remove(&cpu)
            && let Err(error) = self.append(cpu, &full)
        {
            // The page may still be appended at the end, and this event is missing after it.
            self.open.insert(cpu, full);
            self.lost.insert(cpu, lost.saturating_add(1));
            return Err(error);
        }
        let mut next = Page::begin(time, lost);
        next.add(time, &record);
        self.open.insert(cpu, next);
        Ok(())
    }

    /// Appends a page.
    fn append(&mut self, cpu: u32, page: &Page) -> io::Result<()> {
        self.write_at(self.end(), &page.finish())?;
        self.pages.push((cpu, page.events));
        Ok(())
    }

    /// Returns the offset after the last page.
    fn end(&self) -> u64 {
        offset(self.pages.len())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.storage.seek(SeekFrom::Start(offset))?;
        self.storage.write_all(bytes)
    }

    /// Completes the file. If the disk is full, the newest events are dropped.
    ///
    /// # Errors
    /// The file cannot be written. It is not usable then.
    pub fn finish(&mut self) -> io::Result<()> {
        let finished = self.complete();
        if finished.is_err() {
            // If this fails too, the first error is more useful.
            let _ = self.storage.cut(0);
            self.pages.clear();
        }
        finished
    }

    fn complete(&mut self) -> io::Result<()> {
        let mut is_full = false;
        for (cpu, page) in std::mem::take(&mut self.open) {
            if is_full {
                continue;
            }
            match self.append(cpu, &page) {
                Err(error) if is_about_space(&error) => is_full = true,
                appended => appended?,
            }
        }
        let (options, end) = match self.describe() {
            Err(error) if is_about_space(&error) => {
                self.drop_pages();
                self.describe()?
            }
            described => described?,
        };
        self.close(options, end)
    }

    /// Sorts the pages and writes the beginning of the file. `options` is the offset of the first
    /// section of options, and `end` is that of the end.
    fn close(&mut self, options: u64, end: u64) -> io::Result<()> {
        self.sort()?;
        let start = [START, &options.to_le_bytes()].concat();
        let buffer = header(section::BUFFER, self.end() - START_BYTES - SECTION_HEADER);
        let mut front = [start, buffer].concat();
        front.resize(PAGE, 0);
        self.write_at(0, &front)?;
        // A page that was written in part may follow.
        if self.storage.seek(SeekFrom::End(0))? > end {
            self.storage.cut(end)?;
        }
        self.storage.flush()
    }

    /// Drops as many of the last pages as the sections need.
    fn drop_pages(&mut self) {
        let (sections, _) = self.sections();
        let dropped = sections.len().div_ceil(PAGE);
        self.pages
            .truncate(self.pages.len().saturating_sub(dropped));
    }

    /// Writes the sections behind the pages. Returns the offset of the options, and of the end.
    fn describe(&mut self) -> io::Result<(u64, u64)> {
        let (sections, options) = self.sections();
        let at = self.end();
        self.write_at(at, &sections)?;
        Ok((options, at + sections.len() as u64))
    }

    /// Returns the sections that follow the pages, and the offset of the options.
    fn sections(&self) -> (Vec<u8>, u64) {
        let (mut sections, mut options) = (vec![], vec![]);
        for (id, content) in [
            (section::HEADER_INFO, header_info()),
            (section::FTRACE_EVENTS, self.ftrace_events()),
            (section::EVENT_FORMATS, self.event_formats()),
            (section::CMDLINES, self.tasks()),
        ] {
            let at = self.end() + sections.len() as u64;
            option(&mut options, id, &at.to_le_bytes());
            sections.extend(header(id, content.len() as u64));
            sections.extend(content);
        }
        option(&mut options, section::BUFFER, &self.buffer());
        let cpus = self.pages.iter().map(|(cpu, _)| cpu.saturating_add(1));
        let cpus = cpus.max().unwrap_or(1);
        option(&mut options, CPUCOUNT, &cpus.to_le_bytes());
        option(&mut options, DONE, &[0; 8]);
        let at = self.end() + sections.len() as u64;
        sections.extend(header(section::OPTIONS, options.len() as u64));
        sections.extend(options);
        (sections, at)
    }

    /// Returns the option that says which pages each CPU has.
    fn buffer(&self) -> Vec<u8> {
        let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
        for (cpu, _) in &self.pages {
            *counts.entry(*cpu).or_default() += 1;
        }
        let mut option = START_BYTES.to_le_bytes().to_vec();
        // The name of the instance, and the clock. The guest's clock is not known, but its times
        // are nanoseconds as those of the clock "local" are.
        option.extend(b"\0local\0");
        option.extend((PAGE as u32).to_le_bytes());
        option.extend((counts.len() as u32).to_le_bytes());
        let mut at = offset(0);
        for (cpu, pages) in counts {
            let size = pages * PAGE as u64;
            option.extend(cpu.to_le_bytes());
            option.extend(at.to_le_bytes());
            option.extend(size.to_le_bytes());
            at += size;
        }
        option
    }

    /// Returns the formats of the system "ftrace", which has a section of its own.
    fn ftrace_events(&self) -> Vec<u8> {
        let all = self.formats.values();
        let own = all.filter(|format| format.name.starts_with("ftrace:"));
        formats(own.map(|format| format.text.as_str()).collect())
    }

    fn event_formats(&self) -> Vec<u8> {
        let mut systems: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for Format { name, text, .. } in self.formats.values() {
            let (system, _) = name.split_once(':').unwrap_or(("", name));
            systems.entry(system).or_default().push(text);
        }
        systems.remove("ftrace");
        let mut content = (systems.len() as u32).to_le_bytes().to_vec();
        for (system, texts) in systems {
            content.extend(system.replace('\0', "").as_bytes());
            content.push(0);
            content.extend(formats(texts));
        }
        content
    }

    fn tasks(&self) -> Vec<u8> {
        let lines = self.tasks.iter();
        let text: String = lines.map(|(pid, comm)| format!("{pid} {comm}\n")).collect();
        sized(text.as_bytes())
    }

    /// Sorts the pages of the file by CPU. The pages of each CPU stay in order.
    fn sort(&mut self) -> io::Result<()> {
        let mut order: Vec<usize> = (0..self.pages.len()).collect();
        order.sort_by_key(|&page| self.pages[page].0);
        // `order` says which page belongs at each place. A cycle is moved with two pages in memory.
        for first in 0..order.len() {
            if order[first] == first {
                continue;
            }
            let begun = self.read_page(first)?;
            let mut place = first;
            loop {
                let from = std::mem::replace(&mut order[place], place);
                if from == first {
                    break;
                }
                let page = self.read_page(from)?;
                self.write_at(offset(place), &page)?;
                place = from;
            }
            self.write_at(offset(place), &begun)?;
        }
        self.pages.sort_by_key(|(cpu, _)| *cpu);
        Ok(())
    }

    fn read_page(&mut self, number: usize) -> io::Result<Vec<u8>> {
        let mut page = vec![0; PAGE];
        self.storage.seek(SeekFrom::Start(offset(number)))?;
        self.storage.read_exact(&mut page)?;
        Ok(page)
    }
}

/// Returns the offset of a page in the file. The beginning of the file takes one page, too.
fn offset(page: usize) -> u64 {
    ((1 + page) * PAGE) as u64
}

/// The size of the header of a section.
const SECTION_HEADER: u64 = 16;

/// Returns the header of a section: its id, no flags, no description, its size.
fn header(id: u16, size: u64) -> Vec<u8> {
    let mut header = id.to_le_bytes().to_vec();
    header.extend([0; 6]);
    header.extend(size.to_le_bytes());
    header
}

fn option(options: &mut Vec<u8>, id: u16, content: &[u8]) {
    options.extend(id.to_le_bytes());
    options.extend((content.len() as u32).to_le_bytes());
    options.extend(content);
}

fn sized(content: &[u8]) -> Vec<u8> {
    [&(content.len() as u64).to_le_bytes(), content].concat()
}

fn formats(texts: Vec<&str>) -> Vec<u8> {
    let mut content = (texts.len() as u32).to_le_bytes().to_vec();
    content.extend(texts.iter().flat_map(|text| sized(text.as_bytes())));
    content
}

fn header_info() -> Vec<u8> {
    let (page, event) = (HEADER_PAGE.as_bytes(), HEADER_EVENT.as_bytes());
    [
        &b"header_page\0"[..],
        &sized(page),
        b"header_event\0",
        &sized(event),
    ]
    .concat()
}

/// Returns whether the disk is full or the user has no space on it.
pub fn is_about_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge
    )
}

#[cfg(test)]
mod tests;
