// SPDX-License-Identifier: Apache-2.0
//! Reads the guest's registration. Its numbers are hostile: each is copied once, and the copy is
//! checked and used.

use patchbay_proto::text::hex;
use static_keys::{
    CPUS_MAX, Concerns, Directory, EntryFormat, GATES_MAX, GateError, GateKind, Gates, GuestMemory,
    Kernel, Layout, ListedGate, Range, RecordRing,
};
use zerocopy::FromBytes;

use patchbay_guest::abi;
use patchbay_memory::paging::Levels;

/// Longest module name in a request, its NUL not included.
const MAX_MODULE_NAME: usize = 63;

/// The reason why a request is refused, for `DescribeGuest.registration_error`. The guest gets
/// -EINVAL.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; build the guest's kernel from the series that belongs to this monitor")]
pub struct Refused(pub String);

fn refuse<T>(sentence: impl Into<String>) -> Result<T, Refused> {
    Err(Refused(sentence.into()))
}

/// Parses a structure at the start of a copied request page.
///
/// # Errors
/// [`Refused`] if the header does not match.
pub fn read_request<T: FromBytes>(page: &[u8], op: u32) -> Result<T, Refused> {
    let Ok((header, _)) = abi::Header::read_from_prefix(page) else {
        return refuse("the request page is too short for a header");
    };
    if header.magic != abi::HEADER_MAGIC {
        return refuse(format!(
            "the header's magic is {:#x}, not {:#x}",
            header.magic,
            abi::HEADER_MAGIC
        ));
    }
    if header.abi_version != abi::ABI_VERSION {
        return refuse(format!(
            "the guest speaks ABI version {}, the monitor {}",
            header.abi_version,
            abi::ABI_VERSION
        ));
    }
    if u32::from(header.op) != op {
        return refuse(format!(
            "the header names operation {}, the call {op}",
            header.op
        ));
    }
    let known = size_of::<T>();
    if !(known..=abi::REQUEST_PAGE_SIZE).contains(&(header.size as usize)) {
        return refuse(format!(
            "the request says {} bytes, expected {known} to {}",
            header.size,
            abi::REQUEST_PAGE_SIZE
        ));
    }
    if header.generation == 0 {
        return refuse("the generation is 0");
    }
    match T::read_from_prefix(page) {
        Ok((request, _)) => Ok(request),
        Err(_) => refuse("the request page is too short for its structure"),
    }
}

/// Checks a range: ordered, and either empty or wholly in the kernel's half of the address space.
///
/// # Errors
/// [`Refused`] names the range.
pub fn check_range(what: &str, range: abi::Range, levels: Levels) -> Result<Range, Refused> {
    if range.start > range.end {
        return refuse(format!(
            "{what} ends at {:#x}, before its start {:#x}",
            range.end, range.start
        ));
    }
    if range.start < range.end {
        check_address(what, range.start, levels)?;
        check_address(what, range.end - 1, levels)?;
    }
    Ok(Range {
        start: range.start,
        end: range.end,
    })
}

/// Checks that an address lies in the kernel's half of the address space.
///
/// # Errors
/// [`Refused`], which names the address.
pub fn check_address(what: &str, address: u64, levels: Levels) -> Result<(), Refused> {
    // Canonical and negative: Documentation/arch/x86/x86_64/mm.rst.
    let lowest = match levels {
        Levels::Four => 0xffff_8000_0000_0000,
        Levels::Five => 0xff00_0000_0000_0000,
    };
    if address < lowest {
        return refuse(format!(
            "{what} is at {address:#x}, which is no address of a kernel"
        ));
    }
    Ok(())
}

/// Checks an identifier that the guest chooses.
///
/// # Errors
/// [`Refused`] if it is 0.
pub fn check_number(what: &str, number: u64) -> Result<(), Refused> {
    if number == 0 {
        return refuse(format!("the number of {what} is 0"));
    }
    Ok(())
}

/// Checks that a reserved field is 0. A later kernel sets the field to announce a feature that the
/// host must support.
///
/// # Errors
/// [`Refused`], which names the field.
pub fn check_reserved(what: &str, bits: u32) -> Result<(), Refused> {
    if bits != 0 {
        return refuse(format!(
            "{what} is {bits:#x}, expected 0: the guest asks for what this monitor does not know"
        ));
    }
    Ok(())
}

