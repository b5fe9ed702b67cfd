// SPDX-License-Identifier: Apache-2.0

//! Saves guests of a few instructions and starts copies of them.

mod bare_metal;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bare_metal::{
    CODE, JMP, NOP, SITE, branch_guest, counters, created, load, raw, started, wait_until, watchdog,
};
use patchbay_guest::snapshot::{
    ControlState, KeptArray, KeptRequest, MemorySink, SaveError, SinkClosed,
};
use patchbay_vmm::config::{RawEntry, VmConfig};
use patchbay_vmm::pause::{PauseError, Paused};
use patchbay_vmm::request::NoRequests;
use patchbay_vmm::snapshot::{MEMORY_FILE, STATE_FILE, Snapshot, SnapshotError};
use patchbay_vmm::vm::{Vm, VmError};
use sha2::{Digest, Sha256};

/// Timeout that no correct run reaches.
const DEADLINE: Duration = Duration::from_secs(30);
/// An unused page of the branch guest's memory.
const SCRATCH: u64 = 3 << 20;

struct Memory(File);

impl MemorySink for Memory {
    fn take(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), SinkClosed> {
        self.0.write_all_at(&bytes, offset).map_err(|_| SinkClosed)
    }

    fn check(&mut self) -> Result<(), SinkClosed> {
        Ok(())
    }
}

fn control() -> ControlState {
    ControlState {
        guest: "first".to_owned(),
        incarnation: "0123".to_owned(),
        requests: vec![KeptRequest {
            op: 1,
            page: vec![7; 4096],
            arrays: vec![KeptArray {
                address: 0xffff_8880_0000_1000,
                bytes: vec![8; 64],
            }],
        }],
        ledger: b"holds".to_vec(),
    }
}

/// Writes a snapshot of a paused guest to a folder.
fn save(vm: &Vm, paused: &Paused<'_>, folder: &Path) {
    let memory = File::create(folder.join(MEMORY_FILE)).unwrap();
    memory.set_len(vm.ram().bytes()).unwrap();
    let state = vm.save(paused, control(), &mut Memory(memory)).unwrap();
    std::fs::write(folder.join(STATE_FILE), state).unwrap();
}

fn copy(folder: &Path) -> Result<Vm, VmError> {
    let config = VmConfig::of_snapshot(Snapshot::open(folder)?);
    Vm::new(config, Arc::new(NoRequests))
}

#[test]
fn copies_continue_by_themselves() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let paused = vm.pause(DEADLINE).unwrap();
    vm.ram().write(SITE, &JMP).unwrap();
    let saved = [0, 1].map(|vcpu| counters(vm.ram(), vcpu));
    save(&vm, &paused, folder.path());
    assert_eq!([0, 1].map(|vcpu| counters(vm.ram(), vcpu)), saved);
    drop(paused);
    wait_until("the guest runs on", || {
        counters(vm.ram(), 0).taken > saved[0].taken
    });

    let opened = Snapshot::open(folder.path()).unwrap();
    assert_eq!((opened.vcpus(), opened.memory_bytes()), (2, 4 << 20));
    assert_eq!(opened.control(), control());
    let copies = [(); 2].map(|()| copy(folder.path()).unwrap());
    for (number, copy) in (1..).zip(&copies) {
        assert_eq!([0, 1].map(|vcpu| counters(copy.ram(), vcpu)), saved);
        copy.ram().write(SCRATCH, &[number]).unwrap();
        copy.start().unwrap();
    }
    for copy in &copies {
        wait_until("both vCPUs take the branch as it was when saved", || {
            [0, 1]
                .iter()
                .all(|&vcpu| counters(copy.ram(), vcpu).taken > saved[usize::from(vcpu)].taken)
        });
    }
    // A change of one copy reaches neither the other nor the file.
    let paused = copies[0].pause(DEADLINE).unwrap();
    copies[0].ram().write(SITE, &NOP).unwrap();
    drop(paused);
    wait_until("the copy follows its own change", || {
        counters(copies[0].ram(), 0).not_taken > saved[0].not_taken
    });
    for (number, copy) in (1..).zip(&copies) {
        assert_eq!(load(copy.ram(), SCRATCH), number);
    }
    let last = counters(copies[1].ram(), 0);
    assert!(last.not_taken <= saved[0].not_taken + 1, "{last:?}");
    let third = self::copy(folder.path()).unwrap();
    assert_eq!([0, 1].map(|vcpu| counters(third.ram(), vcpu)), saved);
    assert_eq!(load(third.ram(), SCRATCH), 0);
    for vm in [&vm, &copies[0], &copies[1]] {
        assert_eq!(vm.exit_reason(), None);
    }
}

