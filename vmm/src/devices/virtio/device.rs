// SPDX-License-Identifier: Apache-2.0

//! What a device is to its transport.

use std::os::fd::RawFd;
use std::time::Instant;

use super::Memory;
use super::queue::{Broken, Ring};

/// What a device wants next.
pub(super) enum Next {
    /// Nothing before the next notification or event.
    Wait,
    /// Another turn; other devices of the thread come first.
    Again,
    /// Another turn at this time, or after the next notification or event.
    At(Instant),
    /// Something that may take the host long. It is done without any lock, so that a reset does
    /// not wait for it, and handed to [`Device::finish`] unless the driver has reset the device.
    Host(HostWork),
}

/// Work on the host's files that knows nothing of guest memory.
pub(super) type HostWork = Box<dyn FnOnce() -> HostDone + Send>;

/// What [`HostWork`] came to.
pub(super) struct HostDone {
    /// Whether the host could do it.
    pub result: std::io::Result<()>,
    /// The data that was read, or the buffer of what was written.
    pub data: Vec<u8>,
}

/// A device, as its transport and the device thread use it. One thread at a time.
pub(super) trait Device: Send {
    /// The device ID (virtio 1.2, chapter 5).
    fn id(&self) -> u32;

    /// Its own feature bits.
    fn features(&self) -> u64;

    /// The number of its queues.
    fn queues(&self) -> usize;

    /// Its configuration space. It never changes.
    fn config(&self) -> Vec<u8>;

    /// The driver is ready and has accepted `features`.
    fn activate(&mut self, features: u64);

    /// Forget the driver and everything that was under way.
    fn reset(&mut self);

    /// Does what there is to do, but only so much that other devices get their
    /// turn soon, and nothing that may take the host long. Called after a notification, after an
    /// event of [`event_source`](Self::event_source), and as the last answer wants.
    ///
    /// `rings` has one entry per queue, `None` for those that the driver does not use.
    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<Next, Broken>;

    /// Takes what the work of [`Next::Host`] came to. Not called if there was a reset meanwhile.
    fn finish(
        &mut self,
        _done: HostDone,
        _rings: &mut [Option<Ring>],
        _memory: &Memory,
    ) -> Result<(), Broken> {
        Ok(())
    }

    /// The guest has ended: nobody on the host is to find the device any more.
    fn close(&mut self) {}

    /// A descriptor whose becoming readable is an event, if the device waits for
    /// more than the guest. It lives as long as the device.
    fn event_source(&self) -> Option<RawFd> {
        None
    }
}

/// So that a test can drive any of several devices.
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

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<Next, Broken> {
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

    fn close(&mut self) {
        (**self).close();
    }

    fn event_source(&self) -> Option<RawFd> {
        (**self).event_source()
    }
}
