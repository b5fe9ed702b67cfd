// SPDX-License-Identifier: Apache-2.0
//! Waits for the discovery of a kernel that does not register.

use std::sync::Arc;
use std::time::Instant;

use super::Keys;

impl Keys {
    /// Discovers the guest's kernel if it is not known. While the guest is busy, tries again until
    /// the deadline. Dropping the future ends the wait. The caller must check afterwards whether
    /// the kernel is known.
    pub async fn find_kernel(&self, deadline: Instant) {
        // The rest of the time is for the call, which then says what the guest is busy with.
        let rest = deadline.saturating_duration_since(Instant::now()) / 10;
        let deadline = deadline.checked_sub(rest).unwrap_or(deadline);
        while !self.shared.registry.needs_no_discovery() {
            let shared = Arc::clone(&self.shared);
            // A discovery takes tens of milliseconds.
            let look = tokio::task::spawn_blocking(move || shared.registry.look_for_kernel());
            let Ok(Some(rest)) = look.await else { return };
            let next = Instant::now() + rest;
            if next >= deadline {
                return;
            }
            tokio::time::sleep_until(next.into()).await;
        }
    }
}
