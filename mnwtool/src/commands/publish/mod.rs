//! `mnwtool publish`: a folder that is ready to be pushed, with a card that tells strangers what they need to know.
//!
//! ```text
//! facts    what is true of each file: FILE.minnow.json
//! card     README.md, from the facts and a template
//! matter   the YAML between the lines of dashes at its top
//! sums     SHA256SUMS
//! check    whether an existing folder is all this
//! ```
//!
//! The same files and options give the same bytes: nothing here looks at a clock, a host or an order of threads.

mod card;
mod check;
mod facts;
mod matter;
pub(crate) mod sums;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::hub::{Repository, Revision};
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level};
use minnow_formats::{Checkpoint, digest};
use serde_json::{Value, json};

use super::destination::{self, TemporaryFolder};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::terminal;
use facts::Facts;

/// The card's name.
const CARD: &str = "README.md";
/// How names of licences begin.
const LICENSE: &str = "LICENSE";

/// What to publish.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) folder: PathBuf,
    /// The checkpoint that the files were made from.
    pub(crate) source: Option<PathBuf>,
    /// Where that came from, and at which commit.
    pub(crate) base: Option<Repository>,
    pub(crate) base_revision: Option<Revision>,
    /// SPDX-like id as Hugging Face writes it, in lower case.
    pub(crate) license: Option<String>,
    /// Where the folder will be pushed to.
    pub(crate) repository: Option<Repository>,
    pub(crate) title: Option<String>,
    /// Results of `minnowd eval --json`, by the name of the file that took the exam.
    pub(crate) exams: Vec<(String, PathBuf)>,
    pub(crate) template: Option<PathBuf>,
    pub(crate) workers: usize,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Makes the folder.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let parent = destination::check_new_folder(&options.folder)?;
    let names = options.files.iter().map(|path| name_of(path)).collect::<Result<Vec<_>, _>>()?;
    if let Some(twice) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        return Err(Failure::Usage(format!("two files are called {}", twice.1)));
    }
    let template = match &options.template {
        Some(path) => Some(fs::read_to_string(path).map_err(|error| Failure::at(path, error))?),
        None => None,
    };
    let source = match &options.source {
        Some(path) => Some(Checkpoint::open(path, IoBackend::Auto).map_err(Failure::of)?),
        None => None,
    };
    let origin = Origin::of(options, source.as_ref())?;
    let exams = exams(options, &names)?;

    let files = options.files.iter().zip(&names);
    let mut all = Vec::new();
    for ((path, name), exam) in files.zip(exams) {
        all.push(Facts::gather(path, name, source.as_ref(), options, exam)?);
    }
    let made = TemporaryFolder::create(&options.folder, &parent)?;
    let mut listed: Vec<(String, String)> = Vec::new();
    for ((path, name), facts) in options.files.iter().zip(&names).zip(&all) {
        give_second_name(path, &made.path().join(name))?;
        listed.push((name.clone(), facts.sha256.clone()));
    }
    let mut write = |name: String, text: &str| {
        super::extract::write_file(&made.path().join(&name), text)?;
        listed.push((name, digest::sha256_of(text.as_bytes())));
        Ok::<(), Failure>(())
    };
    for (name, facts) in names.iter().zip(&all) {
        write(facts_name(name), &format!("{:#}\n", facts.json(&origin)))?;
    }
    for (name, text) in &origin.licenses {
        write(name.clone(), text)?;
    }
    let card = card::render(template.as_deref(), &card::context(options, &origin, &all))?;
    write(CARD.to_owned(), &card)?;
    listed.sort();
    let sums = sums::text(listed.iter().map(|(name, sha256)| (sha256.as_str(), name.as_str())));
    super::extract::write_file(&made.path().join(sums::NAME), &sums)?;

    // A template of the user's may leave out what a card needs.
    let problems = check::problems(made.path(), options.workers, &|_| ())?;
    if !problems.is_empty() {
        return Err(Failure::at(
            &options.folder,
            format!("is not made, for it would not pass: {}", problems.join("; ")),
        ));
    }
    made.publish(&options.folder, &parent)?;

    let (folder, seconds) = (options.folder.display(), started.elapsed().as_secs_f64());
    let bytes: u64 = all.iter().map(|facts| facts.bytes).sum();
    if options.json {
        let files: Vec<&str> = listed.iter().map(|(name, _)| name.as_str()).chain([sums::NAME]).collect();
        return terminal::print_json(&json!({
            "path": folder.to_string(), "files": files, "bytes": bytes, "seconds": seconds,
        }));
    }
    let count = listed.len() + 1;
    terminal::print(&format!("{folder}: {count} files, {} of models, {seconds:.2} s\n", HumanBytes(bytes)))
}

