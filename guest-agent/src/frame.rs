// SPDX-License-Identifier: Apache-2.0
//! Frames messages on a stream; see `proto/patchbay/v1/agent.proto`.

use std::io::{self, Read, Write};

use patchbay_proto::AGENT_FRAME_MAX_BYTES;
use prost::Message;

/// Why there is no further message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The monitor closed the connection between two frames.
    #[error("the monitor closed the connection")]
    Closed,
    /// An I/O error, or the end of the stream within a frame.
    #[error("the connection to the monitor broke: {0}")]
    Broken(#[from] io::Error),
    #[error(
        "the monitor sent {bytes} bytes as one message, and {AGENT_FRAME_MAX_BYTES} is the maximum"
    )]
    TooLong { bytes: usize },
    #[error("the monitor sent a message that cannot be decoded: {0}")]
    Malformed(#[from] prost::DecodeError),
}

/// Reads one message.
pub fn read<M: Message + Default>(stream: &mut impl Read) -> Result<M, FrameError> {
    let mut length = [0; 4];
    match stream.read(&mut length)? {
        0 => return Err(FrameError::Closed),
        read => stream.read_exact(&mut length[read..])?,
    }
    let bytes = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if bytes > AGENT_FRAME_MAX_BYTES {
        return Err(FrameError::TooLong { bytes });
    }
    let mut frame = vec![0; bytes];
    stream.read_exact(&mut frame)?;
    Ok(M::decode(frame.as_slice())?)
}

/// Writes one message. Fails with `InvalidInput` if the message is too long for a frame.
pub fn write(stream: &mut impl Write, message: &impl Message) -> io::Result<()> {
    let bytes = message.encoded_len();
    let length = u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= AGENT_FRAME_MAX_BYTES);
    let length = length.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "the message exceeds the frame limit",
        )
    })?;
    let mut frame = Vec::with_capacity(4 + bytes);
    frame.extend_from_slice(&length.to_le_bytes());
    message.encode(&mut frame).map_err(io::Error::other)?;
    stream.write_all(&frame)
}

#[cfg(test)]
mod tests {
    use patchbay_proto::agent::v1::{AgentPong, FromAgent, from_agent};

    use super::*;

    fn pong() -> FromAgent {
        FromAgent {
            id: 7,
            message: Some(from_agent::Message::Pong(AgentPong {
                guest_time_ns: 1 << 60,
            })),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut stream = Vec::new();
        write(&mut stream, &pong()).expect("written");
        write(&mut stream, &FromAgent::default()).expect("written");
        let mut stream = stream.as_slice();
        assert_eq!(read::<FromAgent>(&mut stream).expect("a message"), pong());
        assert_eq!(
            read::<FromAgent>(&mut stream).expect("an empty message"),
            FromAgent::default()
        );
        assert!(matches!(
            read::<FromAgent>(&mut stream),
            Err(FrameError::Closed)
        ));
    }

    #[test]
    fn half_frames_long_frames_and_garbage_are_errors() {
        let mut whole = Vec::new();
        write(&mut whole, &pong()).expect("written");
        for cut in 1..whole.len() {
            assert!(
                matches!(
                    read::<FromAgent>(&mut &whole[..cut]),
                    Err(FrameError::Broken(_))
                ),
                "{cut}"
            );
        }
        let long = [0, 0, 0x20, 0];
        assert!(matches!(
            read::<FromAgent>(&mut long.as_slice()),
            Err(FrameError::TooLong { bytes: 0x20_0000 })
        ));
        let garbage = [2, 0, 0, 0, 0xff, 0xff];
        assert!(matches!(
            read::<FromAgent>(&mut garbage.as_slice()),
            Err(FrameError::Malformed(_))
        ));
        let page = patchbay_proto::agent::v1::AgentPage {
            cpu: 0,
            data: vec![0; AGENT_FRAME_MAX_BYTES],
        };
        assert!(write(&mut Vec::new(), &page).is_err());
    }
}
