// SPDX-License-Identifier: Apache-2.0

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::testing::{DESCRIPTOR, LOW, NUMBER, World};
use crate::vm::{Protection, Slot, Vcpu};

fn none() -> Result<HostKernel, OpenError> {
    Err(OpenError(vec![]))
}

/// Creates a process in a folder like /proc.
fn process(proc: &Path, pid: u32, program: &str, line: &str, descriptors: &[&str]) {
    let folder = proc.join(pid.to_string());
    fs::create_dir_all(folder.join("fd")).expect("room");
    for (number, target) in descriptors.iter().enumerate() {
        symlink(target, folder.join("fd").join(number.to_string())).expect("room");
    }
    symlink(format!("/usr/bin/{program}"), folder.join("exe")).expect("room");
    fs::write(folder.join("cmdline"), line.replace(' ', "\0")).expect("room");
    fs::write(folder.join("maps"), "").expect("room");
}

const VM_LINK: &str = "anon_inode:kvm-vm";

#[test]
fn processes_with_vms_are_listed_without_the_kernel() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let vcpus = ["anon_inode:kvm-vcpu:0", "anon_inode:kvm-vcpu:1"];
    let qemu = [&[VM_LINK, "/dev/null"], &vcpus[..]].concat();
    process(
        proc.path(),
        20,
        "qemu-kvm",
        "qemu-kvm -qmp unix:q -name web",
        &qemu,
    );
    process(
        proc.path(),
        3,
        "firecracker",
        "firecracker --id i",
        &["/dev/kvm", VM_LINK],
    );
    process(proc.path(), 4, "two", "two", &[VM_LINK, VM_LINK, vcpus[0]]);
    process(
        proc.path(),
        5,
        "sh",
        "sh",
        &["/dev/kvm", "anon_inode:[eventfd]"],
    );
    fs::write(proc.path().join("uptime"), "1").expect("room");
    let listing = list_in(proc.path(), none).expect("readable");
    let rows: Vec<_> = listing
        .vms
        .iter()
        .map(|vm| (vm.pid, vm.descriptor, vm.name(), vm.vcpus))
        .collect();
    let rows: Vec<_> = rows
        .iter()
        .map(|(pid, at, name, vcpus)| (*pid, *at, name.as_str(), *vcpus))
        .collect();
    assert_eq!(
        rows,
        [
            (3, 1, "i", Some(0)),
            (4, 0, "two-4", None),
            (4, 1, "two-4", None),
            (20, 0, "web", Some(2)),
        ]
    );
    assert!(listing.vms.iter().all(|vm| vm.memory_bytes.is_none()));
    let is_unknown = |vm: &ListedVm| matches!(vm.verdict, Verdict::Unknown(_));
    assert!(listing.vms.iter().all(is_unknown), "{listing:?}");
    assert_eq!(listing.remarks.len(), 1, "{:?}", listing.remarks);
    assert!(listing.remarks[0].contains("cannot be read"));
}

#[test]
fn a_host_without_vms_needs_no_remark() {
    let proc = tempfile::tempdir().expect("temporary folder");
    assert_eq!(
        list_in(proc.path(), none).expect("readable"),
        Listing::default()
    );
    list_in(Path::new("/nonexistent"), none).expect_err("no /proc");
}

#[test]
fn processes_of_other_users_are_counted() {
    let proc = tempfile::tempdir().expect("temporary folder");
    process(proc.path(), 3, "x", "x", &[VM_LINK]);
    let folder = proc.path().join("3/fd");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o000)).expect("own file");
    if fs::read_dir(&folder).is_ok() {
        eprintln!("SKIPPED: this user may read everything");
        return;
    }
    let listing = list_in(proc.path(), none).expect("readable");
    let remark = listing.hidden_remark().expect("one");
    assert!(remark.starts_with("1 processes"), "{listing:?}");
}

