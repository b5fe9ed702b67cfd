// SPDX-License-Identifier: Apache-2.0
//! Tests the Python and Go clients against guests in memory and, with `cargo xtask clients`,
//! against a Linux guest. Also tests stock gRPC clients.

mod stock;

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::kernel::Recipe;
use crate::stubs::Python;
use crate::{cargo, guest, host, lab, package, stubs};

/// The prefix of the names of the clients' tests.
pub const HEADING: &str = "clients ";

/// The number of tests of one kind that passed, failed and were skipped, with the output if some
/// failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub heading: String,
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// The output of a failed test, or the reason why all are skipped.
    pub output: String,
}

impl Outcome {
    pub fn skipped(heading: &str, reason: &str) -> Self {
        Self {
            heading: heading.to_owned(),
            skipped: 1,
            output: format!("SKIPPED: {reason}"),
            ..Self::default()
        }
    }
}

impl Outcome {
    /// Formats the result, with the output unless all passed.
    pub fn verdict(&self) -> String {
        match (self.passed, self.failed) {
            (1.., 0) => "passed".to_owned(),
            (_, 1..) => format!("failed\n{}", self.output.trim_end()),
            _ => self.output.trim_end().to_owned(),
        }
    }
}

/// Runs the tests of one kind.
type Kind = fn(&Servers) -> Result<Outcome>;

