//! Prints the samples that gpipe makes of a JSONL file, for `scripts/tuning_parity.py`.
//!
//! ```text
//! Usage: sample_ids FOLDER FILE
//! ```
//!
//! FOLDER has a `tokenizer.json` and a `tokenizer_config.json`. If FILE has messages, it also has a
//! `chat_template.jinja`. The output is a JSON object:
//!
//! - `texts`: for each line with messages, the rendered text without and with the generation
//!   prompt, or the template's error
//! - `samples`: for each sample, the input tokens and the targets, which are -100 outside the loss
//! - `refused`: for each invalid line, the reason

use std::path::Path;

use gpipe_data::{
    Tokenizer,
    jsonl::{
        ChatTemplate, Encoder, Fields, Lines, NO_DOCUMENT, OnBadLine, PackedBatch, Record, Rows,
        Source, SpecialTokens, batches::in_order,
    },
};
use gpipe_drivers::Failure;
use serde_json::{Value, json};

const USAGE: &str = "usage: sample_ids FOLDER FILE";

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let (folder, file) = (arguments.next().ok_or(USAGE)?, arguments.next().ok_or(USAGE)?);
    let (folder, file) = (Path::new(&folder), Path::new(&file));
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json"))?;
    let template = template(folder)?;
    let mut texts = Vec::new();
    for record in Lines::open(file, Fields::default(), OnBadLine::Skip)? {
        if let (Record::Messages { messages, tools }, Some(template)) = (record?, &template) {
            let both = [false, true].map(|prompts| template.render(&messages, &tools, prompts));
            texts.push(match both {
                [Ok(text), Ok(prompt)] => json!([text, prompt]),
                [Err(error), _] | [_, Err(error)] => json!(error.to_string()),
            });
        }
    }
    let (template, fields, on_bad_line) = (template.as_ref(), Fields::default(), OnBadLine::Skip);
    let encoder = Encoder { template, fields, on_bad_line };
    let encoded = encoder.encode(file, &tokenizer, |_| ())?;
    let refused: Vec<&str> = encoded.bad.iter().map(|bad| bad.reason.as_str()).collect();
    let longest = encoded.samples.tokens().max(1);
    let rows = Rows::new(&encoded.samples, longest, false);
    let source = Source { samples: encoded.samples, rows };
    let mut samples = Vec::new();
    if !source.samples.is_empty() {
        for PackedBatch { batch, documents } in in_order(&source, longest, 1, usize::MAX)? {
            let is_sample = |own: &&i64| **own != NO_DOCUMENT;
            let length = documents.iter().take_while(is_sample).count();
            samples.push(json!([batch.inputs.get(..length), batch.targets.get(..length)]));
        }
    }
    println!("{}", json!({"texts": texts, "samples": samples, "refused": refused}));
    Ok(())
}

/// The template of a folder, with the special tokens in its `tokenizer_config.json`. `None` if the
/// folder has no template.
fn template(folder: &Path) -> Result<Option<ChatTemplate>, Failure> {
    let path = folder.join("chat_template.jinja");
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(folder.join("tokenizer_config.json"))?;
    let settings: Value = serde_json::from_str(&text)?;
    let token = |key: &str| settings.get(key).and_then(Value::as_str).map(str::to_owned);
    let tokens =
        SpecialTokens { bos: token("bos_token"), eos: token("eos_token"), pad: token("pad_token") };
    Ok(Some(ChatTemplate::new(&std::fs::read_to_string(path)?, tokens)?))
}
