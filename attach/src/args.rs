// SPDX-License-Identifier: Apache-2.0
//! Parses the command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use patchbay_attach::libvirt;
use patchbay_attach::memory::Access;
use patchbay_attach::{PauseWay, Target};

/// Serves the keys of a guest that another monitor runs.
///
/// The guest needs no login, no agent and no reboot. Its kernel is discovered in its memory when a
/// client first asks for its keys. SIGTERM or Ctrl-C detaches; the guest keeps running. With --all,
/// each guest that KVM runs on this host is served for as long as it runs.
#[derive(Debug, Parser)]
#[command(name = "patchbay-attach", version)]
pub struct CommandLine {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    Guest(GuestOf),
    /// The guest of each KVM monitor of this host, when it appears and until it ends
    ///
    /// One process serves each guest, with its socket in $XDG_RUNTIME_DIR/patchbay, or in
    /// /run/patchbay. The guest of a monitor of root, outside of containers, or of a user of
    /// --names-of, has its monitor's name for it, with the process id appended if another guest has
    /// this name. All others are named kvm:UID:PID. All of these processes end with this one. It
    /// needs the same rights as `attach process`. The unit patchbay-attach.service runs it for
    /// patchbayd, with --run-dir.
    #[command(long_flag = "all")]
    All(All),
    /// Carry the holds and claims of a guest to the host that the guest migrates to
    ///
    /// The counts in the guest's memory contain the references of its holds and claims, and a
    /// migration copies them. The ledger, which tells whose references these are, is a file beside
    /// the socket of the attacher. It is exported while no attacher serves the guest, and imported
    /// where the guest runs then, before an attacher serves it there. Both commands take the
    /// options of that attacher, whose socket gives the folder of the ledger, and run as its user.
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Resumes a guest, and rolls a change back, after its attacher has been killed; the attacher
    /// starts it
    #[command(hide = true)]
    Watchdog {
        /// Process id of the QEMU
        qemu: u32,
        /// Start of the QEMU, in clock ticks since the boot of the host
        started: u64,
        /// Descriptor of the file with the messages of a stop
        tail: i32,
        /// URI of its libvirt
        #[arg(requires = "domain")]
        libvirt: Option<String>,
        /// Name of the domain
        domain: Option<String>,
    },
}

/// A guest.
#[derive(Debug, Subcommand)]
pub enum GuestOf {
    /// A guest of a QEMU
    Qemu(Qemu),
    /// A running domain of a libvirt on this host
    Libvirt(Domain),
    /// The guest of a KVM monitor, as the host's kernel shows it
    ///
    /// Works with any monitor. The monitor needs no option and does not cooperate. The command
    /// needs root, or CAP_SYS_PTRACE, CAP_DAC_OVERRIDE and either CAP_SYS_RAWIO or CAP_BPF with
    /// CAP_PERFMON. `patchbay host list` shows the processes.
    Process(HostProcess),
}

impl GuestOf {
    pub fn options(&self) -> &Options {
        match self {
            Self::Qemu(qemu) => &qemu.options,
            Self::Libvirt(domain) => &domain.options,
            Self::Process(process) => &process.options,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// Write the ledger of a guest to standard output
    ///
    /// The ledger stays here, for the case that the migration fails. The export is void once an
    /// attacher has served the guest again: export again before the next attempt. An import cannot
    /// tell, because the boot is the same.
    Export {
        #[command(subcommand)]
        guest: GuestOf,
    },
    /// Make an exported ledger that of the guest
    ///
    /// Needs --api-socket, because the ledger belongs in the folder of the attacher's socket.
    /// Refused for the ledger of another boot, and if the guest has or had holds, claims or
    /// generations of owners here already. The next attacher continues what was imported.
    Import {
        /// The exported ledger, a file that no other user may write; - is standard input
        file: PathBuf,
        #[command(subcommand)]
        guest: GuestOf,
    },
}

#[derive(Debug, Args)]
pub struct Domain {
    /// Name of the domain
    pub domain: String,
    /// URI of the libvirt
    #[arg(long, value_name = "URI", default_value = libvirt::SYSTEM)]
    pub connect: String,
    #[command(flatten)]
    pub options: Options,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("qemu").args(["qmp", "pid"]).required(true).multiple(true)))]
