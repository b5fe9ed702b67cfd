// SPDX-License-Identifier: Apache-2.0
//! The tree in which all kernels of one version are built.
//!
//! Kernels differ only in the files that patches change and in the configuration, so `make`
//! recompiles only what depends on them. For this, a file whose content does not change must keep
//! its time stamp. Patches are therefore applied to copies of the original files, and only files
//! that differ are written to the tree.
//!
//! | `<cache>/kernel-tree/<version>/` | |
//! |---|---|
//! | `tree/` | sources and objects |
//! | `identity` | identity of the sources and the compiler; if it differs, a new tree is made |
//! | `original/` | unpatched copies of files that patches have changed |
//! | `patched` | names of these files, and of files that patches have created |
//! | `unfinished` | exists while the tree changes; a tree left by a killed build is not used |

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache;
use crate::step::Steps;

/// A shared tree that this process has locked.
pub struct SharedTree {
    folder: PathBuf,
    _lock: File,
}

impl SharedTree {
    /// Locks the tree of this version. Makes a new one with `unpack` if there is none with this
    /// identity, or if a build in it was interrupted.
    pub fn open(
        version: &str,
        identity: &str,
        unpack: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let folder = cache::root()?.join("kernel-tree").join(version);
        Self::open_in(folder, identity, unpack)
    }

    fn open_in(
        folder: PathBuf,
        identity: &str,
        unpack: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let lock = cache::lock(&folder.join("lock"))?;
        let this = Self {
            folder,
            _lock: lock,
        };
        let known = fs::read_to_string(this.folder.join("identity")).ok();
        if known.as_deref() != Some(identity) || this.unfinished().exists() {
            this.remove()?;
            this.start()?;
            fs::create_dir(this.tree())?;
            unpack(&this.tree())?;
            fs::write(this.folder.join("identity"), identity)?;
            this.finish()?;
        }
        Ok(this)
    }

    /// Returns the directory of the sources and objects.
    pub fn tree(&self) -> PathBuf {
        self.folder.join("tree")
    }

    fn unfinished(&self) -> PathBuf {
        self.folder.join("unfinished")
    }

    fn start(&self) -> Result<()> {
        Ok(File::create(self.unfinished())?.sync_all()?)
    }

    /// Marks the tree as finished, after everything built in it is complete.
    pub fn finish(&self) -> Result<()> {
        Ok(fs::remove_file(self.unfinished())?)
    }

    fn remove(&self) -> Result<()> {
        cache::remove_leftover_folders(&self.folder);
        if self.tree().exists() {
            let old = self.folder.join(format!("old-{}", std::process::id()));
            cache::discard(&self.tree(), &old)?;
        }
        for file in ["identity", "patched"] {
            gone(fs::remove_file(self.folder.join(file)))?;
        }
        gone(fs::remove_dir_all(self.folder.join("original")))
    }

    /// Patches the sources with exactly these patches. The tree is unfinished from then on.
    pub fn patch(&self, steps: &Steps, patches: &[PathBuf]) -> Result<()> {
        let list = self.folder.join("patched");
        let before: BTreeSet<String> = match fs::read_to_string(&list) {
            Ok(text) => text.lines().map(str::to_owned).collect(),
            Err(_) => BTreeSet::new(),
        };
        let mut files = before.clone();
        for patch in patches {
            files.extend(changed_files(&fs::read_to_string(patch)?));
        }
        // Files that no patch has changed yet are original in the tree.
        for file in files.difference(&before) {
            let source = self.tree().join(file);
            if source.exists() {
                copy(&source, &self.folder.join("original").join(file))?;
            }
        }
        let text: String = files.iter().map(|file| format!("{file}\n")).collect();
        fs::write(&list, text)?;

        let scratch = tempfile::tempdir_in(&self.folder)?;
        for file in &files {
            let original = self.folder.join("original").join(file);
            if original.exists() {
                copy(&original, &scratch.path().join(file))?;
            }
        }
        apply(steps, patches, scratch.path())?;
        self.start()?;
        for file in &files {
            replace(&scratch.path().join(file), &self.tree().join(file))?;
        }
        Ok(())
    }
}

/// Applies patches to the sources in a directory.
pub fn apply(steps: &Steps, patches: &[PathBuf], folder: &Path) -> Result<()> {
    for patch in patches {
        let name = patch.file_name().unwrap_or_default().to_string_lossy();
        let mut command = Command::new("patch");
        command
            .args([
                "--strip=1",
                "--forward",
                "--batch",
                "--no-backup-if-mismatch",
            ])
            .arg("--directory")
            .arg(folder);
        steps.run(
            &format!("applying {name}"),
            command.arg("--input").arg(patch),
        )?;
    }
    Ok(())
}

