// SPDX-License-Identifier: Apache-2.0
//! Tests guests of monitors that do not cooperate: Firecracker, Cloud Hypervisor, libkrun
//! and QEMU.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::{Options, PauseWay, attach, process};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::{Guest, Machine};
use patchbay_guest::testing::conformance;
use patchbay_host_kernel::{HostKernel, Verdict};
use serde_json::json;

use super::process::{host, readable};
use super::programs::{self, program};
use super::stock::{self, Boot};
use super::storm::{self, Size};
use super::{
    Accelerator, COUNTER, DEADLINE, END, Memory, Process, SCRATCH, checked, count, counts_on,
    keys_of, options, until,
};

/// The code of a guest that counts.
const ENTRY: std::ops::Range<u64> = 0x100_0000..0x100_0009;

/// Returns the path of the program that runs a guest with libkrun. Prints a message and returns
/// `None` if it is not built.
fn libkrun_guest() -> Option<PathBuf> {
    programs::libkrun()
        .inspect_err(|reason| eprintln!("SKIPPED: no guest of libkrun: {reason}"))
        .ok()
}

/// Writes an ELF kernel that counts at [`COUNTER`], and returns its path. It is entered in 32-bit
/// mode through its note for PVH, or in 64-bit mode.
pub fn counter(folder: &Path) -> PathBuf {
    const CODE_AT: u64 = 0x1000;
    const NOTE_AT: u64 = 0x800;
    // again: inc dword [COUNTER]; jmp again
    // The address has a SIB byte, because without one it is relative to RIP in 64-bit mode.
    let code = [
        &[0xff, 0x04, 0x25][..],
        &(COUNTER as u32).to_le_bytes(),
        &[0xeb, 0xf7],
    ]
    .concat();
    // XEN_ELFNOTE_PHYS32_ENTRY
    let mut note = [4_u32, 8, 18].map(u32::to_le_bytes).concat();
    note.extend(b"Xen\0");
    note.extend(ENTRY.start.to_le_bytes());
    // ELFCLASS64, ELFDATA2LSB; ET_EXEC, EM_X86_64
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    elf.extend([ENTRY.start, 64, 0].map(u64::to_le_bytes).concat());
    elf.extend(
        [0_u16, 0, 64, 56, 2, 0, 0, 0]
            .map(u16::to_le_bytes)
            .concat(),
    );
    // PT_LOAD and PT_NOTE
    for (kind, at, address, bytes) in [(1_u32, CODE_AT, ENTRY.start, &code), (4, NOTE_AT, 0, &note)]
    {
        let length = bytes.len() as u64;
        elf.extend([kind, 5].map(u32::to_le_bytes).concat());
        let words = [at, address, address, length, length, 4];
        elf.extend(words.map(u64::to_le_bytes).concat());
    }
    elf.resize(NOTE_AT as usize, 0);
    elf.extend(note);
    elf.resize(CODE_AT as usize, 0);
    elf.extend(code);
    let path = folder.join("counter.elf");
    fs::write(&path, elf).expect("room");
    path
}

/// Attaches to a guest as soon as its monitor has started it.
pub fn attached(pid: u32) -> Arc<QemuGuest> {
    let options = Options {
        target: host(pid),
        ..options(PathBuf::new(), PauseWay::Freeze, Accelerator::Kvm)
    };
    let (mut guest, mut last) = (None, String::new());
    until("the monitor has started its guest", || {
        match attach(&options) {
            Ok(attached) => guest = Some(attached),
            Err(error) if error.to_string() == last => {}
            Err(error) => {
                last = error.to_string();
                println!("not yet: {last}");
            }
        }
        guest.is_some()
    });
    Arc::new(guest.expect("attached"))
}

/// Returns `kvm_valid_regs` of each vCPU.
pub fn requests(guest: &QemuGuest) -> Vec<u64> {
    let memory = guest.process().memory().expect("it runs");
    let pages = guest.process().run_pages().expect("it runs");
    let request = |page: u64| {
        let mut word = [0; 8];
        memory.read_exact_at(&mut word, page + 288).expect("mapped");
        u64::from_le_bytes(word)
    };
    pages.into_iter().map(request).collect()
}

/// A monitor whose guest with 2 vCPUs counts.
pub struct Counting {
    monitor: Monitor,
    name: String,
}

/// The process of a monitor, killed on drop.
enum Monitor {
    Child(Process),
    Other(Other),
}

