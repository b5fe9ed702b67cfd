// SPDX-License-Identifier: Apache-2.0
//! Checks that the stock clients grpcurl and Node.js can read every error of the interface through
//! the daemon.
//!
//! The monitor behind the daemon is `fleet/node/examples/refusing_monitor.rs`, which refuses each
//! call with the reason that the call names. The clients for Python and Go read the same errors in
//! tests of their own.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{Outcome, Servers, run_to_end};
use crate::step::Steps;
use crate::{cache, host};

const GRPCURL: &str = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4";
const NODE_PACKAGES: &str = "clients/stock/package.json";
const GUEST: &str = "refusing";

/// The daemon in front of the refusing monitor.
struct Refusing {
    folder: tempfile::TempDir,
    monitor: Child,
    daemon: Child,
}

impl Drop for Refusing {
    fn drop(&mut self) {
        for child in [&mut self.daemon, &mut self.monitor] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Refusing {
    fn start(servers: &Servers) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("run"))?;
        let uid = rustix::process::geteuid().as_raw();
        let policy = format!("rules: [{{name: own, principals: ['uid:{uid}'], role: admin}}]\n");
        std::fs::write(at("policy.yaml"), policy)?;
        let mut monitor = Command::new(&servers.refusing)
            .arg(at("run/refusing.sock"))
            .arg(GUEST)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be run", servers.refusing.display()))?;
        let stdout = monitor.stdout.take().context("piped")?;
        let daemon = Command::new(&servers.daemon)
            .arg("--run-dir")
            .arg(at("run"))
            .arg("--socket")
            .arg(at("node.sock"))
            .arg("--policy")
            .arg(at("policy.yaml"))
            .arg("--audit-log")
            .arg(at("audit.jsonl"))
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be run", servers.daemon.display()))?;
        let mut refusing = Self {
            folder,
            monitor,
            daemon,
        };
        wait_for(stdout, "listening")?;
        let stderr = refusing.daemon.stderr.take().context("piped")?;
        wait_for(stderr, "guest found")?;
        Ok(refusing)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("node.sock")
    }
}

/// Waits for a line with this text, and keeps reading so that the program never blocks on a full
/// pipe.
fn wait_for(output: impl Read + Send + 'static, text: &str) -> Result<()> {
    let mut lines = BufReader::new(output).lines();
    let mut read = String::new();
    for line in lines.by_ref() {
        let line = line?;
        if line.contains(text) {
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(());
        }
        read.push_str(&line);
        read.push('\n');
    }
    bail!("a server of the tests ended before {text:?}:\n{read}")
}

/// Returns the names of all reasons in errors.proto, without the prefix.
fn reasons() -> Result<Vec<String>> {
    let path = host::repository().join("proto/patchbay/v1/errors.proto");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let name = |line: &str| {
        let name = line.trim().strip_prefix("ERROR_REASON_")?;
        Some(name.split_once(" = ")?.0.to_owned())
    };
    let names = text.lines().filter_map(name);
    Ok(names.filter(|name| name != "UNSPECIFIED").collect())
}

/// Reads each reason with grpcurl, which uses grpc-go and none of our code.
pub fn grpcurl(servers: &Servers) -> Result<Outcome> {
    let grpcurl = match install_grpcurl() {
        Ok(program) => program,
        Err(error) => return Ok(Outcome::skipped("", &format!("{error:#}"))),
    };
    let refusing = Refusing::start(servers)?;
    let mut outcome = Outcome::default();
    for reason in reasons()? {
        for (method, request) in [
            (
                "UpdateStaticKeys",
                json!({"guest": GUEST, "updates": [{"name": reason, "op": "KEY_OP_INC"}]}),
            ),
            ("GetStaticKey", json!({"guest": GUEST, "name": reason})),
            (
                "WatchStaticKeys",
                json!({"guest": GUEST, "patterns": [reason]}),
            ),
        ] {
            let text = call(&grpcurl, &refusing.socket(), method, &request)?;
            if is_refused(&text, &reason) {
                outcome.passed += 1;
            } else {
                outcome.failed += 1;
                let complaint = format!("grpcurl reads {method} with {reason} as:\n{text}\n");
                outcome.output.push_str(&complaint);
            }
        }
    }
    Ok(outcome)
}

fn call(grpcurl: &Path, socket: &Path, method: &str, request: &Value) -> Result<String> {
    let mut command = Command::new(grpcurl);
    command
        .args(["-plaintext", "-unix", "-max-time", "60", "-format-error"])
        .args(["-d", &request.to_string()])
        .arg(socket)
        .arg(format!("patchbay.v1.StaticKeysService/{method}"));
    Ok(run_to_end(&mut command)?.1)
}

