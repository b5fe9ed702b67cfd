// SPDX-License-Identifier: Apache-2.0
//! Ledgers that are carried to another host. The same guest stands for the copy that a migration
//! makes of its memory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use patchbay_guest::log_file::LogPath;
use patchbay_proto::text::hex;
use sha2::{Digest, Sha256};

use super::*;
use crate::keys::UpdateSummary;
use crate::keys::audit::AuditLog;
use crate::keys::claims::{MadeRequest, MoveError, Moved};
use crate::keys::replay::RequestId;

const FROM: &str = "1-2";
const TO: &str = "7-8";

/// Returns a registry that knows the guest's kernel.
fn registry_of(guest: &InMemoryGuest) -> Registry {
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    registry.register_kernel(found(guest)).expect("taken");
    registry
}

/// The folder of an attacher's socket.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temporary folder"))
    }

    fn ledger(&self) -> PathBuf {
        self.0.path().join("g.ledger")
    }

    fn serve(&self, guest: &Arc<InMemoryGuest>, process: &str) -> Service {
        let file = LedgerFile::open(&self.ledger(), process).expect("usable");
        start_with(guest, file, Some(found(guest))).0
    }

    fn export(&self) -> Result<(Vec<u8>, Moved), MoveError> {
        LedgerFile::export(&self.ledger(), FROM)
    }

    fn import(&self, guest: &InMemoryGuest, exported: &[u8]) -> Result<Moved, MoveError> {
        self.import_with(&registry_of(guest), exported, &mut AuditLog::default())
    }

    /// Imports a ledger. Returns the line in the audit log.
    fn import_audited(&self, guest: &InMemoryGuest, exported: &[u8]) -> serde_json::Value {
        let logs = Host::new();
        let path = logs.0.path().join("audit.jsonl");
        let mut audit = AuditLog::open(&path).expect("opens");
        let taken = self.import_with(&registry_of(guest), exported, &mut audit);
        taken.expect("taken");
        serde_json::from_str(&fs::read_to_string(&path).expect("there")).expect("one line")
    }

    /// Writes a ledger as it is.
    fn put(&self, bytes: &[u8]) {
        let place = LogPath::new(&self.ledger()).expect("a folder");
        place.replace(bytes).expect("room");
    }

    fn import_with(
        &self,
        registry: &Registry,
        exported: &[u8],
        audit: &mut AuditLog,
    ) -> Result<Moved, MoveError> {
        LedgerFile::import(&self.ledger(), TO, exported, registry, audit, "uid:0")
    }

    /// Returns the names and contents of all files.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = fs::read_dir(self.0.path()).expect("a folder").flatten();
        let mut files: Vec<_> = entries
            .map(|entry| (entry.path(), fs::read(entry.path()).expect("a file")))
            .collect();
        files.sort();
        files
    }
}

/// Returns a guest with holds and claims, and its exported ledger.
async fn left() -> (Arc<InMemoryGuest>, Vec<u8>, Vec<(String, String, u32)>) {
    let (guest, from) = (boot(), Host::new());
    let first = from.serve(&guest, FROM);
    first.update("alpha", Op::Inc, None).await.expect("made");
    let on = [("beta", Want::On), ("gamma", Want::Held)];
    first.claim("a", 4, &on).await.expect("made");
    let holds = first.holds().await;
    drop(first);
    let before = from.files();
    let (exported, moved) = from.export().expect("whole");
    let expected = Moved {
        holds: 3,
        claims: 2,
        owners: 1,
        pending: false,
    };
    assert_eq!(moved, expected);
    assert_eq!(from.files(), before);
    (guest, exported, holds)
}

#[tokio::test]
async fn holds_and_claims_move_with_the_guest() {
    let (guest, exported, holds) = left().await;
    let to = Host::new();
    // An attacher has already served the guest here.
    drop(to.serve(&guest, TO));
    assert_eq!(to.import(&guest, &exported).expect("taken").claims, 2);
    let second = to.serve(&guest, TO);
    assert_eq!(second.holds().await, holds, "with their ids");
    assert_eq!(second.claims().await.len(), 2);
    let late = second.claim("a", 3, &[("beta", Want::Off)]).await;
    assert_eq!(late.expect_err("late").reason(), "GENERATION_STALE");
    second.claim("a", 5, &[]).await.expect("undone");
    second
        .update("alpha", Op::Dec, None)
        .await
        .expect("its own");
    let counts = ["alpha", "beta", "gamma"].map(|name| guest.count(name));
    assert_eq!(counts, [0, 0, 0]);
}

