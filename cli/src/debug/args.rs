// SPDX-License-Identifier: Apache-2.0
//! Parses the command line of `patchbay debug`.

use clap::{Args, Subcommand};

use crate::args::keys::ChangeOptions;

const QUERIES: &str = "\
A query is one argument, in the language of the kernel's dynamic-debug-howto, without flags:
  'file drivers/net/*'  'file tcp.c:tcp_*'  'func tcp_*'  'module xfs'  'line 10-20'  'format \"opened %s\"'
All parts of a query must match: 'module kvm func *_init'. Several queries select what any of them does.";

#[derive(Debug, Subcommand)]
pub enum DebugCommand {
    /// List the lines that the guest's pr_debug() and dev_dbg() can print.
    #[command(after_help = QUERIES)]
    List {
        /// Queries that select lines; without a query, every line is listed.
        queries: Vec<String>,
        /// Only lines that are on.
        #[arg(long, conflicts_with = "off")]
        on: bool,
        /// Only lines that are off.
        #[arg(long)]
        off: bool,
    },
    /// Turn the lines on: enables their keys, all or none.
    #[command(after_help = QUERIES)]
    On {
        #[command(flatten)]
        change: DebugArgs,
        /// Print the messages of these lines from the change on, until Ctrl-C; the lines stay on.
        /// The kernel's log is read from the guest's memory, or else by the agent. Without either,
        /// the whole console is printed.
        #[arg(long, conflicts_with = "dry_run")]
        follow: bool,
        /// Print the other messages of the kernel's log too.
        #[arg(long, requires = "follow")]
        whole_log: bool,
    },
    /// Turn the lines off: disables the keys that this client holds, all or none.
    #[command(after_help = QUERIES)]
    Off {
        #[command(flatten)]
        change: DebugArgs,
    },
}

#[derive(Debug, Args)]
pub struct DebugArgs {
    /// Queries that select the lines to turn on or off.
    #[arg(required = true, value_name = "QUERY")]
    pub queries: Vec<String>,
    #[command(flatten)]
    pub options: ChangeOptions,
}
