// SPDX-License-Identifier: Apache-2.0
//! A QMP connection that was taken over from another process. The connection begins with any bytes
//! that the other process left unread.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::qmp::{MAX_MESSAGE, QmpError, message, returned};

/// The connection.
#[derive(Debug)]
pub struct Wire {
    reader: Mutex<BufReader<UnixStream>>,
    /// Ids count down from the maximum, because the previous process counted up from 1.
    next_id: AtomicU64,
    /// Another client has caused a RESUME, and this RESUME has arrived.
    resumed: AtomicBool,
    /// The last event was a STOP, not a RESUME.
    stopped: AtomicBool,
}

impl Wire {
    /// Takes over a connection.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            reader: Mutex::new(BufReader::new(stream)),
            next_id: AtomicU64::new(u64::MAX),
            resumed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        }
    }

    /// Returns whether another client has ended the previous process's stop, according to the
    /// messages so far.
    pub fn was_resumed(&self) -> bool {
        self.resumed.load(Ordering::SeqCst)
    }

    /// Forgets the RESUME events so far, because the guest has been stopped since.
    pub fn forget_resume(&self) {
        self.resumed.store(false, Ordering::SeqCst);
    }

    /// Carries out a command without arguments.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(&self, command: &str, patience: Duration) -> Result<Value, QmpError> {
        let deadline = Instant::now() + patience;
        let id = self.next_id.fetch_sub(1, Ordering::SeqCst);
        let late = || QmpError::TimedOut {
            command: command.to_owned(),
            patience,
        };
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(),
            _ => QmpError::Closed(error.to_string()),
        };
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stream = reader.get_ref();
        let sent = stream
            .set_write_timeout(Some(patience))
            .and_then(|()| stream.write_all(message(command, Value::Null, Some(id)).as_bytes()));
        sent.map_err(failed)?;
        let mut text = Vec::new();
        loop {
            let mut line = Vec::new();
            let room = MAX_MESSAGE.saturating_sub(text.len());
            if !read_line(&mut reader, &mut line, room, deadline).map_err(failed)? {
                return Err(QmpError::Closed("QEMU closed it".to_owned()));
            }
            // With pretty=on a message spans several lines. Only its first and its last are not
            // indented.
            if line.starts_with(b"{") {
                text.clear();
            }
            text.extend(line);
            let Ok(found) = serde_json::from_slice::<Value>(&text) else {
                continue;
            };
            text.clear();
            self.notice(&found);
            if found["id"] == id {
                return returned(command, found);
            }
        }
    }

    /// Records stops and resumes of the guest that a message reports.
    fn notice(&self, message: &Value) {
        match message["event"].as_str() {
            Some("RESUME") => {
                self.resumed.store(true, Ordering::SeqCst);
                self.stopped.store(false, Ordering::SeqCst);
            }
            Some("STOP") => self.stopped.store(true, Ordering::SeqCst),
            // Answers to queries are not empty, so this answers a `stop` of the previous process.
            // The last event was a STOP, so the guest was stopped again after any RESUME.
            None if message["id"].as_u64().is_some_and(|id| id <= u64::MAX / 2)
                && message["return"] == json!({})
                && self.stopped.load(Ordering::SeqCst) =>
            {
                self.resumed.store(false, Ordering::SeqCst);
            }
            _ => {}
        }
    }
}