/// Address of what the typist uses: the number of rounds, the last TSC, and the number of times
/// that the TSC went back.
const DATA: u64 = 0x18_0000;
const ROUNDS: u64 = DATA;
const TSC: u64 = DATA + 24;
const WENT_BACK: u64 = DATA + 32;
/// The same for the second vCPU: the number of rounds, and the integer that its FPU keeps.
const FPU_ROUNDS: u64 = DATA + 0x1000;
const FROM_FPU: u64 = DATA + 0x1008;
const TO_FPU: u64 = DATA + 0x1040;
const KEPT: u32 = 0x1357_9bdf;

/// Returns `program` with a jump back to its byte `to`.
fn looping(program: &[&[u8]], to: i8) -> Vec<u8> {
    let mut image = program.concat();
    let back = to - i8::try_from(image.len() + 2).unwrap();
    image.extend([0xeb, back.to_le_bytes()[0]]);
    image
}

/// Returns a guest whose first vCPU types 1, 2, 3, … into the serial port, and whose second one
/// keeps a number in its FPU.
fn typing() -> VmConfig {
    let typist = looping(
        &[
            &[0x0f, 0x31],                   // rdtsc
            &[0x48, 0xc1, 0xe2, 0x20],       // shl rdx, 32
            &[0x48, 0x09, 0xd0],             // or rax, rdx
            &[0x48, 0x3b, 0x47, 0x18],       // cmp rax, [rdi + 24]
            &[0x73, 0x04],                   // jae over the next
            &[0x48, 0xff, 0x47, 0x20],       // inc qword [rdi + 32]
            &[0x48, 0x89, 0x47, 0x18],       // mov [rdi + 24], rax
            &[0xba, 0xf8, 0x03, 0x00, 0x00], // mov edx, 0x3f8
            &[0xfe, 0xc3],                   // inc bl
            &[0x88, 0xd8],                   // mov al, bl
            &[0xee],                         // out dx, al
            &[0x48, 0xff, 0x07],             // inc qword [rdi]
        ],
        0,
    );
    let keeper = looping(
        &[
            &[0xdb, 0x47, 0x40], // fild dword [rdi + 64]
            &[0xdb, 0x57, 0x08], // fist dword [rdi + 8]
            &[0x48, 0xff, 0x07], // inc qword [rdi]
        ],
        3,
    );
    let mut image = vec![0x90; 0x1000];
    image[..typist.len()].copy_from_slice(&typist);
    image.extend(keeper);
    let entry = |number: u64, user_mode| RawEntry {
        rip: CODE + 0x1000 * number,
        rsp: 0,
        argument: DATA + 0x1000 * number,
        user_mode,
    };
    raw(image, vec![Some(entry(0, false)), Some(entry(1, true))])
}

#[test]
fn a_copy_types_the_next_character() {
    let _watchdog = watchdog(120);
    let Some(vm) = created(typing(), Arc::new(NoRequests)) else {
        return;
    };
    vm.ram().write(TO_FPU, &KEPT.to_le_bytes()).unwrap();
    vm.start().unwrap();
    // If the TSC of a copy began at zero, it would be lower than this in the first round.
    wait_until("the TSC is high", || load(vm.ram(), TSC) > 1 << 31);
    wait_until("the FPU has the number", || load(vm.ram(), FPU_ROUNDS) > 1);
    for _ in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        let paused = vm.pause(DEADLINE).unwrap();
        save(&vm, &paused, folder.path());
        let last = *typed(&vm).last().unwrap();
        let [rounds, fpu_rounds] = [ROUNDS, FPU_ROUNDS].map(|at| load(vm.ram(), at));
        drop(paused);
        let copy = copy(folder.path()).unwrap();
        copy.ram().write(FROM_FPU, &[0; 4]).unwrap();
        copy.start().unwrap();
        wait_until("the copy works", || {
            load(copy.ram(), ROUNDS) > rounds + 10 && load(copy.ram(), FPU_ROUNDS) > fpu_rounds + 2
        });
        let output = copy.console().read(0).bytes;
        let expected: Vec<u8> = (0..10).map(|step| last.wrapping_add(1 + step)).collect();
        assert_eq!(output[..10], expected, "after {last}");
        assert_eq!(load(copy.ram(), FROM_FPU) & 0xffff_ffff, u64::from(KEPT));
        assert_eq!(load(copy.ram(), WENT_BACK), 0);
    }
}

