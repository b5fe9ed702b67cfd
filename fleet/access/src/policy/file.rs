// SPDX-License-Identifier: Apache-2.0
//! Reads and checks the policy file.

use std::fmt;
use std::io::Read;
use std::path::Path;

use patchbay_proto::methods::Role;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use static_keys::{PatternError, Patterns};

use super::approvals::{Approvals, ApprovalsInFile};

/// The maximum size of a policy file. A larger one is refused.
pub const MAX_POLICY_BYTES: u64 = 1 << 20;
/// The maximum number of approvals that a policy can demand.
pub const MAX_APPROVALS: usize = 64;
/// The name in a policy file of the role that has the rights of an operator and may break the
/// glass.
const BREAK_GLASS: &str = "break-glass";

/// A checked policy.
#[derive(Clone, Debug)]
pub struct Policy {
    pub(super) rules: Vec<Rule>,
    pub(super) approvals: Vec<Approvals>,
    revoked: Vec<String>,
}

/// A rule of the policy.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The rule's name, unique in its file.
    pub name: String,
    pub(super) principals: Patterns,
    pub(super) role: Role,
    /// True if the rule's principals may break the glass, which means that they may start and
    /// promote rollouts without approvals.
    pub(super) breaks_glass: bool,
    pub(super) guests: Patterns,
    pub(super) keys: Patterns,
    pub(super) max_keys: Option<usize>,
    pub(super) max_guests: Option<usize>,
    pub(super) may_assert: bool,
}

/// The reason why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("{path} cannot be read: {error}")]
    Read {
        /// The path of the policy file.
        path: String,
        /// The operating system's error.
        error: std::io::Error,
    },
    /// The file is larger than [`MAX_POLICY_BYTES`].
    #[error("{path} has more than {} KiB; split the principals into groups", MAX_POLICY_BYTES >> 10)]
    TooLarge {
        /// The path of the policy file.
        path: String,
    },
    /// The content of the file is invalid.
    #[error("{path}: {error}")]
    In {
        /// The path of the policy file.
        path: String,
        /// The fault.
        error: Box<PolicyError>,
    },
    /// The text is not YAML, or a field is unknown or missing. The message names line and column.
    #[error("the policy is malformed: {0}")]
    Malformed(serde_yaml_ng::Error),
    /// The policy has no rule, so no principal could do anything.
    #[error("the policy has no rule; write at least one for an admin")]
    NoRules,
    /// Two rules have the same name, so a decision could not be traced to one of them.
    #[error("rule {name:?} stands twice; give each rule its own name")]
    SameName {
        /// The name.
        name: String,
    },
    /// A rule has no principals.
    #[error("rule {rule:?} has no principals; write [\"*\"] for everybody")]
    NoPrincipals {
        /// The rule's name.
        rule: String,
    },
    /// A glob is malformed.
    #[error("rule {rule:?}, {field}: {error}")]
    Pattern {
        /// The rule's name.
        rule: String,
        /// The name of the field.
        field: &'static str,
        /// The fault of the glob.
        error: PatternError,
    },
    /// A revoked certificate is not named by its SHA-256.
    #[error(
        "revoked_certificates: {text:?} is no SHA-256 in hexadecimal; take it from `openssl x509 -fingerprint -sha256`"
    )]
    Fingerprint {
        /// The text that was given as a fingerprint.
        text: String,
    },
    /// A number of approvals is out of range.
    #[error("approvals: min is {min}; give 1 to {MAX_APPROVALS}")]
    Approvals {
        /// The number that was given.
        min: usize,
    },
    /// A glob of `approvals` is malformed.
    #[error("approvals, keys: {0}")]
    ApprovalKeys(PatternError),
    /// A rule that allows no changes has a cap.
    #[error("rule {rule:?}: {field} has no effect, because a viewer changes nothing; leave it out")]
    CapOfViewers {
        /// The rule's name.
        rule: String,
        /// The name of the field.
        field: &'static str,
    },
    /// A rule for viewers has `may_assert`.
    #[error(
        "rule {rule:?}: may_assert has no effect, because a viewer changes nothing; leave it out"
    )]
    AssertingViewers {
        /// The rule's name.
        rule: String,
    },
    /// A cap allows nothing.
    #[error(
        "rule {rule:?}: {field} is 0, so the rule allows no change; leave it out or give a number"
    )]
    ZeroCap {
        /// The rule's name.
        rule: String,
        /// The name of the field.
        field: &'static str,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    rules: Vec<RuleInFile>,
    #[serde(default)]
    approvals: Vec<ApprovalsInFile>,
    #[serde(default)]
    revoked_certificates: Vec<String>,
}

