// SPDX-License-Identifier: Apache-2.0
//! Parses the command line.

pub mod claims;
pub mod guest;
pub mod keys;
pub mod output;
pub mod target;
#[cfg(test)]
mod tests;
pub mod times;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use self::guest::{ConsoleArgs, GuestCommand, RunArgs};
use self::keys::{ChangeOptions, HoldsCommand, KeysCommand};
use self::output::{OutputArgument, format_parser};
use self::target::{FleetTarget, GLOBAL, Target};
use self::times::time_in;
use crate::complete;
use crate::debug::args::DebugCommand;
use crate::guest::run::{ATTACHER, HOST_DAEMON};
use crate::trace::args::TraceCommand;

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    error
  2    usage: the command line or a file given with it is wrong
  3    partly done: some guests failed, or some guests, events or keys are not as wanted
  4    drift: guests differ from the state that a rollout set
  5    a gate of the guest stayed closed; try again
  124  timeout";

/// Flips the static keys of running Linux guests from outside.
#[derive(Debug, Parser)]
#[command(
    name = "patchbay",
    version,
    after_help = EXIT_CODES,
    mut_args(times::take_hyphens),
    mut_subcommands(times::take_hyphens_in)
)]
pub struct Cli {
    #[command(flatten)]
    pub target: Target,
    #[command(flatten)]
    pub fleet: FleetTarget,
    /// Output format.
    #[arg(short, long, default_value = "table", global = true, value_parser = format_parser(), help_heading = GLOBAL)]
    pub output: OutputArgument,
    /// Give up after this time, 1us to 365d: for example 500ms, 10s or 2m.
    #[arg(long, value_parser = time_in(times::ANY), global = true, value_name = "TIME", help_heading = GLOBAL)]
    pub timeout: Option<Duration>,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Refuses options that the command would ignore.
    ///
    /// # Errors
    /// A sentence that names the options.
    pub fn check(&self) -> Result<(), String> {
        if let Some((verb, options)) = self.command.drops_references()
            && options.ttl.is_some()
        {
            return Err(format!(
                "`patchbay {verb}` does not take --ttl, after which the references that a change takes \
                 are released: this change only drops references; leave out --ttl"
            ));
        }
        let is_fleet = !self.fleet.fleet.is_empty() || self.fleet.fleet_socket.is_some();
        if is_fleet && !matches!(self.command, Command::Rollout(_)) {
            return Err(
                "only `patchbay rollout` takes --fleet and --fleet-socket; give --socket"
                    .to_owned(),
            );
        }
        let Target { socket, guest, all } = &self.target;
        let given = [
            ("--socket", socket.is_some()),
            ("--guest", !guest.is_empty()),
            // `attach --all` attaches to every guest.
            (
                "--all",
                *all && !matches!(self.command, Command::Attach { .. }),
            ),
        ];
        let given = given.iter().find(|(_, is_given)| *is_given);
        let (Some((option, _)), Some(why)) = (given, self.command.takes_no_guest()) else {
            return Ok(());
        };
        Err(format!("this command does not take {option}: {why}"))
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start, describe, pause and end guests.
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Serve the keys of a guest that another monitor runs, or of all with --all; `attach --help`
    /// has the options.
    #[command(disable_help_flag = true)]
    Attach {
        /// Arguments of patchbay-attach, for example process PID.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, add = complete::arguments(ATTACHER, "attach", false))]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Show static keys and flip them.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// List, release and renew the references that clients hold.
    #[command(subcommand)]
    Holds(HoldsCommand),
    /// Turn the guest's pr_debug() lines on and off.
    #[command(subcommand)]
    Debug(DebugCommand),
    /// Turn tracepoints on and off, and print their events.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Show the virtual machines that KVM runs on this host, whichever monitor they have.
    #[command(subcommand)]
    Host(HostCommand),
    /// Run commands in guests that are booted for them, such as integration tests.
    #[command(subcommand)]
    Ci(CiCommand),
    /// Run a command in an emulated computer with working KVM that sees this machine's files.
    Lab(LabArgs),
    /// List the static keys and branch sites of a kernel or module file.
    Inspect(crate::inspect::InspectArguments),
    /// Plan, run and roll back changes of many guests.
    Rollout(crate::rollout::args::RolloutArgs),
    /// Check and try a policy file: `policy check`, `policy can`; runs patchbayd.
    #[command(disable_help_flag = true)]
    Policy {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, add = complete::arguments(HOST_DAEMON, "policy", true))]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Read the host's audit log: `audit show`, `audit verify`, `audit export`; runs patchbayd.
    #[command(disable_help_flag = true)]
    Audit {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, add = complete::arguments(HOST_DAEMON, "audit", true))]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Make certificates for development: `certs init`, `certs issue`; runs patchbayd.
    #[command(disable_help_flag = true)]
    Certs {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, add = complete::arguments(HOST_DAEMON, "certs", true))]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Print a completion script for a shell.
    Completion { shell: clap_complete::Shell },
    /// The old spelling of `guest run`.
    #[command(hide = true, disable_help_flag = true)]
    Run(RunArgs),
    /// The old spelling of `guest list`.
    #[command(hide = true)]
    Guests { patterns: Vec<String> },
    /// The old spelling of `guest console`.
    #[command(hide = true)]
    Console(ConsoleArgs),
}

