// SPDX-License-Identifier: Apache-2.0
//! Tests that nothing is allocated while the guest is stopped. The thread that holds the
//! allocator's lock may be waiting for a core, and the stopped guest would have to wait too.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use patchbay_guest::console::Console;
use patchbay_guest::guest::{Guest, GuestDescription, Machine, PausedGuest};
use patchbay_guest::memory::GuestRam;
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_service::keys::{KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};
use static_keys::Op;

thread_local! {
    /// Number of allocator calls while this thread holds a guest stopped.
    static CALLS: Cell<Option<usize>> = const { Cell::new(None) };
}

struct Counting;

impl Counting {
    fn count() {
        // This fails while the thread ends, because the variable then no longer exists.
        let _ = CALLS.try_with(|calls| calls.set(calls.get().map(|calls| calls + 1)));
    }
}

// SAFETY: forwards every call unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        Self::count();
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static CALLS_WHILE_STOPPED: AtomicUsize = AtomicUsize::new(0);

struct Watched(Arc<InMemoryGuest>);

struct WatchedPause<P>(P);

impl Machine for Watched {
    fn description(&self) -> GuestDescription {
        self.0.description()
    }

    fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    fn shut_down(&self) {
        self.0.shut_down();
    }

    fn press_power_button(&self) {
        self.0.press_power_button();
    }

    fn take_back_press(&self) -> bool {
        self.0.take_back_press()
    }

    fn console(&self) -> &dyn Console {
        self.0.console()
    }
}

impl Guest for Watched {
    type Paused<'a> = WatchedPause<<InMemoryGuest as Guest>::Paused<'a>>;

    fn ram(&self) -> &GuestRam {
        self.0.ram()
    }

    fn pause(&self, timeout: Duration) -> Result<Self::Paused<'_>, PauseError> {
        let paused = self.0.pause(timeout)?;
        CALLS.set(Some(0));
        Ok(WatchedPause(paused))
    }
}

impl<P> Drop for WatchedPause<P> {
    fn drop(&mut self) {
        let calls = CALLS.take().expect("the guest was stopped on this thread");
        CALLS_WHILE_STOPPED.fetch_add(calls, Ordering::SeqCst);
    }
}

impl<P: PausedGuest> PausedGuest for WatchedPause<P> {
    fn rips(&self) -> Option<&[u64]> {
        self.0.rips()
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        self.0.breakpoint_pending()
    }

    fn stop_time(&self) -> Duration {
        self.0.stop_time()
    }
}

#[tokio::test]
async fn nothing_is_allocated_while_the_guest_stands_still() {
    let names: Vec<String> = (0..100).map(|number| format!("key{number}")).collect();
    let keys: Vec<TestKey> = names.iter().map(|name| TestKey::new(name, 3)).collect();
    let registry = Arc::new(Registry::default());
    let inner = InMemoryGuest::boot(Arc::clone(&registry), &keys);
    let guest = Arc::new(Watched(Arc::clone(&inner)));
    let (keys, _executor) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    for op in [Op::Enable, Op::Disable] {
        let updates = names.iter().map(|name| KeyUpdate::new(name, op));
        let request = UpdateRequest::new(
            updates.collect(),
            "test".to_owned(),
            Duration::from_secs(1),
            Instant::now() + Duration::from_secs(30),
        );
        keys.update(request).await.expect("the keys are flipped");
    }
    assert_eq!(inner.pauses(), 2);
    assert_eq!(CALLS_WHILE_STOPPED.load(Ordering::SeqCst), 0);
    // The ring holds the last of 200 changes, each in the slot that its sequence number gives.
    let records = inner.records();
    let mut numbers: Vec<u64> = records.iter().map(|record| record[0]).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [193, 194, 195, 196, 197, 198, 199, 200]);
}