/// Returns whether grpcurl's JSON output is an error with this reason.
fn is_refused(text: &str, reason: &str) -> bool {
    let error: Value = text
        .find('{')
        .and_then(|start| serde_json::from_str(&text[start..]).ok())
        .unwrap_or_default();
    let details = error["details"].as_array().map_or(&[][..], Vec::as_slice);
    error["message"] == format!("refused with {reason}: “100 %”\nas asked")
        && details.iter().any(|detail| {
            detail["reason"] == reason
                && detail["domain"] == "patchbay"
                && detail["metadata"]["near"] == "näher\nund näher"
        })
}

fn install_grpcurl() -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("grpcurl 1");
    inputs.add("module", GRPCURL);
    let folder = cache::entry("go", &inputs.key(), |folder| {
        let steps = Steps::new("fetching grpcurl", &folder.join("build.log"))?;
        let mut install = Command::new("go");
        install
            .args(["install", GRPCURL])
            .env("GOBIN", folder)
            .env("GOFLAGS", "");
        steps.run(&format!("go install {GRPCURL}"), &mut install)
    })?;
    Ok(folder.join("grpcurl"))
}

/// Reads each reason with the gRPC client of Node.js.
pub fn node(servers: &Servers) -> Result<Outcome> {
    let packages = match install_node_packages() {
        Ok(packages) => packages,
        Err(error) => return Ok(Outcome::skipped("", &format!("{error:#}"))),
    };
    let refusing = Refusing::start(servers)?;
    let mut command = Command::new("node");
    command
        .arg(host::repository().join("clients/stock/errors.js"))
        .arg(packages)
        .arg(host::repository().join("proto"))
        .arg(refusing.socket());
    let (success, output) = run_to_end(&mut command)?;
    let mut outcome = of_counts(output);
    if !success || outcome.passed == 0 {
        outcome.failed = outcome.failed.max(1);
    }
    Ok(outcome)
}

fn install_node_packages() -> Result<PathBuf> {
    let runs = |program: &str| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    if !runs("node") || !runs("npm") {
        host::ensure_packages(&["nodejs", "npm"])?;
    }
    let manifest = host::repository().join(NODE_PACKAGES);
    let mut inputs = cache::Inputs::new("node 1");
    inputs.add_file("package.json", &manifest)?;
    cache::entry("node", &inputs.key(), |folder| {
        std::fs::copy(&manifest, folder.join("package.json"))?;
        let steps = Steps::new("fetching packages of Node.js", &folder.join("build.log"))?;
        let mut install = Command::new("npm");
        install
            .args(["install", "--ignore-scripts", "--no-audit", "--no-fund"])
            .current_dir(folder);
        steps.run("npm install", &mut install)
    })
}

/// Reads the last line, "5 passed, 2 failed".
fn of_counts(output: String) -> Outcome {
    let mut outcome = Outcome::default();
    for part in output.lines().last().unwrap_or_default().split(", ") {
        match part.split_once(' ') {
            Some((count, "passed")) => outcome.passed = count.parse().unwrap_or_default(),
            Some((count, "failed")) => outcome.failed = count.parse().unwrap_or_default(),
            _ => {}
        }
    }
    outcome.output = output;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_names_its_reasons() {
        let reasons = reasons().expect("errors.proto");
        assert!(reasons.contains(&"GUEST_BUSY".to_owned()), "{reasons:?}");
        assert!(!reasons.contains(&"UNSPECIFIED".to_owned()));
    }

    #[test]
    fn errors_of_grpcurl_are_read() {
        let error = json!({
            "code": 5,
            "message": "refused with KEY_NOT_FOUND: “100 %”\nas asked",
            "details": [{
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "domain": "patchbay",
                "metadata": {"near": "näher\nund näher"},
                "reason": "KEY_NOT_FOUND",
            }],
        });
        assert!(is_refused(&error.to_string(), "KEY_NOT_FOUND"));
        assert!(!is_refused(&error.to_string(), "GUEST_BUSY"));
        let lost = "ERROR:\n  Code: Internal\n  Message: server closed the stream without sending trailers\n";
        assert!(!is_refused(lost, "KEY_NOT_FOUND"));
    }

    #[test]
    fn counts_of_node_are_read() {
        let outcome = of_counts("Get with X: no error\n5 passed, 2 failed\n".to_owned());
        assert_eq!((outcome.passed, outcome.failed), (5, 2));
        assert_eq!(of_counts("TypeError\n".to_owned()).passed, 0);
    }
}
