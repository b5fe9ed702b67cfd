// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay rollout`, the operator's side of `patchbay.fleet.v1`.

pub mod args;
mod diff;
mod history;
mod print;
pub mod replicas;
mod status;
mod view;
mod watch;

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::inventory_service_client::InventoryServiceClient;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use self::args::{Reviewed, RolloutArgs, RolloutCommand};
use self::replicas::Refused;
use self::watch::Screen;
use crate::args::output::Output;
use crate::args::target::FleetTarget;
use crate::client::{DEFAULT_TIMEOUT, traced};
use crate::failure::{DRIFT, Failure, PARTLY};
use crate::print::{counted, print};

/// The maximum size of an answer. It suffices for a rollout of 100,000 guests.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Timeout of calls for which the controller queries many guests or hosts.
const FAN_OUT_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum size of a spec, which is the controller's limit.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// Makes calls to the controller. Without a timeout on the command line, each call has a default.
struct Controller {
    rollouts: RolloutServiceClient<Channel>,
    inventory: InventoryServiceClient<Channel>,
    timeout: Option<Duration>,
}

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    target: FleetTarget,
    arguments: RolloutArgs,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    // The file is read before the controller is called, so that a file that cannot be read fails
    // first.
    let plan = match &arguments.command {
        RolloutCommand::Plan { spec, name } | RolloutCommand::Diff { spec, name } => {
            Some(read(spec, name.clone())?)
        }
        _ => None,
    };
    let (place, command) = (target.place()?, arguments.command);
    if let RolloutCommand::Status {
        rollout,
        watch: true,
        output: format,
    } = command
    {
        let screen = Screen::new(output, format.is_wide());
        return Failure::after(timeout, watch::watch(&place, rollout, screen)).await;
    }
    replicas::at_leader(&place, async |channel| {
        let controller = Controller::new(channel, timeout);
        run_at(controller, command.clone(), plan.clone(), output).await
    })
    .await
}

/// Runs a subcommand on one replica.
async fn run_at(
    controller: Controller,
    command: RolloutCommand,
    plan: Option<v1::PlanRequest>,
    output: Output,
) -> Result<(), Refused> {
    match (command, plan) {
        (RolloutCommand::Plan { spec, .. }, Some(request)) => {
            let planned = controller.plan(request).await;
            let planned = planned.map_err(|refused| in_spec(&spec, refused))?;
            print(output, &view::ReviewedRollout(view::Rollout::from(planned)))?;
        }
        (RolloutCommand::Diff { spec, .. }, Some(request)) => {
            let diff = controller.diff(request).await;
            let diff = diff.map_err(|refused| in_spec(&spec, refused))?;
            print(output, &diff)?;
            diff.check()?;
        }
        (
            RolloutCommand::Status {
                rollout,
                output: format,
                ..
            },
            _,
        ) => {
            let rollout = controller.get(rollout).await?;
            let status = status::Status::now(&rollout, format.is_wide());
            print(output, &status)?;
            partly(&rollout)?;
        }
        (RolloutCommand::History { rollout }, _) => {
            let rollout = controller.get(rollout).await?;
            print(output, &history::History::from(rollout.timeline))?;
        }
        (
            RolloutCommand::Explain {
                rollout,
                name,
                host,
            },
            _,
        ) => {
            let explained = controller.explain(rollout, host, name).await?;
            print(output, &explained)?;
        }
        (
            RolloutCommand::Delete {
                rollout,
                unreadable,
            },
            _,
        ) => {
            let request = v1::DeleteRequest {
                rollout: rollout.clone(),
                unreadable,
            };
            let request = controller.timed(request, FAN_OUT_TIMEOUT);
            let answer = controller.rollouts.clone().delete(request).await;
            let archived = answer.map_err(failed)?.into_inner().archived;
            print(output, &view::Deleted { rollout, archived })?;
        }
        (RolloutCommand::List { output: format }, _) => {
            let request = controller.timed(v1::ListRequest {}, DEFAULT_TIMEOUT);
            let list = controller.rollouts.clone().list(request).await;
            let list = list.map_err(failed)?.into_inner();
            let unreadable = list.unreadable.into_iter().map(Into::into);
            let list = list.rollouts.into_iter().map(Into::into);
            let list = list.chain(unreadable).collect::<Vec<view::Rollout>>();
            match format.is_wide() {
                true => print(output, &status::WideList(list)),
                false => print(output, &list),
            }?;
        }
        (RolloutCommand::Hosts, _) => {
            let request = controller.timed(v1::ListHostsRequest {}, FAN_OUT_TIMEOUT);
            let list = controller.inventory.clone().list_hosts(request).await;
            let list = list.map_err(failed)?.into_inner().hosts;
            let list: Vec<view::Host> = list.into_iter().map(Into::into).collect();
            print(output, &list)?;
        }
        (
            RolloutCommand::Drift {
                rollout,
                fix,
                adopt,
            },
            _,
        ) => {
            let action = match (fix, adopt) {
                (true, _) => v1::DriftAction::Fix,
                (_, true) => v1::DriftAction::Adopt,
                _ => v1::DriftAction::Report,
            };
            controller.drift(rollout, action, output).await?;
        }
        (command, _) => {
            let rollout = controller.step(command).await?;
            print(output, &view::Rollout::from(rollout))?;
        }
    }
    Ok(())
}

