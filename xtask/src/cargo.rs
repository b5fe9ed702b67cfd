// SPDX-License-Identifier: Apache-2.0
//! Runs cargo for the programs and tests of this workspace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::host;

/// An executable with tests.
pub struct TestBinary {
    /// Package and target, for example "patchbay-vmm::kvm_flip".
    pub suite: String,
    /// Name of the target.
    pub target: String,
    pub path: PathBuf,
    /// Directory of the package, in which cargo runs the tests.
    pub folder: PathBuf,
}

/// The packages of the programs that tests, demos and benchmarks run. The packages of a build
/// determine the features of their dependencies. Every build therefore names all of these packages,
/// and can reuse the objects of earlier builds.
const PROGRAMS: &[&str] = &[
    "patchbay-vmm-program",
    "patchbay-cli",
    "patchbay-attach",
    "patchbay-node",
    "patchbay-fleet",
    "patchbay-examples",
];

/// Builds the programs that run, describe or attach to a guest, and the programs `others`.
pub fn build_programs_of_guests(others: &[&str]) -> Result<()> {
    let mut command = cargo("build");
    command.arg("--release");
    for package in PROGRAMS {
        command.args(["--package", package]);
    }
    let programs = ["patchbay-vmm", "patchbay", "patchbay-attach"];
    for program in [&programs, others].concat() {
        command.args(["--bin", program]);
    }
    run(&mut command)
}

/// Returns the path of a program built in the release profile.
pub fn program(name: &str) -> PathBuf {
    host::target().join("release").join(name)
}

/// The target of static programs. It is the host's own target, named explicitly so that compiler
/// flags do not apply to build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const STATIC: &str = "-C target-feature=+crt-static";

/// Builds programs in the release profile, statically, and returns their folder.
pub fn build_static_programs(packages: &[&str]) -> Result<PathBuf> {
    let mut command = cargo("build");
    command
        .args(["--release", "--bins", "--target", TARGET])
        .env("RUSTFLAGS", STATIC);
    for package in packages {
        command.args(["--package", package]);
    }
    run(&mut command)?;
    Ok(host::target().join(TARGET).join("release"))
}

/// Builds the guest's agent statically and returns its path.
pub fn build_agent() -> Result<PathBuf> {
    let mut command = cargo("build");
    command
        .args(["--package", "patchbay-guest-agent", "--profile", "agent"])
        .args(["--target", TARGET])
        .env("RUSTFLAGS", STATIC);
    run(&mut command)?;
    Ok(host::target().join(TARGET).join("agent/patchbay-agent"))
}

/// Package whose tests are built in the release profile, because the lab is slow.
const RELEASE: &str = "patchbay-tests";

/// Package with a test that counts the instructions of the release profile.
const COUNTED: &str = "patchbay-vmm";

/// The environment variable that tells the test of [`COUNTED`] that it was built together with
/// [`RELEASE`] and [`PROGRAMS`]. Other packages may select other features of the dependencies, and
/// then the counts differ.
const BUILT_BY: (&str, &str) = ("PATCHBAY_BUILT_BY", "cargo xtask");

/// Builds test targets in the release profile, and the programs that they use. One command builds
/// both, so that cargo selects the same features for all and compiles each dependency once.
pub fn build_release_tests(targets: &[&str]) -> Result<Vec<TestBinary>> {
    let mut command = cargo("build");
    command.args(["--release", "--bins"]);
    command.env(BUILT_BY.0, BUILT_BY.1);
    for package in [&[RELEASE, COUNTED], PROGRAMS].concat() {
        command.args(["--package", package]);
    }
    for target in targets {
        command.args(["--test", target]);
    }
    executables(&mut command)
}

/// Builds the tests of all packages except [`RELEASE`], or only those in certain targets.
pub fn build_tests(targets: &[&str]) -> Result<Vec<TestBinary>> {
    let mut command = cargo("test");
    command.args(["--no-run", "--workspace", "--exclude", RELEASE]);
    for target in targets {
        command.args(["--test", target]);
    }
    executables(&mut command)
}

