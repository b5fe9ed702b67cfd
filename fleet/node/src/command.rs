// SPDX-License-Identifier: Apache-2.0
//! Runs the commands `policy`, `audit` and `certs`. `patchbay` runs them under its own name, so the
//! help of the daemon does not list them.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use patchbay_proto::text::printable_json;
use rustix::process::geteuid;

use static_keys::Patterns;

use patchbay_access::audit::{self, AuditError};
use patchbay_access::certs::{self, CertsError};
use patchbay_access::policy::{Decision, Policy, PolicyError, Question, Role, Want};

/// The policy of a host that uses the unit file.
pub const POLICY_FILE: &str = "/etc/patchbay/policy.yaml";

/// A command that does its work and ends.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check and try a policy file.
    #[command(subcommand, hide = true)]
    Policy(PolicyCommand),
    /// Read the host's audit log.
    #[command(hide = true)]
    Audit(AuditArgs),
    /// Make certificates for development.
    #[command(subcommand, hide = true)]
    Certs(CertsCommand),
}

/// Commands of `policy`.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Check a policy file and list its rules.
    Check {
        /// The policy file.
        file: PathBuf,
    },
    /// Report whether a principal may do something, and which rule decides.
    Can {
        /// The name that the connection proves: a SPIFFE id, a common name, or "uid:N".
        principal: String,
        /// The operation.
        op: CheckedAction,
        /// Keys that would change, each "name" or "module:name". A glob represents every key: only
        /// a rule without key globs and without max_keys allows it.
        keys: Vec<String>,
        /// A guest of the call; may be given several times for a change of several guests.
        #[arg(long = "guest", value_name = "NAME", required = true)]
        guests: Vec<String>,
        /// The policy file.
        #[arg(long, default_value = POLICY_FILE)]
        policy: PathBuf,
    },
}

/// An operation, with the role that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckedAction {
    /// Read guests, keys and events.
    View,
    /// Enable keys.
    Enable,
    /// Disable keys.
    Disable,
    /// Take references on keys.
    Inc,
    /// Drop references on keys.
    Dec,
    /// Arm, fire, park or disarm tracepoints.
    Trace,
    /// Pause or resume guests.
    Pause,
    /// Drop other principals' references, or change guarded keys.
    Force,
    /// Power off guests.
    Shutdown,
    /// Use a guest's console.
    Console,
}

impl CheckedAction {
    fn changes_keys(self) -> bool {
        matches!(self, Self::Enable | Self::Disable | Self::Inc | Self::Dec)
    }

    fn role(self) -> Role {
        match self {
            Self::View => Role::Viewer,
            Self::Enable | Self::Disable | Self::Inc | Self::Dec | Self::Trace | Self::Pause => {
                Role::Operator
            }
            Self::Force | Self::Shutdown | Self::Console => Role::Admin,
        }
    }
}

/// Arguments of `audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    #[command(subcommand)]
    command: AuditCommand,
    /// The path of the log.
    #[arg(long, global = true, default_value_os_t = default_audit_log())]
    log: PathBuf,
}

/// The operation on the log.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// List changes and denied calls with their outcomes.
    Show {
        /// The maximum number of lines, 1 to 1000000; the newest line is printed last.
        #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        limit: u32,
    },
    /// Check the hash chain; print the hash of the last line, to be kept elsewhere.
    Verify,
    /// Write all changes and denied calls as JSON lines.
    Export,
}

