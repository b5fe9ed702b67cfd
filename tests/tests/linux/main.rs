// SPDX-License-Identifier: Apache-2.0
//! Tests that boot Linux guests. They are one program, so that their common code is compiled and
//! linked once.
#![forbid(unsafe_code)]

mod boot;
mod ci;
mod counts;
mod debug_file;
mod disk;
mod faults;
mod gates;
mod kernels;
mod kinds;
mod life;
mod series;
mod snapshot;
mod stock;
mod storm;
mod trace;
mod trace_agent;
mod virtio;
