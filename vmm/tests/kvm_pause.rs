// SPDX-License-Identifier: Apache-2.0

//! Tests the pause on a guest that consists of one branch site.

mod bare_metal;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bare_metal::{
    CODE, JMP, LOOP, NOP, NOT_TAKEN, SITE, TAKEN, branch_code, branch_guest, counters, raw,
    spinning, started, wait_until, watchdog,
};
use patchbay_guest::requests::GuestRequests;
use patchbay_vmm::config::RawEntry;
use patchbay_vmm::pause::PauseError;
use patchbay_vmm::request::{MSR_INDEX, NoRequests};
use patchbay_vmm::vm::{ExitReason, Vm};

/// Timeout that no correct run reaches.
const DEADLINE: Duration = Duration::from_secs(30);

/// Number of rounds that a vCPU has made since it started.
fn rounds(vm: &Vm, vcpu: u8) -> u64 {
    let counters = counters(vm.ram(), vcpu);
    counters.taken + counters.not_taken + counters.torn
}

#[test]
fn ten_thousand_paused_flips_and_not_one_torn() {
    let _watchdog = watchdog(300);
    let Some(vm) = branch_guest(2) else { return };
    // Each vCPU may still count the old branch once, if it stopped between the branch and its
    // counter.
    let mut before = [0, 1].map(|vcpu| counters(vm.ram(), vcpu));
    let mut old_side_allowed = [u64::MAX; 2];
    for flip in 0..10_000 {
        let to_taken = flip % 2 == 0;
        let paused = vm.pause(DEADLINE).unwrap();
        let rips: [u64; 2] = paused.rips().try_into().unwrap();
        assert!(rips.iter().all(|rip| !(SITE + 1..NOT_TAKEN).contains(rip)));
        for vcpu in [0, 1] {
            let now = counters(vm.ram(), vcpu);
            let was = before[usize::from(vcpu)];
            // Since the previous flip, the branch has had its current encoding.
            let (old_side, new_side) = if to_taken {
                (now.taken - was.taken, now.not_taken - was.not_taken)
            } else {
                (now.not_taken - was.not_taken, now.taken - was.taken)
            };
            assert_eq!(now.torn, 0, "flip {flip}, vCPU {vcpu}");
            assert!(
                old_side <= old_side_allowed[usize::from(vcpu)],
                "flip {flip}: vCPU {vcpu} took the old branch {old_side} times and the new one {new_side} times"
            );
            let pending = if to_taken { NOT_TAKEN } else { TAKEN };
            old_side_allowed[usize::from(vcpu)] = u64::from(rips[usize::from(vcpu)] == pending);
            before[usize::from(vcpu)] = now;
        }
        let (from, to) = if to_taken { (NOP, JMP) } else { (JMP, NOP) };
        let mut site = [0; 5];
        vm.ram().read(SITE, &mut site).unwrap();
        assert_eq!(site, from);
        vm.ram().write(SITE, &to).unwrap();
        drop(paused);
        for vcpu in [0, 1] {
            let was = before[usize::from(vcpu)];
            wait_until("the flipped branch is taken", || {
                let now = counters(vm.ram(), vcpu);
                if to_taken {
                    now.taken > was.taken
                } else {
                    now.not_taken > was.not_taken
                }
            });
        }
    }
    vm.shutdown();
    assert_eq!(vm.wait(), ExitReason::Shutdown);
}

/// Negative control: flips without a pause lead to torn branches.
#[test]
fn unpaused_flips_are_torn() {
    let _watchdog = watchdog(300);
    let Some(vm) = branch_guest(2) else { return };
    let torn =
        || vm.exit_reason().is_some() || (0..2).any(|vcpu| counters(vm.ram(), vcpu).torn > 0);
    let mut flips: u64 = 0;
    while !torn() {
        assert!(
            flips < 20_000_000,
            "no torn branch in {flips} unpaused flips"
        );
        // Writes byte by byte, as a debugger would.
        let to = if flips.is_multiple_of(2) { JMP } else { NOP };
        for (address, byte) in (SITE..).zip(to) {
            vm.ram().write(address, &[byte]).unwrap();
        }
        flips += 1;
    }
    println!("the first torn branch came within {flips} unpaused flips");
}

