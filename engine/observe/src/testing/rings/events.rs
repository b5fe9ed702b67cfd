// SPDX-License-Identifier: Apache-2.0
//! The events of the kernel whose rings are in memory.

use super::{ARRAY, BASE, INSTANCE, SYSCALL_FIELDS, Version, Writer};

/// Offset of the list of files in a `struct trace_array`.
const FILES: u64 = 24;
/// Size of a `struct trace_event_file`.
const FILE_BYTES: u64 = 40;

/// A field of an event.
struct Field {
    kind: &'static str,
    name: &'static str,
    offset: u32,
    size: u32,
    is_signed: bool,
    /// The length of an array, which is in the type before 6.1.
    length: u32,
}

const fn field(kind: &'static str, name: &'static str, offset: u32, size: u32) -> Field {
    Field {
        kind,
        name,
        offset,
        size,
        is_signed: matches!(kind.as_bytes(), [b'i', ..]),
        length: 0,
    }
}

const COMMON: [Field; 4] = [
    field("unsigned short", "common_type", 0, 2),
    field("unsigned char", "common_flags", 2, 1),
    field("unsigned char", "common_preempt_count", 3, 1),
    field("int", "common_pid", 4, 4),
];

impl Writer {
    /// Writes the events `test:numbered` with the id 7, `test:alike` with the id 8, and the system
    /// call `syscalls:sys_enter_test` with the id 9.
    pub(super) fn put_events(&mut self) {
        self.put_fields(BASE + 0x50, &COMMON);
        let numbered = [
            field("u64", "number", 8, 8),
            Field {
                length: 16,
                ..field("char[16]", "comm", 16, 16)
            },
            field("__data_loc char[]", "text", 32, 4),
            field("char[]", "rest", 36, 0),
        ];
        let alike = [field("int", "zero", 8, 4), field("u64", "number", 88, 8)];
        let print = "\"%llu %s\", REC->number, REC->comm";
        let calls = [
            self.put_event(7, "test", "numbered", true, print, &numbered),
            self.put_event(8, "test", "alike", false, "\"%x\", REC->zero", &alike),
            self.put_event(9, "syscalls", "sys_enter_test", false, "\"\"", &alike),
        ];
        // The system call has its fields in its metadata.
        let metadata = self.take(64);
        self.put_fields(metadata + 8, &[field("int", "__syscall_nr", 8, 4)]);
        let [numbered, alike, (syscall, class)] = calls;
        self.put(syscall + 80, metadata);
        self.put(class + 16, SYSCALL_FIELDS);
        self.calls = vec![numbered.0, alike.0, syscall];
        self.put_list(BASE + 0x40, &self.calls.clone());
        for array in [ARRAY, INSTANCE] {
            self.put_list(array + FILES, &[]);
        }
    }

    /// Writes the flags of the three events for the top level, or for the instance `foo`.
    pub fn put_files(&mut self, is_instance: bool, flags: [u64; 3]) {
        let array = if is_instance { INSTANCE } else { ARRAY };
        let files = flags.map(|_| self.take(FILE_BYTES));
        self.put_files_at(array, files, flags);
    }

    /// Writes the flags of the three events for an instance of [`Writer::put_instances`].
    pub fn put_files_of(&mut self, array: u64, flags: [u64; 3]) {
        // They have room between this `struct trace_array` and the next one.
        let first = array + 64;
        let files = [0, 1, 2].map(|index| first + index * FILE_BYTES);
        self.put_files_at(array, files, flags);
    }

    fn put_files_at(&mut self, array: u64, files: [u64; 3], flags: [u64; 3]) {
        let calls = self.calls.clone();
        for ((file, flags), call) in files.into_iter().zip(flags).zip(calls) {
            self.put(file + 16, call);
            self.put(file + 24, flags);
        }
        self.put_list(array + FILES, &files);
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let address = self.structures;
        self.structures += bytes.next_multiple_of(64);
        address
    }

    fn put_text(&mut self, text: &str) -> u64 {
        let address = self.texts;
        self.put_bytes(address, text.as_bytes());
        self.texts += text.len() as u64 + 1;
        address
    }

    fn put_list(&mut self, head: u64, members: &[u64]) {
        let mut before = head;
        for &member in members.iter().chain([&head]) {
            self.put(before, member);
            self.put(member + 8, before);
            before = member;
        }
    }

    /// Writes fields. The list begins with the last one.
    fn put_fields(&mut self, head: u64, fields: &[Field]) {
        let mut members = vec![];
        for field in fields.iter().rev() {
            let address = self.take(48);
            let (kind, name) = (self.put_text(field.kind), self.put_text(field.name));
            self.put(address + 16, name);
            self.put(address + 24, kind);
            self.put(
                address + 32,
                u64::from(field.size) << 32 | u64::from(field.offset),
            );
            // In new kernels, the next bit is `needs_test`.
            let needs_test = u64::from(self.version != Version::V5_10) << 1;
            let flags = u64::from(field.is_signed) | needs_test;
            self.put(address + 40, u64::from(field.length) << 32 | flags);
            members.push(address);
        }
        self.put_list(head, &members);
    }

    /// Writes an event. Returns the addresses of its structure and of its class.
    fn put_event(
        &mut self,
        id: u64,
        system: &str,
        name: &str,
        is_tracepoint: bool,
        print: &str,
        fields: &[Field],
    ) -> (u64, u64) {
        let (call, class) = (self.take(96), self.take(64));
        let system = self.put_text(system);
        self.put(class, system);
        self.put_fields(class + 24, fields);
        let mut named = self.put_text(name);
        if is_tracepoint {
            let tracepoint = self.take(64);
            self.put(tracepoint, named);
            named = tracepoint;
        }
        let print = self.put_text(print);
        self.put(call + 16, class);
        self.put(call + 24, named);
        self.put(call + 56, id);
        self.put(call + 72, print);
        (call, class)
    }
}
