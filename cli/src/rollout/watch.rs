// SPDX-License-Identifier: Apache-2.0
//! Follows a rollout until it ends. It reconnects if the controller restarts or another replica
//! becomes the leader.

use std::collections::HashSet;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

use patchbay_proto::fleet::v1;
use tonic::{Code, Status as Error};

use super::replicas::{Place, Refused, at_leader};
use super::status::Status;
use super::{Controller, failed, partly, view};
use crate::args::output::Output;
use crate::client::traced;
use crate::failure::Failure;
use crate::print::{Printable, complain, print_streamed, write};
use crate::text::harmless;

/// The first delay before a call is repeated. It doubles up to `MAX_RETRY`.
const RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// The interval at which countdowns on a terminal are updated.
const TICK: Duration = Duration::from_secs(1);
/// Moves the cursor to the beginning of the screen.
const HOME: &str = "\x1b[H";
/// Clear the rest of the line, and the rest of the screen.
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_REST: &str = "\x1b[J";

/// The place where the changes are shown.
pub struct Screen {
    output: Output,
    is_wide: bool,
    /// The status is redrawn in its place.
    redraws: bool,
    last: view::Rollout,
    /// The lines of the last status.
    lines: HashSet<String>,
}

impl Screen {
    pub fn new(output: Output, is_wide: bool) -> Self {
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
                write(harmless(&changed(&mut self.lines, &text)))
            }
            output => print_streamed(output, &Status::lasting(&self.last, self.is_wide)),
        }
    }

    fn redraw(&self) -> Result<(), Failure> {
        write(redrawn(&harmless(
            &Status::now(&self.last, self.is_wide).table(),
        )))
    }
}

/// Returns the lines of the text that are not among `lines`, and stores the lines of the text
/// there.
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

/// Adds the control codes that let the text replace the contents of a terminal.
fn redrawn(text: &str) -> String {
    let lines: String = text
        .lines()
        .map(|line| format!("{line}{CLEAR_LINE}\r\n"))
        .collect();
    format!("{HOME}{lines}{CLEAR_REST}")
}

/// Returns whether the call may succeed when it is repeated, because the controller cannot be
/// reached or another replica leads.
fn is_passing(error: &Error) -> bool {
    matches!(
        error.code(),
        Code::Unavailable | Code::Unknown | Code::Internal | Code::Aborted
    )
}

/// The state of a watch, which is kept across connections.
struct Watch {
    rollout: String,
    screen: Screen,
    /// A leader has answered since the last failure.
    is_followed: bool,
    /// The leader refused the watch or reported its end, so it must not be repeated.
    is_final: bool,
}

/// Shows the rollout until it ends.
///
/// # Errors
/// No leader answers the first call, the leader refuses the watch, or the rollout has ended and is
/// not completed.
pub async fn watch(place: &Place, rollout: String, screen: Screen) -> Result<(), Failure> {
    let mut watch = Watch {
        rollout,
        screen,
        is_followed: false,
        is_final: false,
    };
    let mut delay = None;
    loop {
        let followed = at_leader(place, async |channel| {
            watch.follow(Controller::new(channel, None)).await
        });
        let failure = match followed.await {
            Ok(()) => return Ok(()),
            Err(failure) if watch.is_final => return Err(failure),
            Err(failure) => failure,
        };
        if std::mem::take(&mut watch.is_followed) {
            complain(&format!(
                "the controller does not answer; trying again: {}",
                failure.message
            ));
            delay = Some(RETRY);
        }
        // If no leader has ever answered, the address may be wrong.
        let Some(rest) = delay else {
            return Err(failure);
        };
        tokio::time::sleep(rest).await;
        delay = Some((rest * 2).min(MAX_RETRY));
    }
}

impl Watch {
    /// Shows the changes that one leader reports.
    async fn follow(&mut self, controller: Controller) -> Result<(), Refused> {
        if let Err(error) = self.changes(&controller).await {
            self.is_final = !is_passing(&error);
            return Err(failed(error));
        }
        // The stream does not contain the guests, which also determine the exit code.
        let rollout = controller.get(self.rollout.clone()).await?;
        self.is_final = true;
        Ok(partly(&rollout)?)
    }

    async fn changes(&mut self, controller: &Controller) -> Result<(), Error> {
        let rollout = self.rollout.clone();
        let request = traced(v1::WatchRequest { rollout });
        let changes = controller.rollouts.clone().watch(request).await?;
        let mut changes = changes.into_inner();
        let mut tick = tokio::time::interval(TICK);
        loop {
            let shown = tokio::select! {
                change = changes.message() => match change? {
                    None => return Ok(()),
                    Some(change) => {
                        self.is_followed = true;
                        self.screen.show(change.rollout.unwrap_or_default().into())
                    }
                },
                _ = tick.tick(), if self.screen.redraws => self.screen.redraw(),
            };
            shown.map_err(|failure| Error::cancelled(failure.message))?;
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
