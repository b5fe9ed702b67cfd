// SPDX-License-Identifier: Apache-2.0

//! The seams between the control service and a monitor. A monitor implements them, and knows no
//! static key; the service uses them, and knows no monitor.
//!
//! | seam | the monitor's part |
//! |---|---|
//! | [`memory::Ram`] | the guest's physical memory |
//! | [`guest::Guest::pause`] | stops every vCPU, and tells where each stopped |
//! | [`guest::Machine`] | describes the guest, tells whether it has ended, has its power switch |
//! | [`console::Console`] | the guest's serial console |
//! | [`requests::GuestRequests`] | calls it for each request of the guest's kernel ([`abi`]) |
//! | [`threads::Threads`] | starts the service's threads under the monitor's filters |
//!
//! Beside the seams the crate has what monitors and the service share: page walks ([`paging`]),
//! log files that are reopened ([`log_file`]), and log lines that a guest can cause
//! ([`log_limit`]).
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod abi;
pub mod console;
pub mod guest;
pub mod log_file;
pub mod log_limit;
pub mod memory;
pub mod paging;
pub mod pause;
pub mod requests;
pub mod threads;
