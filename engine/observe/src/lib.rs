// SPDX-License-Identifier: Apache-2.0
//! Reads what a running Linux kernel records in its own memory: its log ([`log`]), its taints,
//! load, uptime, warnings and pressure ([`state`]), the tasks of its CPUs ([`tasks`]), and its
//! trace events ([`trace`]).
//!
//! The crate does no I/O and starts no thread. It reads through a [`KernelView`], while the kernel
//! runs, is stopped, or has panicked. The kernel owns every pointer and every length that is read:
//! each number is read once and bounded, each walk has a maximum length, and after a failed read
//! the reader searches for its position again.
//!
//! The kernel's writers run concurrently and do not wait for a reader. After each copy, a reader
//! therefore checks that the kernel has not replaced the original meanwhile. The checks need loads
//! in program order: the readers separate them by acquire fences, and an implementation of
//! [`KernelView`] must neither read ahead nor cache.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod bounded;
mod fields;
pub mod log;
pub mod state;
pub mod tasks;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod trace;

pub use self::bounded::Bounded;

/// The virtual memory of a kernel.
pub trait KernelView {
    /// Copies `bytes.len()` bytes, beginning at a kernel-virtual address. Returns false if any of
    /// them cannot be read. The contents of `bytes` are then unspecified.
    #[must_use]
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;
}

/// The types of a kernel, from BTF or DWARF.
pub trait Types {
    /// Returns a member of a structure. Each further name in `path` names a member of the previous
    /// member.
    fn member(&self, structure: &str, path: &[&str]) -> Option<Member>;

    /// Returns the size of a structure in bytes.
    fn size(&self, structure: &str) -> Option<u32>;
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Offset in bytes, rounded down for a bit field.
    pub offset: u32,
    /// Number of bits between `offset` and the start of a bit field.
    pub shift: u32,
    /// Width of a bit field in bits; 0 for other members.
    pub width: u32,
    /// Size in bytes; `None` if it is unknown.
    pub size: Option<u32>,
}

/// Returns the little-endian number of up to 8 bytes at an offset; `None` if it is not within
/// `bytes`.
fn number(bytes: &[u8], offset: u32, size: usize) -> Option<u64> {
    let part = bytes.get(offset as usize..)?.get(..size)?;
    let mut word = [0; 8];
    word.get_mut(..size)?.copy_from_slice(part);
    Some(u64::from_le_bytes(word))
}

/// Copies bytes from an address on.
fn copy(view: &(impl KernelView + ?Sized), address: u64, size: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; size];
    view.read(address, &mut bytes).then_some(bytes)
}

/// Reads the little-endian 64-bit word at an address.
fn word(view: &(impl KernelView + ?Sized), address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    view.read(address, &mut bytes)
        .then(|| u64::from_le_bytes(bytes))
}
