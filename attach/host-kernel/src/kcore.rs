// SPDX-License-Identifier: Apache-2.0
//! Reads kernel memory through `/proc/kcore` (`fs/proc/kcore.c`), an ELF core file of the running
//! kernel. The file's segments map virtual addresses to offsets. Its notes contain the `struct
//! task_struct` of the thread that reads the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::memory::{KernelMemory, ReadError, TransportError};

pub const PATH: &str = "/proc/kcore";

/// The maximum number of program headers. A machine with much memory has some hundreds.
const MAX_HEADERS: usize = 8192;
/// The maximum size of the notes. A `task_struct` has 10 KiB.
const MAX_NOTES: u64 = 1 << 20;

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_TASKSTRUCT: u32 = 4;
const HEADER_SIZE: usize = 64;
const PROGRAM_HEADER_SIZE: usize = 56;

/// A range of virtual addresses and its place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    address: u64,
    size: u64,
    offset: u64,
}

/// The kernel's memory as an ELF core file.
#[derive(Debug)]
pub struct Kcore {
    file: File,
    segments: Vec<Segment>,
    notes: Segment,
}

impl Kcore {
    /// Opens `/proc/kcore`.
    ///
    /// # Errors
    /// The host has no `/proc/kcore`, this user may not read it, or the kernel is locked down.
    pub fn open() -> Result<Self, TransportError> {
        Self::open_at(Path::new(PATH))
    }

    /// Opens a file in the format of `/proc/kcore`.
    ///
    /// # Errors
    /// Like [`Kcore::open`].
    pub fn open_at(path: &Path) -> Result<Self, TransportError> {
        let error = |error: io::Error| {
            let next = match error.kind() {
                io::ErrorKind::NotFound => "the host's kernel is built without CONFIG_PROC_KCORE",
                io::ErrorKind::InvalidData => "report it with the host's kernel release",
                _ => "grant CAP_SYS_RAWIO; lockdown=confidentiality denies it to everybody",
            };
            TransportError {
                what: "/proc/kcore cannot be used",
                error: error.to_string(),
                next,
            }
        };
        let file = File::open(path).map_err(error)?;
        let (segments, notes) = headers(&file).map_err(error)?;
        Ok(Self {
            file,
            segments,
            notes,
        })
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads the segments of memory and the segment of notes.
fn headers(file: &File) -> io::Result<(Vec<Segment>, Segment)> {
    let mut header = [0; HEADER_SIZE];
    file.read_exact_at(&mut header, 0)?;
    // 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(invalid("it is no ELF file of 64 bits"));
    }
    let start = word(&header, 32).unwrap_or_default();
    let [size, count] =
        [54, 56].map(|at| usize::from(u16::from_le_bytes([header[at], header[at + 1]])));
    if size != PROGRAM_HEADER_SIZE || !(1..=MAX_HEADERS).contains(&count) {
        return Err(invalid("its program headers have an unknown form"));
    }
    let mut table = vec![0; size * count];
    file.read_exact_at(&mut table, start)?;
    let (mut segments, mut notes) = (Vec::new(), None);
    for entry in table.chunks_exact(size) {
        let field = |at| word(entry, at).unwrap_or_default();
        let segment = Segment {
            address: field(16),
            size: field(32),
            offset: field(8),
        };
        match half(entry, 0) {
            Some(PT_LOAD) => segments.push(segment),
            Some(PT_NOTE) => notes = Some(segment),
            _ => {}
        }
    }
    let notes = notes.filter(|notes| notes.size <= MAX_NOTES);
    Ok((segments, notes.ok_or_else(|| invalid("it has no notes"))?))
}

/// Returns the contents of the first note of this type.
fn note(notes: &[u8], of_type: u32) -> Option<&[u8]> {
    let mut rest = notes;
    loop {
        let name = half(rest, 0)? as usize;
        let size = half(rest, 4)? as usize;
        let contents = 12 + name.checked_next_multiple_of(4)?;
        let end = contents.checked_add(size)?;
        if half(rest, 8)? == of_type {
            return rest.get(contents..end);
        }
        rest = rest.get(end.checked_next_multiple_of(4)?..)?;
    }
}

impl KernelMemory for Kcore {
    fn name(&self) -> &'static str {
        "/proc/kcore"
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let place = self.segments.iter().find_map(|segment| {
            let within = address.checked_sub(segment.address)?;
            let end = within.checked_add(bytes.len() as u64)?;
            (end <= segment.size)
                .then(|| segment.offset.checked_add(within))
                .flatten()
        });
        let place = place.ok_or(ReadError::Unmapped(address))?;
        self.file.read_exact_at(bytes, place).map_err(|error| {
            // EFAULT: the kernel itself could not read the page.
            match error.raw_os_error() {
                Some(14) => ReadError::Unmapped(address),
                _ => ReadError::Transport(format!("/proc/kcore cannot be read: {error}")),
            }
        })
    }

