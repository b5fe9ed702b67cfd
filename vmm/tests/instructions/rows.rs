// SPDX-License-Identifier: Apache-2.0
//! The rows: calls and other work that is counted.

use patchbay_proto::v1::ResultView;

use super::calls::{self, Call};
use super::claims::Claims;
use super::engine;
use super::guest::Memory;
use super::kernel::Kernel;
use super::node;
use super::served::{self, Setup, Tables};

/// The number of times that the work of a row is counted. Of the two calls that change keys, one
/// turns them on and one turns them off.
pub const CALLS: u64 = 2;

/// A row: its name, and the work that is counted.
pub struct Row {
    pub name: &'static str,
    work: Work,
    is_tested: bool,
}

#[derive(Clone, Copy)]
enum Work {
    /// A call to a guest that is served.
    Served(Setup, Call),
    /// A call to one of this number of guests, through the host's daemon.
    Proxied(usize, node::Call),
    /// Work of the engine alone.
    Engine(engine::Work),
}

/// The threads of a row's process that are distinguished, besides the client.
#[derive(Clone, Copy, Default)]
pub struct Threads {
    /// The service has an executor.
    pub executor: bool,
    /// A thread simulates the agent.
    pub agent: bool,
}

const fn row(name: &'static str, keys: u64, sites: u64, call: Call) -> Row {
    let setup = Setup {
        agent: call.needs_agent(),
        ..Setup::new(Kernel::new(keys, sites), Tables::Registered)
    };
    Row {
        name,
        work: Work::Served(setup, call),
        is_tested: true,
    }
}

/// A row whose tables are found in the guest's memory.
const fn found(name: &'static str, kernel: Kernel, memory: Memory, call: Call) -> Row {
    let setup = Setup {
        kernel,
        tables: match call {
            Call::Query => Tables::DebugLines,
            _ => Tables::Found,
        },
        memory,
        agent: call.needs_agent(),
    };
    Row {
        name,
        work: Work::Served(setup, call),
        is_tested: true,
    }
}

const fn proxied(name: &'static str, guests: usize, call: node::Call) -> Row {
    Row {
        name,
        work: Work::Proxied(guests, call),
        is_tested: true,
    }
}

const fn engine(name: &'static str, work: engine::Work) -> Row {
    Row {
        name,
        work: Work::Engine(work),
        is_tested: true,
    }
}

/// Changes keys by name, with a result for each.
const fn names(count: u64) -> Call {
    let view = ResultView::Unspecified;
    Call::Names { count, view }
}

const fn names_summary(count: u64) -> Call {
    let view = ResultView::Summary;
    Call::Names { count, view }
}

/// The 6.12 cloud kernel of Debian has 772 tracepoints that need only their key to be switched.
const TRACEPOINTS: Kernel = Kernel {
    keys: 772,
    sites: 1,
    tracepoints: true,
};

