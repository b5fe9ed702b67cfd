// SPDX-License-Identifier: Apache-2.0

//! A connection between a unix socket on the host and a vsock socket in the guest.
//!
//! ```text
//!                ┌── queued in `to_host`, at most BUFFER bytes ──▶ unix socket
//!  guest ────────┤
//!                └◀─ read only if the guest has credit and a buffer ── unix socket
//! ```
//!
//! Credit (virtio 1.2, 5.10.6.3): each side announces its buffer size (`buf_alloc`) and the number
//! of bytes that it has consumed (`fwd_cnt`). The other side never has more bytes in flight than
//! the buffer has room for.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::packet::{DATA_MAX, Header, PacketOp, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes from the guest that may wait for the host's reader, per connection.
pub(super) const BUFFER: usize = 64 << 10;

/// Error: the connection must be reset, because it has ended or because the guest broke the rules.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Over;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    /// The guest has been asked to accept.
    Requested,
    Established,
}

/// A packet for the guest, without its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub op: PacketOp,
    pub flags: u32,
    /// Length of the data, which is at the start of the caller's buffer.
    pub length: usize,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    state: ConnectionState,
    /// The packet that opens the connection, until it is sent.
    opening: Option<PacketOp>,
    to_host: VecDeque<u8>,
    /// Bytes forwarded to the host; wraps.
    forwarded: u32,
    /// The value of `forwarded` last sent to the guest.
    announced: u32,
    /// Bytes sent to the guest; wraps.
    sent: u32,
    guest_buf_alloc: u32,
    guest_forwarded: u32,
    /// The guest requested a credit update.
    credit_asked: bool,
    /// A credit request was sent, and since then the guest has not announced any room.
    asking_credit: bool,
    /// The host's socket may have data: no read has returned EAGAIN since the last event.
    readable: bool,
    /// The host's side has shut down sending.
    host_finished: bool,
    /// The host's side has shut down receiving.
    host_deaf: bool,
    /// Shutdown flags that were sent to the guest.
    sent_shutdown: u32,
    /// Shutdown flags that the guest sent.
    guest_shutdown: u32,
}

impl Connection {
    /// Starts a connection that the host opened; `stream` is non-blocking.
    pub fn from_host(stream: UnixStream) -> Self {
        Self::new(stream, ConnectionState::Requested, PacketOp::Request)
    }

    /// Starts a connection that the guest opened with `request`; `stream` is non-blocking.
    pub fn from_guest(stream: UnixStream, request: &Header) -> Self {
        let mut connection = Self::new(stream, ConnectionState::Established, PacketOp::Response);
        connection.take_credit(request);
        connection
    }

    fn new(stream: UnixStream, state: ConnectionState, opening: PacketOp) -> Self {
        Self {
            stream,
            state,
            opening: Some(opening),
            to_host: VecDeque::new(),
            forwarded: 0,
            announced: 0,
            sent: 0,
            guest_buf_alloc: 0,
            guest_forwarded: 0,
            credit_asked: false,
            asking_credit: false,
            readable: true,
            host_finished: false,
            host_deaf: false,
            sent_shutdown: 0,
            guest_shutdown: 0,
        }
    }

    /// Returns the host's end, for the caller to watch.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Handles an event of the host's socket: it became readable or writable, or was closed.
    pub fn host_event(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable && !self.host_finished;
        self.host_deaf |= hung_up;
        if writable || hung_up {
            self.flush();
        }
    }

    fn take_credit(&mut self, header: &Header) {
        self.guest_buf_alloc = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
        // If the guest answers that it has no room, no further request follows. Otherwise requests
        // and answers would alternate for as long as no program in the guest reads. The guest sends
        // an update on its own when there is room (`virtio_transport_stream_do_dequeue()`,
        // `net/vmw_vsock/virtio_transport_common.c`).
        self.asking_credit &= self.credit() == 0;
    }

    /// Returns the number of bytes that the guest has room for.
    fn credit(&self) -> usize {
        let under_way = self.sent.wrapping_sub(self.guest_forwarded);
        self.guest_buf_alloc.saturating_sub(under_way) as usize
    }