impl Controller {
    fn new(channel: Channel, timeout: Option<Duration>) -> Self {
        let rollouts = RolloutServiceClient::new(channel.clone());
        let inventory = InventoryServiceClient::new(channel);
        Self {
            rollouts: rollouts.max_decoding_message_size(MAX_ANSWER_BYTES),
            inventory: inventory.max_decoding_message_size(MAX_ANSWER_BYTES),
            timeout,
        }
    }

    fn timed<T>(&self, message: T, default: Duration) -> Request<T> {
        let mut request = traced(message);
        request.set_timeout(self.timeout.unwrap_or(default));
        request
    }

    async fn plan(&self, request: v1::PlanRequest) -> Result<v1::Rollout, Refused> {
        let request = self.timed(request, FAN_OUT_TIMEOUT);
        let answer = self.rollouts.clone().plan(request).await.map_err(failed)?;
        Ok(answer.into_inner().rollout.unwrap_or_default())
    }

    /// Runs a subcommand whose answer is only the rollout.
    async fn step(&self, command: RolloutCommand) -> Result<v1::Rollout, Refused> {
        let mut client = self.rollouts.clone();
        macro_rules! step {
            ($method:ident, $request:ident { $($field:ident),* }) => {
                client
                    .$method(self.timed(v1::$request { $($field),* }, DEFAULT_TIMEOUT))
                    .await
                    .map_err(failed)?
                    .into_inner()
                    .rollout
                    .unwrap_or_default()
            };
        }
        Ok(match command {
            RolloutCommand::Approve(Reviewed { rollout, digest }) => {
                step!(approve, ApproveRequest { rollout, digest })
            }
            RolloutCommand::Start {
                reviewed: Reviewed { rollout, digest },
                break_glass,
            } => step!(
                start,
                StartRequest {
                    rollout,
                    digest,
                    break_glass
                }
            ),
            RolloutCommand::Pause { rollout } => step!(pause, PauseRequest { rollout }),
            RolloutCommand::Resume { rollout } => step!(resume, ResumeRequest { rollout }),
            RolloutCommand::Promote {
                rollout,
                break_glass,
            } => step!(
                promote,
                PromoteRequest {
                    rollout,
                    break_glass
                }
            ),
            RolloutCommand::Abort { rollout } => step!(abort, AbortRequest { rollout }),
            RolloutCommand::Undo { rollout } => step!(undo, UndoRequest { rollout }),
            RolloutCommand::Forget {
                rollout,
                name: guest,
                host,
            } => step!(
                forget,
                ForgetRequest {
                    rollout,
                    host,
                    guest
                }
            ),
            RolloutCommand::Plan { .. }
            | RolloutCommand::Diff { .. }
            | RolloutCommand::Status { .. }
            | RolloutCommand::History { .. }
            | RolloutCommand::Explain { .. }
            | RolloutCommand::Delete { .. }
            | RolloutCommand::List { .. }
            | RolloutCommand::Drift { .. }
            | RolloutCommand::Hosts => unreachable!("{command:?} has an answer of its own"),
        })
    }

