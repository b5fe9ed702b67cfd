// SPDX-License-Identifier: Apache-2.0
//! Reads the list of a process's mappings. The process decides how long its list is, so a caller
//! names all addresses at once, the list is read once, and only the mappings at these addresses are
//! kept.

use std::fs::Metadata;
use std::io::{self, BufRead};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use crate::error::AttachError;

/// The mappings of a process at the addresses that a caller asked for.
#[derive(Debug, Default)]
pub struct Mappings {
    pid: u32,
    /// Sorted and not overlapping. Each is joined with adjacent mappings that continue it.
    runs: Vec<Mapping>,
}

impl Mappings {
    /// Reads the lines of /proc/PID/maps, as far as the last of these addresses.
    pub(super) fn read(
        pid: u32,
        lines: impl BufRead,
        mut addresses: Vec<u64>,
        deadline: Instant,
    ) -> io::Result<Self> {
        #[cfg(test)]
        READS.set(READS.get() + 1);
        addresses.sort_unstable();
        let mut left = &addresses[..];
        let mut runs = Vec::new();
        // Keeps a run that contains one of the addresses. Returns whether any address lies beyond
        // it.
        let mut keep = |run: Mapping| {
            let (passed, rest) = left.split_at(left.partition_point(|at| *at < run.end));
            left = rest;
            if passed.last().is_some_and(|last| run.start <= *last) {
                runs.push(run);
            }
            !left.is_empty()
        };
        let mut run: Option<Mapping> = None;
        // Names of mappings may contain any bytes.
        for line in lines.split(b'\n') {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let Some(next) = Mapping::parse(&String::from_utf8_lossy(&line?)) else {
                continue;
            };
            if let Some(run) = run.as_mut().filter(|run| run.continues_in(&next)) {
                run.end = next.end;
            } else if !run.replace(next).is_none_or(&mut keep) {
                break;
            }
        }
        run.map(keep);
        Ok(Self { pid, runs })
    }

    /// Returns the mapping of `bytes` bytes from `address`, which must be one of the addresses that
    /// were asked for.
    ///
    /// # Errors
    /// Part of the range is not mapped, or the process may not write to it.
    pub fn at(&self, address: u64, bytes: u64) -> Result<&Mapping, AttachError> {
        let refused = |what: String| {
            Err(AttachError::Refused(format!(
                "process {} {what}: it is not the guest's monitor, or this range is not the guest's RAM",
                self.pid
            )))
        };
        let index = self.runs.partition_point(|run| run.end <= address);
        let Some(found) = self.runs.get(index).filter(|run| run.start <= address) else {
            return refused(format!("has nothing mapped at {address:#x}"));
        };
        if !found.writable {
            return refused(format!(
                "may not write what it has mapped at {address:#x} ({})",
                found.path
            ));
        }
        if found.end < address.saturating_add(bytes) {
            return refused(format!(
                "has no {bytes} bytes at {address:#x} mapped in one run, only {} ({})",
                found.end - address,
                found.path
            ));
        }
        Ok(found)
    }
}

/// A line of /proc/PID/maps, or several that [`Mappings`] has joined. `path` is then that of the
/// first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after the mapping.
    pub end: u64,
    /// The process may write to it.
    pub writable: bool,
    /// Writes reach the file.
    pub shared: bool,
    /// Offset of `start` in the file.
    pub offset: u64,
    /// Device number of the file, as `stat` returns it; 0 if the mapping has no file.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
    /// Name of the file, which may have been deleted.
    pub path: String,
}

impl Mapping {
    /// Returns the offset in the file of an address of the mapping.
    #[must_use]
    pub fn offset_of(&self, address: u64) -> Option<u64> {
        self.offset.checked_add(address.checked_sub(self.start)?)
    }

    /// Returns whether two mappings have the same bytes of the same file at an address, with the
    /// same permissions.
    #[must_use]
    pub fn agrees_at(&self, address: u64, other: &Self) -> bool {
        let rights = |mapping: &Self| (mapping.shared, mapping.writable);
        rights(self) == rights(other)
            && (self.device, self.inode) == (other.device, other.inode)
            && self.offset_of(address) == other.offset_of(address)
    }

    /// Returns whether `next` follows without a gap and has the same permissions and, if there is a
    /// file, the same file.
    pub(super) fn continues_in(&self, next: &Self) -> bool {
        let continues = self.inode == 0 || self.offset_of(self.end) == Some(next.offset);
        self.end == next.start
            && (self.shared, self.writable) == (next.shared, next.writable)
            && (self.device, self.inode) == (next.device, next.inode)
            && continues
    }

