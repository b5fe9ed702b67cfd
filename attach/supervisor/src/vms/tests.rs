// SPDX-License-Identifier: Apache-2.0

use patchbay_host_kernel::Monitor;

use super::*;

pub(crate) fn vm(pid: u32, name: Option<&str>, verdict: Verdict) -> ListedVm {
    ListedVm {
        pid,
        started: Some(70),
        user: Some(0),
        is_contained: false,
        descriptor: 9,
        monitor: Monitor {
            kind: Kind::Firecracker,
            program: "firecracker".to_owned(),
            name: name.map(str::to_owned),
            words: Default::default(),
        },
        vcpus: Some(1),
        memory_bytes: None,
        dirty_logging: None,
        verdict,
        attacher: None,
    }
}

fn of_user(pid: u32, name: &str, user: u32) -> ListedVm {
    ListedVm {
        user: Some(user),
        ..vm(pid, Some(name), Verdict::Yes)
    }
}

fn empty() -> Vms {
    let scans = Scans::new(Box::new(|| Box::new(|| Ok(Listing::default()))));
    Vms::with(scans, BTreeSet::new())
}

/// Takes a list. `taken` are the names of other guests.
fn take(vms: &mut Vms, listed: Vec<ListedVm>, taken: &[&str], earlier: &Earlier) {
    vms.listing = Some(Listing {
        vms: listed,
        ..Listing::default()
    });
    let is_free = |target: &Target| !taken.contains(&&*target.name());
    vms.take(is_free, |_| earlier.clone());
}

fn find(vms: &mut Vms, listed: Vec<ListedVm>) {
    take(vms, listed, &[], &Earlier::None);
}

fn targets(vms: &mut Vms, owner: Owner) -> Vec<String> {
    let targets = vms.targets(|_, _| owner).into_iter();
    targets.map(|target| target.name()).collect()
}

fn names(vms: &mut Vms) -> Vec<String> {
    targets(vms, Owner::Process)
}

#[tokio::test]
async fn a_name_that_is_taken_gets_the_processs_number() {
    let mut vms = empty();
    let two = |first: u32| {
        let named = |pid, name| vm(pid, Some(name), Verdict::Yes);
        vec![named(first, "web"), named(7, "web"), named(9, "db")]
    };
    take(&mut vms, two(3), &["db"], &Earlier::None);
    assert_eq!(names(&mut vms), ["web", "web-7", "db-9"]);
    // A guest keeps its name, even after the guest that had the plain name is gone.
    find(&mut vms, two(2));
    assert_eq!(names(&mut vms), ["web", "web-7", "db-9"]);
    find(&mut vms, vec![vm(7, Some("web"), Verdict::Yes)]);
    assert_eq!(names(&mut vms), ["web-7"]);
    // A process with the same number and another start is another process.
    let mut later = vm(7, Some("web"), Verdict::Yes);
    later.started = Some(71);
    find(&mut vms, vec![later]);
    assert_eq!(names(&mut vms), ["web"]);
}

