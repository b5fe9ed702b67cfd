// SPDX-License-Identifier: Apache-2.0
//! Guests that are attached to by their process alone: the host's kernel is asked, not the monitor.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use kvm_ioctls::Kvm;
use patchbay_attach::host::Host;
use patchbay_attach::monitor::Monitor;
use patchbay_attach::qmp::Qmp;
use patchbay_attach::{Options, PauseWay, Target, attach, process};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::{Guest, Machine};
use patchbay_guest::testing::conformance;
use patchbay_host_kernel::HostKernel;
use serde_json::{Value, json};

use super::stock::{self, Boot};
use super::{
    Accelerator, CODE, DEADLINE, END, Memory, Process, Qemu, SCRATCH, checked, count, keys_of,
    options, until,
};

/// A folder with the programs `firecracker` and `cloud-hypervisor`, which may be compressed by xz.
const MONITORS: &str = "PATCHBAY_TEST_MONITORS";

/// Prints a message and returns false if the host's kernel cannot be read.
fn readable() -> bool {
    let opened = HostKernel::open();
    match &opened {
        Ok(kernel) => println!("the host's kernel is read through {}", kernel.transport()),
        Err(error) => eprintln!("SKIPPED: {error}"),
    }
    opened.is_ok()
}

fn by_process(qemu: &Qemu) -> Options {
    Options {
        target: Target::Host(qemu.child.id()),
        ..qemu.options(PauseWay::Freeze)
    }
}

/// Compares the map of KVM's slots with QEMU's own, for a guest with memory on both sides of the
/// hole below 4 GiB.
pub fn same_map() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start_with(Accelerator::Kvm, Memory::Private, "4G", &[]) else {
        return;
    };
    let qmp = Qmp::connect(&qemu.socket("other"), DEADLINE, Box::new(|_| ()));
    let monitor = Monitor::Socket(qmp.expect("a second monitor"));
    let process = process::Process::open(qemu.child.id()).expect("it runs");
    let host = Host::open(&process, false).expect("a guest");
    let theirs = monitor.ram().expect("QEMU's map");
    let mut pages = 0;
    for range in &theirs {
        let last = range.addresses.end - 4096;
        let starts = range.addresses.clone().step_by(1 << 20);
        for address in starts.chain([last]) {
            let expected = monitor.host_address(address, DEADLINE).expect("QEMU's RAM");
            let found = host.host_address(address).expect("the kernel's RAM");
            assert_eq!(found, expected, "{address:#x}");
            pages += 1;
        }
    }
    let bytes = |ranges: &[patchbay_attach::flat_view::RamRange]| -> u64 {
        let sizes = ranges
            .iter()
            .map(|range| range.addresses.end - range.addresses.start);
        sizes.sum()
    };
    let ours = host.ram().expect("the kernel's map");
    println!(
        "{pages} addresses agree; {} bytes, QEMU {}",
        bytes(&ours),
        bytes(&theirs)
    );
    assert!(pages > 4000 && ours.iter().any(|range| range.addresses.start == 4 << 30));
    // KVM also has the memory of firmware.
    assert!((0..1 << 20).contains(&(bytes(&ours) - bytes(&theirs))));
    host.host_address(1 << 40).expect_err("no RAM");
}

/// Tests memory, pause and registers without a word of QEMU's.
pub fn without_monitor() {
    if !readable() {
        return;
    }
    for (memory, mapped) in [(Memory::Private, false), (Memory::SharedMemfd, true)] {
        let Some(qemu) = Qemu::start(Accelerator::Kvm, memory) else {
            return;
        };
        let guest = Arc::new(attach(&by_process(&qemu)).expect("attached"));
        assert_eq!(guest.description().name, "counter");
        assert_eq!(guest.description().vcpus, 2);
        qemu.runs(&guest);
        conformance::memory(guest.ram(), SCRATCH, END);
        assert_eq!(mapped, guest.ram().can_exchange());
        conformance::pause(&*guest, || vec![count(&guest)]);
        let theirs = Monitor::Socket(
            Qmp::connect(&qemu.socket("other"), DEADLINE, Box::new(|_| ())).expect("a monitor"),
        );
        for _ in 0..20 {
            let found = guest.monitor().registers(DEADLINE).expect("they run");
            assert_eq!(found.len(), 2);
            assert!(CODE.contains(&found[0].rip), "{found:x?}");
            let mut expected = theirs.registers(DEADLINE).expect("QEMU shows them");
            expected[0].rip = found[0].rip;
            assert_eq!(found, expected);
        }
        assert_eq!(guest.cpus().expect("known").expect("there").len(), 2);
        for way in [PauseWay::Freeze, PauseWay::Qmp] {
            let twice = Options {
                pause: way,
                ..by_process(&qemu)
            };
            attach(&twice).expect_err("it is attached to");
        }
        let paused = guest.pause(DEADLINE).expect("stopped");
        assert_eq!(checked(&paused), Ok(()));
        drop(paused);
        conformance::lifecycle(&guest);
    }
}

