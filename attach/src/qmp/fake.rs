// SPDX-License-Identifier: Apache-2.0
//! A monitor that follows a script, for faults that no real QEMU can be made to have.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The greeting of every QEMU.
pub const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;

/// A socket in a temporary folder.
pub struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    /// Starts a thread that serves one client with `serve`.
    pub fn new(serve: impl FnOnce(Session) + Send + 'static) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let listener = UnixListener::bind(folder.path().join("qmp")).expect("free");
        std::thread::spawn(move || {
            if let Ok((stream, _)) = listener.accept() {
                serve(Session {
                    reader: BufReader::new(stream.try_clone().expect("a descriptor")),
                    stream,
                });
            }
        });
        Self { folder }
    }

    /// Returns the socket's path.
    pub fn path(&self) -> PathBuf {
        Path::join(self.folder.path(), "qmp")
    }
}

/// The fake's side of a connection.
pub struct Session {
    reader: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Session {
    /// Sends a line. Ignores an error, because the client may be gone.
    pub fn say(&mut self, line: &str) {
        let _ = self.stream.write_all(format!("{line}\r\n").as_bytes());
    }

    /// Returns the next command; `None` when the client is gone.
    pub fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .ok()
            .filter(|read| *read > 0)?;
        serde_json::from_str(&line).ok()
    }

    /// Sends the greeting and answers the negotiation.
    pub fn greet(&mut self) {
        self.say(GREETING);
        let command = self.next().expect("qmp_capabilities");
        assert_eq!(command["execute"], "qmp_capabilities");
        self.say(&format!("{{\"return\": {{}}, \"id\": {}}}", command["id"]));
    }
}
