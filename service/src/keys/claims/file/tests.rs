// SPDX-License-Identifier: Apache-2.0

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

use super::*;

/// Writes a file that no other user may write, whatever the umask.
fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::write(path, bytes).expect("room");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("its own");
}

fn key(name: &str) -> SavedKey {
    SavedKey {
        name: name.to_owned(),
        address: 0x1000,
    }
}

fn state(newest_hold: u64) -> State {
    State {
        newest_hold,
        ..State::default()
    }
}

fn ledger() -> Ledger {
    let mut holds = KeyHolds::default();
    let at = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(4_000_000_000);
    holds.take(&Hold {
        number: 7,
        holder: "uid:0".into(),
        reason: "incident".into(),
        references: 2,
        since: SystemTime::UNIX_EPOCH,
        expires: Some((Instant::now(), at)),
        fired: false,
    });
    Ledger {
        process: "1-2".to_owned(),
        boot: "b".to_owned(),
        holds_of: "0123abcd".to_owned(),
        now: State {
            newest_hold: 7,
            holds: vec![SavedHolds::of(key("alpha"), &holds)],
            claims: Claims::default(),
        },
        ..Ledger::default()
    }
}

#[test]
fn a_ledger_is_read_back() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let mut file = LedgerFile::open(&path, "1-2").expect("there is none yet");
    assert!(file.found.is_none());
    file.place
        .replace(&ledger().encode().expect("JSON"))
        .expect("room");
    let found = LedgerFile::open(&path, "1-2")
        .expect("whole")
        .found
        .expect("one");
    let holds = found.now.holds[0].restored();
    let hold = holds.find(7).expect("the hold");
    assert_eq!((&*hold.holder, hold.references), ("uid:0", 2));
    let (at, wall) = hold.expires.expect("it expires");
    assert!(at > Instant::now());
    assert_eq!(wall, ledger().now.holds[0].holds[0].expires.expect("so").1);
}

/// Another user may write where the socket is. A pipe has no writer.
#[test]
fn a_ledger_that_another_user_may_have_written_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    write(&path, ledger().encode().expect("JSON"));
    let open = |why: &str| {
        let error = LedgerFile::open(&path, "1-2").expect_err(why).to_string();
        assert!(error.contains("another user"), "{error}");
    };
    for mode in [0o620, 0o602, 0o666] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its own");
        open("anyone writes it");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its own");
    // Only root can give a file away.
    if chown(&path, Some(1), None).is_ok() {
        open("it is another user's");
    }
    fs::remove_file(&path).expect("its own");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a pipe");
    let error = LedgerFile::open(&path, "1-2").expect_err("a pipe");
    assert!(error.to_string().contains("no regular file"), "{error}");
}

/// Sums of what is read do not overflow.
#[test]
fn a_ledger_with_numbers_that_no_program_writes_is_torn() {
    let torn = |change: fn(&mut State)| {
        for is_pending in [false, true] {
            let mut written = ledger();
            let state = match is_pending {
                false => &mut written.now,
                true => &mut written.pending.insert(Pending::default()).after,
            };
            state.holds = ledger().now.holds;
            change(state);
            let error = Ledger::decode(&written.encode().expect("JSON")).expect_err("too large");
            assert!(error.to_string().contains("too large"), "{error}");
        }
    };
    torn(|state| state.newest_hold = u64::MAX);
    torn(|state| state.holds[0].holds[0].references = u32::MAX);
    torn(|state| {
        let mut hold = state.holds[0].holds[0].clone();
        hold.references = 1 << 23;
        state.holds[0].holds = vec![hold; 3];
    });
    torn(|state| {
        let owner = |name: usize| crate::keys::claims::Owner {
            principal: String::new(),
            name: name.to_string(),
        };
        state.claims = Claims::with_owners((0..=crate::keys::claims::MAX_OWNERS).map(owner));
    });
}

