// SPDX-License-Identifier: Apache-2.0

//! Large transfers in both directions at once, between a client on the host and a guest that
//! follows the rules for credit and notification as Linux does. Client, guest and device run on
//! threads of their own. A lost wake-up or a lost byte stalls the transfer.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::super::packet::{HEADER_BYTES, Header, PacketOp, SHUTDOWN_BOTH, SHUTDOWN_SEND, STREAM};
use super::super::{EVENTS_MAX, RECEIVE, RESETS_MAX, TRANSMIT, Vsock, VsockConfig};
use crate::devices::virtio::Memory;
use crate::devices::virtio::device::{Device, NextTurn};
use crate::devices::virtio::testing::{Buffer, Driver, queue_at};
use crate::devices::virtio::thread::DeviceThread;

const CID: u32 = 42;
const PORT: u32 = 7;
/// Chains in flight in each queue.
const BUFFERS: usize = 8;
const PACKETS: usize = 4;
/// Size of the guest's receive buffer in bytes.
const ROOM: u32 = 0x1_0000;
/// Timeout in milliseconds; a correct run never reaches it.
const PATIENCE: u16 = 20_000;

/// A guest that listens on [`PORT`] and echoes everything.
struct Echo {
    driver: Driver,
    /// Readable when the device raises its interrupt.
    interrupt: Epoll,
    /// Addresses of the receive buffers, oldest first.
    buffers: VecDeque<u64>,
    /// Packets that the device has not given back.
    sending: usize,
    /// Packets without data that wait to be sent.
    replies: VecDeque<PacketOp>,
    /// Port of the connection on the host.
    host_port: u32,
    received: VecDeque<u8>,
    forwarded: u32,
    sent: u32,
    peer_room: u32,
    peer_forwarded: u32,
    peer_finished: bool,
    closing: bool,
    /// Number of connections that have ended.
    closed: usize,
}

impl Echo {
    fn new(driver: Driver) -> Self {
        let interrupt = Epoll::new().unwrap();
        let source = driver.transport.interrupt().as_raw_fd();
        let event = EpollEvent::new(EventSet::IN, 0);
        interrupt.ctl(ControlOperation::Add, source, event).unwrap();
        Self {
            driver,
            interrupt,
            buffers: VecDeque::new(),
            sending: 0,
            replies: VecDeque::new(),
            host_port: 0,
            received: VecDeque::new(),
            forwarded: 0,
            sent: 0,
            peer_room: 0,
            peer_forwarded: 0,
            peer_finished: false,
            closing: false,
            closed: 0,
        }
    }

    /// Serves this many connections, one after another, each from its request to its reset.
    fn serve(&mut self, connections: usize) {
        while self.closed < connections {
            let mut busy = true;
            while busy {
                self.want_interrupts(false);
                while self.step() {}
                self.want_interrupts(true);
                fence(Ordering::SeqCst);
                // Handles the chains that the device used before it saw that interrupts are
                // enabled.
                busy = self.step();
            }
            if self.closed < connections {
                self.wait();
            }
        }
    }

    fn want_interrupts(&self, wanted: bool) {
        for queue in [RECEIVE, TRANSMIT] {
            let flags = GuestAddress(queue_at(queue)[1]);
            let value = u16::from(!wanted);
            self.driver.memory.write_obj(value, flags).unwrap();
        }
    }

    fn wait(&self) {
        let mut events = [EpollEvent::default()];
        let ready = self.interrupt.wait(PATIENCE.into(), &mut events).unwrap();
        assert_eq!(
            ready, 1,
            "the device went to sleep: {} bytes received, {} sent, {} of them passed on, {} packets under way",
            self.forwarded, self.sent, self.peer_forwarded, self.sending
        );
        self.driver.transport.interrupt().read().unwrap();
    }

    fn notify(&self, queue: usize) {
        let queue = u32::try_from(queue).unwrap();
        self.driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }

    /// Makes one pass over the queues. Returns whether there was anything to do.
    fn step(&mut self) -> bool {
        let mut did = self.fill();
        self.sending -= self.driver.used(TRANSMIT).len();
        for (_, written) in self.driver.used(RECEIVE) {
            let buffer = self.buffers.pop_front().unwrap();
            let bytes = self.driver.bytes(buffer, written as usize);
            self.receive(&bytes);
            did = true;
        }
        while self.sending < PACKETS && self.send() {
            did = true;
        }
        did
    }

    fn fill(&mut self) -> bool {
        if self.buffers.len() > BUFFERS / 2 {
            return false;
        }
        while self.buffers.len() < BUFFERS {
            let buffer = self
                .driver
                .chain(RECEIVE, &[Buffer::In(HEADER_BYTES + 4000)]);
            self.buffers.push_back(buffer[0]);
        }
        self.notify(RECEIVE);
        true
    }

