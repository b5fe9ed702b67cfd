// SPDX-License-Identifier: Apache-2.0
//! The commands that the executor thread serves.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::keys::audit::AuditFile;
use crate::keys::claims::{ClaimsOutcome, ClaimsRequest};
use crate::keys::error::KeysError;
use crate::keys::outcome::{HoldView, PauseOutcome, PrepareOutcome, RepairOutcome, UpdateOutcome};
use crate::keys::request::{
    CommitRequest, DiscardRequest, PauseRequest, PrepareRequest, ReleaseRequest, RenewRequest,
    RepairRequest, SaveRequest, UpdateRequest,
};
use crate::trace_id::TraceId;

/// Sender of a command's answer.
pub(in crate::keys) type Reply<T> = oneshot::Sender<Result<T, KeysError>>;

/// A command, and the trace of the call that sent it.
pub(in crate::keys) struct Queued {
    pub trace_id: Option<TraceId>,
    pub command: Command,
}

/// Commands to the executor.
pub(in crate::keys) enum Command {
    Update(Box<UpdateRequest>, Reply<Arc<UpdateOutcome>>),
    Prepare(Box<PrepareRequest>, Reply<Arc<PrepareOutcome>>),
    Commit(Box<CommitRequest>, Reply<Arc<UpdateOutcome>>),
    Discard(DiscardRequest, Reply<()>),
    Release(Box<ReleaseRequest>, Reply<Arc<UpdateOutcome>>),
    Renew(RenewRequest, Reply<Vec<HoldView>>),
    Repair(Box<RepairRequest>, Reply<RepairOutcome>),
    Claim(Box<ClaimsRequest>, Reply<Arc<ClaimsOutcome>>),
    Pause(PauseRequest, Reply<PauseOutcome>),
    Resume(Reply<()>),
    Save(SaveRequest, Reply<Vec<u8>>),
    /// Adopt the ledger of an earlier process.
    Adopt(Reply<()>),
    /// Continue the audit log in this file.
    AuditFile(AuditFile),
    /// Read the clock; answered when nothing is due.
    Tick(Reply<()>),
}
