// SPDX-License-Identifier: Apache-2.0
//! The kernel's binary trace: ring-buffer pages, and events by their format files.
//!
//! All of it comes from the guest: lengths and offsets are checked against what there is.

mod event;
mod format;
mod page;

pub use self::event::{Record, context_letters};
pub use self::format::{Format, FormatError};
pub use self::page::{Page, PageError};
