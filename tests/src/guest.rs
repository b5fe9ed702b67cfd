// SPDX-License-Identifier: Apache-2.0
//! Boots guests with the kernels, modules and programs that `cargo xtask` builds.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use patchbay_proto::v1::DescribeAgentResponse;
use patchbay_testing::{Guest, GuestBuilder};

use crate::environment::{Environment, StockKernel};

/// The agent's instance of the guest's tracefs.
pub const AGENT_INSTANCE: &str = "/sys/kernel/tracing/instances/patchbay";

/// The guest's directory with a directory for each of the module's keys.
pub const TEST_KEYS: &str = "/sys/kernel/debug/patchbay_test/keys";

/// A key's state as the guest sees it.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// The count in memory.
    pub raw: i32,
    /// The result of `static_key_count()`.
    pub count: i32,
    /// The likely branch is taken.
    pub likely: bool,
    /// The unlikely branch is taken.
    pub unlikely: bool,
}

/// Configures a guest with 1 vCPU, 256 MiB and the patched kernel.
impl From<&Environment> for GuestBuilder {
    fn from(environment: &Environment) -> Self {
        Self::new(&environment.kernel)
            .monitor(&environment.monitor)
            .initramfs(&environment.initramfs)
            .symbols(&environment.vmlinux)
            .memory("256M")
            // Most tests cover the MP table; tests of ACPI call `acpi`.
            .no_acpi()
    }
}

/// Returns a copy of a guest that is booted and prepared once: by the first test that needs it,
/// which saves it in the folder that `PATCHBAY_TEST_SNAPSHOTS` names. Without the variable, boots
/// and prepares a guest. Guests of the same `name` are prepared in the same way.
async fn once<T>(
    name: &str,
    environment: &Environment,
    builder: GuestBuilder,
    prepare: impl AsyncFnOnce(&mut Guest) -> Result<T>,
) -> Result<Guest> {
    let Some(folder) = std::env::var_os("PATCHBAY_TEST_SNAPSHOTS").map(PathBuf::from) else {
        let mut guest = builder.boot().await?;
        prepare(&mut guest).await?;
        return Ok(guest);
    };
    // Tests run with several kernels.
    let mut hasher = DefaultHasher::new();
    (&environment.kernel, &environment.initramfs).hash(&mut hasher);
    let snapshot = folder.join(format!("{name}-{:x}", hasher.finish()));
    std::fs::create_dir_all(&folder)?;
    let lock = File::create(snapshot.with_extension("lock"))?;
    lock.lock()?;
    if !snapshot.exists() {
        let mut guest = builder.clone().boot().await?;
        prepare(&mut guest).await?;
        guest.snapshot(&snapshot).await?;
    }
    drop(lock);
    builder.from_snapshot(&snapshot).boot().await
}

/// Operations on a guest with our kernels, modules and agent.
#[expect(
    async_fn_in_trait,
    reason = "implemented here alone, and tests await on one thread"
)]
pub trait TestGuest {
    /// Configures a guest with 1 vCPU, 512 MiB, ACPI and a kernel of a distribution, which does not
    /// register.
    fn stock(kernel: &StockKernel) -> GuestBuilder;

    /// Boots a guest with the keys of the kernel module `patchbay_test`, whose monitor permits
    /// changes of guarded keys. If the test is skipped, prints the reason and returns `None`.
    async fn with_test_keys(vcpus: u32) -> Result<Option<Guest>>;

    /// Boots a guest that has registered and whose agent is connected; `None` if no guest can run
    /// here.
    async fn with_agent() -> Result<Option<Guest>>;

    /// Reads a key of `patchbay_test` through the guest.
    async fn seen(&mut self, key: &str) -> Result<Seen>;

    /// Lists the events to which the agent has attached probes, one per line.
    async fn attached(&mut self) -> Result<String>;

    /// Kills the agent in the guest, so that it cannot clean up, and waits until it is gone.
    async fn kill_agent(&mut self) -> Result<()>;

    /// Starts an agent in the guest, as the guest's init does, and waits until the agent is
    /// connected.
    async fn start_agent(&mut self) -> Result<DescribeAgentResponse>;

    /// Returns the number of events that the guest's kernel has recorded for the agent, according
    /// to the kernel's counters. Events that the agent has not read yet are included.
    async fn recorded(&mut self) -> Result<u64>;
}

impl TestGuest for Guest {
    fn stock(kernel: &StockKernel) -> GuestBuilder {
        Guest::builder(&kernel.kernel)
            .monitor(&kernel.monitor)
            .initramfs(&kernel.initramfs)
    }

    async fn with_test_keys(vcpus: u32) -> Result<Option<Guest>> {
        let Some(environment) = Environment::linux_guest() else {
            return Ok(None);
        };
        let builder = Guest::builder(&environment)
            .vcpus(vcpus)
            .argument("--allow-guarded");
        let name = format!("test-keys-{vcpus}");
        let guest = once(&name, &environment, builder, async |guest| {
            guest.shell("insmod /lib/modules/patchbay_test.ko").await
        });
        let mut guest = guest.await?;
        guest.assert_registered().await?;
        Ok(Some(guest))
    }

    async fn with_agent() -> Result<Option<Guest>> {
        let Some(environment) = Environment::linux_guest() else {
            return Ok(None);
        };
        let builder = Guest::builder(&environment).agent();
        let guest = once("agent", &environment, builder, async |guest| {
            guest.wait_for_agent().await.map(drop)
        });
        let mut guest = guest.await?;
        guest.assert_registered().await?;
        guest.wait_for_agent().await?;
        Ok(Some(guest))
    }

    async fn seen(&mut self, key: &str) -> Result<Seen> {
        let text = self
            .shell(&format!(
                "cd {TEST_KEYS}/{key} && cat raw count likely unlikely; cd /"
            ))
            .await?;
        let numbers: Vec<i32> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let [raw, count, likely, unlikely] = numbers[..] else {
            bail!("expected four numbers, found: {text}");
        };
        Ok(Seen {
            raw,
            count,
            likely: likely != 0,
            unlikely: unlikely != 0,
        })
    }

    async fn attached(&mut self) -> Result<String> {
        self.shell(&format!("cat {AGENT_INSTANCE}/set_event")).await
    }

    async fn kill_agent(&mut self) -> Result<()> {
        self.shell("kill -KILL $(pidof patchbay-agent)").await?;
        self.wait_for_no_agent().await?;
        Ok(())
    }

    async fn start_agent(&mut self) -> Result<DescribeAgentResponse> {
        self.shell("patchbay-agent </dev/null >/dev/kmsg 2>&1 &")
            .await?;
        self.wait_for_agent().await
    }

    async fn recorded(&mut self) -> Result<u64> {
        let stats = format!("cat {AGENT_INSTANCE}/per_cpu/cpu*/stats");
        let output = self.shell(&stats).await?;
        let mut sum = 0;
        let mut seen = BTreeSet::new();
        for line in output.lines() {
            let Some((name, value)) = line.trim().split_once(": ") else {
                continue;
            };
            if matches!(name, "entries" | "overrun" | "read events") {
                seen.insert(name);
                sum += value.parse::<u64>()?;
            }
        }
        ensure!(
            seen.len() == 3,
            "the kernel's counts are missing:\n{output}"
        );
        Ok(sum)
    }
}
