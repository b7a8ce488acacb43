//! A request to the Messages API as a [`ChatRequest`].
//!
//! A user's message with tool results becomes one message for each result and one for the text around them, in their
//! order. An assistant's becomes one, with its text and its calls. What was thought is dropped.

use serde_json::{Map, Value, json};

use crate::config::Unsupported;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, wrong_type, wrong_value};
use crate::http::openai::chat::ChatRequest;
use crate::http::openai::messages::{check_count, entries, not_text, read_text};
use crate::http::openai::table::On;
use crate::http::openai::tools::{Choice, Declared};
use crate::http::openai::{Conversation, Settings, Tools};
use crate::session::Session;
use crate::text::as_trained;

/// Members of a block that have no effect.
const INERT: [&str; 2] = ["cache_control", "citations"];

/// The request. Any model's name is fine.
pub(super) fn read(mut fields: Fields, session: &Session, unsupported: Unsupported) -> Result<ChatRequest, ApiError> {
    fields.text("model")?;
    let mut conversation = read_conversation(&mut fields)?;
    let tools = read_tools(&mut fields, &mut conversation.ignored)?;
    check_output(&mut fields, &mut conversation.ignored)?;
    let mut settings = Settings::read(&mut fields, On::Messages, &session.default_options, unsupported)?;
    let mut ignored = fields.rest();
    ignored.append(&mut settings.ignored);
    ignored.append(&mut conversation.ignored);
    let template_arguments = Map::new();
    let prompt_field = "messages";
    Ok(ChatRequest { conversation, prompt_field, tools, template_arguments, format: None, settings, ignored })
}

fn read_conversation(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(system) = read_text(fields, "system", &INERT, &mut conversation.ignored)? {
        conversation.say("system", system);
    }
    for message in entries("messages", fields.required("messages")?)? {
        let mut message = message?;
        let role = message.required_text("role")?;
        if !["user", "assistant"].contains(&role.as_str()) {
            return Err(wrong_value(&message.path("role"), &json!(role), "must be user or assistant"));
        }
        let path = message.path("content");
        let content = message.required("content")?;
        conversation.ignored.extend(message.rest());
        let blocks = match content {
            Value::String(text) => {
                conversation.say(&role, text);
                continue;
            }
            Value::Array(blocks) => blocks,
            other => return Err(wrong_type(&path, "a string or a list of blocks", &other)),
        };
        check_count(&path, blocks.len())?;
        let blocks = blocks.into_iter().enumerate();
        let blocks = blocks.map(|(index, block)| Fields::nested(format!("{path}[{index}]"), block));
        let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
        match role.as_str() {
            "user" => add_user(&mut conversation, blocks)?,
            _ => add_assistant(&mut conversation, blocks)?,
        }
    }
    Ok(conversation)
}

fn add_user(conversation: &mut Conversation, blocks: Vec<Fields>) -> Result<(), ApiError> {
    let has_none = blocks.is_empty();
    let mut text: Option<String> = None;
    for mut block in blocks {
        match block.required_text("type")?.as_str() {
            "text" => text.get_or_insert_default().push_str(&block.required_text("text")?),
            "tool_result" => {
                if let Some(text) = text.take() {
                    conversation.say("user", text);
                }
                let id = block.required_text("tool_use_id")?;
                let content = read_text(&mut block, "content", &INERT, &mut conversation.ignored)?;
                // The model reads what went wrong in the text.
                block.boolean("is_error")?;
                conversation.answer_call(&block.path("tool_use_id"), &id, content.unwrap_or_default())?;
            }
            other => return Err(refused(&block, other, "must be text or tool_result in a user's message")),
        }
        end(block, conversation);
    }
    if let Some(text) = text.or_else(|| has_none.then(String::new)) {
        conversation.say("user", text);
    }
    Ok(())
}

