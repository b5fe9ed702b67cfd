// SPDX-License-Identifier: Apache-2.0
//! Evaluates gates that need external information from a command, a gRPC service, Prometheus, or
//! the agents of a wave's guests.
//!
//! A gate that cannot be evaluated, or does not answer in time, is closed.

mod agents;
mod prometheus;
#[cfg(test)]
mod tests;

use std::process::Stdio;
use std::time::Duration;

use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

pub use self::agents::{Observed, observe, observed};
use crate::hosts::Hosts;
use crate::rollout::WaveGateKind;

/// Evaluates a gate of the wave. An error is the reason why the gate is closed, and begins with the
/// name of the queried party. Dropping the future ends the processes and calls that it has started.
pub async fn ask(kind: &WaveGateKind, hosts: &Hosts, members: Vec<Observed>) -> Result<(), String> {
    let Some(timeout_ms) = kind.timeout_ms() else {
        return Ok(());
    };
    let asked = async {
        match kind {
            WaveGateKind::Errors { .. } | WaveGateKind::PauseP99 { .. } => Ok(()),
            WaveGateKind::Command { argv, .. } => command(argv).await,
            WaveGateKind::AgentHealth { limits, .. } => agents::ask(limits, hosts, members).await,
            WaveGateKind::Grpc { url, service, .. } => grpc(url, service).await,
            WaveGateKind::Prometheus {
                url,
                query,
                above,
                below,
                ..
            } => prometheus::ask(url, query, *above, *below).await,
        }
    };
    let answered = tokio::time::timeout(Duration::from_millis(timeout_ms), asked).await;
    let why = match answered {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(why)) => why,
        Err(_) => match kind {
            WaveGateKind::Command { .. } => format!("did not end within {timeout_ms} ms"),
            _ => format!("no answer within {timeout_ms} ms"),
        },
    };
    Err(match kind {
        WaveGateKind::Command { argv, .. } => {
            format!("{} {why}", argv.first().map_or("", String::as_str))
        }
        WaveGateKind::Grpc { url, service, .. } if service.is_empty() => {
            format!("grpc {url}: {why}")
        }
        WaveGateKind::Grpc { url, service, .. } => {
            format!("grpc {url}, service {service}: {why}")
        }
        WaveGateKind::Prometheus { url, query, .. } => {
            format!("prometheus {url}, query {query:?}: {why}")
        }
        _ => format!("agent_health: {why}"),
    })
}

/// Runs a command, which must exit with status 0. Its process is killed when the future is dropped.
async fn command(argv: &[String]) -> Result<(), String> {
    let (program, arguments) = argv.split_first().ok_or("the command is empty")?;
    let mut command = tokio::process::Command::new(program);
    command.args(arguments).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    match command.status().await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("ended with {status}")),
        Err(error) => Err(format!("cannot be started: {error}")),
    }
}

/// Calls `grpc.health.v1.Health/Check`, which must answer SERVING.
async fn grpc(url: &str, service: &str) -> Result<(), String> {
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|error| error.to_string())?;
    let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(channel).check(request).await;
    let answer = answer
        .map_err(|status| format!("{:?}: {}", status.code(), bounded(status.message())))?
        .into_inner();
    match answer.status() {
        ServingStatus::Serving => Ok(()),
        other => Err(format!("it is {}", other.as_str_name())),
    }
}

/// Formats the error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Returns the beginning of a text from outside, which may be long.
fn bounded(text: &str) -> String {
    text.chars().take(256).collect()
}
