// SPDX-License-Identifier: Apache-2.0
//! Makes changes of keys, and plans of changes.

use std::io::IsTerminal;
use std::time::Duration;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;
use tokio::time::Instant;
use tonic::{Response, Status};
use tonic_types::StatusExt;

use crate::args::keys::{ChangeOptions, CommitArgs};
use crate::client::{Client, result_view, to_proto};
use crate::failure::Failure;
use crate::print::Answer;
use crate::view::{self, Applied, Transaction};

/// Makes the change, or its plan.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn make(
    client: &Client,
    updates: Vec<v1::KeyUpdate>,
    options: &ChangeOptions,
) -> Result<Answer<Applied>, Failure> {
    let applied = if options.dry_run {
        Applied::Plan(prepare(client, updates, options).await?)
    } else {
        Applied::Update(update(client, updates, options).await?)
    };
    Ok(applied.into())
}

async fn update(
    client: &Client,
    updates: Vec<v1::KeyUpdate>,
    options: &ChangeOptions,
) -> Result<view::Update, Failure> {
    let mut request = v1::UpdateStaticKeysRequest {
        updates,
        request_id: options.request_id.clone().unwrap_or_default(),
        allow_guarded: options.allow_guarded,
        force: options.force.force,
        reason: options.reason.clone(),
        ttl: to_proto(options.ttl),
        stop_timeout: to_proto(options.stop_timeout),
        result_view: result_view(options.summary),
        ..Default::default()
    };
    let mut keys = client.keys();
    let attempt = async |time: Duration| {
        request.retry_timeout = time.try_into().ok();
        keys.update_static_keys(client.change(request.clone()))
            .await
    };
    transaction(client, attempt).await
}

async fn prepare(
    client: &Client,
    updates: Vec<v1::KeyUpdate>,
    options: &ChangeOptions,
) -> Result<view::PreparedUpdate, Failure> {
    let request = v1::PrepareUpdateRequest {
        updates,
        request_id: options.request_id.clone().unwrap_or_default(),
        allow_guarded: options.allow_guarded,
        force: options.force.force,
        reason: options.reason.clone(),
        hold_ttl: to_proto(options.ttl),
        plan_ttl: to_proto(options.plan_ttl),
        result_view: result_view(options.summary),
        ..Default::default()
    };
    let mut plan = client
        .keys()
        .prepare_update(client.request(request))
        .await?
        .into_inner();
    let token = std::mem::take(&mut plan.next_page_token);
    plan.results.extend(further_results(client, token).await?);
    Ok(view::PreparedUpdate {
        command: client.command(),
        ..plan.into()
    })
}

/// Makes the change of a plan.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn commit(
    client: &Client,
    arguments: &CommitArgs,
) -> Result<Answer<view::Update>, Failure> {
    let mut request = v1::CommitUpdateRequest {
        plan_id: arguments.plan.clone(),
        digest: arguments.digest.clone().unwrap_or_default(),
        stop_timeout: to_proto(arguments.stop_timeout),
        result_view: result_view(arguments.summary),
        ..Default::default()
    };
    let mut keys = client.keys();
    let attempt = async |time: Duration| {
        request.retry_timeout = time.try_into().ok();
        keys.commit_update(client.change(request.clone())).await
    };
    Ok(transaction(client, attempt).await?.into())
}

/// Discards a plan.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn discard(client: &Client, plan: &str) -> Result<Answer<view::NoPlan>, Failure> {
    let request = v1::DiscardUpdateRequest {
        plan_id: plan.to_owned(),
        ..Default::default()
    };
    client
        .keys()
        .discard_update(client.request(request))
        .await?;
    let discarded = view::NoPlan {
        plan_id: plan.to_owned(),
        discarded: true,
    };
    Ok(discarded.into())
}

/// Retries a transaction while the guest is busy, and fetches all its results.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn transaction<T: Into<Transaction>>(
    client: &Client,
    attempt: impl AsyncFnMut(Duration) -> Result<Response<T>, Status>,
) -> Result<view::Update, Failure> {
    // On a terminal, short calls let the user see the gate that blocks the change. A program makes
    // one call.
    let patience = Patience {
        whole: client.retry_timeout(),
        slice: match std::io::stderr().is_terminal() {
            true => SLICE,
            false => client.retry_timeout(),
        },
    };
    let say = |status: &Status| client.progress().set(status.message());
    let response = patience.spend(attempt, say).await?.into_inner();
    let mut transaction: Transaction = response.into();
    let token = std::mem::take(&mut transaction.next_page_token);
    let more = further_results(client, token).await?;
    transaction.results.extend(more);
    Ok(transaction.into())
}