impl Counting {
    fn started(monitor: &mut Command, name: &str) -> Self {
        let monitor = Process(monitor.spawn().expect("the monitor starts"));
        Self {
            monitor: Monitor::Child(monitor),
            name: name.to_owned(),
        }
    }

    pub fn pid(&self) -> u32 {
        match &self.monitor {
            Monitor::Child(child) => child.id(),
            Monitor::Other(other) => other.0,
        }
    }
}

/// Tests the guest of a monitor that `start` starts.
pub fn counting(start: fn(&Path) -> Option<Counting>) {
    let folder = tempfile::tempdir().expect("temporary folder");
    if let Some(monitor) = start(folder.path()) {
        counts(&monitor);
    }
}

/// Tests memory, pause and registers of a monitor whose guest counts, and checks that the monitor
/// keeps running. Then shuts the guest down.
fn counts(monitor: &Counting) {
    let guest = attached(monitor.pid());
    assert_eq!(guest.description().name, monitor.name);
    assert_eq!(guest.description().vcpus, 2);
    assert_eq!(guest.description().memory_bytes, END);
    let runs = || counts_on(&guest);
    runs();
    conformance::memory(guest.ram(), SCRATCH, END);
    conformance::pause(&*guest, || vec![count(&guest)]);
    for _ in 0..20 {
        let found = guest.monitor().registers(DEADLINE).expect("they run");
        assert!(ENTRY.contains(&found[0].rip), "{found:x?}");
        // The second vCPU waits to be started.
        assert_eq!((found.len(), found[0].cr0 & 1), (2, 1), "{found:x?}");
        assert_eq!(requests(&guest), [0, 0]);
        runs();
    }
    assert_eq!(guest.cpus().expect("known").expect("there").len(), 2);
    let paused = guest.pause(DEADLINE).expect("stopped");
    assert_eq!(checked(&paused), Ok(()));
    let held = guest.cpus().expect_err("it is held");
    assert!(held.contains("held stopped"), "{held}");
    drop(paused);
    runs();
    conformance::lifecycle(&guest);
}

/// Writes Firecracker's configuration of a guest that counts, and whose vsock device has this path.
pub fn configuration(folder: &Path, kernel: &Path, vsock: &Path) -> PathBuf {
    let path = folder.join("config.json");
    let config = json!({
        "boot-source": { "kernel_image_path": kernel },
        "drives": [],
        "machine-config": { "vcpu_count": 2, "mem_size_mib": END >> 20 },
        "vsock": { "guest_cid": 3, "uds_path": vsock },
    });
    fs::write(&path, config.to_string()).expect("room");
    path
}

/// Starts Firecracker with its seccomp filters.
pub fn counting_firecracker(folder: &Path) -> Option<Counting> {
    let program = || program("firecracker", folder);
    let program = readable().then(program).flatten()?;
    let vsock = folder.join("v.sock");
    let config = configuration(folder, &counter(folder), &vsock);
    let mut monitor = Command::new(program);
    monitor.args(["--no-api", "--id", "counter-1", "--config-file"]);
    monitor.arg(config).stdin(Stdio::null());
    Some(Counting::started(&mut monitor, "counter-1"))
}

/// Starts Cloud Hypervisor.
pub fn counting_cloud_hypervisor(folder: &Path) -> Option<Counting> {
    let program = || program("cloud-hypervisor", folder);
    let program = readable().then(program).flatten()?;
    let mut monitor = Command::new(program);
    monitor.arg("--kernel").arg(counter(folder));
    monitor.args(["--cpus", "boot=2", "--memory", "size=64M"]);
    monitor.args(["--console", "off", "--serial", "off", "--api-socket"]);
    monitor.arg(folder.join("counter-1.sock"));
    Some(Counting::started(&mut monitor, "counter-1"))
}

/// Returns the command that runs a guest with libkrun. `more` is the kernel's command line, and the
/// path of its initramfs if it has one.
fn libkrun_command(program: PathBuf, size: &Size, kernel: &Path, more: &[&OsStr]) -> Command {
    let mut monitor = Command::new(program);
    monitor.args([size.vcpus.to_string(), size.mib.to_string()]);
    monitor.arg(kernel).args(more).stdin(Stdio::null());
    monitor
}

