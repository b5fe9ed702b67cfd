// SPDX-License-Identifier: Apache-2.0
//! The library of `patchbayd`, the daemon that runs once per host in front of all guests of that
//! host.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod attach;
pub mod autopsy;
pub mod command;
pub mod guests;
pub mod metrics;
pub mod monitors;
pub mod proxy;
pub mod registry;
pub mod samples;
pub mod serve;
