// SPDX-License-Identifier: Apache-2.0
//! Writes rollouts to files before they are deleted from the store.
//!
//! A file has the records of one rollout, one JSON object in each line. A value is a text with
//! exactly the bytes of the record. A damaged record that is no text is in hexadecimal digits:
//!
//! ```text
//! {"key":"rollouts/net/header","value":"{\"version\":2,\"name\":\"net\",...}"}
//! {"key":"rollouts/net/spec","value":"# patchbay-spec version 2\n..."}
//! {"key":"rollouts/net/members/00000000","hex":"ff00..."}
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use patchbay_proto::text::hex;

use super::{PREFIX, is_own_key};
use crate::store::{Entry, Store, StoreError, Write};

/// The settings for rollouts that have ended.
#[derive(Clone, Debug)]
pub struct Archive {
    /// The folder of the files.
    pub folder: PathBuf,
    /// The time after the last event of a rollout that has ended, after which it is deleted.
    pub keep: Duration,
}

/// The reason why a rollout cannot be written to a file.
#[derive(Debug, thiserror::Error)]
#[error(
    "it cannot be written to {} ({error}), and stays in the store; give --archive with a folder that \
     the controller can write", .folder.display()
)]
pub struct NotArchived {
    folder: PathBuf,
    error: io::Error,
}

impl Archive {
    /// Writes these entries of a rollout to a new file, and returns its path.
    ///
    /// # Errors
    /// [`NotArchived`].
    pub async fn write(&self, name: &str, entries: Vec<Entry>) -> Result<PathBuf, NotArchived> {
        let (folder, name) = (self.folder.clone(), name.to_owned());
        let written = tokio::task::spawn_blocking(move || write(&folder, &name, &entries)).await;
        let written = written.unwrap_or_else(|error| Err(io::Error::other(error)));
        written.map_err(|error| NotArchived {
            folder: self.folder.clone(),
            error,
        })
    }
}

/// The keys below the name of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The keys that this program writes.
    Own,
    /// All keys, because the program that wrote a rollout that cannot be read may be a newer one.
    All,
}

/// Returns the entries of a rollout.
///
/// # Errors
/// [`StoreError`].
pub async fn entries(store: &dyn Store, name: &str, keys: Keys) -> Result<Vec<Entry>, StoreError> {
    let mut entries = store.range(&format!("{PREFIX}{name}/")).await?.entries;
    entries.retain(|entry| keys == Keys::All || is_own_key(name, &entry.key));
    Ok(entries)
}

/// Returns the deletions of these entries of one rollout. The header comes first, because entries
/// without a header are of no rollout.
pub fn deletions(entries: &[Entry]) -> Vec<Write> {
    let mut keys: Vec<&String> = entries.iter().map(|entry| &entry.key).collect();
    keys.sort_by_key(|key| !key.ends_with("/header"));
    let delete = |key: &String| Write::Delete { key: key.clone() };
    keys.into_iter().map(delete).collect()
}

/// Writes a file that is complete and on the disk once it has its name.
fn write(folder: &Path, name: &str, entries: &[Entry]) -> io::Result<PathBuf> {
    create(folder)?;
    let path = free_path(folder, name, entries)?;
    let partial = path.with_extension("partial");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = BufWriter::new(options.open(&partial)?);
    for entry in entries {
        let line = match std::str::from_utf8(&entry.value) {
            Ok(text) => serde_json::json!({ "key": entry.key, "value": text }),
            Err(_) => serde_json::json!({ "key": entry.key, "hex": hex(&entry.value) }),
        };
        writeln!(file, "{line}")?;
    }
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    fs::rename(&partial, &path)?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

/// Creates the folder, and the folders that it is in, if they do not exist.
fn create(folder: &Path) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)?;
    // A new folder is on the disk once the folder that it is in is synced.
    for folder in missing {
        let parent = folder.parent().filter(|path| !path.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}

/// Returns a path that no file has. It has the newest revision of the rollout, by which those of
/// rollouts with the same name are told apart.
fn free_path(folder: &Path, name: &str, entries: &[Entry]) -> io::Result<PathBuf> {
    let newest = entries.iter().map(|entry| entry.modified).max();
    let mut stem = format!("{name}-{}", newest.unwrap_or(0));
    loop {
        let path = folder.join(format!("{stem}.jsonl"));
        if !path.try_exists()? {
            return Ok(path);
        }
        stem.push_str("-again");
    }
}
