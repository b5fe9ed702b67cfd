// SPDX-License-Identifier: Apache-2.0
//! A malicious root user in the guest, in place of the agent, tries to exhaust the host's memory.
//!
//! The monitor's part of tracing runs in a separate process under `RLIMIT_AS`; an excessive
//! allocation ends it. The test process plays the agent.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use patchbay_guest::testing::InMemoryGuest;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentDone, AgentEnabled, AgentEnabledEvent, AgentEvents, AgentHello, AgentPage, AgentPages,
    AgentPong, FromAgent, ToAgent,
};
use patchbay_proto::v1::StreamTracepointEventsRequest;
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_service::api::{Access, Guests, ServedGuest, TracepointsApi};
use patchbay_service::auth::SocketAuthoriser;
use patchbay_service::keys::{Caller, FlipReport, KeysConfig, KeysError, Registry, Use};
use patchbay_service::trace::{
    AgentSocket, Boxed, DEFAULT_GRACE, Switch, TraceThread, TracepointFacts, TracepointKeys,
};
use patchbay_vmm::guest::FilteredThreads;
use patchbay_vmm::seccomp::{self, SeccompLevel};
use prost::Message;
use tonic::Request;

/// Limit on the monitor process: its code, the stacks of its threads, and what a guest can make it
/// hold.
const LIMIT_KIB: u64 = 192 << 10;
/// Size of one attack, many times what the monitor may hold.
const ATTACK_BYTES: usize = 32 << 20;
const FOLDER: &str = "PATCHBAY_FLOOD_FOLDER";
const PATIENCE: Duration = Duration::from_secs(60);
const EVENT: &str = "hostile:event";

struct Keys;

impl TracepointKeys for Keys {
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError> {
        Ok(vec![TracepointFacts {
            key: "event".to_owned(),
            enabled: true,
            probes: Some(1),
            switched_by_function: false,
            functions: vec![],
            also_serves: vec![],
        }])
    }

    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError> {
        Ok(vec![Some(1); keys.len()])
    }

    fn also_serves(&self, _: &str) -> Vec<&'static str> {
        vec![]
    }

    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError> {
        Ok(vec![vec![]; keys.len()])
    }

    fn held_by(&self, _: &str) -> Result<Vec<String>, KeysError> {
        Ok(vec![])
    }

    fn permit(&self, _: &Caller, _: &[String], _: Use) -> Result<(), KeysError> {
        Ok(())
    }

    fn boot(&self) -> Option<u64> {
        None
    }

    fn switch(&self, _: Switch) -> Boxed<'_, Result<Option<FlipReport>, KeysError>> {
        Box::pin(async { Ok(None) })
    }
}

/// The body of the process under the limit.
fn monitor(folder: &Path) {
    // A system call that the trace thread does not need ends the process.
    seccomp::enforce(SeccompLevel::On);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let socket = AgentSocket::bind(&folder.join("vsock")).expect("a socket");
        // The thread has the same filter as in the monitor.
        let thread = TraceThread::start(&FilteredThreads).expect("started");
        let tracer = patchbay_service::trace::start(Arc::new(Keys), Some(socket), thread.handle());
        let tracer = tracer.expect("started");
        let guests = Guests::default();
        let served = ServedGuest::new(static_keys(), tracer, DEFAULT_GRACE);
        guests.add(served).expect("the only one");
        let api = TracepointsApi::new(Access::new(guests, Arc::new(SocketAuthoriser), 0));
        say("listening");
        let request = || StreamTracepointEventsRequest {
            patterns: vec![EVENT.to_owned()],
            arm_and_fire: true,
            even_if_others: true,
            max_events_per_second: 1_000_000,
            ..Default::default()
        };
        // A client that never reads.
        let _stream = loop {
            match api.stream_tracepoint_events(Request::new(request())).await {
                Ok(stream) => break stream,
                Err(status) => {
                    // The agent has not connected yet.
                    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        };
        say("streaming");
        // Runs until the other process closes this one's stdin.
        let (end, ended) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let _ = std::io::stdin().read(&mut [0]);
            let _ = end.send(());
        });
        let _ = ended.await;
        let status = std::fs::read_to_string("/proc/self/status").expect("of this process");
        let high = status.lines().find(|line| line.starts_with("VmHWM"));
        say(high.unwrap_or_default());
    });
}

