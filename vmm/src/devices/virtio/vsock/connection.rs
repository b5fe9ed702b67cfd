// SPDX-License-Identifier: Apache-2.0

//! One connection between a unix socket on the host and a vsock socket in the guest.
//!
//! ```text
//!                ┌── bytes wait in `to_host`, BUFFER at most ──▶ unix socket
//!  guest ────────┤
//!                └◀─ read only when the guest has credit and room ── unix socket
//! ```
//!
//! Credit (virtio 1.2, 5.10.6.3): each side tells how many bytes it buffers
//! (`buf_alloc`) and how many it has passed on (`fwd_cnt`); the other never has
//! more under way than that.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::packet::{DATA_MAX, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes from the guest that wait for the host's side to read them, per connection.
pub(super) const BUFFER: usize = 64 << 10;

/// The guest broke the connection's rules, or it is over: reset it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Over;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest has been asked to accept.
    Requested,
    Established,
}

/// A packet for the guest, without its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub op: Op,
    pub flags: u32,
    /// Bytes of data, at the start of the caller's buffer.
    pub length: usize,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    state: State,
    /// The packet that opens the connection, until it is sent.
    opening: Option<Op>,
    to_host: VecDeque<u8>,
    /// Bytes passed on to the host; wraps.
    forwarded: u32,
    /// `forwarded` as the guest last heard it.
    announced: u32,
    /// Bytes sent to the guest; wraps.
    sent: u32,
    guest_buf_alloc: u32,
    guest_forwarded: u32,
    /// The guest asked how much it may send.
    credit_asked: bool,
    /// The guest has been asked how much we may send, and has had no room since.
    asking_credit: bool,
    /// The host's side may have bytes for us: no read has found it empty since.
    readable: bool,
    /// The host's side sends no more.
    host_finished: bool,
    /// The host's side reads no more.
    host_deaf: bool,
    /// What of that the guest has been told.
    told: u32,
    /// What the guest told.
    guest_shutdown: u32,
}

impl Connection {
    /// A connection that the host opens; `stream` does not block.
    pub fn from_host(stream: UnixStream) -> Self {
        Self::new(stream, State::Requested, Op::Request)
    }

    /// A connection that the guest opened with `request`; `stream` does not block.
    pub fn from_guest(stream: UnixStream, request: &Header) -> Self {
        let mut connection = Self::new(stream, State::Established, Op::Response);
        connection.take_credit(request);
        connection
    }

    fn new(stream: UnixStream, state: State, opening: Op) -> Self {
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
            told: 0,
            guest_shutdown: 0,
        }
    }

    /// The host's end, to be watched.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The host's side has become readable, writable or is gone.
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
        // An answer without room is not asked about again, or question and answer would follow each
        // other for as long as nobody in the guest reads. The guest tells by itself when there is
        // room (`virtio_transport_stream_do_dequeue()`, `net/vmw_vsock/virtio_transport_common.c`).
        self.asking_credit &= self.credit() == 0;
    }

    /// Bytes that the guest has room for.
    fn credit(&self) -> usize {
        let under_way = self.sent.wrapping_sub(self.guest_forwarded);
        self.guest_buf_alloc.saturating_sub(under_way) as usize
    }

    /// A packet from the guest, with its data. `host_port` is the port that the
    /// host's side is told when the guest has accepted.
    pub fn receive(&mut self, header: &Header, data: &[u8], host_port: u32) -> Result<(), Over> {
        self.take_credit(header);
        match (self.state, header.op) {
            (State::Requested, Op::Response) => {
                self.state = State::Established;
                // The first bytes on a new socket: they fit, or nobody is there.
                let ok = format!("OK {host_port}\n");
                self.stream.write_all(ok.as_bytes()).map_err(|_| Over)
            }
            (State::Established, Op::Data) => self.receive_data(data),
            (State::Established, Op::CreditUpdate) => Ok(()),
            (State::Established, Op::CreditRequest) => {
                self.credit_asked = true;
                Ok(())
            }
            (State::Established, Op::Shutdown) => {
                self.guest_shutdown |= header.flags & SHUTDOWN_BOTH;
                if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
                    // Fails only if the host's side is gone as well.
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

    /// Passes on what the host's side takes now.
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
            // As above.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.to_host.drain(..bytes);
        // At most BUFFER, which fits.
        self.forwarded = self
            .forwarded
            .wrapping_add(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// The guest has ended it, as if it had told the end of both ways. True: bytes that it sent
    /// before still wait for the host's side.
    pub fn ended_by_guest(&mut self) -> bool {
        self.guest_shutdown = SHUTDOWN_BOTH;
        // Fails only if the host's side is gone as well.
        let _ = self.stream.shutdown(Shutdown::Read);
        self.flush();
        !self.is_finished()
    }

    /// Whether the host's side went away before the guest accepted.
    pub fn is_abandoned(&self) -> bool {
        self.state == State::Requested && self.host_deaf
    }

    /// Whether all is said: the guest wants nothing more, and all it sent is passed on.
    pub fn is_finished(&self) -> bool {
        self.guest_shutdown == SHUTDOWN_BOTH && self.to_host.is_empty()
    }

    /// Whether the guest has been told that the host's side is gone.
    pub fn is_told(&self) -> bool {
        self.told == SHUTDOWN_BOTH
    }

    /// The guest's view of our room is less than half of it, and wrong.
    fn credit_is_stale(&self) -> bool {
        let unannounced = self.forwarded.wrapping_sub(self.announced) as usize;
        unannounced >= BUFFER / 2
    }

    fn untold(&self) -> u32 {
        let mut flags = 0;
        if self.host_deaf {
            flags |= SHUTDOWN_RECEIVE;
        }
        // What the guest does not want to receive is not read, so its end is not seen.
        let unread = self.host_deaf && self.guest_shutdown & SHUTDOWN_RECEIVE != 0;
        if self.host_finished || unread {
            flags |= SHUTDOWN_SEND;
        }
        flags & !self.told
    }

    fn may_read(&self) -> bool {
        self.readable && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// Whether [`next`](Self::next) may have a packet.
    pub fn has_packet(&self) -> bool {
        if self.opening.is_some() {
            return true;
        }
        self.state == State::Established
            && (self.credit_asked
                || self.credit_is_stale()
                || (self.may_read() && (self.credit() > 0 || !self.asking_credit))
                || self.untold() != 0)
    }

    /// The next packet for the guest, which has `room` for data; the data is put
    /// into `buffer`, of [`DATA_MAX`] bytes.
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

    fn next_op(&mut self, room: usize, buffer: &mut [u8]) -> Option<(Op, u32, usize)> {
        if let Some(op) = self.opening.take() {
            return Some((op, 0, 0));
        }
        if self.state != State::Established {
            return None;
        }
        if self.credit_asked || self.credit_is_stale() {
            self.credit_asked = false;
            return Some((Op::CreditUpdate, 0, 0));
        }
        if self.may_read() {
            let length = self.credit().min(room).min(DATA_MAX).min(buffer.len());
            if length > 0 {
                if let Some(length) = self.read_host(&mut buffer[..length]) {
                    return Some((Op::Data, 0, length));
                }
            } else if self.credit() == 0 && !self.asking_credit {
                self.asking_credit = true;
                return Some((Op::CreditRequest, 0, 0));
            }
        }
        let untold = self.untold();
        if untold != 0 {
            self.told |= untold;
            return Some((Op::Shutdown, self.told, 0));
        }
        None
    }

    /// Reads from the host's side; `None` if there is nothing now, or never will be.
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
