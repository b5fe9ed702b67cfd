// SPDX-License-Identifier: Apache-2.0
//! Tests the program with a fake tracefs and a fake monitor.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentCredit, AgentDisable, AgentEnable, AgentEnabledEvent, AgentEvent, AgentGetBufferStats,
    AgentGetHealth, AgentGetTasks, AgentListEvents, AgentPing, AgentRefusal, AgentSettle,
    AgentWelcome, FromAgent, ToAgent,
};
use prost::Message;
use rustix::fs::{CWD, FileType, Mode, mknodat};

const PATIENCE: Duration = Duration::from_secs(30);
const FORMAT: &str = "name: sched_switch\nID: 259\n";

struct Agent {
    process: Child,
    listener: UnixListener,
    tracefs: PathBuf,
    _folder: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn make_tracefs(root: &Path) {
    let instance = root.join("instances/patchbay");
    let file = |path: PathBuf, text: &str| {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    };
    file(
        root.join("available_events"),
        "sched:sched_switch\nirq:softirq_entry\n",
    );
    file(root.join("trace_options"), "print-parent\nrecord-cmd\n");
    file(root.join("set_event"), "irq:softirq_entry\n");
    file(
        root.join("instances/other/set_event"),
        "sched:sched_switch\n",
    );
    file(root.join("instances/idle/set_event"), "");
    file(root.join("events/sched/sched_switch/format"), FORMAT);
    for name in [
        "trace_options",
        "trace_clock",
        "buffer_size_kb",
        "buffer_percent",
        "tracing_on",
        "set_event",
        "error_log",
    ] {
        file(instance.join(name), "");
    }
    file(
        instance.join("buffer_total_size_kb"),
        "8 (expanded: 1408)\n",
    );
    for name in ["enable", "filter", "trigger"] {
        file(instance.join("events/sched/sched_switch").join(name), "");
    }
    for cpu in ["cpu0", "cpu1"] {
        file(
            instance.join("per_cpu").join(cpu).join("stats"),
            "entries: 5\noverrun: 2\nbytes: 7\nread events: 1\n",
        );
        let pages = instance.join("per_cpu").join(cpu).join("trace_pipe_raw");
        mknodat(CWD, &pages, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    }
}

impl Agent {
    fn start() -> Self {
        Self::start_with(|_| {})
    }

    /// Starts the agent. `prepare` modifies the fake tracefs before the agent sees it.
    fn start_with(prepare: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let tracefs = folder.path().join("tracefs");
        make_tracefs(&tracefs);
        prepare(&tracefs);
        let socket = folder.path().join("monitor");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let process = Command::new(env!("CARGO_BIN_EXE_patchbay-agent"))
            .arg("--connect")
            .arg(format!("unix:{}", socket.display()))
            .arg("--tracefs")
            .arg(&tracefs)
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        Self {
            process,
            listener,
            tracefs,
            _folder: folder,
        }
    }

    fn accept(&self) -> (Monitor, FromAgent) {
        let (stream, _) = self.listener.accept().expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let mut monitor = Monitor { stream, next: 1 };
        let hello = monitor.read().expect("the hello");
        (monitor, hello)
    }

    fn welcome(&self) -> Monitor {
        let (mut monitor, _) = self.accept();
        monitor.send(0, Question::Welcome(AgentWelcome { version: 1 }));
        monitor
    }

    fn instance(&self, path: &str) -> String {
        fs::read_to_string(self.tracefs.join("instances/patchbay").join(path)).expect("readable")
    }
}

struct Monitor {
    stream: UnixStream,
    next: u64,
}

impl Monitor {
    fn send(&mut self, id: u64, question: Question) {
        let message = ToAgent {
            id,
            message: Some(question),
        }
        .encode_to_vec();
        let length = u32::try_from(message.len()).expect("short");
        self.stream.write_all(&length.to_le_bytes()).expect("sent");
        self.stream.write_all(&message).expect("sent");
    }

    fn read(&mut self) -> Option<FromAgent> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).ok()?;
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        self.stream.read_exact(&mut message).ok()?;
        Some(FromAgent::decode(message.as_slice()).expect("a message"))
    }

    fn ask(&mut self, question: Question) -> Answer {
        self.next += 1;
        self.send(self.next, question);
        let answer = self.read().expect("an answer");
        assert_eq!(answer.id, self.next);
        answer.message.expect("an answer")
    }

    fn enable(&mut self, event: AgentEvent, quiet: bool) -> AgentEnabledEvent {
        match self.ask(Question::Enable(AgentEnable {
            events: vec![event],
            quiet,
        })) {
            Answer::Enabled(mut enabled) => enabled.events.remove(0),
            other => panic!("{other:?}"),
        }
    }
}

