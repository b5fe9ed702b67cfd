// SPDX-License-Identifier: Apache-2.0
//! Discovery: finds the static keys of a running kernel in its memory, if the kernel does not
//! register them.
//!
//! ```text
//! vCPU ──▶ page table ──▶ image ──▶ kallsyms, BTF ──▶ gates
//!   ──▶ modules, jump tables ──▶ keys, classes, names ──▶ gates again
//! ```
//!
//! The guest may run or be stopped. Its memory is not trusted: it is copied once, page by page,
//! every address is checked, and every list has a maximum length. A kernel with false tables harms
//! only itself, because a discovery yields only words and sites of the guest's own memory.
//!
//! A [`DebugFile`] of the host supplies what a kernel does not reveal: data symbols without
//! CONFIG_KALLSYMS_ALL, and structures without CONFIG_DEBUG_INFO_BTF.
//!
//! A discovery fails unless every entry of every jump table is valid. Modules that are not live are
//! left out and listed in [`Kernel::left_out`]. A guest that boots or changes its modules yields
//! [`DiscoveryError::Busy`], and the caller tries again later.

mod contents;
mod debug_file;
mod debug_folder;
mod error;
mod finder;
mod found;
mod functions;
mod gates;
mod kernel;
mod layout;
mod locate;
mod memory;
mod modules;
mod names;
mod note;
mod parts;
mod tables;
mod vcpus;

pub use debug_file::{DebugFile, DebugFileError, FileUse};
pub use debug_folder::{DebugFiles, DebugFolder};
pub use error::DiscoveryError;
pub use finder::{Finder, discover};
pub use functions::{EVENT_PROBES, Functions, TASK_NAME_PROBES};
pub use kernel::{Evidence, ImageTables, Kernel, Log, NoteFound, ObservedKey, Way};
pub use layout::Layout;
pub use modules::LeftOut;
pub use parts::Part;
pub use tables::Site;
