// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay keys watch`.

use patchbay_proto::v1;
use tokio_stream::StreamExt;
use tonic::Status;
use tonic_types::StatusExt;

use crate::args::keys::WatchArgs;
use crate::args::output::Output;
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::print::{print_streamed, remark};
use crate::view;

/// The maximum number of new listings in a row. A service that refuses the revisions it has just
/// listed is broken.
const MAX_RESYNCS: u32 = 8;

/// Returns whether the keys must be listed again: the changes since the revision are lost, or the
/// watch ended because its authorization expired.
pub fn must_list_anew(status: &Status) -> bool {
    const REASONS: [&str; 5] = [
        "REVISION_COMPACTED",
        "REVISION_IN_FUTURE",
        "INCARNATION_CHANGED",
        "STREAM_EXPIRED",
        "WATCH_TOO_SLOW",
    ];
    let info = status.get_details_error_info();
    info.is_some_and(|info| REASONS.contains(&info.reason.as_str()))
}

/// Prints changes until the service ends the watch.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn watch(client: &Client, arguments: WatchArgs, output: Output) -> Result<(), Failure> {
    let mut request = v1::WatchStaticKeysRequest {
        start_revision: arguments.from_revision.unwrap_or(0),
        incarnation: arguments.incarnation.unwrap_or_default(),
        patterns: arguments.patterns,
        ..Default::default()
    };
    // The number of listings since the last message of a watch.
    let mut resyncs = 0;
    loop {
        let status = match follow(client, request.clone(), output, &mut resyncs).await? {
            None => return Err(Failure::ended("watch")),
            Some(status) => status,
        };
        resyncs += 1;
        if !must_list_anew(&status) || resyncs > MAX_RESYNCS {
            return Err(status.into());
        }
        let listing = lists::keys(
            client,
            v1::ListStaticKeysRequest {
                patterns: request.patterns.clone(),
                ..Default::default()
            },
        )
        .await?;
        let (revision, incarnation) = (listing.revision, listing.incarnation);
        let why = status.message();
        remark(
            "",
            &vec![format!(
                "{why}; the keys as they are now follow, then their changes"
            )],
        );
        let resync = view::Event::resync(revision, &incarnation, why.to_owned());
        print_streamed(output, &resync)?;
        for key in listing.keys {
            print_streamed(output, &view::Event::listed(key, revision, &incarnation))?;
        }
        request.start_revision = revision + 1;
        request.incarnation = incarnation;
    }
}

/// Reads one stream to its end. Each message resets `resyncs`.
async fn follow(
    client: &Client,
    request: v1::WatchStaticKeysRequest,
    output: Output,
    resyncs: &mut u32,
) -> Result<Option<Status>, Failure> {
    let mut stream = match client
        .keys()
        .watch_static_keys(client.stream(request))
        .await
    {
        Ok(stream) => stream.into_inner(),
        Err(status) => return Ok(Some(status)),
    };
    while let Some(message) = stream.next().await {
        let message = match message {
            Ok(message) => message,
            Err(status) => return Ok(Some(status)),
        };
        *resyncs = 0;
        for event in view::events(message) {
            print_streamed(output, &event)?;
        }
    }
    Ok(None)
}