pub struct Qemu {
    /// A QMP socket of the QEMU that no other program uses
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// Process id of the QEMU, 1 to 4194304; without --qmp its QMP socket is taken from its command
    /// line
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub options: Options,
}

impl Qemu {
    pub fn target(&self) -> Option<Target> {
        match (&self.qmp, self.pid) {
            (Some(path), pid) => Some(Target::Qmp(path.clone(), pid)),
            (None, Some(pid)) => Some(Target::Process(pid)),
            (None, None) => None,
        }
    }
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("process").args(["pid", "name"]).required(true).multiple(true)))]
pub struct HostProcess {
    /// Process id of the monitor, 1 to 4194304 [default: that of the guest which `patchbay host
    /// list` shows by the name of --name]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub pid: Option<u32>,
    /// Refuse a process that did not start at this time, in clock ticks since the boot of the host;
    /// a supervisor gives it
    #[arg(long, value_name = "TICKS", requires = "pid", hide = true)]
    pub started: Option<u64>,
    /// Change the guest even while KVM logs the dirty pages of all its memory: a migration or a
    /// diff snapshot misses what is written
    #[arg(long)]
    pub dirty_logging_ok: bool,
    #[command(flatten)]
    pub options: Options,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("monitors").args(["qmp", "libvirt"]).multiple(true)))]
pub struct All {
    /// Name the guests of the user with this uid, 0 to 4294967294, as their monitors do; may be
    /// given several times. Otherwise only root names its guests, outside of containers; with 0,
    /// the root of each container does too
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(u32).range(0..=4_294_967_294))]
    pub names_of: Vec<u32>,
    /// Put the sockets into this run directory of a patchbayd, which serves the guests. The file
    /// names are not those of the guests: a guest that an administrator has named is served under
    /// its name also if the guest of another process has the same one
    #[arg(long, value_name = "FOLDER")]
    pub run_dir: Option<PathBuf>,
    /// Attach by QMP to every QEMU that has a QMP socket in this folder; may be given several
    /// times. No other program may use these sockets
    #[arg(long, value_name = "FOLDER", requires = "run_dir")]
    pub qmp: Vec<PathBuf>,
    /// Attach through libvirt to every running domain of a libvirt on this host
    #[arg(long, value_name = "URI", requires = "run_dir", num_args = 0..=1, require_equals = true, default_missing_value = libvirt::SYSTEM)]
    pub libvirt: Option<String>,
    /// Attach only to the guests that --qmp and --libvirt find
    #[arg(long, requires = "monitors", conflicts_with = "names_of")]
    pub no_processes: bool,
    #[command(flatten)]
    pub shared: Shared,
}

#[derive(Debug, Args)]
pub struct Options {
    /// Name of the guest here [default: the monitor's name for it; without one, qemu-PID with
    /// --qmp or --pid, and the name of the monitor's program with the process id for `process`]
    #[arg(long)]
    pub name: Option<String>,
    /// Socket of the API [default: NAME.sock in $XDG_RUNTIME_DIR/patchbay, or in /run/patchbay]
    #[arg(long, value_name = "PATH")]
    pub api_socket: Option<PathBuf>,
    /// Way to stop the guest for a change
    #[arg(long, value_enum, default_value_t = Pause::Freeze)]
    pub pause: Pause,
    /// Serve the agent of the guest that has this CID, on this port of the host's AF_VSOCK
    /// [default port: 1024]. Without this option, `qemu` and `libvirt` use the CID of QEMU's
    /// vhost-vsock device if no other process of the host has one, and `process` uses only the
    /// vsock device of Firecracker or Cloud Hypervisor
    #[arg(long, value_name = "CID[:PORT]")]
    pub agent_vsock: Option<AgentVsock>,
    /// Detach when standard input ends; `--all` gives it
    #[arg(long, hide = true)]
    pub until_eof: bool,
    #[command(flatten)]
    pub shared: Shared,
}

