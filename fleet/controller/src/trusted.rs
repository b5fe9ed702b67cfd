// SPDX-License-Identifier: Apache-2.0
//! Reads files that determine what the controller does. It refuses files that users other than root
//! and the controller's own can write.

use std::fs::{Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// The permissions that only the owner may have.
#[derive(Clone, Copy, Debug)]
pub enum Forbidden {
    Write,
    All,
}

/// The reason why a file or a folder is not used.
#[derive(Debug, thiserror::Error)]
pub enum NotTrusted {
    #[error("it cannot be read: {0}")]
    Read(io::Error),
    #[error("it is not a regular file")]
    NoFile,
    #[error("it is not a folder")]
    NoFolder,
    #[error("it has more than {0} bytes")]
    TooLarge(u64),
    #[error(
        "it belongs to uid {owner}, who could change it; change its owner to root or to the \
         controller's user, uid {own}"
    )]
    Owner { owner: u32, own: u32 },
    #[error("it has mode {mode:04o}, so users other than its owner can write it; run `chmod go-w`")]
    Writable { mode: u32 },
    #[error("it has mode {mode:04o}, so users other than its owner have access; run `chmod go=`")]
    Accessible { mode: u32 },
}

impl From<io::Error> for NotTrusted {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

/// Reads a file of at most this many bytes.
///
/// # Errors
/// [`NotTrusted`].
pub fn read(path: &Path, forbidden: Forbidden, most: u64) -> Result<Vec<u8>, NotTrusted> {
    // Opening a FIFO must not block. FIFOs are refused below.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nonblock)
        .open(path)?;
    // The checks apply to the open file, which nobody can replace.
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(NotTrusted::NoFile);
    }
    check(&metadata, forbidden)?;
    let mut content = Vec::new();
    file.take(most + 1).read_to_end(&mut content)?;
    match content.len() as u64 > most {
        true => Err(NotTrusted::TooLarge(most)),
        false => Ok(content),
    }
}

/// Checks that other users cannot replace files in the folder.
///
/// # Errors
/// [`NotTrusted`].
pub fn check_folder(path: &Path) -> Result<(), NotTrusted> {
    // The kernel must not wait for a writer if the path is a FIFO.
    let directory = i32::try_from(rustix::fs::OFlags::DIRECTORY.bits()).unwrap_or(0);
    let mut options = OpenOptions::new();
    let folder = options.read(true).custom_flags(directory).open(path);
    match folder {
        Ok(folder) => check(&folder.metadata()?, Forbidden::Write),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(NotTrusted::NoFolder),
        Err(error) => Err(error.into()),
    }
}

fn check(metadata: &Metadata, forbidden: Forbidden) -> Result<(), NotTrusted> {
    let (owner, own) = (metadata.uid(), rustix::process::geteuid().as_raw());
    let mode = metadata.mode() & 0o7777;
    if owner != 0 && owner != own {
        return Err(NotTrusted::Owner { owner, own });
    }
    match forbidden {
        Forbidden::Write if mode & 0o022 != 0 => Err(NotTrusted::Writable { mode }),
        Forbidden::All if mode & 0o077 != 0 => Err(NotTrusted::Accessible { mode }),
        _ => Ok(()),
    }
}
