// SPDX-License-Identifier: Apache-2.0
//! The link to the agent in the guest.
//!
//! ```text
//!  listening ── connection ──▶ hello? ── versions meet, no other agent ──▶ welcome ──▶ linked
//!      ▲                         │ otherwise: refusal with the reason                    │
//!      └─────────────────────────┴──────────── closed, garbage, too much ◀───────────────┘
//! ```
//!
//! The guest is hostile, and its privileged programs can connect (the vsock device turns the others
//! away, see [`PORT`]): one agent at a time (another takes its
//! place only when it has been silent), capped frames, few handshakes at once, no more pages than
//! there was credit for, and answers only to questions that were asked. A silent agent keeps its
//! place: it may be stopped, and what it armed is still in the keys.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::to_agent::Message as Question;
use patchbay_proto::v1::{
    AgentCredit, AgentHello, AgentPages, AgentPing, AgentRefusal, AgentWelcome, FromAgent, ToAgent,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::clock::GuestClock;
use super::frame::{self, FrameError};

/// vsock port of the host that the agent connects to, from a port of its own below 1024: Linux gives
/// these to holders of CAP_NET_BIND_SERVICE alone.
pub const PORT: u32 = 1024;
/// Versions of the protocol that this monitor speaks.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=1;
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
const HANDSHAKES: usize = 8;
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Without any message for so long the agent counts as silent.
const SILENCE: Duration = Duration::from_secs(5);
/// Questions that wait for their answer.
const MAX_WAITING: usize = 256;
const OUTBOX: usize = 64;
/// Longest text of the hello that is kept.
const MAX_TEXT: usize = 1024;
const MAX_ENABLED: usize = 16_384;

/// Why the agent did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// None is connected.
    #[error("no agent is connected{why}; start patchbay-agent in the guest")]
    Absent {
        /// What is known of it; empty, or begins with ": ".
        why: String,
    },
    /// It is connected and does not answer.
    #[error(
        "the agent in the guest has not answered for {waited:?}; fire and park work without it"
    )]
    Silent {
        /// For the answer.
        waited: Duration,
    },
    /// It said so itself.
    #[error("the agent in the guest could not do it: {0}")]
    Refused(String),
    /// Not what was asked.
    #[error(
        "the agent in the guest answered something else than was asked; is it of this version?"
    )]
    Confused,
}

/// Handle to the link. Clones share it.
#[derive(Clone)]
pub struct AgentLink {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    clock: Mutex<GuestClock>,
    /// Advances with each connection made or lost.
    connections: watch::Sender<u64>,
    pages: mpsc::Sender<AgentPages>,
    next_id: AtomicU64,
}

#[derive(Default)]
struct State {
    current: Option<Connection>,
    /// Why the last one ended or was refused.
    last: String,
}

struct Connection {
    number: u64,
    peer: Peer,
    heard: Instant,
    credit: u64,
    outbox: mpsc::Sender<ToAgent>,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// Dropped with the connection, which ends its tasks.
    _alive: oneshot::Sender<()>,
}

/// What is known of a connected agent.
#[derive(Clone, Debug)]
pub struct Peer {
    /// As it introduced itself; bounded.
    pub hello: AgentHello,
    /// Of the protocol.
    pub version: u32,
    /// When it was welcomed.
    pub connected_at: SystemTime,
    /// Counts the connections; no two have the same.
    pub connection: u64,
}

/// The socket on which the agent's connections arrive: that of the vsock device with the port.
///
/// Firecracker's convention (`docs/vsock.md` there), which the device follows.
pub fn socket_path(vsock: &Path) -> PathBuf {
    let mut path = vsock.as_os_str().to_owned();
    path.push(format!("_{PORT}"));
    path.into()
}

/// The bound socket on which the agent's connections arrive; removed when dropped.
#[derive(Debug)]
pub struct AgentSocket {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
}

impl AgentSocket {
    /// Binds the socket beside that of the vsock device, replacing one that a dead monitor left.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn bind(vsock: &Path) -> std::io::Result<Self> {
        let path = socket_path(vsock);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl AgentLink {
    /// Accepts agents on the current tokio runtime, and hands their pages to `pages`.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn listen(socket: AgentSocket, pages: mpsc::Sender<AgentPages>) -> std::io::Result<Self> {
        let listener = UnixListener::from_std(socket.listener.try_clone()?)?;
        let link = Self::unlinked(pages);
        tokio::spawn(link.clone().accept(socket, listener));
        Ok(link)
    }

