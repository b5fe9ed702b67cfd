// SPDX-License-Identifier: Apache-2.0
//! A process that speaks QMP and lies about the address of its guest's memory, its threads, or its
//! identity.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use kvm_ioctls::Kvm;
use nix::libc;
use patchbay_attach::error::AttachError;
use patchbay_attach::memory::Access;
use patchbay_attach::nested::Nesting;
use patchbay_attach::{Options, PauseWay, Target, attach};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::Guest;
use serde_json::{Value, json};
use vm_memory::{FileOffset, MmapRegion};

use super::relay::Relay;
use super::{Accelerator, DEADLINE, Process, options, process};

/// The variable that makes the test program run as the hostile monitor. Its value is a [`Lies`] in
/// JSON.
const HOSTILE: &str = "PATCHBAY_TEST_HOSTILE";
const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 9}}, "capabilities": []}}"#;
/// The size of the memory that the monitor maps, in bytes.
const SIZE: usize = 1 << 20;
/// The guest-physical address that an attacher writes to.
const TARGET: u64 = 0x2000;
const NOBODY: u32 = 65534;

/// The lies. For a field that is not set, the monitor tells the truth.
#[derive(Clone, Debug, Default)]
struct Lies {
    /// The file of the guest's memory; private memory if there is none.
    file: Option<PathBuf>,
    /// The mapping is read-only.
    maps_read_only: bool,
    /// The descriptor is read-only.
    opens_read_only: bool,
    /// The number of bytes of RAM that the monitor claims.
    claims_bytes: Option<usize>,
    /// The claimed address of the RAM in the process.
    claims_address: Option<u64>,
    /// The claimed ids of the vCPUs' threads.
    claims_threads: Option<Vec<u32>>,
    /// The number of vCPUs of the monitor's KVM VM; `None` if the monitor has no VM.
    has_vcpus: Option<usize>,
    /// The monitor claims to use KVM.
    claims_kvm: bool,
    /// The user that the monitor runs as.
    user: Option<u32>,
    /// CR4 of the monitor's vCPU.
    cr4: u64,
    /// The statistics of the monitor's vCPU, one answer after the other. The last one is repeated.
    stats: Vec<Value>,
}

impl Lies {
    fn json(&self) -> Value {
        json!({
            "file": self.file,
            "maps_read_only": self.maps_read_only,
            "opens_read_only": self.opens_read_only,
            "claims_bytes": self.claims_bytes.unwrap_or(SIZE),
            "claims_address": self.claims_address,
            "claims_threads": self.claims_threads,
            "has_vcpus": self.has_vcpus,
            "claims_kvm": self.claims_kvm,
            "cr4": self.cr4,
            "stats": self.stats,
        })
    }
}

/// A running hostile monitor.
struct Hostile {
    child: Process,
    folder: tempfile::TempDir,
}

impl Hostile {
    /// Starts the monitor in a separate process, which runs `test` of this program.
    fn start(test: &str, lies: &Lies) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(folder.path(), everybody).expect("its owner");
        let mut command = command(test, lies);
        command.env("SOCKET", folder.path().join("qmp"));
        let child = started(&mut command);
        Self { child, folder }
    }

    /// Starts the monitor with a socket that this process listens on.
    fn start_inherited(test: &str, lies: &Lies) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let listener = UnixListener::bind(folder.path().join("qmp")).expect("free");
        let mut command = command(test, lies);
        command.stdin(Stdio::from(OwnedFd::from(listener)));
        let child = started(&mut command);
        Self { child, folder }
    }

    fn options(&self, accelerator: Accelerator) -> Options {
        options(self.socket(), PauseWay::Freeze, accelerator)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }
}

fn command(test: &str, lies: &Lies) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a program"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(HOSTILE, lies.json().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if let Some(user) = lies.user {
        command.uid(user);
    }
    command
}

/// Waits until the monitor listens.
fn started(command: &mut Command) -> Process {
    let mut child = Process(command.spawn().expect("this program"));
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = output.lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("LISTENS")), "it has ended");
    child
}

