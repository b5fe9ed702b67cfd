// SPDX-License-Identifier: Apache-2.0
//! Runs commands for the program that booted the guest; see `proto/patchbay/agent/v1/exec.proto`.
//!
//! Commands are run only in a guest that was booted to run them: [`allowed`] looks for a word on
//! the kernel's command line, and without that word nothing in this module runs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::agent::v1::from_exec::Message as Answer;
use patchbay_proto::agent::v1::to_exec::Message as Question;
use patchbay_proto::agent::v1::{
    ExecExited, ExecFetched, ExecFile, ExecHello, ExecOutput, ExecStart, ExecStarted, FromExec,
    ToExec,
};
use patchbay_proto::agent_frame as frame;
use patchbay_proto::{EXEC_VERSION, EXEC_WORD};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::address::Address;
use crate::health;

/// Maximum number of bytes of data in one message.
const CHUNK: usize = 64 << 10;
/// Time allowed for the output of processes that outlive their command.
const LAST_OUTPUT: Duration = Duration::from_secs(2);
const BACKOFF: Duration = Duration::from_millis(50);
/// Maximum depth of the folders that a fetch enters.
const MAX_DEPTH: usize = 64;

/// Returns whether the kernel's command line permits commands. Words after `--` are arguments of
/// init and do not count.
pub fn allowed(command_line: &str) -> bool {
    let words = command_line.split_ascii_whitespace();
    words
        .take_while(|word| *word != "--")
        .any(|word| word == EXEC_WORD)
}

/// Serves the host for as long as the guest runs.
pub fn serve(address: &Address) -> ! {
    loop {
        if let Ok(connection) = address.connect_patiently()
            && let Err(error) = session(connection)
        {
            eprintln!("patchbay-agent: commands: {error}");
        }
        std::thread::sleep(BACKOFF);
    }
}

#[derive(Clone)]
struct Outlet(Arc<Mutex<File>>);

impl Outlet {
    fn send(&self, message: Answer) -> io::Result<()> {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let message = FromExec {
            message: Some(message),
        };
        frame::write(&mut *stream, &message)
    }
}

/// The process group of the running command.
type Running = Arc<Mutex<Option<Pid>>>;

fn session(mut stream: File) -> io::Result<()> {
    let outlet = Outlet(Arc::new(Mutex::new(stream.try_clone()?)));
    outlet.send(Answer::Hello(ExecHello {
        version: EXEC_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_release: health::line("/proc/sys/kernel/osrelease"),
        uptime_ms: health::uptime(),
    }))?;
    let running = Running::default();
    let result = answer(&mut stream, &outlet, &running);
    kill(&running);
    result
}

fn answer(stream: &mut File, outlet: &Outlet, running: &Running) -> io::Result<()> {
    loop {
        let question: ToExec = match frame::read(stream) {
            Ok(question) => question,
            Err(frame::FrameError::Closed) => return Ok(()),
            Err(error) => return Err(io::Error::other(error)),
        };
        match question.message {
            Some(Question::Start(start)) => {
                let mut group = running.lock().unwrap_or_else(PoisonError::into_inner);
                if group.is_some() {
                    outlet.send(Answer::Error("a command is running already".to_owned()))?;
                    continue;
                }
                match spawn(&start) {
                    Ok(child) => {
                        *group = Pid::from_raw(child.id().cast_signed());
                        outlet.send(Answer::Started(ExecStarted {}))?;
                        let (outlet, running) = (outlet.clone(), running.clone());
                        std::thread::spawn(move || watch(child, &start.mark, &outlet, &running));
                    }
                    Err(error) => outlet.send(Answer::Error(error))?,
                }
            }
            Some(Question::Kill(_)) => kill(running),
            Some(Question::Fetch(fetch)) => match fetch_all(Path::new(&fetch.path), outlet) {
                Ok(()) => outlet.send(Answer::Fetched(ExecFetched {}))?,
                Err(error) => {
                    let error = format!("{} cannot be read in the guest: {error}", fetch.path);
                    outlet.send(Answer::Error(error))?;
                }
            },
            None => {
                let error = "this agent does not know the question; update the agent".to_owned();
                outlet.send(Answer::Error(error))?;
            }
        }
    }
}

