//! JSON as Python's `json.dumps` writes it, for `tojson` in chat templates.

use minijinja::{Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The filter `tojson` as in transformers: no HTML escapes, and the options of `json.dumps`.
///
/// # Errors
/// An option is unknown or has the wrong type, or both `indent` and `separators` are given.
pub(super) fn to_json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    let is_sorted: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let failed =
        |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut value = serde_json::to_value(value).map_err(failed)?;
    if is_sorted == Some(true) {
        value.sort_all_objects();
    }
    let mut bytes = Vec::new();
    match (indent, separators) {
        (Some(indent), None) => {
            let blanks = " ".repeat(indent.min(16));
            let pretty = PrettyFormatter::with_indent(blanks.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, pretty)).map_err(failed)?;
        }
        (Some(_), Some(_)) => {
            let reason = "tojson: give indent or separators, not both";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        (None, separators) => {
            let own = separators.as_deref().unwrap_or_default();
            let [item, key] = [", ", ": "].map(str::to_owned);
            let spaced = match own {
                [item, key] => Spaced { item: item.clone(), key: key.clone() },
                _ => Spaced { item, key },
            };
            value.serialize(&mut Serializer::with_formatter(&mut bytes, spaced)).map_err(failed)?;
        }
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(if is_ascii == Some(true) { escaped(&text) } else { text })
}

/// Writes each UTF-16 unit of characters outside ASCII as `\u` and four hexadecimal digits.
fn escaped(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    for own in text.chars() {
        if own.is_ascii() {
            all.push(own);
            continue;
        }
        for unit in own.encode_utf16(&mut [0; 2]) {
            all.push_str(&format!("\\u{unit:04x}"));
        }
    }
    all
}

/// A formatter with these separators after items and keys.
struct Spaced {
    item: String,
    key: String,
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(self.item.as_bytes()) }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(self.item.as_bytes()) }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    use super::*;

    #[test]
    fn oracle_options_are_those_of_python() {
        let mut environment = Environment::new();
        environment.add_filter("tojson", |value: Value, options| to_json(&value, &options));
        let of = |options: &str| {
            let value = serde_json::json!({"b": [1, "é😀"], "a": null});
            let template = format!("{{{{ value | tojson({options}) }}}}");
            environment.render_str(&template, context! { value => value }).unwrap()
        };
        assert_eq!(of(""), r#"{"b": [1, "é😀"], "a": null}"#);
        assert_eq!(of("ensure_ascii=false"), of(""));
        assert_eq!(of("ensure_ascii=true"), r#"{"b": [1, "\u00e9\ud83d\ude00"], "a": null}"#);
        assert_eq!(of("sort_keys=true"), r#"{"a": null, "b": [1, "é😀"]}"#);
        assert_eq!(of("separators=(',', ':')"), r#"{"b":[1,"é😀"],"a":null}"#);
        assert_eq!(of("indent=1").lines().count(), 7);
    }
}