fn add_assistant(conversation: &mut Conversation, blocks: Vec<Fields>) -> Result<(), ApiError> {
    let mut text = String::new();
    let mut calls = Vec::new();
    for mut block in blocks {
        match block.required_text("type")?.as_str() {
            "text" => text.push_str(&block.required_text("text")?),
            "tool_use" => {
                let (id, name) = (block.required_text("id")?, block.required_text("name")?);
                let input = block.required("input")?;
                if !input.is_object() {
                    return Err(wrong_type(&block.path("input"), "an object", &input));
                }
                calls.push((id, name, as_trained(&input)));
            }
            "thinking" | "redacted_thinking" => continue,
            other => {
                return Err(refused(&block, other, "must be text, tool_use or thinking in an assistant's message"));
            }
        }
        end(block, conversation);
    }
    conversation.say("assistant", text);
    for (id, name, arguments) in calls {
        conversation.call(id, &name, arguments);
    }
    Ok(())
}

/// The refusal of a block that has another kind than it must have.
fn refused(block: &Fields, kind: &str, expected: &str) -> ApiError {
    let path = block.path("type");
    match kind {
        "text" | "tool_use" | "tool_result" => wrong_value(&path, &json!(kind), expected),
        _ => not_text(path, kind),
    }
}

fn end(mut block: Fields, conversation: &mut Conversation) {
    for name in INERT {
        block.take(name);
    }
    conversation.ignored.extend(block.rest());
}

fn read_tools(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<Tools, ApiError> {
    let listed = fields.list("tools")?.unwrap_or_default();
    let declared = listed.into_iter().enumerate().map(|(index, tool)| {
        let path = format!("tools[{index}]");
        let mut tool = Fields::nested(path.clone(), tool)?;
        if let Some(kind) = tool.text("type")?.filter(|kind| kind != "custom") {
            let expected = "must be \"custom\": this server runs no tools";
            return Err(wrong_value(&tool.path("type"), &json!(kind), expected));
        }
        let mut function = Map::from_iter([("name".to_owned(), tool.required("name")?)]);
        function.extend(tool.take("description").map(|text| ("description".to_owned(), text)));
        function.insert("parameters".to_owned(), tool.required("input_schema")?);
        function.extend(tool.take("strict").map(|strict| ("strict".to_owned(), strict)));
        tool.take("cache_control");
        ignored.extend(tool.rest());
        Ok(Declared { definition: json!({ "type": "function", "function": function }), path, schema: "input_schema" })
    });
    let declared = declared.collect::<Result<_, _>>()?;
    let (choice, parallel) = read_choice(fields, ignored)?;
    Tools::of(declared, choice, None, parallel)
}

/// What is to be done, and whether an answer may hold several calls.
fn read_choice(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<(Choice, bool), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok((Choice::Auto, true)) };
    let kind = choice.required_text("type")?;
    let made = match kind.as_str() {
        "auto" => Choice::Auto,
        "none" => Choice::None,
        "any" => Choice::Required,
        "tool" => Choice::Named(choice.required_text("name")?),
        _ => return Err(wrong_value(&choice.path("type"), &json!(kind), "must be auto, any, tool or none")),
    };
    let is_alone = choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    ignored.extend(choice.rest());
    Ok((made, !is_alone))
}

