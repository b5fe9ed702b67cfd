// SPDX-License-Identifier: Apache-2.0

//! Stream sockets between guest and host (virtio 1.2, 5.10) on unix sockets, with Firecracker's
//! protocol on the host.
//!
//! | from | to | how |
//! |---|---|---|
//! | host | guest's port P | connect to `PATH`, write `CONNECT P\n`, read `OK <host port>\n` |
//! | guest | host's port N | the monitor connects to `PATH_N`, where a program listens |
//!
//! A connection that the guest refuses is closed without an answer. A connection to a port that no
//! program serves on the host is refused. So is a connection from an unprivileged program to a
//! privileged port. An invalid packet is answered with a reset of the connection that it names.
//!
//! A reset from the guest ends the connection for the guest. Data that the guest sent before the
//! reset still goes to the host, because Linux also resets a connection after an orderly close if
//! the host takes more than 8 s to read.
//!
//! Bounds: 256 connections, including those that only wait for the host to read; 64 KiB from the
//! guest per connection; 64 clients that have not named a port; 256 resets that wait for the guest.
//! While 256 resets wait, the guest's packets wait too. While fewer than 64 more resets fit, events
//! of the host's clients wait.

mod connection;
mod host;
mod packet;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use connection::{Connection, Outgoing};
use host::{EVENTS_MAX, Host, HostEvent};
use packet::{DATA_MAX, HEADER_BYTES, HOST_CID, Header, PacketOp, STREAM};

use super::Memory;
use super::device::{Device, NextTurn};
use super::queue::{Broken, Chain, Ring};
use patchbay_proto::socket::SocketError;

const DEVICE_ID: u32 = 19;

/// Queue of buffers for packets to the guest.
const RECEIVE: usize = 0;
/// Queue of packets from the guest.
const TRANSMIT: usize = 1;
/// Queue of buffers for events. The only event is the reset of the transport.
const EVENT: usize = 2;
/// Number of queues.
const QUEUES: usize = 3;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (virtio 1.2, 5.10.6.7): all connections are gone, and the
/// CID may have changed.
const TRANSPORT_RESET: u32 = 0;

/// Limit on concurrent connections.
pub const CONNECTIONS_MAX: usize = 256;

/// Limit on resets that wait for the guest to take them.
const RESETS_MAX: usize = 256;

/// Packets handled in one batch, in each direction.
const BATCH: usize = 64;

/// First port on the host's side of connections that the host opens.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Ports of the guest below this are for its privileged programs (`LAST_RESERVED_PORT`,
/// `net/vmw_vsock/af_vsock.c`).
const UNPRIVILEGED_PORTS: u32 = 1024;

/// The lowest CID of a guest; lower ones are reserved.
pub const CID_MIN: u32 = 3;

/// Configuration of the vsock device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VsockConfig {
    /// The socket that clients on the host connect to.
    pub path: PathBuf,
    /// CID of the guest, 3 to 2^32 - 2.
    pub cid: u32,
    /// Ports of the host that only privileged programs of the guest may connect to: those that
    /// connect from a port below 1024, for which Linux requires CAP_NET_BIND_SERVICE
    /// (`__vsock_bind_connectible()`, `net/vmw_vsock/af_vsock.c`).
    pub privileged: Vec<u32>,
}

/// The vsock device cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum VsockError {
    #[error("the vsock address {0} is reserved; use a cid from 3 to 4294967294")]
    Cid(u32),
    #[error("the vsock socket: {0}")]
    Socket(SocketError),
    #[error("the vsock socket {} cannot be watched: {error}; raise the limit on open files", path.display())]
    Unusable {
        path: PathBuf,
        error: std::io::Error,
    },
}

impl From<SocketError> for VsockError {
    fn from(error: SocketError) -> Self {
        Self::Socket(error)
    }
}

/// Identifies a connection by its port on the host and its port in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ports {
    host: u32,
    guest: u32,
}