pub fn build_benchmark(package: &str, target: &str) -> Result<Vec<TestBinary>> {
    let arguments = ["--no-run", "--package", package, "--bench", target];
    executables(cargo("bench").args(arguments))
}

/// Builds the simulation of a fleet, in the repository or in a copy of it. `profile` is an option
/// of cargo, or nothing.
pub fn build_simulation(tree: &Path, profile: &[&str]) -> Result<TestBinary> {
    let mut command = cargo("test");
    command.arg("--no-run").args(profile);
    command.args(["--package", "patchbay-fleet", "--test", "simulation"]);
    // A copy has most of its dependencies in common with the repository.
    command
        .current_dir(tree)
        .env("CARGO_TARGET_DIR", host::target());
    let built = executables(&mut command)?.into_iter().next();
    built.context("cargo built no simulation")
}

/// Returns all executables, except those of `others` whose target `first` already has in another
/// profile. Several executables of one suite stay, because a library and a program may share the
/// suite's name.
pub fn without_repeated_targets(
    first: Vec<TestBinary>,
    others: Vec<TestBinary>,
) -> Vec<TestBinary> {
    let suites: BTreeSet<String> = first.iter().map(|one| one.suite.clone()).collect();
    let others = others
        .into_iter()
        .filter(|one| !suites.contains(&one.suite));
    let others: Vec<_> = others.collect();
    first.into_iter().chain(others).collect()
}

/// Runs cargo and returns the executables that it has built with a test harness.
fn executables(command: &mut Command) -> Result<Vec<TestBinary>> {
    command.arg("--message-format=json-render-diagnostics");
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    let output = command.output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("{command:?} failed; its messages are above");
    }
    let text = String::from_utf8(output.stdout)?;
    text.lines()
        .filter_map(|line| test_binary(line).transpose())
        .collect()
}

/// Builds the tests of `examples/ci`, which is not a member of the workspace, with the dependencies
/// of the workspace.
pub fn build_tests_outside() -> Result<Vec<TestBinary>> {
    let folder = host::repository().join("examples/ci");
    std::fs::copy(
        host::repository().join("Cargo.lock"),
        folder.join("Cargo.lock"),
    )
    .context("cannot copy Cargo.lock to examples/ci")?;
    let manifest = folder.join("Cargo.toml").display().to_string();
    let target = host::target().display().to_string();
    executables(cargo("build").args([
        "--tests",
        "--offline",
        "--manifest-path",
        &manifest,
        "--target-dir",
        &target,
    ]))
}

/// The folder of the program that runs a guest with libkrun.
pub const LIBKRUN: &str = "attach/tests/libkrun";

/// Builds the program that runs a guest with libkrun, and returns its path. The program has its own
/// target directory, so that it can be built at the same time as the workspace. It is not
/// optimised, because compiling it costs more than its guests do.
///
/// # Errors
/// The build fails, for example because the crates are not cached and there is no network.
pub fn build_libkrun_guest() -> Result<PathBuf> {
    let folder = host::repository().join(LIBKRUN);
    let target = host::target().join("libkrun");
    let mut command = cargo("build");
    command
        .args(["--locked", "--quiet", "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target);
    let output = command.output().context("cannot run cargo")?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        eprint!("{messages}");
        let mut lines = messages.lines();
        let reason = lines.find(|line| line.starts_with("error"));
        bail!("cargo build: {}", reason.unwrap_or("no message"));
    }
    Ok(target.join("debug/libkrun-guest"))
}

/// Runs the documentation tests; passes cargo's output on and returns it.
pub fn run_doc_tests() -> Result<(bool, String)> {
    let mut command = cargo("test");
    command
        .args(["--doc", "--workspace", "--no-fail-fast"])
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot run cargo")?;
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    ))
}

