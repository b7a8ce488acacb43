//! The command line: turns what was typed into what is meant. Nothing outside this file knows `clap`.
//!
//! The words are a contract (`docs/architecture.md`, command lines). The environment is read here and nowhere else:
//! `HF_*` say which hub is meant, and as whom.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use minnow_common::Encoding;
use minnow_formats::hub::{Address, CONNECTIONS_MAX, RepoPath, Repository, Revision, Settings};
use minnow_formats::io::IoBackend;
use minnow_formats::mnw::Level;
use minnow_kernels::codec::Quality;

use crate::commands::remote::Access;
use crate::commands::{compare, convert, extract, inspect, manual, publish, pull, push, repair, synth, validate};
use crate::pipeline::budget;
use crate::plan::Choice;
use crate::synthetic::Preset;

/// One command with everything it needs, already checked.
#[derive(Debug)]
pub(crate) enum Command {
    /// Writes a `.mnw` file from a checkpoint.
    Convert(convert::Options),
    /// Says what a checkpoint is.
    Inspect(inspect::Options),
    /// Checks a `.mnw` file.
    Validate(validate::Options),
    /// Says how far one checkpoint's weights are from another's.
    Compare(compare::Options),
    /// Turns a `.mnw` file back into a safetensors folder.
    Extract(extract::Options),
    /// Writes a `.mnw` file with random weights.
    Synth(synth::Options),
    /// Makes a folder that is ready to be pushed.
    Publish(publish::Options),
    /// Lists what is wrong with such a folder.
    CheckPublished(publish::CheckOptions),
    /// Sends a folder to a hub.
    Push(push::Options),
    /// Fetches files from a hub.
    Pull(pull::Options),
    /// Makes a damaged file whole from a hub.
    Repair(repair::Options),
    /// Writes the manual pages.
    Manual(manual::Options),
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Help, version or a completion script, wanted by the user.
    Shown(String),
    /// One line on what is wrong with the command line.
    Usage(String),
}

/// Parses a whole command line, program name included.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, Refused> {
    let typed = Typed::try_parse_from(arguments).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Refused::Shown(error.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Refused::Usage("no command given; see mnwtool --help".to_owned())
        }
        _ => Refused::Usage(one_line(&error.to_string())),
    })?;
    match typed.command {
        TypedCommand::Convert(typed) => typed.meant().map(Command::Convert),
        TypedCommand::Inspect(typed) => Ok(Command::Inspect(inspect::Options {
            place: match typed.path.to_str().filter(|text| text.starts_with(Address::PREFIX)) {
                Some(text) => inspect::Place::Hub(text.parse().map_err(usage)?, typed.access.meant()?),
                None => inspect::Place::Local(typed.path),
            },
            tensors: typed.tensors,
            stats: typed.stats,
            workers: budget::worker_count(typed.workers),
            json: typed.json,
        })),
        TypedCommand::Validate(typed) => Ok(Command::Validate(validate::Options {
            file: typed.file,
            level: match typed.level {
                TypedLevel::Open => Level::Open,
                TypedLevel::Validate => Level::Validate,
                TypedLevel::Strict => Level::Strict,
            },
            workers: budget::worker_count(typed.workers),
            json: typed.json,
        })),
        TypedCommand::Compare(typed) => Ok(Command::Compare(compare::Options {
            source: typed.source,
            file: typed.file,
            workers: budget::worker_count(typed.workers),
            io: typed.io,
            json: typed.report.json,
            progress: !typed.report.no_progress,
        })),
        TypedCommand::Extract(typed) => Ok(Command::Extract(extract::Options {
            file: typed.file,
            folder: typed.folder,
            prefix: String::new(),
            float: typed.dtype.into(),
            shard_bytes_max: typed.shard_mib << 20,
            workers: budget::worker_count(typed.workers),
            json: typed.report.json,
            progress: !typed.report.no_progress,
        })),
        TypedCommand::Synth(typed) => typed.meant().map(Command::Synth),
        TypedCommand::Publish(typed) => typed.meant(),
        TypedCommand::Push(typed) => typed.meant().map(Command::Push),
        TypedCommand::Pull(typed) => typed.meant().map(Command::Pull),
        TypedCommand::Repair(typed) => typed.meant().map(Command::Repair),
        TypedCommand::Completions { shell } => Err(Refused::Shown(completions(shell))),
        TypedCommand::Manual { folder } => Ok(Command::Manual(manual::Options { folder, pages: manual_pages() })),
    }
}

