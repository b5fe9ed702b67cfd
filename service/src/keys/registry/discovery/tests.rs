// SPDX-License-Identifier: Apache-2.0
mod panicked;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;

use patchbay_guest::abi;
use patchbay_guest::guest::Guest;
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use static_keys::{Busy, Concerns, Op};
use zerocopy::FromBytes;

use super::super::{KernelTables, requests};
use super::*;
use crate::keys::{ClosedGate, KeyUpdate, Keys, KeysConfig, KeysError, UpdateRequest};
use crate::testing::{Discovered, discovered_after, found as as_discovered};
use patchbay_guest::testing::{InMemoryGuest, TestKey, Told};

/// A guest without a kernel that could be discovered.
#[derive(Debug, Default)]
struct Empty {
    asked: AtomicUsize,
    resets: AtomicU64,
    memory: AtomicU64,
    registers: Mutex<Registers>,
    /// The number of requests for registers that fail at first.
    late: AtomicUsize,
    confirms: AtomicBool,
    /// The number of searches of the memory.
    searched: AtomicUsize,
}

/// The monitor's answer to a request for registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Registers {
    #[default]
    Known,
    Late,
    Never,
}

impl Empty {
    /// Returns the number of requests for registers; each discovery makes several.
    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl PhysicalMemory for Empty {
    fn ram(&self) -> Vec<Range<u64>> {
        self.searched.fetch_add(1, Ordering::SeqCst);
        Vec::new()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        Err(OutsideMemory { address, length })
    }
}

impl Discoverable for Empty {
    fn memory(&self) -> &dyn PhysicalMemory {
        self
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        let asked = self.asked.fetch_add(1, Ordering::SeqCst);
        if asked < self.late.load(Ordering::SeqCst) {
            return Err("the guest is held stopped".to_owned());
        }
        match *self.registers.lock().expect("no panic") {
            Registers::Known => Ok(Some(Vec::new())),
            Registers::Late => Err("no answer within 2 s".to_owned()),
            Registers::Never => Ok(None),
        }
    }

    fn resets(&self) -> u64 {
        self.resets.load(Ordering::SeqCst)
    }

    fn confirms(&self) -> bool {
        self.confirms.load(Ordering::SeqCst)
    }

    fn is_held(&self) -> bool {
        false
    }

    fn memory_changes(&self, _anyway: bool) -> u64 {
        self.memory.load(Ordering::SeqCst)
    }
}

fn keys() -> [TestKey; 1] {
    [TestKey::new("alpha", 2)]
}

/// The kernel that the guest has described last, as a discovery would find it.
fn found(guest: &InMemoryGuest) -> KernelTables {
    let (descriptor, _) =
        abi::Descriptor::read_from_prefix(&guest.last_request()).expect("a whole page");
    let mut tables = requests::tables(guest.ram(), &descriptor).expect("a kernel");
    tables.boot ^= 1;
    tables.generation ^= 1;
    tables.discovery = Some(discovered_after(0));
    tables
}

#[test]
fn a_refused_discovery_leaves_the_last_one() {
    let guest = InMemoryGuest::boot(Arc::<Registry>::default(), &keys());
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    registry.register_kernel(found(&guest)).expect("taken");
    let damages: [fn(&mut KernelTables); 2] = [
        |tables| tables.generation = 0,
        |tables| tables.page_table.root = !0xfff,
    ];
    for damage in damages {
        let mut damaged = found(&guest);
        damage(&mut damaged);
        registry.register_kernel(damaged).expect_err("damaged");
        assert_eq!(phase(&registry), (RegistrationPhase::Registered, true));
        registry.snapshot().expect("the last one");
    }
    // A kernel's own registration replaces a discovery, even if it is refused.
    let mut damaged = found(&guest);
    (damaged.generation, damaged.discovery) = (0, None);
    registry.register_kernel(damaged).expect_err("damaged");
    assert_eq!(phase(&registry).0, RegistrationPhase::Refused);
}

fn phase(registry: &Registry) -> (RegistrationPhase, bool) {
    let description = registry.describe();
    (description.phase, description.discovery.is_some())
}

#[test]
fn a_kernel_that_registers_itself_is_not_searched_for() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &keys());
    registry.snapshot().expect("registered");
    assert_eq!(empty.asked(), 0);
    // Another kernel may run now, so a kernel is searched for. If the search fails, the reason is
    // kept.
    assert_eq!(guest.unregister(), 0);
    let error = registry.snapshot().expect_err("withdrawn").to_string();
    assert!(error.contains("taken its registration back"), "{error}");
    let searched = empty.asked();
    assert!(searched > 0);
    assert_eq!(phase(&registry).0, RegistrationPhase::Withdrawn);
    // A registration from before a reset is no longer valid.
    assert_eq!(guest.register_again(), 0);
    registry.snapshot().expect("registered");
    empty.resets.fetch_add(1, Ordering::SeqCst);
    registry.snapshot().expect_err("reset");
    assert!(empty.asked() > searched);
    assert_eq!(phase(&registry).0, RegistrationPhase::Absent);
}

