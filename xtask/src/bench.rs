// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: benchmarks by name, each where it can run.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::{cargo, guest, host, lab};

/// What a benchmark needs to run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Only a CPU.
    Nothing,
    /// A bare-metal guest.
    Kvm,
    /// A Linux guest.
    Linux,
}

struct Bench {
    name: &'static str,
    about: &'static str,
    package: &'static str,
    /// The `[[bench]]` target.
    target: &'static str,
    needs: Needs,
}

const BENCHES: &[Bench] = &[
    Bench {
        name: "pause",
        about: "stop and resume of a bare-metal guest's vCPUs",
        package: "patchbay-vmm",
        target: "pause",
        needs: Needs::Kvm,
    },
    Bench {
        name: "engine",
        about: "planning and committing flips, without a guest",
        package: "static-keys",
        target: "engine",
        needs: Needs::Nothing,
    },
    Bench {
        name: "flip",
        about: "flips of a Linux guest's keys beside the guest's own static_branch_enable",
        package: "patchbay-tests",
        target: "flip",
        needs: Needs::Linux,
    },
];

/// Runs one benchmark, or lists them.
pub fn run(name: Option<&str>, arguments: &[String]) -> Result<ExitCode> {
    let Some(name) = name else {
        for bench in BENCHES {
            println!("{:10} {}", bench.name, bench.about);
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == name) else {
        let names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
        bail!(
            "there is no benchmark {name}; there are {}",
            names.join(", ")
        );
    };
    let found =
        cargo::build_tests(&["bench", "--package", bench.package, "--bench", bench.target])?;
    let binary = found
        .first()
        .with_context(|| format!("{name} built no program"))?;
    let variables = match bench.needs {
        Needs::Linux => guest::prepare(false)?,
        Needs::Nothing | Needs::Kvm => Vec::new(),
    };
    let kvm = host::Kvm::probe();
    let here = match bench.needs {
        Needs::Nothing => true,
        Needs::Kvm => kvm.runs_bare_metal(),
        Needs::Linux => kvm.runs_linux(),
    };
    if here {
        let mut command = Command::new(&binary.path);
        command
            .arg("--bench")
            .args(arguments)
            .current_dir(&binary.folder)
            .envs(variables);
        let status = command.status()?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    eprintln!(
        "In the lab, where only ratios mean anything: {}.",
        kvm.describe()
    );
    let mut command = vec![binary.path.clone().into_os_string(), "--bench".into()];
    command.extend(arguments.iter().map(Into::into));
    let mut job = lab::Job::new(command)?;
    job.folder.clone_from(&binary.folder);
    job.set(variables);
    Ok(ExitCode::from(lab::run(&job)?))
}
