// SPDX-License-Identifier: Apache-2.0

//! Threads of the monitor. No thread runs before its filter is installed, and a panic is reported
//! as a message.

use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

pub use patchbay_guest::threads::contain;

use crate::seccomp::{self, ThreadKind};

/// Locks a mutex. A poisoned mutex is used as it is, because no code panics halfway through a
/// change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread and waits until its filter is installed.
///
/// # Errors
/// The thread cannot be started, or the kernel refuses its filter. In both cases `body` has not
/// run, and the monitor must not continue.
pub fn spawn(
    name: &str,
    kind: ThreadKind,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (report, entered) = sync_channel(1);
    let thread = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            let result = seccomp::enter(kind);
            let filtered = result.is_ok();
            // The thread that called `spawn` waits for this result.
            let _ = report.send(result);
            if filtered {
                body();
            }
        })?;
    match entered.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(io::Error::other(error)),
        Err(error) => Err(io::Error::other(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

    use super::*;
    use crate::seccomp::SeccompLevel;

    /// Simulates a kernel without CONFIG_SECCOMP_FILTER, which refuses filters.
    #[test]
    fn a_thread_without_its_filter_does_not_run() {
        seccomp::enforce(SeccompLevel::On);
        let ran = Arc::new(AtomicBool::new(false));
        let body = ran.clone();
        let spawned = std::thread::spawn(move || {
            let filter = SeccompFilter::new(
                BTreeMap::from([(libc::SYS_seccomp, vec![])]),
                SeccompAction::Allow,
                SeccompAction::Errno(libc::EINVAL.unsigned_abs()),
                TargetArch::x86_64,
            );
            let program: BpfProgram = filter.unwrap().try_into().unwrap();
            seccompiler::apply_filter(&program).unwrap();
            spawn("test", ThreadKind::Keys, move || {
                body.store(true, Ordering::SeqCst);
            })
            .map(|thread| thread.join().unwrap())
        });
        let error = spawned.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("--jail off"), "{error}");
        assert!(!ran.load(Ordering::SeqCst));
    }
}
