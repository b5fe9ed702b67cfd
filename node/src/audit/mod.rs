// SPDX-License-Identifier: Apache-2.0
//! Who changed what, and who tried: the log file, the thread that writes it, and reports from it.

mod log;
mod report;
mod writer;

pub use self::log::{AuditError, AuditLog, Chain, Entry, Record, verify};
pub use self::report::{Change, changes, show};
pub use self::writer::{Audit, Pending};
