// SPDX-License-Identifier: Apache-2.0
//! The kernel's log and its recent warnings (`Documentation/ABI/testing/dev-kmsg`).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};

use patchbay_proto::KERNEL_REPORTS;
use patchbay_proto::agent::v1::{AgentLog, AgentLogRecord};
use rustix::fs::{Mode, OFlags, SeekFrom};

/// `LOGLEVEL_WARNING`, `include/linux/kern_levels.h`. A lower level is more severe.
const WARNING: u32 = 4;
/// `LOGLEVEL_DEBUG`.
const DEBUG: u32 = 7;
const PATH: &str = "/dev/kmsg";
/// Limit on the records of an answer in bytes. A frame has 512 KiB.
const LOG_BYTES: usize = 128 << 10;
/// Cost of a record in bytes, in addition to its text.
const RECORD_COST: usize = 32;
const KEPT: usize = 16;
/// Limit on the length of a record as /dev/kmsg formats it (`CONSOLE_EXT_LOG_MAX`; later kernels
/// have a smaller one, `PRINTK_MESSAGE_MAX`).
const RECORD_BYTES: usize = 8192;
/// Limit on the records read per report, so that a flood of messages does not block the agent.
const MAX_RECORDS: usize = 4096;

/// Keeps the most recent warnings, and counts the error reports among them.
#[derive(Debug)]
pub struct Warnings {
    file: Option<File>,
    kept: VecDeque<String>,
    reports: u64,
}

impl Warnings {
    /// Opens the log at the oldest message in the kernel's buffer. If the log cannot be opened,
    /// there are no warnings.
    pub fn open() -> Self {
        Self {
            file: open().ok(),
            kept: VecDeque::new(),
            reports: 0,
        }
    }

    /// Returns the number of error reports among the messages that [`Self::read`] has read.
    pub fn reports(&self) -> u64 {
        self.reports
    }

    /// Returns the most recent warnings, oldest first.
    pub fn read(&mut self) -> Vec<String> {
        let mut record = [0; RECORD_BYTES];
        for _ in 0..MAX_RECORDS {
            let Some(file) = &mut self.file else { break };
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(read) => {
                    if let Some(warning) = warning(&String::from_utf8_lossy(&record[..read])) {
                        self.reports += u64::from(is_report(&warning));
                        self.kept.push_back(warning);
                        if self.kept.len() > KEPT {
                            self.kept.pop_front();
                        }
                    }
                }
                // The record was overwritten; the next read returns the oldest one.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
                Err(_) => break,
            }
        }
        self.kept.iter().cloned().collect()
    }
}

/// Opens the kernel's log at its oldest record.
fn open() -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(PATH, flags, Mode::empty())?;
    let _ = rustix::fs::seek(&fd, SeekFrom::Start(0));
    Ok(File::from(fd))
}

/// Reads the log from a given record on.
#[derive(Debug, Default)]
pub struct Log {
    /// The open log, and the record at which the last answer ended.
    reader: Option<(File, u64)>,
}

impl Log {
    /// Returns the kernel's own records from `from` on. Without `from`, returns no records, only
    /// the end of the log.
    pub fn read(&mut self, from: Option<u64>) -> io::Result<AgentLog> {
        let (mut file, next) = match self.reader.take() {
            Some((file, next)) if Some(next) == from => (file, next),
            _ => (open()?, 0),
        };
        let log = records(&mut file, from, next)?;
        self.reader = Some((file, log.next));
        Ok(log)
    }
}

/// Reads records until there are no more or the answer is full. Records before `from` are skipped.
fn records(file: &mut impl Read, from: Option<u64>, next: u64) -> io::Result<AgentLog> {
    let mut log = AgentLog {
        next,
        ..AgentLog::default()
    };
    let mut bytes = 0;
    let mut buffer = [0; RECORD_BYTES];
    while bytes < LOG_BYTES {
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            // Records were overwritten; the next read returns the oldest one.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        };
        let text = String::from_utf8_lossy(&buffer[..read]);
        let Some(record) = parse(&text) else { continue };
        let wanted = from.is_some_and(|from| from <= record.sequence);
        if wanted {
            let expected = from.unwrap_or_default().max(log.next);
            log.lost += record.sequence.saturating_sub(expected);
        }
        log.next = record.sequence.saturating_add(1);
        // Records of facilities other than the kernel's, which is 0, come from user space
        // (`Documentation/ABI/testing/dev-kmsg`).
        if wanted && record.priority <= DEBUG {
            bytes += record.text.len() + RECORD_COST;
            log.records.push(AgentLogRecord {
                sequence: record.sequence,
                level: record.priority,
                time_us: record.microseconds,
                text: record.text.to_owned(),
            });
        }
    }
    Ok(log)
}

