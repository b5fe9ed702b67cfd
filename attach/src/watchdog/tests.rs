// SPDX-License-Identifier: Apache-2.0
//! Tests what the watchdog does after the attacher's end, with a QEMU that only answers.

use std::io::{BufReader, Write};
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

use patchbay_service::keys::claims::Mark;
use rustix::fs::{FlockOperation, flock};

use super::words::{Fate, Kept};
use super::*;
use crate::rollback::RecordedGate;

fn after(words: &[&[u8]]) -> Words {
    last_words(&words.concat()[..])
}

const QMP: &[u8] = b"s\0\0\0\0\0";
const STOPS_THREADS: &[u8] = b"s\x01\x02\0\0\0\x07\0\0\0\x08\0\0\0";

/// Returns the announcement of a change, and of the ledger that has it as pending.
fn announced(ledger: Option<u8>, change: &Change) -> Vec<u8> {
    let ledger = ledger.map(|digest| [digest; 32]);
    let change = change.bytes().expect("short");
    [&b"w"[..], &optional(ledger.as_ref()), &change].concat()
}

/// Returns the announcement of a ledger with a pending change, and of the one that it replaces.
fn pending(ledger: u8, replaced: Option<u8>) -> Vec<u8> {
    let replaced = replaced.map(|digest| [digest; 32]);
    [&b"p"[..], &[ledger; 32], &optional(replaced.as_ref())].concat()
}

/// Returns the first bytes of the digests of the kept changes, with their fates.
fn fates(words: &[&[u8]]) -> Vec<(u8, Fate)> {
    let kept = after(words).kept.into_iter();
    kept.map(|kept| (kept.digest[0], kept.fate)).collect()
}

#[test]
fn a_stop_counts_until_the_guest_runs() {
    for words in [&[][..], &[b"r" as &[u8]], &[b"r", QMP, b"r"]] {
        assert_eq!(after(words), Words::default(), "{words:?}");
    }
    for words in [&[b"r", QMP][..], &[b"r", QMP, b"r", QMP]] {
        let left = after(words);
        assert!(left.stopped && left.threads.is_empty(), "{words:?}");
    }
    let left = after(&[b"r", STOPS_THREADS]);
    assert!(left.stopped && left.anywhere && !left.writing);
    assert_eq!(left.threads, [7, 8]);
}

#[test]
fn writes_count_from_their_begin_until_the_guest_runs() {
    let change = Change {
        keys: vec!["a".to_owned()],
        ..Change::default()
    };
    let announced = &announced(None, &change)[..];
    let left = after(&[b"r", announced, QMP]);
    assert_eq!(left.writes, Some(change));
    assert!(!left.writing);
    assert!(after(&[b"r", announced, QMP, b"c"]).writing);
    assert!(!after(&[announced, QMP, b"c", announced]).writing);
    assert_eq!(after(&[announced, QMP, b"c", b"r"]), Words::default());
    // An incomplete message is ignored.
    let cut = &announced[..announced.len() - 1];
    let left = after(&[b"r", QMP, cut]);
    assert!(left.stopped && left.writes.is_none());
}

#[test]
fn a_stop_that_another_client_has_ended_is_not_the_attachers() {
    assert!(after(&[b"r", QMP, b"u"]).resumed);
    assert!(!after(&[b"r", QMP, b"u", b"r", QMP]).resumed);
    assert!(!after(&[b"r", QMP, b"u", QMP]).resumed);
}

