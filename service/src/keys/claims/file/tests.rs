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

fn ledger() -> Ledger {
    let mut holds = KeyHolds::default();
    let at = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(4_000_000_000);
    let taking = Taking {
        holder: "uid:0".into(),
        reason: "incident".into(),
        since: SystemTime::UNIX_EPOCH,
        expires: Some((Instant::now(), at)),
        fired: false,
    };
    holds.take(&Hold::new(7, 2, taking));
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
        .replace(&ledger().encode().expect("JSON").0)
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

/// Another user may write in the folder of the socket. A pipe has no writer.
#[test]
fn a_ledger_that_another_user_may_have_written_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    write(&path, ledger().encode().expect("JSON").0);
    let open = |why: &str| {
        let error = LedgerFile::open(&path, "1-2").expect_err(why).to_string();
        assert!(error.contains("another user"), "{error}");
    };
    for mode in [0o620, 0o602, 0o666] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its own");
        open("anyone writes it");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its own");
    // Only root can change the owner of a file.
    if chown(&path, Some(1), None).is_ok() {
        open("it is another user's");
    }
    fs::remove_file(&path).expect("its own");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("a pipe");
    let error = LedgerFile::open(&path, "1-2").expect_err("a pipe");
    assert!(error.to_string().contains("no regular file"), "{error}");
}

/// Returns a file with this content, even if its numbers are invalid.
fn file_of(ledger: &Ledger) -> Vec<u8> {
    let body = serde_json::to_string(ledger).expect("JSON");
    let sha256 = hex(&Sha256::digest(&body));
    let header = format!(r#"{{"format":"patchbay-ledger","version":2,"sha256":"{sha256}"}}"#);
    format!("{header}\n{body}\n").into_bytes()
}

fn with_references(references: &[u32]) -> Vec<SavedHolds> {
    let mut saved = ledger().now.holds;
    let hold = saved[0].holds[0].clone();
    let hold = |references: &u32| SavedHold {
        references: *references,
        ..hold.clone()
    };
    saved[0].holds = references.iter().map(hold).collect();
    saved
}

/// Sums of the numbers in a file do not overflow. A file with such numbers is neither written nor
/// read, and a start does not treat it as torn.
#[test]
fn a_ledger_with_numbers_that_no_program_writes_stops_the_start() {
    let refused = |change: fn(&mut Ledger)| {
        let mut written = ledger();
        written.pending = Some(Pending::default());
        change(&mut written);
        written.encode().expect_err("it would not be read");
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("g.ledger");
        write(&path, file_of(&written));
        let error = LedgerFile::open(&path, "1-2").expect_err("implausible");
        assert!(matches!(error, LedgerError::Implausible { .. }), "{error}");
        assert!(error.to_string().contains("move the file away"), "{error}");
        assert!(path.exists(), "it is the only copy");
    };
    fn pending(ledger: &mut Ledger) -> &mut Pending {
        ledger.pending.as_mut().expect("so")
    }
    refused(|ledger| ledger.now.newest_hold = u64::MAX);
    refused(|ledger| pending(ledger).newest_hold = u64::MAX);
    // A later hold would get the id of one that is there.
    refused(|ledger| ledger.now.newest_hold = 6);
    refused(|ledger| {
        pending(ledger).holds = std::mem::take(&mut ledger.now.holds);
        pending(ledger).newest_hold = 6;
        ledger.now.newest_hold = 5;
    });
    refused(|ledger| ledger.now.holds = with_references(&[u32::MAX]));
    refused(|ledger| ledger.now.holds = with_references(&[1 << 30, 1 << 30]));
    refused(|ledger| pending(ledger).holds = with_references(&[1 << 30, 1 << 30]));
    refused(|ledger| {
        let owner = |name: usize| crate::keys::claims::Owner::new(String::new(), name.to_string());
        ledger.now.claims = Claims::with_owners((0..=crate::keys::claims::MAX_OWNERS).map(owner));
    });
}

/// A count contains at most this many references, so the holds on a key can too.
#[test]
fn as_many_references_as_a_count_has_are_read_back() {
    let mut written = ledger();
    written.now.holds = with_references(&[1 << 30, (1 << 30) - 1]);
    let (bytes, _) = written.encode().expect("within the bounds");
    let read = Ledger::decode(&bytes).expect("within the bounds");
    assert_eq!(read.now.holds[0].restored().references(), i32::MAX as u32);
}

/// A change that ends holds and claims always fits.
#[test]
fn only_a_change_that_adds_something_is_refused_for_its_size() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = LogPath::new(&folder.path().join("g.ledger")).expect("a folder");
    let at_most = at_most_added(place.at_most());
    let large = vec![b' '; usize::try_from(at_most + 1).expect("64 bits")];
    let error = check_room(&place, &large, true).expect_err("too large");
    assert!(error.to_string().contains("at most"), "{error}");
    check_room(&place, &large[1..], true).expect("the largest");
    check_room(&place, &large, false).expect("it ends something");
    // The state before, what is left of it, and the answers.
    assert!(2 * at_most + (16 << 20) <= MAX_BYTES);
}

