// SPDX-License-Identifier: Apache-2.0
//! Kills attachers at named moments of a change and of an adoption, and checks that the next
//! attacher has every hold and claim, and that the counts in the guest's memory are theirs.
//!
//! The kernel's tables and image are made up, so an attacher needs no discovery. Each attacher
//! adopts the ledger, repeats the interrupted request as its client would, and begins the next one.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use nix::sys::signal::Signal;
use patchbay_attach::PauseWay;
use patchbay_guest::guest::Guest;
use patchbay_service::keys::claims::{ClaimsRequest, LedgerFile, Want};
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::replay::RequestId;
use patchbay_service::keys::{KeyUpdate, Keys, KeysConfig, KeysError, UpdateRequest};
use patchbay_service::testing::{listed_claims, listed_holds};
use static_keys::Op;

use self::doomed::{Doomed, DoomedRam, Fate};
use super::cut::{kernel_of, watchdog, write_image};
use super::{Accelerator, DEADLINE, Memory, Qemu, options};

mod doomed;

/// The variable that makes the test's program run as an attacher: `SOCKET:LEDGER:REPEAT:KILL`,
/// where REPEAT and KILL are numbers of requests, or empty. Without KILL, the attacher exits.
const ATTACHER: &str = "PATCHBAY_TEST_KILL_LEDGER";
/// The variable with the moment: its name, `:` and a number of writes.
const MOMENT: &str = "PATCHBAY_TEST_KILL_LEDGER_AT";
/// The variable that gives the number of kills.
const KILLS: &str = "PATCHBAY_TEST_LEDGER_KILLS";
/// The number of kills without the variable. Each moment occurs once in a round, and the rounds
/// have different orders.
const ENOUGH: usize = MOMENTS.len() * STRIDES.len();
/// The distance of two successive moments in each round. None has a common divisor with the number
/// of moments.
const STRIDES: [usize; 8] = [1, 2, 4, 5, 8, 10, 11, 13];

const KEYS: [(&str, u64); 4] = [("alpha", 2), ("beta", 1), ("delta", 3), ("gamma", 0)];
/// Takes a reference on gamma at the start and keeps it.
const KEEPER: &str = "uid:9";
/// Takes and drops a reference on gamma.
const PERSON: &str = "uid:3";
/// The name of all owners. Their principals differ.
const OWNER: &str = "rollout/canary";
/// A limit within the ledger's first line, in bytes.
const TORN_AT: u64 = 60;

/// A moment at which an attacher is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// In the adoption, after a number of reads of the guest's memory.
    Adopting,
    /// In the middle of the first bytes that the adoption writes.
    WritingAdopted,
    /// After the adoption.
    Adopted,
    /// Before the first byte of the ledger that has the change as pending.
    Announced,
    /// In the middle of these bytes.
    WritingPending,
    /// The disk is full: the request has been refused.
    DiskFull,
    /// The change is pending, and the watchdog does not know it.
    Pending,
    /// The watchdog knows the change.
    Told,
    /// The guest is stopped.
    Stopped,
    /// The checks of the stopped guest are over.
    Begun,
    /// After a number of writes to the guest.
    BetweenWrites,
    /// After all writes to the guest.
    Written,
    /// The monitor has confirmed the writes.
    Checked,
    /// The watchdog knows that the change is made.
    Made,
    /// The guest runs, and the outcome is not in the ledger.
    Resumed,
    /// In the middle of the bytes of the outcome.
    WritingOutcome,
    /// The disk is full at the outcome: the request has been answered.
    OutcomeUnwritten,
    /// The request has been answered.
    Answered,
    /// The watchdog is killed first, at the moment `Pending`.
    PendingBoth,
    /// The watchdog is killed first, at the moment `Stopped`.
    StoppedBoth,
    /// The watchdog is killed first, at the moment `Written`.
    WrittenBoth,
}

