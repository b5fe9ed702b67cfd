// SPDX-License-Identifier: Apache-2.0
//! Tests a guest as a distribution sets it up: Debian with systemd on a virtio disk, and the agent
//! as its service.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use patchbay_proto::v1::ShutdownGuestRequest;
use patchbay_tests::{Environment, Guest, SHELL_READS, copy_disk, debugfs};

const FORK: &str = "sched:sched_process_fork";

/// Returns a copy of the distribution's disk with the agent, its unit, and a shell on the console.
fn install(disk: &Path, agent: &Path, folder: &Path) -> Result<PathBuf> {
    let image = copy_disk(disk, folder)?;
    let shell = folder.join("shell.service");
    let run = format!("stty -echo; trap : INT; echo {SHELL_READS}; . /dev/tty");
    std::fs::write(
        &shell,
        format!(
            "[Service]\nType=idle\nExecStart=/bin/sh -c '{run}'\nTTYPath=/dev/ttyS0\n\
             StandardInput=tty\nStandardOutput=tty\nStandardError=tty\n"
        ),
    )?;
    let unit = Path::new("../guest-agent/patchbay-agent.service");
    let units = "/etc/systemd/system";
    let wants = format!("{units}/multi-user.target.wants");
    let mut commands = format!(
        "write {} /usr/sbin/patchbay-agent\nset_inode_field /usr/sbin/patchbay-agent mode 0100755\n",
        agent.display()
    );
    for (name, file) in [("patchbay-agent", unit), ("shell", &shell)] {
        commands += &format!(
            "write {} {units}/{name}.service\nsymlink {wants}/{name}.service ../{name}.service\n",
            file.display()
        );
    }
    debugfs(&image, &commands)?;
    Ok(image)
}

/// Fires the event, and checks that a fork of the guest's shell is reported.
async fn sees_forks(guest: &mut Guest) -> Result<()> {
    let mut events = guest.events().await?;
    guest.fire(&[FORK]).await?;
    guest.shell("/bin/true").await?;
    events.until(|event| event.name == FORK).await?;
    guest.park(&[FORK]).await?;
    Ok(())
}

#[tokio::test]
async fn debian_boots_from_its_disk_and_its_agent_is_a_service() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let Some((disk, agent)) = Environment::root_disk_and_agent() else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let image = install(&disk, &agent, folder.path())?;
    let mut guest = Guest::builder(&environment)
        .root_disk(&image)
        .command_line("systemd.getty_auto=0")
        .acpi()
        .agent()
        .boot()
        .await?;
    guest.assert_registered().await?;
    guest.wait_for_agent().await?;
    let failed = guest
        .shell("systemctl list-units --failed --plain --no-legend")
        .await?;
    ensure!(failed.is_empty(), "systemd could not start: {failed}");
    let root = guest
        .shell("findmnt --noheadings --output SOURCE /")
        .await?;
    ensure!(root.trim() == "/dev/vda", "the root is {root}");

    guest.arm(&[FORK]).await?;
    sees_forks(&mut guest).await?;
    // The agent that systemd restarts keeps the armed events.
    let agents = "systemctl show --value --property NRestarts patchbay-agent";
    guest
        .shell("systemctl kill --signal KILL patchbay-agent")
        .await?;
    guest
        .shell(&format!("until [ \"$({agents})\" = 1 ]; do :; done"))
        .await?;
    sees_forks(&mut guest).await?;
    guest.disarm(&[FORK]).await?;

    guest.shell("echo kept >/root/note").await?;
    guest.assert_no_warnings().await?;
    // systemd-logind listens to the power button.
    let request = ShutdownGuestRequest {
        timeout: Some(prost_types::Duration {
            seconds: 600,
            nanos: 0,
        }),
        ..Default::default()
    };
    let response = guest.guest_service().shutdown_guest(request).await?;
    ensure!(!response.into_inner().power_cut, "systemd did not listen");
    let status = guest.wait().await?;
    ensure!(status.success(), "{status}: {}", guest.monitor_log());
    let note = debugfs(&image, "cat /root/note\n")?;
    ensure!(note.contains("\nkept\n"), "{note}");
    Ok(())
}
