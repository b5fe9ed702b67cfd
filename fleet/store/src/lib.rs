// SPDX-License-Identifier: Apache-2.0
//! Stores the controller's persistent state in an ordered map of keys to values with revisions. The
//! map has the semantics of etcd.
//!
//! ```text
//!            compare-and-swap                     one revision per transaction
//!  commit ──────────────────▶ keys and values ──────────────────────────────▶ watch
//!                                  ▲
//!                     a lease that expires deletes its keys
//! ```
//!
//! * A transaction is applied as a whole or not at all, and advances the revision by one.
//! * A transaction has limits in number and in bytes, which etcd with its defaults keeps to.
//!   [`commit_all`] splits writes by both.
//! * A condition compares the revision at which a key was created or last modified, never its
//!   value.
//! * [`Fence`] is a condition on the leader's key. Every write of a leader carries it, so that a
//!   replica that has lost the election without noticing changes nothing.
//! * A watch reports every change from a revision on, in order and exactly once. It ends with
//!   [`StoreError::Compacted`] if a change that it has not reported is no longer kept.
//!
//! [`conformance`] tests any implementation.

#![forbid(unsafe_code)]

pub mod args;
#[cfg(test)]
pub mod conformance;
#[cfg(feature = "embedded")]
mod embedded;
#[cfg(feature = "embedded")]
mod embedded_watch;
mod etcd;
#[cfg(test)]
mod etcd_tests;
mod layer;
mod members;
pub mod registry;
mod renewal;
mod store;

#[cfg(feature = "embedded")]
pub use self::embedded::EmbeddedStore;
pub use self::etcd::{DEFAULT_ROOT, EtcdStore};
pub use self::layer::Layer;
pub use self::renewal::Renewal;
pub use self::store::{
    Change, Entry, Expected, Fence, LeaseId, MAX_ROOT_BYTES, MAX_TRANSACTION_BYTES,
    MAX_TRANSACTION_OPS, Revision, Snapshot, Store, StoreError, Transaction, Watch, Write,
    commit_all, folders,
};

#[cfg(test)]
mod tests;
