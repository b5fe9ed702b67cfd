// SPDX-License-Identifier: Apache-2.0
//! A client of QEMU's machine protocol (`docs/interop/qmp-spec.rst` of QEMU).
//!
//! One thread reads the socket. It passes each event to the listener and each answer, by the
//! command's id, to the call that waits for this answer. If the call has given up, the answer is
//! dropped.

pub(crate) mod error;
#[cfg(test)]
pub(crate) mod fake;
mod peer;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use error::QmpError;
use patchbay_proto::text::cut;
pub use peer::Peer;
pub(crate) use peer::listens;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Deserializer, Value, json};

/// The maximum length of a received message, in bytes. The flat view of a large machine takes tens
/// of KiB.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;
/// The maximum length of the first message, in bytes. Anybody may listen on a socket, and a QEMU's
/// greeting has about 100.
const MAX_GREETING: usize = 64 << 10;
/// The maximum length of a command, in bytes. A single write to a unix socket accepts this many.
pub(crate) const MAX_COMMAND: usize = 32 << 10;
/// The maximum length of QEMU's description of an error, in bytes. The rest is cut off.
const MAX_DESCRIPTION: usize = 4 << 10;

/// An event that QEMU reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: String,
    /// The event's data; null if it has none.
    pub data: Value,
    /// The number of earlier events of the connection ([`Turn::events_before`]); 0 if the events do
    /// not come through QEMU's own socket.
    pub number: u64,
}

/// A callback that the reading thread calls with each event, and finally with `None` when QEMU has
/// ended the connection, but not when this side drops the connection. The callback must not wait
/// for an answer of QEMU.
pub type EventListener = Box<dyn Fn(Option<Event>) + Send>;

/// A connection to a QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The first message, or its start if it is no greeting.
    greeting: Option<Result<(), String>>,
    last_id: u64,
    /// The number of events that have arrived.
    events: u64,
    /// Calls that wait for an answer, and their answers once they have arrived.
    calls: HashMap<u64, Option<Answer>>,
    /// The reason why the connection has ended.
    closed: Option<String>,
}

/// An answer of QEMU.
#[derive(Clone, Debug)]
struct Answer {
    message: Value,
    /// The number of events that arrived before the answer.
    events: u64,
}

