//! A real Chromium without a window, driven over the DevTools protocol: just enough of it to act as a person does.
//!
//! One browser, one page. Commands go out over a web socket and are answered by number; events are read and dropped.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tungstenite::stream::MaybeTlsStream;
use tungstenite::{Message, WebSocket};

/// How long a page may take to do what it is expected to do.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a page is looked at.
const LOOK: Duration = Duration::from_millis(15);

/// A running browser with one page, killed on drop.
pub struct Browser {
    child: Child,
    socket: WebSocket<MaybeTlsStream<TcpStream>>,
    /// The page's session.
    session: String,
    sent: u64,
    _profile: tempfile::TempDir,
}

/// The browser of this machine, if it has one.
#[must_use]
pub fn installed() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&folders).flat_map(|folder| names.map(|name| folder.join(name))).find(|path| path.is_file())
}

impl Browser {
    /// Starts the browser on an empty page.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(program: &PathBuf) -> Self {
        let profile = tempfile::tempdir().expect("a temporary folder");
        let mut child = Command::new(program)
            .args(["--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--mute-audio"])
            // The sandbox does not work for root, and the only page is our own.
            .args(["--no-sandbox", "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars"])
            .args(["--disable-background-networking", "--no-proxy-server", "--lang=en-US"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the browser starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let address = log
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once("DevTools listening on ").map(|(_, address)| address.trim().to_owned()))
            .expect("the browser says where it listens");
        // The pipe must be emptied, or the browser would block on its log.
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        let (socket, _) = tungstenite::connect(&address).expect("a web socket");
        let mut browser = Self { child, socket, session: String::new(), sent: 0, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page.enable", "Runtime.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Sends a command and gives its result.
    ///
    /// # Panics
    /// If the browser refuses it or is gone.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.sent += 1;
        let mut command = json!({"id": self.sent, "method": method, "params": parameters});
        if !self.session.is_empty() {
            command["sessionId"] = json!(self.session);
        }
        self.socket.send(Message::text(command.to_string())).expect("a running browser");
        loop {
            let Message::Text(text) = self.socket.read().expect("a running browser") else { continue };
            let mut answer: Value = serde_json::from_str(&text).expect("JSON");
            if answer["id"] == self.sent {
                assert!(answer.get("error").is_none(), "{method}: {}", answer["error"]);
                return answer["result"].take();
            }
        }
    }

    /// The size of the window in CSS pixels; phones have touch and twice as many dots.
    pub fn resize(&mut self, width: u32, height: u32, is_phone: bool) {
        let dots = if is_phone { 2 } else { 1 };
        self.call(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": dots, "mobile": is_phone}),
        );
        self.call("Emulation.setTouchEmulationEnabled", json!({"enabled": is_phone}));
    }

    /// What the system prefers: `light` or `dark`.
    pub fn prefer(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Opens an address and waits until the page is there.
    pub fn open(&mut self, address: &str) {
        self.call("Page.navigate", json!({"url": address}));
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// Loads the page again, as F5 does.
    pub fn reload(&mut self) {
        self.evaluate("window.isOld = true");
        self.call("Page.reload", json!({}));
        self.wait("document.readyState === 'complete' && !window.isOld");
    }

    /// The value of an expression in the page.
    ///
    /// # Panics
    /// If it throws.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", parameters);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true.
    ///
    /// # Panics
    /// If it does not become true, with what the page shows instead.
    #[track_caller]
    pub fn wait(&mut self, expression: &str) {
        let started = Instant::now();
        // While a page is being replaced there is nothing to ask.
        let guarded = format!("(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()");
        while self.evaluate(&guarded) != true {
            let shown = || "document.body.innerText";
            assert!(started.elapsed() < PATIENCE, "never: {expression}; the page: {}", self.evaluate(shown()));
            std::thread::sleep(LOOK);
        }
    }

    /// Presses the left button of the mouse in the middle of an element.
    ///
    /// # Panics
    /// If the element is not there or cannot be seen.
    #[track_caller]
    pub fn click(&mut self, selector: &str) {
        let place = self.evaluate(&format!(
            "(() => {{ const node = document.querySelector({selector:?}); if (!node) return null; \
             node.scrollIntoView({{block: 'nearest'}}); const box = node.getBoundingClientRect(); \
             return box.width ? [box.x + box.width / 2, box.y + box.height / 2] : null; }})()"
        ));
        assert!(place.is_array(), "{selector} cannot be clicked");
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Types text where the focus is.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses a key that has no text but a meaning, such as `Escape`, `Tab` or `Enter`.
    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            "Tab" => (9, ""),
            other => (other.bytes().next().map_or(0, |byte| u32::from(byte.to_ascii_uppercase())), other),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// A picture of what is seen, as lossy WebP.
    ///
    /// # Panics
    /// If the browser makes none.
    pub fn picture(&mut self) -> Vec<u8> {
        let parameters = json!({"format": "webp", "quality": 55, "optimizeForSpeed": false});
        let answer = self.call("Page.captureScreenshot", parameters);
        from_base64(answer["data"].as_str().expect("a picture"))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Base64 with the standard alphabet, as browsers write it.
fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b'=').map(digit).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let bits = group.iter().enumerate().fold(0u32, |bits, (at, &digit)| bits | u32::from(digit) << (18 - 6 * at));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read() {
        assert_eq!(from_base64("TWlubm93"), b"Minnow");
        assert_eq!((from_base64("TWk="), from_base64("TQ==")), (b"Mi".to_vec(), b"M".to_vec()));
    }
}