#[test]
fn a_kernel_whose_registration_was_refused_is_not_searched_for() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    registry.attach(guest.ram().clone());
    assert_ne!(guest.request(abi::OP_REGISTER, &[0xff; 64]), 0);
    let error = registry.snapshot().expect_err("refused").to_string();
    assert!(error.contains("registration was refused"), "{error}");
    assert_eq!(phase(&registry).0, RegistrationPhase::Refused);
    assert_eq!(empty.asked(), 0);
}

#[test]
fn a_failed_discovery_leaves_the_reason_and_rests() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    registry.attach(guest.ram().clone());
    // On a busy machine, the time between two attempts may have passed before the next call.
    let rested = (0..100).any(|_| {
        let before = empty.asked();
        let error = registry.snapshot().expect_err("nothing there").to_string();
        assert!(error.contains("were not discovered: "), "{error}");
        before > 0 && empty.asked() == before
    });
    assert!(rested, "each call searches");
    assert_eq!(phase(&registry), (RegistrationPhase::Absent, false));
}

fn keys_of(guest: &Arc<InMemoryGuest>, registry: &Arc<Registry>) -> Keys {
    Keys::start(
        Arc::clone(guest),
        Arc::clone(registry),
        KeysConfig::default(),
    )
    .expect("a thread")
    .0
}

/// Returns a deadline that only a failing test reaches.
fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[tokio::test]
async fn a_busy_guest_is_looked_at_until_the_deadline() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    let keys = keys_of(&guest, &registry);
    // The guest is busy three times. Then it runs no kernel, so waiting does not help.
    empty.late.store(3, Ordering::SeqCst);
    keys.find_kernel(late()).await;
    assert!(empty.asked() > 3, "{}", empty.asked());
    let error = registry
        .known()
        .map(drop)
        .expect_err("nothing there")
        .to_string();
    assert!(error.contains("no kernel was found"), "{error}");

    // A deadline that has passed ends the wait after one attempt.
    empty.resets.fetch_add(1, Ordering::SeqCst);
    empty.late.store(usize::MAX, Ordering::SeqCst);
    let before = empty.asked();
    keys.find_kernel(Instant::now()).await;
    assert_eq!(empty.asked(), before + 1);
    let error = registry.known().map(drop).expect_err("busy").to_string();
    assert!(error.contains("the guest is held stopped"), "{error}");
}

#[tokio::test]
async fn a_change_waits_for_a_busy_guest_and_names_it_at_its_deadline() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    let keys = keys_of(&guest, &registry);
    empty.late.store(3, Ordering::SeqCst);
    let second = Duration::from_secs(1);
    let updates = vec![KeyUpdate::new("alpha", Op::Enable)];
    let request = UpdateRequest::new(updates, "test".to_owned(), second, late());
    let error = keys
        .update(request)
        .await
        .expect_err("no kernel")
        .to_string();
    assert!(error.contains("no kernel was found"), "{error}");
    assert!(empty.asked() > 3, "{}", empty.asked());
}

