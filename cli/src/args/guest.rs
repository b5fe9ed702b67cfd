// SPDX-License-Identifier: Apache-2.0
//! The command line of `patchbay guest`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::times::{self, time_in};
use crate::complete;
use crate::guest::autopsy::AutopsyArgs;
use crate::guest::log::LogArgs;
use crate::guest::run::MONITOR;

#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// List the guests that run on this machine.
    List {
        /// Globs of names; a leading ! excludes. Without globs, all guests are listed.
        #[arg(add = complete::guests())]
        patterns: Vec<String>,
    },
    /// Start a guest: runs patchbay-vmm instead of this command.
    #[command(disable_help_flag = true)]
    Run(RunArgs),
    /// Show the guest, its kernel and its registration.
    Describe,
    /// Wait for a state of the guest, without a limit unless --timeout is given.
    Wait {
        /// The state.
        #[arg(long = "for", value_enum, value_name = "STATE")]
        state: AwaitedState,
    },
    /// Print the guest's status now and after each change.
    Watch,
    /// Stop every vCPU until `resume`, or until the pause expires. Repeat it to renew the pause.
    Pause {
        /// The service resumes the guest automatically after this time, 1ms to 1h; default 30s.
        #[arg(long, value_parser = time_in(times::PAUSE), value_name = "TIME")]
        ttl: Option<Duration>,
    },
    /// Resume a paused guest.
    Resume,
    /// Press the guest's power button and wait until it has powered off, for --timeout or 60s. The
    /// monitor ends with its guest.
    Shutdown {
        /// Cut the power at once: data that the guest has not written to its disks is lost.
        #[arg(long, alias = "force", conflicts_with = "cut_after_timeout")]
        cut_now: bool,
        /// Cut the power if the guest has not powered off in time.
        #[arg(long, alias = "cut")]
        cut_after_timeout: bool,
    },
    /// Save the guest in a new folder, from which `guest run --from` starts copies.
    ///
    /// The guest is stopped until its memory is saved, for --timeout or 60s at most. The folder has
    /// the guest's memory, with all its secrets: only this user may read it. The content of the
    /// guest's disks is not saved. Copies have the guest's holds and claims.
    Snapshot {
        /// The folder, which must not exist.
        folder: PathBuf,
    },
    /// Attach to the guest's serial console; Ctrl-] detaches.
    Console(ConsoleArgs),
    /// Print the log of the guest's kernel, as dmesg does in the guest.
    ///
    /// The log is read from the guest's memory, which needs neither a login nor an agent and also
    /// works while the guest is paused, hangs or has panicked.
    Log(LogArgs),
    /// Collect what the guest's memory tells: the kernel's log and state, the newest trace events,
    /// and the keys, holds and claims that differ from boot.
    ///
    /// It needs neither a login nor an agent and also works while the guest is paused, hangs or has
    /// panicked.
    Autopsy(AutopsyArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AwaitedState {
    /// The service knows the guest's tables of static keys.
    Registered,
    /// The agent in the guest is connected.
    Agent,
    /// The guest has powered off, or its monitor has ended.
    Stopped,
    /// The vCPUs run.
    Running,
    /// The vCPUs are stopped.
    Paused,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Name of the guest, "default" unless given; may also be among the monitor's arguments.
    #[arg(long)]
    pub name: Option<String>,
    /// Print this help and the monitor's options.
    #[arg(short, long)]
    pub help: bool,
    /// Options of the monitor, for example --kernel bzImage --vcpus 2.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, add = complete::arguments(MONITOR, "run", false))]
    pub arguments: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct ConsoleArgs {
    /// Print the console output that the monitor has kept, and exit.
    #[arg(long)]
    pub dump: bool,
}
