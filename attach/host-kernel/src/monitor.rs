// SPDX-License-Identifier: Apache-2.0
//! Recognises monitors by their programs and reads their guests' names.
//!
//! A process chooses its own command line, so a name is only for display and proves nothing.

use std::path::Path;
use std::sync::Arc;

use crate::words::Words;

/// The maximum length of a name in bytes.
const MAX_NAME: usize = 255;

/// A monitor that is known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// QEMU.
    Qemu,
    /// Firecracker.
    Firecracker,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// crosvm.
    Crosvm,
    /// krunvm, or another program that uses libkrun as a shared library.
    Libkrun,
    /// `patchbay-vmm`.
    Patchbay,
    /// Another program.
    Other,
}

/// The monitor of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitor {
    /// The kind of the monitor.
    pub kind: Kind,
    /// File name of the monitor's program.
    pub program: String,
    /// The guest's name on the command line.
    pub name: Option<String>,
    /// The words on the command line of a QEMU; none for another monitor.
    pub words: Arc<Words>,
}

impl Kind {
    /// Returns the monitor's name; `None` if it is not known.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::Qemu => "QEMU",
            Self::Firecracker => "Firecracker",
            Self::CloudHypervisor => "Cloud Hypervisor",
            Self::Crosvm => "crosvm",
            Self::Libkrun => "libkrun",
            Self::Patchbay => "Patchbay",
            Self::Other => return None,
        })
    }
}

impl Monitor {
    /// Recognises a monitor by the file name of its program, its command line as /proc shows it,
    /// and its mappings. The mappings are read only if the program is unknown.
    #[must_use]
    pub fn recognise(
        program: &str,
        command_line: &[u8],
        mappings: impl FnOnce() -> Vec<u8>,
    ) -> Self {
        let program = program.strip_suffix(" (deleted)").unwrap_or(program);
        let kind = match program {
            program if program.starts_with("qemu-") => Kind::Qemu,
            program if program.starts_with("firecracker") => Kind::Firecracker,
            program if program.starts_with("cloud-hypervisor") => Kind::CloudHypervisor,
            "crosvm" => Kind::Crosvm,
            "patchbay-vmm" => Kind::Patchbay,
            "krunvm" => Kind::Libkrun,
            _ => match contains(&mappings(), b"/libkrun.so") {
                true => Kind::Libkrun,
                false => Kind::Other,
            },
        };
        let line = String::from_utf8_lossy(command_line);
        let words: Vec<&str> = line.split('\0').collect();
        let name = match kind {
            Kind::Qemu => option_value(&words, "name").and_then(qemu_name),
            Kind::Firecracker => option_value(&words, "id").map(str::to_owned),
            Kind::Patchbay | Kind::Crosvm => option_value(&words, "name").map(str::to_owned),
            // Cloud Hypervisor has no option for a guest's name.
            Kind::CloudHypervisor => {
                let socket = option_value(&words, "api-socket").and_then(socket_name);
                socket.map(str::to_owned)
            }
            Kind::Libkrun if program == "krunvm" => krunvm_name(&words).map(str::to_owned),
            Kind::Libkrun | Kind::Other => None,
        };
        let name = name.filter(|name| !name.is_empty());
        Self {
            kind,
            program: shortened(program),
            name: name.as_deref().map(shortened),
            words: Arc::new(match kind {
                Kind::Qemu => Words::of(command_line),
                _ => Words::default(),
            }),
        }
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Returns the value of an option on a command line: `-option VALUE`, `--option VALUE` or
/// `--option=VALUE`. The first word is the program.
#[must_use]
pub fn option_value<'a>(words: &[&'a str], option: &str) -> Option<&'a str> {
    let (mut found, mut is_next) = (None, false);
    for word in words.iter().skip(1) {
        if std::mem::take(&mut is_next) {
            found = found.or(Some(*word));
            continue;
        }
        let dashes = word.len() - word.trim_start_matches('-').len();
        match word[dashes..].strip_prefix(option) {
            Some("") if (1..=2).contains(&dashes) => is_next = true,
            Some(rest) if dashes == 2 => found = found.or(rest.strip_prefix('=')),
            _ => {}
        }
    }
    found
}

/// Returns the name in QEMU's `-name NAME,…` or `-name guest=NAME,…`, where a comma in the name is
/// doubled.
fn qemu_name(value: &str) -> Option<String> {
    // A word of a command line contains no NUL.
    let value = value.replace(",,", "\0");
    let mut parts = value.split(',');
    let first = parts.clone().next().filter(|first| !first.contains('='));
    let name = first.or_else(|| parts.find_map(|part| part.strip_prefix("guest=")));
    name.map(|name| name.replace('\0', ","))
}