/// A folder to be looked at.
#[derive(Debug)]
pub(crate) struct CheckOptions {
    pub(crate) folder: PathBuf,
    pub(crate) workers: usize,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Lists what is wrong with a folder.
pub(crate) fn run_check(options: &CheckOptions) -> Result<(), Failure> {
    let folder = &options.folder;
    let entries = fs::read_dir(folder).map_err(|error| Failure::at(folder, error))?;
    let bytes = entries.filter_map(|entry| entry.ok()?.metadata().ok()).map(|found| found.len()).sum::<u64>();
    let progress = Progress::new(2 * bytes, options.progress && !options.json);
    let problems = check::problems(folder, options.workers, &|bytes| progress.advance(bytes, ""))?;
    drop(progress);
    if options.json {
        terminal::print_json(&json!({
            "path": folder.to_string_lossy(), "valid": problems.is_empty(), "problems": problems,
        }))?;
    } else if problems.is_empty() {
        terminal::print(&format!("{}: ready to be pushed\n", folder.display()))?;
    } else {
        terminal::print(&problems.iter().map(|problem| format!("{problem}\n")).collect::<String>())?;
    }
    match &problems[..] {
        [] => Ok(()),
        [only] => Err(Failure::at(folder, only)),
        all => Err(Failure::at(folder, format!("{}; {} problems in all", all[0], all.len()))),
    }
}

/// Where the model comes from, and what may be done with it.
struct Origin {
    repository: Repository,
    revision: Option<Revision>,
    license: String,
    /// Texts of licences by name.
    licenses: Vec<(String, String)>,
    /// Name, length and SHA-256 of each file with weights.
    files: Vec<(String, u64, String)>,
}

impl Origin {
    fn of(options: &Options, source: Option<&Checkpoint>) -> Result<Self, Failure> {
        let known = options.source.as_deref().and_then(cached_at);
        let (known_repository, known_revision) = known.unzip();
        let repository = options.base.clone().or(known_repository).ok_or_else(|| {
            Failure::Usage("--base-model OWNER/NAME is needed: which repository the model comes from".to_owned())
        })?;
        let folder = options.source.as_deref().filter(|path| path.is_dir());
        let own_card = folder.and_then(|folder| fs::read_to_string(folder.join(CARD)).ok());
        let own_license = own_card.as_deref().and_then(matter::license);
        let license = options.license.clone().or(own_license).ok_or_else(|| {
            let why = "the model's licence, as Hugging Face writes it; the source's card names none";
            Failure::Usage(format!("--license ID is needed: {why}"))
        })?;
        let mut files = Vec::new();
        let weights = source.map(Checkpoint::files).unwrap_or_default();
        let progress = Progress::new(weights.iter().map(|file| file.len()).sum(), options.progress && !options.json);
        for file in weights {
            let sha256 = digest::sha256(file, &|bytes| progress.advance(bytes, file.label())).map_err(Failure::of)?;
            let name = Path::new(file.label()).file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push((name, file.len(), sha256));
        }
        let revision = options.base_revision.clone().or(known_revision);
        Ok(Self { repository, revision, license, licenses: folder.map_or(Ok(Vec::new()), licenses)?, files })
    }