#[test]
fn yama_forbids_it_without_a_capability() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let write = |path: &str, text: &str| {
        let path = proc.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("room");
        fs::write(path, text).expect("room");
    };
    assert_eq!(ptrace_refusal(proc.path()), None);
    for (scope, capabilities, refused) in [
        ("0\n", "0", false),
        ("1\n", "0000000000080000", false),
        ("2\n", "0000000000080000", false),
        ("1\n", "000001fffff7ffff", true),
        ("2\n", "x", true),
        ("3\n", "000001ffffffffff", true),
    ] {
        write("sys/kernel/yama/ptrace_scope", scope);
        write(
            "self/status",
            &format!("Name:\tx\nCapEff:\t{capabilities}\n"),
        );
        assert_eq!(
            ptrace_refusal(proc.path()).is_some(),
            refused,
            "{scope} {capabilities}"
        );
    }
}

fn vm(slots: &[(u64, bool, bool)]) -> Vm {
    let slot = |(index, &(mib, logs, memfd)): (u64, &(u64, bool, bool))| Slot {
        space: 0,
        guest_address: index << 32,
        bytes: mib << 20,
        process_address: 0x7f00_0000_0000 + (index << 32),
        readonly: false,
        guest_memfd: memfd,
        logs_dirty_pages: logs,
    };
    Vm {
        found: crate::vm::Found::default(),
        slots: (0..).zip(slots).map(slot).collect(),
        generations: vec![2],
        vcpus: vec![Vcpu { thread: Some(7) }; 2],
        protection: Protection::None,
        dirty_ring_bytes: 0,
    }
}

#[test]
fn what_the_kernel_knows_decides() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let line = "qemu-kvm -qmp unix:q";
    process(proc.path(), 20, "qemu-kvm", line, &[VM_LINK]);
    let candidate = Candidate::open(&proc.path().join("20"), 20, None);
    let candidate = candidate.expect("readable").expect("it has a VM");
    let listed = |vm: &Vm| candidate.listed(0, Some(Ok(vm.clone())), true, &None);
    let fine = vm(&[(512, false, false), (16, true, false)]);
    let row = listed(&fine);
    assert_eq!(row.verdict, Verdict::Yes);
    assert_eq!((row.vcpus, row.memory_bytes), (Some(2), Some(528 << 20)));
    assert_eq!(row.dirty_logging, Some(DirtyLogging::Part));
    let closed = Vm {
        protection: Protection::Protected("a test"),
        ..fine.clone()
    };
    let ring = Vm {
        dirty_ring_bytes: 4096,
        ..fine.clone()
    };
    for (vm, reason) in [
        (closed, "closed to its host, because a test"),
        (ring, "dirty pages of the guest"),
        (
            vm(&[(512, true, false), (16, true, false)]),
            "dirty pages of the guest",
        ),
        (vm(&[(512, false, true)]), "guest_memfd"),
        (vm(&[]), "no memory"),
    ] {
        let Verdict::No(reasons) = listed(&vm).verdict else {
            panic!("{vm:?} is accepted");
        };
        assert!(
            reasons.len() == 1 && reasons[0].contains(reason),
            "{reasons:?}"
        );
    }
    let unknown = Vm {
        protection: Protection::Unknown("a test"),
        ..fine.clone()
    };
    assert!(matches!(listed(&unknown).verdict, Verdict::Unknown(why) if why.contains("a test")));
    let several = candidate.listed(0, Some(Ok(fine.clone())), false, &None);
    assert!(matches!(several.verdict, Verdict::No(why) if why[0].contains("several VMs")));
    let mut waits = fine.clone();
    waits.vcpus[1].thread = None;
    assert!(matches!(listed(&waits).verdict, Verdict::No(why) if why[0].contains("has not run")));
    let failed = candidate.listed(0, Some(Err(WalkError::Busy("it"))), true, &None);
    assert!(matches!(failed.verdict, Verdict::Unknown(_)));
    let traced = candidate.listed(0, Some(Ok(fine)), true, &Some("yama".to_owned()));
    assert_eq!(traced.verdict, Verdict::No(vec!["yama".to_owned()]));
}

