// SPDX-License-Identifier: Apache-2.0
//! The interface between the control service and a monitor, in the form of traits ("seams"). A
//! monitor implements them without any knowledge of static keys. The service uses them without any
//! knowledge of a particular monitor.
//!
//! | seam | the monitor's part |
//! |---|---|
//! | [`memory::Ram`] | reads and writes the guest's physical memory |
//! | [`guest::Guest::pause`] | stops every vCPU and returns where each stopped |
//! | [`guest::Machine`] | describes the guest, says whether it has ended, and ends it |
//! | [`console::Console`] | connects the guest's serial console |
//! | [`discovery::Discoverable`] | returns the registers of the vCPUs and counts resets |
//! | [`requests::GuestRequests`] | calls the handler for each request of the guest ([`abi`]) |
//! | [`guest::Guest::save`] | saves the stopped guest ([`snapshot`]) |
//! | [`threads::Threads`] | starts the service's threads under the monitor's filters |
//!
//! With the feature `testing`, the module `testing` has a guest in memory, and a conformance suite
//! that every implementation of the seams must pass.
//!
//! The crate also contains the address space of a guest's kernel ([`kernel_memory`]), log files
//! that are reopened ([`log_file`]) and a limit for log lines that a guest can cause
//! ([`log_limit`]).
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod abi;
pub mod console;
pub mod discovery;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod guest;
pub mod kernel_memory;
pub mod log_file;
pub mod log_limit;
pub mod memory;
pub mod pause;
pub mod requests;
pub mod snapshot;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
