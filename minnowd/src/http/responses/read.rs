//! A request to the Responses API as a [`ChatRequest`]: the prompt is the one that chat makes of the same turns.
//!
//! Items become messages. Calls that follow each other or an assistant's message belong to that message, as in chat.

use serde_json::{Map, Value, json};

use super::telling::Echo;
use crate::config::Unsupported;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, as_text, wrong_type, wrong_value};
use crate::http::openai::chat::ChatRequest;
use crate::http::openai::messages::{INERT, entries, read_text};
use crate::http::openai::table::On;
use crate::http::openai::tools::Naming;
use crate::http::openai::{Conversation, Format, Limit, Settings, Tools};
use crate::session::Session;

/// Values of `include`. None has an effect: they ask for parts of answers that do not exist here.
const INCLUDED: [&str; 8] = [
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];

/// The request, the model it asks for, and what its answer repeats.
pub(super) fn read(
    mut fields: Fields,
    session: &Session,
    unsupported: Unsupported,
) -> Result<(ChatRequest, Option<String>, Echo), ApiError> {
    let model = fields.text("model")?;
    let instructions = fields.text("instructions")?;
    let mut conversation = read_conversation(&mut fields, instructions.clone())?;
    let tools_shown: Value = fields.peek("tools").and_then(Value::as_array).into_iter().flatten().map(shown).collect();
    let tool_choice = fields.peek("tool_choice").cloned().unwrap_or_else(|| json!("auto"));
    let tools = Tools::read(&mut fields, Naming::Flat)?;
    let mut format_shown = json!({ "type": "text" });
    let mut format = None;
    if let Some(mut text) = fields.object("text")? {
        if let Some(value) = text.take("format") {
            format_shown = value.clone();
            format = Format::read_flat(Fields::nested(text.path("format"), value)?)?;
        }
        text.take("verbosity");
        conversation.ignored.extend(text.rest());
    }
    check_include(&mut fields)?;
    let (metadata, user) = (fields.map("metadata")?.unwrap_or_default(), fields.text("user")?);
    let mut settings = Settings::read(&mut fields, On::Responses, &session.default_options, unsupported)?;
    let mut ignored = fields.rest();
    ignored.append(&mut settings.ignored);
    ignored.append(&mut conversation.ignored);
    let echo = Echo {
        instructions,
        limit: match settings.limit {
            Some(Limit::Tokens(tokens)) => Some(tokens),
            Some(Limit::Room) | None => None,
        },
        parallel: tools.parallel,
        format: format_shown,
        tool_choice,
        tools: tools_shown,
        user,
        metadata,
    };
    let template_arguments = Map::new();
    let request =
        ChatRequest { conversation, prompt_field: "input", tools, template_arguments, format, settings, ignored };
    Ok((request, model, echo))
}

fn read_conversation(fields: &mut Fields, instructions: Option<String>) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = instructions {
        conversation.say("system", instructions);
    }
    match fields.required("input")? {
        Value::String(text) => conversation.say("user", text),
        items @ Value::Array(_) => {
            for item in entries("input", items)? {
                add(&mut conversation, item?)?;
            }
        }
        other => return Err(wrong_type("input", "a string or a list of items", &other)),
    }
    if conversation.messages.is_empty() {
        return Err(ApiError::new(Code::InvalidValue, "input has no message").at("input"));
    }
    Ok(conversation)
}

fn add(conversation: &mut Conversation, mut item: Fields) -> Result<(), ApiError> {
    let kind = item.text("type")?.unwrap_or_else(|| "message".to_owned());
    let text = |item: &mut Fields, name: &str, ignored: &mut Vec<String>| {
        read_text(item, name, &INERT, ignored)?.map_or_else(|| item.required_text(name), Ok)
    };
    match kind.as_str() {
        "message" => {
            let role = item.required_text("role")?;
            let role = match role.as_str() {
                "developer" => "system",
                "system" | "user" | "assistant" => role.as_str(),
                _ => {
                    let expected = "must be system, developer, user or assistant";
                    return Err(wrong_value(&item.path("role"), &json!(role), expected));
                }
            };
            let content = text(&mut item, "content", &mut conversation.ignored)?;
            conversation.say(role, content);
            item.take("phase");
        }
        "function_call" => {
            let (id, name) = (item.required_text("call_id")?, item.required_text("name")?);
            conversation.call(id, &name, item.required_text("arguments")?);
        }
        "function_call_output" => {
            let id = item.required_text("call_id")?;
            let output = text(&mut item, "output", &mut conversation.ignored)?;
            conversation.answer_call(&item.path("call_id"), &id, output)?;
        }
        // The model has no use for what another one thought.
        "reasoning" => return Ok(()),
        "item_reference" => {
            let path = item.path("type");
            let message = format!("{path} is \"item_reference\", but this server stores no items");
            return Err(ApiError::new(Code::UnsupportedValue, message).at(path));
        }
        _ => {
            let expected = "must be message, function_call, function_call_output or reasoning";
            return Err(wrong_value(&item.path("type"), &json!(kind), expected));
        }
    }
    for name in ["id", "status"] {
        item.take(name);
    }
    conversation.ignored.extend(item.rest());
    Ok(())
}

