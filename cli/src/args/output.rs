// SPDX-License-Identifier: Apache-2.0
//! The format of a command's output.

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::TypedValueParser;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table for people.
    #[default]
    Table,
    /// One JSON value; watches print one per line.
    Json,
    /// YAML; watches print one document per change.
    Yaml,
    /// Only names, one per line; GUEST/NAME for several guests.
    Name,
}

/// The formats of a kernel's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people, as dmesg prints them.
    Table,
    /// One JSON value per line and record.
    Json,
    /// The export format of systemd's journal.
    Export,
}

/// The formats of rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RolloutFormat {
    /// A table for people.
    Table,
    /// A table with more columns, and with all guests for `status`.
    Wide,
    /// One JSON value; watches print one per line.
    Json,
    /// YAML; watches print one document per change.
    Yaml,
    /// Only names, one per line.
    Name,
}

/// The argument of `-o`. One type covers all commands, because clap passes a global option to every
/// command.
#[derive(Clone, Debug)]
pub enum OutputArgument {
    Format(Output),
    /// The wide table of rollouts.
    Wide,
    /// The file that `trace record` writes.
    File(PathBuf),
    /// The format of `guest log`.
    Log(LogFormat),
}

impl OutputArgument {
    pub fn format(&self) -> Output {
        match self {
            Self::Format(output) => *output,
            Self::Wide | Self::File(_) | Self::Log(_) => Output::Table,
        }
    }

    pub fn is_wide(&self) -> bool {
        matches!(self, Self::Wide)
    }
}

pub fn format_parser() -> impl TypedValueParser<Value = OutputArgument> {
    clap::builder::EnumValueParser::<Output>::new().map(OutputArgument::Format)
}

pub fn log_format_parser() -> impl TypedValueParser<Value = OutputArgument> {
    clap::builder::EnumValueParser::<LogFormat>::new().map(OutputArgument::Log)
}

pub fn rollout_format_parser() -> impl TypedValueParser<Value = OutputArgument> {
    clap::builder::EnumValueParser::<RolloutFormat>::new().map(|format| match format {
        RolloutFormat::Table => OutputArgument::Format(Output::Table),
        RolloutFormat::Wide => OutputArgument::Wide,
        RolloutFormat::Json => OutputArgument::Format(Output::Json),
        RolloutFormat::Yaml => OutputArgument::Format(Output::Yaml),
        RolloutFormat::Name => OutputArgument::Format(Output::Name),
    })
}

/// Parses the file name of `trace record`.
pub fn file(text: &str) -> Result<OutputArgument, String> {
    Ok(OutputArgument::File(text.into()))
}
