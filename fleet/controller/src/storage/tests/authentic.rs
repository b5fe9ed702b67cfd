// SPDX-License-Identifier: Apache-2.0
//! Tests records that are forged, moved, signed with another key, or not signed.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::super::authentic::NoKey;
use super::*;

/// Files of keys, in a folder that is deleted on drop.
struct KeyFiles(tempfile::TempDir);

impl KeyFiles {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temporary folder"))
    }

    fn write(&self, name: &str, key: &[u8], mode: u32) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, key).expect("written");
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&path, mode).expect("its own");
        path
    }

    /// Returns the keys that consist of these bytes.
    fn keys(&self, bytes: &[u8]) -> RecordKeys {
        let file = |&byte: &u8| self.write(&byte.to_string(), &[byte; 32], 0o400);
        let files: Vec<PathBuf> = bytes.iter().map(file).collect();
        RecordKeys::read(&files).expect("keys")
    }
}

/// Returns the writes of a rollout of two guests with this random text, signed by the keys.
fn signed(keys: &RecordKeys, name: &str, run: &str) -> Vec<Write> {
    let one = rollout(name, 2, 1);
    let header = Header {
        run: run.to_owned(),
        ..one.header().clone()
    };
    let mut one = Rollout::new(header, one.members().to_vec());
    keys.signed(run, planned(&mut one, SPEC).expect("fits"))
}

async fn value(store: &dyn Store, key: &str) -> Vec<u8> {
    let entry = store.get(key).await.expect("read");
    entry.expect("there").value
}

fn reasons(loaded: &Loaded) -> Vec<(&str, &str)> {
    let unreadable = loaded.unreadable.iter();
    unreadable.map(|one| (&*one.name, &*one.why)).collect()
}

#[tokio::test]
async fn records_of_the_own_key_are_loaded() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    let keys = files.keys(&[1]);
    write(&store, signed(&keys, "net", "r1")).await;
    let loaded = load(&store, &keys).await.expect("loaded");
    assert_eq!((names(&loaded), reasons(&loaded)), (vec!["net"], vec![]));
    assert!(loaded.signed_again.is_empty());
    for key in self::keys(&store).await {
        let value = value(&store, &key).await;
        assert!(value.starts_with(b"patchbay-hmac-sha256 "), "{key}");
    }
}

/// Checks that a change of any byte of a record takes only this rollout out of service.
#[tokio::test]
async fn a_record_with_a_wrong_hmac_takes_out_its_own_rollout_alone() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    let keys = files.keys(&[1]);
    for name in ["a", "net", "z"] {
        write(&store, signed(&keys, name, name)).await;
    }
    for key in self::keys(&store).await {
        if !key.starts_with("rollouts/net/") {
            continue;
        }
        let right = value(&store, &key).await;
        // One byte of the beginning, of the MAC, of the random text and of the value, and the end.
        let end = right.len() - 1;
        for at in [0, 30, 86, 90, end] {
            let mut wrong = right.clone();
            wrong[at] ^= 1;
            write(&store, vec![put(key.clone(), wrong)]).await;
            let loaded = load(&store, &keys).await.expect("loaded");
            assert_eq!(names(&loaded), ["a", "z"], "{key} {at}");
            let [("net", why)] = reasons(&loaded)[..] else {
                panic!("{:?}", loaded.unreadable);
            };
            assert!(why.contains("HMAC") || why.contains("not authen"), "{why}");
            assert!(loaded.over.is_empty() && loaded.leftovers.is_empty());
            // Records that cannot be verified are not deleted either if the header is missing.
            let header = header_key("net");
            let kept = value(&store, &header).await;
            write(&store, vec![header_deletion("net")]).await;
            let loaded = load(&store, &keys).await.expect("loaded");
            let is_kept = loaded.leftovers.is_empty() || key == header;
            assert!(is_kept, "{key} {at}");
            write(&store, vec![put(header, kept)]).await;
        }
        write(&store, vec![put(key, right)]).await;
    }
    let loaded = load(&store, &keys).await.expect("loaded");
    assert_eq!(names(&loaded), ["a", "net", "z"]);
}

#[tokio::test]
async fn a_record_does_not_count_under_another_key_or_in_another_run() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    let keys = files.keys(&[1]);
    let other_run: Vec<Write> = signed(&keys, "net", "r1");
    for (from, to) in [
        (
            "rollouts/net/members/00000000",
            "rollouts/net/members/00000001",
        ),
        ("rollouts/other/header", "rollouts/net/header"),
        ("rollouts/other/spec", "rollouts/net/spec"),
    ] {
        write(&store, signed(&keys, "net", "r2")).await;
        write(&store, signed(&keys, "other", "r2")).await;
        let moved = value(&store, from).await;
        write(&store, vec![put(to.to_owned(), moved)]).await;
        let loaded = load(&store, &keys).await.expect("loaded");
        assert_eq!(names(&loaded), ["other"], "{from}");
        assert!(reasons(&loaded)[0].1.contains("a wrong HMAC"), "{from}");
    }
    for stale in other_run {
        let Write::Put { key, .. } = &stale else {
            panic!("{stale:?}");
        };
        // A set of keys is the same in both runs, because its key is its digest.
        let counts = key.contains("/sets/");
        write(&store, signed(&keys, "net", "r2")).await;
        let key = key.clone();
        write(&store, vec![stale]).await;
        let loaded = load(&store, &keys).await.expect("loaded");
        assert_eq!(names(&loaded).contains(&"net"), counts, "{key}");
    }
}

