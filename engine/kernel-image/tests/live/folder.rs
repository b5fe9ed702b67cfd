// SPDX-License-Identifier: Apache-2.0
//! Kernels that do not reveal everything, with a folder of debug files of many kernels.

use std::fs;
use std::path::PathBuf;

use patchbay_kernel_image::live::{DebugFiles, Finder, Kernel, Way};
use tempfile::TempDir;

use crate::craft_btf;
use crate::craft_file::{symbols, system_map, vmlinux};
use crate::craft_guest::{CraftedGuest, RELEASE, guest, guest_without_data_symbols};

/// The build id of the guest's kernel, and the name of the debug file with this build id.
const BUILD: &[u8] = &[0, 0xff];
const BY_BUILD_ID: &str = ".build-id/00/ff.debug";

struct Folder {
    folder: TempDir,
    finder: Finder,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = DebugFiles::open(folder.path()).unwrap();
        Self {
            folder,
            finder: Finder::new(Some(files)),
        }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // The old file is removed first, so that a replacement is a new file.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn find(&mut self, guest: &CraftedGuest) -> Result<Kernel, String> {
        let found = self.finder.find(guest, &guest.cpus, Way::Image);
        found.map_err(|error| error.to_string())
    }
}

fn by_release(kind: &str) -> String {
    format!("{kind}-{RELEASE}")
}

/// A vmlinux of the guest, with types.
fn whole(guest: &CraftedGuest) -> Vec<u8> {
    let types = craft_btf::kernel().finish();
    vmlinux(&symbols(guest), Some(BUILD), &[(".BTF", &types)])
}

#[test]
fn a_file_is_found_by_build_id_then_by_release() {
    let guest = guest_without_data_symbols();
    let folder = Folder::new();
    let map = system_map(&symbols(&guest));
    for (name, bytes) in [
        (by_release("System.map"), map),
        (by_release("vmlinux"), whole(&guest)),
        (BY_BUILD_ID.to_owned(), whole(&guest)),
    ] {
        let path = folder.put(&name, &bytes);
        let files = DebugFiles::open(folder.folder.path()).unwrap();
        let mut finder = Finder::new(Some(files));
        let kernel = finder.find(&guest, &guest.cpus, Way::Image).unwrap();
        assert_eq!(kernel.evidence.file.unwrap().path, path);
    }
}

#[test]
fn the_search_for_the_note_uses_the_folder_too() {
    let guest = guest_without_data_symbols();
    let mut folder = Folder::new();
    let path = folder.put(BY_BUILD_ID, &whole(&guest));
    let kernel = folder.finder.find(&guest, &[], Way::Note).unwrap();
    assert_eq!(kernel.evidence.file.unwrap().path, path);
}

#[test]
fn a_folder_without_the_file_says_what_was_looked_for() {
    let guest = guest_without_data_symbols();
    let mut folder = Folder::new();
    folder.put("vmlinux", &whole(&guest));
    folder.put("vmlinux-6.12.2-crafted", &whole(&guest));
    let error = folder.find(&guest).unwrap_err();
    let names = format!(
        "none of {BY_BUILD_ID}, {}, {};",
        by_release("vmlinux"),
        by_release("System.map")
    );
    assert!(error.contains("without CONFIG_KALLSYMS_ALL"), "{error}");
    assert!(error.contains(&names), "{error}");
    let place = folder.folder.path().display().to_string();
    assert!(error.contains(&place), "{error}");
    // The folder is searched again at each discovery.
    folder.put(&by_release("vmlinux"), &whole(&guest));
    folder.find(&guest).unwrap();
}

#[test]
fn a_file_that_is_replaced_is_read_again() {
    let guest = guest_without_data_symbols();
    let mut folder = Folder::new();
    let mut moved = symbols(&guest);
    moved
        .iter_mut()
        .find(|(_, name)| name == "Tfunction_b")
        .unwrap()
        .0 += 8;
    let wrong = vmlinux(&moved, Some(BUILD), &[]);
    for (bytes, expected) in [
        (&wrong[..], "is of another build"),
        (&wrong[..wrong.len() / 2], "cannot be used: damaged"),
        (b"no map", "cannot be used: line 1"),
    ] {
        let path = folder.put(BY_BUILD_ID, bytes);
        for _ in 0..2 {
            let error = folder.find(&guest).unwrap_err();
            let expected = format!("the debug file {} {expected}", path.display());
            assert!(error.contains(&expected), "{error}");
        }
    }
    folder.put(BY_BUILD_ID, &whole(&guest));
    folder.find(&guest).unwrap();
}

#[test]
fn a_release_that_is_no_plain_word_names_no_file() {
    let guest = guest_without_data_symbols();
    let mut folder = Folder::new();
    let banner = guest.symbol("linux_banner") + "Linux version ".len() as u64;
    for release in ["6/../../x ", "../6.12.1 ", "6.12.1-\0 ", "6.12.1-crafted"] {
        guest.put(banner, &[b'x'; 60]);
        guest.put(banner, release.as_bytes());
        let error = folder.find(&guest).unwrap_err();
        let only = format!("none of {BY_BUILD_ID};");
        assert!(error.contains(&only), "{error}");
    }
    // The note with the build id gets another type, so that it is not recognised.
    let notes = guest.symbol("__start_notes");
    guest.put_u32(notes + 24 + 8, 4);
    let error = folder.find(&guest).unwrap_err();
    let neither = "neither a build id nor a release";
    assert!(error.contains(neither), "{error}");
}

#[test]
fn a_kernel_that_says_everything_needs_no_file() {
    let guest = guest();
    let mut folder = Folder::new();
    folder.put(BY_BUILD_ID, b"no kernel");
    let kernel = folder.find(&guest).unwrap();
    assert!(kernel.evidence.file.is_none());
}

#[test]
fn a_file_that_cannot_be_looked_at_is_not_a_missing_one() {
    let guest = guest_without_data_symbols();
    let mut folder = Folder::new();
    let path = folder.folder.path().join(by_release("vmlinux"));
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let error = folder.find(&guest).unwrap_err();
    assert!(error.contains("cannot be looked at"), "{error}");
}
