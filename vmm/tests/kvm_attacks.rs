// SPDX-License-Identifier: Apache-2.0

//! Attacks of a guest on its monitor: the real one, with real vCPUs. After each, the monitor lives and
//! serves a guest that follows the rules, its memory has not grown beyond a bound, vCPUs stop when they
//! are told, nothing but legal sites and counts was written, and the error names the guest's fault.

mod attacks;
mod bare_metal;
