//! JSON as Python's `json.dumps` writes it: what chat templates were made with and models were trained on.

use std::fmt::Write;

use serde_json::{Number, Value};

/// How `json.dumps` is asked to write. The default is `ensure_ascii=False` and no indentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    /// Escape everything outside ASCII.
    pub(super) ensure_ascii: bool,
    /// Write members on lines of their own, indented by this much a level.
    pub(super) indent: Option<usize>,
    /// Order members by key.
    pub(super) sort_keys: bool,
    /// Between items, and between key and value, in place of Python's own.
    pub(super) separators: Option<(String, String)>,
}

/// `value` in the style that models know.
pub(crate) fn as_trained(value: &Value) -> String {
    dumps(value, &Style::default())
}

/// `json.dumps(value, ...)`. Key order is kept, separators are `", "` and `": "`, nothing is escaped that JSON does not
/// require. The nesting of `value` is bounded by its parser.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let item = if style.indent.is_some() { "," } else { ", " };
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None => (item, ": "),
    };
    let mut out = String::new();
    Writer { style, item, key, out: &mut out }.value(value, 0);
    out
}

struct Writer<'a> {
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: &'a mut String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(true) => self.out.push_str("true"),
            Value::Bool(false) => self.out.push_str("false"),
            Value::Number(number) => self.number(number),
            Value::String(text) => self.string(text),
            Value::Array(items) => {
                self.list(('[', ']'), items.iter(), depth, |writer, item| writer.value(item, depth + 1));
            }
            Value::Object(members) => {
                let mut members: Vec<(&String, &Value)> = members.iter().collect();
                if self.style.sort_keys {
                    members.sort_by_key(|(key, _)| *key);
                }
                self.list(('{', '}'), members.into_iter(), depth, |writer, (key, value)| {
                    writer.string(key);
                    writer.out.push_str(writer.key);
                    writer.value(value, depth + 1);
                });
            }
        }
    }

    fn list<T>(
        &mut self,
        (open, close): (char, char),
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        write: impl Fn(&mut Self, T),
    ) {
        let is_empty = items.len() == 0;
        self.out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                self.out.push_str(self.item);
            }
            self.line(depth + 1);
            write(self, item);
        }
        if !is_empty {
            self.line(depth);
        }
        self.out.push(close);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn number(&mut self, number: &Number) {
        match number.as_f64() {
            Some(float) if number.is_f64() => self.out.push_str(&float_repr(float)),
            _ => self.out.push_str(&number.to_string()),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                '\0'..='\u{1F}' => self.escape(character),
                _ if self.style.ensure_ascii && !character.is_ascii() => self.escape(character),
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

/// `repr(float)`: the shortest digits that read back the same, with an exponent below 1e-4 and from 1e16 on.
fn float_repr(float: f64) -> String {
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_written_as_python_writes_them() {
        let value = json!({"b": [1, -2, 1.0, 0.1, 1e16, 1e15, 1.5e-7, 1e-4, 1e22, 18_446_744_073_709_551_615u64],
            "a": {"x": null, "y": [true, false], "z": {}}, "e": [], "t": "<b> \u{e9}\u{1F642}\"\\\n\r\t\u{8}\u{c}\u{1}\u{7f}"});
        // python3 -c 'import json; print(json.dumps(..., ensure_ascii=False))'
        let expected = "{\"b\": [1, -2, 1.0, 0.1, 1e+16, 1000000000000000.0, 1.5e-07, 0.0001, 1e+22, \
            18446744073709551615], \"a\": {\"x\": null, \"y\": [true, false], \"z\": {}}, \"e\": [], \
            \"t\": \"<b> \u{e9}\u{1F642}\\\"\\\\\\n\\r\\t\\b\\f\\u0001\u{7f}\"}";
        assert_eq!(dumps(&value, &Style::default()), expected);

        let value = json!({"b": [1, {"c": "\u{e9}\u{1F642}"}], "a": {}});
        let style = Style { ensure_ascii: true, indent: Some(2), sort_keys: true, separators: None };
        let expected =
            "{\n  \"a\": {},\n  \"b\": [\n    1,\n    {\n      \"c\": \"\\u00e9\\ud83d\\ude42\"\n    }\n  ]\n}";
        assert_eq!(dumps(&value, &style), expected);
        let style = Style { separators: Some((",".to_owned(), ":".to_owned())), ..Style::default() };
        assert_eq!(dumps(&json!({"a": [1, 2]}), &style), "{\"a\":[1,2]}");
    }
}
