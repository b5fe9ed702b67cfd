// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay guest log`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;

use super::journal::Boot;
use crate::args::output::{LogFormat, Output, OutputArgument, log_format_parser};
use crate::args::times::{self, time_in};
use crate::client::{Client, to_proto};
use crate::failure::Failure;
use crate::print::{complain, json_line, write};
use crate::text::harmless;

/// The levels, from 0 on, as dmesg names them.
const LEVELS: [&str; 8] = [
    "emerg", "alert", "crit", "err", "warn", "notice", "info", "debug",
];
/// The names of syslog's facilities, from 0 on, as dmesg names them.
const FACILITIES: [&str; 12] = [
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv",
    "ftp",
];

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Print new records too, until Ctrl-C.
    #[arg(short, long)]
    pub follow: bool,
    /// Only records that are at most this much older than the newest one, 1ms to 365d: for example
    /// 5m.
    #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
    pub since: Option<Duration>,
    /// Begin with the record of this sequence number, 0 to 18446744073709551615.
    #[arg(long, value_name = "NUMBER", conflicts_with = "since")]
    pub from: Option<u64>,
    /// Only records of this level or a more severe one, as a name (emerg, alert, crit, err, warn,
    /// notice, info, debug) or 0 to 7.
    #[arg(long, value_parser = level, value_name = "LEVEL")]
    pub level: Option<Level>,
    /// Only records whose text contains TEXT.
    #[arg(long, value_name = "TEXT")]
    pub grep: Option<String>,
    /// The source of the log [default: the guest's memory if the log is found there, otherwise the
    /// agent].
    #[arg(long, value_enum)]
    pub source: Option<Source>,
    /// Output format.
    // Its id is that of the global output option, so it replaces that option.
    #[arg(short, long, default_value = "table", value_name = "FORMAT", value_parser = log_format_parser())]
    pub output: OutputArgument,
}

/// The reader of the log, or of trace events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Source {
    /// The guest's memory.
    Memory,
    /// The agent in the guest.
    Agent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(pub u32);

/// Parses a level.
fn level(text: &str) -> Result<Level, String> {
    let named = LEVELS.iter().position(|name| *name == text);
    let number = named.or_else(|| text.parse().ok().filter(|number| *number < LEVELS.len()));
    let number = number.and_then(|number| u32::try_from(number).ok());
    let names = LEVELS.join(", ");
    number
        .map(Level)
        .ok_or_else(|| format!("give {names} or 0 to 7"))
}

/// A record as JSON.
#[derive(Debug, Serialize)]
pub struct Line {
    sequence: u64,
    /// Microseconds since the kernel booted.
    time_us: u64,
    level: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    facility: Option<String>,
    /// "T" and a pid, or "C" and a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    caller: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    subsystem: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    device: String,
    text: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continues: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    text_lost: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unfinished: bool,
}

/// A loss or the start of another kernel's log, as JSON.
#[derive(Debug, Serialize)]
struct Mark {
    #[serde(skip_serializing_if = "is_zero")]
    lost: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    restarted: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub fn time(record: &v1::KernelLogRecord) -> Duration {
    Duration::try_from(record.time.unwrap_or_default()).unwrap_or_default()
}

fn level_name(level: u32) -> &'static str {
    let level = usize::try_from(level).unwrap_or(usize::MAX);
    LEVELS.get(level).copied().unwrap_or("debug")
}

/// Returns the text of a record as dmesg prints it. Further lines of the text are indented.
pub fn text(record: &v1::KernelLogRecord) -> String {
    let time = time(record);
    let stamp = format!("[{:5}.{:06}] ", time.as_secs(), time.subsec_micros());
    let text = match record.text_lost {
        true => "(the kernel had no room for this text)",
        false => &record.text,
    };
    let text = harmless(&text.replace('\t', "        "));
    let indent = format!("\n{}", " ".repeat(stamp.len()));
    format!("{stamp}{}\n", text.replace('\n', &indent))
}

