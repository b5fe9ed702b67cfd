// SPDX-License-Identifier: Apache-2.0

//! Short machine code programs for the vCPUs. RDI points to the vCPU's scratch page.

use patchbay_vmm::request::MSR_INDEX;

use super::kernel::{EXECUTED, EXECUTED_TARGET, NOP, TEXT};

/// Offset in a scratch page: number of rounds.
pub const ROUNDS: u64 = 0;
/// Offset in vCPU 0's scratch page: rounds in which the branch was not taken.
pub const NOT_TAKEN: u64 = 8;
/// Offset in vCPU 0's scratch page: rounds in which the branch was taken.
pub const TAKEN: u64 = 16;
/// Offset in a scratch page: for vCPU 0, a value to write to the MSR; for the others, nonzero
/// starts the program.
pub const MAILBOX: u64 = 0x20;
/// Offset in a scratch page: the program's result.
pub const RESULT: u64 = 0x28;

/// Program of a vCPU other than vCPU 0.
#[derive(Clone, Debug)]
pub struct Program {
    pub code: Vec<u8>,
    /// Run at privilege level 3, where code runs at full speed on every KVM.
    pub user_mode: bool,
}

/// Register numbers in instructions.
const RAX: u8 = 0;
const RCX: u8 = 1;
const RDX: u8 = 2;
const RBX: u8 = 3;
const RSI: u8 = 6;
const RDI: u8 = 7;

/// `mov reg, value`
fn set(register: u8, value: u64) -> Vec<u8> {
    let mut code = vec![0x48, 0xb8 + register];
    code.extend_from_slice(&value.to_le_bytes());
    code
}

/// `jmp` back to `start`.
fn again(code: &mut Vec<u8>, start: usize) {
    let distance = i32::try_from(start as i64 - (code.len() as i64 + 5)).unwrap();
    code.push(0xe9);
    code.extend_from_slice(&distance.to_le_bytes());
}

/// `inc qword [rdi]`
const ROUND: [u8; 3] = [0x48, 0xff, 0x07];
/// `jmp` to itself.
const STAY: [u8; 2] = [0xeb, 0xfe];

/// Waits for the mailbox: `cmp qword [rdi + 0x20], 0; je` back to itself.
pub const WAIT: [u8; 7] = [0x48, 0x83, 0x7f, 0x20, 0x00, 0x74, 0xf9];

/// `mov rax, value; mov rdx, rax; shr rdx, 32; mov ecx, MSR; wrmsr`
fn write_msr(value: u64) -> Vec<u8> {
    let mut code = set(RAX, value);
    code.extend_from_slice(&[0x48, 0x89, 0xc2, 0x48, 0xc1, 0xea, 32, 0xb9]);
    code.extend_from_slice(&MSR_INDEX.to_le_bytes());
    code.extend_from_slice(&[0x0f, 0x30]);
    code
}

impl Program {
    fn kernel(code: Vec<u8>) -> Self {
        Self {
            code,
            user_mode: false,
        }
    }

    fn user(code: Vec<u8>) -> Self {
        Self {
            code,
            user_mode: true,
        }
    }

    /// Returns vCPU 0's program, to be placed at the start of text. It executes `alpha`'s site,
    /// counts, and makes the requests found in its mailbox.
    pub fn serve() -> Vec<u8> {
        let mut code = ROUND.to_vec();
        code.resize(offset(EXECUTED), 0x90);
        code.extend_from_slice(&NOP);
        // inc qword [rdi + 8]; jmp over the other arm
        code.extend_from_slice(&[0x48, 0xff, 0x47, 0x08, 0xeb]);
        let join = offset(EXECUTED_TARGET) + 4;
        code.push(u8::try_from(join - code.len() - 1).unwrap());
        code.resize(offset(EXECUTED_TARGET), 0x90);
        // inc qword [rdi + 16]
        code.extend_from_slice(&[0x48, 0xff, 0x47, 0x10]);
        // mov rax, [rdi + 0x20]; test rax, rax; jne over the jump back
        code.extend_from_slice(&[0x48, 0x8b, 0x47, 0x20, 0x48, 0x85, 0xc0, 0x75, 5]);
        again(&mut code, 0);
        // mov rdx, rax; shr rdx, 32; mov ecx, MSR; wrmsr
        code.extend_from_slice(&[0x48, 0x89, 0xc2, 0x48, 0xc1, 0xea, 32, 0xb9]);
        code.extend_from_slice(&MSR_INDEX.to_le_bytes());
        code.extend_from_slice(&[0x0f, 0x30]);
        // mov qword [rdi + 0x20], 0
        code.extend_from_slice(&[0x48, 0xc7, 0x47, 0x20, 0, 0, 0, 0]);
        again(&mut code, 0);
        code
    }

    /// Stores all first values, then all second values, for ever.
    pub fn toggle(words: &[(u64, [u64; 2])]) -> Self {
        let mut code = vec![];
        for phase in [0, 1] {
            for (address, values) in words {
                code.extend(set(RBX, *address));
                code.extend(set(RAX, values[phase]));
                // mov [rbx], rax
                code.extend_from_slice(&[0x48, 0x89, 0x03]);
            }
            code.extend_from_slice(&ROUND);
        }
        again(&mut code, 0);
        Self::user(code)
    }

    /// Atomically increments a 32-bit word for ever.
    pub fn count_up(address: u64) -> Self {
        let mut code = set(RBX, address);
        let start = code.len();
        // lock inc dword [rbx]
        code.extend_from_slice(&[0xf0, 0xff, 0x03]);
        code.extend_from_slice(&ROUND);
        again(&mut code, start);
        Self::user(code)
    }

