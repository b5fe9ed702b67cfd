// SPDX-License-Identifier: Apache-2.0

//! Tests the monitor's program: signals, readers that stall, a second monitor, confinement.

#[path = "../../tests/bare_metal/mod.rs"]
mod bare_metal;
mod program;

use std::io::{PipeReader, Read, Write};
use std::process::{Command, Stdio};

use bare_metal::{wait_until, watchdog};
use program::{Case, Monitor, QUIET, TALKING, has_kvm};
use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

/// Starts a guest that prints endlessly. The monitor's stdout is a full pipe that nothing reads.
/// With `errors`, its stderr is the same pipe.
fn stalled(case: &Case, errors: bool) -> (Monitor, PipeReader) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = case.program(&["--api-socket", "api"]);
    command.stdout(writer.try_clone().unwrap());
    if errors {
        command.stderr(writer.try_clone().unwrap());
    }
    let monitor = Monitor::start(command);
    wait_until("the console's writer is stuck", || {
        monitor.is_stuck_writing("console")
    });
    wait_until("signals are handled", || case.answers("api"));
    (monitor, reader)
}

#[test]
fn a_reader_that_stalls_does_not_keep_the_monitor_from_ending() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    for errors in [false, true] {
        let case = Case::new(TALKING);
        let (mut monitor, _reader) = stalled(&case, errors);
        monitor.signal(Signal::TERM);
        assert!(monitor.wait().success());
    }
}

#[test]
fn a_file_that_does_not_exist_is_reported_once() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(QUIET);
    for arguments in [
        ["--initrd", "none"],
        ["--symbols", "none"],
        ["--debug-file", "none"],
        ["--disk", "none"],
        ["--console", "file:none/log"],
    ] {
        let output = case.program(&["--jail", "off"]).args(arguments).output();
        let output = output.unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert_eq!(message.matches("os error 2").count(), 1, "{message}");
    }
}

/// Checks refusals that need neither KVM nor a file.
#[test]
fn an_invalid_command_line_ends_with_2_and_makes_no_file() {
    let case = Case::new(QUIET);
    for (arguments, said) in [
        (&["--disk=d"; 5][..], "5 disks are more than"),
        (&["--vsock=v,cid=2"], "cid=N"),
        (&["--name="], "--name"),
        (&["--from=s"], "--from"),
        (&["--memory=1M"], "--memory"),
        (&["--vcpus=0"], "--vcpus"),
        (
            &["--trace-events=a:b", "--cmdline=trace_event=c:d"],
            "--trace-events",
        ),
    ] {
        let mut command = case.program(&["--api-socket=api"]);
        let output = command.args(arguments).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(said), "{arguments:?}: {message}");
        assert!(!case.path("api").exists(), "{arguments:?}");
    }
}

#[test]
fn a_second_monitor_leaves_the_first_ones_sockets_alone() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(QUIET);
    let quiet = ["--console", "api", "--vsock", "v"];
    let mut first = Monitor::start(case.program(&quiet));
    wait_until("the first listens", || {
        case.answers("v") && case.answers("v_1024")
    });
    let mut other = case.program(&quiet);
    let second = other.args(["--name", "other"]).output().unwrap();
    let text = String::from_utf8_lossy(&second.stderr);
    let said = text.matches("a running program already serves").count();
    assert_eq!(said, 1, "{text}");
    assert_eq!(second.status.code(), Some(1));
    assert!(case.answers("v") && case.answers("v_1024"));
    first.signal(Signal::TERM);
    assert!(first.wait().success());
    assert!(!case.path("v").exists() && !case.path("v_1024").exists());
}

#[test]
fn a_hangup_has_the_logs_opened_again_and_ends_no_guest() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(TALKING);
    let mut command = case.program(&[
        "--console",
        "file:console",
        "--audit-log",
        "audit",
        "--api-socket",
        "api",
    ]);
    command.stderr(std::fs::File::create(case.path("errors")).unwrap());
    let mut monitor = Monitor::start(command);
    wait_until("signals are handled", || case.answers("api"));
    for round in 0..3 {
        wait_until("the guest has printed", || !case.read("console").is_empty());
        for name in ["console", "audit"] {
            std::fs::rename(case.path(name), case.path(&format!("{name}.{round}"))).unwrap();
        }
        monitor.signal(Signal::HUP);
        wait_until("the files are there again", || {
            case.path("console").exists() && case.path("audit").exists()
        });
    }
    wait_until("the guest has printed", || !case.read("console").is_empty());
    assert!(monitor.runs());
    monitor.signal(Signal::TERM);
    assert!(monitor.wait().success());
    assert_eq!(
        case.read("errors"),
        "patchbay-vmm: the guest was shut down\n"
    );
}

