// SPDX-License-Identifier: Apache-2.0

//! A thread on which devices work. Each disk has one of its own, because the host may take seconds
//! for a request of a disk; the others share one, for none of their calls waits.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::transport::Transport;
use crate::seccomp::ThreadKind;
use crate::thread;

/// The token of the descriptor that ends the thread.
const STOP: u64 = u64::MAX;

/// In a token: the device's own event, not a notification.
const OWN_EVENT: u64 = 1 << 32;

/// The thread, running or not.
pub(super) struct DeviceThread {
    name: String,
    transports: Arc<[Arc<Transport>]>,
    epoll: Arc<Epoll>,
    stop: EventFd,
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceThread {
    /// Prepares the thread; it does not run yet.
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
                // Edge-triggered: a device whose driver is not ready lets its events lie.
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

    /// What the host's tools show it as.
    #[cfg(test)]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts it. `failed` is told why if it cannot go on: a guest without its devices would hang.
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

    /// Ends it and waits for that.
    pub fn stop(&self) {
        // Fails only if the counter is full, and then it is readable anyway.
        let _ = self.stop.write(1);
        let handle = self
            .handle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(handle) = handle {
            // A panic there has been told to `failed`.
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
    // When each device wants another turn, if it is not woken before.
    let mut turns: Vec<Option<Instant>> = vec![None; transports.len()];
    loop {
        let count = match epoll.wait(milliseconds_until(&turns), &mut ready) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(format!(
                    "the device thread cannot wait for events ({error})"
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
                // Fails only if nothing was written, and then there is no harm in looking.
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

/// Until the first turn, rounded up; -1 is for ever (epoll_wait(2)).
fn milliseconds_until(turns: &[Option<Instant>]) -> i32 {
    let Some(first) = turns.iter().flatten().min() else {
        return -1;
    };
    let left = first.saturating_duration_since(Instant::now());
    i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
}