#[test]
fn no_vcpu_runs_while_paused_and_all_run_afterwards() {
    let _watchdog = watchdog(300);
    for vcpus in [1, 2, 4, 16] {
        let Some(vm) = branch_guest(vcpus) else {
            return;
        };
        for _ in 0..20 {
            let paused = vm.pause(DEADLINE).unwrap();
            assert_eq!(paused.rips().len(), usize::from(vcpus));
            assert!(!paused.breakpoint_pending());
            let code = CODE..CODE + 0x5000;
            assert!(paused.rips().iter().all(|rip| code.contains(rip)));
            let stopped: Vec<u64> = (0..vcpus).map(|vcpu| rounds(&vm, vcpu)).collect();
            // A vCPU that still ran would make thousands of rounds in this time.
            for _ in 0..200 {
                std::thread::yield_now();
            }
            let later: Vec<u64> = (0..vcpus).map(|vcpu| rounds(&vm, vcpu)).collect();
            assert_eq!(stopped, later);
            drop(paused);
            for (vcpu, stopped) in (0..).zip(stopped) {
                wait_until("every vCPU runs again", || rounds(&vm, vcpu) > stopped);
            }
        }
    }
}

#[test]
fn pauses_in_quick_succession() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(2) else { return };
    // vCPUs that have no time to wake up go directly from one pause to the next.
    for _ in 0..5_000 {
        let paused = vm.pause(DEADLINE).unwrap();
        assert_eq!(paused.rips().len(), 2);
    }
    let stopped = [rounds(&vm, 0), rounds(&vm, 1)];
    wait_until("both run again", || {
        rounds(&vm, 0) > stopped[0] && rounds(&vm, 1) > stopped[1]
    });
}

#[test]
fn vcpus_that_do_not_run_count_as_stopped() {
    let _watchdog = watchdog(120);
    // hlt; jmp back to the hlt.
    let mut image = branch_code();
    image[..3].copy_from_slice(&[0xf4, 0xeb, 0xfd]);
    let halted = RawEntry {
        rip: CODE,
        rsp: 0,
        argument: 0,
        user_mode: false,
    };
    let entries = vec![Some(spinning(0)), Some(halted), None];
    let Some(vm) = started(raw(image, entries), Arc::new(NoRequests)) else {
        return;
    };
    wait_until("vCPU 0 runs", || rounds(&vm, 0) > 0);
    // vCPU 1 is in its hlt, or after it if the kick woke the vCPU.
    let halted = |rips: &[u64]| rips.iter().any(|rip| (CODE..CODE + 3).contains(rip));
    // The thread of vCPU 1 may not have reached its first instruction yet.
    wait_until("vCPU 1 halts", || {
        halted(vm.pause(DEADLINE).unwrap().rips())
    });
    for _ in 0..100 {
        let paused = vm.pause(DEADLINE).unwrap();
        assert!(halted(paused.rips()), "{:x?}", paused.rips());
        let stopped = rounds(&vm, 0);
        drop(paused);
        wait_until("vCPU 0 runs again", || rounds(&vm, 0) > stopped);
    }
}

#[test]
fn only_one_pause_at_a_time() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(1) else { return };
    let paused = vm.pause(DEADLINE).unwrap();
    assert_eq!(vm.pause(DEADLINE).err(), Some(PauseError::AlreadyPaused));
    drop(paused);
    assert!(vm.pause(DEADLINE).is_ok());
}

#[test]
fn a_paused_guest_can_be_ended() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(2) else { return };
    let paused = vm.pause(DEADLINE).unwrap();
    vm.shutdown();
    assert_eq!(vm.wait(), ExitReason::Shutdown);
    drop(paused);
    assert_eq!(vm.pause(DEADLINE).err(), Some(PauseError::Ended));
}

#[test]
fn a_triple_fault_ends_the_guest_and_is_reported() {
    let _watchdog = watchdog(120);
    let mut image = branch_code();
    // ud2
    image[..2].copy_from_slice(&[0x0f, 0x0b]);
    let faulting = RawEntry {
        rip: CODE,
        ..spinning(1)
    };
    let entries = vec![Some(spinning(0)), Some(faulting)];
    let Some(vm) = started(raw(image, entries), Arc::new(NoRequests)) else {
        return;
    };
    let reason = vm.wait();
    assert!(
        matches!(reason, ExitReason::TripleFault { vcpu: 1, .. }),
        "{reason:?}"
    );
    assert_eq!(vm.pause(DEADLINE).err(), Some(PauseError::Ended));
}

