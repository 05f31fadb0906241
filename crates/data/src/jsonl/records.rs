//! What a line of JSON says.

use serde_json::{Map, Value};

/// Names of the fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fields {
    /// A text, all of which is learned.
    pub text: String,
    /// What is read before the completion.
    pub prompt: String,
    /// What is learned after the prompt.
    pub completion: String,
    /// A list of messages, of which the assistant's are learned.
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

/// A line.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A text, all of which is learned.
    Text(String),
    /// A prompt, and the completion that is learned.
    Completion {
        /// What is read.
        prompt: String,
        /// What is learned.
        completion: String,
    },
    /// Messages: objects with `role`, `content` and what else the template may use.
    Messages(Vec<Value>),
}

/// Maximum number of messages of a conversation.
const MESSAGES_MAX: usize = 10_000;

impl Record {
    /// Reads a line, or returns what is wrong with it.
    ///
    /// # Errors
    /// The line is not a JSON object, has none of the fields or several kinds of them, or a field
    /// has another type.
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
            [false, false, true] => Ok(Self::Messages(conversation(&keys, messages)?)),
            [false, false, false] => {
                let found: Vec<&str> = keys.keys().map(String::as_str).take(8).collect();
                Err(format!(
                    "it has none of the fields {text}, {prompt} with {completion}, or {messages}; \
                    its fields are {}",
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
        Some(_) => Err(format!("its field {name} is not a text")),
        None => Err(format!("it has no field {name}")),
    }
}

/// The messages: objects with a role and a content, at least one of them the assistant's.
fn conversation(keys: &Map<String, Value>, name: &str) -> Result<Vec<Value>, String> {
    let Some(Value::Array(messages)) = keys.get(name) else {
        return Err(format!("its field {name} is not a list of messages"));
    };
    if messages.len() > MESSAGES_MAX {
        return Err(format!("it has {} messages, at most {MESSAGES_MAX}", messages.len()));
    }
    for (number, message) in messages.iter().enumerate() {
        let text = |key: &str| message.get(key).is_some_and(Value::is_string);
        if !text("role") || !text("content") {
            return Err(format!(
                "message {} of {name} needs \"role\" and \"content\", which are texts",
                number + 1
            ));
        }
    }
    if !messages.iter().any(is_assistants) {
        return Err(format!(
            "no message of {name} has the role assistant: there is nothing to learn"
        ));
    }
    Ok(messages.clone())
}

/// Whether the assistant says this message.
pub(super) fn is_assistants(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Why a line is not JSON.
fn not_json(line: &str, error: &serde_json::Error) -> String {
    if line.trim_start().starts_with('[') {
        return not_an_object(line);
    }
    // Column 0 is the end of the line within a string.
    match error.is_eof() || error.column() == 0 {
        true => "it ends before its JSON does: write each object on one line".into(),
        false => {
            format!("it is not JSON (column {}): write one object on each line", error.column())
        }
    }
}

fn not_an_object(line: &str) -> String {
    match line.trim_start().starts_with('[') {
        true => "it begins a list: write one object on each line, as `jq -c '.[]'` does".into(),
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
        let expected = messages.as_array().unwrap().clone();
        assert_eq!(read(json!({ "messages": messages })), Ok(Record::Messages(expected)));
        let renamed = Fields { text: "body".into(), ..Fields::default() };
        let line = json!({"body": "b", "text": 3}).to_string();
        assert_eq!(Record::parse(&line, &renamed), Ok(Record::Text("b".into())));
    }

    #[test]
    fn fault_what_is_wrong_is_said() {
        for (line, reason) in [
            ("{", "it ends before its JSON does"),
            ("a,b", "it is not JSON (column 1)"),
            ("[]", "it begins a list"),
            ("7", "it is not a JSON object"),
            (r#"{"body": "a"}"#, "none of the fields text, prompt with completion, or messages"),
            (r#"{"text": 3}"#, "its field text is not a text"),
            (r#"{"prompt": "a"}"#, "it has no field completion"),
            (r#"{"text": "a", "prompt": "b"}"#, "keep one"),
            (r#"{"messages": "a"}"#, "not a list of messages"),
            (r#"{"messages": [{"role": "user"}]}"#, "message 1 of messages needs"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "nothing to learn"),
        ] {
            let error = Record::parse(line, &Fields::default()).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