/// Checks that `patchbay host list` describes a guest of libkrun, which is linked statically.
fn is_listed(pid: u32, memory: u64) {
    let listing = patchbay_host_kernel::list(HostKernel::open).expect("/proc");
    let row = listing.vms.iter().find(|vm| vm.pid == pid);
    let row = row.expect("the guest is listed");
    println!("{row:?}");
    assert_eq!(row.monitor.program, "libkrun-guest");
    assert_eq!(row.name(), format!("libkrun-guest-{pid}"));
    assert_eq!((row.vcpus, row.memory_bytes), (Some(2), Some(memory)));
    assert_eq!(row.verdict, Verdict::Yes);
}

/// Starts libkrun, and checks that `patchbay host list` describes its guest.
pub fn listed_libkrun(folder: &Path) -> Option<Counting> {
    let counting = counting_libkrun(folder)?;
    drop(attached(counting.pid()));
    is_listed(counting.pid(), END);
    Some(counting)
}

/// Starts libkrun.
pub fn counting_libkrun(folder: &Path) -> Option<Counting> {
    let program = readable().then(libkrun_guest).flatten()?;
    let size = Size {
        vcpus: 2,
        mib: END >> 20,
    };
    let mut monitor = libkrun_command(program, &size, &counter(folder), &[OsStr::new("unused")]);
    let mut counting = Counting::started(&mut monitor, "");
    counting.name = format!("libkrun-guest-{}", counting.pid());
    Some(counting)
}

/// A process that is no child of this one, killed on drop.
pub struct Other(pub u32);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = process::Process::open(self.0).map(|process| process.kill());
    }
}

/// Starts a counting guest in Firecracker as its jailer does: as user 65534, with its own root
/// folder and PID namespace. Returns its process and the root folder. Prints a message and returns
/// `None` if this is not possible.
pub fn jailed(folder: &Path) -> Option<(Other, PathBuf)> {
    let program = |name| program(name, folder);
    let programs = || program("firecracker").zip(program("jailer"));
    let (firecracker, jailer) = readable().then(programs).flatten()?;
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: the jailer needs root");
        return None;
    }
    let root = folder.join("jail/firecracker/jailed-1/root");
    fs::create_dir_all(&root).expect("room");
    counter(&root);
    configuration(&root, Path::new("/counter.elf"), Path::new("v.sock"));
    // The program is linked with libraries, and finds only those inside its root folder.
    let libraries = Command::new("ldd").arg(&firecracker).output().expect("ldd");
    let libraries = String::from_utf8(libraries.stdout).expect("text");
    for library in libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let copy = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().expect("a folder")).expect("room");
        fs::copy(library, copy).expect("room");
    }
    let mut jail = Command::new(jailer);
    jail.args(["--id", "jailed-1", "--uid", "65534", "--gid", "65534"]);
    jail.args(["--new-pid-ns", "--cgroup-version", "2", "--exec-file"]);
    jail.arg(firecracker)
        .arg("--chroot-base-dir")
        .arg(folder.join("jail"));
    jail.args(["--", "--no-api", "--config-file", "config.json"]);
    assert!(
        jail.stdin(Stdio::null())
            .status()
            .expect("it starts")
            .success()
    );
    let pid = fs::read_to_string(root.join("firecracker.pid")).expect("it has started");
    Some((Other(pid.trim().parse().expect("a number")), root))
}

/// Starts Firecracker in its jail.
pub fn jailed_firecracker(folder: &Path) -> Option<Counting> {
    let (monitor, _) = jailed(folder)?;
    Some(Counting {
        monitor: Monitor::Other(monitor),
        name: "jailed-1".to_owned(),
    })
}

/// Prepares a guest that changes keys of its own.
fn prepare() -> Option<Boot> {
    readable().then(|| Boot::with(storm::INIT, &[], Vec::new()))?
}

/// Flips keys of a stock kernel without involving its monitor, also while the guest changes keys.
/// Compares the discovered keys and sites with those in the kernel's file.
async fn flips(boot: &Boot, pid: u32, name: &str) {
    let guest = attached(pid);
    println!("{:?}", guest.description());
    let keys = keys_of(&guest);
    let (query, queries, _) = stock::flips(boot, &keys, name, true).await;
    let kernel = fs::read(&boot.kernel).expect("a kernel");
    let report = patchbay_kernel_image::inspect(&kernel, None).expect("a kernel");
    let summary = &report.summary;
    println!(
        "in the file: {} keys, {} sites",
        summary.keys, summary.sites
    );
    let known: BTreeSet<&str> = report.keys.iter().map(|key| key.name.as_str()).collect();
    let listed = keys.list(&query).expect("they are found");
    for key in &listed.keys {
        assert!(known.contains(&*key.name), "{key:?} is not the kernel's");
    }
    storm::same_as_in_the_file(&keys, &report);
    stock::turns_off(&keys, queries).await;
    // Some kernels warn while they boot.
    let complaints = boot.complaints();
    storm::storm(&keys, name).await;
    boot.is_silent();
    assert_eq!(
        boot.complaints(),
        complaints,
        "the guest's kernel complains"
    );
    conformance::lifecycle(&guest);
}