pub(super) struct Vsock {
    cid: u64,
    privileged: Vec<u32>,
    host: Host,
    connections: BTreeMap<Ports, Connection>,
    /// The connection of each stream that `host` watches.
    tokens: BTreeMap<u64, Ports>,
    /// Connections that the guest has reset while bytes wait for the host's reader, by token. If
    /// there is no room for a new connection, the oldest of these is evicted. The guest may reuse
    /// their ports.
    lingering: BTreeMap<u64, Connection>,
    resets: VecDeque<Header>,
    /// The connection that was served last. The search for the next one begins after it.
    last_served: Option<Ports>,
    next_host_port: u32,
    /// A receive buffer that was taken from the queue but not used.
    spare: Option<Chain>,
    /// The driver must be told that all connections are reset, because the guest is a copy of
    /// another.
    transport_reset: bool,
    /// Buffer for a packet's data.
    data: Box<[u8]>,
}

impl Vsock {
    /// Listens on the host.
    pub fn new(config: &VsockConfig) -> Result<Self, VsockError> {
        if !(CID_MIN..u32::MAX).contains(&config.cid) {
            return Err(VsockError::Cid(config.cid));
        }
        Ok(Self {
            cid: config.cid.into(),
            privileged: config.privileged.clone(),
            host: Host::listen(&config.path)?,
            connections: BTreeMap::new(),
            tokens: BTreeMap::new(),
            lingering: BTreeMap::new(),
            resets: VecDeque::new(),
            last_served: None,
            next_host_port: FIRST_HOST_PORT,
            spare: None,
            transport_reset: false,
            data: vec![0; DATA_MAX].into(),
        })
    }

