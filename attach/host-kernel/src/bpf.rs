// SPDX-License-Identifier: Apache-2.0
//! Reads kernel memory through a BPF program.
//!
//! The program copies from the kernel's memory to a map by `bpf_probe_read_kernel()`. It is loaded
//! as a raw tracepoint program but attached to nothing: `BPF_PROG_TEST_RUN` runs it once, in the
//! calling thread, with the address and the length as its arguments. It is short and written here
//! as instructions, so the build needs no compiler for BPF. The crate aya loads it; to build aya
//! takes neither clang nor libbpf. aya's own way to write programs, in Rust, is not used, because
//! it needs a nightly compiler.

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{RawTracePoint, RawTracePointRunOptions, TestRun};
use object::write::{Object, Relocation, Symbol, SymbolSection};
use object::{
    Architecture, BinaryFormat, Endianness, RelocationFlags, SectionKind, SymbolFlags, SymbolKind,
    SymbolScope, elf,
};

use crate::memory::{KernelMemory, ReadError, TransportError};

/// The maximum number of bytes that one run copies.
const CHUNK: usize = 1024;

/// The name of the program, which `bpftool prog` shows.
const PROGRAM: &str = "patchbay_read";
const MAP: &str = "copy";

/// `bpf_probe_read_kernel()` is offered only to programs whose licence is compatible with the GPL.
const LICENSE: &[u8] = b"Dual MIT/GPL\0";

/// The helpers that the program calls (`include/uapi/linux/bpf.h`).
const MAP_LOOKUP: i32 = 1;
const GET_CURRENT_TASK: i32 = 35;
const PROBE_READ_KERNEL: i32 = 113;

/// `EINVAL`, which the program returns for a length above [`CHUNK`].
const INVALID: i32 = -22;
const NOT_PERMITTED: i32 = 1;

/// Encodes an instruction (Documentation/bpf/standardization/instruction-set.rst).
const fn instruction(
    opcode: u8,
    destination: u8,
    source: u8,
    offset: i16,
    immediate: i32,
) -> [u8; 8] {
    let offset = offset.to_le_bytes();
    let immediate = immediate.to_le_bytes();
    [
        opcode,
        source << 4 | destination,
        offset[0],
        offset[1],
        immediate[0],
        immediate[1],
        immediate[2],
        immediate[3],
    ]
}

/// The index of the instruction that loads the map, which the loader completes.
const LOADS_MAP: u64 = 4;

/// The program. Its arguments are an address and a length. If the address is 0, the program copies
/// the address of its own thread's `task_struct`.
const INSTRUCTIONS: [[u8; 8]; 23] = {
    const LOAD: u8 = 0x79;
    const STORE: u8 = 0x7b;
    const STORE_WORD: u8 = 0x62;
    const MOVE: u8 = 0xbf;
    const MOVE_VALUE: u8 = 0xb7;
    const ADD_VALUE: u8 = 0x07;
    const LOAD_MAP: u8 = 0x18;
    const CALL: u8 = 0x85;
    const JUMP_IF_EQUAL: u8 = 0x15;
    const JUMP_IF_DIFFERENT: u8 = 0x55;
    const JUMP_IF_GREATER: u8 = 0x25;
    const EXIT: u8 = 0x95;
    [
        instruction(MOVE, 6, 1, 0, 0),
        // r0 = bpf_map_lookup_elem(map, &key), key = 0
        instruction(STORE_WORD, 10, 0, -4, 0),
        instruction(MOVE, 2, 10, 0, 0),
        instruction(ADD_VALUE, 2, 0, 0, -4),
        instruction(LOAD_MAP, 1, 0, 0, 0),
        instruction(0, 0, 0, 0, 0),
        instruction(CALL, 0, 0, 0, MAP_LOOKUP),
        instruction(JUMP_IF_EQUAL, 0, 0, 13, 0),
        instruction(MOVE, 7, 0, 0, 0),
        instruction(LOAD, 3, 6, 0, 0),
        instruction(LOAD, 2, 6, 8, 0),
        instruction(JUMP_IF_EQUAL, 3, 0, 4, 0),
        instruction(JUMP_IF_GREATER, 2, 0, 8, CHUNK as i32),
        instruction(MOVE, 1, 7, 0, 0),
        instruction(CALL, 0, 0, 0, PROBE_READ_KERNEL),
        instruction(EXIT, 0, 0, 0, 0),
        // address == 0
        instruction(JUMP_IF_DIFFERENT, 2, 0, 4, 8),
        instruction(CALL, 0, 0, 0, GET_CURRENT_TASK),
        instruction(STORE, 7, 0, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
        // refused
        instruction(MOVE_VALUE, 0, 0, 0, INVALID),
        instruction(EXIT, 0, 0, 0, 0),
    ]
};

/// The kernel's memory through a BPF program.
pub struct Bpf {
    program: Ebpf,
    copy: Array<MapData, [u8; CHUNK]>,
}

impl std::fmt::Debug for Bpf {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Bpf").finish_non_exhaustive()
    }
}