/// The options that also apply to many guests.
#[derive(Debug, Args)]
pub struct Shared {
    /// Way to reach the guest's memory
    #[arg(long, value_enum, default_value_t = Memory::Auto)]
    pub memory: Memory,
    /// Allow changes of guarded keys for clients that ask for it
    #[arg(long)]
    pub allow_guarded: bool,
    /// Allow changes though the guest has a module loaded that checks the kernel's text (LKRG); it
    /// may take them for an attack and panic
    #[arg(long)]
    pub allow_text_checker: bool,
    /// Declare the keys of the files in this folder safe to count from outside [default:
    /// /etc/patchbay/keys.d if it exists]
    #[arg(long, value_name = "FOLDER")]
    pub keys_dir: Option<PathBuf>,
    /// Discover with this file what the kernel does not reveal: its vmlinux or System.map if it is
    /// built without CONFIG_KALLSYMS_ALL, its vmlinux with debug information if without
    /// CONFIG_DEBUG_INFO_BTF. In a folder the file is found by the kernel's build id
    /// (.build-id/ab/cdef.debug) or release (vmlinux-RELEASE, System.map-RELEASE)
    #[arg(long, value_name = "PATH")]
    pub debug_file: Option<PathBuf>,
    /// Append each change to this file
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,
}

impl Shared {
    /// Returns the words from which these options are parsed.
    pub fn words(&self) -> Vec<OsString> {
        let Self {
            memory,
            allow_guarded,
            allow_text_checker,
            keys_dir,
            debug_file,
            audit_log,
        } = self;
        let memory = memory.to_possible_value();
        let memory = memory.map(|value| OsString::from(value.get_name()));
        let path = |path: &Option<PathBuf>| path.clone().map(OsString::from);
        let values = [
            ("--memory", memory),
            ("--keys-dir", path(keys_dir)),
            ("--debug-file", path(debug_file)),
            ("--audit-log", path(audit_log)),
        ];
        let flags = [
            ("--allow-guarded", *allow_guarded),
            ("--allow-text-checker", *allow_text_checker),
        ];
        let values = values.into_iter().filter_map(|(name, value)| {
            // The value may begin with a dash.
            let mut word = OsString::from(format!("{name}="));
            word.push(value?);
            Some(word)
        });
        let flags = flags.into_iter().filter(|(_, is_given)| *is_given);
        values.chain(flags.map(|(name, _)| name.into())).collect()
    }
}

/// The CID that the agent connects from, and the port that it connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentVsock {
    pub guest: u32,
    pub port: u32,
}

impl AgentVsock {
    /// Selects the agent of the guest with this CID, on the default port of agents.
    pub fn of(guest: u32) -> Self {
        Self {
            guest,
            port: patchbay_service::trace::PORT,
        }
    }
}

