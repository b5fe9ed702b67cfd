// SPDX-License-Identifier: Apache-2.0
//! Tests guests that are attached to by their process: the host's kernel is asked, not the monitor.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use patchbay_attach::flat_view::{RamRange, Removal};
use patchbay_attach::host::{Host, Logging};
use patchbay_attach::memory::Access;
use patchbay_attach::{Options, PauseWay, Target, attach, process};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::{Guest, Intended, Machine, PausedGuest};
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::conformance;
use patchbay_host_kernel::HostKernel;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};

use super::{
    Accelerator, BOOT_SECTOR, CODE, DEADLINE, END, Memory, Process, Qemu, SCRATCH, begun, checked,
    count, hotplug, options, tcg, until,
};

/// Prints a message and returns false if the host's kernel cannot be read.
pub fn readable() -> bool {
    let opened = HostKernel::open();
    match &opened {
        Ok(kernel) => println!("the host's kernel is read through {}", kernel.transport()),
        Err(error) => eprintln!("SKIPPED: {error}"),
    }
    opened.is_ok()
}

pub fn host(pid: u32) -> Target {
    Target::Host {
        pid,
        started: None,
        dirty_logging_ok: false,
    }
}

/// Waits until the guest counts, because the firmware, which runs first, changes the memory slots.
pub fn counting(qemu: &Qemu) {
    drop(qemu.attach(PauseWay::Freeze));
}

