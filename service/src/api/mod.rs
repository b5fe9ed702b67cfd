// SPDX-License-Identifier: Apache-2.0
//! The gRPC services of guests on a unix socket.
//!
//! ```text
//!  client ══ socket ══▶ limits ──▶ a service ──▶ access ──▶ guest ──▶ keys, trace
//!                                                  │
//!                             who asks, which guest, the method's role
//! ```

mod access;
mod convert;
mod debug_sites;
mod endpoint;
mod guest;
mod guests;
mod holds;
mod kernel_log;
mod limits;
mod plans;
mod repair;
mod static_keys;
mod status;
mod stream;
mod tracepoints;

use std::time::Duration;

use patchbay_proto::v1::ResultView;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use self::status::ends;

pub use self::access::Access;
pub use self::endpoint::{Endpoint, ServeError};
pub use self::guests::{AddError, Guests, ServedGuest};
pub(crate) use self::limits::accept;
pub(crate) use self::static_keys::time_allowed;
pub use self::tracepoints::TracepointsApi;
pub use patchbay_proto::socket::{ListeningSocket as ApiSocket, SocketError};

/// Waits until the guest is removed.
async fn wait_for_end(ending: &mut watch::Receiver<bool>) {
    // An error means that the sender is dropped, which also ends the guest.
    let _ = ending.wait_for(|ending| *ending).await;
}

/// Runs `tell`, which fills a stream, until it returns, the client is gone or the guest is removed.
/// Only a removed guest ends the stream with an error.
async fn until_end<T>(
    sender: &mpsc::Sender<Result<T, Status>>,
    mut ending: watch::Receiver<bool>,
    tell: impl Future<Output = ()>,
) {
    tokio::select! {
        () = tell => {}
        () = sender.closed() => {}
        () = wait_for_end(&mut ending) => {
            let _ = sender.send(Err(ends())).await;
        }
    }
}

/// Returns whether the request wants only the summary.
///
/// # Errors
/// INVALID_ARGUMENT for an unknown view.
pub(crate) fn summary_only(view: i32) -> Result<bool, crate::keys::KeysError> {
    match ResultView::try_from(view) {
        Ok(ResultView::Unspecified | ResultView::Full) => Ok(false),
        Ok(ResultView::Summary) => Ok(true),
        Err(_) => Err(crate::keys::KeysError::InvalidArgument {
            field: "result_view",
            message: format!("unknown result_view {view}; give full or summary"),
        }),
    }
}

fn invalid(field: &'static str, message: impl Into<String>) -> crate::keys::KeysError {
    crate::keys::KeysError::InvalidArgument {
        field,
        message: message.into(),
    }
}

/// Default and maximum page size.
const DEFAULT_PAGE_SIZE: usize = 1000;
const MAX_PAGE_SIZE: usize = 10_000;
const NEGATIVE_PAGE_SIZE: &str = "is negative; give 0 for the default or a count";

/// Returns the page size of a request, or `None` for a negative number.
fn page_size(given: i32) -> Option<usize> {
    match usize::try_from(given).ok()? {
        0 => Some(DEFAULT_PAGE_SIZE),
        size => Some(size.min(MAX_PAGE_SIZE)),
    }
}

/// Returns the duration given by a request, or `None` if it is absent. Zero is a value: a `ttl` of
/// zero must not mean "no expiry".
///
/// # Errors
/// INVALID_ARGUMENT if it is outside `range`.
pub(crate) fn from_proto(
    field: &'static str,
    duration: Option<prost_types::Duration>,
    range: std::ops::RangeInclusive<Duration>,
) -> Result<Option<Duration>, crate::keys::KeysError> {
    let Some(given) = duration else {
        return Ok(None);
    };
    match Duration::try_from(given) {
        Ok(duration) if range.contains(&duration) => Ok(Some(duration)),
        _ => Err(crate::keys::KeysError::InvalidArgument {
            field,
            message: format!(
                "is {given}; give {:?} to {:?}, or leave it out",
                range.start(),
                range.end()
            ),
        }),
    }
}
