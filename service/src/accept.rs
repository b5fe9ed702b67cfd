// SPDX-License-Identifier: Apache-2.0
//! Accepts connections.

use std::time::Duration;

use patchbay_guest::log_limit::limited;

/// Delay before a failed accept is retried, because the error persists and the listener stays
/// readable.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts a connection. After an error, most likely a lack of file descriptors, waits before the
/// next attempt.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses tokio's paused clock, which advances when all tasks wait.
    #[tokio::test(start_paused = true)]
    async fn a_listener_that_cannot_accept_is_not_tried_at_once() {
        let began = tokio::time::Instant::now();
        let mut tries = 0;
        let accepted = accept(|| {
            tries += 1;
            std::future::ready(match tries {
                1..=10 => Err(std::io::Error::from_raw_os_error(libc::EMFILE)),
                _ => Ok(tries),
            })
        });
        assert_eq!(accepted.await, 11);
        assert_eq!(began.elapsed(), 10 * ACCEPT_RETRY);
    }
}
