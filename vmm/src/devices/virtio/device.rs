// SPDX-License-Identifier: Apache-2.0

//! Interface between a virtio device and its transport.

use std::os::fd::RawFd;
use std::time::Instant;

use super::Memory;
use super::queue::{Broken, Ring};

/// The time of a device's next turn, or the work on the host that precedes it.
pub(super) enum NextTurn {
    /// No turn before the next notification or event.
    Wait,
    /// A turn after the other devices of the thread.
    Again,
    /// A turn at this time, or after the next notification or event.
    At(Instant),
    /// Work that may block on the host. It runs without any lock, so that a reset does not wait for
    /// the work. The result goes to [`Device::finish`], unless the driver has reset the device.
    Host(HostWork),
}

/// Work on the host's files without access to guest memory.
pub(super) type HostWork = Box<dyn FnOnce() -> HostDone + Send>;

/// Result of [`HostWork`].
pub(super) struct HostDone {
    pub result: std::io::Result<()>,
    /// The data read, or the buffer of the data written.
    pub data: Vec<u8>,
}

/// A device as seen by its transport and the device thread. Only one thread calls it at a time.
pub(super) trait Device: Send {
    /// Returns the device ID (virtio 1.2, chapter 5).
    fn id(&self) -> u32;

    /// Returns the device-specific feature bits.
    fn features(&self) -> u64;

    /// Returns the number of queues.
    fn queues(&self) -> usize;

    /// Returns the configuration space, which must never change.
    fn config(&self) -> Vec<u8>;

    /// Starts the device: the driver is ready and has accepted `features`.
    fn activate(&mut self, features: u64);

    /// Forgets the driver and all requests in progress.
    fn reset(&mut self);

    /// Processes a bounded amount of work, so that other devices get their turn. Does nothing that
    /// may block on the host. Called after a notification, after an event of
    /// [`event_source`](Self::event_source), and when the previous call returned that it needs
    /// another turn.
    ///
    /// `rings` has one entry per queue, `None` for a queue that the driver does not use.
    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<NextTurn, Broken>;

    /// Takes the result of the work of [`NextTurn::Host`]. Not called if the device was reset
    /// meanwhile.
    fn finish(
        &mut self,
        _done: HostDone,
        _rings: &mut [Option<Ring>],
        _memory: &Memory,
    ) -> Result<(), Broken> {
        Ok(())
    }

    /// Returns whether the host still works on a request. [`Device::finish`] ends it.
    fn is_busy(&self) -> bool {
        false
    }

    /// Returns the number of chains that were taken last from a queue and will be returned, so that
    /// a copy of the guest has to take them again.
    fn unused(&self, _queue: usize) -> u16 {
        0
    }

    /// Continues the driver of a guest that was saved. Called after [`Device::activate`].
    fn resume(&mut self) {}

    /// Returns whether a copy of the guest may have another configuration space.
    fn may_change_config(&self) -> bool {
        false
    }

    /// Closes the sockets that clients on the host connect to, because the guest has ended.
    fn close(&mut self) {}

    /// Returns a descriptor that becomes readable on an event, if the device waits for more than
    /// the guest. The descriptor stays open as long as the device exists.
    fn event_source(&self) -> Option<RawFd> {
        None
    }
}

/// Lets a test drive any of several devices.
#[cfg(any(test, feature = "testing"))]
impl Device for Box<dyn Device> {
    fn id(&self) -> u32 {
        (**self).id()
    }

    fn features(&self) -> u64 {
        (**self).features()
    }

    fn queues(&self) -> usize {
        (**self).queues()
    }

    fn config(&self) -> Vec<u8> {
        (**self).config()
    }

    fn activate(&mut self, features: u64) {
        (**self).activate(features);
    }

    fn reset(&mut self) {
        (**self).reset();
    }

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<NextTurn, Broken> {
        (**self).process(rings, memory)
    }

    fn finish(
        &mut self,
        done: HostDone,
        rings: &mut [Option<Ring>],
        memory: &Memory,
    ) -> Result<(), Broken> {
        (**self).finish(done, rings, memory)
    }

    fn is_busy(&self) -> bool {
        (**self).is_busy()
    }

    fn unused(&self, queue: usize) -> u16 {
        (**self).unused(queue)
    }

    fn resume(&mut self) {
        (**self).resume();
    }

    fn may_change_config(&self) -> bool {
        (**self).may_change_config()
    }

    fn close(&mut self) {
        (**self).close();
    }

    fn event_source(&self) -> Option<RawFd> {
        (**self).event_source()
    }
}
