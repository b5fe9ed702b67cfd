// SPDX-License-Identifier: Apache-2.0

//! Randomness for the guest (virtio 1.2, 5.4), from the host's `getrandom`.

use rustix::rand::{GetRandomFlags, getrandom};

use super::Memory;
use super::device::{Device, Next};
use super::queue::{Broken, Ring};

const DEVICE_ID: u32 = 4;

/// Bytes given for one request; a driver that asks for more asks again.
const REQUEST_MAX: usize = 4096;

/// Requests answered in one batch.
const BATCH: usize = 16;

/// The device.
#[derive(Debug, Default)]
pub(super) struct Rng;

impl Device for Rng {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> usize {
        1
    }

    fn config(&self) -> Vec<u8> {
        vec![]
    }

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {}

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<Next, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(Next::Wait);
        };
        let mut bytes = [0; REQUEST_MAX];
        for _ in 0..BATCH {
            let Some(chain) = ring.pop()? else {
                return Ok(Next::Wait);
            };
            let wanted = chain.writable_bytes().min(REQUEST_MAX);
            // Fewer is allowed; a host without randomness gives none.
            let filled = getrandom(&mut bytes[..wanted], GetRandomFlags::NONBLOCK).unwrap_or(0);
            chain.write_at(memory, 0, &bytes[..filled])?;
            ring.push(&chain, filled)?;
        }
        Ok(Next::Again)
    }
}