fn kill(running: &Running) {
    let group = running.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(group) = *group {
        // This fails if the group has ended meanwhile.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

fn spawn(start: &ExecStart) -> Result<Child, String> {
    let [program, arguments @ ..] = start.argv.as_slice() else {
        return Err("the command is empty".to_owned());
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    for variable in &start.environment {
        if let Some((name, value)) = variable.split_once('=') {
            command.env(name, value);
        }
    }
    let directory = Path::new(&start.directory);
    command.current_dir(if directory.is_dir() {
        directory
    } else {
        Path::new("/")
    });
    mark(&start.mark, "begins");
    command
        .spawn()
        .map_err(|error| refusal(program, start, &error))
}

/// Returns the reason why a program could not be started.
fn refusal(program: &str, start: &ExecStart, error: &io::Error) -> String {
    let path = match program.contains('/') {
        true => Path::new(&start.directory).join(program),
        false => PathBuf::from(program),
    };
    match error.kind() {
        io::ErrorKind::NotFound if program.contains('/') && path.exists() => {
            let interpreter = interpreter(&path).unwrap_or_else(|| "its interpreter".to_owned());
            format!("{program} cannot be started: the guest has no {interpreter}, which runs it")
        }
        io::ErrorKind::NotFound => {
            format!("the guest has no program {program}; copy it with --copy")
        }
        io::ErrorKind::PermissionDenied => format!("{program} is not executable in the guest"),
        _ => format!("{program} cannot be started: {error}"),
    }
}

/// Returns the program that the first line of a script names.
fn interpreter(path: &Path) -> Option<String> {
    let mut head = [0; 256];
    let length = File::open(path).ok()?.read(&mut head).ok()?;
    let text = String::from_utf8_lossy(&head[..length]).into_owned();
    let line = text.strip_prefix("#!")?.lines().next()?;
    Some(line.split_whitespace().next()?.to_owned())
}

/// Writes a mark to the kernel's log, so that the console shows what the kernel printed between two
/// marks.
fn mark(mark: &str, what: &str) {
    if mark.is_empty() {
        return;
    }
    if let Ok(mut log) = OpenOptions::new().write(true).open("/dev/kmsg") {
        // Level 1 (`KERN_ALERT`) is more severe than a warning, so a console that shows warnings
        // shows the mark too. One write is one record.
        let _ = log.write_all(format!("<1>patchbay-exec: {mark} {what}\n").as_bytes());
    }
}

/// Forwards the output of a command and reports its end.
fn watch(mut child: Child, name: &str, outlet: &Outlet, running: &Running) {
    let start = Instant::now();
    let (sender, ends) = channel();
    let out = child
        .stdout
        .take()
        .map(|pipe| (1, Box::new(pipe) as Box<dyn Read + Send>));
    let err = child
        .stderr
        .take()
        .map(|pipe| (2, Box::new(pipe) as Box<dyn Read + Send>));
    for (descriptor, pipe) in [out, err].into_iter().flatten() {
        let (outlet, sender) = (outlet.clone(), sender.clone());
        std::thread::spawn(move || {
            forward(pipe, descriptor, &outlet);
            let _ = sender.send(());
        });
    }
    let status = child.wait();
    let elapsed = start.elapsed();
    // The remaining processes of the group would keep the output open.
    kill(running);
    wait_for_output(&ends);
    *running.lock().unwrap_or_else(PoisonError::into_inner) = None;
    mark(name, "ends");
    let message = match status {
        Ok(status) => Answer::Exited(ExecExited {
            code: status.code(),
            signal: status.signal().unwrap_or_default(),
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
        }),
        Err(error) => Answer::Error(format!("the command cannot be awaited: {error}")),
    };
    // The session ends by itself if the connection is gone.
    let _ = outlet.send(message);
}

/// Waits for both pipes to end. A process that left the group may keep them open.
fn wait_for_output(ends: &Receiver<()>) {
    let deadline = Instant::now() + LAST_OUTPUT;
    for _ in 0..2 {
        let left = deadline.saturating_duration_since(Instant::now());
        if ends.recv_timeout(left).is_err() {
            return;
        }
    }
}

fn forward(mut pipe: impl Read, descriptor: u32, outlet: &Outlet) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let data = buffer[..length].to_vec();
        if outlet
            .send(Answer::Output(ExecOutput { descriptor, data }))
            .is_err()
        {
            return;
        }
    }
}

/// Sends a file, or a folder with everything below it. Symbolic links to files are followed; files
/// that are not regular are left out.
fn fetch_all(path: &Path, outlet: &Outlet) -> io::Result<()> {
    let name = path
        .file_name()
        .map_or_else(|| PathBuf::from("root"), PathBuf::from);
    let metadata = fs::metadata(path)?;
    if metadata.is_file() {
        return fetch_file(path, &name, outlet);
    }
    let mut folders = vec![(path.to_owned(), name, 0)];
    while let Some((folder, name, depth)) = folders.pop() {
        outlet.send(Answer::File(ExecFile {
            path: name.to_string_lossy().into_owned(),
            mode: 0o755,
            folder: true,
            ..Default::default()
        }))?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), name.join(entry.file_name()));
            if entry.file_type()?.is_dir() {
                if depth < MAX_DEPTH {
                    folders.push((path, name, depth + 1));
                }
            } else if fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                fetch_file(&path, &name, outlet)?;
            }
        }
    }
    Ok(())
}