    async fn diff(&self, request: v1::PlanRequest) -> Result<diff::Diff, Refused> {
        let v1::PlanRequest { spec, rollout } = request;
        let request = self.timed(v1::DiffRequest { rollout, spec }, FAN_OUT_TIMEOUT);
        let answer = self.rollouts.clone().diff(request).await.map_err(failed)?;
        Ok(answer.into_inner().into())
    }

    async fn get(&self, rollout: String) -> Result<view::Rollout, Refused> {
        let request = self.timed(v1::GetRequest { rollout }, DEFAULT_TIMEOUT);
        let answer = self.rollouts.clone().get(request).await.map_err(failed)?;
        Ok(answer.into_inner().rollout.unwrap_or_default().into())
    }

    async fn explain(
        &self,
        rollout: String,
        host: String,
        guest: String,
    ) -> Result<view::Explanation, Refused> {
        let request = v1::ExplainRequest {
            rollout,
            host,
            guest,
        };
        let request = self.timed(request, DEFAULT_TIMEOUT);
        let answer = self.rollouts.clone().explain(request).await;
        Ok(answer.map_err(failed)?.into_inner().into())
    }

    async fn drift(
        &self,
        rollout: String,
        action: v1::DriftAction,
        output: Output,
    ) -> Result<(), Refused> {
        let name = rollout.clone();
        let request = v1::DriftRequest {
            rollout,
            action: action.into(),
        };
        let request = self.timed(request, FAN_OUT_TIMEOUT);
        let answer = self.rollouts.clone().drift(request).await;
        let drift = view::DriftReport::from(answer.map_err(failed)?.into_inner());
        print(output, &drift)?;
        let is_report = action == v1::DriftAction::Report;
        let left = drift
            .drifts
            .iter()
            .filter(|one| is_report || !one.left.is_empty());
        match left.count() {
            0 if is_report && drift.waiting > 0 => {
                let waiting = are(drift.waiting.into(), "guest");
                let message = format!(
                    "{waiting} still to be changed in an added wave; `patchbay rollout status \
                     {name}` shows for what it waits"
                );
                Err(Failure::new(PARTLY, message).into())
            }
            0 => Ok(()),
            count => {
                let next = match (is_report, drift.phase.as_str()) {
                    (true, "completed") => "; change them with --fix, or accept them with --adopt",
                    // The controller does not report whether its policy demands approvals.
                    (true, "paused") => {
                        "; resume the rollout and then change them with --fix, or accept them with \
                         --adopt, which a policy that demands approvals allows only once the \
                         rollout is completed"
                    }
                    (true, _) => {
                        "; change them with --fix, or accept them with --adopt, which a policy \
                         that demands approvals allows only once the rollout is completed"
                    }
                    (false, _) => "",
                };
                let message = format!("{count} differences from the rollout{next}");
                Err(Failure::new(DRIFT, message).into())
            }
        }
    }
}

/// The argument that means standard input.
const STDIN: &str = "-";

/// Returns the spec's name for messages.
fn name_of(path: &Path) -> String {
    match path.as_os_str() == STDIN {
        true => "standard input".to_owned(),
        false => path.display().to_string(),
    }
}

/// Prefixes a failure that contains a position in the spec with the name of the spec.
fn in_spec(spec: &Path, mut refused: Refused) -> Refused {
    if let Refused::Failed(Failure { message, .. }) = &mut refused
        && message.starts_with("line ")
    {
        *message = format!("{}: {message}", name_of(spec));
    }
    refused
}