/// The watchdog of the attacher that wrote the file has written a mark beside it.
#[test]
fn a_mark_is_read_only_with_its_ledger() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let (bytes, digest) = ledger().encode().expect("JSON");
    let mark = |digest: &[u8; 32]| Mark::new(digest, true, vec!["beta".to_owned()]);
    mark(&digest).write(&path).expect("there is no ledger");
    write(&path, &bytes);
    mark(&[0; 32]).write(&path).expect("another ledger's");
    assert!(!Mark::path(&path).exists());
    mark(&digest).write(&path).expect("room");
    let found = || LedgerFile::open(&path, "1-2").expect("whole").mark;
    assert_eq!(found(), Some(mark(&digest)));
    let mark_path = Mark::path(&path);
    let content = fs::read(&mark_path).expect("there");
    for end in 0..content.len() {
        write(&mark_path, &content[..end]);
        assert_eq!(found(), None, "{end} bytes of it");
    }
    write(&mark_path, &content);
    fs::set_permissions(&mark_path, fs::Permissions::from_mode(0o666)).expect("its own");
    assert_eq!(found(), None, "anyone writes it");
    fs::set_permissions(&mark_path, fs::Permissions::from_mode(0o600)).expect("its own");
    let mut later = ledger();
    later.serial = 1;
    write(&path, later.encode().expect("JSON").0);
    assert_eq!(found(), None, "of the content before");
}

/// The guest has migrated away and come back, or was restored from an image.
#[test]
fn a_ledger_of_another_process_is_forgotten() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    write(&path, ledger().encode().expect("JSON").0);
    let file = LedgerFile::open(&path, "1-3").expect("usable");
    assert!(file.found.is_none());
    assert_eq!(file.process, "1-3");
    let file = LedgerFile::open(&path, "1-2").expect("usable");
    assert!(file.found.is_some());
}

/// Every prefix of a file, and every file with one byte changed.
#[test]
fn a_torn_ledger_is_set_aside() {
    let bytes = ledger().encode().expect("JSON").0;
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

/// Opens every prefix of every content that a ledger has had, alone, with a newline at its end, and
/// with the rest of another content. Either the whole content is found, or nothing of it, and the
/// file is kept for people.
#[test]
fn a_ledger_is_opened_whole_or_set_aside() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let aside = folder.path().join("g.ledger.1");
    let contents = history();
    for (at, (ledger, whole)) in contents.iter().enumerate() {
        write(&path, whole);
        let found = LedgerFile::open(&path, "1-2").expect("whole").found;
        assert_eq!(found.as_ref().map(file_of), Some(file_of(ledger)));
        let (_, other) = &contents[(at + 1) % contents.len()];
        for end in 0..whole.len() {
            let cut = &whole[..end];
            let rest = other.get(end..).unwrap_or_default();
            for torn in [cut.to_vec(), [cut, b"\n"].concat(), [cut, rest].concat()] {
                if contents.iter().any(|(_, whole)| *whole == torn) {
                    continue;
                }
                let _ = fs::remove_file(&aside);
                write(&path, &torn);
                let file = LedgerFile::open(&path, "1-2").expect("set aside");
                assert!(file.found.is_none() && file.mark.is_none(), "{end} bytes");
                assert!(!path.exists());
                assert_eq!(fs::read(&aside).expect("for people"), torn);
            }
        }
    }
}

