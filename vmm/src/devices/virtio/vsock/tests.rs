// SPDX-License-Identifier: Apache-2.0

//! Tests of the vsock device between a guest's driver and unix sockets.

mod bulk;
mod endings;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use super::super::testing::{Buffer, Driver};
use super::connection::BUFFER;
use super::packet::{HEADER_BYTES, Header, PacketOp, STREAM};
use super::{CONNECTIONS_MAX, FIRST_HOST_PORT, RECEIVE, RESETS_MAX, TRANSMIT};
use super::{Vsock, VsockConfig};

const CID: u32 = 42;
/// A port of the host for privileged programs of the guest.
const PRIVILEGED: u32 = 1024;
/// Space for data in each of the guest's receive buffers.
const ROOM: usize = 4096;

struct TestDriver {
    driver: Driver,
    /// Addresses of the receive buffers that the device holds, in order.
    buffers: std::collections::VecDeque<u64>,
    folder: tempfile::TempDir,
}

impl TestDriver {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = VsockConfig {
            path: folder.path().join("vsock"),
            cid: CID,
            privileged: vec![PRIVILEGED],
        };
        Self {
            driver: Driver::new(Vsock::new(&config).unwrap()),
            buffers: std::collections::VecDeque::new(),
            folder,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn send(&mut self, header: Header, data: &[u8]) {
        let bytes = header.to_bytes();
        self.driver
            .chain(TRANSMIT, &[Buffer::Out(&bytes), Buffer::Out(data)]);
        self.driver.run();
        assert_eq!(self.driver.used(TRANSMIT).len(), 1);
    }

    /// Adds a receive buffer and returns the packet that the device put there, if any.
    fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        if self.buffers.is_empty() {
            let buffer = self
                .driver
                .chain(RECEIVE, &[Buffer::In(HEADER_BYTES + ROOM)])[0];
            self.buffers.push_back(buffer);
        }
        self.driver.run();
        let &(_, written) = self.driver.used(RECEIVE).first()?;
        let buffer = self.buffers.pop_front().unwrap();
        let bytes = self.driver.bytes(buffer, written as usize);
        let (header, data) = bytes.split_first_chunk::<HEADER_BYTES>().unwrap();
        let header = Header::from_bytes(header);
        assert_eq!(header.length as usize, data.len());
        assert_eq!(header.dst_cid, u64::from(CID));
        Some((header, data.to_vec()))
    }

    fn expect(&mut self, op: PacketOp) -> (Header, Vec<u8>) {
        let (header, data) = self.receive().expect("a packet");
        assert_eq!(header.op, op, "{header:?}");
        (header, data)
    }

    /// Opens a connection from the host to the guest's port 7, which accepts it.
    fn accept(&mut self) -> (UnixStream, u32) {
        let mut client = self.client(b"CONNECT 7\n");
        let (request, _) = self.expect(PacketOp::Request);
        assert_eq!(request.dst_port, 7);
        let port = request.src_port;
        self.send(packet(PacketOp::Response, port, 0), &[]);
        let ok = format!("OK {port}\n");
        let mut answer = vec![0; ok.len()];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, ok.as_bytes());
        (client, port)
    }

    fn client(&mut self, says: &[u8]) -> UnixStream {
        let mut client = UnixStream::connect(self.path("vsock")).unwrap();
        client.write_all(says).unwrap();
        client
    }
}

/// A packet from the guest's port 7, which has 64 KiB of buffer.
fn packet(op: PacketOp, dst_port: u32, length: usize) -> Header {
    Header {
        src_cid: CID.into(),
        dst_cid: 2,
        src_port: 7,
        dst_port,
        length: u32::try_from(length).unwrap(),
        kind: STREAM,
        op,
        flags: 0,
        buf_alloc: 0x1_0000,
        fwd_cnt: 0,
    }
}

#[test]
fn the_host_connects_and_both_talk() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    assert!(port >= FIRST_HOST_PORT);
    client.write_all(b"question").unwrap();
    let (header, data) = guest.expect(PacketOp::Data);
    assert_eq!((header.src_port, header.dst_port), (port, 7));
    assert_eq!(data, b"question");
    guest.send(packet(PacketOp::Data, port, 6), b"answer");
    let mut answer = [0; 6];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
}

#[test]
fn what_follows_the_greeting_at_once_is_for_the_guest() {
    let mut guest = TestDriver::new();
    let _client = guest.client(b"CONNECT 7\nearly");
    let (request, _) = guest.expect(PacketOp::Request);
    assert!(guest.receive().is_none(), "data before the guest accepts");
    guest.send(packet(PacketOp::Response, request.src_port, 0), &[]);
    assert_eq!(guest.expect(PacketOp::Data).1, b"early");
}

#[test]
fn the_guest_connects_to_a_program_on_the_host() {
    let mut guest = TestDriver::new();
    let listener = UnixListener::bind(guest.path("vsock_99")).unwrap();
    guest.send(packet(PacketOp::Request, 99, 0), &[]);
    let (response, _) = guest.expect(PacketOp::Response);
    assert_eq!(
        (response.src_cid, response.src_port, response.dst_port),
        (2, 99, 7)
    );
    assert_eq!(response.buf_alloc as usize, BUFFER);
    let (mut program, _) = listener.accept().unwrap();
    guest.send(packet(PacketOp::Data, 99, 5), b"hello");
    let mut hello = [0; 5];
    program.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
}