/// The guest has migrated and come back, or its image was restored.
#[test]
fn a_ledger_of_another_process_is_forgotten() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    write(&path, ledger().encode().expect("JSON"));
    let file = LedgerFile::open(&path, "1-3").expect("usable");
    assert!(file.found.is_none());
    assert_eq!(file.process, "1-3");
    let file = LedgerFile::open(&path, "1-2").expect("usable");
    assert!(file.found.is_some());
}

/// Every prefix of a file, and every file with one byte changed.
#[test]
fn a_torn_ledger_is_set_aside() {
    let bytes = ledger().encode().expect("JSON");
    for end in 0..bytes.len() {
        let error = Ledger::decode(&bytes[..end]).expect_err("cut");
        assert!(matches!(error, Unusable::Torn(_)), "{end}: {error}");
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        Ledger::decode(&changed).expect_err("another content");
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    write(&path, &bytes[..bytes.len() / 2]);
    let file = LedgerFile::open(&path, "1-2").expect("usable");
    assert!(file.found.is_none());
    assert!(!path.exists());
    assert!(folder.path().join("g.ledger.1").exists(), "for people");
}

#[test]
fn a_ledger_of_a_newer_version_is_left_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let text = "{\"format\":\"patchbay-ledger\",\"version\":2,\"more\":1}\nanything";
    write(&path, text);
    let error = LedgerFile::open(&path, "1-2").expect_err("newer");
    assert!(error.to_string().contains("has version 2"), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("it stays"), text);
}

#[test]
fn a_ledger_that_is_no_file_or_too_large_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    fs::create_dir(&path).expect("room");
    let error = LedgerFile::open(&path, "1-2").expect_err("a folder");
    assert!(matches!(error, LedgerError::Io { .. }), "{error}");
    let path = folder.path().join("large");
    write(&path, "");
    let file = File::options().write(true).open(&path).expect("its own");
    file.set_len(MAX_BYTES + 1).expect("sparse");
    let error = LedgerFile::open(&path, "1-2").expect_err("too large");
    assert!(error.to_string().contains("at most"), "{error}");
}

