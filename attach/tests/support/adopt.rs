// SPDX-License-Identifier: Apache-2.0
//! Kills an attacher by SIGKILL, after a claim and in the middle of a claim, and checks that the
//! next attacher continues its holds and claims.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, raise};
use patchbay_attach::PauseWay::Qmp;
use patchbay_attach::guest::QemuGuest;
use patchbay_service::keys::claims::{ClaimQuery, ClaimsRequest, LedgerFile, Mark, Verdict, Want};
use patchbay_service::keys::debug::DebugQueries;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::{
    DebugListQuery, HoldQuery, KeyUpdate, Keys, KeysConfig, KeysError, UpdateRequest,
};
use static_keys::Op;

use super::qemu::options;
use super::stock::{Boot, DEBUG, boots};
use super::{Accelerator, DEADLINE, Memory, PATIENCE, Qemu, until};

/// The variable that makes the test's program run as the attacher to kill:
/// `SOCKET:LEDGER:ACCELERATOR:MOMENT:GENERATION`.
const ATTACHER: &str = "PATCHBAY_TEST_LEDGER";
const OWNER: &str = "rollout/canary";
const CALLER: &str = "uid:0";
/// The holder of a reference that ends by itself.
const OTHER: &str = "uid:1";
/// The time after which a hold of the killed attacher ends. It is longer than the attacher lives.
const TTL: Duration = Duration::from_secs(10);

/// The moment at which the attacher is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// The attacher has answered.
    Answered,
    /// The attacher has written the change to the ledger as pending.
    Pending,
    /// The attacher has made the change, and could not write the ledger afterwards.
    Unkept,
}

/// A service that keeps its ledger in a file.
struct Service {
    guest: Arc<QemuGuest>,
    keys: Keys,
    thread: JoinHandle<()>,
}

/// Runs the test `test`. The attacher runs in a second process of the same program.
pub async fn adopted(accelerator: Accelerator, test: &str) {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word).await;
    }
    let Some(boot) = Boot::prepare() else {
        return;
    };
    let Some(qemu) = boot.start(accelerator, Memory::SharedMemfd, &[]) else {
        return;
    };
    let ledger = boot.folder.path().join("guest.sock.ledger");
    let first = Service::start(&qemu.socket("qmp"), &ledger, accelerator);
    let listed = || first.lines().map(drop).map_err(|error| error.to_string());
    boots(&boot.console, listed);
    let lines = first.lines().expect("the kernel is known");
    first.end();

    let kill = |moment, generation| kill(&qemu, &ledger, test, moment, generation);
    let held = kill(Moment::Answered, 4);
    let next = Service::start(&qemu.socket("qmp"), &ledger, accelerator);
    next.keys.adopt_ledger().await.expect("the kernel is known");
    assert_eq!(next.claims(), [(lines[0].clone(), 4, Verdict::Made)]);
    assert_eq!(next.holds(CALLER), [held], "with its id");
    let stale = next.claim(3, &[(&lines[0], Want::Off)]).await;
    assert_eq!(stale.expect_err("late").reason(), "GENERATION_STALE");
    next.update(&lines[1], Op::Dec)
        .await
        .expect("its own reference");
    next.claim(5, &[]).await.expect("cleared");
    // The hold with a time limit ends although the attacher that took it is gone.
    until("the hold ends", || next.count(&lines[2]) == 0);
    assert_eq!(next.holds(OTHER), Vec::<String>::new());
    assert_eq!([next.count(&lines[0]), next.count(&lines[1])], [0, 0]);
    next.end();

    for (moment, generation) in [
        (Moment::Pending, 6),
        (Moment::Pending, 8),
        (Moment::Pending, 10),
        (Moment::Unkept, 12),
    ] {
        kill(moment, generation);
        let _ = std::fs::remove_dir(obstacle(&ledger));
        // The attacher may have been killed after it had written the outcome. Otherwise its
        // watchdog knows whether the change was made.
        let written = std::fs::read_to_string(&ledger).expect("a ledger");
        if written.contains("\"pending\":{") {
            drop(attached(&qemu.socket("qmp"), accelerator));
            let mark = std::fs::read_to_string(Mark::path(&ledger)).expect("a mark");
            println!("the mark: {mark}");
            let made = mark.contains("\"made\":true");
            assert!(made || moment != Moment::Unkept);
        }
        let next = Service::start(&qemu.socket("qmp"), &ledger, accelerator);
        next.keys.adopt_ledger().await.expect("the kernel is known");
        println!("killed in generation {generation}: {:?}", next.claims());
        if moment == Moment::Unkept {
            let made = [(lines[0].clone(), generation, Verdict::Made)];
            assert_eq!(next.claims(), made, "without a repeat");
        }
        let want = [(lines[0].as_str(), Want::On)];
        next.claim(generation, &want)
            .await
            .expect("made, or answered");
        assert_eq!(
            next.claims(),
            [(lines[0].clone(), generation, Verdict::Made)]
        );
        assert_eq!(next.count(&lines[0]), 1);
        next.claim(generation + 1, &[]).await.expect("cleared");
        // The first command of the killed attacher took this reference.
        next.update(&lines[1], Op::Dec)
            .await
            .expect("its own reference");
        assert_eq!([next.count(&lines[0]), next.count(&lines[1])], [0, 0]);
        let owner = format!("{CALLER} \u{b7} {OWNER}");
        assert_eq!(next.holds(&owner), Vec::<String>::new());
        next.end();
    }
    boot.lives();
}

