// SPDX-License-Identifier: Apache-2.0
//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::trace::args::TraceCommand;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 error, 2 usage, 3 partly done, \
    5 a gate of the guest stayed closed (try again), 124 timeout";

/// Flips the static keys of running Linux guests from outside.
#[derive(Debug, Parser)]
#[command(name = "patchbay", version, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(flatten)]
    pub target: Target,
    /// How to print.
    #[arg(short, long, default_value = "table", global = true, value_parser = format_parser())]
    pub output: OutputArgument,
    /// Give up after this time, for example 500ms, 10s or 2m.
    #[arg(long, value_parser = parse_duration, global = true)]
    pub timeout: Option<Duration>,
    #[command(subcommand)]
    pub command: Command,
}

/// Which guest.
#[derive(Debug, Args)]
pub struct Target {
    /// API socket of the guest's monitor; without it and --guest, $PATCHBAY_SOCKET.
    #[arg(long, global = true, value_name = "PATH", conflicts_with = "guest")]
    pub socket: Option<PathBuf>,
    /// Name of the guest; not needed if only one runs.
    #[arg(long, global = true, value_name = "NAME")]
    pub guest: Option<String>,
}

/// How to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// One JSON value; watches print one per line.
    Json,
    /// YAML; watches print one document per change.
    Yaml,
    /// Names alone, one per line.
    Name,
}

/// What follows `-o`: of one type, because clap hands an option that is global to every command.
#[derive(Clone, Debug)]
pub enum OutputArgument {
    /// How to print.
    Format(Output),
    /// Of `trace record`: where to.
    File(PathBuf),
}

impl OutputArgument {
    /// How to print.
    pub fn format(&self) -> Output {
        match self {
            Self::Format(output) => *output,
            Self::File(_) => Output::Table,
        }
    }
}

fn format_parser() -> impl TypedValueParser<Value = OutputArgument> {
    clap::builder::EnumValueParser::<Output>::new().map(OutputArgument::Format)
}

/// Parses the name of a file.
pub fn file(text: &str) -> Result<OutputArgument, String> {
    Ok(OutputArgument::File(text.into()))
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a guest (runs patchbay-vmm in the place of this command).
    Run(RunArgs),
    /// List the guests that run on this machine.
    Guests,
    /// Look at a guest as a whole, pause it, end it.
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Attach to a guest's serial console; Ctrl-] detaches.
    Console(ConsoleArgs),
    /// Look at static keys and flip them.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Turn tracepoints on and off, and see their events.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// List the static keys and branch sites of a kernel or module file.
    Inspect(crate::inspect::InspectArguments),
    /// Print a completion script for a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Name of the guest, "default" unless said; may also stand among the monitor's arguments.
    #[arg(long)]
    pub name: Option<String>,
    /// Arguments of patchbay-vmm, for example --kernel bzImage --vcpus 2; see patchbay-vmm --help.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Say what runs there and whether its kernel has registered.
    Describe,
    /// Stop every vCPU until `resume`, or until the pause expires. Again: renew the pause.
    Pause {
        /// The monitor resumes the guest by itself after this time, 30s unless given; at most 1h.
        #[arg(long, value_parser = parse_duration)]
        ttl: Option<Duration>,
    },
    /// Let a paused guest run on.
    Resume,
    /// Press the guest's power button and wait until it has powered itself off, for --timeout or 60s.
    /// The monitor ends with its guest.
    Shutdown {
        /// Cut the power at once: what the guest has not written to its disks is lost.
        #[arg(long, conflicts_with = "cut")]
        force: bool,
        /// Cut the power of a guest that has not powered off in time.
        #[arg(long)]
        cut: bool,
    },
}

#[derive(Debug, Args)]
pub struct ConsoleArgs {
    /// Print the output that is kept, and end.
    #[arg(long)]
    pub dump: bool,
}

