// SPDX-License-Identifier: Apache-2.0
//! Code that the fuzz targets of the service and of the monitor share.

/// A fuzz target, which is called with the fuzzer's bytes.
pub type Target = fn(&[u8]);

/// Reads numbers from the front of the bytes. Missing bytes read as zero.
pub struct Numbers<'a>(pub &'a [u8]);

#[expect(missing_docs, reason = "each is what it returns")]
impl<'a> Numbers<'a> {
    pub fn more(&self) -> bool {
        !self.0.is_empty()
    }

    /// Takes at most `length` bytes.
    pub fn take(&mut self, length: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(length.min(self.0.len()));
        self.0 = later;
        now
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.bytes())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }
}