/// Commands of `certs`.
#[derive(Debug, Subcommand)]
pub enum CertsCommand {
    /// Create a CA in a folder.
    Init {
        /// The folder; it is created with mode 0700.
        #[arg(long, default_value = "patchbay-ca")]
        folder: PathBuf,
        /// The trust domain of the SPIFFE ids that the CA issues.
        #[arg(long, value_name = "DOMAIN", default_value = certs::DEFAULT_TRUST_DOMAIN)]
        trust_domain: String,
    },
    /// Issue a certificate.
    Issue {
        /// Name of the files and of the principal, whose SPIFFE id is spiffe://DOMAIN/NAME with the
        /// CA's trust domain.
        name: String,
        /// The folder of the CA.
        #[arg(long, default_value = "patchbay-ca")]
        folder: PathBuf,
        /// Issue this SPIFFE id instead, spiffe://DOMAIN/PATH.
        #[arg(long, value_name = "ID")]
        spiffe: Option<String>,
        /// Issue a certificate without a SPIFFE id. Daemons accept it only with --common-name-ca,
        /// and its common name is the principal.
        #[arg(long, conflicts_with = "spiffe")]
        common_name: bool,
        /// The name by which the host registers, or a DNS name or address that clients reach it by;
        /// may be given several times. Issues a host's certificate instead of a client's.
        #[arg(long = "host", value_name = "NAME")]
        hosts: Vec<String>,
        /// Validity of the certificate in days, 1 to 3650.
        #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

/// Returns the default path of the daemon's log. It is in the user's state folder, or under
/// /var/log for root and for users without a home folder.
#[must_use]
pub fn default_audit_log() -> PathBuf {
    if !geteuid().is_root() {
        let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(state) = folder("XDG_STATE_HOME") {
            return PathBuf::from(state).join("patchbayd/audit.jsonl");
        }
        if let Some(home) = folder("HOME") {
            return PathBuf::from(home).join(".local/state/patchbayd/audit.jsonl");
        }
    }
    PathBuf::from("/var/log/patchbayd/audit.jsonl")
}

/// Runs a command, prints its answer to `out` and remarks on it to `remarks`. Returns `false` if
/// the command succeeded and its answer is no.
///
/// # Errors
/// The reason why the command failed, with a message for the operator.
pub fn run(
    command: &Command,
    out: &mut dyn Write,
    remarks: &mut dyn Write,
) -> anyhow::Result<bool> {
    match command {
        Command::Policy(PolicyCommand::Check { file }) => check(file, out),
        Command::Policy(PolicyCommand::Can {
            principal,
            op,
            keys,
            guests,
            policy,
        }) => {
            let policy = Policy::read(policy)?;
            can(&policy, principal, *op, keys, guests, out)
        }
        Command::Audit(args) => audit_command(&args.command, &args.log, out, remarks),
        Command::Certs(command) => certs_command(command, out),
    }
}

/// Returns the exit code for an error of [`run`]: 2 if the command line, or a file given with it,
/// is wrong, otherwise 1.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    const ERROR: u8 = 1;
    const USAGE: u8 = 2;
    let is_wrong = |cause: &(dyn std::error::Error + 'static)| {
        let of_certs = cause.downcast_ref::<CertsError>();
        cause.is::<PolicyError>()
            || cause.is::<WrongArgument>()
            || of_certs.is_some_and(|error| !matches!(error, CertsError::Make(_)))
            || matches!(cause.downcast_ref(), Some(AuditError::File { .. }))
    };
    match error.chain().any(is_wrong) {
        true => USAGE,
        false => ERROR,
    }
}

/// An invalid argument that only the command itself can detect.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct WrongArgument(String);

fn check(file: &Path, out: &mut dyn Write) -> anyhow::Result<bool> {
    let policy = Policy::read(file)?;
    for rule in policy.rules() {
        writeln!(out, "{rule}")?;
    }
    writeln!(
        out,
        "{}: {} rules, none malformed",
        file.display(),
        policy.rules().len()
    )?;
    Ok(true)
}

fn can(
    policy: &Policy,
    principal: &str,
    op: CheckedAction,
    keys: &[String],
    guests: &[String],
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let wrong = |text: String| Err(anyhow::Error::new(WrongArgument(text)));
    if let Some(glob) = guests.iter().find(|guest| is_glob(guest)) {
        return wrong(format!(
            "--guest {glob:?} is not the name of a guest; ask about each guest that the glob would select"
        ));
    }
    if let Err(error) = Patterns::parse(keys) {
        return wrong(error.to_string());
    }
    // Without a key's name, a rule for other keys would seem to allow the change.
    if keys.is_empty() && op.changes_keys() {
        return wrong(
            "the question names no keys; name those that would change, after the operation"
                .to_owned(),
        );
    }
    let guests: Vec<&str> = guests.iter().map(String::as_str).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let globs = keys.iter().any(|key| is_glob(key));
    let decision = policy.decide(&Question {
        principal,
        role: op.role(),
        guests: &guests,
        want: match names.as_slice() {
            [] => Want::Nothing,
            _ if globs => Want::AnyKeys,
            names => Want::Keys(names),
        },
    });
    match decision {
        Decision::Allowed { rule, role } => {
            writeln!(out, "yes: rule {rule:?} gives {principal} the role {role}")?;
            Ok(true)
        }
        Decision::Denied { why } => {
            writeln!(out, "no: {why}")?;
            if globs {
                writeln!(
                    out,
                    "a change by patterns is also allowed if the rule covers every key that they select in the guest"
                )?;
            }
            Ok(false)
        }
    }
}

fn is_glob(name: &str) -> bool {
    name.contains(['*', '?', '[']) || name.starts_with('!')
}

fn audit_command(
    command: &AuditCommand,
    log: &Path,
    out: &mut dyn Write,
    remarks: &mut dyn Write,
) -> anyhow::Result<bool> {
    let (changes, chain) = audit::changes(log)?;
    match command {
        AuditCommand::Show { limit } => {
            let limit = usize::try_from(*limit)?;
            if changes.is_empty() {
                // A closed standard error is no fault of the command.
                let _ = writeln!(remarks, "patchbay: no entries found in {}", log.display());
            }
            for change in &changes[changes.len().saturating_sub(limit)..] {
                writeln!(out, "{}", audit::show(change))?;
            }
            // The daemon may be writing this line now.
            if let Some(torn) = chain.torn {
                writeln!(out, "{}", cut_short(&torn))?;
            }
        }
        AuditCommand::Verify => {
            let kept = chain.records - chain.missing;
            writeln!(out, "{}: {kept} lines, unbroken", log.display())?;
            if chain.missing > 0 {
                let missing = chain.missing;
                writeln!(
                    out,
                    "{missing} earlier lines are in older files that are no longer in this folder"
                )?;
            }
            if let Some(torn) = &chain.torn {
                writeln!(out, "{}", cut_short(torn))?;
            }
            writeln!(out, "head {}", chain.head)?;
        }
        AuditCommand::Export => {
            for change in &changes {
                let json = serde_json::to_string(change)?;
                writeln!(out, "{}", printable_json(&json))?;
            }
        }
    }
    Ok(true)
}

fn cut_short(torn: &audit::Torn) -> String {
    format!(
        "the last line, of {} bytes, is incomplete; patchbayd removes it when it starts, and records that in the log",
        torn.bytes.len()
    )
}

fn certs_command(command: &CertsCommand, out: &mut dyn Write) -> anyhow::Result<bool> {
    let issued = match command {
        CertsCommand::Init {
            folder,
            trust_domain,
        } => certs::init(folder, trust_domain)?,
        CertsCommand::Issue {
            name,
            folder,
            spiffe,
            common_name,
            hosts,
            days,
        } => certs::issue(
            folder,
            &certs::Request {
                name: name.clone(),
                spiffe: spiffe.clone(),
                common_name: *common_name,
                hosts: hosts.clone(),
                days: *days,
            },
        )?,
    };
    writeln!(out, "certificate {}", issued.certificate.display())?;
    writeln!(out, "key         {}", issued.key.display())?;
    match command {
        CertsCommand::Init { trust_domain, .. } => {
            let ca = issued.certificate.display();
            writeln!(
                out,
                "to accept certificates of this CA, start patchbayd with --client-ca {trust_domain}={ca}"
            )?;
        }
        CertsCommand::Issue { .. } => writeln!(out, "principal   {}", issued.principal)?,
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const POLICY: &str = "
rules:
  - {name: net, principals: [alice], role: operator, guests: ['web-*'], keys: ['net_*'], max_keys: 2}
  - {name: on-call, principals: ['uid:0'], role: admin}
";

    fn answer(principal: &str, op: CheckedAction, keys: &[&str], guest: &str) -> (bool, String) {
        ask(principal, op, keys, &[guest]).expect("an answer")
    }

    fn ask(
        principal: &str,
        op: CheckedAction,
        keys: &[&str],
        guests: &[&str],
    ) -> anyhow::Result<(bool, String)> {
        let policy = Policy::parse(POLICY).expect("a policy");
        let guests: Vec<String> = guests.iter().map(|guest| (*guest).to_owned()).collect();
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut out = vec![];
        let yes = can(&policy, principal, op, &keys, &guests, &mut out)?;
        Ok((yes, String::from_utf8(out).expect("text")))
    }

    #[test]
    fn the_answer_names_the_rule_that_decides() {
        let (yes, text) = answer("alice", CheckedAction::Enable, &["net_a"], "web-1");
        assert!(yes && text.contains("\"net\""), "{text}");
        let (yes, text) = answer("alice", CheckedAction::Enable, &["net_*"], "web-1");
        assert!(!yes && text.contains("every key"), "{text}");
        let (yes, text) = answer("alice", CheckedAction::Enable, &["ext4_x"], "web-1");
        assert!(!yes && text.contains("ext4_x"), "{text}");
        let (yes, text) = answer("alice", CheckedAction::Shutdown, &[], "web-1");
        assert!(!yes && text.contains("admin"), "{text}");
        let (yes, text) = answer("uid:0", CheckedAction::Enable, &["net_*"], "db-1");
        assert!(yes && text.contains("on-call"), "{text}");
        let (yes, text) = answer("bob", CheckedAction::View, &[], "web-1");
        assert!(!yes && text.contains("bob"), "{text}");
    }

    /// Checks that a rule about other guests allows nothing on this guest.
    #[test]
    fn a_question_names_its_guests() {
        let (yes, text) = answer("alice", CheckedAction::Enable, &["net_a"], "db-1");
        assert!(!yes && text.contains("guest \"db-1\""), "{text}");
        let both = ask(
            "alice",
            CheckedAction::Enable,
            &["net_a"],
            &["web-1", "db-1"],
        );
        assert!(!both.expect("an answer").0);
        let words = ["x", "policy", "can", "alice", "enable", "net_a"];
        let parsed = TestLine::try_parse_from(words);
        let why = parsed.expect_err("no guest").to_string();
        assert!(why.contains("--guest <NAME>"), "{why}");
        for (guest, key) in [("web-*", "net_a"), ("web-1", "net_["), ("web-1", "!")] {
            let error =
                ask("alice", CheckedAction::Enable, &[key], &[guest]).expect_err("malformed");
            assert_eq!(exit_code(&error), 2, "{error}");
        }
    }

    #[derive(Debug, clap::Parser)]
    struct TestLine {
        #[command(subcommand)]
        command: Command,
    }

    #[test]
    fn a_wrong_argument_or_file_has_the_exit_code_of_a_wrong_command_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("policy"), "rules: 7").expect("written");
        std::fs::write(path("log"), "{}\n").expect("written");
        let (policy, log, nowhere) = (path("policy"), path("log"), path("nowhere"));
        std::fs::write(path("good"), POLICY).expect("written");
        let good = path("good");
        let can = ["policy", "can", "a", "view", "--guest", "g", "--policy"];
        let enable = [
            "policy", "can", "alice", "enable", "--guest", "web-1", "--policy",
        ];
        for (code, words) in [
            (2, &["policy", "check", &nowhere][..]),
            (2, &["policy", "check", &policy]),
            (2, &[&can[..], &[nowhere.as_str()]].concat()),
            (2, &[&enable[..], &[good.as_str()]].concat()),
            (2, &["audit", "--log", &nowhere, "show"]),
            (1, &["audit", "--log", &log, "verify"]),
            (2, &["certs", "issue", "../x"]),
            (2, &["certs", "issue", "alice", "--folder", &nowhere]),
        ] {
            let line = TestLine::try_parse_from([&["x"], words].concat()).expect("parsed");
            let error = run(&line.command, &mut vec![], &mut vec![]).expect_err("refused");
            assert_eq!(exit_code(&error), code, "{words:?}: {error:#}");
        }
    }