fn switch(filter: &str) -> AgentEvent {
    AgentEvent {
        name: "sched:sched_switch".into(),
        filter: filter.into(),
        trigger: String::new(),
    }
}

#[test]
fn hello_tells_versions_and_the_instance_is_set_up() {
    let agent = Agent::start();
    let (_monitor, hello) = agent.accept();
    let Some(Answer::Hello(hello)) = hello.message else {
        panic!("{hello:?}")
    };
    assert_eq!((hello.oldest_version, hello.newest_version), (1, 1));
    assert_eq!(hello.no_tracing, "");
    assert!(
        !hello.kernel_release.is_empty() && !hello.boot_id.is_empty() && hello.page_size >= 4096
    );
    assert_eq!(agent.instance("trace_clock"), "mono");
    assert_eq!(agent.instance("trace_options"), "norecord-cmd");
    assert_eq!(agent.instance("buffer_size_kb"), "1024");
    let top = fs::read_to_string(agent.tracefs.join("trace_options")).expect("readable");
    assert!(
        top.starts_with("record-cmd"),
        "names of commands are recorded again for the others: {top}"
    );
}

/// Selecting the clock again would drop the events that were recorded while no agent ran.
#[test]
fn a_clock_that_is_chosen_already_is_not_chosen_again() {
    let chosen = "local global counter uptime perf [mono] mono_raw boot\n";
    let agent = Agent::start_with(|tracefs| {
        fs::write(tracefs.join("instances/patchbay/trace_clock"), chosen).expect("written");
    });
    let _monitor = agent.accept();
    assert_eq!(agent.instance("trace_clock"), chosen);
}

#[test]
fn events_are_listed_enabled_and_disabled() {
    let agent = Agent::start();
    let mut monitor = agent.welcome();
    let Answer::Events(events) = monitor.ask(Question::ListEvents(AgentListEvents {})) else {
        panic!("events")
    };
    assert_eq!(events.names, ["sched:sched_switch", "irq:softirq_entry"]);
    let others: Vec<_> = events
        .others
        .iter()
        .map(|other| (other.name.as_str(), other.events.len()))
        .collect();
    assert_eq!(others, [("", 1), ("other", 1)]);

    let enabled = monitor.enable(switch("prev_pid == 0"), true);
    assert_eq!(
        (enabled.error.as_str(), enabled.format.as_str()),
        ("", FORMAT)
    );
    assert_eq!(agent.instance("events/sched/sched_switch/enable"), "1");
    assert_eq!(
        agent.instance("events/sched/sched_switch/filter"),
        "prev_pid == 0"
    );
    assert_eq!(agent.instance("tracing_on"), "0", "quiet until settled");
    let Answer::Done(done) = monitor.ask(Question::Settle(AgentSettle {})) else {
        panic!("done")
    };
    assert!(done.guest_time_ns > 0);
    assert_eq!(agent.instance("tracing_on"), "1");
    let names = vec!["sched:sched_switch".to_owned()];
    let Answer::Enabled(disabled) = monitor.ask(Question::Disable(AgentDisable { names })) else {
        panic!("disabled")
    };
    assert_eq!(disabled.events[0].error, "");
    assert_eq!(agent.instance("events/sched/sched_switch/enable"), "0");
}

#[test]
fn invalid_names_touch_nothing_and_the_kernels_refusal_is_passed_on() {
    let agent = Agent::start();
    let mut monitor = agent.welcome();
    for name in [
        "nothing:here",
        "../../..:etc",
        "sched",
        "sched:sched_switch/../x",
        "",
    ] {
        let event = AgentEvent {
            name: name.into(),
            ..Default::default()
        };
        assert!(!monitor.enable(event, false).error.is_empty(), "{name:?}");
    }
    let event = AgentEvent {
        name: "nothing:here".into(),
        ..Default::default()
    };
    assert!(monitor.enable(event, false).vanished);

    // A file that cannot be written stands for a write that the kernel refuses.
    let trigger = agent
        .tracefs
        .join("instances/patchbay/events/sched/sched_switch/trigger");
    fs::remove_file(&trigger).expect("removed");
    fs::create_dir(&trigger).expect("made");
    fs::write(
        agent.tracefs.join("instances/patchbay/error_log"),
        "[    1.0] error: no such trigger\n  Command: x\n",
    )
    .expect("written");
    let event = AgentEvent {
        trigger: "x".into(),
        ..switch("")
    };
    let error = monitor.enable(event, false).error;
    assert!(
        error.starts_with("trigger: error: no such trigger"),
        "{error}"
    );
    assert_eq!(
        agent.instance("events/sched/sched_switch/enable"),
        "",
        "not enabled"
    );
}

