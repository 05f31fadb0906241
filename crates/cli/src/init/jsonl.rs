//! What the first line of a JSONL file holds.

use std::path::Path;

use gpipe_data::jsonl::{Fields as Names, Lines, OnBadLine, Record};
use serde_json::{Map, Value};

use super::refused;
use crate::CliError;

/// Names that fields of prompts and of completions have in published data, ours first.
const PROMPTS: [&str; 5] = ["prompt", "instruction", "question", "input", "query"];
const COMPLETIONS: [&str; 6] = ["completion", "output", "response", "answer", "target", "chosen"];

/// What a line holds.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Fields {
    Text,
    /// The names of the fields of a prompt and of its completion.
    Prompt(String, String),
    Messages,
}

/// What the first line of the file holds.
///
/// # Errors
/// It holds nothing that a training takes, or more than one thing.
pub(super) fn fields(path: &Path) -> Result<Fields, CliError> {
    let mut lines = Lines::open(path, Names::default(), OnBadLine::Stop)?;
    let Some((number, line)) = lines.next_text()? else { return refused(path, "it has no line") };
    let object: Map<String, Value> = match serde_json::from_str(&line) {
        Ok(object) => object,
        Err(error) => {
            return refused(path, &format!("line {number} is no JSON object: {error}"));
        }
    };
    let is_text = |name: &&&str| object.get(**name).is_some_and(Value::is_string);
    let prompts: Vec<&str> = PROMPTS.iter().filter(is_text).copied().collect();
    let completion = COMPLETIONS.iter().find(is_text).copied();
    let mut names = Names::default();
    let found = match (object.contains_key("messages"), &prompts[..], completion) {
        (true, ..) => Fields::Messages,
        // The rest would be left out of the prompt without a word.
        (_, [prompt, _, ..], Some(completion)) if *prompt != names.prompt => {
            return refused(
                path,
                &format!(
                    "line {number} has {} beside {completion}, and a sample has one prompt: \
                    join them in a field named prompt",
                    prompts.join(" and ")
                ),
            );
        }
        (_, [prompt, ..], Some(completion)) => {
            (names.prompt, names.completion) = ((*prompt).to_owned(), completion.to_owned());
            Fields::Prompt(names.prompt.clone(), names.completion.clone())
        }
        _ if is_text(&&"text") => Fields::Text,
        _ => {
            let names: Vec<&str> = object.keys().map(String::as_str).collect();
            return refused(
                path,
                &format!(
                    "line {number} has the fields {}, none of which is text, prompt and \
                    completion, or messages: rename them, or write a configuration with \
                    [data.fields]",
                    names.join(", ")
                ),
            );
        }
    };
    // A training would refuse each such line.
    match Record::parse(&line, &names) {
        Ok(_) => Ok(found),
        Err(reason) => refused(path, &format!("line {number}: {reason}")),
    }
}
