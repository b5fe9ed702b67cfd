// SPDX-License-Identifier: Apache-2.0

//! Tests the ends of connections and of the device: by either side, by a reset, and in a copy of
//! the guest.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixListener;

use patchbay_proto::socket::SocketError;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_CONFIG;
use vm_memory::{Bytes, GuestAddress};

use super::super::packet::{Header, PacketOp, SHUTDOWN_BOTH, SHUTDOWN_SEND};
use super::super::{EVENT, RECEIVE, TRANSPORT_RESET, Vsock, VsockConfig, VsockError};
use super::{CID, TestDriver, packet};
use crate::devices::virtio::testing::Buffer;

#[test]
fn the_host_ends_one_way_and_then_the_other() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    client.write_all(b"last").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.expect(PacketOp::Data).1, b"last");
    assert_eq!(guest.expect(PacketOp::Shutdown).0.flags, SHUTDOWN_SEND);
    guest.send(packet(PacketOp::Data, port, 5), b"reply");
    let mut reply = [0; 5];
    client.read_exact(&mut reply).unwrap();
    drop(client);
    assert_eq!(guest.expect(PacketOp::Shutdown).0.flags, SHUTDOWN_BOTH);
    // The connection is forgotten: any further packet is unexpected.
    guest.send(packet(PacketOp::Data, port, 1), b"x");
    guest.expect(PacketOp::Reset);
}

#[test]
fn the_guest_ends_and_everything_it_sent_arrives() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    guest.send(packet(PacketOp::Data, port, 4), b"last");
    let end = Header {
        flags: SHUTDOWN_BOTH,
        ..packet(PacketOp::Shutdown, port, 0)
    };
    guest.send(end, &[]);
    guest.expect(PacketOp::Reset);
    let mut read = vec![];
    client.read_to_end(&mut read).unwrap();
    assert_eq!(read, b"last");
}

/// Linux resets a connection 8 s after closing it if the host has not read everything.
#[test]
fn what_the_guest_sent_before_a_reset_arrives() {
    let mut guest = TestDriver::new();
    let (mut client, port) = guest.accept();
    let data = vec![7; 0x8000];
    let mut sent = 0;
    let mut forwarded = 0;
    // Sends more than the unix socket holds, so that a part waits in the device.
    while sent - forwarded < 0x8000 {
        guest.send(packet(PacketOp::Data, port, data.len()), &data);
        sent += data.len();
        while let Some((header, _)) = guest.receive() {
            forwarded = header.fwd_cnt as usize;
        }
    }
    guest.send(packet(PacketOp::Reset, port, 0), &[]);
    assert!(guest.receive().is_none(), "a reset is not answered");
    guest.send(packet(PacketOp::Data, port, 1), b"x");
    guest.expect(PacketOp::Reset);
    let mut read = 0;
    let mut piece = vec![0; 0x1_0000];
    client.set_nonblocking(true).unwrap();
    loop {
        match client.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => read += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => guest.driver.run(),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(read, sent);
}

#[test]
fn a_client_that_leaves_before_the_guest_accepts() {
    let mut guest = TestDriver::new();
    let client = guest.client(b"CONNECT 7\n");
    let (request, _) = guest.expect(PacketOp::Request);
    drop(client);
    guest.expect(PacketOp::Reset);
    guest.send(packet(PacketOp::Response, request.src_port, 0), &[]);
    guest.expect(PacketOp::Reset);
}

#[test]
fn a_reset_ends_connections_and_the_socket_stays() {
    let mut guest = TestDriver::new();
    let (mut client, _) = guest.accept();
    guest.driver.start();
    guest.buffers.clear();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    guest.accept();
}

#[test]
fn one_monitor_listens_and_the_socket_goes_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        path: folder.path().join("vsock"),
        cid: CID,
        privileged: vec![],
    };
    let first = Vsock::new(&config).unwrap();
    assert!(matches!(
        Vsock::new(&config),
        Err(VsockError::Socket(SocketError::InUse(_)))
    ));
    drop(first);
    assert!(!config.path.exists());
    // An abandoned socket is replaced; another file is not.
    drop(UnixListener::bind(&config.path).unwrap());
    drop(Vsock::new(&config).unwrap());
    std::fs::write(&config.path, "precious").unwrap();
    assert!(matches!(
        Vsock::new(&config),
        Err(VsockError::Socket(SocketError::NotASocket(_)))
    ));
    assert!(config.path.exists());
    for cid in [0, 1, 2, u32::MAX] {
        let config = VsockConfig {
            cid,
            ..config.clone()
        };
        assert!(matches!(Vsock::new(&config), Err(VsockError::Cid(_))));
    }
}

#[test]
fn a_copy_tells_its_guest_that_connections_are_gone() {
    let mut guest = TestDriver::new();
    let _client = guest.accept();
    // A buffer waits for a packet.
    assert!(guest.receive().is_none());
    let event = guest.driver.chain(EVENT, &[Buffer::In(8)])[0];
    guest.driver.run();
    assert_eq!(guest.driver.used(EVENT), []);

    let folder = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        path: folder.path().join("vsock"),
        cid: CID + 1,
        privileged: vec![],
    };
    guest
        .driver
        .memory
        .write_obj(u64::MAX, GuestAddress(event))
        .unwrap();
    let copy = guest.driver.copy(Vsock::new(&config).unwrap()).unwrap();
    guest = TestDriver {
        driver: copy,
        buffers: guest.buffers,
        folder,
    };
    guest.driver.run();
    assert_eq!(guest.driver.used(EVENT).len(), 1);
    assert_eq!(guest.driver.bytes(event, 4), TRANSPORT_RESET.to_le_bytes());
    assert!(guest.driver.interrupted());
    // The driver reads the new CID.
    let mut cid = [0; 4];
    let config = VIRTIO_MMIO_CONFIG.into();
    guest.driver.transport.read(config, &mut cid);
    assert_eq!(u32::from_le_bytes(cid), CID + 1);
    // The buffer is used for the first packet.
    let _client = guest.client(b"CONNECT 7\n");
    guest.driver.run();
    assert_eq!(guest.driver.used(RECEIVE).len(), 1);
    // The event is not sent again.
    guest.driver.chain(EVENT, &[Buffer::In(8)]);
    guest.driver.run();
    assert_eq!(guest.driver.used(EVENT), []);
}
