// SPDX-License-Identifier: Apache-2.0
//! The link to the agent in the guest.
//!
//! ```text
//!  listening ── connection ──▶ hello? ── versions meet, no other agent ──▶ welcome ──▶ linked
//!      ▲                         │ otherwise: refusal with the reason                    │
//!      └─────────────────────────┴──────────── closed, garbage, too much ◀───────────────┘
//! ```
//!
//! The guest is hostile, and its privileged programs can connect (the vsock device rejects others,
//! see [`PORT`]). Therefore only one agent is connected at a time, and another agent replaces it
//! only if it is silent. Frames and concurrent handshakes are bounded, pages need credit, and
//! answers need a request. A silent agent stays connected until then: it may be stopped, and its
//! probes are still attached.
//!
//! Credit is a window. The agent's unused credit and the pages that are not decoded yet never
//! exceed [`WINDOW`] bytes together, over all connections. The reader therefore never waits for the
//! decoder, and pages do not delay answers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::log_limit::limited;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentCredit, AgentHello, AgentPages, AgentPing, AgentRefusal, AgentWelcome, FromAgent, ToAgent,
};
use patchbay_proto::{AGENT_PAGE_MAX_BYTES, AGENT_PAGE_OVERHEAD};
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::clock::GuestClock;
use super::error::AgentError;
use super::frame::{self, FrameError};
use super::socket::AgentListener;

/// vsock port on the host that the agent connects to. The agent's own port is below 1024, because
/// Linux requires CAP_NET_BIND_SERVICE for such a port.
pub const PORT: u32 = 1024;
/// Versions of the protocol that this monitor supports.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=1;
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
const HANDSHAKES: usize = 8;
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// An agent that sends no message for this long counts as silent.
const SILENCE: Duration = Duration::from_secs(5);
/// Maximum number of requests that wait for an answer.
const MAX_WAITING: usize = 256;
const OUTBOX: usize = 64;
/// Maximum length of a text of the hello; longer texts are truncated.
const MAX_TEXT: usize = 1024;
const MAX_ENABLED: usize = 16_384;
/// Maximum length of an event's name.
const MAX_NAME: usize = 256;
/// Maximum cost of the pages that are in flight or wait for the decoder.
pub const WINDOW: u64 = 4 << 20;
/// Minimum credit per message. A smaller grant is not worth a message.
const LEAST_CREDIT: u64 = WINDOW / 16;

/// Handle to the link. Clones share it.
#[derive(Clone)]
pub struct AgentLink {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    clock: Mutex<GuestClock>,
    /// Changes with each connection that opens or closes.
    connections: watch::Sender<u64>,
    /// Bounded by the window.
    pages: mpsc::UnboundedSender<Received>,
    next_id: AtomicU64,
}

#[derive(Default)]
struct State {
    current: Option<Connection>,
    /// The reason why the last agent disconnected or was refused.
    last: String,
    /// Cost of the pages that wait for the decoder, over all connections.
    held: u64,
}

/// Pages that used credit; [`AgentLink::release`] gives it back.
#[derive(Debug)]
pub struct Received {
    pub pages: AgentPages,
    /// Credit that the pages used, as the protocol defines it.
    pub cost: u64,
}

struct Connection {
    number: u64,
    peer: Peer,
    heard: Instant,
    /// True if a stream wants pages.
    wanted: bool,
    /// Credit that the agent has not used.
    granted: u64,
    /// Credit that has not been announced to the agent yet.
    owed: u64,
    credited: Arc<Notify>,
    outbox: mpsc::Sender<ToAgent>,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// Dropping this sender ends the connection's tasks.
    _alive: oneshot::Sender<()>,
}

/// A connected agent.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its hello, with texts of bounded length.
    pub hello: AgentHello,
    /// Version of the protocol.
    pub version: u32,
    /// Time at which the agent was welcomed.
    pub connected_at: SystemTime,
    /// Number of the connection. Never reused.
    pub connection: u64,
}

