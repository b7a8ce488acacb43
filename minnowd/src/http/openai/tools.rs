//! Tool definitions and which of them the model may, must or must not call.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::form;
use crate::grammar;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, as_list, wrong_type, wrong_value};

/// Tools of a request, and bytes of their definitions together.
const TOOLS_MAX: usize = 128;
const DEFINITION_BYTES_MAX: usize = 256 << 10;
const NAME_BYTES_MAX: usize = 64;

/// The tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tools {
    /// Definitions as the client wrote them, with distinct names. Only `strict` is taken out: it is for the server, and a
    /// model that never saw it calls worse when it does.
    pub definitions: Vec<Value>,
    /// Names of those that are `strict`.
    strict: HashSet<String>,
    /// What the model is to do with them.
    pub choice: Choice,
    /// Whether an answer may hold several calls.
    pub parallel: bool,
}

/// A tool of a request as the model would see it, and where the client wrote it.
pub(crate) struct Declared {
    /// `{"type": "function", "function": {name, description?, parameters?, strict?}}`
    pub definition: Value,
    /// The path of what has the function's members.
    pub path: String,
    /// What the client calls `parameters`.
    pub schema: &'static str,
}

/// A tool, as far as calls of it depend on it.
pub(crate) struct Called<'a> {
    /// Its name.
    pub name: &'a str,
    /// The schema of its arguments.
    pub parameters: Option<&'a Value>,
    /// Whether arguments must fit that schema.
    pub is_strict: bool,
}

/// Where the members of a function stand, in `tools` and in `tool_choice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// `{"type": "function", "function": {"name", ...}}`
    Nested,
    /// `{"type": "function", "name", ...}`
    Flat,
}

