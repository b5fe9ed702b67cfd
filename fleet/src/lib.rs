// SPDX-License-Identifier: Apache-2.0
//! The controller of a fleet.
#![forbid(unsafe_code)]

pub mod rollout;
pub mod spec;
pub mod store;
