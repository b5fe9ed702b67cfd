// SPDX-License-Identifier: Apache-2.0
//! One connection to the monitor, from hello to its end.
//!
//! Three threads serve it. The first reads questions and answers pings, so that a ping measures
//! latency and not work. The second answers the other questions in order. The third forwards pages
//! within the monitor's credit. A thread that fails shuts the socket down, which ends the others.

use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentDone, AgentEnabled, AgentEvents, AgentHello, AgentPong, AgentTask, AgentTasks, FromAgent,
    ToAgent,
};
use patchbay_proto::agent_frame::{self as frame, FrameError};
use rustix::time::{ClockId, clock_gettime};

use crate::health;
use crate::pump::{Credit, Pump};
use crate::tracefs::{Tracefs, TracefsError};

/// Protocol versions that this program supports.
const OLDEST_VERSION: u32 = 1;
const NEWEST_VERSION: u32 = 1;
/// Limit on the requests that wait for an answer. A monitor that sends more does not follow the
/// protocol.
const MAX_QUESTIONS: usize = 64;
/// Limit on task names per request.
const MAX_TASKS: usize = 4096;

/// The reason why a connection ended.
pub enum Ending {
    /// The connection ended after the monitor's welcome.
    Served(String),
    /// The connection failed before the monitor's welcome.
    Failed(String),
}

/// Sends answers, from any thread.
pub struct Outlet {
    stream: Mutex<File>,
}

impl Outlet {
    /// Sends one message. A failure ends the connection.
    pub fn send(&self, id: u64, message: Answer) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = frame::write(
            &mut *stream,
            &FromAgent {
                id,
                message: Some(message),
            },
        );
        if sent
            .as_ref()
            .is_err_and(|error| error.kind() != io::ErrorKind::InvalidInput)
        {
            shut_down(&stream);
        }
        sent
    }
}

fn shut_down(stream: &File) {
    // This fails if the other side has already closed the connection.
    let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Both);
}

/// Returns the guest's CLOCK_MONOTONIC, which is also the events' clock "mono".
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Serves the monitor until the connection ends.
pub fn run(mut stream: File, tracefs: Result<&Tracefs, &TracefsError>) -> Ending {
    let outlet = match stream.try_clone() {
        Ok(clone) => Arc::new(Outlet {
            stream: Mutex::new(clone),
        }),
        Err(error) => return Ending::Failed(format!("the connection cannot be used: {error}")),
    };
    if let Err(error) = greet(&outlet, &mut stream, tracefs) {
        return Ending::Failed(error);
    }
    let credit = Arc::new(Credit::default());
    let (questions, waiting) = sync_channel(MAX_QUESTIONS);
    let error = std::thread::scope(|scope| {
        let (worker_outlet, worker_credit) = (&outlet, &credit);
        scope.spawn(move || work(worker_outlet, &waiting, tracefs, worker_credit));
        if let Ok(tracefs) = tracefs {
            let pump = Pump {
                outlet: &outlet,
                credit: &credit,
                tracefs,
            };
            scope.spawn(move || pump.run());
        }
        let error = listen(&mut stream, &outlet, questions, &credit);
        shut_down(&stream);
        credit.close();
        error
    });
    Ending::Served(error)
}

fn greet(
    outlet: &Outlet,
    stream: &mut File,
    tracefs: Result<&Tracefs, &TracefsError>,
) -> Result<(), String> {
    let hello = AgentHello {
        oldest_version: OLDEST_VERSION,
        newest_version: NEWEST_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: health::line("/proc/sys/kernel/osrelease"),
        boot_id: health::line("/proc/sys/kernel/random/boot_id"),
        no_tracing: tracefs.err().map(ToString::to_string).unwrap_or_default(),
        enabled: tracefs.map(Tracefs::enabled).unwrap_or_default(),
        page_size: u32::try_from(rustix::param::page_size()).unwrap_or(0),
    };
    outlet
        .send(0, Answer::Hello(hello))
        .map_err(|error| format!("the hello cannot be sent: {error}"))?;
    let answer: ToAgent = frame::read(stream).map_err(|error| error.to_string())?;
    match answer.message {
        Some(Question::Welcome(welcome))
            if (OLDEST_VERSION..=NEWEST_VERSION).contains(&welcome.version) =>
        {
            Ok(())
        }
        Some(Question::Welcome(welcome)) => Err(format!(
            "the monitor chose version {} of the protocol, but this agent supports {OLDEST_VERSION} to {NEWEST_VERSION}; update the older one",
            welcome.version
        )),
        Some(Question::Refusal(refusal)) => Err(format!("the monitor refused: {}", refusal.reason)),
        _ => Err("the monitor did not answer the hello with a welcome".to_owned()),
    }
}