pub const ROWS: &[Row] = &[
    row("a call that does nothing", 1000, 1, Call::Nothing),
    row("1 key, 1 site", 1, 1, names(1)),
    row("1 key, 56 sites", 1, 56, names(1)),
    row("1 key, 56 sites, prepared", 1, 56, Call::Commit),
    row("1 key, 1,000 sites", 1, 1000, names(1)),
    row("1 key, 10,000 sites", 1, 10_000, names(1)).untested(),
    row("1 key, 100,000 sites", 1, 100_000, names(1)),
    row("100 keys by name", 100, 1, names(100)),
    row("1,000 keys by name", 1000, 1, names(1000)),
    row("10,000 keys by name", 10_000, 1, names(10_000)).untested(),
    row("1 key by pattern, summary", 1, 1, Call::Pattern),
    row("10 keys by pattern, summary", 10, 1, Call::Pattern).untested(),
    row("100 keys by pattern, summary", 100, 1, Call::Pattern),
    row("1,000 keys by pattern, summary", 1000, 1, Call::Pattern),
    row("10,000 keys by pattern, summary", 10_000, 1, Call::Pattern).untested(),
    row("65,000 keys by pattern, summary", 65_000, 1, Call::Pattern),
    row("1,000 keys by pattern, prepared", 1000, 1, Call::Commit),
    row("1 of 1,000 keys", 1000, 1, names(1)),
    row("1 of 10,000 keys", 10_000, 1, names(1)).untested(),
    row("1 of 100,000 keys", 100_000, 1, names(1)),
    row("100 of 1,000 keys by name", 1000, 1, names(100)),
    row("100 of 10,000 keys by name", 10_000, 1, names(100)).untested(),
    row("100 of 100,000 keys by name", 100_000, 1, names(100)),
    row("no claims", 1, 1, Call::Claims(Claims::Empty)),
    row("1 claim", 1, 1, Call::Claims(Claims::Set)),
    row("100 claims", 100, 1, Call::Claims(Claims::Set)),
    row("1,000 claims", 1000, 1, Call::Claims(Claims::Set)),
    row("4,000 claims", 4000, 1, Call::Claims(Claims::Set)).untested(),
    row(
        "1,000 claims, the same again",
        1000,
        1,
        Call::Claims(Claims::Again),
    ),
    row(
        "1,000 claims, cleared",
        1000,
        1,
        Call::Claims(Claims::Clear),
    )
    .untested(),
    found(
        "found: 772 tracepoints by name, summary",
        TRACEPOINTS,
        Memory::Own,
        names_summary(TRACEPOINTS.keys),
    )
    .untested(),
    found(
        "found: 772 tracepoints fired, summary",
        TRACEPOINTS,
        Memory::Own,
        Call::Fire,
    ),
    found(
        "found: 1,000 lines of dynamic debug, summary",
        Kernel::new(1000, 1),
        Memory::Own,
        Call::Query,
    ),
    found(
        "attached, file: 1 key, 56 sites",
        Kernel::new(1, 56),
        Memory::File,
        names(1),
    )
    .untested(),
    found(
        "attached, file: 1,000 keys by pattern, summary",
        Kernel::new(1000, 1),
        Memory::File,
        Call::Pattern,
    ),
    found(
        "attached, process: 1 key, 56 sites",
        Kernel::new(1, 56),
        Memory::Process,
        names(1),
    )
    .untested(),
    found(
        "attached, process: 1,000 keys by pattern, summary",
        Kernel::new(1000, 1),
        Memory::Process,
        Call::Pattern,
    ),
    row(
        "refused: 4,096 names, the last unknown",
        1000,
        1,
        Call::UnknownName,
    ),
    row("refused: a stale plan", 1000, 1, Call::Stale),
    row("refused: a closed gate", 1000, 1, Call::ClosedGate),
    found(
        "events forwarded by an agent",
        TRACEPOINTS,
        Memory::Own,
        Call::Events,
    )
    .untested(),
    engine("2,000 events of a ring in memory", engine::Work::Ring),
    engine("a small kernel: discovered", engine::Work::Discovery),
    engine(
        "a small kernel: discovered again",
        engine::Work::Rediscovery,
    ),
    engine("a small kernel: confirmed", engine::Work::Confirmation),
    proxied(
        "patchbayd, 1 guest: a call that does nothing",
        1,
        node::Call::Nothing,
    ),
    proxied("patchbayd, 1 guest: 1 key", 1, node::Call::OneKey),
];

/// Returns the row with this name, or else the first row whose name begins with it.
pub fn named(name: &str) -> &'static Row {
    let exact = ROWS.iter().find(|row| row.name == name);
    let row = exact.or_else(|| ROWS.iter().find(|row| row.name.starts_with(name)));
    row.unwrap_or_else(|| {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        panic!("there is no row {name}; use one of {names:#?}")
    })
}

impl Row {
    /// Leaves the row out of the test, which would otherwise take too long. The command counts it.
    const fn untested(mut self) -> Self {
        self.is_tested = false;
        self
    }

    /// Returns whether the test counts the row, and not only the command.
    pub fn is_tested(&self) -> bool {
        self.is_tested
    }

    /// Performs uncounted work, and then the counted work [`CALLS`] times.
    pub fn perform(&self) {
        let runtime = served::runtime();
        match self.work {
            Work::Served(setup, call) => runtime.block_on(calls::perform(setup, call)),
            Work::Proxied(guests, call) => runtime.block_on(node::perform(guests, call)),
            Work::Engine(work) => engine::perform(work),
        }
    }

    pub fn threads(&self) -> Threads {
        match self.work {
            Work::Served(setup, _) => Threads {
                executor: true,
                agent: setup.agent,
            },
            Work::Proxied(..) | Work::Engine(_) => Threads::default(),
        }
    }

    /// Returns whether the guest is stopped in a counted call.
    pub fn stops(&self) -> bool {
        matches!(self.work, Work::Served(setup, call) if call.flipped(setup.kernel) > 0)
    }

    /// Returns whether only the executor's instructions are compared, with twice the permitted
    /// difference. After a pause the API's differ by a third between runs and the executor's by
    /// 8 %; the cause is not known.
    pub fn varies(&self) -> bool {
        matches!(self.work, Work::Served(_, Call::ClosedGate))
    }
}