const MOMENTS: [Moment; 21] = [
    Moment::Adopting,
    Moment::WritingAdopted,
    Moment::Adopted,
    Moment::Announced,
    Moment::WritingPending,
    Moment::DiskFull,
    Moment::Pending,
    Moment::Told,
    Moment::Stopped,
    Moment::Begun,
    Moment::BetweenWrites,
    Moment::Written,
    Moment::Checked,
    Moment::Made,
    Moment::Resumed,
    Moment::WritingOutcome,
    Moment::OutcomeUnwritten,
    Moment::Answered,
    Moment::PendingBoth,
    Moment::StoppedBoth,
    Moment::WrittenBoth,
];

/// The number of requests after which no claim is left.
const CYCLE: usize = 8;

/// A request.
enum Step {
    /// Replaces the claims of an owner.
    Claim(&'static str, &'static [(&'static str, Want)]),
    /// Takes or drops a reference on gamma for [`PERSON`].
    Person(Op),
}

fn step(number: usize) -> Step {
    match number % CYCLE {
        0 => Step::Claim("uid:1", &[("alpha", Want::On), ("beta", Want::Held)]),
        1 => Step::Claim(
            "uid:2",
            &[
                ("alpha", Want::Off),
                ("beta", Want::On),
                ("gamma", Want::Held),
            ],
        ),
        2 => Step::Person(Op::Inc),
        3 => Step::Claim(
            "uid:1",
            &[
                ("beta", Want::Held),
                ("gamma", Want::On),
                ("delta", Want::Held),
            ],
        ),
        4 => Step::Claim("uid:2", &[("gamma", Want::Held)]),
        5 => Step::Person(Op::Dec),
        6 => Step::Claim("uid:2", &[]),
        _ => Step::Claim("uid:1", &[]),
    }
}

/// Returns the state after this many requests, as [`Attacher::state`] prints it.
fn expected(steps: usize) -> String {
    let mut claims: BTreeMap<&str, Vec<(&str, Want)>> = BTreeMap::new();
    let mut holds = BTreeMap::from([(("gamma", KEEPER.to_owned()), 1)]);
    for number in 0..steps {
        match step(number) {
            Step::Person(Op::Inc) => _ = holds.insert(("gamma", PERSON.to_owned()), 1),
            Step::Person(_) => _ = holds.remove(&("gamma", PERSON.to_owned())),
            Step::Claim(principal, wanted) => {
                for stack in claims.values_mut() {
                    stack.retain(|(of, _)| *of != principal);
                }
                for (key, want) in wanted {
                    claims.entry(key).or_default().push((principal, *want));
                }
            }
        }
    }
    let mut lines = Vec::new();
    for (key, stack) in &claims {
        let decider = stack.iter().rposition(|(_, want)| *want != Want::Held);
        for (at, (principal, want)) in stack.iter().enumerate() {
            lines.push(format!("{key} {} {principal}", want.name()));
            if *want == Want::Held || *want == Want::On && decider == Some(at) {
                holds.insert((*key, holder(principal)), 1);
            }
        }
    }
    for ((key, holder), references) in &holds {
        lines.push(format!("{key} has {references} of {holder}"));
    }
    for (key, _) in KEYS {
        let count = holds.keys().filter(|(of, _)| *of == key).count();
        lines.push(format!("{key} is {count}"));
    }
    sorted(lines)
}

fn sorted(mut lines: Vec<String>) -> String {
    lines.sort();
    lines.join(", ")
}

fn holder(principal: &str) -> String {
    format!("{principal} \u{b7} {OWNER}")
}

/// The kills at a moment.
#[derive(Default)]
struct Row {
    kills: usize,
    /// The number of kills after which the next attacher found the change made.
    made: usize,
    lost: usize,
}

/// Runs the test `name`. The attachers run in further processes of the same program.
pub fn kill_ledger(accelerator: Accelerator, name: &str) {
    if let Ok(word) = std::env::var(ATTACHER) {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime
            .expect("threads")
            .block_on(attacher(&word, accelerator));
    }
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Freeze);
    write_image(guest.ram(), &kernel_of(&KEYS).1);
    drop(guest);
    let folder = tempfile::tempdir().expect("temporary folder");
    let run = Run {
        name,
        socket: qemu.socket("qmp"),
        ledger: folder.path().join("guest.ledger"),
    };
    let first = run.attacher(None, None, (Moment::Answered, 0));
    let keeper = first.line("keeper ").expect("it has a hold");
    let kills = std::env::var(KILLS).map_or(ENOUGH, |kills| kills.parse().expect("a number"));
    let mut rows: BTreeMap<Moment, Row> = BTreeMap::new();
    let mut faults = Vec::new();
    // The request that was interrupted, and the moment.
    let mut last: Option<(usize, Moment)> = None;
    for kill in 0..=kills {
        let next = last.map_or(0, |(number, _)| number + 1);
        let (round, place) = (kill / MOMENTS.len(), kill % MOMENTS.len());
        let moment = MOMENTS[place * STRIDES[round % STRIDES.len()] % MOMENTS.len()];
        let writes = 1 + round % 8;
        let is_last = kill == kills;
        let ended = run.attacher(
            last.map(|(number, _)| number),
            (!is_last).then_some(next),
            (moment, writes),
        );
        let Some(found) = ended.line("found ") else {
            rows.entry(ended.killed()).or_default().kills += 1;
            continue;
        };
        let [before, after] = match last {
            None => [expected(0), expected(0)],
            Some((number, _)) => [expected(number), expected(number + 1)],
        };
        let was_at = last.map_or(Moment::Answered, |(_, moment)| moment);
        let is_made = found == after;
        let is_right = match was_at.made() {
            Some(made) => found == if made { &*after } else { &*before },
            None => is_made || found == before,
        };
        let row = rows.entry(was_at).or_default();
        let mut lose = |what: String| {
            row.lost += 1;
            faults.push(format!("after {was_at:?} in request {last:?}: {what}"));
        };
        if !is_right {
            lose(format!("{found}; before it {before}; after it {after}"));
        }
        if ended.line("keeper ") != Some(keeper) {
            lose("the hold of another client".to_owned());
        }
        if let Some(why) = ended.line("unfenced ") {
            lose(format!("a generation: {why}"));
        }
        if let Some(repeated) = ended.line("repeated ")
            && repeated != after
        {
            lose(format!("{repeated} after a repeat, not {after}"));
        }
        if is_last {
            break;
        }
        let killed = ended.killed();
        rows.entry(killed).or_default().kills += 1;
        // After a kill in the adoption, the same request is still the interrupted one.
        if killed != Moment::Adopted {
            if last.is_some() {
                rows.entry(was_at).or_default().made += usize::from(is_made);
            }
            last = Some((next, killed));
        }
    }
    println!("{:<18}{:>6}{:>6}{:>6}", "killed", "times", "made", "lost");
    for (moment, row) in &rows {
        let moment = format!("{moment:?}");
        println!("{moment:<18}{:>6}{:>6}{:>6}", row.kills, row.made, row.lost);
    }
    let total: usize = rows.values().map(|row| row.kills).sum();
    println!("{total} kills, {} lost", faults.len());
    assert_eq!(faults, Vec::<String>::new());
    assert_eq!(total, kills);
    for moment in MOMENTS {
        assert!(
            kills < ENOUGH || rows.contains_key(&moment),
            "never {moment:?}"
        );
    }
}

impl Moment {
    fn named(name: &str) -> Self {
        let mut all = MOMENTS.into_iter();
        all.find(|of| format!("{of:?}") == name).expect("listed")
    }

    /// Returns whether a change is made that was interrupted at this moment; `None` if both are
    /// right.
    fn made(self) -> Option<bool> {
        match self {
            Self::Announced
            | Self::WritingPending
            | Self::DiskFull
            | Self::Pending
            | Self::Told
            | Self::Stopped
            | Self::Begun
            | Self::PendingBoth
            | Self::StoppedBoth => Some(false),
            Self::Made
            | Self::Resumed
            | Self::WritingOutcome
            | Self::OutcomeUnwritten
            | Self::Answered
            | Self::WrittenBoth => Some(true),
            _ => None,
        }
    }
}

/// The arguments of all attachers.
struct Run<'a> {
    name: &'a str,
    socket: PathBuf,
    ledger: PathBuf,
}

/// The output of an attacher that has ended.
struct Ended(String);

impl Run<'_> {
    /// Runs an attacher until its end.
    fn attacher(
        &self,
        repeat: Option<usize>,
        kill: Option<usize>,
        (moment, writes): (Moment, usize),
    ) -> Ended {
        let number = |step: Option<usize>| step.map_or(String::new(), |step| step.to_string());
        let (socket, ledger) = (self.socket.display(), self.ledger.display());
        let word = format!("{socket}:{ledger}:{}:{}", number(repeat), number(kill));
        let output = Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", self.name, "--nocapture"])
            .env(ATTACHER, word)
            .env(MOMENT, format!("{moment:?}:{writes}"))
            .stderr(Stdio::inherit())
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_expected = match kill {
            None => output.status.success(),
            Some(_) => matches!(
                output
                    .status
                    .signal()
                    .and_then(|signal| Signal::try_from(signal).ok()),
                Some(Signal::SIGKILL | Signal::SIGXFSZ)
            ),
        };
        assert!(
            is_expected,
            "{moment:?} in request {kill:?}: {}: {text}",
            output.status
        );
        Ended(text)
    }
}

