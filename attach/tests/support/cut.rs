// SPDX-License-Identifier: Apache-2.0
//! Kills an attacher by SIGKILL after any byte that it stores, and checks that a vCPU can execute
//! the instructions that are left. The memory is copied in several stores, and some sites straddle
//! pages. The vCPU executes every site all the time.

use std::fs;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use nix::sys::signal::{Signal, kill, raise};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use patchbay_attach::guest::{Paused, QemuGuest};
use patchbay_attach::memory::Access;
use patchbay_attach::{Options, PauseWay};
use patchbay_guest::guest::{Guest, Intended};
use patchbay_guest::memory::{Exchanged, GuestRam, Piece, Ram};
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_memory::{OutsideMemory, PhysicalMemory};
use patchbay_service::keys::registry::{Contents, KernelTables, Registry};
use patchbay_service::keys::{KeyUpdate, Keys, KeysConfig, UpdateRequest};
use patchbay_service::testing::found;
use static_keys::Op;

use super::wrapped::Wrapped;
use super::{Accelerator, COUNTER, DEADLINE, Memory, Qemu, options, until};

/// The variable that makes the test program run as the attacher to kill:
/// `SOCKET:ACCESS:KILLED:BYTES`.
const ATTACHER: &str = "PATCHBAY_TEST_CUT";
/// The variable that makes the test kill after every byte instead of after a sample of the bytes.
const ALL: &str = "PATCHBAY_TEST_CUT_ALL";

/// Guest-virtual and guest-physical address of the text.
const TEXT: u64 = 0xffff_ffff_8100_0000;
const TEXT_PHYSICAL: u64 = 2 << 20;
const TEXT_BYTES: usize = 1 << 20;
/// The end of the memory that the test kernel uses.
const IMAGE_END: u64 = 40 << 20;
/// The program waits until this word holds the address at which it continues.
const FLAG: u64 = 0x8010;
/// The counters of passes through each site, by its NOP and by its JMP.
const PASSED: u64 = 0x9000;
/// The key, the offset in a page, and the size of each site.
const SITES: [(usize, u64, usize); 9] = [
    (0, 0x100, 5),
    (0, 0x203, 2),
    (0, 0xffc, 5),
    (0, 0xffd, 5),
    (0, 0xffe, 5),
    (1, 0xfff, 5),
    (1, 0xfff, 2),
    (1, 0x305, 5),
    (1, 0xffe, 5),
];
const KEYS: [(&str, u64); 2] = [("first", 5), ("second", 4)];

/// The processes that are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    /// Kills the attacher. Its watchdog rolls back.
    Attacher,
    /// Kills the attacher after the guest has taken another reference to a key that is on. That
    /// reference changes no site.
    Counted,
    /// Kills the watchdog first, then the attacher. No process rolls back, so the vCPU executes the
    /// intermediate state.
    Both,
}

fn code(site: usize) -> u64 {
    TEXT + 0x4000 * (site as u64 + 1) + SITES[site].1
}

/// Returns the distance of a site's jump. Each of its bytes differs from the NOP's, so a jump with
/// a mixture of both leads to a breakpoint.
fn distance(site: usize) -> u64 {
    match SITES[site].2 {
        2 => 0x42,
        _ => 0x1_2345,
    }
}

fn instruction(site: usize, on: bool) -> Vec<u8> {
    let size = SITES[site].2;
    let displacement = distance(site) - size as u64;
    match (size, on) {
        (2, false) => vec![0x66, 0x90],
        (2, true) => vec![0xeb, displacement as u8],
        (_, false) => vec![0x0f, 0x1f, 0x44, 0, 0],
        (_, true) => [&[0xe9][..], &(displacement as u32).to_le_bytes()].concat(),
    }
}

/// Returns the tables and the memory of a kernel with these keys, which are the same in every
/// process.
pub fn kernel_of(keys: &[(&str, u64)]) -> (KernelTables, Arc<InMemoryGuest>) {
    let keys = keys.iter().map(|(name, sites)| TestKey::new(name, *sites));
    let keys: Vec<_> = keys.collect();
    let guest = InMemoryGuest::boot(Arc::new(Registry::default()), &keys);
    let mut tables = found(&guest);
    tables.promises.text_gates = true;
    (tables, guest)
}

