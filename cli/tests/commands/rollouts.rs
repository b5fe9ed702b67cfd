// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay rollout` against a controller on an embedded store, with one guest in memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::api;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::hosts::{HostConfig, HostEndpoint};
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{EmbeddedStore, Store, Transaction};
use patchbay_proto::socket::ListeningSocket;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::lab::{Commands, Lab, runtime};

/// The lifetime of the controller's lease, for which the next one waits.
const LEASE_TTL: Duration = Duration::from_secs(2);

/// Repeats the query until it has an answer.
#[track_caller]
pub fn until<T>(mut query: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(answer) = query() {
            return answer;
        }
        assert!(Instant::now() < end, "no answer in time");
    }
}

pub struct FakeFleet {
    pub lab: Lab,
    store: Arc<EmbeddedStore>,
    runtime: Runtime,
    /// The tasks of the controller.
    tasks: JoinSet<()>,
}

impl Commands for FakeFleet {
    fn folder(&self) -> &Path {
        self.lab.folder()
    }
}

impl FakeFleet {
    pub fn new() -> Self {
        Self::with(Transaction::new())
    }

    /// Starts a controller on a store with these records.
    fn with(records: Transaction) -> Self {
        let (lab, runtime) = (Lab::new(), runtime());
        let entered = runtime.enter();
        let store = EmbeddedStore::open(&lab.folder().join("fleet.redb")).expect("opens");
        runtime.block_on(store.commit(records)).expect("written");
        drop(entered);
        let mut fleet = Self {
            lab,
            store: Arc::new(store),
            runtime,
            tasks: JoinSet::new(),
        };
        fleet.serve();
        fleet
    }

    /// Starts the controller, and waits until it leads.
    fn serve(&mut self) {
        let _entered = self.runtime.enter();
        let own = rustix::process::geteuid().as_raw();
        let config = Config {
            replica: Leader {
                name: "one".to_owned(),
                address: None,
            },
            authority: Authority::new(LivePolicy::own_user_only(own), None),
            hosts: vec![HostConfig {
                name: "here".to_owned(),
                endpoint: HostEndpoint::Socket(self.lab.socket()),
                labels: [("rack".to_owned(), "a".to_owned())].into(),
            }],
            reach: Reach::default(),
            lease_ttl: LEASE_TTL,
            archive: Archive {
                folder: self.lab.folder().join("archive"),
                keep: Duration::from_secs(24 * 3600),
            },
            commands: patchbay_fleet::gates::commands::Commands::default(),
            keys: RecordKeys::default(),
        };
        let store: Arc<dyn Store> = self.store.clone();
        let controller = Arc::new(Controller::new(config, store).expect("own names"));
        let (runs, leads) = (Arc::clone(&controller), Arc::clone(&controller));
        self.tasks.spawn(async move { runs.run().await });
        let socket = self.lab.folder().join("fleet.sock");
        let bound = ListeningSocket::bind(&socket).expect("free");
        self.tasks.spawn(async move {
            let served = api::serve(controller, &bound, None, std::future::pending());
            served.await.expect("it serves");
        });
        self.runtime.block_on(leads.lead());
    }

    /// Stops the controller with all its connections, and starts it again.
    pub fn restart(&mut self) {
        self.runtime.block_on(self.tasks.shutdown());
        self.serve();
    }

    /// Plans the spec, unless it is planned, and starts it.
    pub fn start(&self, name: &str, spec: &str) {
        let planned = self.json(&self.words(&["plan", spec]));
        let digest = planned["digest"].as_str().expect("a digest");
        self.ok(&self.words(&["start", name, "--digest", digest]));
    }

    pub fn spec(&self, name: &str, text: &str) -> String {
        let path = self.folder().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    /// Returns the words of `patchbay rollout` followed by `words`.
    pub fn words<'a>(&self, words: &[&'a str]) -> Vec<&'a str> {
        [&["rollout"][..], words].concat()
    }
}

pub const SPEC: &str =
    "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";