impl Ended {
    fn line(&self, start: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(start))
    }

    fn killed(&self) -> Moment {
        Moment::named(self.line("killed ").expect("it has said so"))
    }
}

/// Runs an attacher, which kills itself or exits.
async fn attacher(word: &str, accelerator: Accelerator) -> ! {
    let words: Vec<&str> = word.split(':').collect();
    let [repeat, next] = [words[2], words[3]].map(|word| word.parse::<usize>().ok());
    let at = std::env::var(MOMENT).expect("given");
    let (name, writes) = at.split_once(':').expect("a name and a number");
    let moment = Moment::named(name);
    let options = options(words[0].into(), PauseWay::Freeze, accelerator);
    let guest = super::qemu::attached(&options, DEADLINE, "the next attacher");
    let ledger = Path::new(words[1]);
    guest.keeps_ledger(ledger).expect("the watchdog lives");
    let dies_in_adoption = next.is_some()
        && matches!(
            moment,
            Moment::Adopting | Moment::WritingAdopted | Moment::Adopted
        );
    let fate = Arc::new(Fate {
        moment,
        left: AtomicUsize::new(writes.parse().expect("a number")),
        is_armed: AtomicBool::new(dies_in_adoption),
        watchdog: moment.is_of_both().then(watchdog),
    });
    let doomed = Arc::new(Doomed {
        ram: Arc::new(DoomedRam {
            ram: guest.ram().clone(),
            fate: Arc::clone(&fate),
        }),
        guest,
        with: Arc::clone(&fate),
    });
    let config = KeysConfig {
        ledger: Some(LedgerFile::open(ledger, "test").expect("whole, or not there yet")),
        ..KeysConfig::default()
    };
    let registry = Arc::new(Registry::default());
    let (keys, _) = Keys::start(doomed, Arc::clone(&registry), config).expect("a thread");
    if moment == Moment::WritingAdopted {
        fate.limit(moment);
    }
    registry.register_kernel(kernel_of(&KEYS).0).expect("taken");
    let attacher = Attacher { keys };
    attacher
        .keys
        .adopt_ledger()
        .await
        .expect("the kernel is known");
    if repeat.is_none() && attacher.keeper().is_none() {
        attacher
            .reference(KEEPER, Op::Inc, None)
            .await
            .expect("taken");
    }
    println!("\nfound {}", attacher.state());
    println!("keeper {}", attacher.keeper().unwrap_or_default());
    fate.reach(Moment::Adopted);
    if let Some(repeat) = repeat {
        attacher.is_fenced(repeat).await;
        attacher.request(repeat).await.expect("made, or answered");
        println!("repeated {}", attacher.state());
    }
    let Some(next) = next else {
        std::process::exit(0);
    };
    fate.is_armed.store(true, Ordering::SeqCst);
    match attacher.request(next).await {
        Err(error) if moment == Moment::DiskFull => {
            assert_eq!(error.reason(), "LEDGER_UNWRITABLE", "{error}");
            fate.die(moment);
        }
        Err(error) => panic!("{moment:?}: {error}"),
        // The limit of the outcome's size was set.
        Ok(()) if moment == Moment::OutcomeUnwritten => fate.die(moment),
        Ok(()) => fate.die(Moment::Answered),
    }
}

