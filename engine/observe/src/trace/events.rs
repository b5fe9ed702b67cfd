// SPDX-License-Identifier: Apache-2.0
//! The events of a kernel, and their formats as tracefs shows them.

use std::fmt::Write;
use std::sync::atomic::{Ordering, fence};

use super::Source;
use crate::fields::Field;
use crate::{KernelView, copy, number, word};

/// The maximum number of events. 7.3 with the modules of a distribution has less than 3000.
pub(super) const MAX_EVENTS: usize = 16_384;
/// The maximum number of fields of one event.
const MAX_FIELDS: usize = 128;
/// The maximum length of a name in bytes.
const MAX_NAME: usize = 128;
/// The maximum length of the type of a field in bytes.
const MAX_TYPE: usize = 256;
/// The maximum length of a print format in bytes. A longer one is cut.
const MAX_PRINT: usize = 65_536;
/// The number of bytes of a text that are read at once.
const CHUNK: usize = 64;
const PAGE: u64 = 4096;
/// Kernel addresses begin here. The union in `struct trace_event_call` contains an address in any
/// case; the first bytes of a text, read as a number, are below it, because they are ASCII.
const KERNEL: u64 = 0xffff_8000_0000_0000;

/// An event of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `common_type` of its records.
    pub id: u16,
    /// The subsystem.
    pub system: String,
    /// The name.
    pub name: String,
    /// The address of its `struct trace_event_call`.
    address: u64,
    /// Addresses of the class, of the print format, and of the last field. An event that is
    /// registered later in the same memory rarely has the same ones.
    parts: [u64; 3],
}

/// Returns the addresses of the members of a list, first to last, by the addresses of their links.
/// Returns `None` if the list cannot be read or has more than `max` members.
pub(super) fn list(view: &(impl KernelView + ?Sized), head: u64, max: usize) -> Option<Vec<u64>> {
    let mut links = Vec::new();
    let mut link = word(view, head)?;
    while link != head {
        if links.len() == max {
            return None;
        }
        links.push(link);
        link = word(view, link)?;
    }
    Some(links)
}

/// Reads a text that ends with NUL, or its first `max` bytes.
pub(super) fn text(view: &(impl KernelView + ?Sized), address: u64, max: usize) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let mut at = address;
    while text.len() < max {
        // The next page need not be mapped.
        let in_page = usize::try_from(PAGE - at % PAGE).ok()?;
        let mut bytes = [0; CHUNK];
        let bytes = &mut bytes[..CHUNK.min(in_page).min(max - text.len())];
        if !view.read(at, bytes) {
            return None;
        }
        if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&bytes[..end]);
            break;
        }
        text.extend_from_slice(bytes);
        at = at.checked_add(bytes.len() as u64)?;
    }
    Some(text)
}

/// Reads a name. Names in tracefs are names of files.
fn name(view: &(impl KernelView + ?Sized), address: u64) -> Option<String> {
    let name = text(view, address, MAX_NAME)?;
    let is_graphic = !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
    String::from_utf8(name).ok().filter(|_| is_graphic)
}

/// Reads the printable text of a field's type or of a print format.
fn printable(view: &(impl KernelView + ?Sized), address: u64, max: usize) -> Option<String> {
    let mut text = text(view, address, max)?;
    for byte in &mut text {
        if !matches!(byte, b' '..=b'~' | b'\t') {
            *byte = b'?';
        }
    }
    String::from_utf8(text).ok()
}

impl Event {
    /// Reads the list of all events. Events that contradict themselves are left out. Returns `None`
    /// if the list cannot be read, for example because a module is being loaded.
    pub fn all(view: &(impl KernelView + ?Sized), source: &Source) -> Option<Vec<Self>> {
        let offset = source.layout.call.list;
        let links = list(view, source.events, MAX_EVENTS)?;
        let calls = links.into_iter().map(|link| link.wrapping_sub(offset));
        Some(
            calls
                .filter_map(|call| Self::read(view, source, call))
                .collect(),
        )
    }

    fn read(view: &(impl KernelView + ?Sized), source: &Source, address: u64) -> Option<Self> {
        let layout = &source.layout.call;
        let call = copy(view, address, layout.size)?;
        let class = copy(view, layout.class.of(&call)?, source.layout.class.size)?;
        let named = layout.name.of(&call)?;
        // TRACE_EVENT_FL_TRACEPOINT tells whether the union is a name or a tracepoint. Its bit
        // differs between versions, and the enumeration has no name.
        let of_tracepoint = word(view, named.wrapping_add(layout.tracepoint_name))?;
        let named = match of_tracepoint >= KERNEL {
            true => of_tracepoint,
            false => named,
        };
        let fields = source.layout.class.fields as usize;
        let last_field = class.get(fields..).and_then(|rest| words(rest).next());
        Some(Self {
            id: u16::try_from(layout.id.of(&call)?).ok()?,
            system: name(view, source.layout.class.system.of(&class)?)?,
            name: name(view, named)?,
            address,
            parts: [
                layout.class.of(&call)?,
                layout.print.of(&call)?,
                last_field?,
            ],
        })
    }

