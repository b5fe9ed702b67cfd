// SPDX-License-Identifier: Apache-2.0

//! The header of a vsock packet (virtio 1.2, 5.10.6; `struct virtio_vsock_hdr` in Linux's
//! `include/uapi/linux/virtio_vsock.h`).
//!
//! The virtio-vsock crate does not fit: it wants a packet's data in one buffer, but Linux since 6.7
//! sends it in up to 17 (`virtio_transport_send_skb`, for `MSG_ZEROCOPY`).

/// Size of a packet header in bytes.
pub(super) const HEADER_BYTES: usize = 44;

/// Limit on the data of a packet in bytes (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
pub(super) const DATA_MAX: usize = 64 << 10;

pub(super) const HOST_CID: u64 = 2;

/// Socket type of stream sockets.
pub(super) const STREAM: u16 = 1;

/// Shutdown flag: the sender no longer receives.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Shutdown flag: the sender no longer sends.
pub(super) const SHUTDOWN_SEND: u32 = 2;
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// Operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PacketOp {
    Request,
    Response,
    Reset,
    Shutdown,
    Data,
    CreditUpdate,
    CreditRequest,
    Unknown(u16),
}

impl PacketOp {
    fn from_wire(op: u16) -> Self {
        match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            other => Self::Unknown(other),
        }
    }

    fn to_wire(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
            Self::Unknown(other) => other,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    /// Length of the data in bytes.
    pub length: u32,
    /// Socket type.
    pub kind: u16,
    pub op: PacketOp,
    pub flags: u32,
    /// Size of the sender's receive buffer.
    pub buf_alloc: u32,
    /// Bytes of this connection that the sender has consumed; wraps.
    pub fwd_cnt: u32,
}

impl Header {
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        Self {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            src_port: u32_at(16),
            dst_port: u32_at(20),
            length: u32_at(24),
            kind: u16_at(28),
            op: PacketOp::from_wire(u16_at(30)),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
        }
    }

    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.length.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_wire().to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// Returns the reset that answers this packet.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            length: 0,
            kind: self.kind,
            op: PacketOp::Reset,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_their_fields() {
        let mut bytes = [0; HEADER_BYTES];
        for (at, byte) in (0..).zip(&mut bytes) {
            *byte = at;
        }
        let header = Header::from_bytes(&bytes);
        assert_eq!(header.src_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.fwd_cnt, 0x2b2a_2928);
        assert_eq!(header.to_bytes(), bytes);
    }
}
