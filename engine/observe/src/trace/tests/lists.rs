// SPDX-License-Identifier: Apache-2.0
//! Lists of instances and events.

use super::*;

#[test]
fn instances_are_found_by_name() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let source = memory.source();
    assert_eq!(
        source.instances(&memory),
        Some(vec!["foo".to_owned(), String::new()])
    );
    assert_eq!(source.instance(&memory, ""), Some(ARRAY));
    assert_eq!(source.instance(&memory, "foo"), Some(ARRAY + 0x80));
    assert_eq!(source.instance(&memory, "bar"), None);
}

/// A list of `struct trace_array` that leads nowhere, in a circle, or to more instances than any
/// guest has is not taken for a list without the instance that is wanted.
#[test]
fn a_list_of_instances_is_read_whole_or_not_at_all() {
    const NAME: &[u8] = &[b'x'; 255];
    /// For each instance, and for the top level: the link, the pointer to the name, and the name in
    /// pieces of 64 bytes. One more read is the list's head.
    const READS: u64 = 1025 * 6 + 1;
    let memory = Memory::new(Version::V6_12, 1, 4);
    let source = memory.source();
    memory.before_read(|_, _| {});
    let read = |name: &str| {
        let before = memory.reads();
        let found = source.instance(&memory, name);
        let reads = memory.reads() - before;
        assert!(reads <= READS, "{reads} reads");
        found
    };
    let (first, step) = memory.write(|writer| writer.put_instances([NAME; 1023]));
    let listed = source.instances(&memory).expect("as many as the limit");
    assert_eq!(listed.len(), 1024);
    assert_eq!(read(std::str::from_utf8(NAME).expect("ASCII")), Some(first));
    assert_eq!(read("xx"), None);
    assert_eq!(read(""), Some(ARRAY));
    memory.write(|writer| writer.put_instances([NAME; 1024]));
    assert_eq!(source.instances(&memory), None, "one more");
    assert_eq!(read(""), None);

    let last = first + step;
    for wild in [0, 1, u64::MAX, first, last] {
        memory.write(|writer| {
            writer.put_instances([&b"foo"[..], b"bar"]);
            writer.put(last, wild);
        });
        assert_eq!(source.instances(&memory), None, "{wild:#x}");
        assert_eq!(read("foo"), None);
    }
    // A name that cannot be read does not hide the others.
    for wild in [1, u64::MAX, 0xdead_0000_0000_0100] {
        memory.write(|writer| {
            writer.put_instances([&b"foo"[..], b"bar"]);
            writer.put(first + 16, wild);
        });
        let listed = source.instances(&memory);
        assert_eq!(listed, Some(vec!["bar".to_owned(), String::new()]));
        assert_eq!(read("bar"), Some(last));
    }
    // A name without an end is cut, and so names no instance.
    memory.write(|writer| {
        writer.put_instances([&b"foo"[..]]);
        let text = writer.memory().len() as u64 + BASE - 400;
        writer.put_bytes(text, &[b'y'; 400]);
        writer.put(first + 16, text);
    });
    let listed = source.instances(&memory).expect("a list");
    assert_eq!(listed, ["y".repeat(255), String::new()]);
}

const NUMBERED: &str = "name: numbered
ID: 7
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:u64 number;\toffset:8;\tsize:8;\tsigned:0;
\tfield:char comm[16];\toffset:16;\tsize:16;\tsigned:0;
\tfield:__data_loc char[] text;\toffset:32;\tsize:4;\tsigned:0;
\tfield:char rest[];\toffset:36;\tsize:0;\tsigned:0;

print fmt: \"%llu %s\", REC->number, REC->comm
";

#[test]
fn formats_are_those_of_tracefs() {
    for version in VERSIONS {
        let memory = Memory::new(version, 1, 3);
        let source = memory.source();
        let events = Event::all(&memory, &source).expect("a list");
        let names: Vec<_> = events
            .iter()
            .map(|event| (event.id, event.system.as_str(), event.name.as_str()))
            .collect();
        let expected = [
            (7, "test", "numbered"),
            (8, "test", "alike"),
            (9, "syscalls", "sys_enter_test"),
        ];
        assert_eq!(names, expected);
        let format = |index: usize| events[index].format(&memory, &source).expect("readable");
        assert_eq!(format(0), NUMBERED, "{version:?}");
        assert!(format(1).contains("int zero;\toffset:8;\tsize:4;\tsigned:1;"));
        assert!(format(2).contains("int __syscall_nr;"), "{}", format(2));
        let unknown = Source {
            syscall_fields: None,
            ..source
        };
        assert_eq!(events[2].format(&memory, &unknown), None);
    }
}

#[test]
fn a_list_of_events_that_leads_nowhere_or_in_a_circle_ends() {
    let memory = Memory::new(Version::V6_12, 1, 3);
    let source = memory.source();
    let events = Event::all(&memory, &source).expect("a list");
    let address = source.events;
    for wild in [0, 1, u64::MAX, address] {
        memory.write(|writer| writer.put(address, wild));
        _ = Event::all(&memory, &source);
        memory.write(|writer| writer.put(source.common_fields, wild));
        assert_eq!(events[0].format(&memory, &source), None);
    }
    memory.before_read(|_, _| {});
    memory.write(|writer| writer.put(address, address + 0x100));
    memory.write(|writer| writer.put(address + 0x100, address + 0x100));
    assert_eq!(Event::all(&memory, &source), None);
    assert!(memory.reads() < 20_000, "{}", memory.reads());
}
