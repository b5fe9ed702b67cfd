// SPDX-License-Identifier: Apache-2.0
//! Changes three Linux guests, canary first. A rollout whose gate fails is aborted, which undoes
//! its change, and one whose gate passes changes all guests. After each step the demo checks what
//! the guests execute.
#![forbid(unsafe_code)]

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use patchbay_examples::{environment, step};
use patchbay_tests::{Environment, Guest};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

const KEY: &str = "getppid_key";
/// The message that each `getppid()` prints while the key is on.
const MESSAGE: &str = "I am the true branch";
const GUESTS: [&str; 3] = ["web-1", "web-2", "web-3"];
/// Timeout for the controller to take its lease.
const PATIENCE: Duration = Duration::from_secs(60);

/// Rolls a change out over three Linux guests, wave by wave, and takes it back.
#[derive(Parser)]
struct Arguments {
    /// Address of the controller's page
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8480")]
    page: SocketAddr,
    /// Also forward connections from this address to the page; needed in the lab, where a forwarded
    /// port does not arrive at a loopback address
    #[arg(long, value_name = "ADDRESS:PORT")]
    forwarded: Option<SocketAddr>,
    /// Keep the guests and the page until Ctrl-C
    #[arg(long)]
    keep: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let environment = environment("rollout")?;
    step("Boot three Linux guests, and start a controller for them");
    let mut guests = Vec::new();
    for name in GUESTS {
        let builder = Guest::builder(&environment).argument(&format!("--name={name}"));
        let mut guest = builder.boot().await?;
        guest.assert_registered().await?;
        println!("   {name} has booted.");
        guests.push(guest);
    }
    let controller = Controller::start(&environment, &guests, arguments.page).await?;
    if let Some(address) = arguments.forwarded {
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
        tokio::spawn(forward(listener, arguments.page));
    }
    match arguments.keep {
        true => println!("   The page is at http://{}/", arguments.page),
        false => println!("   The page ends with this demo; to look at it, add --keep."),
    }
    print!("{}", controller.run(&["hosts"]).await?);

    step("A rollout whose gate fails: the canary is changed, and its change is undone");
    controller.plan_and_start("wrong", "false").await?;
    controller.watch("wrong", "aborted").await?;
    let why = controller.run(&["explain", "wrong", "web-1"]).await?;
    print!("{why}");
    expect(&mut guests, false).await?;

    step("A rollout whose gate passes: the canary, then all");
    controller.plan_and_start("right", "true").await?;
    controller.watch("right", "completed").await?;
    expect(&mut guests, true).await?;
    print!("{}", controller.run(&["drift", "right"]).await?);

    step("Undo it");
    controller.run(&["undo", "right"]).await?;
    controller.watch("right", "undone").await?;
    expect(&mut guests, false).await?;

    for guest in &mut guests {
        guest.assert_no_warnings().await?;
    }
    if arguments.keep {
        step("Guests and page are yours until Ctrl-C");
        tokio::signal::ctrl_c().await?;
    }
    step("Reset the guests, which ends their monitors");
    for guest in guests {
        let status = guest.power_off().await?;
        ensure!(status.success(), "a monitor ended with {status}");
    }
    println!("\nThe guests followed every step.");
    Ok(())
}

/// Forwards each connection to the page, because the page serves loopback addresses only.
async fn forward(listener: TcpListener, page: SocketAddr) {
    while let Ok((mut browser, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut page = TcpStream::connect(page).await?;
            tokio::io::copy_bidirectional(&mut browser, &mut page).await
        });
    }
}

/// Checks the key in every guest, and what the guest's `getppid()` does.
async fn expect(guests: &mut [Guest], is_on: bool) -> Result<()> {
    for (guest, name) in guests.iter_mut().zip(GUESTS) {
        let count = guest.key(KEY).await?.count;
        let counted = format!("dmesg | grep -c '{MESSAGE}'");
        let calls = "timeout 1 getppid_loop 50";
        let script = format!("before=$({counted}); {calls}; echo $(($({counted}) - before))");
        let printed = guest.shell(&script).await?;
        let messages = printed
            .lines()
            .rev()
            .find_map(|line| line.trim().parse().ok());
        let messages: u32 = messages.with_context(|| format!("no number: {printed}"))?;
        println!("   {name}: {KEY} has the count {count}; getppid() printed {messages} messages.");
        ensure!(
            count == i32::from(is_on) && (messages > 0) == is_on,
            "the key of {name} is not {}",
            if is_on { "on" } else { "off" }
        );
    }
    Ok(())
}

