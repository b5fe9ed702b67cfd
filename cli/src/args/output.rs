// SPDX-License-Identifier: Apache-2.0
//! The format of a command's output.

use clap::ValueEnum;

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
