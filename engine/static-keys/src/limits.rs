// SPDX-License-Identifier: Apache-2.0
//! Limits of what a guest may register.

/// The maximum number of jump entries of a guest, modules included. Images of distribution kernels
/// have 4,000 to 12,000.
pub const ENTRIES_MAX: usize = 1 << 20;
/// The maximum number of keys of a guest, modules included.
pub const KEYS_MAX: usize = 1 << 17;
/// The maximum number of modules of a guest.
pub const MODULES_MAX: usize = 4096;
/// The maximum length of a key's name, in bytes.
pub const NAME_MAX: usize = 540;
/// Size of a directory record in bytes.
pub(crate) const RECORD_SIZE: usize = 32;
/// The maximum size of a directory record in bytes. The records of a newer guest may have
/// additional fields, which are ignored.
pub(crate) const RECORD_SIZE_MAX: usize = 2 * RECORD_SIZE;
/// The maximum size of the names block, in bytes. It also bounds the total length of an image's
/// names, because names may overlap in the block.
pub(crate) const NAMES_SIZE_MAX: u32 = 16 << 20;
