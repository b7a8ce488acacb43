//! The conversation of a chat request, checked and brought into the form that templates read.
//!
//! A message becomes `{role, content, reasoning_content?, tool_calls?, tool_call_id?}`: `developer` is `system`, content
//! is one string, names are dropped (a template would put them in place of the role), and tool results are known to
//! answer a call that has no result yet.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, as_list, wrong_type, wrong_value};

/// Messages of a request, and parts or calls of a message.
const MESSAGES_MAX: usize = 8192;
const PARTS_MAX: usize = 1024;
/// Members of a part that come back with an answer.
pub(crate) const INERT: [&str; 2] = ["annotations", "logprobs"];

/// A checked conversation. Dialects put theirs together with [`say`](Self::say), [`call`](Self::call) and
/// [`answer_call`](Self::answer_call).
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Conversation {
    /// One object for each message, as templates read it; never empty.
    pub messages: Vec<Value>,
    /// Calls that earlier assistant messages made.
    pub calls: usize,
    /// Members that had no effect.
    pub ignored: Vec<String>,
    /// Ids of calls without a result, and how many calls have that id.
    open_calls: HashMap<String, usize>,
}

impl Conversation {
    /// Takes `messages` out.
    pub(crate) fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut conversation = Self::default();
        for message in entries("messages", fields.required("messages")?)? {
            conversation.add(message?)?;
        }
        Ok(conversation)
    }

    /// Adds a message without calls.
    pub(crate) fn say(&mut self, role: &str, content: String) {
        self.messages.push(json!({ "role": role, "content": content }));
    }

    /// Adds a call to the assistant's message that the conversation ends with, or to a new one.
    pub(crate) fn call(&mut self, id: String, name: &str, arguments: String) {
        if self.messages.last().is_none_or(|message| message["role"] != "assistant") {
            self.say("assistant", String::new());
        }
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        if let Some(Value::Object(message)) = self.messages.last_mut() {
            match message.get_mut("tool_calls") {
                Some(Value::Array(calls)) => calls.push(call),
                _ => drop(message.insert("tool_calls".to_owned(), json!([call]))),
            }
        }
        self.expect_result(id);
    }

    /// Adds the result of a call that has none yet; its id stands at `path`.
    pub(crate) fn answer_call(&mut self, path: &str, id: &str, content: String) -> Result<(), ApiError> {
        self.close_call(path, id)?;
        self.messages.push(json!({ "role": "tool", "content": content, "tool_call_id": id }));
        Ok(())
    }

    fn expect_result(&mut self, id: String) {
        *self.open_calls.entry(id).or_insert(0) += 1;
        self.calls += 1;
    }

    fn close_call(&mut self, path: &str, id: &str) -> Result<(), ApiError> {
        match self.open_calls.get_mut(id) {
            Some(open) if *open > 0 => {
                *open -= 1;
                Ok(())
            }
            _ => {
                let message = format!("{path} names no earlier call that is without a result");
                Err(ApiError::new(Code::InvalidToolHistory, message).at(path))
            }
        }
    }

    /// Adds a system message after those that the conversation begins with.
    pub(crate) fn instruct(&mut self, message: Value) {
        let first = self.messages.iter().position(|message| message["role"] != "system");
        self.messages.insert(first.unwrap_or(self.messages.len()), message);
    }

    fn add(&mut self, mut fields: Fields) -> Result<(), ApiError> {
        let role = fields.required_text("role")?;
        let role = match role.as_str() {
            "developer" => "system",
            "system" | "user" | "assistant" | "tool" => role.as_str(),
            _ => {
                let expected = "must be system, developer, user, assistant or tool";
                return Err(wrong_value(&fields.path("role"), &json!(role), expected));
            }
        };
        let calls = if role == "assistant" { self.read_calls(&mut fields)? } else { Vec::new() };
        let content = read_text(&mut fields, "content", &INERT, &mut self.ignored)?;
        let mut message = Map::new();
        message.insert("role".to_owned(), json!(role));
        match content {
            Some(text) => message.insert("content".to_owned(), json!(text)),
            None if !calls.is_empty() => message.insert("content".to_owned(), json!("")),
            None => {
                let path = fields.path("content");
                return Err(ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path));
            }
        };
        if role == "assistant" {
            if let Some(reasoning) = fields.text("reasoning_content")? {
                message.insert("reasoning_content".to_owned(), json!(reasoning));
            }
            for name in ["audio", "function_call"] {
                if fields.take(name).is_some() {
                    let path = fields.path(name);
                    return Err(ApiError::new(Code::UnsupportedContent, format!("{path} is not supported")).at(path));
                }
            }
        }
        if role == "tool" {
            let path = fields.path("tool_call_id");
            let id = fields.required_text("tool_call_id")?;
            self.close_call(&path, &id)?;
            message.insert("tool_call_id".to_owned(), json!(id));
        }
        if !calls.is_empty() {
            for id in calls.iter().filter_map(|call| call["id"].as_str()) {
                self.expect_result(id.to_owned());
            }
            message.insert("tool_calls".to_owned(), json!(calls));
        }
        for name in ["name", "refusal", "annotations", "reasoning_content", "timestamp", "tool_calls", "audio"] {
            fields.take(name);
        }
        self.ignored.extend(fields.rest());
        self.messages.push(Value::Object(message));
        Ok(())
    }

    fn read_calls(&mut self, fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
        let path = fields.path("tool_calls");
        let calls = fields.list("tool_calls")?.unwrap_or_default();
        check_count(&path, calls.len())?;
        let calls = calls.into_iter().enumerate().map(|(index, call)| {
            let mut fields = Fields::nested(format!("{path}[{index}]"), call)?;
            let id = fields.required_text("id")?;
            if let Some(kind) = fields.text("type")?.filter(|kind| kind != "function") {
                return Err(wrong_value(&fields.path("type"), &json!(kind), "must be \"function\""));
            }
            let mut function = Fields::nested(fields.path("function"), fields.required("function")?)?;
            let name = function.required_text("name")?;
            let arguments = function.required_text("arguments")?;
            // The index of streamed calls, which some clients send back.
            fields.take("index");
            self.ignored.extend(fields.rest());
            self.ignored.extend(function.rest());
            Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        });
        calls.collect()
    }
}

