// SPDX-License-Identifier: Apache-2.0
//! The guest's own readers of its rings.

use super::{CAPACITY, DATA, MAX_PAGES, Version, Writer, ring};

/// The flags of `commit` on a page before which events were lost.
const MISSED_EVENTS: u64 = 1 << 31;
const MISSED_STORED: u64 = 1 << 30;

impl Writer {
    /// Takes all events of the reader page, or exchanges it for the head (`rb_get_reader_page()`).
    /// Returns false if there is nothing to take.
    pub fn consume(&mut self, cpu: usize) -> bool {
        let ring = &mut self.rings[cpu];
        let reader = ring.reader;
        let page = &mut ring.pages[reader];
        if page.consumed < page.written {
            page.consumed = page.written;
            ring.read += page.entries - page.consumed_entries;
            page.consumed_entries = page.entries;
            let (consumed, read) = (page.consumed as u64, ring.read);
            self.put_header_word(cpu, ring::READ, read);
            self.put(self.page(cpu, reader) + 24, consumed);
            return true;
        }
        if ring.commit == reader || ring.entries == ring.overrun + ring.read {
            return false;
        }
        self.exchange(cpu);
        true
    }

    fn exchange(&mut self, cpu: usize) {
        let ring = &mut self.rings[cpu];
        let (old, before) = (ring.reader, ring.before_head);
        let head = ring.pages[before].next;
        let after = ring.pages[head].next;
        let page = &mut ring.pages[old];
        page.clear();
        page.generation = 0;
        (page.next, page.previous) = (after, before);
        let data = page.data;
        ring.pages[before].next = old;
        ring.pages[after].previous = old;
        ring.before_head = old;
        ring.reader = head;
        ring.head_hint = after;
        ring.missed = ring.overrun - ring.last_overrun;
        ring.last_overrun = ring.overrun;
        ring.pages[head].consumed = 0;
        let (address, overrun) = (ring.address, ring.overrun);
        let old_page = self.page(cpu, old);
        self.put(old_page + 16, 0);
        self.put(old_page + 24, 0);
        self.put(data + 8, 0);
        if self.version == Version::V7_3 {
            self.put(data, 0);
        }
        self.put_links(cpu, old);
        self.put_links(cpu, before);
        self.put_links(cpu, after);
        let (head_page, after_page) = (self.page(cpu, head), self.page(cpu, after));
        self.put(address + ring::HEAD, after_page);
        self.put(address + ring::READER, head_page);
        self.put(head_page + 24, 0);
        self.put(address + ring::LAST_OVERRUN, overrun);
    }

    /// Exchanges the data page of the reader page for an empty one, as `trace_pipe_raw` does.
    pub fn take_data(&mut self, cpu: usize) {
        self.consume(cpu);
        let ring = &mut self.rings[cpu];
        let page = &mut ring.pages[ring.reader];
        let spare = DATA + ((cpu as u64 + 1) * MAX_PAGES - 1) * 4096;
        page.data = spare;
        page.clear();
        let reader = self.page(cpu, self.rings[cpu].reader);
        self.put(spare, 0);
        self.put(spare + 8, 0);
        self.put(reader + 48, spare);
        self.put(reader + 16, 0);
    }

    /// Takes events as [`Self::consume`] does, for a process that has mapped the ring
    /// (`ring_buffer_map_get_reader()`). If events were lost before the reader page, the page is
    /// flagged, and their number replaces its padding.
    pub fn consume_mapped(&mut self, cpu: usize) -> bool {
        let taken = self.consume(cpu);
        let ring = &mut self.rings[cpu];
        let missed = std::mem::take(&mut ring.missed);
        if missed == 0 || ring.commit == ring.reader {
            return taken;
        }
        let page = &mut ring.pages[ring.reader];
        if page.end > 0 {
            page.written = page.end;
        }
        let (data, length) = (page.data, page.written);
        let mut commit = length as u64;
        self.put(data + 8, commit);
        if CAPACITY - length >= 8 {
            let end = data + 16 + commit;
            self.put(end, missed);
            commit |= MISSED_STORED;
            self.put(data + 8, commit);
            self.put_bytes(end + 8, &vec![0; CAPACITY - length - 8]);
        }
        self.put(data + 8, commit | MISSED_EVENTS);
        taken
    }
}