/// Runs the hostile monitor, and does not return, if this process was started as one.
fn play() {
    let Ok(lies) = std::env::var(HOSTILE) else {
        return;
    };
    let lies: Value = serde_json::from_str(&lies).expect("JSON");
    let map = map(&lies);
    let address = lies["claims_address"].as_u64();
    let address = address.unwrap_or(map.as_ptr() as u64);
    let vcpus = lies["has_vcpus"].as_u64();
    let _vm = vcpus.map(|vcpus| {
        let vm = Kvm::new().expect("/dev/kvm").create_vm().expect("a VM");
        let vcpus: Vec<_> = (0..vcpus)
            .map(|id| vm.create_vcpu(id).expect("a vCPU"))
            .collect();
        (vm, vcpus)
    });
    let threads = match lies["claims_threads"].as_array() {
        Some(threads) => threads.clone(),
        None => vec![idle_thread().into()],
    };
    let listener = match std::env::var_os("SOCKET") {
        Some(path) => UnixListener::bind(path).expect("free"),
        None => {
            let inherited = std::io::stdin().as_fd().try_clone_to_owned();
            UnixListener::from(inherited.expect("a descriptor"))
        }
    };
    println!("LISTENS");
    let mut stats = lies["stats"].as_array().expect("a list").clone();
    for stream in listener.incoming().map_while(Result::ok) {
        serve(&stream, &lies, address, &threads, &mut stats);
    }
    std::process::exit(0);
}

/// Maps the memory that the monitor claims to be a guest's.
fn map(lies: &Value) -> MmapRegion {
    let is = |name: &str| lies[name] == true;
    let protection = match is("maps_read_only") {
        true => libc::PROT_READ,
        false => libc::PROT_READ | libc::PROT_WRITE,
    };
    let file = lies["file"].as_str().map(|path| {
        let mut file = File::options();
        file.read(true).write(!is("opens_read_only"));
        FileOffset::new(file.open(path).expect("it may be opened"), 0)
    });
    let flags = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    };
    MmapRegion::build(file, SIZE, protection, flags).expect("room")
}

/// Returns the id of a thread that waits forever.
fn idle_thread() -> u32 {
    let (sender, id) = channel();
    std::thread::spawn(move || {
        let id = rustix::thread::gettid().as_raw_nonzero().get();
        let _ = sender.send(id.cast_unsigned());
        loop {
            std::thread::park();
        }
    });
    id.recv().expect("it runs")
}

/// Answers a client until it is gone.
fn serve(
    stream: &UnixStream,
    lies: &Value,
    address: u64,
    threads: &[Value],
    stats: &mut Vec<Value>,
) {
    let mut to = stream;
    let mut say = |message: &str| writeln!(to, "{message}").is_ok();
    if !say(GREETING) {
        return;
    }
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let Ok(command) = serde_json::from_str::<Value>(&line) else {
            return;
        };
        let mut answer = match answer(&command, lies, address, threads, stats) {
            Some(value) => json!({ "return": value }),
            None => json!({ "error": { "class": "GenericError", "desc": "not in the script" } }),
        };
        answer["id"] = command["id"].clone();
        if !say(&answer.to_string()) {
            return;
        }
    }
}

fn answer(
    command: &Value,
    lies: &Value,
    address: u64,
    threads: &[Value],
    stats: &mut Vec<Value>,
) -> Option<Value> {
    let thread = |id: &Value| json!({ "thread-id": id });
    Some(match command["execute"].as_str()? {
        "qmp_capabilities" | "stop" | "cont" | "query-migrate" => json!({}),
        "query-kvm" => json!({ "enabled": lies["claims_kvm"], "present": true }),
        "query-status" => json!({ "status": "running", "running": true }),
        "query-name" => json!({ "name": "hostile" }),
        "query-cpus-fast" => threads.iter().map(thread).collect(),
        "query-memdev" => json!([{ "id": "ram0" }]),
        "query-memory-devices" => json!([]),
        "qom-list" => json!([{ "name": "ram-below-4g[0]", "type": "child<memory-region>" }]),
        "qom-get" => match command["arguments"]["property"].as_str()? {
            "addr" => json!(0),
            "size" => lies["claims_bytes"].clone(),
            _ => return None,
        },
        "query-stats" => match stats.len() {
            0 => return None,
            1 => stats[0].clone(),
            _ => stats.remove(0),
        },
        "human-monitor-command" => text(
            command["arguments"]["command-line"].as_str()?,
            lies,
            address,
        )?
        .into(),
        _ => return None,
    })
}

fn text(line: &str, lies: &Value, address: u64) -> Option<String> {
    let last = lies["claims_bytes"].as_u64()? - 1;
    if let Some(guests) = line.strip_prefix("gpa2hva 0x") {
        let guests = u64::from_str_radix(guests, 16).ok()?;
        return Some(format!(
            "Host virtual address for {guests:#x} (ram0) is {:#x}\r\n",
            address + guests
        ));
    }
    Some(match line {
        "info mtree -f" => format!(
            "FlatView #0\n AS \"memory\", root: system\n Root memory region: system\n  {:016x}-{last:016x} (prio 0, ram): ram0 KVM\n",
            0
        ),
        "info registers -a" => registers(lies["cr4"].as_u64()?),
        _ => return None,
    })
}

