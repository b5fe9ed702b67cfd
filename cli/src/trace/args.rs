// SPDX-License-Identifier: Apache-2.0
//! The command line of `patchbay trace`.

use std::time::Duration;

use clap::{Args, Subcommand};

use crate::args::{OutputArgument, parse_duration};

/// Events are named "system:name" or "name", or by globs; a leading ! takes away: 'sched:*' '!*stat*'.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// List the guest's tracepoints.
    List {
        /// Globs; all if there is none.
        patterns: Vec<String>,
        /// Only armed ones.
        #[arg(long)]
        armed: bool,
        /// Fail if the agent in the guest does not answer.
        #[arg(long)]
        refresh: bool,
    },
    /// Attach probes and park at once: nothing is traced, and nothing is paid for it.
    Arm {
        /// Events.
        #[arg(required = true)]
        patterns: Vec<String>,
        #[command(flatten)]
        probe: Probe,
        /// Check everything and change nothing.
        #[arg(long)]
        dry_run: bool,
        /// Repeating a change with the same id does nothing twice.
        #[arg(long, default_value = "", value_name = "ID")]
        request_id: String,
    },
    /// Let armed events fire; works without the guest's help.
    Fire {
        /// Armed events.
        #[arg(required = true)]
        patterns: Vec<String>,
        #[command(flatten)]
        switch: SwitchArgs,
    },
    /// Park firing events; works without the guest's help.
    Park {
        /// Armed events.
        #[arg(required = true)]
        patterns: Vec<String>,
        #[command(flatten)]
        switch: SwitchArgs,
        /// Also what other clients fired.
        #[arg(long)]
        force: bool,
        /// Also if others in the guest trace them: they then see nothing.
        #[arg(long)]
        even_if_others: bool,
    },
    /// Detach the probes.
    Disarm {
        /// Armed events.
        #[arg(required = true)]
        patterns: Vec<String>,
        /// Also what other clients armed.
        #[arg(long)]
        force: bool,
        /// Repeating a change with the same id does nothing twice.
        #[arg(long, default_value = "", value_name = "ID")]
        request_id: String,
    },
    /// Print events as they happen. Given events are armed and fired meanwhile.
    Tail {
        #[command(flatten)]
        stream: StreamArgs,
        /// End after so many events.
        #[arg(short = 'n', long, value_name = "COUNT")]
        events: Option<u64>,
    },
    /// Record events as a timeline for ui.perfetto.dev or chrome://tracing.
    Record {
        #[command(flatten)]
        stream: StreamArgs,
        /// The file to write (Chrome trace JSON).
        // By its id it stands in the place of the global option, which says how to print: a
        // recording is printed one way alone.
        #[arg(short, long, required = true, value_name = "FILE", value_parser = crate::args::file)]
        output: OutputArgument,
        /// End after this time, for example 10s; else at Ctrl-C.
        #[arg(long, value_parser = parse_duration)]
        duration: Option<Duration>,
    },
    /// Rates and losses of armed events.
    Stat {
        /// How long to count.
        #[arg(long, value_parser = parse_duration, default_value = "1s")]
        interval: Duration,
    },
    /// What the agent says of itself and the guest.
    Agent,
}

#[derive(Clone, Debug, Args)]
pub struct Probe {
    /// The kernel's event filter, for example 'prev_pid == 0'.
    #[arg(long, default_value = "")]
    pub filter: String,
    /// The kernel's event trigger, for example stacktrace:5.
    #[arg(long, default_value = "")]
    pub trigger: String,
    /// Also if others in the guest trace them: they then see nothing.
    #[arg(long)]
    pub even_if_others: bool,
}

#[derive(Debug, Args)]
pub struct SwitchArgs {
    /// Check everything and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Answer with numbers alone, not with each event: faster for hundreds of them.
    #[arg(long)]
    pub summary: bool,
    /// How long the vCPUs may take to stop, for example 10ms.
    #[arg(long, value_parser = parse_duration)]
    pub stop_timeout: Option<Duration>,
    /// Repeating a change with the same id does nothing twice.
    #[arg(long, default_value = "", value_name = "ID")]
    pub request_id: String,
}

#[derive(Clone, Debug, Args)]
pub struct StreamArgs {
    /// Events; without them, what is armed by others.
    pub patterns: Vec<String>,
    #[command(flatten)]
    pub probe: Probe,
    /// Only listen: arm and fire nothing.
    #[arg(long)]
    pub listen: bool,
    /// Flood guard: drop what comes beyond this in a second.
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub max_rate: u32,
}
