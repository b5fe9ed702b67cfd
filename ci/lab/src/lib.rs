// SPDX-License-Identifier: Apache-2.0
//! Runs commands in the lab, an emulated computer with working KVM that sees this machine's files.
//!
//! [`machine::run`] runs one command in the lab. QEMU emulates a CPU with AMD's SVM, so KVM runs
//! Linux guests in the lab on any host, but much more slowly than on the host's own KVM. The lab
//! needs the Debian packages [`packages::LAB`] and downloads a kernel package once. It needs root
//! only to install packages that are missing. Everything that it keeps is in the user's cache,
//! [`cache::root`].
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod cache;
pub mod cpio;
pub mod image;
pub mod kvm;
pub mod machine;
pub mod modules;
pub mod packages;
pub mod shell;
pub mod step;
mod terminal;