/// Returns the printable part of a fixed, NUL-padded field.
pub fn field_text(field: &[u8]) -> String {
    let end = field
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(field.len());
    field[..end]
        .iter()
        .map(|&byte| {
            if byte.is_ascii_graphic() {
                char::from(byte)
            } else {
                '?'
            }
        })
        .collect()
}

/// Returns the name of a module.
///
/// # Errors
/// [`Refused`] if the name is empty or has no NUL.
pub fn module_name(field: &[u8; 64]) -> Result<&[u8], Refused> {
    match field.iter().position(|&byte| byte == 0) {
        Some(length @ 1..) => Ok(&field[..length]),
        _ => refuse(format!(
            "the module's name is not 1 to {MAX_MODULE_NAME} bytes and a NUL"
        )),
    }
}

/// Returns a build id in hexadecimal; empty if it is all zero.
pub fn build_id(id: &[u8; 20]) -> String {
    if id.iter().all(|&byte| byte == 0) {
        return String::new();
    }
    hex(id)
}

/// Largest plausible offset in a structure of the guest, in bytes. The largest structure, `struct
/// module`, has about 1,500.
const MAX_OFFSET: u32 = 1 << 16;

/// Returns the layout of the guest's structures.
///
/// # Errors
/// [`Refused`] if an offset is implausible.
fn layout(descriptor: &abi::Descriptor) -> Result<Layout, Refused> {
    let layout = Layout {
        static_key_type: descriptor.static_key_type,
        static_key_mod_next: descriptor.static_key_mod_next,
        static_key_mod_entries: descriptor.static_key_mod_entries,
        static_key_mod_mod: descriptor.static_key_mod_mod,
        tracepoint_key: descriptor.tracepoint_key,
        module_state: descriptor.module_state,
        module_state_live: descriptor.module_state_live,
        tracepoint_funcs: descriptor.tracepoint_funcs,
    };
    check_layout(layout)
}

/// Checks the offsets of a layout.
///
/// # Errors
/// [`Refused`] if an offset is implausible.
pub fn check_layout(layout: Layout) -> Result<Layout, Refused> {
    let offsets = [
        ("static_key.type", layout.static_key_type),
        ("static_key_mod.next", layout.static_key_mod_next),
        ("static_key_mod.entries", layout.static_key_mod_entries),
        ("static_key_mod.mod", layout.static_key_mod_mod),
        ("module.state", layout.module_state),
        ("tracepoint.key", layout.tracepoint_key),
        ("tracepoint.funcs", layout.tracepoint_funcs),
    ];
    match offsets.into_iter().find(|(_, offset)| *offset > MAX_OFFSET) {
        Some((field, offset)) => refuse(format!(
            "the offset of {field} is {offset}, more than {MAX_OFFSET}"
        )),
        None => Ok(layout),
    }
}

/// Returns the format of the guest's jump tables.
///
/// # Errors
/// [`Refused`] if the format is unknown or its entries have another size.
fn entry_format(format: u32, size: u32) -> Result<EntryFormat, Refused> {
    let format = match format {
        abi::FORMAT_RELATIVE => EntryFormat::Relative,
        abi::FORMAT_ABSOLUTE64 => EntryFormat::Absolute64,
        abi::FORMAT_ABSOLUTE32 => EntryFormat::Absolute32,
        abi::FORMAT_NONE => return Ok(EntryFormat::None),
        unknown => return refuse(format!("the jump table format {unknown} is unknown")),
    };
    if size as usize != format.entry_size() {
        return refuse(format!(
            "jump table entries have {size} bytes, this format has {}",
            format.entry_size()
        ));
    }
    Ok(format)
}

/// Returns the location of a directory.
///
/// # Errors
/// [`Refused`] if a reserved field is set.
pub fn directory(directory: abi::Directory) -> Result<Directory, Refused> {
    check_reserved("the directory's reserved field", directory.reserved)?;
    Ok(Directory {
        keys: directory.keys,
        key_count: directory.key_count,
        key_size: directory.key_size,
        names: directory.names,
        names_size: directory.names_size,
    })
}

