// SPDX-License-Identifier: Apache-2.0
//! Provides the policy in force, which is read again on SIGHUP.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;

use super::decide::{Decision, Permission, Question};
use super::file::{Policy, PolicyError};
use super::spent::Spent;

/// The policy in force. It can be reloaded.
#[derive(Clone, Debug)]
pub struct LivePolicy {
    file: Option<PathBuf>,
    current: watch::Sender<Arc<Policy>>,
    spent: Spent,
}

impl LivePolicy {
    /// Reads a policy file.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn read(file: PathBuf) -> Result<Self, PolicyError> {
        let policy = Policy::read(&file)?;
        Ok(Self {
            file: Some(file),
            current: watch::Sender::new(Arc::new(policy)),
            spent: Spent::default(),
        })
    }

    /// Creates the policy that applies without a file. This user and root are admins, and no other
    /// principal may do anything.
    #[must_use]
    pub fn own_user_only(uid: u32) -> Self {
        Self {
            file: None,
            current: watch::Sender::new(Arc::new(Policy::own_user_only(uid))),
            spent: Spent::default(),
        }
    }

    /// Returns the policy in force. A unary call keeps it until the call ends. A stream is
    /// authorized again after a reload.
    #[must_use]
    pub fn current(&self) -> Arc<Policy> {
        Arc::clone(&self.current.borrow())
    }

    /// Decides about a change that is about to be made, and counts it against the caps of the rule
    /// that allows it. `guests` are the names under which the guests of the question are counted.
    /// They must be unique among all counted guests.
    #[must_use]
    pub fn charge(&self, question: &Question<'_>, guests: &[&str]) -> Decision {
        self.current()
            .charge(question, guests, &self.spent, Instant::now())
    }

    /// Returns the keys that a call with the role and the guests of the question may change. With
    /// `counts`, the call is counted as a change of `guests`, which are the names under which the
    /// guests of the question are counted. They must be unique among all counted guests.
    ///
    /// # Errors
    /// No rule gives the role on the guests. The sentence names the closest rule.
    pub fn permission(
        &self,
        question: &Question<'_>,
        guests: &[&str],
        counts: bool,
    ) -> Result<Permission, String> {
        let count = counts.then(|| (&self.spent, Instant::now()));
        self.current().permission(question, guests, count)
    }

    /// Subscribes to the results of [`LivePolicy::reload`].
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<Policy>> {
        self.current.subscribe()
    }

    /// Reads the file again. On an error the old policy stays in force.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn reload(&self) -> Result<(), PolicyError> {
        if let Some(file) = &self.file {
            self.current.send_replace(Arc::new(Policy::read(file)?));
        }
        Ok(())
    }
}
