// SPDX-License-Identifier: Apache-2.0
//! Tests domains of a real libvirt: a libvirtd for the test, without systemd, in a temporary
//! folder.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use patchbay_attach::error::AttachError;
use patchbay_attach::guest::QemuGuest;
use patchbay_attach::memory::Access;
use patchbay_attach::{Options, PauseWay, Target, attach};
use patchbay_guest::guest::{Guest, Machine};
use patchbay_guest::pause::PauseError;
use rustix::process::{Pid, Signal, kill_process};

use super::daemon::{Daemon, Programs};
use super::stock::Boot;
use super::{Process, checked, until};

const DEADLINE: Duration = Duration::from_secs(60);
/// The user of libvirtd if the test runs as root. A libvirtd of root would use the machine's own
/// folders.
const NOBODY: u32 = 65534;
const SHARED: &str = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

/// A running libvirtd and its domain; both end on drop.
struct Libvirt {
    daemon: Option<Process>,
    folder: tempfile::TempDir,
}

impl Libvirt {
    /// Starts libvirtd. Prints a message and returns `None` if libvirt is not installed.
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut libvirt = Self {
            daemon: None,
            folder,
        };
        let root = rustix::process::geteuid().is_root();
        for folder in [".", "run", "home"] {
            let path = libvirt.path(folder);
            fs::create_dir_all(&path).expect("room");
            if root {
                chown(&path, Some(NOBODY), Some(NOBODY)).expect("root may");
            }
        }
        let mut command = if root {
            let mut command = Command::new("setpriv");
            let id = NOBODY.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "libvirtd"]);
            command
        } else {
            Command::new("libvirtd")
        };
        let installed = ["libvirtd", "virsh", "qemu-system-x86_64"]
            .iter()
            .all(|program| is_installed(program));
        if !installed {
            eprintln!("SKIPPED: libvirtd, virsh and qemu-system-x86_64 are not all installed");
            return None;
        }
        let daemon = command
            .env("HOME", libvirt.path("home"))
            .env("XDG_RUNTIME_DIR", libvirt.path("run"))
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_CACHE_HOME")
            .stdout(Stdio::null())
            .stderr(fs::File::create(libvirt.path("log")).expect("room"))
            .spawn()
            .expect("installed");
        libvirt.daemon = Some(Process(daemon));
        let end = Instant::now() + DEADLINE;
        while !libvirt.virsh(&["list"]).0 {
            assert!(
                Instant::now() < end,
                "libvirtd does not answer: {}",
                fs::read_to_string(libvirt.path("log")).unwrap_or_default()
            );
        }
        Some(libvirt)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn uri(&self) -> String {
        let socket = self.path("run/libvirt/libvirt-sock");
        format!("qemu:///session?socket={}", socket.display())
    }

    /// Returns whether virsh succeeded, and its output.
    fn virsh(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new("virsh")
            .args(["--connect", &self.uri()])
            .args(arguments)
            .output()
            .expect("installed");
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        (output.status.success(), text)
    }

    /// Starts a domain.
    fn create(&self, definition: &str) {
        let path = self.path("domain.xml");
        fs::write(&path, definition).expect("room");
        let (created, text) = self.virsh(&["create", &path.display().to_string()]);
        assert!(created, "{text}");
    }

    fn options(&self, domain: &str) -> Options {
        Options {
            target: Target::Libvirt {
                uri: self.uri(),
                domain: domain.to_owned(),
            },
            name: None,
            access: Access::Auto,
            pause: PauseWay::Freeze,
            watchdog: PathBuf::from(env!("CARGO_BIN_EXE_patchbay-attach")),
            accept_tcg: Some(super::tcg::registers),
        }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        for name in ["shared", "private", "stock"] {
            self.virsh(&["destroy", name]);
        }
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps daemons in a folder that is not in a plain user's PATH.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders
        .map(|folder| folder.join(program))
        .any(|path| Path::exists(&path))
}

