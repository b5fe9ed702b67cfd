// SPDX-License-Identifier: Apache-2.0
//! Keys that the host's operator declares as class ref, for kernels that declare nothing.
//!
//! The files are read once, when the monitor starts. Their declarations are checked against each
//! kernel that registers or is discovered. The guest's description reports the declarations that do
//! not apply to the kernel.

mod file;

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

pub use self::file::DeclarationError;
pub(super) use self::file::{KernelRange, Text};

/// The folder that is read unless another is given.
pub const DEFAULT_FOLDER: &str = "/etc/patchbay/keys.d";

/// A declaration of the host that a key may be counted from outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Declaration {
    /// "name" or "module:name".
    pub key: String,
    /// Path of the file with the declaration.
    pub file: String,
    /// The reason why counting the key from outside is safe.
    pub reason: String,
    /// The evidence for the reason: a commit, or a line of the source.
    pub source: String,
    #[serde(skip)]
    kernel: KernelRange,
}

/// The declarations of a host, in the order of files and entries.
#[derive(Clone, Debug, Default)]
pub struct Declarations(Vec<Arc<Declaration>>);

impl Declarations {
    /// Reads every file of a folder whose name ends in `.yaml`. Without `folder`,
    /// [`DEFAULT_FOLDER`] is read if it exists.
    ///
    /// # Errors
    /// [`DeclarationError`], which names the file and, for malformed text, the line and column.
    pub fn read(folder: Option<&Path>) -> Result<Self, DeclarationError> {
        match folder {
            Some(folder) => file::read(folder),
            None if Path::new(DEFAULT_FOLDER).is_dir() => file::read(Path::new(DEFAULT_FOLDER)),
            None => Ok(Vec::new()),
        }
        .map(Self)
    }

    /// Returns the declarations for a kernel.
    pub(super) fn of<'a>(
        &'a self,
        release: &'a str,
        build_id: &'a str,
    ) -> impl Iterator<Item = &'a Arc<Declaration>> {
        let all = self.0.iter();
        all.filter(move |declaration| declaration.kernel.includes(release, build_id))
    }
}

#[cfg(test)]
mod tests {
    use static_keys::Op;

    use super::*;
    use crate::keys::audit::AuditLog;
    use crate::keys::{KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};
    use patchbay_guest::testing::{InMemoryGuest, TestKey};

    fn declarations(text: &str) -> Declarations {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::write(folder.path().join("a.yaml"), text).expect("writable");
        Declarations::read(Some(folder.path())).expect(text)
    }

    fn declare(name: &str) -> String {
        format!("- {{key: {name:?}, reason: tested, source: here}}\n")
    }

    fn keys(text: &str) -> (Arc<InMemoryGuest>, Keys) {
        keys_with(text, AuditLog::default())
    }

    fn keys_with(text: &str, audit: AuditLog) -> (Arc<InMemoryGuest>, Keys) {
        let registry = Arc::new(Registry::default());
        let sealed = TestKey {
            sealed: true,
            ..TestKey::guarded("sealed")
        };
        let guest = InMemoryGuest::new(Arc::clone(&registry));
        let config = KeysConfig {
            audit,
            declared: declarations(text),
            ..KeysConfig::default()
        };
        let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        guest.run(&[
            TestKey::guarded("safe"),
            TestKey::guarded("other"),
            TestKey::tracepoint("event", true),
            sealed,
        ]);
        (guest, keys)
    }

    async fn inc(keys: &Keys, name: &str) -> bool {
        let second = std::time::Duration::from_secs(5);
        let request = UpdateRequest::new(
            vec![KeyUpdate::new(name, Op::Inc)],
            "uid:0".to_owned(),
            second,
            std::time::Instant::now() + second,
        );
        keys.update(request).await.is_ok()
    }

