// SPDX-License-Identifier: Apache-2.0
//! Identifies the principal of a request, and refuses requests that do not come from the page.
//!
//! A TCP connection within the host has no peer credentials, but the kernel lists the owner of each
//! socket in `/proc/net/tcp`. The page looks up the uid of its peer there.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, Method, Request, header};
use patchbay_access::identity::Identity;

use super::Shared;
pub use crate::authority::may_view;

/// The header that every request that changes state must have. A page of another origin cannot set
/// it.
pub const REQUEST_HEADER: &str = "x-patchbay-request";

/// The state of an established connection in `/proc/net/tcp`.
const ESTABLISHED: &str = "01";

/// Returns the uid that owns the socket at `theirs` that is connected to `ours`.
pub fn loopback_uid(theirs: SocketAddr, ours: SocketAddr) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let mut tables = tables
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok());
    tables.find_map(|table| find_uid(&table, theirs, ours))
}

fn find_uid(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_it = parse_address(fields.next()?)? == plain(local)
            && parse_address(fields.next()?)? == plain(remote)
            && fields.next()? == ESTABLISHED;
        let uid = fields.nth(3)?.parse().ok()?;
        // For a socket that no process holds, the kernel lists uid 0 and inode 0.
        let inode: u64 = fields.nth(1)?.parse().ok()?;
        (is_it && inode != 0).then_some(uid)
    })
}

/// Converts an IPv4-mapped IPv6 address to IPv4, because both name the same peer.
fn plain(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// Parses an address such as "0100007F:1F90". Each 32-bit word is in host byte order.
fn parse_address(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(index * 8)?);
            }
            IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some((ip, port))
}

/// Returns the reason to refuse a request before its content is examined; `None` accepts it.
pub fn refusal<B>(shared: &Shared, identity: &Identity, request: &Request<B>) -> Option<String> {
    let headers = request.headers();
    let host = request.uri().authority().map(|host| host.as_str());
    let host = host.or_else(|| text(headers, header::HOST.as_str()));
    if !shared.is_own_host(host) {
        return Some(format!(
            "the page is not served as {:?}; open it by a loopback address",
            host.unwrap_or_default()
        ));
    }
    if let Err(refusal) = shared.admission.check(identity) {
        return Some(refusal.to_string());
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return foreign(headers, host.unwrap_or_default());
    }
    None
}

/// Returns the reason why a request that changes state does not come from this page; `None` if it
/// does.
fn foreign(headers: &HeaderMap, host: &str) -> Option<String> {
    let origin = text(headers, "origin").and_then(|origin| Some(origin.split_once("://")?.1));
    let site = text(headers, "sec-fetch-site");
    let has_header = headers.contains_key(REQUEST_HEADER);
    let is_ours =
        origin.is_none_or(|origin| origin == host) && site.is_none_or(|site| site == "same-origin");
    (!has_header || !is_ours).then(|| "the request is not of this page".to_owned())
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0000000000000000 20 0 0 10 -1
   1: 0100007F:9C41 0100007F:1F90 04 00000000:00000000 00:00000000 00000000     0        0 0 1 0000000000000000
   2: 0100007F:9C42 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 0 1 0000000000000000
   3: 0000000000000000FFFF00000100007F:9C43 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 4243 1 0
   4: junk
";

    fn uid(port: u16) -> Option<u32> {
        let local = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        find_uid(TABLE, local(port), local(8080))
    }

    #[test]
    fn the_kernel_names_the_user_of_a_connected_socket() {
        assert_eq!(uid(40_000), Some(1000));
        assert_eq!(uid(40_003), Some(1001), "IPv4 on an IPv6 socket");
        assert_eq!(uid(40_001), None, "closed by its process");
        assert_eq!(uid(40_002), None, "without a process");
        assert_eq!(uid(40_009), None, "not listed");
    }

    #[test]
    fn a_real_connection_is_ours() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("free");
        let address = listener.local_addr().expect("bound");
        let client = std::net::TcpStream::connect(address).expect("connects");
        let theirs = client.local_addr().expect("connected");
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(loopback_uid(theirs, address), Some(own));
    }
}