/// A pending change is in the ledger before its first byte is written.
#[test]
fn the_fate_of_the_pending_change_is_known() {
    let of_none = &announced(None, &Change::default())[..];
    let of_one = &announced(Some(1), &Change::default())[..];
    let (one, two) = (&pending(1, None)[..], &pending(2, None)[..]);
    assert_eq!(fates(&[b"r", of_none, QMP, b"c", b"m", b"r"]), []);
    let begun = [b"r", one, of_one, QMP];
    let with = |more: &[&'static [u8]]| fates(&[&begun[..], more].concat());
    assert_eq!(with(&[]), [(1, Fate::NotMade)]);
    assert_eq!(with(&[b"r"]), [(1, Fate::NotMade)]);
    assert_eq!(with(&[b"c"]), [(1, Fate::Begun)]);
    assert_eq!(with(&[b"c", b"m"]), [(1, Fate::Made)]);
    assert_eq!(with(&[b"c", b"m", b"r"]), [(1, Fate::Made)]);
    assert_eq!(with(&[b"c", b"b", b"r"]), [(1, Fate::NotMade)]);
    // The next one, also during a lasting pause.
    for between in [&[b"c" as &[u8], b"m", b"r"][..], &[b"c", b"m"]] {
        let words = [&begun[..], between, &[two]].concat();
        assert_eq!(fates(&words), [(2, Fate::NotMade)]);
    }
}

/// Its writes are not told one by one, so only the guest's counts show which were made. Without a
/// mark, the next attacher asks them.
#[test]
fn a_change_that_is_made_while_the_guest_runs_has_no_fate() {
    let of_two = &announced(Some(2), &Change::default())[..];
    let forget = |ledger: u8| [&b"f"[..], &[ledger; 32]].concat();
    let (one, two) = (&pending(1, None)[..], &pending(2, Some(1))[..]);
    let (forget_one, forget_two) = (&forget(1)[..], &forget(2)[..]);
    assert_eq!(fates(&[b"r", one, forget_one]), []);
    assert_eq!(fates(&[b"r", one, forget_one, b"r"]), []);
    // Another one that may be on the disk keeps its fate.
    let both = [b"r", one, two];
    let left = |last| fates(&[&both[..], &[last]].concat());
    assert_eq!(left(forget_one), [(2, Fate::NotMade)]);
    assert_eq!(left(forget_two), [(1, Fate::NotMade)]);
    // The next change stops the guest.
    let made = [b"r", one, forget_one, two, of_two, QMP, b"c", b"m"];
    assert_eq!(fates(&made), [(2, Fate::Made)]);
    // An incomplete message changes nothing.
    assert_eq!(fates(&[b"r", one, &forget_one[..32]]), [(1, Fate::NotMade)]);
}

/// Another client has resumed the guest within its stop, or has loaded an earlier state, so the
/// attacher has written nothing, or what it wrote is gone.
#[test]
fn a_change_that_was_left_was_not_made() {
    let of_one = &announced(Some(1), &Change::default())[..];
    let of_none = &announced(None, &Change::default())[..];
    let begun = [b"r", &pending(1, None)[..], of_one, QMP, b"c"];
    for next in [b"r" as &[u8], of_none] {
        let words = [&begun[..], &[next]].concat();
        assert_eq!(fates(&words), [(1, Fate::NotMade)]);
    }
}

/// The disk is full: the outcome of the first change cannot be written, nor can the second pending
/// change.
#[test]
fn the_fates_of_both_changes_that_the_ledger_may_have_are_kept() {
    let of = |digest| announced(Some(digest), &Change::default());
    let (of_one, of_two) = (&of(1)[..], &of(2)[..]);
    let made = [b"c" as &[u8], b"m", b"r"];
    let one = &pending(1, None)[..];
    let first = [&[b"r" as &[u8], one, of_one, QMP][..], &made].concat();
    let (two, three) = (&pending(2, Some(1))[..], &pending(3, Some(1))[..]);
    let both = |second| vec![(1, Fate::Made), (second, Fate::NotMade)];
    assert_eq!(fates(&[&first[..], &[two]].concat()), both(2));
    assert_eq!(fates(&[&first[..], &[two, three]].concat()), both(3));
    // There is room again.
    let second = [&first[..], &[two, of_two, QMP], &made].concat();
    assert_eq!(fates(&second), [(1, Fate::Made), (2, Fate::Made)]);
    let fourth = &pending(4, Some(2))[..];
    let expected = [(2, Fate::Made), (4, Fate::NotMade)];
    assert_eq!(fates(&[&second[..], &[fourth]].concat()), expected);
}

/// A repair is in no ledger. An earlier change may still be pending there.
#[test]
fn the_writes_of_another_change_do_not_decide() {
    let of_one = &announced(Some(1), &Change::default())[..];
    let of_none = &announced(None, &Change::default())[..];
    for (made, fate) in [(true, Fate::Made), (false, Fate::NotMade)] {
        let one = &pending(1, None)[..];
        let first: &[&[u8]] = match made {
            true => &[b"r", one, of_one, QMP, b"c", b"m", b"r"],
            // It was refused before its writes were announced.
            false => &[b"r", one],
        };
        let repair = [of_none, QMP, b"c", b"m", b"r"];
        for end in 0..=repair.len() {
            let words = [first, &repair[..end]].concat();
            assert_eq!(fates(&words), [(1, fate.clone())], "{end}");
        }
    }
}

#[test]
fn what_was_made_is_not_rolled_back() {
    let of_none = &announced(None, &Change::default())[..];
    let left = after(&[b"r", of_none, QMP, b"c", b"m"]);
    assert!(left.stopped && !left.writing);
}

#[test]
fn a_rollback_decides_the_fate_of_the_change_that_has_begun() {
    let change = Change {
        keys: ["a", "b"].map(str::to_owned).to_vec(),
        ..Change::default()
    };
    let settle = |fate: Fate, made: Option<bool>| {
        let digest = [1; 32];
        let mut left = Words {
            kept: vec![Kept { digest, fate }],
            ..Words::default()
        };
        let moved = vec![1];
        let settled = Settled {
            made,
            moved,
            ..Settled::default()
        };
        left.settle(&change, &settled);
        left.kept.remove(0).fate
    };
    for made in [false, true] {
        let moved = vec!["b".to_owned()];
        let expected = Fate::Settled { made, moved };
        assert_eq!(settle(Fate::Begun, Some(made)), expected);
        assert_eq!(settle(Fate::NotMade, Some(made)), Fate::NotMade);
    }
    assert_eq!(settle(Fate::Begun, None), Fate::Begun);
}

#[test]
fn a_mark_is_left_beside_the_ledger_whose_change_has_a_fate() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let ledger = folder.path().join("g.ledger");
    let header = format!(
        r#"{{"format":"patchbay-ledger","version":2,"sha256":"{}"}}"#,
        "01".repeat(32)
    );
    std::fs::write(&ledger, header + "\n{}\n").expect("room");
    let owner_only = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&ledger, owner_only).expect("own file");
    let mark = Mark::path(&ledger);
    let leave_all = |kept: Vec<Kept>| {
        let path = ledger.to_str().expect("ASCII").as_bytes();
        let length = count(path.len()).expect("short");
        let mut left = after(&[b"l", &length, path, b"r"]);
        left.kept = kept;
        left.leave_mark().expect("room");
        let text = std::fs::read_to_string(&mark).ok();
        let _ = std::fs::remove_file(&mark);
        text.map(|text| text.contains("\"made\":true"))
    };
    let kept = |digest: u8, fate: Fate| {
        let digest = [digest; 32];
        Kept { digest, fate }
    };
    let leave = |digest: u8, fate: Fate| leave_all(vec![kept(digest, fate)]);
    assert_eq!(leave(1, Fate::Begun), None);
    assert_eq!(leave(2, Fate::Made), None, "the ledger has another change");
    assert_eq!(leave(1, Fate::NotMade), Some(false));
    assert_eq!(leave(1, Fate::Made), Some(true));
    let moved = vec!["b".to_owned()];
    assert_eq!(leave(1, Fate::Settled { made: true, moved }), Some(true));
    // The ledger of one of two changes is on the disk.
    for at in 0..2 {
        let mut both = vec![kept(2, Fate::NotMade); 2];
        both[at] = kept(1, Fate::Made);
        assert_eq!(leave_all(both), Some(true), "{at}");
    }
}

