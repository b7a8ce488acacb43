//! Golden and hostile data of this repository. Files may be stored gzipped; callers name them without `.gz`.

use std::io::Read;
use std::path::{Path, PathBuf};

/// The folder of this crate, which holds `golden/` and `hostile/`.
#[must_use]
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Bytes of a file under `tests/`, unpacked if it is stored as `PATH.gz`.
///
/// # Panics
/// If there is no such file: a fault of the test.
#[must_use]
pub fn bytes(path: &str) -> Vec<u8> {
    let plain = root().join(path);
    if plain.exists() {
        return std::fs::read(&plain).unwrap_or_else(|error| panic!("{}: {error}", plain.display()));
    }
    let packed = root().join(format!("{path}.gz"));
    let raw = std::fs::read(&packed).unwrap_or_else(|error| panic!("{}: {error}", packed.display()));
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(&raw[..]).read_to_end(&mut out).expect("a whole gzip file");
    out
}

/// [`bytes`] as text.
#[must_use]
pub fn text(path: &str) -> String {
    String::from_utf8(bytes(path)).expect("a UTF-8 file")
}

/// [`bytes`] as JSON.
#[must_use]
pub fn json(path: &str) -> serde_json::Value {
    serde_json::from_slice(&bytes(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// [`bytes`] as JSON lines.
#[must_use]
pub fn json_lines(path: &str) -> Vec<serde_json::Value> {
    text(path).lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// Writes the (unpacked) file `path` into `folder` under its own name and returns where it is.
#[must_use]
pub fn unpack_into(path: &str, folder: &Path) -> PathBuf {
    let target = folder.join(Path::new(path).file_name().expect("a file name"));
    std::fs::write(&target, bytes(path)).expect("a writable folder");
    target
}

/// The folder of the trained BF16 tiny model, from `MINNOW_TINY_DIR`. `None`, with a line on stderr, where it is not
/// set: those tests are then reported as skipped. In CI (`CI=true`) its absence is a failure.
#[must_use]
pub fn tiny_dir() -> Option<PathBuf> {
    match std::env::var_os("MINNOW_TINY_DIR") {
        Some(dir) => {
            let dir = PathBuf::from(dir);
            assert!(
                dir.join("model.safetensors").is_file(),
                "MINNOW_TINY_DIR={} has no model.safetensors",
                dir.display()
            );
            Some(dir)
        }
        None => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "MINNOW_TINY_DIR must be set in CI");
            eprintln!("skipped: MINNOW_TINY_DIR is not set, so the BF16 tiny model cannot be read");
            None
        }
    }
}