fn usage(error: impl std::fmt::Display) -> Refused {
    Refused::Usage(error.to_string())
}

/// The message of a `clap` error without its headline word, usage and advice, on one line.
fn one_line(rendered: &str) -> String {
    let message = rendered.strip_prefix("error: ").unwrap_or(rendered);
    let advice = |line: &&str| ["tip:", "Usage:", "For more"].iter().any(|start| line.starts_with(start));
    let lines = message.lines().map(str::trim).take_while(|line| !advice(line));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Converts, inspects, validates and extracts LLaDA2.x checkpoints.
#[derive(Debug, Parser)]
#[command(name = "mnwtool", version, max_term_width = 100, subcommand_required = true)]
struct Typed {
    #[command(subcommand)]
    command: TypedCommand,
}

#[derive(Debug, Subcommand)]
enum TypedCommand {
    /// Convert a safetensors folder or a .mnw file into a .mnw file
    Convert(TypedConvert),
    /// Describe a .mnw file, a safetensors file or a folder
    Inspect(TypedInspect),
    /// Check a .mnw file
    Validate(TypedValidate),
    /// Measure how far the weights of one checkpoint are from those of another
    Compare(TypedCompare),
    /// Write a .mnw file's assets and tensors into a new safetensors folder
    Extract(TypedExtract),
    /// Write a .mnw file with random weights of realistic scale
    Synth(TypedSynth),
    /// Make a folder of .mnw files that is ready to be pushed: card, checksums, provenance; or check one
    Publish(TypedPublish),
    /// Send the files of a folder to a Hugging Face repository, in one commit
    Push(TypedPush),
    /// Fetch a file, or all files, of a Hugging Face repository
    Pull(TypedPull),
    /// Make a damaged .mnw file whole, fetching only what is damaged
    Repair(TypedRepair),
    /// Print a script that completes this command line: bash, zsh, fish, elvish or powershell
    Completions {
        /// For which shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write the manual pages
    Manual {
        /// Into which folder
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// A script that completes the command line.
fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Typed::command(), "mnwtool", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// A manual page for the program and one for each command, with their file names.
fn manual_pages() -> Vec<(String, Vec<u8>)> {
    let mut command = Typed::command();
    command.build();
    let commands = command.get_subcommands().filter(|command| command.get_name() != "help").cloned();
    let pages = commands.chain([command.clone()]).map(|command| {
        let (page, mut text) = (clap_mangen::Man::new(command), Vec::new());
        page.render(&mut text).expect("memory takes everything");
        (page.get_filename(), text)
    });
    pages.collect()
}

/// What a command that takes a while shows: shared by all of them.
#[derive(Debug, Args)]
struct TypedReport {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Show no progress bar
    #[arg(long)]
    no_progress: bool,
}

/// How a hub is reached: shared by all commands that do. HF_ENDPOINT says which one, HF_TOKEN as whom.
#[derive(Debug, Args)]
struct TypedAccess {
    /// File with the token; default: HF_TOKEN, or the file that hf auth login writes
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Tries of a request without any progress, with growing pauses
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100), default_value = "6")]
    tries: u32,
    /// Connections at a time, at most 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=CONNECTIONS_MAX as u64), default_value = "8")]
    connections: u64,
}

impl TypedAccess {
    fn meant(self) -> Result<Access, Refused> {
        let settings = Settings::from_environment(|name| std::env::var_os(name), self.token_file.as_deref());
        Ok(Access { settings: settings.map_err(usage)?, tries: self.tries, connections: self.connections as usize })
    }
}

#[derive(Debug, Args)]
struct TypedPublish {
    /// The .mnw files
    #[arg(value_name = "FILE", required_unless_present = "check")]
    files: Vec<PathBuf>,
    /// The folder to make; may exist if it is empty
    #[arg(long, value_name = "DIR", required_unless_present = "check")]
    to: Option<PathBuf>,
    /// List what is wrong with an existing folder instead
    #[arg(long, value_name = "DIR", conflicts_with_all = ["files", "to", "source", "template", "exam"])]
    check: Option<PathBuf>,
    /// The checkpoint that the files were made from: its digests, licence, and how far the files are from it
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// The repository that the model comes from; known if --source lies in the Hugging Face cache
    #[arg(long, value_name = "OWNER/NAME")]
    base_model: Option<Repository>,
    /// Its commit; known if --source lies in the Hugging Face cache
    #[arg(long, value_name = "COMMIT")]
    base_revision: Option<Revision>,
    /// The model's licence as Hugging Face writes it, such as apache-2.0; default: what the card of --source says
    #[arg(long, value_name = "ID", value_parser = license_id)]
    license: Option<String>,
    /// Where the folder will be pushed to, for the commands in the card
    #[arg(long, value_name = "OWNER/NAME")]
    repo: Option<Repository>,
    /// The card's title; default: the repository's name
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// What minnowd eval --json said of a file: NAME.mnw=RESULT.json; may be given several times
    #[arg(long, value_name = "NAME=FILE", value_parser = exam)]
    exam: Vec<(String, PathBuf)>,
    /// A minijinja template for the card
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Threads that read, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    #[command(flatten)]
    report: TypedReport,
}

fn license_id(typed: &str) -> Result<String, String> {
    let is_id = !typed.is_empty() && typed.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-+".contains(&byte));
    if is_id { Ok(typed.to_lowercase()) } else { Err("expected an id such as apache-2.0".to_owned()) }
}

fn exam(typed: &str) -> Result<(String, PathBuf), String> {
    match typed.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.to_owned(), PathBuf::from(path))),
        _ => Err("expected NAME.mnw=RESULT.json".to_owned()),
    }
}

