// SPDX-License-Identifier: Apache-2.0
//! Calls that the policy has allowed.

use bytes::Bytes;
use patchbay_access::identity::Identity;
use patchbay_access::policy::{KeyRule, Permission, Role};
use patchbay_proto::scope::{PersonScope, Scope, ScopeRule};
use prost::Message;
use tonic::Status;

use super::status;

/// A call that the policy allows.
#[derive(Clone, Debug)]
pub struct Allowed {
    /// The name of the rule, for the audit log. If rules limit keys, this contains the names of all
    /// rules among which the monitor chooses.
    pub rule: String,
    /// The role to which the call is limited.
    pub role: Role,
    /// The rules that limit the keys of the call; empty if none does.
    pub keys: Vec<KeyRule>,
    /// The person for whom the call is made, and the rules that limit the person's keys; `None` if
    /// no rule does.
    person: Option<(String, Vec<KeyRule>)>,
}

impl Allowed {
    /// Returns the permission of a rule that does not limit keys.
    pub fn by(rule: String, role: Role) -> Self {
        Self {
            rule,
            role,
            keys: vec![],
            person: None,
        }
    }

    /// Limits this permission to what `bounds` also gives the person.
    pub fn bounded(mut self, person: &str, bounds: Self) -> Self {
        self.rule = format!("{}; for {person}: {}", self.rule, bounds.rule);
        self.role = self.role.min(bounds.role);
        if !bounds.keys.is_empty() {
            self.person = Some((person.to_owned(), bounds.keys));
        }
        self
    }

    /// Returns the permission for a call that needs the role `needed` and changes keys.
    pub fn keys(permission: Permission, needed: Role) -> Self {
        match permission {
            Permission::Every { rule, role } => Self::by(rule, role),
            Permission::Some(keys) => {
                let names: Vec<&str> = keys.iter().map(|rule| rule.name.as_str()).collect();
                Self {
                    rule: names.join(" or "),
                    // The rules may give different roles. Each of these roles includes the needed
                    // one.
                    role: needed,
                    keys,
                    person: None,
                }
            }
        }
    }

    /// Returns whether another permission gives the same rights. The comparison ignores whether a
    /// cap on guests is reached.
    pub fn is_like(&self, other: &Self) -> bool {
        let same = |(a, b): (&KeyRule, &KeyRule)| {
            (&a.name, &a.keys, a.max_keys) == (&b.name, &b.keys, b.max_keys)
        };
        self.role == other.role
            && self.keys.len() == other.keys.len()
            && self.keys.iter().zip(&other.keys).all(same)
    }

    /// Returns the scope that is asserted to the monitor; `None` if no rule limits keys.
    pub fn scope(&self, identity: &Identity) -> Option<Scope> {
        let rule = |rule: &KeyRule| ScopeRule {
            name: rule.name.clone(),
            keys: rule.keys.clone(),
            max_keys: rule
                .max_keys
                .map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
            exhausted: rule.exhausted.clone(),
        };
        let rules = |keys: &[KeyRule]| keys.iter().map(rule).collect::<Vec<_>>();
        let person = self.person.as_ref().map(|(name, keys)| PersonScope {
            name: name.clone(),
            rules: rules(keys),
        });
        let own = match (self.keys.is_empty(), &person) {
            (true, None) => return None,
            // The caller's own rule covers every key.
            (true, Some(_)) => vec![ScopeRule {
                name: self.rule.clone(),
                ..ScopeRule::default()
            }],
            (false, _) => rules(&self.keys),
        };
        let proof = identity.certificate.as_ref();
        Some(Scope {
            rules: own,
            expires: proof.map_or(0, |proof| proof.not_after),
            person,
        })
    }
}

/// Decodes a request.
pub fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| {
        status::invalid("request", &format!("the request cannot be read: {error}"))
    })
}
