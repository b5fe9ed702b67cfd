// SPDX-License-Identifier: Apache-2.0
//! Records who changed what, and who tried to. The modules contain the log file, the thread that
//! writes it, and the reports from it.

mod chain;
mod log;
mod record;
mod report;
mod writer;

pub use self::chain::{AuditError, Chain, Torn, verify};
pub use self::log::AuditLog;
pub use self::record::{Entry, Record};
pub use self::report::{Change, changes, show};
pub use self::writer::{Audit, Pending};
