// SPDX-License-Identifier: Apache-2.0
//! The command line of `patchbay keys` and `patchbay holds`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, Subcommand, ValueEnum};

use super::claims::{ClaimCommand, ClaimsListArgs};
use super::times::{self, time_in};
use crate::complete;

#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// List keys.
    List(ListArgs),
    /// Show keys with their sites, bytes and disassembly.
    Get {
        /// "name", "module:name" or globs; - reads them from standard input.
        #[arg(required = true, add = complete::keys())]
        keys: Vec<String>,
    },
    /// static_branch_enable(): set the count to one reference if it is zero.
    Enable(ChangeArgs),
    /// static_branch_disable(): set the count to zero if it is one reference.
    Disable(ChangeArgs),
    /// static_branch_inc(): take one more reference.
    Inc(ChangeArgs),
    /// static_branch_dec(): drop one reference.
    Dec(ChangeArgs),
    /// Make all changes of a file, or none. The file is a YAML or JSON list of {key, op, etag}, of
    /// {patterns, classes, op}, or the output of `keys list -o yaml` for one guest or for several.
    Apply {
        /// The file; - is standard input.
        #[arg(short, long)]
        file: PathBuf,
        #[command(flatten)]
        options: ChangeOptions,
    },
    /// Make the change of a plan that --dry-run has printed.
    Commit(CommitArgs),
    /// Discard a plan.
    Discard {
        /// The plan's id.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        plan: String,
    },
    /// Compare every site with its key's count, and list the keys that do not agree.
    Verify {
        /// Globs, as in `list`; without globs, all keys.
        #[arg(add = complete::keys())]
        patterns: Vec<String>,
    },
    /// Show the writes that would make a key's sites agree with its count; write them with --yes.
    Repair(RepairArgs),
    /// Print each change as it happens.
    Watch(WatchArgs),
    /// Wait until a key is on, is off or changes, without a limit unless --timeout is given.
    Wait {
        /// "name" or "module:name".
        #[arg(add = complete::keys())]
        key: String,
        #[arg(long = "for", value_enum, value_name = "STATE")]
        state: AwaitedKey,
    },
    /// List the claims on keys: their owners, what each claim wants, and which claim decides.
    Claims(ClaimsListArgs),
    /// Claim the state of keys for a named owner, until the claims are cleared or expire.
    #[command(subcommand)]
    Claim(ClaimCommand),
    /// The old spelling of `holds list`.
    #[command(hide = true)]
    Holds(HoldsListArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AwaitedKey {
    On,
    Off,
    /// The count changes.
    Changed,
}

#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Globs of "name" or "module:name"; a leading ! excludes: 'sched_*' '!virtio*:*'. - reads them
    /// from standard input.
    #[arg(add = complete::keys())]
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Changed only with --allow-guarded.
    Guarded,
    /// The key's count may be changed from outside the guest.
    Ref,
    /// The key of a tracepoint.
    Tracepoint,
    /// The key of a pr_debug().
    Dyndbg,
    /// The key guards a static call that may be NULL, and is never changed.
    Never,
}

#[derive(Clone, Debug, Args)]
pub struct ChangeArgs {
    /// "name", "module:name" or globs; a leading ! excludes; - reads them from standard input, one
    /// per line. All keys are changed together, or none is. Globs leave out sealed keys, those of
    /// class never and, without --allow-guarded, guarded ones; a name is never left out.
    #[arg(required = true, add = complete::keys())]
    pub keys: Vec<String>,
    /// Change the key only if its etag is still this one (one key only).
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub etag: Option<String>,
    #[command(flatten)]
    pub options: ChangeOptions,
}

