// SPDX-License-Identifier: Apache-2.0

//! Attacks of a guest on the real monitor with real vCPUs. After each, the monitor still serves a
//! well-behaved guest, its memory has not grown beyond a bound, vCPUs stop on request, only legal
//! sites and counts were written, and the error names the guest's fault.

mod attacks;
mod bare_metal;