/// Checks that a migration, which only KVM's dirty log shows, prevents changes, even one that begins
/// while the guest is stopped.
pub fn dirty_logging() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let guest = attach(&by_process(&qemu)).expect("attached");
    qemu.other("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    let migrate = || qemu.other("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    let paused = guest.pause(DEADLINE).expect("stopped");
    migrate();
    until("KVM logs dirty pages", || checked(&paused).is_err());
    let error = checked(&paused).expect_err("a migration has begun");
    assert!(error.contains("migration"), "{error}");
    drop(paused);
    qemu.runs(&guest);
    let error = guest.pause(DEADLINE).expect_err("it is under way");
    assert!(error.to_string().contains("dirty logging"), "{error}");
    drop(guest);
    let error = attach(&by_process(&qemu)).expect_err("it is under way");
    assert!(error.to_string().contains("--dirty-logging-ok"), "{error}");
    let anyway = Options {
        dirty_logging_ok: true,
        ..by_process(&qemu)
    };
    let guest = attach(&anyway).expect("the operator says so");
    let paused = guest.pause(DEADLINE).expect("stopped");
    assert_eq!(checked(&paused), Ok(()));
    drop(paused);
    drop(guest);
    qemu.other("migrate_cancel", Value::Null);
    until("the dirty log is off", || {
        attach(&by_process(&qemu)).is_ok()
    });
}

/// Checks processes without a VM, with two, with an empty one, and a thread.
pub fn refusals() {
    if !readable() {
        return;
    }
    let own = |target| Options {
        target: Target::Host(target),
        ..options(PathBuf::new(), PauseWay::Freeze, Accelerator::Kvm)
    };
    let refused = |target| attach(&own(target)).expect_err("refused").to_string();
    let pid = std::process::id();
    let thread = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get());
    let error = refused(thread.join().expect("no panic").cast_unsigned());
    assert!(error.contains("process id"), "{error}");
    let sleep = Command::new("sleep").arg("1000").spawn();
    let sleep = Process(sleep.expect("coreutils"));
    assert!(refused(sleep.id()).contains("has no KVM VM"));
    let kvm = Kvm::new().expect("KVM");
    let first = kvm.create_vm().expect("a VM");
    let error = refused(pid);
    assert!(error.contains("no memory"), "{error}");
    let second = kvm.create_vm().expect("a VM");
    let error = refused(pid);
    assert!(error.contains("several VMs"), "{error}");
    drop((first, second));
    assert!(refused(pid).contains("has no KVM VM"));
}

/// Returns the path of a monitor's program. Prints a message and returns `None` if there is none.
fn program(name: &str, folder: &Path) -> Option<PathBuf> {
    let monitors = std::env::var_os(MONITORS).map(PathBuf::from);
    let found = monitors.and_then(|monitors| {
        let program = monitors.join(name);
        if program.is_file() {
            return Some(program);
        }
        let packed = monitors.join(format!("{name}.xz"));
        packed.is_file().then(|| {
            let program = folder.join(name);
            let output = File::create(&program).expect("room");
            let mut xz = Command::new("xz");
            let unpacked = xz.arg("-dc").arg(packed).stdout(output).status();
            assert!(unpacked.expect("xz").success());
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("own file");
            program
        })
    });
    if found.is_none() {
        eprintln!("SKIPPED: {MONITORS} names no folder with {name}");
    }
    found
}

/// Flips keys of a stock kernel that another monitor runs, which does not know of it. `command`
/// starts the monitor with this kernel as an ELF file.
async fn foreign(name: &str, command: impl Fn(&mut Command, &Boot, &Path)) {
    if !readable() {
        return;
    }
    let Some(boot) = Boot::prepare() else {
        return;
    };
    let Some(program) = program(name, boot.folder.path()) else {
        return;
    };
    let kernel = fs::read(&boot.kernel).expect("a kernel");
    let unpacked = patchbay_kernel_image::unpack(&kernel).expect("a kernel");
    let vmlinux = boot.folder.path().join("vmlinux");
    fs::write(&vmlinux, &unpacked.elf).expect("room");
    let mut monitor = Command::new(program);
    monitor.stdin(Stdio::null());
    command(&mut monitor, &boot, &vmlinux);
    let monitor = Process(monitor.spawn().expect("the monitor starts"));
    let by_process = Options {
        target: Target::Host(monitor.id()),
        ..options(PathBuf::new(), PauseWay::Freeze, Accelerator::Kvm)
    };
    let mut guest = None;
    until("the monitor has started its guest", || {
        let attached = attach(&by_process);
        if let Err(error) = &attached {
            println!("not yet: {error}");
        }
        guest = attached.ok();
        guest.is_some()
    });
    let guest = Arc::new(guest.expect("attached"));
    println!("{:?}", guest.description());
    let keys = keys_of(&guest);
    let (query, queries, _) = stock::flips(&boot, &keys, name, true).await;
    let report = patchbay_kernel_image::inspect(&kernel, None).expect("a kernel");
    println!(
        "in the file: {} keys, {} sites",
        report.summary.keys, report.summary.sites
    );
    let listed = keys.list(&query).expect("they are found");
    let unknown = listed.keys.iter().filter(|key| {
        let mut names = report.keys.iter().map(|known| known.name.as_str());
        names.all(|known| known != &*key.name)
    });
    assert_eq!(unknown.count(), 0, "a key is not the kernel's");
    stock::turns_off(&keys, queries).await;
    boot.is_silent();
    conformance::lifecycle(&guest);
}

/// Firecracker, with its seccomp filters.
pub async fn firecracker() {
    foreign("firecracker", |command, boot, vmlinux| {
        let config = json!({
            "boot-source": {
                "kernel_image_path": vmlinux,
                "initrd_path": boot.initrd,
                "boot_args": format!("{} pci=off reboot=k", Boot::COMMAND_LINE),
            },
            "drives": [],
            "machine-config": { "vcpu_count": 2, "mem_size_mib": 512 },
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

/// Cloud Hypervisor.
pub async fn cloud_hypervisor() {
    foreign("cloud-hypervisor", |command, boot, vmlinux| {
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
            .args(["--cpus", "boot=2", "--memory", "size=512M"]);
    })
    .await;
}
