// SPDX-License-Identifier: Apache-2.0

//! What a device is to its transport.

use std::os::fd::RawFd;

use super::Memory;
use super::queue::{Broken, Ring};

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
    /// turn soon. True: there is more. Called after a notification, after an
    /// event of [`event_source`](Self::event_source), and after an answer of true.
    ///
    /// `rings` has one entry per queue, `None` for those that the driver does not use.
    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<bool, Broken>;

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

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<bool, Broken> {
        (**self).process(rings, memory)
    }

    fn close(&mut self) {
        (**self).close();
    }

    fn event_source(&self) -> Option<RawFd> {
        (**self).event_source()
    }
}
