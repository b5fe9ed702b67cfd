// SPDX-License-Identifier: Apache-2.0
//! Evaluates gates that need external information from a command, a gRPC service, Prometheus, or
//! the agents of a wave's guests.
//!
//! A gate whose party cannot be asked, or does not answer the question in time, is inconclusive.

mod agents;
pub mod commands;
mod prometheus;
#[cfg(test)]
mod tests;

use std::time::Duration;

use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

pub use self::agents::{Observed, observe, observed};
use self::commands::Commands;
use crate::hosts::Hosts;
use crate::rollout::{GateAnswer, WaveGateKind};

/// The reason why a command line in a stored record is not run. Otherwise everyone who can write
/// the store could run any command.
const NOT_RUN: &str = "is not run, because the spec contains its command line and not a name; undo \
     the rollout, or promote it without this gate";

/// The reason why a gate has not passed.
enum Obstacle {
    Failed(String),
    Inconclusive(String),
}

/// A text that is not known to be an answer is none.
impl<T: Into<String>> From<T> for Obstacle {
    fn from(why: T) -> Self {
        Self::Inconclusive(why.into())
    }
}

/// The wave whose gates are queried, and the means to query them.
pub struct Asking<'a> {
    pub hosts: &'a Hosts,
    pub commands: &'a Commands,
    pub rollout: &'a str,
    pub wave: &'a str,
}

/// Evaluates a gate of the wave. A reason begins with the name of the queried party. Dropping the
/// future ends the processes and calls that it has started.
pub async fn ask(kind: &WaveGateKind, asking: &Asking<'_>, members: Vec<Observed>) -> GateAnswer {
    let Some(timeout_ms) = kind.timeout_ms() else {
        return GateAnswer::Passed;
    };
    let asked = async {
        match kind {
            WaveGateKind::Errors { .. } | WaveGateKind::PauseP99 { .. } => Ok(()),
            WaveGateKind::Command { .. } => Err(NOT_RUN.into()),
            WaveGateKind::NamedCommand { name, .. } => asking.commands.run(name, asking).await,
            WaveGateKind::AgentHealth { limits, .. } => {
                agents::ask(limits, asking.hosts, members).await
            }
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
    let obstacle = match answered {
        Ok(Ok(())) => return GateAnswer::Passed,
        Ok(Err(obstacle)) => obstacle,
        Err(_) => Obstacle::Inconclusive(match kind {
            WaveGateKind::NamedCommand { .. } => format!("did not end within {timeout_ms} ms"),
            _ => format!("no answer within {timeout_ms} ms"),
        }),
    };
    match obstacle {
        Obstacle::Failed(why) => GateAnswer::Failed(named(kind, &why)),
        Obstacle::Inconclusive(why) => GateAnswer::Inconclusive(named(kind, &why)),
    }
}

/// Returns the reason after the name of the queried party.
fn named(kind: &WaveGateKind, why: &str) -> String {
    match kind {
        WaveGateKind::Command { argv, .. } => {
            format!("{} {why}", argv.first().map_or("", String::as_str))
        }
        WaveGateKind::NamedCommand { name, .. } => format!("command {name} {why}"),
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
    }
}

/// Calls `grpc.health.v1.Health/Check`, which must answer SERVING.
async fn grpc(url: &str, service: &str) -> Result<(), Obstacle> {
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
        other => Err(Obstacle::Failed(format!("it is {}", other.as_str_name()))),
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
