// SPDX-License-Identifier: Apache-2.0
//! Tests a stock kernel in QEMU. Its keys are found and changed from outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use patchbay_attach::PauseWay;
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::Guest;
use patchbay_lab::cpio::Archive;
use patchbay_service::keys::debug::DebugQueries;
use patchbay_service::keys::{DebugListQuery, DebugView};
use patchbay_service::keys::{
    HoldQuery, KeyUpdate, Keys, ListQuery, ReleaseRequest, Selection, Target, UpdateRequest,
};
use static_keys::{Class, Op};

use super::{Accelerator, DEADLINE, Memory, Qemu, hotplug};

/// The variable that names kernels of distributions, separated by colons. The first one is booted.
const KERNEL: &str = "PATCHBAY_TEST_DISTRO_KERNELS";
/// Makes the kernel announce a device again and again, and prints a line each time. So the test
/// sees that the guest runs.
const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t sysfs s /sys
/bin/busybox echo READY
while :; do
    /bin/busybox usleep 100000
    /bin/busybox echo change > /sys/class/mem/null/uevent
    /bin/busybox echo alive
done
";
/// The variable that names the archive of the first kernel's modules, among them KVM's. The archive
/// also contains /bin/busybox.
const MODULES: &str = "PATCHBAY_TEST_DISTRO_MODULES";
/// Loads a module once the DIMM above 4 GiB is in use. Kernel memory below 4 GiB is then used only
/// if there is no other. Some kernels put new memory into use automatically.
const LOADER: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t sysfs s /sys
/bin/busybox echo READY
cd /sys/devices/system/memory
until /bin/busybox grep -qs online memory32/state; do
    /bin/busybox usleep 100000
    /bin/busybox grep -qs offline memory32/state && /bin/busybox echo online_kernel > memory32/state
