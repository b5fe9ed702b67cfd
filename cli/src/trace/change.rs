// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay trace arm`, `fire`, `park` and `disarm`.

use std::time::Duration;

use patchbay_proto::v1;

use super::args::{ArmArgs, Probe, SwitchArgs};
use super::view::Change;
use crate::client::{Client, result_view, to_proto};
use crate::failure::{Failure, PARTLY};
use crate::print::Answer;
use crate::print::counted;

/// Arms events.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn arm(client: &Client, arguments: &ArmArgs) -> Result<Answer<Change>, Failure> {
    let Probe {
        filter,
        trigger,
        others,
    } = arguments.probe.clone();
    let request = v1::ArmTracepointsRequest {
        patterns: arguments.patterns.clone(),
        filter,
        trigger,
        even_if_others: others.even_if_others,
        validate_only: arguments.dry_run,
        request_id: arguments.request_id.clone().unwrap_or_default(),
        ttl: to_proto(arguments.ttl),
        ..Default::default()
    };
    let answer = client
        .tracepoints()
        .arm_tracepoints(client.request(request))
        .await?
        .into_inner();
    Ok(Change::new(answer.results, answer.report, arguments.dry_run).into())
}

/// Fires armed events.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn fire(
    client: &Client,
    patterns: Vec<String>,
    switch: &SwitchArgs,
    ttl: Option<Duration>,
) -> Result<Answer<Change>, Failure> {
    let request = v1::FireTracepointsRequest {
        patterns,
        validate_only: switch.dry_run,
        stop_timeout: to_proto(switch.stop_timeout),
        request_id: switch.request_id.clone().unwrap_or_default(),
        result_view: result_view(switch.summary),
        ttl: to_proto(ttl),
        ..Default::default()
    };
    let answer = client
        .tracepoints()
        .fire_tracepoints(client.request(request))
        .await?
        .into_inner();
    let change = Change::new(answer.results, answer.report, switch.dry_run);
    let change = change.with_summary(answer.summary);
    Ok(Answer {
        remarks: change.remarks(),
        ..change.into()
    })
}

/// Parks firing events.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn park(
    client: &Client,
    patterns: Vec<String>,
    switch: &SwitchArgs,
    force: bool,
    even_if_others: bool,
) -> Result<Answer<Change>, Failure> {
    let request = v1::ParkTracepointsRequest {
        patterns,
        validate_only: switch.dry_run,
        stop_timeout: to_proto(switch.stop_timeout),
        even_if_others,
        force,
        request_id: switch.request_id.clone().unwrap_or_default(),
        result_view: result_view(switch.summary),
        ..Default::default()
    };
    let answer = client
        .tracepoints()
        .park_tracepoints(client.request(request))
        .await?
        .into_inner();
    let change =
        Change::new(answer.results, answer.report, switch.dry_run).with_summary(answer.summary);
    let kept = if switch.dry_run { 0 } else { change.firing };
    Ok(Answer {
        remarks: change.remarks(),
        undone: partly(kept, "also fired by other clients, so not parked"),
        ..change.into()
    })
}

/// Disarms events.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn disarm(
    client: &Client,
    patterns: Vec<String>,
    force: bool,
    request_id: String,
) -> Result<Answer<Change>, Failure> {
    let request = v1::DisarmTracepointsRequest {
        patterns,
        force,
        request_id,
        ..Default::default()
    };
    let answer = client
        .tracepoints()
        .disarm_tracepoints(client.request(request))
        .await?
        .into_inner();
    let change = Change::new(answer.results, None, false);
    let results = change.results.iter();
    let kept = results.filter(|result| !result.kept_by.is_empty()).count();
    Ok(Answer {
        undone: partly(kept, "also armed by other clients, so not disarmed"),
        ..change.into()
    })
}

fn partly(kept: usize, why: &str) -> Option<Failure> {
    let events = counted(kept as u64, "event");
    let message = format!("{events} {why}; --force releases other clients' holds too");
    (kept > 0).then(|| Failure::new(PARTLY, message))
}