/// Returns the files that a patch changes, creates or removes.
fn changed_files(patch: &str) -> impl Iterator<Item = String> {
    patch.lines().filter_map(|line| {
        let file = line
            .strip_prefix("--- a/")
            .or_else(|| line.strip_prefix("+++ b/"))?;
        Some(file.split('\t').next().unwrap_or(file).to_owned())
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Makes `to` equal to `from`, and removes it if `from` does not exist. Leaves an equal file alone,
/// which keeps its time stamp.
fn replace(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return gone(fs::remove_file(to));
    }
    if fs::read(to).ok() == Some(fs::read(from)?) {
        return Ok(());
    }
    copy(from, to)
}

fn gone(result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    const ADD_FILE: &str = "--- /dev/null\n+++ b/drivers/new.c\n@@ -0,0 +1 @@\n+new\n";
    const CHANGE_A: &str = "--- a/a.c\n+++ b/a.c\n@@ -1 +1 @@\n-a\n+changed\n";
    const CHANGE_A_AGAIN: &str = "--- a/a.c\n+++ b/a.c\n@@ -1 +1 @@\n-changed\n+twice\n";
    const CHANGE_B: &str = "--- a/sub/b.c\n+++ b/sub/b.c\n@@ -1 +1 @@\n-b\n+changed\n";

    struct World {
        folder: tempfile::TempDir,
        steps: Steps,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let steps = Steps::new("test", &folder.path().join("log")).unwrap();
            Self { folder, steps }
        }

        fn try_open(&self, identity: &str) -> (bool, Result<SharedTree>) {
            let mut unpacked = false;
            let tree = SharedTree::open_in(self.folder.path().join("6.12"), identity, |tree| {
                unpacked = true;
                fs::create_dir(tree.join("sub"))?;
                for (file, content) in [("a.c", "a\n"), ("sub/b.c", "b\n"), ("c.c", "c\n")] {
                    fs::write(tree.join(file), content)?;
                }
                Ok(())
            });
            (unpacked, tree)
        }

        fn open(&self, identity: &str) -> (bool, SharedTree) {
            let (unpacked, tree) = self.try_open(identity);
            (unpacked, tree.unwrap())
        }

        fn patches(&self, patches: &[&str]) -> Vec<PathBuf> {
            let write = |(number, text): (usize, &&str)| {
                let path = self.folder.path().join(format!("{number}.patch"));
                fs::write(&path, text).unwrap();
                path
            };
            patches.iter().enumerate().map(write).collect()
        }

        fn patch(&self, tree: &SharedTree, patches: &[&str]) -> Result<()> {
            tree.patch(&self.steps, &self.patches(patches))
        }
    }

    fn content(tree: &SharedTree, file: &str) -> Option<String> {
        fs::read_to_string(tree.tree().join(file)).ok()
    }

    #[test]
    fn only_what_changes_is_written() {
        let world = World::new();
        let (unpacked, tree) = world.open("one");
        assert!(unpacked);
        world.patch(&tree, &[CHANGE_A, ADD_FILE]).unwrap();
        assert_eq!(content(&tree, "a.c").as_deref(), Some("changed\n"));
        assert_eq!(content(&tree, "drivers/new.c").as_deref(), Some("new\n"));

        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let path = |file: &str| tree.tree().join(file);
        let is_old = |file: &str| fs::metadata(path(file)).unwrap().modified().unwrap() == old;
        for file in ["a.c", "sub/b.c", "c.c", "drivers/new.c"] {
            let opened = File::options().write(true).open(path(file)).unwrap();
            opened.set_modified(old).unwrap();
        }
        world.patch(&tree, &[CHANGE_A, CHANGE_B, ADD_FILE]).unwrap();
        assert!(is_old("a.c") && is_old("c.c") && is_old("drivers/new.c"));
        assert!(!is_old("sub/b.c"));
        world.patch(&tree, &[CHANGE_A, CHANGE_A_AGAIN]).unwrap();
        assert_eq!(content(&tree, "a.c").as_deref(), Some("twice\n"));
        assert_eq!(content(&tree, "sub/b.c").as_deref(), Some("b\n"));
        assert_eq!(content(&tree, "drivers/new.c"), None);
        world.patch(&tree, &[]).unwrap();
        assert_eq!(content(&tree, "a.c").as_deref(), Some("a\n"));
        assert!(is_old("c.c"));
    }

    #[test]
    fn what_a_build_has_finished_is_built_upon() {
        let world = World::new();
        let (_, tree) = world.open("one");
        world.patch(&tree, &[CHANGE_A]).unwrap();
        fs::write(tree.tree().join("a.o"), "object").unwrap();
        tree.finish().unwrap();
        drop(tree);
        let (unpacked, tree) = world.open("one");
        assert!(!unpacked);
        assert!(content(&tree, "a.o").is_some());
        drop(tree);
        // Another compiler, for example, changes the identity.
        let (unpacked, tree) = world.open("two");
        assert!(unpacked);
        assert_eq!(content(&tree, "a.o"), None);
        world.patch(&tree, &[CHANGE_A]).unwrap();
        assert_eq!(content(&tree, "a.c").as_deref(), Some("changed\n"));
    }

    #[test]
    fn what_a_broken_build_has_left_is_not_built_upon() {
        let world = World::new();
        let (_, tree) = world.open("one");
        world.patch(&tree, &[CHANGE_A]).unwrap();
        fs::write(tree.tree().join("a.o"), "half an object").unwrap();
        drop(tree);
        let (unpacked, tree) = world.open("one");
        assert!(unpacked);
        assert_eq!(content(&tree, "a.o"), None);
        assert_eq!(content(&tree, "a.c").as_deref(), Some("a\n"));
    }

    #[test]
    fn a_patch_that_does_not_apply_leaves_the_tree_as_it_is() {
        let world = World::new();
        let (_, tree) = world.open("one");
        world.patch(&tree, &[CHANGE_A]).unwrap();
        tree.finish().unwrap();
        assert!(world.patch(&tree, &[CHANGE_B, CHANGE_B]).is_err());
        assert_eq!(content(&tree, "a.c").as_deref(), Some("changed\n"));
        assert_eq!(content(&tree, "sub/b.c").as_deref(), Some("b\n"));
        drop(tree);
        assert!(!world.open("one").0);
    }
}