/// Returns the request with the spec's text.
fn read(path: &Path, name: Option<String>) -> Result<v1::PlanRequest, Failure> {
    let is_stdin = path.as_os_str() == STDIN;
    let shown = name_of(path);
    let unreadable =
        |error: std::io::Error| Failure::usage(format!("the spec {shown} cannot be read: {error}"));
    let stem = || match is_stdin {
        true => None,
        false => Some(path.file_stem()?.to_string_lossy().into_owned()),
    };
    let rollout = name
        .or_else(stem)
        .ok_or_else(|| Failure::usage(format!("the spec {shown} has no file name; give --name")))?;
    let input: Box<dyn Read> = match is_stdin {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(path).map_err(unreadable)?),
    };
    let mut spec = String::new();
    input
        .take(MAX_SPEC_BYTES + 1)
        .read_to_string(&mut spec)
        .map_err(unreadable)?;
    if spec.len() as u64 > MAX_SPEC_BYTES {
        return Err(Failure::usage(format!(
            "the spec {shown} is too long; at most {MAX_SPEC_BYTES} bytes are read"
        )));
    }
    Ok(v1::PlanRequest { spec, rollout })
}

/// Fails with exit code 3 if guests are not yet as wanted, do not answer any more, or could not be
/// released so far.
/// Forgotten guests do not count.
fn partly(rollout: &view::Rollout) -> Result<(), Failure> {
    let not_yet: u32 = rollout.waves.iter().map(|wave| wave.not_yet).sum();
    let is_held_up = |guest: &&view::RolloutGuest| guest.is_releasing() && guest.is_late();
    let held_up = rollout.guests.iter().filter(is_held_up).count();
    let unknown: u32 = rollout.waves.iter().map(|wave| wave.unknown).sum();
    let mut parts = Vec::new();
    if unknown > 0 {
        parts.push(match unknown {
            1 => "1 guest does not answer".to_owned(),
            _ => format!("{unknown} guests do not answer"),
        });
    }
    if not_yet > 0 {
        parts.push(format!(
            "{} not yet as wanted",
            are(not_yet.into(), "guest")
        ));
    }
    if held_up > 0 {
        parts.push(format!("{} not yet released", are(held_up as u64, "guest")));
    }
    if parts.is_empty() {
        return Ok(());
    }
    let (parts, name) = (parts.join(", and "), &rollout.name);
    Err(Failure::new(
        PARTLY,
        format!("{parts}; `patchbay rollout explain {name} GUEST` says why, and what you can do"),
    ))
}

/// Returns the number of things as the subject of a sentence.
fn are(count: u64, noun: &str) -> String {
    let verb = if count == 1 { "is" } else { "are" };
    format!("{} {verb}", counted(count, noun))
}

/// Converts the error of a call.
pub fn failed(status: Status) -> Refused {
    if let Some(refused) = replicas::not_leader(&status) {
        return refused;
    }
    let failure = match status.code() {
        Code::InvalidArgument => Failure::usage(status.message()),
        Code::DeadlineExceeded | Code::Cancelled => Failure::new(
            crate::failure::TIMEOUT,
            "the controller has not answered in time; see `patchbay rollout list` for what is \
             done, and allow more time with --timeout",
        ),
        Code::Unimplemented => Failure::error(
            "the controller does not know this call: it is of another version, or the socket is \
             not that of a controller; update it, or give another --fleet-socket",
        ),
        Code::Unknown => {
            // In TLS 1.3 the peer refuses a certificate after the connection is made.
            let why = patchbay_access::connect::explain(&status).unwrap_or(status.message());
            Failure::error(format!("the controller is gone: {why}"))
        }
        _ => Failure::error(status.message()),
    };
    Refused::Failed(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_fails_partly_while_guests_are_unknown_or_late() {
        let of = |unknown: u32, not_yet: u32| {
            let wave = v1::Wave {
                unknown,
                not_yet,
                ..v1::Wave::default()
            };
            let rollout = v1::Rollout {
                name: "net".to_owned(),
                waves: vec![wave],
                ..v1::Rollout::default()
            };
            partly(&view::Rollout::from(rollout))
        };
        assert!(of(0, 0).is_ok());
        for (unknown, not_yet, why) in [
            (
                1,
                0,
                "1 guest does not answer; `patchbay rollout explain net GUEST`",
            ),
            (2, 0, "2 guests do not answer; "),
            (
                1,
                2,
                "1 guest does not answer, and 2 guests are not yet as wanted; ",
            ),
        ] {
            let failure = of(unknown, not_yet).expect_err(why);
            assert_eq!(failure.exit_code, PARTLY);
            assert!(failure.message.starts_with(why), "{}", failure.message);
        }
    }
}