    fn header(&self, ports: Ports, op: PacketOp) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.cid,
            src_port: ports.host,
            dst_port: ports.guest,
            length: 0,
            kind: STREAM,
            op,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }

    /// Ends a connection on both sides.
    fn reset_connection(&mut self, ports: Ports) {
        self.forget(ports);
        let reset = self.header(ports, PacketOp::Reset);
        self.resets.push_back(reset);
    }

    /// Handles the reset of a connection by the guest (sent for example by
    /// `virtio_transport_close_timeout()`, `net/vmw_vsock/virtio_transport_common.c`).
    fn end_by_guest(&mut self, ports: Ports) {
        let token = self.tokens.iter().find(|(_, named)| **named == ports);
        let token = token.map(|(token, _)| *token);
        let connection = self.connections.remove(&ports);
        self.forget(ports);
        if let (Some(token), Some(mut connection)) = (token, connection)
            && connection.ended_by_guest()
        {
            self.lingering.insert(token, connection);
        }
    }

    /// Ends a connection on the host's side only.
    fn forget(&mut self, ports: Ports) {
        self.connections.remove(&ports);
        self.tokens.retain(|_, named| *named != ports);
    }

    /// Adds a connection. Returns false if there is no room for it.
    fn add(&mut self, ports: Ports, connection: Connection) -> bool {
        if self.connections.len() >= CONNECTIONS_MAX {
            return false;
        }
        if self.connections.len() + self.lingering.len() >= CONNECTIONS_MAX {
            self.lingering.pop_first();
        }
        match self.host.watch(connection.stream()) {
            Ok(token) => {
                self.tokens.insert(token, ports);
                self.connections.insert(ports, connection);
                true
            }
            Err(_) => false,
        }
    }

    fn host_event(&mut self, event: HostEvent) {
        match event {
            HostEvent::Connect(stream, port) => self.connect_guest(stream, port),
            HostEvent::Stream {
                token,
                readable,
                writable,
                hung_up,
            } => {
                if let Some(connection) = self.lingering.get_mut(&token) {
                    connection.host_event(readable, writable, hung_up);
                    if connection.is_finished() {
                        self.lingering.remove(&token);
                    }
                }
                let Some(&ports) = self.tokens.get(&token) else {
                    return;
                };
                if let Some(connection) = self.connections.get_mut(&ports) {
                    connection.host_event(readable, writable, hung_up);
                    self.settle(ports);
                }
            }
        }
    }

    /// Resets a connection that is finished or abandoned.
    fn settle(&mut self, ports: Ports) {
        let ended = self
            .connections
            .get(&ports)
            .is_some_and(|connection| connection.is_finished() || connection.is_abandoned());
        if ended {
            self.reset_connection(ports);
        }
    }

    /// Connects a client on the host to the guest's `port`.
    fn connect_guest(&mut self, stream: UnixStream, port: u32) {
        let mut ports = Ports {
            host: self.next_host_port,
            guest: port,
        };
        // The number is in use only if the numbers have wrapped around during a long connection, or
        // if the guest has connected to this port of the host.
        while self.connections.contains_key(&ports) {
            ports.host = next_port(ports.host);
        }
        self.next_host_port = next_port(ports.host);
        // If there is no room, the stream is dropped, which closes the client's connection.
        self.add(ports, Connection::from_host(stream));
    }

    /// Handles a packet from the guest.
    fn receive(&mut self, chain: &Chain, memory: &Memory) -> Result<(), Broken> {
        let mut header = [0; HEADER_BYTES];
        chain.read_at(memory, 0, &mut header)?;
        let header = Header::from_bytes(&header);
        let length = header.length as usize;
        let ports = Ports {
            host: header.dst_port,
            guest: header.src_port,
        };
        let ours =
            header.src_cid == self.cid && header.dst_cid == HOST_CID && header.kind == STREAM;
        if !ours {
            self.refuse(&header);
            return Ok(());
        }
        if length > DATA_MAX || length > chain.readable_bytes() - HEADER_BYTES {
            self.forget(ports);
            self.refuse(&header);
            return Ok(());
        }
        match (header.op, self.connections.get_mut(&ports)) {
            (PacketOp::Reset, _) => self.end_by_guest(ports),
            (PacketOp::Request, None) => self.connect_host(ports, &header),
            (_, None) => self.refuse(&header),
            (op, Some(connection)) => {
                let data = match op {
                    PacketOp::Data => &mut self.data[..length],
                    _ => &mut [],
                };
                chain.read_at(memory, HEADER_BYTES, data)?;
                match connection.receive(&header, data, ports.host) {
                    Ok(()) => self.settle(ports),
                    Err(connection::Over) => self.reset_connection(ports),
                }
            }
        }
        Ok(())
    }

    /// Answers an unexpected packet with a reset.
    fn refuse(&mut self, header: &Header) {
        // A reset of a reset could loop for ever.
        if header.op != PacketOp::Reset {
            let reset = header.reset();
            self.resets.push_back(Header {
                dst_cid: self.cid,
                ..reset
            });
        }
    }

    /// Connects the guest to a port of the host.
    fn connect_host(&mut self, ports: Ports, request: &Header) {
        let allowed = ports.guest < UNPRIVILEGED_PORTS || !self.privileged.contains(&ports.host);
        let connected = match allowed && self.connections.len() < CONNECTIONS_MAX {
            true => self.host.connect(ports.host).ok(),
            false => None,
        };
        let added = connected
            .is_some_and(|stream| self.add(ports, Connection::from_guest(stream, request)));
        if !added {
            self.refuse(request);
        }
    }

    /// Handles packets from the guest. Returns true if there are more.
    fn transmit(&mut self, ring: &mut Ring, memory: &Memory) -> Result<bool, Broken> {
        for _ in 0..BATCH {
            if self.resets.len() >= RESETS_MAX {
                // No more packets are handled until the guest takes its resets.
                return Ok(false);
            }
            let Some(chain) = ring.pop()? else {
                return Ok(false);
            };
            self.receive(&chain, memory)?;
            ring.push(&chain, 0)?;
        }
        Ok(true)
    }

    /// Picks the next connection that may have a packet, round-robin.
    fn next_ready(&self) -> Option<Ports> {
        let ready =
            |(ports, connection): (&Ports, &Connection)| connection.has_packet().then_some(*ports);
        let after = self.last_served.and_then(|last| {
            let mut after = self.connections.range((Excluded(last), Unbounded));
            after.find_map(ready)
        });
        after.or_else(|| self.connections.iter().find_map(ready))
    }

    /// Sends packets to the guest. Returns true if there are more.
    fn send(&mut self, ring: &mut Ring, memory: &Memory) -> Result<bool, Broken> {
        for _ in 0..BATCH {
            let ready = self.next_ready();
            if self.resets.is_empty() && ready.is_none() {
                return Ok(false);
            }
            let chain = match self.spare.take() {
                Some(chain) => chain,
                None => match ring.pop()? {
                    Some(chain) => chain,
                    // The guest notifies when it adds a buffer.
                    None => return Ok(false),
                },
            };
            let room = chain.writable_bytes().saturating_sub(HEADER_BYTES);
            if room == 0 {
                return Err(Broken("a vsock buffer has no room for a packet with data"));
            }
            let header = match self.resets.pop_front() {
                Some(reset) => Some(reset),
                None => ready.and_then(|ports| self.next_packet(ports, room)),
            };
            let Some(header) = header else {
                self.spare = Some(chain);
                continue;
            };
            let length = header.length as usize;
            chain.write_at(memory, 0, &header.to_bytes())?;
            chain.write_at(memory, HEADER_BYTES, &self.data[..length])?;
            ring.push(&chain, HEADER_BYTES + length)?;
        }
        Ok(true)
    }

    /// Returns the next packet of one connection, whose data is written to `self.data`.
    fn next_packet(&mut self, ports: Ports, room: usize) -> Option<Header> {
        self.last_served = Some(ports);
        let connection = self.connections.get_mut(&ports)?;
        let Outgoing {
            op,
            flags,
            length,
            buf_alloc,
            fwd_cnt,
        } = connection.next(room, &mut self.data)?;
        if connection.is_shut_down() {
            // A later answer of the guest names an unknown connection and is harmless.
            self.forget(ports);
        }
        Some(Header {
            length: u32::try_from(length).unwrap_or(0),
            flags,
            buf_alloc,
            fwd_cnt,
            ..self.header(ports, op)
        })
    }
}

