// SPDX-License-Identifier: Apache-2.0
//! Fields of one event.

use patchbay_proto::v1::trace_field::Value;

use super::format::{Field, Format, Kind};

/// Maximum length in bytes of a text or raw value that is sent.
const MAX_VALUE_BYTES: usize = 1024;

/// `enum trace_flag_type`, `include/linux/trace_events.h`.
mod flag {
    pub const IRQS_OFF: u8 = 0x01;
    pub const IRQS_NOSUPPORT: u8 = 0x02;
    pub const NEED_RESCHED: u8 = 0x04;
    pub const HARDIRQ: u8 = 0x08;
    pub const SOFTIRQ: u8 = 0x10;
    pub const PREEMPT_RESCHED: u8 = 0x20;
    pub const NMI: u8 = 0x40;
    pub const BH_OFF: u8 = 0x80;
}

/// The payload of an event and its common fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// `common_type`: the format's id.
    pub id: u16,
    /// `common_flags`.
    pub flags: u8,
    /// `common_preempt_count`.
    pub preempt_count: u8,
    /// `common_pid`.
    pub pid: i32,
    bytes: &'a [u8],
}

impl<'a> Record<'a> {
    /// Parses the common fields. Returns `None` if the payload is too short for them.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (common, _) = bytes.split_at_checked(8)?;
        Some(Self {
            id: u16::from_le_bytes(common[..2].try_into().ok()?),
            flags: common[2],
            preempt_count: common[3],
            pid: i32::from_le_bytes(common[4..].try_into().ok()?),
            bytes,
        })
    }

    /// Returns the values by field number. Fields outside the payload are left out.
    ///
    /// Fields of a real event do not overlap, so its values together are no longer than its
    /// payload. Values beyond that length are left out, so that a short event stays small.
    pub fn values(&self, format: &Format) -> Box<[(u8, Value)]> {
        let mut left = self.bytes.len();
        let mut values = Vec::new();
        for (number, field) in (0..).zip(&format.fields) {
            let Some(value) = value(field, self.bytes) else {
                continue;
            };
            let is_open = field.kind == Kind::Text && field.size == 0;
            let content = match (field.kind, &value) {
                (_, Value::Text(text)) if is_open => text.len(),
                (Kind::Located { .. } | Kind::RelativelyLocated { .. }, Value::Text(text)) => {
                    text.len()
                }
                (Kind::Located { .. } | Kind::RelativelyLocated { .. }, Value::Raw(bytes)) => {
                    bytes.len()
                }
                _ => 0,
            };
            // A field of size 0 counts as present.
            let Some(rest) = left.checked_sub(field.size.max(1) + content) else {
                continue;
            };
            left = rest;
            values.push((number, value));
        }
        values.into()
    }
}

fn value(field: &Field, event: &[u8]) -> Option<Value> {
    let end = field.offset.checked_add(field.size)?;
    let bytes = event.get(field.offset..end)?;
    Some(match field.kind {
        Kind::Signed => Value::Signed(signed(bytes)),
        Kind::Unsigned => Value::Unsigned(unsigned(bytes)),
        Kind::Hexadecimal => Value::Hexadecimal(unsigned(bytes)),
        // The text of an array without a length ends with the event.
        Kind::Text if field.size == 0 => text(event.get(field.offset..)?),
        Kind::Text => text(bytes),
        Kind::Raw => raw(bytes),
        Kind::Located { text } => located(event, 0, bytes, text)?,
        Kind::RelativelyLocated { text } => located(event, end, bytes, text)?,
    })
}

/// Returns the value at which a `__data_loc` word points: its offset is in the low half of the
/// word, its length in the high half.
fn located(event: &[u8], base: usize, word: &[u8], is_text: bool) -> Option<Value> {
    let word = unsigned(word);
    let offset = usize::try_from(word & 0xffff).ok()?.checked_add(base)?;
    let length = usize::try_from(word >> 16 & 0xffff).ok()?;
    let bytes = event.get(offset..offset.checked_add(length)?)?;
    Some(if is_text { text(bytes) } else { raw(bytes) })
}