#[test]
fn a_rollout_from_its_plan_to_its_end() {
    let fleet = FakeFleet::new();
    let run = |words: &[&str]| fleet.ok(&fleet.words(words));
    let spec = fleet.spec("net.yaml", &(SPEC.to_owned() + "approvals: 2\n"));
    let plan = run(&["plan", &spec]);
    assert!(
        plan.contains("wave 1: 1 guest on 1 host, 1 key, 1 site"),
        "{plan}"
    );
    assert!(
        plan.contains("patchbay rollout approve net --digest "),
        "{plan}"
    );
    let planned = fleet.json(&fleet.words(&["status", "net"]));
    let digest = planned["digest"].as_str().expect("a digest");
    assert_eq!(planned["guests"][0]["phase"], "pending");
    let approved = run(&["approve", "net", "--digest", digest]);
    assert!(approved.contains("net is planned"), "{approved}");
    let alone = fleet.fails(1, &fleet.words(&["start", "net", "--digest", digest]));
    assert!(alone.contains("1 of 2 people"), "{alone}");
    let why = run(&["explain", "net", "test"]);
    assert!(why.contains("1 of 2 approvals"), "{why}");
    run(&["abort", "net"]);
    run(&["status", "net", "--watch"]);

    let spec = fleet.spec("two.yaml", SPEC);
    let planned = fleet.json(&fleet.words(&["plan", &spec]));
    let digest = planned["digest"].as_str().expect("a digest");
    run(&["start", "two", "--digest", digest]);
    let watched = run(&["status", "two", "--watch"]);
    assert!(watched.contains("two is completed"), "{watched}");
    assert!(
        watched.contains("wave 1: 1 of 1 guest on 1 host as wanted, 0 not yet"),
        "{watched}"
    );
    assert_eq!(fleet.lab.guest.count("alpha"), 1);
    assert_eq!(run(&["list", "-o", "name"]), "two\nnet\n");
    let hosts = run(&["hosts"]);
    assert!(
        hosts.contains("rack=a") && hosts.contains("answers"),
        "{hosts}"
    );
    let said = fleet.fails(1, &fleet.words(&["delete", "two"]));
    assert!(said.contains("1 guests of rollout two"), "{said}");
    let again = run(&["plan", &spec]);
    assert!(
        again.contains("is completed; to plan the spec again") && !again.contains("start it with"),
        "{again}"
    );
    run(&["undo", "two"]);
    let watched = run(&["status", "two", "--watch"]);
    assert!(
        watched.contains("two is undone") && watched.contains("1 released"),
        "{watched}"
    );
    assert_eq!(fleet.lab.guest.count("alpha"), 0);
    let deleted = run(&["delete", "two"]);
    assert!(
        deleted.starts_with("two is deleted; the controller keeps it in "),
        "{deleted}"
    );
    assert_eq!(run(&["list", "-o", "name"]), "net\n");
}

#[test]
fn a_status_says_until_when_a_wave_bakes() {
    let fleet = FakeFleet::new();
    let spec = SPEC.replace("size: rest", "size: rest, bake: 1h");
    let spec = fleet.spec("net.yaml", &spec);
    let planned = fleet.json(&fleet.words(&["plan", &spec]));
    let digest = planned["digest"].as_str().expect("a digest");
    fleet.ok(&fleet.words(&["start", "net", "--digest", digest]));
    let mut watch = fleet.follow(&fleet.words(&["status", "net", "--watch"]));
    let mut lines = std::iter::repeat_with(|| watch.line()).take(100);
    let line = lines.find(|line| line.contains("; it bakes"));
    let (_, until) = line
        .as_deref()
        .and_then(|line| line.split_once("; it bakes until "))
        .expect("a time");
    assert!(until.starts_with("20") && until.ends_with('Z'), "{until}");
    watch.end();
}

