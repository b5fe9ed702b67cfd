// SPDX-License-Identifier: Apache-2.0
//! The kernel's last warnings (`Documentation/ABI/testing/dev-kmsg`).

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;

use rustix::fs::{Mode, OFlags, SeekFrom};

/// `LOGLEVEL_WARNING`, `include/linux/kern_levels.h`; lower is worse.
const WARNING: u32 = 4;
const KEPT: usize = 16;
/// A record is never longer (`CONSOLE_EXT_LOG_MAX`).
const RECORD_BYTES: usize = 8192;
/// Records looked at per report, so that a flood of messages does not hold the agent.
const MAX_RECORDS: usize = 4096;

/// A ring of the newest warnings.
#[derive(Debug)]
pub struct Warnings {
    file: Option<File>,
    kept: VecDeque<String>,
}

impl Warnings {
    /// From the oldest message that the kernel still has. Without permission: none.
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
        }
    }

    /// The newest, oldest first.
    pub fn read(&mut self) -> Vec<String> {
        let mut record = [0; RECORD_BYTES];
        for _ in 0..MAX_RECORDS {
            let Some(file) = &mut self.file else { break };
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(read) => {
                    if let Some(warning) = parse(&String::from_utf8_lossy(&record[..read])) {
                        self.kept.push_back(warning);
                        if self.kept.len() > KEPT {
                            self.kept.pop_front();
                        }
                    }
                }
                // Overwritten before it was read; the next read goes on with the oldest.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
                Err(_) => break,
            }
        }
        self.kept.iter().cloned().collect()
    }
}

/// "priority,sequence,microseconds,flags;text\n KEY=value\n..." as "[seconds] text", if it is a warning.
fn parse(record: &str) -> Option<String> {
    let (prefix, text) = record.split_once(';')?;
    let mut fields = prefix.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let microseconds: u64 = fields.nth(1)?.parse().ok()?;
    let text = text.lines().next()?;
    // Facilities but the kernel's own are of user space (`include/linux/syslog.h`).
    (priority <= WARNING).then(|| {
        format!(
            "[{:5}.{:06}] {text}",
            microseconds / 1_000_000,
            microseconds % 1_000_000
        )
    })
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
}
