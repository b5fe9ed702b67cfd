// SPDX-License-Identifier: Apache-2.0

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::*;

/// The user and group of monitors that are not root.
const USER: u32 = 65534;

fn own() -> Process {
    Process::open(std::process::id()).expect("it runs")
}

fn refusal(process: &Process, vsock: &Path) -> String {
    bind_beside(process, vsock).expect_err("refused")
}

/// A process that only sleeps, killed on drop.
struct Sleeper(Child);

impl Sleeper {
    /// Starts a process and waits until it runs the program, from when on it has its user.
    fn start(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child.spawn().expect("it starts");
        // `cat` answers once it runs.
        std::io::Write::write_all(child.stdin.as_mut().expect("piped"), b"x").expect("it reads");
        let mut answer = [0];
        std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut answer)
            .expect("it writes");
        Self(child)
    }

    fn process(&self) -> Process {
        Process::open(self.0.id()).expect("it runs")
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns whether this is root, who alone may take the rights of others.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: it needs root");
    }
    is_root
}

#[test]
fn the_sockets_on_which_a_process_listens_are_found() {
    let folder = tempfile::tempdir().expect("temporary folder");
    // A forged line of /proc/net/unix.
    let path = folder
        .path()
        .join("v\n0: 00000002 00000000 00010000 0001 01 1 x");
    let listener = UnixListener::bind(&path).expect("free");
    let _client = UnixStream::connect(&path).expect("it listens");
    let (_accepted, _) = listener.accept().expect("a client");
    assert!(own().listeners().expect("readable").contains(&path));
    drop(listener);
    // The accepted socket has the same name.
    assert!(!own().listeners().expect("readable").contains(&path));
    // This process is no monitor.
    assert_eq!(find(&own()), Ok(None));
}

#[test]
fn the_vsock_device_is_chosen_among_the_sockets_of_a_monitor() {
    let chosen = |line: &str, sockets: &[&str]| {
        let words: Vec<&str> = line.split(' ').collect();
        let kind = match words[0] {
            "firecracker" => Kind::Firecracker,
            _ => Kind::CloudHypervisor,
        };
        let sockets = sockets.iter().map(PathBuf::from).collect();
        choose(kind, &words, sockets).map(|path| path.map(|path| path.display().to_string()))
    };
    for (line, sockets, expected) in [
        ("firecracker --no-api", &[][..], None),
        ("firecracker --no-api", &["v"], Some("v")),
        ("firecracker --api-sock /a", &["/a"], None),
        ("firecracker --api-sock=/a", &["/a", "/v"], Some("/v")),
        (
            "firecracker",
            &["/run/firecracker.socket", "/v"],
            Some("/v"),
        ),
        ("ch --api-socket /a", &["/a"], None),
        ("ch --api-socket path=/a", &["/a", "/v"], Some("/v")),
        ("ch --vsock cid=3,socket=/v", &["/a", "/v"], Some("/v")),
        // The command line alone does not count.
        ("ch --vsock cid=3,socket=/v", &[], None),
        ("ch --vsock cid=3,socket=/v", &["/a"], Some("/a")),
        (
            "ch --serial socket=/s --console socket=/c",
            &["/c", "/s"],
            None,
        ),
    ] {
        assert_eq!(
            chosen(line, sockets),
            Ok(expected.map(str::to_owned)),
            "{line}"
        );
    }
    for line in ["firecracker --api-sock /x", "ch --vsock cid=3,socket=/x"] {
        let error = chosen(line, &["/v", "/w"]).expect_err("two");
        assert!(error.contains("/v, on /w and perhaps"), "{error}");
    }
}