/// Checks a guest with a key that the rollout wants off and a person's hold keeps on.
#[test]
fn a_guest_that_is_not_as_wanted_yet_is_forgotten() {
    let fleet = FakeFleet::new();
    fleet.ok(&["keys", "claim", "set", "person", "alpha=on"]);
    let spec = fleet.spec("net.yaml", &SPEC.replace("want: on", "want: off"));
    let planned = fleet.json(&fleet.words(&["plan", &spec]));
    let digest = planned["digest"].as_str().expect("a digest");
    let said = fleet.fails(1, &fleet.words(&["forget", "net", "test"]));
    assert!(
        said.contains("the rollout does not wait for guest test on here"),
        "{said}"
    );
    fleet.ok(&["keys", "inc", "alpha"]);
    fleet.ok(&fleet.words(&["start", "net", "--digest", digest]));
    // No guest of the wave is as wanted, so the rollout pauses.
    let end = Instant::now() + Duration::from_secs(60);
    let (out, said, code) = loop {
        let (out, said, code) = fleet.all(&fleet.words(&["status", "net"]));
        if out.contains("net is paused") {
            break (out, said, code);
        }
        assert!(Instant::now() < end, "{out}{said}");
    };
    assert_eq!(code, Some(3), "{out}{said}");
    assert!(
        out.contains("wave 1: 0 of 1 guest on 1 host as wanted, 1 not yet"),
        "{out}"
    );
    assert!(
        said.contains("1 guest is not yet as wanted") && said.contains("rollout explain net GUEST"),
        "{said}"
    );
    let why = fleet.ok(&fleet.words(&["explain", "net", "test"]));
    assert!(why.contains("or `rollout forget` gives it up"), "{why}");
    assert_eq!(fleet.lab.guest.count("alpha"), 1);
    fleet.ok(&fleet.words(&["forget", "net", "test", "--host", "here"]));
    let shown = fleet.ok(&fleet.words(&["status", "net"]));
    assert!(shown.contains("0 not yet, 1 forgotten"), "{shown}");
    let why = fleet.ok(&fleet.words(&["explain", "net", "test"]));
    assert!(why.contains("given it up"), "{why}");
    let drift = fleet.ok(&fleet.words(&["drift", "net"]));
    assert!(
        drift.contains("0 guests compared: as the rollout wants them; 1 more"),
        "{drift}"
    );
    fleet.ok(&fleet.words(&["undo", "net"]));
    let ended = fleet.ok(&fleet.words(&["status", "net", "--watch"]));
    assert!(
        ended.contains("net is undone") && ended.contains("1 forgotten guests"),
        "{ended}"
    );
}

#[test]
fn a_rollout_that_cannot_be_read_is_listed_until_it_is_deleted() {
    let newer = "{\"version\": 99}";
    let records = Transaction::new().put("rollouts/newer/header", newer);
    let fleet = FakeFleet::with(records.put("rollouts/broken/header", "x"));
    let spec = fleet.spec("net.yaml", SPEC);
    let list = fleet.ok(&fleet.words(&["list"]));
    assert!(
        list.contains("newer is out of service") && list.contains("version 99"),
        "{list}"
    );
    let listed = fleet.json(&fleet.words(&["list"]));
    assert_eq!(listed[0]["phase"], "unreadable", "{listed}");
    let said = fleet.fails(1, &fleet.words(&["status", "broken"]));
    assert!(
        said.contains("rollouts/broken/header is malformed"),
        "{said}"
    );
    // The keys that it changes are not known.
    let said = fleet.fails(1, &fleet.words(&["plan", &spec]));
    assert!(
        said.contains("rollout delete broken --unreadable"),
        "{said}"
    );
    let said = fleet.fails(1, &fleet.words(&["delete", "broken"]));
    assert!(said.contains("out of service"), "{said}");
    let deleted = fleet.json(&fleet.words(&["delete", "broken", "--unreadable"]));
    let file = deleted["archived"].as_str().expect("a path");
    assert!(
        std::fs::read_to_string(file)
            .expect("written")
            .contains("\"x\"")
    );
    fleet.ok(&fleet.words(&["delete", "newer", "--unreadable"]));
    fleet.ok(&fleet.words(&["plan", &spec]));
    let names = fleet.ok(&fleet.words(&["list", "-o", "name"]));
    assert_eq!(names, "net\n");
    let said = fleet.fails(1, &fleet.words(&["delete", "net", "--unreadable"]));
    assert!(said.contains("net is planned"), "{said}");
}

