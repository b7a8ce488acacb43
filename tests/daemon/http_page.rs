//! The page at `/` as a person uses it: a real Chromium against the real server and the embedded model.
//!
//! `MINNOW_SCREENSHOTS=docs/page cargo test -p minnow-tests --test daemon page` also writes the pictures of `docs/`.

use std::path::PathBuf;
use std::time::Duration;

use minnow_tests::browser::{self, Browser};
use minnow_tests::program::Server;
use serde_json::json;

use super::http::{Answers, content, story};

/// The browser of this machine; CI must have one.
fn chromium() -> Option<PathBuf> {
    let found = browser::installed();
    if found.is_none() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have chromium, see .ci/run");
        eprintln!("skipped: no chromium, chromium-browser or google-chrome in PATH");
    }
    found
}

/// Keeps a picture if someone wants pictures.
fn keep_picture(browser: &mut Browser, name: &str) {
    let Some(folder) = std::env::var_os("MINNOW_SCREENSHOTS") else { return };
    let folder = minnow_tests::golden::root().join("..").join(folder);
    std::fs::create_dir_all(&folder).unwrap();
    // What flashes has stopped flashing.
    std::thread::sleep(Duration::from_millis(1000));
    std::fs::write(folder.join(format!("{name}.webp")), browser.picture()).unwrap();
}

/// A page that notes what goes wrong in it, with these settings.
fn open(browser: &mut Browser, server: &Server, settings: &serde_json::Value) {
    let watch = "window.faults = []; \
        addEventListener('error', (event) => faults.push(event.message)); \
        addEventListener('unhandledrejection', (event) => faults.push(String(event.reason))); \
        addEventListener('securitypolicyviolation', (event) => faults.push(event.violatedDirective));";
    browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": watch}));
    let address = format!("http://{}/", server.address());
    browser.open(&address);
    let settings = serde_json::to_string(&settings.to_string()).unwrap();
    browser.evaluate(&format!("localStorage.clear(); localStorage.setItem('minnow.settings', {settings})"));
    browser.reload();
    browser.wait("document.querySelector('#lamp.ready')");
}

fn ask(browser: &mut Browser, text: &str) {
    browser.click("#prompt");
    browser.write(text);
    browser.press("Enter");
}

const DONE: &str = "!document.querySelector('.go.stop')";
const LAST_SAID: &str = "[...document.querySelectorAll('.turn.assistant .said')].at(-1).innerText";

fn assert_sound(browser: &mut Browser) {
    assert_eq!(browser.evaluate("faults"), json!([]), "nothing goes wrong in the page");
    let wide = browser.evaluate("document.documentElement.scrollWidth > innerWidth");
    assert_eq!(wide, false, "nothing is wider than the window");
}

#[test]
fn a_server_with_keys_is_used_after_one_was_given() {
    let Some(program) = chromium() else { return };
    let server = Server::start(&["--api-key", "a-key-for-the-browser"]);
    let mut browser = Browser::start(&program);
    browser.resize(1360, 860, false);
    browser.open(&format!("http://{}/", server.address()));
    for key in ["a-key-that-is-wrong", "a-key-for-the-browser"] {
        browser.wait("document.getElementById('ask-key').open && !document.getElementById('key').value");
        browser.click("#key");
        browser.write(key);
        browser.press("Enter");
    }
    browser.wait("document.querySelector('#lamp.ready')");
    browser.evaluate("settings.temperature = '0'; settings.pace = '0'");
    ask(&mut browser, "Compute 55 + 525.");
    browser.wait(&format!("{DONE} && document.querySelector('.facts strong')"));
    assert_eq!(browser.evaluate(LAST_SAID), "55 + 525 = 580");
    // It outlives a reload, and not the tab.
    browser.reload();
    browser.wait("document.querySelector('#lamp.ready')");
    assert_eq!(browser.evaluate("JSON.stringify(localStorage).includes('a-key-for')"), false);
}