#[tokio::test]
async fn a_controller_with_another_key_or_none_leaves_the_records_alone() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    let mut writes = signed(&files.keys(&[1]), "net", "r1");
    write(&store, writes.clone()).await;
    // This one has no header, as after a plan that was interrupted.
    writes = signed(&files.keys(&[1]), "half", "r1");
    writes.pop();
    write(&store, writes).await;
    for (keys, why) in [
        (files.keys(&[2]), "has a wrong HMAC"),
        (files.keys(&[2]).adopting(), "has a wrong HMAC"),
        (RecordKeys::default(), "give it --record-key"),
    ] {
        let loaded = load(&store, &keys).await.expect("loaded");
        assert_eq!(names(&loaded), [""; 0]);
        assert!(loaded.leftovers.is_empty(), "nothing is deleted");
        assert!(loaded.signed_again.is_empty(), "nothing is written");
        for (name, found) in reasons(&loaded) {
            assert!(["half", "net"].contains(&name) && found.contains(why));
        }
        assert_eq!(loaded.unreadable.len(), 2);
    }
}

#[tokio::test]
async fn records_are_signed_again_when_keys_change() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    write(&store, signed(&files.keys(&[1]), "net", "r1")).await;
    let count = keys(&store).await.len();
    let both = load(&store, &files.keys(&[2, 1])).await.expect("loaded");
    assert_eq!(
        (names(&both), both.signed_again.len()),
        (vec!["net"], count)
    );
    write(&store, both.signed_again).await;
    let new = load(&store, &files.keys(&[2])).await.expect("loaded");
    assert_eq!((names(&new), new.signed_again.len()), (vec!["net"], 0));
    let old = load(&store, &files.keys(&[1])).await.expect("loaded");
    assert_eq!(names(&old), [""; 0]);
}

#[tokio::test]
async fn records_of_the_time_before_keys_are_adopted_once() {
    let (files, (_folder, store)) = (KeyFiles::new(), store().await);
    let keys = files.keys(&[1]);
    write(&store, signed(&RecordKeys::default(), "net", "r1")).await;
    write(&store, signed(&RecordKeys::default(), "old", "r1")).await;
    let version = put(header_key("old"), b"{\"version\":2}".to_vec());
    write(&store, vec![version]).await;
    let refused = load(&store, &keys).await.expect("loaded");
    assert_eq!(names(&refused), [""; 0]);
    let why = reasons(&refused)[0].1;
    assert!(why.contains("--adopt-unsigned-records"), "{why}");
    assert!(refused.leftovers.is_empty() && refused.signed_again.is_empty());
    let adopted = load(&store, &keys.clone().adopting())
        .await
        .expect("loaded");
    assert_eq!(names(&adopted), ["net"]);
    // Records that cannot be read are not signed either.
    let is_read = |write: &Write| format!("{write:?}").contains("rollouts/net/");
    assert!(adopted.signed_again.len() == 5 && adopted.signed_again.iter().all(is_read));
    // An interrupted adoption can be repeated.
    let mut writes = adopted.signed_again;
    let rest = writes.split_off(2);
    write(&store, writes).await;
    assert_eq!(names(&load(&store, &keys).await.expect("loaded")), [""; 0]);
    let adopted = load(&store, &keys.clone().adopting())
        .await
        .expect("loaded");
    assert_eq!(adopted.signed_again, rest);
    write(&store, rest).await;
    let loaded = load(&store, &keys).await.expect("loaded");
    assert_eq!(names(&loaded), ["net"]);
}

#[test]
fn keys_that_are_short_or_that_others_can_read_are_refused() {
    let files = KeyFiles::new();
    let read = |path: PathBuf| RecordKeys::read(&[path]).map(drop);
    for bytes in [0, 1, 31] {
        let refused = read(files.write("short", &vec![7; bytes], 0o600));
        assert!(matches!(refused, Err(NoKey::Short { .. })), "{refused:?}");
    }
    for mode in [0o640, 0o604, 0o644, 0o620] {
        let refused = read(files.write("open", &[7; 32], mode));
        let why = refused.expect_err("refused").to_string();
        assert!(why.contains("other than its owner have access"), "{why}");
    }
    let refused = read(files.write("large", &[7; 5000], 0o600));
    assert!(matches!(refused, Err(NoKey::NotTrusted { .. })));
    let refused = read(files.0.path().join("absent"));
    let why = refused.expect_err("refused").to_string();
    assert!(
        why.contains("absent is not used: it cannot be read"),
        "{why}"
    );
    read(files.write("right", &[7; 32], 0o400)).expect("a key");
}