/// Runs the clients' tests whose heading, "clients Python" for example, contains the filter.
pub fn run(filter: Option<&str>) -> Result<Vec<Outcome>> {
    let wanted = |heading: &str| filter.is_none_or(|filter| heading.contains(filter));
    let kinds: [(&str, Kind); 5] = [
        ("clients Python", python),
        ("clients Go", go),
        ("clients grpcurl", stock::grpcurl),
        ("clients Node.js", stock::node),
        ("clients stubs", |_| drift()),
    ];
    let kinds: Vec<_> = kinds.iter().filter(|(name, _)| wanted(name)).collect();
    if kinds.is_empty() {
        return Ok(Vec::new());
    }
    let servers = Servers::build()?;
    let mut outcomes = Vec::new();
    for (heading, run) in kinds {
        let start = Instant::now();
        let mut outcome = match missing_program(heading) {
            Some(program) => Outcome::skipped(heading, &format!("{program} is not installed")),
            None => run(&servers)?,
        };
        outcome.heading = format!("{heading}, {:.0} s", start.elapsed().as_secs_f64());
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// Returns a program that these tests need and this machine lacks.
fn missing_program(heading: &str) -> Option<&'static str> {
    let needed: &[(&str, &str)] = match heading {
        "clients Python" => &[("python3", "--version")],
        "clients Go" | "clients grpcurl" => &[("go", "version")],
        // The tests install the programs that they need.
        "clients Node.js" => &[],
        _ => &[("python3", "--version"), ("go", "version")],
    };
    let runs = |(program, argument): &(&'static str, &str)| {
        let output = Command::new(program).arg(argument).output();
        output.is_ok_and(|output| output.status.success())
    };
    needed.iter().find(|one| !runs(one)).map(|one| one.0)
}

/// The programs to which the clients connect.
struct Servers {
    guests: PathBuf,
    refusing: PathBuf,
    daemon: PathBuf,
}

impl Servers {
    fn build() -> Result<Self> {
        // The tests of the workspace are built with the same features, so that nothing is compiled
        // twice.
        let mut command = cargo::cargo("build");
        command.args(["--workspace", "--exclude", "patchbay-tests"]);
        command.args([
            "--example",
            "in_memory_guests",
            "--example",
            "refusing_monitor",
        ]);
        command.args(["--bin", "patchbayd"]);
        command.args(["--features", "patchbay-service/testing"]);
        cargo::run(&mut command)?;
        let folder = host::target().join("debug");
        Ok(Self {
            guests: folder.join("examples/in_memory_guests"),
            refusing: folder.join("examples/refusing_monitor"),
            daemon: folder.join("patchbayd"),
        })
    }

    fn name_in(&self, command: &mut Command) {
        command
            .env("PATCHBAY_TEST_GUESTS", &self.guests)
            .env("PATCHBAY_TEST_REFUSING", &self.refusing)
            .env("PATCHBAY_TEST_DAEMON", &self.daemon)
            .env_remove("PATCHBAY_SOCKET");
    }
}

fn python(servers: &Servers) -> Result<Outcome> {
    let python = match Python::get() {
        Ok(python) => python,
        Err(error) => return Ok(Outcome::skipped("", &format!("{error:#}"))),
    };
    python.generate_stubs()?;
    let folder = host::repository().join("clients/python");
    let path = std::env::join_paths([folder.join("src"), python.packages()])?;
    let mut command = python.command();
    command
        .args(["-m", "pytest", "--quiet", "-rs", "-p", "no:cacheprovider"])
        .args(["-p", "patchbay.pytest_plugin"])
        // An installation from this folder leaves metadata by which pytest loads the plugin twice.
        .env("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        .env("PYTHONPATH", path)
        .current_dir(folder);
    servers.name_in(&mut command);
    let (success, output) = run_to_end(&mut command)?;
    let mut outcome = of_pytest(&output);
    if !success {
        outcome.failed = outcome.failed.max(1);
    }
    Ok(outcome)
}

/// Runs the clients' tests with a Linux guest, here or in the lab, and returns the exit status. The
/// monitor is the static one of the packages.
pub fn run_with_guest() -> Result<u8> {
    host::ensure_packages(host::LAB)?;
    let python = Python::get()?;
    python.generate_stubs()?;
    let folder = host::repository().join("clients/python");
    let mut variables = guest::kernel_of_the_guest(&Recipe::standard())?;
    variables.push((
        "PATCHBAY_VMM",
        package::static_programs()?.join("patchbay-vmm"),
    ));
    let programs = tempfile::tempdir_in(host::target())?;
    let flip = programs.path().join("flip");
    let mut build = Command::new("go");
    build
        .args(["build", "-buildvcs=false", "-o"])
        .args([flip.as_os_str(), "./examples/flip".as_ref()])
        .current_dir(host::repository().join("clients/go"))
        .env("CGO_ENABLED", "0");
    if build.status().is_ok_and(|status| status.success()) {
        variables.push(("PATCHBAY_TEST_GO_FLIP", flip));
    }
    let words = ["python3", "-m", "pytest", "-v", "-p", "no:cacheprovider"];
    let file = "tests/test_real_guest.py";
    let command: Vec<_> = words.iter().chain(&[file]).map(Into::into).collect();
    let path = std::env::join_paths([folder.join("src"), python.packages()])?;
    guest::announce_place();
    if host::Kvm::probe().runs_linux() {
        let mut here = Command::new(&command[0]);
        here.args(&command[1..]).current_dir(folder);
        here.env("PYTHONPATH", path).envs(variables);
        let success = here.status().context("python3 cannot be run")?.success();
        return Ok(u8::from(!success));
    }
    let mut job = lab::Job::new(command, &host::lab_output())?;
    job.set(variables);
    job.environment.insert("PYTHONPATH".into(), path);
    job.folder = folder;
    lab::run(&job)
}

fn go(servers: &Servers) -> Result<Outcome> {
    let folder = host::repository().join("clients/go");
    let go = |arguments: &[&str]| {
        let mut command = Command::new("go");
        command
            .args(arguments)
            .current_dir(&folder)
            .env("GOFLAGS", "-buildvcs=false");
        servers.name_in(&mut command);
        run_to_end(&mut command)
    };
    let (fetched, message) = go(&["mod", "download"])?;
    if !fetched {
        let reason = format!("go mod download: {}", message.trim());
        return Ok(Outcome::skipped("", &reason));
    }
    let (vetted, complaints) = go(&["vet", "./..."])?;
    let (success, output) = go(&["test", "-count=1", "-json", "./..."])?;
    let mut outcome = of_go(&output);
    outcome.output.insert_str(0, &complaints);
    match vetted {
        true => outcome.passed += 1,
        false => outcome.failed += 1,
    }
    if !success {
        outcome.failed = outcome.failed.max(1);
    }
    Ok(outcome)
}

fn drift() -> Result<Outcome> {
    let differ = match stubs::drift() {
        Ok(differ) => differ,
        Err(error) => return Ok(Outcome::skipped("", &format!("{error:#}"))),
    };
    let mut outcome = Outcome::default();
    match differ.as_slice() {
        [] => outcome.passed = 1,
        files => {
            outcome.failed = 1;
            let files = files.join(" ");
            outcome.output = format!(
                "{files}: not what proto/patchbay gives. Run `cargo xtask stubs` and commit the files."
            );
        }
    }
    Ok(outcome)
}

fn run_to_end(command: &mut Command) -> Result<(bool, String)> {
    let output = command
        .output()
        .with_context(|| format!("{} cannot be run", command.get_program().display()))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}

/// Reads pytest's last line, "1 failed, 5 passed, 2 skipped in 3.05s".
fn of_pytest(output: &str) -> Outcome {
    let mut outcome = Outcome {
        output: output.to_owned(),
        ..Outcome::default()
    };
    let last = output.lines().rev().find(|line| line.contains(" in "));
    for part in last.unwrap_or_default().split(", ") {
        let mut words = part.split_whitespace();
        let count = words.next().and_then(|word| word.parse().ok());
        match (count, words.next()) {
            (Some(count), Some("passed")) => outcome.passed = count,
            (Some(count), Some("failed" | "error" | "errors")) => outcome.failed += count,
            (Some(count), Some("skipped")) => outcome.skipped = count,
            _ => {}
        }
    }
    outcome
}

/// Reads the events of `go test -json`.
fn of_go(output: &str) -> Outcome {
    let mut outcome = Outcome::default();
    for line in output.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else {
            // The compiler's messages are plain text.
            outcome.output.push_str(line);
            outcome.output.push('\n');
            continue;
        };
        if let Some(text) = event["Output"].as_str() {
            outcome.output.push_str(text);
        }
        if event["Test"].is_null() {
            continue;
        }
        match event["Action"].as_str() {
            Some("pass") => outcome.passed += 1,
            Some("fail") => outcome.failed += 1,
            Some("skip") => outcome.skipped += 1,
            _ => {}
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(outcome: &Outcome) -> [usize; 3] {
        [outcome.passed, outcome.failed, outcome.skipped]
    }

    #[test]
    fn results_of_pytest_add_up() {
        let text = "..F.E [100%]\nshort summary\n1 failed, 5 passed, 2 skipped, 1 error in 3.05s\n";
        assert_eq!(counts(&of_pytest(text)), [5, 2, 2]);
        assert_eq!(counts(&of_pytest("5 passed in 0.05s\n")), [5, 0, 0]);
        assert_eq!(counts(&of_pytest("no module named pytest\n")), [0, 0, 0]);
    }

    #[test]
    fn results_of_go_add_up() {
        let text = r#"{"Action":"output","Package":"p","Test":"TestA","Output":"hello\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p","Test":"TestB"}
{"Action":"skip","Package":"p","Test":"TestC"}
{"Action":"fail","Package":"p"}
does not compile
"#;
        let outcome = of_go(text);
        assert_eq!(counts(&outcome), [1, 1, 1]);
        assert_eq!(outcome.output, "hello\ndoes not compile\n");
    }
}