    #[tokio::test]
    async fn a_declared_key_needs_no_permission_and_others_do() {
        let text = format!("kernel: {{from: '6.12'}}\nkeys:\n{}", declare("safe"));
        let (guest, keys) = keys(&text);
        assert!(inc(&keys, "safe").await && inc(&keys, "safe").await);
        assert!(!inc(&keys, "other").await);
        assert_eq!((guest.count("safe"), guest.count("other")), (2, 0));
        let description = keys.describe();
        assert_eq!(description.declared, 1);
        assert!(description.undeclared.is_empty(), "{description:?}");
    }

    #[tokio::test]
    async fn the_audit_log_names_the_declarations_of_what_a_change_changes() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let log = folder.path().join("audit.jsonl");
        let audit = AuditLog::open(&log).expect("opens");
        let text = "kernel: {from: '6.12'}\nkeys:\n\
                    - {key: other, reason: not this one, source: elsewhere}\n\
                    - {key: safe, reason: only read by readers, source: 'mm/safe.c:7'}\n";
        let (_guest, keys) = keys_with(text, audit);
        assert!(inc(&keys, "safe").await);
        assert!(!inc(&keys, "sealed").await);
        assert!(inc(&keys, "event").await, "it needs no declaration");
        let text = std::fs::read_to_string(&log).expect("readable");
        let lines = text.lines().map(serde_json::from_str);
        let lines: Vec<serde_json::Value> = lines.collect::<Result<_, _>>().expect("JSON");
        let intents: Vec<_> = lines
            .iter()
            .filter(|line| line["event"] == "intent")
            .collect();
        let of = |key| {
            let mut found = intents
                .iter()
                .filter(move |line| line["updates"][0]["key"] == key);
            found.next()
        };
        let [declared] = &of("safe").expect("an intent")["declared"]
            .as_array()
            .expect("a list")[..]
        else {
            panic!("not one declaration: {text}");
        };
        let file = declared["file"].as_str().expect("a path");
        assert!(file.ends_with("a.yaml"), "{file}");
        assert_eq!(declared["key"], "safe");
        assert_eq!(declared["reason"], "only read by readers");
        assert_eq!(declared["source"], "mm/safe.c:7");
        let event = of("event").expect("an intent");
        assert!(event.get("declared").is_none(), "{event}");
    }

    #[tokio::test]
    async fn declarations_of_other_kernels_do_not_apply() {
        let build_id = "ab".repeat(20);
        for (kernel, applies) in [
            ("{from: '6.12', to: '6.12'}".to_owned(), true),
            ("{to: '6.11'}".to_owned(), false),
            ("{from: '6.13'}".to_owned(), false),
            (format!("{{build_id: {build_id}}}"), true),
            ("{build_id: 00ff}".to_owned(), false),
        ] {
            let text = format!("kernel: {kernel}\nkeys:\n{}", declare("safe"));
            let (_guest, keys) = keys(&text);
            assert_eq!(inc(&keys, "safe").await, applies, "{kernel}");
        }
    }

    #[tokio::test]
    async fn what_the_kernel_does_not_satisfy_is_described() {
        let names = ["safe", "safe", "missing", "sealed", "event", "mod:key"];
        let entries: String = names.map(declare).concat();
        let (guest, keys) = keys(&format!("kernel: {{from: '6.12'}}\nkeys:\n{entries}"));
        let told = keys.describe().undeclared;
        for (told, (key, why)) in told.iter().zip([
            ("safe", "declares it too"),
            ("missing", "no such key"),
            ("sealed", "sealed"),
            ("event", "class tracepoint"),
        ]) {
            assert!(told.contains(key) && told.contains(why), "{told}");
            assert!(told.contains("a.yaml"), "{told}");
        }
        assert_eq!(told.len(), 4, "{told:?}");
        assert!(!inc(&keys, "sealed").await);
        // Once the module is loaded, the declaration of its key applies.
        guest.add_module("mod", &[TestKey::guarded("key")]);
        assert!(inc(&keys, "mod:key").await);
        assert!(inc(&keys, "safe").await, "declared still");
        assert_eq!(keys.describe().undeclared.len(), 4);
    }
}