/// Reads questions until the connection ends. Returns the reason for its end.
fn listen(
    stream: &mut File,
    outlet: &Outlet,
    questions: SyncSender<(u64, Question)>,
    credit: &Credit,
) -> String {
    loop {
        let question: ToAgent = match frame::read(stream) {
            Ok(question) => question,
            Err(error @ (FrameError::Closed | FrameError::Broken(_))) => return error.to_string(),
            Err(error) => return format!("{error}; is the monitor of another version?"),
        };
        match question.message {
            Some(Question::Ping(_)) => {
                if let Err(error) = outlet.send(
                    question.id,
                    Answer::Pong(AgentPong {
                        guest_time_ns: now(),
                    }),
                ) {
                    return format!("the answer cannot be sent: {error}");
                }
            }
            Some(Question::Credit(more)) => credit.add(more.bytes),
            Some(message) => match questions.try_send((question.id, message)) {
                Ok(()) => {}
                Err(TrySendError::Full(_)) => {
                    return format!(
                        "the monitor sent more than {MAX_QUESTIONS} questions without waiting for answers"
                    );
                }
                Err(TrySendError::Disconnected(_)) => return "the agent's worker ended".to_owned(),
            },
            None => {
                let error = "this agent does not know the question; update the agent".to_owned();
                if let Err(error) = outlet.send(question.id, Answer::Error(error)) {
                    return format!("the answer cannot be sent: {error}");
                }
            }
        }
    }
}

fn work(
    outlet: &Outlet,
    questions: &Receiver<(u64, Question)>,
    tracefs: Result<&Tracefs, &TracefsError>,
    credit: &Credit,
) {
    let mut warnings = crate::kmsg::Warnings::open();
    let mut log = crate::kmsg::Log::default();
    // The loop ends when the listener drops its sender.
    while let Ok((id, question)) = questions.recv() {
        let answer = match (question, tracefs) {
            (Question::GetHealth(_), _) => Answer::Health(health::report(&mut warnings)),
            (Question::ReadLog(question), _) => match log.read(question.first) {
                Ok(log) => Answer::Log(log),
                Err(error) => Answer::Error(format!("/dev/kmsg cannot be read: {error}")),
            },
            (Question::GetTasks(tasks), _) => Answer::Tasks(names(&tasks.pids)),
            (_, Err(error)) => Answer::Error(error.to_string()),
            (question, Ok(tracefs)) => trace(tracefs, question, credit),
        };
        if let Err(error) = outlet.send(id, answer) {
            if error.kind() != io::ErrorKind::InvalidInput {
                return;
            }
            let _ = outlet.send(id, Answer::Error(error.to_string()));
        }
    }
}

fn trace(tracefs: &Tracefs, question: Question, credit: &Credit) -> Answer {
    match question {
        Question::ListEvents(_) => match tracefs.events() {
            Ok(names) => Answer::Events(AgentEvents {
                names,
                others: tracefs.others(),
            }),
            Err(error) => Answer::Error(format!("the events cannot be listed: {error}")),
        },
        Question::Enable(enable) => {
            if enable.quiet
                && let Err(error) = tracefs.record(false)
            {
                return Answer::Error(format!("recording cannot be stopped: {error}"));
            }
            Answer::Enabled(AgentEnabled {
                events: enable
                    .events
                    .iter()
                    .map(|event| tracefs.enable(event))
                    .collect(),
            })
        }
        Question::Settle(_) => {
            let guest_time_ns = now();
            match tracefs.record(true) {
                Ok(()) => Answer::Done(AgentDone { guest_time_ns }),
                Err(error) => Answer::Error(format!("recording cannot be started: {error}")),
            }
        }
        Question::Disable(disable) => Answer::Enabled(AgentEnabled {
            events: disable
                .names
                .iter()
                .map(|name| tracefs.disable(name))
                .collect(),
        }),
        Question::GetBufferStats(_) => {
            let mut stats = tracefs.stats();
            stats.sent_bytes = credit.sent();
            Answer::BufferStats(stats)
        }
        _ => Answer::Error("this agent does not know the question; update the agent".to_owned()),
    }
}

fn names(pids: &[i32]) -> AgentTasks {
    let task = |&pid: &i32| AgentTask {
        pid,
        comm: health::line(&format!("/proc/{pid}/comm")),
    };
    AgentTasks {
        tasks: pids.iter().take(MAX_TASKS).map(task).collect(),
    }
}
