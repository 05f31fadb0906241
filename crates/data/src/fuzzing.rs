//! Readers exposed for fuzzing only. Users do not need them.

use std::path::Path;

use crate::{
    Document, Result, Tokenizer,
    images::{Image, decode},
    jsonl::{ChatTemplate, Encoder, Fields, OnBadLine, Rows, TemplateError, batches, cache},
    parallel,
};

/// Reads a TSV file of pairs and returns the number of pairs kept.
///
/// # Errors
/// Fails as [`crate::parallel::ParallelCorpus::read`] does.
pub fn pairs(path: &Path) -> Result<usize> {
    parallel::fuzzing::pairs(path)
}

/// Decodes an image.
///
/// # Errors
/// Returns what is wrong with the image.
pub fn image(bytes: &[u8]) -> std::result::Result<Image, String> {
    decode::guarded(bytes)
}

/// Reads lines of JSON as samples, places them in rows and makes mini-batches. Returns the number
/// of samples.
///
/// # Errors
/// Fails as [`Encoder::encode`] does.
pub fn lines(path: &Path) -> Result<usize> {
    let text = "a stage and a bubble, ".repeat(4);
    let tokenizer = Tokenizer::train(&[Document { name: "t".into(), text }], 280)?;
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let template = ChatTemplate::new(source, Default::default()).ok();
    let on_bad_line = OnBadLine::Skip;
    let encoder = Encoder { template: template.as_ref(), fields: Fields::default(), on_bad_line };
    let samples = encoder.encode(path, &tokenizer, |_| ())?.samples;
    let count = samples.len();
    for packed in [true, false] {
        let rows = Rows::new(&samples, 8, packed);
        let source = batches::Source { samples: samples.clone(), rows };
        if let Ok(all) = batches::in_order(&source, 8, 2) {
            all.for_each(drop);
        }
    }
    Ok(count)
}

/// Reads kept samples. Returns whether they are whole.
pub fn kept_samples(path: &Path) -> bool {
    cache::read(path).is_some()
}

/// Applies a chat template to a conversation. Returns the length of the text.
///
/// # Errors
/// What is wrong with the template.
pub fn chat_template(source: &str) -> std::result::Result<usize, TemplateError> {
    let template = ChatTemplate::new(source, Default::default())?;
    let said = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let marked = template.marked(&[said("user", "hi"), said("assistant", "yes")])?;
    let within = marked.learned.iter().all(|part| marked.text.get(part.clone()).is_some());
    assert!(within, "parts outside of the text");
    template.turn_end()?;
    Ok(marked.text.len())
}
