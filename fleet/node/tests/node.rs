// SPDX-License-Identifier: Apache-2.0
//! Tests of the daemon as a process.
#![allow(missing_docs)]

#[path = "node/access.rs"]
mod access;
#[path = "node/attach.rs"]
mod attach;
#[path = "node/fake.rs"]
mod fake;
#[path = "node/guests.rs"]
mod guests;
#[path = "node/log.rs"]
mod log;
#[path = "node/patterns.rs"]
mod patterns;
#[path = "node/persons.rs"]
mod persons;
#[path = "node/records.rs"]
mod records;
#[path = "node/remote.rs"]
mod remote;
#[path = "node/spans.rs"]
mod spans;
#[path = "node/streams.rs"]
mod streams;
#[path = "node/support.rs"]
mod support;
#[path = "node/unit.rs"]
mod unit;
#[path = "node/wrong_ca.rs"]
mod wrong_ca;