    fn receive(&mut self, bytes: &[u8]) {
        let (header, data) = bytes.split_first_chunk::<HEADER_BYTES>().unwrap();
        let header = Header::from_bytes(header);
        if header.op == PacketOp::Reset {
            self.closed += 1;
            return;
        }
        self.peer_room = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
        match header.op {
            PacketOp::Request => {
                self.host_port = header.src_port;
                (self.forwarded, self.sent) = (0, 0);
                (self.peer_finished, self.closing) = (false, false);
                self.replies.push_back(PacketOp::Response);
            }
            PacketOp::Data => {
                self.received.extend(data);
                assert!(self.received.len() <= ROOM as usize, "beyond credit");
            }
            PacketOp::CreditRequest => self.replies.push_back(PacketOp::CreditUpdate),
            PacketOp::CreditUpdate => {}
            PacketOp::Shutdown => {
                assert_eq!(header.flags, SHUTDOWN_SEND);
                self.peer_finished = true;
            }
            other => panic!("{other:?}"),
        }
    }

    /// Sends the next packet if credit allows.
    fn send(&mut self) -> bool {
        let credit = self.peer_room - (self.sent - self.peer_forwarded);
        let length = self.received.len().min(credit as usize).min(5000);
        let mut flags = 0;
        let (op, data) = if let Some(op) = self.replies.pop_front() {
            (op, vec![])
        } else if length > 0 {
            (PacketOp::Data, self.received.drain(..length).collect())
        } else if self.peer_finished && self.received.is_empty() && !self.closing {
            self.closing = true;
            flags = SHUTDOWN_BOTH;
            (PacketOp::Shutdown, vec![])
        } else {
            return false;
        };
        self.forwarded += u32::try_from(data.len()).unwrap();
        self.sent += u32::try_from(data.len()).unwrap();
        let header = Header {
            src_cid: CID.into(),
            dst_cid: 2,
            src_port: PORT,
            dst_port: self.host_port,
            length: u32::try_from(data.len()).unwrap(),
            kind: STREAM,
            op,
            flags,
            buf_alloc: ROOM,
            fwd_cnt: self.forwarded,
        };
        let header = header.to_bytes();
        self.driver
            .chain(TRANSMIT, &[Buffer::Out(&header), Buffer::Out(&data)]);
        self.sending += 1;
        self.notify(TRANSMIT);
        true
    }
}

fn exchange(socket: &Path, round: usize) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(PATIENCE.into())))
        .unwrap();
    stream
        .write_all(format!("CONNECT {PORT}\n").as_bytes())
        .unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.starts_with("OK "), "{line:?}");
    let data: Vec<u8> = (0..600_000).map(|at| ((at + round) % 251) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Pieces of varying sizes, so that buffers become full and empty.
            for piece in data.chunks(1 + round * 1000) {
                stream.write_all(piece).unwrap();
            }
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = vec![];
        reader.read_to_end(&mut received).unwrap();
        assert!(received == data, "{} bytes came back", received.len());
    });
}

#[test]
fn much_goes_both_ways_at_once() {
    const ROUNDS: usize = 30;
    let folder = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        path: folder.path().join("vsock"),
        cid: CID,
        privileged: vec![],
    };
    let driver = Driver::new(Vsock::new(&config).unwrap());
    let thread =
        DeviceThread::new("devices".into(), Arc::from([driver.transport.clone()])).unwrap();
    thread.start(|why| panic!("{why}")).unwrap();
    let guest = std::thread::spawn(move || {
        Echo::new(driver).serve(ROUNDS);
    });
    for round in 0..ROUNDS {
        exchange(&config.path, round);
    }
    guest.join().unwrap();
    thread.stop();
}

/// Clients on the host connect and disconnect while the guest takes no packets.
#[test]
fn resets_that_the_host_causes_are_bounded_too() {
    let folder = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        path: folder.path().join("vsock"),
        cid: 3,
        privileged: vec![],
    };
    let mut vsock = Vsock::new(&config).unwrap();
    let memory = Memory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
    let mut work = || {
        // Runs until the device has read the greeting and seen that the client has left.
        while let NextTurn::Again = vsock.process(&mut [None, None, None], &memory).unwrap() {}
        vsock.resets.len()
    };
    let connect = || {
        let mut client = UnixStream::connect(&config.path).unwrap();
        client.write_all(b"CONNECT 7\n").unwrap();
        client
    };
    let greeted = RESETS_MAX - EVENTS_MAX;
    for _ in 0..greeted {
        let client = connect();
        work();
        drop(client);
        work();
    }
    assert_eq!(work(), greeted);
    // The clients are fewer than the kernel's listen backlog, and more than the device has room
    // for.
    let clients: Vec<_> = (0..120).map(|_| connect()).collect();
    work();
    drop(clients);
    for _ in 0..10 {
        let waiting = work();
        assert!(waiting <= RESETS_MAX, "{waiting} resets wait");
    }
}
