// SPDX-License-Identifier: Apache-2.0
//! Finds the holders of file locks in `/proc/locks` (Documentation/filesystems/proc.rst).
//!
//! An attacher locks `/proc/PID/maps` of its guest's monitor, so the holder of this lock is the
//! attacher.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The locks of this host at one moment.
#[derive(Clone, Debug, Default)]
pub struct Locks(String);

impl Locks {
    /// Reads the locks from a folder like /proc. If they cannot be read, no lock is found.
    #[must_use]
    pub fn read(proc: &Path) -> Self {
        Self(fs::read_to_string(proc.join("locks")).unwrap_or_default())
    }

    /// Returns the process that holds a lock on a file. Returns `None` if it is not found, for
    /// example because it is in another PID namespace.
    #[must_use]
    pub fn holder(&self, file: &Metadata) -> Option<u32> {
        let device = file.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let name = format!("{major:02x}:{minor:02x}:{}", file.ino());
        let mut lines = self.0.lines().map(|line| line.split_ascii_whitespace());
        // "1: FLOCK  ADVISORY  WRITE 5215 fe:00:15368203 0 EOF"
        let mut holder = lines.find(|words| words.clone().nth(5) == Some(name.as_str()))?;
        holder.nth(4)?.parse().ok().filter(|pid| *pid != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let file = tempfile::tempfile().expect("a file");
        let holder =
            |file: &File| Locks::read(Path::new("/proc")).holder(&file.metadata().expect("open"));
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
        let (major, minor) = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
        let name = format!("{major:02x}:{minor:02x}:{}", file.ino());
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
            assert_eq!(Locks(line.clone()).holder(&file), found, "{line}");
        }
    }
}
