// SPDX-License-Identifier: Apache-2.0
//! Sends the records that a client has asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_observe::log::{Batch, Caller, Record, Start};
use patchbay_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use super::reader::{Place, Reader};
use super::text::printable;
use crate::keys::{Keys, KeysError};

/// Time between two polls after a record.
const BUSY: Duration = Duration::from_millis(5);
/// Maximum time between two polls. Without a record, the time doubles up to this.
const IDLE: Duration = Duration::from_millis(200);
/// For a client that does not follow: the time that the stream waits for a record that is being
/// written, and for a ring buffer that the guest keeps changing.
const STALL: Duration = Duration::from_millis(500);

/// For a client that does not follow: the maximum time that the log is read, without the time in
/// which the client takes the records. A guest that keeps writing may make its newest record at the
/// start have a number that no later record reaches.
const DUMP: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// The records that a client selects.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The least severe level that is sent, 0 to 7.
    pub max_level: u32,
    /// The first record.
    pub start: Start,
    /// Only records that are at most this much older than the newest one.
    pub since: Option<Duration>,
    /// End after the records that exist at the start.
    pub no_follow: bool,
}

/// The bounds of the selection in the log that was found at the start.
#[derive(Clone, Copy, Debug, Default)]
struct Bounds {
    /// Sequence number of the newest record.
    newest: Option<u64>,
    /// Records up to `newest` are left out if they are older than this.
    oldest_time: u64,
}

impl Bounds {
    fn of(wanted: &Wanted, place: &Place) -> Self {
        let newest = place.newest();
        let oldest_time = newest.as_ref().zip(wanted.since).map(|(newest, since)| {
            let since = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
            newest.time.saturating_sub(since)
        });
        Self {
            newest: newest.map(|record| record.seq),
            oldest_time: oldest_time.unwrap_or(0),
        }
    }

    fn admit(&self, record: &Record) -> bool {
        record.time >= self.oldest_time || self.newest.is_none_or(|newest| record.seq > newest)
    }
}

/// A client's view of the log.
pub struct LogStream {
    reader: Reader,
    bounds: Bounds,
    wanted: Wanted,
}

impl LogStream {
    /// Fixes the position in the log.
    ///
    /// # Errors
    /// The log cannot be read.
    pub async fn begin(keys: Arc<Keys>, place: Place, wanted: Wanted) -> Result<Self, KeysError> {
        let begin = tokio::task::spawn_blocking(move || {
            let bounds = Bounds::of(&wanted, &place);
            let reader = Reader::begin(keys, place, wanted.start)?;
            Ok(Self {
                reader,
                bounds,
                wanted,
            })
        });
        begin.await.map_err(failed)?
    }

    /// Sends records until the client disconnects. Without following, ends at the end of the log.
    pub async fn tell(self, sender: &mpsc::Sender<Result<v1::StreamKernelLogResponse, Status>>) {
        let first = v1::StreamKernelLogResponse {
            source: v1::KernelLogSource::Memory.into(),
            ..Default::default()
        };
        if sender.send(Ok(first)).await.is_ok()
            && let Err(error) = self.send(sender).await
        {
            let _ = sender.send(Err(error.into())).await;
        }
    }

    async fn send(
        mut self,
        sender: &mpsc::Sender<Result<v1::StreamKernelLogResponse, Status>>,
    ) -> Result<(), KeysError> {
        // The time since which the guest keeps the next record from being read.
        let mut stalled: Option<Instant> = None;
        // In a dump, records that are not finished are sent last.
        let mut unfinished = false;
        let mut reading = Duration::ZERO;
        loop {
            // Nothing is read until the client has taken the previous records.
            let Ok(permit) = sender.reserve().await else {
                return Ok(());
            };
            let mut message = v1::StreamKernelLogResponse::default();
            let mut rest = BUSY;
            let turn = Instant::now();
            loop {
                let before = self.reader.next_seq();
                let polled = tokio::task::spawn_blocking(move || {
                    let batch = self.reader.poll(unfinished);
                    (self, batch)
                });
                let (polled, batch) = polled.await.map_err(failed)?;
                self = polled;
                let Batch {
                    more,
                    waits,
                    unreadable,
                    ..
                } = batch;
                let advances = !batch.records.is_empty()
                    || batch.lost > 0
                    || batch.restarted
                    || self.reader.next_seq() != before;
                stalled = match advances {
                    true => None,
                    false => stalled.or_else(|| (more || waits).then(Instant::now)),
                };
                self.add(&mut message, batch);
                let is_empty = message.records.is_empty() && message.lost == 0;
                if self.wanted.no_follow {
                    let has_passed = self.has_passed();
                    let is_late = reading + turn.elapsed() >= DUMP;
                    let gives_up = is_late || unfinished && !advances;
                    if has_passed || unreadable || gives_up {
                        if !is_empty {
                            permit.send(Ok(message));
                        }
                        return match has_passed || !(unreadable || more || is_late) {
                            true => Ok(()),
                            false => Err(incomplete()),
                        };
                    }
                    let is_over = !more && !waits;
                    unfinished |= is_over || stalled.is_some_and(|since| since.elapsed() >= STALL);
                }
                if !is_empty || message.restarted {
                    break;
                }
                if !more || !advances {
                    tokio::time::sleep(rest).await;
                    rest = (rest * 2).min(IDLE);
                }
            }
            permit.send(Ok(message));
            reading += turn.elapsed();
        }
    }

    /// Returns whether all records that existed at the start have been read.
    fn has_passed(&self) -> bool {
        let next = self.reader.next_seq();
        let newest = self.bounds.newest;
        next.zip(newest).is_some_and(|(next, newest)| next > newest)
    }

    /// Adds the records of a batch that the client wants.
    fn add(&mut self, message: &mut v1::StreamKernelLogResponse, batch: Batch) {
        if batch.restarted {
            // The bounds apply to the previous log only.
            self.bounds = Bounds::default();
        }
        message.lost = message.lost.saturating_add(batch.lost);
        message.restarted |= batch.restarted;
        let records = batch.records.into_iter();
        let records = records.filter(|record| {
            u32::from(record.level) <= self.wanted.max_level && self.bounds.admit(record)
        });
        message.records.extend(records.map(to_proto));
    }
}

fn incomplete() -> KeysError {
    KeysError::NotRegistered {
        why: "the log was not read to its end: another kernel runs in the guest, or the guest changes its log all the time; try again".to_owned(),
    }
}

fn to_proto(record: Record) -> v1::KernelLogRecord {
    v1::KernelLogRecord {
        level: record.level.into(),
        time: Duration::from_nanos(record.time).try_into().ok(),
        text_lost: record.text.is_none(),
        text: printable(&record.text.unwrap_or_default()),
        sequence: record.seq,
        facility: record.facility.into(),
        caller: Some(match record.caller {
            Caller::Task(pid) => v1::kernel_log_record::Caller::Task(pid),
            Caller::Cpu(cpu) => v1::kernel_log_record::Caller::Cpu(cpu),
        }),
        subsystem: printable(&record.subsystem),
        device: printable(&record.device),
        continues: record.continues,
        unfinished: !record.finished,
    }
}

fn failed(error: tokio::task::JoinError) -> KeysError {
    KeysError::Internal {
        message: format!("the kernel's log cannot be read: {error}; report it, it is a bug"),
    }
}
