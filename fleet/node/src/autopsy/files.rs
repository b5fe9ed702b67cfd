// SPDX-License-Identifier: Apache-2.0
//! Keeps the files of autopsies in a folder, which has limits on their number and their bytes.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use patchbay_proto::text::hex;
use sha2::{Digest, Sha256};

/// The maximum number of files.
const MAX_FILES: usize = 64;
/// The maximum number of bytes of a file.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// The maximum number of files of one guest, which chooses how often it panics.
const MAX_FILES_OF_GUEST: usize = 8;
/// The maximum number of bytes of all files.
const MAX_BYTES: u64 = 1 << 30;
/// The number of bytes that stay free on the file system, which may be that of the audit log.
const MIN_FREE: u64 = 256 << 20;
/// The maximum length of a part of a file's name. The name of a file has at most 255 bytes.
const MAX_PART: usize = 100;
const SUFFIX: &str = ".json";
/// The name of the file that is being written. The caller writes one at a time.
const UNFINISHED: &str = ".unfinished";

/// Returns the beginning of the names of a guest's files. Characters of the guest's name other than
/// letters, digits, dots and hyphens are replaced by `%` and their code.
fn prefix(guest: &str) -> String {
    format!("{}_", part(guest))
}

fn part(text: &str) -> String {
    let mut part = String::new();
    for (index, byte) in text.bytes().enumerate() {
        let is_plain = byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.' && index > 0;
        match is_plain {
            true => part.push(byte.into()),
            false => part.push_str(&format!("%{byte:02X}")),
        }
    }
    if part.len() > MAX_PART {
        let digest = hex(&Sha256::digest(text.as_bytes()));
        // All characters are ASCII.
        part.truncate(MAX_PART - 17);
        part = format!("{part}-{}", &digest[..16]);
    }
    part
}

/// Writes a file of mode 0600 that appears whole, after deleting the oldest ones to make room for
/// it. `panic` is the sequence number and the time of the log's record of the panic. Returns `None`
/// if the folder has an autopsy of this panic. Only one call may run at a time.
///
/// # Errors
/// A message with the path. No part of the file remains.
pub fn store(
    folder: &Path,
    guest: &str,
    panic: Option<(u64, u64)>,
    content: &[u8],
) -> Result<Option<PathBuf>, String> {
    prepare(folder).map_err(|error| failed(folder, error))?;
    let prefix = prefix(guest);
    let name = match panic {
        Some((sequence, time)) => format!("{prefix}{sequence}-{time}_"),
        None => format!("{prefix}unknown_"),
    };
    let files = list(folder).map_err(|error| failed(folder, error))?;
    if panic.is_some() && files.iter().any(|file| file.name.starts_with(&name)) {
        return Ok(None);
    }
    let unfinished = folder.join(UNFINISHED);
    let path = folder.join(format!("{name}{}{SUFFIX}", stamp(SystemTime::now())));
    let written = make_room(folder, files, &prefix, content.len() as u64)
        .and_then(|()| write(&unfinished, content))
        .and_then(|()| std::fs::rename(&unfinished, &path));
    if let Err(error) = written {
        // It may not exist.
        let _ = std::fs::remove_file(&unfinished);
        return Err(failed(&path, error));
    }
    // The file is there also if this fails, and a crash of the host may lose its name.
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(Some(path))
}

