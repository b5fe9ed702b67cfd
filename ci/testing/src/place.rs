// SPDX-License-Identifier: Apache-2.0
//! Decides where a test runs: on this machine, or in the lab.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use patchbay_ci::place;
use patchbay_lab::machine::{self, Job};

/// The environment variable that names a file. A test in the lab creates the file to show that it
/// ran, because libtest also succeeds if a name matches no test.
const MARK_VARIABLE: &str = "PATCHBAY_TESTING_MARK";

/// Serializes labs. Each needs 4 GiB of memory, so a program runs one lab at a time.
static ONE_LAB: Mutex<()> = Mutex::new(());

/// Runs a test, on this machine's KVM or in the lab.
///
/// Call it in a `#[test]` function, outside of any runtime, with a closure written in that
/// function, because the closure's type names the test that the lab starts.
///
/// # Errors
/// The test fails, here or in the lab, or there is no lab.
pub fn in_place<T: AsyncFnOnce() -> Result<()>>(test: T) -> Result<()> {
    let Some(why) = place::needs_lab() else {
        if let Some(mark) = std::env::var_os(MARK_VARIABLE) {
            let mark = PathBuf::from(mark);
            std::fs::write(&mark, "")
                .with_context(|| format!("cannot write {}", mark.display()))?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        return runtime.block_on(test());
    };
    let name = test_name(std::any::type_name::<T>());
    // eprintln!() is not used, because libtest shows its output only after a failure.
    let _ = writeln!(
        std::io::stderr(),
        "{name} runs in the lab, an emulated computer, and is slow: {why}"
    );
    let _one = ONE_LAB.lock().unwrap_or_else(PoisonError::into_inner);
    let program = std::env::current_exe().context("cannot find this program")?;
    let results = tempfile::tempdir()?;
    let words = [&name, "--exact", "--nocapture", "--include-ignored"];
    let command = [program.into_os_string()]
        .into_iter()
        .chain(words.map(Into::into));
    let mut job = Job::new(command.collect(), results.path())?;
    let mark = job.out.join("mark");
    job.set([(MARK_VARIABLE, &mark)]);
    judge(&name, machine::run(&job)?, &mark)
}

fn judge(name: &str, status: u8, mark: &Path) -> Result<()> {
    ensure!(status == 0, "{name} failed in the lab; its output is above");
    ensure!(
        mark.exists(),
        "{name} did not run in the lab: call in_place() with a closure in the #[test] function itself"
    );
    Ok(())
}

/// Returns libtest's name of the function that contains a closure, from the closure's type.
fn test_name(closure: &str) -> String {
    let function = closure.split("::{{closure}}").next().unwrap_or(closure);
    let name = function.split_once("::").map_or(function, |parts| parts.1);
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of<T: AsyncFnOnce() -> Result<()>>(_: &T) -> String {
        test_name(std::any::type_name::<T>())
    }

    #[test]
    fn closures_name_their_tests() {
        let here = "place::tests::closures_name_their_tests";
        let thread = std::thread::current().name().map(str::to_owned);
        // libtest names its threads after the tests, unless it runs them one at a time.
        if thread.is_some_and(|name| name != "main") {
            assert_eq!(std::thread::current().name(), Some(here));
        }
        assert_eq!(name_of(&async || Ok(())), here);
        assert_eq!(name_of(&|| async { Ok(()) }), here);
    }

    #[test]
    fn a_test_that_did_not_run_has_not_passed() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let error = |status| judge("t", status, &mark).unwrap_err().to_string();
        assert!(error(0).contains("did not run"));
        assert!(error(1).contains("failed"));
        std::fs::write(&mark, "").unwrap();
        judge("t", 0, &mark).unwrap();
        assert!(error(101).contains("failed"));
    }
}
