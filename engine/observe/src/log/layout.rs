// SPDX-License-Identifier: Apache-2.0
//! The layout of the log's structures, from a kernel's own types.
//!
//! | kernel | last member of `prb_desc_ring` | size of `printk_info` |
//! |---|---|---|
//! | 5.10 | `tail_id` | 88 |
//! | 6.1 | `last_finalized_id` | 88 |
//! | 6.12 | `last_finalized_seq` | 88 |
//! | 7.3 | `last_finalized_seq` | 112 |
//!
//! No reader needs the members that differ.

use crate::Types;
use crate::fields::{Field, Name, Structure};

/// The symbol of the pointer to the ring.
pub const SYMBOL: &str = "prb";

/// Every type that [`Layout::read`] looks up.
pub const TYPES: &[&str] = &[
    "dev_printk_info",
    "prb_data_blk_lpos",
    "prb_data_ring",
    "prb_desc",
    "prb_desc_ring",
    "printk_info",
    "printk_ringbuffer",
];

/// The layout of a kernel's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(super) ring: RingLayout,
    pub(super) descriptor: DescriptorLayout,
    pub(super) info: InfoLayout,
}

/// `struct printk_ringbuffer`, with the members of the two rings in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingLayout {
    pub size: usize,
    pub count_bits: Field,
    pub descriptors: Field,
    pub infos: Field,
    pub head: Field,
    pub tail: Field,
    pub text_bits: Field,
    pub text: Field,
    /// `fail`, the number of records for which a writer found no room.
    pub refused: Option<Field>,
}

/// `struct prb_desc`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DescriptorLayout {
    pub size: usize,
    pub state: Field,
    pub begin: Field,
    pub next: Field,
}

/// `struct printk_info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InfoLayout {
    pub size: usize,
    pub seq: Field,
    pub time: Field,
    pub text_length: Field,
    pub facility: Field,
    pub flags: Field,
    pub level: Field,
    pub caller: Field,
    pub subsystem: Name,
    pub device: Name,
}

impl Layout {
    /// Reads the layout from a kernel's types.
    ///
    /// # Errors
    /// A sentence that names the structure or member that is missing or implausible. Kernels before
    /// 5.10 have none of them.
    pub fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let ring = Structure::new(types, "printk_ringbuffer")?;
        let descriptor = Structure::new(types, "prb_desc")?;
        let info = Structure::new(types, "printk_info")?;
        let descriptors = |name, size| ring.field(&["desc_ring", name], size);
        let texts = |name, size| ring.field(&["text_data_ring", name], size);
        Ok(Self {
            ring: RingLayout {
                size: ring.size as usize,
                count_bits: descriptors("count_bits", 4)?,
                descriptors: descriptors("descs", 8)?,
                infos: descriptors("infos", 8)?,
                head: descriptors("head_id", 8)?,
                tail: descriptors("tail_id", 8)?,
                text_bits: texts("size_bits", 4)?,
                text: texts("data", 8)?,
                refused: ring.field(&["fail"], 8).ok(),
            },
            descriptor: DescriptorLayout {
                size: descriptor.size as usize,
                state: descriptor.field(&["state_var"], 8)?,
                begin: descriptor.field(&["text_blk_lpos", "begin"], 8)?,
                next: descriptor.field(&["text_blk_lpos", "next"], 8)?,
            },
            info: InfoLayout {
                size: info.size as usize,
                seq: info.field(&["seq"], 8)?,
                time: info.field(&["ts_nsec"], 8)?,
                text_length: info.field(&["text_len"], 2)?,
                facility: info.field(&["facility"], 1)?,
                flags: info.field(&["flags"], 1)?,
                level: info.field(&["level"], 1)?,
                caller: info.field(&["caller_id"], 4)?,
                subsystem: info.name(&["dev_info", "subsystem"])?,
                device: info.name(&["dev_info", "device"])?,
            },
        })
    }
}
