// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay guest`.

pub mod autopsy;
pub mod console;
mod journal;
pub mod log;
pub mod run;
mod snapshot;
mod wait;

use std::time::Duration;

use patchbay_kernel_image::Patterns;
use patchbay_proto::v1;

use crate::args::guest::GuestCommand;
use crate::args::output::Output;
use crate::args::target::Target;
use crate::client::selected::{Heard, LIST_TIMEOUT, Selected, endpoints, guests_of, sockets_of};
use crate::client::{ANSWER_TIME, Client, to_proto};
use crate::failure::Failure;
use crate::print::print;
use crate::progress::Progress;
use crate::view;

/// The time for a guest to power off, unless --timeout is given.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Lists the guests of all sockets.
///
/// # Errors
/// A glob is malformed, no monitor answers on the given socket, or a folder of sockets cannot be
/// read.
pub async fn list(
    target: &Target,
    mut patterns: Vec<String>,
    output: Output,
) -> Result<(), Failure> {
    patterns.extend(target.guest.iter().cloned());
    let matching = Patterns::parse(&patterns).map_err(|error| Failure::usage(error.to_string()))?;
    if let Some(socket) = &target.socket {
        // If no monitor answers, that is an error, not an empty list.
        let only = Client::open(socket, LIST_TIMEOUT).await?;
        guests_of(&only, &patterns).await?;
    }
    let sockets = sockets_of(target)?;
    let described = async {
        let mut guests = vec![];
        for endpoint in endpoints(sockets, &patterns).await {
            let path = endpoint.socket.path.display().to_string();
            let name = endpoint.socket.name;
            let silent = match endpoint.guests {
                Heard::Guests(found) => {
                    for (status, client) in found {
                        guests.push(
                            details(&client.with_timeout(LIST_TIMEOUT), status, path.clone()).await,
                        );
                    }
                    continue;
                }
                Heard::Dead => "dead",
                Heard::Denied(_) => "no permission",
                Heard::Failed(_) => "not answering",
            };
            // The name comes from the socket. A monitor with one guest names its socket after the
            // guest.
            if matching.select_whole(&name) {
                guests.push(view::GuestDetails::silent(name, path, silent));
            }
        }
        guests.sort_by(|a, b| (&a.name, &a.socket).cmp(&(&b.name, &b.socket)));
        guests
    };
    let guests = Progress::default()
        .during("listing guests", described)
        .await;
    print(output, &guests)
}

async fn details(client: &Client, status: v1::GuestStatus, socket: String) -> view::GuestDetails {
    let request = client.request(v1::DescribeGuestRequest::default());
    match client.guest().describe_guest(request).await {
        Ok(answer) => view::GuestDetails::described(status.guest, socket, answer.into_inner()),
        Err(_) => {
            let state = view::state(status.state());
            view::GuestDetails::silent(status.guest, socket, state)
        }
    }
}

/// Describes the guest, with the state of its kernel if that is known already.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
async fn describe(client: &Client) -> Result<view::GuestDetails, Failure> {
    describe_by(client, v1::DescribeGuestRequest::default()).await
}

/// Describes the guest, and searches for the state of its kernel if that is not known. A guest
/// whose kernel is not found is described without it.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
async fn describe_with_kernel(client: &Client) -> Result<view::GuestDetails, Failure> {
    let request = v1::DescribeGuestRequest {
        find_kernel_state: true,
        ..Default::default()
    };
    let Ok(mut guest) = describe_by(client, request).await else {
        return describe(client).await;
    };
    // Only this request reads the tasks, and a CPU always runs one.
    let details = guest.details.as_mut();
    if let Some(details) = details.filter(|details| details.tasks.is_empty()) {
        details.not_in_memory.push("tasks");
    }
    Ok(guest)
}