    /// Makes these requests (page and operation) for ever.
    pub fn requests(values: &[u64]) -> Self {
        let mut code = vec![];
        for value in values {
            code.extend(write_msr(*value));
        }
        code.extend_from_slice(&ROUND);
        again(&mut code, 0);
        Self::kernel(code)
    }

    /// Makes one request at privilege level 3 after it is released.
    pub fn request_from_user_mode(value: u64) -> Self {
        let mut code = WAIT.to_vec();
        code.extend(write_msr(value));
        code.extend_from_slice(&STAY);
        Self::user(code)
    }

    /// Loops on one instruction.
    pub fn spin(user_mode: bool) -> Self {
        let mut code = ROUND.to_vec();
        code.extend_from_slice(&STAY);
        Self { code, user_mode }
    }

    /// Executes `hlt` for ever.
    pub fn halt() -> Self {
        Self::kernel([&ROUND[..], &[0xf4, 0xeb, 0xfd]].concat())
    }

    /// Executes an undefined instruction without an IDT after it is released.
    pub fn fault() -> Self {
        Self::user([&WAIT[..], &[0x0f, 0x0b]].concat())
    }

    /// Powers off by ACPI, or resets by the keyboard controller, after it is released.
    pub fn power(off: bool) -> Self {
        let mut code = WAIT.to_vec();
        if off {
            // mov dx, 0x604; mov ax, 0x3400; out dx, ax
            code.extend_from_slice(&[0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x34, 0x66, 0xef]);
        } else {
            // mov dx, 0x64; mov al, 0xfe; out dx, al
            code.extend_from_slice(&[0x66, 0xba, 0x64, 0x00, 0xb0, 0xfe, 0xee]);
        }
        code.extend_from_slice(&STAY);
        Self::kernel(code)
    }

    /// For each port, writes `length` bytes from `from` by a string instruction and reads as many
    /// to `to`, for ever.
    pub fn strings(ports: &[u16], from: u64, to: u64, length: u64) -> Self {
        let mut code = vec![];
        // outsb, outsw, outsd; insb, insw, insd
        let widths: [(&[u8], &[u8], u64); 3] = [
            (&[0xf3, 0x6e], &[0xf3, 0x6c], 1),
            (&[0xf3, 0x66, 0x6f], &[0xf3, 0x66, 0x6d], 2),
            (&[0xf3, 0x6f], &[0xf3, 0x6d], 4),
        ];
        // mov r8, rdi
        code.extend_from_slice(&[0x49, 0x89, 0xf8]);
        let start = code.len();
        for port in ports {
            for (out, in_, width) in widths {
                code.extend(set(RDX, u64::from(*port)));
                code.extend(set(RSI, from));
                code.extend(set(RCX, length / width));
                code.extend_from_slice(out);
                code.extend(set(RDI, to));
                code.extend(set(RCX, length / width));
                code.extend_from_slice(in_);
            }
        }
        // inc qword [r8]
        code.extend_from_slice(&[0x49, 0xff, 0x00]);
        again(&mut code, start);
        Self::kernel(code)
    }

    /// Writes a character to a port for ever.
    pub fn print(port: u16) -> Self {
        let mut code = set(RDX, u64::from(port));
        code.extend(set(RAX, u64::from(b'\x1b')));
        let start = code.len();
        code.push(0xee);
        code.extend_from_slice(&ROUND);
        again(&mut code, start);
        Self::kernel(code)
    }

    /// Reads and writes device memory from `start` to `end` at every offset and in every width.
    pub fn sweep(start: u64, end: u64, step: u32) -> Self {
        let mut code = set(RBX, start);
        code.extend(set(RCX, end));
        code.extend(set(RAX, 0));
        let top = code.len();
        code.extend_from_slice(&[
            0x88, 0x03, 0x66, 0x89, 0x03, 0x89, 0x03, 0x48, 0x89, 0x03, // stores
            0x8a, 0x03, 0x66, 0x8b, 0x03, 0x8b, 0x03, 0x48, 0x8b, 0x03, // loads
        ]);
        // add rbx, step; cmp rbx, rcx; jae over the jump back
        code.extend_from_slice(&[0x48, 0x81, 0xc3]);
        code.extend_from_slice(&step.to_le_bytes());
        code.extend_from_slice(&[0x48, 0x39, 0xcb, 0x73, 5]);
        again(&mut code, top);
        code.extend_from_slice(&ROUND);
        code.extend_from_slice(&STAY);
        Self::kernel(code)
    }

    /// Stores 32-bit words in order after it is released, then reads one into `RESULT` for ever.
    pub fn pokes(words: &[(u64, u32)], read: u64) -> Self {
        let mut code = WAIT.to_vec();
        for (address, value) in words {
            code.extend(set(RBX, *address));
            // mov dword [rbx], value
            code.extend_from_slice(&[0xc7, 0x03]);
            code.extend_from_slice(&value.to_le_bytes());
        }
        code.extend(set(RBX, read));
        let start = code.len();
        // mov eax, [rbx]; mov [rdi + 0x28], eax
        code.extend_from_slice(&[0x8b, 0x03, 0x89, 0x47, 0x28]);
        code.extend_from_slice(&ROUND);
        again(&mut code, start);
        Self::kernel(code)
    }
}

fn offset(address: u64) -> usize {
    usize::try_from(address - TEXT).unwrap()
}
