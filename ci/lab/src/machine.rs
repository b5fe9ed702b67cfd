// SPDX-License-Identifier: Apache-2.0
//! Runs the lab, a virtual machine with working KVM on any host.
//!
//! QEMU without acceleration emulates a CPU with AMD's SVM and boots a stock Debian kernel with
//! kvm_amd. Inside, the host's root file system is visible read-only over 9p, under an overlay in
//! memory, so programs built on the host run unchanged. What they write is lost, except below one
//! directory, `PATCHBAY_LAB_OUT`.
//!
//! ```text
//!   host  patchbay lab -- CMD               QEMU (TCG, 1 CPU)
//!         control  <── "ready", "exit N" ── vport0p1
//!                  ── an empty line ──────> every 500 ms, to cause an interrupt
//!         stdout   <─────────────────────── vport0p2      stage2.sh runs CMD
//!         stderr   <─────────────────────── vport0p3
//!         stdin    ───────────────────────> vport0p4
//!         terminal <──────────────────────> hvc0          instead of 2 to 4, when interactive
//!         console.log <──────────────────── ttyS0         kernel messages
//!         127.0.0.1:PORT ─────────────────> 10.0.2.15:PORT  if the job has a port; nothing else
//! ```
//!
//! The lab always has one CPU: with two, its kernel or its guests hang.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::image::{self, Image};
use crate::step::{dying_with_us, tail};
use crate::terminal::RawTerminal;
use crate::{cache, cpio, packages, shell};

const INIT: &str = include_str!("../guest/init.sh");
const STAGE2: &str = include_str!("../guest/stage2.sh");

/// The signals that end a job.
const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The timeout for the boot of the lab. The boot takes 4 s on an idle machine, and several times as
/// long during a kernel build.
const BOOT_DEADLINE: Duration = Duration::from_secs(300);

/// The interval of the lines that this process sends to the lab to cause interrupts there.
///
/// QEMU 7.2 occasionally loses an interrupt of the lab's only timer. Leaving a nested guest clears
/// a bit of the CPU's pending requests (`do_vmexit`, `target/i386/tcg/sysemu/svm_helper.c`) without
/// the lock and without an atomic access, while another thread sets one. The timer has then expired
/// and its vector is set in the local APIC's IRR, but a nested guest that spins continues forever.
/// The next interrupt of any kind makes QEMU check the APIC again and delivers the lost one too.
const NUDGE: Duration = Duration::from_millis(500);

/// The environment variable that names the job's writable directory.
pub const OUT_VARIABLE: &str = "PATCHBAY_LAB_OUT";

/// The default memory of a lab in MiB.
pub const DEFAULT_MEMORY_MIB: u32 = 4096;

/// The lab's address, if a job has a port. QEMU's user network expects the lab there.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

/// A command to run in the lab.
pub struct Job {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Directory in which the command runs.
    pub folder: PathBuf,
    /// Environment variables; names that a shell does not accept are left out.
    pub environment: BTreeMap<OsString, OsString>,
    /// Directory of the host that is writable in the lab, under the same name.
    pub out: PathBuf,
    /// Memory of the lab in MiB.
    pub memory_mib: u32,
    /// Timeout of the job, without the boot.
    pub timeout: Option<Duration>,
    /// Make the lab's clocks count instructions, one per nanosecond. The time-stamp counter,
    /// including that of guests, is then the number of executed instructions.
    pub clocks_count_instructions: bool,
    /// A TCP port of this machine's loopback interface. Its connections go to the same port of
    /// [`ADDRESS`] in the lab. Without it the lab has no network.
    pub tcp_port: Option<u16>,
    /// Signals that end the job instead of this process, so that the job can clean up.
    pub interrupts: Option<Interrupts>,
}

/// SIGINT, SIGTERM and SIGHUP, which are caught from [`Interrupts::catch`] on.
///
/// Callers catch the signals before they create temporary files for a job, but after [`prepare`],
/// so that a signal still ends the downloads of [`prepare`].
#[derive(Clone)]
pub struct Interrupts(Arc<AtomicUsize>);

impl Interrupts {
    /// Starts to catch the signals.
    ///
    /// # Errors
    /// A handler cannot be registered.
    pub fn catch() -> Result<Self> {
        let caught = Arc::default();
        for signal in ENDING {
            let number = usize::try_from(signal)?;
            signal_hook::flag::register_usize(signal, Arc::clone(&caught), number)?;
        }
        Ok(Self(caught))
    }

    /// Returns the last signal that has arrived, if any.
    fn caught(&self) -> Option<i32> {
        let number = i32::try_from(self.0.load(Ordering::SeqCst)).ok()?;
        (number != 0).then_some(number)
    }
}

