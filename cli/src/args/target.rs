// SPDX-License-Identifier: Apache-2.0
//! The options with which a command selects guests.

use std::path::PathBuf;

use clap::Args;

use crate::complete;

/// The heading in the help that separates these options from those of the subcommand.
pub(super) const GLOBAL: &str = "Options of every command";

#[derive(Debug, Args)]
pub struct Target {
    /// API socket of a guest or of `patchbayd`; default: $PATCHBAY_SOCKET, else all sockets of this
    /// machine.
    #[arg(long, global = true, value_name = "PATH", help_heading = GLOBAL)]
    pub socket: Option<PathBuf>,
    /// Name of the guest; not needed if only one runs. Several guests: a glob ('web-*'), or the
    /// option repeated.
    #[arg(long, global = true, value_name = "NAME", conflicts_with = "all", help_heading = GLOBAL, add = complete::guests())]
    pub guest: Vec<String>,
    /// Every guest that runs on this machine, or behind --socket.
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub all: bool,
}
