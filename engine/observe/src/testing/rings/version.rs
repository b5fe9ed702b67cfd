// SPDX-License-Identifier: Apache-2.0
//! The layouts of some versions.

use super::super::plain;
use super::ring;
use crate::{Member, Types};

/// A version of the kernel, by the layout of its tracing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// 5.10.
    V5_10,
    /// 6.12.
    V6_12,
    /// 7.3, which also forgets the time of a page that a reader puts back.
    V7_3,
}

impl Types for Version {
    fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
        let is_new = *self != Self::V5_10;
        Some(match (structure, path) {
            ("trace_array", ["list"]) => plain(0, 16),
            ("trace_array", ["events"]) => plain(24, 16),
            ("trace_array", ["name"]) => plain(16, 8),
            ("trace_array", ["array_buffer", "buffer"]) => plain(40, 8),
            ("trace_array", ["clock_id"]) => plain(48, 4),
            ("trace_buffer", ["buffers"]) => plain(24, 8),
            ("trace_buffer", ["subbuf_order"]) if is_new => plain(48, 4),
            ("ring_buffer_per_cpu", ["head_page"]) => plain(ring::HEAD as u32, 8),
            ("ring_buffer_per_cpu", ["commit_page"]) => plain(ring::COMMIT as u32, 8),
            ("ring_buffer_per_cpu", ["reader_page"]) => plain(ring::READER as u32, 8),
            ("ring_buffer_per_cpu", ["entries"]) => plain(ring::ENTRIES as u32, 8),
            ("ring_buffer_per_cpu", ["overrun"]) => plain(ring::OVERRUN as u32, 8),
            ("ring_buffer_per_cpu", ["commits"]) => plain(ring::COMMITS as u32, 8),
            ("ring_buffer_per_cpu", ["committing"]) => plain(ring::COMMITTING as u32, 8),
            ("ring_buffer_per_cpu", ["read"]) => plain(ring::READ as u32, 8),
            ("ring_buffer_per_cpu", ["last_overrun"]) => plain(ring::LAST_OVERRUN as u32, 8),
            ("ring_buffer_per_cpu", ["nr_pages"]) => plain(ring::PAGES as u32, 8),
            ("buffer_page", ["list"]) => plain(0, 16),
            ("buffer_page", ["write"]) => plain(16, 8),
            ("buffer_page", ["read"]) => plain(24, 4),
            ("buffer_page", ["page"]) => plain(48, 8),
            ("buffer_data_page", ["time_stamp"]) => plain(0, 8),
            ("buffer_data_page", ["commit"]) => plain(8, 8),
            ("buffer_data_page", ["data"]) => plain(16, 0),
            ("trace_event_call", ["list"]) => plain(0, 16),
            ("trace_event_call", ["class"]) => plain(16, 8),
            ("trace_event_call", ["name"]) => plain(24, 8),
            ("trace_event_call", ["event", "type"]) => plain(56, 4),
            ("trace_event_call", ["print_fmt"]) => plain(72, 8),
            ("trace_event_call", ["data"]) => plain(80, 8),
            ("trace_event_class", ["system"]) => plain(0, 8),
            ("trace_event_class", ["get_fields"]) => plain(16, 8),
            ("trace_event_class", ["fields"]) => plain(24, 16),
            ("trace_event_file", ["list"]) => plain(0, 16),
            ("trace_event_file", ["event_call"]) => plain(16, 8),
            ("trace_event_file", ["flags"]) => plain(24, 8),
            ("ftrace_event_field", ["link"]) => plain(0, 16),
            ("ftrace_event_field", ["name"]) => plain(16, 8),
            ("ftrace_event_field", ["type"]) => plain(24, 8),
            ("ftrace_event_field", ["offset"]) => plain(32, 4),
            ("ftrace_event_field", ["size"]) => plain(36, 4),
            ("ftrace_event_field", ["is_signed"]) if is_new => Member {
                offset: 40,
                shift: 0,
                width: 1,
                size: None,
            },
            ("ftrace_event_field", ["is_signed"]) => plain(40, 4),
            ("ftrace_event_field", ["len"]) if is_new => plain(44, 4),
            ("syscall_metadata", ["enter_fields"]) => plain(8, 16),
            ("tracepoint", ["name"]) => plain(0, 8),
            _ => return None,
        })
    }

    fn size(&self, structure: &str) -> Option<u32> {
        Some(match structure {
            "trace_array" => 64,
            "trace_buffer" => 64,
            "ring_buffer_per_cpu" => 256,
            "buffer_page" => 56,
            "buffer_data_page" => 16,
            "trace_event_call" => 96,
            "trace_event_class" => 40,
            "trace_event_file" => 40,
            "ftrace_event_field" => 48,
            "tracepoint" => 64,
            _ => return None,
        })
    }
}
