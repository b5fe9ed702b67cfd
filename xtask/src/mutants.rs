// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask simulate --mutants` shows that the simulation of a fleet finds faults.
//!
//! A mutant is a patch that puts one fault into the code. Its file begins with a sentence that
//! describes the fault, and a line with a seed of the simulation that finds it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::tracked::{self, git};
use crate::{cargo, host, simulate};

/// The folder of the patches, relative to the repository.
const PATCHES: &str = "fleet/controller/tests/simulation/mutants";
/// The number of seeds that are searched if the seed of the file does not find the fault.
const SEARCHED: u64 = 3_000;

struct Mutant {
    name: String,
    patch: PathBuf,
    fault: String,
    seed: u64,
}

/// Runs each mutant with its seed.
pub fn run() -> Result<ExitCode> {
    let mutants = all(&host::repository())?;
    let tree = host::target().join("mutants");
    copy(&tree)?;
    let mut missed = 0;
    for mutant in &mutants {
        apply(&tree, mutant, &[])?;
        let found = find(&tree, mutant);
        apply(&tree, mutant, &["--reverse"])?;
        let (name, seed, fault) = (&mutant.name, mutant.seed, &mutant.fault);
        match found? {
            Some(found) if found == seed => println!("found by seed {seed:<5} {name}: {fault}"),
            Some(found) => {
                println!(
                    "MISSED by seed {seed}, found by seed {found}, which belongs in the file: {name}"
                );
                missed += 1;
            }
            None => {
                println!("MISSED by seed {seed} and by the first {SEARCHED} seeds: {name}");
                missed += 1;
            }
        }
    }
    println!("{} mutants, {missed} missed", mutants.len());
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Returns the mutants of the repository, ordered by name.
fn all(repository: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for file in std::fs::read_dir(repository.join(PATCHES))? {
        let patch = file?.path();
        let text = std::fs::read_to_string(&patch)?;
        let read = || {
            let (fault, rest) = text.split_once('\n')?;
            let seed = rest.strip_prefix("Seed: ")?.lines().next()?;
            Some(Mutant {
                name: patch.file_stem()?.to_str()?.to_owned(),
                patch: patch.clone(),
                fault: fault.to_owned(),
                seed: seed.parse().ok()?,
            })
        };
        let mutant = read().with_context(|| {
            let file = patch.display();
            format!(
                "{file}: the first line must describe the fault, and the second must be `Seed: N`"
            )
        })?;
        mutants.push(mutant);
    }
    mutants.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(mutants)
}

/// Makes `tree` a copy of the working tree. A file with the same content is not written, so that
/// cargo does not build it again.
fn copy(tree: &Path) -> Result<()> {
    let names = tracked::files(&host::repository())?;
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    remove_others(tree, tree, &names)?;
    for name in names {
        let (from, to) = (host::repository().join(name), tree.join(name));
        let content = std::fs::read(&from)?;
        if std::fs::read(&to).is_ok_and(|before| before == content) {
            continue;
        }
        std::fs::create_dir_all(to.parent().context("a file has a folder")?)?;
        std::fs::write(to, content)?;
    }
    Ok(())
}

/// Removes the files of a folder in the tree that do not have these names.
fn remove_others(tree: &Path, folder: &Path, names: &BTreeSet<&str>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(tree, &path, names)?;
            continue;
        }
        let name = path.strip_prefix(tree)?.to_str();
        if name.is_none_or(|name| !names.contains(name)) {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// Applies the patch of a mutant to a tree.
fn apply(tree: &Path, mutant: &Mutant, arguments: &[&str]) -> Result<()> {
    let mut command = git(tree);
    // The tree lies in a folder that git ignores, and a patch outside of a repository is applied
    // to the current folder.
    command.env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree));
    command.arg("apply").args(arguments).arg(&mutant.patch);
    if !command.status().context("cannot run git")?.success() {
        bail!(
            "{} does not apply to the code any more; make the patch again",
            mutant.patch.display()
        );
    }
    Ok(())
}

/// Builds the simulation in the tree, and returns the seed that finds the fault: that of the
/// mutant, or another one; `None` if there is none among those that are searched.
fn find(tree: &Path, mutant: &Mutant) -> Result<Option<u64>> {
    // One seed takes less time than the build, which is quicker in the dev profile.
    let test = cargo::build_simulation(tree, &[])?;
    let fails = |first: u64, seeds: u64| -> Result<Option<u64>> {
        let values = [first, seeds].map(|value| value.to_string());
        let mut command = simulate::command(&test, values);
        let output = command.stdout(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        // The run prints a line "seed N, after ..." for each broken seed.
        let broken = text.lines().filter_map(|line| {
            let (seed, _) = line.strip_prefix("seed ")?.split_once(", after ")?;
            seed.parse().ok()
        });
        match (broken.min(), output.status.success()) {
            (Some(seed), false) => Ok(Some(seed)),
            (None, true) => Ok(None),
            _ => bail!("{} ended unexpectedly: {text}", mutant.name),
        }
    };
    match fails(mutant.seed, 1)? {
        Some(seed) => Ok(Some(seed)),
        None => fails(0, SEARCHED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_patches_of_mutants_fit_the_code() {
        let repository = host::repository();
        let mutants = all(&repository).expect("readable");
        assert!(mutants.len() >= 8, "{}", mutants.len());
        for mutant in mutants {
            let mut command = git(&repository);
            command.args(["apply", "--check"]).arg(&mutant.patch);
            let output = command.output().expect("git runs");
            assert!(output.status.success(), "{}: {output:?}", mutant.name);
        }
    }
}