fn registers(cr4: u64) -> String {
    format!(
        "\r\nCPU#0\r\nRIP=ffffffff81000000\r\nIDT=     fffffe0000000000 00000fff\r\n\
         CR0=80050033 CR2=0 CR3=1000 CR4={cr4:08x}\r\nEFER=0000000000000d01\r\n"
    )
}

fn refusal(options: &Options) -> String {
    let refused = attach(options).map(|guest| format!("attached to {guest:?}"));
    refused.expect_err("refused").to_string()
}

/// Returns whether the attacher, if it is not refused, changes the guest's memory.
fn writes(options: &Options) -> Result<bool, AttachError> {
    let guest = attach(options)?;
    let paused = guest.pause(DEADLINE).expect("stopped");
    let written = guest.ram().write(TARGET, b"flipped").is_ok();
    drop(paused);
    Ok(written)
}

/// Checks that the attacher does not write a file that the monitor may only read, although the
/// monitor claims that its guest's memory is in this file.
pub fn files_of_others(test: &str) {
    play();
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("victim");
    for (opens_read_only, bytes) in [(true, SIZE), (false, SIZE), (false, 2 * SIZE)] {
        let content = vec![0x90; 2 * SIZE];
        fs::write(&file, &content).expect("room");
        let lies = Lies {
            file: Some(file.clone()),
            opens_read_only,
            maps_read_only: bytes == SIZE,
            claims_bytes: Some(bytes),
            ..Lies::default()
        };
        let hostile = Hostile::start(test, &lies);
        for access in [Access::Auto, Access::File, Access::Process] {
            let options = Options {
                access,
                ..hostile.options(Accelerator::Tcg)
            };
            let wrote = writes(&options);
            assert!(fs::read(&file).expect("there") == content, "{wrote:?}");
            let error = wrote.expect_err("refused").to_string();
            let expected = match bytes {
                SIZE => "may not write",
                _ => "in one run",
            };
            assert!(error.contains(expected), "{error}");
        }
    }
    // The monitor's own file is written.
    let lies = Lies {
        file: Some(file.clone()),
        ..Lies::default()
    };
    let honest = Hostile::start(test, &lies);
    for access in [Access::File, Access::Process] {
        fs::write(&file, vec![0x90; SIZE]).expect("room");
        let options = Options {
            access,
            ..honest.options(Accelerator::Tcg)
        };
        assert!(writes(&options).expect("attached"));
        let mut found = [0; 7];
        let file = File::open(&file).expect("there");
        file.read_exact_at(&mut found, TARGET).expect("long enough");
        assert_eq!(&found, b"flipped");
    }
}

/// Checks that the attacher does not touch a process just because the monitor makes claims about
/// it.
pub fn other_processes(test: &str) {
    play();
    if let Err(error) = Kvm::new() {
        eprintln!("SKIPPED: /dev/kvm cannot be opened ({error})");
        return;
    }
    let kvm = |lies: &Lies| Lies {
        claims_kvm: true,
        ..lies.clone()
    };
    let strict = |hostile: &Hostile| hostile.options(Accelerator::Kvm);

    // The monitor has no VM, or fewer vCPUs than threads.
    let hostile = Hostile::start(test, &kvm(&Lies::default()));
    let error = refusal(&strict(&hostile));
    assert!(error.contains("has no KVM VM"), "{error}");
    let none = kvm(&Lies {
        has_vcpus: Some(0),
        ..Lies::default()
    });
    let error = refusal(&strict(&Hostile::start(test, &none)));
    let told = match process::readable() {
        true => "the guest has no memory",
        false => "has 0 KVM vCPUs",
    };
    assert!(error.contains(told), "{error}");

    // This process listens and another one answers. The other process claims that a thread of this
    // process is its vCPU.
    let victim = vec![0x90_u8; SIZE];
    let lies = Lies {
        claims_threads: Some(vec![idle_thread()]),
        claims_address: Some(victim.as_ptr() as u64),
        ..kvm(&Lies::default())
    };
    let hostile = Hostile::start_inherited(test, &lies);
    let wrote = writes(&strict(&hostile));
    assert!(victim.iter().all(|byte| *byte == 0x90), "{wrote:?}");
    let error = wrote.expect_err("refused").to_string();
    // This process may hold the VMs of other tests' guests.
    let none = ["has no KVM VM", "the VM of another process"];
    assert!(none.iter().any(|none| error.contains(none)), "{error}");
    drop(hostile);

    // The named process also has a VM, and belongs to another user.
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start a process of another user");
        return;
    }
    let vm = Kvm::new().expect("/dev/kvm").create_vm().expect("a VM");
    let _vcpu = vm.create_vcpu(0).expect("a vCPU");
    let lies = Lies {
        user: Some(NOBODY),
        ..lies
    };
    let hostile = Hostile::start(test, &lies);
    let named = Options {
        target: Target::Qmp(hostile.socket(), Some(std::process::id())),
        ..strict(&hostile)
    };
    let wrote = writes(&named);
    assert!(victim.iter().all(|byte| *byte == 0x90), "{wrote:?}");
    let error = wrote.expect_err("refused").to_string();
    assert!(error.contains("user 65534"), "{error}");
}

