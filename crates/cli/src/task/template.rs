//! The chat template of a model: from the tokenizer's folder, or from `data.chat_template`.

use std::path::Path;

use gpipe_data::jsonl::{ChatTemplate, SpecialTokens};
use serde_json::Value;

use super::{Vocabulary, vocabulary::Tokens};
use crate::{CliError, files::read_bounded};

/// The file of a chat template.
const TEMPLATE: &str = "chat_template.jinja";
/// The file of a chat template in JSON, which multimodal models have.
const TEMPLATE_IN_JSON: &str = "chat_template.json";
/// The file of the tokenizer's settings, which has the template in older folders.
const SETTINGS: &str = "tokenizer_config.json";
/// The key of the template in JSON files.
const KEY: &str = "chat_template";
/// Maximum size of a configured template: 4 MiB.
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;

/// A compiled chat template with its source.
pub(crate) struct Template {
    pub source: String,
    pub tokens: SpecialTokens,
    pub compiled: ChatTemplate,
}

impl Template {
    fn new(source: String, tokens: SpecialTokens, origin: &str) -> Result<Self, CliError> {
        let compiled = ChatTemplate::new(&source, tokens.clone())
            .map_err(|error| CliError::Usage(format!("{origin}: {error}")))?;
        Ok(Self { source, tokens, compiled })
    }

    /// The template in the tokenizer's folder. `None` if the folder has no template.
    ///
    /// # Errors
    /// A file is not JSON or not UTF-8, or the template is invalid.
    pub(crate) fn of(vocabulary: &Vocabulary) -> Result<Option<Self>, CliError> {
        let settings = json(vocabulary, SETTINGS)?;
        let other = json(vocabulary, TEMPLATE_IN_JSON)?;
        let alone = vocabulary.companion(TEMPLATE);
        let alone = alone.map(|bytes| Ok::<_, CliError>((text(bytes, TEMPLATE)?, TEMPLATE)));
        let found = alone.transpose()?;
        let found = found.or_else(|| found_in(&settings, SETTINGS));
        let Some((source, origin)) = found.or_else(|| found_in(&other, TEMPLATE_IN_JSON)) else {
            return Ok(None);
        };
        let token = |key: &str| {
            let value = settings.as_ref()?.get(key)?;
            Some(value.as_str().or_else(|| value.get("content")?.as_str())?.to_owned())
        };
        let mut tokens = SpecialTokens {
            bos: token("bos_token"),
            eos: token("eos_token"),
            pad: token("pad_token"),
        };
        if tokens.eos.is_none() {
            tokens.eos = end_of_document(vocabulary)?;
        }
        Self::new(source, tokens, origin).map(Some)
    }
}

/// Replaces the template of `vocabulary` by that in the file at `path`. An empty path changes
/// nothing.
///
/// # Errors
/// The file cannot be read, or the template is invalid.
pub(super) fn with_configured(
    mut vocabulary: Vocabulary,
    path: &Path,
) -> Result<Vocabulary, CliError> {
    if let (false, Vocabulary::Tokens(tokens)) = (path.as_os_str().is_empty(), &mut vocabulary) {
        let source = read_bounded(path, TEMPLATE_BYTES_MAX)?;
        let origin = path.display().to_string();
        Template::new(source.clone(), SpecialTokens::default(), &origin)?;
        let Tokens { companions, .. } = tokens.as_mut();
        companions.retain(|(name, _)| name != TEMPLATE);
        companions.push((TEMPLATE.to_owned(), source.into_bytes()));
    }
    Ok(vocabulary)
}

/// The template in the file at `path`, for a tokenizer that is not trained yet. `None` if the path
/// is empty.
///
/// # Errors
/// The file cannot be read, or the template is invalid.
pub(super) fn configured(path: &Path) -> Result<Option<Template>, CliError> {
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let source = read_bounded(path, TEMPLATE_BYTES_MAX)?;
    let eos = Some(gpipe_data::END_OF_DOCUMENT.to_owned());
    let tokens = SpecialTokens { eos, ..SpecialTokens::default() };
    Template::new(source, tokens, &path.display().to_string()).map(Some)
}

