// SPDX-License-Identifier: Apache-2.0
//! Decides by a list of rules who may do what. The first rule that allows a call decides. A call
//! that no rule allows is denied.
//!
//! ```yaml
//! rules:
//!   - name: on-call
//!     principals: ["spiffe://example.org/on-call/*", "uid:0"]
//!     role: admin
//!   - name: network team
//!     principals: ["spiffe://example.org/net/*"]
//!     role: operator
//!     guests: ["web-*"]
//!     keys: ["net_*", "!net_high*"]
//!     max_guests: 50         # guests that one principal may change in an hour
//!     max_keys: 200          # and keys in each of them
//!   - name: everybody
//!     principals: ["*"]
//!     role: viewer
//! approvals:               # of rollouts; the controller alone uses them
//!   - keys: ["net_*"]
//!     min: 2                 # different principals
//!     planner_may_approve: false
//! revoked_certificates: []   # SHA-256 of certificates that are no longer accepted
//! ```
//!
//! Principals, guests and keys are globs in the syntax that Patchbay uses everywhere. In a
//! principal, `*` does not match a slash: `spiffe://example.org/net/*` matches the ids directly
//! below `net`, and `spiffe://example.org/net/**` matches all ids below it. A lone `*` matches
//! everybody. A pattern with `!` excludes the ids that it matches and all ids below them. A rule
//! without `guests` or `keys` covers all of them.
//!
//! # Persons
//!
//! A controller makes calls for persons, and names the person in a signed assertion
//! ([`crate::assertion`]). A rule with `may_assert: true` lets its principals do so on its guests,
//! and the daemon refuses the assertions of all others. Without a policy file, root and the
//! daemon's own user may assert.
//!
//! ```yaml
//!   - name: controller
//!     principals: ["spiffe://example.org/fleet"]
//!     role: operator
//!     may_assert: true
//! ```
//!
//! An assertion grants no rights: the controller's own rules must allow the call. If a rule names
//! the person, the rules must also allow the call for the person, with roles, guests, keys and caps
//! as if the person had made it. A rule whose only pattern for the person is `*` or `**` does not
//! name the person in this sense. Otherwise a rule that makes everybody a viewer would block every
//! rollout. For a person whom no rule names, only the controller's rights count. Hosts need not
//! know all persons of a fleet, because the controller's policy decides about their rights. To
//! limit all persons of a domain, name them: `spiffe://example.org/people/**`. An assertion about
//! `uid:N` means a user of the controller's machine, and the rules for `uid:N` apply to it too.
//! Rules for the person do not apply when claims end, so that everyone who may abort a rollout can
//! do so.
//!
//! # Approvals
//!
//! If a rollout claims a key that an entry of `approvals` covers, it needs `min` approvals. The
//! planner's approval does not count if `planner_may_approve` is false; the default is true. An
//! entry without `keys` covers all keys. The role `break-glass` allows the same as `operator`. In
//! the controller, it also allows to start and promote rollouts without approvals.
//!
//! # Caps
//!
//! `max_guests` limits the number of different guests that one principal may change under the rule
//! within any hour (3,600 s), and `max_keys` the number of different keys of each guest. A key or a
//! guest that is changed repeatedly counts once, until an hour after its last change. If a change
//! would exceed a cap, the rule does not allow it, and the next rule is tried. A call that only
//! releases what the principal holds is never refused by a cap. Dry runs, prepared plans and
//! refused calls are not counted. A change that was sent to a monitor is counted, even if it failed
//! there. Pausing a guest, powering it off and using its console each count as a change of the
//! guest.
//!
//! The daemon counts guests. A change of keys counts under each rule that may allow it. Only the
//! monitor can determine which keys a call changes, so the daemon sends the rules with the call
//! ([`Permission`]), and the monitor applies them and counts the keys. On the controller's page, a
//! command for a rollout counts all guests and all keys of the rollout, by name.
//!
//! The counts survive a reload of the policy. The counts of guests restart at 0 when the daemon
//! starts, and those of keys when the monitor starts. A cap in a rule for viewers is refused,
//! because viewers change nothing and the cap would have no effect.

mod approvals;
mod decide;
mod file;
mod lack;
mod live;
mod spent;

pub use self::approvals::Demand;
pub use self::decide::{Decision, KeyRule, Permission, Question, Want};
pub use patchbay_proto::methods::Role;

pub use self::file::{MAX_POLICY_BYTES, Policy, PolicyError, Rule};
pub use self::live::LivePolicy;
pub use self::spent::WINDOW;