/// A role in a policy file: a role of `patchbay.v1`, and the right to break the glass.
struct RoleInFile {
    role: Role,
    breaks_glass: bool,
}

impl<'de> Deserialize<'de> for RoleInFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        if text == BREAK_GLASS {
            return Ok(Self {
                role: Role::Operator,
                breaks_glass: true,
            });
        }
        let role = text
            .parse()
            .map_err(|error| D::Error::custom(format_args!("{error}, or {BREAK_GLASS}")))?;
        Ok(Self {
            role,
            breaks_glass: false,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleInFile {
    name: String,
    principals: Vec<String>,
    role: RoleInFile,
    #[serde(default)]
    guests: Vec<String>,
    #[serde(default)]
    keys: Vec<String>,
    max_keys: Option<usize>,
    max_guests: Option<usize>,
    #[serde(default)]
    may_assert: bool,
}

impl Policy {
    /// Reads and checks a policy file.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let name = || path.display().to_string();
        let read = |error| PolicyError::Read {
            path: name(),
            error,
        };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(MAX_POLICY_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(read)?;
        if text.len() as u64 > MAX_POLICY_BYTES {
            return Err(PolicyError::TooLarge { path: name() });
        }
        Self::parse(&text).map_err(|error| PolicyError::In {
            path: name(),
            error: Box::new(error),
        })
    }

    /// Checks the text of a policy.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let file: PolicyFile = serde_yaml_ng::from_str(text).map_err(PolicyError::Malformed)?;
        if file.rules.is_empty() {
            return Err(PolicyError::NoRules);
        }
        let mut rules: Vec<Rule> = Vec::with_capacity(file.rules.len());
        for rule in file.rules {
            if rules.iter().any(|earlier| earlier.name == rule.name) {
                return Err(PolicyError::SameName { name: rule.name });
            }
            rules.push(Rule::check(rule)?);
        }
        let mut revoked = Vec::with_capacity(file.revoked_certificates.len());
        for text in file.revoked_certificates {
            let digits: String = text.chars().filter(|c| *c != ':').collect();
            if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(PolicyError::Fingerprint { text });
            }
            revoked.push(digits.to_ascii_lowercase());
        }
        let approvals = file.approvals.into_iter().map(Approvals::check);
        Ok(Self {
            rules,
            approvals: approvals.collect::<Result<_, _>>()?,
            revoked,
        })
    }

    /// Returns whether the certificate with this SHA-256 (lower-case hexadecimal) is revoked.
    #[must_use]
    pub fn has_revoked(&self, fingerprint: &str) -> bool {
        self.revoked.iter().any(|revoked| revoked == fingerprint)
    }

    /// Creates a policy with a single rule that makes this user and root admins.
    pub(super) fn own_user_only(uid: u32) -> Self {
        let users = ["uid:0".to_owned(), format!("uid:{uid}")];
        let rule = Rule {
            name: "built-in".to_owned(),
            principals: Patterns::parse(&users).unwrap_or_default(),
            role: Role::Admin,
            breaks_glass: false,
            guests: Patterns::default(),
            keys: Patterns::default(),
            max_keys: None,
            max_guests: None,
            // These users could also write a policy that allows it.
            may_assert: true,
        };
        Self {
            rules: vec![rule],
            approvals: vec![],
            revoked: vec![],
        }
    }

    /// Returns whether a rule covers only some guests.
    #[must_use]
    pub fn limits_guests(&self) -> bool {
        self.rules
            .iter()
            .any(|rule| !rule.guests.texts().is_empty())
    }

    /// Returns the rules, in the order in which they are tried.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }
}

/// Formats the rule as one line of text.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, role) = (&self.name, self.role.as_str());
        let role = if self.breaks_glass { BREAK_GLASS } else { role };
        write!(f, "{name}: {role} for {}", self.principals)?;
        for (what, patterns) in [("guests", &self.guests), ("keys", &self.keys)] {
            if !patterns.texts().is_empty() {
                write!(f, "; {what} {patterns}")?;
            }
        }
        for (what, cap) in [("max_keys", self.max_keys), ("max_guests", self.max_guests)] {
            if let Some(cap) = cap {
                write!(f, "; {what} {cap} an hour")?;
            }
        }
        if self.may_assert {
            write!(f, "; may assert for whom it acts")?;
        }
        Ok(())
    }
}

