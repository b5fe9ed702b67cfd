// SPDX-License-Identifier: Apache-2.0
//! Acts with the rights of another process.
//!
//! An attacher may have rights that a monitor lacks. What it does in a monitor's folders, it does
//! with the monitor's rights, so a hostile monitor gains nothing by naming a folder of others.
//!
//! Only the effective ids change, and only in a thread that then ends. The real and saved user
//! stay, so the monitor's user may neither signal nor trace this thread.

use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::process::{Gid, Uid, dumpable_behavior, geteuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// Serialises the calls. A call that began during another one would find the process undumpable,
/// and leave it so.
static DUMPABLE: Mutex<()> = Mutex::new(());

/// The ids and capabilities of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    user: u32,
    group: u32,
    groups: Vec<u32>,
    capabilities: CapabilitySet,
}

impl Rights {
    /// Reads the rights of a user's process from its `status` in /proc. Its capabilities count only
    /// if they are those of this process's user namespace.
    pub fn parse(user: u32, status: &str, has_capabilities: bool) -> Option<Self> {
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
        let group = field("Gid:")?.split_ascii_whitespace().nth(1)?;
        let groups = field("Groups:")?.split_ascii_whitespace();
        let capabilities = u64::from_str_radix(field("CapEff:")?.trim(), 16).ok()?;
        Some(Self {
            user,
            group: group.parse().ok()?,
            groups: groups.map(|id| id.parse().ok()).collect::<Option<_>>()?,
            capabilities: match has_capabilities {
                true => CapabilitySet::from_bits_retain(capabilities),
                false => CapabilitySet::empty(),
            },
        })
    }

    /// Calls a function in a thread that has these rights.
    ///
    /// # Errors
    /// This process may not take the rights, or a thread cannot be started; otherwise those of the
    /// function.
    pub fn call<T: Send>(
        &self,
        function: impl FnOnce() -> Result<T, String> + Send,
    ) -> Result<T, String> {
        let taken = || {
            self.take().map_err(|error| {
                format!(
                    "the rights of user {} cannot be taken ({error}); run as this user, or with CAP_SETUID and CAP_SETGID",
                    self.user
                )
            })
        };
        // A change of the effective user makes the process undumpable.
        let _guard = DUMPABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let dumpable = dumpable_behavior();
        let result = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("rights".to_owned());
            let thread = thread.spawn_scoped(scope, || taken().and_then(|()| function()));
            let thread = thread.map_err(|error| format!("a thread cannot be started ({error})"))?;
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err("the thread with these rights panicked".to_owned()))
        });
        if let Ok(dumpable) = dumpable {
            let _ = set_dumpable_behavior(dumpable);
        }
        result
    }

    /// Gives the calling thread these rights.
    fn take(&self) -> io::Result<()> {
        if geteuid().as_raw() != self.user {
            let groups: Vec<_> = self.groups.iter().copied().map(Gid::from_raw).collect();
            set_thread_groups(&groups)?;
            set_thread_res_gid(None::<Gid>, Gid::from_raw(self.group), None::<Gid>)?;
            set_thread_res_uid(None::<Uid>, Uid::from_raw(self.user), None::<Uid>)?;
        }
        let mut sets = capabilities(None)?;
        sets.effective = sets.permitted & self.capabilities;
        set_capabilities(None, sets)?;
        Ok(())
    }
}