#[derive(Clone, Debug, Args)]
pub struct ChangeOptions {
    /// Check everything and change nothing. For keys, prints a plan, which `keys commit` carries
    /// out.
    #[arg(long)]
    pub dry_run: bool,
    /// Time for which the plan of --dry-run is kept, 1s to 24h; default 10m.
    #[arg(long, value_parser = time_in(times::PLAN), requires = "dry_run", value_name = "TIME")]
    pub plan_ttl: Option<Duration>,
    /// Reason for the change; kept with the holds and in the audit log.
    #[arg(
        long,
        default_value = "",
        value_name = "TEXT",
        hide_default_value = true
    )]
    pub reason: String,
    /// The service releases the references that this change takes after this time, 1ms to 365d: for
    /// example 10m.
    #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
    pub ttl: Option<Duration>,
    /// Change guarded keys too; the monitor must allow it.
    #[arg(long)]
    pub allow_guarded: bool,
    #[command(flatten)]
    pub force: Force,
    /// Repeating a change with the same id does not apply it twice.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "ID")]
    pub request_id: Option<String>,
    /// Print only totals, not each key: faster for thousands of keys.
    #[arg(long)]
    pub summary: bool,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), conflicts_with = "dry_run", value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
}

// One type for all commands, so that --force has one help text.
#[derive(Clone, Copy, Debug, Args)]
pub struct Force {
    /// Release also what others hold: other clients and, for keys, the guest itself.
    #[arg(long)]
    pub force: bool,
}

#[derive(Clone, Debug, Args)]
pub struct CommitArgs {
    /// The plan's id.
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub plan: String,
    /// Make the change only if this is the plan's digest.
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub digest: Option<String>,
    /// Print only totals, not each key: faster for thousands of keys.
    #[arg(long)]
    pub summary: bool,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
}

#[derive(Clone, Debug, Args)]
pub struct RepairArgs {
    /// "name" or "module:name".
    #[arg(add = complete::keys())]
    pub key: String,
    /// Write the repair. Without this option nothing is changed.
    #[arg(long)]
    pub yes: bool,
    /// Reason for the repair; kept in the audit log.
    #[arg(
        long,
        default_value = "",
        requires = "yes",
        value_name = "TEXT",
        hide_default_value = true
    )]
    pub reason: String,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), requires = "yes", value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
}

#[derive(Clone, Debug, Args)]
pub struct WatchArgs {
    /// Globs, as in `list`.
    #[arg(add = complete::keys())]
    pub patterns: Vec<String>,
    /// Start at this past revision instead of now, 0 to 18446744073709551615.
    #[arg(long, requires = "incarnation", value_name = "REVISION")]
    pub from_revision: Option<u64>,
    /// The incarnation that the revision belongs to, as `guest describe` and watches print it.
    #[arg(long, requires = "from_revision", value_name = "ID")]
    pub incarnation: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum HoldsCommand {
    /// List the references that clients hold.
    List(HoldsListArgs),
    /// Release holds: one transaction, all or none.
    Release(ReleaseArgs),
    /// Give holds a new expiry, all or none.
    #[command(group(ArgGroup::new("expiry").required(true).args(["ttl", "no_expiry"])))]
    Renew {
        /// Ids of holds; - reads them from standard input.
        #[arg(required = true, value_name = "ID", add = complete::holds())]
        holds: Vec<String>,
        /// The holds expire after this time, counted from now, 1ms to 365d: for example 10m.
        #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
        ttl: Option<Duration>,
        /// The holds no longer expire.
        #[arg(long)]
        no_expiry: bool,
    },
}

#[derive(Clone, Debug, Args)]
pub struct HoldsListArgs {
    /// Globs of keys, as in `keys list`.
    #[arg(add = complete::keys())]
    pub patterns: Vec<String>,
    /// Only this client's holds, for example uid:1000.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "PRINCIPAL")]
    pub holder: Option<String>,
}

#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Ids of holds; - reads them from standard input.
    #[arg(required = true, value_name = "ID", add = complete::holds())]
    pub holds: Vec<String>,
    #[command(flatten)]
    pub force: Force,
    /// Repeating a change with the same id does not apply it twice.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "ID")]
    pub request_id: Option<String>,
    /// Print only totals, not each key: faster for thousands of keys.
    #[arg(long)]
    pub summary: bool,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
}
