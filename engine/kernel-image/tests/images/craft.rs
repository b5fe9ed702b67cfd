// SPDX-License-Identifier: Apache-2.0
//! Small kernel images, byte by byte.

use patchbay_kernel_image::Format;

/// Distance between sites in bytes.
const SITE_STRIDE: u64 = 0x40;
/// Offset of the first site in the text.
const FIRST_SITE: u64 = 0x100;
/// Offset in the text of the code that refers to both ends of the table.
const BOUNDS_CODE: usize = 0x80;
/// Offset of the keys in the data. Each key has 16 bytes, and the table follows the keys.
const KEYS: u64 = 0x100;
pub const TABLE: u64 = 0x800;

/// A site and its key as they are written.
#[derive(Clone, Copy, Debug)]
pub struct Branch {
    pub bytes: [u8; 5],
    pub size: u8,
    pub flags: u8,
    pub initial: i32,
}

/// Returns branches with JMPs and NOPs of both sizes, likely and unlikely, each as its key's
/// initial value requires. Their targets are 0x20 ahead.
pub fn branches(objtool: bool) -> Vec<Branch> {
    let nop = if objtool { 2 } else { 0 };
    let one = |bytes: [u8; 5], size, flags, initial| Branch {
        bytes,
        size,
        flags,
        initial,
    };
    let four = [
        one([0x0f, 0x1f, 0x44, 0, 0], 5, nop, 0),
        one([0x66, 0x90, 0xcc, 0xcc, 0xcc], 2, nop | 1, 1),
        one([0xe9, 0x1b, 0, 0, 0], 5, 1, 0),
        one([0xeb, 0x1e, 0xcc, 0xcc, 0xcc], 2, 0, 1),
    ];
    four.into_iter().cycle().take(16).collect()
}

/// A kernel in pieces.
pub struct Kernel {
    pub format: Format,
    pub text: Vec<u8>,
    pub data: Vec<u8>,
    pub table_bytes: usize,
}

impl Kernel {
    pub fn new(format: Format, branches: &[Branch]) -> Self {
        let mut kernel = Self {
            format,
            text: vec![0xcc; 0x1000],
            data: vec![0; 0x1000],
            table_bytes: 0,
        };
        for (index, branch) in branches.iter().enumerate() {
            let code = kernel.site(index);
            let at = (code - kernel.text_address()) as usize;
            kernel.text[at..at + 5].copy_from_slice(&branch.bytes);
            let key_at = (KEYS + 16 * index as u64) as usize;
            kernel.data[key_at..key_at + 4].copy_from_slice(&branch.initial.to_le_bytes());
            let key = kernel.key(index) | u64::from(branch.flags);
            let entry = kernel.entry(index, code, code + 0x20, key);
            let at = TABLE as usize + kernel.table_bytes;
            kernel.data[at..at + entry.len()].copy_from_slice(&entry);
            kernel.table_bytes += entry.len();
        }
        kernel.refer_to_bounds(kernel.table(), kernel.table() + kernel.table_bytes as u64);
        kernel
    }

    /// Writes the start of jump_label_init(): `mov $start, %rdi; mov $stop, %rsi`, or the same with
    /// %edi and %esi.
    pub fn refer_to_bounds(&mut self, start: u64, stop: u64) {
        let mov = if self.wide() {
            [vec![0x48, 0xc7, 0xc7], vec![0x48, 0xc7, 0xc6]]
        } else {
            [vec![0xbf], vec![0xbe]]
        };
        let mut at = BOUNDS_CODE;
        for (mov, address) in mov.into_iter().zip([start, stop]) {
            let instruction = [mov.as_slice(), &(address as u32).to_le_bytes()].concat();
            self.text[at..at + instruction.len()].copy_from_slice(&instruction);
            at += instruction.len();
        }
    }

    /// Like [`Kernel::refer_to_bounds`], with `lea start(%rip), %rdi; lea stop(%rip), %rsi`.
    pub fn refer_to_bounds_by_distance(&mut self) {
        let text = self.text_address();
        let start = self.table();
        let stop = start + self.table_bytes as u64;
        let mut at = BOUNDS_CODE;
        for (lea, address) in [([0x48, 0x8d, 0x3d], start), ([0x48, 0x8d, 0x35], stop)] {
            let next = text + at as u64 + 7;
            let distance = (address.wrapping_sub(next) as u32).to_le_bytes();
            let instruction = [lea.as_slice(), &distance].concat();
            self.text[at..at + 7].copy_from_slice(&instruction);
            at += 7;
        }
    }

    /// Address of the operand in the first instruction that [`Kernel::refer_to_bounds`] wrote.
    pub fn bounds_code(&self) -> u64 {
        self.text_address() + BOUNDS_CODE as u64 + if self.wide() { 3 } else { 1 }
    }

    fn entry(&self, index: usize, code: u64, target: u64, key: u64) -> Vec<u8> {
        let at = self.table() + self.format.entry_size() * index as u64;
        let low = |value: u64| (value as u32).to_le_bytes();
        match self.format {
            Format::Relative64 => [
                low(code.wrapping_sub(at)).as_slice(),
                &low(target.wrapping_sub(at + 4)),
                &key.wrapping_sub(at + 8).to_le_bytes(),
            ]
            .concat(),
            Format::Relative32 => [
                low(code.wrapping_sub(at)),
                low(target.wrapping_sub(at + 4)),
                low(key.wrapping_sub(at + 8)),
            ]
            .concat(),
            Format::Absolute64 => {
                [code.to_le_bytes(), target.to_le_bytes(), key.to_le_bytes()].concat()
            }
            Format::Absolute32 => [low(code), low(target), low(key)].concat(),
        }
    }