    /// Returns the number of the vCPU whose run page this is, and the page's address. The pages
    /// behind the run page belong to the vCPU's dirty ring.
    pub(super) fn run_page(&self) -> Option<(u32, u64)> {
        let number = self.path.strip_prefix("anon_inode:kvm-vcpu:")?;
        let is_it = self.offset == 0 && self.shared && self.writable;
        is_it.then_some((number.parse().ok()?, self.start))
    }

    /// Returns whether the path leads to the mapped file, and the file is a regular one.
    pub(super) fn is_of_path(&self, path: &Path) -> bool {
        // STATX_DONT_SYNC does not wait for file systems that do not answer.
        let wanted = StatxFlags::TYPE | StatxFlags::INO;
        statx(CWD, path, AtFlags::STATX_DONT_SYNC, wanted).is_ok_and(|found| {
            let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
            FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile
                && (device, found.stx_ino) == (self.device, self.inode)
        })
    }

    /// Returns whether `found` is the mapped file, and a regular one.
    pub(super) fn is_of(&self, found: &Metadata) -> bool {
        found.is_file() && (found.dev(), found.ino()) == (self.device, self.inode)
    }

    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
        let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
        let rights = words.next()?;
        let offset = hexadecimal(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let number = |digits| u32::from_str_radix(digits, 16).ok();
        let device = rustix::fs::makedev(number(major)?, number(minor)?);
        Some(Self {
            start,
            end,
            writable: rights.as_bytes().get(1) == Some(&b'w'),
            shared: rights.ends_with('s'),
            offset,
            device,
            inode: words.next()?.parse().ok()?,
            path: words.next().unwrap_or("").trim_start().to_owned(),
        })
    }
}

#[cfg(test)]
thread_local! {
    /// The number of lists that this thread has read.
    pub(crate) static READS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIST: &str = "1000-2000 rw-s 00003000 fe:01 7 /ram\n\
                        2000-5000 rw-s 00004000 fe:01 7 /ram\n\
                        5000-6000 rw-s 00009000 fe:01 7 /ram\n\
                        nonsense\n\
                        8000-9000 r--s 00000000 fe:01 8 /rom\n\
                        9000-a000 rw-p 00000000 00:00 0\n\
                        a000-b000 rw-p 00000000 00:00 0 [heap]\n";

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn read(addresses: &[u64]) -> Mappings {
        Mappings::read(7, LIST.as_bytes(), addresses.to_vec(), later()).expect("a list")
    }

    #[test]
    fn one_read_answers_for_all_addresses() {
        let all = [0xa800, 0, 0x1800, 0x2000, 0x8000, 0x5000, 0x6000, 0x2000];
        let mappings = read(&all);
        let found = |address, bytes| mappings.at(address, bytes).map(|it| it.end);
        assert_eq!(found(0x1800, 0x3800).expect("one run"), 0x5000);
        assert_eq!(found(0x2000, 1).expect("the same"), 0x5000);
        assert_eq!(
            found(0x5000, 0x1000).expect("the file goes on elsewhere"),
            0x6000
        );
        assert_eq!(found(0xa800, 0x800).expect("the last one"), 0xb000);
        let offset = mappings.at(0x2000, 1).map(|it| it.offset_of(0x2000));
        assert_eq!(offset.expect("mapped"), Some(0x4000));
        for (address, bytes, expected) in [
            (
                0x1800,
                0x3801,
                "has no 14337 bytes at 0x1800 mapped in one run, only 14336",
            ),
            (0, 1, "has nothing mapped at 0x0"),
            (0x6000, 1, "has nothing mapped at 0x6000"),
            (
                0x8000,
                1,
                "may not write what it has mapped at 0x8000 (/rom)",
            ),
            (0x5000, u64::MAX, "in one run, only 4096 (/ram)"),
        ] {
            let error = found(address, bytes).expect_err("not RAM").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn only_mappings_at_the_addresses_are_kept() {
        assert_eq!(read(&[0x2000, 0x3000]).runs.len(), 1);
        assert!(read(&[0x7000, u64::MAX]).runs.is_empty());
        assert!(read(&[]).runs.is_empty());
    }

    #[test]
    fn a_list_that_is_longer_than_the_time_is_not_read_to_its_end() {
        let read = Mappings::read(7, LIST.as_bytes(), vec![0x1000], Instant::now());
        let error = read.expect_err("the deadline has passed");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
