// SPDX-License-Identifier: Apache-2.0

//! Device threads. Each disk has its own thread, because a request may block for seconds on the
//! host's file. The other devices share one thread, because none of their calls blocks.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::transport::Transport;
use crate::seccomp::ThreadKind;
use crate::thread;

/// Token of the descriptor that stops the thread.
const STOP: u64 = u64::MAX;

/// Bit in a token: the device's own event, not a notification.
const OWN_EVENT: u64 = 1 << 32;

/// A device thread, running or not.
pub(super) struct DeviceThread {
    name: String,
    transports: Arc<[Arc<Transport>]>,
    epoll: Arc<Epoll>,
    stop: EventFd,
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceThread {
    /// Creates the thread's descriptors; [`start`](Self::start) runs it.
    pub fn new(name: String, transports: Arc<[Arc<Transport>]>) -> std::io::Result<Self> {
        let epoll = Epoll::new()?;
        let stop = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let watch = |fd, events, token| {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, token))
        };
        watch(stop.as_raw_fd(), EventSet::IN, STOP)?;
        for (token, transport) in (0_u64..).zip(transports.iter()) {
            watch(transport.kick().as_raw_fd(), EventSet::IN, token)?;
            if let Some(source) = transport.event_source() {
                // Edge-triggered, because the events of a device without a ready driver stay
                // pending and would otherwise wake the thread again and again.
                let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
                watch(source, events, token | OWN_EVENT)?;
            }
        }
        Ok(Self {
            name,
            transports,
            epoll: Arc::new(epoll),
            stop,
            handle: Mutex::default(),
        })
    }

    /// Returns the name of the thread as shown by tools of the host.
    #[cfg(test)]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts the thread. If the thread cannot continue, it calls `failed` with the reason, because
    /// a guest without its devices would hang.
    pub fn start(&self, failed: impl FnOnce(String) + Send + 'static) -> std::io::Result<()> {
        let name = self.name.clone();
        let transports = self.transports.clone();
        let epoll = self.epoll.clone();
        let run = move || {
            let ended = thread::contain(&name, || work(&transports, &epoll));
            if let Err(why) = ended.and_then(|result| result) {
                failed(why);
            }
        };
        let handle = thread::spawn(&self.name, ThreadKind::Device, run)?;
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
        Ok(())
    }

    /// Stops the thread and waits for its end.
    pub fn stop(&self) {
        // Fails only if the counter is full, and then the descriptor is readable anyway.
        let _ = self.stop.write(1);
        let handle = self
            .handle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(handle) = handle {
            // A panic has been reported to `failed`.
            let _ = handle.join();
        }
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop();
    }
}

fn work(transports: &[Arc<Transport>], epoll: &Epoll) -> Result<(), String> {
    let mut ready = [EpollEvent::default(); 32];
    // The time at which each device needs its next turn if no event comes first.
    let mut turns: Vec<Option<Instant>> = vec![None; transports.len()];
    loop {
        let count = match epoll.wait(milliseconds_until(&turns), &mut ready) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(format!(
                    "the device thread cannot wait for events ({error}); restart the guest"
                ));
            }
        };
        for event in &ready[..count] {
            let token = event.data();
            if token == STOP {
                return Ok(());
            }
            let Some((transport, turn)) = usize::try_from(token & !OWN_EVENT)
                .ok()
                .and_then(|index| transports.get(index).zip(turns.get_mut(index)))
            else {
                continue;
            };
            if token & OWN_EVENT == 0 {
                // This fails only if nothing was written. An extra turn is then harmless.
                let _ = transport.kick().read();
            }
            *turn = transport.run();
        }
        let now = Instant::now();
        for (transport, turn) in transports.iter().zip(&mut turns) {
            if turn.is_some_and(|at| at <= now) {
                *turn = transport.run();
            }
        }
    }
}

/// Returns the time to the first turn, rounded up; -1 waits for ever (epoll_wait(2)).
fn milliseconds_until(turns: &[Option<Instant>]) -> i32 {
    let Some(first) = turns.iter().flatten().min() else {
        return -1;
    };
    let left = first.saturating_duration_since(Instant::now());
    i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
}
