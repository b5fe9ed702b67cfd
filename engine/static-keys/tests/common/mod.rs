// SPDX-License-Identifier: Apache-2.0
//! A synthetic guest: pages in any order, with a kernel's keys, sites, tables and modules written
//! the way the kernel lays them out.

#![allow(dead_code, reason = "each test file uses its own part of it")]

pub mod memory;
pub mod world;
