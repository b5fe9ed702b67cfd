// SPDX-License-Identifier: Apache-2.0

//! The monitor's command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::NonEmptyStringValueParser;
use clap::{Parser, ValueEnum};
use patchbay_service::trace::BootEvents;
use patchbay_vmm::boot::{BootProtocol, DeviceDiscovery, LinuxBoot};
use patchbay_vmm::devices::ConsoleOutput;
use patchbay_vmm::devices::virtio::{
    CID_MIN, DISKS_MAX, DiskConfig, DiskLimits, Rate, VirtioConfig, VirtioError, VsockConfig,
};
use patchbay_vmm::jail::Files;
use patchbay_vmm::seccomp::SeccompLevel;
use patchbay_vmm::snapshot::{MEMORY_FILE, STATE_FILE};

const DEFAULT_GRACE_SECONDS: u16 = 5;

/// Boots one Linux guest under KVM and lets its operator flip the guest's static keys.
///
/// Ctrl-C, Ctrl-\, SIGTERM and a hang-up of the terminal end the guest at once; a second signal
/// ends the monitor without waiting for the guest. Without a terminal, SIGHUP reopens the log
/// files. The exit status is 0 if the guest powered off, reset or was shut down, 1 if the guest
/// halted for good or the monitor failed, and 2 for an invalid command line.
#[derive(Debug, Parser)]
#[command(name = "patchbay-vmm", version)]
pub struct Args {
    /// Kernel image: a bzImage, or an ELF file (vmlinux).
    #[arg(long, value_name = "FILE", required_unless_present = "from")]
    pub kernel: Option<PathBuf>,

    /// Start a copy of the guest in this snapshot, a folder that `patchbay guest snapshot` wrote.
    /// Give the same --disk (an image with the content of that time), --vsock and --rng; the disks'
    /// limits and all paths may differ. Nothing may change the folder while its copies run.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["kernel", "initrd", "cmdline", "boot_protocol", "memory", "vcpus", "acpi_devices", "no_patchbay", "trace_events"])]
    pub from: Option<PathBuf>,

    /// Initial RAM disk.
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// Kernel command line.
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "console=ttyS0 panic=-1",
        allow_hyphen_values = true
    )]
    pub cmdline: String,

    /// Boot protocol.
    #[arg(long, value_enum, default_value_t = Protocol::Auto)]
    pub boot_protocol: Protocol,

    /// Guest memory: 2M to 1T, with a suffix K, M, G or T.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_memory)]
    pub memory: u64,

    /// Number of vCPUs, 1 to 16.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vcpus: u8,

    /// Output of the serial console: stdout (with input from stdin), file:PATH, api, or none. A
    /// file is renamed to PATH.1 at 16 MiB and a new one is started; SIGHUP reopens it.
    #[arg(long, value_name = "WHERE", default_value = "stdout")]
    pub console: Console,

    /// Name of the guest in the API.
    #[arg(long, default_value = "default", value_parser = NonEmptyStringValueParser::new())]
    pub name: String,

    /// Serve the API on this unix socket.
    #[arg(long, value_name = "PATH")]
    pub api_socket: Option<PathBuf>,

    /// Take function names from this file: the kernel's System.map or vmlinux.
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,

    /// Read from this file what the kernel's memory does not contain. Give its vmlinux or
    /// System.map if it is built without CONFIG_KALLSYMS_ALL, and its vmlinux with debug
    /// information if it is built without CONFIG_DEBUG_INFO_BTF. The file is read at the start,
    /// because the monitor's threads cannot open files.
    #[arg(long, value_name = "FILE")]
    pub debug_file: Option<PathBuf>,

    /// Append every change of a key to this file; SIGHUP reopens it.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,

    /// Permit changes of keys that the guest has not declared safe to change from outside.
    #[arg(long)]
    pub allow_guarded: bool,

    /// Permit changes even if the guest has loaded a module that checks the kernel's text (LKRG).
    /// The module may take a change for an attack and panic.
    #[arg(long)]
    pub allow_text_checker: bool,

    /// Treat the keys that the files in this folder list as declared safe to count from outside.
    /// Without this option, /etc/patchbay/keys.d is used if it exists.
    #[arg(long, value_name = "FOLDER")]
    pub keys_dir: Option<PathBuf>,

    /// Hide the Patchbay CPUID leaf, to measure what Patchbay costs the guest.
    #[arg(long, hide = true)]
    pub no_patchbay: bool,

    /// Stream sockets between guest and host. Clients on the host connect to PATH and write
    /// "CONNECT <port>". Connections from the guest to the host's port N go to PATH_N. The guest's
    /// CID is 3 unless given.
    #[arg(long, value_name = "PATH[,cid=N]", value_parser = parse_vsock)]
    pub vsock: Option<VsockConfig>,

    /// Seconds that events stay armed and firing after the client that streamed them (`patchbay
    /// trace tail`, `record`) disconnects, 0 to 3600.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_GRACE_SECONDS, value_parser = clap::value_parser!(u16).range(0..=3600))]
    pub trace_grace: u16,

    /// Let the guest's kernel arm these events when it boots (trace_event= on its command line),
    /// and park them as soon as the kernel is known. They can then be fired without an agent, and
    /// be read in memory.
    #[arg(long, value_name = "SYSTEM:NAME|SYSTEM:*[,...]", value_parser = BootEvents::parse)]
    pub trace_events: Option<BootEvents>,

    /// Disk: a raw image. Up to 4 times. RATE limits the bytes or the requests per second. BURST is
    /// the amount that an idle disk saves up; without it, one second's worth. Both take a suffix K,
    /// M, G or T.
    #[arg(long, value_name = "PATH[,readonly][,bytes=RATE[/BURST]][,ops=RATE[/BURST]]", value_parser = parse_disk)]
    pub disk: Vec<DiskConfig>,

    /// Give the guest a virtio random number generator.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub rng: bool,

    /// Describe the virtio devices in ACPI tables and not on the command line, for kernels without
    /// CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES, such as Debian's.
    #[arg(long)]
    pub acpi_devices: bool,

    /// Confinement of the monitor.
    #[arg(long, value_enum, default_value_t = SeccompLevel::On)]
    pub jail: SeccompLevel,
}