/// Reads a line, or what precedes the end of the connection. Returns `false` at this end. QEMU is
/// not trusted to end its lines, so each read is checked against the deadline and against `room`,
/// the maximum length of the line.
fn read_line(
    reader: &mut BufReader<UnixStream>,
    line: &mut Vec<u8>,
    room: usize,
    deadline: Instant,
) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        reader.get_ref().set_read_timeout(Some(left))?;
        let bytes = match reader.fill_buf() {
            Ok([]) => return Ok(!line.is_empty()),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(bytes.len(), |end| end + 1);
        if line.len() + taken > room {
            return Err(io::Error::other(format!(
                "a message has more than {MAX_MESSAGE} bytes"
            )));
        }
        line.extend(&bytes[..taken]);
        reader.consume(taken);
        if end.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a connection on which QEMU's side sends this text.
    fn wire(text: &str) -> (Wire, UnixStream) {
        let (ours, mut qemus) = UnixStream::pair().expect("a pair");
        qemus.write_all(text.as_bytes()).expect("room");
        (Wire::new(ours), qemus)
    }

    const PATIENCE: Duration = Duration::from_secs(30);
    const FIRST: u64 = u64::MAX;
    const SECOND: u64 = u64::MAX - 1;

    #[test]
    fn answers_are_found_behind_what_was_left_unread() {
        let (wire, _qemu) = wire(&format!(
            "123}}\r\n{{\"event\": \"STOP\"}}\r\n{{\"return\": 1, \"id\": 7}}\r\n{{\"return\": {{}}, \"id\": {FIRST}}}\r\n\
             {{\n    \"return\": {{\n        \"status\": \"paused\"\n    }},\n    \"id\": {SECOND}\n}}\r\n"
        ));
        let first = wire.execute("cont", PATIENCE);
        assert_eq!(first, Ok(serde_json::json!({})));
        let second = wire.execute("query-status", PATIENCE).expect("answered");
        assert_eq!(second["status"], "paused");
        assert!(!wire.was_resumed());
    }

    #[test]
    fn a_resume_is_noticed_and_a_refusal_carries_qemus_words() {
        let (wire, _qemu) = wire(&format!(
            "{{\"event\": \"RESUME\"}}\r\n{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no\"}}, \"id\": {FIRST}}}\r\n"
        ));
        let refused = wire.execute("cont", PATIENCE).expect_err("refused");
        assert_eq!(refused.to_string(), "QEMU refused cont: no");
        assert!(wire.was_resumed());
    }

    #[test]
    fn a_resume_before_the_attachers_own_stop_does_not_end_it() {
        const STOP: &str = "{\"event\": \"STOP\"}\r\n";
        const RESUME: &str = "{\"event\": \"RESUME\"}\r\n";
        const QUERY: &str = "{\"return\": {\"status\": \"paused\"}, \"id\": 7}\r\n";
        const ANSWER: &str = "{\"return\": {}, \"id\": 8}\r\n";
        for (before, resumed) in [
            (vec![QUERY, RESUME, STOP, ANSWER], false),
            (vec![STOP, ANSWER, RESUME], true),
            (vec![STOP, ANSWER, RESUME, STOP, QUERY], true),
            (vec![STOP, RESUME, ANSWER], true),
        ] {
            let own = format!("{{\"return\": {{}}, \"id\": {FIRST}}}\r\n");
            let (wire, _qemu) = wire(&(before.concat() + &own));
            wire.execute("query-status", PATIENCE).expect("answered");
            assert_eq!(wire.was_resumed(), resumed, "{before:?}");
        }
    }

    #[test]
    fn silence_an_end_and_nonsense_are_errors() {
        let (mute, _qemu) = wire("");
        let late = mute.execute("cont", Duration::from_millis(20));
        assert!(matches!(late, Err(QmpError::TimedOut { .. })), "{late:?}");
        let (ended, qemu) = wire("nonsense\n{\"id\":\n");
        drop(qemu);
        let closed = ended.execute("cont", PATIENCE);
        assert!(matches!(closed, Err(QmpError::Closed(_))), "{closed:?}");
    }

    #[test]
    fn a_line_without_end_is_bounded_in_size() {
        let (wire, mut qemu) = wire("");
        let writer = std::thread::spawn(move || {
            let mut sent = 0;
            // The write fails when the attacher has dropped the connection.
            while sent < 4 * MAX_MESSAGE && qemu.write_all(&[b' '; 1 << 16]).is_ok() {
                sent += 1 << 16;
            }
            sent
        });
        let closed = wire.execute("cont", PATIENCE).expect_err("no answer");
        assert!(closed.to_string().contains("more than"), "{closed}");
        drop(wire);
        let sent = writer.join().expect("no panic");
        assert!(sent < 2 * MAX_MESSAGE, "{sent}");
    }

    #[test]
    fn a_line_that_dribbles_is_bounded_in_time() {
        let (wire, mut qemu) = wire("");
        let patience = Duration::from_millis(300);
        std::thread::spawn(move || {
            // Each byte comes well within the patience, and they end only with the connection.
            while qemu.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let late = wire.execute("cont", patience);
        assert!(matches!(late, Err(QmpError::TimedOut { .. })), "{late:?}");
    }
}