/// An attacher that was killed has left a part of the next content beside the ledger.
#[test]
fn the_part_of_a_next_content_is_not_read() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let contents = history();
    for pair in contents.windows(2) {
        let [(ledger, whole), (_, next)] = pair else {
            unreachable!("two")
        };
        write(&path, whole);
        for end in 0..=next.len() {
            write(&folder.path().join("g.ledger.new"), &next[..end]);
            let mut file = LedgerFile::open(&path, "1-2").expect("whole");
            let found = file.found.take().expect("the content before");
            assert_eq!(file_of(&found), file_of(ledger), "{end} bytes");
        }
        let mut file = LedgerFile::open(&path, "1-2").expect("whole");
        file.place.replace(next).expect("the part is no obstacle");
        assert_eq!(fs::read(&path).expect("there"), *next);
    }
}

/// Returns contents of a ledger in their order, with the bytes of their files: nothing, holds, a
/// pending change of several keys, and its outcome with several owners and claims.
fn history() -> Vec<(Ledger, Vec<u8>)> {
    let version_1 = Ledger::decode(VERSION_1).expect("version 1");
    let (now, requests) = version_1.clone().settled(None, |_| None);
    let outcome = Ledger {
        now,
        requests,
        pending: None,
        ..version_1.clone()
    };
    let nothing = Ledger {
        now: State::default(),
        ..ledger()
    };
    let contents = [nothing, ledger(), version_1, outcome].into_iter();
    let contents = contents.zip(0..).map(|(ledger, serial)| {
        let ledger = Ledger { serial, ..ledger };
        let (bytes, _) = ledger.encode().expect("JSON");
        (ledger, bytes)
    });
    contents.collect()
}

#[test]
fn a_ledger_of_a_newer_version_is_left_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("g.ledger");
    let text = "{\"format\":\"patchbay-ledger\",\"version\":3,\"more\":1}\nanything";
    write(&path, text);
    let error = LedgerFile::open(&path, "1-2").expect_err("newer");
    assert!(error.to_string().contains("has version 3"), "{error}");
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

/// Later programs read files of this version. A field that this program does not know is ignored.
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

/// A file of version 1. Its pending change contains the whole state after the change.
const VERSION_1: &[u8] = include_bytes!("v1.ledger");

#[test]
fn a_pending_change_of_version_1_is_read() {
    let ledger = Ledger::decode(VERSION_1).expect("version 1");
    assert_eq!((&*ledger.process, &*ledger.boot), ("1-2", "b"));
    let pending = ledger.pending.as_ref().expect("a change");
    let touched = |of: &SavedHolds| (of.key.name.clone(), of.holds.len());
    let mut holds: Vec<_> = pending.holds.iter().map(touched).collect();
    holds.sort();
    assert_eq!(
        holds,
        [("alpha".to_owned(), 0), ("beta".to_owned(), 1)],
        "gamma stays"
    );
    let claims: Vec<_> = pending.claims.keys().collect();
    assert_eq!(claims, ["alpha", "beta"]);
    assert_eq!(pending.owners.len(), 1, "the other one stays");
    let counts = |made: bool| move |key: &SavedKey| Some(i32::from((key.name == "beta") == made));
    let held = |state: &State| {
        let mut names: Vec<_> = state.holds.iter().map(|of| of.key.name.clone()).collect();
        names.sort();
        names.concat()
    };
    let (before, _) = ledger.clone().settled(None, counts(false));
    assert_eq!(held(&before), "alphagamma");
    assert!(before.claims.key("alpha").is_some() && before.claims.key("beta").is_none());
    let (after, _) = ledger.settled(None, counts(true));
    assert_eq!(held(&after), "betagamma");
    assert!(after.claims.key("alpha").is_none() && after.claims.key("beta").is_some());
    let owner = crate::keys::claims::Owner::new("uid:0".to_owned(), "a".to_owned());
    let owner = after.claims.owner(&owner).expect("it has claims");
    assert!(owner.expires.is_some() && owner.answer.is_some());
}