/// Returns the kernel's tables and memory.
fn kernel() -> (KernelTables, Arc<InMemoryGuest>) {
    let (mut tables, guest) = kernel_of(&KEYS);
    let Contents::Found(kernel) = &mut tables.contents else {
        panic!("just made")
    };
    let entries = &mut kernel.images[0].entries;
    assert_eq!(entries.len(), SITES.len());
    for (site, entry) in entries.iter_mut().enumerate() {
        entry.code = code(site);
        entry.target = code(site) + distance(site);
    }
    (tables, guest)
}

/// Writes `inc dword [counter]; jmp to`, for 32-bit mode, at an address.
fn count_and_jump(text: &mut [u8], at: u64, counter: u64, to: u64) {
    let low = |address: u64| (address as u32).to_le_bytes();
    let displacement = low(to.wrapping_sub(at + 11));
    let bytes = [&[0xff, 0x05][..], &low(counter), &[0xe9], &displacement].concat();
    let at = (at - TEXT) as usize;
    text[at..at + bytes.len()].copy_from_slice(&bytes);
}

/// Returns the kernel's text: a loop through every site. All other bytes are breakpoints, and the
/// guest ends when it reaches one.
fn text() -> Vec<u8> {
    let mut text = vec![0xcc; TEXT_BYTES];
    count_and_jump(&mut text, TEXT, COUNTER, code(0));
    for (site, (_, _, size)) in SITES.into_iter().enumerate() {
        let next = if site + 1 < SITES.len() {
            code(site + 1)
        } else {
            TEXT
        };
        let passed = PASSED + 8 * site as u64;
        count_and_jump(&mut text, code(site) + size as u64, passed, next);
        count_and_jump(&mut text, code(site) + distance(site), passed + 4, next);
        let at = (code(site) - TEXT) as usize;
        text[at..at + size].copy_from_slice(&instruction(site, false));
    }
    text
}

/// Returns a boot sector that enters protected mode and continues at the address in FLAG.
fn boot_sector() -> Vec<u8> {
    const START: u16 = 0x7c00;
    let word = |number: u16| number.to_le_bytes();
    let (pointer, protected) = (START + 64, START + 96);
    let real = [
        // cli; xor eax, eax; mov ds, ax; mov [FLAG], eax
        &[0xfa, 0x66, 0x31, 0xc0, 0x8e, 0xd8, 0x66, 0xa3, 0x10, 0x80][..],
        // lgdt [pointer]
        &[0x0f, 0x01, 0x16],
        &word(pointer),
        // mov eax, cr0; or al, 1; mov cr0, eax; jmp 8:protected
        &[0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0, 0xea],
        &word(protected),
        &word(8),
    ];
    let gdt = [
        &word(23)[..],
        &word(pointer + 6),
        &[0; 10],
        &[0xff, 0xff, 0, 0, 0, 0x9a, 0xcf, 0],
        &[0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0],
    ];
    let program = [
        // mov ax, 16; mov ds, ax; mov ss, ax
        &[0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8, 0x8e, 0xd0][..],
        // again: inc dword [COUNTER]; mov eax, [FLAG]; test eax, eax; jz again; jmp eax
        &[0xff, 0x05, 0x00, 0x80, 0, 0, 0xa1, 0x10, 0x80, 0, 0],
        &[0x85, 0xc0, 0x74, 0xf1, 0xff, 0xe0],
    ];
    let mut sector = real.concat();
    sector.resize(64, 0);
    sector.extend(gdt.concat());
    sector.resize(96, 0);
    sector.extend(program.concat());
    sector
}