done
/bin/busybox insmod /modules/*-overlay.ko && /bin/busybox echo LOADED
while :; do
    /bin/busybox usleep 100000
    /bin/busybox echo alive
done
";
/// Timeout for a boot, and for the guest's output.
const BOOT: Duration = Duration::from_secs(600);
/// The lines of pr_debug() that the guest's loop passes.
pub const DEBUG: &str = "file lib/kobject_uevent.c func kobject_uevent*";

fn kernel() -> Option<(PathBuf, Vec<u8>)> {
    let kernel = std::env::var(KERNEL)
        .ok()
        .and_then(|list| list.split(':').next().map(PathBuf::from));
    let busybox = fs::read("/bin/busybox").ok();
    if kernel.is_none() || busybox.is_none() {
        eprintln!("SKIPPED: it needs /bin/busybox, and a kernel named by {KERNEL}");
    }
    kernel.zip(busybox)
}

/// Returns the archive of the first kernel's modules. Prints a message and returns `None` if there
/// is none.
pub fn modules() -> Option<Vec<u8>> {
    let archive = std::env::var_os(MODULES).and_then(|path| fs::read(path).ok());
    if archive.is_none() {
        eprintln!("SKIPPED: {MODULES} names no archive of modules; `cargo xtask test` names it");
    }
    archive
}

pub fn wait_for(console: &Path, words: &str, times: usize) {
    let end = Instant::now() + BOOT;
    loop {
        let text = String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned();
        if text.matches(words).count() >= times {
            return;
        }
        assert!(Instant::now() < end, "no {words:?} on the console: {text}");
        // QEMU writes the console to a file, which gives no event, so this polls.
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn occurrences(console: &Path, words: &str) -> usize {
    let text = fs::read(console).unwrap_or_default();
    String::from_utf8_lossy(&text).matches(words).count()
}

/// Lists keys until the guest has booted. The calls are refused while firmware runs or the kernel
/// boots.
pub fn boots(console: &Path, list: impl Fn() -> Result<(), String>) {
    let end = Instant::now() + BOOT;
    let mut last = String::new();
    loop {
        match list() {
            Ok(()) => return wait_for(console, "READY", 1),
            // A failed discovery is not repeated at once, so the same error may be reported again.
            Err(error) if error == last => {}
            Err(error) => {
                println!("while it boots: {error}");
                last = error;
            }
        }
        assert!(
            Instant::now() < end,
            "the guest does not boot: {last}; its console: {}",
            String::from_utf8_lossy(&fs::read(console).unwrap_or_default())
        );
    }
}

fn update(keys: Target, op: Op) -> UpdateRequest {
    UpdateRequest::new(
        vec![KeyUpdate { keys, op }],
        "uid:0".to_owned(),
        DEADLINE,
        Instant::now() + DEADLINE,
    )
}

/// Checks that an LSM hook is never changed, and that the refusal comes before the first write.
async fn never(keys: &Keys) {
    let query = ListQuery {
        page_size: 1,
        keys: Selection {
            classes: vec![Class::Never],
            ..Selection::default()
        },
        ..ListQuery::default()
    };
    let page = keys.list(&query).expect("found");
    println!("{} keys are never changed", page.total);
    // Kernels before 6.12 have no such key.
    let Some(hook) = page.keys.first() else {
        return;
    };
    assert!(hook.name.starts_with("security_hook_active_"), "{hook:?}");
    let mut request = UpdateRequest::new(
        vec![KeyUpdate::new(&*hook.name, Op::Enable)],
        "uid:0".to_owned(),
        DEADLINE,
        Instant::now() + DEADLINE,
    );
    (request.allow_guarded, request.force) = (true, true);
    let refused = keys.update(request).await.expect_err("never");
    assert_eq!(refused.reason(), "KEY_NEVER", "{refused}");
}

/// The boot files of a guest, and the path to which QEMU writes its console.
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub console: PathBuf,
    pub folder: tempfile::TempDir,
}

impl Boot {
    /// With `noxsave`, because KVM in the lab reports a size of the XSAVE area that is not that of
    /// the guest's components. Linux 7.3 then ends with a panic in fpu__init_system_xstate(), and
    /// earlier kernels warn.
    pub const COMMAND_LINE: &str = "console=ttyS0 panic=-1 ignore_loglevel noxsave";
    /// The output of the lines of [`DEBUG`].
    pub const PRINTED: &str = "kobject: 'null'";

    /// Prepares the boot files. Prints a message and returns `None` if there is no kernel.
    pub fn prepare() -> Option<Self> {
        Self::with(INIT, &[], Vec::new())
    }

    /// Prepares a boot with this first program, these further programs and this further archive.
    pub fn with(init: &[u8], more: &[(&str, &[u8])], archive: Vec<u8>) -> Option<Self> {
        let (kernel, busybox) = kernel()?;
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| folder.path().join(name);
        let mut files = Archive::default();
        for folder in ["dev", "bin", "sys", "proc"] {
            files.directory(folder);
        }
        files.character_device("dev/console", 5, 1);
        let own = [("bin/busybox", &busybox[..]), ("init", init)];
        for (name, content) in own.iter().chain(more) {
            files.file(name, 0o755, content);
        }
        // The kernel unpacks the archives one after the other.
        let initrd = [archive, files.finish()].concat();
        fs::write(path("initrd"), initrd).expect("room");
        Some(Self {
            kernel,
            initrd: path("initrd"),
            console: path("console"),
            folder,
        })
    }

    /// Starts QEMU. Prints a message and returns `None` if QEMU is not installed.
    pub fn start(&self, accelerator: Accelerator, memory: Memory, more: &[&str]) -> Option<Qemu> {
        // The QEMU to which the guest migrates writes into the same file.
        let console = format!("file,id=console,append=on,path={}", self.console.display());
        let (kernel, initrd) = (
            self.kernel.display().to_string(),
            self.initrd.display().to_string(),
        );
        let arguments = [
            "-kernel",
            &kernel,
            "-initrd",
            &initrd,
            "-append",
            Self::COMMAND_LINE,
            "-chardev",
            &console,
            "-serial",
            "chardev:console",
        ];
        Qemu::start_with(accelerator, memory, "512M", &[&arguments, more].concat())
    }

    /// Waits until the guest's first program runs.
    pub fn boots(&self) {
        wait_for(&self.console, "READY", 1);
    }

    /// Waits until the guest has printed a few lines of [`DEBUG`].
    pub fn prints(&self) {
        wait_for(&self.console, Self::PRINTED, self.printed() + 3);
    }

    /// Waits until the guest has passed [`DEBUG`] a few times, and checks that it printed nothing.
    pub fn is_silent(&self) {
        self.lives();
        let before = self.printed();
        self.lives();
        assert_eq!(self.printed(), before, "the lines are off");
    }

    /// Waits until the guest has run for a while.
    pub fn lives(&self) {
        let alive = occurrences(&self.console, "alive");
        wait_for(&self.console, "alive", alive + 3);
    }

    fn printed(&self) -> usize {
        occurrences(&self.console, Self::PRINTED)
    }

    /// Returns the number of the kernel's complaints on the console.
    pub fn complaints(&self) -> usize {
        let words = ["WARNING:", "BUG:", "Oops"].into_iter();
        words.map(|word| occurrences(&self.console, word)).sum()
    }
}

/// Checks that keys are found, and that a key can be changed and changed back. Then resets the
/// guest and checks that its kernel is discovered again.
pub async fn stock(accelerator: Accelerator, way: PauseWay, memory: Memory) {
    let Some(boot) = Boot::prepare() else {
        return;
    };
    let Some(qemu) = boot.start(accelerator, memory, &[]) else {
        return;
    };
    let (guest, keys) = qemu.keys(way);
    let label = format!("{accelerator:?} {way:?} {memory:?}");
    let (query, queries, first) =
        flips(&boot, &keys, &label, accelerator == Accelerator::Kvm).await;
    let console = &boot.console;
    reset(&qemu, &*guest, console, &keys, &query, &first).await;
    keys.update(update(Target::Debug(queries), Op::Enable))
        .await
        .expect("changed");
    boot.lives();
}

/// Waits until the guest has booted, and turns lines of pr_debug() on, off and on. With `prints`
/// the guest must execute the changed code. Returns the queries that were used, and the name of a
/// key.
pub async fn flips(
    boot: &Boot,
    keys: &Keys,
    label: &str,
    prints: bool,
) -> (ListQuery, DebugQueries, String) {
    let console = &boot.console;
    let query = ListQuery {
        page_size: 10_000,
        ..ListQuery::default()
    };
    boots(console, || {
        keys.list(&query)
            .map(drop)
            .map_err(|error| error.to_string())
    });
    let began = Instant::now();
    let page = keys.list(&query).expect("the keys are found");
    let description = keys.describe();
    println!(
        "{label}: {} of {} keys, {} sites, {} modules found in {:?}",
        page.keys.len(),
        description.keys,
        description.sites,
        description.modules,
        began.elapsed()
    );
    assert!(
        description.keys > 1000 && description.sites > 2000,
        "{description:?}"
    );
    never(keys).await;
    let queries = DebugQueries::parse(&[DEBUG.to_owned()]).expect("well-formed");
    let lines = keys
        .list_debug_sites(&DebugListQuery {
            page_size: 100,
            queries: queries.clone(),
            ..DebugListQuery::default()
        })
        .expect("they are found");
    for DebugView { key, site, .. } in &lines.sites {
        println!("{key}: {}() {:?}", site.function, site.format);
    }
    assert!(lines.total > 0, "there are such lines");
    let first = lines.sites[0].key.to_string();
    boot.is_silent();
    for (op, on) in [(Op::Enable, true), (Op::Disable, false), (Op::Enable, true)] {
        let outcome = keys
            .update(update(Target::Debug(queries.clone()), op))
            .await
            .expect("changed");
        println!("{op:?}: {:?} {:?}", outcome.summary, outcome.report);
        assert!(outcome.summary.sites_patched > 0, "{:?}", outcome.summary);
        let details = keys.get(&first, 10, "").expect("it is there");
        assert_eq!(details.key.count != 0, on);
        if prints && on {
            boot.prints();
        }
        boot.lives();
    }
    (query, queries, first)
}

/// Turns lines of pr_debug() off.
pub async fn turns_off(keys: &Keys, queries: DebugQueries) {
    let off = update(Target::Debug(queries), Op::Disable);
    keys.update(off).await.expect("changed");
}

/// Resets the guest, whose key `on` is held, and lists keys until the guest has booted again. Each
/// answer is a refusal or the keys of the running kernel. The holds end with the first kernel.
async fn reset(
    qemu: &Qemu,
    guest: &impl Discoverable,
    console: &Path,
    keys: &Keys,
    query: &ListQuery,
    on: &str,
) {
    let held = || {
        let all = HoldQuery {
            page_size: 10,
            ..HoldQuery::default()
        };
        let holds = keys.holds(&all).expect("listed").holds;
        holds.into_iter().map(|hold| hold.id).collect::<Vec<_>>()
    };
    let ids = held();
    assert!(!ids.is_empty());
    let (before, resets) = (keys.describe().generation, guest.resets());
    qemu.other("system_reset", serde_json::Value::Null);
    let end = Instant::now() + BOOT;
    let (mut last, mut gone) = (String::new(), false);
    loop {
        let booted = occurrences(console, "READY") > 1;
        gone |= guest.resets() != resets;
        match keys.list(query) {
            Ok(page) => {
                if keys.describe().generation == before {
                    assert!(!gone && !booted, "keys of the kernel before the reset");
                    continue;
                }
                gone = true;
                let key = page.keys.iter().find(|key| *key.name == *on);
                let key = key.expect("the kernel has the same keys");
                assert_eq!((key.count, key.held_references), (0, 0), "{key:?}");
                if booted {
                    break;
                }
            }
            Err(error) => {
                gone = true;
                assert_eq!(error.reason(), "GUEST_NOT_REGISTERED", "{error}");
                let error = error.to_string();
                if error != last {
                    println!("after the reset: {error}");
                    last = error;
                }
            }
        }
        assert!(Instant::now() < end, "the guest does not boot: {last}");
        // Neither the guest nor its console announces new output, so this polls.
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(held(), Vec::<String>::new());
    let release = ReleaseRequest {
        ids,
        caller: "uid:0".into(),
        force: false,
        request_id: None,
        summary_only: false,
        stop_timeout: DEADLINE,
        deadline: Instant::now() + DEADLINE,
    };
    let refused = keys.release(release).await.expect_err("they are void");
    assert_eq!(refused.reason(), "HOLD_NOT_FOUND", "{refused}");
}

/// Checks that a module in plugged-in memory is found, and that its lines can be turned on and off.
pub async fn plugged_in(accelerator: Accelerator, way: PauseWay, memory: Memory) {
    let Some(boot) = modules().and_then(|modules| Boot::with(LOADER, &[], modules)) else {
        return;
    };
    let Some(qemu) = boot.start(accelerator, memory, &["-m", "512M,slots=2,maxmem=2G"]) else {
        return;
    };
    let (guest, keys) = qemu.keys(way);
    let list = || keys.list(&ListQuery::default()).map(drop);
    boots(&boot.console, || list().map_err(|error| error.to_string()));
    list().expect("the keys are found");
    let before = guest.memory().changes();
    let address = hotplug::dimm(&qemu, memory != Memory::Private, "dimm");
    assert_eq!(address, 4 << 30);
    wait_for(&boot.console, "LOADED", 1);
    let written = || (address..address + hotplug::SIZE).step_by(4096);
    let written = || written().any(|page| guest.ram().is_dirty(page));
    assert!(!written());
    let queries = DebugQueries::parse(&["module overlay".to_owned()]).expect("well-formed");
    for op in [Op::Enable, Op::Disable] {
        let began = Instant::now();
        let outcome = keys
            .update(update(Target::Debug(queries.clone()), op))
            .await
            .expect("changed");
        println!(
            "{op:?} in {:?}: {:?} {:?}",
            began.elapsed(),
            outcome.summary,
            outcome.report
        );
        assert!(outcome.summary.sites_patched > 0, "{:?}", outcome.summary);
        boot.lives();
    }
    assert!(guest.memory().changes() > before);
    assert!(written(), "the module lies there");
}
