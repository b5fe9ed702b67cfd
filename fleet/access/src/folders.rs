// SPDX-License-Identifier: Apache-2.0
//! Creates the folders in which a program makes its sockets and logs.

use std::io;
use std::path::{Path, PathBuf};

/// The folder cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("folder {} cannot be created", folder.display())]
pub struct FolderError {
    folder: PathBuf,
    source: io::Error,
}

/// Creates the folder of this path, and the folders above it, unless they exist.
///
/// # Errors
/// [`FolderError`].
pub fn create_folder_of(path: &Path) -> Result<(), FolderError> {
    // The folder of a name without a slash is the empty path, which always exists.
    let folder = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(|source| FolderError {
        folder: folder.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_created_unless_a_file_is_there() {
        let root = tempfile::tempdir().expect("a folder");
        let socket = root.path().join("a/b/socket");
        for _ in 0..2 {
            create_folder_of(&socket).expect("created");
        }
        assert!(root.path().join("a/b").is_dir() && !socket.exists());
        create_folder_of(Path::new("socket")).expect("the current folder");
        create_folder_of(Path::new("/")).expect("the root");
        std::fs::write(&socket, "").expect("written");
        let error = create_folder_of(&socket.join("c")).expect_err("a file");
        let expected = format!("folder {} cannot be created", socket.display());
        assert_eq!(error.to_string(), expected);
    }
}
