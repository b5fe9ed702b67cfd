// SPDX-License-Identifier: Apache-2.0

use std::sync::mpsc::channel;

use super::fake::{Fake, GREETING};
use super::*;

/// Timeout for an event that must happen.
const PATIENCE: Duration = Duration::from_secs(30);
/// Wait for an event that must not happen.
const SHORT: Duration = Duration::from_millis(50);

fn silent() -> EventListener {
    Box::new(|_| ())
}

fn connect(fake: &Fake) -> Result<Qmp, QmpError> {
    Qmp::connect(&fake.path(), PATIENCE, silent())
}

#[test]
fn commands_are_answered_by_id_and_events_reach_the_listener() {
    let fake = Fake::new(|mut session| {
        session.greet();
        let first = session.next().expect("a command");
        let second = session.next().expect("a command");
        session.say(r#"{"event": "RESET", "data": {"guest": true}, "timestamp": {"seconds": 1, "microseconds": 2}}"#);
        // The answers come in reverse order, one of them spread over lines as with QEMU's
        // pretty=on.
        for (command, pretty) in [(second, true), (first, false)] {
            let text = format!(
                "{{\"return\": {}, \"id\": {}}}",
                command["execute"], command["id"]
            );
            session.say(&if pretty {
                text.replace(", ", ",\n  ")
            } else {
                text
            });
        }
        session.next();
    });
    let (seen, events) = channel();
    let listener = Box::new(move |event| {
        let _ = seen.send(event);
    });
    let qmp = Qmp::connect(&fake.path(), PATIENCE, listener).expect("greeted");
    std::thread::scope(|scope| {
        for command in ["query-status", "query-kvm"] {
            let qmp = &qmp;
            scope.spawn(move || {
                let answer = qmp
                    .execute(command, Value::Null, PATIENCE)
                    .expect("answered");
                assert_eq!(answer, command);
            });
        }
    });
    let event = events.recv().expect("an event").expect("no end");
    assert_eq!(
        (event.name.as_str(), &event.data["guest"]),
        ("RESET", &json!(true))
    );
    let peer = qmp.peer().expect("known");
    assert_eq!(peer.pid, Some(std::process::id()));
    drop(qmp);
    assert!(events.recv().is_err(), "this side's own end is no event");
}

#[test]
fn a_peer_that_is_no_qemu_is_named() {
    let first_words: [(&str, &str); 4] = [
        ("SSH-2.0-OpenSSH_9.2", "no QMP message"),
        ("{\"hello\": 1}", "it sent"),
        ("", "QEMU closed it"),
        ("[1, 2", "no QMP message"),
    ];
    for (words, expected) in first_words {
        let fake = Fake::new(move |mut session| {
            if !words.is_empty() {
                session.say(words);
            }
        });
        let error = connect(&fake).expect_err("no QEMU");
        assert!(matches!(error, QmpError::NotQmp { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_socket_in_use_or_a_hanging_qemu_is_reported_as_such() {
    let (release, wait) = channel::<()>();
    let fake = Fake::new(move |_session| {
        let _ = wait.recv();
    });
    let error = Qmp::connect(&fake.path(), SHORT, silent()).expect_err("no greeting");
    let us = Some(std::process::id());
    assert!(
        matches!(error, QmpError::NoGreeting { owner, .. } if owner == us),
        "{error}"
    );
    drop(release);
    let error = Qmp::connect(Path::new("/nonexistent/qmp"), SHORT, silent()).expect_err("nobody");
    assert!(error.to_string().contains("/nonexistent/qmp"), "{error}");
}

#[test]
fn a_command_that_hangs_times_out_and_its_late_answer_is_forgotten() {
    let (release, wait) = channel::<()>();
    let fake = Fake::new(move |mut session| {
        session.greet();
        let late = session.next().expect("a command");
        let _ = wait.recv();
        session.say(&format!("{{\"return\": \"late\", \"id\": {}}}", late["id"]));
        let next = session.next().expect("a command");
        session.say(&format!("{{\"return\": \"next\", \"id\": {}}}", next["id"]));
        session.next();
    });
    let qmp = connect(&fake).expect("greeted");
    let error = qmp.execute("stop", Value::Null, SHORT).expect_err("hangs");
    assert!(matches!(error, QmpError::TimedOut { .. }), "{error}");
    drop(release);
    assert_eq!(
        qmp.execute("cont", Value::Null, PATIENCE),
        Ok(json!("next"))
    );
    assert!(qmp.shared.state().calls.is_empty());
}

#[test]
fn late_answers_of_a_turn_tell_the_events_between_them() {
    let (release, held) = channel::<()>();
    let fake = Fake::new(move |mut session| {
        session.greet();
        let [first, second] = [(); 2].map(|()| session.next().expect("a command"));
        let _ = held.recv();
        for (event, command) in [("RESUME", first), ("STOP", second)] {
            session.say(&format!("{{\"event\": \"{event}\"}}"));
            session.say(&format!("{{\"return\": {{}}, \"id\": {}}}", command["id"]));
        }
        session.next();
    });
    let (seen, events) = channel();
    let listener = Box::new(move |event| {
        let _ = seen.send(event);
    });
    let qmp = Qmp::connect(&fake.path(), PATIENCE, listener).expect("greeted");
    let commands = ["query-status", "stop"].map(|command| (command, Value::Null));
    let turn = qmp.send_in_turn(commands).expect("sent");
    let late = turn.wait(SHORT).expect("the connection lives");
    assert!(late.iter().all(Result::is_err), "{late:?}");
    assert_eq!(turn.events_before(), [None, None]);
    drop(release);
    for _ in 0..2 {
        let answers = turn.wait(PATIENCE).expect("the connection lives");
        assert_eq!(answers, [Ok(json!({})), Ok(json!({}))]);
    }
    assert_eq!(turn.events_before(), [Some(1), Some(2)]);
    drop(turn);
    assert!(qmp.shared.state().calls.is_empty());
    for (number, name) in [(0, "RESUME"), (1, "STOP")] {
        let event = events.recv().expect("an event").expect("no end");
        assert_eq!((event.number, event.name.as_str()), (number, name));
    }
}

#[test]
fn a_refusal_carries_qemus_words_and_an_end_is_an_error() {
    let fake = Fake::new(|mut session| {
        session.greet();
        let command = session.next().expect("a command");
        session.say(&format!(
            "{{\"error\": {{\"class\": \"CommandNotFound\", \"desc\": \"no such thing\"}}, \"id\": {}}}",
            command["id"]
        ));
        session.next();
    });
    let (seen, events) = channel();
    let listener = Box::new(move |event| {
        let _ = seen.send(event);
    });
    let qmp = Qmp::connect(&fake.path(), PATIENCE, listener).expect("greeted");
    let error = qmp
        .execute("query-kvm", Value::Null, PATIENCE)
        .expect_err("refused");
    assert!(error.to_string().ends_with("no such thing"), "{error}");
    for _ in 0..2 {
        let error = qmp
            .execute("query-kvm", Value::Null, PATIENCE)
            .expect_err("ended");
        assert!(matches!(error, QmpError::Closed(_)), "{error}");
    }
    assert_eq!(events.recv(), Ok(None), "QEMU's end");
}

#[test]
fn a_message_without_end_is_not_read_to_its_end() {
    let fake = Fake::new(|mut session| {
        session.say(GREETING);
        session.say(&format!("\"{}", "x".repeat(MAX_MESSAGE)));
        session.next();
    });
    let error = connect(&fake).expect_err("no answer");
    assert!(
        error.to_string().contains("a message has more than"),
        "{error}"
    );
}

/// Relies on QEMU's backlog of 1: QEMU accepts no connection while it has a client.
#[test]
fn a_full_queue_of_connections_is_reported_as_a_socket_in_use() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("qmp");
    let socket = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    let address = SocketAddrUnix::new(&path).expect("short");
    net::bind(&socket, &address).expect("free");
    net::listen(&socket, 1).expect("bound");
    for _ in 0..5 {
        let error = Qmp::connect(&path, SHORT, silent()).expect_err("no greeting");
        let us = Some(std::process::id());
        assert!(
            matches!(error, QmpError::NoGreeting { owner, .. } if owner == us),
            "{error}"
        );
    }
}

#[test]
fn a_description_of_an_error_is_bounded() {
    let description = "d".repeat(MAX_MESSAGE / 2);
    let error = json!({ "error": { "class": "GenericError", "desc": description } });
    let refused = returned("cont", error).expect_err("refused");
    assert!(refused.to_string().len() < 2 * MAX_DESCRIPTION);
}

#[test]
fn a_long_greeting_is_refused() {
    let fake = Fake::new(|mut session| {
        session.say(&GREETING.replace(
            "\"package\": \"",
            &format!("\"package\": \"{}", "x".repeat(MAX_GREETING)),
        ));
        while let Some(command) = session.next() {
            session.say(&format!("{{\"return\": {{}}, \"id\": {}}}", command["id"]));
        }
    });
    let error = connect(&fake).expect_err("it is too long");
    assert!(error.to_string().contains("the first more than"), "{error}");
}
