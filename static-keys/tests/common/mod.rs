// SPDX-License-Identifier: Apache-2.0
//! A guest made of numbers: pages in any order, and a kernel's keys, sites, tables and modules
//! written into them the way the kernel would have them.

#![allow(dead_code, reason = "each test file uses its own part of it")]

pub mod memory;
pub mod world;
