// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! `patchbay-attach`.
fn main() {}
