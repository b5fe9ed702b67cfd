// SPDX-License-Identifier: Apache-2.0
//! Streams the log of the guest's kernel, which the agent reads.
//!
//! The agent is asked repeatedly while a client listens. It therefore keeps no state for a client,
//! and each of its messages is an answer of bounded size.

use std::time::Duration;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{AgentLog, AgentReadLog};
use patchbay_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::trace::link::{AgentLink, bounded};
use crate::trace::{AgentError, TraceError};

/// Time allowed for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two requests: the maximum delay of a record, and a limit on the agent's work.
const INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of records taken from an answer. The agent sends no more.
const MAX_RECORDS: usize = 4096;

/// A position in the kernel log, on one connection of the agent.
pub struct Follower {
    link: AgentLink,
    connection: u64,
    next: u64,
}

impl Follower {
    /// Starts at the end of the log.
    ///
    /// # Errors
    /// No agent is connected, or it does not read the log.
    pub async fn start(link: AgentLink) -> Result<Self, TraceError> {
        let connection = link.peer()?.connection;
        let mut follower = Self {
            link,
            connection,
            next: 0,
        };
        follower.next = follower.ask(None).await?.next;
        Ok(follower)
    }

    async fn ask(&self, first: Option<u64>) -> Result<AgentLog, AgentError> {
        let question = Question::ReadLog(AgentReadLog { first });
        let answer = self.link.ask(question, PATIENCE).await?;
        // The guest may have booted again. The numbers of its records then start again.
        if self.link.peer()?.connection != self.connection {
            return Err(AgentError::Absent {
                why: ": another one has connected, follow its log anew".to_owned(),
            });
        }
        match answer {
            Answer::Log(log) => Ok(log),
            _ => Err(AgentError::Confused),
        }
    }

    /// Returns the records since the last call.
    async fn records(&mut self) -> Result<v1::StreamKernelLogResponse, AgentError> {
        let log = match self.ask(Some(self.next)).await {
            Ok(log) => log,
            // A guest that is paused or starved answers later.
            Err(AgentError::Silent { .. }) => AgentLog {
                next: self.next,
                ..AgentLog::default()
            },
            Err(error) => return Err(error),
        };
        // The guest chooses the numbers. The position only advances, so a client still gets each
        // answer once.
        self.next = self.next.max(log.next);
        let records = log
            .records
            .into_iter()
            .take(MAX_RECORDS)
            .map(|record| v1::KernelLogRecord {
                level: record.level,
                time: Duration::from_micros(record.time_us).try_into().ok(),
                text: bounded(record.text),
            });
        Ok(v1::StreamKernelLogResponse {
            records: records.collect(),
            lost: log.lost,
        })
    }

    /// Sends records until the client or the agent is gone.
    pub async fn tell(
        mut self,
        sender: &mpsc::Sender<Result<v1::StreamKernelLogResponse, Status>>,
    ) {
        let mut message = Ok(v1::StreamKernelLogResponse::default());
        loop {
            let ends = message.is_err();
            if sender.send(message).await.is_err() || ends {
                return;
            }
            message = loop {
                tokio::time::sleep(INTERVAL).await;
                match self.records().await {
                    Ok(none) if none.records.is_empty() && none.lost == 0 => {}
                    Ok(some) => break Ok(some),
                    Err(error) => break Err(TraceError::from(error).into()),
                }
            };
        }
    }
}