/// Commands that were sent in one write. Dropping this value gives up the answers that are missing.
#[derive(Debug)]
pub struct Turn<const N: usize> {
    shared: Arc<Shared>,
    names: [String; N],
    ids: [u64; N],
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns a value; `None` if the deadline passes first.
    fn wait_for<T>(
        &self,
        deadline: Instant,
        mut done: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.state();
        loop {
            if let Some(found) = done(&mut state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Qmp {
    /// Connects and negotiates within `patience`.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn connect(
        path: &Path,
        patience: Duration,
        listener: EventListener,
    ) -> Result<Self, QmpError> {
        let cannot = |error: io::Error| QmpError::Connect {
            path: path.to_owned(),
            error: error.to_string(),
        };
        let deadline = Instant::now() + patience;
        let no_greeting = |owner| QmpError::NoGreeting {
            path: path.to_owned(),
            patience,
            owner,
        };
        let stream = open(path, patience).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => no_greeting(peer::owner(path)),
            _ => cannot(error),
        })?;
        let shared = Arc::new(Shared::default());
        let reader = {
            let (shared, stream) = (Arc::clone(&shared), stream.try_clone().map_err(cannot)?);
            std::thread::Builder::new()
                .name("qmp".to_owned())
                .spawn(move || read(&shared, stream, &listener))
                .map_err(cannot)?
        };
        let qmp = Self {
            stream,
            shared,
            reader: Some(reader),
        };
        let not_qmp = |found: String| QmpError::NotQmp {
            path: path.to_owned(),
            found,
        };
        let greeted = qmp.shared.wait_for(deadline, |state| {
            let greeting = state.greeting.clone().map(Ok);
            greeting.or_else(|| state.closed.clone().map(Err))
        });
        match greeted {
            None => return Err(no_greeting(qmp.peer().ok().and_then(|peer| peer.pid))),
            Some(Err(closed)) => return Err(not_qmp(closed)),
            Some(Ok(Err(other))) => return Err(not_qmp(format!("it sent {other}"))),
            Some(Ok(Ok(()))) => {}
        }
        qmp.execute("qmp_capabilities", Value::Null, patience)?;
        Ok(qmp)
    }

    /// Carries out a command and waits at most `patience` for its answer. `arguments` is null or an
    /// object.
    ///
    /// # Errors
    /// [`QmpError`]. After [`QmpError::TimedOut`] it is unknown whether QEMU carries the command
    /// out.
    pub fn execute(
        &self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        let [answer] = self.execute_in_turn([(command, arguments)], patience)?;
        answer
    }

    /// Sends several commands in one write, so that QEMU has each one as soon as it has carried out
    /// the one before, and waits at most `patience` for all answers. Another client's command may
    /// still come between two of them.
    ///
    /// # Errors
    /// The connection has ended, so the outcome of every command is unknown. Otherwise each command
    /// has its own answer or error.
    pub fn execute_in_turn<const N: usize>(
        &self,
        commands: [(&str, Value); N],
        patience: Duration,
    ) -> Result<[Result<Value, QmpError>; N], QmpError> {
        self.send_in_turn(commands)?.wait(patience)
    }

    /// Sends several commands like [`Self::execute_in_turn`], and does not wait for the answers.
    ///
    /// # Errors
    /// The connection has ended, so the outcome of every command is unknown.
    pub fn send_in_turn<const N: usize>(
        &self,
        commands: [(&str, Value); N],
    ) -> Result<Turn<N>, QmpError> {
        let names = commands.each_ref().map(|(name, _)| (*name).to_owned());
        let ids: [u64; N] = {
            let mut state = self.shared.state();
            if let Some(why) = &state.closed {
                return Err(QmpError::Closed(why.clone()));
            }
            std::array::from_fn(|_| {
                state.last_id += 1;
                let id = state.last_id;
                state.calls.insert(id, None);
                id
            })
        };
        let shared = Arc::clone(&self.shared);
        let turn = Turn { shared, names, ids };
        let mut lines = String::new();
        for ((name, arguments), id) in commands.into_iter().zip(ids) {
            lines.push_str(&message(name, arguments, Some(id)));
        }
        self.send(&lines)?;
        Ok(turn)
    }

    /// Sends a line in one write. So a process that is killed leaves no partial command behind.
    fn send(&self, line: &str) -> Result<(), QmpError> {
        let closed = |error: io::Error| QmpError::Closed(format!("writing failed ({error})"));
        if line.len() > MAX_COMMAND {
            return Err(QmpError::Closed(format!(
                "a command of {} bytes was not sent",
                line.len()
            )));
        }
        (&self.stream).write_all(line.as_bytes()).map_err(closed)
    }

    /// Returns the process that the socket belongs to.
    ///
    /// # Errors
    /// The kernel does not report the process.
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(&self.stream)
    }

    /// Returns the connection for another process, which uses it after this one has been killed.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.stream.try_clone().map(OwnedFd::from)
    }
}

impl<const N: usize> Turn<N> {
    /// Waits at most `patience` for all answers. May be called again if some were missing.
    ///
    /// # Errors
    /// The connection has ended, so the outcome of every command is unknown. Otherwise each command
    /// has its own answer or error.
    pub fn wait(&self, patience: Duration) -> Result<[Result<Value, QmpError>; N], QmpError> {
        let deadline = Instant::now() + patience;
        let mut closed = None;
        let answers = std::array::from_fn(|index| {
            let command = &self.names[index];
            let answer = self.shared.wait_for(deadline, |state| {
                let answer = state.calls.get(&self.ids[index]).cloned().flatten();
                answer.map(Ok).or_else(|| state.closed.clone().map(Err))
            });
            match answer {
                None => Err(QmpError::TimedOut {
                    command: command.clone(),
                    patience,
                }),
                Some(Ok(answer)) => returned(command, answer.message),
                Some(Err(why)) => {
                    closed = Some(why.clone());
                    Err(QmpError::Closed(why))
                }
            }
        });
        match closed {
            Some(why) => Err(QmpError::Closed(why)),
            None => Ok(answers),
        }
    }