/// Returns the kernel that a descriptor describes; `memory` resolves its addresses.
///
/// # Errors
/// [`Refused`] if a number is implausible or its gates cannot be read.
pub fn kernel(
    descriptor: &abi::Descriptor,
    memory: &impl GuestMemory,
    levels: Levels,
) -> Result<Kernel, Refused> {
    let unknown = descriptor.flags & !(abi::FLAG_LA57 | abi::FLAG_PTI);
    check_reserved("the set of unknown flags", unknown)?;
    check_reserved("the descriptor's reserved field", descriptor.reserved)?;
    Ok(Kernel {
        format: entry_format(descriptor.entry_format, descriptor.entry_size)?,
        jump_table: check_range("the jump table", descriptor.jump_table, levels)?,
        text: check_range("text", descriptor.text, levels)?,
        ro_after_init: check_range("ro_after_init", descriptor.ro_after_init, levels)?,
        layout: layout(descriptor)?,
        gates: gates(descriptor, memory, levels)?,
        directory: directory(descriptor.directory)?,
        records: records(descriptor, levels)?,
    })
}

fn records(descriptor: &abi::Descriptor, levels: Levels) -> Result<RecordRing, Refused> {
    if descriptor.record_count > 0 {
        check_address("the ring of records", descriptor.records, levels)?;
    }
    Ok(RecordRing {
        address: descriptor.records,
        count: descriptor.record_count,
        size: descriptor.record_size,
    })
}

/// Maximum size of a gate entry. A later guest may extend the entry.
const MAX_GATE_SIZE: usize = 2 * size_of::<abi::Gate>();

/// Reads the array of gates.
fn gates(
    descriptor: &abi::Descriptor,
    memory: &impl GuestMemory,
    levels: Levels,
) -> Result<Gates, Refused> {
    let (count, stride) = (
        descriptor.gate_count as usize,
        descriptor.gate_size as usize,
    );
    if count > GATES_MAX {
        return refuse(GateError::TooMany(count).to_string());
    }
    if !(size_of::<abi::Gate>()..=MAX_GATE_SIZE).contains(&stride) {
        return refuse(format!(
            "a gate has {stride} bytes, expected {} to {MAX_GATE_SIZE}",
            size_of::<abi::Gate>()
        ));
    }
    let bytes = copy("the gates", descriptor.gates, count * stride, memory)?;
    let mut listed = Vec::with_capacity(count);
    for entry in bytes.chunks_exact(stride) {
        if let Ok((gate, _)) = abi::Gate::read_from_prefix(entry) {
            listed.push(listed_gate(&gate)?);
        }
    }
    let cpus = descriptor.cpu_count as usize;
    if cpus > CPUS_MAX {
        return refuse(GateError::TooManyCpus(cpus).to_string());
    }
    let bytes = copy("the CPU offsets", descriptor.cpu_offsets, 8 * cpus, memory)?;
    let (offsets, _) = bytes.as_chunks();
    let offsets: Vec<u64> = offsets.iter().copied().map(u64::from_le_bytes).collect();
    let gates = Gates::new(&listed, &offsets).map_err(|error| Refused(error.to_string()))?;
    check_gates(gates, levels)
}

/// Copies an array of bounded size.
fn copy(
    what: &str,
    address: u64,
    length: usize,
    memory: &impl GuestMemory,
) -> Result<Vec<u8>, Refused> {
    let mut bytes = vec![0; length];
    if length > 0 {
        memory
            .read_gva(address, &mut bytes)
            .map_err(|error| Refused(format!("{what} cannot be read: {error}")))?;
    }
    Ok(bytes)
}

fn listed_gate(gate: &abi::Gate) -> Result<ListedGate, Refused> {
    let name = field_text(&gate.name);
    let unknown = gate.flags & !abi::GATE_PER_CPU;
    check_reserved(
        &format!("the set of unknown flags of gate {name}"),
        unknown.into(),
    )?;
    // No guest lists gates for dynamic debug, because only discovered kernels have that class.
    let unknown = gate.concerns & !(Concerns::ALL.0 & !Concerns::DYNAMIC_DEBUG.0);
    check_reserved(
        &format!("the set of unknown changes that gate {name} concerns"),
        unknown,
    )?;
    let reserved = gate.reserved.iter().fold(0, |all, byte| all | byte);
    check_reserved(
        &format!("the reserved field of gate {name}"),
        reserved.into(),
    )?;
    Ok(ListedGate {
        kind: gate_kind(gate.kind),
        name: name.into(),
        address: gate.address,
        per_cpu: gate.flags & abi::GATE_PER_CPU != 0,
        width: gate.width,
        mask: gate.mask,
        wanted: gate.wanted,
        concerns: Concerns(gate.concerns),
    })
}

