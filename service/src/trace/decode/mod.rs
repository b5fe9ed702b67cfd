// SPDX-License-Identifier: Apache-2.0
//! The kernel's binary trace: ring-buffer pages, and events by their format files.
//!
//! All of the data comes from the guest, so lengths and offsets are checked against the available
//! bytes.

mod event;
mod format;

pub use self::event::{Record, context_letters};
pub use self::format::{Format, FormatError};
pub use patchbay_observe::trace::{Page, PageError};