#[test]
fn the_socket_is_bound_beside_the_device_and_removed() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let device = folder.path().join("v.sock");
    let path = folder.path().join("v.sock_1024");
    let error = refusal(&own(), &device);
    assert!(error.contains("v.sock cannot be inspected"), "{error}");
    let _device = UnixListener::bind(&device).expect("free");
    let (listener, file) = bind_beside(&own(), &device).expect("free");
    assert_eq!(fs::metadata(&path).expect("bound").mode() & 0o777, 0o600);
    UnixStream::connect(&path).expect("it listens");
    let error = refusal(&own(), &device);
    assert!(error.contains("another process listens"), "{error}");
    UnixStream::connect(&path).expect("it still listens");
    drop((listener, file));
    assert!(fs::symlink_metadata(&path).is_err(), "removed");

    // A killed attacher leaves its socket.
    drop(UnixListener::bind(&path).expect("free"));
    let (listener, file) = bind_beside(&own(), &device).expect("replaced");
    drop(listener);
    // A socket that another process has bound meanwhile stays.
    fs::remove_file(&path).expect("there");
    let _other = UnixListener::bind(&path).expect("free");
    drop(file);
    UnixStream::connect(&path).expect("it is there");
}

#[test]
fn other_files_and_links_are_left_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let device = folder.path().join("v.sock");
    let path = folder.path().join("v.sock_1024");
    let _device = UnixListener::bind(&device).expect("free");
    fs::write(&path, "precious").expect("room");
    let error = refusal(&own(), &device);
    assert!(error.contains("exists and is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("kept"), "precious");
    fs::remove_file(&path).expect("there");
    // A link to a socket without a listener, and one to nothing.
    let target = folder.path().join("target");
    drop(UnixListener::bind(&target).expect("free"));
    for target in [&target, &folder.path().join("nothing")] {
        symlink(target, &path).expect("free");
        let error = refusal(&own(), &device);
        assert!(error.contains("exists and is not a socket"), "{error}");
        assert!(fs::symlink_metadata(&path).expect("kept").is_symlink());
        fs::remove_file(&path).expect("there");
    }
    let kept = fs::symlink_metadata(&target).expect("kept");
    assert!(kept.file_type().is_socket());
    assert!(!folder.path().join("nothing").exists());
    // A device that is a link, and a folder that is one.
    symlink(&device, folder.path().join("link")).expect("free");
    let error = refusal(&own(), &folder.path().join("link"));
    assert!(error.contains("no longer the socket"), "{error}");
    let parent = tempfile::tempdir().expect("temporary folder");
    symlink(folder.path(), parent.path().join("link")).expect("free");
    let error = refusal(&own(), &parent.path().join("link/v.sock"));
    assert!(error.contains("contains a symbolic link"), "{error}");
    let error = refusal(&own(), Path::new("../v.sock"));
    assert!(
        error.contains("out of the monitor's working folder"),
        "{error}"
    );
}

#[test]
fn paths_that_are_too_long_are_refused() {
    // The path of another folder of temporary files may be too long already.
    let folder = tempfile::tempdir_in("/tmp").expect("temporary folder");
    let nested = folder.path().join("d".repeat(50));
    fs::create_dir(&nested).expect("room");
    let bound = |folder: &Path, name: usize| {
        let device = folder.join("x".repeat(name));
        (UnixListener::bind(&device).expect("free"), device)
    };
    let longest = |folder: &Path| 102 - folder.as_os_str().len() - 1;
    // With `_1024` the path has 107 bytes, and the name has 82.
    let (_path, path_fits) = bound(&nested, longest(&nested));
    let (_name, name_fits) = bound(folder.path(), 77);
    for device in [path_fits, name_fits] {
        bind_beside(&own(), &device).expect("it fits");
    }
    let (_path, long_path) = bound(&nested, longest(&nested) + 1);
    let (_name, long_name) = bound(folder.path(), 78);
    for device in [long_path, long_name] {
        let error = refusal(&own(), &device);
        assert!(error.contains("too long"), "{error}");
    }
    for path in ["/", "..", ""] {
        let error = refusal(&own(), Path::new(path));
        assert!(
            error.contains("not the path of a socket"),
            "{path:?}: {error}"
        );
    }
}

#[test]
fn another_users_socket_is_bound_with_that_users_rights() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).expect("own");
    let jail = folder.path().join("jail");
    fs::create_dir(&jail).expect("room");
    let device = jail.join("v.sock");
    let path = jail.join("v.sock_1024");
    let _device = UnixListener::bind(&device).expect("free");
    let monitor = Sleeper::start(Command::new("cat").uid(USER).gid(USER).current_dir(&jail));
    let dumpable = rustix::process::dumpable_behavior();
    let error = refusal(&monitor.process(), &device);
    assert!(error.contains("Permission denied"), "{error}");
    let owner = |user| std::os::unix::fs::chown(&jail, Some(user), Some(user)).expect("root");
    owner(USER);
    for device in [&*device, Path::new("v.sock")] {
        let (_listener, file) = bind_beside(&monitor.process(), device).expect("free");
        let found = fs::metadata(&path).expect("bound");
        assert_eq!((found.uid(), found.gid()), (USER, USER));
        drop(file);
        assert!(!path.exists());
    }
    // What this user may not connect to counts as served, and stays.
    drop(UnixListener::bind(&path).expect("free"));
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("own");
    let error = refusal(&monitor.process(), &device);
    assert!(error.contains("cannot check whether"), "{error}");
    assert!(path.exists());
    assert!(rustix::process::geteuid().is_root());
    assert_eq!(rustix::process::dumpable_behavior(), dumpable);
}

