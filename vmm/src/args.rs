// SPDX-License-Identifier: Apache-2.0

//! The command line of the monitor itself.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use patchbay_vmm::boot::{BootProtocol, LinuxBoot};
use patchbay_vmm::devices::ConsoleOutput;
use patchbay_vmm::devices::virtio::{
    CID_MIN, DiskConfig, DiskLimits, Rate, VirtioConfig, VsockConfig,
};
use patchbay_vmm::jail::Files;
use patchbay_vmm::seccomp::SeccompLevel;

const DEFAULT_GRACE_SECONDS: u16 = 5;

/// Boots one Linux guest under KVM and lets its operator flip its static keys.
///
/// Ctrl-C, Ctrl-\\, SIGTERM and a terminal's hang-up end the guest at once; a second one does not wait for it.
/// Without a terminal SIGHUP has log files opened again. The exit status is 0 if the guest
/// switched itself off, reset itself or was shut down, 1 if it or the monitor
/// failed, 2 for a wrong command line.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// The kernel: a bzImage, or an ELF file (vmlinux).
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,

    /// An initial RAM disk.
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// The kernel's command line.
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "console=ttyS0 panic=-1",
        allow_hyphen_values = true
    )]
    pub cmdline: String,

    /// How the kernel is entered.
    #[arg(long, value_enum, default_value_t = Protocol::Auto)]
    pub boot_protocol: Protocol,

    /// The guest's memory: 2M to 1T, with a suffix K, M, G or T.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub memory: u64,

    /// The guest's vCPUs, 1 to 16.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vcpus: u8,

    /// Where the serial console goes: stdout (with input from stdin), file:PATH, api, or none. A file is
    /// renamed to PATH.1 at 16 MiB, and a new one begun; SIGHUP has it opened again.
    #[arg(long, value_name = "WHERE", default_value = "stdout")]
    pub console: Console,

    /// The name that the guest has in the API.
    #[arg(long, default_value = "default")]
    pub name: String,

    /// Serve the API on this unix socket.
    #[arg(long, value_name = "PATH")]
    pub api_socket: Option<PathBuf>,

    /// Take function names from this file: the kernel's System.map or vmlinux.
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,

    /// Append every change of a key to this file; SIGHUP has it opened again.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,

    /// Permit changes of keys that the guest has not declared safe to change from outside.
    #[arg(long)]
    pub allow_guarded: bool,

    /// Do not tell the guest of Patchbay, as any other monitor: to measure what that costs it.
    #[arg(long, hide = true)]
    pub no_patchbay: bool,

    /// Sockets between guest and host: clients on the host connect to PATH and
    /// write "CONNECT <port>"; what the guest sends to the host's port N goes to
    /// PATH_N. N is the guest's address, 3 unless given.
    #[arg(long, value_name = "PATH[,cid=N]", value_parser = parse_vsock)]
    pub vsock: Option<VsockConfig>,

    /// Seconds for which events stay armed and firing after the client that streamed them (`patchbay
    /// trace tail`, `record`) is gone, 0 to 3600.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_GRACE_SECONDS, value_parser = clap::value_parser!(u16).range(0..=3600))]
    pub trace_grace: u16,

    /// A disk: a raw image. Up to 4 times. RATE limits the bytes or the requests per second, and BURST
    /// is what a rest saves up, one second's worth unless given; both take a suffix K, M, G or T.
    #[arg(long, value_name = "PATH[,readonly][,bytes=RATE[/BURST]][,ops=RATE[/BURST]]", value_parser = parse_disk)]
    pub disk: Vec<DiskConfig>,

    /// Whether the guest gets randomness from the host.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub rng: bool,

    /// How the monitor is confined: with system call filters, Landlock and limits (on); with filters that
    /// only write a line to the kernel's log (log); or not at all (off).
    #[arg(long, value_enum, default_value_t = SeccompLevel::On)]
    pub jail: SeccompLevel,
}

impl Args {
    /// What the monitor opens of these.
    pub fn files(&self) -> Files {
        let mut files = Files::default();
        files.read(&self.kernel);
        for path in self.initrd.iter().chain(&self.symbols) {
            files.read(path);
        }
        for disk in &self.disk {
            match disk.read_only {
                true => files.read(&disk.path),
                false => files.write(&disk.path),
            }
        }
        for path in self.api_socket.iter().chain(&self.audit_log) {
            files.make(path);
        }
        if let Some(vsock) = &self.vsock {
            files.make(&vsock.path);
        }
        if let Console::File(path) = &self.console {
            files.make(path);
        }
        files
    }

    /// The virtio devices.
    pub fn virtio(&self) -> VirtioConfig {
        VirtioConfig {
            rng: self.rng,
            vsock: self.vsock.clone(),
            disks: self.disk.clone(),
        }
    }

    /// What to boot.
    pub fn linux_boot(&self) -> LinuxBoot {
        LinuxBoot {
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            command_line: self.cmdline.clone(),
            protocol: match self.boot_protocol {
                Protocol::Auto => BootProtocol::Auto,
                Protocol::Linux => BootProtocol::Linux,
                Protocol::Pvh => BootProtocol::Pvh,
            },
        }
    }
}

/// How the kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// PVH for an ELF kernel that can, else the 64-bit Linux protocol.
    Auto,
    /// The 64-bit Linux boot protocol.
    Linux,
    /// PVH.
    Pvh,
}

/// Where the console goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Console {
    /// To stdout, with input from stdin.
    Stdout,
    /// To a file.
    File(PathBuf),
    /// To the API's clients alone.
    Api,
    /// Nowhere that matters; the API's clients can still read it.
    None,
}

