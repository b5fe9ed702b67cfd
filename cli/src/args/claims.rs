// SPDX-License-Identifier: Apache-2.0
//! The command line of `patchbay keys claims` and `patchbay keys claim`.

use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use super::keys::Force;
use super::times::{self, time_in};
use crate::complete;

#[derive(Clone, Debug, Args)]
pub struct ClaimsListArgs {
    /// Globs of keys, as in `keys list`.
    #[arg(add = complete::keys())]
    pub patterns: Vec<String>,
    /// Only claims whose owner has this name, for example rollout/net-canary.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "NAME", add = complete::owners())]
    pub owner: Option<String>,
    /// Only claims whose owner belongs to this client, for example uid:1000.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "PRINCIPAL")]
    pub principal: Option<String>,
    /// Only claims that do not hold: another claim decides, the key is gone, or it was changed.
    #[arg(long)]
    pub not_made: bool,
}

#[derive(Debug, Subcommand)]
pub enum ClaimCommand {
    /// Replace the claims of an owner with this set, in one transaction. Keys that cannot be
    /// changed are left out and shown.
    Set(ClaimSetArgs),
    /// End the claims of an owner. Each key returns to the state that the remaining claims want, or
    /// to its state before the claims.
    Clear(ClaimClearArgs),
}

#[derive(Clone, Debug, Args)]
pub struct ClaimSetArgs {
    /// The name of the owner, for example rollout/net-canary.
    #[arg(value_parser = NonEmptyStringValueParser::new(), add = complete::owners())]
    pub owner: String,
    /// KEY=on, KEY=off, or KEY=held for one reference; - reads them from standard input, one per
    /// line.
    #[arg(required = true, value_name = "KEY=WANT", add = complete::claims())]
    pub claims: Vec<String>,
    /// The claims end after this time, 1ms to 365d: for example 10m.
    #[arg(long, value_parser = time_in(times::TTL), value_name = "TIME")]
    pub ttl: Option<Duration>,
    /// Change guarded keys too; the monitor must allow it.
    #[arg(long)]
    pub allow_guarded: bool,
    #[command(flatten)]
    pub force: Force,
    /// Do nothing unless the claims have this digest; --dry-run prints it.
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), value_name = "DIGEST")]
    pub intent_digest: Option<String>,
    #[command(flatten)]
    pub options: ClaimOptions,
}

#[derive(Clone, Debug, Args)]
pub struct ClaimClearArgs {
    /// The name of the owner, for example rollout/net-canary.
    #[arg(value_parser = NonEmptyStringValueParser::new(), add = complete::owners())]
    pub owner: String,
    #[command(flatten)]
    pub options: ClaimOptions,
}

#[derive(Clone, Debug, Args)]
pub struct ClaimOptions {
    /// The generation of the claims, 1 to 18446744073709551615; default: the generation after the
    /// owner's current one. The service then refuses lower generations of this owner.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "NUMBER")]
    pub generation: Option<u64>,
    /// Check everything and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Reason for the change; kept in the audit log.
    #[arg(
        long,
        default_value = "",
        value_name = "TEXT",
        hide_default_value = true
    )]
    pub reason: String,
    /// Limit on the time to stop the vCPUs, 1us to 30s: for example 10ms.
    #[arg(long, value_parser = time_in(times::STOP), conflicts_with = "dry_run", value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
}
