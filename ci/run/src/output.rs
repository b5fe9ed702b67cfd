// SPDX-License-Identifier: Apache-2.0
//! Writes the files of results so that no reader sees a part of one.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::monitor::cannot_write;

/// Replaces a file: writes the content under another name and renames it. Pipes, devices and files
/// that cannot be replaced are written in place. The work takes place on another thread, because a
/// pipe may block until it has a reader, and a signal must be able to end this process meanwhile.
///
/// # Errors
/// The file cannot be written.
pub async fn write(path: &Path, content: String) -> Result<()> {
    let of_thread = path.to_owned();
    let write = move || write_now(&of_thread, content.as_bytes());
    let written = tokio::task::spawn_blocking(write).await?;
    written.with_context(|| cannot_write(path))
}

/// Prints results on standard output, on another thread, because a write to a pipe may block and a
/// signal must be able to end this process meanwhile. A closed standard output does not change the
/// result of a run.
pub async fn print(text: String) {
    let print = move || io::stdout().write_all(text.as_bytes());
    let _ = tokio::task::spawn_blocking(print).await;
}

/// Writes a file as [`write`] does, on this thread.
pub fn write_now(path: &Path, content: &[u8]) -> io::Result<()> {
    let existing = match path.metadata() {
        Ok(metadata) if metadata.is_file() => Some(metadata.permissions()),
        Err(error) if error.kind() == ErrorKind::NotFound && !path.is_symlink() => None,
        // A device or a pipe must stay what it is, and a link to nothing names the new file.
        _ => return fs::write(path, content),
    };
    match replace(path, existing, content) {
        // The folder belongs to another user, or the file is a mount point, for example in a
        // container.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem
                    | ErrorKind::ResourceBusy
            ) =>
        {
            fs::write(path, content)
        }
        replaced => replaced,
    }
}

fn replace(path: &Path, existing: Option<Permissions>, content: &[u8]) -> io::Result<()> {
    // The name may be a symbolic link, which stays.
    let path = match existing {
        Some(_) => path.canonicalize()?,
        None => path.to_owned(),
    };
    let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .prefix(".patchbay-")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    if let Some(permissions) = existing {
        file.as_file().set_permissions(permissions)?;
    }
    file.write_all(content)?;
    file.persist(&path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.xml");
        write_now(&path, b"first").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        // As for any new file, the umask decides.
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(mode(&path), mode(&plain));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let open = fs::File::open(&path).unwrap();
        let link = folder.path().join("link");
        symlink("j.xml", &link).unwrap();
        write_now(&link, b"second").unwrap();
        assert!(link.is_symlink());
        assert_eq!(
            (fs::read(&path).unwrap(), mode(&path)),
            (b"second".to_vec(), 0o640)
        );
        // A reader of the old file reads all of it.
        assert_eq!(io::read_to_string(open).unwrap(), "first");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_device_stays_and_a_link_to_nothing_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (full, link) = (folder.path().join("full"), folder.path().join("link"));
        symlink("/dev/full", &full).unwrap();
        let error = write_now(&full, b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        symlink("new", &link).unwrap();
        write_now(&link, b"x").unwrap();
        assert!(link.is_symlink() && folder.path().join("new").is_file());
        write_now(&folder.path().join("missing/x"), b"x").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
