// SPDX-License-Identifier: Apache-2.0
//! Finds the holders of file locks in `/proc/locks` (Documentation/filesystems/proc.rst).
//!
//! An attacher locks `/proc/PID/maps` of its guest's monitor, so the holder of this lock is the
//! attacher.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The maximum number of bytes of `/proc/locks` that are read. A process may have any number of
/// POSIX locks, and the kernel steps over all earlier locks again for each page that is read.
const MAX_BYTES: u64 = 4 << 20;

/// The holders of the locks on some files at one moment.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    /// The process that holds a lock on each file; `None` if no holder was found.
    holders: HashMap<String, Option<u32>>,
    /// True if there are more locks than were read.
    is_cut: bool,
}

impl Locks {
    /// Reads the holders of locks on these files from a folder like /proc. If the locks cannot be
    /// read, no holder is found.
    #[must_use]
    pub fn read<'a>(proc: &Path, files: impl IntoIterator<Item = &'a Metadata>) -> Self {
        let mut locks = Self::on(files);
        if let Ok(file) = File::open(proc.join("locks")) {
            // An error ends the list.
            let _ = locks.scan(file);
        }
        locks
    }

    fn on<'a>(files: impl IntoIterator<Item = &'a Metadata>) -> Self {
        Self {
            holders: files.into_iter().map(|file| (name(file), None)).collect(),
            is_cut: false,
        }
    }

    /// Reads lines of locks. Only one line is in memory at a time.
    fn scan(&mut self, lines: impl Read) -> io::Result<()> {
        let mut lines = BufReader::new(lines.take(MAX_BYTES));
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            // "1: FLOCK  ADVISORY  WRITE 5215 fe:00:15368203 0 EOF"
            let text = String::from_utf8_lossy(&line);
            let mut words = text.split_ascii_whitespace().skip(4);
            if let (Some(pid), Some(name)) = (words.next(), words.next())
                && let Some(holder @ None) = self.holders.get_mut(name)
            {
                *holder = pid.parse().ok().filter(|pid| *pid != 0);
            }
            line.clear();
        }
        self.is_cut = lines.get_ref().limit() == 0;
        Ok(())
    }

    /// Returns the process that holds a lock on one of the files; `None` if no holder was found,
    /// for example because it is in another PID namespace.
    #[must_use]
    pub fn holder(&self, file: &Metadata) -> Option<u32> {
        self.holders.get(&name(file)).copied().flatten()
    }

    /// Returns a sentence about the locks that were not read, if there are any.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        self.is_cut.then(|| {
            format!(
                "/proc/locks has more than {MAX_BYTES} bytes, of which the others are not read; \
                 guests that are attached to may be shown as attachable"
            )
        })
    }
}

/// Returns a file's name in `/proc/locks`.
fn name(file: &Metadata) -> String {
    let device = file.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major:02x}:{minor:02x}:{}", file.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let file = tempfile::tempfile().expect("a file");
        let holder = |file: &File| {
            let file = file.metadata().expect("open");
            Locks::read(Path::new("/proc"), [&file]).holder(&file)
        };
        assert_eq!(holder(&file), None);
        file.try_lock().expect("it is free");
        assert_eq!(holder(&file), Some(std::process::id()));
        file.unlock().expect("it is locked");
        assert_eq!(holder(&file), None);
    }

    #[test]
    fn lines_of_other_forms_are_no_locks() {
        let file = tempfile::tempfile().expect("a file");
        let file = file.metadata().expect("open");
        let name = name(&file);
        for (line, found) in [
            (
                format!("1: FLOCK  ADVISORY  WRITE 52 {name} 0 EOF"),
                Some(52),
            ),
            (format!("1: FLOCK  ADVISORY  WRITE 0 {name} 0 EOF"), None),
            (format!("1: FLOCK  ADVISORY  WRITE -1 {name} 0 EOF"), None),
            (
                format!("1: -> FLOCK  ADVISORY  WRITE 52 {name} 0 EOF"),
                None,
            ),
            (name.clone(), None),
            (String::new(), None),
        ] {
            let mut locks = Locks::on([&file]);
            locks.scan(line.as_bytes()).expect("bytes");
            assert_eq!(locks.holder(&file), found, "{line}");
        }
    }

    /// Any user can have millions of locks.
    #[test]
    fn locks_without_end_are_cut() {
        let file = tempfile::tempfile().expect("a file");
        let file = file.metadata().expect("open");
        let own = format!("1: FLOCK  ADVISORY  WRITE 52 {} 0 EOF\n", name(&file));
        let other = "2: POSIX  ADVISORY  WRITE 7 00:00:1 0 0\n".to_owned();
        for (text, found) in [
            (own.clone() + &other, Some(52)),
            (other.clone() + &own, Some(52)),
        ] {
            let mut locks = Locks::on([&file]);
            locks.scan(text.as_bytes()).expect("bytes");
            assert_eq!((locks.holder(&file), locks.remark()), (found, None));
        }
        let mut locks = Locks::on([&file]);
        let endless = io::repeat(b'x').chain(own.as_bytes());
        locks.scan(endless).expect("bytes");
        assert_eq!(locks.holder(&file), None);
        let many = other.repeat(MAX_BYTES as usize / other.len() + 1) + &own;
        locks.scan(many.as_bytes()).expect("bytes");
        assert_eq!(locks.holder(&file), None);
        assert!(
            locks
                .remark()
                .is_some_and(|remark| remark.contains("are not read"))
        );
    }
}
