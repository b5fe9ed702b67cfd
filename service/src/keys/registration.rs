// SPDX-License-Identifier: Apache-2.0
//! Reading what the guest registers: hostile numbers, each copied once, checked, and used from the
//! copy.

use static_keys::{Directory, EntryFormat, Gates, Kernel, Layout, Range};
use zerocopy::FromBytes;

use crate::abi;
use crate::paging::Levels;

/// Longest module name in a request, its NUL not included.
const MAX_MODULE_NAME: usize = 63;

/// Why a request is refused: one sentence for `DescribeGuest.registration_error`; the guest gets
/// -EINVAL.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; build the guest's kernel from the series that belongs to this monitor")]
pub struct Refused(pub String);

fn refuse<T>(sentence: impl Into<String>) -> Result<T, Refused> {
    Err(Refused(sentence.into()))
}

/// Reads a structure from the front of a request page that was copied.
///
/// # Errors
/// [`Refused`] if the header does not belong to it.
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
    if header.size as usize != size_of::<T>() {
        return refuse(format!(
            "the request says {} bytes, its structure has {}",
            header.size,
            size_of::<T>()
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
/// [`Refused`] names it.
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

/// Checks a number that the guest draws and that stands for something.
///
/// # Errors
/// [`Refused`] if it is 0.
pub fn check_number(what: &str, number: u64) -> Result<(), Refused> {
    if number == 0 {
        return refuse(format!("the number of {what} is 0"));
    }
    Ok(())
}

/// Text of a fixed, NUL-padded field: what is printable of it.
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

/// The name of a module.
///
/// # Errors
/// [`Refused`] if it is empty or has no NUL.
pub fn module_name(field: &[u8; 64]) -> Result<&[u8], Refused> {
    match field.iter().position(|&byte| byte == 0) {
        Some(length @ 1..) => Ok(&field[..length]),
        _ => refuse(format!(
            "the module's name is not 1 to {MAX_MODULE_NAME} bytes and a NUL"
        )),
    }
}

/// Hexadecimal build id; empty if it is all zero.
pub fn build_id(id: &[u8; 20]) -> String {
    if id.iter().all(|&byte| byte == 0) {
        return String::new();
    }
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Largest offset in a guest structure that is believed, in bytes. `struct module` is the largest,
/// with some 1,500.
const MAX_OFFSET: u32 = 1 << 16;

/// The layout of the guest's structures.
///
/// # Errors
/// [`Refused`] if an offset is out of all proportion.
fn layout(descriptor: &abi::Descriptor) -> Result<Layout, Refused> {
    let layout = Layout {
        static_key_type: descriptor.static_key_type,
        static_key_mod_next: descriptor.static_key_mod_next,
        static_key_mod_entries: descriptor.static_key_mod_entries,
        static_key_mod_mod: descriptor.static_key_mod_mod,
        tracepoint_key: descriptor.tracepoint_key,
        module_state: descriptor.module_state,
        module_state_live: descriptor.module_state_live,
        tracepoint_regfunc: descriptor.tracepoint_regfunc,
        tracepoint_unregfunc: descriptor.tracepoint_unregfunc,
        tracepoint_funcs: descriptor.tracepoint_funcs,
    };
    check_layout(layout)
}

/// Checks the offsets of a layout.
///
/// # Errors
/// [`Refused`] if an offset is out of all proportion.
pub fn check_layout(layout: Layout) -> Result<Layout, Refused> {
    let offsets = [
        ("static_key.type", layout.static_key_type),
        ("static_key_mod.next", layout.static_key_mod_next),
        ("static_key_mod.entries", layout.static_key_mod_entries),
        ("static_key_mod.mod", layout.static_key_mod_mod),
        ("module.state", layout.module_state),
        ("tracepoint.key", layout.tracepoint_key),
        ("tracepoint.regfunc", layout.tracepoint_regfunc),
        ("tracepoint.unregfunc", layout.tracepoint_unregfunc),
        ("tracepoint.funcs", layout.tracepoint_funcs),
    ];
    match offsets.into_iter().find(|(_, offset)| *offset > MAX_OFFSET) {
        Some((field, offset)) => refuse(format!(
            "the offset of {field} is {offset}, more than {MAX_OFFSET}"
        )),
        None => Ok(layout),
    }
}

/// The format of the guest's jump tables.
///
/// # Errors
/// [`Refused`] if it is unknown or its entries have another size.
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

/// Where a directory lies.
pub fn directory(directory: abi::Directory) -> Directory {
    Directory {
        keys: directory.keys,
        key_count: directory.key_count,
        names: directory.names,
        names_size: directory.names_size,
    }
}

/// The kernel that a descriptor describes.
///
/// # Errors
/// [`Refused`] if a number in it cannot be right.
pub fn kernel(descriptor: &abi::Descriptor, levels: Levels) -> Result<Kernel, Refused> {
    check_range("init text", descriptor.init_text, levels)?;
    check_range("the tracepoint pointers", descriptor.tracepoints, levels)?;
    Ok(Kernel {
        format: entry_format(descriptor.entry_format, descriptor.entry_size)?,
        jump_table: check_range("the jump table", descriptor.jump_table, levels)?,
        text: check_range("text", descriptor.text, levels)?,
        ro_after_init: check_range("ro_after_init", descriptor.ro_after_init, levels)?,
        layout: layout(descriptor)?,
        gates: gates(descriptor, levels)?,
        directory: directory(descriptor.directory),
    })
}

fn gates(descriptor: &abi::Descriptor, levels: Levels) -> Result<Gates, Refused> {
    let gates = Gates {
        system_state: descriptor.system_state,
        system_state_running: descriptor.system_state_running,
        mutex_owner_mask: descriptor.mutex_owner_mask,
        jump_label_mutex_owner: descriptor.jump_label_mutex_owner,
        text_mutex_owner: descriptor.text_mutex_owner,
        tracepoints_mutex_owner: descriptor.tracepoints_mutex_owner,
        tp_vec_nr: descriptor.tp_vec_nr,
        bp_desc_refs: descriptor.bp_desc_refs,
    };
    check_gates(gates, levels)
}

/// Checks the addresses of gate words.
///
/// # Errors
/// [`Refused`] names the one that is no address of a kernel.
pub fn check_gates(gates: Gates, levels: Levels) -> Result<Gates, Refused> {
    for (what, address) in [
        ("system_state", gates.system_state),
        (
            "the owner of jump_label_mutex",
            gates.jump_label_mutex_owner,
        ),
        ("the owner of text_mutex", gates.text_mutex_owner),
        (
            "the owner of tracepoints_mutex",
            gates.tracepoints_mutex_owner,
        ),
        ("tp_vec_nr", gates.tp_vec_nr),
        ("bp_desc.refs", gates.bp_desc_refs),
    ] {
        if address != 0 {
            check_address(what, address, levels)?;
        }
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
                    size: 384,
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