/// Simulates a QEMU in this state, which sends `events` first and calls `on_cont` before it
/// carries out a `cont`. Its thread returns the commands other than queries.
fn qemu(
    status: &'static str,
    events: &str,
    stops_late: bool,
    mut on_cont: impl FnMut() + Send + 'static,
) -> (Asked, JoinHandle<Vec<String>>) {
    let (ours, qemus) = UnixStream::pair().expect("a pair");
    let mut to = qemus.try_clone().expect("a descriptor");
    to.write_all(events.as_bytes()).expect("room");
    let thread = std::thread::spawn(move || {
        let (mut status, mut sent, mut answers) = (status, Vec::new(), String::new());
        for line in io::BufRead::lines(BufReader::new(qemus)) {
            let command: Value = serde_json::from_str(&line.expect("text")).expect("JSON");
            let name = command["execute"].as_str().expect("a name").to_owned();
            match name.as_str() {
                "stop" => status = "paused",
                "cont" => {
                    on_cont();
                    status = "running";
                    to.write_all(RESUME.as_bytes()).expect("room");
                }
                _ => {}
            }
            let returned = match name.as_str() {
                "query-migrate" => serde_json::json!({}),
                _ => serde_json::json!({ "status": status }),
            };
            let answer = serde_json::json!({ "return": returned, "id": command["id"] });
            // An answer that is late comes just before the next one.
            answers += &format!("{answer}\r\n");
            if name != "stop" || !stops_late {
                to.write_all(answers.as_bytes()).expect("room");
                answers.clear();
            }
            if !name.starts_with("query-") {
                sent.push(name);
            }
        }
        sent
    });
    (Asked::Connection(Wire::new(ours)), thread)
}

