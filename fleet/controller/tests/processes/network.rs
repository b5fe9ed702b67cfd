// SPDX-License-Identifier: Apache-2.0
//! Runs processes in network namespaces, and cuts their links.
//!
//! The test itself runs in a network namespace, a PID namespace and a mount namespace of its own.
//! However the test ends, the kernel then ends its processes and removes its links, bridges and
//! namespaces. The network of the host never has their names or addresses.

use std::process::{Command, Output, Stdio};

/// Tells the test's program that it runs in the namespaces, and names the file that it writes then.
const INSIDE: &str = "PATCHBAY_TEST_NETWORK";
/// The options of `unshare` that create the namespaces.
const NAMESPACES: [&str; 5] = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
/// Shows that links and bridges can be created.
const PROBE: &str = "ip link add probe type veth peer name other && ip link add hub type bridge";
/// Connects a new namespace to the test's bridges, and continues as another program. The link of
/// a side is SIDE in the namespace, and SIDE-NUMBER in the test's namespace.
const ENTER: &str = r#"set -e
parent=$1 number=$2 sides=$3
shift 3
ip link set lo up
for side in $sides; do
    network=${side#*=} side=${side%=*}
    ip link add "$side" type veth peer name "$side-$number" netns "$parent"
    ip address add "$network.$number/24" dev "$side"
    ip link set "$side" up
    nsenter "--net=/proc/$parent/ns/net" ip link set "$side-$number" master "$side" up
done
exec "$@"
"#;

/// A bridge, to which processes have links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Connects the members of etcd with their clients. The test has a link too.
    Clients,
    /// Connects the members of etcd with each other.
    Peers,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Clients => "clients",
            Self::Peers => "peers",
        }
    }

    /// Returns the first three bytes of the addresses.
    fn network(self) -> &'static str {
        match self {
            Self::Clients => "10.213.1",
            Self::Peers => "10.213.2",
        }
    }

    /// Returns the address of the process with this number.
    pub fn address(self, number: u8) -> String {
        format!("{}.{number}", self.network())
    }
}

/// The bridges in the test's namespace.
#[derive(Clone, Copy)]
pub struct Network(());

fn is_unusable(why: &str) -> bool {
    eprintln!("SKIPPED: no network namespaces: {why}");
    true
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// Calls `ip` with these words.
fn ip(words: &str) {
    let output = Command::new("ip").args(words.split(' ')).output();
    let output = output.expect("iproute2");
    assert!(output.status.success(), "ip {words}: {}", text_of(&output));
}

impl Network {
    /// Returns the network if this process is in namespaces of its own. Otherwise runs the test
    /// again in such namespaces, and returns `None`. Prints a message if that is not possible.
    pub fn inside(test: &str) -> Option<Self> {
        if let Some(seen) = std::env::var_os(INSIDE) {
            std::fs::write(seen, test).expect("room");
            return Some(Self::create());
        }
        let mut probe = Command::new("unshare");
        probe.args(NAMESPACES).args(["sh", "-c", PROBE]);
        let is_skipped = match probe.output() {
            _ if !rustix::process::geteuid().is_root() => is_unusable("they need root"),
            Err(error) => is_unusable(&format!("unshare cannot be started: {error}")),
            Ok(output) if !output.status.success() => {
                is_unusable(&format!("{}; apt-get install iproute2", text_of(&output)))
            }
            Ok(_) => false,
        };
        if is_skipped {
            return None;
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let seen = folder.path().join("seen");
        let status = Command::new("unshare")
            .args(NAMESPACES)
            .arg(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env(INSIDE, &seen)
            .stdin(Stdio::null())
            .status()
            .expect("util-linux");
        assert!(status.success(), "in the namespaces: {status}");
        // The program also succeeds if it has no test of this name.
        assert!(seen.exists(), "{test} has run in the namespaces");
        None
    }

    fn create() -> Self {
        ip("link set lo up");
        for side in [Side::Clients, Side::Peers] {
            ip(&format!("link add {} type bridge", side.name()));
            ip(&format!("link set {} up", side.name()));
        }
        let (side, network) = (Side::Clients.name(), Side::Clients.network());
        ip(&format!("address add {network}.254/24 dev {side}"));
        Self(())
    }

    /// Returns a command that starts the program in a new network namespace, and has the number
    /// 1 to 253 in the addresses of its links. No other process may have had this number.
    pub fn enter(self, number: u8, sides: &[Side], program: &Command) -> Command {
        let sides = sides.iter();
        let sides = sides.map(|side| format!("{}={}", side.name(), side.network()));
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", ENTER, "sh"]);
        command.arg(std::process::id().to_string());
        command.arg(number.to_string());
        command.arg(sides.collect::<Vec<_>>().join(" "));
        command.arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// Takes the link of a process down. Everything that is sent through it is lost.
    pub fn cut(self, number: u8, side: Side) {
        ip(&format!("link set {}-{number} down", side.name()));
    }

    pub fn heal(self, number: u8, side: Side) {
        ip(&format!("link set {}-{number} up", side.name()));
    }
}