/// Runs the test `name`. The attacher runs in a second process of the same program.
pub fn cut(name: &str, accelerator: Accelerator, memory: Memory) {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word, accelerator);
    }
    let _pages = match memory {
        Memory::Hugetlb => match super::huge_pages::reserve(32) {
            Some(reserved) => Some(reserved),
            None => return,
        },
        _ => None,
    };
    let Some(qemu) = Qemu::start_program(accelerator, memory, &boot_sector(), &["-no-reboot"])
    else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    write_image(guest.ram(), &kernel().1);
    guest.ram().write(TEXT_PHYSICAL, &text()).expect("RAM");
    let start = (TEXT_PHYSICAL as u32).to_le_bytes();
    guest.ram().write(FLAG, &start).expect("RAM");
    passes(&qemu, &guest, Some(false));
    drop(guest);
    let mut kills = 0;
    for killed in [Killed::Attacher, Killed::Both] {
        for access in [Access::Auto, Access::Process] {
            for on in [false, true] {
                kills += kill_after_each_byte(name, &qemu, access, killed, on);
            }
        }
    }
    kills += kill_after_each_byte(name, &qemu, Access::Auto, Killed::Attacher, false);
    kills += kill_after_each_byte(name, &qemu, Access::Auto, Killed::Counted, true);
    println!("{memory:?}: {kills} kills, no guest died");
}

/// Copies a made-up kernel into a guest, except to the memory of firmware and boot sector.
pub fn write_image(ram: &GuestRam, image: &InMemoryGuest) {
    let zeros = [0; 4096];
    for page in (0x1000..IMAGE_END).step_by(4096) {
        let mut bytes = [0; 4096];
        image.memory().read(page, &mut bytes).expect("memory");
        let firmware = (0x4000..TEXT_PHYSICAL).contains(&page);
        if bytes != zeros && !firmware {
            ram.write(page, &bytes).expect("RAM");
        }
    }
}

/// Kills attachers until one of them completes its change from `on`. Returns the number that were
/// killed.
fn kill_after_each_byte(
    name: &str,
    qemu: &Qemu,
    access: Access,
    killed: Killed,
    on: bool,
) -> usize {
    // The stride and the lengths have no common divisor, so both kinds of sites and each of the
    // three steps are reached.
    let stride = if std::env::var_os(ALL).is_some() {
        1
    } else {
        5
    };
    for (kills, bytes) in (1..).step_by(stride).enumerate() {
        let mut child = Command::new(std::env::current_exe().expect("a program"));
        child.args(["--exact", name, "--nocapture"]);
        let socket = qemu.socket("qmp");
        let word = format!("{}:{access:?}:{killed:?}:{bytes}", socket.display());
        let child = child.env(ATTACHER, word).stdout(Stdio::null());
        let status = child.status().expect("started");
        let what = format!("{access:?} {killed:?} {on}, byte {bytes}: {status}");
        let options = options_of(qemu.socket("qmp"), qemu.accelerator, access);
        let guest = super::qemu::attached(&options, DEADLINE, &what);
        if status.success() {
            passes(qemu, &guest, Some(!on));
            return kills;
        }
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{what}");
        match killed {
            Killed::Attacher => {
                // The last kills may come after the last write.
                let now = is_on(&guest, &what);
                passes(qemu, &guest, Some(now));
                put(&guest, on);
            }
            Killed::Counted => {
                agrees(&guest, &what);
                passes(qemu, &guest, None);
                put(&guest, on);
            }
            Killed::Both => {
                passes(qemu, &guest, None);
                put(&guest, on);
            }
        }
        passes(qemu, &guest, Some(on));
    }
    unreachable!("it does not end")
}

/// Returns whether the change is made. Fails if it is partial.
fn is_on(guest: &QemuGuest, what: &str) -> bool {
    let image = kernel().1;
    let mut states = Vec::new();
    for (site, (_, _, size)) in SITES.into_iter().enumerate() {
        let mut found = vec![0; size];
        let at = code(site) - TEXT + TEXT_PHYSICAL;
        guest.ram().read(at, &mut found).expect("RAM");
        let on = found == instruction(site, true);
        assert!(
            on || found == instruction(site, false),
            "{what}: site {site} {found:02x?}"
        );
        states.push(on);
    }
    for (name, _) in KEYS {
        let mut count = [0; 4];
        guest
            .ram()
            .read(image.count_address(name), &mut count)
            .expect("RAM");
        states.push(u32::from_le_bytes(count) == 1);
    }
    assert!(
        states.iter().all(|state| *state == states[0]),
        "{what}: a change in part, {states:?}"
    );
    states[0]
}

