//! What the clients ask: a file of questions, or a built-in set.

use std::path::Path;

use anyhow::{Context, bail};
use minnow_common::random::keyed;
use serde_json::{Value, json};

use crate::session::Session;

/// Questions, each as it goes over HTTP and as ids.
pub(super) struct Prompts {
    questions: Vec<Question>,
    vocabulary: u32,
}

/// One question.
pub(super) struct Question {
    /// Path of the route that takes it.
    pub path: &'static str,
    /// Members of the request's body that say what is asked.
    pub body: Value,
    /// The prompt.
    pub ids: Vec<u32>,
}

/// A text that half of the built-in questions begin with, so that there is something to find in the cache.
const SYSTEM: &str = "You are a helpful assistant. Answer briefly and correctly. If a question asks for a number, give the \
                      number. If it asks for a story, tell one with a beginning, a middle and an end. Do not make up facts.";

impl Prompts {
    /// The questions of `file`, or the built-in ones.
    pub(super) fn read(file: Option<&Path>, session: &Session) -> anyhow::Result<Self> {
        let bodies: Vec<Value> = match file {
            None => built_in(),
            Some(path) => {
                let name = path.display();
                let text = std::fs::read_to_string(path).with_context(|| name.to_string())?;
                let lines = text.lines().filter(|line| !line.trim().is_empty());
                lines.map(serde_json::from_str).collect::<Result<_, _>>().with_context(|| name.to_string())?
            }
        };
        let questions = bodies.iter().map(|body| Question::read(body, session)).collect::<anyhow::Result<Vec<_>>>()?;
        if questions.is_empty() {
            bail!("there are no questions");
        }
        Ok(Self { questions, vocabulary: u32::try_from(session.config.vocab_size).unwrap_or(u32::MAX) })
    }

    /// Question `number` of client `client`: all are asked, in another order by each.
    pub(super) fn question(&self, client: u64, number: u64) -> &Question {
        let index = keyed(client, &[number]) % self.questions.len() as u64;
        &self.questions[index as usize]
    }

    /// A prompt of `tokens` ids that no one has seen before: ordinary ids from the first half of the vocabulary.
    pub(super) fn unseen(&self, number: u64, tokens: usize) -> Question {
        let id = |position: u64| (keyed(0x10f6, &[number, position]) % u64::from(self.vocabulary / 2)) as u32;
        let ids: Vec<u32> = (0..tokens as u64).map(id).collect();
        Question { path: "/v1/completions", body: json!({ "prompt": ids, "cache_prompt": false }), ids }
    }
}

impl Question {
    /// A line of the file: `prompt_ids`, `prompt` or `messages`, and perhaps `tools`.
    fn read(line: &Value, session: &Session) -> anyhow::Result<Self> {
        if let Some(ids) = line.get("prompt_ids") {
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).context("prompt_ids")?;
            return Ok(Self { path: "/v1/completions", body: json!({ "prompt": ids }), ids });
        }
        if let Some(text) = line.get("prompt").and_then(Value::as_str) {
            let ids = session.encode_raw(text)?;
            return Ok(Self { path: "/v1/completions", body: json!({ "prompt": text }), ids });
        }
        let messages = line
            .get("messages")
            .and_then(Value::as_array)
            .context("a question needs prompt_ids, prompt or messages")?;
        let tools = line.get("tools").and_then(Value::as_array);
        let ids = session.encode_chat(messages.clone(), tools.cloned(), None)?;
        let mut body = json!({ "messages": messages });
        if let Some(tools) = tools {
            body["tools"] = json!(tools);
        }
        Ok(Self { path: "/v1/chat/completions", body, ids })
    }
}

/// Short and long answers about evenly; every second one after the common beginning.
fn built_in() -> Vec<Value> {
    const ANIMALS: [&str; 8] = ["fox", "owl", "bear", "mouse", "rabbit", "cat", "duck", "wolf"];
    const NAMES: [&str; 8] = ["Anna", "Ben", "Clara", "Dan", "Eva", "Finn", "Gina", "Hugo"];
    const COUNTRIES: [&str; 8] = ["France", "Japan", "Brazil", "Kenya", "Italy", "Canada", "Norway", "Egypt"];
    let mut questions = Vec::new();
    for (index, ((animal, name), country)) in ANIMALS.iter().zip(NAMES).zip(COUNTRIES).enumerate() {
        let texts = [
            format!("Tell me a story about a brave {animal} named {name}."),
            format!("What is the capital of {country}?"),
            format!("Tell me a story about a clever {animal} named {name} who lives in {country}."),
            format!("Compute {} + {}.", 17 * index + 5, 31 * index + 9),
        ];
        for (number, text) in texts.into_iter().enumerate() {
            let user = json!({ "role": "user", "content": text });
            let system = json!({ "role": "system", "content": SYSTEM });
            let messages = if (index + number) % 2 == 0 { json!([user]) } else { json!([system, user]) };
            questions.push(json!({ "messages": messages }));
        }
    }
    questions
}