#[test]
fn privileged_ports_are_for_privileged_programs() {
    let mut guest = TestDriver::new();
    let listener = UnixListener::bind(guest.path("vsock_1024")).unwrap();
    listener.set_nonblocking(true).unwrap();
    for (port, answer) in [
        (1 << 30, PacketOp::Reset),
        (1024, PacketOp::Reset),
        (1023, PacketOp::Response),
        (0, PacketOp::Response),
    ] {
        let request = Header {
            src_port: port,
            ..packet(PacketOp::Request, PRIVILEGED, 0)
        };
        guest.send(request, &[]);
        guest.expect(answer);
        assert_eq!(
            listener.accept().is_ok(),
            answer == PacketOp::Response,
            "{port}"
        );
    }
}

#[test]
fn a_packet_may_come_in_many_buffers() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    let bytes = packet(PacketOp::Data, port, 6).to_bytes();
    let (first, second) = bytes.split_at(20);
    guest.driver.chain(
        TRANSMIT,
        &[
            Buffer::Out(first),
            Buffer::Out(second),
            Buffer::Out(b"ab"),
            Buffer::Out(b""),
            Buffer::Out(b"cdef"),
        ],
    );
    guest.driver.run();
    let mut data = [0; 6];
    client.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"abcdef");
}

#[test]
fn a_port_without_a_listener_is_a_reset() {
    let mut guest = TestDriver::new();
    guest.send(packet(PacketOp::Request, 99, 0), &[]);
    let (reset, _) = guest.expect(PacketOp::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (99, 7));
}

#[test]
fn a_refused_connection_is_closed_without_an_answer() {
    let mut guest = TestDriver::new();
    let mut client = guest.client(b"CONNECT 7\n");
    let (request, _) = guest.expect(PacketOp::Request);
    guest.send(packet(PacketOp::Reset, request.src_port, 0), &[]);
    let mut answer = vec![];
    client.read_to_end(&mut answer).unwrap();
    assert!(answer.is_empty());
}

#[test]
fn packets_out_of_place_are_answered_by_a_reset() {
    let mut guest = TestDriver::new();
    let good = packet(PacketOp::Data, 5, 0);
    for header in [
        good,
        packet(PacketOp::Response, 5, 0),
        packet(PacketOp::Shutdown, 5, 0),
        packet(PacketOp::CreditUpdate, 5, 0),
        packet(PacketOp::CreditRequest, 5, 0),
        packet(PacketOp::Unknown(0), 5, 0),
        packet(PacketOp::Unknown(8), 5, 0),
        Header {
            kind: 2,
            ..packet(PacketOp::Request, 5, 0)
        },
        Header { src_cid: 9, ..good },
        Header { dst_cid: 1, ..good },
        Header { length: 1, ..good },
        Header {
            length: 0x1_0001,
            ..good
        },
        Header {
            length: u32::MAX,
            ..good
        },
    ] {
        guest.send(header, &[]);
        let (reset, _) = guest.receive().expect("a reset");
        assert_eq!(reset.op, PacketOp::Reset, "{header:?}");
        assert_eq!((reset.src_port, reset.dst_port), (5, 7));
    }
    // A reset is never answered with a reset.
    guest.send(packet(PacketOp::Reset, 5, 0), &[]);
    assert!(guest.receive().is_none());
    assert!(!guest.driver.needs_reset());
}

#[test]
fn a_connection_that_breaks_its_own_rules_ends() {
    for wrong in [PacketOp::Request, PacketOp::Response, PacketOp::Unknown(77)] {
        let mut guest = TestDriver::new();
        let (mut client, port) = guest.accept();
        guest.send(packet(wrong, port, 0), &[]);
        guest.expect(PacketOp::Reset);
        let mut rest = vec![];
        client.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());
    }
    // The guest sends data before it has accepted.
    let mut guest = TestDriver::new();
    let _client = guest.client(b"CONNECT 7\n");
    let (request, _) = guest.expect(PacketOp::Request);
    guest.send(packet(PacketOp::Data, request.src_port, 1), b"x");
    guest.expect(PacketOp::Reset);
}

#[test]
fn a_host_that_never_reads_costs_a_bounded_buffer() {
    let mut guest = TestDriver::new();
    let (client, port) = guest.accept();
    let data = vec![1; 0x8000];
    let mut forwarded = 0_u32;
    let mut sent = 0_u32;
    // Sends as much as the device's credit allows.
    loop {
        while let Some((header, _)) = guest.receive() {
            forwarded = header.fwd_cnt;
        }
        if sent - forwarded + 0x8000 > BUFFER as u32 {
            break;
        }
        guest.send(packet(PacketOp::Data, port, data.len()), &data);
        sent += 0x8000;
    }
    assert!(sent as usize >= BUFFER);
    // More data ends the connection.
    let mut resets = 0;
    for _ in 0..3 {
        guest.send(packet(PacketOp::Data, port, data.len()), &data);
        while let Some((header, _)) = guest.receive() {
            resets += u32::from(header.op == PacketOp::Reset);
        }
    }
    assert!(resets > 0);
    drop(client);
}

