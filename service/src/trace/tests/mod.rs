// SPDX-License-Identifier: Apache-2.0
//! The monitor's side against an agent and keys that are made up.

mod agent;
mod fake;
mod hostile;
mod kernel_log;
mod memory;
mod mute;
mod permission;
mod streams;
mod tracing;
mod ttl;
