// SPDX-License-Identifier: Apache-2.0
//! Tracepoints with an agent, which a thread of this process simulates. Its work is not counted.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use patchbay_observe::trace::Page;
use patchbay_proto::AGENT_PAGE_OVERHEAD;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentDone, AgentEnabled, AgentEnabledEvent, AgentEvents, AgentHello, AgentPage, AgentPages,
    AgentPong, AgentTask, AgentTasks, FromAgent, ToAgent,
};
use patchbay_proto::agent_frame::{decode, encode, length};
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    ArmTracepointsRequest, FireTracepointsRequest, FlipReport, KeyOp, ParkTracepointsRequest,
    ResultView, StreamTracepointEventsRequest, StreamTracepointEventsResponse, TraceSource,
};
use patchbay_service::trace::socket_path;
use tonic::Streaming;
use tonic::transport::Channel;

use super::callgrind;
use super::kernel::Kernel;
use super::served::{Served, agent_socket, counted};

/// Pages that a Linux guest has recorded, and the format of most of their events.
const PAGES: &[u8] = include_bytes!("../../../service/src/trace/fixtures/cpu0.pages");
const FORMAT: &str = include_str!("../../../service/src/trace/fixtures/sched_switch.format");
const PAGE: usize = 4096;
/// The number of the format.
const ID: u16 = 259;
/// The number of times that the pages are sent in one turn.
const REPEATED: usize = 20;

/// The thread that simulates the agent. It is started before those of the service, so that its
/// number is known.
pub struct Player(Sender<Connected>);

impl Player {
    pub fn start() -> Self {
        let (sender, connected) = channel::<Connected>();
        std::thread::spawn(move || {
            if let Ok(connected) = connected.recv() {
                connected.answer();
            }
        });
        Self(sender)
    }
}

/// A connection of the agent to the service.
struct Connected {
    reader: UnixStream,
    writer: Arc<Mutex<UnixStream>>,
    credit: Arc<Credit>,
    kernel: Kernel,
}

impl Connected {
    /// Answers questions until the service closes the connection.
    fn answer(mut self) {
        while let Some(question) = receive(&mut self.reader) {
            let Some(message) = question.message else {
                continue;
            };
            if let Question::Credit(credit) = &message {
                self.credit.grant(credit.bytes);
            }
            if let Some(message) = answer(message, self.kernel) {
                send(&self.writer, question.id, message);
            }
        }
    }
}

/// The connection of the agent.
pub struct Agent {
    connection: Arc<Mutex<UnixStream>>,
    credit: Arc<Credit>,
    events: Streaming<StreamTracepointEventsResponse>,
}

/// The number of bytes of pages that the service permits.
#[derive(Default)]
struct Credit {
    bytes: Mutex<u64>,
    granted: Condvar,
}

impl Credit {
    fn grant(&self, bytes: u64) {
        *self.bytes.lock().expect("no panic") += bytes;
        self.granted.notify_one();
    }

    /// Waits for this credit, and takes it.
    fn take(&self, bytes: u64) {
        let credit = self.bytes.lock().expect("no panic");
        let granted = self.granted.wait_while(credit, |credit| *credit < bytes);
        *granted.expect("no panic") -= bytes;
    }
}

/// Returns the number of events that each turn forwards.
fn forwarded() -> usize {
    let pages = PAGES
        .chunks(PAGE)
        .map(|page| Page::parse(page).expect("a page"));
    let payloads = pages.flat_map(|page| page.events().map(|event| event.expect("whole").1));
    let wanted = payloads.filter(|payload| payload.starts_with(&ID.to_le_bytes()));
    wanted.count() * REPEATED
}

impl Agent {
    /// Connects the agent, arms the events of all tracepoints, and streams those of the first.
    pub async fn connect(player: Player, served: &Served, kernel: Kernel) -> Self {
        let path = socket_path(&agent_socket(served.service.folder.path()));
        let mut reader = UnixStream::connect(path).expect("the service listens");
        let writer = reader.try_clone().expect("a descriptor");
        let connection = Arc::new(Mutex::new(writer));
        let credit = Arc::new(Credit::default());
        let hello = AgentHello {
            oldest_version: 1,
            newest_version: 1,
            agent_version: "0".to_owned(),
            ..Default::default()
        };
        send(&connection, 0, Answer::Hello(hello));
        let welcome = receive(&mut reader).and_then(|question| question.message);
        assert!(matches!(welcome, Some(Question::Welcome(_))), "{welcome:?}");
        let connected = Connected {
            reader,
            writer: Arc::clone(&connection),
            credit: Arc::clone(&credit),
            kernel,
        };
        player.0.send(connected).expect("the thread waits");
        let mut tracepoints = TracepointsServiceClient::new(served.channel.clone());
        let arm = ArmTracepointsRequest {
            patterns: vec!["sched:*".to_owned()],
            // The tracepoints have probes already.
            even_if_others: true,
            ..Default::default()
        };
        let armed = tracepoints.arm_tracepoints(arm).await;
        armed.expect("the events are armed");
        let stream = StreamTracepointEventsRequest {
            patterns: vec![format!("sched:{}", Kernel::name(0))],
            max_events_per_second: 1_000_000,
            ..Default::default()
        };
        let events = tracepoints.stream_tracepoint_events(stream).await;
        let mut events = events.expect("a stream").into_inner();
        let first = events.message().await.expect("no error").expect("no end");
        assert_eq!(first.source(), TraceSource::Agent);
        Self {
            connection,
            credit,
            events,
        }
    }

