// SPDX-License-Identifier: Apache-2.0
//! Shows progress on a terminal for work that takes more than a second.

use std::fmt::Write as _;
use std::future::Future;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, interval_at};

/// The time before the line is first shown, and between its updates.
const STEP: Duration = Duration::from_secs(1);
/// The maximum width of the line. A longer line would wrap, and could not be overwritten.
const WIDTH: usize = 79;
/// Moves the cursor to the start of the line and erases the line.
const ERASE: &str = "\r\x1b[K";

/// A description of the work in progress. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<String>>);

impl Progress {
    /// Sets the detail that is shown next to the verb from the next update on.
    pub fn set(&self, detail: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = detail.into();
    }

    /// Waits for `work`, and shows a line on stderr if that is a terminal.
    pub async fn during<F: Future>(&self, what: &str, work: F) -> F::Output {
        let stderr = std::io::stderr();
        if !stderr.is_terminal() {
            return work.await;
        }
        self.draw(stderr, what, work).await
    }

    async fn draw<F: Future>(&self, mut out: impl Write, what: &str, work: F) -> F::Output {
        let started = Instant::now();
        let mut ticks = interval_at(started + STEP, STEP);
        let mut work = std::pin::pin!(work);
        let mut drawn = false;
        loop {
            tokio::select! {
                biased;
                result = &mut work => {
                    if drawn {
                        let _ = write!(out, "{ERASE}");
                        let _ = out.flush();
                    }
                    return result;
                }
                _ = ticks.tick() => {
                    let line = self.line(what, started.elapsed());
                    let _ = write!(out, "{ERASE}{line}");
                    let _ = out.flush();
                    drawn = true;
                }
            }
        }
    }

    fn line(&self, what: &str, elapsed: Duration) -> String {
        let detail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = format!("patchbay: {what}, {} s", elapsed.as_secs());
        if !detail.is_empty() {
            let _ = write!(line, ": {detail}");
        }
        crate::text::harmless(&line).chars().take(WIDTH).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn drawn(work: Duration) -> String {
        let mut out = vec![];
        let progress = Progress::default();
        progress.set("text_mutex is held\x07");
        let work = tokio::time::sleep(work);
        progress.draw(&mut out, "changing keys", work).await;
        String::from_utf8(out).expect("text")
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_is_drawn_after_a_second_and_erased_at_the_end() {
        assert_eq!(drawn(Duration::from_millis(900)).await, "");
        assert_eq!(
            drawn(Duration::from_millis(2500)).await,
            "\r\x1b[Kpatchbay: changing keys, 1 s: text_mutex is held\u{fffd}\
             \r\x1b[Kpatchbay: changing keys, 2 s: text_mutex is held\u{fffd}\r\x1b[K"
        );
    }
}