/// Unpacks the kernel into an ELF file and returns its path.
fn vmlinux(boot: &Boot) -> PathBuf {
    let kernel = fs::read(&boot.kernel).expect("a kernel");
    let unpacked = patchbay_kernel_image::unpack(&kernel).expect("a kernel");
    let path = boot.folder.path().join("vmlinux");
    fs::write(&path, &unpacked.elf).expect("room");
    path
}

/// Flips keys of a stock kernel in another monitor. `command` completes the monitor's command line.
/// It is given the kernel as an ELF file.
async fn foreign(name: &str, command: impl Fn(&mut Command, &Boot, &Path)) {
    let Some(boot) = prepare() else {
        return;
    };
    let Some(program) = program(name, boot.folder.path()) else {
        return;
    };
    let vmlinux = vmlinux(&boot);
    let mut monitor = Command::new(program);
    monitor.stdin(Stdio::null());
    command(&mut monitor, &boot, &vmlinux);
    let monitor = Process(monitor.spawn().expect("the monitor starts"));
    flips(&boot, monitor.id(), name).await;
}

/// Tests QEMU with a stock kernel.
pub async fn qemu() {
    let Some(boot) = prepare() else {
        return;
    };
    let Size { vcpus, mib } = Size::given();
    let size = ["-smp", &vcpus.to_string(), "-m", &format!("{mib}M")];
    if let Some(qemu) = boot.start(Accelerator::Kvm, Memory::Private, &size) {
        flips(&boot, qemu.child.id(), "QEMU").await;
    }
}

/// Tests Firecracker with a stock kernel.
pub async fn firecracker() {
    foreign("firecracker", |command, boot, vmlinux| {
        let Size { vcpus, mib } = Size::given();
        let config = json!({
            "boot-source": {
                "kernel_image_path": vmlinux,
                "initrd_path": boot.initrd,
                "boot_args": format!("{} pci=off reboot=k", Boot::COMMAND_LINE),
            },
            "drives": [],
            "machine-config": { "vcpu_count": vcpus, "mem_size_mib": mib },
        });
        let path = boot.folder.path().join("config.json");
        fs::write(&path, config.to_string()).expect("room");
        let console = File::create(&boot.console).expect("room");
        command
            .args(["--no-api", "--id", "firecracker-1", "--config-file"])
            .arg(path)
            .stdout(console);
    })
    .await;
}

/// Tests Cloud Hypervisor with a stock kernel.
pub async fn cloud_hypervisor() {
    foreign("cloud-hypervisor", |command, boot, vmlinux| {
        let Size { vcpus, mib } = Size::given();
        let path = |path: &Path| path.display().to_string();
        let serial = format!("file={}", boot.console.display());
        command
            .args([
                "--kernel",
                &path(vmlinux),
                "--initramfs",
                &path(&boot.initrd),
            ])
            .args([
                "--cmdline",
                Boot::COMMAND_LINE,
                "--console",
                "off",
                "--serial",
                &serial,
            ])
            .arg("--cpus")
            .arg(format!("boot={vcpus}"))
            .arg("--memory")
            .arg(format!("size={mib}M"));
    })
    .await;
}

/// Tests libkrun with a stock kernel.
pub async fn libkrun() {
    let Some(boot) = prepare() else {
        return;
    };
    let Some(program) = libkrun_guest() else {
        return;
    };
    let more = [OsStr::new(Boot::COMMAND_LINE), boot.initrd.as_os_str()];
    let mut monitor = libkrun_command(program, &Size::given(), &vmlinux(&boot), &more);
    let console = File::create(&boot.console).expect("room");
    let monitor = Process(monitor.stdout(console).spawn().expect("the monitor starts"));
    flips(&boot, monitor.id(), "libkrun").await;
}