/// The text of the token that ends a document.
fn end_of_document(vocabulary: &Vocabulary) -> Result<Option<String>, CliError> {
    let tokenizer = vocabulary.tokenizer()?;
    let end = tokenizer.end_of_document();
    let is_end = |special: &&str| tokenizer.special(special) == Some(end);
    Ok(tokenizer.specials().find(is_end).map(str::to_owned))
}

/// The template in a parsed JSON file, with the file's `name`. The file has one template, or a list
/// with one named `default`.
fn found_in(value: &Option<Value>, name: &'static str) -> Option<(String, &'static str)> {
    let source = match value.as_ref()?.get(KEY)? {
        Value::String(source) => source.as_str(),
        Value::Array(all) => {
            let is_default = |own: &&Value| own.get("name").is_some_and(|name| name == "default");
            all.iter().find(is_default)?.get("template")?.as_str()?
        }
        _ => return None,
    };
    Some((source.to_owned(), name))
}

fn json(vocabulary: &Vocabulary, name: &str) -> Result<Option<Value>, CliError> {
    let read = |bytes: &[u8]| {
        serde_json::from_slice(bytes).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            CliError::Usage(format!(
                "{name} of the model is not JSON (line {line}, column {column}): correct it"
            ))
        })
    };
    vocabulary.companion(name).map(read).transpose()
}

fn text(bytes: &[u8], name: &str) -> Result<String, CliError> {
    String::from_utf8(bytes.to_vec())
        .map_err(|_| CliError::Usage(format!("{name} of the model is not UTF-8: correct it")))
}

#[cfg(test)]
mod tests {
    use gpipe_data::{Document, Tokenizer};
    use serde_json::json;

    use super::*;

    fn vocabulary(companions: &[(&str, String)]) -> Vocabulary {
        let document = Document { name: "t".into(), text: "abcd".into() };
        let tokenizer = Tokenizer::train(&[document], 257).unwrap();
        let companions =
            companions.iter().map(|(name, text)| ((*name).to_owned(), text.clone().into_bytes()));
        Vocabulary::Tokens(Box::new(Tokens { tokenizer, companions: companions.collect() }))
    }

    fn rendered(companions: &[(&str, String)]) -> Option<String> {
        let template = Template::of(&vocabulary(companions)).unwrap()?;
        let hi = json!({"role": "user", "content": "hi"});
        Some(template.compiled.render(&[hi], &json!(null), false).unwrap())
    }

    #[test]
    fn oracle_a_template_is_found_wherever_folders_have_it() {
        const OWN: &str = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}";
        let alone = (TEMPLATE, OWN.to_owned());
        assert_eq!(rendered(&[]), None);
        assert_eq!(rendered(std::slice::from_ref(&alone)).unwrap(), "hi<|end|>");
        let settings = json!({
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": "old",
        });
        let settings = (SETTINGS, settings.to_string());
        assert_eq!(rendered(std::slice::from_ref(&settings)).unwrap(), "old");
        assert_eq!(rendered(&[alone, settings]).unwrap(), "<s>hi</s>");
        let several = json!({"chat_template": [
            {"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"},
        ]});
        assert_eq!(rendered(&[(SETTINGS, several.to_string())]).unwrap(), "b");
        let other = (TEMPLATE_IN_JSON, json!({"chat_template": "c"}).to_string());
        assert_eq!(rendered(&[(SETTINGS, "{}".into()), other]).unwrap(), "c");
    }

    #[test]
    fn fault_a_broken_template_is_named() {
        let error = |companion: (&str, String)| {
            Template::of(&vocabulary(&[companion])).err().unwrap().to_string()
        };
        assert!(error((TEMPLATE, "{% if %}".into())).starts_with(TEMPLATE));
        assert!(error((SETTINGS, "{".into())).starts_with(SETTINGS));
    }
}