/// Checks that the changes belong to the trace of the call that planned the rollout, not of the
/// call that started it.
#[test]
fn a_rollout_is_of_the_trace_that_planned_it() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let fleet = FakeFleet::new();
    let spec = fleet.spec("net.yaml", SPEC);
    let mut plan = fleet.command(&fleet.words(&["plan", &spec]));
    plan.env("TRACEPARENT", format!("00-{TRACE}-b7ad6b7169203331-01"));
    assert!(plan.output().expect("it starts").status.success());
    let planned = fleet.json(&fleet.words(&["status", "net"]));
    let digest = planned["digest"].as_str().expect("a digest");
    fleet.ok(&fleet.words(&["start", "net", "--digest", digest]));
    fleet.ok(&fleet.words(&["status", "net", "--watch"]));
    let audit = fleet.lab.audit();
    let events: Vec<&str> = audit
        .iter()
        .filter_map(|line| line["event"].as_str())
        .collect();
    assert_eq!(events, ["claims", "intent", "outcome"], "{audit:?}");
    for line in audit {
        assert_eq!(line["trace_id"], TRACE, "{line}");
    }
}

#[test]
fn a_spec_comes_from_standard_input_with_a_name() {
    let fleet = FakeFleet::new();
    let fed = |words: &[&str], spec: &str| {
        let output = fleet.fed(&fleet.words(words), spec);
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (
            text(output.stdout),
            text(output.stderr),
            output.status.code(),
        )
    };
    let (out, said, code) = fed(&["plan", "-", "--name", "net"], SPEC);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("net is planned"), "{out}");
    // A missing name is reported before the input is read.
    let said = fleet.fails(2, &fleet.words(&["plan", "-"]));
    assert!(said.contains("give --name"), "{said}");
    let (_, said, code) = fed(&["plan", "-", "--name", "x"], "title: 7\n");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("standard input: line 1"), "{said}");
    let large = format!("# {}\n{SPEC}", "x".repeat(2 << 20));
    let mut child = fleet.command(&fleet.words(&["plan", "-", "--name", "x"]));
    let file = fleet.spec("large.yaml", &large);
    let file = std::fs::File::open(file).expect("there");
    assert_eq!(
        child.stdin(file).output().expect("starts").status.code(),
        Some(2)
    );
}

/// Checks that `rollout drift` is refused for a rollout that has not started: there is no desired
/// state to compare with yet.
#[test]
fn a_rollout_that_wants_nothing_has_no_drift() {
    let fleet = FakeFleet::new();
    let spec = fleet.spec("net.yaml", SPEC);
    fleet.ok(&fleet.words(&["plan", &spec]));
    for words in [
        &["drift", "net"][..],
        &["drift", "net", "--fix"],
        &["drift", "net", "--adopt"],
    ] {
        let said = fleet.fails(1, &fleet.words(words));
        assert!(
            said.contains("net is planned; drift is legal while it is running"),
            "{said}"
        );
    }
}

#[test]
fn drift_has_an_exit_code_and_is_fixed_or_adopted() {
    let fleet = FakeFleet::new();
    let run = |words: &[&str]| fleet.ok(&fleet.words(words));
    let spec = fleet.spec("net.yaml", SPEC);
    let planned = fleet.json(&fleet.words(&["plan", &spec]));
    let digest = planned["digest"].as_str().expect("a digest");
    run(&["start", "net", "--digest", digest]);
    run(&["status", "net", "--watch"]);
    let same = run(&["drift", "net"]);
    assert!(same.contains("as the rollout wants"), "{same}");

    let drifted = || {
        fleet.lab.guest.set_count("alpha", 0);
        let (out, said, code) = fleet.all(&fleet.words(&["drift", "net"]));
        assert_eq!(code, Some(4), "{said}");
        assert!(
            out.contains("alpha") && said.contains("--fix"),
            "{out}{said}"
        );
    };
    drifted();
    run(&["drift", "net", "--fix"]);
    run(&["status", "net", "--watch"]);
    assert_eq!(fleet.lab.guest.count("alpha"), 1);
    run(&["drift", "net"]);
    drifted();
    run(&["drift", "net", "--adopt"]);
    run(&["drift", "net"]);
    let why = run(&["explain", "net", "test"]);
    assert!(why.contains("taken as it is"), "{why}");
}

