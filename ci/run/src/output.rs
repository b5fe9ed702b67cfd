// SPDX-License-Identifier: Apache-2.0
//! Writes the files of results. A regular file is replaced as a whole where that is possible, so no
//! reader finds an incomplete one.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use rustix::process::geteuid;
use tempfile::TempPath;
use tokio::task::spawn_blocking;

use crate::monitor::cannot_write;

/// Replaces a file: writes the content under another name and renames it. Pipes, devices and files
/// that cannot be replaced are written in place. The content is written on another thread, because
/// a pipe may block until it has a reader, and a signal must be able to end this process meanwhile.
/// If the future is dropped, the other name is removed.
///
/// # Errors
/// The file cannot be written.
pub async fn write(path: &Path, content: impl Into<Vec<u8>>) -> Result<()> {
    let written = replace(path, content.into().into()).await;
    written.with_context(|| cannot_write(path))
}

async fn replace(path: &Path, content: Arc<[u8]>) -> io::Result<()> {
    if let Some((mut file, replacement)) = Replacement::begin(path)? {
        let content = Arc::clone(&content);
        // The thread outlives a dropped future, so the name must not be the thread's.
        let written = spawn_blocking(move || file.write_all(&content)).await?;
        if replacement.end(written)? {
            return Ok(());
        }
    }
    let path = path.to_owned();
    spawn_blocking(move || fs::write(path, content)).await?
}

/// Prints results on standard output, on another thread, because a write to a pipe may block and a
/// signal must be able to end this process meanwhile. A closed standard output does not change the
/// result of a run.
///
/// # Errors
/// Standard output cannot be written, for example because the disk is full.
pub async fn print(text: String) -> Result<()> {
    let print = move || {
        let mut out = io::stdout();
        out.write_all(text.as_bytes()).and(out.flush())
    };
    match spawn_blocking(print).await? {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        printed => printed.context("cannot write to standard output"),
    }
}

/// The name of a new file that has yet to replace another one. Dropping it removes the name.
struct Replacement {
    name: TempPath,
    path: PathBuf,
}

impl Replacement {
    /// Creates an empty file beside the one to replace; `None` if it has to be written in place.
    fn begin(path: &Path) -> io::Result<Option<(File, Self)>> {
        // The links there may name an open file, whose reader or writer would keep the old one.
        if path.starts_with("/dev") || path.starts_with("/proc") {
            return Ok(None);
        }
        let existing = match path.metadata() {
            Ok(metadata) if is_replaceable(&metadata) => Some(metadata),
            Err(error) if error.kind() == ErrorKind::NotFound && !path.is_symlink() => None,
            // A device or a pipe must stay what it is, and a link to nothing names the new file.
            _ => return Ok(None),
        };
        unless_in_place(Self::create(path, existing))
    }

