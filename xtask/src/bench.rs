// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench` runs a benchmark on this machine or in the lab.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::{cargo, guest, host, lab, stock};

/// The needs of a benchmark. It runs in the lab if this machine's KVM does not suffice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Programs only, and no KVM. It always runs on this machine.
    Programs,
    /// KVM for bare-metal guests.
    BareMetal,
    /// KVM for Linux guests, the guest's kernel, a stock kernel, and QEMU to compare with.
    Linux,
    /// KVM for Linux guests and other kernels to compare with. The first run, with the argument
    /// "images", needs no KVM.
    Kernels,
}

struct Bench {
    name: &'static str,
    about: &'static str,
    package: &'static str,
    /// The `[[bench]]` target.
    target: &'static str,
    needs: Needs,
}

/// The name of the benchmark that is also a test. Its baseline must be counted with the executable
/// that the test uses.
const IN_USER_SPACE: &str = "instructions";

/// The argument that selects counting of instructions in the lab instead of measuring time.
const INSTRUCTIONS: &str = "--instructions";

/// The benchmark that counts instructions in the lab.
const COUNTING: &str = "flip";

/// Other benchmarks that count instructions, each with the beginnings of the names of its rows of
/// [`IN_USER_SPACE`].
const ROWS: &[(&str, &[&str])] = &[
    ("trace", &["found: 772", "events", "2,000 events"]),
    ("attach", &["attached", "a small kernel"]),
];

const BENCHES: &[Bench] = &[
    Bench {
        name: "pause",
        about: "stop and resume of spinning vCPUs, beside a bare probe",
        package: "patchbay-vmm",
        target: "pause",
        needs: Needs::BareMetal,
    },
    Bench {
        name: "sites",
        about: "transactions by their sites and by the size of the guest's table",
        package: "patchbay-vmm",
        target: "sites",
        needs: Needs::BareMetal,
    },
    Bench {
        name: "flip",
        about: "flips of a Linux guest by the host, by the guest itself, and in QEMU by each way of pausing",
        package: "patchbay-tests",
        target: "flip",
        needs: Needs::Linux,
    },
    Bench {
        name: "log",
        about: "the logs of 1,000 idle guests in memory, followed through one daemon",
        package: "patchbay-tests",
        target: "kernel_log",
        needs: Needs::Programs,
    },
    Bench {
        name: "guest-cost",
        about: "what the series costs a kernel: its code, its boot, its speed",
        package: "patchbay-tests",
        target: "guest_cost",
        needs: Needs::Kernels,
    },
    Bench {
        name: "trace",
        about: "tracepoints of a Linux guest: first event, all at once, rate, and their cost for the guest; `bench trace memory` compares the ways to read the events of a stock kernel; `bench trace log` follows its log",
        package: "patchbay-tests",
        target: "trace",
        needs: Needs::Linux,
    },
];