async fn describe_by(
    client: &Client,
    request: v1::DescribeGuestRequest,
) -> Result<view::GuestDetails, Failure> {
    let request = client.request(request);
    let answer = client.guest().describe_guest(request).await?.into_inner();
    let name = answer.status.clone().unwrap_or_default().guest;
    let socket = client.socket().display().to_string();
    Ok(view::GuestDetails::described(name, socket, answer))
}

/// Returns the guest's name if the output format is `name`, and otherwise an empty string.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
async fn name_for(output: Output, client: &Client) -> Result<String, Failure> {
    match (output, client.guest_name()) {
        (Output::Name, "") => Ok(describe(client).await?.name),
        (Output::Name, name) => Ok(name.to_owned()),
        _ => Ok(String::new()),
    }
}

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    target: &Target,
    command: GuestCommand,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    let selected = || Selected::select(target, timeout);
    match command {
        GuestCommand::List { patterns } => list(target, patterns, output).await,
        GuestCommand::Run(arguments) => run::become_monitor(target, arguments),
        GuestCommand::Describe => {
            let verb = async |client: Client| Ok(describe_with_kernel(&client).await?.into());
            selected().await?.run(output, "describing", verb).await
        }
        GuestCommand::Wait { state } => {
            let verb = async |client: Client| wait::wait(&client, state, timeout).await;
            selected()
                .await?
                .run(output, "waiting for a guest", verb)
                .await
        }
        GuestCommand::Watch => {
            let client = selected().await?.one("guest watch")?;
            Failure::after(timeout, wait::watch(&client, output)).await
        }
        GuestCommand::Pause { ttl } => {
            let verb = async |client: Client| {
                let name = name_for(output, &client).await?;
                let request = v1::PauseGuestRequest {
                    timeout: to_proto(timeout),
                    ttl: to_proto(ttl),
                    ..Default::default()
                };
                let mut guest = client.guest();
                let answer = guest.pause_guest(client.request(request)).await?;
                Ok(view::Power::paused(name, answer.into_inner()).into())
            };
            selected().await?.run(output, "pausing", verb).await
        }
        GuestCommand::Resume => {
            let verb = async |client: Client| {
                let request = client.request(v1::ResumeGuestRequest::default());
                client.guest().resume_guest(request).await?;
                let request = client.request(v1::DescribeGuestRequest::default());
                let guest = client.guest().describe_guest(request).await?.into_inner();
                let status = guest.status.unwrap_or_default();
                let state = view::state(status.state());
                Ok(view::Power::is(status.guest, state).into())
            };
            selected().await?.run(output, "resuming", verb).await
        }
        GuestCommand::Shutdown {
            cut_now,
            cut_after_timeout,
        } => {
            let timeout = timeout.unwrap_or(SHUTDOWN_TIMEOUT);
            let verb = async |client: Client| {
                // The monitor ends with its guest and then no longer tells the name.
                let name = name_for(output, &client).await?;
                let mut request = client.stream(v1::ShutdownGuestRequest {
                    force: cut_now,
                    timeout: to_proto(Some(timeout)),
                    cut_after_timeout,
                    ..Default::default()
                });
                request.set_timeout(timeout + ANSWER_TIME);
                let answer = client.guest().shutdown_guest(request).await?;
                Ok(view::Power::off(name, answer.into_inner()).into())
            };
            let what = format!("waiting up to {timeout:?} for the power button to be obeyed");
            selected().await?.run(output, &what, verb).await
        }
        GuestCommand::Snapshot { folder } => {
            let client = selected().await?.one("guest snapshot")?;
            snapshot::snapshot(&client, &folder, timeout, output).await
        }
        GuestCommand::Console(arguments) => {
            console::console(&selected().await?.one("guest console")?, &arguments).await
        }
        GuestCommand::Autopsy(arguments) => {
            let client = selected().await?.one("guest autopsy")?;
            Failure::after(timeout, autopsy::autopsy(&client, arguments, output)).await
        }
        GuestCommand::Log(arguments) => {
            let client = selected().await?.one("guest log")?;
            Failure::after(timeout, log::log(&client, arguments)).await
        }
    }
}