/// Writes the commands of the gates to a folder, which nobody else can write.
fn gates(folder: &Path) -> Result<PathBuf> {
    let gates = folder.join("gates.d");
    fs::DirBuilder::new().mode(0o700).create(&gates)?;
    for name in ["true", "false"] {
        let file = gates.join(format!("{name}.yaml"));
        fs::write(&file, format!("command: [/bin/{name}]\n"))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    }
    Ok(gates)
}

/// The demo's controller, and the command that talks to it.
struct Controller {
    cli: PathBuf,
    folder: tempfile::TempDir,
    // The process is killed when this is dropped.
    process: Child,
}

impl Controller {
    /// Starts the controller. Each guest is on its own host, in its own rack.
    async fn start(environment: &Environment, guests: &[Guest], page: SocketAddr) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = environment.cli.with_file_name("patchbay-fleet");
        let mut command = Command::new(&program);
        command
            .arg("--standalone")
            .arg("--store")
            .arg(folder.path().join("fleet.redb"));
        command
            .arg("--socket")
            .arg(folder.path().join("fleet.sock"));
        command.arg("--gates").arg(gates(folder.path())?);
        command.arg(format!("--page={page}"));
        for (guest, rack) in guests.iter().zip(["a", "b", "c"]) {
            let socket = guest.socket().display();
            command.arg(format!("--host=host-{rack}={socket},rack={rack}"));
        }
        let process = command
            .env("PATCHBAY_LOG", "warn")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut controller = Self {
            cli: environment.cli.clone(),
            folder,
            process,
        };
        let leads = tokio::time::timeout(PATIENCE, controller.leads()).await;
        leads.context("the controller does not answer")??;
        Ok(controller)
    }

    async fn leads(&mut self) -> Result<()> {
        while self.output(&["list"]).await.is_err() {
            if let Some(status) = self.process.try_wait()? {
                bail!("the controller ended with {status}");
            }
        }
        Ok(())
    }

    /// Plans and starts a rollout whose gate runs the program `gate` of the controller.
    async fn plan_and_start(&self, name: &str, gate: &str) -> Result<()> {
        let spec = format!(
            "title: The demo's branch\n\
             selector: {{guests: [\"web-*\"]}}\n\
             claims: [{{want: on, keys: [{KEY}]}}]\n\
             waves: [{{name: canary, size: 1, bake: 1s}}, {{name: all, size: rest}}]\n\
             spread_over: rack\n\
             gates: [{{command: {gate}, on_failure: abort}}]\n"
        );
        let path = self.folder.path().join(format!("{name}.yaml"));
        std::fs::write(&path, &spec)?;
        for line in spec.lines() {
            println!("   {line}");
        }
        let path = path.to_str().context("the folder's name is not UTF-8")?;
        let plan = self.run(&["plan", path]).await?;
        print!("{plan}");
        let digest = plan.trim().rsplit(' ').next().unwrap_or_default();
        print!("{}", self.run(&["start", name, "--digest", digest]).await?);
        Ok(())
    }

    /// Prints each change of a rollout until the rollout ends in `phase`.
    async fn watch(&self, name: &str, phase: &str) -> Result<()> {
        let seen = self.run(&["status", name, "--watch"]).await?;
        print!("{seen}");
        let mut heads = seen.lines().filter(|line| !line.starts_with(' '));
        let last = heads.next_back().unwrap_or_default();
        let expected = format!("{name} is {phase}");
        ensure!(
            last.starts_with(&expected),
            "expected {expected:?}, found {last:?}"
        );
        Ok(())
    }

    /// Prints the command, runs it, and fails if the command fails.
    async fn run(&self, words: &[&str]) -> Result<String> {
        println!("   $ patchbay rollout {}", words.join(" "));
        self.output(words).await
    }

    async fn output(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(&self.cli)
            .arg("rollout")
            .args(words)
            .env(
                "PATCHBAY_FLEET_SOCKET",
                self.folder.path().join("fleet.sock"),
            )
            .output()
            .await?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {said}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }
}