impl AgentLink {
    /// Creates a link that sends received pages to `pages`. No agent can connect before
    /// [`AgentLink::accept`] is called.
    pub fn new(pages: mpsc::UnboundedSender<Received>) -> Self {
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

    /// Returns the mapping of the guest's clock to the host's.
    pub fn clock(&self) -> MutexGuard<'_, GuestClock> {
        self.shared
            .clock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver that changes when an agent connects or disconnects.
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.shared.connections.subscribe()
    }

    /// Returns the connected agent.
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

    /// Returns whether an agent is connected.
    pub fn is_connected(&self) -> bool {
        self.state().current.is_some()
    }

    /// Returns the time since the last message, if the agent counts as silent.
    pub fn silent_for(&self) -> Option<Duration> {
        let heard = self.state().current.as_ref()?.heard.elapsed();
        (heard > SILENCE).then_some(heard)
    }

    /// Sends a request and waits for the answer.
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
        // This also runs when the caller is dropped before the answer.
        let _waiting = Waiting {
            link: self,
            number,
            id,
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
            Err(_) => Err(silent()),
        }
    }

    /// Starts or stops the flow of pages. The credit that the agent already has is not revoked.
    pub fn want_pages(&self, wanted: bool) {
        let mut state = self.state();
        if let Some(connection) = &mut state.current {
            connection.wanted = wanted;
        }
        state.top_up();
    }

    /// Returns the credit of decoded pages.
    pub fn release(&self, cost: u64) {
        let mut state = self.state();
        state.held = state.held.saturating_sub(cost);
        state.top_up();
    }

    /// Returns the cost of the pages that wait for the decoder.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn held(&self) -> u64 {
        self.state().held
    }

    /// Takes the credit that must be announced to the agent.
    fn take_owed(&self, number: u64) -> u64 {
        let mut state = self.state();
        let current = state.current.as_mut();
        current
            .filter(|current| current.number == number)
            .map_or(0, |current| std::mem::take(&mut current.owed))
    }

    /// Accepts agents. Their connections end when the future is dropped.
    pub(super) async fn accept(self, listener: AgentListener) {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        let mut number = 0;
        let mut connections = JoinSet::new();
        loop {
            let stream = crate::accept::accept(|| listener.accept()).await;
            while connections.try_join_next().is_some() {}
            let Ok(permit) = Arc::clone(&handshakes).try_acquire_owned() else {
                continue;
            };
            number += 1;
            let link = self.clone();
            connections.spawn(async move { link.connected(stream, number, permit).await });
        }
    }

    /// Serves a connection until it ends.
    pub(super) async fn connected(
        &self,
        stream: UnixStream,
        number: u64,
        handshake: OwnedSemaphorePermit,
    ) {
        let greeted = tokio::time::timeout(HANDSHAKE_TIME, self.greet(stream, number)).await;
        drop(handshake);
        match greeted {
            Ok(Ok(Some(greeted))) => self.serve(greeted, number).await,
            Ok(Ok(None)) => {}
            Ok(Err(error)) => self.note(format!("{error} (before its hello)")),
            Err(_) => self.note("a program connected and sent no hello".to_owned()),
        }
    }

    fn note(&self, why: String) {
        limited!(info, why, "the agent's link");
        self.state().last = why;
    }

    /// Reads the agent's hello and welcomes or refuses it. Returns `None` if the agent was refused.
    async fn greet(
        &self,
        mut stream: UnixStream,
        number: u64,
    ) -> Result<Option<Greeted>, FrameError> {
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
                let credited = Arc::new(Notify::new());
                // The welcome is queued and not written here, so that an agent that dies meanwhile
                // does not stay connected. The queue is new, so it has room and the welcome is its
                // first message.
                let _ = outbox.try_send(to_agent(Question::Welcome(AgentWelcome { version })));
                let connection = Connection {
                    number,
                    peer,
                    heard: Instant::now(),
                    wanted: false,
                    granted: 0,
                    owed: 0,
                    credited: Arc::clone(&credited),
                    outbox,
                    waiting,
                    _alive: alive,
                };
                self.clock().clear();
                self.state().current = Some(connection);
                self.shared.connections.send_modify(|count| *count += 1);
                Ok(Some(Greeted {
                    stream,
                    outgoing,
                    credited,
                    gone,
                }))
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
        hello.enabled.retain(|name| name.len() <= MAX_NAME);
        hello.enabled.shrink_to_fit();
        Ok(Peer {
            hello,
            version,
            connected_at: SystemTime::now(),
            connection,
        })
    }

    async fn serve(&self, greeted: Greeted, number: u64) {
        let Greeted {
            stream,
            mut outgoing,
            credited,
            mut gone,
        } = greeted;
        let (mut reader, mut writer) = stream.into_split();
        let read = async {
            loop {
                let message: FromAgent = match frame::read(&mut reader).await {
                    Ok(message) => message,
                    Err(error) => return error.to_string(),
                };
                if let Err(why) = self.take(number, message) {
                    return why;
                }
            }
        };
        let write = async {
            loop {
                let message = tokio::select! {
                    message = outgoing.recv() => message,
                    () = credited.notified() => match self.take_owed(number) {
                        0 => continue,
                        bytes => Some(to_agent(Question::Credit(AgentCredit { bytes }))),
                    },
                };
                let Some(message) = message else {
                    return "another agent took its place".to_owned();
                };
                if let Err(error) = frame::write(&mut writer, &message).await {
                    return format!("the agent takes no messages: {error}");
                }
            }
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

    /// Pings the agent and never returns.
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

    /// Processes a message of the agent. An error is the reason why the connection must be closed.
    fn take(&self, number: u64, message: FromAgent) -> Result<(), String> {
        let mut state = self.state();
        let state = &mut *state;
        let current = state.current.as_mut();
        let current = current
            .filter(|current| current.number == number)
            .ok_or("another agent took its place")?;
        current.heard = Instant::now();
        match message.message {
            Some(Answer::Pages(pages)) => {
                let cost = cost(&pages)?;
                current.granted = current.granted.checked_sub(cost).ok_or_else(|| {
                    format!(
                        "the agent sent pages that cost {cost} bytes and had credit for {}",
                        current.granted
                    )
                })?;
                state.held = state.held.saturating_add(cost);
                let sent = self.shared.pages.send(Received { pages, cost });
                sent.map_err(|_| "the monitor ends".to_owned())
            }
            Some(answer) => {
                // If no request is found, the answer came after its request timed out.
                if let Some(reply) = current.waiting.remove(&message.id) {
                    let _ = reply.send(answer);
                }
                Ok(())
            }
            // The message belongs to a newer version.
            None => Ok(()),
        }
    }
}

/// The connection of a welcomed agent.
struct Greeted {
    stream: UnixStream,
    outgoing: mpsc::Receiver<ToAgent>,
    credited: Arc<Notify>,
    gone: oneshot::Receiver<()>,
}

/// A waiting request. Dropping this removes it.
struct Waiting<'a> {
    link: &'a AgentLink,
    number: u64,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.link.state().current
            && connection.number == self.number
        {
            connection.waiting.remove(&self.id);
        }
    }
}

/// Returns the cost of a frame's pages, or an error if a page is too long.
fn cost(pages: &AgentPages) -> Result<u64, String> {
    let mut cost = 0;
    for page in &pages.pages {
        let bytes = page.data.len() as u64;
        if bytes > AGENT_PAGE_MAX_BYTES {
            return Err(format!(
                "the agent sent a page of {bytes} bytes, and {AGENT_PAGE_MAX_BYTES} is the maximum"
            ));
        }
        cost += bytes + AGENT_PAGE_OVERHEAD;
    }
    Ok(cost)
}

impl State {
    /// Grants the free part of the window.
    fn top_up(&mut self) {
        let Some(current) = self.current.as_mut().filter(|current| current.wanted) else {
            return;
        };
        let free = WINDOW.saturating_sub(self.held.saturating_add(current.granted));
        if free >= LEAST_CREDIT {
            current.granted += free;
            current.owed += free;
            current.credited.notify_one();
        }
    }

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

/// Makes a text from the guest printable and truncates it.
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
