// SPDX-License-Identifier: Apache-2.0

//! Fuzz targets that drive each device with the fuzzer's bytes.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use super::DiskLimits;
use super::block::{Block, DiskConfig};
use super::device::Device;
use super::rng::Rng;
use super::testing::{BUFFERS, Buffer, Driver, QUEUE};
use super::vsock::{CID_MIN, Vsock, VsockConfig};
use patchbay_guest::fuzzing::Numbers;

/// Size of a vsock header in bytes.
const HEADER: usize = 44;

/// Host sockets of one run, removed when dropped.
struct Sockets(PathBuf);

impl Sockets {
    /// Derives the path from the thread's number. Runs on one thread follow each other, so they can
    /// use the same path.
    fn new() -> Self {
        let thread = rustix::thread::gettid().as_raw_nonzero();
        Self(std::env::temp_dir().join(format!("patchbay-fuzz-{thread}")))
    }

    fn vsock(&self) -> Vsock {
        let config = VsockConfig {
            path: self.0.clone(),
            cid: CID_MIN,
            privileged: vec![],
        };
        // A killed run may have left its socket.
        let _ = std::fs::remove_file(&self.0);
        Vsock::new(&config).expect("the host has sockets")
    }

    /// Returns the path of the socket for the guest's connections to port 52.
    fn port(&self) -> PathBuf {
        let mut name = self.0.clone().into_os_string();
        name.push("_52");
        name.into()
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.port());
    }
}

fn disk() -> (Block, impl AsRawFd) {
    let image = memfd_create("disk", MemfdFlags::CLOEXEC).expect("the host has memory");
    rustix::fs::ftruncate(&image, 64 << 10).expect("the host has memory");
    let config = DiskConfig {
        path: Path::new("/proc/self/fd").join(image.as_raw_fd().to_string()),
        read_only: false,
        limits: DiskLimits::default(),
    };
    (Block::open(&config, 0).expect("it was just made"), image)
}

/// Drives any device with any registers, descriptors and buffers.
pub fn virtio(data: &[u8]) {
    let mut numbers = Numbers(data);
    let sockets = Sockets::new();
    let (disk, _image) = disk();
    let (device, queue): (Box<dyn Device>, usize) = match numbers.u8() % 4 {
        0 => (Box::new(Rng), 0),
        1 => (Box::new(disk), 0),
        2 => (Box::new(sockets.vsock()), 1),
        _ => (Box::new(sockets.vsock()), 0),
    };
    let mut driver = Driver::new(device);
    for _ in 0..64 {
        if !numbers.more() {
            break;
        }
        let step = numbers.u8();
        // Most addresses are plausible. The others fail at the first check.
        let mut address = || match step >> 6 {
            0..3 => BUFFERS + u64::from(numbers.u16()),
            _ => numbers.u64(),
        };
        match step % 8 {
            0 | 1 => {
                let address = address();
                let length = match step & 8 {
                    0 => u32::from(numbers.u8()),
                    _ => numbers.u32(),
                };
                let [index, flags, next] = numbers.bytes();
                let index = u16::from(index) % QUEUE;
                driver.describe(
                    queue,
                    index,
                    (
                        address,
                        length,
                        u16::from(flags % 8),
                        u16::from(next) % (QUEUE + 1),
                    ),
                );
            }
            2 => driver.offer(queue, u16::from(numbers.u8()) % (QUEUE + 1)),
            3 => driver.set_available(queue, numbers.u16()),
            4 => {
                let at = address();
                let length = usize::from(numbers.u8() % 64);
                // Writes outside memory have no effect.
                let _ = driver
                    .memory
                    .write_slice(numbers.take(length), GuestAddress(at));
            }
            5 => {
                let at = numbers.u16() % 0x1000;
                match step >> 4 {
                    0..12 => driver.set(u32::from(at) & !3, numbers.u32()),
                    wide => {
                        let mut bytes = numbers.bytes::<8>();
                        let width = 1 << (wide % 4);
                        driver.transport.write(at.into(), &bytes[..width]);
                        driver.transport.read(at.into(), &mut bytes[..width]);
                    }
                }
            }
            6 => driver.run(),
            _ => driver.start(),
        }
    }
    driver.run();
    driver.start();
    assert!(!driver.needs_reset());
}

/// Sends arbitrary packets between a well-behaved driver and clients on the host.
pub fn vsock(data: &[u8]) {
    let mut numbers = Numbers(data);
    let sockets = Sockets::new();
    let mut driver = Driver::new(sockets.vsock());
    let _ = std::fs::remove_file(sockets.port());
    let listener = UnixListener::bind(sockets.port()).expect("the host has sockets");
    listener.set_nonblocking(true).expect("a socket");
    let mut streams: Vec<UnixStream> = vec![];
    for _ in 0..48 {
        if !numbers.more() {
            break;
        }
        let step = numbers.u8();
        match step % 8 {
            // A nearly valid packet from the guest: address, ports, length, type, operation.
            0..4 => {
                let mut header = [0; HEADER];
                header[0] = 3;
                header[8] = 2;
                header[16] = numbers.u8() % 4;
                header[20..24].copy_from_slice(&match numbers.u8() {
                    0..128 => 52_u32.to_le_bytes(),
                    near => (0x4000_0000 + u32::from(near % 4)).to_le_bytes(),
                });
                header[24] = numbers.u8();
                header[28] = 1;
                header[30] = numbers.u8() % 9;
                header[32] = numbers.u8() % 4;
                header[36..44].copy_from_slice(&numbers.bytes::<8>());
                for _ in 0..(step >> 3) % 4 {
                    let at = usize::from(numbers.u8()) % HEADER;
                    header[at] = numbers.u8();
                }
                let length = match step >> 5 {
                    0 => usize::from(numbers.u8()),
                    _ => usize::from(header[24]),
                };
                let body = vec![step; length];
                driver.chain(1, &[Buffer::Out(&header), Buffer::Out(&body)]);
            }
            // Receive buffers for packets to the guest.
            4 => {
                driver.chain(0, &[Buffer::In(HEADER + usize::from(step))]);
            }
            5 => {
                if streams.len() < 8
                    && let Ok(mut stream) = UnixStream::connect(&sockets.0)
                {
                    let _ = stream.set_nonblocking(true);
                    let _ = stream.write_all(numbers.take(usize::from(step >> 3)));
                    streams.push(stream);
                }
            }
            6 => {
                streams.extend(listener.accept().map(|(stream, _)| stream));
                for stream in &mut streams {
                    let _ = stream.set_nonblocking(true);
                    let _ = stream.read(&mut [0; 256]);
                    let _ = stream.write(numbers.take(usize::from(step >> 3)));
                }
            }
            _ => {
                if !streams.is_empty() {
                    streams.swap_remove(usize::from(step >> 3) % streams.len());
                }
            }
        }
        driver.run();
        driver.used(0);
        driver.used(1);
    }
    driver.start();
    assert!(!driver.needs_reset());
}