impl TypedPublish {
    fn meant(self) -> Result<Command, Refused> {
        let (workers, json) = (budget::worker_count(self.workers), self.report.json);
        let progress = !self.report.no_progress;
        match (self.check, self.to) {
            (Some(folder), _) => Ok(Command::CheckPublished(publish::CheckOptions { folder, workers, json, progress })),
            (None, Some(folder)) => Ok(Command::Publish(publish::Options {
                files: self.files,
                folder,
                source: self.source,
                base: self.base_model,
                base_revision: self.base_revision,
                license: self.license,
                repository: self.repo,
                title: self.title,
                exams: self.exam,
                template: self.template,
                workers,
                json,
                progress,
            })),
            (None, None) => Err(Refused::Usage("publish needs --to DIR".to_owned())),
        }
    }
}

#[derive(Debug, Args)]
struct TypedPush {
    /// The folder; hidden files in it are left out
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The repository, OWNER/NAME
    #[arg(value_name = "REPO")]
    repository: Repository,
    /// The branch
    #[arg(long, value_name = "BRANCH", default_value = "main")]
    revision: Revision,
    /// First line of the commit's message
    #[arg(long, value_name = "TEXT", default_value = "Upload with mnwtool")]
    message: String,
    /// Make the repository if there is none
    #[arg(long, value_name = "WHO", value_enum)]
    create: Option<TypedSight>,
    /// Replace files that the repository has with other bytes
    #[arg(long)]
    replace: bool,
    /// Make every check and say what would be sent, but send nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    access: TypedAccess,
    /// Threads that validate, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    #[command(flatten)]
    report: TypedReport,
}

/// Who sees a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedSight {
    Private,
    Public,
}

impl TypedPush {
    fn meant(self) -> Result<push::Options, Refused> {
        Ok(push::Options {
            access: self.access.meant()?,
            folder: self.folder,
            repository: self.repository,
            revision: self.revision,
            message: self.message,
            create: self.create.map(|sight| sight == TypedSight::Private),
            replace: self.replace,
            dry_run: self.dry_run,
            workers: budget::worker_count(self.workers),
            json: self.report.json,
            progress: !self.report.no_progress,
        })
    }
}

#[derive(Debug, Args)]
struct TypedPull {
    /// The repository, OWNER/NAME
    #[arg(value_name = "REPO")]
    repository: Repository,
    /// The file; without it, all of them
    #[arg(value_name = "FILE")]
    path: Option<RepoPath>,
    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: Revision,
    /// The folder to fetch into; default: this one for a file, one named after the repository for all
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Fetch only the tensors whose names start so, and write them as a safetensors folder
    #[arg(long, value_name = "PREFIX", requires = "path", conflicts_with = "force")]
    tensors: Option<String>,
    /// What quantized tensors become with --tensors
    #[arg(long, value_name = "TYPE", value_enum, default_value = "bf16", requires = "tensors")]
    dtype: TypedFloat,
    #[command(flatten)]
    access: TypedAccess,
    /// Threads that validate or decode, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// Replace files that are there with other bytes
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: TypedReport,
}

