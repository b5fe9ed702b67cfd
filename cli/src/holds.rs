// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay holds`.

use std::time::Duration;

use patchbay_proto::v1;

use crate::args::keys::{HoldsCommand, HoldsListArgs, ReleaseArgs};
use crate::args::output::Output;
use crate::client::selected::Selected;
use crate::client::{Client, lists, result_view, to_proto};
use crate::failure::Failure;
use crate::keys::change::transaction;
use crate::print::Answer;
use crate::{names, view};

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(selected: Selected, command: HoldsCommand, output: Output) -> Result<(), Failure> {
    match command {
        HoldsCommand::List(arguments) => list(selected, arguments, output).await,
        HoldsCommand::Release(mut arguments) => {
            // The id of a hold is valid for one guest only.
            let selected = Selected::One(selected.one("holds release")?);
            arguments.holds = names::expand(arguments.holds)?;
            let arguments = &arguments;
            let verb = async |client: Client| release(&client, arguments).await;
            selected.run(output, "releasing holds", verb).await
        }
        HoldsCommand::Renew { holds, ttl, .. } => {
            let selected = Selected::One(selected.one("holds renew")?);
            let ids = &names::expand(holds)?;
            let verb = async |client: Client| {
                let request = client.request(v1::RenewHoldsRequest {
                    ids: ids.clone(),
                    ttl: to_proto(ttl),
                    ..Default::default()
                });
                let holds = client.keys().renew_holds(request).await?.into_inner().holds;
                Ok(shown(holds))
            };
            selected.run(output, "renewing holds", verb).await
        }
    }
}

fn shown(holds: Vec<v1::Hold>) -> Answer<Vec<view::Hold>> {
    let holds: Vec<view::Hold> = holds.into_iter().map(Into::into).collect();
    holds.into()
}

/// Lists all pages.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn list(
    selected: Selected,
    arguments: HoldsListArgs,
    output: Output,
) -> Result<(), Failure> {
    let request = &v1::ListHoldsRequest {
        patterns: names::expand(arguments.patterns)?,
        holder: arguments.holder.unwrap_or_default(),
        ..Default::default()
    };
    let verb = async |client: Client| Ok(shown(lists::holds(&client, request.clone()).await?));
    selected.run(output, "listing holds", verb).await
}

async fn release(
    client: &Client,
    arguments: &ReleaseArgs,
) -> Result<Answer<view::Update>, Failure> {
    let mut request = v1::ReleaseHoldsRequest {
        ids: arguments.holds.clone(),
        force: arguments.force.force,
        request_id: arguments.request_id.clone().unwrap_or_default(),
        stop_timeout: to_proto(arguments.stop_timeout),
        result_view: result_view(arguments.summary),
        ..Default::default()
    };
    let mut keys = client.keys();
    let attempt = async |time: Duration| {
        request.retry_timeout = time.try_into().ok();
        keys.release_holds(client.change(request.clone())).await
    };
    Ok(transaction(client, attempt).await?.into())
}