    fn json(&self) -> Value {
        let file =
            |(name, bytes, sha256): &(String, u64, String)| json!({"name": name, "bytes": bytes, "sha256": sha256});
        json!({
            "repository": self.repository.to_string(),
            "revision": self.revision.as_ref().map(ToString::to_string),
            "license": self.license,
            "files": self.files.iter().map(file).collect::<Vec<_>>(),
        })
    }
}

/// Repository and commit of a folder in the cache of Hugging Face's tools.
fn cached_at(path: &Path) -> Option<(Repository, Revision)> {
    let path = path.canonicalize().ok()?;
    let mut parts = path.iter().rev().map(|part| part.to_string_lossy());
    let (commit, snapshots, model) = (parts.next()?, parts.next()?, parts.next()?);
    let (owner, name) = model.strip_prefix("models--")?.split_once("--")?;
    let revision: Revision = commit.parse().ok()?;
    (snapshots == "snapshots" && revision.is_commit()).then_some((format!("{owner}/{name}").parse().ok()?, revision))
}

/// Texts that say what may be done with the model.
fn licenses(folder: &Path) -> Result<Vec<(String, String)>, Failure> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| Failure::at(folder, error))? {
        let path = entry.map_err(|error| Failure::at(folder, error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.to_uppercase().starts_with(LICENSE) && is_plain_name(&name) && path.is_file() {
            found.push((name, fs::read_to_string(&path).map_err(|error| Failure::at(&path, error))?));
        }
    }
    found.sort();
    Ok(found)
}

/// The results of exams, in the order of `names`.
fn exams(options: &Options, names: &[String]) -> Result<Vec<Option<Value>>, Failure> {
    let mut exams = vec![None; names.len()];
    for (name, path) in &options.exams {
        let Some(index) = names.iter().position(|known| known == name) else {
            return Err(Failure::Usage(format!("--exam {name}: no file of that name is published")));
        };
        let text = fs::read_to_string(path).map_err(|error| Failure::at(path, error))?;
        let result: Value = serde_json::from_str(&text).map_err(|error| Failure::at(path, error))?;
        let summary = facts::exam_summary(&result);
        exams[index] = Some(summary.ok_or_else(|| Failure::at(path, "is no result of minnowd eval --json"))?);
    }
    Ok(exams)
}

/// The name of a file, if it may stand in a card and a command without quotes.
fn name_of(path: &Path) -> Result<String, Failure> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if is_plain_name(&name) && name.ends_with(".mnw") {
        return Ok(name);
    }
    Err(Failure::at(path, "cannot be published: the name must be letters, digits, '.', '_' and '-', and end in .mnw"))
}

fn is_plain_name(name: &str) -> bool {
    minnow_formats::names::is_asset_name(name)
}

/// `x.mnw` -> `x.minnow.json`
fn facts_name(name: &str) -> String {
    format!("{}.minnow.json", name.strip_suffix(".mnw").unwrap_or(name))
}

/// Makes `target` another name of the file at `path`: a hard link, else blocks shared with it, else a copy.
fn give_second_name(path: &Path, target: &Path) -> Result<(), Failure> {
    let real = path.canonicalize().map_err(|error| Failure::at(path, error))?;
    if fs::hard_link(&real, target).is_ok() {
        return Ok(());
    }
    let copied = File::open(&real).and_then(|source| {
        let copy = File::create_new(target)?;
        if rustix::fs::ioctl_ficlone(&copy, &source).is_err() {
            std::io::copy(&mut &source, &mut &copy)?;
        }
        copy.sync_all()
    });
    copied.map_err(|error| Failure::at(path, error))
}

/// Whether a container is all that a stranger may expect of it.
fn check_strictly(path: &Path, workers: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<(), String> {
    let file = io::open(path, IoBackend::Auto).map_err(|error| error.to_string())?;
    let findings = mnw::validate_all(&file, Level::Strict, workers, progress);
    match findings.problems.first() {
        None => Ok(()),
        Some(problem) => Err(format!("{}: {}", problem.reason, problem.message)),
    }
}
