// SPDX-License-Identifier: Apache-2.0
//! Decides where guests run: on this machine's KVM, or in the lab.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use patchbay_lab::kvm::Kvm;
use patchbay_lab::machine::{self, Interrupts, Job, OUT_VARIABLE};

use crate::monitor::cannot_write;
use crate::output;

/// The environment variable that names the directory to which a run in the lab writes its results.
/// The host then copies the results to their paths.
const RESULTS_VARIABLE: &str = "PATCHBAY_CI_RESULTS";
pub(crate) const JUNIT: &str = "junit.xml";
pub(crate) const PLOT: &str = "plot.svg";
pub(crate) const COLLECTED: &str = "collected";

/// Returns whether this process runs in the lab.
pub fn in_lab() -> bool {
    std::env::var_os(OUT_VARIABLE).is_some()
}

/// Returns the words that a guest's kernel needs on its command line in the lab, with a leading
/// space; empty elsewhere.
pub fn kernel_words() -> &'static str {
    // The lab's QEMU does not intercept a nested guest's XSETBV, so its KVM reports the size of an
    // XSAVE area without AVX. The guest's kernel warns at boot, and that of Linux 7.3 panics.
    if in_lab() { " noxsave" } else { "" }
}

/// Returns the time limit of a step in a guest. In the lab it is four times as long, because the
/// emulated machine is slow and sometimes stands still for many seconds.
pub fn patience(limit: Duration) -> Duration {
    if in_lab() { 4 * limit } else { limit }
}

/// Returns the reason why the guest has to run in the lab; `None` if it runs on this machine's KVM.
pub fn needs_lab() -> Option<&'static str> {
    let kvm = Kvm::probe();
    (!kvm.runs_linux() && !in_lab()).then(|| kvm.describe())
}

/// The files and folders that a run writes, with their names in the lab.
type Results<'a> = [(&'static str, &'a mut PathBuf)];

/// Redirects the results to the directory that outlives the lab, if this process runs in the lab.
pub(crate) fn redirect(results: &mut Results) {
    let Some(folder) = std::env::var_os(RESULTS_VARIABLE).map(PathBuf::from) else {
        return;
    };
    for (name, path) in results {
        **path = folder.join(*name);
    }
}

/// Runs this command again in the lab and copies the results to their paths.
///
/// # Errors
/// There is no lab, or the results cannot be written.
pub(crate) async fn run_in_lab(results: &Results<'_>) -> Result<u8> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    machine::prepare()?;
    let interrupts = Interrupts::catch()?;
    let folder = tempfile::Builder::new()
        .prefix("patchbay-ci-")
        .tempdir()
        .context("cannot create a temporary directory")?;
    let mut job = Job::new(command, folder.path())?;
    job.interrupts = Some(interrupts);
    let variable: (&str, OsString) = (RESULTS_VARIABLE, job.out.clone().into());
    job.set([variable]);
    let status = machine::run(&job)?;
    for (name, path) in results {
        let from = job.out.join(name);
        // Root in the lab could make a link to a file of this machine.
        match fs::symlink_metadata(&from).is_ok_and(|of| of.is_file()) {
            true => {
                let content = fs::read(&from).with_context(|| cannot_write(path))?;
                output::write(path, content).await?;
            }
            false => move_tree(&from, path)?,
        }
    }
    Ok(status)
}

/// Copies a file, or the files of a directory into another one. A source that does not exist is no
/// error, because the run may have ended early.
fn move_tree(from: &Path, to: &Path) -> Result<()> {
    let Ok(metadata) = fs::symlink_metadata(from) else {
        return Ok(());
    };
    let describe = || format!("cannot write {}", to.display());
    if metadata.is_file() {
        fs::copy(from, to).with_context(describe)?;
        return Ok(());
    }
    if !metadata.is_dir() {
        bail!("{} is neither a file nor a directory", from.display());
    }
    fs::create_dir_all(to).with_context(describe)?;
    for entry in fs::read_dir(from).with_context(describe)? {
        let entry = entry.with_context(describe)?;
        move_tree(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_moved_and_may_be_absent() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        move_tree(&from, &to).unwrap();
        assert!(!to.exists());
        fs::create_dir_all(from.join("a/b")).unwrap();
        fs::write(from.join("a/b/c"), "text").unwrap();
        fs::create_dir_all(to.join("a")).unwrap();
        fs::write(to.join("a/old"), "old").unwrap();
        move_tree(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("a/b/c")).unwrap(), "text");
        assert!(to.join("a/old").exists());
        let error = move_tree(&from, &to.join("a/old/x"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("cannot write"), "{error}");
    }
}
