// SPDX-License-Identifier: Apache-2.0

//! Serial console of the guest.
//!
//! ```text
//!  guest ──▶ 16550 ──▶ ring of the last MiB ──▶ writer thread ──▶ stdout or file
//!    ▲                                    └───▶ readers of the API, from any offset
//!    └── 16550's FIFO ◀── pending input ◀── terminal, API
//! ```
//!
//! A vCPU never waits for a reader, so no reader delays a pause. Output that the writer thread
//! cannot write in time, for example to a full pipe, is lost, and the writer reports how much. When
//! the guest ends, the monitor waits for the writer no longer than the limit given to
//! [`Console::drain`].

use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use patchbay_guest::console::{ConsoleChunk, Listener};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};
use vmm_sys_util::eventfd::EventFd;

use super::console_file::ConsoleFile;
use crate::seccomp::ThreadKind;
use crate::snapshot::SerialState;
use crate::thread::{self, lock};

/// Size of the output ring in bytes.
const KEPT: usize = 1 << 20;

/// Limit on input that waits for the guest to read it, in bytes.
const INPUT_MAX: usize = 64 << 10;

/// Maximum size of a chunk that one read returns, in bytes.
const CHUNK: usize = 32 << 10;

/// Destination of the console's output, in addition to the readers of [`Console::read`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ConsoleOutput {
    /// Discarded.
    #[default]
    None,
    /// The standard output.
    Stdout,
    /// A file, which is created or truncated first. At 16 MiB it is renamed to `PATH.1`, replacing
    /// an earlier one, and a new file is started.
    File(PathBuf),
}

/// The console cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum ConsoleError {
    #[error(
        "the console cannot be written to {path} ({error}); use a file in an existing directory that you can write to"
    )]
    File { path: PathBuf, error: io::Error },
    #[error("the console cannot be set up ({0}); raise the limits on threads and open files")]
    Host(io::Error),
}

impl From<io::Error> for ConsoleError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

#[derive(Default)]
struct RingState {
    bytes: VecDeque<u8>,
    /// Offset of the first byte kept.
    start: u64,
    closed: bool,
    /// The writer has to reopen its file.
    reopen: bool,
}

impl RingState {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

/// The writer's next step.
enum Work {
    Write,
    Reopen,
    End,
}

#[derive(Default)]
struct Ring {
    state: Mutex<RingState>,
    changed: Condvar,
    listeners: Mutex<Vec<Listener>>,
}

impl Ring {
    fn push(&self, bytes: &[u8]) {
        let mut state = lock(&self.state);
        state.bytes.extend(bytes);
        let excess = state.bytes.len().saturating_sub(KEPT);
        state.bytes.drain(..excess);
        state.start += excess as u64;
        drop(state);
        self.notify();
    }

    fn notify(&self) {
        self.changed.notify_all();
        for listener in lock(&self.listeners).iter() {
            listener();
        }
    }

    fn read(&self, offset: u64) -> ConsoleChunk {
        let state = lock(&self.state);
        let offset = offset.max(state.start);
        let skip = usize::try_from(offset - state.start).unwrap_or(usize::MAX);
        ConsoleChunk {
            offset,
            bytes: state.bytes.iter().skip(skip).take(CHUNK).copied().collect(),
        }
    }