#[test]
fn a_module_that_was_left_out_is_named() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &keys());
    guest.discover_with(
        &registry,
        FileUse {
            path: "vmlinux".into(),
            data_symbols: false,
            types: true,
            compared: 1,
            build_id: true,
        },
    );
    let registration = registry.snapshot().expect("discovered").registration;
    let error = registration.find("stuck:own").expect_err("not live");
    assert!(
        matches!(
            error,
            KeysError::Busy {
                kind: ClosedGate::ModuleState,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("stuck is not LIVE (COMING)"),
        "{error}"
    );
    registration.find("alpha").expect("a key of the kernel");
    for name in ["alpha_", "stuck", "other:own"] {
        let error = registration.find(name).expect_err("no such key");
        assert!(matches!(error, KeysError::KeyNotFound { .. }), "{error}");
    }
    let user = |module| {
        let key = Arc::from("alpha");
        registration.name_user(&Busy::UnknownModule { key, module })
    };
    let stuck = registration
        .discovery
        .as_ref()
        .expect("discovered")
        .left_out[0]
        .address;
    let named = user(stuck).expect("known");
    assert!(
        named.contains("key alpha") && named.contains("stuck"),
        "{named}"
    );
    assert_eq!(user(stuck + 64), None);
}

/// A kernel that ran before a reset is still in RAM, with open gates. Only the registers show that
/// it does not run.
#[test]
fn memory_is_searched_without_registers_only_if_the_monitor_never_has_them() {
    let registry = Arc::new(Registry::default());
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    *empty.registers.lock().expect("no panic") = Registers::Late;
    let error = registry.snapshot().expect_err("not known").to_string();
    assert!(
        error.contains("the registers of its vCPUs are not known: no answer within 2 s"),
        "{error}"
    );
    assert_eq!(empty.asked(), 1, "the monitor has had its time");
    assert_eq!(empty.searched.load(Ordering::SeqCst), 0);

    *empty.registers.lock().expect("no panic") = Registers::Never;
    empty.resets.fetch_add(1, Ordering::SeqCst);
    let error = registry.snapshot().expect_err("no kernel").to_string();
    assert!(!error.contains("registers"), "{error}");
    assert!(empty.searched.load(Ordering::SeqCst) > 0);
}

#[test]
fn a_registration_replaces_a_discovery_and_no_discovery_replaces_it() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &keys());
    let tables = found(&guest);
    let ours = registry.describe().generation;
    let refused = registry.register_kernel(tables.clone()).expect_err("ours");
    assert!(
        refused.to_string().contains("registers itself"),
        "{refused}"
    );
    assert_eq!(registry.describe().generation, ours);
    // The same kernel runs, and has withdrawn its registration.
    assert_eq!(guest.unregister(), 0);
    registry
        .register_kernel(tables.clone())
        .expect_err("withdrawn");
    assert_eq!(phase(&registry), (RegistrationPhase::Withdrawn, false));
    // Another kernel, started by kexec.
    let mut other = tables;
    other.release = "6.12.0-stock".to_owned();
    registry.register_kernel(other).expect("another kernel");
    assert_eq!(phase(&registry), (RegistrationPhase::Registered, true));
    assert_eq!(guest.register_again(), 0);
    assert_eq!(phase(&registry), (RegistrationPhase::Registered, false));
}

/// A known kernel whose gates are the counts of three keys.
/// Returns a gate that is open while the count of this key is 0.
fn gate(kernel: &Registration, kind: GateKind, name: &str) -> ListedGate {
    ListedGate {
        kind,
        name: Arc::default(),
        address: kernel.find(name).expect("a key").id.0,
        width: 4,
        mask: u64::MAX,
        wanted: 0,
        concerns: Concerns::ALL,
        per_cpu: false,
    }
}

