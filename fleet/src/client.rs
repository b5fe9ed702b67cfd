// SPDX-License-Identifier: Apache-2.0
//! `patchbay-fleet rollout`: the operator's side of `patchbay.fleet.v1`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Subcommand;
use patchbay_fleet::hosts::channel;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use tonic::Status;
use tonic::transport::Channel;

/// A rollout that ended with guests left to look at.
const PARTLY: u8 = 3;
const MAX_ANSWER_BYTES: usize = 64 << 20;

#[derive(Subcommand)]
pub enum RolloutCommand {
    /// Prepare a change on every guest of a spec, and show it
    Plan {
        /// The spec, in YAML
        spec: PathBuf,
        /// Name of the rollout; the spec's file name if it is not given
        #[arg(long)]
        name: Option<String>,
    },
    /// Start a plan that was reviewed
    Start {
        rollout: String,
        /// The digest that `plan` showed
        #[arg(long)]
        digest: String,
    },
    /// Show a rollout
    Status {
        rollout: String,
        /// Show changes until it ends
        #[arg(long)]
        watch: bool,
    },
    /// Begin no further change
    Pause { rollout: String },
    /// Go on, and try again what failed and can be tried again
    Resume { rollout: String },
    /// Go on without the rest of the bake time and the gates
    Promote { rollout: String },
    /// End the rollout and take everything back
    Abort { rollout: String },
    /// Take everything back
    Undo { rollout: String },
    /// Say why a guest is in the state that it is in
    Explain {
        rollout: String,
        guest: String,
        /// Needed if several hosts have such a guest
        #[arg(long, default_value = "")]
        host: String,
    },
    /// List rollouts, the newest first
    List,
}

pub async fn run(socket: &Path, command: RolloutCommand) -> anyhow::Result<ExitCode> {
    let client = RolloutServiceClient::new(channel(socket));
    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
    let mut out = std::io::stdout().lock();
    let failed = |status: Status| anyhow!("{}", status.message());
    macro_rules! command {
        ($method:ident, $request:ident { $($field:ident),* }) => {
            client
                .$method(v1::$request { $($field),* })
                .await
                .map_err(failed)?
                .into_inner()
                .rollout
                .unwrap_or_default()
        };
    }
    let rollout = match command {
        RolloutCommand::Plan { spec, name } => {
            let (rollout, spec) = read(&spec, name)?;
            let planned = command!(plan, PlanRequest { spec, rollout });
            return show_plan(&mut out, &planned).map(|()| ExitCode::SUCCESS);
        }
        RolloutCommand::Status {
            rollout,
            watch: true,
        } => {
            return watch(&mut client, &mut out, rollout).await;
        }
        RolloutCommand::List => {
            let list = client.list(v1::ListRequest {}).await.map_err(failed)?;
            for rollout in list.into_inner().rollouts {
                let v1::Rollout { name, title, .. } = &rollout;
                writeln!(out, "{name:<24} {:<10} {title}", phase(&rollout))?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        RolloutCommand::Explain {
            rollout,
            guest,
            host,
        } => {
            let request = v1::ExplainRequest {
                rollout,
                host,
                guest,
            };
            let answer = client.explain(request).await.map_err(failed)?.into_inner();
            for reason in answer.reasons {
                writeln!(out, "{reason}")?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        RolloutCommand::Start { rollout, digest } => {
            command!(start, StartRequest { rollout, digest })
        }
        RolloutCommand::Status {
            rollout,
            watch: false,
        } => {
            let rollout = command!(get, GetRequest { rollout });
            show(&mut out, &rollout)?;
            return Ok(exit_code(&rollout));
        }
        RolloutCommand::Pause { rollout } => command!(pause, PauseRequest { rollout }),
        RolloutCommand::Resume { rollout } => command!(resume, ResumeRequest { rollout }),
        RolloutCommand::Promote { rollout } => command!(promote, PromoteRequest { rollout }),
        RolloutCommand::Abort { rollout } => command!(abort, AbortRequest { rollout }),
        RolloutCommand::Undo { rollout } => command!(undo, UndoRequest { rollout }),
    };
    show(&mut out, &rollout)?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the rollout after each change until it ends.
async fn watch(
    client: &mut RolloutServiceClient<Channel>,
    out: &mut impl Write,
    rollout: String,
) -> anyhow::Result<ExitCode> {
    let failed = |status: Status| anyhow!("{}", status.message());
    let request = v1::WatchRequest { rollout };
    let mut changes = client.watch(request).await.map_err(failed)?.into_inner();
    let mut last = v1::Rollout::default();
    while let Some(change) = changes.message().await.map_err(failed)? {
        last = change.rollout.unwrap_or_default();
        show(out, &last)?;
    }
    Ok(exit_code(&last))
}

/// The rollout's name and the spec's text.
fn read(path: &Path, name: Option<String>) -> anyhow::Result<(String, String)> {
    let spec = std::fs::read_to_string(path)
        .with_context(|| format!("the spec {} cannot be read", path.display()))?;
    let stem = || {
        path.file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
    };
    let name = name.or_else(stem).context("give --name")?;
    Ok((name, spec))
}

/// 3 if guests failed, or were not taken back.
fn exit_code(rollout: &v1::Rollout) -> ExitCode {
    let failed: u32 = rollout.waves.iter().map(|wave| wave.failed).sum();
    ExitCode::from(if failed == 0 { 0 } else { PARTLY })
}

fn phase(rollout: &v1::Rollout) -> String {
    let name = rollout.phase().as_str_name();
    name.trim_start_matches("PHASE_").to_lowercase()
}

fn show(out: &mut impl Write, rollout: &v1::Rollout) -> anyhow::Result<()> {
    let message = match rollout.message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    writeln!(out, "{} is {}{message}", rollout.name, phase(rollout))?;
    for wave in &rollout.waves {
        let v1::Wave {
            name,
            guests,
            hosts,
            committed,
            failed,
            reverted,
            ..
        } = wave;
        writeln!(
            out,
            "  wave {name}: {committed} of {guests} guests on {hosts} hosts changed, \
             {failed} failed, {reverted} taken back"
        )?;
    }
    Ok(())
}

fn show_plan(out: &mut impl Write, rollout: &v1::Rollout) -> anyhow::Result<()> {
    writeln!(out, "{} is {}", rollout.name, phase(rollout))?;
    for wave in &rollout.waves {
        let pause = wave.predicted_pause.unwrap_or_default();
        let micros = pause.seconds * 1_000_000 + i64::from(pause.nanos / 1000);
        let pause = match micros {
            0 => "pause not known yet".to_owned(),
            micros => format!("pause up to {micros} us"),
        };
        let v1::Wave {
            name,
            guests,
            hosts,
            keys,
            sites,
            ..
        } = wave;
        writeln!(
            out,
            "  wave {name}: {guests} guests on {hosts} hosts, {keys} keys, {sites} sites, {pause}"
        )?;
    }
    for guest in &rollout.guests {
        if guest.phase() == v1::GuestPhase::Skipped {
            let v1::RolloutGuest {
                host,
                guest,
                message,
                ..
            } = guest;
            writeln!(out, "  not touched: {guest} on {host}: {message}")?;
        }
    }
    if !rollout.message.is_empty() {
        writeln!(out, "  {}", rollout.message)?;
    }
    let (name, digest) = (&rollout.name, &rollout.digest);
    writeln!(
        out,
        "start it with: patchbay-fleet rollout start {name} --digest {digest}"
    )?;
    Ok(())
}