/// Later programs read what this version writes. A field that this one does not know is ignored.
#[test]
fn a_ledger_of_version_1_is_read() {
    let claim = r#"{"owner":{"principal":"uid:0","name":"a"},"want":"on","force":false,"since":{"secs_since_epoch":1,"nanos_since_epoch":0},"void":false}"#;
    let key = format!(
        r#"{{"address":4096,"stack":[{claim}],"taken":0,"on":{{"principal":"uid:0","name":"a"}},"leaving":[]}}"#
    );
    let content = vec!["0"; 32].join(",");
    let owner = format!(
        r#"{{"owner":{{"principal":"uid:0","name":"a"}},"generation":4,"content":[{content}],"expires":null,"answer":null}}"#
    );
    let hold = r#"{"number":7,"holder":"uid:0","reason":"","references":2,"since":{"secs_since_epoch":1,"nanos_since_epoch":0},"expires":{"secs_since_epoch":4000000000,"nanos_since_epoch":0},"fired":false}"#;
    let holds = format!(r#"{{"key":{{"name":"alpha","address":4096}},"holds":[{hold}]}}"#);
    let now = format!(
        r#"{{"newest_hold":7,"holds":[{holds}],"claims":{{"owners":[{owner}],"keys":{{"alpha":{key}}}}}}}"#
    );
    let body =
        format!(r#"{{"boot":"b","holds_of":"0123abcd","now":{now},"pending":null,"later":1}}"#);
    let sha256 = hex(&Sha256::digest(&body));
    let text = format!(
        "{{\"format\":\"patchbay-ledger\",\"version\":1,\"sha256\":\"{sha256}\"}}\n{body}\n"
    );
    let ledger = Ledger::decode(text.as_bytes()).expect("version 1");
    let holds = ledger.now.holds[0].restored();
    assert_eq!(holds.find(7).expect("the hold").references, 2);
    let claims = ledger.now.claims.key("alpha").expect("claimed");
    assert_eq!(claims.stack().len(), 1);
    assert!(claims.is_of(static_keys::KeyId(4096)) && !claims.is_of(static_keys::KeyId(8192)));
}

/// The counts in the guest tell whether a pending change was made.
#[test]
fn the_guest_tells_whether_a_pending_change_was_made() {
    let pending = |counts: &[(&str, i32, i32)]| Ledger {
        now: state(1),
        pending: Some(Pending {
            counts: counts
                .iter()
                .map(|(name, before, after)| (key(name), *before, *after))
                .collect(),
            after: state(2),
            request: None,
        }),
        ..Ledger::default()
    };
    let counts = [("a", 0, 1), ("b", 1, 0), ("c", 0, 2)];
    let settled = |found: [Option<i32>; 3]| {
        let mut found = found.into_iter();
        pending(&counts)
            .settled(|_| found.next().flatten())
            .0
            .newest_hold
    };
    assert_eq!(settled([Some(1), Some(0), Some(2)]), 2);
    assert_eq!(settled([Some(0), Some(1), Some(0)]), 1);
    // The guest has changed one key since, or its module is gone.
    assert_eq!(settled([Some(1), Some(0), Some(5)]), 2);
    assert_eq!(settled([Some(0), None, Some(0)]), 1);
    assert_eq!(settled([None, None, None]), 1);
    // A change of claims alone: the counts are the same, and the client has no answer.
    let one = pending(&[("a", 1, 1)]).settled(|_| Some(1)).0;
    assert_eq!(one.newest_hold, 1);
}

/// The attacher and its watchdog were killed, and a change of three keys was made in part.
#[test]
fn each_key_of_a_change_that_was_made_in_part_decides_for_itself() {
    let holds = |name: &str, number: u64| {
        let mut holds = KeyHolds::default();
        holds.take(&Hold {
            number,
            holder: "uid:0".into(),
            reason: "".into(),
            references: 1,
            since: SystemTime::UNIX_EPOCH,
            expires: None,
            fired: false,
        });
        SavedHolds::of(key(name), &holds)
    };
    let state = |names: &[&str], owner: &str| State {
        newest_hold: 9,
        holds: (1..)
            .zip(names)
            .map(|(number, name)| holds(name, number))
            .collect(),
        claims: Claims::with_owners(std::iter::once(crate::keys::claims::Owner {
            principal: "uid:0".to_owned(),
            name: owner.to_owned(),
        })),
    };
    let settled = |found: [i32; 3]| {
        // a is given back, b and c are taken.
        let ledger = Ledger {
            now: state(&["a", "x"], "before"),
            pending: Some(Pending {
                counts: [("a", 1, 0), ("b", 0, 1), ("c", 0, 1)]
                    .map(|(name, before, after)| (key(name), before, after))
                    .to_vec(),
                after: state(&["b", "c", "x"], "after"),
                request: None,
            }),
            ..Ledger::default()
        };
        let mut found = found.into_iter();
        let (state, _) = ledger.settled(|_| found.next());
        let mut held: Vec<String> = state
            .holds
            .into_iter()
            .map(|holds| holds.key.name)
            .collect();
        held.sort();
        let owner = |name: &str| crate::keys::claims::Owner {
            principal: "uid:0".to_owned(),
            name: name.to_owned(),
        };
        (held.concat(), state.claims.owner(&owner("after")).is_some())
    };
    assert_eq!(settled([0, 1, 1]), ("bcx".to_owned(), true));
    assert_eq!(settled([1, 0, 0]), ("ax".to_owned(), false));
    assert_eq!(settled([0, 1, 0]), ("bx".to_owned(), false));
    assert_eq!(settled([1, 0, 1]), ("acx".to_owned(), false));
    // The guest has changed one of them, and the others decide.
    assert_eq!(settled([0, 7, 1]), ("bcx".to_owned(), true));
    assert_eq!(settled([1, 0, 7]), ("ax".to_owned(), false));
}