impl Job {
    /// Creates a job in this process's directory and environment. It may write to `out`, or to the
    /// directory that [`OUT_VARIABLE`] names; the directory is created.
    pub fn new(command: Vec<OsString>, out: &Path) -> Result<Self> {
        let out = std::env::var_os(OUT_VARIABLE).map_or(out.to_owned(), PathBuf::from);
        fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
        // The path must have no symbolic links: the lab's init creates the same directory under
        // another root, where absolute links are wrong.
        let out = out.canonicalize()?;
        Ok(Self {
            command,
            folder: std::env::current_dir()?,
            environment: std::env::vars_os().collect(),
            out,
            memory_mib: DEFAULT_MEMORY_MIB,
            timeout: None,
            clocks_count_instructions: false,
            tcp_port: None,
            interrupts: None,
        })
    }

    /// Adds variables to the job's environment.
    pub fn set<N: Into<OsString>, V: Into<OsString>>(
        &mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) {
        let variables = variables.into_iter();
        self.environment
            .extend(variables.map(|(name, value)| (name.into(), value.into())));
    }

    fn script(&self) -> Vec<u8> {
        let mut script = Vec::new();
        for (name, value) in &self.environment {
            if shell::is_variable_name(name) {
                script.extend(
                    [
                        b"export ",
                        name.as_bytes(),
                        b"=",
                        &shell::quote(value),
                        b"\n",
                    ]
                    .concat(),
                );
            }
        }
        let out = shell::quote(self.out.as_os_str());
        script.extend([b"export ", OUT_VARIABLE.as_bytes(), b"=", &out, b"\n"].concat());
        let folder = shell::quote(self.folder.as_os_str());
        script.extend([b"cd ", &folder[..], b" || exit 125\nexec"].concat());
        for word in &self.command {
            script.push(b' ');
            script.extend(shell::quote(word));
        }
        script.push(b'\n');
        script
    }
}

/// Fetches the packages and images of the lab that are missing.
pub fn prepare() -> Result<()> {
    packages::ensure_packages(packages::LAB)?;
    image::get().map(drop)
}

/// Runs a job and returns its exit status as a shell does: 128 + n for signal n.
pub fn run(job: &Job) -> Result<u8> {
    packages::ensure_packages(packages::LAB)?;
    let image = image::get()?;
    let mut lab = Lab::start(job, &image)?;
    let result = lab.wait(job);
    lab.stop();
    match result {
        Ok(status) => {
            let _ = fs::remove_file(&lab.console_log);
            Ok(status)
        }
        Err(error) => bail!(
            "{error:#}\nThe lab's console, {}, ends with:\n{}",
            lab.console_log.display(),
            tail(&lab.console_log, 20)
        ),
    }
}

enum Event {
    Ready,
    Exit(u8),
    /// QEMU closed the control port.
    Gone,
    Signal(i32),
}

struct Lab {
    qemu: Child,
    console_log: PathBuf,
    events: Receiver<Event>,
    signals: Option<signal_hook::iterator::Handle>,
    nudge: UnixStream,
    copies: Vec<JoinHandle<()>>,
    // Restores the terminal when it is dropped.
    terminal: Option<RawTerminal>,
    // This end stays open, because on a full close QEMU would discard input that the guest has not
    // read yet.
    _stdin: UnixStream,
    // Holds the sockets and the initramfs until the lab is up.
    files: Option<tempfile::TempDir>,
}