/// Returns a key service. The API requires one for each guest, but this test does not use it.
fn static_keys() -> Arc<patchbay_service::keys::Keys> {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    let config = KeysConfig::default();
    let started = patchbay_service::keys::Keys::start(guest, registry, config);
    Arc::new(started.expect("a thread").0)
}

fn say(text: &str) {
    println!("\n#{text}");
    std::io::stdout().flush().expect("open");
}

struct Monitor {
    process: Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
}

impl Monitor {
    fn start(folder: &Path) -> Self {
        let program = std::env::current_exe().expect("this program");
        let limit = format!("ulimit -v {LIMIT_KIB} && exec \"$0\" \"$@\"");
        let mut process = Command::new("sh")
            .args(["-c", &limit])
            .arg(program)
            .args(["--exact", TEST, "--nocapture"])
            .env(FOLDER, folder)
            // Otherwise the C library reserves 64 MiB of addresses for the heap of each thread.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let output = process.stdout.take().expect("piped");
        Self {
            process,
            lines: std::io::BufRead::lines(std::io::BufReader::new(output)),
        }
    }

    /// Returns the next line that the monitor process prints.
    fn hear(&mut self) -> String {
        loop {
            let line = self
                .lines
                .next()
                .expect("the monitor lives within its limit")
                .expect("text");
            if let Some(line) = line.strip_prefix('#') {
                return line.to_owned();
            }
        }
    }

    /// Ends the process and returns its peak of resident memory.
    fn end(mut self) -> String {
        drop(self.process.stdin.take());
        let high = self.hear();
        for _ in &mut self.lines {}
        assert!(self.process.wait().expect("ended").success());
        high
    }
}

/// Returns a format with the maximum number of fields, all at the same offset.
fn format() -> String {
    let common = [
        ("unsigned short common_type", 0, 2),
        ("unsigned char common_flags", 2, 1),
        ("unsigned char common_preempt_count", 3, 1),
        ("int common_pid", 4, 4),
    ];
    let mut text = "name: event\nID: 7\nformat:\n".to_owned();
    for (declaration, offset, size) in common {
        text += &format!("\tfield:{declaration};\toffset:{offset};\tsize:{size};\tsigned:0;\n");
    }
    for number in 0..124 {
        let name = format!("a_field_with_a_name_{number}");
        text += &format!("\tfield:char {name}[1];\toffset:0;\tsize:1;\tsigned:0;\n");
    }
    text
}

/// Returns a page full of the smallest events.
fn page(bytes: usize) -> Vec<u8> {
    let length = (bytes - 16) / 12 * 12;
    let mut page = 1_u64.to_le_bytes().to_vec();
    page.extend((length as u64).to_le_bytes());
    for number in 0..length / 12 {
        page.extend(((1_u32 << 5) | 2).to_le_bytes());
        page.extend([7, 0, b'a', b'b']);
        page.extend(u32::try_from(number + 1).expect("few").to_le_bytes());
    }
    page
}

fn frame(message: Answer, id: u64) -> Vec<u8> {
    let message = FromAgent {
        id,
        message: Some(message),
    }
    .encode_to_vec();
    let mut frame = u32::try_from(message.len())
        .expect("short")
        .to_le_bytes()
        .to_vec();
    frame.extend(message);
    frame
}

fn pages(pages: &[&[u8]]) -> Vec<u8> {
    let page = |data: &&[u8]| AgentPage {
        cpu: 0,
        data: data.to_vec(),
    };
    let pages = pages.iter().map(page).collect();
    frame(Answer::Pages(AgentPages { pages }), 0)
}

/// A connection that behaves until the attack starts.
struct Agent {
    stream: UnixStream,
    armed: bool,
    settled: bool,
    credit: u64,
}