/// What the model is to do with its tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// What it likes.
    #[default]
    Auto,
    /// Answer in text; it does not see the tools.
    None,
    /// Call one of them.
    Required,
    /// Call this one; it does not see the others.
    Named(String),
}

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls` out. With [`Choice::None`] no definitions are left, with
    /// [`Choice::Named`] one, with [`Choice::Required`] at least one.
    pub(crate) fn read(fields: &mut Fields, naming: Naming) -> Result<Self, ApiError> {
        let tools = fields.list("tools")?.unwrap_or_default().into_iter().enumerate();
        let declared = tools.map(|(index, tool)| declared(format!("tools[{index}]"), tool, naming));
        let declared = declared.collect::<Result<_, _>>()?;
        let (choice, allowed) = read_choice(fields, naming)?;
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        Self::of(declared, choice, allowed, parallel)
    }

    /// Checks what a dialect has read. `allowed`: names of the tools that are left, if these are narrowed.
    pub(crate) fn of(
        declared: Vec<Declared>,
        choice: Choice,
        allowed: Option<Vec<String>>,
        parallel: bool,
    ) -> Result<Self, ApiError> {
        check(&declared)?;
        let mut definitions: Vec<Value> = declared.into_iter().map(|tool| tool.definition).collect();
        let strict = definitions.iter_mut().filter_map(take_strict).collect();
        Self { definitions, strict, choice, parallel }.narrowed(allowed)
    }

    /// Names of the tools the model sees.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.definitions.iter().filter_map(name)
    }

    /// The tools the model sees, as far as calls of them depend on it.
    pub(crate) fn called(&self) -> impl Iterator<Item = Called<'_>> {
        self.definitions.iter().filter_map(|definition| {
            let function = &definition["function"];
            let parameters = Some(&function["parameters"]).filter(|parameters| parameters.is_object());
            let name = name(definition)?;
            Some(Called { name, parameters, is_strict: self.strict.contains(name) })
        })
    }

    /// Whether the arguments of one of them must fit its schema.
    pub(crate) fn has_strict(&self) -> bool {
        self.called().any(|tool| tool.is_strict)
    }

    /// Whether a call must be made.
    pub(crate) fn must_call(&self) -> bool {
        matches!(self.choice, Choice::Required | Choice::Named(_))
    }

    /// Calls after which an answer ends; `None` is no limit. A demanded call of one function is one call.
    pub(crate) fn calls_max(&self) -> Option<usize> {
        (!self.parallel || matches!(self.choice, Choice::Named(_))).then_some(1)
    }

    /// The only tool that may be called, if a call must be made and there is only one.
    pub(crate) fn only(&self) -> Option<&str> {
        match &self.definitions[..] {
            [only] if self.must_call() => name(only),
            _ => None,
        }
    }

    fn narrowed(mut self, allowed: Option<Vec<String>>) -> Result<Self, ApiError> {
        let refuse = |message| Err(ApiError::new(Code::InvalidValue, message).at("tool_choice"));
        if let Some(allowed) = allowed {
            if let Some(unknown) = allowed.iter().find(|allowed| !self.names().any(|name| name == allowed.as_str())) {
                return refuse(format!("tool_choice allows \"{unknown}\", which is not among the tools"));
            }
            self.definitions
                .retain(|definition| name(definition).is_some_and(|name| allowed.iter().any(|a| a == name)));
        }
        match &self.choice {
            Choice::Auto => {}
            Choice::None => self.definitions.clear(),
            Choice::Required if self.definitions.is_empty() => {
                return refuse("tool_choice demands a call, but there are no tools".to_owned());
            }
            Choice::Required => {}
            Choice::Named(wanted) => {
                self.definitions.retain(|definition| name(definition) == Some(wanted));
                if self.definitions.is_empty() {
                    return refuse(format!("tool_choice names \"{wanted}\", which is not among the tools"));
                }
            }
        }
        Ok(self)
    }
}

/// Takes `strict` out of a definition, and gives its name if it was set.
fn take_strict(definition: &mut Value) -> Option<String> {
    let is_set = is_strict(&definition["function"]);
    // What follows keeps its order: the template shows it.
    definition["function"].as_object_mut()?.shift_remove("strict");
    name(definition).filter(|_| is_set).map(str::to_owned)
}

fn is_strict(function: &Value) -> bool {
    function["strict"] == true
}

fn name(definition: &Value) -> Option<&str> {
    definition["function"]["name"].as_str()
}

/// A tool as requests write it.
fn declared(path: String, mut tool: Value, naming: Naming) -> Result<Declared, ApiError> {
    if !tool.is_object() {
        return Err(wrong_type(&path, "an object", &tool));
    }
    let kind = member(format!("{path}.type"), &tool["type"])?;
    if kind != "function" {
        return Err(wrong_value(&format!("{path}.type"), kind, "must be \"function\""));
    }
    let (path, definition) = match naming {
        Naming::Nested => (format!("{path}.function"), tool),
        Naming::Flat => {
            // What is left keeps its order: the template shows it.
            tool.as_object_mut().and_then(|members| members.shift_remove("type"));
            (path, json!({ "type": "function", "function": tool }))
        }
    };
    let function = member(path.clone(), &definition["function"])?;
    if !function.is_object() {
        return Err(wrong_type(&path, "an object", function));
    }
    Ok(Declared { definition, path, schema: "parameters" })
}

/// A member that must be there.
fn member(path: String, value: &Value) -> Result<&Value, ApiError> {
    match value {
        Value::Null => Err(ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path)),
        value => Ok(value),
    }
}

/// Only looks: definitions reach the template as they came, members in their order.
fn check(tools: &[Declared]) -> Result<(), ApiError> {
    let refuse = |path: &str, message: String| Err(ApiError::new(Code::InvalidValue, message).at(path));
    if tools.len() > TOOLS_MAX {
        let message = format!("tools has {} entries, at most {TOOLS_MAX} are allowed", tools.len());
        return refuse("tools", message);
    }
    let mut names = HashSet::new();
    let mut bytes = 0;
    for tool in tools {
        let name = check_function(tool)?;
        if !names.insert(name) {
            return refuse(&format!("{}.name", tool.path), format!("two tools are named \"{name}\""));
        }
        bytes += tool.definition.to_string().len();
    }
    if bytes > DEFINITION_BYTES_MAX {
        return refuse("tools", format!("tools has {bytes} bytes, at most {DEFINITION_BYTES_MAX} are allowed"));
    }
    Ok(())
}

fn check_function(tool: &Declared) -> Result<&str, ApiError> {
    let function = &tool.definition["function"];
    let at = |name: &str| format!("{}.{name}", tool.path);
    let name = member(at("name"), &function["name"])?;
    let Value::String(text) = name else { return Err(wrong_type(&at("name"), "a string", name)) };
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if !is_plain || !(1..=NAME_BYTES_MAX).contains(&text.len()) {
        let expected = "must be 1 to 64 letters, digits, underscores and hyphens";
        return Err(wrong_value(&at("name"), name, expected));
    }
    let parameters = &function["parameters"];
    if !(parameters.is_object() || parameters.is_null()) {
        return Err(wrong_type(&at(tool.schema), "an object", parameters));
    }
    let description = &function["description"];
    if !(description.is_string() || description.is_null()) {
        return Err(wrong_type(&at("description"), "a string", description));
    }
    let strict = &function["strict"];
    if !(strict.is_boolean() || strict.is_null()) {
        return Err(wrong_type(&at("strict"), "a boolean", strict));
    }
    if is_strict(function) {
        grammar::check_schema(parameters).map_err(|error| form::refused(error, &at(tool.schema)))?;
    }
    Ok(text)
}

/// Takes `tool_choice` out: what is to be done, and the names of the tools that are allowed if these are narrowed.
fn read_choice(fields: &mut Fields, naming: Naming) -> Result<(Choice, Option<Vec<String>>), ApiError> {
    let Some(value) = fields.take("tool_choice") else { return Ok((Choice::Auto, None)) };
    let expected = match naming {
        Naming::Nested => {
            "must be \"auto\", \"none\", \"required\" or {\"type\":\"function\",\"function\":{\"name\":...}}"
        }
        Naming::Flat => "must be \"auto\", \"none\", \"required\" or {\"type\":\"function\",\"name\":...}",
    };
    match &value {
        Value::String(word) => match word.as_str() {
            "auto" => Ok((Choice::Auto, None)),
            "none" => Ok((Choice::None, None)),
            "required" => Ok((Choice::Required, None)),
            _ => Err(wrong_value("tool_choice", &value, expected)),
        },
        Value::Object(_) if value["type"] == "function" => {
            let (path, name) = match naming {
                Naming::Nested => ("tool_choice.function.name", &value["function"]["name"]),
                Naming::Flat => ("tool_choice.name", &value["name"]),
            };
            match name {
                Value::String(name) => Ok((Choice::Named(name.clone()), None)),
                _ => Err(ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path)),
            }
        }
        Value::Object(_) if value["type"] == "allowed_tools" => {
            let mut fields = Fields::nested("tool_choice".to_owned(), value)?;
            if naming == Naming::Nested {
                fields = Fields::nested(fields.path("allowed_tools"), fields.required("allowed_tools")?)?;
            }
            read_allowed(fields, naming)
        }
        Value::Object(_) => Err(wrong_value("tool_choice", &value, expected)),
        _ => Err(wrong_type("tool_choice", "a string or an object", &value)),
    }
}

/// `{"mode", "tools": [...]}`, with tools as in a choice.
fn read_allowed(mut fields: Fields, naming: Naming) -> Result<(Choice, Option<Vec<String>>), ApiError> {
    let mode = fields.required("mode")?;
    let choice = match mode.as_str() {
        Some("auto") => Choice::Auto,
        Some("required") => Choice::Required,
        _ => return Err(wrong_value(&fields.path("mode"), &mode, "must be \"auto\" or \"required\"")),
    };
    let path = fields.path("tools");
    let tools = as_list(&path, fields.required("tools")?)?;
    let names = tools.into_iter().enumerate().map(|(index, tool)| {
        let mut tool = Fields::nested(format!("{path}[{index}]"), tool)?;
        let kind = tool.required("type")?;
        if kind != "function" {
            return Err(wrong_value(&tool.path("type"), &kind, "must be \"function\""));
        }
        if naming == Naming::Nested {
            tool = Fields::nested(tool.path("function"), tool.required("function")?)?;
        }
        tool.required_text("name")
    });
    Ok((choice, Some(names.collect::<Result<_, _>>()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Tools, ApiError> {
        let Value::Object(members) = value else { panic!("not an object") };
        Tools::read(&mut Fields::new(members), Naming::Nested)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn definitions_stay_as_they_were_written() {
        let text =
            r#"{"type":"function","function":{"name":"b","description":"d","parameters":{"z":1,"a":2},"x-own":1}}"#;
        let tools = read(json!({"tools": [serde_json::from_str::<Value>(text).unwrap()]})).unwrap();
        assert_eq!(tools.definitions[0].to_string(), text);
        assert!(tools.parallel && !tools.must_call());
    }

    #[test]
    fn strict_is_for_the_server_and_not_for_the_model() {
        let with = |strict: &str| {
            let text = format!(
                r#"{{"type":"function","function":{{"name":"b",{strict}"description":"d","parameters":{{"z":1}},"x-own":1}}}}"#
            );
            read(json!({"tools": [serde_json::from_str::<Value>(&text).unwrap()]})).unwrap()
        };
        let (plain, off, on) = (with(""), with(r#""strict":false,"#), with(r#""strict":true,"#));
        assert!(on.has_strict() && !off.has_strict() && !plain.has_strict());
        for tools in [off, on] {
            assert_eq!(tools.definitions[0].to_string(), plain.definitions[0].to_string());
        }
    }

    #[test]
    fn a_choice_narrows_what_the_model_sees() {
        let both = json!([tool("a"), tool("b")]);
        let named = json!({"type": "function", "function": {"name": "b"}});
        let names = |choice: Value| {
            let tools = read(json!({"tools": both, "tool_choice": choice})).unwrap();
            (tools.names().map(str::to_owned).collect::<Vec<_>>(), tools.only().map(str::to_owned))
        };
        assert_eq!(names(json!("auto")).0, ["a", "b"]);
        assert_eq!(names(json!("none")).0, [""; 0]);
        assert_eq!(names(json!("required")), (vec!["a".to_owned(), "b".to_owned()], None));
        assert_eq!(names(named), (vec!["b".to_owned()], Some("b".to_owned())));
        let allowed = |mode: &str, name: &str| {
            let tools = json!([{"type": "function", "function": {"name": name}}]);
            json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
        };
        assert_eq!(names(allowed("auto", "b")), (vec!["b".to_owned()], None));
        assert_eq!(names(allowed("required", "a")), (vec!["a".to_owned()], Some("a".to_owned())));
        assert!(read(json!({"tools": both, "tool_choice": allowed("auto", "c")})).is_err());
        let one = read(json!({"tools": [tool("a")], "tool_choice": "required"})).unwrap();
        assert_eq!(one.only(), Some("a"));
        assert!(read(json!({"tool_choice": "none"})).is_ok());
    }

    #[test]
    fn flat_choices_mean_what_nested_ones_do() {
        let read = |choice: Value| {
            let mut fields = Fields::new(serde_json::Map::from_iter([("tool_choice".to_owned(), choice)]));
            read_choice(&mut fields, Naming::Flat)
        };
        assert_eq!(read(json!("required")).unwrap(), (Choice::Required, None));
        let named = json!({"type": "function", "name": "a"});
        assert_eq!(read(named.clone()).unwrap(), (Choice::Named("a".to_owned()), None));
        let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [named]});
        assert_eq!(read(allowed).unwrap(), (Choice::Required, Some(vec!["a".to_owned()])));
        for (choice, param) in [
            (json!({"type": "function", "function": {"name": "a"}}), "tool_choice.name"),
            (json!({"type": "allowed_tools", "allowed_tools": {}}), "tool_choice.mode"),
            (json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}), "tool_choice.tools[0].type"),
            (json!({"type": "file_search"}), "tool_choice"),
            (json!(1), "tool_choice"),
        ] {
            assert_eq!(read(choice).unwrap_err().body()["error"]["param"], param);
        }
    }

    #[test]
    fn wrong_tools_are_named() {
        for (value, param) in [
            (json!({"tools": "x"}), "tools"),
            (json!({"tools": [5]}), "tools[0]"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"function": {"name": "x"}}]}), "tools[0].type"),
            (json!({"tools": [{"type": "web", "function": {"name": "x"}}]}), "tools[0].type"),
            (json!({"tools": [tool("a"), tool("bad name!")]}), "tools[1].function.name"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (json!({"tools": [tool(&"x".repeat(65))]}), "tools[0].function.name"),
            (json!({"tools": [tool("a"), tool("a")]}), "tools[1].function.name"),
            (json!({"tools": vec![tool("a"); 129]}), "tools"),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "description": "x".repeat(300_000)}}]}),
                "tools",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (
                json!({"tools": [tool("b"), {"type": "function", "function":
                    {"name": "a", "strict": true, "parameters": {"properties": {"x": {"not": {}}}}}}]}),
                "tools[1].function.parameters.properties.x.not",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}),
                "tools[0].function.strict",
            ),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "perhaps", "tools": [tool("a")]}), "tool_choice"),
            (json!({"tool_choice": {"type": "function"}, "tools": [tool("a")]}), "tool_choice.function.name"),
            (
                json!({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [tool("a")]}),
                "tool_choice",
            ),
            (json!({"tool_choice": 5}), "tool_choice"),
            (json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice.allowed_tools"),
            (
                json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}}),
                "tool_choice.allowed_tools.mode",
            ),
            (
                json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}}),
                "tool_choice.allowed_tools.tools[0].function",
            ),
            (json!({"parallel_tool_calls": "no"}), "parallel_tool_calls"),
        ] {
            assert_eq!(read(value.clone()).unwrap_err().body()["error"]["param"], param, "{value}");
        }
    }
}
