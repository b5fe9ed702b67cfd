// SPDX-License-Identifier: Apache-2.0
//! Follows a rollout until it ends, also if the controller is started again or another replica
//! becomes the leader.

use std::collections::HashSet;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

use patchbay_proto::fleet::v1;
use tonic::{Code, Status as Error};

use super::status::Status;
use super::{Controller, failed, partly, view};
use crate::args::output::Output;
use crate::client::traced;
use crate::failure::Failure;
use crate::print::{Printable, complain, print_streamed, write};
use crate::text::harmless;

/// The first delay before a call is repeated. It doubles up to the second.
const RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// The interval of countdowns on a terminal.
const TICK: Duration = Duration::from_secs(1);
/// Moves the cursor to the beginning of the screen.
const HOME: &str = "\x1b[H";
/// Clears the rest of the line, and of the screen.
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_REST: &str = "\x1b[J";

/// The place where the changes are shown.
struct Screen {
    output: Output,
    is_wide: bool,
    /// The status is redrawn in its place.
    redraws: bool,
    last: view::Rollout,
    /// The lines of the last status.
    lines: HashSet<String>,
}

impl Screen {
    fn new(output: Output, is_wide: bool) -> Self {
        Self {
            output,
            is_wide,
            redraws: output == Output::Table && stdout().is_terminal(),
            last: view::Rollout::default(),
            lines: HashSet::new(),
        }
    }

    /// Shows the rollout if it has changed.
    fn show(&mut self, next: view::Rollout) -> Result<(), Failure> {
        // The controller also reports changes that are not shown.
        if next == self.last {
            return Ok(());
        }
        self.last = next;
        match self.output {
            Output::Table if self.redraws => self.redraw(),
            Output::Table => {
                let text = Status::lasting(&self.last, self.is_wide).table();
                write(&harmless(&changed(&mut self.lines, &text)))
            }
            output => print_streamed(output, &Status::lasting(&self.last, self.is_wide)),
        }
    }

    fn redraw(&self) -> Result<(), Failure> {
        write(&redrawn(&harmless(
            &Status::now(&self.last, self.is_wide).table(),
        )))
    }
}

/// Returns the lines of the text that are not among the earlier ones, and keeps the text's.
fn changed(lines: &mut HashSet<String>, text: &str) -> String {
    let is_new = |line: &&str| !lines.contains(*line);
    let new: String = text
        .lines()
        .filter(is_new)
        .map(|line| format!("{line}\n"))
        .collect();
    *lines = text.lines().map(str::to_owned).collect();
    new
}

/// Returns the text with the codes that let it replace what a terminal shows.
fn redrawn(text: &str) -> String {
    let lines: String = text
        .lines()
        .map(|line| format!("{line}{CLEAR_LINE}\r\n"))
        .collect();
    format!("{HOME}{lines}{CLEAR_REST}")
}

/// Returns whether the call may succeed when it is repeated: the controller is gone for now, or
/// another replica leads.
fn is_passing(error: &Error) -> bool {
    matches!(
        error.code(),
        Code::Unavailable | Code::Unknown | Code::Internal | Code::Aborted
    )
}

impl Controller {
    /// Shows the rollout until it ends.
    pub async fn watch(
        &self,
        rollout: String,
        output: Output,
        is_wide: bool,
    ) -> Result<(), Failure> {
        let mut screen = Screen::new(output, is_wide);
        let followed = self.follow(&rollout, &mut screen);
        match self.timeout {
            Some(timeout) => tokio::time::timeout(timeout, followed)
                .await
                .map_err(|_| failed(Error::deadline_exceeded("")))?,
            None => followed.await,
        }?;
        // The changes are without the guests, which decide about the exit code too.
        partly(&self.get(rollout).await?)
    }

    async fn follow(&self, rollout: &str, screen: &mut Screen) -> Result<(), Failure> {
        let mut delay = RETRY;
        loop {
            let error = match self.follow_leader(rollout, screen, &mut delay).await? {
                None => return Ok(()),
                Some(error) if is_passing(&error) => error,
                Some(error) => return Err(failed(error)),
            };
            if delay == RETRY {
                complain(&format!(
                    "the controller does not answer, and is tried again: {}",
                    error.message()
                ));
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_RETRY);
        }
    }

    /// Shows the changes that one leader reports. Returns the error that ends this; `None` if the
    /// rollout has ended.
    async fn follow_leader(
        &self,
        rollout: &str,
        screen: &mut Screen,
        delay: &mut Duration,
    ) -> Result<Option<Error>, Failure> {
        let rollout = rollout.to_owned();
        let request = traced(v1::WatchRequest { rollout });
        let mut changes = match self.rollouts.clone().watch(request).await {
            Ok(changes) => changes.into_inner(),
            Err(error) => return Ok(Some(error)),
        };
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                change = changes.message() => match change {
                    Ok(Some(change)) => {
                        *delay = RETRY;
                        screen.show(change.rollout.unwrap_or_default().into())?;
                    }
                    Ok(None) => return Ok(None),
                    Err(error) => return Ok(Some(error)),
                },
                _ = tick.tick(), if screen.redraws => screen.redraw()?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_lines_are_printed() {
        let mut lines = HashSet::new();
        assert_eq!(changed(&mut lines, "a\nb\n"), "a\nb\n");
        assert_eq!(changed(&mut lines, "a\nc\n"), "c\n");
        assert_eq!(changed(&mut lines, "a\nc\n"), "");
        assert_eq!(changed(&mut lines, "a\nb\n"), "b\n", "a line that is back");
    }

    #[test]
    fn a_terminal_shows_the_latest_status_alone() {
        assert_eq!(redrawn("a\nb\n"), "\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J");
    }
}