fn gate_kind(number: u32) -> GateKind {
    match number {
        abi::GATE_SYSTEM_STATE => GateKind::SystemState,
        abi::GATE_JUMP_LABEL_MUTEX => GateKind::JumpLabelMutex,
        abi::GATE_TEXT_MUTEX => GateKind::TextMutex,
        abi::GATE_TEXT_POKE => GateKind::TextPoke,
        abi::GATE_TEXT_POKE_QUEUE => GateKind::TextPokeQueue,
        abi::GATE_TRACEPOINTS_MUTEX => GateKind::TracepointsMutex,
        abi::GATE_MODULE_MUTEX => GateKind::ModuleMutex,
        other => GateKind::Other(other),
    }
}

/// Checks the addresses of gate words.
///
/// # Errors
/// [`Refused`] names an address outside of the kernel's half.
pub fn check_gates(gates: Gates, levels: Levels) -> Result<Gates, Refused> {
    for (name, address) in gates.addresses() {
        check_address(&format!("gate {name}"), address, levels)?;
    }
    Ok(gates)
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    fn header() -> abi::Header {
        abi::Header {
            magic: abi::HEADER_MAGIC,
            abi_version: abi::ABI_VERSION,
            op: 2,
            size: 24,
            status: 0,
            generation: 7,
        }
    }

    #[test]
    fn each_header_field_is_checked() {
        let read = |header: abi::Header| read_request::<abi::Header>(header.as_bytes(), 2);
        assert_eq!(read(header()).expect("well-formed").generation, 7);
        let broken = [
            (
                "magic",
                abi::Header {
                    magic: 1,
                    ..header()
                },
            ),
            (
                "version",
                abi::Header {
                    abi_version: 2,
                    ..header()
                },
            ),
            ("operation", abi::Header { op: 1, ..header() }),
            (
                "bytes",
                abi::Header {
                    size: 16,
                    ..header()
                },
            ),
            (
                "4097 bytes",
                abi::Header {
                    size: 4097,
                    ..header()
                },
            ),
            (
                "generation",
                abi::Header {
                    generation: 0,
                    ..header()
                },
            ),
        ];
        for (word, header) in broken {
            let error = read(header).expect_err(word);
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(read_request::<abi::Header>(&[0; 8], 2).is_err());
        // The structure of a later guest. Only the known part of it is read.
        let later = abi::Header {
            size: 4096,
            ..header()
        };
        assert_eq!(read(later).expect("a larger one").generation, 7);
    }

    #[test]
    fn ranges_are_ordered_and_the_kernels() {
        let check = |start, end| check_range("text", abi::Range { start, end }, Levels::Four);
        assert!(check(0xffff_ffff_8100_0000, 0xffff_ffff_8200_0000).is_ok());
        assert!(check(0xffff_ffff_8100_0000, u64::MAX).is_ok());
        assert!(check(0, 0).is_ok(), "an empty range lies nowhere");
        for (start, end) in [
            (0xffff_ffff_8200_0000, 0xffff_ffff_8100_0000),
            (0x1000, 0x2000),
            (0x1000, u64::MAX),
            (1 << 63, u64::MAX),
        ] {
            assert!(check(start, end).is_err(), "{start:#x}..{end:#x}");
        }
    }

    #[test]
    fn module_names_are_terminated_and_not_empty() {
        let mut field = [0; 64];
        assert!(module_name(&field).is_err());
        field[..4].copy_from_slice(b"ext4");
        assert_eq!(module_name(&field), Ok(&b"ext4"[..]));
        assert!(module_name(&[b'x'; 64]).is_err());
    }

    #[test]
    fn fields_are_made_printable() {
        assert_eq!(field_text(b"6.12.0\0\0"), "6.12.0");
        assert_eq!(field_text(b"a\x1b[2J"), "a?[2J");
        assert_eq!(build_id(&[0; 20]), "");
        assert_eq!(&build_id(&[0xab; 20])[..4], "abab");
    }
}