/// Returns the path of a folder that keeps a ledger from being written.
fn obstacle(ledger: &Path) -> PathBuf {
    let mut path = ledger.as_os_str().to_owned();
    path.push(".new");
    path.into()
}

/// Attaches as soon as an earlier attacher and its watchdog have ended.
fn attached(socket: &Path, accelerator: Accelerator) -> QemuGuest {
    let options = options(socket.to_owned(), Qmp, accelerator);
    super::qemu::attached(&options, PATIENCE, "the next attacher")
}

/// Starts an attacher that kills itself, and waits for its end. Returns the id of its own hold.
fn kill(qemu: &Qemu, ledger: &Path, test: &str, moment: Moment, generation: u64) -> String {
    let (socket, ledger) = (qemu.socket("qmp"), ledger.display());
    let (socket, accelerator) = (socket.display(), qemu.accelerator);
    let output = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", test, "--nocapture"])
        .env(
            ATTACHER,
            format!("{socket}:{ledger}:{accelerator:?}:{moment:?}:{generation}"),
        )
        .stderr(Stdio::inherit())
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&output.stdout);
    let killed = Some(Signal::SIGKILL as i32);
    assert_eq!(output.status.signal(), killed, "{moment:?}: {text}");
    let mut lines = text.lines();
    let id = lines.find_map(|line| line.strip_prefix("hold "));
    id.expect("it has a hold").to_owned()
}

/// Runs the attacher to kill.
async fn attacher(word: &str) -> ! {
    let words: Vec<&str> = word.split(':').collect();
    let accelerator = match words[2] {
        "Tcg" => Accelerator::Tcg,
        _ => Accelerator::Kvm,
    };
    let ledger = PathBuf::from(words[1]);
    let service = Service::start(Path::new(words[0]), &ledger, accelerator);
    let lines = service.lines().expect("the kernel is known");
    service.update(&lines[1], Op::Inc).await.expect("taken");
    // With one thread, the test runner has written the name of the test into this line.
    println!("\nhold {}", service.holds(CALLER)[0]);
    let is_pending = words[3] == "Pending";
    if words[3] == "Answered" {
        service.hold(&lines[2], TTL).await.expect("taken");
        assert_eq!(service.count(&lines[2]), 1);
    }
    if is_pending || words[3] == "Unkept" {
        std::thread::spawn(move || {
            loop {
                let content = std::fs::read_to_string(&ledger).unwrap_or_default();
                if !content.contains("\"pending\":{") {
                    continue;
                }
                if !is_pending {
                    return std::fs::create_dir(obstacle(&ledger)).expect("room");
                }
                raise(Signal::SIGKILL).expect("nothing forbids it");
            }
        });
    }
    let generation = words[4].parse().expect("a number");
    let made = service.claim(generation, &[(&lines[0], Want::On)]).await;
    made.expect("made");
    raise(Signal::SIGKILL).expect("nothing forbids it");
    unreachable!("it is killed")
}