/// Runs a prepared cargo command with its output on this terminal.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().context("cannot run cargo")?;
    if !status.success() {
        bail!("{command:?} failed; its messages are above");
    }
    Ok(())
}

/// Returns a command for the cargo that runs this program, in the repository.
pub fn cargo(subcommand: &str) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.arg(subcommand).current_dir(host::repository());
    // Variables that `cargo run` sets for xtask must not reach build scripts of other packages.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name.as_ref());
        }
    }
    command
}

fn test_binary(line: &str) -> Result<Option<TestBinary>> {
    let message: Value = match serde_json::from_str(line) {
        Ok(message) => message,
        // Build scripts may print other lines.
        Err(_) => return Ok(None),
    };
    let (Some("compiler-artifact"), Some(path), Some(true)) = (
        message["reason"].as_str(),
        message["executable"].as_str(),
        message["profile"]["test"].as_bool(),
    ) else {
        return Ok(None);
    };
    let manifest = message["manifest_path"]
        .as_str()
        .context("cargo's message has no manifest path")?;
    let folder = Path::new(manifest)
        .parent()
        .context("the manifest path has no directory")?;
    let target = message["target"]["name"]
        .as_str()
        .context("cargo's message has no target name")?;
    let package = package_name(message["package_id"].as_str().unwrap_or_default());
    let suite = match package.replace('-', "_") == target.replace('-', "_") {
        true => package.to_owned(),
        false => format!("{package}::{target}"),
    };
    Ok(Some(TestBinary {
        suite,
        target: target.to_owned(),
        path: path.into(),
        folder: folder.to_path_buf(),
    }))
}

/// Returns the package's name in a package ID: "path+file:///repo/vmm#patchbay-vmm@0.1.0", or
/// "path+file:///repo/xtask#0.1.0" if the directory has the same name.
fn package_name(id: &str) -> &str {
    let (source, fragment) = id.split_once('#').unwrap_or((id, id));
    match fragment.split_once('@') {
        Some((name, _)) => name,
        None => source.rsplit('/').next().unwrap_or(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_package_ids() {
        assert_eq!(
            package_name("path+file:///repo/vmm#patchbay-vmm@0.1.0"),
            "patchbay-vmm"
        );
        assert_eq!(package_name("path+file:///repo/xtask#0.1.0"), "xtask");
    }

    #[test]
    fn a_target_in_two_profiles_runs_once_and_a_suite_of_two_targets_runs_whole() {
        let binary = |suite: &str, path: &str| TestBinary {
            suite: suite.into(),
            target: String::new(),
            path: path.into(),
            folder: "/".into(),
        };
        let first = vec![binary("attach::linux_qemu", "release/linux_qemu")];
        let others = vec![
            binary("attach", "debug/library"),
            binary("attach::linux_qemu", "debug/linux_qemu"),
            binary("attach", "debug/program"),
        ];
        let left = without_repeated_targets(first, others);
        let paths: Vec<_> = left.iter().filter_map(|one| one.path.to_str()).collect();
        assert_eq!(
            paths,
            ["release/linux_qemu", "debug/library", "debug/program"]
        );
    }

    #[test]
    fn only_test_executables_are_taken() {
        let artifact = |test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///r/vmm#patchbay-vmm@0.1.0",
                "manifest_path":"/r/vmm/Cargo.toml","target":{{"name":"kvm_flip"}},
                "profile":{{"test":{test}}},"executable":"/r/target/kvm_flip-1"}}"#
            )
        };
        let found = test_binary(&artifact(true)).unwrap().unwrap();
        assert_eq!(found.suite, "patchbay-vmm::kvm_flip");
        assert_eq!(found.folder, Path::new("/r/vmm"));
        assert!(test_binary(&artifact(false)).unwrap().is_none());
        assert!(test_binary("not JSON").unwrap().is_none());
        assert!(
            test_binary(r#"{"reason":"build-finished","success":true}"#)
                .unwrap()
                .is_none()
        );
    }
}