#[test]
fn what_is_not_listed_is_told() {
    let proc = tempfile::tempdir().expect("temporary folder");
    process(proc.path(), 3, "x", "x", &["anon_inode:kvm-vcpu:0"]);
    process(proc.path(), 4, "x", "x", &[VM_LINK; MAX_VMS]);
    process(proc.path(), 5, "x", "x", &[VM_LINK; MAX_VMS + 1]);
    process(proc.path(), 6, "x", "x", &[VM_LINK; MAX_DESCRIPTORS + 1]);
    let listing = list_in(proc.path(), none).expect("readable");
    assert_eq!(listing.vms.len(), 3 * MAX_VMS);
    assert_eq!(listing.remarks.len(), 4, "{:?}", listing.remarks);
    assert!(listing.remarks[0].starts_with("process 3 runs vCPUs of a VM"));
    assert!(listing.remarks[1].starts_with("process 5 has more than 64 VMs"));
    assert!(listing.remarks[2].starts_with("process 6 has more than 1024 descriptors"));
}

/// The monitor has a duplicate of its VM's descriptor, and a descriptor of another monitor's VM.
#[test]
fn a_monitor_that_holds_the_vm_of_another_has_one() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let mut descriptors = vec!["anon_inode:kvm-vcpu:0"; DESCRIPTOR as usize];
    descriptors.extend([VM_LINK; 3]);
    let line = "qemu-kvm -qmp unix:q";
    process(proc.path(), NUMBER, "qemu-kvm", line, &descriptors);
    let world = World::new(true, &[LOW]);
    world.more_descriptors();
    let listing = list_in(proc.path(), || Ok(world.kernel())).expect("readable");
    let [vm] = &listing.vms[..] else {
        panic!("{listing:?}");
    };
    assert_eq!((vm.pid, vm.descriptor), (NUMBER, DESCRIPTOR));
    assert_eq!(vm.vcpus, Some(2));
    let waits = "one of its vCPUs has not run yet, or has lost its thread";
    assert_eq!(vm.verdict, Verdict::No(vec![waits.to_owned()]));
    assert_eq!(listing.remarks, [""; 0]);
}

#[test]
fn a_scan_reads_the_kernel_only_for_what_has_changed() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let mut descriptors = vec!["/dev/null"; DESCRIPTOR as usize];
    descriptors.push(VM_LINK);
    process(
        proc.path(),
        NUMBER,
        "qemu-kvm",
        "qemu-kvm -name web",
        &descriptors,
    );
    let path = proc.path().join(NUMBER.to_string());
    let start = |ticks: u32| {
        let stat = format!("20 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0");
        fs::write(path.join("stat"), stat).expect("room");
    };
    start(70);
    let world = World::new(true, &[LOW]);
    let mut scanner = Scanner::in_folder(proc.path(), world.kernel());
    let mut scan = || {
        let before = world.reads();
        let listing = scanner.scan().expect("readable");
        let [vm] = &listing.vms[..] else {
            panic!("{listing:?}");
        };
        (vm.clone(), world.reads() > before)
    };
    // One of the process's vCPUs has not run yet, so the process is read again.
    for _ in 0..2 {
        let (vm, has_read) = scan();
        assert!(matches!(vm.verdict, Verdict::No(_)) && has_read);
    }
    world.both_run();
    let (vm, has_read) = scan();
    assert_eq!((&vm.verdict, has_read), (&Verdict::Yes, true));
    assert_eq!((vm.name(), vm.started), ("web".to_owned(), Some(70)));
    assert_eq!(scan(), (vm.clone(), false));
    // Another process has the number now.
    start(71);
    let (later, has_read) = scan();
    assert_eq!((later.started, has_read), (Some(71), true));
    assert_eq!(scan(), (later, false));
    symlink("anon_inode:kvm-vcpu:0", path.join("fd/99")).expect("room");
    assert!(scan().1, "it has another vCPU");
    fs::remove_dir_all(&path).expect("own folder");
    assert_eq!(scanner.scan().expect("readable"), Listing::default());
    assert!(scanner.known.is_empty());
}

