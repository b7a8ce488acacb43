//! `POST /v1/completions`: continues a text as it is, without template and without tokens of its own.

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;

use super::table::On;
use super::telling::teller;
use super::{Settings, Shape};
use crate::http::App;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, as_integer, wrong_type};
use crate::http::request::{Draft, Prepared, check_rest, respond};
use crate::session::Session;
use crate::text::OutputText;

/// Continues a text.
pub(crate) async fn complete(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    respond(&app, request, prepare_text).await
}

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

fn prepare_text(app: &App, session: &Session, mut fields: Fields, request_id: String) -> Result<Prepared, ApiError> {
    let model = fields.text("model")?;
    let prompt = read_prompt(&mut fields, session.config.vocab_size)?;
    let mut settings = Settings::read(&mut fields, On::Text, &session.default_options, app.options().unsupported)?;
    let mut ignored = fields.rest();
    ignored.append(&mut settings.ignored);
    check_rest(app, session, &ignored, model.as_deref())?;
    let prompt = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text(text) => {
            let encoded = session.tokenizer.encode(&text);
            encoded.map_err(|error| ApiError::new(Code::InvalidValue, error.to_string()).at("prompt"))?
        }
    };
    let text = OutputText::plain(&session.tokenizer, &settings.stops).ending_at(&session.stop_ids());
    let form = settings.form.take();
    let draft = Draft { prompt, prompt_field: "prompt", text, opened: Vec::new(), settings, ignored, form };
    let settled = draft.settle(app, session, request_id)?;
    Ok(settled.told_by(teller(Shape::Text, session)))
}

fn read_prompt(fields: &mut Fields, vocabulary: usize) -> Result<Prompt, ApiError> {
    let refuse = |code, message: &str| Err(ApiError::new(code, message).at("prompt"));
    let prompt = match fields.required("prompt")? {
        Value::String(text) => Prompt::Text(text),
        Value::Array(items) => match &items[..] {
            [Value::String(text)] => Prompt::Text(text.clone()),
            [Value::String(_), ..] => {
                return refuse(Code::UnsupportedValue, "prompt has several texts, but only one is supported");
            }
            _ => Prompt::Tokens(read_tokens("prompt", &items, vocabulary)?),
        },
        other => return Err(wrong_type("prompt", "a string or a list of token ids", &other)),
    };
    match &prompt {
        Prompt::Text(text) if text.is_empty() => refuse(Code::InvalidValue, "prompt is empty"),
        Prompt::Tokens(tokens) if tokens.is_empty() => refuse(Code::InvalidValue, "prompt is empty"),
        _ => Ok(prompt),
    }
}

/// A list of token ids, each below `vocabulary`.
pub(crate) fn read_tokens(path: &str, items: &[Value], vocabulary: usize) -> Result<Vec<u32>, ApiError> {
    let last = i64::try_from(vocabulary).unwrap_or(i64::MAX) - 1;
    let tokens = items.iter().enumerate().map(|(index, item)| {
        let id = as_integer(&format!("{path}[{index}]"), item, &(0..=last))?;
        Ok(u32::try_from(id).unwrap_or(u32::MAX))
    });
    tokens.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn read(prompt: Value) -> Result<Prompt, ApiError> {
        read_prompt(&mut Fields::new(Map::from_iter([("prompt".to_owned(), prompt)])), 100)
    }

    #[test]
    fn prompts_are_text_or_ids() {
        assert_eq!(read(json!("x")).unwrap(), Prompt::Text("x".to_owned()));
        assert_eq!(read(json!(["x"])).unwrap(), Prompt::Text("x".to_owned()));
        assert_eq!(read(json!([5, 6.0, 99])).unwrap(), Prompt::Tokens(vec![5, 6, 99]));
        for bad in [
            json!(null),
            json!([]),
            json!([-1]),
            json!([100]),
            json!([1.5]),
            json!({}),
            json!(""),
            json!(["a", "b"]),
            json!([1, "a"]),
        ] {
            let error = read(bad.clone()).unwrap_err();
            assert!(error.body()["error"]["param"].as_str().unwrap().starts_with("prompt"), "{bad}");
        }
    }
}