/// Checks that drift is not reported as over while the wave that fixes it waits for a freeze.
#[test]
fn guests_that_wait_in_a_fix_wave_have_an_exit_code() {
    let fleet = FakeFleet::new();
    let spec = fleet.spec(
        "net.yaml",
        &SPEC.replace("size: rest", "size: rest, bake: 1h"),
    );
    fleet.start("net", &spec);
    let bakes = || {
        let shown = fleet.ok(&fleet.words(&["status", "net"]));
        shown.contains("it bakes wave").then_some(())
    };
    until(bakes);
    fleet.ok(&fleet.words(&["drift", "net"]));
    fleet.lab.guest.set_count("alpha", 0);
    // The wave that is added waits until the first one has baked.
    fleet.ok(&fleet.words(&["drift", "net", "--fix"]));
    assert_eq!(fleet.lab.guest.count("alpha"), 0);
    let (out, said, code) = fleet.all(&fleet.words(&["drift", "net"]));
    assert_eq!(code, Some(3), "{out}{said}");
    let waits = "0 guests compared: as the rollout wants them; 1 guest waits in an added wave for \
                 the change\n";
    assert_eq!(out, waits);
    assert!(said.contains("1 guest is still to be changed"), "{said}");
    let json = fleet.all(&fleet.words(&["drift", "net", "-o", "json"])).0;
    assert!(json.contains("\"waiting\": 1"), "{json}");
    fleet.ok(&fleet.words(&["promote", "net"]));
    until(bakes);
    let done = fleet.ok(&fleet.words(&["drift", "net"]));
    assert!(done.contains("1 guest compared"), "{done}");
}

#[test]
fn what_is_wrong_is_said_in_one_sentence() {
    let fleet = FakeFleet::new();
    let fails = |code, words: &[&str]| fleet.fails(code, &fleet.words(words));
    let spec = fleet.spec("net.yaml", SPEC);
    let wrong = fleet.spec("wrong.yaml", &SPEC.replace("size", "siez"));
    let empty = fleet.spec("empty.yaml", &SPEC.replace("guests: [\"*\"]", ""));
    let large = fleet.spec("large.yaml", &format!("# {}\n{SPEC}", "x".repeat(10 << 20)));
    let said = fails(2, &["plan", &wrong]);
    assert!(
        said.contains("wrong.yaml: line 3, column") && said.contains("siez"),
        "{said}"
    );
    let bake = fleet.spec(
        "bake.yaml",
        &SPEC.replace("size: rest", "size: rest, bake: 10"),
    );
    let said = fails(2, &["plan", &bake]);
    assert!(
        said.contains("bake.yaml: line 3") && said.contains("10s"),
        "{said}"
    );
    let ops = SPEC.replace("claims: [{want: on,", "ops: [{op: enable,");
    let ops = fleet.spec("ops.yaml", &ops);
    let said = fails(2, &["plan", &ops]);
    assert!(said.contains("`ops` is replaced by `claims`"), "{said}");
    let said = fails(2, &["plan", &empty]);
    assert!(
        said.contains("line 1") && said.contains("empty selector"),
        "{said}"
    );
    let said = fails(2, &["plan", &large]);
    assert!(said.contains("at most 1048576 bytes are read"), "{said}");
    let said = fails(2, &["plan", "/nowhere.yaml"]);
    assert!(said.contains("/nowhere.yaml"), "{said}");
    let said = fails(2, &["plan", &spec, "--name", "a/b"]);
    assert!(said.contains("is no name of a rollout"), "{said}");
    fleet.ok(&fleet.words(&["plan", &spec]));
    let said = fails(1, &["plan", &spec, "--name", "other"]);
    assert!(said.contains("rollout net changes alpha"), "{said}");
    for verb in ["start", "approve"] {
        let said = fails(1, &[verb, "net", "--digest", "0"]);
        assert!(said.contains("review the plan"), "{said}");
    }
    for verb in ["pause", "resume", "promote"] {
        let said = fails(1, &[verb, "net"]);
        assert!(said.contains("net is planned"), "{said}");
    }
    for verb in [
        "status", "pause", "resume", "promote", "abort", "undo", "drift", "delete",
    ] {
        let said = fails(1, &[verb, "nte"]);
        assert!(said.contains("no rollout \"nte\""), "{said}");
    }
    for verb in ["explain", "forget"] {
        let said = fails(1, &[verb, "nte", "test"]);
        assert!(said.contains("no rollout \"nte\""), "{said}");
        let said = fails(1, &[verb, "net", "tset"]);
        assert!(said.contains("does not select a guest \"tset\""), "{said}");
    }
    let said = fails(1, &["list", "--fleet-socket", "/nowhere.sock"]);
    assert!(
        said.contains("no controller answers on /nowhere.sock"),
        "{said}"
    );
}
