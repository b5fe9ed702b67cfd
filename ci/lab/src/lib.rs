// SPDX-License-Identifier: Apache-2.0
//! Runs commands in the lab, an emulated computer with working KVM that sees this machine's files.
//!
//! [`machine::run`] runs one command in it. QEMU emulates a CPU with AMD's SVM, so Linux guests run
//! under KVM there on any host, at a fraction of its speed. The lab needs the Debian packages
//! [`packages::LAB`] and downloads a kernel package once. It needs root only to install packages
//! that are missing. Everything that it keeps is in the user's cache, [`cache::root`].
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
