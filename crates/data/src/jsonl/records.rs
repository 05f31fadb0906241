//! Records: the parsed lines of a JSONL file.

use serde_json::{Map, Value};

/// Names of the fields in a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fields {
    /// Field of a text. All its tokens are in the loss.
    pub text: String,
    /// Field of a prompt, which is not in the loss.
    pub prompt: String,
    /// Field of the completion of a prompt, which is in the loss.
    pub completion: String,
    /// Field of a list of messages. The assistant's messages are in the loss.
    pub messages: String,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            text: "text".into(),
            prompt: "prompt".into(),
            completion: "completion".into(),
            messages: "messages".into(),
        }
    }
}

/// A parsed line.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A text, all of which is in the loss.
    Text(String),
    /// A prompt and its completion.
    Completion {
        /// The prompt, which is not in the loss.
        prompt: String,
        /// The completion, which is in the loss.
        completion: String,
    },
    /// A conversation.
    Messages {
        /// Objects with the strings `role` and `content`, and any other fields that the chat
        /// template uses.
        messages: Vec<Value>,
        /// What the assistant may call, as a list of JSON schemas; null if the line has no tools.
        tools: Value,
    },
}

/// Field beside messages of what the assistant may call.
const TOOLS: &str = "tools";
/// Maximum number of messages in a conversation.
const MESSAGES_MAX: usize = 10_000;

impl Record {
    /// Parses a line of JSONL.
    ///
    /// # Errors
    /// Returns the reason, without the line's number, if the line is not a JSON object, has fields
    /// of no kind or of several kinds, or has a field of the wrong type.
    pub fn parse(line: &str, fields: &Fields) -> Result<Self, String> {
        let parsed: Value = serde_json::from_str(line).map_err(|error| not_json(line, &error))?;
        let Value::Object(keys) = parsed else { return Err(not_an_object(line)) };
        let has = |name: &str| keys.contains_key(name);
        let kinds = [
            has(&fields.text),
            has(&fields.prompt) || has(&fields.completion),
            has(&fields.messages),
        ];
        let Fields { text, prompt, completion, messages } = fields;
        match kinds {
            [true, false, false] => Ok(Self::Text(string(&keys, text)?)),
            [false, true, false] => Ok(Self::Completion {
                prompt: string(&keys, prompt)?,
                completion: string(&keys, completion)?,
            }),
            [false, false, true] => Ok(Self::Messages {
                messages: conversation(&keys, messages)?,
                tools: tools(&keys)?,
            }),
            [false, false, false] => {
                let found: Vec<&str> = keys.keys().map(String::as_str).take(8).collect();
                let found = if found.is_empty() { vec!["nothing"] } else { found };
                Err(format!(
                    "it has none of the fields {text}, {prompt} with {completion}, or {messages}; \
                    found: {}",
                    found.join(", ")
                ))
            }
            _ => Err(format!(
                "it has several of {text}, {prompt} with {completion}, and {messages}: keep one"
            )),
        }
    }
}

fn string(keys: &Map<String, Value>, name: &str) -> Result<String, String> {
    match keys.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("field {name} must be a string")),
        None => Err(format!("it has no field {name}")),
    }
}

/// The messages in field `name`, at least one of which is the assistant's.
fn conversation(keys: &Map<String, Value>, name: &str) -> Result<Vec<Value>, String> {
    let Some(Value::Array(messages)) = keys.get(name) else {
        return Err(format!("field {name} must be a list of messages"));
    };
    if messages.len() > MESSAGES_MAX {
        return Err(format!("it has {} messages; the limit is {MESSAGES_MAX}", messages.len()));
    }
    for (number, message) in messages.iter().enumerate() {
        let text = |key: &str| message.get(key).is_some_and(Value::is_string);
        if !text("role") || !text("content") {
            return Err(format!(
                "message {} of {name}: \"role\" and \"content\" must be strings",
                number + 1
            ));
        }
    }
    if !messages.iter().any(is_assistants) {
        return Err(format!(
            "no message of {name} has the role assistant: no token is in the loss"
        ));
    }
    Ok(messages.clone())
}

/// The list in the field [`TOOLS`], which some data have as a string. Null if there is none.
fn tools(keys: &Map<String, Value>) -> Result<Value, String> {
    let bad = || format!("field {TOOLS} must be a list of JSON schemas, or null");
    let own = match keys.get(TOOLS) {
        Some(Value::String(text)) if text.trim().is_empty() => Value::Null,
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|_| bad())?,
        own => own.cloned().unwrap_or_default(),
    };
    match own {
        Value::Null | Value::Array(_) => Ok(own),
        _ => Err(bad()),
    }
}

/// Whether the message's role is `assistant`.
pub(super) fn is_assistants(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// The reason why a line is not JSON.
fn not_json(line: &str, error: &serde_json::Error) -> String {
    if line.trim_start().starts_with('[') {
        return not_an_object(line);
    }
    // serde_json reports column 0 when the line ends within a string.
    match error.is_eof() || error.column() == 0 {
        true => "the JSON is incomplete: write each object on one line".into(),
        false => {
            format!("it is not JSON (column {}): write one object per line", error.column())
        }
    }
}

fn not_an_object(line: &str) -> String {
    match line.trim_start().starts_with('[') {
        true => "it begins a JSON array: write one object per line, as `jq -c '.[]'` does".into(),
        false => "it is not a JSON object".into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn oracle_each_kind_of_line_is_read() {
        let read = |line: Value| Record::parse(&line.to_string(), &Fields::default());
        assert_eq!(read(json!({"text": "a", "source": 3})), Ok(Record::Text("a".into())));
        let (prompt, completion) = ("q".to_owned(), "a".to_owned());
        assert_eq!(
            read(json!({"prompt": "q", "completion": "a"})),
            Ok(Record::Completion { prompt, completion })
        );
        let messages = json!([{"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "tool_calls": []}]);
        let expected = |tools: Value| {
            Ok(Record::Messages { messages: messages.as_array().unwrap().clone(), tools })
        };
        assert_eq!(read(json!({ "messages": messages })), expected(Value::Null));
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for given in [tools.clone(), tools.to_string().into()] {
            let line = json!({ "messages": messages, "tools": given });
            assert_eq!(read(line), expected(tools.clone()));
        }
        let renamed = Fields { text: "body".into(), ..Fields::default() };
        let line = json!({"body": "b", "text": 3}).to_string();
        assert_eq!(Record::parse(&line, &renamed), Ok(Record::Text("b".into())));
    }

    #[test]
    fn fault_what_is_wrong_is_said() {
        for (line, reason) in [
            ("{", "the JSON is incomplete"),
            ("a,b", "it is not JSON (column 1)"),
            ("[]", "it begins a JSON array"),
            ("7", "it is not a JSON object"),
            (r#"{"body": "a"}"#, "none of the fields text, prompt with completion, or messages"),
            (r#"{"text": 3}"#, "field text must be a string"),
            (r#"{"prompt": "a"}"#, "it has no field completion"),
            (r#"{"text": "a", "prompt": "b"}"#, "keep one"),
            (r#"{"messages": "a"}"#, "field messages must be a list of messages"),
            (r#"{"messages": [{"role": "user"}]}"#, "message 1 of messages: "),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "no token is in the loss"),
        ] {
            let error = Record::parse(line, &Fields::default()).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
