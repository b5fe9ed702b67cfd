// SPDX-License-Identifier: Apache-2.0
//! The one thread that writes the log. Intents that arrive together share a sync.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::log::{AuditLog, Entry};

/// Denied calls that are written in one go, and afterwards one each interval: whoever may connect must
/// not be able to fill the disk.
const DENIED_BURST: u32 = 100;
const DENIED_INTERVAL: Duration = Duration::from_millis(200);
/// A message of an outcome is cut to this many bytes.
const MAX_MESSAGE_BYTES: usize = 4096;

enum Line {
    Intent {
        entry: Entry,
        done: oneshot::Sender<Result<u64, String>>,
    },
    Outcome {
        id: u64,
        code: String,
        message: String,
    },
    Denied(Entry),
    Flush(oneshot::Sender<()>),
}

/// The log, for all calls.
#[derive(Clone)]
pub struct Audit {
    lines: mpsc::UnboundedSender<Line>,
    denied: Arc<Mutex<Denied>>,
    records: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
}

struct Denied {
    left: u32,
    since: Instant,
    unwritten: u64,
}

impl Audit {
    /// Starts the thread. It ends, and the log is closed, when the last clone and the last
    /// [`Pending`] are dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(log: AuditLog) -> std::io::Result<Self> {
        let (lines, receiver) = mpsc::unbounded_channel();
        let records = Arc::new(AtomicU64::new(log.records() as u64));
        let failures = Arc::new(AtomicU64::new(0));
        let audit = Self {
            lines,
            denied: Arc::new(Mutex::new(Denied {
                left: DENIED_BURST,
                since: Instant::now(),
                unwritten: 0,
            })),
            records: Arc::clone(&records),
            failures: Arc::clone(&failures),
        };
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || {
                Writer {
                    log,
                    records,
                    failures,
                }
                .run(receiver);
            })?;
        Ok(audit)
    }

    /// Writes an intent, and answers when it is on the disk.
    ///
    /// # Errors
    /// Why it could not be written: the change must not be made.
    pub async fn intend(&self, entry: Entry) -> Result<Pending, String> {
        let (done, written) = oneshot::channel();
        let ended = || "the thread that writes the audit log has ended".to_owned();
        self.lines
            .send(Line::Intent { entry, done })
            .map_err(|_| ended())?;
        // Whoever stops to wait leaves an intent without an outcome, and no change.
        let id = written.await.map_err(|_| ended())??;
        Ok(Pending {
            id: Some(id),
            lines: self.lines.clone(),
        })
    }

    /// Writes that a call was denied, unless there are too many of them.
    pub fn denied(&self, principal: &str, method: &str, guest: &str, why: &str) {
        let mut denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(unwritten) = denied.admit(Instant::now()) else {
            return;
        };
        let _ = self.lines.send(Line::Denied(Entry::Denied {
            principal: principal.to_owned(),
            method: method.to_owned(),
            guest: cut(guest, 256),
            why: cut(why, MAX_MESSAGE_BYTES),
            unwritten,
        }));
    }

    /// Waits until what was said before is written.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.lines.send(Line::Flush(done)).is_ok() {
            let _ = flushed.await;
        }
    }

    /// Lines in the log.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Writes that failed since the start.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl Denied {
    /// How many went unwritten before this one; `None` if this one does as well.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.since).as_millis();
        let earned = u32::try_from(passed / DENIED_INTERVAL.as_millis()).unwrap_or(u32::MAX);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(DENIED_BURST);
            self.since = now;
        }
        if self.left == 0 {
            self.unwritten += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.unwritten))
    }
}

/// An intent that waits for its outcome. Dropping it without one writes that the client left.
#[derive(Debug)]
pub struct Pending {
    id: Option<u64>,
    lines: mpsc::UnboundedSender<Line>,
}

impl Pending {
    /// Writes what became of it.
    pub fn finish(mut self, code: &str, message: &str) {
        self.end(code, message);
    }