pub fn by_process(qemu: &Qemu) -> Options {
    Options {
        target: host(qemu.child.id()),
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
    let monitor = tcg::believed(&qemu);
    let process = Arc::new(process::Process::open(qemu.child.id()).expect("it runs"));
    let host = Host::open(&process, Logging::Refuse).expect("a guest");
    let theirs = monitor.ram(Instant::now() + DEADLINE).expect("QEMU's map");
    let mut pages = 0;
    for range in &theirs {
        let last = range.addresses.end - 4096;
        let starts = range.addresses.clone().step_by(1 << 20);
        for address in starts.chain([last]) {
            let page = address..address + 4096;
            let expected = monitor
                .host_address(&page, Instant::now() + DEADLINE)
                .expect("QEMU's RAM");
            let found = host.host_address(&page).expect("the kernel's RAM");
            assert_eq!(found, expected, "{address:#x}");
            pages += 1;
        }
    }
    let bytes = |ranges: &[RamRange]| -> u64 {
        let sizes = ranges
            .iter()
            .map(|range| range.addresses.end - range.addresses.start);
        sizes.sum()
    };
    let ours = host.ram(Instant::now() + DEADLINE, |_| Some(Removal::ByVcpu));
    let ours = ours.expect("the kernel's map");
    println!(
        "{pages} addresses agree; {} bytes, QEMU {}",
        bytes(&ours),
        bytes(&theirs)
    );
    assert!(pages > 4000 && ours.iter().any(|range| range.addresses.start == 4 << 30));
    // KVM also has the memory of firmware.
    assert!((0..1 << 20).contains(&(bytes(&ours) - bytes(&theirs))));
    host.host_address(&(1 << 40..1 << 41)).expect_err("no RAM");
}

/// Tests memory, pause and registers without asking QEMU.
pub fn without_monitor() {
    if !readable() {
        return;
    }
    for (memory, access) in [
        (Memory::Private, Access::Auto),
        (Memory::SharedMemfd, Access::Auto),
        (Memory::SharedMemfd, Access::File),
    ] {
        let Some(qemu) = Qemu::start(Accelerator::Kvm, memory) else {
            return;
        };
        counting(&qemu);
        let options = Options {
            access,
            ..by_process(&qemu)
        };
        let guest = Arc::new(attach(&options).expect("attached"));
        assert_eq!(guest.description().name, "counter");
        assert_eq!(guest.description().vcpus, 2);
        qemu.runs(&guest);
        conformance::memory(guest.ram(), SCRATCH, END);
        // A file that the monitor may shorten is mapped only if the options ask for it.
        assert_eq!(access == Access::File, guest.ram().can_exchange());
        conformance::pause(&*guest, || vec![count(&guest)]);
        let theirs = tcg::believed(&qemu);
        for _ in 0..5 {
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
        // A monitor that has paused its guest may be writing a snapshot.
        drop(theirs);
        qemu.other("stop", Value::Null);
        let short = Duration::from_millis(500);
        let error = guest.pause(short).expect_err("its monitor has paused it");
        assert!(matches!(error, PauseError::Late { .. }), "{error}");
        let error = guest.monitor().registers(short).expect_err("they are old");
        assert!(
            error.to_string().contains("does not return from KVM_RUN"),
            "{error}"
        );
        qemu.other("cont", Value::Null);
        qemu.runs(&guest);
        drop(guest.pause(DEADLINE).expect("stopped"));
        assert!(!guest.has_power_button());
        conformance::lifecycle(&guest);
    }
}

/// Checks that a migration that only KVM's dirty log shows prevents changes, even if it begins
/// while the guest is stopped.
pub fn dirty_logging() {
    if !readable() {
        return;
    }
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    counting(&qemu);
    let guest = attach(&by_process(&qemu)).expect("attached");
    qemu.other("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    let migrate = || qemu.other("migrate", json!({ "uri": "exec:cat > /dev/null" }));
    let paused = guest.pause(DEADLINE).expect("stopped");
    migrate();
    // While QEMU turns the log on, the memory slots change during every attempt to read them.
    until("KVM logs dirty pages", || {
        checked(&paused).is_err_and(|error| error.contains("migration"))
    });
    drop(paused);
    qemu.runs(&guest);
    let error = guest.pause(DEADLINE).expect_err("it is under way");
    assert!(error.to_string().contains("dirty logging"), "{error}");
    drop(guest);
    let error = attach(&by_process(&qemu)).expect_err("it is under way");
    assert!(error.to_string().contains("--dirty-logging-ok"), "{error}");
    let anyway = Options {
        target: Target::Host {
            pid: qemu.child.id(),
            started: None,
            dirty_logging_ok: true,
        },
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

/// Checks that a change is not made if memory slots change during it, and that new memory is found.
pub fn slots() {
    if !readable() {
        return;
    }
    let slots = ["-m", "64M,slots=2,maxmem=1G"];
    let memory = Memory::SharedMemfd;
    let Some(qemu) = Qemu::start_program(Accelerator::Kvm, memory, &BOOT_SECTOR, &slots) else {
        return;
    };
    counting(&qemu);
    let guest = attach(&by_process(&qemu)).expect("attached");
    let before = guest.description().memory_bytes;
    let begins = || {
        let nothing = Intended {
            keys: &mut std::iter::empty(),
            writes: &mut std::iter::empty(),
            gates: &mut std::iter::empty(),
            ledger: None,
        };
        guest.will_write(nothing).expect("kept by the watchdog");
        let paused = guest.pause(DEADLINE).expect("stopped");
        assert_eq!(begun(&paused), Ok(()));
        paused
    };
    let paused = begins();
    assert_eq!(checked(&paused), Ok(()));
    let address = hotplug::dimm(&qemu, false, "dimm");
    let error = checked(&paused).expect_err("a slot has been added");
    assert!(error.contains("its memory has changed"), "{error}");
    paused.undone();
    let error = begun(&paused).expect_err("it was not confirmed");
    assert!(error.contains("its memory has changed"), "{error}");
    drop(paused);
    qemu.runs(&guest);
    let changes = guest.memory().changes();
    assert!(guest.memory_changes(true) > changes);
    assert!(guest.description().memory_bytes > before);
    assert_eq!(guest.ram().read_u64(address), Some(0));
    let paused = begins();
    assert_eq!(checked(&paused), Ok(()));
    drop(paused);
    qemu.runs(&guest);
}

/// Checks a process without a VM, one with two VMs, one with an empty VM, and a thread.
pub fn refusals() {
    if !readable() {
        return;
    }
    let own = |target| Options {
        target: host(target),
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
    // Another process has a descriptor of this VM.
    let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).expect("this process");
    let copy = pidfd_getfd(&own, first.as_raw_fd(), PidfdGetfdFlags::empty()).expect("a VM");
    let holder = Command::new("sleep").arg("1000").stdin(copy).spawn();
    let holder = Process(holder.expect("coreutils"));
    let error = refused(holder.id());
    assert!(error.contains("the VM of another process"), "{error}");
    // A duplicate of the descriptor is not a second VM.
    let copy = pidfd_getfd(&own, first.as_raw_fd(), PidfdGetfdFlags::empty()).expect("a VM");
    let error = refused(pid);
    assert!(error.contains("no memory"), "{error}");
    let second = kvm.create_vm().expect("a VM");
    let error = refused(pid);
    assert!(error.contains("has 2 VMs"), "{error}");
    drop((first, copy, second));
    // This process also holds the VMs of other tests' guests.
    let error = refused(pid);
    let none = ["has no KVM VM", "the VM of another process"];
    assert!(none.iter().any(|none| error.contains(none)), "{error}");
}