fn text(bytes: &[u8]) -> Value {
    let end = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len())
        .min(MAX_VALUE_BYTES);
    Value::Text(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

fn raw(bytes: &[u8]) -> Value {
    Value::Raw(bytes[..bytes.len().min(MAX_VALUE_BYTES)].to_vec())
}

/// Returns a little-endian integer of 1, 2, 4 or 8 bytes.
fn unsigned(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn signed(bytes: &[u8]) -> i64 {
    let unused = 64 - 8 * u32::try_from(bytes.len()).unwrap_or(8).clamp(1, 8);
    // Shifting left and back right extends the sign.
    (unsigned(bytes) << unused).cast_signed() >> unused
}

/// Returns the five letters that the kernel itself prints (`trace_print_lat_fmt()`,
/// `kernel/trace/trace_output.c`).
pub fn context_letters(flags: u8, preempt_count: u8) -> String {
    let has = |flag: u8| flags & flag != 0;
    let interrupts = match (
        has(flag::IRQS_OFF),
        has(flag::BH_OFF),
        has(flag::IRQS_NOSUPPORT),
    ) {
        (true, true, _) => 'D',
        (true, false, _) => 'd',
        (false, true, _) => 'b',
        (false, false, true) => 'X',
        (false, false, false) => '.',
    };
    let reschedule = match (has(flag::NEED_RESCHED), has(flag::PREEMPT_RESCHED)) {
        (true, true) => 'N',
        (true, false) => 'n',
        (false, true) => 'p',
        (false, false) => '.',
    };
    let within = match (has(flag::NMI), has(flag::HARDIRQ), has(flag::SOFTIRQ)) {
        (true, true, _) => 'Z',
        (true, false, _) => 'z',
        (false, true, true) => 'H',
        (false, true, false) => 'h',
        (false, false, true) => 's',
        (false, false, false) => '.',
    };
    let digit = |count: u8| match count {
        0 => '.',
        count => char::from_digit(u32::from(count), 16).unwrap_or('?'),
    };
    [
        interrupts,
        reschedule,
        within,
        digit(preempt_count & 0xf),
        digit(preempt_count >> 4),
    ]
    .iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::{Format, Page};
    use super::*;

    const PAGES: &[u8] = include_bytes!("../fixtures/cpu0.pages");
    const TEXT: &str = include_str!("../fixtures/trace.txt");
    const FORMATS: [(&str, &str); 6] = [
        (
            "sched_switch",
            include_str!("../fixtures/sched_switch.format"),
        ),
        (
            "sched_process_exec",
            include_str!("../fixtures/sched_process_exec.format"),
        ),
        (
            "sched_process_fork",
            include_str!("../fixtures/sched_process_fork.format"),
        ),
        (
            "timer_start",
            include_str!("../fixtures/timer_start.format"),
        ),
        (
            "softirq_entry",
            include_str!("../fixtures/softirq_entry.format"),
        ),
        (
            "sys_openat",
            include_str!("../fixtures/sys_enter_openat.format"),
        ),
    ];

    /// Returns the names and values of the fields.
    fn fields(record: &Record<'_>, format: &Format) -> Vec<(String, Value)> {
        let values = record.values(format).into_iter();
        let name = |number: u8| format.fields[usize::from(number)].name.to_string();
        values
            .map(|(number, value)| (name(number), value))
            .collect()
    }

    fn shown(fields: &[(String, Value)], name: &str) -> String {
        let (_, value) = fields
            .iter()
            .find(|(field, _)| field == name)
            .expect("the field");
        match value {
            Value::Signed(value) => value.to_string(),
            Value::Unsigned(value) => value.to_string(),
            Value::Hexadecimal(value) => format!("{value:x}"),
            Value::Text(text) => text.clone(),
            Value::Raw(bytes) => format!("{bytes:?}"),
        }
    }

    /// Decodes pages of a real guest and compares the result with the kernel's own text of the
    /// events.
    #[test]
    fn pages_of_a_real_kernel_are_decoded_as_it_does_itself() {
        let formats: HashMap<u16, (&str, Format)> = FORMATS
            .iter()
            .map(|(name, text)| (*name, Format::parse(text).expect(name)))
            .map(|(name, format)| (format.id, (name, format)))
            .collect();
        let mut lines = TEXT
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let mut count = 0;
        for page in PAGES.chunks(4096) {
            for event in Page::parse(page).expect("a page").events() {
                let (time, payload) = event.expect("an event");
                let record = Record::parse(payload).expect("a record");
                let (name, format) = &formats[&record.id];
                let fields = fields(&record, format);
                let line = lines.next().expect("as many lines as events");
                let rounded = (time + 500) / 1000;
                let stamp = format!(
                    "{:>5}.{:06}: {name}",
                    rounded / 1_000_000,
                    rounded % 1_000_000
                );
                assert!(line.contains(&stamp), "{stamp} in {line}");
                assert!(
                    line.contains(&format!("-{} ", record.pid)),
                    "{} in {line}",
                    record.pid
                );
                assert!(
                    line.contains(&context_letters(record.flags, record.preempt_count)),
                    "{line}"
                );
                let told = match *name {
                    "sched_switch" => format!(
                        "prev_comm={} prev_pid={} prev_prio={} ",
                        shown(&fields, "prev_comm"),
                        shown(&fields, "prev_pid"),
                        shown(&fields, "prev_prio")
                    ),
                    "sched_process_exec" => format!("filename={} pid=", shown(&fields, "filename")),
                    "sched_process_fork" => format!("child_pid={}", shown(&fields, "child_pid")),
                    "timer_start" => format!("expires={} ", shown(&fields, "expires")),
                    "softirq_entry" => format!("vec={} ", shown(&fields, "vec")),
                    _ => format!(
                        "filename: {}, flags: {},",
                        shown(&fields, "filename"),
                        shown(&fields, "flags")
                    ),
                };
                assert!(line.contains(&told), "{told} in {line}");
                count += 1;
            }
        }
        assert_eq!(count, 126, "as the kernel counted");
        assert!(lines.next().is_none());
    }

    #[test]
    fn values_that_lie_outside_are_left_out() {
        let format = Format::parse(FORMATS[1].1).expect("sched_process_exec");
        let mut event = vec![0; 20];
        event[8..12].copy_from_slice(&(100u32 << 16 | 16).to_le_bytes());
        let names = |event: &[u8]| {
            let record = Record::parse(event).expect("a record");
            let fields = fields(&record, &format).into_iter();
            fields.map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(&event), ["pid", "old_pid"]);
        assert!(names(&event[..10]).is_empty());
        assert_eq!(Record::parse(&event[..7]), None);
    }

    /// A hostile guest could amplify a short event with overlapping fields.
    #[test]
    fn fields_that_overlap_make_no_more_of_an_event_than_it_has() {
        let common = FORMATS[0].1.lines().take(8).collect::<Vec<_>>().join("\n");
        let many = |field: &str, count| {
            let text = format!("{common}\n{}", field.repeat(count));
            Format::parse(&text).expect("well-formed")
        };
        let mut event = vec![b'x'; 1032];
        event[8..12].copy_from_slice(&(1000u32 << 16 | 16).to_le_bytes());
        let record = Record::parse(&event).expect("a record");
        for (field, most) in [
            ("field:char a[1000];\toffset:8;\tsize:1000;\tsigned:0;\n", 1),
            (
                "field:__data_loc char[] b;\toffset:8;\tsize:4;\tsigned:0;\n",
                1,
            ),
            ("field:u64 c;\toffset:0;\tsize:8;\tsigned:0;\n", 100),
        ] {
            let format = many(field, 100);
            assert_eq!(record.values(&format).len(), most, "{field}");
        }
        let short = Record::parse(&event[..12]).expect("a record");
        let format = many("field:char d[0];\toffset:8;\tsize:0;\tsigned:0;\n", 100);
        assert_eq!(short.values(&format).len(), 6, "the text has one byte");
        let format = many("field:char d[];\toffset:8;\tsize:0;\tsigned:0;\n", 1);
        let mut print = vec![0; 8];
        print.extend_from_slice(b"marked\0");
        let record = Record::parse(&print).expect("a record");
        let text = Value::Text("marked".to_owned());
        assert_eq!(*record.values(&format), [(0, text)]);
    }

    #[test]
    fn numbers_keep_their_sign() {
        assert_eq!(signed(&[0xff]), -1);
        assert_eq!(signed(&[0xfe, 0xff]), -2);
        assert_eq!(signed(&[1, 0, 0, 0x80]), i64::from(i32::MIN) + 1);
        assert_eq!(signed(&u64::MAX.to_le_bytes()), -1);
        assert_eq!(unsigned(&[1, 2]), 0x201);
    }
}
