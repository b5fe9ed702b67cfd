// SPDX-License-Identifier: Apache-2.0

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use patchbay_guest::testing::TestKey;
use patchbay_kernel_image::DebugLine;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentHello, AgentLog, AgentLogRecord, AgentPong, FromAgent, ToAgent,
};
use patchbay_proto::agent_frame;
use patchbay_service::testing::Discovered;

use super::lab::{Commands, Host, Lab};

fn lab() -> Lab {
    let lab = Lab::with(&[
        TestKey::guarded("net/a.c/10"),
        TestKey::guarded("net/b.c/20"),
        TestKey::guarded("hook"),
    ]);
    let site = |file: &str, line, function: &str, format: &str| DebugLine {
        module: "net".to_owned(),
        file: file.to_owned(),
        function: function.to_owned(),
        line,
        format: format.to_owned(),
        classed: false,
    };
    lab.guest.discover(
        &lab.registry,
        &[
            ("net/a.c/10", site("net/a.c", 10, "a_open", "open %s\n")),
            ("net/b.c/20", site("net/b.c", 20, "b_open", "\u{1b}[2J")),
        ],
        &["hook"],
    );
    lab
}

#[test]
fn lines_are_listed_and_their_texts_do_not_steer_the_terminal() {
    let lab = lab();
    let table = lab.ok(&["debug", "list"]);
    assert!(
        table.contains("net/a.c:10  net     a_open    off    0      \"open %s\"\n"),
        "{table}"
    );
    assert!(table.contains(r#""\033[2J""#), "{table}");
    let lines = lab.json(&["debug", "list", "func a_*"]);
    assert_eq!(lines[0]["key"], "net/a.c/10");
    assert_eq!(lines[0]["format"], r"open %s\n");
    assert!(lines[1].is_null());
    assert_eq!(lab.ok(&["debug", "list", "--on", "-o", "name"]), "");
}

#[test]
fn lines_are_switched_by_queries() {
    let lab = lab();
    let on = lab.ok(&["debug", "on", "file a.c", "line 20-", "--reason", "why"]);
    assert!(
        on.contains("net/a.c/10  0 -> 1  1\n") && on.contains("2 of 2 keys changed\n"),
        "{on}"
    );
    assert!(lab.guest.jumps("net/b.c/20"));
    assert_eq!(
        lab.ok(&["debug", "list", "--on", "-o", "name"]),
        "net/a.c/10\nnet/b.c/20\n"
    );
    lab.ok(&["debug", "off", "module net"]);
    assert!(!lab.guest.jumps("net/a.c/10") && !lab.guest.jumps("net/b.c/20"));
    let plan = lab.json(&["debug", "on", "module net", "--dry-run"]);
    assert_eq!(plan["keys_changed"], 2);
    assert!(!lab.guest.jumps("net/a.c/10"));
}

#[test]
fn errors_point_at_the_word() {
    let lab = lab();
    let message = lab.fails(2, &["debug", "on", "file a.c fnc x"]);
    assert!(
        message.contains("\"fnc\"") && message.contains("column 10"),
        "{message}"
    );
    let message = lab.fails(1, &["debug", "on", "file c.c"]);
    assert!(message.contains("no line"), "{message}");
    let message = lab.fails(1, &["keys", "enable", "hook", "--allow-guarded"]);
    assert!(message.contains("NULL"), "{message}");
    let usage = lab.all(&["debug", "on"]);
    assert_eq!(usage.2, Some(2));
}

#[test]
fn classes_are_shown_and_selected() {
    let lab = lab();
    let keys = lab.json(&["keys", "list", "--class", "dyndbg,never"]);
    assert_eq!(
        (&keys[0]["class"], &keys[1]["class"]),
        (&"never".into(), &"dyndbg".into())
    );
}

#[test]
fn the_console_is_followed_from_the_change_on() {
    let lab = lab();
    lab.guest.print(b"before\r\n");
    let mut following = lab.follow(&["debug", "on", "module net", "--follow"]);
    let mut line = following.line();
    while !line.starts_with("2 of 2") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    lab.guest.print(b"a line \x1b[2J\r\n");
    let line = loop {
        let line = following.line();
        assert!(line != "before" && !line.is_empty(), "{line:?}");
        if line.starts_with("a line") {
            break line;
        }
    };
    assert_eq!(line, "a line \u{fffd}[2J");
    following.end();
    assert!(lab.guest.jumps("net/b.c/20"), "the lines stay on");
}

/// Runs an agent that reads a log of these texts. It ends with the connection.
fn agent(lab: &Lab, log: &Arc<Mutex<Vec<String>>>) -> UnixStream {
    let mut stream = UnixStream::connect(lab.agent_socket()).expect("listening");
    let hello = AgentHello {
        oldest_version: 1,
        newest_version: 1,
        ..Default::default()
    };
    let send = |stream: &mut UnixStream, id, message| {
        let message = Some(message);
        let _ = agent_frame::write(stream, &FromAgent { id, message });
    };
    send(&mut stream, 0, Answer::Hello(hello));
    let welcome: ToAgent = agent_frame::read(&mut stream).expect("a welcome");
    assert!(matches!(welcome.message, Some(Question::Welcome(_))));
    let (mut own, log) = (stream.try_clone().expect("a socket"), Arc::clone(log));
    std::thread::spawn(move || {
        while let Ok(question) = agent_frame::read::<ToAgent>(&mut own) {
            let answer = match question.message {
                Some(Question::Ping(_)) => Answer::Pong(AgentPong::default()),
                Some(Question::ReadLog(read)) => {
                    Answer::Log(records(&log.lock().expect("whole"), read.first))
                }
                Some(Question::Credit(_)) | None => continue,
                _ => Answer::Error("it reads the log alone".to_owned()),
            };
            send(&mut own, question.id, answer);
        }
    });
    stream
}

fn records(log: &[String], from: Option<u64>) -> AgentLog {
    let record = |(sequence, text): (u64, &String)| AgentLogRecord {
        sequence,
        level: 7,
        time_us: 12_345_678,
        text: text.clone(),
    };
    let numbered = (0..)
        .zip(log)
        .filter(|(sequence, _)| from.is_some_and(|from| from <= *sequence));
    AgentLog {
        records: numbered.map(record).collect(),
        next: log.len() as u64,
        lost: 0,
    }
}

#[test]
fn the_kernels_log_is_followed_where_there_is_an_agent() {
    let lab = lab();
    let log = Arc::new(Mutex::new(vec!["before".to_owned()]));
    let connection = agent(&lab, &log);
    let words = ["debug", "on", "module net", "--follow", "--whole-log"];
    let mut following = lab.follow(&words);
    let mut line = following.line();
    while !line.starts_with("2 of 2") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    lab.guest.print(b"on the console\r\n");
    for text in ["first", "\x1b[2Jsecond"] {
        log.lock().expect("whole").push(text.to_owned());
        let line = loop {
            let line = following.line();
            assert!(
                !line.contains("before") && !line.contains("console"),
                "{line}"
            );
            if line.starts_with('[') {
                break line;
            }
        };
        let shown = text.replace('\x1b', "\u{fffd}");
        assert_eq!(line, format!("[   12.345678] {shown}"));
    }
    connection
        .shutdown(std::net::Shutdown::Both)
        .expect("connected");
    let (_, said, code) = following.output();
    assert!(said.contains("no agent is connected"), "{said}");
    assert_eq!(code, Some(1), "{said}");
    assert!(lab.guest.jumps("net/b.c/20"), "the lines stay on");
}

#[test]
fn several_guests_answer_at_once() {
    let host = Host::new();
    let table = host.ok(&["--guest", "web-*", "debug", "on", "module x"]);
    assert!(
        table.contains("web-1") && table.contains("web-2"),
        "{table}"
    );
    assert_eq!(host.fake.guest("web-2", |guest| guest.count("beta")), 1);
    assert_eq!(host.fake.guest("db", |guest| guest.count("beta")), 0);
    let lines = host.json(&["--guest", "db", "debug", "list"]);
    assert_eq!(lines.as_array().map(Vec::len), Some(3), "all pages");
    let message = host.fails(2, &["--all", "debug", "on", "module x", "--follow"]);
    assert!(message.contains("one guest"), "{message}");
}
