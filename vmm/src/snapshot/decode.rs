// SPDX-License-Identifier: Apache-2.0

//! Decodes the body of the file `state` in bounded memory.
//!
//! An empty message in a list has two bytes in the file, and up to 256 bytes when it is decoded. A
//! malicious file of 64 MiB could therefore use 8 GiB of memory. To prevent this, the elements are
//! counted in the wire format (<https://protobuf.dev/programming-guides/encoding>) before anything
//! is decoded or allocated. All messages together then take at most [`PARTS_MAX`] times 256 bytes,
//! which is 8 MiB, and three times as much while a list grows. The bytes in them take at most as
//! much as the file.

use prost::Message;

use super::{MachineState, SnapshotError};

/// Limit on the number of fields with a length, in the messages that have lists. A guest with 4,096
/// modules has four for each of them: a request, its page, the keys and their names.
const PARTS_MAX: u32 = 1 << 15;

/// The fields of a message that are messages with lists themselves.
struct Lists(&'static [(u64, Self)]);

/// [`MachineState`]: its devices, whose queues are counted, and its control, with requests whose
/// arrays are counted. Other messages have no lists.
const STATE: Lists = Lists(&[(10, Lists(&[])), (11, Lists(&[(3, Lists(&[]))]))]);

/// Decodes a body.
pub fn decode(body: &[u8]) -> Result<MachineState, SnapshotError> {
    let mut left = PARTS_MAX;
    if count(body, &STATE, &mut left).is_none() {
        return Err(SnapshotError::Invalid(
            "it cannot be read or has too many parts",
        ));
    }
    MachineState::decode(body).map_err(|_| SnapshotError::Invalid("it cannot be read"))
}

/// Subtracts the number of parts from `left`. Returns `None` if the number exceeds `left`, or if
/// the bytes are not a valid message.
fn count(mut message: &[u8], lists: &Lists, left: &mut u32) -> Option<()> {
    while !message.is_empty() {
        let (field, content) = take_field(&mut message)?;
        let Some(content) = content else { continue };
        *left = left.checked_sub(1)?;
        if let Some((_, lists)) = lists.0.iter().find(|(of, _)| *of == field) {
            count(content, lists, left)?;
        }
    }
    Some(())
}

/// Takes a field off the front, and returns its number and, if it has a length, its content. Groups
/// are refused: no version of the format has any.
fn take_field<'a>(message: &mut &'a [u8]) -> Option<(u64, Option<&'a [u8]>)> {
    let key = take_varint(message)?;
    let content = match key & 7 {
        0 => {
            take_varint(message)?;
            None
        }
        1 => {
            message.split_off(..8)?;
            None
        }
        2 => {
            let length = usize::try_from(take_varint(message)?).ok()?;
            Some(message.split_off(..length)?)
        }
        5 => {
            message.split_off(..4)?;
            None
        }
        _ => return None,
    };
    Some((key >> 3, content))
}

/// Takes a number off the front: seven bits in each byte, the lowest first. All bytes but the last
/// have bit 7 set.
fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *message.split_off_first()?;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::{ActiveQueue, Array, Control, DeviceState, QueueState, Request, VcpuState};
    use super::*;

    const MANY: usize = PARTS_MAX as usize + 1;

    fn is_accepted(state: &MachineState) -> bool {
        let decoded = decode(&state.encode_to_vec());
        decoded.is_ok_and(|decoded| decoded == *state)
    }

    fn request(arrays: usize) -> Request {
        let array = Array {
            address: u64::MAX,
            bytes: vec![1; 200],
        };
        Request {
            op: 1,
            page: vec![1; 300],
            arrays: vec![array; arrays],
        }
    }

    fn controlled(requests: Vec<Request>) -> MachineState {
        MachineState {
            control: Some(Control {
                guest: "g".to_owned(),
                requests,
                ..Control::default()
            }),
            ..MachineState::default()
        }
    }

    #[test]
    fn the_largest_guest_is_accepted() {
        let queue = QueueState {
            size: 256,
            active: Some(ActiveQueue::default()),
            ..QueueState::default()
        };
        let device = DeviceState {
            config: vec![1; 60],
            queues: vec![queue; 3],
            ..DeviceState::default()
        };
        let mut requests = vec![request(2); static_keys::MODULES_MAX];
        requests.push(request(4));
        let state = MachineState {
            memory_bytes: 1 << 40,
            memory_digest: vec![1; 8],
            vcpus: vec![VcpuState::default(); 16],
            irqchips: vec![vec![1; 520]; 3],
            devices: vec![device; 6],
            ..controlled(requests)
        };
        assert!(is_accepted(&state));
    }

    #[test]
    fn each_list_is_bounded() {
        let device = |queues| DeviceState {
            queues: vec![QueueState::default(); queues],
            ..DeviceState::default()
        };
        let with_devices = |devices| MachineState {
            devices,
            ..MachineState::default()
        };
        let states = [
            MachineState {
                vcpus: vec![VcpuState::default(); MANY],
                ..MachineState::default()
            },
            MachineState {
                irqchips: vec![vec![]; MANY],
                ..MachineState::default()
            },
            with_devices(vec![DeviceState::default(); MANY]),
            with_devices(vec![device(MANY)]),
            // The elements are counted in all devices together.
            with_devices(vec![device(MANY / 2 + 1); 2]),
            controlled(vec![Request::default(); MANY]),
            controlled(vec![request(MANY)]),
            controlled(vec![request(MANY / 2 + 1); 2]),
        ];
        for (index, state) in states.iter().enumerate() {
            assert!(!is_accepted(state), "{index}");
        }
    }

    /// The decoder merges them.
    #[test]
    fn repeated_controls_are_counted_together() {
        let one = controlled(vec![Request::default(); MANY / 2 + 1]).encode_to_vec();
        assert!(decode(&one).is_ok());
        assert!(decode(&[&one[..], &one[..]].concat()).is_err());
    }

    #[test]
    fn messages_have_the_size_that_the_bound_assumes() {
        let sizes = [
            size_of::<VcpuState>(),
            size_of::<DeviceState>(),
            size_of::<QueueState>(),
            size_of::<Request>(),
            size_of::<Array>(),
        ];
        assert!(sizes.iter().all(|size| *size <= 256), "{sizes:?}");
    }

    #[test]
    fn no_bytes_make_it_fail_otherwise() {
        let state = controlled(vec![request(1); 3]).encode_to_vec();
        for length in 0..state.len() {
            let _ = decode(&state[..length]);
        }
        for wrong in [
            // A group, a number of more than 64 bits, and a length beyond the end.
            &[0x0b, 0x0c][..],
            &[
                0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02,
            ],
            &[
                0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x81, 0x00,
            ],
            &[
                0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
            ],
            &[0x12, 2, 0],
            &[0x09, 0],
        ] {
            assert!(decode(wrong).is_err(), "{wrong:x?}");
        }
    }
}