/// Returns the file name, without its extension, of the socket in `--api-socket PATH` or
/// `--api-socket path=PATH`.
fn socket_name(value: &str) -> Option<&str> {
    let path = value.strip_prefix("path=").unwrap_or(value);
    // `fd=N` names no file.
    let path = path
        .split(',')
        .next()
        .filter(|path| !path.starts_with("fd="));
    Path::new(path?).file_stem()?.to_str()
}

/// Returns the name in `krunvm start [OPTION]… NAME`.
fn krunvm_name<'a>(words: &[&'a str]) -> Option<&'a str> {
    let mut words = words.iter().skip_while(|word| **word != "start").skip(1);
    // The options take values: --cpus N, --mem N, --env NAME=VALUE.
    while let Some(word) = words.next() {
        match word.starts_with('-') {
            false => return Some(word),
            true if word.contains('=') => {}
            true => drop(words.next()),
        }
    }
    None
}

/// Truncates a text to [`MAX_NAME`] bytes.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_NAME);
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recognise(line: &str) -> Monitor {
        let program = line.split(' ').next().expect("one");
        Monitor::recognise(program, line.replace(' ', "\0").as_bytes(), Vec::new)
    }

    #[test]
    fn monitors_and_names_are_recognised() {
        for (line, kind, name) in [
            (
                "qemu-system-x86_64 -m 1G -name web",
                Kind::Qemu,
                Some("web"),
            ),
            (
                "qemu-kvm -name guest=web,debug-threads=on -S",
                Kind::Qemu,
                Some("web"),
            ),
            (
                "qemu-kvm -name debug-threads=on,guest=web",
                Kind::Qemu,
                Some("web"),
            ),
            ("qemu-kvm -name debug-threads=on", Kind::Qemu, None),
            ("qemu-kvm --name web,process=p", Kind::Qemu, Some("web")),
            ("qemu-kvm -name", Kind::Qemu, None),
            ("qemu-kvm -name a,,b,process=p", Kind::Qemu, Some("a,b")),
            ("qemu-kvm -name x=y,guest=a,,,b=", Kind::Qemu, Some("a,")),
            (
                "firecracker-v1.16 --id i-1 --no-api",
                Kind::Firecracker,
                Some("i-1"),
            ),
            ("firecracker --id=i-1", Kind::Firecracker, Some("i-1")),
            ("firecracker --identity x --id=", Kind::Firecracker, None),
            (
                "cloud-hypervisor --api-socket /run/ch/web.sock",
                Kind::CloudHypervisor,
                Some("web"),
            ),
            (
                "cloud-hypervisor-static --api-socket=path=web",
                Kind::CloudHypervisor,
                Some("web"),
            ),
            (
                "cloud-hypervisor --api-socket fd=3",
                Kind::CloudHypervisor,
                None,
            ),
            (
                "cloud-hypervisor --api-socket /",
                Kind::CloudHypervisor,
                None,
            ),
            ("cloud-hypervisor --kernel k", Kind::CloudHypervisor, None),
            ("patchbay-vmm --name a --name b", Kind::Patchbay, Some("a")),
            ("kvmtool run --name x", Kind::Other, None),
            ("", Kind::Other, None),
        ] {
            let monitor = recognise(line);
            assert_eq!(
                (monitor.kind, monitor.name.as_deref()),
                (kind, name),
                "{line}"
            );
        }
    }

    #[test]
    fn libkrun_is_a_library() {
        let mappings = || b"7f00-7f01 r-xp 0 0:0 1 /usr/lib64/libkrun.so.1.19\n".to_vec();
        let monitor = Monitor::recognise("krunvm (deleted)", b"krunvm", mappings);
        assert_eq!((monitor.kind, &*monitor.program), (Kind::Libkrun, "krunvm"));
        for (line, name) in [
            ("krunvm start web", Some("web")),
            (
                "krunvm -v 1 start --cpus 2 --mem=512 web /bin/sh -c x",
                Some("web"),
            ),
            ("krunvm start --cpus", None),
            ("krunvm create web", None),
            ("krun start web", None),
        ] {
            let program = line.split(' ').next().expect("one");
            let line = line.replace(' ', "\0");
            let monitor = Monitor::recognise(program, line.as_bytes(), mappings);
            assert_eq!(
                (monitor.kind, monitor.name.as_deref()),
                (Kind::Libkrun, name)
            );
        }
    }

    #[test]
    fn hostile_names_are_cut() {
        let mut line = b"qemu-kvm\0-name\0".to_vec();
        line.extend("ä".repeat(4000).into_bytes());
        let monitor = Monitor::recognise("qemu-kvm", &line, Vec::new);
        assert_eq!(monitor.name.expect("a name").len(), 254);
        let _ = Monitor::recognise("x", &[0xff, 0, b'-', 0xfe, 0], Vec::new);
    }
}
