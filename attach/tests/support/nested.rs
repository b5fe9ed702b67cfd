// SPDX-License-Identifier: Apache-2.0
//! Tests a stock kernel that runs a nested guest.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;

use patchbay_attach::PauseWay;
use patchbay_attach::kvm::FOLDER;
use patchbay_guest::discovery::Discoverable;
use patchbay_service::keys::ListQuery;

use super::stock::{Boot, boots, modules, wait_for};
use super::{Accelerator, Memory, until};

/// Loads KVM. Starts the nested guest after a line from the second serial port, and ends it after
/// the next line.
const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t devtmpfs d /dev
for name in irqbypass ccp kvm kvm_amd; do
    for file in /modules/*-$name.ko; do [ -e $file ] && /bin/busybox insmod $file; done
done
exec 3</dev/ttyS1
/bin/busybox echo READY
read line <&3
/nested &
read line <&3
/bin/busybox kill -9 $!
wait
/bin/busybox echo ENDED
while :; do /bin/busybox sleep 1000; done
";

/// Runs a guest that spins with paging on. Its memory is two pages that end at 4 GiB: a page
/// directory whose last entry maps the last 4 MiB to themselves, and a page with `jmp $` where a
/// vCPU starts. The program's own pages are at 0x400000, the guest's at 0x401000.
#[rustfmt::skip]
const NESTED: [u8; 233] = [
    // kvm = open("/dev/kvm", O_RDWR)
    0x48, 0x8d, 0x3d, 0xd9, 0, 0, 0, 0xbe, 2, 0, 0, 0, 0xb8, 2, 0, 0, 0, 0x0f, 0x05,
    // vm = ioctl(kvm, KVM_CREATE_VM, 0)
    0x89, 0xc7, 0xbe, 0x01, 0xae, 0, 0, 0x31, 0xd2, 0xe8, 0x97, 0, 0, 0, 0x89, 0xc3,
    // mov dword [0x401ffc], 0xffc00083; mov word [0x402ff0], 0xfeeb
    0xc7, 0x04, 0x25, 0xfc, 0x1f, 0x40, 0, 0x83, 0, 0xc0, 0xff, 0x66, 0xc7, 0x04, 0x25, 0xf0, 0x2f, 0x40, 0, 0xeb, 0xfe,
    // ioctl(vm, KVM_SET_USER_MEMORY_REGION, region)
    0x89, 0xdf, 0xbe, 0x46, 0xae, 0x20, 0x40, 0x48, 0x8d, 0x15, 0x7a, 0, 0, 0, 0xe8, 0x6d, 0, 0, 0,
    // vcpu = ioctl(vm, KVM_CREATE_VCPU, 0)
    0x89, 0xdf, 0xbe, 0x41, 0xae, 0, 0, 0x31, 0xd2, 0xe8, 0x5f, 0, 0, 0, 0x89, 0xc3,
    // ioctl(vcpu, KVM_GET_SREGS, 0x403000)
    0x89, 0xdf, 0xbe, 0x83, 0xae, 0x38, 0x81, 0xba, 0, 0x30, 0x40, 0, 0xe8, 0x4c, 0, 0, 0,
    // CR0 = 0x80000011, CR3 = 0xffffe000, CR4 = 0x10
    0xc7, 0x04, 0x25, 0xe0, 0x30, 0x40, 0, 0x11, 0, 0, 0x80, 0xc7, 0x04, 0x25, 0xf0, 0x30, 0x40, 0, 0, 0xe0, 0xff, 0xff,
    0xc7, 0x04, 0x25, 0xf8, 0x30, 0x40, 0, 0x10, 0, 0, 0,
    // ioctl(vcpu, KVM_SET_SREGS, 0x403000)
    0x89, 0xdf, 0xbe, 0x84, 0xae, 0x38, 0x41, 0xba, 0, 0x30, 0x40, 0, 0xe8, 0x1a, 0, 0, 0,
    // ioctl(vcpu, KVM_RUN, 0); exit(1)
    0x89, 0xdf, 0xbe, 0x80, 0xae, 0, 0, 0x31, 0xd2, 0xe8, 0x0c, 0, 0, 0, 0xbf, 1, 0, 0, 0, 0xb8, 0x3c, 0, 0, 0, 0x0f, 0x05,
    // ioctl: mov eax, 16; syscall; ret
    0xb8, 0x10, 0, 0, 0, 0x0f, 0x05, 0xc3,
    // region: slot 0, no flags, guest-physical address, size, address
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0xe0, 0xff, 0xff, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x40, 0, 0, 0, 0, 0,
    // "/dev/kvm"
    0x2f, 0x64, 0x65, 0x76, 0x2f, 0x6b, 0x76, 0x6d, 0,
];

/// Returns the program as a file: one segment at 0x400000, and zeros behind it up to 0x404000.
fn executable() -> Vec<u8> {
    const HEADERS: usize = 64 + 56;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [0x40_0000 + HEADERS as u64, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    file.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    let size = (HEADERS + NESTED.len()) as u64;
    for word in [0, 0x40_0000, 0x40_0000, size, 0x4000, 0x1000] {
        file.extend(u64::to_le_bytes(word));
    }
    file.extend(NESTED);
    file
}

/// Returns the number of entries into guests of this QEMU's guest so far.
fn entries(pid: u32) -> u64 {
    let guests = fs::read_dir(FOLDER).expect("a folder");
    let prefix = format!("{pid}-");
    let mut guests = guests
        .flatten()
        .filter(|guest| guest.file_name().to_string_lossy().starts_with(&prefix));
    let guest = guests.next().expect("KVM shows the guest");
    let text = fs::read_to_string(guest.path().join("nested_run")).expect("a counter");
    text.trim().parse().expect("a number")
}

/// Checks that the guest's kernel is not searched for while a nested guest runs, and is found
/// afterwards although SVM is still on.
pub fn runs_a_guest() {
    let Some(modules) = modules() else {
        return;
    };
    let flags = fs::read_to_string("/proc/cpuinfo").expect("mounted");
    if !fs::exists(FOLDER).unwrap_or_default() || !flags.contains(" svm ") {
        eprintln!("SKIPPED: it needs SVM, and {FOLDER} to see what KVM counts");
        return;
    }
    let Some(boot) = Boot::with(INIT, &[("nested", &executable())], modules) else {
        return;
    };
    let port = boot.folder.path().join("port");
    let serial = format!("unix:{},server=on,wait=off", port.display());
    let more = ["-cpu", "host", "-serial", &serial];
    let Some(qemu) = boot.start(Accelerator::Kvm, Memory::SharedMemfd, &more) else {
        return;
    };
    wait_for(&boot.console, "READY", 1);
    let mut port = UnixStream::connect(port).expect("QEMU listens");
    port.write_all(b"\n").expect("QEMU reads");
    until("the guest runs a guest", || entries(qemu.child.id()) != 0);
    let (guest, keys) = qemu.keys(PauseWay::Freeze);
    let list = || {
        keys.list(&ListQuery::default())
            .map(|page| assert!(page.total > 1000, "{} keys", page.total))
            .map_err(|error| error.to_string())
    };
    let are_nested = || {
        guest
            .cpus()
            .expect("answered")
            .expect("registers")
            .into_iter()
            .map(|cpu| cpu.may_be_nested)
    };
    for _ in 0..20 {
        let before = entries(qemu.child.id());
        assert!(are_nested().all(|may| may));
        until("the guest enters its guest again", || {
            entries(qemu.child.id()) != before
        });
    }
    let error = list().expect_err("a guest of the guest runs");
    assert!(error.contains("VMX or SVM is on in every vCPU"), "{error}");
    port.write_all(b"\n").expect("QEMU reads");
    wait_for(&boot.console, "ENDED", 1);
    assert!(are_nested().all(|may| !may));
    boots(&boot.console, list);
}
