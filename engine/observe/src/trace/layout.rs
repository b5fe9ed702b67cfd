// SPDX-License-Identifier: Apache-2.0
//! The layout of the structures of tracing, from a kernel's own types.
//!
//! | | 5.10 | 6.1 | 6.12 | 7.3 |
//! |---|---|---|---|---|
//! | `trace_buffer.subbuf_order` | – | – | yes | yes |
//! | `ftrace_event_field.len` | – | yes | yes | yes |
//! | `ftrace_event_field.is_signed` | a word | a word | a bit | a bit |
//!
//! Without `subbuf_order` a data page has 4096 bytes. Without `len`, the length of an array is part
//! of the field's type.

use crate::Types;
use crate::fields::{Field, Structure};

/// The symbol of the list of all events, linked by `trace_event_call.list`.
pub const EVENTS: &str = "ftrace_events";
/// The symbol of the list of the fields that all events have.
pub const COMMON_FIELDS: &str = "ftrace_common_fields";
/// The symbol of the list of `struct trace_array`: the top level, and the instances.
pub const ARRAYS: &str = "ftrace_trace_arrays";
/// The function that returns the fields of the events of system calls
/// (kernel/trace/trace_syscalls.c).
pub const SYSCALL_FIELDS: &str = "syscall_get_enter_fields";

/// The symbol of the number of CPUs, including those that may be added: an `unsigned int`.
pub const CPUS: &str = "nr_cpu_ids";

/// Every type that [`Layout::read`] looks up.
pub const TYPES: &[&str] = &[
    "array_buffer",
    "buffer_data_page",
    "buffer_page",
    "ftrace_event_field",
    "list_head",
    "ring_buffer_per_cpu",
    "syscall_metadata",
    "trace_array",
    "trace_buffer",
    "trace_event",
    "trace_event_call",
    "trace_event_class",
    "trace_event_file",
    "tracepoint",
];

/// The layout of the structures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(super) array: ArrayLayout,
    pub(super) buffer: BufferLayout,
    pub(super) cpu: CpuLayout,
    pub(super) page: PageLayout,
    pub(super) data: DataLayout,
    pub(super) call: CallLayout,
    pub(super) class: ClassLayout,
    pub(super) field: FieldLayout,
    /// `None` if the kernel's types do not have it.
    pub(super) file: Option<FileLayout>,
}

/// `struct trace_array`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArrayLayout {
    pub list: Field,
    pub name: Field,
    /// Pointer to the `struct trace_buffer` that is written.
    pub buffer: Field,
    /// The index of the clock in `trace_clocks` (kernel/trace/trace.c).
    pub clock: Option<Field>,
}

/// `struct trace_buffer`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BufferLayout {
    pub size: usize,
    /// Pointer to the array of pointers to `struct ring_buffer_per_cpu`.
    pub buffers: Field,
    pub order: Option<Field>,
}

/// `struct ring_buffer_per_cpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpuLayout {
    pub size: usize,
    pub head: Field,
    pub commit_page: Field,
    pub reader: Field,
    pub overrun: Field,
    pub last_overrun: Field,
    pub entries: Field,
    pub read: Field,
    pub commits: Field,
    pub committing: Field,
    /// Number of pages, without the reader page.
    pub pages: Option<Field>,
}

/// `struct buffer_page`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageLayout {
    pub size: usize,
    /// Offset of the `struct list_head`.
    pub list: u64,
    pub next: Field,
    pub write: Field,
    pub read: Field,
    pub data: Field,
}

/// `struct buffer_data_page`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataLayout {
    pub stamp: Field,
    pub commit: Field,
    /// Offset of the events.
    pub events: u64,
}

/// `struct trace_event_call`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallLayout {
    pub size: usize,
    pub list: u64,
    pub class: Field,
    /// A name, or a pointer to a `struct tracepoint`.
    pub name: Field,
    pub id: Field,
    pub print: Field,
    pub data: Field,
    /// `tracepoint.name`.
    pub tracepoint_name: u64,
    /// `syscall_metadata.enter_fields`, a list.
    pub syscall_fields: Option<u64>,
}

/// `struct trace_event_class`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClassLayout {
    pub size: usize,
    pub system: Field,
    /// Offset of the list of fields.
    pub fields: u64,
    pub get_fields: Field,
}

/// `struct ftrace_event_field`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FieldLayout {
    pub size: usize,
    pub link: u64,
    pub name: Field,
    pub kind: Field,
    pub offset: Field,
    pub bytes: Field,
    pub signed: Field,
    pub length: Option<Field>,
}