/// Any user who may open /dev/kvm can start a process with any command line.
#[tokio::test]
async fn only_root_and_named_users_name_their_guests() {
    let mut vms = empty();
    let listed = vec![
        of_user(7, "db", 1000),
        of_user(8, "web", 0),
        of_user(9, "mail", 107),
    ];
    find(&mut vms, listed.clone());
    assert_eq!(names(&mut vms), ["kvm:1000:7", "web", "kvm:107:9"]);
    let mut vms = empty();
    vms.namers.insert(107);
    find(&mut vms, listed);
    assert_eq!(names(&mut vms), ["kvm:1000:7", "web", "mail"]);
    // The root of a container, also if another guest has no such name.
    let mut contained = of_user(7, "db", 0);
    contained.is_contained = true;
    let mut vms = empty();
    find(&mut vms, vec![contained.clone()]);
    assert_eq!(names(&mut vms), ["kvm:0:7"]);
    let mut vms = empty();
    vms.namers.insert(0);
    find(&mut vms, vec![contained]);
    assert_eq!(names(&mut vms), ["db"], "the administrator trusts it");
    let mut unknown = of_user(7, "db", 1000);
    unknown.user = None;
    find(&mut vms, vec![unknown]);
    assert_eq!(names(&mut vms), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_cannot_be_attached_to_is_reported_once() {
    let mut vms = empty();
    let no = || Verdict::No(vec!["the guest has no memory".to_owned()]);
    let take = |vms: &mut Vms, verdict| {
        find(vms, vec![vm(7, None, verdict)]);
        vms.found[&(7, 70)].is_reported
    };
    assert!(!take(&mut vms, no()));
    tokio::time::advance(REPORT_AFTER / 2).await;
    assert!(!take(&mut vms, no()));
    tokio::time::advance(REPORT_AFTER / 2).await;
    assert!(take(&mut vms, no()));
    assert!(names(&mut vms).is_empty());
    // It has started.
    take(&mut vms, Verdict::Yes);
    assert_eq!(names(&mut vms), ["firecracker-7"]);
    take(&mut vms, Verdict::Unknown("a test".to_owned()));
    assert!(names(&mut vms).is_empty());
}

#[tokio::test]
async fn a_guest_that_another_process_serves_is_left_to_it() {
    let mut vms = empty();
    let attached = || {
        let mut vm = vm(7, None, Verdict::Yes);
        vm.attacher = Some(5);
        vec![vm]
    };
    take(&mut vms, attached(), &[], &Earlier::None);
    assert!(names(&mut vms).is_empty());
    // An earlier supervisor has started the attacher, which has not given its guest's name yet.
    take(&mut vms, attached(), &[], &Earlier::Unnamed);
    assert!(names(&mut vms).is_empty());
    // The guest keeps the name that it was given when another guest had its own name.
    let named = Earlier::Named("web-7".to_owned());
    take(&mut vms, attached(), &[], &named);
    assert_eq!(names(&mut vms), ["web-7"]);
    // The guest's name is known from now on.
    take(&mut vms, attached(), &[], &Earlier::None);
    assert_eq!(names(&mut vms), ["web-7"]);
    assert!(targets(&mut vms, Owner::Other).is_empty());
    assert!(names(&mut vms).is_empty(), "it may have ended");
}

#[tokio::test]
async fn a_guest_without_a_known_owner_waits() {
    let mut vms = empty();
    let mut qemu = vm(7, Some("web"), Verdict::Yes);
    qemu.monitor.kind = Kind::Qemu;
    find(&mut vms, vec![qemu.clone()]);
    let since = vms.newest_qemu();
    assert!(since.is_some());
    assert!(targets(&mut vms, Owner::Unknown).is_empty());
    find(&mut vms, vec![qemu]);
    assert_eq!(vms.newest_qemu(), since, "it was found before");
    assert_eq!(names(&mut vms), ["web"]);
    assert_eq!(vms.newest_qemu(), None);
    // The guest has its attacher.
    assert_eq!(targets(&mut vms, Owner::Unknown), ["web"]);
}

#[tokio::test]
async fn a_user_has_a_limited_number_of_guests() {
    let mut vms = empty();
    let limit = u32::try_from(MAX_PER_USER).expect("small");
    let count =
        |names: &[String], part: &str| names.iter().filter(|name| name.starts_with(part)).count();
    // Processes with low numbers, each with several VMs, and after them a process of another user.
    let mut listed: Vec<ListedVm> = (1..=limit + 9)
        .flat_map(|pid| [(); 64].map(|()| of_user(pid, "x", 1000)))
        .collect();
    listed.extend((0..limit + 9).map(|n| of_user(5000 + n, "r", 0)));
    listed.extend((0..limit + 9).map(|n| ListedVm {
        is_contained: true,
        ..of_user(6000 + n, "c", 0)
    }));
    listed.push(of_user(9000, "db", 1001));
    find(&mut vms, listed.clone());
    let first = names(&mut vms);
    assert_eq!(count(&first, "kvm:1000:"), MAX_PER_USER);
    assert_eq!(count(&first, "kvm:1001:"), 1);
    assert_eq!(count(&first, "r"), MAX_PER_USER + 9, "root has no limit");
    assert_eq!(count(&first, "kvm:0:"), MAX_PER_USER, "a container's root");
    assert_eq!(vms.crowded, BTreeSet::from([0, 1000]));
    // The same ones stay, also if others come before them.
    listed.retain(|vm| vm.pid != 1);
    find(&mut vms, listed.clone());
    let second = names(&mut vms);
    assert_eq!(count(&second, "kvm:1000:"), MAX_PER_USER);
    assert!(second.contains(&format!("kvm:1000:{}", limit + 1)));
    listed.insert(0, of_user(1, "x", 1000));
    find(&mut vms, listed);
    assert_eq!(names(&mut vms), second);
}