    /// Returns the number of events that arrived before each answer; `None` for an answer that has
    /// not arrived. QEMU sends an event before the answer to the command that causes it.
    #[must_use]
    pub fn events_before(&self) -> [Option<u64>; N] {
        let state = self.shared.state();
        let answer = |id| state.calls.get(&id)?.as_ref();
        self.ids.map(|id| Some(answer(id)?.events))
    }
}

impl<const N: usize> Drop for Turn<N> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for id in self.ids {
            state.calls.remove(&id);
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        // This is set first, so that the reading thread knows why its read ended.
        let mut state = self.shared.state();
        state.closed.get_or_insert("it was dropped".to_owned());
        drop(state);
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Connects within `patience`. While QEMU serves a client, it queues two more connections. They
/// stay queued until this client disconnects, even if they have been closed. Any further connection
/// would wait for that.
fn open(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The timeout applies to writes too, for a peer that reads nothing.
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    let address = SocketAddrUnix::new(path)?;
    retry_on_intr(|| net::connect(&socket, &address))?;
    Ok(UnixStream::from(socket))
}

/// Formats a command. libvirt adds an id itself and refuses a command that has one.
pub(crate) fn message(command: &str, arguments: Value, id: Option<u64>) -> String {
    let mut message = json!({ "execute": command });
    if let Some(id) = id {
        message["id"] = id.into();
    }
    if !arguments.is_null() {
        message["arguments"] = arguments;
    }
    format!("{message}\n")
}

pub(crate) fn returned(command: &str, mut answer: Value) -> Result<Value, QmpError> {
    if let Some(error) = answer.get("error") {
        let text = |name: &str| {
            let text = error.get(name).and_then(Value::as_str);
            cut(text.unwrap_or_default(), MAX_DESCRIPTION).into_owned()
        };
        return Err(QmpError::Refused {
            command: command.to_owned(),
            class: text("class"),
            description: text("desc"),
        });
    }
    match answer.get_mut("return") {
        Some(value) => Ok(value.take()),
        None => Err(QmpError::Unexpected {
            command: command.to_owned(),
            missing: "\"return\"".to_owned(),
        }),
    }
}

/// Returns the start of a received text, in a form that is safe to show.
fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// Limits the number of bytes that are read for one message.
struct Limited {
    stream: UnixStream,
    left: Rc<Cell<usize>>,
}

impl Read for Limited {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = bytes.len().min(self.left.get());
        if most == 0 {
            return Err(io::Error::other(format!(
                "a message has more than {MAX_MESSAGE} bytes, or the first more than {MAX_GREETING}"
            )));
        }
        let read = self.stream.read(&mut bytes[..most])?;
        self.left.set(self.left.get() - read);
        Ok(read)
    }
}

/// Runs in the reading thread.
fn read(shared: &Shared, stream: UnixStream, listener: &EventListener) {
    let left = Rc::new(Cell::new(MAX_GREETING));
    let limited = Limited {
        stream,
        left: Rc::clone(&left),
    };
    let mut why = "QEMU closed it".to_owned();
    for message in Deserializer::from_reader(BufReader::new(limited)).into_iter::<Value>() {
        left.set(MAX_MESSAGE);
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                why = format!("what came is no QMP message ({error})");
                break;
            }
        };
        if let Some(name) = message.get("event").and_then(Value::as_str) {
            let number = {
                let mut state = shared.state();
                let number = state.events;
                state.events += 1;
                number
            };
            listener(Some(Event {
                name: name.to_owned(),
                data: message.get("data").cloned().unwrap_or_default(),
                number,
            }));
            continue;
        }
        let mut state = shared.state();
        match message.get("id").and_then(Value::as_u64) {
            Some(id) => {
                let events = state.events;
                // The answer is dropped if its call has given up.
                if let Some(call) = state.calls.get_mut(&id) {
                    *call = Some(Answer { message, events });
                }
            }
            None if state.greeting.is_none() => {
                let is_greeting = message.get("QMP").is_some();
                let greeting = is_greeting.then_some(());
                state.greeting = Some(greeting.ok_or_else(|| shortened(&message.to_string())));
            }
            None => {}
        }
        drop(state);
        shared.changed.notify_all();
    }
    let mut state = shared.state();
    let dropped = state.closed.is_some();
    state.closed.get_or_insert(why);
    drop(state);
    shared.changed.notify_all();
    if !dropped {
        listener(None);
    }
}