impl Bpf {
    /// Loads the program.
    ///
    /// # Errors
    /// The host's kernel has no BPF, or denies BPF to this user.
    pub fn open() -> Result<Self, TransportError> {
        let error = |error: String| TransportError {
            what: "BPF cannot be used",
            error,
            next: "grant CAP_BPF and CAP_PERFMON; lockdown=confidentiality denies it to everybody",
        };
        let object = object_file().map_err(|why| error(why.to_string()))?;
        let mut program = Ebpf::load(&object).map_err(|why| error(cause(&why)))?;
        let found = program
            .take_map(MAP)
            .ok_or_else(|| error("the loader lost the map".to_owned()))?;
        let copy = Array::try_from(found).map_err(|why| error(cause(&why)))?;
        let reader: &mut RawTracePoint = program
            .program_mut(PROGRAM)
            .ok_or_else(|| error("the loader lost the program".to_owned()))?
            .try_into()
            .map_err(|why: aya::programs::ProgramError| error(cause(&why)))?;
        reader.load().map_err(|why| error(cause(&why)))?;
        Ok(Self { program, copy })
    }

    /// Runs the program and returns its result, 0 or a negative error number.
    fn run(&mut self, address: u64, length: usize) -> Result<i32, ReadError> {
        let failed = |why: &dyn std::error::Error| {
            ReadError::Transport(format!("the BPF program cannot be run: {}", cause(why)))
        };
        let reader: &RawTracePoint = self
            .program
            .program(PROGRAM)
            .ok_or_else(|| ReadError::Transport("the BPF program is not loaded".to_owned()))?
            .try_into()
            .map_err(|why: aya::programs::ProgramError| failed(&why))?;
        let mut options = RawTracePointRunOptions::new();
        options.args[0] = address;
        options.args[1] = length as u64;
        let result = reader.test_run(options).map_err(|why| failed(&why))?;
        Ok(result.return_value.cast_signed())
    }

    fn copied(&self) -> Result<[u8; CHUNK], ReadError> {
        self.copy.get(&0, 0).map_err(|error| {
            ReadError::Transport(format!("the BPF map cannot be read: {}", cause(&error)))
        })
    }
}

impl KernelMemory for Bpf {
    fn name(&self) -> &'static str {
        "BPF"
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let mut at = address;
        for chunk in bytes.chunks_mut(CHUNK) {
            let end = at.checked_add(chunk.len() as u64);
            // For address 0 the program copies the address of the task instead.
            let next = end.filter(|_| at != 0).ok_or(ReadError::Unmapped(at))?;
            match self.run(at, chunk.len())? {
                0 => chunk.copy_from_slice(&self.copied()?[..chunk.len()]),
                error if error == -NOT_PERMITTED => {
                    return Err(ReadError::Transport(
                        "the host's kernel is locked down (confidentiality): it denies reads of \
                         its memory"
                            .to_owned(),
                    ));
                }
                _ => return Err(ReadError::Unmapped(at)),
            }
            at = next;
        }
        Ok(())
    }

    fn own_task(&mut self, offset: u32) -> Result<u64, ReadError> {
        match self.run(0, 8)? {
            0 => {}
            error => {
                return Err(ReadError::Transport(format!(
                    "the BPF program failed with {error}"
                )));
            }
        }
        let copied = self.copied()?;
        let task = copied
            .first_chunk()
            .map_or(0, |word| u64::from_le_bytes(*word));
        let address = task
            .checked_add(offset.into())
            .ok_or(ReadError::Unmapped(task))?;
        let mut word = [0; 8];
        self.read(address, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }
}