    /// Returns the address of its `struct trace_event_call`.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Returns whether the kernel still has this event. An event that is registered after another
    /// one was removed may have the same id, and be in the same memory.
    pub fn is_current(&self, view: &(impl KernelView + ?Sized), source: &Source) -> bool {
        let link = self.address.wrapping_add(source.layout.call.list);
        let before = word(view, link.wrapping_add(8));
        let is_linked = before.and_then(|before| word(view, before)) == Some(link);
        is_linked && Self::read(view, source, self.address).as_ref() == Some(self)
    }

    /// Returns the text of `events/SYSTEM/NAME/format` (`f_show()` in kernel/trace/trace_events.c).
    /// Returns `None` if the event has vanished, or if its fields cannot be read.
    pub fn format(&self, view: &(impl KernelView + ?Sized), source: &Source) -> Option<String> {
        let layout = &source.layout.call;
        let call = copy(view, self.address, layout.size)?;
        let class = copy(view, layout.class.of(&call)?, source.layout.class.size)?;
        let fields = match source.layout.class.get_fields.of(&class)? {
            0 => {
                let class = layout.class.of(&call)?;
                class.wrapping_add(source.layout.class.fields)
            }
            function if Some(function) == source.syscall_fields => {
                let metadata = layout.data.of(&call)?;
                metadata.wrapping_add(layout.syscall_fields?)
            }
            _ => return None,
        };
        let mut text = format!("name: {}\nID: {}\nformat:\n", self.name, self.id);
        for head in [source.common_fields, fields] {
            let mut links = list(view, head, MAX_FIELDS)?;
            // Each field was added before the earlier ones.
            links.reverse();
            for link in links {
                add_field(view, source, link, &mut text)?;
            }
            text.push('\n');
        }
        let print = printable(view, layout.print.of(&call)?, MAX_PRINT)?;
        writeln!(text, "print fmt: {print}").ok()?;
        fence(Ordering::Acquire);
        // The memory of a module that was unloaded may be reused.
        self.is_current(view, source).then_some(text)
    }
}

fn add_field(
    view: &(impl KernelView + ?Sized),
    source: &Source,
    link: u64,
    text: &mut String,
) -> Option<()> {
    let layout = &source.layout.field;
    let field = copy(view, link.wrapping_sub(layout.link), layout.size)?;
    let number = |of: Field| of.of(&field);
    let kind = printable(view, number(layout.kind)?, MAX_TYPE)?;
    let name = name(view, number(layout.name)?)?;
    let bracket = match kind.starts_with("__data_loc") {
        true => None,
        false => kind.split_once('['),
    };
    let declared = match (bracket, layout.length) {
        (None, _) => format!("{kind} {name}"),
        // Before the kernel had the length, the type contained it.
        (Some((element, rest)), None) => format!("{element} {name}[{rest}"),
        (Some((element, _)), Some(length)) => match number(length)? {
            0 => format!("{element} {name}[]"),
            length => format!("{element} {name}[{length}]"),
        },
    };
    let (offset, size) = (number(layout.offset)?, number(layout.bytes)?);
    let signed = u8::from(number(layout.signed)? != 0);
    let line = writeln!(
        text,
        "\tfield:{declared};\toffset:{offset};\tsize:{size};\tsigned:{signed};"
    );
    line.ok()
}

/// Returns the address and the name of each `struct trace_array`. The top level has no name.
pub(super) fn arrays(
    view: &(impl KernelView + ?Sized),
    source: &Source,
) -> Option<Vec<(u64, Vec<u8>)>> {
    /// The maximum number of instances.
    const MAX_ARRAYS: usize = 1024;
    let offset = source.layout.array.list.offset();
    let links = list(view, source.arrays, MAX_ARRAYS)?;
    let addresses = links.into_iter().map(|link| link.wrapping_sub(offset));
    Some(
        addresses
            .filter_map(|address| Some((address, array_name(view, source, address)?)))
            .collect(),
    )
}

/// Reads the name of a `struct trace_array`.
pub(super) fn array_name(
    view: &(impl KernelView + ?Sized),
    source: &Source,
    address: u64,
) -> Option<Vec<u8>> {
    /// NAME_MAX of Linux.
    const MAX_NAME: usize = 255;
    let field = source.layout.array.name.offset();
    match word(view, address.wrapping_add(field))? {
        0 => Some(vec![]),
        named => text(view, named, MAX_NAME),
    }
}

/// Returns the little-endian words of `bytes`.
pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).filter_map(|word| number(word, 0, 8))
}