/// Returns a record for programs.
pub fn line(record: v1::KernelLogRecord, is_memory: bool) -> Line {
    use v1::kernel_log_record::Caller;
    let facility = || {
        let number = usize::try_from(record.facility).unwrap_or(usize::MAX);
        let name = FACILITIES.get(number).map(ToString::to_string);
        name.unwrap_or_else(|| record.facility.to_string())
    };
    Line {
        sequence: record.sequence,
        time_us: u64::try_from(time(&record).as_micros()).unwrap_or(u64::MAX),
        level: level_name(record.level),
        facility: is_memory.then(facility),
        caller: record.caller.map(|caller| match caller {
            Caller::Task(pid) => format!("T{pid}"),
            Caller::Cpu(cpu) => format!("C{cpu}"),
        }),
        subsystem: record.subsystem,
        device: record.device,
        text: record.text,
        continues: record.continues,
        text_lost: record.text_lost,
        unfinished: record.unfinished,
    }
}

fn json(value: &impl Serialize, out: &mut Vec<u8>) -> Result<(), Failure> {
    out.extend_from_slice(json_line(value)?.as_bytes());
    Ok(())
}

/// Reports lost records and another kernel on standard error.
pub fn tell_losses(message: &v1::StreamKernelLogResponse) {
    if message.restarted {
        complain("another kernel runs in the guest; its log follows");
    }
    if message.lost > 0 {
        complain(&format!(
            "{} messages are lost: the guest's kernel overwrote them before they were read, or \
             did not finish them",
            message.lost
        ));
    }
}

/// Prints the log.
///
/// # Errors
/// [`Failure`] with the message for the operator.
pub async fn log(client: &Client, arguments: LogArgs) -> Result<(), Failure> {
    use v1::stream_kernel_log_request::Start;
    let format = match arguments.output {
        OutputArgument::Log(format) => format,
        // `-o` before the subcommand is parsed as the global option.
        OutputArgument::Format(Output::Table) => LogFormat::Table,
        OutputArgument::Format(Output::Json) => LogFormat::Json,
        OutputArgument::Format(Output::Yaml | Output::Name)
        | OutputArgument::Wide
        | OutputArgument::File(_) => {
            return Err(Failure::usage("give table, json or export to --output"));
        }
    };
    let source = match arguments.source {
        None => v1::KernelLogSource::Unspecified,
        Some(Source::Memory) => v1::KernelLogSource::Memory,
        Some(Source::Agent) => v1::KernelLogSource::Agent,
    };
    let request = client.stream(v1::StreamKernelLogRequest {
        source: source.into(),
        max_level: arguments.level.map(|Level(number)| number),
        start: Some(match to_proto(arguments.since) {
            Some(since) => Start::Since(since),
            None => Start::FirstSeq(arguments.from.unwrap_or(0)),
        }),
        no_follow: !arguments.follow,
        ..Default::default()
    });
    let mut boot = match format {
        LogFormat::Export => Some(Boot::of(client).await?),
        LogFormat::Table | LogFormat::Json => None,
    };
    let stream = client.tracepoints().stream_kernel_log(request).await?;
    let mut stream = stream.into_inner();
    let mut is_memory = false;
    while let Some(message) = stream.next().await {
        let message = message?;
        is_memory |= message.source() == v1::KernelLogSource::Memory;
        if message.restarted && boot.is_some() {
            boot = Some(Boot::of(client).await?);
        }
        let mut out = Vec::new();
        if format != LogFormat::Json {
            tell_losses(&message);
        } else if message.restarted || message.lost > 0 {
            let (lost, restarted) = (message.lost, message.restarted);
            json(&Mark { lost, restarted }, &mut out)?;
        }
        let wanted = |record: &v1::KernelLogRecord| {
            let grep = arguments.grep.as_ref();
            grep.is_none_or(|grep| record.text.contains(grep))
        };
        for record in message.records.into_iter().filter(wanted) {
            match &boot {
                Some(boot) => out.extend(boot.entry(&record)),
                None if format == LogFormat::Json => json(&line(record, is_memory), &mut out)?,
                None => out.extend_from_slice(text(&record).as_bytes()),
            }
        }
        write(&out)?;
    }
    match arguments.follow {
        true => Err(Failure::ended("stream")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_do_not_act_on_a_terminal() {
        let record = v1::KernelLogRecord {
            text: "a\u{9b}2J\u{7f}".to_owned(),
            ..Default::default()
        };
        let mut out = Vec::new();
        json(&line(record, true), &mut out).expect("JSON");
        let out = String::from_utf8(out).expect("UTF-8");
        assert!(out.contains("a\\u009b2J\\u007f"), "{out:?}");
    }
}