/// Checks that each site agrees with its key's count.
fn agrees(guest: &QemuGuest, what: &str) {
    let image = kernel().1;
    for (site, (key, _, size)) in SITES.into_iter().enumerate() {
        let mut count = [0; 4];
        let at = image.count_address(KEYS[key].0);
        guest.ram().read(at, &mut count).expect("RAM");
        let count = u32::from_le_bytes(count);
        let mut found = vec![0; size];
        let at = code(site) - TEXT + TEXT_PHYSICAL;
        guest.ram().read(at, &mut found).expect("RAM");
        let expected = instruction(site, count > 0);
        assert_eq!(found, expected, "{what}: site {site} of a key at {count}");
    }
}

/// Turns all keys on or off.
fn put(guest: &QemuGuest, on: bool) {
    let image = kernel().1;
    let paused = guest.pause(DEADLINE).expect("stopped");
    for site in 0..SITES.len() {
        let at = code(site) - TEXT + TEXT_PHYSICAL;
        let bytes = instruction(site, on);
        guest.ram().write(at, &bytes).expect("RAM");
    }
    for (name, _) in KEYS {
        let count = u32::from(on).to_le_bytes();
        let at = image.count_address(name);
        guest.ram().write(at, &count).expect("RAM");
    }
    drop(paused);
}

/// Waits until the vCPU has executed every site twice. If `on` is given, checks that it executed
/// the JMP (true) or the NOP (false) at every site.
fn passes(qemu: &Qemu, guest: &QemuGuest, on: Option<bool>) {
    for _ in 0..3 {
        qemu.runs(guest);
    }
    let Some(on) = on else { return };
    let counts = || -> Vec<u32> {
        let mut bytes = [0; 8 * SITES.len()];
        guest.ram().read(PASSED, &mut bytes).expect("RAM");
        let words = bytes.chunks_exact(4);
        words
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect()
    };
    let before = counts();
    for _ in 0..3 {
        qemu.runs(guest);
    }
    let after = counts();
    for site in 0..SITES.len() {
        let passed = [2 * site, 2 * site + 1].map(|at| before[at] != after[at]);
        assert_eq!(passed, [!on, on], "site {site} is passed as it is not");
    }
}

fn options_of(socket: PathBuf, accelerator: Accelerator, access: Access) -> Options {
    Options {
        access,
        ..options(socket, PauseWay::Freeze, accelerator)
    }
}

/// Runs the attacher to kill.
fn attacher(word: &str, accelerator: Accelerator) -> ! {
    let words: Vec<&str> = word.split(':').collect();
    let access = match words[1] {
        "Process" => Access::Process,
        _ => Access::Auto,
    };
    let options = options_of(words[0].into(), accelerator, access);
    let guest = super::qemu::attached(&options, DEADLINE, "the attacher to kill");
    let ram = Cutting {
        ram: guest.ram().clone(),
        left: AtomicUsize::new(words[3].parse().expect("a number")),
        watchdog: (words[2] == "Both").then(watchdog),
        counted: (words[2] == "Counted").then(|| kernel().1.count_address(KEYS[1].0)),
    };
    let guest = Arc::new(CutGuest {
        guest,
        ram: Arc::new(ram),
        with: (),
    });
    let (tables, image) = kernel();
    let mut count = [0; 4];
    let at = image.count_address(KEYS[0].0);
    guest.ram.read(at, &mut count).expect("RAM");
    let op = match u32::from_le_bytes(count) {
        0 => Op::Enable,
        _ => Op::Disable,
    };
    let registry = Arc::new(Registry::default());
    let (keys, _) =
        Keys::start(guest, Arc::clone(&registry), KeysConfig::default()).expect("a thread");
    registry.register_kernel(tables).expect("taken");
    let updates = KEYS.map(|(name, _)| KeyUpdate::new(name, op));
    let mut request = UpdateRequest::new(
        updates.to_vec(),
        "uid:0".to_owned(),
        DEADLINE,
        Instant::now() + DEADLINE,
    );
    request.force = true;
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let made = runtime.expect("threads").block_on(keys.update(request));
    match made {
        Ok(_) => std::process::exit(0),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1)
        }
    }
}