    /// Waits for output at `offset`. Returns false if there is none and the timeout has passed or
    /// the ring is closed.
    fn wait(&self, offset: u64, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        loop {
            if state.end() > offset {
                return true;
            }
            if state.closed {
                return false;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return false;
            };
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits for work for the writer, which has written everything up to `offset`.
    fn work(&self, offset: u64) -> Work {
        let mut state = lock(&self.state);
        loop {
            if std::mem::take(&mut state.reopen) {
                return Work::Reopen;
            }
            if state.end() > offset {
                return Work::Write;
            }
            if state.closed {
                return Work::End;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Destination of the writer.
pub(super) trait Sink: Write + Send {
    /// Opens a new file, because the current one was renamed.
    fn reopen(&mut self) {}
}

impl Sink for io::Stdout {}

/// Output of the serial port.
struct RingWriter(Arc<Ring>);

impl Write for RingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Interrupt line of the serial port.
struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct Port {
    serial: Serial<Interrupt, NoEvents, RingWriter>,
    pending: VecDeque<u8>,
}

impl Port {
    /// Moves as much pending input as fits into the 16550's FIFO.
    fn refill(&mut self) {
        let room = self.serial.fifo_capacity().min(self.pending.len());
        let bytes: Vec<u8> = self.pending.drain(..room).collect();
        if !bytes.is_empty() {
            // Input is refused only in loop-back mode. It is lost then, as on a real 16550.
            let _ = self.serial.enqueue_raw_bytes(&bytes);
        }
    }
}

/// Serial console of a guest.
pub struct Console {
    port: Mutex<Port>,
    ring: Arc<Ring>,
    interrupt: EventFd,
    /// Carries no messages; it disconnects when the writer thread ends.
    writer: Mutex<Option<Receiver<()>>>,
}

impl Console {
    /// Sets the console up and starts its writer thread if there is an output.
    pub(crate) fn new(output: &ConsoleOutput) -> Result<Self, ConsoleError> {
        let ring = Arc::new(Ring::default());
        let interrupt = EventFd::new(libc::EFD_NONBLOCK)?;
        let serial = Serial::new(Interrupt(interrupt.try_clone()?), RingWriter(ring.clone()));
        let sink: Option<Box<dyn Sink>> = match output {
            ConsoleOutput::None => None,
            ConsoleOutput::Stdout => Some(Box::new(io::stdout())),
            ConsoleOutput::File(path) => {
                Some(Box::new(ConsoleFile::new(path).map_err(|error| {
                    ConsoleError::File {
                        path: path.clone(),
                        error,
                    }
                })?))
            }
        };
        let writer = sink.map(|sink| start_writer(&ring, sink)).transpose()?;
        Ok(Self {
            port: Mutex::new(Port {
                serial,
                pending: VecDeque::new(),
            }),
            ring,
            interrupt,
            writer: Mutex::new(writer),
        })
    }

    /// Returns the interrupt line, to be connected to IRQ 4.
    pub(crate) fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Reads output from `offset` on, counted in bytes since the guest's start. Returns no bytes if
    /// there is none yet. The last 1 MiB is kept; an older offset starts at the oldest byte kept.
    #[must_use]
    pub fn read(&self, offset: u64) -> ConsoleChunk {
        self.ring.read(offset)
    }

    /// Waits for output at `offset`. Returns false if there is none and the timeout has passed or
    /// the guest has ended.
    #[must_use]
    pub fn wait(&self, offset: u64, timeout: Duration) -> bool {
        self.ring.wait(offset, timeout)
    }

    /// Registers a function that is called after each output and when the guest has ended. It may
    /// run on a vCPU's thread, so it must not block.
    pub fn on_output(&self, listener: Listener) {
        lock(&self.ring.listeners).push(listener);
    }

    /// Returns whether the guest has ended. No output follows.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.ring.state).closed
    }

    /// Types `bytes` into the console and returns how many were accepted. Up to 64 KiB wait for the
    /// guest to read them.
    #[must_use]
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut port = lock(&self.port);
        let taken = bytes.len().min(INPUT_MAX - port.pending.len());
        port.pending.extend(&bytes[..taken]);
        port.refill();
        taken
    }

    pub(super) fn port_read(&self, register: u8, data: &mut [u8]) {
        let mut port = lock(&self.port);
        for byte in data {
            *byte = port.serial.read(register);
        }
        port.refill();
    }

    pub(crate) fn port_write(&self, register: u8, data: &[u8]) {
        let mut port = lock(&self.port);
        for byte in data {
            // This fails only if the interrupt cannot be raised. The output is kept.
            let _ = port.serial.write(register, *byte);
        }
    }

    /// Returns the state of the serial port and the input that the guest has not read.
    pub(crate) fn save(&self) -> SerialState {
        let port = lock(&self.port);
        let state = port.serial.state();
        SerialState {
            registers: vec![
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            fifo: state.in_buffer,
            pending: port.pending.iter().copied().collect(),
        }
    }

    /// Sets the state of the serial port, and raises its interrupt if it is pending. Returns false
    /// if the state is impossible.
    pub(crate) fn restore(&self, saved: &SerialState) -> bool {
        let [
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = *saved.registers
        else {
            return false;
        };
        let state = vm_superio::SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: saved.fifo.clone(),
        };
        let Ok(line) = self.interrupt.try_clone() else {
            return false;
        };
        let (line, out) = (Interrupt(line), RingWriter(self.ring.clone()));
        let Ok(serial) = Serial::from_state(&state, line, NoEvents, out) else {
            return false;
        };
        let mut port = lock(&self.port);
        port.serial = serial;
        port.pending = saved.pending.iter().copied().take(INPUT_MAX).collect();
        true
    }

    /// Makes the writer reopen its file after it was renamed.
    pub fn reopen(&self) {
        lock(&self.ring.state).reopen = true;
        self.ring.changed.notify_all();
    }

    /// Marks the end of the output. Does not wait for the writer.
    pub(crate) fn close(&self) {
        lock(&self.ring.state).closed = true;
        self.ring.notify();
    }

    /// Waits at most `limit` until the writer has written everything up to [`close`](Self::close).
    /// The limit is needed because the output's reader may be stuck.
    pub(crate) fn drain(&self, limit: Duration) {
        let Some(writer) = lock(&self.writer).take() else {
            return;
        };
        if writer.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "the guest's last output is lost: the console's reader did not read it within {limit:?}"
            );
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.close();
    }
}

/// Starts the writer thread. The returned receiver disconnects when the thread ends.
fn start_writer(ring: &Arc<Ring>, mut sink: Box<dyn Sink>) -> io::Result<Receiver<()>> {
    let ring = ring.clone();
    let (writing, ended) = channel();
    thread::spawn("console", ThreadKind::LogFiles, move || {
        let _writing = writing;
        // The guest continues without the writer.
        if let Err(why) = thread::contain("the console", || write_out(&ring, &mut *sink)) {
            tracing::error!("the console's writer has ended: {why}");
        }
    })?;
    Ok(ended)
}

/// Copies the ring to `sink` until the ring is closed and everything is written, or `sink` fails.
fn write_out(ring: &Ring, sink: &mut dyn Sink) {
    let mut offset = 0;
    loop {
        match ring.work(offset) {
            Work::Write => {}
            Work::Reopen => {
                sink.reopen();
                continue;
            }
            Work::End => return,
        }
        let chunk = ring.read(offset);
        let lost = chunk.offset - offset;
        let written = if lost > 0 {
            write!(sink, "\n[{lost} bytes of console output lost here]\n")
        } else {
            Ok(())
        };
        let written = written
            .and_then(|()| sink.write_all(&chunk.bytes))
            .and_then(|()| sink.flush());
        if written.is_err() {
            // The output can no longer be written. The guest continues to run.
            return;
        }
        offset = chunk.offset + chunk.bytes.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn type_out(console: &Console, text: &[u8]) {
        console.port_write(0, text);
    }

    #[test]
    fn output_is_kept_by_offset() {
        let console = Console::new(&ConsoleOutput::None).unwrap();
        type_out(&console, b"hello world");
        let chunk = console.read(6);
        assert_eq!((chunk.offset, chunk.bytes.as_slice()), (6, &b"world"[..]));
        assert!(console.read(11).bytes.is_empty());
        assert!(console.read(u64::MAX).bytes.is_empty());
        assert!(console.wait(10, Duration::ZERO));
        assert!(!console.wait(11, Duration::ZERO));
    }

    #[test]
    fn the_oldest_output_goes_first() {
        let ring = Ring::default();
        ring.push(&[b'a'; 10]);
        ring.push(&vec![b'b'; KEPT]);
        let chunk = ring.read(0);
        assert_eq!(chunk.offset, 10);
        assert_eq!(chunk.bytes[0], b'b');
        assert_eq!(lock(&ring.state).bytes.len(), KEPT);
    }

    #[test]
    fn input_longer_than_the_fifo_arrives_whole() {
        let console = Console::new(&ConsoleOutput::None).unwrap();
        let typed: Vec<u8> = (0..=255).cycle().take(1000).collect();
        assert_eq!(console.input(&typed), 1000);
        let mut read = vec![];
        loop {
            let mut status = [0];
            console.port_read(5, &mut status);
            if status[0] & 1 == 0 {
                break;
            }
            let mut byte = [0];
            console.port_read(0, &mut byte);
            read.push(byte[0]);
        }
        assert_eq!(read, typed);
    }

    #[test]
    fn input_without_a_reader_is_bounded() {
        let console = Console::new(&ConsoleOutput::None).unwrap();
        let typed = vec![0; 2 * INPUT_MAX];
        let taken = console.input(&typed);
        assert!(taken >= INPUT_MAX && taken < typed.len());
        let more = console.input(&typed);
        assert!(more <= 64, "{more}");
    }

    #[test]
    fn a_drained_file_has_everything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let console = Console::new(&ConsoleOutput::File(path.clone())).unwrap();
        type_out(&console, b"last words");
        console.close();
        console.drain(Duration::from_secs(60));
        assert_eq!(std::fs::read(path).unwrap(), b"last words");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let output = ConsoleOutput::File("/nonexistent/console".into());
        let error = Console::new(&output).err().unwrap().to_string();
        assert!(error.contains("/nonexistent/console"), "{error}");
    }

    /// A sink whose writes are calls of the function.
    struct Calling<F>(F);

    impl<F: FnMut() -> io::Result<usize> + Send> Write for Calling<F> {
        fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
            (self.0)()
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<F: FnMut() -> io::Result<usize> + Send> Sink for Calling<F> {}

    #[test]
    fn a_reader_that_stalls_does_not_hold_up_the_end() {
        let mut console = Console::new(&ConsoleOutput::None).unwrap();
        let (stall, stalled) = channel();
        // Blocks until the test drops the sender.
        let stuck = move || stalled.recv().map_err(io::Error::other);
        let writer = start_writer(&console.ring, Box::new(Calling(stuck))).unwrap();
        console.writer = Mutex::new(Some(writer));
        type_out(&console, b"unread");
        console.close();
        console.drain(Duration::from_millis(1));
        drop(stall);
    }

    #[test]
    fn a_panic_of_the_writer_ends_the_writer_alone() {
        let mut console = Console::new(&ConsoleOutput::None).unwrap();
        let panics = || panic!("a write panics");
        let writer = start_writer(&console.ring, Box::new(Calling(panics))).unwrap();
        console.writer = Mutex::new(Some(writer));
        type_out(&console, b"lost");
        // Returns because the writer has ended.
        console.drain(Duration::MAX);
        type_out(&console, b", kept");
        assert_eq!(console.read(0).bytes, b"lost, kept");
    }

    #[test]
    fn close_wakes_those_who_wait() {
        let console = Arc::new(Console::new(&ConsoleOutput::None).unwrap());
        let waiting = console.clone();
        let thread = std::thread::spawn(move || waiting.wait(0, Duration::from_secs(60)));
        console.close();
        assert!(!thread.join().unwrap());
    }
}