impl Rule {
    fn check(rule: RuleInFile) -> Result<Self, PolicyError> {
        let name = rule.name;
        if rule.principals.is_empty() {
            return Err(PolicyError::NoPrincipals { rule: name });
        }
        let patterns = |field, texts: &[String]| {
            Patterns::parse(texts).map_err(|error| PolicyError::Pattern {
                rule: name.clone(),
                field,
                error,
            })
        };
        let principals = patterns("principals", &rule.principals)?;
        let guests = patterns("guests", &rule.guests)?;
        let keys = patterns("keys", &rule.keys)?;
        for (field, cap) in [("max_keys", rule.max_keys), ("max_guests", rule.max_guests)] {
            if cap == Some(0) {
                return Err(PolicyError::ZeroCap { rule: name, field });
            }
            if cap.is_some() && rule.role.role == Role::Viewer {
                return Err(PolicyError::CapOfViewers { rule: name, field });
            }
        }
        if rule.may_assert && rule.role.role == Role::Viewer {
            return Err(PolicyError::AssertingViewers { rule: name });
        }
        Ok(Self {
            name,
            principals,
            role: rule.role.role,
            breaks_glass: rule.role.breaks_glass,
            guests,
            keys,
            max_keys: rule.max_keys,
            max_guests: rule.max_guests,
            may_assert: rule.may_assert,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Policy::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn a_policy_is_checked_when_it_is_read() {
        let rule = |rest: &str| format!("rules:\n  - name: a\n    principals: ['*']\n    {rest}\n");
        assert!(Policy::parse(&rule("role: viewer")).is_ok());
        let unknown = refused(&rule("role: viewer\n    gests: ['web-*']"));
        assert!(
            unknown.contains("gests") && unknown.contains("line 5"),
            "{unknown}"
        );
        assert!(refused(&rule("role: king")).contains("king"));
        assert!(refused("rules: []").contains("no rule"));
        assert!(refused("").contains("malformed"));
        assert!(refused(&rule("role: admin\n    keys: ['net_[']")).contains("net_["));
        assert!(refused(&rule("role: admin\n    max_keys: 0")).contains("max_keys"));
        for cap in ["max_keys", "max_guests"] {
            let text = refused(&rule(&format!("role: viewer\n    {cap}: 1")));
            assert!(text.contains(cap) && text.contains("no effect"), "{text}");
        }
        let viewers = refused(&rule("role: viewer\n    may_assert: true"));
        assert!(viewers.contains("may_assert"), "{viewers}");
        assert!(refused(&rule("role: admin\n    max_keys: -1")).contains("malformed"));
        let twice = format!(
            "{}{}",
            rule("role: admin"),
            rule("role: admin").trim_start_matches("rules:\n")
        );
        assert!(refused(&twice).contains("twice"), "{}", refused(&twice));
        assert!(
            refused("rules: [{name: a, role: admin, principals: []}]").contains("no principals")
        );
    }

    #[test]
    fn certificates_are_revoked_by_their_fingerprint() {
        let rules = "rules: [{name: a, principals: ['*'], role: viewer}]";
        let revoke =
            |text: &str| Policy::parse(&format!("{rules}\nrevoked_certificates: ['{text}']"));
        let (lower, colons) = ("ab".repeat(32), ["AB"; 32].join(":"));
        for text in [&lower, &colons] {
            let policy = revoke(text).expect(text);
            assert!(policy.has_revoked(&lower) && !policy.has_revoked(&"cd".repeat(32)));
        }
        for text in ["", "ab", &"x".repeat(64)] {
            let error = revoke(text).expect_err(text).to_string();
            assert!(error.contains("SHA-256"), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_too_large_is_not_parsed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = "#".repeat(usize::try_from(MAX_POLICY_BYTES).expect("small") + 1);
        std::fs::write(file.path(), text).expect("written");
        let error = Policy::read(file.path()).expect_err("too large");
        assert!(matches!(error, PolicyError::TooLarge { .. }), "{error}");
        let missing = Policy::read(Path::new("/nonexistent/policy.yaml")).expect_err("missing");
        assert!(
            missing.to_string().contains("/nonexistent/policy.yaml"),
            "{missing}"
        );
    }
}
