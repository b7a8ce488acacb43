//! `minnowd generate`: answers one prompt on standard output, block by block.

use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cache::Access;
use crate::config::{DecodingDefaults, ModelSource};
use crate::engine::runner::{Progress, Task};
use crate::grammar::Grammar;
use crate::session::Loaded;
use crate::text::{Delta, OutputText};

/// What to answer and how to show it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt; `-` reads standard input.
    pub prompt: String,
    /// A system message before it.
    pub system: Option<String>,
    /// Continue the text as it is, without the chat template.
    pub raw: bool,
    /// Output limit; `None` is what the context leaves.
    pub max_tokens: Option<usize>,
    /// What the output must look like; `None` is anything.
    pub form: Option<Form>,
    /// Print one JSON object instead of the text.
    pub json: bool,
}

/// What an output must look like.
#[derive(Clone, Debug)]
pub enum Form {
    /// JSON that fits the schema in this file.
    JsonSchema(PathBuf),
    /// A match of this regular expression.
    Regex(String),
    /// A sentence of the Lark grammar in this file.
    Grammar(PathBuf),
}

impl Form {
    /// The grammar, with its flag in errors.
    fn grammar(&self) -> anyhow::Result<Grammar> {
        let read = |path: &PathBuf| std::fs::read_to_string(path).with_context(|| path.display().to_string());
        Ok(match self {
            Self::JsonSchema(path) => {
                let schema = serde_json::from_str(&read(path)?).with_context(|| path.display().to_string())?;
                Grammar::Json(schema)
            }
            Self::Regex(pattern) => Grammar::Regex(pattern.clone()),
            Self::Grammar(path) => Grammar::Lark(read(path)?),
        })
    }

    /// The flag that says so.
    fn flag(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "--json-schema",
            Self::Regex(_) => "--regex",
            Self::Grammar(_) => "--grammar",
        }
    }
}

/// Answers and prints.
pub fn run(source: &ModelSource, decoding: &DecodingDefaults, request: Request) -> anyhow::Result<ExitCode> {
    let mut prompt = request.prompt;
    if prompt == "-" {
        prompt.clear();
        std::io::stdin().read_to_string(&mut prompt).context("standard input")?;
    }
    let form = match &request.form {
        Some(form) => Some((form.grammar().context(form.flag())?, form.flag())),
        None => None,
    };
    let Loaded { session, mut runner } = Loaded::open(source, decoding, 1)?;
    let language = match form {
        Some((grammar, flag)) => Some(session.grammars.compile(&grammar).context(flag)?),
        None => None,
    };
    let ids = if request.raw {
        session.encode_raw(&prompt)?
    } else {
        let system = request.system.map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
        session.encode_chat(messages, None, None)?
    };
    let room = session.room_after(ids.len())?;
    let task = Task {
        prompt: ids,
        max_new: request.max_tokens.map_or(room, |limit| limit.min(room)),
        options: session.default_options,
        seed: session.default_seed.unwrap_or_else(|| fastrand::u64(..)),
        stop_ids: session.stop_ids(),
        cache: Access::Shared,
        language,
    };
    let mut output = OutputText::plain(&session.tokenizer, &[]).ending_at(&task.stop_ids);
    let mut printer = Printer { text: String::new(), is_silent: request.json };
    let (prompt_ids, seed) = (task.prompt.clone(), task.seed);
    let outcome = runner.run(task, &mut |progress| {
        if let Progress::Block { tokens, .. } = progress {
            printer.take(output.push(tokens));
        }
        ControlFlow::Continue(())
    })?;
    printer.take(output.finish());
    let stats = &outcome.stats;
    if request.json {
        let object = json!({
            "model": session.model_id,
            "backend": session.backend,
            "text": printer.text,
            "prompt_ids": prompt_ids,
            "token_ids": outcome.tokens,
            "finish_reason": outcome.reason.name(),
            "seed": seed,
            "stats": {
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": stats.completion_tokens,
                "denoise_forwards": stats.denoise_forwards,
                "commit_forwards": stats.commit_forwards,
                "reused_commits": stats.reused_commits,
                "cached_tokens": stats.cached_tokens,
                "tokens_per_forward": stats.tokens_per_forward(),
                "constrained_forwards": stats.constrained_forwards,
                "determined_tokens": stats.determined_tokens,
                "forced_blocks": stats.forced_blocks,
                "repeated_tokens": stats.repeated_tokens,
                "token_edits": stats.token_edits,
                "deletes": stats.deletes,
                "splits": stats.splits,
                "forwards_per_block": stats.blocks.iter().map(|block| block.forwards).collect::<Vec<_>>(),
                "prefill_seconds": stats.prefill.as_secs_f64(),
                "decode_seconds": stats.decode.as_secs_f64(),
            },
        });
        println!("{object}");
    } else {
        println!();
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows text as blocks become final, and remembers it.
struct Printer {
    text: String,
    is_silent: bool,
}

impl Printer {
    fn take(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            let Delta::Content(text) = delta else { continue };
            if !self.is_silent {
                print!("{text}");
                let _ = std::io::stdout().flush();
            }
            self.text.push_str(&text);
        }
    }
}
