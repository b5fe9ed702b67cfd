// SPDX-License-Identifier: Apache-2.0
//! Patchbay's developer commands. `cargo xtask help` lists them.
#![forbid(unsafe_code)]

mod bench;
mod bill;
mod cargo;
mod clients;
mod debug_file;
mod demo;
mod deny;
mod doctor;
mod fuzz;
mod guest;
mod host;
mod initramfs;
mod installed;
mod kernel;
mod kernel_config;
mod kernel_tree;
mod mutants;
mod package;
mod package_trial;
mod root_disk;
mod simulate;
mod stock;
mod stubs;
mod test;
mod test_durations;
mod test_run;
mod test_runner;
mod tracked;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};
use patchbay_lab::{cache, cpio, image as lab_image, machine as lab, modules, step};

#[derive(Parser)]
#[command(name = "cargo xtask", about, disable_help_subcommand = false)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a demo: `stock` boots Debian's own kernel in our monitor, in QEMU and with libkrun and
    /// flips its static keys from outside; `getppid` boots a kernel that registers its keys;
    /// `trace` traces a guest; `sick-guest` boots a guest whose user space hangs; `rollout` changes
    /// three guests wave by wave, with a page to watch it; `fleet` does the same with 500 guests in
    /// memory, of which some are not yet as wanted or unknown for a while
    Demo {
        /// stock (default), getppid, trace, sick-guest, rollout or fleet, and its arguments;
        /// `--keep` keeps the guests running at the end
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Run all tests, each where it can run
    Test(Test),
    /// Run one benchmark, or list them
    Bench {
        /// The benchmark's name
        name: Option<String>,
        /// Its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Fuzz one target with libFuzzer, or list them; the tests include a short run of each
    Fuzz {
        /// The target's name
        target: Option<String>,
        /// Stop after this many seconds
        #[arg(long, value_name = "N", default_value_t = 60)]
        seconds: u64,
    },
    /// Run the simulation of a fleet with faults; the tests include a short run of it
    Simulate(simulate::Options),
    /// Run a command in an emulated computer with working KVM that sees this machine's files
    Lab {
        /// Give up if the command has not ended after this many seconds
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
        /// The lab's memory
        #[arg(long, value_name = "MIB", default_value_t = lab::DEFAULT_MEMORY_MIB)]
        memory: u32,
        /// The command and its arguments
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Build the guest's kernel and initramfs, unless they are in the cache
    GuestKernel(GuestKernel),
    /// Generate the clients' code from the interface
    Stubs,
    /// Run the clients' tests with a Linux guest
    Clients,
    /// Make Debian packages and a tarball of static programs
    Package {
        /// Also install, use, upgrade and purge them in a clean Debian root
        #[arg(long = "try")]
        try_them: bool,
        /// Sign SHA256SUMS with this key of gpg's, named as by --local-user
        #[arg(long, value_name = "KEY")]
        sign: Option<String>,
    },
    /// Check the licences, sources and known vulnerabilities of all dependencies
    Deny,
    /// Report what this machine can and cannot do, and why
    Doctor,
    /// Run the tests given on standard input (used by `test` in a lab)
    #[command(hide = true)]
    RunTests {
        #[arg(long, value_name = "SECONDS")]
        timeout: u64,
    },
}

#[derive(Args)]
struct Test {
    /// Run only this tier (1: no KVM, 2: bare-metal guests, 3: Linux guests); may be repeated
    #[arg(long = "tier", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    tiers: Vec<u8>,
    /// Kill a test after this many seconds
    #[arg(long, default_value_t = 1200, value_name = "SECONDS")]
    timeout: u64,
    /// Number of labs that run at the same time; each keeps one CPU busy [default: half the CPUs, 2
    /// to 4]
    #[arg(long, value_name = "N")]
    labs: Option<usize>,
    /// Also repeat tests with the oldest and the newest kernel that have a series. Without this
    /// and without a filter, the oldest one is used if it has been built before
    #[arg(long)]
    other_kernels: bool,
    /// Also discover the keys of every stock kernel that Debian's archive has
    #[arg(long, value_enum, value_name = "WHICH")]
    kernels: Option<Kernels>,
    /// Run only tests whose name, "package::target function", contains this
    filter: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kernels {
    All,
}

#[derive(Args)]
struct GuestKernel {
    /// The kernel series, one of the directories of guest-kernel-patches
    #[arg(long, default_value = "6.12")]
    version: String,
    /// A source tree to copy instead of Debian's linux-source package
    #[arg(long, env = "PATCHBAY_KERNEL_TREE", value_name = "FOLDER")]
    tree: Option<PathBuf>,
    /// Build it without our series and modules
    #[arg(long)]
    no_series: bool,
    /// A file of guest-kernel-patches/config to append to guest.config, such as no-jump-label
    #[arg(long, value_name = "NAME")]
    config: Vec<String>,
    /// Print only the kernel's directory
    #[arg(long)]
    print_path: bool,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    // A lab has no repository at the current directory.
    if !matches!(task, Task::RunTests { .. }) {
        host::find_repository()?;
    }
    match task {
        Task::Demo { arguments } => demo::run(arguments),
        Task::Test(arguments) => {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            let success = test::run(&test::Selection {
                tiers: arguments.tiers,
                filter: arguments.filter,
                other_kernels: arguments.other_kernels,
                all_kernels: arguments.kernels.is_some(),
                timeout: Duration::from_secs(arguments.timeout),
                labs: arguments.labs.unwrap_or((cpus / 2).clamp(2, 4)),
            })?;
            Ok(if success {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Task::Bench { name, arguments } => bench::run(name.as_deref(), &arguments),
        Task::Fuzz { target, seconds } => fuzz::run(target.as_deref(), seconds),
        Task::Simulate(options) => simulate::run(options),
        Task::Stubs => {
            stubs::write()?;
            Ok(ExitCode::SUCCESS)
        }
        Task::Clients => Ok(ExitCode::from(clients::run_with_guest()?)),
        Task::Deny => {
            let outcomes = deny::run(None)?;
            for outcome in &outcomes {
                println!("{}: {}", outcome.heading, outcome.verdict());
            }
            let failed = outcomes.iter().any(|outcome| outcome.failed > 0);
            Ok(ExitCode::from(u8::from(failed)))
        }
        Task::Package { try_them, sign } => {
            let folder = package::run()?;
            if let Some(key) = sign {
                package::sign(&folder, &key)?;
            }
            if try_them {
                package_trial::run(&folder)?;
                println!("installed, used, upgraded and purged in a clean Debian root");
            }
            println!("{}", folder.display());
            Ok(ExitCode::SUCCESS)
        }
        Task::Doctor => doctor::run(),
        Task::RunTests { timeout } => {
            test_runner::serve(Duration::from_secs(timeout))?;
            Ok(ExitCode::SUCCESS)
        }
        Task::Lab {
            timeout,
            memory,
            command,
        } => {
            let mut job = lab::Job::new(command, &host::lab_output())?;
            job.timeout = timeout.map(Duration::from_secs);
            job.memory_mib = memory;
            job.interrupts = Some(lab::Interrupts::catch()?);
            Ok(ExitCode::from(lab::run(&job)?))
        }
        Task::GuestKernel(arguments) => {
            let recipe = kernel::Recipe {
                version: arguments.version,
                tree: arguments.tree,
                patched: !arguments.no_series,
                config: arguments.config,
            };
            let kernel = kernel::get(&recipe)?;
            if arguments.print_path {
                println!("{}", kernel.folder.display());
            } else {
                println!("bzImage  {}", kernel.bzimage().display());
                println!("vmlinux  {}", kernel.vmlinux().display());
                println!("modules  {}", kernel.modules().display());
                println!("initrd   {}", initramfs::get(&kernel)?.display());
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}