fn fetch_file(path: &Path, name: &Path, outlet: &Outlet) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = file.read(&mut buffer)?;
        outlet.send(Answer::File(ExecFile {
            path: name.to_string_lossy().into_owned(),
            data: buffer[..length].to_vec(),
            mode,
            more: length > 0,
            folder: false,
        }))?;
        if length == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_the_word_itself_permits_commands() {
        assert!(allowed("console=ttyS0 patchbay.exec panic=-1\n"));
        for line in [
            "",
            "console=ttyS0 patchbay.agent",
            "patchbay.execute",
            "patchbay.exec=0",
            "xpatchbay.exec",
            "patchbay.run=patchbay.exec",
            "quiet -- patchbay.exec",
        ] {
            assert!(!allowed(line), "{line:?}");
        }
    }

    /// The host's end of a session.
    struct Host(File);

    impl Host {
        /// Serves a session in a thread of this process.
        fn start() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("exec");
            let listener = UnixListener::bind(&path).expect("a socket");
            let address = Address::Unix(path);
            let agent = std::thread::spawn(move || address.connect_patiently());
            let (stream, _) = listener.accept().expect("a connection");
            let agent = agent.join().expect("joined").expect("connected");
            std::thread::spawn(move || session(agent));
            let stream: std::os::fd::OwnedFd = stream.into();
            let mut host = Self(File::from(stream));
            assert!(matches!(host.read(), Answer::Hello(hello) if hello.version == EXEC_VERSION));
            host
        }

        fn read(&mut self) -> Answer {
            let message: FromExec = frame::read(&mut self.0).expect("a message");
            message.message.expect("not empty")
        }

        fn ask(&mut self, question: Question) {
            let message = Some(question);
            frame::write(&mut self.0, &ToExec { message }).expect("sent");
        }

        fn run(&mut self, argv: &[&str]) -> (Vec<u8>, Vec<u8>, Answer) {
            self.ask(Question::Start(ExecStart {
                argv: argv.iter().map(|&word| word.to_owned()).collect(),
                environment: vec!["WORD=from the host".to_owned()],
                ..Default::default()
            }));
            let (mut out, mut err) = (vec![], vec![]);
            loop {
                match self.read() {
                    Answer::Started(_) => {}
                    Answer::Output(output) if output.descriptor == 1 => out.extend(output.data),
                    Answer::Output(output) => err.extend(output.data),
                    end => return (out, err, end),
                }
            }
        }
    }

    #[test]
    fn output_and_status_come_back() {
        let mut host = Host::start();
        let script = "echo \"$WORD\"; echo no >&2; exit 7";
        let (out, err, end) = host.run(&["sh", "-c", script]);
        assert_eq!(
            (&out[..], &err[..]),
            (&b"from the host\n"[..], &b"no\n"[..])
        );
        assert!(matches!(end, Answer::Exited(end) if end.code == Some(7)));
        let (.., end) = host.run(&["sh", "-c", "kill -SEGV $$"]);
        assert!(matches!(end, Answer::Exited(end) if end.code.is_none() && end.signal == 11));
    }

    #[test]
    fn what_cannot_be_started_is_named() {
        let mut host = Host::start();
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, mode, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            path.display().to_string()
        };
        let plain = file("plain", 0o644, "");
        let script = file("script", 0o755, "#!/no/such/interpreter -x\n");
        for (argv, expected) in [
            (&[][..], "empty"),
            (&["no-such-program"], "no program no-such-program"),
            (&["/no/such"], "no program /no/such"),
            (&[plain.as_str()], "not executable"),
            (&[script.as_str()], "/no/such/interpreter"),
        ] {
            let (.., end) = host.run(argv);
            assert!(
                matches!(&end, Answer::Error(error) if error.contains(expected)),
                "{end:?} {expected}"
            );
        }
        assert!(matches!(host.run(&["true"]).2, Answer::Exited(_)));
    }

    #[test]
    fn a_command_is_killed_with_its_children() {
        let mut host = Host::start();
        let argv = ["sh", "-c", "sleep 1000 & echo ready; wait"].map(str::to_owned);
        host.ask(Question::Start(ExecStart {
            argv: argv.to_vec(),
            ..Default::default()
        }));
        while !matches!(host.read(), Answer::Output(_)) {}
        host.ask(Question::Start(ExecStart::default()));
        assert!(matches!(host.read(), Answer::Error(error) if error.contains("already")));
        host.ask(Question::Kill(Default::default()));
        assert!(matches!(host.read(), Answer::Exited(end) if end.signal == 9));
    }

    #[test]
    fn files_and_folders_are_fetched() {
        let mut host = Host::start();
        let folder = tempfile::tempdir().expect("a folder");
        let results = folder.path().join("results");
        fs::create_dir_all(results.join("sub")).expect("made");
        let long = vec![b'x'; CHUNK + 1];
        fs::write(results.join("sub/long"), &long).expect("written");
        std::os::unix::fs::symlink(".", results.join("loop")).expect("linked");
        let fetch = |path: &Path| {
            let path = path.display().to_string();
            Question::Fetch(patchbay_proto::agent::v1::ExecFetch { path })
        };
        host.ask(fetch(&results));
        let (mut names, mut data) = (vec![], vec![]);
        let end = loop {
            match host.read() {
                Answer::File(file) => {
                    names.push(file.path);
                    data.extend(file.data);
                }
                end => break end,
            }
        };
        assert!(matches!(end, Answer::Fetched(_)));
        names.dedup();
        assert_eq!(names, ["results", "results/sub", "results/sub/long"]);
        assert_eq!(data, long);
        host.ask(fetch(&folder.path().join("absent")));
        assert!(matches!(host.read(), Answer::Error(error) if error.contains("absent")));
    }
}