#[test]
fn a_known_kernel_stays_while_it_is_busy_and_is_forgotten_when_another_runs() {
    let names = ["kernel", "modules", "idle"];
    let guest = InMemoryGuest::boot(
        Arc::<Registry>::default(),
        &names.map(|name| TestKey::new(name, 1)),
    );
    let registry = Registry::default();
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    registry.attach(guest.ram().clone());
    registry
        .register_kernel(as_discovered(&guest))
        .expect("taken");
    let snapshot = registry.snapshot().expect("taken");
    let gate = |name: &str, mask| {
        let open = gate(&snapshot.registration, GateKind::SameKernel, name);
        vec![ListedGate { mask, ..open }]
    };
    let discovery = registry.discovery.get().expect("just set");
    *discovery.state.lock().expect("not poisoned") = State {
        kernel: gate("kernel", u64::MAX),
        modules: gate("modules", u64::MAX),
        idle: gate("idle", !7),
        ..State::default()
    };
    let searched = empty.asked();
    registry.snapshot().expect("nothing has changed");
    // A search that fails is repeated, and the known kernel is kept.
    empty.memory.fetch_add(1, Ordering::SeqCst);
    registry.snapshot().expect("the memory has changed");
    assert!(empty.asked() > searched);
    discovery.state.lock().expect("not poisoned").next = None;
    let searched = empty.asked();
    registry.snapshot().expect("it is still another memory");
    assert!(empty.asked() > searched);
    empty.memory.store(0, Ordering::SeqCst);
    let mut state = discovery.state.lock().expect("not poisoned");
    (state.next, state.refused) = (None, 0);
    drop(state);
    let searched = empty.asked();
    registry.snapshot().expect("nothing has changed");
    assert_eq!(empty.asked(), searched);

    guest.set_count("modules", 1);
    // A mutex whose holder hangs delays the search but does not prevent it.
    guest.set_count("idle", 8);
    registry.snapshot().expect("other modules, not found yet");
    assert!(empty.asked() > searched);

    guest.set_count("kernel", 1);
    let next = discovery.state.lock().expect("not poisoned").next;
    while next.is_some_and(|next| Instant::now() < next) {
        thread::yield_now();
    }
    let error = registry.snapshot().expect_err("another kernel").to_string();
    assert!(error.contains("were not discovered: "), "{error}");
}

/// A discovered kernel, and the service for its keys.
fn served() -> (Arc<InMemoryGuest>, Arc<Empty>, Keys) {
    let guest = InMemoryGuest::boot(Arc::<Registry>::default(), &keys());
    let registry = Registry::default();
    let empty = Arc::new(Empty::default());
    registry.discover(empty.clone(), None);
    registry.attach(guest.ram().clone());
    let mut tables = as_discovered(&guest);
    tables.discovery = found(&guest).discovery;
    (tables.promises.fence, tables.promises.text_gates) = (false, true);
    registry.register_kernel(tables).expect("taken");
    let started = Keys::start(guest.clone(), Arc::new(registry), KeysConfig::default());
    (guest, empty, started.expect("a thread").0)
}

async fn enable(keys: &Keys) -> Result<(), KeysError> {
    let second = Duration::from_secs(1);
    let updates = vec![KeyUpdate::new("alpha", Op::Inc)];
    let mut request =
        UpdateRequest::new(updates, "test".to_owned(), second, Instant::now() + second);
    request.allow_guarded = true;
    keys.update(request).await.map(drop)
}