#[test]
fn the_paths_of_a_jail_stay_in_it() {
    let busybox = Path::new("/bin/busybox");
    if !is_root() || !busybox.exists() {
        eprintln!("SKIPPED: it needs root and /bin/busybox");
        return;
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).expect("own");
    let jail = folder.path().join("jail");
    fs::create_dir(&jail).expect("room");
    fs::copy(busybox, jail.join("busybox")).expect("room");
    std::os::unix::fs::chown(&jail, Some(USER), Some(USER)).expect("root");
    let user = format!("{USER}:{USER}");
    let mut command = Command::new("chroot");
    command.arg(format!("--userspec={user}")).arg(&jail);
    let monitor = Sleeper::start(command.args(["/busybox", "cat"]));
    let _device = UnixListener::bind(jail.join("v.sock")).expect("free");
    // A folder outside that has the same path from the jail, if the jail is left.
    let _outside = UnixListener::bind(folder.path().join("v.sock")).expect("free");
    symlink(folder.path(), jail.join("out")).expect("free");
    for path in ["/v.sock", "/../v.sock", "v.sock"] {
        let (_listener, file) = bind_beside(&monitor.process(), Path::new(path)).expect(path);
        assert!(jail.join("v.sock_1024").exists(), "{path}");
        assert!(!folder.path().join("v.sock_1024").exists(), "{path}");
        drop(file);
        assert!(!jail.join("v.sock_1024").exists(), "{path}");
    }
    let error = refusal(&monitor.process(), Path::new("/out/v.sock"));
    assert!(error.contains("contains a symbolic link"), "{error}");
}

#[test]
fn rights_are_read_from_the_status_of_a_process() {
    let status =
        "Name:\tx\nUid:\t7\t7\t7\t7\nGid:\t8\t9\t8\t9\nGroups:\t9 10 \nCapEff:\t0000000000000002\n";
    let with = Rights::parse(7, status, true).expect("complete");
    let without = Rights::parse(7, status, false).expect("complete");
    assert_ne!(
        with, without,
        "the capabilities of another namespace do not count"
    );
    let text = format!("{without:?}");
    assert!(text.contains("group: 9, groups: [9, 10]"), "{text}");
    for missing in ["Gid:", "Groups:", "CapEff:"] {
        assert!(
            Rights::parse(7, &status.replace(missing, "x"), true).is_none(),
            "{missing}"
        );
    }
    assert!(Rights::parse(7, &status.replace("9 10", "9 x"), true).is_none());
}
