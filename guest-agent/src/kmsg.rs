// SPDX-License-Identifier: Apache-2.0
//! Recent warnings of the kernel (`Documentation/ABI/testing/dev-kmsg`).

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;

use patchbay_proto::KERNEL_REPORTS;
use rustix::fs::{Mode, OFlags, SeekFrom};

/// `LOGLEVEL_WARNING`, `include/linux/kern_levels.h`. A lower level is more severe.
const WARNING: u32 = 4;
const KEPT: usize = 16;
/// Limit on the length of a record (`CONSOLE_EXT_LOG_MAX`).
const RECORD_BYTES: usize = 8192;
/// Limit on the records read per report, so that a flood of messages does not block the agent.
const MAX_RECORDS: usize = 4096;

/// Keeps the most recent warnings, and counts the reports among them.
#[derive(Debug)]
pub struct Warnings {
    file: Option<File>,
    kept: VecDeque<String>,
    reports: u64,
}

impl Warnings {
    /// Starts at the oldest message in the kernel's buffer. Without permission there are no
    /// warnings.
    pub fn open() -> Self {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open("/dev/kmsg", flags, Mode::empty())
            .ok()
            .map(|fd| {
                let _ = rustix::fs::seek(&fd, SeekFrom::Start(0));
                File::from(fd)
            });
        Self {
            file,
            kept: VecDeque::new(),
            reports: 0,
        }
    }

    /// Reports among the messages that [`Self::read`] has read.
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
                    if let Some(warning) = parse(&String::from_utf8_lossy(&record[..read])) {
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

/// Formats a record "priority,sequence,microseconds,flags;text\n KEY=value\n..." as "[seconds]
/// text" if it is a warning.
fn parse(record: &str) -> Option<String> {
    let (prefix, text) = record.split_once(';')?;
    let mut fields = prefix.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let microseconds: u64 = fields.nth(1)?.parse().ok()?;
    let text = text.lines().next()?;
    // Other facilities than the kernel's are user space (`include/linux/syslog.h`).
    (priority <= WARNING).then(|| {
        format!(
            "[{:5}.{:06}] {text}",
            microseconds / 1_000_000,
            microseconds % 1_000_000
        )
    })
}

/// Whether the warning is the first message of a report of an error in the kernel.
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
            parse(record).as_deref(),
            Some("[    7.105000] NET: something odd")
        );
        assert_eq!(parse("6,339,5140900,-;just so"), None);
        assert_eq!(parse("12,2,3,-;a user's warning"), None);
        assert_eq!(parse("garbage"), None);
        assert_eq!(parse("4,x;y"), None);
    }

    #[test]
    fn reports_are_told_from_other_warnings() {
        for (text, expected) in [
            ("WARNING: CPU: 0 PID: 1 at lib/x.c:9 f+0x1/0x2", true),
            ("BUG: kernel NULL pointer dereference, address: 0", true),
            ("NET: something odd", false),
            ("a driver said WARNING: no", false),
        ] {
            let warning = parse(&format!("4,1,7105000,-;{text}\n")).expect("a warning");
            assert_eq!(is_report(&warning), expected, "{warning}");
        }
    }
}