/// A host may have more VMs than this process may have descriptors.
#[test]
fn folders_of_processes_are_not_kept_open() {
    let proc = tempfile::tempdir().expect("temporary folder");
    process(proc.path(), 20, "x", "x", &[VM_LINK]);
    let path = proc.path().join("20");
    let _candidate = Candidate::open(&path, 20, None).expect("readable");
    for entry in fs::read_dir("/proc/self/fd").expect("mounted").flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        assert_ne!(target, path);
    }
}

#[test]
fn a_process_with_the_number_of_another_is_not_listed() {
    let proc = tempfile::tempdir().expect("temporary folder");
    process(proc.path(), 20, "x", "x", &[VM_LINK, "/dev/kvm"]);
    let path = proc.path().join("20");
    let start = |ticks: u32| {
        let stat = format!("20 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0");
        fs::write(path.join("stat"), stat).expect("room");
    };
    start(70);
    let candidate = Candidate::open(&path, 20, None).expect("readable");
    let candidate = candidate.expect("it has a VM");
    assert!(candidate.still_has(0) && !candidate.still_has(1) && !candidate.still_has(2));
    start(71);
    assert!(!candidate.still_has(0));
    assert_eq!(candidate.vms(None).len(), 0);
}

#[test]
fn only_processes_that_have_ended_vanish() {
    let proc = tempfile::tempdir().expect("temporary folder");
    fs::create_dir(proc.path().join("3")).expect("room");
    assert_eq!(
        list_in(proc.path(), none).expect("readable"),
        Listing::default()
    );
    // A file in place of the process's folder gives ENOTDIR.
    fs::write(proc.path().join("4"), "").expect("room");
    let listing = list_in(proc.path(), none).expect("readable");
    assert!(
        listing.remarks[0].starts_with("1 processes could not"),
        "{listing:?}"
    );
    let mut failures = Failures::default();
    for number in [2, 3, 24, 24] {
        failures.add(io::Error::from_raw_os_error(number));
    }
    let remark = failures.remark().expect("EMFILE");
    assert!(
        remark.starts_with("2 ") && remark.contains("os error 24"),
        "{remark}"
    );
}

#[test]
fn threads_of_the_kernel_are_known_by_their_flags() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (stat, is_one) in [
        ("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0", true),
        (
            "9 (a) S 0 0 0 0 -1 2129984 0) S 1 9 9 0 -1 4194560 0",
            false,
        ),
        ("9 (x) S", false),
        ("", false),
    ] {
        fs::write(folder.path().join("stat"), stat).expect("room");
        assert_eq!(is_kernel_thread(folder.path()), is_one, "{stat}");
    }
    assert!(!is_kernel_thread(Path::new("/nonexistent")));
}

#[test]
fn slots_of_kvm_itself_are_no_ram() {
    let mut logged = vm(&[(512, true, false)]);
    for pages in 1..=4 {
        let slot = Slot {
            guest_address: 0xfee0_0000,
            bytes: pages * 4096,
            logs_dirty_pages: false,
            process_address: 0x7000_0000_0000,
            ..logged.slots[0]
        };
        logged.slots.push(slot);
        let is_own = pages <= 3;
        assert_eq!(logged.ram_bytes() == 512 << 20, is_own, "{pages}");
        assert_eq!(
            logged.dirty_logging() == DirtyLogging::All,
            is_own,
            "{pages}"
        );
        logged.slots.pop();
    }
}

