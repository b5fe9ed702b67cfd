// SPDX-License-Identifier: Apache-2.0
//! Determines the state of KVM on this machine.

use std::fs::{self, OpenOptions};
use std::io;

/// State of /dev/kvm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kvm {
    /// The device does not exist.
    Missing,
    /// The device exists, but this user may not open it.
    Forbidden,
    /// The device exists, but opening it fails for another reason.
    Broken,
    /// KVM works, but the CPU has neither VMX nor SVM. Kernel code of guests is emulated in
    /// software, which suffices for bare-metal guests but not for Linux.
    Software,
    /// KVM works on a CPU with VMX or SVM.
    Hardware,
}

impl Kvm {
    /// Probes this machine.
    pub fn probe() -> Self {
        match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => Self::Missing,
                io::ErrorKind::PermissionDenied => Self::Forbidden,
                _ => Self::Broken,
            },
            Ok(_) => {
                let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
                if has_virtualization(&cpuinfo) {
                    Self::Hardware
                } else {
                    Self::Software
                }
            }
        }
    }

    /// Returns whether a Linux guest runs on this machine without the lab.
    pub fn runs_linux(self) -> bool {
        self == Self::Hardware
    }

    /// Returns whether a bare-metal guest runs on this machine without the lab.
    pub fn runs_bare_metal(self) -> bool {
        matches!(self, Self::Hardware | Self::Software)
    }

    /// Returns a sentence about the state.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Missing => "/dev/kvm does not exist (no KVM module, or a container without it)",
            Self::Forbidden => "this user may not open /dev/kvm (join the group kvm)",
            Self::Broken => "/dev/kvm exists but cannot be opened",
            Self::Software => "/dev/kvm works, but the CPU offers neither vmx nor svm",
            Self::Hardware => "/dev/kvm works on a CPU with hardware virtualization",
        }
    }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .flat_map(str::split_whitespace)
        .any(|flag| flag == "vmx" || flag == "svm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualization_is_a_whole_word_among_the_flags() {
        assert!(has_virtualization(
            "model name : x\nflags\t\t: fpu svm sse\n"
        ));
        assert!(has_virtualization("flags : vmx\n"));
        assert!(!has_virtualization(
            "model name : svm\nflags : fpu svm_lock vmxx\n"
        ));
        assert!(!has_virtualization(""));
    }
}