/// Returns the whole output that the console keeps.
fn typed(vm: &Vm) -> Vec<u8> {
    let (mut output, mut offset) = (vec![], 0);
    loop {
        let chunk = vm.console().read(offset);
        if chunk.bytes.is_empty() {
            return output;
        }
        offset = chunk.offset + chunk.bytes.len() as u64;
        output.extend(chunk.bytes);
    }
}

/// MSRs, not all of which KVM lists, with values that differ from those of a new vCPU: memory types
/// of ranges and the controls of machine checks (Intel SDM, volume 4).
const MSRS: [(u32, u64); 8] = [
    (0x200, 0xc000_0000),
    (0x201, 0xf_c000_0800),
    (0x250, 0x0606_0606_0606_0606),
    (0x26f, 0x0505_0505_0505_0505),
    (0x277, 0x0007_0106_0007_0406),
    (0x2ff, 0xc06),
    (0x400, u64::MAX),
    (0x404, u64::MAX),
];
/// Address of the values that the guest has read last.
const VALUES: u64 = DATA + 0x40;

/// Returns a guest that sets these MSRs, and then reads them for ever.
fn reading_msrs() -> VmConfig {
    let mut image = vec![];
    for (index, value) in MSRS {
        let value = value.to_le_bytes();
        image.push(0xb9); // mov ecx, index
        image.extend(index.to_le_bytes());
        image.push(0xb8); // mov eax, low
        image.extend(&value[..4]);
        image.push(0xba); // mov edx, high
        image.extend(&value[4..]);
        image.extend([0x0f, 0x30]); // wrmsr
    }
    let start = image.len();
    for ((index, _), at) in MSRS.iter().zip((0x40..).step_by(8)) {
        image.push(0xb9); // mov ecx, index
        image.extend(index.to_le_bytes());
        image.extend([0x0f, 0x32]); // rdmsr
        image.extend([0x89, 0x47, at]); // mov [rdi + at], eax
        image.extend([0x89, 0x57, at + 4]); // mov [rdi + at + 4], edx
    }
    image.extend([0x48, 0xff, 0x07]); // inc qword [rdi]
    let back = i32::try_from(image.len() + 5 - start).unwrap();
    image.push(0xe9); // jmp to the first rdmsr
    image.extend((-back).to_le_bytes());
    let entry = RawEntry {
        rip: CODE,
        rsp: 0,
        argument: DATA,
        user_mode: false,
    };
    raw(image, vec![Some(entry)])
}

#[test]
fn a_copy_has_the_memory_types_and_the_machine_checks() {
    let _watchdog = watchdog(120);
    let Some(vm) = started(reading_msrs(), Arc::new(NoRequests)) else {
        return;
    };
    let values = |vm: &Vm| [0, 1, 2, 3, 4, 5, 6, 7].map(|at| load(vm.ram(), VALUES + 8 * at));
    let expected = MSRS.map(|(_, value)| value);
    wait_until("the guest reads", || load(vm.ram(), ROUNDS) > 1);
    assert_eq!(values(&vm), expected);
    let folder = tempfile::tempdir().unwrap();
    let paused = vm.pause(DEADLINE).unwrap();
    save(&vm, &paused, folder.path());
    drop(paused);
    let copy = copy(folder.path()).unwrap();
    copy.ram().write(VALUES, &[0; 64]).unwrap();
    let rounds = load(copy.ram(), ROUNDS);
    copy.start().unwrap();
    wait_until("the copy reads", || load(copy.ram(), ROUNDS) > rounds + 2);
    assert_eq!(values(&copy), expected);
}

/// Returns a folder with a snapshot.
fn snapshot() -> Option<tempfile::TempDir> {
    let vm = branch_guest(1)?;
    let folder = tempfile::tempdir().unwrap();
    let paused = vm.pause(DEADLINE).unwrap();
    save(&vm, &paused, folder.path());
    Some(folder)
}

