// SPDX-License-Identifier: Apache-2.0
//! The parts of a descriptor that depend on the kernel's structures alone. Tests and benchmarks that
//! lay out a kernel of their own use it too.

use crate::abi;

/// Fills in the jump_entry format and the structures' offsets, as of Linux 6.12 on x86-64.
pub fn describe(descriptor: &mut abi::Descriptor) {
    descriptor.entry_format = abi::FORMAT_RELATIVE;
    descriptor.entry_size = 16;
    descriptor.system_state_running = 2;
    descriptor.mutex_owner_mask = !7;
    descriptor.static_key_size = 16;
    descriptor.static_key_type = 8;
    descriptor.static_key_mod_next = 0;
    descriptor.static_key_mod_entries = 8;
    descriptor.static_key_mod_mod = 16;
    descriptor.static_key_mod_size = 24;
    descriptor.tracepoint_name = 0;
    descriptor.tracepoint_key = 8;
    descriptor.tracepoint_regfunc = 24;
    descriptor.tracepoint_unregfunc = 32;
    descriptor.tracepoint_funcs = 40;
    descriptor.tracepoint_size = 64;
}