fn next_port(port: u32) -> u32 {
    port.checked_add(1).unwrap_or(FIRST_HOST_PORT)
}

impl Device for Vsock {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    /// Returns `struct virtio_vsock_config`.
    fn config(&self) -> Vec<u8> {
        self.cid.to_le_bytes().to_vec()
    }

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {
        self.connections.clear();
        self.tokens.clear();
        self.lingering.clear();
        self.resets.clear();
        self.last_served = None;
        self.spare = None;
        self.transport_reset = false;
    }

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<NextTurn, Broken> {
        let mut more = false;
        if self.transport_reset
            && let Some(Some(ring)) = rings.get_mut(EVENT)
            && let Some(chain) = ring.pop()?
        {
            chain.write_at(memory, 0, &TRANSPORT_RESET.to_le_bytes())?;
            ring.push(&chain, size_of_val(&TRANSPORT_RESET))?;
            self.transport_reset = false;
        }
        // Each event may end a connection and queue a reset. Events that do not fit wait in the
        // kernel.
        let room = self.resets.len() + EVENTS_MAX <= RESETS_MAX;
        if room {
            let (events, there_are_more) = self.host.events();
            more = there_are_more;
            for event in events {
                self.host_event(event);
            }
        }
        if let Some(Some(ring)) = rings.get_mut(TRANSMIT) {
            more |= self.transmit(ring, memory)?;
        }
        if let Some(Some(ring)) = rings.get_mut(RECEIVE) {
            let waiting = self.resets.len();
            more |= self.send(ring, memory)?;
            // Packets and events that had no room for their resets can be handled now.
            more |= waiting >= RESETS_MAX && self.resets.len() < RESETS_MAX;
            more |= !room && self.resets.len() + EVENTS_MAX <= RESETS_MAX;
        }
        Ok(if more {
            NextTurn::Again
        } else {
            NextTurn::Wait
        })
    }

    fn unused(&self, queue: usize) -> u16 {
        (queue == RECEIVE && self.spare.is_some()).into()
    }

    fn resume(&mut self) {
        self.transport_reset = true;
    }

    /// The driver reads the CID again after a reset of the transport.
    fn may_change_config(&self) -> bool {
        true
    }

    fn close(&mut self) {
        self.host.close();
    }

    fn event_source(&self) -> Option<RawFd> {
        Some(self.host.event_source())
    }
}
