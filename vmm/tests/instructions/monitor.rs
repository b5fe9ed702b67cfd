// SPDX-License-Identifier: Apache-2.0
//! A process that owns the memory of a guest, as another monitor does. An attacher reaches the
//! memory through this process, whose instructions are not counted.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use patchbay_attach::flat_view::{RamRange, Removal};
use patchbay_attach::memory::{Access, AttachedRam};
use patchbay_attach::process::Process;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::callgrind::{self, Program};
use super::kernel::MEMORY_BYTES;

/// Value of the variable `callgrind::ROW` that makes a process act as such a monitor.
pub const ROW: &str = "monitor";

/// The process. It ends when its standard input, a socket, is closed.
pub struct Monitor {
    child: Child,
    socket: Option<UnixStream>,
    process: Process,
    /// The address of the guest's memory in the process.
    map: u64,
}

/// Maps the guest's memory, sends its address and a pidfd of this process, and waits for the end.
/// Valgrind does not support pidfd_open(), so the counted process cannot call it.
pub fn run() {
    let socket = std::io::stdin();
    let socket = rustix::io::dup(&socket).map(UnixStream::from);
    let socket = socket.expect("a descriptor");
    let file = tempfile::tempfile().expect("a file");
    file.set_len(MEMORY_BYTES).expect("room");
    let size = usize::try_from(MEMORY_BYTES).expect("small");
    let map = MmapRegion::<()>::from_file(FileOffset::new(file, 0), size).expect("a mapping");
    let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    let address = (map.as_ptr() as u64).to_ne_bytes();
    let sent = socket.send_with_fd(&address[..], pidfd.as_raw_fd());
    sent.expect("the parent receives");
    let _ = std::io::copy(&mut &socket, &mut std::io::sink());
}

impl Monitor {
    pub fn start() -> Self {
        let (own, other) = UnixStream::pair().expect("sockets");
        let child = Command::new(Program::executable())
            .args(["--exact", super::TEST, "--nocapture"])
            .env(callgrind::ROW, ROW)
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let mut address = [0; 8];
        let (bytes, pidfd) = own.recv_with_fd(&mut address).expect("a message");
        assert_eq!(bytes, address.len());
        let process = Process::of(pidfd.expect("a pidfd").into());
        Self {
            child,
            socket: Some(own),
            process: process.expect("the child"),
            map: u64::from_ne_bytes(address),
        }
    }

    /// Returns the memory in the form in which an attacher accesses it.
    pub fn memory(&self, access: Access) -> AttachedRam {
        let range = RamRange {
            addresses: 0..MEMORY_BYTES,
            backend: "ram".to_owned(),
            offset: 0,
            removal: Removal::Never,
        };
        let host_address = |address| Ok(self.map + address);
        let deadline = Instant::now() + Duration::from_secs(60);
        let ram = AttachedRam::open(&self.process, vec![range], access, deadline, host_address);
        let ram = ram.expect("memory");
        assert_eq!(ram.is_mapped(), access == Access::File);
        ram
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.socket = None;
        let _ = self.child.wait();
    }
}