fn failed(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Creates the folder, and refuses one in which other users could exchange files.
fn prepare(folder: &Path) -> std::io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let metadata = std::fs::metadata(folder)?;
    let mode = metadata.permissions().mode();
    let own = rustix::process::geteuid().as_raw();
    match (metadata.uid() == own, mode & 0o022) {
        (true, 0) => Ok(()),
        (true, _) => Err(std::io::Error::other(format!(
            "others may write to the folder (mode {:o}); give it mode 0700",
            mode & 0o7777
        ))),
        (false, _) => Err(std::io::Error::other(format!(
            "the folder belongs to the user {}; make {own} its owner",
            metadata.uid()
        ))),
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    // An earlier daemon may have been killed while it wrote.
    remove(path)?;
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// An autopsy in the folder. The fields decide the order: the oldest is the first, so `modified`
/// must stay the first field.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Stored {
    modified: SystemTime,
    name: String,
    bytes: u64,
}

/// Lists the autopsies, and leaves out everything that has another form of name.
fn list(folder: &Path) -> std::io::Result<Vec<Stored>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let has_form = has_form(&name);
        // Does not follow symbolic links. The file may have been removed.
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if has_form && metadata.is_file() {
            files.push(Stored {
                modified: metadata.modified()?,
                name,
                bytes: metadata.len(),
            });
        }
    }
    Ok(files)
}

/// Returns whether a name consists of a guest, a panic and a time.
fn has_form(name: &str) -> bool {
    let parts: Vec<&str> = name.split('_').collect();
    let [guest, _, time] = parts[..] else {
        return false;
    };
    let is_digit = |at: usize, byte: u8| match at {
        8 => byte == b'T',
        15 => byte == b'Z',
        _ => byte.is_ascii_digit(),
    };
    let time = time.strip_suffix(SUFFIX).unwrap_or_default();
    let mut bytes = time.bytes().enumerate();
    !guest.starts_with('.') && time.len() == 16 && bytes.all(|(at, byte)| is_digit(at, byte))
}

/// Deletes the guest's own oldest files, and then the oldest ones of all, until one more file of
/// this size fits.
///
/// # Errors
/// The file system would have less than [`MIN_FREE`] bytes left.
fn make_room(
    folder: &Path,
    mut files: Vec<Stored>,
    prefix: &str,
    bytes: u64,
) -> std::io::Result<()> {
    files.sort_unstable();
    let (mut number, mut own, mut total, mut is_full) = (1, 1, bytes, false);
    for file in files.into_iter().rev() {
        let is_own = file.name.starts_with(prefix);
        own += usize::from(is_own);
        is_full |= number == MAX_FILES || total.saturating_add(file.bytes) > MAX_BYTES;
        if !is_full && !(is_own && own > MAX_FILES_OF_GUEST) {
            number += 1;
            total += file.bytes;
            continue;
        }
        remove(&folder.join(&file.name))?;
        tracing::info!(file = file.name, "an old autopsy is deleted to make room");
    }
    let system = rustix::fs::statvfs(folder)?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    match free.checked_sub(bytes) {
        Some(left) if left >= MIN_FREE => Ok(()),
        _ => Err(std::io::Error::other(format!(
            "{free} bytes are free, and {MIN_FREE} must stay free"
        ))),
    }
}