/// Of `output_config`, a format would bind the answer; the rest is about effort, which is none here.
fn check_output(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<(), ApiError> {
    let Some(mut output) = fields.object("output_config")? else { return Ok(()) };
    if output.take("format").is_some() {
        let path = output.path("format");
        let message = format!("{path} is not supported here: /v1/chat/completions and /v1/responses have formats");
        return Err(ApiError::new(Code::UnsupportedParameter, message).at(path));
    }
    output.take("effort");
    ignored.extend(output.rest());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: Value) -> Fields {
        let Value::Object(members) = body else { panic!("not an object") };
        Fields::new(members)
    }

    #[test]
    fn blocks_become_messages_in_their_order() {
        let call = |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
        let result = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
        let conversation = read_conversation(&mut fields(json!({
            "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "T"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "frob": 1}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "t"},
                    call("x", json!({"city": "Rome", "n": [1, 2]})),
                    call("y", json!({})),
                ]},
                {"role": "user", "content": [
                    result("y", json!([{"type": "text", "text": "r"}])),
                    {"type": "tool_result", "tool_use_id": "x", "is_error": true},
                    {"type": "text", "text": "more"},
                ]},
                {"role": "assistant", "content": []},
                {"role": "user", "content": []},
            ],
        })))
        .unwrap();
        let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
        assert_eq!(
            conversation.messages,
            [
                json!({"role": "system", "content": "ST"}),
                json!({"role": "user", "content": "a b"}),
                json!({"role": "assistant", "content": "t",
                    "tool_calls": [call("x", r#"{"city": "Rome", "n": [1, 2]}"#), call("y", "{}")]}),
                json!({"role": "tool", "content": "r", "tool_call_id": "y"}),
                json!({"role": "tool", "content": "", "tool_call_id": "x"}),
                json!({"role": "user", "content": "more"}),
                json!({"role": "assistant", "content": ""}),
                json!({"role": "user", "content": ""}),
            ]
        );
        assert_eq!(conversation.ignored, ["messages[0].content[1].frob"]);
    }

    #[test]
    fn wrong_messages_are_named() {
        let with = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!("x"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "system", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": ["x"]}]), "messages[0].content[0]"),
            (with("user", json!({"text": "x"})), "messages[0].content[0].type"),
            (with("user", json!({"type": "text"})), "messages[0].content[0].text"),
            (with("user", json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
            (with("user", json!({"type": "document"})), "messages[0].content[0].type"),
            (with("user", json!({"type": "tool_use"})), "messages[0].content[0].type"),
            (with("user", json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id"),
            (with("user", json!({"type": "tool_result", "tool_use_id": "a"})), "messages[0].content[0].tool_use_id"),
            (with("assistant", json!({"type": "tool_result"})), "messages[0].content[0].type"),
            (with("assistant", json!({"type": "tool_use", "id": "a"})), "messages[0].content[0].name"),
            (
                with("assistant", json!({"type": "tool_use", "id": "a", "name": "f", "input": "x"})),
                "messages[0].content[0].input",
            ),
        ] {
            let error = read_conversation(&mut fields(json!({ "messages": messages }))).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(param)), "{messages}");
        }
        let error = read_conversation(&mut fields(json!({"system": 5, "messages": []}))).unwrap_err();
        assert_eq!(error.param(), Some("system"));
    }

    #[test]
    fn tools_and_choices_are_those_of_chat_in_other_words() {
        let read = |body: Value| read_tools(&mut fields(body), &mut Vec::new());
        let tool = json!({"input_schema": {"type": "object"}, "description": "d", "name": "f", "cache_control": {}});
        let with = |choice: Value| read(json!({"tools": [tool], "tool_choice": choice}));
        let tools = read(json!({"tools": [tool]})).unwrap();
        let nested = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
        assert_eq!(tools.definitions[0].to_string(), nested.to_string());
        assert_eq!((&tools.choice, tools.parallel), (&Choice::Auto, true));
        assert_eq!(with(json!({"type": "any"})).unwrap().choice, Choice::Required);
        assert_eq!(with(json!({"type": "tool", "name": "f"})).unwrap().only(), Some("f"));
        assert!(with(json!({"type": "none"})).unwrap().definitions.is_empty());
        assert!(!with(json!({"type": "auto", "disable_parallel_tool_use": true})).unwrap().parallel);
        for (body, param) in [
            (json!({"tools": [1]}), "tools[0]"),
            (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
            (json!({"tools": [{"name": "f", "input_schema": 1}]}), "tools[0].input_schema"),
            (json!({"tools": [{"name": "f g", "input_schema": {}}]}), "tools[0].name"),
            (
                json!({"tools": [{"name": "f", "strict": true, "input_schema": {"not": {}}}]}),
                "tools[0].input_schema.not",
            ),
            (json!({"tools": [tool], "tool_choice": "auto"}), "tool_choice"),
            (json!({"tools": [tool], "tool_choice": {}}), "tool_choice.type"),
            (json!({"tools": [tool], "tool_choice": {"type": "required"}}), "tool_choice.type"),
            (json!({"tools": [tool], "tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"tools": [tool], "tool_choice": {"type": "tool", "name": "g"}}), "tool_choice"),
            (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        ] {
            assert_eq!(read(body.clone()).unwrap_err().param(), Some(param), "{body}");
        }
    }

    #[test]
    fn a_format_is_refused_and_effort_is_not() {
        let check = |value: Value| check_output(&mut fields(json!({ "output_config": value })), &mut Vec::new());
        assert!(check(json!({"effort": "high"})).is_ok());
        assert_eq!(
            check(json!({"format": {"type": "json_schema"}})).unwrap_err().param(),
            Some("output_config.format")
        );
    }
}
