// SPDX-License-Identifier: Apache-2.0
//! Copies files of a guest to this machine.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::console::printable;
use crate::guest::Guest;

/// Limit on the name of a run's folder in bytes. Longer ones are cut, and a hash is appended. The
/// names of keys may be longer than Linux allows for a file.
const FOLDER_NAME_MAX: usize = 200;

/// The files and folders to copy.
#[derive(Clone, Debug)]
pub struct Collect {
    /// Paths in the guest.
    pub paths: Vec<String>,
    /// The folder for the copies.
    pub into: PathBuf,
}

impl Collect {
    /// Returns the same paths with a subfolder for the run `name`. Characters that could lead out
    /// of the folder are replaced, because the guest chooses the names of its keys.
    #[must_use]
    pub fn of_run(&self, name: &str) -> Self {
        let kept = |c: char| c.is_ascii_alphanumeric() || "_-.:=".contains(c);
        let name: String = name
            .chars()
            .map(|c| if kept(c) { c } else { '_' })
            .collect();
        let name = match name.trim_start_matches('.') {
            "" => "run",
            name => name,
        };
        let into = match name.get(..FOLDER_NAME_MAX) {
            None => self.into.join(name),
            Some(start) => {
                let mut hasher = DefaultHasher::new();
                name.hash(&mut hasher);
                self.into.join(format!("{start}~{:016x}", hasher.finish()))
            }
        };
        Self {
            paths: self.paths.clone(),
            into,
        }
    }

    /// Copies the files from the guest, or prints that the guest has ended. `name` is the name of
    /// the run, for messages.
    ///
    /// # Errors
    /// The folder cannot be created. Other errors are only printed, so that a missing file does not
    /// hide the reason why the run failed.
    pub async fn from(&self, guest: Option<&mut Guest>, name: Option<&str>) -> Result<()> {
        let run = name.map_or_else(String::new, |name| format!("{name}: "));
        let tell = |why: &str| tell!("patchbay: {}", printable(&format!("{run}{why}")));
        let into = &self.into;
        if self.paths.is_empty() {
            return Ok(());
        }
        std::fs::create_dir_all(into)
            .with_context(|| format!("cannot create {}", into.display()))?;
        let Some(guest) = guest else {
            tell("nothing is collected: the guest has ended");
            return Ok(());
        };
        for path in &self.paths {
            if let Err(error) = guest.collect(path, into).await {
                tell(&format!("{error:#}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_folder_of_a_run_is_below_the_one_that_was_given() {
        let all = Collect {
            paths: vec![],
            into: "collected".into(),
        };
        for (name, folder) in [
            ("no key flipped", "no_key_flipped"),
            ("module:key=on", "module:key=on"),
            ("../../etc=on", "_.._etc=on"),
            ("a/b\0\n\u{e9}=off", "a_b___=off"),
            ("..", "run"),
            ("", "run"),
        ] {
            let into = all.of_run(name).into;
            assert_eq!(into, Path::new("collected").join(folder), "{name:?}");
        }
        let long = |end: &str| all.of_run(&format!("{}{end}", "a".repeat(540))).into;
        let [on, off] = ["=on", "=off"].map(long);
        assert!(on.file_name().expect("a name").len() < 255);
        assert_ne!(on, off);
    }
}
