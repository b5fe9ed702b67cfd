// SPDX-License-Identifier: Apache-2.0
//! Runs commands over the connection to the agent in the guest; see
//! `proto/patchbay/agent/v1/exec.proto`. The guest is not trusted: sizes are limited, and an
//! unexpected message is an error.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::EXEC_VERSION;
use patchbay_proto::agent::v1::from_exec::Message as Answer;
use patchbay_proto::agent::v1::to_exec::Message as Question;
use patchbay_proto::agent::v1::{
    ExecFetch, ExecFile, ExecHello, ExecKill, ExecStart, FromExec, ToExec,
};
use patchbay_proto::agent_frame::{decode, encode, length};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::place::patience;

/// Limit on the total size of one fetch.
const FETCH_MAX_BYTES: u64 = 4 << 30;
/// Limit on the number of files of one fetch.
const FETCH_MAX_FILES: usize = 100_000;
/// The time limit for the next part of a fetch.
const FETCH_TIME: Duration = Duration::from_secs(60);
/// Time for a killed command to end.
const KILL_TIME: Duration = Duration::from_secs(10);

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Exited(i32),
    Signal(i32),
    /// The command was killed because its time limit had passed.
    TimedOut,
    /// The command could not be started; the text is a sentence.
    NotStarted(String),
    /// The time limit had passed, and the killed command did not end either.
    Hung,
    /// The connection ended: the guest or the agent is gone.
    Lost,
}

/// Receives output: the descriptor, 1 or 2, and the data.
pub trait Sink {
    fn take(&mut self, descriptor: u32, data: &[u8]) -> impl Future<Output = ()> + Send;
}

/// A connected agent.
#[derive(Debug)]
pub struct Session {
    messages: mpsc::Receiver<Result<Answer>>,
    writer: OwnedWriteHalf,
}

impl Session {
    /// Receives the agent's hello.
    pub async fn start(stream: UnixStream) -> Result<(Self, ExecHello)> {
        let (reader, writer) = stream.into_split();
        // Reading a message is not cancel-safe, so a task reads messages and passes them through a
        // channel. The channel is bounded, so that a slow reader makes vsock's flow control stop
        // the command's output.
        let (sender, messages) = mpsc::channel(4);
        tokio::spawn(read_all(reader, sender));
        let mut session = Self { messages, writer };
        match session.next().await? {
            Answer::Hello(hello) => {
                ensure!(
                    hello.version == EXEC_VERSION,
                    "the agent in the guest, {}, speaks version {} of the command protocol, and this \
                     program version {EXEC_VERSION}; give the agent of this program with --agent",
                    hello.agent_version,
                    hello.version
                );
                Ok((session, hello))
            }
            _ => bail!("the agent in the guest did not begin with a hello"),
        }
    }

    async fn next(&mut self) -> Result<Answer> {
        let lost = "the connection to the agent in the guest ended";
        self.messages.recv().await.context(lost)?
    }

    async fn ask(&mut self, question: Question) -> Result<()> {
        let message = ToExec {
            message: Some(question),
        };
        let frame = encode(&message)
            .context("the command and its environment are too long; shorten them")?;
        // If the connection has ended, the next read reports it.
        let _ = self.writer.write_all(&frame).await;
        Ok(())
    }

    /// Runs a command to its end, or kills it after `limit`. If the killed command does not end,
    /// ends the connection and returns [`End::Hung`].
    ///
    /// # Errors
    /// The command and its environment are too long, or the agent breaks the protocol.
    pub async fn run(
        &mut self,
        start: ExecStart,
        limit: Duration,
        sink: &mut (impl Sink + Send),
    ) -> Result<End> {
        self.ask(Question::Start(start)).await?;
        let over = tokio::time::sleep(limit);
        tokio::pin!(over);
        let mut killed = false;
        loop {
            let message = tokio::select! {
                message = self.messages.recv() => message,
                () = &mut over => {
                    if killed {
                        self.hang_up();
                        return Ok(End::Hung);
                    }
                    killed = true;
                    self.ask(Question::Kill(ExecKill {})).await?;
                    over.as_mut().reset(tokio::time::Instant::now() + patience(KILL_TIME));
                    continue;
                }
            };
            match message {
                None => return Ok(if killed { End::TimedOut } else { End::Lost }),
                Some(message) => match message? {
                    Answer::Started(_) => {}
                    // Output that arrives after the kill is dropped, so that a large output does
                    // not delay the end.
                    Answer::Output(_) if killed => {}
                    Answer::Output(output) => sink.take(output.descriptor, &output.data).await,
                    Answer::Exited(_) if killed => return Ok(End::TimedOut),
                    Answer::Exited(exited) => {
                        return Ok(match exited.code {
                            Some(code) => End::Exited(code),
                            None => End::Signal(exited.signal),
                        });
                    }
                    Answer::Error(error) => return Ok(End::NotStarted(error)),
                    _ => bail!("the agent in the guest answered out of turn"),
                },
            }
        }
    }