    fn create(path: &Path, existing: Option<Metadata>) -> io::Result<(File, Self)> {
        // The name may be a symbolic link, which stays.
        let path = match existing {
            Some(_) => path.canonicalize()?,
            None => path.to_owned(),
        };
        let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
        let file = tempfile::Builder::new()
            .prefix(".patchbay-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder.unwrap_or(Path::new(".")))?;
        let (file, name) = file.into_parts();
        if let Some(existing) = existing {
            fchown(&file, None, Some(existing.gid()))?;
            // Bits such as setuid were given to another content.
            file.set_permissions(Permissions::from_mode(existing.mode() & 0o777))?;
        }
        Ok((file, Self { name, path }))
    }

    /// Replaces the file if the content was written. Returns whether it did; otherwise the file has
    /// to be written in place.
    fn end(self, written: io::Result<()>) -> io::Result<bool> {
        let persist = |()| Ok(self.name.persist(&self.path)?);
        Ok(unless_in_place(written.and_then(persist))?.is_some())
    }
}

/// Returns whether a new file can take the place of this one: the owner and the other names of a
/// file would be lost.
fn is_replaceable(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.uid() == geteuid().as_raw() && metadata.nlink() == 1
}

/// Returns `None` after an error that does not keep a file from being written in place: the folder
/// belongs to another user, the group is not one of this user's, or the file is a mount point, for
/// example in a container.
fn unless_in_place<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound
                    | ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem
                    | ErrorKind::ResourceBusy
                    // The group of a file may be unknown in a container.
                    | ErrorKind::InvalidInput
            ) =>
        {
            Ok(None)
        }
        done => done.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_file_is_replaced_as_a_whole_and_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.xml");
        replace(&path, (*b"first").into()).await.unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o7777;
        // The umask decides about the mode of a new file.
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(mode(&path), mode(&plain));
        fs::set_permissions(&path, Permissions::from_mode(0o6640)).unwrap();
        let open = File::open(&path).unwrap();
        let link = folder.path().join("link");
        symlink("j.xml", &link).unwrap();
        replace(&link, (*b"second").into()).await.unwrap();
        assert!(link.is_symlink());
        assert_eq!(
            (fs::read(&path).unwrap(), mode(&path)),
            (b"second".to_vec(), 0o640)
        );
        // A reader of the old file reads all of it.
        assert_eq!(io::read_to_string(open).unwrap(), "first");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[tokio::test]
    async fn a_device_stays_and_a_link_to_nothing_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (full, link) = (folder.path().join("full"), folder.path().join("link"));
        symlink("/dev/full", &full).unwrap();
        let error = replace(&full, (*b"x").into()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        symlink("new", &link).unwrap();
        replace(&link, (*b"x").into()).await.unwrap();
        assert!(link.is_symlink() && folder.path().join("new").is_file());
        replace(&folder.path().join("missing/x"), (*b"x").into())
            .await
            .unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    /// Writes a file and returns whether it is still the same one.
    async fn stays(path: &Path) -> bool {
        let file = || path.metadata().unwrap().ino();
        let before = file();
        replace(path, (*b"new").into()).await.unwrap();
        assert_eq!(fs::read(path).unwrap(), b"new");
        file() == before
    }

    #[tokio::test]
    async fn a_file_keeps_its_other_names_its_owner_and_its_group() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        for name in ["plain", "one", "group", "owner"] {
            fs::write(path(name), "old").unwrap();
        }
        fs::hard_link(path("one"), path("other")).unwrap();
        assert!(!stays(&path("plain")).await);
        assert!(stays(&path("one")).await);
        assert_eq!(fs::read(path("other")).unwrap(), b"new");
        // Only root may give a file away.
        if geteuid().is_root() {
            fchown(File::open(path("group")).unwrap(), None, Some(12)).unwrap();
            assert!(!stays(&path("group")).await);
            assert_eq!(path("group").metadata().unwrap().gid(), 12);
            fchown(File::open(path("owner")).unwrap(), Some(12), None).unwrap();
            assert!(stays(&path("owner")).await);
            assert_eq!(path("owner").metadata().unwrap().uid(), 12);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[tokio::test]
    async fn an_open_file_is_written_in_place() {
        use std::os::fd::AsRawFd;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let open = File::create_new(&path).unwrap();
        for of in ["/dev/fd", "/proc/self/fd"] {
            let name = PathBuf::from(format!("{of}/{}", open.as_raw_fd()));
            assert!(stays(&name).await);
            assert_eq!(
                path.metadata().unwrap().ino(),
                open.metadata().unwrap().ino()
            );
        }
        // A deleted file has no folder.
        fs::remove_file(&path).unwrap();
        let link = folder.path().join("link");
        symlink(format!("/proc/self/fd/{}", open.as_raw_fd()), &link).unwrap();
        replace(&link, (*b"last").into()).await.unwrap();
        assert_eq!(open.metadata().unwrap().len(), 4);
    }

    #[tokio::test]
    async fn a_write_that_is_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.xml");
        let count = || fs::read_dir(folder.path()).unwrap().count();
        let (file, replacement) = Replacement::begin(&path).unwrap().expect("a new file");
        assert_eq!(count(), 1);
        drop(replacement);
        assert_eq!(count(), 0);
        drop(file);
        // The future is dropped while the thread may still write.
        let content = "x".repeat(16 << 20);
        let ended = tokio::time::timeout(Duration::ZERO, write(&path, content)).await;
        assert_eq!(count(), usize::from(ended.is_ok()));
        write(&path, "whole".to_owned()).await.unwrap();
        assert_eq!((count(), fs::read(&path).unwrap()), (1, b"whole".to_vec()));
    }
}