fn refused(folder: &Path) -> SnapshotError {
    match copy(folder) {
        Err(VmError::Snapshot(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a copy was created"),
    }
}

#[test]
fn damaged_files_are_refused() {
    let _watchdog = watchdog(120);
    let Some(folder) = snapshot() else { return };
    let path = |name: &str| folder.path().join(name);
    let state = std::fs::read(path(STATE_FILE)).unwrap();
    let with_state = |state: &[u8]| {
        std::fs::write(path(STATE_FILE), state).unwrap();
        refused(folder.path())
    };
    for byte in (0..64).chain((64..state.len()).step_by(97)) {
        let mut changed = state.clone();
        changed[byte] ^= 1 << (byte % 8);
        let error = with_state(&changed).to_string();
        assert!(error.contains("snapshot"), "{byte}: {error}");
        assert!(
            !error.trim_end_matches('.').contains(". "),
            "one sentence: {error}"
        );
    }
    for length in [0, 7, 55, state.len() - 1] {
        let error = with_state(&state[..length]);
        let expected = matches!(
            error,
            SnapshotError::NotAState | SnapshotError::Length { .. }
        );
        assert!(expected, "{length}: {error}");
    }
    let mut later = state.clone();
    later[8] += 1;
    let error = with_state(&later);
    assert!(matches!(error, SnapshotError::Version(3)));
    let formats = "has format 3, and this monitor restores format 2";
    assert!(error.to_string().contains(formats), "{error}");
    std::fs::write(path(STATE_FILE), &state).unwrap();

    let memory = File::options().write(true).open(path(MEMORY_FILE)).unwrap();
    // In a page with content, and in a hole.
    for (address, bit, before) in [(SITE, 1, NOP[0]), (SCRATCH, 4, 0)] {
        memory.write_all_at(&[before ^ 1 << bit], address).unwrap();
        let error = refused(folder.path());
        assert!(matches!(error, SnapshotError::MemoryChecksum), "{error}");
        memory.write_all_at(&[before], address).unwrap();
    }
    // Zeros that are no hole make no difference.
    drop(copy(folder.path()).unwrap());
    memory.set_len((4 << 20) - 4096).unwrap();
    let error = refused(folder.path());
    assert!(
        matches!(error, SnapshotError::MemoryLength { .. }),
        "{error}"
    );
    for name in [MEMORY_FILE, STATE_FILE] {
        std::fs::remove_file(path(name)).unwrap();
        let error = refused(folder.path()).to_string();
        assert!(error.contains(path(name).to_str().unwrap()), "{error}");
    }
}

/// Whoever changes the state can also write a valid checksum.
#[test]
fn hostile_states_are_refused_or_harmless() {
    let _watchdog = watchdog(240);
    let Some(folder) = snapshot() else { return };
    let path = folder.path().join(STATE_FILE);
    let state = std::fs::read(&path).unwrap();
    let mut random = fastrand::Rng::with_seed(27);
    for round in 0..300 {
        let mut body = state[56..].to_vec();
        for _ in 0..random.usize(1..4) {
            // The beginning has the lengths of most fields.
            let at = match random.bool() {
                true => random.usize(..body.len().min(200)),
                false => random.usize(..body.len()),
            };
            body[at] = random.u8(..);
        }
        if round % 3 == 0 {
            body.truncate(random.usize(..body.len()));
        }
        let mut head = state[..16].to_vec();
        head.extend((body.len() as u64).to_le_bytes());
        let sum = Sha256::new().chain_update(&head).chain_update(&body);
        let sum = sum.finalize();
        std::fs::write(&path, [&head, &sum[..], &body].concat()).unwrap();
        // Neither panics.
        if let Ok(copy) = copy(folder.path()) {
            copy.start().unwrap();
            copy.shutdown();
            let _ = copy.wait();
        }
    }
}

#[test]
fn a_guest_that_does_not_run_is_not_saved() {
    let _watchdog = watchdog(120);
    let Some(vm) = started(typing(), Arc::new(NoRequests)) else {
        return;
    };
    vm.shutdown();
    let _ = vm.wait();
    assert!(matches!(vm.pause(DEADLINE), Err(PauseError::Ended)));

    let vm = Vm::new(typing(), Arc::new(NoRequests)).unwrap();
    let paused = vm.pause(DEADLINE).unwrap();
    let file = Memory(tempfile::tempfile().unwrap());
    let error = vm.save(&paused, control(), &mut { file }).unwrap_err();
    assert!(error.to_string().contains("has not started"), "{error}");
}

#[test]
fn a_receiver_that_has_gone_ends_the_save() {
    struct Gone;
    impl MemorySink for Gone {
        fn take(&mut self, _: u64, _: Vec<u8>) -> Result<(), SinkClosed> {
            Err(SinkClosed)
        }

        fn check(&mut self) -> Result<(), SinkClosed> {
            Ok(())
        }
    }
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(1) else { return };
    let paused = vm.pause(DEADLINE).unwrap();
    let saved = vm.save(&paused, control(), &mut Gone);
    assert_eq!(saved, Err(SaveError::Closed));
    let before = counters(vm.ram(), 0).not_taken;
    drop(paused);
    wait_until("the guest runs on", || {
        counters(vm.ram(), 0).not_taken > before
    });
}
