//! Readers exposed for fuzzing only. Users do not need them.

use std::{path::Path, sync::OnceLock};

use crate::{
    Document, Result, Tokenizer,
    images::{Image, decode},
    jsonl::{ChatTemplate, Encoder, Fields, OnBadLine, Rows, Samples, TemplateError, batches},
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

/// Encodes a JSONL file as samples, packs them into rows and makes mini-batches. Returns the number
/// of samples.
///
/// # Errors
/// As for [`Encoder::encode`].
pub fn lines(path: &Path) -> Result<usize> {
    static MADE: OnceLock<(Tokenizer, Option<ChatTemplate>)> = OnceLock::new();
    let (tokenizer, template) = match MADE.get() {
        Some(made) => made,
        None => {
            let text = "a stage and a bubble, ".repeat(4);
            let tokenizer = Tokenizer::train(&[Document { name: "t".into(), text }], 280)?;
            let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
            let template = ChatTemplate::new(source, Default::default()).ok();
            MADE.get_or_init(|| (tokenizer, template))
        }
    };
    let on_bad_line = OnBadLine::Skip;
    let encoder = Encoder { template: template.as_ref(), fields: Fields::default(), on_bad_line };
    let samples = encoder.encode(path, tokenizer, |_| ())?.samples;
    let count = samples.len();
    for packed in [true, false] {
        let rows = Rows::new(&samples, 8, packed);
        let source = batches::Source { samples: samples.clone(), rows };
        if let Ok(all) = batches::in_order(&source, 8, 2, count) {
            all.for_each(drop);
        }
    }
    Ok(count)
}

/// Reads a file of cached samples. Returns whether the file is intact.
pub fn kept_samples(path: &Path) -> bool {
    Samples::kept(path).is_some()
}

/// Renders a conversation with a chat template. Returns the length of the text in bytes.
///
/// # Errors
/// As for [`ChatTemplate::new`] and [`ChatTemplate::marked`].
pub fn chat_template(source: &str) -> std::result::Result<usize, TemplateError> {
    let template = ChatTemplate::new(source, Default::default())?;
    let said = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let turns = [said("user", "hi"), said("assistant", "yes")];
    let marked = template.marked(&turns, &serde_json::json!([{"name": "f"}]))?;
    let within = marked.learned.iter().all(|part| marked.text.get(part.clone()).is_some());
    assert!(within, "a range of the loss mask is outside the text");
    template.turn_end()?;
    Ok(marked.text.len())
}