    /// Copies a file or folder of the guest to `into`. Returns the number of files.
    ///
    /// # Errors
    /// The file or folder cannot be read in the guest or written here, or it exceeds the limits.
    pub async fn fetch(&mut self, path: &str, into: &Path) -> Result<usize> {
        self.ask(Question::Fetch(ExecFetch {
            path: path.to_owned(),
        }))
        .await?;
        let mut receiver = Receiver::new(into);
        loop {
            let next = tokio::time::timeout(patience(FETCH_TIME), self.next()).await;
            let Ok(answer) = next else {
                self.hang_up();
                bail!("the agent in the guest does not answer any more");
            };
            match answer? {
                Answer::File(file) => receiver.take(&file).inspect_err(|_| self.hang_up())?,
                Answer::Fetched(_) => return Ok(receiver.files),
                Answer::Error(error) => bail!(error),
                _ => bail!("the agent in the guest answered out of turn"),
            }
        }
    }

    /// Returns whether the connection is open, so that another command can run.
    pub fn is_connected(&self) -> bool {
        !self.messages.is_closed()
    }

    /// Ends the connection. Otherwise the answers that are still to come would be taken for those
    /// to the next question.
    fn hang_up(&mut self) {
        self.messages.close();
        while self.messages.try_recv().is_ok() {}
    }
}

async fn read_all(mut reader: OwnedReadHalf, sender: mpsc::Sender<Result<Answer>>) {
    loop {
        let message = match read_one(&mut reader).await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => return,
            Err(error) => Err(error),
        };
        let failed = message.is_err();
        if sender.send(message).await.is_err() || failed {
            return;
        }
    }
}

/// Returns the next message; `None` at the end of the connection, even within a message.
async fn read_one(reader: &mut OwnedReadHalf) -> Result<Option<Answer>> {
    let mut header = [0; 4];
    if reader.read_exact(&mut header).await.is_err() {
        return Ok(None);
    }
    let cause = "the agent in the guest breaks the protocol";
    let bytes = length(header).context(cause)?;
    let mut frame = vec![];
    let whole = reader.take(bytes as u64).read_to_end(&mut frame).await;
    if whole.is_err() || frame.len() < bytes {
        return Ok(None);
    }
    let message: FromExec = decode(&frame, bytes).context(cause)?;
    let message = message.message;
    Ok(Some(message.context(
        "the agent in the guest sent an empty message; is it of another version?",
    )?))
}

/// Writes the files that a guest sends below one directory. It creates regular files and
/// directories and no links, and refuses a path that leaves the directory.
#[derive(Debug)]
struct Receiver<'a> {
    into: &'a Path,
    /// The file whose parts are expected next.
    open: Option<(PathBuf, std::fs::File)>,
    files: usize,
    bytes: u64,
}

impl<'a> Receiver<'a> {
    fn new(into: &'a Path) -> Self {
        Self {
            into,
            open: None,
            files: 0,
            bytes: 0,
        }
    }