impl TypedPull {
    fn meant(self) -> Result<pull::Options, Refused> {
        Ok(pull::Options {
            access: self.access.meant()?,
            repository: self.repository,
            revision: self.revision,
            path: self.path,
            folder: self.to,
            tensors: self.tensors.map(|prefix| (prefix, self.dtype.into())),
            workers: budget::worker_count(self.workers),
            force: self.force,
            json: self.report.json,
            progress: !self.report.no_progress,
        })
    }
}

#[derive(Debug, Args)]
struct TypedRepair {
    /// The damaged .mnw file
    file: PathBuf,
    /// The sound one, hf:OWNER/NAME/FILE or hf:OWNER/NAME@REVISION/FILE
    #[arg(long, value_name = "ADDRESS")]
    from: Address,
    /// Only list what is damaged
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    access: TypedAccess,
    /// Threads that look for damage, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    #[command(flatten)]
    report: TypedReport,
}

impl TypedRepair {
    fn meant(self) -> Result<repair::Options, Refused> {
        Ok(repair::Options {
            access: self.access.meant()?,
            file: self.file,
            from: self.from,
            dry_run: self.dry_run,
            workers: budget::worker_count(self.workers),
            json: self.report.json,
            progress: !self.report.no_progress,
        })
    }
}

/// What experts become, and how: shared by convert and synth.
#[derive(Debug, Args)]
struct TypedChoice {
    /// Encoding of the routed experts
    #[arg(long, value_name = "ENCODING", value_enum, default_value = "original")]
    experts: TypedExperts,
    /// Elements that share a scale: 16, 32, 64 or 128; 0 for the default (128, or 16 for nvfp4)
    #[arg(long, value_name = "N", value_parser = group_size, default_value = "0")]
    group_size: u64,
    /// Order of quantized elements: tensor-core tiles or plain rows [default: mma]
    #[arg(long, value_name = "LAYOUT", value_enum)]
    quant_layout: Option<TypedLayout>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedExperts {
    Original,
    Int8,
    Int4,
    Nvfp4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedLayout {
    Mma,
    Row,
}

fn group_size(typed: &str) -> Result<u64, String> {
    match typed.parse() {
        Ok(group @ (0 | 16 | 32 | 64 | 128)) => Ok(group),
        _ => Err("expected 16, 32, 64, 128, or 0 for the default".to_owned()),
    }
}

impl TypedChoice {
    fn meant(&self) -> Result<Choice, Refused> {
        let experts = match (self.experts, self.quant_layout) {
            (TypedExperts::Original, None) => None,
            (TypedExperts::Original, Some(_)) => {
                return Err(Refused::Usage("--quant-layout needs --experts int8 or --experts int4".to_owned()));
            }
            (TypedExperts::Nvfp4, Some(TypedLayout::Row)) => {
                return Err(Refused::Usage(
                    "--quant-layout row does not exist for --experts nvfp4; use mma".to_owned(),
                ));
            }
            (TypedExperts::Int8, Some(TypedLayout::Row)) => Some(Encoding::I8Sym),
            (TypedExperts::Int8, _) => Some(Encoding::I8Mma),
            (TypedExperts::Int4, Some(TypedLayout::Row)) => Some(Encoding::I4Sym),
            (TypedExperts::Int4, _) => Some(Encoding::I4Mma),
            (TypedExperts::Nvfp4, _) => Some(Encoding::Nvfp4),
        };
        if experts == Some(Encoding::Nvfp4) && !matches!(self.group_size, 0 | 16) {
            let message = format!("--group-size {} does not fit --experts nvfp4, whose groups are 16", self.group_size);
            return Err(Refused::Usage(message));
        }
        Ok(Choice { experts, group: self.group_size })
    }
}

#[derive(Debug, Args)]
struct TypedConvert {
    /// A safetensors folder (or file), or a .mnw file
    source: PathBuf,
    /// The .mnw file to write
    output: PathBuf,
    #[command(flatten)]
    choice: TypedChoice,
    /// JSON list of {prefix, encoding, group_size}; the last rule whose prefix matches a tensor decides
    #[arg(long, value_name = "FILE")]
    tensor_rules: Option<PathBuf>,
    /// How scales are chosen: rtn by the largest value (the specified bytes), search by the least error (slower)
    #[arg(long, value_name = "QUALITY", value_enum, default_value = "rtn")]
    quality: TypedQuality,
    /// Threads that quantize, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// How the source is read: auto, uring, direct, buffered or mmap
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    io: IoBackend,
    /// Name stored in the file instead of the source's last path component
    #[arg(long, value_name = "TEXT")]
    model_id: Option<String>,
    /// Make every check and print the plan, but write nothing
    #[arg(long)]
    dry_run: bool,
    /// Continue what a killed run of the same conversion left behind, after checking it; the bytes are the same
    #[arg(long)]
    resume: bool,
    /// How much output may have to be made again after a kill, in MiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(..=1 << 20), default_value = "256")]
    journal_mib: u64,
    /// Do not read the complete file once more to check it and to report its SHA-256
    #[arg(long)]
    no_sha256: bool,
    /// Replace an existing output, atomically, once the new file is complete
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: TypedReport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedQuality {
    Rtn,
    Search,
}

impl TypedConvert {
    fn meant(self) -> Result<convert::Options, Refused> {
        Ok(convert::Options {
            choice: self.choice.meant()?,
            source: self.source,
            output: self.output,
            rules_file: self.tensor_rules,
            quality: match self.quality {
                TypedQuality::Rtn => Quality::Rtn,
                TypedQuality::Search => Quality::Search,
            },
            workers: budget::worker_count(self.workers),
            io: self.io,
            model_id: self.model_id,
            dry_run: self.dry_run,
            resume: self.resume,
            journal_bytes: self.journal_mib << 20,
            sha256: !self.no_sha256,
            force: self.force,
            json: self.report.json,
            progress: !self.report.no_progress,
        })
    }
}

#[derive(Debug, Args)]
struct TypedInspect {
    /// A .mnw file, a safetensors file or a folder; or a .mnw file at a hub, hf:OWNER/NAME/FILE
    path: PathBuf,
    #[command(flatten)]
    access: TypedAccess,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Read every tensor: range, root mean square, zeros, suspicious experts, and the SHA-256 of each file
    #[arg(long)]
    stats: bool,
    /// Threads that read for --stats, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct TypedValidate {
    /// The .mnw file
    file: PathBuf,
    /// open: structure; validate: and digests and scales; strict: and the canonical layout
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "validate")]
    level: TypedLevel,
    /// Threads that read and hash, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedLevel {
    Open,
    Validate,
    Strict,
}

#[derive(Debug, Args)]
struct TypedCompare {
    /// What the weights should be: a .mnw file, a safetensors file or a folder
    source: PathBuf,
    /// What they are: the same
    file: PathBuf,
    /// Threads that read and decode, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// How both are read: auto, uring, direct, buffered or mmap
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    io: IoBackend,
    #[command(flatten)]
    report: TypedReport,
}

#[derive(Debug, Args)]
struct TypedExtract {
    /// The .mnw file
    file: PathBuf,
    /// The folder to make; may exist if it is empty
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// What quantized tensors become; floating tensors are kept as stored
    #[arg(long, value_name = "TYPE", value_enum, default_value = "bf16")]
    dtype: TypedFloat,
    /// The largest safetensors file to write, in MiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20), default_value = "4096")]
    shard_mib: u64,
    /// Threads that decode, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    #[command(flatten)]
    report: TypedReport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedFloat {
    Bf16,
    F32,
}

impl From<TypedFloat> for minnow_common::FloatType {
    fn from(typed: TypedFloat) -> Self {
        match typed {
            TypedFloat::Bf16 => Self::Bf16,
            TypedFloat::F32 => Self::F32,
        }
    }
}

#[derive(Debug, Args)]
struct TypedSynth {
    /// The .mnw file to write
    output: PathBuf,
    /// Which released configuration to imitate
    #[arg(long, value_name = "PRESET", value_enum)]
    preset: TypedPreset,
    #[command(flatten)]
    choice: TypedChoice,
    /// Number that all weights are derived from
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Make only the first N layers
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Threads that make weights, at most 64; 0 for one per CPU, at most 8
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=budget::WORKERS_MAX as u64), default_value = "0")]
    workers: u64,
    /// Replace an existing output, atomically, once the new file is complete
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: TypedReport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TypedPreset {
    Tiny,
    Mini,
    Flash,
}

