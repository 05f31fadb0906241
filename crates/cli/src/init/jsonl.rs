//! What the first line of a JSONL file holds.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use gpipe_data::jsonl::{Fields as Names, Record};
use serde_json::{Map, Value};

use super::refused;
use crate::{CliError, files::io};

/// Maximum length of a line that is looked at, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
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
    let file = fs::File::open(path).map_err(io(path))?;
    let mut line = String::new();
    let mut lines = BufReader::new(file.take(LINE_BYTES_MAX)).lines();
    while line.trim().is_empty() {
        match lines.next() {
            Some(next) => line = next.map_err(io(path))?,
            None => return refused(path, "it has no line"),
        }
    }
    let object: Map<String, Value> = match serde_json::from_str(&line) {
        Ok(object) => object,
        Err(error) => return refused(path, &format!("line 1 is no JSON object: {error}")),
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
                    "line 1 has {} beside {completion}, and a sample has one prompt: join them in \
                    a field named prompt",
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
                    "line 1 has the fields {}, none of which is text, prompt and completion, or \
                    messages: rename them, or write a configuration with [data.fields]",
                    names.join(", ")
                ),
            );
        }
    };
    // A training would refuse each such line.
    match Record::parse(&line, &names) {
        Ok(_) => Ok(found),
        Err(reason) => refused(path, &format!("line 1: {reason}")),
    }
}