struct Attacher {
    keys: Keys,
}

impl Attacher {
    /// Sends a request under its generation or id.
    async fn request(&self, number: usize) -> Result<(), KeysError> {
        match step(number) {
            Step::Claim(principal, claims) => {
                self.claim(principal, number as u64 + 1, claims).await
            }
            Step::Person(op) => self.reference(PERSON, op, Some(number)).await,
        }
    }

    async fn claim(
        &self,
        principal: &str,
        generation: u64,
        claims: &[(&str, Want)],
    ) -> Result<(), KeysError> {
        let claims = claims.iter().map(|(key, want)| ((*key).to_owned(), *want));
        let end = Instant::now() + DEADLINE;
        let claims = claims.collect();
        let request =
            ClaimsRequest::new(principal.into(), OWNER, generation, claims, DEADLINE, end);
        self.keys.set_claims(request).await.map(drop)
    }

    /// Takes or drops a reference on gamma.
    async fn reference(&self, principal: &str, op: Op, id: Option<usize>) -> Result<(), KeysError> {
        let updates = vec![KeyUpdate::new("gamma", op)];
        let end = Instant::now() + DEADLINE;
        let mut request = UpdateRequest::new(updates, principal, DEADLINE, end);
        let id = id.map_or(String::new(), |id| id.to_string());
        request.request_id = RequestId::new(id, Vec::new);
        self.keys.update(request).await.map(drop)
    }

