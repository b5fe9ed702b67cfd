// SPDX-License-Identifier: Apache-2.0
//! Tests of the monitor's side, with a fake agent and fake keys.

mod agent;
mod armed_in_guest;
mod fake;
mod hostile;
mod idle;
mod kernel_log;
mod memory;
mod mute;
mod permission;
mod streams;
mod tracing;
mod ttl;