    /// For a guest without vsock: no agent ever connects.
    pub fn unlinked(pages: mpsc::Sender<AgentPages>) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            clock: Mutex::default(),
            connections: watch::Sender::new(0),
            pages,
            next_id: AtomicU64::new(1),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's clock by the host's.
    pub fn clock(&self) -> MutexGuard<'_, GuestClock> {
        self.shared
            .clock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes when an agent connects or goes.
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.shared.connections.subscribe()
    }

    /// The connected agent.
    ///
    /// # Errors
    /// [`AgentError::Absent`].
    pub fn peer(&self) -> Result<Peer, AgentError> {
        let state = self.state();
        state
            .current
            .as_ref()
            .map(|connection| connection.peer.clone())
            .ok_or_else(|| state.absent())
    }

    /// How long ago the agent was heard, if that is too long.
    pub fn silent_for(&self) -> Option<Duration> {
        let heard = self.state().current.as_ref()?.heard.elapsed();
        (heard > SILENCE).then_some(heard)
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// [`AgentError`].
    pub async fn ask(&self, question: Question, patience: Duration) -> Result<Answer, AgentError> {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let silent = || AgentError::Silent { waited: patience };
        let (reply, answer) = oneshot::channel();
        let (outbox, number) = {
            let mut state = self.state();
            let absent = state.absent();
            let connection = state.current.as_mut().ok_or(absent)?;
            if connection.waiting.len() >= MAX_WAITING {
                return Err(silent());
            }
            connection.waiting.insert(id, reply);
            (connection.outbox.clone(), connection.number)
        };
        let conversation = async {
            outbox
                .send(ToAgent {
                    id,
                    message: Some(question),
                })
                .await
                .ok()?;
            answer.await.ok()
        };
        match tokio::time::timeout(patience, conversation).await {
            Ok(Some(Answer::Error(message))) => Err(AgentError::Refused(bounded(message))),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.state().absent()),
            Err(_) => {
                self.forget(number, id);
                Err(silent())
            }
        }
    }

    fn forget(&self, number: u64, id: u64) {
        if let Some(connection) = &mut self.state().current
            && connection.number == number
        {
            connection.waiting.remove(&id);
        }
    }

    /// Lets the agent send more pages. `reset`: no more than these.
    pub fn credit(&self, bytes: u64, reset: bool) {
        let mut state = self.state();
        let Some(connection) = &mut state.current else {
            return;
        };
        // What was let before a reset may be on its way.
        connection.credit = connection.credit.saturating_add(bytes);
        let message = Some(Question::Credit(AgentCredit { bytes, reset }));
        // Without room the agent has not taken anything for long, and wants no pages either; the
        // next stream or batch gives anew.
        let _ = connection.outbox.try_send(ToAgent { id: 0, message });
    }

    async fn accept(self, _socket: AgentSocket, listener: UnixListener) {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        let mut number = 0;
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Out of file descriptors, most likely; the next may find one.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Ok(permit) = Arc::clone(&handshakes).try_acquire_owned() else {
                continue;
            };
            number += 1;
            let link = self.clone();
            tokio::spawn(async move {
                let greeted =
                    tokio::time::timeout(HANDSHAKE_TIME, link.greet(stream, number)).await;
                drop(permit);
                match greeted {
                    Ok(Ok(Some((stream, outbox, gone)))) => {
                        link.serve(stream, number, outbox, gone).await
                    }
                    Ok(Ok(None)) => {}
                    Ok(Err(error)) => link.note(format!("{error} (before its hello)")),
                    Err(_) => link.note("a program connected and sent no hello".to_owned()),
                }
            });
        }
    }

    fn note(&self, why: String) {
        tracing::info!(why, "the agent's link");
        self.state().last = why;
    }

    /// None if the agent was refused.
    #[allow(clippy::type_complexity)]
    async fn greet(
        &self,
        mut stream: UnixStream,
        number: u64,
    ) -> Result<Option<(UnixStream, mpsc::Receiver<ToAgent>, oneshot::Receiver<()>)>, FrameError>
    {
        let first: FromAgent = frame::read(&mut stream).await?;
        let (outbox, outgoing) = mpsc::channel(OUTBOX);
        let (alive, gone) = oneshot::channel();
        let judged = match first.message {
            Some(Answer::Hello(hello)) => self.judge(hello, number),
            _ => Err("the first message must be the hello".to_owned()),
        };
        match judged {
            Err(reason) => {
                frame::write(
                    &mut stream,
                    &to_agent(Question::Refusal(AgentRefusal {
                        reason: reason.clone(),
                    })),
                )
                .await?;
                self.note(format!("an agent was refused: {reason}"));
                Ok(None)
            }
            Ok(peer) => {
                let version = peer.version;
                let waiting = HashMap::new();
                // Not written here: an agent that dies meanwhile would stay the connected one. Nothing
                // can be asked before it, and a new channel has room.
                let _ = outbox.try_send(to_agent(Question::Welcome(AgentWelcome { version })));
                let connection = Connection {
                    number,
                    peer,
                    heard: Instant::now(),
                    credit: 0,
                    outbox,
                    waiting,
                    _alive: alive,
                };
                self.clock().clear();
                self.state().current = Some(connection);
                self.shared.connections.send_modify(|count| *count += 1);
                Ok(Some((stream, outgoing, gone)))
            }
        }
    }

    fn judge(&self, mut hello: AgentHello, connection: u64) -> Result<Peer, String> {
        let version = hello.newest_version.min(*VERSIONS.end());
        if version < hello.oldest_version || !VERSIONS.contains(&version) {
            return Err(format!(
                "the agent {} speaks versions {} to {} of the protocol, and this monitor {} to {}; update the older one",
                bounded(hello.agent_version),
                hello.oldest_version,
                hello.newest_version,
                VERSIONS.start(),
                VERSIONS.end()
            ));
        }
        if let Some(current) = &self.state().current
            && current.heard.elapsed() < SILENCE
        {
            return Err("another agent is connected and answers; stop one of them".to_owned());
        }
        for text in [
            &mut hello.agent_version,
            &mut hello.kernel_release,
            &mut hello.boot_id,
            &mut hello.no_tracing,
        ] {
            *text = bounded(std::mem::take(text));
        }
        hello.enabled.truncate(MAX_ENABLED);
        Ok(Peer {
            hello,
            version,
            connected_at: SystemTime::now(),
            connection,
        })
    }

    async fn serve(
        &self,
        stream: UnixStream,
        number: u64,
        mut outgoing: mpsc::Receiver<ToAgent>,
        mut gone: oneshot::Receiver<()>,
    ) {
        let (mut reader, mut writer) = stream.into_split();
        let read = async {
            loop {
                let message: FromAgent = match frame::read(&mut reader).await {
                    Ok(message) => message,
                    Err(error) => return error.to_string(),
                };
                if let Err(why) = self.take(number, message).await {
                    return why;
                }
            }
        };
        let write = async {
            while let Some(message) = outgoing.recv().await {
                if let Err(error) = frame::write(&mut writer, &message).await {
                    return format!("the agent takes no messages: {error}");
                }
            }
            "another agent took its place".to_owned()
        };
        let why = tokio::select! {
            why = read => why,
            why = write => why,
            () = self.ping() => String::new(),
            _ = &mut gone => "another agent took its place".to_owned(),
        };
        let mut state = self.state();
        if state
            .current
            .as_ref()
            .is_some_and(|current| current.number == number)
        {
            state.current = None;
        }
        drop(state);
        self.note(why);
        self.shared.connections.send_modify(|count| *count += 1);
    }

    /// Never ends.
    async fn ping(&self) {
        loop {
            let asked = Instant::now();
            if let Ok(Answer::Pong(pong)) = self.ask(Question::Ping(AgentPing {}), SILENCE).await {
                self.clock()
                    .sample(asked, Instant::now(), pong.guest_time_ns);
            }
            tokio::time::sleep(PING_INTERVAL).await;
        }
    }

    /// Why the connection must end, if it must.
    async fn take(&self, number: u64, message: FromAgent) -> Result<(), String> {
        let pages = {
            let mut state = self.state();
            let current = state
                .current
                .as_mut()
                .filter(|current| current.number == number);
            let current = current.ok_or("another agent took its place")?;
            current.heard = Instant::now();
            match message.message {
                Some(Answer::Pages(pages)) => {
                    let bytes = pages.pages.iter().map(|page| page.data.len() as u64).sum();
                    // One page more than there was credit for is allowed: credit is counted in bytes.
                    if bytes > current.credit.saturating_add(64 << 10) {
                        return Err("the agent sent pages that nobody had asked for".to_owned());
                    }
                    current.credit = current.credit.saturating_sub(bytes);
                    pages
                }
                Some(answer) => {
                    // An answer to nothing is one that came too late.
                    if let Some(reply) = current.waiting.remove(&message.id) {
                        let _ = reply.send(answer);
                    }
                    return Ok(());
                }
                // Of a newer version.
                None => return Ok(()),
            }
        };
        self.shared
            .pages
            .send(pages)
            .await
            .map_err(|_| "the monitor ends".to_owned())
    }
}

impl State {
    fn absent(&self) -> AgentError {
        let why = if self.last.is_empty() {
            String::new()
        } else {
            format!(" (last: {})", self.last)
        };
        AgentError::Absent { why }
    }
}

fn to_agent(message: Question) -> ToAgent {
    ToAgent {
        id: 0,
        message: Some(message),
    }
}

/// Text of the guest's, printable and of bounded length.
pub fn bounded(text: String) -> String {
    text.chars()
        .take(MAX_TEXT)
        .map(|c| {
            if c.is_control() && c != '\n' && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}