impl TypedSynth {
    fn meant(self) -> Result<synth::Options, Refused> {
        let preset = match self.preset {
            TypedPreset::Tiny => Preset::Tiny,
            TypedPreset::Mini => Preset::Mini,
            TypedPreset::Flash => Preset::Flash,
        };
        let layers = self.layers.unwrap_or(preset.layers());
        if !(1..=preset.layers()).contains(&layers) {
            let message =
                format!("--layers {layers} does not fit --preset {}: expected 1 to {}", preset.name(), preset.layers());
            return Err(Refused::Usage(message));
        }
        Ok(synth::Options {
            choice: self.choice.meant()?,
            output: self.output,
            preset,
            seed: self.seed,
            layers,
            workers: budget::worker_count(self.workers),
            force: self.force,
            json: self.report.json,
            progress: !self.report.no_progress,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, Refused> {
        parse(std::iter::once("mnwtool").chain(line.split_whitespace()).map(OsString::from))
    }

    fn refusal(line: &str) -> String {
        match parsed(line) {
            Err(Refused::Usage(message)) => message,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn experts_and_layout_name_an_encoding() {
        for (flags, expected) in [
            ("", None),
            ("--experts original", None),
            ("--experts int8", Some(Encoding::I8Mma)),
            ("--experts int8 --quant-layout row", Some(Encoding::I8Sym)),
            ("--experts int4 --quant-layout mma", Some(Encoding::I4Mma)),
            ("--experts int4 --quant-layout row", Some(Encoding::I4Sym)),
            ("--experts nvfp4 --group-size 16", Some(Encoding::Nvfp4)),
        ] {
            let Ok(Command::Convert(options)) = parsed(&format!("convert a b {flags}")) else { panic!("{flags}") };
            assert_eq!(options.choice.experts, expected, "{flags}");
        }
    }

    #[test]
    fn a_bad_value_is_one_line_with_flag_and_value() {
        for (line, words) in [
            ("convert a b --experts int5", &["int5", "--experts", "int4"][..]),
            ("convert a b --group-size 48", &["48", "--group-size", "128"]),
            ("convert a b --workers 65", &["65", "--workers", "64"]),
            ("convert a b --workers -1", &["-1"]),
            ("convert a b --io floppy", &["floppy", "--io"]),
            ("convert a b --experts nvfp4 --quant-layout row", &["--quant-layout row", "nvfp4"]),
            ("convert a b --experts nvfp4 --group-size 32", &["--group-size 32", "nvfp4"]),
            ("convert a b --quant-layout row", &["--quant-layout"]),
            ("convert a b --quality best", &["--quality", "best", "search"]),
            ("convert a", &["OUTPUT"]),
            ("compare a --json", &["FILE"]),
            ("push x", &["REPO"]),
            ("push x y", &["y", "OWNER/NAME"]),
            ("pull a/b ../c", &["../c"]),
            ("pull a/b --tensors model", &["FILE"]),
            ("repair a --from b", &["b", "hf:OWNER/NAME"]),
            ("inspect hf:a/b", &["hf:a/b", "hf:OWNER/NAME/FILE"]),
            ("synth a --preset huge", &["huge", "--preset"]),
            ("synth a --preset tiny --layers 9", &["--layers 9", "tiny"]),
            ("validate a --level paranoid", &["paranoid", "--level"]),
            ("frobnicate", &["frobnicate"]),
            ("", &["no command"]),
        ] {
            let message = refusal(line);
            assert!(!message.contains('\n'), "{line}: {message}");
            for word in words {
                assert!(message.contains(word), "{line}: {message}");
            }
        }
    }

    #[test]
    fn help_is_not_an_error() {
        assert!(matches!(parsed("convert --help"), Err(Refused::Shown(text)) if text.contains("--tensor-rules")));
        assert!(matches!(parsed("--version"), Err(Refused::Shown(_))));
    }
}
