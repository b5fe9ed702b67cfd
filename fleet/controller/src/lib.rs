// SPDX-License-Identifier: Apache-2.0
//! Implements the controller of a fleet. It changes static keys on many guests wave by wave, and
//! can undo the changes.
//!
//! ```text
//!  page ─────┐
//!  api ──▶ controller ──▶ runner ──▶ rollout (a pure state machine)
//!             │   │          │ └───▶ hosts ══▶ patchbay.v1 of each host
//!             │   └ leader   │
//!             └──▶ plan      ├─────▶ gates ══▶ commands, gRPC, Prometheus, agents
//!                            └─────▶ storage ──▶ store (embedded, etcd)
//! ```
#![forbid(unsafe_code)]

// Unit tests share the samples of the tests of processes, which name this crate.
#[cfg(test)]
extern crate self as patchbay_fleet;

pub mod api;
pub mod authority;
pub mod clock;
pub mod controller;
pub mod drift;
pub mod gates;
pub mod hosts;
pub mod inventory;
pub mod leader;
pub mod metrics;
mod names;
pub mod page;
pub mod plan;
pub mod rollout;
pub mod runner;
pub mod scrape;
mod sight;
pub mod spec;
pub mod storage;
mod trusted;
mod view;
pub mod webhooks;

pub use patchbay_store as store;
