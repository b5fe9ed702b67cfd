// SPDX-License-Identifier: Apache-2.0
//! Caches expensive builds: kernels, initramfs images, the lab, tools.
//!
//! An entry is a directory `<cache>/<kind>/<key>`. The key is the hash of all its inputs. An entry
//! is built under another name, gets a file `complete` last, and is then renamed, so a failed or
//! interrupted build is never used. A lock file next to the entry keeps two processes from building
//! it at once.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

const COMPLETE: &str = "complete";
const PARTIAL: &str = ".partial-";
const RUBBISH: &str = ".rubbish";

/// Returns `$XDG_CACHE_HOME/patchbay`, or `~/.cache/patchbay`.
pub fn root() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            let home = std::env::var_os("HOME").context(
                "neither XDG_CACHE_HOME nor HOME is set; set one so that builds can be cached",
            )?;
            PathBuf::from(home).join(".cache")
        }
    };
    Ok(base.join("patchbay"))
}

/// Returns the directory for logs, next to the entries, and creates it if it does not exist.
pub fn logs() -> Result<PathBuf> {
    let folder = root()?.join("logs");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// Collects the inputs of an entry. Labels and lengths are hashed too, so that different lists of
/// inputs have different keys.
pub struct Inputs(Sha256);

impl Inputs {
    /// Starts with the name and version of the recipe that turns the inputs into the entry.
    pub fn new(recipe: &str) -> Self {
        let mut inputs = Self(Sha256::new());
        inputs.add("recipe", recipe);
        inputs
    }

    /// Adds one input.
    pub fn add(&mut self, label: &str, content: impl AsRef<[u8]>) {
        for part in [label.as_bytes(), content.as_ref()] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds the content of a file.
    pub fn add_file(&mut self, label: &str, path: &Path) -> Result<()> {
        let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.add(label, content);
        Ok(())
    }

    /// Adds every file below a directory with its relative path, in a fixed order.
    pub fn add_folder(&mut self, label: &str, folder: &Path) -> Result<()> {
        for path in files_below(folder)? {
            let name = path.strip_prefix(folder)?.to_string_lossy().into_owned();
            self.add_file(&format!("{label}/{name}"), &path)?;
        }
        Ok(())
    }

    /// Returns the entry's key: 80 bits of the hash, in hexadecimal.
    pub fn key(self) -> String {
        self.0
            .finalize()
            .iter()
            .take(10)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// Returns all files below a directory, sorted by path. Symbolic links to directories are not
/// followed.
pub fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push(entry.path()),
                false => files.push(entry.path()),
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the directory of a complete entry, and builds it if it does not exist. `build` fills an
/// empty directory. If it fails, the directory is kept for inspection until the next attempt.
pub fn entry(kind: &str, key: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    entry_in(&root()?.join(kind), key, build)
}

fn entry_in(parent: &Path, key: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let entry = parent.join(key);
    if entry.join(COMPLETE).exists() {
        return Ok(entry);
    }
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let _lock = lock(&parent.join(format!("{key}.lock")))?;
    // Another process may have built the entry meanwhile.
    if entry.join(COMPLETE).exists() {
        return Ok(entry);
    }
    remove_leftovers(parent, key);
    remove_folder(&entry)?;
    // The name contains this process's id, because compilers that a killed build has left behind
    // may still write to that build's folder.
    let partial = parent.join(format!("{key}{PARTIAL}{}", std::process::id()));
    fs::create_dir(&partial)?;
    build(&partial)?;
    // The data must be on disk before the rename, or a power cut could leave empty files.
    for file in files_below(&partial)? {
        // A symbolic link has no data to write, and some links in a kernel tree dangle.
        if !file.is_symlink() {
            File::open(&file)?.sync_all()?;
        }
    }
    fs::write(partial.join(COMPLETE), "")?;
    fs::rename(&partial, &entry)?;
    Ok(entry)
}

/// Returns whether the entry exists and is complete.
pub fn has(kind: &str, key: &str) -> Result<bool> {
    Ok(root()?.join(kind).join(key).join(COMPLETE).exists())
}

/// Takes the lock at this path; waits if another process holds it.
pub fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!(
                "waiting for another process that builds the same entry ({})",
                path.display()
            );
            file.lock()?;
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    Ok(file)
}

/// Removes the remains of failed builds. Keys whose lock another process holds are skipped, because
/// their builds are in progress. This process holds the lock of the key `locked`, so the remains of
/// that key are removed too.
fn remove_leftovers(parent: &Path, locked: &str) {
    remove_leftover_folders(parent);
    for folder in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = folder.file_name().to_string_lossy().into_owned();
        let Some((key, _)) = name.split_once(PARTIAL) else {
            continue;
        };
        if name.ends_with(RUBBISH) {
            continue;
        }
        let lock = File::create(parent.join(format!("{key}.lock")));
        if key == locked || lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            eprintln!(
                "removing what an interrupted build left: {}",
                folder.path().display()
            );
            // If a process still writes to the folder, the next build tries to remove it again.
            let _ = fs::remove_dir_all(folder.path());
        }
    }
}

/// Removes a large directory of an entry under construction, in the background. On a file system
/// that discards freed blocks, removing a kernel's 90,000 files takes minutes.
pub fn discard(large: &Path, entry: &Path) -> Result<()> {
    let mut rubbish = entry.as_os_str().to_owned();
    rubbish.push(RUBBISH);
    fs::rename(large, &rubbish)?;
    remove_in_background(Path::new(&rubbish))
}

/// Removes, in the background, directories whose removal by [`discard`] was interrupted.
pub fn remove_leftover_folders(parent: &Path) {
    for folder in fs::read_dir(parent).into_iter().flatten().flatten() {
        if folder.file_name().to_string_lossy().ends_with(RUBBISH) {
            let _ = remove_in_background(&folder.path());
        }
    }
}

fn remove_in_background(folder: &Path) -> Result<()> {
    let status = Command::new("setsid")
        .args(["--fork", "rm", "-rf"])
        .arg(folder)
        .status()
        .context("cannot start setsid")?;
    ensure!(status.success(), "setsid failed ({status})");
    Ok(())
}

fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(parts: &[(&str, &str)]) -> String {
        let mut inputs = Inputs::new("test 1");
        for (label, content) in parts {
            inputs.add(label, content);
        }
        inputs.key()
    }

    #[test]
    fn keys_tell_inputs_apart() {
        assert_eq!(
            key(&[("a", "1"), ("b", "2")]),
            key(&[("a", "1"), ("b", "2")])
        );
        let distinct = [
            key(&[("a", "1"), ("b", "2")]),
            key(&[("b", "2"), ("a", "1")]),
            key(&[("a", "1b"), ("", "2")]),
            key(&[("a", "1"), ("b", "3")]),
            key(&[("a1", ""), ("b", "2")]),
            key(&[]),
        ];
        for (n, one) in distinct.iter().enumerate() {
            assert!(
                distinct[n + 1..].iter().all(|other| other != one),
                "{one} twice"
            );
        }
    }

    #[test]
    fn folder_key_follows_names_and_content() {
        let folder = tempfile::tempdir().unwrap();
        let of = || {
            let mut inputs = Inputs::new("test 1");
            inputs.add_folder("f", folder.path()).unwrap();
            inputs.key()
        };
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/a"), "1").unwrap();
        let first = of();
        assert_eq!(first, of());
        fs::rename(folder.path().join("sub/a"), folder.path().join("sub/b")).unwrap();
        let renamed = of();
        assert_ne!(first, renamed);
        fs::write(folder.path().join("sub/b"), "2").unwrap();
        assert_ne!(renamed, of());
    }

    #[test]
    fn only_a_complete_build_is_used() {
        let cache = tempfile::tempdir().unwrap();
        let parent = cache.path().join("kind");
        let broken = entry_in(&parent, "k", |folder| {
            fs::write(folder.join("result"), "half")?;
            anyhow::bail!("interrupted")
        });
        assert_eq!(broken.unwrap_err().to_string(), "interrupted");
        assert!(!parent.join("k").exists());
        // An entry without the file `complete` does not count.
        fs::create_dir(parent.join("k")).unwrap();
        fs::write(parent.join("k/result"), "half").unwrap();
        let build = |folder: &Path| Ok(fs::write(folder.join("result"), "whole")?);
        let built = entry_in(&parent, "k", build).unwrap();
        assert_eq!(fs::read_to_string(built.join("result")).unwrap(), "whole");
        let again = entry_in(&parent, "k", |_| anyhow::bail!("not built twice")).unwrap();
        assert_eq!(again, built);
        let mut left: Vec<_> = fs::read_dir(&parent)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["k", "k.lock"]);
    }

    #[test]
    fn a_build_in_progress_is_not_a_leftover() {
        let cache = tempfile::tempdir().unwrap();
        let folder = |name: &str| cache.path().join(name);
        for name in ["busy.partial-1", "dead.partial-2"] {
            fs::create_dir(folder(name)).unwrap();
        }
        let _busy = lock(&folder("busy.lock")).unwrap();
        remove_leftovers(cache.path(), "other");
        assert!(folder("busy.partial-1").exists());
        assert!(!folder("dead.partial-2").exists());
    }

    #[test]
    fn what_is_discarded_goes_even_if_the_first_removal_was_cut_off() {
        let cache = tempfile::tempdir().unwrap();
        let entry = |name: &str| cache.path().join(name);
        let gone = |path: &Path| {
            // The end of the removing process causes no event here, so this polls.
            while path.exists() {
                std::thread::yield_now();
            }
        };
        fs::create_dir_all(entry("k.partial-1/tree/sub")).unwrap();
        discard(&entry("k.partial-1/tree"), &entry("k.partial-1")).unwrap();
        assert!(!entry("k.partial-1/tree").exists());
        gone(&entry("k.partial-1.rubbish"));
        fs::create_dir_all(entry("l.partial-2.rubbish/sub")).unwrap();
        remove_leftovers(cache.path(), "other");
        gone(&entry("l.partial-2.rubbish"));
    }

    #[test]
    fn two_builders_of_the_same_build_once() {
        let cache = tempfile::tempdir().unwrap();
        let builds = std::sync::atomic::AtomicUsize::new(0);
        let build = || {
            entry_in(cache.path(), "k", |_| {
                builds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(build);
            }
        });
        assert_eq!(builds.into_inner(), 1);
    }
}