/// Without an import, the references look like the guest's own.
#[tokio::test]
async fn a_guest_that_moves_alone_keeps_the_references() {
    let (guest, _exported, _) = left().await;
    let to = Host::new();
    let second = to.serve(&guest, TO);
    assert_eq!(second.claims().await, []);
    second.claim("a", 5, &[]).await.expect("nothing to end");
    assert_eq!(guest.count("beta"), 1);
}

#[tokio::test]
async fn an_export_that_is_cut_or_newer_is_refused() {
    let (guest, exported, _) = left().await;
    let to = Host::new();
    for end in 0..exported.len() {
        let error = to.import(&guest, &exported[..end]).expect_err("cut");
        assert!(matches!(error, MoveError::Torn { .. }), "{end}: {error}");
    }
    let twice = [&exported[..], &exported].concat();
    let error = to.import(&guest, &twice).expect_err("two of them");
    assert!(matches!(error, MoveError::Torn { .. }), "{error}");
    let text = String::from_utf8(exported).expect("JSON");
    let newer = text.replace("\"version\":2", "\"version\":3");
    let error = to.import(&guest, newer.as_bytes()).expect_err("newer");
    assert!(
        matches!(error, MoveError::Newer { found: 3, .. }),
        "{error}"
    );
    assert_eq!(to.files(), []);
}

#[tokio::test]
async fn the_ledger_of_another_boot_is_not_imported() {
    let (guest, exported, _) = left().await;
    let to = Host::new();
    guest.run(&["alpha", "beta", "gamma"].map(|name| TestKey::new(name, 0)));
    let error = to.import(&guest, &exported).expect_err("another boot");
    assert!(matches!(error, MoveError::OtherBoot { .. }), "{error}");
    let mut audit = AuditLog::default();
    let error = to
        .import_with(&Registry::default(), &exported, &mut audit)
        .expect_err("no kernel");
    assert!(matches!(error, MoveError::NoKernel(_)), "{error}");
    assert_eq!(to.files(), []);
}

#[tokio::test]
async fn a_ledger_that_has_something_is_not_replaced() {
    let (guest, exported, _) = left().await;
    for what in ["hold", "claim", "generation", "newer", "torn"] {
        let to = Host::new();
        let service = to.serve(&guest, TO);
        match what {
            "hold" => service.update("alpha", Op::Inc, None).await.expect("made"),
            "claim" => {
                let made = service.claim("b", 1, &[("alpha", Want::Held)]).await;
                made.expect("made");
            }
            "generation" => service.claim("b", 1, &[]).await.expect("nothing to end"),
            "newer" => {
                let text = "{\"format\":\"patchbay-ledger\",\"version\":3}\n";
                fs::write(to.ledger(), text).expect("room");
            }
            _ => fs::write(to.ledger(), "{").expect("room"),
        }
        drop(service);
        let before = to.files();
        let result = to.import(&guest, &exported);
        match (what, result) {
            // An import sets a torn ledger aside and continues, as an attacher does.
            ("torn", result) => assert_eq!(result.expect("taken").claims, 2),
            ("newer", Err(MoveError::Ledger(_))) => assert_eq!(to.files(), before),
            (_, Err(error @ MoveError::Used { .. })) => {
                assert!(error.to_string().contains("move this file away"), "{error}");
                assert_eq!(to.files(), before, "{what}");
            }
            (_, other) => panic!("{what}: {other:?}"),
        }
        guest.set_count("alpha", 1);
    }
}