/// The memory of a kernel that ended at a reset passes every gate.
#[tokio::test]
async fn a_guest_that_is_reset_after_the_plan_is_not_changed() {
    let (guest, empty, keys) = served();
    enable(&keys).await.expect("it runs");
    assert_eq!(guest.count("alpha"), 1);
    let told = [Told::WillWrite(None), Told::Begins];
    assert_eq!(guest.told(), [&told[..], &[Told::Made]].concat());
    guest.on_pause(move || {
        empty.resets.fetch_add(1, Ordering::SeqCst);
    });
    let error = enable(&keys).await.expect_err("reset").to_string();
    assert!(error.contains("were not discovered: "), "{error}");
    assert_eq!(guest.count("alpha"), 1);
    assert_eq!(guest.told(), told, "it was not made");
}

/// Another client loads a snapshot while the guest is stopped for a change.
#[tokio::test]
async fn the_counts_of_a_snapshot_that_is_loaded_after_the_writes_stay() {
    for (loaded, left) in [(7, 7), (1, 0)] {
        let (guest, empty, keys) = served();
        let stopped = Arc::clone(&guest);
        guest.on_check(move || {
            stopped.set_count("alpha", loaded);
            empty.resets.fetch_add(1, Ordering::SeqCst);
        });
        enable(&keys).await.expect_err("another state");
        // If the memory still holds all writes, no snapshot has replaced it, and the writes are
        // undone.
        assert_eq!(guest.count("alpha"), left);
        assert!(!guest.told().contains(&Told::Made));
    }
}

/// A reset that the monitor reports late or not at all.
#[tokio::test]
async fn a_guest_whose_vcpus_do_not_run_the_kernel_is_not_changed() {
    let (guest, empty, keys) = served();
    empty.confirms.store(true, Ordering::SeqCst);
    let pauses = guest.pauses();
    let error = enable(&keys)
        .await
        .expect_err("no vCPU runs it")
        .to_string();
    assert!(error.contains("were not discovered: "), "{error}");
    assert_eq!((guest.count("alpha"), guest.pauses()), (0, pauses));
    // If the registers are late, the change is refused for that reason. A monitor that never
    // provides registers cannot be asked.
    let (guest, empty, keys) = served();
    empty.confirms.store(true, Ordering::SeqCst);
    *empty.registers.lock().expect("no panic") = Registers::Late;
    let error = enable(&keys).await.expect_err("not known").to_string();
    assert!(error.contains("no answer within 2 s"), "{error}");
    assert_eq!(guest.count("alpha"), 0);
    *empty.registers.lock().expect("no panic") = Registers::Never;
    enable(&keys).await.expect("nothing can be asked");
}

/// A guest whose discovery does not end until the test permits it.
#[derive(Debug)]
struct Slow {
    begun: mpsc::Sender<()>,
    end: Mutex<mpsc::Receiver<()>>,
    held: AtomicBool,
    empty: Empty,
}

impl Discoverable for Slow {
    fn memory(&self) -> &dyn PhysicalMemory {
        &self.empty
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        let _ = self.begun.send(());
        let _ = self.end.lock().expect("not poisoned").recv();
        Ok(Some(Vec::new()))
    }

    fn resets(&self) -> u64 {
        0
    }

    fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }
}

/// A discovery on another thread must not delay the end of an operator's pause.
#[test]
fn who_holds_the_guest_waits_for_no_discovery() {
    let registry = Registry::default();
    let (begun, has_begun) = mpsc::channel();
    let (end, ends) = mpsc::channel();
    let guest = Arc::new(Slow {
        begun,
        end: Mutex::new(ends),
        held: AtomicBool::new(false),
        empty: Empty::default(),
    });
    registry.discover(guest.clone(), None);
    thread::scope(|scope| {
        scope.spawn(|| registry.snapshot().map(drop));
        has_begun.recv().expect("the discovery has begun");
        guest.held.store(true, Ordering::SeqCst);
        let (answered, answer) = mpsc::channel();
        let registry = &registry;
        scope.spawn(move || answered.send(registry.snapshot().is_err()));
        // Only a failure takes this long.
        let answer = answer.recv_timeout(Duration::from_secs(10));
        drop(end);
        assert_eq!(answer, Ok(true), "no answer while the discovery runs");
    });
}