/// Records the requests and answers each with its own number.
#[derive(Default)]
struct Requests(Mutex<Vec<(u32, u64)>>);

impl GuestRequests for Requests {
    fn attach(&self, _: patchbay_guest::memory::GuestRam) {}

    fn request(&self, op: u32, page: u64) -> i32 {
        self.0.lock().unwrap().push((op, page));
        -i32::try_from(op).unwrap()
    }
}

/// Runs ring-0 code that ends in a loop at `LOOP`, and returns its requests.
fn ask(code: &[u8], transport: fn(&Vm) -> bool) -> Option<(Vm, Vec<(u32, u64)>)> {
    let mut image = branch_code();
    image[..code.len()].copy_from_slice(code);
    let asking = RawEntry {
        rip: CODE,
        user_mode: false,
        ..spinning(0)
    };
    let requests = Arc::new(Requests::default());
    let mut config = raw(image, vec![Some(asking)]);
    config.offer_patchbay = true;
    let vm = match Vm::new(config, requests.clone()) {
        Ok(vm) => vm,
        Err(error) => {
            println!("SKIPPED: {error}");
            return None;
        }
    };
    if !transport(&vm) {
        println!("SKIPPED: this transport does not reach user space on this host's KVM");
        return None;
    }
    vm.start().unwrap();
    wait_until("the guest goes on after its request", || {
        vm.exit_reason().is_some() || rounds(&vm, 0) > 0
    });
    assert_eq!(vm.exit_reason(), None);
    let seen = requests.0.lock().unwrap().clone();
    Some((vm, seen))
}

/// Status in the header of the tests' request page.
fn status(vm: &Vm) -> i32 {
    let mut bytes = [0; 4];
    vm.ram().read(REQUEST_PAGE + 12, &mut bytes).unwrap();
    i32::from_le_bytes(bytes)
}

const REQUEST_PAGE: u64 = 0x17_0000;

#[test]
fn a_request_by_msr_is_answered() {
    let _watchdog = watchdog(120);
    let mut code = vec![0xb9];
    code.extend_from_slice(&MSR_INDEX.to_le_bytes());
    // mov eax, page | 3; xor edx, edx; wrmsr
    code.extend_from_slice(&[0xb8, 0x03, 0x00, 0x17, 0x00, 0x31, 0xd2, 0x0f, 0x30]);
    let Some((vm, seen)) = ask(&code, |vm| vm.transports().msr) else {
        return;
    };
    assert_eq!(seen, [(3, REQUEST_PAGE)]);
    assert_eq!(status(&vm), -3);
}

#[test]
fn a_request_by_hypercall_is_answered_in_rax_too() {
    let _watchdog = watchdog(120);
    let vendor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let call = if vendor.contains("AuthenticAMD") || vendor.contains("HygonGenuine") {
        0xd9
    } else {
        0xc1
    };
    // mov eax, 12; mov ebx, page; mov ecx, 1; mov edx, magic; shl rdx, 32; or rdx, 2;
    // xor esi, esi; vmcall or vmmcall; mov [page + 16], rax
    let code = [
        &[0xb8, 12, 0, 0, 0, 0xbb, 0x00, 0x00, 0x17, 0x00][..],
        &[0xb9, 1, 0, 0, 0, 0xba, 0x50, 0x42, 0x41, 0x59],
        &[0x48, 0xc1, 0xe2, 32, 0x48, 0x83, 0xca, 2, 0x31, 0xf6],
        &[
            0x0f, 0x01, call, 0x48, 0x89, 0x04, 0x25, 0x10, 0x00, 0x17, 0x00,
        ],
    ]
    .concat();
    assert!(CODE + code.len() as u64 <= LOOP);
    let Some((vm, seen)) = ask(&code, |vm| vm.transports().hypercall) else {
        return;
    };
    assert_eq!(seen, [(2, REQUEST_PAGE)]);
    assert_eq!(status(&vm), -2);
    let mut rax = [0; 8];
    vm.ram().read(REQUEST_PAGE + 16, &mut rax).unwrap();
    assert_eq!(i64::from_le_bytes(rax), -2);
}