/// Formats a time in UTC to the second.
fn stamp(time: SystemTime) -> String {
    let mut time = prost_types::Timestamp::from(time);
    time.nanos = 0;
    time.to_string().replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let names = entries.map(|entry| name(entry).into_string().expect("UTF-8"));
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// Creates a file of this length without content, which is older than the others by its number.
    fn old(folder: &Path, number: u64, bytes: u64) -> String {
        let name = format!("old_{number}_20260101T000000Z.json");
        let file = File::create(folder.join(&name)).expect("created");
        file.set_len(bytes).expect("sparse");
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + number);
        file.set_modified(time).expect("a time");
        name
    }

    fn stored(folder: &Path, guest: &str, panic: Option<(u64, u64)>) -> PathBuf {
        let path = store(folder, guest, panic, b"{}\n");
        path.expect("written").expect("a new panic")
    }

    #[test]
    fn a_file_has_a_safe_name_and_appears_whole_for_its_owner_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let new = folder.path().join("deep/autopsies");
        assert_eq!(prefix("../kvm:7_b"), "%2E.%2Fkvm%3A7%5Fb_");
        let path = stored(&new, "../kvm:7_b", Some((1, 2)));
        assert_eq!(std::fs::read(&path).expect("text"), b"{}\n");
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode();
        assert_eq!((mode(&path) & 0o777, mode(&new) & 0o777), (0o600, 0o700));
        assert_eq!(names(&new).len(), 1);
        let again = store(&new, "../kvm:7_b", Some((1, 2)), b"{}\n");
        assert_eq!(again, Ok(None), "the same panic");
        stored(&new, "../kvm:7_b", Some((1, 3)));
        let long = "/".repeat(5000);
        assert_ne!(prefix(&long), prefix(&long[1..]));
        stored(&new, &long, Some((u64::MAX, u64::MAX)));
    }

    #[test]
    fn the_oldest_files_make_room_and_others_are_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let others = [
            "notes.json",
            "my_old_notes.json",
            "a_b_20260101T00000xZ.json",
        ];
        for name in others {
            std::fs::write(folder.join(name), "mine").expect("written");
        }
        let olds: Vec<_> = (0..MAX_FILES as u64 + 3)
            .map(|number| old(folder, number, 1))
            .collect();
        stored(folder, "web", None);
        let left = names(folder);
        assert_eq!(left.len(), MAX_FILES + others.len());
        assert!(others.iter().all(|name| left.contains(&(*name).to_owned())));
        assert!(
            !left.contains(&olds[3]) && left.contains(&olds[4]),
            "{left:?}"
        );
    }

    #[test]
    fn all_files_have_a_limit_in_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let half = MAX_BYTES / 2;
        let olds =
            [(0, 1), (1, half), (2, half - 3)].map(|(number, bytes)| old(folder, number, bytes));
        stored(folder, "web", None);
        let left = names(folder);
        assert!(
            left.contains(&olds[1]) && left.contains(&olds[2]),
            "{left:?}"
        );
        assert!(!left.contains(&olds[0]), "{left:?}");
        stored(folder, "web", Some((1, 2)));
        let left = names(folder);
        assert!(
            !left.contains(&olds[1]) && left.contains(&olds[2]),
            "{left:?}"
        );
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_an_error_and_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let error = store(&file.join("in"), "web", None, b"{}\n").expect_err("no folder");
        assert!(error.contains("file/in"), "{error}");
        let open = folder.path().join("open");
        std::fs::create_dir(&open).expect("created");
        let mode = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(&open, mode).expect("changed");
        let error = store(&open, "web", None, b"{}\n").expect_err("open to others");
        assert!(error.contains("mode 777"), "{error}");
        assert!(names(&open).is_empty());
    }

    #[test]
    fn a_guest_that_panics_often_takes_only_its_own_files_away() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let other = old(folder, 1, 1);
        let first = stored(folder, "web", Some((0, 0)));
        let early = SystemTime::UNIX_EPOCH + Duration::from_secs(2000);
        let file = File::options().write(true).open(&first).expect("there");
        file.set_modified(early).expect("a time");
        for number in 1..=MAX_FILES_OF_GUEST as u64 {
            stored(folder, "web", Some((number, 0)));
        }
        let left = names(folder);
        assert_eq!(left.len(), 1 + MAX_FILES_OF_GUEST);
        assert!(left.contains(&other) && !first.exists(), "{left:?}");
    }

    /// An earlier daemon was killed while it wrote, and a link has taken the place of its file.
    #[test]
    fn what_an_earlier_daemon_left_is_replaced_and_no_link_is_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("target");
        std::fs::write(&target, "precious").expect("written");
        let own = folder.path().join("own");
        std::fs::create_dir(&own).expect("created");
        std::os::unix::fs::symlink(&target, own.join(UNFINISHED)).expect("linked");
        stored(&own, "web", None);
        assert_eq!(std::fs::read_to_string(&target).expect("text"), "precious");
        assert_eq!(names(&own).len(), 1);
    }
}