    /// Sends pages, and receives their events.
    pub async fn send_and_receive(&mut self, is_counted: bool) {
        let page = |page: &[u8]| AgentPage {
            cpu: 3,
            data: page.to_vec(),
        };
        let pages = PAGES.chunks(PAGE).map(page);
        let pages: Vec<_> = std::iter::repeat_n(pages, REPEATED).flatten().collect();
        let cost = |page: &AgentPage| page.data.len() as u64 + AGENT_PAGE_OVERHEAD;
        self.credit.take(pages.iter().map(cost).sum());
        let (connection, events) = (&self.connection, &mut self.events);
        let expected = forwarded();
        counted(is_counted, async {
            let send = || send(connection, 0, Answer::Pages(AgentPages { pages }));
            match is_counted {
                true => callgrind::ignore_this_thread(send),
                false => send(),
            }
            let mut received = 0;
            while received < expected {
                let batch = events.message().await.expect("no error").expect("no end");
                assert!(batch.losses.is_none(), "{:?}", batch.losses);
                received += batch.events.len();
            }
            assert_eq!(received, expected);
        })
        .await;
    }
}

fn send(connection: &Mutex<UnixStream>, id: u64, message: Answer) {
    let message = Some(message);
    let frame = encode(&FromAgent { id, message }).expect("short enough");
    let mut connection = connection.lock().expect("no panic");
    connection.write_all(&frame).expect("the service reads");
}

/// Returns the next message of the service; `None` if it has closed the connection.
fn receive(connection: &mut UnixStream) -> Option<ToAgent> {
    let mut header = [0; 4];
    connection.read_exact(&mut header).ok()?;
    let bytes = length(header).expect("short enough");
    let mut frame = vec![0; bytes];
    connection.read_exact(&mut frame).ok()?;
    Some(decode(&frame, bytes).expect("a message"))
}

fn answer(question: Question, kernel: Kernel) -> Option<Answer> {
    let name = |key| format!("sched:{}", Kernel::name(key));
    Some(match question {
        Question::Ping(_) => Answer::Pong(AgentPong {
            guest_time_ns: 1_000_000_000,
        }),
        Question::ListEvents(_) => Answer::Events(AgentEvents {
            names: (0..kernel.keys).map(name).collect(),
            others: Vec::new(),
        }),
        Question::Enable(enable) => {
            let enabled = |event: &patchbay_proto::agent::v1::AgentEvent| AgentEnabledEvent {
                name: event.name.clone(),
                format: format_of(&event.name),
                ..Default::default()
            };
            Answer::Enabled(AgentEnabled {
                events: enable.events.iter().map(enabled).collect(),
            })
        }
        Question::Disable(disable) => {
            let disabled = |name: &String| AgentEnabledEvent {
                name: name.clone(),
                ..Default::default()
            };
            Answer::Enabled(AgentEnabled {
                events: disable.names.iter().map(disabled).collect(),
            })
        }
        // The time is before that of the first event.
        Question::Settle(_) => Answer::Done(AgentDone { guest_time_ns: 1 }),
        Question::GetTasks(tasks) => {
            let task = |&pid: &i32| AgentTask {
                pid,
                comm: "task".to_owned(),
            };
            Answer::Tasks(AgentTasks {
                tasks: tasks.pids.iter().map(task).collect(),
            })
        }
        _ => return None,
    })
}

/// Returns the format of an event. Each event has its own number.
fn format_of(event: &str) -> String {
    let key = event.rsplit_once('k').and_then(|(_, key)| key.parse().ok());
    let id = ID + key.unwrap_or(0);
    FORMAT.replace(&format!("ID: {ID}"), &format!("ID: {id}"))
}

/// Fires or parks the events of all tracepoints.
pub async fn fire(channel: &Channel, op: KeyOp, is_counted: bool) -> Option<FlipReport> {
    let mut tracepoints = TracepointsServiceClient::new(channel.clone());
    let (patterns, result_view) = (vec!["*".to_owned()], ResultView::Summary.into());
    if op == KeyOp::Enable {
        let fire = FireTracepointsRequest {
            patterns,
            result_view,
            ..Default::default()
        };
        let call = tracepoints.fire_tracepoints(fire);
        let answer = counted(is_counted, call).await.expect("they fire");
        return answer.into_inner().report;
    }
    let park = ParkTracepointsRequest {
        patterns,
        result_view,
        even_if_others: true,
        ..Default::default()
    };
    let call = tracepoints.park_tracepoints(park);
    let answer = counted(is_counted, call).await.expect("they are parked");
    answer.into_inner().report
}