    /// Checks that a generation below that of an earlier request of the same owner is refused.
    async fn is_fenced(&self, before: usize) {
        let earlier = (1..before).rev().find_map(|number| match step(number) {
            Step::Claim(principal, _) => Some((principal, number as u64)),
            Step::Person(_) => None,
        });
        let Some((principal, late)) = earlier else {
            return;
        };
        match self.claim(principal, late, &[("delta", Want::On)]).await {
            Err(error) if error.reason() == "GENERATION_STALE" => {}
            made => println!("unfenced {principal} {late}: {made:?}"),
        }
    }

    /// Returns the claims, the holds and the counts, as [`expected`] does.
    fn state(&self) -> String {
        let claims = listed_claims(&self.keys).into_iter().map(|view| {
            let (principal, want) = (view.claim.owner.principal.clone(), view.claim.want.name());
            format!("{} {want} {principal}", view.key)
        });
        let holds = listed_holds(&self.keys).into_iter();
        let holds = holds.map(|of| format!("{} has {} of {}", of.key, of.references, of.holder));
        let counts = KEYS.map(|(key, _)| {
            let found = self.keys.get(key, 1, "").expect("it is there").key;
            format!("{key} is {}", found.count)
        });
        sorted(claims.chain(holds).chain(counts).collect())
    }

    /// Returns the id of the hold that stays.
    fn keeper(&self) -> Option<String> {
        let mut holds = listed_holds(&self.keys).into_iter();
        holds.find_map(|of| (&*of.holder == KEEPER).then_some(of.id))
    }
}
