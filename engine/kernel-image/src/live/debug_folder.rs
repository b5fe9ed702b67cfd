// SPDX-License-Identifier: Apache-2.0
//! A folder of the host with the files of many kernels, named as in debuginfo packages.
//!
//! | name | looked for if the kernel's read-only data has |
//! |---|---|
//! | `.build-id/ab/cdef….debug` | a build id |
//! | `vmlinux-RELEASE`, `System.map-RELEASE` | `linux_banner` |
//!
//! The first file that exists is used. The guest chooses the build id and the release, so a build
//! id is used in hexadecimal, and a release only if it consists of letters, digits and `.+-_~`. The
//! file is compared with the kernel like any debug file.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memchr::memmem;

use super::debug_file::{self, DebugFile, DebugFileError};
use super::error::{DiscoveryError, GIVE_FILE, refuse};
use patchbay_memory::PAGE_SIZE;

/// The maximum length of a release in bytes, that of `struct new_utsname`.
const MAX_RELEASE: usize = 64;
/// The maximum size of a note with a build id, in bytes.
const MAX_NOTE: usize = 16 + 32;
/// The maximum size in pages of the ELF files in the kernel's data. These are the vDSOs, which have
/// build ids of their own.
const EMBEDDED_PAGES: usize = 4;

/// The debug files of the host.
#[derive(Debug)]
pub enum DebugFiles {
    /// One file, used for every kernel.
    One(DebugFile),
    /// A folder in which each kernel's file is found by name.
    Folder(DebugFolder),
}

impl From<DebugFile> for DebugFiles {
    fn from(file: DebugFile) -> Self {
        Self::One(file)
    }
}

impl DebugFiles {
    /// Reads a file, or keeps the path of a folder. The files of a folder are read when a kernel
    /// needs them.
    ///
    /// # Errors
    /// [`DebugFileError`].
    pub fn open(path: &Path) -> Result<Self, DebugFileError> {
        if fs::metadata(path)?.is_dir() {
            return Ok(Self::Folder(DebugFolder {
                path: path.to_owned(),
                last: None,
            }));
        }
        DebugFile::open(path).map(Self::from)
    }

    /// Returns the file for the kernel with this read-only data. `lacks` is the reason why the
    /// kernel needs a file, for errors.
    pub(super) fn of(
        &mut self,
        data: &[(u64, Vec<u8>)],
        lacks: &str,
    ) -> Result<&DebugFile, DiscoveryError> {
        match self {
            Self::One(file) => Ok(file),
            Self::Folder(folder) => folder.of(&Identity::find(data), lacks),
        }
    }
}

/// A folder with files of many kernels.
#[derive(Debug)]
pub struct DebugFolder {
    path: PathBuf,
    /// The file that was read last. Each attempt at a discovery needs the file, which may have 1
    /// GiB.
    last: Option<Opened>,
}

/// The result of reading a file.
#[derive(Debug)]
struct Opened {
    path: PathBuf,
    stamp: Stamp,
    file: Result<DebugFile, String>,
}

/// Distinguishes a file from one that replaced it.
#[derive(Debug, PartialEq, Eq)]
struct Stamp([i64; 2], [u64; 3]);

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self(
            [metadata.mtime(), metadata.mtime_nsec()],
            [metadata.dev(), metadata.ino(), metadata.len()],
        )
    }
}

impl DebugFolder {
    fn of(&mut self, kernel: &Identity, lacks: &str) -> Result<&DebugFile, DiscoveryError> {
        let names = kernel.names();
        if names.is_empty() {
            return refuse(format!(
                "{lacks}, and its read-only data has neither a build id nor a release to find a file by; {GIVE_FILE}"
            ));
        }
        let mut found = None;
        for name in &names {
            let path = self.path.join(name);
            match fs::metadata(&path) {
                Ok(metadata) => {
                    found = Some((path, Stamp::of(&metadata)));
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return refuse(format!(
                        "the debug file {} cannot be looked at: {error}; let this process read it",
                        path.display()
                    ));
                }
            }
        }
        let Some((path, stamp)) = found else {
            return refuse(format!(
                "{lacks}, and the folder {} has none of {}; put the file of this very kernel there",
                self.path.display(),
                names.join(", ")
            ));
        };
        let known = |last: &Opened| last.path == path && last.stamp == stamp;
        let opened = match self.last.take().filter(known) {
            Some(last) => last,
            None => Opened {
                file: DebugFile::open(&path).map_err(|error| {
                    format!("the debug file {} cannot be used: {error}", path.display())
                }),
                path,
                stamp,
            },
        };
        match &self.last.insert(opened).file {
            Ok(file) => Ok(file),
            Err(error) => refuse(error.as_str()),
        }
    }
}

/// The properties of a kernel that name its files.
#[derive(Debug, Default, PartialEq, Eq)]
struct Identity {
    build_id: Option<String>,
    release: Option<String>,
}