    fn end(&mut self, code: &str, message: &str) {
        if let Some(id) = self.id.take() {
            let _ = self.lines.send(Line::Outcome {
                id,
                code: code.to_owned(),
                message: cut(message, MAX_MESSAGE_BYTES),
            });
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.end(
            "CANCELLED",
            "the client left before the answer; the monitor's audit log has the outcome",
        );
    }
}

struct Writer {
    log: AuditLog,
    records: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
}

impl Writer {
    fn run(mut self, mut lines: mpsc::UnboundedReceiver<Line>) {
        while let Some(first) = lines.blocking_recv() {
            let mut written = vec![];
            let mut next = Some(first);
            while let Some(line) = next {
                self.write(line, &mut written);
                next = lines.try_recv().ok();
            }
            let synced = if written.is_empty() {
                Ok(())
            } else {
                self.log.sync().map_err(|error| self.failed(&error))
            };
            self.records
                .store(self.log.records() as u64, Ordering::Relaxed);
            for (done, id) in written {
                let _ = done.send(synced.clone().map(|()| id));
            }
        }
    }

    fn write(
        &mut self,
        line: Line,
        written: &mut Vec<(oneshot::Sender<Result<u64, String>>, u64)>,
    ) {
        match line {
            Line::Intent { entry, done } => match self.log.intent(entry) {
                Ok(id) => written.push((done, id)),
                Err(error) => {
                    let _ = done.send(Err(self.failed(&error)));
                }
            },
            Line::Outcome { id, code, message } => {
                if let Err(error) = self.log.outcome(id, &code, &message) {
                    self.failed(&error);
                }
            }
            Line::Flush(done) => {
                let _ = done.send(());
            }
            Line::Denied(entry) => {
                if let Err(error) = self.log.intent(entry) {
                    self.failed(&error);
                }
            }
        }
    }

    fn failed(&self, error: &super::AuditError) -> String {
        self.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(%error, "the audit log cannot be written; no change is made until it can");
        error.to_string()
    }
}

fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let mut end = bytes;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::verify;

    fn intent(guest: &str) -> Entry {
        Entry::Intent {
            principal: "uid:0".to_owned(),
            method: "/patchbay.v1.GuestService/PauseGuest".to_owned(),
            guest: guest.to_owned(),
            rule: "on-call".to_owned(),
            request: "{}".to_owned(),
            trace_id: String::new(),
        }
    }

    /// Entries in the log once `audit` is closed.
    fn entries(path: &std::path::Path) -> Vec<(u64, Entry)> {
        let mut entries = vec![];
        verify(path, |record| {
            entries.push((record.id, record.entry.clone()))
        })
        .expect("whole");
        entries
    }

    #[tokio::test]
    async fn an_intent_is_in_the_file_before_the_call_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
        let first = audit.intend(intent("a")).await.expect("written");
        assert_eq!(entries(&path), [(0, intent("a"))]);
        let second = audit.intend(intent("b")).await.expect("written");
        drop(second);
        first.finish("OK", "1 key");
        // The next intent comes after both outcomes.
        let third = audit.intend(intent("c")).await.expect("written");
        let found = entries(&path);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(matches!(&found[2], (1, Entry::Outcome { code, .. }) if code == "CANCELLED"));
        assert!(matches!(&found[3], (0, Entry::Outcome { code, .. }) if code == "OK"));
        assert_eq!(audit.records(), 5);
        drop(third);
    }

    #[test]
    fn denied_calls_cannot_fill_the_disk() {
        let start = Instant::now();
        let mut denied = Denied {
            left: DENIED_BURST,
            since: start,
            unwritten: 0,
        };
        let burst = (0..1000).filter(|_| denied.admit(start).is_some()).count();
        assert_eq!(burst, 100);
        assert_eq!(denied.admit(start + DENIED_INTERVAL), Some(900));
        assert_eq!(denied.admit(start + DENIED_INTERVAL), None);
        assert_eq!(denied.admit(start + 3 * DENIED_INTERVAL), Some(1));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("ääää", 4), "ää…");
        assert_eq!(cut("ääää", 5), "ää…");
        assert_eq!(cut("ää", 4), "ää");
    }
}