/// The entries of a list that a conversation is written in, each an object.
pub(crate) fn entries(path: &str, value: Value) -> Result<impl Iterator<Item = Result<Fields, ApiError>>, ApiError> {
    let list = as_list(path, value)?;
    if list.is_empty() || list.len() > MESSAGES_MAX {
        let message = format!("{path} has {} entries, it must have 1 to {MESSAGES_MAX}", list.len());
        return Err(ApiError::new(Code::InvalidValue, message).at(path));
    }
    let path = path.to_owned();
    Ok(list.into_iter().enumerate().map(move |(index, entry)| Fields::nested(format!("{path}[{index}]"), entry)))
}

/// The text of a member: a string, or parts joined without a separator. Of parts, `inert` members have no effect.
pub(crate) fn read_text(
    fields: &mut Fields,
    name: &str,
    inert: &[&str],
    ignored: &mut Vec<String>,
) -> Result<Option<String>, ApiError> {
    let path = fields.path(name);
    let parts = match fields.take(name) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(&path, "a string or a list of parts", &other)),
    };
    check_count(&path, parts.len())?;
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::nested(format!("{path}[{index}]"), part)?;
        let kind = part.required_text("type")?;
        if !matches!(kind.as_str(), "text" | "input_text" | "output_text") {
            return Err(not_text(part.path("type"), &kind));
        }
        text.push_str(&part.required_text("text")?);
        for name in inert {
            part.take(name);
        }
        ignored.extend(part.rest());
    }
    Ok(Some(text))
}

/// The refusal of a part of some kind, which stands at `path`.
pub(crate) fn not_text(path: String, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    let message = format!("{path} is \"{kind}\", but this model reads text only");
    ApiError::new(Code::UnsupportedContent, message).at(path)
}

/// Bounds the parts or calls of a message.
pub(crate) fn check_count(path: &str, count: usize) -> Result<(), ApiError> {
    if count <= PARTS_MAX {
        return Ok(());
    }
    Err(ApiError::new(Code::InvalidValue, format!("{path} has {count} entries, at most {PARTS_MAX} are allowed"))
        .at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(messages: Value) -> Result<Conversation, ApiError> {
        Conversation::read(&mut Fields::new(Map::from_iter([("messages".to_owned(), messages)])))
    }

    fn calling(ids: &[&str]) -> Value {
        let call =
            |id: &&str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "not json"}});
        json!({"role": "assistant", "content": null, "tool_calls": ids.iter().map(call).collect::<Vec<_>>()})
    }

    fn result(id: &str) -> Value {
        json!({"role": "tool", "tool_call_id": id, "content": "r"})
    }

    #[test]
    fn every_legal_role_and_content_is_taken() {
        let conversation = read(json!([
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}], "name": "ann"},
            {"role": "assistant", "content": "", "refusal": null, "reasoning_content": "r"},
            {"role": "system", "content": "later"},
            {"role": "user", "content": "", "timestamp": 5, "frob": 1},
        ]))
        .unwrap();
        assert_eq!(conversation.messages[0], json!({"role": "system", "content": "d"}));
        assert_eq!(conversation.messages[1], json!({"role": "user", "content": "a b"}));
        assert_eq!(conversation.messages[2], json!({"role": "assistant", "content": "", "reasoning_content": "r"}));
        assert_eq!(conversation.ignored, ["messages[4].frob"]);
    }

    #[test]
    fn results_answer_calls_in_any_order_and_once() {
        let conversation =
            read(json!([calling(&["a", "b"]), result("b"), result("a"), calling(&["a"]), result("a")])).unwrap();
        assert_eq!(conversation.calls, 3);
        assert_eq!(conversation.messages[0]["content"], "");
        assert!(read(json!([calling(&["a", "b"]), result("b")])).is_ok(), "a result may be missing");
        let absent = json!({"role": "assistant", "tool_calls": calling(&["a"])["tool_calls"]});
        assert!(read(json!([absent])).is_ok());
        for (history, param) in [
            (json!([result("a")]), "messages[0].tool_call_id"),
            (json!([calling(&["a"]), result("a"), result("a")]), "messages[2].tool_call_id"),
            (json!([result("a"), calling(&["a"])]), "messages[0].tool_call_id"),
        ] {
            let error = read(history).unwrap_err();
            assert_eq!((error.code(), &error.body()["error"]["param"]), (Code::InvalidToolHistory, &json!(param)));
        }
    }

    #[test]
    fn wrong_messages_are_named() {
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!("hi"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "wizard", "content": "x"}]), "messages[0].role"),
            (json!([{"role": 5, "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": null}]), "messages[0].content"),
            (json!([{"role": "assistant", "content": null}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": ["x"]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
            (json!([{"role": "assistant", "tool_calls": [{"id": "a"}]}]), "messages[0].tool_calls[0].function"),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (json!(vec![json!({"role": "user", "content": "x"}); 8193]), "messages"),
        ] {
            let error = read(messages).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param);
            assert_eq!(error.status(), 400);
        }
    }
}