#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// List keys.
    List(ListArgs),
    /// Show keys with their sites, bytes and disassembly.
    Get {
        /// "name" or "module:name".
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// static_branch_enable(): to one reference, if there is none.
    Enable(ChangeArgs),
    /// static_branch_disable(): to no reference, if there is one.
    Disable(ChangeArgs),
    /// static_branch_inc(): take one more reference.
    Inc(ChangeArgs),
    /// static_branch_dec(): drop one reference.
    Dec(ChangeArgs),
    /// Make all changes of a file, or none: a YAML or JSON list of {key, op}.
    Apply {
        /// The file; - is standard input.
        #[arg(short, long)]
        file: PathBuf,
        #[command(flatten)]
        terms: Terms,
    },
    /// Print each change as it happens.
    Watch {
        /// Globs, as in `list`.
        patterns: Vec<String>,
        /// Start with this revision of the past instead of now.
        #[arg(long, default_value_t = 0, requires = "incarnation")]
        from_revision: u64,
        /// The incarnation that the revision belongs to, as `guest describe` prints it.
        #[arg(long, default_value = "")]
        incarnation: String,
    },
    /// Who keeps keys on.
    Holds {
        /// Globs, as in `list`.
        patterns: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Globs of "name" or "module:name"; a leading ! takes away: 'sched_*' '!virtio*:*'.
    pub patterns: Vec<String>,
    /// Only keys of these classes.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub class: Vec<Class>,
    /// Only keys that are on.
    #[arg(long, conflicts_with = "disabled")]
    pub enabled: bool,
    /// Only keys that are off.
    #[arg(long)]
    pub disabled: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Class {
    /// Needs permission.
    Guarded,
    /// Safe to count from outside.
    Ref,
    /// Of a tracepoint.
    Tracepoint,
}

#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// "name", "module:name" or globs; a leading ! takes away. All are changed together or none. Globs
    /// leave out sealed keys and, without --allow-guarded, guarded ones; a name is never left out.
    #[arg(required = true)]
    pub keys: Vec<String>,
    /// Only if the key's etag is still this one (one key only).
    #[arg(long)]
    pub etag: Option<String>,
    #[command(flatten)]
    pub terms: Terms,
}

#[derive(Debug, Args)]
pub struct Terms {
    /// Check everything and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Why; kept with the hold and in the audit log.
    #[arg(long, default_value = "")]
    pub reason: String,
    /// The monitor gives the references back after this time, for example 10m.
    #[arg(long, value_parser = parse_duration)]
    pub ttl: Option<Duration>,
    /// Change guarded keys too (the monitor must allow it).
    #[arg(long)]
    pub allow_guarded: bool,
    /// Drop references that others or the guest itself hold.
    #[arg(long)]
    pub force: bool,
    /// Repeating a change with the same id does nothing twice.
    #[arg(long, default_value = "")]
    pub request_id: String,
    /// Answer with numbers alone, not with each key: faster for thousands of them.
    #[arg(long)]
    pub summary: bool,
    /// How long the vCPUs may take to stop, for example 10ms.
    #[arg(long, value_parser = parse_duration)]
    pub stop_timeout: Option<Duration>,
}

/// "500us", "10ms", "5s", "2m", "3h" or "1d".
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let help = || format!("{text:?} is not a time; write for example 500ms, 10s, 5m or 2h");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(help)?;
    let (digits, unit) = text.split_at(unit_at);
    let value: u64 = digits.parse().map_err(|_| help())?;
    let micros = match unit {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(help()),
    };
    match value.checked_mul(micros) {
        Some(0) | None => Err(help()),
        Some(micros) => Ok(Duration::from_micros(micros)),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Each code in the help is one that a command can end with.
    #[test]
    fn the_help_tells_the_exit_codes_that_there_are() {
        use crate::failure::{ERROR, GATE, PARTLY, TIMEOUT, USAGE};
        let told: Vec<u8> = EXIT_CODES
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse().ok())
            .collect();
        assert_eq!(told, [0, ERROR, USAGE, PARTLY, GATE, TIMEOUT]);
    }

    #[test]
    fn the_same_option_names_a_format_or_a_recording() {
        let parse = |words: &[&str]| Cli::try_parse_from([&["patchbay"], words].concat());
        let format = |words: &[&str]| parse(words).map(|cli| cli.output.format()).ok();
        assert_eq!(format(&["guests"]), Some(Output::Table));
        assert_eq!(format(&["-o", "json", "trace", "stat"]), Some(Output::Json));
        assert_eq!(format(&["trace", "stat", "-oname"]), Some(Output::Name));
        assert_eq!(format(&["trace", "stat", "-o", "t.json"]), None);
        for words in [
            &["trace", "record", "-o", "json"][..],
            &["-o", "yaml", "trace", "record", "x", "--output=json"],
        ] {
            let cli = parse(words).expect("a recording");
            assert_eq!(cli.output.format(), Output::Table);
            let Command::Trace(TraceCommand::Record { output, .. }) = cli.command else {
                panic!("{words:?}")
            };
            assert!(matches!(output, OutputArgument::File(path) if path == *"json"));
        }
        assert!(parse(&["trace", "record"]).is_err());
        assert!(parse(&["-o", "json", "trace", "record"]).is_err());
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_duration("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        for bad in [
            "",
            "5",
            "ms",
            "-1s",
            "1.5s",
            "1w",
            "0s",
            "99999999999999999999s",
            "9999999999999999d",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad:?}");
        }
    }
}