/// Tests a guest that has VMX on and runs no nested guest. Since Linux 6.12, KVM sets CR4.VMXE as
/// soon as it is loaded. KVM's statistics decide, and without them no vCPU is trusted.
pub fn nested_guests(test: &str) {
    play();
    let vcpu = |path: &str, inside: bool, entries: u64| {
        json!({ "provider": "kvm", "qom-path": path, "stats": [
            { "name": "guest_mode", "value": inside },
            { "name": "nested_run", "value": entries },
        ]})
    };
    let outside = json!([vcpu("/a", false, 5)]);
    for (stats, may_be_nested) in [
        (vec![outside.clone()], false),
        (vec![], true),
        (vec![json!([])], true),
        (vec![json!([vcpu("/a", true, 5)])], true),
        (vec![outside.clone(), json!([vcpu("/a", false, 6)])], true),
        (vec![outside.clone(), json!([vcpu("/a", true, 5)])], true),
        (vec![outside.clone(), json!("nonsense")], true),
    ] {
        let lies = Lies {
            cr4: 1 << 13,
            stats: stats.clone(),
            ..Lies::default()
        };
        let monitor = Hostile::start(test, &lies);
        let guest = attach(&monitor.options(Accelerator::Tcg)).expect("attached");
        let cpus = guest.cpus().expect("answered").expect("registers");
        assert_eq!(cpus[0].may_be_nested, may_be_nested, "{stats:?}");
    }
}

/// Checks the statistics of a real QEMU.
pub fn statistics_of_qemu() {
    let Some(qemu) = super::Qemu::start(Accelerator::Kvm, super::Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    let Some(nesting) = guest.monitor().nesting(DEADLINE) else {
        eprintln!("SKIPPED: this QEMU has no statistics of KVM");
        return;
    };
    assert!(
        Nesting::never_between(Some(&nesting), Some(&nesting), 2),
        "{nesting:?}"
    );
}

/// Checks that a monitor without a vhost-vsock device cannot claim the CID of another guest.
pub fn cids_of_others() {
    let memory = super::Memory::SharedMemfd;
    let Some(qemu) = super::Qemu::start(Accelerator::Kvm, memory) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), qemu.socket("qmp"));
    let devices = json!([{ "name": "vsock0", "type": "child<vhost-vsock-pci>" }]);
    relay.lie(
        "qom-list",
        json!({ "path": "/machine/peripheral" }),
        devices,
    );
    let cid = json!({ "path": "/machine/peripheral/vsock0", "property": "guest-cid" });
    relay.lie("qom-get", cid, json!(7));
    let mut attacher = Command::new(env!("CARGO_BIN_EXE_patchbay-attach"));
    attacher
        .args(["qemu", "--pid", &qemu.child.id().to_string(), "--qmp"])
        .arg(relay.path())
        .arg("--api-socket")
        .arg(folder.path().join("api"))
        .stderr(Stdio::piped());
    let mut attacher = Process(attacher.spawn().expect("it is built"));
    let lines = BufReader::new(attacher.stderr.take().expect("piped")).lines();
    let lines = lines.map_while(Result::ok);
    let said: Vec<_> = lines
        .take_while(|line| !line.starts_with("attached to "))
        .collect();
    let said = said.join("\n");
    assert!(
        said.contains("only QEMU says that CID 7 is this guest's"),
        "{said}"
    );
    assert!(said.contains("has no vhost-vsock device"), "{said}");
}