const RESUME: &str = "{\"event\": \"RESUME\"}\r\n";

/// Another client resumes the guest after the attacher's end or before it.
#[test]
fn a_guest_that_was_resumed_is_stopped_for_the_rollback_and_then_continued() {
    for (resumed, stopped) in [(false, false), (true, false), (true, true)] {
        let status = if stopped { "paused" } else { "running" };
        let events = if resumed { "" } else { RESUME };
        let (monitor, qemu) = qemu(status, events, false, || {});
        let mut left = Words {
            stopped: true,
            resumed,
            ..Words::default()
        };
        let memory = tempfile::tempfile();
        put_right(&Change::default(), &mut left, None, memory, &monitor).expect("nothing to do");
        let ended = monitor.resume(left.resumed);
        drop(monitor);
        let sent = qemu.join().expect("answered");
        match stopped {
            // The client that resumed the guest has stopped it.
            true => {
                let error = ended.expect_err("another client's").to_string();
                assert!(error.contains("another client"), "{error}");
                assert_eq!(sent, [""; 0]);
            }
            false => {
                ended.expect("continued");
                assert_eq!(sent, ["stop", "cont"], "{resumed}");
            }
        }
    }
}

#[test]
fn a_stop_that_is_answered_late_is_the_watchdogs_own() {
    let (monitor, qemu) = qemu("running", RESUME, true, || {});
    let mut left = Words {
        stopped: true,
        ..Words::default()
    };
    let memory = tempfile::tempfile();
    put_right(&Change::default(), &mut left, None, memory, &monitor).expect_err("not stopped");
    monitor.resume(left.resumed).expect("continued");
    drop(monitor);
    assert_eq!(qemu.join().expect("answered"), ["stop", "cont"]);
}

/// Another client resumed the guest, and the watchdog's stop met the guest in the middle of a
/// change of its own.
#[test]
fn a_guest_stopped_by_qmp_during_its_own_change_runs_until_its_gates_are_open() {
    let gate = RecordedGate {
        address: 0,
        length: 8,
        mask: u64::MAX,
        open: 0,
    };
    let change = Change {
        gates: vec![gate],
        ..Change::default()
    };
    let memory = tempfile::tempfile().expect("a file");
    memory.write_all_at(&[1; 8], 0).expect("room");
    let guests = memory.try_clone().expect("a descriptor");
    let mut runs = 0;
    let (monitor, qemu) = qemu("running", RESUME, false, move || {
        runs += 1;
        if runs == 2 {
            guests.write_all_at(&[0; 8], 0).expect("room");
        }
    });
    let mut left = Words {
        stopped: true,
        ..Words::default()
    };
    put_right(&change, &mut left, None, Ok(memory), &monitor).expect("the gate was opened");
    monitor
        .resume(left.resumed)
        .expect("the watchdog's own stop");
    drop(monitor);
    let sent = qemu.join().expect("answered");
    assert_eq!(sent, ["stop", "cont", "stop", "cont", "stop", "cont"]);
}

/// Returns the handle to a watchdog that only reads.
fn reads() -> Watchdog {
    let mut child = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("coreutils");
    Watchdog {
        pipe: child.stdin.take(),
        tail: Tail::new().expect("memory"),
        child,
        knows_writes: false,
        writing: false,
    }
}

/// The variable that makes the test's program panic during a change.
const PANICS: &str = "PATCHBAY_TEST_PANICS";

/// A guest that is stopped.
struct Stopped(Watchdog);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.abort_in_panic();
        self.0.disarm();
    }
}