fn refused(options: &Options, words: &str) {
    let error: AttachError = attach(options).expect_err(words);
    assert!(error.to_string().contains(words), "{error}");
}

fn stops_and_resumes(guest: &QemuGuest) {
    let paused = guest.pause(DEADLINE).expect("stopped");
    assert_eq!(checked(&paused), Ok(()));
}

/// Returns the processes of `virsh` that this process has started.
fn virshs() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").expect("its own");
    tasks
        .flatten()
        .flat_map(|task| {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let children = children.split_whitespace().map(str::to_owned);
            children.collect::<Vec<_>>()
        })
        .filter(|id| {
            fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|name| name == "virsh\n")
        })
        .filter_map(|id| Pid::from_raw(id.parse().ok()?))
        .collect()
}

/// Checks that commands go through one `virsh` and events through another, and that a `virsh` that
/// was killed is started again.
fn uses_two_virshs(guest: &QemuGuest) {
    let first = virshs();
    assert_eq!(first.len(), 2);
    for _ in 0..5 {
        stops_and_resumes(guest);
        assert_eq!(virshs(), first);
    }
    for virsh in &first {
        let resets = guest.life().resets();
        kill_process(*virsh, Signal::KILL).expect("its own");
        until("a virsh takes its place", || {
            // The next command starts a new `virsh` for commands.
            stops_and_resumes(guest);
            let now = virshs();
            now.len() == 2 && !now.contains(virsh)
        });
        println!("{} resets for lost events", guest.life().resets() - resets);
    }
    assert!(guest.life().resets() >= 2, "events may be lost");
}

/// Checks that a reset, a stop and a resume by another client of libvirt are noticed.
fn notices_events(libvirt: &Libvirt, guest: &QemuGuest) {
    for command in ["reset", "suspend", "resume"] {
        let before = guest.life().resets();
        let (done, text) = libvirt.virsh(&[command, "shared"]);
        assert!(done, "{text}");
        until(command, || guest.life().resets() > before);
    }
    assert!(!guest.has_ended());
}

/// Returns a domain without KVM, with this memory and nothing to boot.
fn emulated(name: &str, memory: &str) -> String {
    format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>2</vcpu>
         <os><type arch='x86_64' machine='pc'>hvm</type></os>{memory}
         <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>
         <memballoon model='none'/></devices></domain>"
    )
}

/// Returns a domain with KVM that boots a stock kernel.
fn stock(name: &str, kernel: &Path, boot: &Boot) -> String {
    let [kernel, initrd, console] =
        [kernel, &boot.initrd, &boot.console].map(|path| path.display());
    format!(
        "<domain type='kvm'><name>{name}</name><memory unit='MiB'>512</memory><vcpu>2</vcpu>
         <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
         <cmdline>{}</cmdline></os>{SHARED}<features><acpi/></features>
         <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>
         <memballoon model='none'/><serial type='file'><source path='{console}'/></serial></devices></domain>",
        Boot::COMMAND_LINE
    )
}