impl Args {
    /// Checks what the parser of single options cannot check, without reading a file.
    ///
    /// # Errors
    /// The reason why the command line is invalid.
    pub fn check(&self) -> Result<(), String> {
        if self.disk.len() > DISKS_MAX {
            return Err(VirtioError::TooManyDisks(self.disk.len()).to_string());
        }
        self.linux_boot().map(|_| ())
    }

    /// Returns the files that the monitor opens for these arguments.
    pub fn files(&self) -> Files {
        let mut files = Files::default();
        let given = self.kernel.iter().chain(&self.initrd).chain(&self.symbols);
        for path in given.chain(&self.debug_file) {
            files.read(path);
        }
        if let Some(folder) = &self.from {
            for name in [STATE_FILE, MEMORY_FILE] {
                files.read(&folder.join(name));
            }
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

    pub fn virtio(&self) -> VirtioConfig {
        VirtioConfig {
            rng: self.rng,
            vsock: self.vsock.clone(),
            disks: self.disk.clone(),
        }
    }

    /// Returns the boot of the kernel; `None` for a copy of a snapshot.
    ///
    /// # Errors
    /// The command line has events already, and events are also given by the option.
    pub fn linux_boot(&self) -> Result<Option<LinuxBoot>, String> {
        let Some(kernel) = self.kernel.clone() else {
            return Ok(None);
        };
        let mut boot = LinuxBoot {
            kernel,
            initrd: self.initrd.clone(),
            command_line: self.cmdline.clone(),
            protocol: match self.boot_protocol {
                Protocol::Auto => BootProtocol::Auto,
                Protocol::Linux => BootProtocol::Linux,
                Protocol::Pvh => BootProtocol::Pvh,
            },
            virtio_devices: match self.acpi_devices {
                true => DeviceDiscovery::Acpi,
                false => DeviceDiscovery::CommandLine,
            },
        };
        if let Some(events) = &self.trace_events {
            if BootEvents::is_in(&self.cmdline) {
                return Err(
                    "the kernel's command line has trace_event= already, and some kernels take only the last one; give all events by --trace-events"
                        .to_owned(),
                );
            }
            boot.add_words(&format!(" {}", events.word()));
        }
        Ok(Some(boot))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// PVH for an ELF kernel with a PVH note, else the 64-bit Linux boot protocol.
    Auto,
    /// The 64-bit Linux boot protocol.
    Linux,
    /// PVH.
    Pvh,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Console {
    /// To stdout, with input from stdin.
    Stdout,
    File(PathBuf),
    /// Only to clients of the API.
    Api,
    /// Nowhere; clients of the API can still read it.
    None,
}

impl Console {
    pub fn output(&self) -> ConsoleOutput {
        match self {
            Self::Stdout => ConsoleOutput::Stdout,
            Self::File(path) => ConsoleOutput::File(path.clone()),
            Self::Api | Self::None => ConsoleOutput::None,
        }
    }

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
                _ => Err("use stdout, file:PATH, api or none".into()),
            },
        }
    }
}

/// Parses a socket's path with an optional CID.
fn parse_vsock(text: &str) -> Result<VsockConfig, String> {
    let (path, cid) = match text.rsplit_once(",cid=") {
        Some((path, cid)) => {
            // The CIDs 0 to 2 are reserved, and the last one is VMADDR_CID_ANY.
            let cid = cid.parse().ok();
            let cid = cid.filter(|cid| (CID_MIN..u32::MAX).contains(cid));
            let cid = cid.ok_or("use cid=N with a number from 3 to 4294967294")?;
            (path, cid)
        }
        None => (text, CID_MIN),
    };
    match path.is_empty() {
        true => Err("give PATH or PATH,cid=N".into()),
        false => Ok(VsockConfig {
            path: path.into(),
            cid,
            // Without this, any program in the guest could pose as the agent.
            privileged: vec![patchbay_service::trace::PORT, patchbay_proto::EXEC_PORT],
        }),
    }
}

/// Parses a disk image's path and options. The options are parsed from the end, because a path may
/// contain commas.
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

/// Parses "RATE" or "RATE/BURST".
fn parse_rate(text: &str) -> Result<Rate, String> {
    let (per_second, burst) = text.split_once('/').unwrap_or((text, text));
    let rate = Rate {
        per_second: parse_size(per_second)?,
        burst: parse_size(burst)?,
    };
    match rate {
        Rate { per_second: 0, .. } | Rate { burst: 0, .. } => {
            Err("use a rate and a burst above 0, or leave them out".into())
        }
        rate => Ok(rate),
    }
}

/// The range of [`Args::memory`].
const MEMORY: std::ops::RangeInclusive<u64> = 2 << 20..=1 << 40;

fn parse_memory(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    match MEMORY.contains(&size) {
        true => Ok(size),
        false => Err("give 2M to 1T".to_owned()),
    }
}

/// Parses a size in bytes with an optional suffix K, M, G or T.
fn parse_size(text: &str) -> Result<u64, String> {
    let hint = "use a number with K, M, G or T, such as 256M";
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
    fn memory_has_a_range() {
        assert_eq!(parse_memory("2M"), Ok(2 << 20));
        assert_eq!(parse_memory("1T"), Ok(1 << 40));
        for bad in ["0", "1M", "2T", "1", "much"] {
            parse_memory(bad).expect_err(bad);
        }
    }

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
            privileged: vec![1024, 1025],
        };
        assert_eq!(parse_vsock("/run/v"), Ok(vsock("/run/v", 3)));
        assert_eq!(parse_vsock("a,b,cid=7"), Ok(vsock("a,b", 7)));
        for wrong in [
            "",
            ",cid=3",
            "v,cid=",
            "v,cid=x",
            "v,cid=-1",
            "v,cid=2",
            "v,cid=4294967295",
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
    fn events_of_the_boot_are_on_the_command_line() {
        let boot = |more: &[&str]| {
            let args = ["patchbay-vmm", "--kernel=k"].iter().chain(more);
            Args::try_parse_from(args).map_err(|error| error.to_string())
        };
        let events = "--trace-events=sched:*,irq:softirq_entry";
        let args = boot(&[events, "--cmdline=quiet -- sh"]).expect("well-formed");
        let line = args.linux_boot().expect("no other events");
        let line = line.expect("a kernel").command_line;
        assert_eq!(line, "quiet trace_event=sched:*,irq:softirq_entry -- sh");
        let args = boot(&[events, "--cmdline=trace_event=a:b"]).expect("well-formed");
        let error = args.linux_boot().expect_err("two words");
        assert!(error.contains("--trace-events"), "{error}");
        let error = boot(&["--trace-events=sched:sched_*"]).expect_err("a glob");
        assert!(error.contains("SYSTEM:*"), "{error}");
        let line = boot(&[]).expect("well-formed").linux_boot();
        let line = line.expect("no events").expect("a kernel").command_line;
        assert!(!line.contains("trace_event"), "{line}");
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
    fn a_copy_has_the_kernel_and_the_size_of_its_snapshot() {
        let parse = |words: &[&str]| Args::try_parse_from([&["vmm"], words].concat());
        let args = parse(&["--from", "s", "--name", "b", "--disk", "d"]).unwrap();
        assert!(args.linux_boot().unwrap().is_none());
        for wrong in [
            "--kernel=k",
            "--memory=1G",
            "--vcpus=2",
            "--cmdline=x",
            "--trace-events=a:b",
        ] {
            assert!(parse(&["--from", "s", wrong]).is_err(), "{wrong}");
        }
        assert!(parse(&[]).is_err(), "neither a kernel nor a snapshot");
    }

    #[test]
    fn the_version_names_the_program() {
        use clap::CommandFactory;
        let version = Args::command().render_version();
        assert!(version.starts_with("patchbay-vmm 0"), "{version}");
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
