// SPDX-License-Identifier: Apache-2.0
//! Crafted images of every format, hostile ones, and stock kernels.

mod craft;
mod distro;
mod formats;
mod hostile;
mod kallsyms;