#[test]
fn credit_comes_back_when_the_host_reads() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    let data = vec![3; 0x8000];
    guest.send(packet(PacketOp::Data, port, data.len()), &data);
    let mut read = vec![0; data.len()];
    client.read_exact(&mut read).unwrap();
    assert_eq!(read, data);
    let (update, _) = guest.expect(PacketOp::CreditUpdate);
    assert_eq!(update.fwd_cnt as usize, data.len());
    guest.send(packet(PacketOp::CreditRequest, port, 0), &[]);
    guest.expect(PacketOp::CreditUpdate);
    assert!(guest.receive().is_none());
}

#[test]
fn the_guest_is_never_sent_more_than_it_has_room_for() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    let small = Header {
        buf_alloc: 100,
        ..packet(PacketOp::CreditUpdate, port, 0)
    };
    guest.send(small, &[]);
    client.write_all(&[9; 250]).unwrap();
    assert_eq!(guest.expect(PacketOp::Data).1.len(), 100);
    guest.expect(PacketOp::CreditRequest);
    assert!(guest.receive().is_none(), "asked once");
    // A driver that claims to have consumed more than it received gains nothing.
    guest.send(
        Header {
            fwd_cnt: 5000,
            ..small
        },
        &[],
    );
    assert!(
        guest.receive().is_none(),
        "an answer without room is no reason to ask again"
    );
    guest.send(
        Header {
            fwd_cnt: 100,
            ..small
        },
        &[],
    );
    assert_eq!(guest.expect(PacketOp::Data).1.len(), 100);
    guest.expect(PacketOp::CreditRequest);
    guest.send(
        Header {
            fwd_cnt: 200,
            ..small
        },
        &[],
    );
    assert_eq!(guest.expect(PacketOp::Data).1.len(), 50);
}

#[test]
fn clients_that_say_nonsense_are_dropped_and_others_are_not() {
    let mut guest = TestDriver::new();
    let mut wrong = guest.client(b"HELO\n");
    let half = guest.client(b"CONNECT ");
    guest.driver.run();
    assert_eq!(wrong.read(&mut [0]).unwrap(), 0);
    drop(half);
    let mut late = guest.client(b"CONNE");
    guest.driver.run();
    late.write_all(b"CT 8\n").unwrap();
    assert_eq!(guest.expect(PacketOp::Request).0.dst_port, 8);
}

#[test]
fn silent_clients_make_room_for_others() {
    let mut guest = TestDriver::new();
    let mut silent = vec![];
    for _ in 0..65 {
        silent.push(guest.client(b""));
        guest.driver.run();
    }
    // The oldest client was dropped.
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
    silent[1].set_nonblocking(true).unwrap();
    let error = silent[1].read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    guest.accept();
}

#[test]
fn connections_are_capped() {
    let mut guest = TestDriver::new();
    let listener = UnixListener::bind(guest.path("vsock_99")).unwrap();
    let mut programs = vec![];
    for port in 0..CONNECTIONS_MAX {
        let request = Header {
            src_port: u32::try_from(port).unwrap(),
            ..packet(PacketOp::Request, 99, 0)
        };
        guest.send(request, &[]);
        guest.expect(PacketOp::Response);
        programs.push(listener.accept().unwrap());
    }
    guest.send(
        Header {
            src_port: 1 << 20,
            ..packet(PacketOp::Request, 99, 0)
        },
        &[],
    );
    guest.expect(PacketOp::Reset);
    let mut client = guest.client(b"CONNECT 7\n");
    guest.driver.run();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    // A connection that ends makes room for another.
    guest.send(
        Header {
            src_port: 5,
            ..packet(PacketOp::Reset, 99, 0)
        },
        &[],
    );
    guest.accept();
}

#[test]
fn resets_that_the_guest_does_not_take_hold_it_up() {
    let mut guest = TestDriver::new();
    let header = packet(PacketOp::Data, 5, 0).to_bytes();
    let mut done = 0;
    for _ in 0..RESETS_MAX + 10 {
        guest.driver.chain(TRANSMIT, &[Buffer::Out(&header)]);
        guest.driver.run();
        done += guest.driver.used(TRANSMIT).len();
    }
    assert_eq!(done, RESETS_MAX);
    // The device continues as resets are taken.
    for _ in 0..RESETS_MAX + 10 {
        guest.expect(PacketOp::Reset);
    }
    assert!(guest.receive().is_none());
    assert_eq!(guest.driver.used(TRANSMIT).len(), 10);
}

#[test]
fn receive_buffers_without_room_need_a_reset() {
    for length in [0, 1, HEADER_BYTES - 1, HEADER_BYTES] {
        let mut guest = TestDriver::new();
        guest.driver.chain(RECEIVE, &[Buffer::In(length)]);
        guest.send(packet(PacketOp::Data, 5, 0), &[]);
        assert!(guest.driver.needs_reset(), "{length}");
    }
}