/// A tool as the answer repeats it.
fn shown(tool: &Value) -> Value {
    json!({
        "type": "function",
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["parameters"],
        "strict": tool["strict"] == true,
    })
}

fn check_include(fields: &mut Fields) -> Result<(), ApiError> {
    for (index, value) in fields.list("include")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("include[{index}]");
        let value = as_text(&path, value)?;
        if !INCLUDED.contains(&value.as_str()) {
            let expected = format!("must be one of {}", INCLUDED.join(", "));
            return Err(wrong_value(&path, &json!(value), &expected));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Conversation, ApiError> {
        let Value::Object(members) = body else { panic!("not an object") };
        let mut fields = Fields::new(members);
        let instructions = fields.text("instructions")?;
        read_conversation(&mut fields, instructions)
    }

    #[test]
    fn items_become_the_messages_that_chat_would_have() {
        let call =
            |id: &str| json!({"type": "function_call", "id": "fc_1", "call_id": id, "name": "f", "arguments": "{}"});
        let conversation = read(json!({"instructions": "I", "input": [
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a "}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}]},
            call("x"),
            call("y"),
            {"type": "function_call_output", "call_id": "y", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "function_call_output", "call_id": "x", "output": "s"},
            call("x"),
            {"role": "user", "content": "more", "frob": 1},
        ]}))
        .unwrap();
        let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        assert_eq!(
            conversation.messages,
            [
                json!({"role": "system", "content": "I"}),
                json!({"role": "system", "content": "D"}),
                json!({"role": "user", "content": "a b"}),
                json!({"role": "assistant", "content": "t", "tool_calls": [call("x"), call("y")]}),
                json!({"role": "tool", "content": "r", "tool_call_id": "y"}),
                json!({"role": "tool", "content": "s", "tool_call_id": "x"}),
                json!({"role": "assistant", "content": "", "tool_calls": [call("x")]}),
                json!({"role": "user", "content": "more"}),
            ]
        );
        assert_eq!((conversation.calls, conversation.ignored), (3, vec!["input[9].frob".to_owned()]));
        assert_eq!(read(json!({"input": "hi"})).unwrap().messages, [json!({"role": "user", "content": "hi"})]);
    }

    #[test]
    fn wrong_input_is_named() {
        for (input, param) in [
            (json!(null), "input"),
            (json!(5), "input"),
            (json!([]), "input"),
            (json!(["x"]), "input[0]"),
            (json!([{"type": "reasoning"}]), "input"),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (json!([{"content": "x"}]), "input[0].role"),
            (json!([{"role": "tool", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": "user", "content": 1}]), "input[0].content"),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].type"),
            (json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
            (json!([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]), "input[0].arguments"),
            (json!([{"type": "function_call_output", "call_id": "a", "output": "x"}]), "input[0].call_id"),
            (json!([{"type": "function_call_output", "call_id": "a"}]), "input[0].output"),
        ] {
            let error = read(json!({ "input": input })).unwrap_err();
            assert_eq!((error.status().as_u16(), &error.body()["error"]["param"]), (400, &json!(param)), "{input}");
        }
    }

    #[test]
    fn flat_tools_are_checked_at_their_own_paths() {
        let tools =
            |tools: Value| Tools::read(&mut Fields::new(Map::from_iter([("tools".to_owned(), tools)])), Naming::Flat);
        let flat = json!({"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true, "type": "function"});
        let read = tools(json!([flat])).unwrap();
        let nested = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
        assert_eq!(read.definitions[0].to_string(), nested.to_string());
        assert!(read.has_strict());
        for (wrong, param) in [
            (json!([1]), "tools[0]"),
            (json!([{"name": "f"}]), "tools[0].type"),
            (json!([{"type": "web_search"}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].name"),
            (json!([flat, flat]), "tools[1].name"),
            (json!([{"type": "function", "name": "f", "parameters": 1}]), "tools[0].parameters"),
            (
                json!([{"type": "function", "name": "f", "strict": true, "parameters": {"not": {}}}]),
                "tools[0].parameters.not",
            ),
        ] {
            assert_eq!(tools(wrong).unwrap_err().body()["error"]["param"], param);
        }
    }

    #[test]
    fn only_known_values_may_be_included() {
        let check = |value: Value| {
            check_include(&mut Fields::new(Map::from_iter([("include".to_owned(), value)])))
                .map_err(|error| error.body()["error"]["param"].clone())
        };
        assert_eq!(check(json!(["reasoning.encrypted_content", "message.output_text.logprobs"])), Ok(()));
        assert_eq!(check(json!(["file_search_call.results", "frob"])), Err(json!("include[1]")));
        assert_eq!(check(json!([1])), Err(json!("include[0]")));
        assert_eq!(check(json!("x")), Err(json!("include")));
    }
}