/// The guest would run on with a part of the change, and the watchdog would not roll it back.
#[test]
fn a_panic_during_the_writes_ends_the_process_before_the_guest_runs() {
    const NAME: &str = "a_panic_during_the_writes_ends_the_process_before_the_guest_runs";
    let steps: [(&str, fn(&mut Watchdog)); 4] = [
        ("told", |_| {}),
        ("begun", |watchdog| {
            watchdog.begin_writes().expect("it was told");
        }),
        ("made", |watchdog| {
            watchdog.begin_writes().expect("it was told");
            watchdog.made();
        }),
        ("undone", |watchdog| {
            watchdog.begin_writes().expect("it was told");
            // A part may be left.
            watchdog.undone();
        }),
    ];
    if let Some(step) = std::env::var_os(PANICS) {
        let mut stopped = Stopped(reads());
        let change = Change::default();
        stopped.0.will_write(&change, None).expect("it lives");
        let step = steps.iter().find(|(name, _)| *name == step);
        step.expect("one of them").1(&mut stopped.0);
        panic!("during a change");
    }
    for (name, _) in steps {
        let status = Command::new(std::env::current_exe().expect("a program"))
            .args([NAME, "--test-threads=1"])
            .env(PANICS, name)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("this program");
        let aborts = matches!(name, "begun" | "undone");
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, aborts.then_some(Signal::SIGABRT as i32), "{name}");
        assert!(!status.success(), "{name}");
    }
}

#[test]
fn writes_begin_only_after_the_change_was_told() {
    let mut watchdog = reads();
    let arm = |watchdog: &mut Watchdog| watchdog.arm(&[7], Point::Any).expect("it lives");
    arm(&mut watchdog);
    watchdog.begin_writes().expect_err("it was not told");
    watchdog
        .will_write(&Change::default(), None)
        .expect("it lives");
    arm(&mut watchdog);
    arm(&mut watchdog);
    watchdog.begin_writes().expect("it was told");
    watchdog.disarm();
    arm(&mut watchdog);
    watchdog.begin_writes().expect_err("it has forgotten");
}

/// A rollback lasts as long as a gate is closed. Another attacher must not change the same keys
/// meanwhile.
#[test]
fn no_other_attacher_begins_before_the_watchdog_has_ended() {
    use std::os::unix::fs::PermissionsExt;

    let mut child = Command::new("sleep").arg("1000").spawn();
    let child = child.as_mut().expect("coreutils");
    let qemu = Process::open(child.id()).expect("it runs");
    let folder = tempfile::tempdir().expect("temporary folder");
    let program = folder.path().join("watchdog");
    std::fs::write(&program, "#!/bin/sh\nexec tail -f /dev/null >&1\n").expect("room");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("own file");
    let started = (qemu.pid(), qemu.started().expect("it runs"));
    let (connection, _qemus) = UnixStream::pair().expect("a pair");
    let libvirt = Way::Libvirt {
        uri: "test:///default",
        domain: "test",
    };
    for way in [Way::Nobody, libvirt, Way::Connection(connection.into())] {
        let lock = qemu.lock().expect("nobody has it");
        let what = format!("{way:?}");
        let watchdog = Watchdog::start(&program, started, way, lock.files());
        let mut watchdog = watchdog.expect("started");
        drop(lock);
        let locked = qemu.lock();
        // An attacher that is not root takes this lock alone.
        let maps = File::open(format!("/proc/{}/maps", qemu.pid())).expect("it runs");
        let maps_locked = flock(&maps, FlockOperation::NonBlockingLockExclusive);
        drop(maps);
        watchdog.child.kill().expect("it runs");
        drop(watchdog);
        let error = locked.expect_err(&what).to_string();
        assert!(error.contains("another process"), "{what}: {error}");
        assert!(maps_locked.is_err(), "{what}");
        qemu.lock().expect("free again");
    }
    child.kill().expect("it runs");
    child.wait().expect("it has ended");
}

#[test]
fn a_qemu_that_closes_the_connection_is_reported() {
    let (ours, qemus) = UnixStream::pair().expect("a pair");
    drop(qemus);
    let monitor = Asked::Connection(Wire::new(ours));
    monitor.resume(false).expect_err("not answered");
}