#[test]
fn a_conversation_is_held_watched_stopped_and_resumed() {
    let Some(program) = chromium() else { return };
    let server = Server::start(&[]);
    let mut browser = Browser::start(&program);
    browser.resize(1360, 860, false);
    browser.prefer("light");
    // A high threshold makes more steps, and so more to see.
    let settings = json!({"temperature": "0", "seed": "7", "max_tokens": "96", "threshold": "0.97", "pace": "0"});
    open(&mut browser, &server, &settings);
    let model = server.get("/v1/models").json()["data"][0]["id"].clone();
    assert_eq!(browser.evaluate("document.getElementById('model').textContent"), model);
    let threshold = server.get("/props").json()["default_generation_settings"]["params"]["threshold"].to_string();
    assert_eq!(browser.evaluate("document.getElementById('s-threshold').placeholder"), json!(threshold));

    // Sending: by keyboard, the answer is the API's, and so are its numbers.
    let plain = server.chat(&story(json!({"threshold": 0.97})));
    ask(&mut browser, "Tell me a story about a brave fox named Anna.");
    browser.wait(&format!("{DONE} && document.querySelector('.facts strong')"));
    assert_eq!(browser.evaluate(LAST_SAID).as_str().unwrap().trim(), content(&plain).trim());
    let forwards = plain["minnow"]["denoise_forwards"].to_string();
    assert_eq!(browser.evaluate("document.getElementById('n-forwards').textContent"), json!(forwards));
    assert_eq!(browser.evaluate("Number(document.getElementById('step').max) + 1").to_string(), forwards);
    let settled = "document.querySelectorAll('#cells .cell').length === 32 && !document.querySelector('#cells .mask')";
    assert_eq!(browser.evaluate(settled), true);
    assert_sound(&mut browser);

    // Going back through the steps, to where most positions are still masks.
    browser.evaluate(
        "(() => { const left = frames.get(turns.at(-1)).map(masks); step.value = left.indexOf(Math.max(...left)); \
         step.dispatchEvent(new Event('input')); })()",
    );
    assert_eq!(browser.evaluate("document.querySelectorAll('#cells .mask').length > 0"), true);
    keep_picture(&mut browser, "desktop");

    // While refining, in slow motion.
    browser.evaluate("settings.pace = '300'");
    ask(&mut browser, "Tell me a story about a brave fox named Anna.");
    browser.wait("(() => { const n = document.querySelectorAll('#cells .mask').length; return n > 3 && n < 29; })()");
    keep_picture(&mut browser, "refining");
    browser.wait(DONE);
    browser.evaluate("settings.pace = '0'");
    ask(&mut browser, "Compute 55 + 525.");
    browser.wait(&format!("{DONE} && document.querySelectorAll('.turn.assistant .facts strong').length > 8"));
    assert_eq!(browser.evaluate(LAST_SAID), "55 + 525 = 580");

    // Stopping, with the button and with a key; the server stops too.
    browser.evaluate("Object.assign(settings, {pace: '0', max_tokens: '1500', threshold: '1'})");
    for by_key in [false, true] {
        ask(&mut browser, "Tell me a story about a brave fox named Anna.");
        browser.wait("document.querySelector('.draft') || document.querySelectorAll('.turn').length > 3");
        if by_key {
            browser.press("Escape")
        } else {
            browser.click("#go")
        }
        browser.wait(&format!("{DONE} && [...document.querySelectorAll('.note')].at(-1).innerText === 'Stopped.'"));
        server.wait_idle(Duration::from_secs(10));
    }

    // Reloading in the middle of an answer goes on reading it.
    let long = json!({"max_tokens": 400, "threshold": 1});
    let plain = server.chat(&story(long));
    browser.click("#fresh");
    browser.evaluate("settings.max_tokens = '400'; save('settings', settings)");
    ask(&mut browser, "Tell me a story about a brave fox named Anna.");
    browser.wait("document.querySelector('.draft')");
    browser.reload();
    browser.wait("document.querySelector('.facts strong') && !document.querySelector('.go.stop')");
    assert_eq!(browser.evaluate("document.querySelectorAll('.turn').length"), 2);
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(browser.evaluate(LAST_SAID).as_str().unwrap()), words(content(&plain)));
    browser.reload();
    browser.wait("document.querySelector('#lamp.ready')");
    assert_eq!(words(browser.evaluate(LAST_SAID).as_str().unwrap()), words(content(&plain)), "a finished answer stays");

    // A refusal is shown as it was given.
    browser.evaluate("settings.stop = 'x'.repeat(2000)");
    ask(&mut browser, "Hello");
    browser.wait("document.querySelector('.note.bad')");
    let note = browser.evaluate("document.querySelector('.note.bad').innerText");
    assert!(note.as_str().unwrap().starts_with("stop has 2000 bytes"), "{note}");
    assert_sound(&mut browser);
}