impl Identity {
    /// Finds the build id and the release without symbols, because a kernel without
    /// CONFIG_KALLSYMS_ALL has no symbols for its data.
    fn find(data: &[(u64, Vec<u8>)]) -> Self {
        let pieces = || data.iter().map(|(_, bytes)| bytes.as_slice());
        Self {
            build_id: pieces().find_map(build_id),
            release: pieces().find_map(release),
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if let Some((folder, rest)) = self
            .build_id
            .as_deref()
            .and_then(|id| id.split_at_checked(2))
        {
            names.push(format!(".build-id/{folder}/{rest}.debug"));
        }
        if let Some(release) = &self.release {
            names.extend(["vmlinux", "System.map"].map(|kind| format!("{kind}-{release}")));
        }
        names
    }
}

/// Returns the release in `linux_banner`.
fn release(data: &[u8]) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b".+-_~".contains(byte);
    memmem::find_iter(data, BANNER).find_map(|at| {
        let rest = data.get(at + BANNER.len()..)?;
        let end = rest
            .iter()
            .take(MAX_RELEASE + 1)
            .position(|byte| *byte == b' ')?;
        let release = rest.get(..end)?;
        let named = release.first()?.is_ascii_digit() && release.iter().all(plain);
        named.then(|| String::from_utf8_lossy(release).into_owned())
    })
}

/// Returns the build id of the kernel from a note in its data.
fn build_id(data: &[u8]) -> Option<String> {
    // The pattern is NT_GNU_BUILD_ID and the name, which follow two sizes.
    memmem::find_iter(data, b"\x03\0\0\0GNU\0").find_map(|at| {
        let start = at.checked_sub(8)?;
        let note = data.get(start..data.len().min(start + MAX_NOTE))?;
        let id = debug_file::build_id(note).filter(|_| !is_embedded(data, start));
        id.filter(|id| id.len() > 2)
    })
}

/// Returns whether an ELF file starts in the same page or up to three pages before it.
fn is_embedded(data: &[u8], at: usize) -> bool {
    let page = at / PAGE_SIZE as usize;
    let pages = page.saturating_sub(EMBEDDED_PAGES - 1)..=page;
    pages
        .filter_map(|page| data.get(page * PAGE_SIZE as usize..))
        .any(|bytes| bytes.starts_with(b"\x7fELF"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A note with a build id.
    fn note(id: &[u8]) -> Vec<u8> {
        let mut note = vec![4, 0, 0, 0, id.len() as u8, 0, 0, 0, 3, 0, 0, 0];
        note.extend(b"GNU\0");
        note.extend(id);
        note
    }

    fn names(data: &[u8]) -> Vec<String> {
        Identity::find(&[(0, b"other".to_vec()), (PAGE_SIZE, data.to_vec())]).names()
    }

    #[test]
    fn the_build_id_of_a_vdso_is_not_the_kernels() {
        let mut data = vec![0; 8 * PAGE_SIZE as usize];
        let put = |data: &mut Vec<u8>, at: usize, bytes: &[u8]| {
            data[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let page = PAGE_SIZE as usize;
        put(&mut data, page, b"\x7fELF");
        put(&mut data, page + 0x300, &note(&[1, 2, 3]));
        put(&mut data, 4 * page + 0x300, &note(&[4, 5, 6]));
        assert!(names(&data).is_empty());
        put(&mut data, 7 * page, &note(&[0xab, 0xcd, 0xef]));
        assert_eq!(names(&data), [".build-id/ab/cdef.debug"]);
        // The note is first complete at the end of the data, and then truncated.
        let end = 7 * page + note(&[0; 3]).len();
        assert_eq!(names(&data[..end]), [".build-id/ab/cdef.debug"]);
        assert!(names(&data[..end - 4]).is_empty());
    }

    #[test]
    fn build_ids_that_name_no_file_are_passed_over() {
        let found = |id: &[u8]| names(&note(id));
        assert!(found(&[]).is_empty());
        assert!(found(&[1]).is_empty());
        assert_eq!(found(&[1, 2]), [".build-id/01/02.debug"]);
        assert_eq!(found(&[7; 32]).len(), 1);
        assert!(found(&[7; 40]).is_empty());
        assert!(names(b"\x03\0\0\0GNU\0").is_empty());
    }

    #[test]
    fn the_release_is_in_the_first_banner_that_has_one() {
        let data = b"Linux version %s Linux version 6.1.0-56-amd64 (x) Linux version 7.0 ";
        assert_eq!(
            names(data),
            ["vmlinux-6.1.0-56-amd64", "System.map-6.1.0-56-amd64"]
        );
        let long = |length| format!("Linux version {} ", "6".repeat(length)).into_bytes();
        assert_eq!(names(&long(MAX_RELEASE)).len(), 2);
        assert!(names(&long(MAX_RELEASE + 1)).is_empty());
        assert!(names(b"Linux version 6.1").is_empty());
    }
}