/// Checks the refusals of attaching through virsh, and the pauses of a domain without KVM.
pub fn refusals_and_pauses() {
    let Some(libvirt) = Libvirt::start() else {
        return;
    };
    refused(&libvirt.options("shared"), "failed to get domain 'shared'");
    libvirt.create(&emulated("shared", SHARED));
    libvirt.create(&emulated("private", ""));
    let strict = Options {
        accept_tcg: None,
        ..libvirt.options("shared")
    };
    refused(&strict, "without KVM");
    let by_qmp = Options {
        pause: PauseWay::Qmp,
        ..libvirt.options("shared")
    };
    refused(&by_qmp, "give --pause freeze");
    let elsewhere = Options {
        target: Target::Libvirt {
            uri: "qemu:///session?socket=/nonexistent/libvirt".to_owned(),
            domain: "shared".to_owned(),
        },
        ..libvirt.options("shared")
    };
    refused(&elsewhere, "/nonexistent/libvirt");

    let guest = attach(&libvirt.options("shared")).expect("attached");
    assert!(guest.memory().is_mapped(), "the backing is shared");
    assert_eq!(guest.description().name, "shared");
    assert_eq!(guest.description().vcpus, 2);
    stops_and_resumes(&guest);
    uses_two_virshs(&guest);
    notices_events(&libvirt, &guest);
    refused(&libvirt.options("shared"), "is attached to the guest");
    let (suspended, text) = libvirt.virsh(&["suspend", "shared"]);
    assert!(suspended, "{text}");
    assert_eq!(guest.pause(DEADLINE).err(), Some(PauseError::AlreadyPaused));
    let (resumed, text) = libvirt.virsh(&["resume", "shared"]);
    assert!(resumed, "{text}");
    stops_and_resumes(&guest);

    let guest = attach(&libvirt.options("private")).expect("attached");
    assert!(!guest.memory().is_mapped(), "the backing is private");
    stops_and_resumes(&guest);
    drop(guest);
    let by_file = Options {
        access: Access::File,
        ..libvirt.options("private")
    };
    refused(&by_file, "is not a file that QEMU shares");
}

/// Tests a domain with KVM: `patchbay attach libvirt` serves it, its keys are flipped, and it keeps
/// running when the attacher detaches. Then `patchbayd` discovers it, flips its keys, and notices
/// its end.
pub fn flips() {
    let (Some(programs), Some(boot)) = (Programs::find(), Boot::prepare()) else {
        return;
    };
    let Some(libvirt) = Libvirt::start() else {
        return;
    };
    // QEMU runs as the user of libvirtd.
    let folder = boot.folder.path();
    let kernel = folder.join("kernel");
    fs::copy(&boot.kernel, &kernel).expect("room");
    if rustix::process::geteuid().is_root() {
        chown(folder, Some(NOBODY), Some(NOBODY)).expect("root may");
    }
    libvirt.create(&stock("stock", &kernel, &boot));
    boot.boots();
    by_name(&programs, &boot, &libvirt);
    by_daemon(&programs, &boot, &libvirt);
}

fn by_name(programs: &Programs, boot: &Boot, libvirt: &Libvirt) {
    let socket = boot.folder.path().join("api.sock");
    let attacher = Command::new(&programs.cli)
        .args(["attach", "libvirt", "stock", "--connect", &libvirt.uri()])
        .arg("--api-socket")
        .arg(&socket)
        .stderr(Stdio::piped())
        .spawn();
    let mut attacher = Process(attacher.expect("the program is there"));
    let mut line = String::new();
    let mut errors = BufReader::new(attacher.stderr.take().expect("piped"));
    errors.read_line(&mut line).expect("text");
    assert!(line.starts_with("attached to stock"), "{line:?}");
    programs.flips(&socket, boot);

    let pid = i32::try_from(attacher.id()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), Signal::TERM).expect("its own");
    let status = attacher.wait().expect("its own");
    line.clear();
    errors.read_to_string(&mut line).expect("text");
    assert!(status.success(), "{status}: {line}");
    boot.lives();
    let guest = attach(&libvirt.options("stock")).expect("attached");
    for _ in 0..20 {
        stops_and_resumes(&guest);
    }
    boot.lives();
    let (known, state) = libvirt.virsh(&["domstate", "stock"]);
    assert!(known && state.trim() == "running", "{state}");
}

fn by_daemon(programs: &Programs, boot: &Boot, libvirt: &Libvirt) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let options = ["--attach-libvirt", &libvirt.uri()];
    let mut daemon = Daemon::start(programs, folder.path(), &options);
    let host = folder.path().join("host.sock");
    until("the domain is served", || {
        programs.guests(&host) == "stock\n"
    });
    programs.flips(&host, boot);
    let (destroyed, text) = libvirt.virsh(&["destroy", "stock"]);
    assert!(destroyed, "{text}");
    daemon.forgets_the_guest(programs);
}
