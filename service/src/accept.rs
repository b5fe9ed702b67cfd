// SPDX-License-Identifier: Apache-2.0
//! Accepts connections.

use std::time::Duration;

use patchbay_guest::log_limit::limited;

/// Delay before a failed accept is retried, because the error persists and the listener stays
/// readable.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts a connection. After an error, most likely a lack of file descriptors, it waits before it
/// retries.
pub(crate) async fn accept<T, F>(mut next: impl FnMut() -> F) -> T
where
    F: Future<Output = std::io::Result<T>>,
{
    loop {
        match next().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                limited!(
                    warn,
                    "a connection cannot be accepted ({error}); raise the limit on open files"
                );
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}