#[test]
fn a_tool_is_called_and_answered_by_hand() {
    let Some(program) = chromium() else { return };
    let server = Server::start(&[]);
    let mut browser = Browser::start(&program);
    browser.resize(1360, 860, false);
    browser.prefer("light");
    open(&mut browser, &server, &json!({"temperature": "0", "max_tokens": "128", "pace": "0"}));
    browser.click(".idea:nth-child(4)");
    browser.wait(&format!("{DONE} && document.querySelector('.call form')"));
    assert_eq!(browser.evaluate("document.querySelector('.call b').innerText"), "get_weather");
    let arguments = browser.evaluate("document.querySelector('.call pre').innerText");
    let arguments: serde_json::Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Mumbai"}));
    keep_picture(&mut browser, "tool-call");
    browser.click(".call form button");
    browser.wait(&format!("{DONE} && document.querySelectorAll('.turn.assistant').length === 2"));
    let said = browser.evaluate(LAST_SAID);
    assert!(said.as_str().is_some_and(|text| text.contains("Mumbai")), "{said}");
    assert_eq!(browser.evaluate("document.querySelector('.call header span').innerText"), "answered");
    assert_sound(&mut browser);
}

#[test]
fn the_page_fits_a_phone_a_dark_room_and_a_keyboard() {
    let Some(program) = chromium() else { return };
    let server = Server::start(&[]);
    let mut browser = Browser::start(&program);
    browser.resize(390, 844, true);
    browser.prefer("dark");
    open(
        &mut browser,
        &server,
        &json!({"temperature": "0", "seed": "7", "max_tokens": "96", "threshold": "0.97", "pace": "0"}),
    );
    assert_eq!(browser.evaluate("document.documentElement.dataset.theme"), "dark");
    assert_sound(&mut browser);
    browser.click(".idea:nth-child(1)");
    browser.wait(&format!("{DONE} && document.querySelector('.facts strong')"));
    assert_eq!(browser.evaluate("cells.offsetHeight"), 0, "the block is folded on a phone");
    browser.click("#fold");
    browser.evaluate("step.value = 1; step.dispatchEvent(new Event('input'))");
    browser.wait("cells.offsetHeight > 100");
    assert_sound(&mut browser);
    keep_picture(&mut browser, "phone");

    browser.resize(1360, 860, false);
    browser
        .evaluate("small.dispatchEvent(new Event('change')); step.value = 2; step.dispatchEvent(new Event('input'))");
    keep_picture(&mut browser, "dark");
    browser.prefer("light");
    browser.wait("document.documentElement.dataset.theme === 'light'");

    // Everything can be reached and used without a mouse, and is seen to have the focus.
    browser.evaluate("document.activeElement.blur()");
    browser.press("/");
    assert_eq!(browser.evaluate("document.activeElement.id"), "prompt");
    let mut reached = Vec::new();
    for _ in 0..30 {
        browser.press("Tab");
        let node =
            "document.activeElement.id || document.activeElement.className || document.activeElement.textContent";
        reached.push(browser.evaluate(node).as_str().unwrap_or_default().to_owned());
    }
    for wanted in ["fresh", "theme", "open-settings", "prompt", "go", "play", "step", "act"] {
        assert!(reached.iter().any(|name| name == wanted), "{wanted} is not reached by Tab: {reached:?}");
    }
    browser.evaluate("document.getElementById('open-settings').focus()");
    browser.press("Enter");
    browser.wait("document.getElementById('settings').open");
    browser.evaluate("document.getElementById('s-threshold').select()");
    browser.write("0.9");
    browser.press("Escape");
    browser.wait("!document.getElementById('settings').open");
    assert_eq!(browser.evaluate("load('settings').threshold"), "0.9");

    // Colours can be read: 4.5 to 1 for text, whatever the theme.
    for theme in ["light", "dark"] {
        browser.evaluate(&format!("save('theme', '{theme}'); showTheme()"));
        let contrast = |ink: &str, ground: &str| {
            format!(
                "(() => {{ const light = (name) => {{ const probe = document.createElement('i'); \
                 probe.style.color = `var(--${{name}})`; document.body.append(probe); \
                 const rgb = getComputedStyle(probe).color.match(/\\d+/g).map(Number); probe.remove(); \
                 const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4); \
                 return .2126 * r + .7152 * g + .0722 * b; }}; const [a, b] = [light('{ink}'), light('{ground}')].sort((a, b) => b - a); \
                 return (a + .05) / (b + .05); }})()"
            )
        };
        for (ink, ground) in [
            ("ink", "ground"),
            ("ink", "surface"),
            ("soft", "ground"),
            ("soft", "surface"),
            ("faint", "ground"),
            ("faint", "surface"),
            ("accent-ink", "accent"),
            ("ink", "accent-wash"),
            ("edit", "edit-wash"),
            ("ink", "gone-wash"),
        ] {
            let found = browser.evaluate(&contrast(ink, ground)).as_f64().unwrap();
            assert!(found >= 4.5, "{theme}: {ink} on {ground} has a contrast of {found:.2}");
        }
    }
    assert_sound(&mut browser);
}