fn request(caller: &str, name: &str, op: Op) -> UpdateRequest {
    let end = Instant::now() + DEADLINE;
    UpdateRequest::new(vec![KeyUpdate::new(name, op)], caller, DEADLINE, end)
}

impl Service {
    fn start(socket: &Path, ledger: &Path, accelerator: Accelerator) -> Self {
        let guest = Arc::new(attached(socket, accelerator));
        guest.keeps_ledger(ledger).expect("the watchdog lives");
        let registry = Arc::new(Registry::default());
        registry.discover(guest.clone(), None);
        let config = KeysConfig {
            ledger: Some(LedgerFile::open(ledger, "test").expect("whole, or not there yet")),
            ..KeysConfig::default()
        };
        let (keys, thread) = Keys::start(guest.clone(), registry, config).expect("a thread");
        Self {
            guest,
            keys,
            thread,
        }
    }

    fn end(self) {
        drop(self.keys);
        self.thread.join().expect("no panic");
        drop(self.guest);
    }

    /// Returns the keys of [`DEBUG`].
    fn lines(&self) -> Result<Vec<String>, KeysError> {
        let queries = DebugQueries::parse(&[DEBUG.to_owned()]).expect("well-formed");
        let page = self.keys.list_debug_sites(&DebugListQuery {
            page_size: 100,
            queries,
            ..DebugListQuery::default()
        })?;
        let names = page.sites.into_iter();
        Ok(names.map(|view| view.key.to_string()).collect())
    }

    fn count(&self, name: &str) -> i32 {
        self.keys.get(name, 1, "").expect("it is there").key.count
    }

    async fn update(&self, name: &str, op: Op) -> Result<(), KeysError> {
        self.keys.update(request(CALLER, name, op)).await.map(drop)
    }

    /// Takes a reference that ends by itself.
    async fn hold(&self, name: &str, ttl: Duration) -> Result<(), KeysError> {
        let mut request = request(OTHER, name, Op::Inc);
        request.ttl = Some(ttl);
        self.keys.update(request).await.map(drop)
    }

    async fn claim(&self, generation: u64, claims: &[(&str, Want)]) -> Result<(), KeysError> {
        let claims = claims.iter().map(|(key, want)| ((*key).to_owned(), *want));
        let deadline = Instant::now() + DEADLINE;
        let request = ClaimsRequest::new(
            CALLER.into(),
            OWNER,
            generation,
            claims.collect(),
            DEADLINE,
            deadline,
        );
        let outcome = self.keys.set_claims(request).await?;
        let mut keys = outcome.keys.iter();
        assert!(keys.all(|key| key.verdict == Verdict::Made), "{outcome:?}");
        Ok(())
    }

    fn claims(&self) -> Vec<(String, u64, Verdict)> {
        let page = self.keys.claims(&ClaimQuery {
            page_size: 10,
            ..ClaimQuery::default()
        });
        let claims = page.claims.into_iter();
        claims
            .map(|view| (view.key, view.generation, view.verdict))
            .collect()
    }

    /// Returns the ids of a holder's holds.
    fn holds(&self, holder: &str) -> Vec<String> {
        let query = HoldQuery {
            page_size: 10,
            holder: Some(holder.to_owned()),
            ..HoldQuery::default()
        };
        let page = self.keys.holds(&query).expect("no token");
        page.holds.into_iter().map(|hold| hold.id).collect()
    }
}
