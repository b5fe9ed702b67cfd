// SPDX-License-Identifier: Apache-2.0
//! A made-up agent on the agent's socket, and made-up keys.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentDone, AgentEnabled, AgentEnabledEvent, AgentEvents, AgentHello, AgentInstance, AgentLog,
    AgentPage, AgentPages, AgentPong, AgentTask, AgentTasks, FromAgent, ToAgent,
};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use super::super::frame;
use super::super::switch::{Boxed, Switch, TracepointFacts, TracepointKeys};
use super::super::{AgentSocket, Tracer, start};
use crate::keys::{
    Caller, FlipReport, KeyRefusal, KeysError, PauseTimes, RefusedKey, TracepointUpdate, Use,
};

pub const SWITCH: &str = include_str!("../fixtures/sched_switch.format");
pub const FORK: &str = include_str!("../fixtures/sched_process_fork.format");
pub const PAGES: &[u8] = include_bytes!("../fixtures/cpu0.pages");
/// A time before the first event of the fixtures.
pub const BEFORE: u64 = 1;

/// State of the keys by name: on or off, and the number of probes.
#[derive(Default)]
pub struct Keys {
    pub state: Mutex<BTreeMap<String, (bool, u32)>>,
    /// Holders, by key.
    pub held: Mutex<BTreeMap<String, BTreeSet<String>>>,
    pub switches: Mutex<Vec<Switch>>,
    /// The names of probes, by key.
    pub functions: Mutex<BTreeMap<String, Vec<String>>>,
    /// The events in memory.
    pub events: Mutex<Vec<String>>,
    pub boot: AtomicU64,
    pub fail: Mutex<Option<KeysError>>,
    /// Keys whose changes are refused.
    pub refused: Mutex<BTreeSet<String>>,
    /// The guest boots again at the end of the next switch.
    pub reboots: AtomicBool,
    /// The callers whose permission was asked, with the keys and their use.
    pub permitted: Mutex<Vec<(String, Vec<String>, Use)>>,
}

impl Keys {
    pub fn new() -> Arc<Self> {
        let keys = Self::default();
        let names = [
            "sched_switch",
            "sched_process_fork",
            "sched_process_exec",
            "sys_enter",
        ];
        *keys.state.lock().unwrap() = names.map(|name| (name.to_owned(), (false, 0))).into();
        Arc::new(keys)
    }

    pub fn is_on(&self, name: &str) -> bool {
        self.state.lock().unwrap()[name].0
    }

    /// Does what the guest's kernel does when a probe comes or goes.
    pub fn probe(&self, event: &str, attach: bool) {
        let name = event.split_once(':').unwrap().1;
        let mut state = self.state.lock().unwrap();
        let Some((on, probes)) = state.get_mut(name) else {
            return;
        };
        *probes = if attach {
            *probes + 1
        } else {
            probes.saturating_sub(1)
        };
        if *probes == 0 || attach && *probes == 1 {
            *on = attach;
        }
        if !*on {
            self.held.lock().unwrap().remove(name);
        }
    }
}

impl TracepointKeys for Keys {
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError> {
        let functions = self.functions.lock().unwrap();
        let fact = |(name, (on, probes)): (&String, &(bool, u32))| TracepointFacts {
            key: name.clone(),
            enabled: *on,
            probes: Some(*probes),
            switched_by_function: name == "sys_enter",
            functions: functions.get(name).cloned().unwrap_or_default(),
            also_serves: vec![],
        };
        Ok(self.state.lock().unwrap().iter().map(fact).collect())
    }

    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError> {
        let state = self.state.lock().unwrap();
        let probes = |key: &String| state.get(key).map(|(_, probes)| *probes);
        Ok(keys.iter().map(probes).collect())
    }

    fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }

    fn also_serves(&self, _: &str) -> Vec<&'static str> {
        vec![]
    }

    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError> {
        let held = self.held.lock().unwrap();
        let holders = |key: &String| {
            let holders = held.get(key).into_iter().flatten();
            holders.map(|holder| holder.as_str().into()).collect()
        };
        Ok(keys.iter().map(holders).collect())
    }

    fn held_by(&self, client: &str) -> Result<Vec<String>, KeysError> {
        let held = self.held.lock().unwrap();
        let of_client = held.iter().filter(|(_, holders)| holders.contains(client));
        Ok(of_client.map(|(key, _)| key.clone()).collect())
    }

    fn permit(&self, caller: &Caller, keys: &[String], how: Use) -> Result<(), KeysError> {
        let mut permitted = self.permitted.lock().unwrap();
        permitted.push((caller.name.clone(), keys.to_vec(), how));
        match caller.scope {
            Some(_) => Err(KeysError::NotPermitted {
                principal: caller.name.clone(),
                why: "the test's scope permits nothing".to_owned(),
            }),
            None => Ok(()),
        }
    }

    fn boot(&self) -> Option<u64> {
        Some(self.boot.load(Ordering::Relaxed))
    }

    fn switch(&self, switch: Switch) -> Boxed<'_, Result<Option<FlipReport>, KeysError>> {
        Box::pin(async move {
            if let Some(error) = self.fail.lock().unwrap().take() {
                return Err(error);
            }
            let refused = self.refused.lock().unwrap();
            if let Some(key) = switch.keys.iter().find(|key| refused.contains(*key)) {
                return Err(KeysError::KeyRefused {
                    key: RefusedKey::Named(key.clone()),
                    reason: KeyRefusal::Sealed,
                    message: "the test refuses it".to_owned(),
                });
            }
            let mut state = self.state.lock().unwrap();
            let mut held = self.held.lock().unwrap();
            for key in &switch.keys {
                let on = &mut state.get_mut(key).unwrap().0;
                let held = held.entry(key.clone()).or_default();
                match switch.update {
                    TracepointUpdate::Fire => {
                        held.insert(switch.holder.clone());
                        *on = true;
                    }
                    TracepointUpdate::Park => {
                        held.remove(&switch.holder);
                        *on &= !held.is_empty();
                    }
                    TracepointUpdate::Leave => {
                        *on &= !held.remove(&switch.holder) || !held.is_empty();
                    }
                    TracepointUpdate::Silence | TracepointUpdate::HandOver => {
                        held.clear();
                        *on = switch.update == TracepointUpdate::HandOver;
                    }
                }
            }
            self.switches.lock().unwrap().push(switch);
            if self.reboots.swap(false, Ordering::Relaxed) {
                self.boot.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Some(FlipReport {
                pause: Some(PauseTimes::default()),
                ..FlipReport::default()
            }))
        })
    }
}

/// Behaviour of the fake agent, and what it has received.
#[derive(Default)]
pub struct Script {
    pub enabled: Mutex<BTreeSet<String>>,
    pub others: Mutex<Vec<AgentInstance>>,
    /// Answers to enable, by event.
    pub complaints: Mutex<BTreeMap<String, AgentEnabledEvent>>,
    pub quiet: Mutex<Vec<bool>>,
    pub settle_time: Mutex<u64>,
    pub credit: Mutex<u64>,
    /// Answers to requests for the kernel's log, and the first record of each request.
    pub log: Mutex<VecDeque<AgentLog>>,
    pub log_asked: Mutex<Vec<Option<u64>>>,
    /// True while the agent answers nothing.
    pub hung: watch::Sender<bool>,
    /// True while the agent answers only pings.
    pub mute: AtomicBool,
    /// Number of requests that got no answer because `mute` was set.
    pub unanswered: AtomicUsize,
}

pub struct Fake {
    pub tracer: Arc<Tracer>,
    pub keys: Arc<Keys>,
    pub script: Arc<Script>,
    pub socket: PathBuf,
    _folder: tempfile::TempDir,
}

pub const EVENTS: [&str; 4] = [
    "raw_syscalls:sys_enter",
    "sched:sched_process_fork",
    "sched:sched_switch",
    "syscalls:sys_enter_openat",
];