/// Fetches the results after the first page, which the service keeps for 10 minutes.
async fn further_results(
    client: &Client,
    mut page_token: String,
) -> Result<Vec<v1::KeyResult>, Failure> {
    let (mut results, mut pages) = (vec![], Pages::of("results"));
    while !page_token.is_empty() {
        let request = v1::ListUpdateResultsRequest {
            page_token,
            ..Default::default()
        };
        let page = client
            .keys()
            .list_update_results(client.request(request))
            .await
            .map_err(|status| {
                let mut failure = Failure::from(status);
                failure.message = format!(
                    "the transaction was answered, but not all of its results can be listed: {}",
                    failure.message
                );
                failure
            })?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        results.extend(page.results);
        page_token = next.unwrap_or_default();
    }
    Ok(results)
}

/// The duration of one call if a user watches.
const SLICE: Duration = Duration::from_secs(2);

/// The time for which a change is retried while a gate of the guest is closed. It is split into
/// slices, and between them the gate is shown. A call that found the guest busy has changed
/// nothing.
struct Patience {
    whole: Duration,
    slice: Duration,
}

impl Patience {
    async fn spend<T>(
        self,
        mut attempt: impl AsyncFnMut(Duration) -> Result<T, Status>,
        mut say: impl FnMut(&Status),
    ) -> Result<T, Status> {
        let deadline = Instant::now() + self.whole;
        let mut said = String::new();
        let mut left = self.whole;
        loop {
            let time = left.min(self.slice);
            let answer = attempt(time).await;
            // An attempt that got all of the remaining time is the last one, even if it ended a
            // little early.
            let last = time == left;
            left = deadline.saturating_duration_since(Instant::now());
            match answer {
                Err(status) if is_busy(&status) && !last && !left.is_zero() => {
                    let gate = gate(&status);
                    if said != gate {
                        say(&status);
                        said = gate;
                    }
                }
                answer => return answer,
            }
        }
    }
}

fn is_busy(status: &Status) -> bool {
    let info = status.get_details_error_info();
    info.is_some_and(|info| info.reason == "GUEST_BUSY")
}

fn gate(status: &Status) -> String {
    let info = status.get_details_error_info();
    let gate = info.and_then(|mut info| info.metadata.remove("gate_message"));
    gate.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::ErrorDetails;

    use super::*;

    fn busy(gate: &str) -> Status {
        let metadata = [("gate_message".to_owned(), gate.to_owned())];
        let details = ErrorDetails::with_error_info("GUEST_BUSY", "patchbay", metadata);
        Status::with_error_details(Code::Unavailable, format!("busy: {gate}"), details)
    }

    /// Returns the result, the seconds of each attempt, and the messages shown.
    async fn spend(
        slice: u64,
        answers: Vec<Result<(), Status>>,
    ) -> (Result<(), Status>, Vec<u64>, Vec<String>) {
        let (mut tried, mut said) = (vec![], vec![]);
        let mut answers = answers.into_iter();
        let patience = Patience {
            whole: Duration::from_secs(5),
            slice: Duration::from_secs(slice),
        };
        let attempt = async |time: Duration| {
            tried.push(time.as_secs());
            let answer = answers.next().expect("no more attempts");
            if answer.is_err() {
                tokio::time::sleep(time).await;
            }
            answer
        };
        let result = patience
            .spend(attempt, |status| said.push(status.message().to_owned()))
            .await;
        (result, tried, said)
    }

    #[tokio::test(start_paused = true)]
    async fn each_gate_that_is_waited_for_is_shown_once() {
        let gates = ["text_mutex", "text_mutex", "system_state"];
        let answers = gates.map(|gate| Err(busy(gate))).to_vec();
        let (result, tried, said) = spend(2, answers).await;
        assert_eq!(
            result.expect_err("time is up").message(),
            "busy: system_state"
        );
        assert_eq!(
            (tried, said),
            (vec![2, 2, 1], vec!["busy: text_mutex".to_owned()])
        );
        let (result, tried, said) = spend(2, vec![Err(busy("text_mutex")), Ok(())]).await;
        assert!(result.is_ok());
        assert_eq!((tried, said.len()), (vec![2, 2], 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_gets_one_answer_and_other_errors_end_it() {
        let (result, tried, said) = spend(5, vec![Err(busy("text_mutex"))]).await;
        assert!(result.is_err());
        assert_eq!((tried, said), (vec![5], vec![]));
        let other = Status::unavailable("the monitor is gone");
        let (result, tried, _) = spend(2, vec![Err(other)]).await;
        assert!(result.is_err());
        assert_eq!(tried, [2]);
    }
}
