// SPDX-License-Identifier: Apache-2.0
//! Boots a systemd in namespaces, to test a unit.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// The contents of the booted machine.
pub struct Machine<'a> {
    /// The paths of the programs that are installed.
    pub programs: &'a [&'a str],
    /// The units and drop-ins: names in /etc/systemd/system, and texts.
    pub units: &'a [(&'a str, &'a str)],
    /// The script that systemd runs.
    pub steps: &'a str,
    /// The names and contents of files in /etc/patchbay.
    pub etc: &'a [(&'a str, &'a [u8])],
}

impl Machine<'_> {
    /// Boots the machine and waits for its end. Returns the folder with the files that the script
    /// wrote, or `None` if no machine can boot here.
    pub fn run(&self) -> Option<TempDir> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: only root boots a systemd");
            return None;
        }
        if !Path::new("/lib/systemd/systemd").exists() {
            println!("SKIPPED: systemd is not installed");
            return None;
        }
        let [host, scratch, cgroup] = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
        for folder in ["bin", "units", "etc"] {
            std::fs::create_dir(host.path().join(folder)).expect("created");
        }
        for program in self.programs {
            let name = Path::new(program).file_name().expect("a name");
            let bin = host.path().join("bin").join(name);
            std::os::unix::fs::symlink(program, bin).expect("linked");
        }
        let put = |name: &str, content: &[u8]| {
            let path = host.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            std::fs::write(path, content).expect("written");
        };
        for (name, text) in self.units {
            put(&format!("units/{name}"), text.as_bytes());
        }
        put("steps.sh", self.steps.as_bytes());
        put("boot.sh", include_bytes!("boot.sh"));
        put("cgroup.sh", include_bytes!("cgroup.sh"));
        put(
            "sysusers",
            include_bytes!("../../xtask/package/patchbay.sysusers"),
        );
        for (name, content) in self.etc {
            put(&format!("etc/{name}"), content);
        }
        let output = Command::new("unshare")
            .args(["--mount", "sh"])
            .arg(host.path().join("cgroup.sh"))
            .arg(cgroup.path())
            .args(["unshare", "--mount", "--pid", "--fork", "--kill-child"])
            .args(["--cgroup", "--ipc", "--uts", "sh"])
            .arg(host.path().join("boot.sh"))
            .args([scratch.path(), host.path()])
            .output();
        let output = output.expect("unshare starts");
        if !host.path().join("log").exists() {
            let why = String::from_utf8_lossy(&output.stderr);
            println!("SKIPPED: no systemd boots in namespaces here: {why}");
            return None;
        }
        Some(host)
    }
}
