// SPDX-License-Identifier: Apache-2.0
//! The guest's static keys: the registration, the holds of clients, and the only thread that
//! changes keys.
//!
//! ```text
//!  vCPU threads ── requests ──▶ Registry ── snapshots ──┬──▶ Executor (one thread) ──▶ pause, commit
//!                                   │                   │       │  ▲
//!                                   ▼                   ▼       │  │ commands
//!  watchers ◀──────────────────  Journal ◀──────────────────────┘  │
//!  clients ──────────────────▶  Keys (list, get, holds) ───────────┘
//! ```

mod advice;
pub mod audit;
mod boot;
pub mod claims;
mod clock;
pub mod debug;
mod debug_list;
pub mod declared;
mod draft;
mod error;
mod estimate;
mod executor;
mod gate;
mod handle;
mod hold_list;
mod holds;
mod incarnation;
mod journal;
mod near;
mod outcome;
mod pages;
mod paging;
mod planned;
mod plans;
mod quarantine;
mod refused;
mod registration;
pub mod registry;
pub mod replay;
mod request;
mod scope;
mod selection;
mod shared;
pub mod symbols;
mod text_checker;
mod torn;
mod verify;
mod view;

pub use self::advice::{Advice, Known, Safety};
pub use self::clock::{Clock, SystemClock};
pub use self::debug_list::{DebugListQuery, DebugPage, DebugView};
pub use self::error::{ClaimRefusal, KeyRefusal, KeysError, RefusedKey};
pub use self::gate::ClosedGate;
pub use self::handle::{Keys, KeysConfig};
pub use self::hold_list::{HoldPage, HoldQuery};
pub use self::holds::{Hold, Holds, KeyInstance, Taking};
pub use self::incarnation::{HoldId, Incarnation};
pub use self::journal::{Author, Event, Events, Journal, Limits, Revision, Watcher};
pub use self::outcome::{
    FlipReport, HoldView, KeyOutcome, LeftOut, PauseOutcome, PauseState, PauseTimes, PlanUsage,
    PrepareOutcome, RepairOutcome, RepairedSite, UpdateOutcome, UpdateSummary,
};
pub use self::pages::ResultsPage;
pub(crate) use self::paging::PAGE_BYTES;
pub use self::quarantine::{Quarantine, QuarantineCause};
pub use self::registry::{Description, KernelTables, Refused, RegistrationPhase, Registry};
pub use self::request::{
    CommitRequest, DiscardRequest, KeyUpdate, ListQuery, MAX_UPDATES, PauseRequest, PrepareRequest,
    ReleaseRequest, RenewRequest, RepairRequest, SaveRequest, Selection, Target, TracepointUpdate,
    UpdateRequest,
};
pub use self::scope::{Caller, KeyScope, Use};
pub use self::torn::TornKey;
pub use self::verify::{MAX_TORN, Verification};
pub use self::view::{KeyDetails, KeyPage, KeyView, SiteView};