    fn take(&mut self, file: &ExecFile) -> Result<()> {
        let name = Path::new(&file.path);
        let inside = name
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            inside && name.components().next().is_some(),
            "the guest sent a file named {:?}, which is outside of {}",
            file.path,
            self.into.display()
        );
        let path = self.into.join(name);
        let cannot_write = || format!("cannot write {}", path.display());
        if file.folder {
            return std::fs::create_dir_all(&path).with_context(cannot_write);
        }
        self.bytes += file.data.len() as u64;
        ensure!(
            self.bytes <= FETCH_MAX_BYTES,
            "what is to be collected exceeds {} GiB",
            FETCH_MAX_BYTES >> 30
        );
        if self.open.as_ref().is_none_or(|(open, _)| *open != path) {
            self.files += 1;
            ensure!(
                self.files <= FETCH_MAX_FILES,
                "what is to be collected exceeds {FETCH_MAX_FILES} files"
            );
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).with_context(cannot_write)?;
            }
            // The old entry is removed first, so that neither an existing file nor the target of
            // the user's symbolic link is overwritten.
            let _ = std::fs::remove_file(&path);
            let mut options = std::fs::OpenOptions::new();
            use std::os::unix::fs::OpenOptionsExt;
            options
                .write(true)
                .create_new(true)
                .mode(file.mode & 0o777 | 0o600);
            self.open = Some((
                path.clone(),
                options.open(&path).with_context(cannot_write)?,
            ));
        }
        if let Some((_, open)) = &mut self.open {
            use std::io::Write;
            open.write_all(&file.data).with_context(cannot_write)?;
        }
        if !file.more {
            self.open = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::agent::v1::{ExecExited, ExecOutput, ExecStarted};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[derive(Default)]
    struct Kept(Vec<u8>);

    impl Sink for Kept {
        async fn take(&mut self, _: u32, data: &[u8]) {
            self.0.extend(data);
        }
    }

    async fn send(stream: &mut UnixStream, message: Answer) {
        let message = FromExec {
            message: Some(message),
        };
        stream.write_all(&encode(&message).unwrap()).await.unwrap();
    }

    fn hello(version: u32) -> Answer {
        Answer::Hello(ExecHello {
            version,
            ..Default::default()
        })
    }

    async fn connected() -> (Session, UnixStream) {
        let (host, mut guest) = UnixStream::pair().unwrap();
        send(&mut guest, hello(EXEC_VERSION)).await;
        let (session, _) = Session::start(host).await.unwrap();
        (session, guest)
    }

    #[tokio::test]
    async fn other_versions_and_other_beginnings_are_refused() {
        for first in [hello(EXEC_VERSION + 1), Answer::Started(ExecStarted {})] {
            let (host, mut guest) = UnixStream::pair().unwrap();
            send(&mut guest, first).await;
            assert!(Session::start(host).await.is_err());
        }
    }

    #[tokio::test]
    async fn ends_are_told_apart() {
        let exited = |code, signal| {
            Answer::Exited(ExecExited {
                code,
                signal,
                elapsed_us: 1,
            })
        };
        let error = || Answer::Error("no program".to_owned());
        for (answer, expected) in [
            (exited(Some(3), 0), End::Exited(3)),
            (exited(None, 9), End::Signal(9)),
            (error(), End::NotStarted("no program".to_owned())),
        ] {
            let (mut session, mut guest) = connected().await;
            let data = b"out".to_vec();
            send(
                &mut guest,
                Answer::Output(ExecOutput {
                    descriptor: 1,
                    data,
                }),
            )
            .await;
            send(&mut guest, answer).await;
            let mut kept = Kept::default();
            let end = session
                .run(ExecStart::default(), LIMIT, &mut kept)
                .await
                .unwrap();
            assert_eq!((end, &kept.0[..]), (expected, &b"out"[..]));
        }
        let (mut session, guest) = connected().await;
        drop(guest);
        let end = session
            .run(ExecStart::default(), LIMIT, &mut Kept::default())
            .await
            .unwrap();
        assert_eq!(end, End::Lost);
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_is_killed_after_its_time_and_given_up_if_it_does_not_end() {
        let (mut session, _guest) = connected().await;
        assert!(session.is_connected());
        let limit = Duration::from_secs(5);
        let mut kept = Kept::default();
        let run = session.run(ExecStart::default(), limit, &mut kept);
        assert_eq!(run.await.unwrap(), End::Hung);
        assert!(!session.is_connected());
    }

    #[tokio::test]
    async fn a_connection_that_ends_after_the_kill_serves_no_other_command() {
        let (mut session, mut guest) = connected().await;
        let mut kept = Kept::default();
        let run = session.run(ExecStart::default(), Duration::ZERO, &mut kept);
        let leave = async {
            let mut asked = vec![0; 4096];
            // The start and the kill.
            let kill = encode(&ToExec {
                message: Some(Question::Kill(ExecKill {})),
            });
            let (kill, mut seen) = (kill.unwrap(), vec![]);
            while !seen.ends_with(&kill) {
                let length = guest.read(&mut asked).await.unwrap();
                seen.extend(&asked[..length]);
            }
            drop(guest);
        };
        let (end, ()) = tokio::join!(run, leave);
        assert_eq!(end.unwrap(), End::TimedOut);
        assert!(!session.is_connected());
    }

    #[tokio::test]
    async fn floods_and_garbage_are_errors() {
        for bytes in [&[0, 0, 16, 0][..], &[2, 0, 0, 0, 0xff, 0xff], &[0, 0, 0, 0]] {
            let (mut session, mut guest) = connected().await;
            guest.write_all(bytes).await.unwrap();
            let mut kept = Kept::default();
            assert!(
                session
                    .run(ExecStart::default(), LIMIT, &mut kept)
                    .await
                    .is_err()
            );
        }
    }

    #[test]
    fn a_guest_cannot_write_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let into = folder.path().join("into");
        let outside = folder.path().join("outside");
        std::fs::create_dir(&into).unwrap();
        std::fs::write(&outside, "mine").unwrap();
        std::os::unix::fs::symlink(&outside, into.join("link")).unwrap();
        let file = |path: &str, more| ExecFile {
            path: path.to_owned(),
            data: b"data".to_vec(),
            mode: 0o4755,
            more,
            folder: false,
        };
        let mut receiver = Receiver::new(&into);
        for bad in ["", "/etc/passwd", "../outside", "a/../../outside", "."] {
            assert!(receiver.take(&file(bad, false)).is_err(), "{bad:?}");
        }
        receiver.take(&file("link", false)).unwrap();
        assert_eq!(std::fs::read_to_string(&outside).unwrap(), "mine");
        receiver.take(&file("a/b", true)).unwrap();
        receiver.take(&file("a/b", false)).unwrap();
        assert_eq!(
            std::fs::read_to_string(into.join("a/b")).unwrap(),
            "datadata"
        );
        assert_eq!(receiver.files, 2);
    }
}