/// `struct trace_event_file`, and the list of them in a `struct trace_array`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileLayout {
    /// Offset of the list in the array.
    pub files: u64,
    pub size: usize,
    /// Offset of the link in a file.
    pub list: u64,
    pub next: Field,
    pub call: Field,
    pub flags: Field,
}

impl Layout {
    /// Reads the layout from a kernel's types.
    ///
    /// # Errors
    /// A sentence that names the structure or member that is missing or implausible. Kernels
    /// without `CONFIG_TRACING` have none of them.
    pub fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let array = Structure::new(types, "trace_array")?;
        let buffer = Structure::new(types, "trace_buffer")?;
        let cpu = Structure::new(types, "ring_buffer_per_cpu")?;
        let page = Structure::new(types, "buffer_page")?;
        let data = Structure::new(types, "buffer_data_page")?;
        let pointer = |member| cpu.field(&[member], 8);
        Ok(Self {
            array: ArrayLayout {
                list: array.field(&["list"], 8)?,
                name: array.field(&["name"], 8)?,
                buffer: array.field(&["array_buffer", "buffer"], 8)?,
                clock: array.field(&["clock_id"], 4).ok(),
            },
            buffer: BufferLayout {
                size: buffer.size as usize,
                buffers: buffer.field(&["buffers"], 8)?,
                order: buffer.field(&["subbuf_order"], 4).ok(),
            },
            cpu: CpuLayout {
                size: cpu.size as usize,
                head: pointer("head_page")?,
                commit_page: pointer("commit_page")?,
                reader: pointer("reader_page")?,
                overrun: pointer("overrun")?,
                last_overrun: pointer("last_overrun")?,
                entries: pointer("entries")?,
                read: pointer("read")?,
                commits: pointer("commits")?,
                committing: pointer("committing")?,
                pages: pointer("nr_pages").ok(),
            },
            page: PageLayout {
                size: page.size as usize,
                list: page.member(&["list"], 16)?.offset.into(),
                next: page.field(&["list"], 8)?,
                write: page.field(&["write"], 8)?,
                read: page.field(&["read"], 4)?,
                data: page.field(&["page"], 8)?,
            },
            data: DataLayout {
                stamp: data.field(&["time_stamp"], 8)?,
                commit: data.field(&["commit"], 8)?,
                events: data.member(&["data"], 0)?.offset.into(),
            },
            call: CallLayout::read(types)?,
            class: ClassLayout::read(types)?,
            field: FieldLayout::read(types)?,
            file: FileLayout::read(types).ok(),
        })
    }
}

impl CallLayout {
    fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let call = Structure::new(types, "trace_event_call")?;
        let tracepoint = Structure::new(types, "tracepoint")?;
        let syscall = types.member("syscall_metadata", &["enter_fields"]);
        Ok(Self {
            size: call.size as usize,
            list: call.member(&["list"], 16)?.offset.into(),
            class: call.field(&["class"], 8)?,
            name: call.field(&["name"], 8)?,
            id: call.field(&["event", "type"], 4)?,
            print: call.field(&["print_fmt"], 8)?,
            data: call.field(&["data"], 8)?,
            tracepoint_name: tracepoint.field(&["name"], 8)?.offset(),
            syscall_fields: syscall.map(|member| member.offset.into()),
        })
    }
}

impl ClassLayout {
    fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let class = Structure::new(types, "trace_event_class")?;
        Ok(Self {
            size: class.size as usize,
            system: class.field(&["system"], 8)?,
            fields: class.member(&["fields"], 16)?.offset.into(),
            get_fields: class.field(&["get_fields"], 8)?,
        })
    }
}

impl FieldLayout {
    fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let field = Structure::new(types, "ftrace_event_field")?;
        Ok(Self {
            size: field.size as usize,
            link: field.member(&["link"], 16)?.offset.into(),
            name: field.field(&["name"], 8)?,
            kind: field.field(&["type"], 8)?,
            offset: field.field(&["offset"], 4)?,
            bytes: field.field(&["size"], 4)?,
            // The low byte suffices for both the word and the bit.
            signed: field.field(&["is_signed"], 1)?,
            length: field.field(&["len"], 4).ok(),
        })
    }
}

impl FileLayout {
    fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let array = Structure::new(types, "trace_array")?;
        let file = Structure::new(types, "trace_event_file")?;
        Ok(Self {
            files: array.member(&["events"], 16)?.offset.into(),
            size: file.size as usize,
            list: file.member(&["list"], 16)?.offset.into(),
            next: file.field(&["list"], 8)?,
            call: file.field(&["event_call"], 8)?,
            flags: file.field(&["flags"], 8)?,
        })
    }
}
