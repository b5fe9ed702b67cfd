// SPDX-License-Identifier: Apache-2.0
//! Runs Chromium without a window and drives it by its DevTools protocol over a pair of pipes.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Timeout of an answer. It is long, because the page may wait for two sweeps over the keys, which
/// may begin 30 s apart.
const PATIENCE: Duration = Duration::from_secs(180);

pub struct Browser {
    _child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: Option<String>,
    next_id: u64,
    /// Events that no wait has consumed.
    events: VecDeque<Value>,
    _profile: tempfile::TempDir,
}

/// Returns the Debian package's program. If it is not installed, prints the reason on standard
/// error and returns `None`.
pub fn program() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&paths).map(|folder| folder.join("chromium"));
    let found = found.find(|path| path.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no Chromium on this machine; apt-get install chromium");
    }
    found
}

impl Browser {
    pub async fn start(program: &Path, width: u32, height: u32) -> Self {
        let profile = tempfile::tempdir().expect("temporary folder");
        let mut command = Command::new("sh");
        // Chromium uses descriptors 3 and 4 for the protocol.
        command.args([
            "-c",
            "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1",
        ]);
        command.arg(program).args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.arg(format!("--window-size={width},{height}"));
        command.env("HOME", profile.path()).env("TZ", "UTC");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().expect("a shell");
        let mut browser = Self {
            input: child.stdin.take().expect("piped"),
            output: BufReader::new(child.stdout.take().expect("piped")),
            _child: child,
            session: None,
            next_id: 0,
            events: VecDeque::new(),
            _profile: profile,
        };
        let page = json!({ "url": "about:blank" });
        let target = browser.call("Target.createTarget", page).await["targetId"].clone();
        let attach = json!({ "targetId": target, "flatten": true });
        let session = browser.call("Target.attachToTarget", attach).await["sessionId"].clone();
        browser.session = session.as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({})).await;
        }
        browser.resize(width, height).await;
        browser
    }

    /// Sets the size of the window.
    pub async fn resize(&mut self, width: u32, height: u32) {
        let metrics =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", metrics)
            .await;
    }

    /// Calls a method and returns its result.
    pub async fn call(&mut self, method: &str, params: Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut text = message.to_string().into_bytes();
        text.push(0);
        self.input.write_all(&text).await.expect("Chromium runs");
        loop {
            let mut message = self.receive(method).await;
            if message["id"] == json!(id) {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            self.events.push_back(message);
        }
    }

    async fn receive(&mut self, waiting_for: &str) -> Value {
        let mut text = Vec::new();
        let read = tokio::time::timeout(PATIENCE, self.output.read_until(0, &mut text));
        let length = read
            .await
            .unwrap_or_else(|_| panic!("no answer to {waiting_for}"));
        assert!(
            length.expect("readable") > 0,
            "Chromium ended during {waiting_for}"
        );
        text.pop();
        serde_json::from_slice(&text).expect("JSON")
    }

    pub async fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url })).await;
        self.wait("document.readyState === 'complete'").await;
    }

    /// Returns the value of an expression, which may be a promise.
    pub async fn evaluate(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut answer = self.call("Runtime.evaluate", params).await;
        let thrown = &answer["exceptionDetails"];
        assert!(thrown.is_null(), "{expression}: {thrown}");
        answer["result"]["value"].take()
    }

    /// Waits until the condition holds, and checks it after each change of the document.
    pub async fn wait(&mut self, condition: &str) {
        let script = format!(
            "new Promise((resolve) => {{
                const timer = setTimeout(() => end(false), {});
                const look = () => {{ try {{ if ({condition}) end(true); }} catch {{}} }};
                const observer = new MutationObserver(look);
                const end = (is) => {{ clearTimeout(timer); observer.disconnect(); resolve(is); }};
                observer.observe(document, {{ subtree: true, childList: true, attributes: true, characterData: true }});
                document.addEventListener('readystatechange', look);
                look();
            }})",
            PATIENCE.as_millis() / 2
        );
        let held = self.evaluate(&script).await;
        if held != json!(true) {
            let text = self.evaluate("document.body.innerText").await;
            panic!(
                "{condition} does not hold on the page:\n{}",
                text.as_str().unwrap_or_default()
            );
        }
    }

    pub async fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, None),
            "Enter" => (13, Some("\r")),
            "Escape" => (27, None),
            "ArrowRight" => (39, None),
            "ArrowDown" => (40, None),
            _ => panic!("no key {key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if let Some(text) = text.filter(|_| kind == "keyDown") {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event).await;
        }
    }

    /// Presses Tab until the focused element matches the selector.
    pub async fn tab_to(&mut self, selector: &str) {
        for _ in 0..400 {
            self.press("Tab").await;
            let script = format!("document.activeElement.matches({})", json!(selector));
            if self.evaluate(&script).await == json!(true) {
                return;
            }
        }
        panic!("Tab does not reach {selector}");
    }

    pub async fn prefer(&mut self, scheme: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", features).await;
    }

    /// Saves a picture of the whole page among the outputs of the tests.
    pub async fn picture(&mut self, name: &str) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
        std::fs::create_dir_all(&folder).expect("writable");
        let params = json!({ "format": "png", "captureBeyondViewport": true });
        let picture = self.call("Page.captureScreenshot", params).await;
        let picture = decode(picture["data"].as_str().expect("a picture"));
        std::fs::write(folder.join(format!("{name}.png")), picture).expect("writable");
    }

    /// Returns errors of the page, and requested addresses of other origins.
    pub fn complaints(&self, own: &str) -> Vec<String> {
        let complaint = |event: &Value| {
            let params = &event["params"];
            let is_bad = match event["method"].as_str()? {
                "Runtime.exceptionThrown" => true,
                "Runtime.consoleAPICalled" => params["type"] == "error",
                "Log.entryAdded" => params["entry"]["level"] == "error",
                "Network.requestWillBeSent" => {
                    let url = params["request"]["url"].as_str().unwrap_or_default();
                    !url.starts_with(own) && url != "about:blank"
                }
                _ => false,
            };
            is_bad.then(|| event.to_string())
        };
        self.events.iter().filter_map(complaint).collect()
    }
}

/// Decodes the protocol's Base64.
fn decode(text: &str) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b'=').collect();
    let mut bytes = Vec::new();
    for chunk in digits.chunks(4) {
        let word = chunk
            .iter()
            .fold(0_u32, |word, &byte| word << 6 | u32::from(value(byte)));
        let word = word << (6 * (4 - chunk.len()));
        bytes.extend(&word.to_be_bytes()[1..chunk.len()]);
    }
    bytes
}
