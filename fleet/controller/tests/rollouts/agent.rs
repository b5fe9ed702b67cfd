// SPDX-License-Identifier: Apache-2.0
//! A guest's agent that reports a given health.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentEvents, AgentHealth, AgentHello, AgentPong, FromAgent, ToAgent,
};
use patchbay_proto::agent_frame::{read, write};

const EVENTS: [&str; 4] = [
    "kmem:kmem_alloc",
    "sched:sched_switch",
    "sched:sched_waking",
    "sched:sched_wakeup",
];

/// A connected agent. The connection ends on drop.
pub struct Agent {
    pub health: Arc<Mutex<AgentHealth>>,
    /// The kernel warnings to report from the next query on.
    later: Arc<Mutex<Option<u64>>>,
    stream: UnixStream,
}

impl Agent {
    /// Connects, and answers until the connection ends.
    pub fn connect(socket: &Path, boot_id: &str) -> Self {
        let stream = UnixStream::connect(socket).expect("the service listens");
        let hello = AgentHello {
            oldest_version: 1,
            newest_version: 1,
            boot_id: boot_id.to_owned(),
            no_tracing: "it only reports".to_owned(),
            ..AgentHello::default()
        };
        let hello = FromAgent {
            id: 0,
            message: Some(Answer::Hello(hello)),
        };
        let mut thread = stream.try_clone().expect("a second handle");
        write(&mut thread, &hello).expect("sent");
        let health = Arc::new(Mutex::new(AgentHealth::default()));
        let later = Arc::<Mutex<Option<u64>>>::default();
        let (reported, next) = (Arc::clone(&health), Arc::clone(&later));
        std::thread::spawn(move || {
            while let Ok(ToAgent { id, message }) = read(&mut thread) {
                let answer = match message {
                    Some(Question::Welcome(_) | Question::Credit(_)) | None => continue,
                    Some(Question::Ping(_)) => Answer::Pong(AgentPong::default()),
                    Some(Question::GetHealth(_)) => {
                        let mut reported = reported.lock().expect("no panic");
                        let answer = reported.clone();
                        if let Some(count) = next.lock().expect("no panic").take() {
                            reported.kernel_warnings = count;
                        }
                        Answer::Health(answer)
                    }
                    Some(Question::ListEvents(_)) => Answer::Events(AgentEvents {
                        names: EVENTS.map(str::to_owned).to_vec(),
                        ..AgentEvents::default()
                    }),
                    Some(_) => Answer::Error("it only reports".to_owned()),
                };
                let message = Some(answer);
                if write(&mut thread, &FromAgent { id, message }).is_err() {
                    return;
                }
            }
        });
        Self {
            health,
            later,
            stream,
        }
    }

    pub fn warnings(&self, count: u64) {
        self.health.lock().expect("no panic").kernel_warnings = count;
    }

    /// Sets the number of kernel warnings that the agent reports from the next query on.
    pub fn warnings_later(&self, count: u64) {
        *self.later.lock().expect("no panic") = Some(count);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The peer may already have closed the connection.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}