#[test]
fn pages_are_sent_only_against_credit() {
    let agent = Agent::start();
    let mut monitor = agent.welcome();
    let pipe = agent
        .tracefs
        .join("instances/patchbay/per_cpu/cpu1/trace_pipe_raw");
    let mut pipe = fs::OpenOptions::new()
        .write(true)
        .open(pipe)
        .expect("the agent reads it");
    let mut page = vec![0; 4096];
    page[8..16].copy_from_slice(&20u64.to_le_bytes());
    page[16..36].fill(7);
    pipe.write_all(&page).expect("written");
    // The answer to a later question arrives first: nothing is sent without credit.
    let Answer::Pong(_) = monitor.ask(Question::Ping(AgentPing {})) else {
        panic!("pong")
    };
    // The credit is one byte too small for a page.
    monitor.send(0, Question::Credit(AgentCredit { bytes: 4223 }));
    let Answer::Pong(_) = monitor.ask(Question::Ping(AgentPing {})) else {
        panic!("pong")
    };
    monitor.send(0, Question::Credit(AgentCredit { bytes: 1 }));
    let pages = monitor.read().expect("pages");
    assert_eq!(pages.id, 0);
    let Some(Answer::Pages(pages)) = pages.message else {
        panic!("{pages:?}")
    };
    assert_eq!(pages.pages.len(), 1);
    assert_eq!(
        (pages.pages[0].cpu, pages.pages[0].data.as_slice()),
        (1, &page[..36])
    );
    let Answer::BufferStats(stats) = monitor.ask(Question::GetBufferStats(AgentGetBufferStats {}))
    else {
        panic!("stats")
    };
    assert_eq!(
        (stats.entries, stats.overrun, stats.read, stats.buffer_bytes),
        (10, 4, 2, 8192)
    );
    assert_eq!(stats.sent_bytes, 36);
}

#[test]
fn health_and_tasks_are_reported() {
    let agent = Agent::start();
    let mut monitor = agent.welcome();
    let Answer::Health(health) = monitor.ask(Question::GetHealth(AgentGetHealth {})) else {
        panic!("health")
    };
    assert!(health.uptime_ms > 0 && health.load.len() == 3 && health.memory_total_bytes > 0);
    assert!(health.agent_memory_bytes > 0);
    let pid = i32::try_from(agent.process.id()).expect("a process id");
    let Answer::Tasks(tasks) = monitor.ask(Question::GetTasks(AgentGetTasks {
        pids: vec![pid, -1],
    })) else {
        panic!("tasks")
    };
    assert_eq!(
        (tasks.tasks[0].comm.as_str(), tasks.tasks[1].comm.as_str()),
        ("patchbay-agent", "")
    );
}

#[test]
fn it_comes_back_after_a_refusal_a_restart_and_garbage() {
    let agent = Agent::start();
    let (mut monitor, _) = agent.accept();
    monitor.send(
        0,
        Question::Refusal(AgentRefusal {
            reason: "not now".into(),
        }),
    );
    let (mut monitor, _) = agent.accept();
    monitor.send(0, Question::Welcome(AgentWelcome { version: 9 }));
    let mut monitor = agent.welcome();
    monitor.enable(switch(""), false);
    fs::write(
        agent.tracefs.join("instances/patchbay/set_event"),
        "sched:sched_switch\n",
    )
    .expect("written");
    drop(monitor);
    let (mut monitor, hello) = agent.accept();
    let Some(Answer::Hello(hello)) = hello.message else {
        panic!("{hello:?}")
    };
    assert_eq!(
        hello.enabled,
        ["sched:sched_switch"],
        "what is armed stays armed, and is reported"
    );
    monitor.stream.write_all(&[0xff; 16]).expect("sent");
    let started = Instant::now();
    agent.welcome();
    assert!(started.elapsed() < PATIENCE);
}

#[test]
fn help_and_version_report_a_full_device_and_ignore_a_closed_pipe() {
    let run = |option: &str, output: Stdio| {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_patchbay-agent"));
        let output = agent.arg(option).stdout(output).output().expect("starts");
        let message = String::from_utf8(output.stderr).expect("text");
        (output.status.code(), message)
    };
    for option in ["--help", "--version"] {
        let full = fs::File::options().write(true).open("/dev/full");
        let (code, message) = run(option, full.expect("a device").into());
        assert_eq!(code, Some(1), "{message}");
        let expected = "patchbay-agent: cannot write to standard output: ";
        assert!(message.starts_with(expected), "{message}");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        assert_eq!(run(option, writer.into()), (Some(0), String::new()));
    }
}

#[test]
fn an_unknown_option_is_refused() {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_patchbay-agent"));
    let output = agent.arg("--nonsense").output().expect("starts");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "patchbay-agent: \"--nonsense\" is not an option; see --help\n"
    );
}