impl Fake {
    /// Creates a monitor without an agent.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let vsock = folder.path().join("vsock");
        let keys = Keys::new();
        let tracer = start(
            keys.clone(),
            Some(AgentSocket::bind(&vsock).expect("a socket")),
            &tokio::runtime::Handle::current(),
        )
        .expect("a socket");
        let socket = super::super::socket_path(&vsock);
        Self {
            tracer,
            keys,
            script: Arc::default(),
            socket,
            _folder: folder,
        }
    }

    /// Creates a monitor with an agent.
    pub async fn with_agent() -> Self {
        let fake = Self::new();
        fake.agent().await;
        fake
    }

    /// Connects an agent that follows the script. It also sends the pages that it gets through the
    /// returned sender.
    pub async fn agent(&self) -> mpsc::UnboundedSender<FromAgent> {
        let hello = hello(1, 1, &self.script.enabled.lock().unwrap());
        let (mut reader, writer) = self.connect(hello).await;
        let welcome: ToAgent = frame::read(&mut reader).await.expect("welcome");
        assert!(
            matches!(welcome.message, Some(Question::Welcome(_))),
            "{welcome:?}"
        );
        let (sender, outgoing) = mpsc::unbounded_channel();
        tokio::spawn(Self::play(
            Arc::clone(&self.script),
            Arc::clone(&self.keys),
            reader,
            sender.clone(),
        ));
        tokio::spawn(Self::send(writer, outgoing));
        sender
    }

    pub async fn connect(&self, hello: FromAgent) -> (OwnedReadHalf, OwnedWriteHalf) {
        let (reader, mut writer) = UnixStream::connect(&self.socket)
            .await
            .expect("listening")
            .into_split();
        frame::write(&mut writer, &hello).await.expect("sent");
        (reader, writer)
    }

    /// Follows the script. Answers are queued behind the pages that are being sent.
    async fn play(
        script: Arc<Script>,
        keys: Arc<Keys>,
        mut reader: OwnedReadHalf,
        answers: mpsc::UnboundedSender<FromAgent>,
    ) {
        let mut hung = script.hung.subscribe();
        while let Ok(question) = frame::read::<ToAgent>(&mut reader).await {
            let _ = hung.wait_for(|hung| !hung).await;
            let Some(message) = question.message else {
                continue;
            };
            let is_ping = matches!(message, Question::Ping(_));
            if script.mute.load(Ordering::Relaxed) && !is_ping {
                script.unanswered.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if let Some(message) = answer(&script, &keys, message) {
                let _ = answers.send(FromAgent {
                    id: question.id,
                    message: Some(message),
                });
            }
        }
    }

    async fn send(mut writer: OwnedWriteHalf, mut outgoing: mpsc::UnboundedReceiver<FromAgent>) {
        while let Some(message) = outgoing.recv().await {
            if frame::write(&mut writer, &message).await.is_err() {
                return;
            }
        }
    }
}

pub fn hello(oldest: u32, newest: u32, enabled: &BTreeSet<String>) -> FromAgent {
    let hello = AgentHello {
        oldest_version: oldest,
        newest_version: newest,
        agent_version: "9.9.9".to_owned(),
        enabled: enabled.iter().cloned().collect(),
        ..Default::default()
    };
    FromAgent {
        id: 0,
        message: Some(Answer::Hello(hello)),
    }
}

/// Returns the pages of the fixtures.
pub fn pages() -> FromAgent {
    let pages = PAGES
        .chunks(4096)
        .map(|page| AgentPage {
            cpu: 3,
            data: page.to_vec(),
        })
        .collect();
    FromAgent {
        id: 0,
        message: Some(Answer::Pages(AgentPages { pages })),
    }
}

fn answer(script: &Script, keys: &Keys, question: Question) -> Option<Answer> {
    Some(match question {
        Question::Ping(_) => Answer::Pong(AgentPong {
            guest_time_ns: 1_000_000_000,
        }),
        Question::ListEvents(_) => Answer::Events(AgentEvents {
            names: EVENTS.map(str::to_owned).to_vec(),
            others: script.others.lock().unwrap().clone(),
        }),
        Question::Enable(enable) => {
            script.quiet.lock().unwrap().push(enable.quiet);
            let complaints = script.complaints.lock().unwrap();
            let result = |event: &patchbay_proto::agent::v1::AgentEvent| {
                if let Some(complaint) = complaints.get(&event.name) {
                    return complaint.clone();
                }
                if script.enabled.lock().unwrap().insert(event.name.clone()) {
                    keys.probe(&event.name, true);
                }
                let format = if event.name.ends_with("fork") {
                    FORK
                } else {
                    SWITCH
                }
                .to_owned();
                AgentEnabledEvent {
                    name: event.name.clone(),
                    format,
                    ..Default::default()
                }
            };
            Answer::Enabled(AgentEnabled {
                events: enable.events.iter().map(result).collect(),
            })
        }
        Question::Disable(disable) => {
            let result = |name: &String| {
                if script.enabled.lock().unwrap().remove(name) {
                    keys.probe(name, false);
                }
                AgentEnabledEvent {
                    name: name.clone(),
                    ..Default::default()
                }
            };
            Answer::Enabled(AgentEnabled {
                events: disable.names.iter().map(result).collect(),
            })
        }
        Question::Settle(_) => Answer::Done(AgentDone {
            guest_time_ns: *script.settle_time.lock().unwrap(),
        }),
        Question::GetTasks(tasks) => {
            let task = |&pid: &i32| AgentTask {
                pid,
                comm: format!("task-{pid}"),
            };
            Answer::Tasks(AgentTasks {
                tasks: tasks.pids.iter().map(task).collect(),
            })
        }
        Question::ReadLog(read) => {
            script.log_asked.lock().unwrap().push(read.first);
            Answer::Log(script.log.lock().unwrap().pop_front()?)
        }
        Question::Credit(credit) => {
            *script.credit.lock().unwrap() += credit.bytes;
            return None;
        }
        _ => return None,
    })
}