impl Command {
    /// Returns the reason why the command does not apply to a running guest; `None` if it applies
    /// to one.
    fn takes_no_guest(&self) -> Option<&'static str> {
        match self {
            Self::Rollout(_) => Some(
                "a rollout's spec selects its guests; show one guest with `patchbay rollout explain \
                 ROLLOUT GUEST`, and choose the controller with --fleet or --fleet-socket",
            ),
            Self::Attach { .. } => {
                Some("give the guest after `attach`; see `patchbay attach --help`")
            }
            Self::Ci(_) => Some("`patchbay ci` boots a guest of its own"),
            Self::Host(_) => Some("it lists all KVM virtual machines of this host"),
            Self::Policy { .. } | Self::Audit { .. } | Self::Certs { .. } => Some(
                "it reads files of this host; give its own options after the command, see --help",
            ),
            Self::Lab(_) | Self::Inspect(_) | Self::Completion { .. } => {
                Some("it does not concern a running guest")
            }
            Self::Guest(_)
            | Self::Keys(_)
            | Self::Holds(_)
            | Self::Debug(_)
            | Self::Trace(_)
            | Self::Run(_)
            | Self::Guests { .. }
            | Self::Console(_) => None,
        }
    }

    /// Returns the options of a change that takes no references, and the command as it is typed.
    fn drops_references(&self) -> Option<(&'static str, &ChangeOptions)> {
        match self {
            Self::Keys(KeysCommand::Disable(change)) => Some(("keys disable", &change.options)),
            Self::Keys(KeysCommand::Dec(change)) => Some(("keys dec", &change.options)),
            Self::Debug(DebugCommand::Off { change }) => Some(("debug off", &change.options)),
            _ => None,
        }
    }

    /// Returns whether the command becomes a monitor.
    pub fn starts_a_guest(&self) -> bool {
        matches!(self, Self::Guest(GuestCommand::Run(_)) | Self::Run(_))
    }
}

#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// List the virtual machines that KVM runs on this host, and whether Patchbay can attach.
    ///
    /// The command needs no daemon, no socket and no configuration, and changes nothing. Without
    /// privileges it lists only this user's virtual machines. It reads their memory size, dirty
    /// logging and protection from the host's kernel, through /proc/kcore (CAP_SYS_RAWIO) or BPF
    /// (CAP_BPF and CAP_PERFMON). Without either they are unknown, and a message says why.
    List,
}

#[derive(Debug, Subcommand)]
pub enum CiCommand {
    /// Boot a kernel, run a command in the guest, and end with its status.
    ///
    /// A warning, oops, lockdep or KASAN report of the guest's kernel fails the run. Each run of
    /// the command is killed after --timeout, 10m unless given. Exit codes: the command's own, or 1
    /// if it is 0 and the kernel reported a problem; 124 if the command timed out; 125 if the run
    /// could not take place or the guest was lost; 127 if the command could not be started. With
    /// --matrix: 0 if no run failed; 1 if one did; 125 if a run could not take place. SIGHUP,
    /// SIGINT and SIGTERM end the run with 129, 130 and 143, and the results so far are reported; a
    /// second signal ends it without a report.
    Run(Box<patchbay_ci::RunArgs>),
    /// Measure the effect of static keys on a benchmark.
    ///
    /// Boots a kernel and runs the command with each key off and on, in random order. Prints the
    /// ratio of the medians, on to off, with a bootstrap interval, and whether a difference was
    /// found; the decisions about several keys follow Holm's procedure. Each run of the command is
    /// killed after --timeout, 10m unless given. Exit codes: 0 if each key was compared or skipped
    /// because it cannot be flipped; 1 if the command failed or printed no measurement with a key,
    /// or the plot could not be written; if the first run, in which no key is flipped, failed, the
    /// exit code that `ci run` would have; 125 if the comparison could not take place. SIGHUP,
    /// SIGINT and SIGTERM end it with 129, 130 and 143, and the results so far are printed, in
    /// which the other keys are undecided; a second signal ends it without results.
    Compare(Box<patchbay_ci::CompareArgs>),
}

#[derive(Debug, Args)]
pub struct LabArgs {
    /// Memory of the lab in MiB, 512 to 262144.
    #[arg(long, value_name = "MIB", default_value_t = patchbay_lab::machine::DEFAULT_MEMORY_MIB, value_parser = clap::value_parser!(u32).range(512..=262_144))]
    pub memory: u32,
    /// Folder in which the command's files are kept; all other writes of the command are lost.
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}