impl Lab {
    fn start(job: &Job, image: &Image) -> Result<Self> {
        let (events, received) = mpsc::channel();
        // The handlers are registered before anything else, so that no signal arrives without a
        // handler.
        let signals = match &job.interrupts {
            Some(earlier) => {
                let handle = signal_events(events.clone())?;
                // Sending cannot fail, because the receiver is in this function.
                let _ = earlier
                    .caught()
                    .map(|signal| events.send(Event::Signal(signal)));
                Some(handle)
            }
            None => None,
        };
        let files = tempfile::Builder::new().prefix("patchbay-lab-").tempdir()?;
        let logs = cache::logs()?;
        fs::create_dir_all(&logs)?;
        let name = files
            .path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let console_log = logs.join(format!("{name}.log"));

        let size = RawTerminal::size_if_interactive();
        let initramfs = files.path().join("initramfs");
        let mut bytes = fs::read(&image.modules)?;
        bytes.extend(job_archive(job, size));
        fs::write(&initramfs, bytes)?;

        let mut qemu = qemu_command(job, image, &initramfs, &console_log);
        let mut listen = |name: &str| -> Result<UnixListener> {
            let path = files.path().join(name);
            let listener = UnixListener::bind(&path)?;
            qemu.arg("-chardev")
                .arg(option(&format!("socket,id={name},path="), &path, ""));
            Ok(listener)
        };
        let control = listen("control")?;
        let stdout = listen("stdout")?;
        let stderr = listen("stderr")?;
        let stdin = listen("stdin")?;
        let terminal = size.map(|_| listen("terminal")).transpose()?;
        qemu.args(["-device", "virtio-serial-pci"]);
        if terminal.is_some() {
            qemu.args(["-device", "virtconsole,chardev=terminal,nr=0"]);
        }
        for (number, port) in ["control", "stdout", "stderr", "stdin"].iter().enumerate() {
            let number = number + 1;
            qemu.arg("-device")
                .arg(format!("virtserialport,chardev={port},nr={number}"));
        }
        let mut qemu = dying_with_us(&qemu)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start setpriv and qemu-system-x86_64")?;

        // QEMU connects to all sockets before it runs the guest, and exits if it cannot.
        let mut connect = |listener: UnixListener| accept(&listener, &mut qemu);
        let control = connect(control)?;
        let nudge = control.try_clone()?;
        control_events(control, events);
        let (stdout, stderr, stdin) = (connect(stdout)?, connect(stderr)?, connect(stdin)?);
        let terminal = terminal.map(connect).transpose()?;
        let mut copies = Vec::new();
        let mut raw = None;
        match terminal {
            Some(terminal) => {
                raw = Some(RawTerminal::enter()?);
                let input = terminal.try_clone()?;
                thread::spawn(move || copy(io::stdin(), input));
                copies.push(thread::spawn(move || copy(terminal, io::stdout())));
            }
            None => {
                copies.push(thread::spawn(move || copy(stdout, io::stdout())));
                copies.push(thread::spawn(move || copy(stderr, io::stderr())));
                if RawTerminal::is_terminal_input() {
                    stdin.shutdown(Shutdown::Write)?;
                } else {
                    let stdin = stdin.try_clone()?;
                    thread::spawn(move || {
                        copy(io::stdin(), &stdin);
                        let _ = stdin.shutdown(Shutdown::Write);
                    });
                }
            }
        }
        Ok(Self {
            qemu,
            console_log,
            events: received,
            signals,
            nudge,
            copies,
            terminal: raw,
            _stdin: stdin,
            files: Some(files),
        })
    }

    /// Waits for the job's exit status.
    fn wait(&mut self, job: &Job) -> Result<u8> {
        let start = Instant::now();
        match self.events.recv_timeout(BOOT_DEADLINE) {
            Ok(Event::Ready) => {}
            Ok(Event::Exit(status)) => return Ok(status),
            Ok(Event::Signal(signal)) => return Ok(status_of(signal)),
            Ok(Event::Gone) | Err(RecvTimeoutError::Disconnected) => {
                bail!("the lab ended before it was up")
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("the lab was not up after {} s", BOOT_DEADLINE.as_secs())
            }
        }
        let mut nudge = self.nudge.try_clone()?;
        thread::spawn(move || {
            while nudge.write_all(b"\n").is_ok() {
                thread::sleep(NUDGE);
            }
        });
        // The files are removed now, so that they are gone even if this process is killed.
        self.files = None;
        if std::env::var_os("PATCHBAY_LAB_VERBOSE").is_some() {
            eprintln!("lab up after {:.1} s", start.elapsed().as_secs_f32());
        }
        let event = match job.timeout {
            Some(timeout) => self.events.recv_timeout(timeout),
            None => self.events.recv().map_err(RecvTimeoutError::from),
        };
        match event {
            Ok(Event::Exit(status)) => Ok(status),
            Ok(Event::Signal(signal)) => Ok(status_of(signal)),
            Err(RecvTimeoutError::Timeout) => bail!(
                "the command in the lab did not end within {} s",
                job.timeout.unwrap_or_default().as_secs()
            ),
            _ => bail!("the lab died before its command ended"),
        }
    }

    /// Ends QEMU and copies its remaining output.
    fn stop(&mut self) {
        // All output of the job is in the sockets already: the guest's write to a port returns only
        // after QEMU has taken the data.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        for copy in self.copies.drain(..) {
            let _ = copy.join();
        }
        self.terminal = None;
        if let Some(signals) = self.signals.take() {
            signals.close();
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop();
    }
}

