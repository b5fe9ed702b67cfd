// SPDX-License-Identifier: Apache-2.0
//! Identifies clients and decides what they may do. The crate contains the identities from
//! certificates and sockets, the policy, the listener that admits clients, the audit log, and the
//! metrics and spans that the daemon of a host and the controller of a fleet publish about
//! themselves.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod addresses;
pub mod assertion;
pub mod audit;
pub mod certs;
pub mod connect;
pub mod folders;
pub mod identity;
pub mod listen;
pub mod policy;
pub mod scrape;
pub mod spans;
