// SPDX-License-Identifier: Apache-2.0
//! Writes rollouts to files before they are deleted from the store.
//!
//! A file has the records of one rollout, one JSON object in each line:
//!
//! ```text
//! {"key":"rollouts/net/header","value":{"version":2,"name":"net",...}}
//! {"key":"rollouts/net/spec","value":"# patchbay-spec version 2\n..."}
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

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

/// Returns the entries of a rollout.
///
/// # Errors
/// [`StoreError`].
pub async fn entries(store: &dyn Store, name: &str) -> Result<Vec<Entry>, StoreError> {
    let mut entries = store.range(&format!("{PREFIX}{name}/")).await?.entries;
    entries.retain(|entry| is_own_key(name, &entry.key));
    Ok(entries)
}

/// Returns the deletions of these keys of one rollout. The header comes first, because entries
/// without a header are of no rollout.
pub fn deletions(mut keys: Vec<String>) -> Vec<Write> {
    keys.sort_by_key(|key| !key.ends_with("/header"));
    let delete = |key| Write::Delete { key };
    keys.into_iter().map(delete).collect()
}

/// Writes a file that is complete and on the disk once it has its name.
fn write(folder: &Path, name: &str, entries: &[Entry]) -> io::Result<PathBuf> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)?;
    let path = free_path(folder, name, entries)?;
    let partial = path.with_extension("partial");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = BufWriter::new(options.open(&partial)?);
    for entry in entries {
        let text = || Value::String(String::from_utf8_lossy(&entry.value).into_owned());
        let value = serde_json::from_slice(&entry.value).unwrap_or_else(|_| text());
        let line = serde_json::json!({ "key": entry.key, "value": value });
        writeln!(file, "{line}")?;
    }
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    fs::rename(&partial, &path)?;
    File::open(folder)?.sync_all()?;
    Ok(path)
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
