// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay guest wait` and `watch`.

use std::time::Duration;

use patchbay_proto::v1;
use tokio::net::UnixStream;
use tokio_stream::StreamExt;
use tonic::{Status, Streaming};
use tonic_types::StatusExt;
use v1::{GuestState, RegistrationState};

use crate::args::guest::AwaitedState;
use crate::args::output::Output;
use crate::client::Client;
use crate::failure::{Failure, TIMEOUT};
use crate::print::Answer;
use crate::print::print_streamed;
use crate::view;

/// Prints the status now and after each change.
///
/// # Errors
/// The service ends the watch.
pub async fn watch(client: &Client, output: Output) -> Result<(), Failure> {
    let mut stream = open(client).await?;
    while let Some(message) = stream.next().await {
        match message {
            Ok(message) => {
                let status = message.status.unwrap_or_default();
                print_streamed(output, &view::Status::from(status))?;
            }
            Err(status) if is_expired(&status) => stream = open(client).await?,
            Err(status) => return Err(status.into()),
        }
    }
    Err(Failure::ended("watch"))
}

/// Returns whether the host ended the stream because its authorization expired. The caller then
/// opens a new stream, which begins with the guest's status.
fn is_expired(status: &Status) -> bool {
    let info = status.get_details_error_info();
    info.is_some_and(|info| info.reason == "STREAM_EXPIRED")
}

async fn open(client: &Client) -> Result<Streaming<v1::WatchGuestResponse>, Failure> {
    let request = client.stream(v1::WatchGuestRequest::default());
    Ok(client.guest().watch_guest(request).await?.into_inner())
}

/// Waits for the state, or for `limit`.
///
/// # Errors
/// The guest can no longer reach the state, or `limit` has passed.
pub async fn wait(
    client: &Client,
    awaited: AwaitedState,
    limit: Option<Duration>,
) -> Result<Answer<view::Status>, Failure> {
    let Some(limit) = limit else {
        return Ok(reach(client, awaited).await?.into());
    };
    let reached = tokio::time::timeout(limit, reach(client, awaited)).await;
    let reached = reached.unwrap_or_else(|_| {
        Err(Failure::new(
            TIMEOUT,
            format!(
                "the guest {} after {limit:?}; wait longer with --timeout, or see `patchbay guest describe`",
                missing(awaited)
            ),
        ))
    });
    Ok(reached?.into())
}

fn missing(awaited: AwaitedState) -> &'static str {
    match awaited {
        AwaitedState::Registered => "has not registered",
        AwaitedState::Agent => "has no agent connected",
        AwaitedState::Stopped => "has not stopped",
        AwaitedState::Running => "does not run",
        AwaitedState::Paused => "is not paused",
    }
}

fn is_reached(awaited: AwaitedState, status: &v1::GuestStatus) -> bool {
    match awaited {
        AwaitedState::Registered => status.registration() == RegistrationState::Registered,
        AwaitedState::Agent => status.agent_connected,
        AwaitedState::Stopped => status.state() == GuestState::Stopped,
        AwaitedState::Running => status.state() == GuestState::Running,
        AwaitedState::Paused => status.state() == GuestState::Paused,
    }
}

async fn reach(client: &Client, awaited: AwaitedState) -> Result<view::Status, Failure> {
    let mut stream = open(client).await?;
    let mut name = client.guest_name().to_owned();
    let mut end = Failure::ended("watch");
    while let Some(message) = stream.next().await {
        let status = match message {
            Ok(message) => message.status.unwrap_or_default(),
            Err(status) if is_expired(&status) => {
                stream = open(client).await?;
                continue;
            }
            Err(status) => {
                end = status.into();
                break;
            }
        };
        if is_reached(awaited, &status) {
            return Ok(status.into());
        }
        if status.state() == GuestState::Stopped {
            return Err(Failure::error(format!(
                "guest {} has stopped, and so {}; start it again",
                status.guest,
                missing(awaited)
            )));
        }
        let refused = status.registration() == RegistrationState::Refused;
        if awaited == AwaitedState::Registered && refused {
            return Err(Failure::error(format!(
                "the registration of guest {} was refused: {}",
                status.guest, status.registration_error
            )));
        }
        name.clone_from(&status.guest);
        let status = view::Status::from(status);
        client
            .progress()
            .set(format!("{}, {}", status.state, status.registration));
    }
    // A monitor ends with its guest, perhaps before it has sent the last status.
    let is_gone = UnixStream::connect(client.socket()).await.is_err();
    if awaited == AwaitedState::Stopped && is_gone {
        return Ok(view::Status::gone(&name));
    }
    Err(end)
}