    #[test]
    fn an_empty_audit_log_is_said_to_be_empty() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let name = log.path().display().to_string();
        for (verb, expected) in [
            ("show", format!("patchbay: no entries found in {name}\n")),
            ("export", String::new()),
        ] {
            let line = TestLine::try_parse_from(["x", "audit", "--log", &name, verb]);
            let (mut out, mut said) = (vec![], vec![]);
            let done = run(&line.expect("parsed").command, &mut out, &mut said);
            assert!(done.expect("read") && out.is_empty(), "{verb}");
            assert_eq!(String::from_utf8_lossy(&said), expected, "{verb}");
        }
    }

    #[test]
    fn a_policy_file_is_checked_with_its_name() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), POLICY).expect("written");
        let mut out = vec![];
        assert!(check(file.path(), &mut out).expect("checked"));
        let text = String::from_utf8(out).expect("text");
        assert!(
            text.contains("net: operator") && text.contains("2 rules"),
            "{text}"
        );
        std::fs::write(file.path(), "rules: 7").expect("written");
        let error = check(file.path(), &mut vec![]).expect_err("malformed");
        let name = file.path().display().to_string();
        assert_eq!(format!("{error:#}").matches(&name).count(), 1, "{error:#}");
        let missing = Path::new("/nowhere.yaml");
        let error = check(missing, &mut vec![]).expect_err("missing");
        let text = format!("{error:#}");
        assert_eq!(text.matches("/nowhere.yaml").count(), 1, "{text}");
    }
}