/// Returns the watchdog of this process. Polls, because a program that has just been started may
/// have no command line yet.
pub fn watchdog() -> Pid {
    let mut found = None;
    until("the watchdog runs", || {
        let processes = fs::read_dir("/proc").expect("mounted").flatten();
        found = processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .find(|id| is_watchdog(*id).unwrap_or_default());
        found.is_some()
    });
    Pid::from_raw(found.expect("just seen"))
}

/// Returns whether a process is the watchdog; `None` if it no longer exists.
fn is_watchdog(id: i32) -> Option<bool> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The format is "ID (NAME) STATE PARENT …".
    let parent = stat.rsplit(')').next()?.split_ascii_whitespace().nth(1)?;
    let line = fs::read(format!("/proc/{id}/cmdline")).ok()?;
    let named = line.split(|byte| *byte == 0).nth(1) == Some(b"watchdog");
    Some(named && parent == std::process::id().to_string())
}

/// Guest memory that kills this process after a number of stored bytes. An atomic write by the
/// kernel counts as one byte.
#[derive(Debug)]
struct Cutting {
    ram: GuestRam,
    left: AtomicUsize,
    /// The watchdog, if it is killed before this process.
    watchdog: Option<Pid>,
    /// The address of the count to which the guest adds a reference before the kill.
    counted: Option<u64>,
}

impl Cutting {
    fn count(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        if let Some(address) = self.counted {
            let mut count = [0; 4];
            self.ram.read(address, &mut count).expect("RAM");
            let more = match u32::from_le_bytes(count) {
                // Only a further reference is added, because the first would change sites.
                0 => 0,
                count => count + 1,
            };
            let more = more.to_le_bytes();
            self.ram.write(address, &more).expect("RAM");
        }
        die(self.watchdog);
    }
}

/// Kills the watchdog, if it is given, and then this process.
pub fn die(watchdog: Option<Pid>) -> ! {
    if let Some(watchdog) = watchdog {
        kill(watchdog, Signal::SIGKILL).expect("it lives");
        waitpid(watchdog, None).expect("a child");
    }
    raise(Signal::SIGKILL).expect("nothing forbids it");
    unreachable!("it is killed")
}

impl PhysicalMemory for Cutting {
    fn ram(&self) -> Vec<Range<u64>> {
        self.ram.ram()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        self.ram.read(address, bytes)
    }

    fn read_u64(&self, address: u64) -> Option<u64> {
        self.ram.read_u64(address)
    }
}

impl Ram for Cutting {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        self.ram.piece(address, length)
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        self.ram.read_piece(piece, bytes)
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        // An aligned word is stored in one step.
        let word = bytes.len() == 4 && piece.offset().is_multiple_of(4);
        if word {
            let written = self.ram.write_piece(piece, bytes);
            self.count();
            return written;
        }
        for (offset, byte) in (0..).zip(bytes) {
            let byte_of = Piece::new(piece.region(), piece.offset() + offset, 1);
            if !self.ram.write_piece(byte_of, &[*byte]) {
                return false;
            }
            self.count();
        }
        true
    }

    fn writes_whole(&self, piece: Piece) -> bool {
        self.ram.writes_whole(piece)
    }

    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        self.ram.compare_exchange_u32(piece, current, new)
    }

    fn can_exchange(&self) -> bool {
        self.ram.can_exchange()
    }

    fn is_dirty(&self, address: u64) -> bool {
        self.ram.is_dirty(address)
    }
}

/// A guest with memory that kills this process.
type CutGuest = Wrapped<()>;

impl Guest for CutGuest {
    type Paused<'a> = Paused<'a>;

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        self.guest.will_write(change)
    }

    fn pause(&self, timeout: std::time::Duration) -> Result<Paused<'_>, PauseError> {
        self.guest.pause(timeout)
    }
}
