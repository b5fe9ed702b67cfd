// SPDX-License-Identifier: Apache-2.0
//! The parts of a descriptor that depend only on the kernel's structures, and its gates. Tests and
//! benchmarks with a kernel layout of their own use them too.

use std::mem::size_of;

use static_keys::Concerns;

use crate::abi;

const GATE_BYTES: u32 = size_of::<abi::Gate>() as u32;
const KEY_BYTES: u32 = size_of::<abi::Key>() as u32;

/// A gate word that the host reads while the guest is stopped. The words are 8 bytes apart, in this
/// order.
#[derive(Clone, Copy, Debug)]
pub enum Gate {
    /// 0 while booting, 2 when running.
    SystemState,
    /// Owner word of jump_label_mutex.
    JumpLabelMutex,
    /// Owner word of text_mutex.
    TextMutex,
    /// Owner word of tracepoints_mutex.
    TracepointsMutex,
    /// Queued text pokes.
    TextPokeQueue,
    /// References to the text poke in progress.
    TextPoke,
}

impl Gate {
    /// Returns the address of the word, if the first word is at `words`.
    pub fn address(self, words: u64) -> u64 {
        words + 8 * self as u64
    }
}

/// Returns a directory of [`abi::Key`] in the layout of this version.
pub fn directory(keys: u64, key_count: u32, names: u64, names_size: u32) -> abi::Directory {
    abi::Directory {
        keys,
        names,
        key_count,
        names_size,
        key_size: KEY_BYTES,
        reserved: 0,
    }
}

/// Returns a gate that is open while the 8-byte word at `address` is 0.
pub fn gate(kind: u32, name: &str, address: u64, concerns: Concerns) -> abi::Gate {
    let mut gate = abi::Gate {
        address,
        mask: u64::MAX,
        kind,
        concerns: concerns.0,
        width: 8,
        ..abi::Gate::default()
    };
    gate.name[..name.len()].copy_from_slice(name.as_bytes());
    gate
}

/// Returns the gates of Linux 6.12, in the order of [`Gate`], with the first word at `words`.
pub fn gates(words: u64) -> [abi::Gate; 6] {
    let mutex = |kind, name, word: Gate, concerns| abi::Gate {
        mask: !7,
        ..gate(kind, name, word.address(words), concerns)
    };
    let word = |kind, name, word: Gate, concerns, wanted| abi::Gate {
        mask: u32::MAX.into(),
        wanted,
        width: 4,
        ..gate(kind, name, word.address(words), concerns)
    };
    [
        word(
            abi::GATE_SYSTEM_STATE,
            "system_state",
            Gate::SystemState,
            Concerns::COUNTS,
            2,
        ),
        mutex(
            abi::GATE_JUMP_LABEL_MUTEX,
            "jump_label_mutex",
            Gate::JumpLabelMutex,
            Concerns::SITES,
        ),
        mutex(
            abi::GATE_TEXT_MUTEX,
            "text_mutex",
            Gate::TextMutex,
            Concerns::SITES,
        ),
        mutex(
            abi::GATE_TRACEPOINTS_MUTEX,
            "tracepoints_mutex",
            Gate::TracepointsMutex,
            Concerns::TRACEPOINT,
        ),
        word(
            abi::GATE_TEXT_POKE_QUEUE,
            "tp_vec_nr",
            Gate::TextPokeQueue,
            Concerns::SITES,
            0,
        ),
        word(
            abi::GATE_TEXT_POKE,
            "bp_desc.refs",
            Gate::TextPoke,
            Concerns::SITES,
            0,
        ),
    ]
}

/// Sets the jump_entry format and the structures' offsets to those of Linux 6.12 on x86-64.
pub fn describe(descriptor: &mut abi::Descriptor) {
    descriptor.entry_format = abi::FORMAT_RELATIVE;
    descriptor.entry_size = 16;
    descriptor.gate_size = GATE_BYTES;
    descriptor.static_key_type = 8;
    descriptor.static_key_mod_next = 0;
    descriptor.static_key_mod_entries = 8;
    descriptor.static_key_mod_mod = 16;
    descriptor.tracepoint_key = 8;
    descriptor.tracepoint_funcs = 40;
}
