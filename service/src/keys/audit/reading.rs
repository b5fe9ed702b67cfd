// SPDX-License-Identifier: Apache-2.0
//! Records that a client reads the guest's log or events.

use serde::Serialize;

use super::{AuditLog, AuditOutcome, Body};
use crate::keys::error::KeysError;
use crate::trace_id;

/// A client that is about to read records.
#[derive(Debug, Serialize)]
pub struct Reader {
    /// The principal: "uid:N", or a name that the host's daemon asserts.
    pub owner: String,
    /// The person for whom the principal reads, according to the host's daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub person: Option<String>,
    /// "kernel log", "trace events" or "snapshot".
    pub reads: &'static str,
    /// The tracefs instance of the events; empty for the top level and for the log.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub instance: String,
}

impl Body for Reader {}

/// A client's reading, whose start is in the audit log. Its end is written when this is dropped.
#[derive(Debug)]
pub struct Reading(Option<End>);

/// The outcome of a [`Reading`], which is written when this is dropped.
#[derive(Debug)]
struct End {
    audit: AuditLog,
    id: u64,
    records: u64,
    bytes: u64,
    /// The reason why the stream was not opened.
    refused: Option<(&'static str, String)>,
    /// The error that ended the stream.
    error: Option<String>,
}

impl Reading {
    /// Writes the start and syncs it to the disk, on a thread that may block.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: nothing may be read.
    pub async fn begin(mut audit: AuditLog, reader: Reader) -> Result<Self, KeysError> {
        audit.set_trace(trace_id::current());
        let written = tokio::task::spawn_blocking(move || {
            let id = audit.promise("reading", &reader)?;
            Ok(Self(Some(End {
                audit,
                id,
                records: 0,
                bytes: 0,
                refused: None,
                error: None,
            })))
        });
        written.await.map_err(|error| KeysError::Internal {
            message: format!("the audit log is not written: {error}; report it, it is a bug"),
        })?
    }

    /// Counts a message that is sent to the client.
    pub fn count(&mut self, records: usize, bytes: usize) {
        if let Some(end) = &mut self.0 {
            end.records = end.records.saturating_add(records as u64);
            end.bytes = end.bytes.saturating_add(bytes as u64);
        }
    }

    /// Notes why the stream is not opened.
    pub fn fail(&mut self, reason: &'static str, message: String) {
        if let Some(end) = &mut self.0 {
            end.refused = Some((reason, message));
        }
    }

    /// Notes the error that ends the stream.
    pub fn end_with(&mut self, error: &str) {
        if let Some(end) = &mut self.0 {
            end.error = Some(error.to_owned());
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // Writing may block, for example on a full pipe. If the runtime drops this task without
        // running it, dropping it writes the outcome.
        let end = self.0.take();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(end));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let outcome = match self.refused.take() {
            Some((reason, error)) => AuditOutcome::Failed { reason, error },
            None => AuditOutcome::Read {
                records: self.records,
                bytes: self.bytes,
                error: self.error.take(),
            },
        };
        self.audit.outcome(self.id, &outcome);
    }
}