impl FromStr for AgentVsock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (guest, port) = match text.split_once(':') {
            Some((guest, port)) => (guest, Some(port)),
            None => (text, None),
        };
        // The CIDs 0 to 2 are reserved, and the last one is VMADDR_CID_ANY.
        let guest = guest.parse().ok().filter(|cid| (3..u32::MAX).contains(cid));
        let guest =
            guest.ok_or("use CID or CID:PORT; a guest's CID is a number from 3 to 4294967294")?;
        let port = port.map(|port| {
            port.parse()
                .ok()
                .filter(|port| (1..u32::MAX).contains(port))
        });
        match port {
            None => Ok(Self::of(guest)),
            Some(Some(port)) => Ok(Self { guest, port }),
            Some(None) => {
                Err("use CID or CID:PORT; a port is a number from 1 to 4294967294".to_owned())
            }
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Pause {
    /// Use ptrace to stop the vCPUs' threads
    Freeze,
    /// Use the monitor's own stop and cont
    Qmp,
}

impl From<Pause> for PauseWay {
    fn from(pause: Pause) -> Self {
        match pause {
            Pause::Freeze => Self::Freeze,
            Pause::Qmp => Self::Qmp,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Memory {
    /// Use the memory's file if the monitor shares one, otherwise the monitor's process
    Auto,
    /// Use only the memory's file
    File,
    /// Use the monitor's process, by /proc/PID/mem
    Process,
}

impl From<Memory> for Access {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Auto => Self::Auto,
            Memory::File => Self::File,
            Memory::Process => Self::Process,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<CommandLine, clap::Error> {
        CommandLine::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_command_line_is_sound() {
        CommandLine::command().debug_assert();
        for line in [
            "a qemu --qmp s",
            "a qemu --pid 7",
            "a qemu --qmp s --pid 7 --pause qmp --memory process --name n",
            "a libvirt d --agent-vsock 3",
            "a libvirt d",
            "a process 7 --dirty-logging-ok --name n",
            "a process --name n",
            "a process 7 --started 9 --until-eof",
            "a --all",
            "a --all --memory process --allow-guarded",
            "a --all --names-of 107 --names-of=64055 --names-of 0",
            "a all --run-dir r",
            "a all --run-dir r --qmp q --qmp p --libvirt --debug-file d",
            "a all --run-dir r --libvirt=qemu:///session --no-processes",
            "a all",
            "a libvirt d --keys-dir k",
            "a qemu --pid 7 --debug-file vmlinux",
            "a ledger export qemu --qmp s --api-socket g.sock",
            "a ledger export process 7",
            "a ledger import f libvirt d --connect qemu:///session --api-socket s",
            "a ledger import - process --name n --audit-log l --api-socket s",
        ] {
            parse(line).expect(line);
        }
        for line in [
            "a",
            "a qemu",
            "a qemu --pid x",
            "a qemu --qmp s --pause kill",
            "a libvirt",
            "a process",
            "a process 0",
            "a process --started 9 --name n",
            "a process --all",
            "a --all 7",
            "a --all process 7",
            "a --all --name n",
            "a --all --names-of qemu",
            "a --all --api-socket s",
            "a --all --qmp q",
            "a --all --libvirt",
            "a --all --run-dir r --no-processes",
            "a --all --run-dir r --qmp q --no-processes --names-of 7",
            "a qemu --qmp s --memory disk",
            "a ledger",
            "a ledger export",
            "a ledger export --all",
            "a ledger export f qemu --qmp s",
            "a ledger import",
            "a ledger import f",
            "a ledger import qemu --qmp s",
            "a ledger import f qemu",
            "a ledger import f all",
        ] {
            parse(line).expect_err(line);
        }
    }

    #[test]
    fn a_missing_guest_is_asked_for_by_all_its_options() {
        for (line, options) in [
            ("a qemu", ["--qmp <SOCKET>", "--pid <PID>"]),
            ("a process", ["PID", "--name <NAME>"]),
        ] {
            let error = parse(line).expect_err(line).to_string();
            let (wanted, _) = error.split_once("Usage").expect("both");
            for option in options {
                assert!(wanted.contains(option), "{error}");
            }
        }
    }

    #[test]
    fn the_short_and_the_long_help_begin_alike() {
        let mut command = CommandLine::command();
        let [short, long] = [command.render_help(), command.render_long_help()];
        let first =
            |help: clap::builder::StyledStr| help.to_string().lines().next().map(str::to_owned);
        assert_eq!(first(short).map(|line| line + "."), first(long));
    }

    #[test]
    fn attachers_get_all_shared_options() {
        let all = |line: &str| match parse(line).expect("sound").command {
            Command::All(all) => all.shared.words(),
            other => panic!("{other:?}"),
        };
        let shared = "--memory=process --keys-dir=-k --debug-file=d --audit-log=a --allow-guarded --allow-text-checker";
        let others = "--names-of 1 --run-dir r --qmp q --libvirt=u";
        let words = all(&format!("a all {shared} {others}"));
        assert_eq!(words.join(OsStr::new(" ")), OsStr::new(shared));
        assert_eq!(all("a all"), ["--memory=auto"]);
    }

    #[test]
    fn the_agents_address_is_parsed_or_refused() {
        assert_eq!(
            "7".parse(),
            Ok(AgentVsock {
                guest: 7,
                port: 1024
            })
        );
        assert_eq!("7:9".parse(), Ok(AgentVsock { guest: 7, port: 9 }));
        for bad in [
            "",
            "2",
            "x",
            "7:",
            "7:0",
            "7:x",
            "4294967295",
            "7:4294967295",
            "-3",
            "7:1:1",
        ] {
            assert!(bad.parse::<AgentVsock>().is_err(), "{bad:?}");
        }
    }
}
