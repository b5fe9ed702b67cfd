// SPDX-License-Identifier: Apache-2.0
//! Ends the runs in progress at a signal, so that the results so far are still reported.
//!
//! ```text
//!   no results yet ──── signal ────▶ this process ends at once
//!        │
//!        │ keep_results
//!        ▼
//!   results are kept ── signal ────▶ halted: the runs in progress end with an error, and the
//!        │                             results are reported
//!        │ another_job_ended           │
//!        ▼                             │ another signal
//!   halted: the other jobs end         ▼
//!   with an error                    this process ends at once, without a report
//! ```
//!
//! In all cases the guests are ended and the temporary files are removed.

use std::fmt;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

/// The time in which another signal belongs to the same request as the first one. timeout(1) sends
/// its signal to the command and then to the whole process group, some programs pass on a signal
/// that the terminal has also sent to this process, and systemd ends a login session with SIGTERM
/// and SIGHUP.
const SAME_REQUEST: Duration = Duration::from_millis(200);

/// A signal that ends this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Hangup,
    Interrupt,
    Terminate,
}

impl Signal {
    /// Returns the exit status that a shell shows for a process that this signal ended.
    pub fn status(self) -> u8 {
        match self {
            Self::Hangup => 129,
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hangup => "SIGHUP",
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        })
    }
}

/// The reason why the runs in progress have to end. It is also the error with which they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Signal(Signal),
    /// A run of another job could not take place.
    AnotherJob,
}

impl Cause {
    /// Returns the cause that an error has, if it is the end of a halted run.
    pub fn of(error: &anyhow::Error) -> Option<Self> {
        error.downcast_ref().copied()
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "interrupted by {signal}"),
            Self::AnotherJob => f.write_str("a run of another job could not take place"),
        }
    }
}

impl std::error::Error for Cause {}

#[derive(Debug, Default)]
struct State {
    keeps_results: bool,
    cause: Option<Cause>,
}

/// Tells the runs in progress that they have to end. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Halt(watch::Sender<State>);

impl Halt {
    /// Lets the next signal end only the runs in progress, because there are results to report.
    pub fn keep_results(&self) {
        self.0.send_modify(|state| state.keeps_results = true);
    }

    /// Ends the runs of the other jobs.
    pub fn another_job_ended(&self) {
        self.set(Cause::AnotherJob);
    }

    /// Returns the cause for which the runs in progress have to end, if there is one.
    pub fn cause(&self) -> Option<Cause> {
        self.0.borrow().cause
    }

    /// Waits until the runs in progress have to end.
    pub async fn requested(&self) -> Cause {
        let mut changes = self.0.subscribe();
        let halted = changes.wait_for(|state| state.cause.is_some()).await;
        let cause = halted.ok().and_then(|state| state.cause);
        cause.expect("`self` keeps the channel open until there is a cause")
    }

    /// Does the work unless the runs in progress have to end before it is done.
    ///
    /// # Errors
    /// The cause of the end. The work was dropped.
    pub async fn cut_short<T>(&self, work: impl Future<Output = T>) -> Result<T, Cause> {
        tokio::select! {
            // A signal from the terminal also ends the monitor. The signal is the cause, and not
            // the loss of the guest.
            biased;
            cause = self.requested() => Err(cause),
            done = work => Ok(done),
        }
    }

    /// Sets the cause unless there is one.
    fn set(&self, cause: Cause) {
        self.0.send_modify(|state| {
            state.cause.get_or_insert(cause);
        });
    }

    /// Handles a first signal, and returns whether results are kept for a report.
    fn signalled(&self, signal: Signal) -> bool {
        let keeps_results = self.0.borrow().keeps_results;
        if keeps_results {
            self.set(Cause::Signal(signal));
        }
        keeps_results
    }
}

/// Waits for a signal that ends this process at once, and returns the status that a shell would
/// show. The first poll registers the handlers of the signals.
pub async fn end_at_once(halt: &Halt) -> u8 {
    let (Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
    ) else {
        return std::future::pending().await;
    };
    let next = async || {
        tokio::select! {
            // If several signals have arrived, the status does not depend on chance.
            biased;
            _ = interrupt.recv() => Signal::Interrupt,
            _ = terminate.recv() => Signal::Terminate,
            _ = hangup.recv() => Signal::Hangup,
        }
    };
    after_signals(halt, next).await
}

/// Takes signals until one ends this process at once.
async fn after_signals(halt: &Halt, mut next: impl AsyncFnMut() -> Signal) -> u8 {
    let first = next().await;
    if !halt.signalled(first) {
        return first.status();
    }
    let begin = Instant::now();
    loop {
        let again = next().await;
        if begin.elapsed() >= SAME_REQUEST {
            return again.status();
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, Result};

    use super::*;

    #[tokio::test]
    async fn a_signal_halts_the_runs_only_if_there_are_results_and_the_first_cause_stays() {
        let halt = Halt::default();
        assert!(!halt.signalled(Signal::Interrupt));
        assert_eq!(halt.cause(), None);
        let runs = halt.clone();
        runs.keep_results();
        assert!(halt.signalled(Signal::Terminate));
        runs.another_job_ended();
        let expected = Cause::Signal(Signal::Terminate);
        assert_eq!(
            (halt.cause(), runs.requested().await),
            (Some(expected), expected)
        );
    }

    /// Returns the status after these signals, each with the time before it in milliseconds, and
    /// whether all of them were needed.
    async fn after(halt: &Halt, signals: &[(u64, Signal)]) -> (u8, bool) {
        let mut signals = signals.iter();
        let next = async || match signals.next() {
            Some(&(time, signal)) => {
                tokio::time::sleep(Duration::from_millis(time)).await;
                signal
            }
            None => std::future::pending().await,
        };
        let limit = Duration::from_secs(60);
        let status = tokio::time::timeout(limit, after_signals(halt, next)).await;
        (status.unwrap_or(0), signals.next().is_none())
    }

    #[tokio::test(start_paused = true)]
    async fn a_signal_is_the_second_one_only_after_a_time() {
        use Signal::{Hangup, Interrupt, Terminate};
        for (signals, expected) in [
            (&[(0, Interrupt)][..], 0),
            (&[(0, Terminate), (0, Terminate), (150, Terminate)], 0),
            (&[(0, Interrupt), (201, Interrupt)], 130),
            (&[(0, Interrupt), (150, Interrupt), (51, Interrupt)], 130),
            (&[(0, Terminate), (0, Hangup), (150, Interrupt)], 0),
            (&[(0, Interrupt), (201, Terminate)], 143),
            (&[(0, Terminate), (0, Hangup), (201, Hangup)], 129),
        ] {
            let halt = Halt::default();
            halt.keep_results();
            let ended = after(&halt, signals).await;
            assert_eq!(ended, (expected, true), "{signals:?}");
            assert_eq!(halt.cause(), Some(Cause::Signal(signals[0].1)));
        }
        // Without results the first signal is enough.
        let signals = [(0, Interrupt), (0, Terminate)];
        let ended = after(&Halt::default(), &signals).await;
        assert_eq!(ended, (130, false));
    }

    #[test]
    fn the_cause_is_found_below_the_name_of_a_run() {
        let ended: Result<()> = Err(Cause::Signal(Signal::Interrupt).into());
        let error = ended.context("a=on").context("a matrix").unwrap_err();
        assert_eq!(Cause::of(&error), Some(Cause::Signal(Signal::Interrupt)));
        assert_eq!(
            format!("{error:#}"),
            "a matrix: a=on: interrupted by SIGINT"
        );
        assert_eq!(Cause::of(&anyhow::anyhow!("no guest")), None);
    }
}
