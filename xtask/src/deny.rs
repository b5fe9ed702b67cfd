// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask deny` checks the licences, sources and known vulnerabilities of the dependencies
//! with cargo-deny and `deny.toml`.
//!
//! The advisories come from RustSec's database, or from the git clone of it that the variable
//! `PATCHBAY_ADVISORIES` names. Without either the check is skipped.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};

use crate::clients::Outcome;
use crate::step::Steps;
use crate::{cache, cargo, host};

const VERSION: &str = "0.20.2";
/// The prefix of the names of these checks.
pub const HEADING: &str = "dependencies ";
const DATABASE: &str = "https://github.com/RustSec/advisory-db";
const CLONE: &str = "PATCHBAY_ADVISORIES";
/// The folder of the workspace's manifest.
const WORKSPACE: &str = "";

/// Runs the checks whose heading contains the filter. A heading is for example "dependencies
/// licences".
pub fn run(filter: Option<&str>) -> Result<Vec<Outcome>> {
    let wanted = |heading: &&(&str, &str)| filter.is_none_or(|filter| heading.0.contains(filter));
    let checks = [
        ("dependencies licences", "licenses"),
        ("dependencies sources", "sources"),
        ("dependencies versions", "bans"),
        ("dependencies advisories", "advisories"),
    ];
    let checks: Vec<_> = checks.iter().filter(wanted).collect();
    if checks.is_empty() {
        return Ok(Vec::new());
    }
    let program = match program() {
        Ok(program) => program,
        Err(error) => {
            let skipped = |check: &&(&str, &str)| {
                Outcome::skipped(check.0, &format!("no cargo-deny: {error:#}"))
            };
            return Ok(checks.iter().map(skipped).collect());
        }
    };
    let config = Config::write()?;
    let check = |&&(heading, what): &&(&str, &str)| {
        if what == "advisories"
            && let Err(error) = config.fetch(&program)
        {
            let reason = format!("no database of advisories, set {CLONE} to a clone: {error:#}");
            return Ok(Outcome::skipped(heading, &reason));
        }
        let outputs =
            [WORKSPACE, cargo::LIBKRUN].map(|folder| config.check(&program, folder, what));
        let outputs = outputs.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(outcome(heading, &outputs))
    };
    checks.iter().map(check).collect()
}

/// Returns the path of the installed cargo-deny. It is built without optimisation, because it runs
/// only for a second.
fn program() -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("cargo-deny 1");
    inputs.add("version", VERSION);
    let folder = cache::entry("cargo-deny", &inputs.key(), |folder| {
        let steps = Steps::new("building cargo-deny", &folder.join("build.log"))?;
        let mut install = cargo::cargo("install");
        install
            .args(["cargo-deny", "--version", VERSION, "--locked", "--debug"])
            .args(["--no-default-features", "--root"])
            .arg(folder)
            .env("CARGO_TARGET_DIR", folder.join("target"))
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        let built = steps.run("cargo install cargo-deny", &mut install);
        let _ = std::fs::remove_dir_all(folder.join("target"));
        built
    })?;
    Ok(folder.join("bin/cargo-deny"))
}

/// `deny.toml`, with the database in the cache.
struct Config(tempfile::NamedTempFile);

impl Config {
    fn write() -> Result<Self> {
        let own = std::fs::read_to_string(host::repository().join("deny.toml"))?;
        let database = match std::env::var(CLONE) {
            Ok(clone) => format!("file://{}", std::path::absolute(clone)?.display()),
            Err(_) => DATABASE.to_owned(),
        };
        let file = tempfile::Builder::new().suffix(".toml").tempfile()?;
        let cache = cache::root()?.join("advisories");
        std::fs::write(file.path(), with_database(&own, &database, &cache))?;
        Ok(Self(file))
    }

    fn fetch(&self, program: &Path) -> Result<()> {
        let mut fetch = Command::new(program);
        fetch.arg("--config").arg(self.0.path());
        let output = run_quietly(fetch.args(["fetch", "db"]))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let first = said.lines().find(|line| !line.trim().is_empty());
        bail!("{}", first.unwrap_or("cargo-deny said nothing").trim())
    }

    fn check(&self, program: &Path, folder: &str, what: &str) -> Result<Output> {
        let mut check = Command::new(program);
        let manifest = host::repository().join(folder).join("Cargo.toml");
        check.arg("--manifest-path").arg(manifest);
        check.args(["--locked", "--config"]).arg(self.0.path());
        run_quietly(check.args(["check", "--hide-inclusion-graph", what]))
    }
}

fn with_database(config: &str, url: &str, cache: &Path) -> String {
    let place = format!(
        "[advisories]\ndb-urls = [{url:?}]\ndb-path = {:?}\n",
        cache.display().to_string()
    );
    config.replacen("[advisories]\n", &place, 1)
}

fn run_quietly(command: &mut Command) -> Result<Output> {
    let command = command.stdin(Stdio::null()).current_dir(host::repository());
    // Variables of `cargo run` would select another manifest.
    command.env_remove("CARGO_MANIFEST_DIR");
    command.output().context("cannot run cargo-deny")
}

fn outcome(heading: &str, outputs: &[Output]) -> Outcome {
    let passed = outputs.iter().all(|output| output.status.success());
    Outcome {
        heading: heading.to_owned(),
        passed: usize::from(passed),
        failed: usize::from(!passed),
        skipped: 0,
        output: outputs
            .iter()
            .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_database_is_where_the_variable_says() {
        let own = std::fs::read_to_string(host::repository().join("deny.toml")).unwrap();
        let text = with_database(&own, "file:///srv/advisory-db", Path::new("/cache"));
        let place = "[advisories]\ndb-urls = [\"file:///srv/advisory-db\"]\ndb-path = \"/cache\"\n";
        assert!(text.contains(place), "{text}");
    }

    #[test]
    fn a_check_that_fails_counts_as_failed() {
        let outputs = ["true", "false"].map(|program| Command::new(program).output().unwrap());
        let outcome = outcome("dependencies sources", &outputs);
        assert_eq!((outcome.passed, outcome.failed), (0, 1));
    }
}