#[test]
fn links_are_not_followed() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(QUIET);
    std::fs::write(case.path("precious"), "precious").unwrap();
    std::os::unix::fs::symlink("precious", case.path("link")).unwrap();
    for arguments in [["--console", "file:link"], ["--audit-log", "link"]] {
        let output = case.program(&arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("link"), "{text}");
        assert_eq!(output.status.code(), Some(1), "{text}");
    }
    assert_eq!(case.read("precious"), "precious");
}

/// Starts the monitor under a separate terminal, as from a shell. `setsid` makes this terminal the
/// controlling one.
fn on_a_terminal(case: &Case) -> (Monitor, std::fs::File, std::fs::File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, vec![]).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = std::fs::File::from(rustix::fs::open(&*name, flags, Mode::empty()).unwrap());
    let before = ["setsid", "--ctty", "--wait"];
    let mut command = case.program_under(&before, &[]);
    for attach in [Command::stdin, Command::stdout, Command::stderr] {
        attach(&mut command, Stdio::from(slave.try_clone().unwrap()));
    }
    let monitor = Monitor::start(command);
    wait_until("the terminal is the guest's", || {
        !local_modes(&slave).contains(LocalModes::ICANON)
    });
    let mut master = std::fs::File::from(master);
    // The guest has printed, so it runs, and the monitor will soon handle signals.
    master.read_exact(&mut [0]).unwrap();
    (monitor, master, slave)
}

fn local_modes(terminal: &std::fs::File) -> LocalModes {
    tcgetattr(terminal).unwrap().local_modes
}

#[test]
fn signals_from_the_keyboard_give_the_terminal_back() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    // Ctrl-\ and Ctrl-C.
    for key in [0x1c, 3] {
        let case = Case::new(QUIET);
        let (mut monitor, mut master, slave) = on_a_terminal(&case);
        master.write_all(&[key]).unwrap();
        assert_eq!(monitor.wait().code(), Some(0), "key {key}");
        assert!(local_modes(&slave).contains(LocalModes::ICANON | LocalModes::ECHO));
    }
}

#[test]
fn a_terminal_that_is_gone_takes_the_guest_with_it() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(QUIET);
    let (mut monitor, master, slave) = on_a_terminal(&case);
    drop((master, slave));
    assert_eq!(monitor.wait().code(), Some(0));
}

#[test]
fn every_thread_is_confined() {
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let case = Case::new(QUIET);
    let arguments = ["--console=file:console", "--vsock=v", "--api-socket=api"];
    let mut monitor = Monitor::start(case.program(&arguments));
    let named = ["console", "devices", "keys", "logs", "vcpu0", "wait"];
    wait_until("all threads run", || {
        let threads = monitor.threads("Seccomp");
        let has = |name: &str| threads.iter().any(|(thread, _)| thread == name);
        named.iter().all(|name| has(name)) && threads.iter().all(|(_, mode)| mode == "2")
    });
    let privileges = monitor.threads("NoNewPrivs");
    assert!(
        privileges.iter().all(|(_, value)| value == "1"),
        "{privileges:?}"
    );
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", monitor.0.id())).unwrap();
    for (limit, value) in [("Max core file size", "0"), ("Max open files", "2048")] {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit));
        assert!(
            line.is_some_and(|line| line.trim().starts_with(value)),
            "{limits}"
        );
    }
    monitor.signal(Signal::TERM);
    assert!(monitor.wait().success());
    // The monitor has removed its sockets.
    assert!(!case.path("api").exists() && !case.path("v").exists());
}

/// Simulates a kernel that refuses filters: the process inherits a filter that refuses them.
#[test]
fn without_filters_there_is_no_guest_unless_the_jail_is_off() {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
    let _watchdog = watchdog(60);
    if !has_kvm() {
        return;
    }
    let refused = std::thread::spawn(|| {
        let filter = SeccompFilter::new(
            [(libc::SYS_seccomp, vec![])].into(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EINVAL.unsigned_abs()),
            TargetArch::x86_64,
        );
        let filter: BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&filter).unwrap();
        let case = Case::new(QUIET);
        let output = case.program(&[]).output().unwrap();
        let mut command = case.program(&["--jail", "off"]);
        let mut unconfined = Monitor::start({
            command.stdout(Stdio::piped());
            command
        });
        let mut printed = [0];
        unconfined
            .0
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut printed)
            .unwrap();
        (output, printed)
    });
    let (output, printed) = refused.join().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("--jail off"), "{text}");
    assert_eq!(text.matches("os error 22").count(), 1, "{text}");
    assert_eq!(output.stdout, b"");
    assert_eq!(printed, *b"x");
}