impl Console {
    /// Where the monitor itself writes to.
    pub fn output(&self) -> ConsoleOutput {
        match self {
            Self::Stdout => ConsoleOutput::Stdout,
            Self::File(path) => ConsoleOutput::File(path.clone()),
            Self::Api | Self::None => ConsoleOutput::None,
        }
    }

    /// Whether stdin is typed into it.
    pub fn is_terminal(&self) -> bool {
        *self == Self::Stdout
    }
}

impl FromStr for Console {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stdout" => Ok(Self::Stdout),
            "api" => Ok(Self::Api),
            "none" => Ok(Self::None),
            _ => match text.strip_prefix("file:") {
                Some(path) if !path.is_empty() => Ok(Self::File(path.into())),
                _ => Err("give stdout, file:PATH, api or none".into()),
            },
        }
    }
}

/// A socket's path, and perhaps the guest's address.
fn parse_vsock(text: &str) -> Result<VsockConfig, String> {
    let (path, cid) = match text.rsplit_once(",cid=") {
        Some((path, cid)) => {
            let cid = cid
                .parse()
                .map_err(|_| "give cid=N, a number from 3 to 4294967294")?;
            (path, cid)
        }
        None => (text, CID_MIN),
    };
    match path.is_empty() {
        true => Err("give PATH or PATH,cid=N".into()),
        false => Ok(VsockConfig {
            path: path.into(),
            cid,
            // Or any program of the guest could pose as the agent.
            privileged: vec![patchbay_service::trace::PORT],
        }),
    }
}

/// A disk image's path and how to use it. The options are at the end: a path may have commas.
fn parse_disk(text: &str) -> Result<DiskConfig, String> {
    let mut path = text;
    let mut read_only = false;
    let mut limits = DiskLimits::default();
    while let Some((rest, option)) = path.rsplit_once(',') {
        match option.split_once('=') {
            None if option == "readonly" => read_only = true,
            Some(("bytes", rate)) => limits.bytes = Some(parse_rate(rate)?),
            Some(("ops", rate)) => limits.operations = Some(parse_rate(rate)?),
            _ => break,
        }
        path = rest;
    }
    match path.is_empty() {
        true => Err("give PATH or PATH,readonly".into()),
        false => Ok(DiskConfig {
            path: path.into(),
            read_only,
            limits,
        }),
    }
}

/// "RATE" or "RATE/BURST".
fn parse_rate(text: &str) -> Result<Rate, String> {
    let (per_second, burst) = text.split_once('/').unwrap_or((text, text));
    let rate = Rate {
        per_second: parse_size(per_second)?,
        burst: parse_size(burst)?,
    };
    match rate {
        Rate { per_second: 0, .. } | Rate { burst: 0, .. } => {
            Err("give a rate and a burst above 0, or leave them out".into())
        }
        rate => Ok(rate),
    }
}

/// A size in bytes, with a suffix K, M, G or T.
fn parse_size(text: &str) -> Result<u64, String> {
    let hint = "give a number with K, M, G or T, such as 256M";
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| hint.to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| hint.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use patchbay_service::trace::DEFAULT_GRACE;

    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("256M"), Ok(256 << 20));
        assert_eq!(parse_size("1g"), Ok(1 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        for wrong in ["", "M", "1.5G", "-1M", "99999999999T", "12Q", "1ä"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn vsock_sockets() {
        let vsock = |path: &str, cid| VsockConfig {
            path: path.into(),
            cid,
            privileged: vec![1024],
        };
        assert_eq!(parse_vsock("/run/v"), Ok(vsock("/run/v", 3)));
        assert_eq!(parse_vsock("a,b,cid=7"), Ok(vsock("a,b", 7)));
        for wrong in [
            "",
            ",cid=3",
            "v,cid=",
            "v,cid=x",
            "v,cid=-1",
            "v,cid=4294967296",
        ] {
            assert!(parse_vsock(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn disks() {
        let disk = |path: &str, read_only, limits| DiskConfig {
            path: path.into(),
            read_only,
            limits,
        };
        let none = DiskLimits::default();
        assert_eq!(parse_disk("a.img"), Ok(disk("a.img", false, none)));
        assert_eq!(parse_disk("a,b,readonly"), Ok(disk("a,b", true, none)));
        let rate = |per_second, burst| Some(Rate { per_second, burst });
        let limits = DiskLimits {
            bytes: rate(50 << 20, 100 << 20),
            operations: rate(1000, 1000),
        };
        assert_eq!(
            parse_disk("a,b,bytes=50M/100M,readonly,ops=1000"),
            Ok(disk("a,b", true, limits))
        );
        for wrong in [
            "",
            ",readonly",
            ",ops=1",
            "a,ops=",
            "a,ops=0",
            "a,ops=1/0",
            "a,bytes=1/2/3",
            "a,bytes=-1",
            "a,bytes=99999999999T",
        ] {
            assert!(parse_disk(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn consoles() {
        assert_eq!("file:a:b".parse(), Ok(Console::File("a:b".into())));
        assert_eq!("api".parse(), Ok(Console::Api));
        for wrong in ["", "file:", "File:x", "serial"] {
            assert!(wrong.parse::<Console>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn grace_has_a_range() {
        let grace = |words: &[&str]| {
            let args = Args::try_parse_from([&["vmm", "--kernel", "k"], words].concat());
            args.map(|args| args.trace_grace).ok()
        };
        assert_eq!(
            grace(&[]).map(|seconds| Duration::from_secs(seconds.into())),
            Some(DEFAULT_GRACE)
        );
        assert_eq!(grace(&["--trace-grace=0"]), Some(0));
        assert_eq!(grace(&["--trace-grace=3600"]), Some(3600));
        for wrong in ["3601", "-1", "5s", ""] {
            assert_eq!(grace(&["--trace-grace", wrong]), None, "{wrong}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