fn qemu_command(job: &Job, image: &Image, initramfs: &Path, console_log: &Path) -> Command {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-nodefaults", "-no-user-config"]);
    qemu.args([
        "-display",
        "none",
        "-no-reboot",
        "-accel",
        "tcg,thread=single",
    ]);
    // The CPU has no cmpxchg16b, because QEMU 7.2 leaves garbage in the flags after that
    // instruction. An interrupt at that point saves and restores them, and then the kernel crashes
    // with a double fault or hangs.
    qemu.args([
        "-cpu",
        "max,-cx16",
        "-M",
        "q35",
        "-smp",
        "1",
        "-m",
        &job.memory_mib.to_string(),
    ]);
    if job.clocks_count_instructions {
        qemu.args(["-icount", "shift=0"]);
    }
    qemu.arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(initramfs);
    qemu.args(["-append", image::COMMAND_LINE]);
    qemu.arg("-chardev")
        .arg(option("file,id=console,path=", console_log, ""));
    qemu.args(["-serial", "chardev:console"]);
    let root = ",id=root,readonly=on,security_model=none,multidevs=remap";
    qemu.arg("-fsdev")
        .arg(option("local,path=", Path::new("/"), root));
    qemu.args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
    let out = ",id=out,security_model=none,multidevs=remap";
    qemu.arg("-fsdev").arg(option("local,path=", &job.out, out));
    qemu.args(["-device", "virtio-9p-pci,fsdev=out,mount_tag=out"]);
    if let Some(port) = job.tcp_port {
        // The network is restricted, so that the lab can open no connections to this machine or
        // beyond.
        let forward = format!("hostfwd=tcp:127.0.0.1:{port}-{ADDRESS}:{port}");
        qemu.arg("-nic")
            .arg(format!("user,model=virtio-net-pci,restrict=on,{forward}"));
    }
    qemu
}

/// Formats an option that contains a path, with commas doubled for QEMU.
fn option(before: &str, path: &Path, after: &str) -> OsString {
    let mut bytes = before.as_bytes().to_vec();
    for &byte in path.as_os_str().as_bytes() {
        bytes.push(byte);
        if byte == b',' {
            bytes.push(byte);
        }
    }
    bytes.extend_from_slice(after.as_bytes());
    std::ffi::OsStr::from_bytes(&bytes).to_owned()
}

/// Returns the part of the initramfs that depends on the job.
fn job_archive(job: &Job, terminal: Option<(u16, u16)>) -> Vec<u8> {
    let mut archive = cpio::Archive::default();
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("stage2", 0o755, STAGE2.as_bytes());
    archive.directory("job");
    archive.file("job/job", 0o755, &job.script());
    archive.file("job/out-folder", 0o644, job.out.as_os_str().as_bytes());
    if let Some((rows, columns)) = terminal {
        let script = format!("$bb stty rows {rows} cols {columns}\n");
        archive.file("job/terminal", 0o644, script.as_bytes());
    }
    archive.finish()
}

/// Waits until QEMU connects or exits.
fn accept(listener: &UnixListener, qemu: &mut Child) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(status) = qemu.try_wait()? {
            bail!("QEMU did not start ({status}); its message is above");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn control_events(stream: UnixStream, sender: Sender<Event>) {
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let event = match line.split_once(' ') {
                Some(("exit", status)) => status.parse().map(Event::Exit).ok(),
                _ => (line == "ready").then_some(Event::Ready),
            };
            if event.is_some_and(|event| sender.send(event).is_err()) {
                return;
            }
        }
        let _ = sender.send(Event::Gone);
    });
}

/// Turns the signals that end a process into events.
fn signal_events(sender: Sender<Event>) -> Result<signal_hook::iterator::Handle> {
    let mut signals = Signals::new(ENDING)?;
    let handle = signals.handle();
    thread::spawn(move || {
        for signal in signals.forever() {
            if sender.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    });
    Ok(handle)
}

/// Returns the exit status that a shell reports for a command that was killed by this signal.
fn status_of(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Copies until either side ends. Flushes the output after every read, so that it appears at once.
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                if to
                    .write_all(&buffer[..length])
                    .and_then(|()| to.flush())
                    .is_err()
                {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_script_restores_folder_environment_and_words() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let command = "printf '%s|' \"$PWD\" \"$TEXT\" \"$PATCHBAY_LAB_OUT\" \"$@\"";
        let job = Job {
            command: ["sh", "-c", command, "sh", "a b", "it's", ""]
                .map(Into::into)
                .to_vec(),
            folder: folder.clone(),
            environment: [("TEXT", "x\n'y'"), ("BASH_FUNC_f%%", "() { :; }")]
                .map(|(name, value)| (name.into(), value.into()))
                .into(),
            out: "/some where".into(),
            memory_mib: 0,
            timeout: None,
            clocks_count_instructions: false,
            tcp_port: None,
            interrupts: None,
        };
        let script = std::ffi::OsStr::from_bytes(&job.script()).to_owned();
        let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
        let expected = format!("{}|x\n'y'|/some where|a b|it's||", folder.display());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }

    #[test]
    fn commas_in_paths_are_doubled() {
        let argument = option("local,path=", Path::new("/a,b"), ",id=x");
        assert_eq!(argument, "local,path=/a,,b,id=x");
    }
}
