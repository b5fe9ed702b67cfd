// SPDX-License-Identifier: Apache-2.0
//! A connection's stream that wakes its thread for input only.
//!
//! tokio registers both directions for the life of a stream. A unix socket becomes writable each
//! time the peer reads, so each message would wake the thread once more without need. Here the
//! socket is registered for output only while a write waits.

use std::io::{ErrorKind, IoSlice, Read, Result, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// The maximum number of bytes per read.
const READ_BYTES: usize = 8 << 10;

/// A connected unix socket.
#[derive(Debug)]
pub struct Stream {
    socket: AsyncFd<UnixStream>,
    /// A duplicate of the socket while a write waits, because an epoll instance accepts a
    /// descriptor only once.
    full: Option<AsyncFd<UnixStream>>,
    /// Receives the input. The caller's buffer is not initialised, so reading into it without
    /// unsafe code would clear all of it before each read, and most reads are short.
    input: Box<[u8]>,
}

impl Stream {
    /// Takes over a connected socket, on the current tokio runtime.
    ///
    /// # Errors
    /// An I/O error.
    pub fn new(stream: tokio::net::UnixStream) -> Result<Self> {
        let socket = register(stream.into_std()?, Interest::READABLE)?;
        Ok(Self {
            socket,
            full: None,
            input: vec![0; READ_BYTES].into(),
        })
    }

    fn poll_io(
        &mut self,
        context: &mut Context<'_>,
        mut write: impl FnMut(&UnixStream) -> Result<usize>,
    ) -> Poll<Result<usize>> {
        loop {
            if let Some(full) = &self.full {
                drop(ready!(full.poll_write_ready(context))?);
                self.full = None;
            }
            match write(self.socket.get_ref()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // If the socket is already writable, this is reported at once.
                    let again = self.socket.get_ref().try_clone()?;
                    self.full = Some(register(again, Interest::WRITABLE)?);
                }
                result => return Poll::Ready(result),
            }
        }
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe, for types that do not own their descriptor; a UnixStream does"
)]
fn register(socket: UnixStream, interest: Interest) -> Result<AsyncFd<UnixStream>> {
    AsyncFd::with_interest(socket, interest)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let Self { socket, input, .. } = self.get_mut();
        let bytes = buffer.remaining().min(input.len());
        loop {
            let mut guard = ready!(socket.poll_read_ready(context))?;
            match guard.try_io(|socket| socket.get_ref().read(&mut input[..bytes])) {
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Ok(Ok(read)) => {
                    buffer.put_slice(&input[..read]);
                    return Poll::Ready(Ok(()));
                }
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        self.poll_io(context, |mut socket| socket.write(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(Shutdown::Write))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.poll_io(context, |mut socket| socket.write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const EPOLLOUT: u32 = 0x4;

    fn pair() -> (Stream, tokio::net::UnixStream) {
        let (ours, theirs) = tokio::net::UnixStream::pair().expect("sockets");
        (Stream::new(ours).expect("a runtime"), theirs)
    }

    /// Returns the events for which each epoll instance of this process watches a descriptor, as
    /// /proc/self/fdinfo shows them (proc_pid_fdinfo(5)).
    fn events(descriptor: i32) -> Vec<u32> {
        let mut events = vec![];
        for entry in std::fs::read_dir("/proc/self/fdinfo").expect("procfs") {
            let path = entry.expect("an entry").path();
            // Other tests close their descriptors concurrently.
            let text = std::fs::read_to_string(path).unwrap_or_default();
            for line in text.lines() {
                let mut words = line.split_whitespace();
                if words.next() == Some("tfd:") && words.next() == Some(&descriptor.to_string()) {
                    let mask = words.nth(1).expect("a mask");
                    events.push(u32::from_str_radix(mask, 16).expect("hexadecimal"));
                }
            }
        }
        events
    }

    #[tokio::test]
    async fn room_is_waited_for_while_a_write_waits() {
        const BYTES: usize = 8 << 20;
        let (mut ours, mut theirs) = pair();
        let waits = |of: &AsyncFd<UnixStream>| {
            let events = events(of.get_ref().as_raw_fd());
            // Several descriptors refer to the epoll instance, and all of them show the same
            // events.
            assert!(!events.is_empty() && events.windows(2).all(|pair| pair[0] == pair[1]));
            events[0] & EPOLLOUT != 0
        };
        assert!(!waits(&ours.socket));
        let sent: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut done = 0;
        while let Poll::Ready(written) = Pin::new(&mut ours).poll_write(&mut context, &sent[done..])
        {
            done += written.expect("connected");
        }
        assert!(waits(ours.full.as_ref().expect("full")) && !waits(&ours.socket));
        let writing = async {
            ours.write_all(&sent[done..]).await.expect("connected");
            assert!(ours.full.is_none());
            ours.shutdown().await.expect("connected");
        };
        let mut seen = vec![];
        let (_, read) = tokio::join!(writing, theirs.read_to_end(&mut seen));
        assert_eq!(read.expect("connected"), BYTES);
        assert!(seen == sent);
    }

    #[tokio::test]
    async fn what_arrives_is_read_up_to_the_end() {
        let (mut ours, mut theirs) = pair();
        let mut seen = [0; 5];
        let reading = ours.read_exact(&mut seen);
        let (read, _) = tokio::join!(reading, theirs.write_all(b"hello"));
        assert_eq!(read.expect("connected"), 5);
        assert_eq!(&seen, b"hello");
        drop(theirs);
        assert_eq!(ours.read(&mut seen).await.expect("the end"), 0);
        assert!(ours.write(b"late").await.is_err());
    }
}