/// The counts no longer contain what an import would bring back.
#[tokio::test]
async fn a_ledger_is_not_imported_again_after_its_holds_have_ended() {
    let (guest, from, to) = (boot(), Host::new(), Host::new());
    let first = from.serve(&guest, FROM);
    first.update("alpha", Op::Inc, None).await.expect("made");
    drop(first);
    let (exported, _) = from.export().expect("whole");
    to.import(&guest, &exported).expect("taken");
    let second = to.serve(&guest, TO);
    let holds = second.holds().await;
    second.release(&holds[0].0).await.expect("its own");
    drop(second);
    let before = to.files();
    let error = to.import(&guest, &exported).expect_err("again");
    assert!(matches!(error, MoveError::Over(_)), "{error}");
    assert_eq!(to.files(), before);
    fs::remove_file(to.ledger()).expect("its own");
    to.import(&guest, &exported)
        .expect("the file was moved away");
}

/// A repeat of such a request must not be made a second time.
#[tokio::test]
async fn a_ledger_with_answers_of_requests_is_not_replaced() {
    let (guest, exported, _) = left().await;
    let to = Host::new();
    let mut ledger = Ledger {
        process: TO.to_owned(),
        now: State::default(),
        ..Ledger::decode(&exported).expect("whole")
    };
    ledger.requests.push(MadeRequest {
        principal: "uid:7".to_owned(),
        request: RequestId::new("r".to_owned(), || "alpha".into()).expect("an id"),
        summary: UpdateSummary::default(),
        unmade: 0,
    });
    to.put(&ledger.encode().expect("JSON").0);
    let error = to.import(&guest, &exported).expect_err("used");
    assert!(matches!(error, MoveError::Over(_)), "{error}");
}