    /// Handles a packet from the guest with its data. `host_port` is sent to the host's client when
    /// the guest accepts.
    pub fn receive(&mut self, header: &Header, data: &[u8], host_port: u32) -> Result<(), Over> {
        self.take_credit(header);
        match (self.state, header.op) {
            (ConnectionState::Requested, PacketOp::Response) => {
                self.state = ConnectionState::Established;
                // The first bytes on a new socket always fit, unless the client has closed it.
                let ok = format!("OK {host_port}\n");
                self.stream.write_all(ok.as_bytes()).map_err(|_| Over)
            }
            (ConnectionState::Established, PacketOp::Data) => self.receive_data(data),
            (ConnectionState::Established, PacketOp::CreditUpdate) => Ok(()),
            (ConnectionState::Established, PacketOp::CreditRequest) => {
                self.credit_asked = true;
                Ok(())
            }
            (ConnectionState::Established, PacketOp::Shutdown) => {
                self.guest_shutdown |= header.flags & SHUTDOWN_BOTH;
                if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
                    // This fails only if the host's side is closed too.
                    let _ = self.stream.shutdown(Shutdown::Read);
                }
                self.flush();
                Ok(())
            }
            _ => Err(Over),
        }
    }

    fn receive_data(&mut self, data: &[u8]) -> Result<(), Over> {
        let beyond_credit = self.to_host.len() + data.len() > BUFFER;
        if beyond_credit || self.guest_shutdown & SHUTDOWN_SEND != 0 {
            return Err(Over);
        }
        self.to_host.extend(data);
        self.flush();
        Ok(())
    }

    /// Forwards as much as the host's socket accepts.
    fn flush(&mut self) {
        while !self.to_host.is_empty() && !self.host_deaf {
            match self.stream.write(self.to_host.as_slices().0) {
                Ok(0) => break,
                Ok(written) => self.forward(written),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.host_deaf = true,
            }
        }
        if self.host_deaf {
            self.forward(self.to_host.len());
        }
        if self.to_host.is_empty() && self.guest_shutdown & SHUTDOWN_SEND != 0 {
            // This fails only if the host's side is closed too.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.to_host.drain(..bytes);
        // At most BUFFER bytes are forwarded, so the conversion cannot fail.
        self.forwarded = self
            .forwarded
            .wrapping_add(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// Handles a reset of the connection by the guest, which shuts down both directions. Returns
    /// true if bytes that the guest sent before the reset still wait for the host's reader.
    pub fn ended_by_guest(&mut self) -> bool {
        self.guest_shutdown = SHUTDOWN_BOTH;
        // This fails only if the host's side is closed too.
        let _ = self.stream.shutdown(Shutdown::Read);
        self.flush();
        !self.is_finished()
    }

    /// Returns whether the host's side closed before the guest accepted.
    pub fn is_abandoned(&self) -> bool {
        self.state == ConnectionState::Requested && self.host_deaf
    }

    /// Returns whether the guest has shut down both directions and all of its data is forwarded.
    pub fn is_finished(&self) -> bool {
        self.guest_shutdown == SHUTDOWN_BOTH && self.to_host.is_empty()
    }

    /// Returns whether the guest has been told that the host's side is closed.
    pub fn is_shut_down(&self) -> bool {
        self.sent_shutdown == SHUTDOWN_BOTH
    }

    /// Returns whether at least half of our buffer has become free without an announcement to the
    /// guest.
    fn credit_is_stale(&self) -> bool {
        let unannounced = self.forwarded.wrapping_sub(self.announced) as usize;
        unannounced >= BUFFER / 2
    }

    fn unsent_shutdown(&self) -> u32 {
        let mut flags = 0;
        if self.host_deaf {
            flags |= SHUTDOWN_RECEIVE;
        }
        // If the guest no longer receives, the socket is not read, so its end is not detected.
        let unread = self.host_deaf && self.guest_shutdown & SHUTDOWN_RECEIVE != 0;
        if self.host_finished || unread {
            flags |= SHUTDOWN_SEND;
        }
        flags & !self.sent_shutdown
    }

    fn may_read(&self) -> bool {
        self.readable && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// Returns whether [`next`](Self::next) may return a packet.
    pub fn has_packet(&self) -> bool {
        if self.opening.is_some() {
            return true;
        }
        self.state == ConnectionState::Established
            && (self.credit_asked
                || self.credit_is_stale()
                || (self.may_read() && (self.credit() > 0 || !self.asking_credit))
                || self.unsent_shutdown() != 0)
    }

    /// Returns the next packet for the guest, whose buffer holds `room` bytes of data. The data is
    /// written to `buffer`, which has [`DATA_MAX`] bytes.
    pub fn next(&mut self, room: usize, buffer: &mut [u8]) -> Option<Outgoing> {
        let (op, flags, length) = self.next_op(room, buffer)?;
        self.announced = self.forwarded;
        Some(Outgoing {
            op,
            flags,
            length,
            buf_alloc: u32::try_from(BUFFER).unwrap_or(u32::MAX),
            fwd_cnt: self.forwarded,
        })
    }

    fn next_op(&mut self, room: usize, buffer: &mut [u8]) -> Option<(PacketOp, u32, usize)> {
        if let Some(op) = self.opening.take() {
            return Some((op, 0, 0));
        }
        if self.state != ConnectionState::Established {
            return None;
        }
        if self.credit_asked || self.credit_is_stale() {
            self.credit_asked = false;
            return Some((PacketOp::CreditUpdate, 0, 0));
        }
        if self.may_read() {
            let length = self.credit().min(room).min(DATA_MAX).min(buffer.len());
            if length > 0 {
                if let Some(length) = self.read_host(&mut buffer[..length]) {
                    return Some((PacketOp::Data, 0, length));
                }
            } else if self.credit() == 0 && !self.asking_credit {
                self.asking_credit = true;
                return Some((PacketOp::CreditRequest, 0, 0));
            }
        }
        let unsent_shutdown = self.unsent_shutdown();
        if unsent_shutdown != 0 {
            self.sent_shutdown |= unsent_shutdown;
            return Some((PacketOp::Shutdown, self.sent_shutdown, 0));
        }
        None
    }

    /// Reads from the host's socket. Returns `None` if there is no data now, or if the stream has
    /// ended.
    fn read_host(&mut self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => {
                    self.host_finished = true;
                    self.readable = false;
                    return None;
                }
                Ok(length) => {
                    self.sent = self
                        .sent
                        .wrapping_add(u32::try_from(length).unwrap_or(u32::MAX));
                    return Some(length);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.readable = false;
                    if error.kind() != ErrorKind::WouldBlock {
                        self.host_finished = true;
                        self.host_deaf = true;
                    }
                    return None;
                }
            }
        }
    }
}