/// Runs one benchmark, or lists them.
pub fn run(name: Option<&str>, arguments: &[String]) -> Result<ExitCode> {
    let Some(name) = name else {
        for bench in BENCHES {
            println!("{:10} {}", bench.name, bench.about);
        }
        let about = "calls by their instructions in user space, and a profile by function";
        println!("{IN_USER_SPACE:10} {about}");
        return Ok(ExitCode::SUCCESS);
    };
    if name == IN_USER_SPACE {
        return count_in_user_space(arguments);
    }
    let counts = arguments.iter().any(|argument| argument == INSTRUCTIONS);
    if counts && let Some((_, rows)) = ROWS.iter().find(|(of, _)| *of == name) {
        return count_in_user_space(&["rows".to_owned(), rows.join("\n")]);
    }
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == name) else {
        let names = BENCHES.iter().map(|bench| bench.name);
        let names: Vec<&str> = names.chain([IN_USER_SPACE]).collect();
        bail!(
            "there is no benchmark {name}; use one of {}",
            names.join(", ")
        );
    };
    if counts && name != COUNTING {
        let names = ROWS.iter().map(|(of, _)| *of);
        let names: Vec<&str> = names.chain([COUNTING]).collect();
        bail!(
            "{name} does not count instructions; these benchmarks do: {}",
            names.join(", ")
        );
    }
    let variables = match bench.needs {
        Needs::Programs => {
            cargo::build_programs_of_guests(&["patchbayd"])?;
            guest::paths_of_programs()
        }
        Needs::BareMetal => Vec::new(),
        Needs::Linux => {
            host::ensure_packages(host::LAB)?;
            let mut variables = guest::prepare(&[])?;
            variables.push(stock::cloud_6_12()?);
            if name == COUNTING {
                variables.push(guest::libkrun());
            }
            variables
        }
        Needs::Kernels => {
            let mut variables = guest::prepare(&[])?;
            variables.extend(guest::kernels_to_compare()?);
            variables
        }
    };
    let found = cargo::build_benchmark(bench.package, bench.target)?;
    let binary = found
        .first()
        .with_context(|| format!("{name} built no program"))?;
    let run_here = |arguments: &[String]| {
        let mut command = Command::new(&binary.path);
        command
            .arg("--bench")
            .args(arguments)
            .envs(variables.iter().map(|(name, path)| (name, path)))
            .current_dir(&binary.folder);
        let success = command.status()?.success();
        Ok::<_, anyhow::Error>(if success {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    };
    let images = ["images".to_owned()];
    if bench.needs == Needs::Kernels && (arguments.is_empty() || arguments == images) {
        let compared = run_here(&images)?;
        if compared != ExitCode::SUCCESS || !arguments.is_empty() {
            return Ok(compared);
        }
    }
    let kvm = host::Kvm::probe();
    let here = match bench.needs {
        Needs::Programs => true,
        Needs::BareMetal => kvm.runs_bare_metal(),
        Needs::Linux | Needs::Kernels => kvm.runs_linux(),
    };
    if here && !counts {
        return run_here(arguments);
    }
    if counts {
        eprintln!("In the lab, whose clocks count instructions.");
    } else {
        eprintln!(
            "In the lab, where only ratios are meaningful: {}.",
            kvm.describe()
        );
    }
    let mut command = vec![binary.path.clone().into_os_string(), "--bench".into()];
    command.extend(arguments.iter().map(Into::into));
    let mut job = lab::Job::new(command, &host::lab_output())?;
    job.set(variables);
    job.folder.clone_from(&binary.folder);
    job.clocks_count_instructions = counts || bench.needs == Needs::Kernels;
    Ok(ExitCode::from(lab::run(&job)?))
}

/// Runs the test that counts instructions, for its table, for some rows, for a new baseline or for
/// a profile.
fn count_in_user_space(arguments: &[String]) -> Result<ExitCode> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let variable = match *arguments {
        [] => ("PATCHBAY_INSTRUCTIONS_TABLE", "1"),
        ["baseline"] => ("PATCHBAY_INSTRUCTIONS_BASELINE", "1"),
        ["profile", row] => ("PATCHBAY_INSTRUCTIONS_PROFILE", row),
        ["rows", names] => ("PATCHBAY_INSTRUCTIONS_ROWS", names),
        _ => bail!(
            "the arguments are none, `baseline`, `profile ROW` or `rows BEGINNING`, not {arguments:?}"
        ),
    };
    host::ensure_packages(host::VALGRIND)?;
    let built = cargo::build_release_tests(&[IN_USER_SPACE])?;
    let suite = "patchbay-vmm::instructions";
    let test = built.iter().find(|binary| binary.suite == suite);
    let test = test.with_context(|| format!("cargo built no {suite}"))?;
    let mut command = Command::new(&test.path);
    command.arg("--nocapture").current_dir(&test.folder);
    command.env(variable.0, variable.1);
    let success = command.status()?.success();
    Ok(if success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