/// A process may replace the VM at a descriptor, and the kernel may use the old VM's address for
/// the VM of another process.
#[test]
fn a_known_process_that_has_replaced_its_vm_hides_no_other_vm() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let mut descriptors = vec!["/dev/null"; DESCRIPTOR as usize];
    descriptors.push(VM_LINK);
    let stat = "20 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 70 0";
    for pid in [20, NUMBER] {
        process(proc.path(), pid, "qemu-kvm", "qemu-kvm", &descriptors);
        fs::write(proc.path().join(format!("{pid}/stat")), stat).expect("room");
    }
    let world = World::new(true, &[LOW]);
    world.both_run();
    let mut scanner = Scanner::in_folder(proc.path(), world.kernel());
    let scan = |scanner: &mut Scanner| {
        let listing = scanner.scan().expect("readable");
        let pids = listing.vms.iter().map(|vm| vm.pid);
        pids.collect::<Vec<u32>>()
    };
    assert_eq!(scan(&mut scanner), [20, NUMBER]);
    // Process 20 had this VM at the last scan. Process 1000 is new.
    let row = scanner.known.remove(&NUMBER).expect("attachable");
    assert!(scanner.known.is_empty());
    let known = row.of_process(proc.path(), 20);
    scanner.known.insert(20, known);
    assert_eq!(scan(&mut scanner), [NUMBER]);
    assert!(scanner.known.contains_key(&NUMBER) && scanner.known.len() == 1);
    // Process 20 is read again.
    assert_eq!(scan(&mut scanner), [20, NUMBER]);
}

#[test]
fn the_user_of_a_process_is_its_real_user() {
    let proc = tempfile::tempdir().expect("temporary folder");
    process(proc.path(), 20, "x", "x", &[VM_LINK]);
    let user = || {
        let listing = list_in(proc.path(), none).expect("readable");
        listing.vms[0].user
    };
    assert_eq!(user(), None);
    let status = proc.path().join("20/status");
    // A program that the user 1000 has started and that has the rights of root.
    fs::write(&status, "Name:\tUid:\t0\nUid:\t1000\t0\t0\t0\n").expect("room");
    assert_eq!(user(), Some(1000));
    let is_contained = |namespaces: &str| {
        fs::write(&status, format!("Uid:\t0\t0\t0\t0\n{namespaces}")).expect("room");
        let listing = list_in(proc.path(), none).expect("readable");
        assert_eq!(listing.vms[0].user, Some(0));
        listing.vms[0].is_contained
    };
    assert!(!is_contained("") && !is_contained("NSpid:\t20\n"));
    assert!(is_contained("NSpid:\t20\t1\n") && is_contained("NSpid:\t20\t7\t1\n"));
    for broken in ["Uid:\n", "Uid:\tx\n", ""] {
        fs::write(&status, broken).expect("room");
        assert_eq!(user(), None, "{broken}");
    }
}

#[test]
fn descriptors_without_end_are_not_all_looked_at() {
    let proc = tempfile::tempdir().expect("temporary folder");
    let mut descriptors = vec!["/dev/null"; MAX_LOOKED_AT];
    descriptors.push(VM_LINK);
    process(proc.path(), 20, "x", "x", &descriptors);
    let path = proc.path().join("20");
    let count = || {
        let candidate = Candidate::open(&path, 20, None).expect("readable");
        candidate.map(|candidate| (candidate.vms.len(), candidate.has_more))
    };
    // The order of the descriptors in a temporary folder is not known.
    fs::remove_file(path.join(format!("fd/{MAX_LOOKED_AT}"))).expect("own file");
    assert_eq!(count(), None);
    for number in 0..MAX_LOOKED_AT {
        let path = path.join(format!("fd/{number}"));
        fs::remove_file(&path).expect("own file");
        symlink("anon_inode:kvm-vcpu:0", path).expect("room");
    }
    assert_eq!(count(), Some((0, false)));
    symlink("/dev/null", path.join("fd/x")).expect("room");
    assert_eq!(count(), Some((0, true)));
}