    fn own_task(&mut self, offset: u32) -> Result<u64, ReadError> {
        let failed = |why: String| {
            ReadError::Transport(format!("the notes of /proc/kcore cannot be read: {why}"))
        };
        let mut notes = vec![0; self.notes.size as usize];
        self.file
            .read_exact_at(&mut notes, self.notes.offset)
            .map_err(|error| failed(error.to_string()))?;
        note(&notes, NT_TASKSTRUCT)
            .and_then(|task| word(task, offset as usize))
            .ok_or_else(|| failed("they have no task_struct of the expected size".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn program_header(of_type: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
        let mut header = of_type.to_le_bytes().to_vec();
        header.extend(7_u32.to_le_bytes());
        for word in [offset, address, 0, size, size, 0] {
            header.extend(word.to_le_bytes());
        }
        header
    }

    fn elf(headers: &[Vec<u8>]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(HEADER_SIZE, 0);
        file[32] = HEADER_SIZE as u8;
        file[54] = PROGRAM_HEADER_SIZE as u8;
        file[56] = headers.len() as u8;
        file.extend(headers.concat());
        file
    }

    fn a_note(name: &[u8], of_type: u32, contents: &[u8]) -> Vec<u8> {
        let mut note = (name.len() as u32).to_le_bytes().to_vec();
        note.extend((contents.len() as u32).to_le_bytes());
        note.extend(of_type.to_le_bytes());
        for part in [name, contents] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    fn opened(bytes: &[u8]) -> Result<Kcore, TransportError> {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(bytes).expect("room");
        Kcore::open_at(file.path())
    }

    #[test]
    fn segments_and_the_own_task_are_read() {
        const NOTES: u64 = 512;
        const MEMORY: u64 = 1024;
        const ADDRESS: u64 = 0xffff_8880_0000_0000;
        let task: Vec<u8> = (0..64).collect();
        let notes = [
            a_note(b"CORE\0", 1, &[0; 7]),
            a_note(b"CORE\0", NT_TASKSTRUCT, &task),
        ]
        .concat();
        let mut file = elf(&[
            program_header(PT_NOTE, NOTES, 0, notes.len() as u64),
            program_header(PT_LOAD, 4096, 0xffff_ffff_8000_0000, 16),
            program_header(PT_LOAD, MEMORY, ADDRESS, 32),
        ]);
        file.resize(NOTES as usize, 0);
        file.extend(notes);
        file.resize(MEMORY as usize, 0);
        file.extend(100..132);
        let mut kcore = opened(&file).expect("a core file");
        let mut bytes = [0; 4];
        assert_eq!(kcore.read(ADDRESS + 28, &mut bytes), Ok(()));
        assert_eq!(bytes, [128, 129, 130, 131]);
        for outside in [ADDRESS - 1, ADDRESS + 29, 0, u64::MAX] {
            let unmapped = Err(ReadError::Unmapped(outside));
            assert_eq!(kcore.read(outside, &mut bytes), unmapped);
        }
        // The file is shorter than its headers say.
        let short = kcore.read(0xffff_ffff_8000_0000, &mut bytes);
        assert!(matches!(short, Err(ReadError::Transport(_))), "{short:?}");
        let word = u64::from_le_bytes([8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(kcore.own_task(8), Ok(word));
        for outside in [57, u32::MAX] {
            kcore.own_task(outside).expect_err("the task is shorter");
        }
    }

    #[test]
    fn other_files_are_refused() {
        let note = program_header(PT_NOTE, 64, 0, MAX_NOTES + 1);
        for (bytes, why) in [
            (vec![], "fill"),
            (vec![0; 4096], "no ELF file"),
            (elf(&[]), "program headers"),
            (elf(&[program_header(PT_LOAD, 0, 0, 8)]), "no notes"),
            (elf(&[note]), "no notes"),
        ] {
            let error = opened(&bytes).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
        let absent = Kcore::open_at(Path::new("/nonexistent")).expect_err("no file");
        assert!(absent.next.contains("CONFIG_PROC_KCORE"), "{absent}");
    }

    #[test]
    fn notes_that_pass_their_end_are_not_read() {
        let mut long = a_note(b"CORE\0", NT_TASKSTRUCT, &[1; 8]);
        assert!(note(&long, NT_TASKSTRUCT).is_some());
        long[4] = 0xff;
        assert_eq!(note(&long, NT_TASKSTRUCT), None);
        let mut other = a_note(b"CORE\0", 1, &[1; 8]);
        other[..8].fill(0xff);
        assert_eq!(note(&other, NT_TASKSTRUCT), None);
    }
}
