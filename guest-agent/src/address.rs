// SPDX-License-Identifier: Apache-2.0
//! Address of the monitor.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

/// `VMADDR_CID_HOST`, `include/uapi/linux/vm_sockets.h`.
const HOST_CID: u32 = 2;
const PORT: u32 = 1024;
/// `VMADDR_CID_ANY`.
const ANY_CID: u32 = u32::MAX;
/// Local ports of the agent. Linux requires CAP_NET_BIND_SERVICE for ports below 1024
/// (`LAST_RESERVED_PORT`, `net/vmw_vsock/af_vsock.c`), and the monitor accepts an agent only from
/// such a port. Some lower ports are assigned to other programs.
const OWN_PORTS: std::ops::RangeInclusive<u32> = 512..=1023;
/// A monitor that accepts no data for this long is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Vsock {
        cid: u32,
        port: u32,
    },
    /// A unix socket, which only tests use.
    Unix(PathBuf),
}

impl Default for Address {
    fn default() -> Self {
        Self::Vsock {
            cid: HOST_CID,
            port: PORT,
        }
    }
}

impl Address {
    /// Returns the address of the program that booted the guest to run commands in it.
    pub fn exec() -> Self {
        Self::Vsock {
            cid: HOST_CID,
            port: patchbay_proto::EXEC_PORT,
        }
    }

    pub fn connect(&self) -> io::Result<File> {
        let socket = self.open()?;
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        Ok(File::from(OwnedFd::from(socket)))
    }

    /// Connects without a send timeout to a program that may read late, such as one whose own
    /// output is blocked.
    pub fn connect_patiently(&self) -> io::Result<File> {
        Ok(File::from(OwnedFd::from(self.open()?)))
    }

    fn open(&self) -> io::Result<Socket> {
        Ok(match self {
            Self::Vsock { cid, port } => {
                let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
                bind_privileged(&socket)?;
                socket.connect(&SockAddr::vsock(*cid, *port))?;
                socket
            }
            Self::Unix(path) => {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
                socket.connect(&SockAddr::unix(path)?)?;
                socket
            }
        })
    }
}

/// Binds a free port of [`OWN_PORTS`]. The port of a connection that is still closing is not free.
fn bind_privileged(socket: &Socket) -> io::Result<()> {
    for port in OWN_PORTS.rev() {
        match socket.bind(&SockAddr::vsock(ANY_CID, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(io::Error::new(
                    error.kind(),
                    "the agent may not bind a port below 1024, by which the monitor recognises it; give it CAP_NET_BIND_SERVICE",
                ));
            }
            bound => return bound,
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vsock { cid, port } => write!(f, "the monitor at vsock {cid}:{port}"),
            Self::Unix(path) => write!(f, "the monitor at {}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("{text:?} is not an address; use vsock:CID:PORT or unix:PATH");
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("vsock", rest)) => {
                let (cid, port) = rest.split_once(':').ok_or_else(malformed)?;
                Ok(Self::Vsock {
                    cid: cid.parse().map_err(|_| malformed())?,
                    port: port.parse().map_err(|_| malformed())?,
                })
            }
            _ => Err(malformed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_or_refused() {
        assert_eq!("vsock:2:1024".parse(), Ok(Address::default()));
        assert_eq!("unix:/a:b".parse(), Ok(Address::Unix("/a:b".into())));
        for bad in ["", "unix:", "vsock:2", "vsock:x:1", "tcp:1:2", "2:1024"] {
            assert!(bad.parse::<Address>().is_err(), "{bad:?}");
        }
    }
}