/// The checksum does not show who wrote the file, and a pipe has no writer.
#[tokio::test]
async fn an_exported_file_that_another_user_may_write_is_refused() {
    let (_, exported, _) = left().await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("web-1.ledger");
    let refused = |path: &Path, why: &str| {
        let error = LedgerFile::read_exported(path).expect_err(why);
        assert!(matches!(error, MoveError::Unreadable { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&path, "No such file");
    refused(&folder.path().join("none/web-1.ledger"), "No such file");
    fs::write(&path, &exported).expect("room");
    let set_mode = |mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its own");
    };
    for mode in [0o620, 0o602, 0o666] {
        set_mode(mode);
        refused(&path, "another user may write it");
    }
    for mode in [0o600, 0o644] {
        set_mode(mode);
        assert_eq!(LedgerFile::read_exported(&path).expect("its own"), exported);
    }
    let link = folder.path().join("link");
    symlink(&path, &link).expect("room");
    refused(&link, "symbolic link");
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("a pipe");
    refused(&pipe, "no regular file");
}

/// An import that nobody can trace later is not made.
#[tokio::test]
async fn an_import_is_in_the_audit_log_before_it_is_made() {
    let (guest, exported, _) = left().await;
    let to = Host::new();
    let mut full = AuditLog::open(Path::new("/dev/full")).expect("a device");
    let refused = to.import_with(&registry_of(&guest), &exported, &mut full);
    let error = refused.expect_err("no room for the line");
    assert!(matches!(error, MoveError::Unaudited(_)), "{error}");
    assert_eq!(to.files(), []);
    let line = to.import_audited(&guest, &exported);
    assert_eq!(line["event"], "ledger_import");
    assert_eq!(line["owner"], "uid:0");
    assert_eq!((&line["holds"], &line["claims"]), (&3.into(), &2.into()));
    assert_eq!(line["sha256"], hex(&Sha256::digest(&exported)));
    assert_eq!(line["pending"], false);
}

/// The line of an import that was not made must not remain without an outcome.
#[tokio::test]
async fn an_import_that_fails_is_in_the_audit_log_too() {
    let (guest, exported, _) = left().await;
    let (to, logs) = (Host::new(), Host::new());
    let path = logs.0.path().join("audit.jsonl");
    let mut audit = AuditLog::open(&path).expect("opens");
    // The new content is written under this name first.
    let mut next = to.ledger().into_os_string();
    next.push(".new");
    fs::create_dir(&next).expect("room");
    let refused = to.import_with(&registry_of(&guest), &exported, &mut audit);
    let error = refused.expect_err("a folder has the name of the new file");
    assert!(matches!(error, MoveError::Io { .. }), "{error}");
    let lines = fs::read_to_string(&path).expect("there");
    let lines: Vec<serde_json::Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let [import, outcome] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert_eq!(import["event"], "ledger_import");
    assert_eq!(
        (&outcome["event"], &outcome["id"]),
        (&"outcome".into(), &import["id"])
    );
    assert_eq!(outcome["reason"], "LEDGER_UNWRITABLE");
}

/// Returns a guest, a host whose service was killed while a claim on beta was pending, and the
/// digest of its ledger.
async fn killed() -> (Arc<InMemoryGuest>, Host, [u8; 32]) {
    let (guest, place, from) = (boot(), Place::default(), Host::new());
    let first = serve(&guest, &place);
    let on = first.claim("a", 1, &[("beta", Want::On)]).await;
    on.expect("made");
    drop(first);
    // The first write contains the pending change.
    let mut ledger = place.after(1).newest();
    FROM.clone_into(&mut ledger.process);
    let (bytes, digest) = ledger.encode().expect("JSON");
    from.put(&bytes);
    (guest, from, digest)
}

/// No service has started since, so the change is still pending in the file.
#[tokio::test]
async fn the_mark_of_a_pending_change_is_exported_too() {
    for (made, is_marked) in [(true, true), (false, true), (true, false)] {
        let (guest, from, digest) = killed().await;
        if is_marked {
            let mark = Mark::new(&digest, made, Vec::new());
            mark.write(&from.ledger()).expect("room");
        }
        // With a mark, the count contradicts it, because the guest has changed the key since.
        // Without one, the count decides.
        guest.set_count("beta", i32::from(made != is_marked));
        let (exported, moved) = from.export().expect("whole");
        assert_eq!(moved.pending, !is_marked);
        assert_eq!(moved.claims, usize::from(made && is_marked));
        let to = Host::new();
        let line = to.import_audited(&guest, &exported);
        assert_eq!(line["pending"], !is_marked);
        let second = to.serve(&guest, TO);
        let claims = second.claims().await;
        assert_eq!(claims.len(), usize::from(made), "{made}, {is_marked}");
    }
}

/// Without the mark, the destination would take a change that was rolled back for one that was
/// made.
#[tokio::test]
async fn a_pending_change_whose_keys_the_guest_has_changed_since_is_settled_before_an_export() {
    let (guest, from, digest) = killed().await;
    let mark = Mark::new(&digest, false, vec!["beta".to_owned()]);
    mark.write(&from.ledger()).expect("room");
    guest.set_count("beta", 0);
    let before = from.files();
    let error = from.export().expect_err("the counts tell");
    assert!(matches!(error, MoveError::Unsettled(_)), "{error}");
    assert_eq!(from.files(), before);
    let next = from.serve(&guest, FROM);
    assert_eq!(next.claims().await, []);
    drop(next);
    let (_, moved) = from.export().expect("settled");
    assert!(!moved.pending && moved.claims == 0, "{moved}");
}

#[tokio::test]
async fn a_ledger_that_cannot_be_exported_stays_as_it_is() {
    let (_, exported, _) = left().await;
    let from = Host::new();
    let error = from.export().expect_err("none");
    assert!(matches!(error, MoveError::Missing(_)), "{error}");
    let place = Host::new();
    place.put(&exported);
    let refused = LedgerFile::export(&place.ledger(), "other");
    let error = refused.expect_err("another process");
    assert!(matches!(error, MoveError::OtherProcess(_)), "{error}");
    place.put(&exported[..9]);
    let error = place.export().expect_err("cut");
    assert!(matches!(error, MoveError::Torn { .. }), "{error}");
    let error = error.to_string();
    assert!(!error.contains("export the ledger again"), "{error}");
    assert_eq!(place.files(), [(place.ledger(), exported[..9].to_vec())]);
}

#[tokio::test]
async fn a_mark_that_cannot_be_read_is_named() {
    let (_guest, from, digest) = killed().await;
    let mark = Mark::new(&digest, true, Vec::new());
    mark.write(&from.ledger()).expect("room");
    let path = Mark::path(&from.ledger());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("its own");
    let error = from.export().expect_err("anyone writes it").to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    assert!(error.contains("as the user of the attacher"), "{error}");
}
