// SPDX-License-Identifier: Apache-2.0

//! Entropy device (virtio 1.2, 5.4), fed by the host's `getrandom`.

use rustix::rand::{GetRandomFlags, getrandom};

use super::Memory;
use super::device::{Device, NextTurn};
use super::queue::{Broken, Ring};

const DEVICE_ID: u32 = 4;

/// Limit on the bytes of one request. A driver that needs more sends another request.
const REQUEST_MAX: usize = 4096;

/// Requests answered in one batch.
const BATCH: usize = 16;

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

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<NextTurn, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(NextTurn::Wait);
        };
        let mut bytes = [0; REQUEST_MAX];
        for _ in 0..BATCH {
            let Some(chain) = ring.pop()? else {
                return Ok(NextTurn::Wait);
            };
            let wanted = chain.writable_bytes().min(REQUEST_MAX);
            // A short answer is allowed. If the host has no entropy, the answer is empty.
            let filled = getrandom(&mut bytes[..wanted], GetRandomFlags::NONBLOCK).unwrap_or(0);
            chain.write_at(memory, 0, &bytes[..filled])?;
            ring.push(&chain, filled)?;
        }
        Ok(NextTurn::Again)
    }
}
