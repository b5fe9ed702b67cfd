// SPDX-License-Identifier: Apache-2.0
//! The policy in force, read again on SIGHUP.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use super::file::{Policy, PolicyError};

/// The policy that decides now.
#[derive(Clone, Debug)]
pub struct LivePolicy {
    file: Option<PathBuf>,
    current: Arc<RwLock<Arc<Policy>>>,
}

impl LivePolicy {
    /// Reads a policy file.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn read(file: PathBuf) -> Result<Self, PolicyError> {
        let policy = Policy::read(&file)?;
        let current = Arc::new(RwLock::new(Arc::new(policy)));
        let file = Some(file);
        Ok(Self { file, current })
    }

    /// Without a file: this user is an admin, and nobody else may do anything.
    #[must_use]
    pub fn own_user_only(uid: u32) -> Self {
        let current = Arc::new(RwLock::new(Arc::new(Policy::own_user_only(uid))));
        let file = None;
        Self { file, current }
    }

    /// The policy in force. A call keeps it to its end.
    #[must_use]
    pub fn current(&self) -> Arc<Policy> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&current)
    }

    /// Reads the file again. On an error the old policy stays in force.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn reload(&self) -> Result<(), PolicyError> {
        if let Some(file) = &self.file {
            let policy = Arc::new(Policy::read(file)?);
            *self.current.write().unwrap_or_else(PoisonError::into_inner) = policy;
        }
        Ok(())
    }
}
