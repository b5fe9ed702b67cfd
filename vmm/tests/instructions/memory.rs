// SPDX-License-Identifier: Apache-2.0
//! The memory that a process uses for a guest at rest. It is measured without valgrind, in a
//! separate process for each row.

use std::fmt::Write;
use std::process::Command;

use patchbay_proto::v1::ListStaticKeysRequest;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;

use super::callgrind::{self, Program};
use super::costs::{self, DIFFERENCE};
use super::kernel::Kernel;
use super::node;
use super::served::{self, Service, Setup, Tables, settle};

/// Prefix of the line with the numbers of a process.
const MARK: &str = "memory ";
/// The number of guests of the daemon.
const GUESTS: usize = 1000;
/// The largest number of keys in a page of a list.
const PAGE: i32 = 10_000;

/// A row: its name, and the process that is measured.
pub struct Row {
    pub name: &'static str,
    work: Work,
    /// The test measures the row too, and not only the command.
    pub is_tested: bool,
}

enum Work {
    /// The service of a guest, after a client has listed all keys and disconnected. The guest's
    /// memory is not included.
    Service(Kernel, Tables),
    /// The daemon in front of this number of guests, divided by the number.
    Daemon(usize),
}

/// The 6.18 cloud kernel of Debian has 5,845 keys and 10,090 sites.
const STOCK: Kernel = Kernel::new(5845, 2);

pub const ROWS: &[Row] = &[
    Row {
        name: "memory: the service, 1 key",
        work: Work::Service(Kernel::new(1, 1), Tables::Registered),
        is_tested: true,
    },
    Row {
        name: "memory: the service, 1,000 keys",
        work: Work::Service(Kernel::new(1000, 1), Tables::Registered),
        is_tested: true,
    },
    Row {
        name: "memory: the service, found: 5,845 keys with 2 sites",
        work: Work::Service(STOCK, Tables::Found),
        is_tested: true,
    },
    Row {
        name: "memory: the service, found: 5,845 lines of dynamic debug",
        work: Work::Service(STOCK, Tables::DebugLines),
        is_tested: true,
    },
    Row {
        name: "memory: patchbayd, each of 1,000 guests",
        work: Work::Daemon(GUESTS),
        is_tested: false,
    },
];

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// The bytes that the process has allocated and not freed.
    pub heap: u64,
    /// The private pages of the process, which include freed memory and stacks.
    pub resident: u64,
}

impl Use {
    /// Returns the memory of this process.
    fn now() -> Self {
        // SAFETY: the function only reads the statistics of the allocator.
        let heap = unsafe { libc::mallinfo2() };
        let status = std::fs::read_to_string("/proc/self/status").expect("this process");
        let anonymous = status.lines().find_map(|line| {
            let words = line.strip_prefix("RssAnon:")?;
            words.split_whitespace().next()?.parse::<u64>().ok()
        });
        Self {
            heap: (heap.uordblks + heap.hblkhd) as u64,
            resident: anonymous.expect("in kB") * 1024,
        }
    }

    /// Describes the difference if the allocated memory differs too much from the baseline.
    pub fn difference(self, name: &str) -> Option<String> {
        let Some([before]) = costs::baseline(name) else {
            return Some(format!("{name}: the baseline has no such row"));
        };
        let is_near = self.heap.abs_diff(before) * 100 <= before * DIFFERENCE;
        (!is_near).then(|| {
            format!(
                "{name}: {} bytes are allocated, over {DIFFERENCE} % more or less than the \
                 baseline of {before}",
                self.heap
            )
        })
    }

    /// Returns the growth since `before`, for each of `count`.
    fn since(self, before: Self, count: u64) -> Self {
        Self {
            heap: self.heap.saturating_sub(before.heap) / count,
            resident: self.resident.saturating_sub(before.resident) / count,
        }
    }
}

/// Performs a row in this process and prints its numbers. Returns `false` if there is no such row.
pub fn perform(name: &str) -> bool {
    let Some(row) = ROWS.iter().find(|row| row.name == name) else {
        return false;
    };
    let growth = match row.work {
        Work::Service(kernel, tables) => of_service(kernel, tables),
        Work::Daemon(guests) => of_daemon(guests),
    };
    println!("\n{MARK}{} {}", growth.heap, growth.resident);
    true
}

fn of_service(kernel: Kernel, tables: Tables) -> Use {
    let setup = Setup::new(kernel, tables);
    let before = Use::now();
    let service = Service::start(setup);
    list_keys(&service, kernel.keys);
    settle();
    Use::now().since(before, 1)
}

/// Lists all keys. The client's thread and memory are gone when this returns.
fn list_keys(service: &Service, keys: u64) {
    let socket = service.socket();
    let client = move || {
        served::runtime().block_on(async {
            let mut client = StaticKeysServiceClient::new(served::connect(&socket).await);
            let request = ListStaticKeysRequest {
                page_size: PAGE,
                ..Default::default()
            };
            let page = client.list_static_keys(request).await.expect("a list");
            assert_eq!(page.into_inner().keys.len() as u64, keys);
        });
    };
    std::thread::spawn(client).join().expect("no panic");
}

fn of_daemon(guests: usize) -> Use {
    let settled = |guests| {
        let daemon = node::Daemon::start(guests);
        let connect = async || drop(daemon.connect().await);
        served::runtime().block_on(connect());
        settle();
        (Use::now(), daemon)
    };
    let (before, _one) = settled(1);
    let (after, _many) = settled(guests);
    after.since(before, guests as u64)
}

/// Measures a row in a process of its own.
pub fn measure(row: &Row) -> Use {
    let output = Command::new(Program::executable())
        .args(["--exact", super::TEST, "--nocapture"])
        .env(callgrind::ROW, row.name)
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers = text.lines().find_map(|line| {
        let (heap, resident) = line.strip_prefix(MARK)?.split_once(' ')?;
        Some((heap.parse().ok()?, resident.parse().ok()?))
    });
    let errors = String::from_utf8_lossy(&output.stderr);
    let (heap, resident) = numbers.unwrap_or_else(|| panic!("{}: {text}{errors}", row.name));
    Use { heap, resident }
}

/// Formats the rows as a table.
pub fn table(uses: &[(&str, Use)]) -> String {
    let mut table =
        "| bytes in use for a guest at rest | allocated | private pages |\n|---|---|---|\n"
            .to_owned();
    for (name, of) in uses {
        let _ = writeln!(table, "| {name} | {} | {} |", of.heap, of.resident);
    }
    table
}
