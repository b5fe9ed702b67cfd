// SPDX-License-Identifier: Apache-2.0
//! Passes a controller's connections to etcd on, until a place at which the test holds them.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::fleet::PATIENCE;

/// The maximum length of the text of a place.
const MAX_TEXT: usize = 128;

/// The part of a call at which the connections are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The request does not arrive at etcd.
    Before,
    /// The request arrives, and its answer is held.
    After,
}

/// The place at which all connections are held.
#[derive(Clone, Debug)]
pub struct Place {
    /// A part of the request. It is not found if it is divided between two DATA frames, because
    /// the bytes of the second frame's header are then inside it.
    pub text: String,
    /// The number of the occurrence at which the connections are held, from 1.
    pub occurrence: usize,
    pub side: Side,
}

/// The connections; see the module's documentation. Dropping this value closes them, and what is
/// held is lost.
pub struct Proxy {
    pub url: String,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    /// The place, and the number of occurrences that are left.
    place: Mutex<Option<Place>>,
    held: watch::Sender<bool>,
}

impl Proxy {
    /// Starts to listen, and passes everything on to this ADDRESS:PORT.
    pub async fn start(etcd: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let shared = Arc::new(Shared {
            place: Mutex::default(),
            held: watch::Sender::new(false),
        });
        let mut tasks = JoinSet::new();
        let passing = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.expect("it listens");
                let member = TcpStream::connect(&etcd).await.expect("etcd runs");
                for stream in [&client, &member] {
                    stream.set_nodelay(true).expect("connected");
                }
                let (answers, requests) = member.into_split();
                let (from, to) = client.into_split();
                connections.spawn(Arc::clone(&passing).requests(from, requests));
                connections.spawn(Arc::clone(&passing).answers(answers, to));
            }
        });
        Self {
            url,
            shared,
            _tasks: tasks,
        }
    }

    /// Holds all connections as soon as the controller sends such a request.
    pub fn hold(&self, place: Place) {
        *self.shared.place.lock().expect("not poisoned") = Some(place);
    }

    /// Waits until the connections are held.
    pub async fn held(&self) {
        let mut held = self.shared.held.subscribe();
        let reached = tokio::time::timeout(PATIENCE, held.wait_for(|held| *held)).await;
        reached.expect("in time").expect("the sender lives");
    }
}

impl Shared {
    /// Returns the side if the place is in these bytes, the first `old` of which were passed on
    /// before.
    fn reached(&self, bytes: &[u8], old: usize) -> Option<Side> {
        let mut place = self.place.lock().expect("not poisoned");
        let at = place.as_mut()?;
        let text = at.text.as_bytes();
        let new = &bytes[old.saturating_sub(text.len() - 1)..];
        let found = new.windows(text.len()).filter(|of| *of == text).count();
        at.occurrence = at.occurrence.saturating_sub(found);
        let is_reached = at.occurrence == 0;
        is_reached.then(|| place.take().expect("set").side)
    }

    async fn requests(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        // The beginning is the end of what was passed on, because a text may arrive in two parts.
        let (mut bytes, mut old) = (Vec::with_capacity(1 << 20), 0);
        while let Ok(1..) = from.read_buf(&mut bytes).await {
            let side = self.reached(&bytes, old);
            if side.is_some() {
                self.held.send_replace(true);
            }
            let is_held = *self.held.borrow() && side != Some(Side::After);
            if is_held || to.write_all(&bytes[old..]).await.is_err() {
                break;
            }
            bytes.drain(..bytes.len().saturating_sub(MAX_TEXT));
            old = bytes.len();
        }
        self.wait_if_held().await;
    }

    async fn answers(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut chunk = vec![0; 1 << 20];
        while let Ok(length @ 1..) = from.read(&mut chunk).await {
            if *self.held.borrow() || to.write_all(&chunk[..length]).await.is_err() {
                break;
            }
        }
        self.wait_if_held().await;
    }

    /// Keeps a held connection open.
    async fn wait_if_held(&self) {
        if *self.held.borrow() {
            std::future::pending::<()>().await;
        }
    }
}