    pub fn wide(&self) -> bool {
        matches!(self.format, Format::Relative64 | Format::Absolute64)
    }

    pub fn text_address(&self) -> u64 {
        if self.wide() {
            0xffff_ffff_8100_0000
        } else {
            0xc100_0000
        }
    }

    pub fn data_address(&self) -> u64 {
        self.text_address() + 0x10_0000
    }

    pub fn table(&self) -> u64 {
        self.data_address() + TABLE
    }

    pub fn site(&self, index: usize) -> u64 {
        self.text_address() + FIRST_SITE + SITE_STRIDE * index as u64
    }

    pub fn key(&self, index: usize) -> u64 {
        self.data_address() + KEYS + 16 * index as u64
    }

    /// The symbols in the format of nm(1).
    pub fn system_map(&self) -> String {
        let text = self.text_address();
        let mut map = format!("{text:x} T _text\n{text:x} T _stext\n");
        for index in 0..16 {
            map += &format!(
                "{:x} t function_{index}\n{:x} d key_{index}\n",
                self.site(index) - 4,
                self.key(index)
            );
        }
        let stop = self.table() + self.table_bytes as u64;
        map + &format!(
            "{:x} D __start___jump_table\n{stop:x} D __stop___jump_table\n",
            self.table()
        )
    }

    /// A stripped ELF file: two segments, no sections.
    pub fn elf(&self) -> Vec<u8> {
        let (header, entry) = if self.wide() { (64, 56) } else { (52, 32) };
        let text_at = 0x200u64;
        let data_at = text_at + self.text.len() as u64;
        let mut elf = Vec::new();
        let word = |elf: &mut Vec<u8>, value: u64| {
            let size = if self.wide() { 8 } else { 4 };
            elf.extend_from_slice(&value.to_le_bytes()[..size]);
        };
        elf.extend_from_slice(b"\x7fELF");
        elf.extend_from_slice(&[
            if self.wide() { 2 } else { 1 },
            1,
            1,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ]);
        elf.extend_from_slice(&2u16.to_le_bytes()); // ET_EXEC
        elf.extend_from_slice(&if self.wide() { 62u16 } else { 3 }.to_le_bytes());
        elf.extend_from_slice(&1u32.to_le_bytes());
        word(&mut elf, self.text_address());
        word(&mut elf, header);
        word(&mut elf, 0);
        elf.extend_from_slice(&0u32.to_le_bytes());
        for half in [header as u16, entry, 2, 0, 0, 0] {
            elf.extend_from_slice(&half.to_le_bytes());
        }
        for (flags, at, address, bytes) in [
            (5u32, text_at, self.text_address(), &self.text),
            (6, data_at, self.data_address(), &self.data),
        ] {
            let size = bytes.len() as u64;
            elf.extend_from_slice(&1u32.to_le_bytes());
            if self.wide() {
                elf.extend_from_slice(&flags.to_le_bytes());
            }
            for value in [at, address, address, size, size] {
                word(&mut elf, value);
            }
            if !self.wide() {
                elf.extend_from_slice(&flags.to_le_bytes());
            }
            word(&mut elf, 0x1000);
        }
        elf.resize(text_at as usize, 0);
        elf.extend_from_slice(&self.text);
        elf.extend_from_slice(&self.data);
        elf
    }
}

/// A section of [`Kernel::elf_with_sections`]: name, flags (1 writable, 2 allocated, 4 executable),
/// address, length.
pub type Section<'a> = (&'a str, u64, u64, u64);

impl Kernel {
    /// Returns the file with a section table at its end, like a bzImage's payload. 64 bits only.
    pub fn elf_with_sections(&self, sections: &[Section<'_>]) -> Vec<u8> {
        let mut elf = self.elf();
        let mut names = vec![0];
        let mut headers = vec![[0; 8]];
        for (name, flags, address, size) in sections {
            let in_text = *address < self.data_address();
            let base = if in_text {
                self.text_address()
            } else {
                self.data_address() - self.text.len() as u64
            };
            headers.push([
                names.len() as u64 | 1 << 32,
                *flags,
                *address,
                address - base + 0x200,
                *size,
                0,
                1,
                0,
            ]);
            names.extend_from_slice(name.as_bytes());
            names.push(0);
        }
        headers.push([
            names.len() as u64 | 3 << 32,
            0,
            0,
            elf.len() as u64,
            names.len() as u64 + 10,
            0,
            1,
            0,
        ]);
        names.extend_from_slice(b".shstrtab\0");
        elf.extend_from_slice(&names);
        elf.resize(elf.len().next_multiple_of(8), 0);
        let table = elf.len() as u64;
        elf[40..48].copy_from_slice(&table.to_le_bytes());
        let count = headers.len() as u16;
        for (at, half) in [(58, 64), (60, count), (62, count - 1)] {
            elf[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
        for word in headers.into_iter().flatten() {
            elf.extend_from_slice(&word.to_le_bytes());
        }
        elf
    }
}

/// A bzImage with one setup sector around a payload.
pub fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&0x40u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.resize(1024 + 0x40, 0);
    image.extend_from_slice(payload);
    image
}
