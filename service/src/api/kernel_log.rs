// SPDX-License-Identifier: Apache-2.0
//! Streams the log of the guest's kernel, from its memory or as the agent reads it.
//!
//! The agent is asked repeatedly while a client listens. It therefore keeps no state for a client,
//! and each of its messages is an answer of bounded size.

use std::sync::Arc;
use std::time::Duration;

use patchbay_observe::log::Start;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{AgentLog, AgentReadLog};
use patchbay_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use super::guests::ServedGuest;
use super::requests::{MAX_TTL, from_proto, invalid};
use crate::keys::{Keys, KeysError};
use crate::log::{LogStream, Place, Wanted};
use crate::trace::link::{AgentLink, bounded};
use crate::trace::{AgentError, TraceError};

/// Time allowed for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two requests: the maximum delay of a record, and a limit on the agent's work.
const INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of records taken from an answer. The agent sends no more.
const MAX_RECORDS: usize = 4096;

/// The least severe level, KERN_DEBUG.
const MAX_LEVEL: u32 = 7;
/// Permitted values for the time before the newest record at which a stream starts.
const SINCE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=MAX_TTL;

/// A client's view of the log.
pub enum Log {
    /// The log in the guest's memory.
    Memory(Box<LogStream>),
    /// The log that the agent reads.
    Agent(Follower),
}

impl Log {
    /// Opens the log at the position that the client requests.
    ///
    /// # Errors
    /// The request is wrong, or the log cannot be read.
    pub async fn open(
        guest: &ServedGuest,
        request: v1::StreamKernelLogRequest,
    ) -> Result<Self, TraceError> {
        let (source, wanted) = read(&request)?;
        if source != v1::KernelLogSource::Agent {
            match memory(&guest.keys, wanted.clone()).await {
                Ok(stream) => return Ok(Self::Memory(Box::new(stream))),
                Err(error) if source == v1::KernelLogSource::Memory => return Err(error.into()),
                Err(error) if guest.tracer.link.peer().is_err() => {
                    let why = format!(", and {error}");
                    return Err(AgentError::Absent { why }.into());
                }
                Err(error) => tracing::debug!(%error, "the agent reads the log"),
            }
        }
        if wanted.since.is_some() {
            let message = "the agent cannot begin at a time; give first_seq";
            return Err(invalid("since", message).into());
        }
        let link = guest.tracer.link.clone();
        Ok(Self::Agent(Follower::start(link, wanted).await?))
    }

    /// Sends records until the client is gone or the log ends.
    pub async fn tell(self, sender: &mpsc::Sender<Result<v1::StreamKernelLogResponse, Status>>) {
        match self {
            Self::Memory(stream) => stream.tell(sender).await,
            Self::Agent(follower) => follower.tell(sender).await,
        }
    }
}

async fn memory(keys: &Arc<Keys>, wanted: Wanted) -> Result<LogStream, KeysError> {
    let place = Place::search(keys).await?;
    LogStream::begin(Arc::clone(keys), place, wanted).await
}

/// Reads the fields of a request.
fn read(request: &v1::StreamKernelLogRequest) -> Result<(v1::KernelLogSource, Wanted), KeysError> {
    use v1::stream_kernel_log_request::Start as Given;
    let source = v1::KernelLogSource::try_from(request.source).map_err(|_| {
        let message = format!("unknown source {}; give memory or agent", request.source);
        invalid("source", message)
    })?;
    let max_level = request.max_level.unwrap_or(MAX_LEVEL);
    if max_level > MAX_LEVEL {
        let message = format!("level {max_level} given; give 0 (emergency) to 7 (debug)");
        return Err(invalid("max_level", message));
    }
    let (start, since) = match request.start {
        None => (Start::End, None),
        Some(Given::FirstSeq(0)) => (Start::Oldest, None),
        Some(Given::FirstSeq(first)) => (Start::Seq(first), None),
        Some(Given::Since(since)) => (Start::Oldest, from_proto("since", Some(since), SINCE)?),
    };
    let wanted = Wanted {
        max_level,
        start,
        since,
        no_follow: request.no_follow,
    };
    Ok((source, wanted))
}

/// A position in the kernel log, on one connection of the agent.
pub struct Follower {
    link: AgentLink,
    connection: u64,
    next: u64,
    wanted: Wanted,
}

impl Follower {
    /// Starts at the position that the client requests.
    ///
    /// # Errors
    /// No agent is connected, or the agent does not read the log.
    async fn start(link: AgentLink, wanted: Wanted) -> Result<Self, TraceError> {
        let connection = link.peer()?.connection;
        let mut follower = Self {
            link,
            connection,
            next: 0,
            wanted,
        };
        let end = follower.ask(None).await?.next;
        follower.next = match follower.wanted.start {
            Start::End => end,
            Start::Oldest => 0,
            Start::Seq(first) => first,
        };
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
        // The guest chooses the sequence numbers. The position never goes back, so that the client
        // does not get the same records again.
        self.next = self.next.max(log.next);
        let records = log
            .records
            .into_iter()
            .take(MAX_RECORDS)
            .filter(|record| record.level <= self.wanted.max_level)
            .map(|record| v1::KernelLogRecord {
                level: record.level,
                time: Duration::from_micros(record.time_us).try_into().ok(),
                text: bounded(record.text),
                sequence: record.sequence,
                ..Default::default()
            });
        Ok(v1::StreamKernelLogResponse {
            records: records.collect(),
            lost: log.lost,
            ..Default::default()
        })
    }

    /// Sends records until the client or the agent is gone. With `no_follow`, also ends when the
    /// agent has no more records.
    async fn tell(mut self, sender: &mpsc::Sender<Result<v1::StreamKernelLogResponse, Status>>) {
        let mut message = Ok(v1::StreamKernelLogResponse {
            source: v1::KernelLogSource::Agent.into(),
            ..Default::default()
        });
        loop {
            let ends = message.is_err();
            if sender.send(message).await.is_err() || ends {
                return;
            }
            message = loop {
                let first = self.next;
                tokio::time::sleep(INTERVAL).await;
                match self.records().await {
                    Ok(none) if none.records.is_empty() && none.lost == 0 => {
                        // Records that the filter drops advance the position too. So an unchanged
                        // position means that there are no more records.
                        if self.wanted.no_follow && self.next == first {
                            return;
                        }
                    }
                    Ok(some) => break Ok(some),
                    Err(error) => break Err(TraceError::from(error).into()),
                }
            };
        }
    }
}
