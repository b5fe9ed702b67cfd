// SPDX-License-Identifier: Apache-2.0
//! Flips Linux static keys from outside the kernel.
//!
//! A static key is a counter and a set of branch sites in the kernel's text. Each site is a NOP or
//! a JMP, depending on whether the counter is zero. The kernel flips the sites of a running machine
//! with breakpoints and IPIs (`text_poke_bp()`). A hypervisor can stop every vCPU instead and write
//! the bytes. This crate decides which bytes of which sites to write, under which conditions, and
//! what the counter is afterwards. The guest ends up as if it had made the change itself.
//!
//! The crate accesses guest memory through one trait ([`GuestMemory`]). It does not depend on KVM
//! or threads, and reads the clock only for the time in a record:
//!
//! ```text
//! register   Catalog::new, add_module      copies the tables              guest waits
//! plan       Plan::new                     counts, sites, both encodings  guest runs
//!   (stop every vCPU; not needed if !plan.needs_pause())
//! verify     plan.verify                   gates, counts, every byte      guest is stopped
//! commit     plan.commit                   writes, reads back, or undoes  guest is stopped
//!   (resume)
//! ```
//!
//! The rules are tables: [`refcount`] (what an operation does to a count), [`instruction`] (what a
//! site may hold), [`entry`] (how tables are stored) and [`busy`] (when a change is allowed). Their
//! source is kernel/jump_label.c of Linux 6.12.
//!
//! The guest is hostile. Its numbers are copied once and checked. Its tables are bounded
//! ([`ENTRIES_MAX`] and so on), and its pointers are followed a bounded number of times. The crate
//! writes only counts, and a NOP over a JMP or a JMP over a NOP that it computed itself. There are
//! three exceptions: [`instruction::replace`] stores a TEST temporarily, a repair overwrites a
//! mixture of a NOP and a JMP, and [`RecordRing`] receives a record of each change.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod busy;
mod catalog;
mod commit;
mod directory;
pub mod entry;
mod error;
mod gates;
mod inspect;
pub mod instruction;
mod kernel;
mod key;
mod limits;
mod memory;
mod pattern;
mod plan;
mod planner;
mod records;
pub mod refcount;
mod repair;
mod tracepoint;
mod users;
mod verify;

pub use busy::{Busy, Gate};
pub use catalog::Catalog;
pub use commit::{CommitError, CommitOutcome, GateWord, RunningError, Undo, Write, WriteError};
pub use directory::ListedKeys;
pub use entry::{EntryFormat, Image, JumpEntry};
pub use error::CatalogError;
pub use gates::{
    CPUS_MAX, Concerns, GATE_WORDS_MAX, GATES_MAX, GateError, GateKind, Gates, KernelGate,
    ListedGate,
};
pub use inspect::{NotPatchable, SiteState};
pub use instruction::{
    Branch, Hex, Instruction, Nops, OutOfReach, Size, disassemble, recognise_in_file,
};
pub use kernel::{Directory, FoundImage, FoundKernel, FoundKey, Kernel, Layout, Module, Range};
pub use key::{Class, Key, KeyChange, KeyId, split_name};
pub use limits::{ENTRIES_MAX, KEYS_MAX, MODULES_MAX, NAME_MAX};
pub use memory::{
    AccessFault, Exchanged, GuestMemory, LOCATE_MAX, Leading, ReadError, Unmapped, Word,
};
pub use pattern::{MAX_PATTERNS, PatternError, Patterns};
pub use plan::{Options, Plan, PlanError, SiteChange, Update};
pub use records::{RECORDS_MAX, RecordRing, RecordRingError};
pub use refcount::{Op, Refusal, apply, crosses_zero, users as count_users};
pub use repair::mixture;
pub use tracepoint::{Probes, Tracepoint};
pub use verify::VerifyError;
