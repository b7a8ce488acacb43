//! `minnowd eval`: takes an exam and prints exact match per task and tokens per forward.
//!
//! A question is a JSON line with `expected` and one of `prompt_ids`, `prompt` (text with control tokens) or `messages`
//! (and `tools`). The answer, control tokens kept and cut before the first stop id, must equal `expected` entirely.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cache::Access;
use crate::config::{DecodingDefaults, ModelSource};
use crate::engine::runner::{Runner, Task};
use crate::session::{Loaded, Session};

/// Which questions, and how long answers may be.
#[derive(Clone, Debug)]
pub struct Exam {
    /// The JSON-lines file.
    pub data: PathBuf,
    /// Output limit of each answer.
    pub max_tokens: usize,
    /// Ask only every Nth question.
    pub every: usize,
    /// Print one JSON object instead of a table.
    pub json: bool,
}

#[derive(Debug, Deserialize)]
struct Question {
    id: Option<String>,
    #[serde(default)]
    task: String,
    expected: String,
    prompt_ids: Option<Vec<u32>>,
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
}

/// One answered question.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The question's id, or its line number.
    pub id: String,
    /// The task it belongs to.
    pub task: String,
    /// Whether the text equals what was expected.
    pub ok: bool,
    /// The text.
    pub text: String,
    /// Tokens up to and including the stop id.
    pub completion_tokens: usize,
    /// Refinement forwards of each block.
    pub forwards: Vec<usize>,
}

/// Sums over the questions of one task, or of all.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Score {
    /// Questions asked.
    pub questions: usize,
    /// Answers that were right.
    pub right: usize,
    /// Completion tokens.
    pub tokens: usize,
    /// Refinement forwards.
    pub forwards: usize,
}

impl Score {
    fn add(&mut self, answer: &Answer) {
        self.questions += 1;
        self.right += usize::from(answer.ok);
        self.tokens += answer.completion_tokens;
        self.forwards += answer.forwards.iter().sum::<usize>();
    }

    /// Right answers in percent.
    #[must_use]
    pub fn exact_match(&self) -> f64 {
        100.0 * self.right as f64 / self.questions.max(1) as f64
    }

    /// Completion tokens for each refinement forward.
    #[must_use]
    pub fn tokens_per_forward(&self) -> f64 {
        self.tokens as f64 / self.forwards.max(1) as f64
    }
}

/// Takes the exam and prints the result.
pub fn run(source: &ModelSource, decoding: &DecodingDefaults, exam: &Exam) -> anyhow::Result<ExitCode> {
    let questions = read(exam)?;
    let Loaded { session, mut runner } = Loaded::open(source, decoding, 1)?;
    let started = Instant::now();
    let mut answers = Vec::with_capacity(questions.len());
    for (line, question) in questions {
        let where_ = || format!("{}:{line}", exam.data.display());
        answers.push(ask(&session, &mut runner, line, question, exam.max_tokens).with_context(where_)?);
    }
    report(&session, &answers, started.elapsed().as_secs_f64(), exam.json);
    Ok(ExitCode::SUCCESS)
}

/// The chosen questions with their line numbers.
fn read(exam: &Exam) -> anyhow::Result<Vec<(usize, Question)>> {
    let name = exam.data.display();
    let text = std::fs::read_to_string(&exam.data).with_context(|| name.to_string())?;
    let mut questions = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).step_by(exam.every) {
        let question = serde_json::from_str(line).with_context(|| format!("{name}:{}", index + 1))?;
        questions.push((index + 1, question));
    }
    if questions.is_empty() {
        bail!("{name}: no questions");
    }
    Ok(questions)
}

fn ask(
    session: &Session,
    runner: &mut Runner,
    line: usize,
    question: Question,
    max_tokens: usize,
) -> anyhow::Result<Answer> {
    let prompt = match (question.prompt_ids, question.prompt, question.messages) {
        (Some(ids), _, _) => ids,
        (None, Some(text), _) => session.encode_raw(&text)?,
        (None, None, Some(messages)) => session.encode_chat(messages, question.tools, None)?,
        (None, None, None) => bail!("a question needs prompt_ids, prompt or messages"),
    };
    let task = Task {
        max_new: session.room_after(prompt.len())?.min(max_tokens),
        prompt,
        options: session.default_options,
        seed: session.default_seed.unwrap_or(0),
        stop_ids: session.stop_ids(),
        cache: Access::Shared,
        language: None,
    };
    let outcome = runner.run(task, &mut |_| ControlFlow::Continue(()))?;
    let visible = match outcome.tokens.split_last() {
        Some((last, rest)) if session.special.stop.contains(last) => rest,
        _ => &outcome.tokens[..],
    };
    let text = session.tokenizer.decode_with_specials(visible);
    Ok(Answer {
        id: question.id.unwrap_or_else(|| format!("line {line}")),
        ok: text == question.expected,
        task: question.task,
        text,
        completion_tokens: outcome.tokens.len(),
        forwards: outcome.stats.blocks.iter().map(|block| block.forwards).collect(),
    })
}

fn report(session: &Session, answers: &[Answer], seconds: f64, json: bool) {
    let mut tasks: BTreeMap<&str, Score> = BTreeMap::new();
    let mut all = Score::default();
    for answer in answers {
        tasks.entry(&answer.task).or_default().add(answer);
        all.add(answer);
    }
    if json {
        let object = serde_json::json!({
            "model": session.model_id,
            "backend": session.backend,
            "encodings": session.file_type,
            "threshold": session.default_options.threshold,
            "seconds": seconds,
            "exact_match": all.exact_match(),
            "tokens_per_forward": all.tokens_per_forward(),
            "all": all,
            "tasks": tasks,
            "answers": answers,
        });
        println!("{object}");
        return;
    }
    println!("{:<20} {:>5} {:>8} {:>8}", "task", "n", "EM", "tok/fwd");
    let rows = tasks.iter().map(|(task, score)| (*task, score)).chain([("all", &all)]);
    for (task, score) in rows {
        let (match_, speed) = (score.exact_match(), score.tokens_per_forward());
        println!("{task:<20} {:>5} {match_:>6.1} % {speed:>8.2}", score.questions);
    }
    println!(
        "{} ({}), {}: {} of {} right, threshold {}, {} forwards in {seconds:.1} s",
        session.model_id,
        session.file_type,
        session.backend,
        all.right,
        all.questions,
        session.default_options.threshold,
        all.forwards
    );
}