/// A record "priority,sequence,microseconds,flags;text\n KEY=value\n...".
struct Record<'t> {
    priority: u32,
    sequence: u64,
    microseconds: u64,
    text: &'t str,
}

fn parse(record: &str) -> Option<Record<'_>> {
    let (prefix, text) = record.split_once(';')?;
    let mut fields = prefix.split(',');
    Some(Record {
        priority: fields.next()?.parse().ok()?,
        sequence: fields.next()?.parse().ok()?,
        microseconds: fields.next()?.parse().ok()?,
        text: text.lines().next()?,
    })
}

/// Formats a record as "[seconds] text" if its level is that of a kernel warning or more severe.
fn warning(record: &str) -> Option<String> {
    let record = parse(record)?;
    (record.priority <= WARNING).then(|| {
        format!(
            "[{:5}.{:06}] {}",
            record.microseconds / 1_000_000,
            record.microseconds % 1_000_000,
            record.text
        )
    })
}

/// Returns whether the warning is the first message of a report of an error in the kernel.
fn is_report(warning: &str) -> bool {
    let text = warning.split_once("] ").map_or(warning, |(_, text)| text);
    KERNEL_REPORTS.iter().any(|report| text.starts_with(report))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_the_kernel_are_kept_and_others_not() {
        let record = "4,1094,7105000,-;NET: something odd\n SUBSYSTEM=net\n";
        assert_eq!(
            warning(record).as_deref(),
            Some("[    7.105000] NET: something odd")
        );
        assert_eq!(warning("6,339,5140900,-;just so"), None);
        assert_eq!(warning("12,2,3,-;a user's warning"), None);
        assert_eq!(warning("garbage"), None);
        assert_eq!(warning("4,x;y"), None);
    }

    /// Returns the answer for a device with these records, one per read.
    fn log(records: &[&str], from: Option<u64>) -> AgentLog {
        struct Device<'r>(&'r [&'r str]);
        impl Read for Device<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let Some((first, rest)) = self.0.split_first() else {
                    return Err(io::ErrorKind::WouldBlock.into());
                };
                self.0 = rest;
                if first.is_empty() {
                    return Err(rustix::io::Errno::PIPE.into());
                }
                buffer[..first.len()].copy_from_slice(first.as_bytes());
                Ok(first.len())
            }
        }
        super::records(&mut Device(records), from, 0).expect("a log")
    }

    #[test]
    fn the_log_is_read_from_a_record_on() {
        let device = [
            "6,5,1000000,-;old\n",
            "7,6,2000000,-;debug\n SUBSYSTEM=x\n",
            "30,7,2500000,-;a daemon's\n",
            "garbage",
            "4,8,3000000,-;warning\n",
        ];
        let end = log(&device, None);
        assert_eq!((end.records.len(), end.next, end.lost), (0, 9, 0));
        let new = log(&device, Some(6));
        let texts: Vec<_> = new
            .records
            .iter()
            .map(|record| (record.level, record.text.as_str()))
            .collect();
        assert_eq!(texts, [(7, "debug"), (4, "warning")]);
        assert_eq!((new.next, new.lost, new.records[0].sequence), (9, 0, 6));
        assert_eq!(
            log(&device, Some(3)).lost,
            2,
            "overwritten before the first read"
        );
        let gap = log(&["6,5,1,-;a\n", "", "6,9,1,-;b\n"], Some(5));
        assert_eq!((gap.records.len(), gap.next, gap.lost), (2, 10, 3));
        let long = format!("6,5,1,-;{}\n", "x".repeat(8000));
        let many = vec![long.as_str(); 100];
        assert!(
            log(&many, Some(0)).records.len() < 20,
            "an answer fits into a frame"
        );
    }

    #[test]
    fn reports_are_told_from_other_warnings() {
        for (text, expected) in [
            ("WARNING: CPU: 0 PID: 1 at lib/x.c:9 f+0x1/0x2", true),
            ("BUG: kernel NULL pointer dereference, address: 0", true),
            ("NET: something odd", false),
            ("a driver said WARNING: no", false),
        ] {
            let warning = super::warning(&format!("4,1,7105000,-;{text}\n")).expect("a warning");
            assert_eq!(is_report(&warning), expected, "{warning}");
        }
    }
}