impl Agent {
    /// Connects. `armed` says that the monitor has already armed the event on an earlier
    /// connection.
    fn connect(folder: &Path, armed: bool) -> Self {
        let socket = patchbay_service::trace::socket_path(&folder.join("vsock"));
        let hello = AgentHello {
            oldest_version: 1,
            newest_version: 1,
            enabled: armed.then(|| EVENT.to_owned()).into_iter().collect(),
            ..Default::default()
        };
        let hello = frame(Answer::Hello(hello), 0);
        // The monitor may not have noticed the end of the previous connection.
        loop {
            let mut stream = UnixStream::connect(&socket).expect("listening");
            stream.set_read_timeout(Some(PATIENCE)).expect("set");
            stream.set_write_timeout(Some(PATIENCE)).expect("set");
            if stream.write_all(&hello).is_err() {
                continue;
            }
            let mut agent = Self {
                stream,
                armed,
                settled: false,
                credit: 0,
            };
            if let Some(Question::Welcome(_)) = agent.read() {
                return agent;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn read(&mut self) -> Option<Question> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).ok()?;
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        self.stream.read_exact(&mut message).ok()?;
        let asked = ToAgent::decode(message.as_slice()).expect("a question");
        let question = asked.message?;
        let answer = match &question {
            Question::Ping(_) => Some(Answer::Pong(AgentPong::default())),
            Question::ListEvents(_) => Some(Answer::Events(AgentEvents {
                names: vec![EVENT.to_owned()],
                ..Default::default()
            })),
            Question::Enable(_) => {
                self.armed = true;
                Some(Answer::Enabled(AgentEnabled {
                    events: vec![AgentEnabledEvent {
                        name: EVENT.to_owned(),
                        format: format(),
                        ..Default::default()
                    }],
                }))
            }
            Question::Disable(_) => Some(Answer::Enabled(AgentEnabled::default())),
            Question::Settle(_) => {
                self.settled = self.armed;
                Some(Answer::Done(AgentDone::default()))
            }
            _ => None,
        };
        if let Question::Credit(credit) = &question {
            self.credit = self.credit.saturating_add(credit.bytes);
        }
        if let Some(answer) = answer {
            self.stream.write_all(&frame(answer, asked.id)).ok()?;
        }
        Some(question)
    }

    fn until_credit(&mut self) {
        while !self.settled || self.credit == 0 {
            self.read().expect("a question");
        }
    }

    /// Sends `bytes` repeatedly until the attack is complete or the monitor disconnects.
    fn flood(mut self, bytes: &[u8]) {
        for _ in 0..ATTACK_BYTES / bytes.len() {
            if self.stream.write_all(bytes).is_err() {
                return;
            }
        }
    }

    /// Sends `bytes` as [`flood`](Self::flood) does, but within the credit.
    fn flood_within_credit(mut self, bytes: &[u8], cost: u64) {
        for _ in 0..ATTACK_BYTES / 4 / bytes.len() {
            while self.credit < cost {
                if self.read().is_none() {
                    return;
                }
            }
            self.credit -= cost;
            if self.stream.write_all(bytes).is_err() {
                return;
            }
        }
        // Waits for the last credit, so that everything has been read.
        while self.credit < cost {
            if self.read().is_none() {
                return;
            }
        }
    }
}

/// Name of the test, which both processes run.
const TEST: &str = "a_flood_of_the_agent_stays_within_the_limit";

#[test]
fn a_flood_of_the_agent_stays_within_the_limit() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return monitor(Path::new(&folder));
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut monitor = Monitor::start(folder.path());
    assert_eq!(monitor.hear(), "listening");
    let mut agent = Agent::connect(folder.path(), false);
    let streaming = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            // The monitor pings once per second.
            while !streaming.load(Ordering::Relaxed) {
                agent.read().expect("a question");
            }
        });
        assert_eq!(monitor.hear(), "streaming");
        streaming.store(true, Ordering::Relaxed);
        answering.join().expect("no panic");
    });
    let next = |name: &str| {
        println!("{name}");
        let mut agent = Agent::connect(folder.path(), true);
        agent.until_credit();
        agent
    };

    println!("small events within credit");
    let small = page(32 << 10);
    agent.flood_within_credit(&pages(&[&small, &small]), (64 << 10) + 256);
    println!("pages without credit");
    next("pages without credit").flood(&pages(&[&page(63 << 10)]));
    next("empty pages").flood(&pages(&vec![&[][..]; 250 << 10]));
    next("one large page").flood(&pages(&[&page(1000 << 10)]));
    let enabled = AgentEnabled {
        events: vec![AgentEnabledEvent::default(); 250 << 10],
    };
    next("answers that nobody asked for").flood(&frame(Answer::Enabled(enabled), 1 << 60));
    let names = AgentEvents {
        names: vec![String::new(); 250 << 10],
        ..Default::default()
    };
    next("names").flood(&frame(Answer::Events(names), 1 << 60));
    println!("peak of the monitor: {}", monitor.end());
}
