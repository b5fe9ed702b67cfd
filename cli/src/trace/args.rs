// SPDX-License-Identifier: Apache-2.0
//! Parses the command line of `patchbay trace`.

use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand, ValueEnum};

use crate::args::keys::Force;
use crate::args::output::OutputArgument;
use crate::args::times::{self, time_in};
use crate::complete;
use crate::guest::log::Source;

/// Events are named "system:name" or "name", or by globs; a leading ! excludes: 'sched:*'
/// '!*stat*'.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// List the guest's tracepoints.
    #[command(alias = "list")]
    Events {
        /// Globs; all if there is none.
        #[arg(add = complete::events())]
        patterns: Vec<String>,
        /// Only tracepoints with a probe: those that clients have armed, and those that the guest
        /// itself has armed (command line, tracefs, perf, BPF, modules).
        #[arg(long)]
        armed: bool,
        /// Fail if the agent in the guest does not answer.
        #[arg(long)]
        refresh: bool,
    },
    /// Attach probes and park at once: nothing is traced, and there is no run-time cost.
    Arm(ArmArgs),
    /// Let armed events fire; needs no help from the guest.
    Fire {
        /// Armed events; - reads them from standard input.
        #[arg(required = true, add = complete::events())]
        patterns: Vec<String>,
        #[command(flatten)]
        switch: SwitchArgs,
        /// The service parks the events for this client after this time, 1ms to 365d: for example
        /// 10m.
        #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
        ttl: Option<Duration>,
    },
    /// Park firing events; needs no help from the guest.
    Park {
        /// Armed events; - reads them from standard input.
        #[arg(required = true, add = complete::events())]
        patterns: Vec<String>,
        #[command(flatten)]
        switch: SwitchArgs,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        others: EvenIfOthers,
    },
    /// Detach the probes.
    Disarm {
        /// Armed events; - reads them from standard input.
        #[arg(required = true, add = complete::events())]
        patterns: Vec<String>,
        #[command(flatten)]
        force: Force,
        /// Repeating a change with the same id does not apply it twice.
        #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "ID")]
        request_id: Option<String>,
    },
    /// Print events as they happen. Events that are named are armed and fired for this time.
    Tail {
        #[command(flatten)]
        stream: StreamArgs,
        /// End after this number of events, 1 to 1000000000000.
        #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000))]
        events: Option<u64>,
    },
    /// Record events in a file, for ui.perfetto.dev or for trace-cmd.
    Record {
        #[command(flatten)]
        stream: StreamArgs,
        /// The format of the file.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
        /// The file to write.
        // Its id is that of the global output option, so it replaces that option: the format of a
        // recording is another one.
        #[arg(short, long, required = true, value_name = "FILE", value_parser = crate::args::output::file)]
        output: OutputArgument,
        /// End after this time, 1us to 365d: for example 10s; without it, at Ctrl-C.
        #[arg(long, value_parser = time_in(times::ANY), value_name = "TIME")]
        duration: Option<Duration>,
    },
    /// Show rates and losses of armed events, and the figures of the guest's ring buffer.
    Stat {
        /// The reader of the ring buffer's figures [default: the agent if one is connected,
        /// otherwise the guest's memory].
        #[arg(long, value_enum)]
        source: Option<Source>,
        /// The ring buffer of this tracefs instance of the guest, read in memory, instead of that
        /// of the top level.
        #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
        instance: Option<String>,
        /// Time during which events are counted, 1ms to 1h.
        #[arg(long, value_parser = time_in(times::INTERVAL), value_name = "TIME", default_value = "1s")]
        interval: Duration,
    },
    /// Show the agent's report on itself and the guest.
    Agent,
}

/// The format of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A timeline for ui.perfetto.dev or chrome://tracing (Chrome trace JSON).
    #[default]
    Perfetto,
    /// trace.dat of version 7, for trace-cmd 3.0 or later and KernelShark; the events are read in
    /// the guest's memory.
    TraceDat,
}

#[derive(Debug, Args)]
pub struct ArmArgs {
    /// Events; - reads them from standard input.
    #[arg(required = true, add = complete::events())]
    pub patterns: Vec<String>,
    #[command(flatten)]
    pub probe: Probe,
    /// The service disarms the events for this client after this time, 1ms to 365d: for example
    /// 10m.
    #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
    pub ttl: Option<Duration>,
    /// Check everything and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Repeating a change with the same id does not apply it twice.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "ID")]
    pub request_id: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct Probe {
    /// The kernel's event filter, for example 'prev_pid == 0'.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub filter: String,
    /// The kernel's event trigger, for example stacktrace:5.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub trigger: String,
    #[command(flatten)]
    pub others: EvenIfOthers,
}

// One type for all commands, so that --even-if-others has one help text.
#[derive(Clone, Copy, Debug, Args)]
pub struct EvenIfOthers {
    /// Also park events that others in the guest trace, who then receive no events.
    #[arg(long)]
    pub even_if_others: bool,
}

#[derive(Debug, Args)]
pub struct SwitchArgs {
    /// Check everything and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print only totals, not each event: faster for hundreds of events.
    #[arg(long)]
    pub summary: bool,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
    /// Repeating a change with the same id does not apply it twice.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "ID")]
    pub request_id: Option<String>,
}

/// Options that apply only to events that the agent arms.
const OF_AGENT: [&str; 3] = ["filter", "trigger", "even_if_others"];

#[derive(Clone, Debug, Args)]
pub struct StreamArgs {
    /// Events; without them, the events that other clients have armed.
    #[arg(add = complete::events())]
    pub patterns: Vec<String>,
    #[command(flatten)]
    pub probe: Probe,
    /// Only listen: arm and fire nothing.
    #[arg(long)]
    pub listen: bool,
    /// The reader of the events [default: for named events the agent if one is connected, otherwise
    /// the agent if one has connected before; without an agent the guest's memory]. In memory, they
    /// are those that the guest itself records, and names only select.
    #[arg(long, value_enum)]
    pub source: Option<Source>,
    /// Read this tracefs instance of the guest in memory, instead of the top level.
    #[arg(
        long,
        value_name = "NAME",
        value_parser = NonEmptyStringValueParser::new(),
        conflicts_with_all = OF_AGENT
    )]
    pub instance: Option<String>,
    /// Begin with the events that the guest's ring buffer holds already; only in memory.
    #[arg(long, conflicts_with_all = OF_AGENT)]
    pub buffered: bool,
    /// Flood guard: drop events beyond this number per second, 1 to 1000000; default 50000.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_rate: Option<u32>,
}

impl StreamArgs {
    /// Returns whether the options leave only the guest's memory.
    pub fn is_memory(&self) -> bool {
        self.source == Some(Source::Memory) || self.instance.is_some() || self.buffered
    }
}