/// Returns the message of an error, followed by the messages of its causes.
fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    // The verifier's log has many lines.
    text.lines().next().unwrap_or_default().to_owned()
}

/// Returns the program as the ELF file that the loader expects.
fn object_file() -> Result<Vec<u8>, object::write::Error> {
    let mut file = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let section = |file: &mut Object<'_>, name: &str, kind, data: &[u8]| {
        let id = file.add_section(Vec::new(), name.into(), kind);
        file.append_section_data(id, data, 8);
        id
    };
    section(&mut file, "license", SectionKind::Data, LICENSE);
    // struct bpf_map_def: type (array), size of a key, size of a value, number of entries, flags.
    let map: Vec<u8> = [2, 4, CHUNK as u32, 1, 0]
        .iter()
        .flat_map(|word: &u32| word.to_le_bytes())
        .collect();
    let maps = section(&mut file, "maps", SectionKind::Data, &map);
    let code = section(
        &mut file,
        "raw_tp",
        SectionKind::Text,
        INSTRUCTIONS.as_flattened(),
    );
    let symbol = |file: &mut Object<'_>, name: &str, kind, section, size: usize| {
        file.add_symbol(Symbol {
            name: name.into(),
            value: 0,
            size: size as u64,
            kind,
            scope: SymbolScope::Linkage,
            weak: false,
            section: SymbolSection::Section(section),
            flags: SymbolFlags::None,
        })
    };
    let map = symbol(&mut file, MAP, SymbolKind::Data, maps, map.len());
    let length = INSTRUCTIONS.as_flattened().len();
    symbol(&mut file, PROGRAM, SymbolKind::Text, code, length);
    file.add_relocation(
        code,
        Relocation {
            offset: 8 * LOADS_MAP,
            symbol: map,
            addend: 0,
            flags: RelocationFlags::Elf {
                r_type: elf::R_BPF_64_64,
            },
        },
    )?;
    file.write()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the transport; prints a message and returns `None` where BPF is denied.
    fn open() -> Option<Bpf> {
        match Bpf::open() {
            Ok(bpf) => Some(bpf),
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                None
            }
        }
    }

    #[test]
    fn the_kernels_memory_is_read() {
        let Some(mut bpf) = open() else { return };
        // A task_struct has more than 1 KiB and no page of it is unmapped.
        let task = (0..4096_u32).step_by(8);
        let words: Result<Vec<u64>, ReadError> = task.map(|at| bpf.own_task(at)).collect();
        let words = words.expect("mapped");
        assert!(words.iter().any(|word| *word >> 47 == 0x1_ffff));
        for user in [0, 8, 0x1000, 1 << 46, u64::MAX - 7, u64::MAX] {
            let mut bytes = [0; 8];
            let unmapped = bpf.read(user, &mut bytes);
            assert!(matches!(unmapped, Err(ReadError::Unmapped(_))), "{user:#x}");
        }
    }

    #[test]
    fn a_length_that_the_map_does_not_hold_is_refused() {
        let Some(mut bpf) = open() else { return };
        assert_eq!(bpf.run(0, 8), Ok(0));
        let copied = bpf.copied().expect("the map");
        let task = u64::from_le_bytes(*copied.first_chunk().expect("8 bytes"));
        assert_eq!(bpf.run(task, CHUNK), Ok(0));
        assert_eq!(bpf.run(task, CHUNK + 1), Ok(INVALID));
        assert_eq!(bpf.run(0, 9), Ok(INVALID));
        let mut bytes = [0xa5; 2 * CHUNK + 8];
        assert_eq!(bpf.read(task, &mut bytes), Ok(()));
        assert_ne!(bytes[2 * CHUNK..], [0xa5; 8], "the last chunk is copied");
    }
}
