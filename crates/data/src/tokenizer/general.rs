//! A tokenizer of another program: any `tokenizer.json` that the `tokenizers` crate reads.
//!
//! It encodes and decodes as that crate and Hugging Face's transformers do. A post-processor may
//! add tokens, such as one that begins a text. The text of a special token in a document is that
//! token.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use tokenizers::PostProcessorWrapper;

use super::{JSON_BYTES_MAX, PlacedToken, VOCABULARY_MAX};
use crate::{Error, Result};

/// Special tokens that end a document, the likeliest first. They are used if nothing says which.
const ENDS: [&str; 5] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"];
/// Longer documents are encoded in parts, because the crate keeps many bytes for each token. What a
/// post-processor adds goes to the two ends of the document, and a normalizer may add its prefix to
/// each part.
const PART_BYTES: usize = 4 << 20;

/// The tokenizer, and the text that it was read from.
#[derive(Debug, Clone)]
pub(super) struct General {
    inner: tokenizers::Tokenizer,
    pub json: String,
}

/// What a tokenizer's file says.
pub(super) struct Facts {
    /// One more than the largest token.
    pub vocabulary: usize,
    /// Special tokens with their ids, sorted by id.
    pub specials: Vec<(String, u32)>,
    /// The token that ends a document, if one has a usual name.
    pub end: Option<u32>,
}

/// Calls the crate, which panics on some damaged files.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("the `tokenizers` crate fails on it: the file is damaged".into()),
    }
}

impl General {
    /// Reads the text of a `tokenizer.json`, or returns what is wrong with it.
    pub fn parse(json: &str) -> std::result::Result<(Self, Facts), String> {
        if json.len() as u64 > JSON_BYTES_MAX {
            return Err(format!("it is larger than {JSON_BYTES_MAX} bytes"));
        }
        let mut inner: tokenizers::Tokenizer = guarded(|| json.parse())?;
        // A file may tell how its last user cut and padded texts. Documents are not cut.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        if let Some(own) = inner.get_post_processor() {
            let whole = untrimmed(own)?;
            inner.with_post_processor(Some(whole));
        }
        let all = inner.get_vocab(true);
        let vocabulary = all.values().max().map_or(0, |&largest| largest as usize + 1);
        if !(1..=VOCABULARY_MAX).contains(&vocabulary) {
            return Err(format!("its vocabulary has {vocabulary} tokens"));
        }
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let mut specials: Vec<(String, u32)> =
            special.map(|(id, token)| (token.content.clone(), *id)).collect();
        specials.sort_unstable_by_key(|(_, id)| *id);
        let is_special = |end: &&str| specials.iter().find(|(text, _)| text == *end);
        let end = ENDS.iter().find_map(is_special).map(|(_, id)| *id);
        Ok((Self { inner, json: json.to_owned() }, Facts { vocabulary, specials, end }))
    }

    /// The id of a token's text.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    pub fn text(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut whole = Whole::default();
        for part in parts(text) {
            let encoded = guarded(|| self.inner.encode_fast(part, true));
            let encoded = encoded.map_err(|reason| refused("encode a text", reason))?;
            whole.add(encoded.get_ids(), encoded.get_special_tokens_mask());
        }
        Ok(whole.tokens())
    }

    pub fn encode_with_offsets(&self, text: &str, adds: bool) -> Result<Vec<PlacedToken>> {
        let (mut whole, mut from) = (Whole::default(), 0);
        for part in parts(text) {
            let encoded = guarded(|| self.inner.encode(part, adds));
            let encoded = encoded.map_err(|reason| refused("encode a text", reason))?;
            let added = encoded.get_special_tokens_mask();
            let offsets = encoded.get_offsets().iter().zip(added);
            let placed = encoded.get_ids().iter().zip(offsets);
            let placed = placed.map(|(token, ((start, end), added))| match added {
                0 => (*token, Some(from + start..from + end)),
                _ => (*token, None),
            });
            whole.add(&placed.collect::<Vec<PlacedToken>>(), added);
            from += part.len();
        }
        Ok(whole.tokens())
    }

    pub fn decode(&self, tokens: &[u32], leave_out_specials: bool) -> Result<String> {
        guarded(|| self.inner.decode(tokens, leave_out_specials))
            .map_err(|reason| refused("decode tokens", reason))
    }
}

/// The tokens of a text that is encoded in parts. What the post-processor adds to each part is kept
/// at the two ends of the text alone.
struct Whole<T> {
    tokens: Vec<T>,
    /// What was added at the end of the last part.
    end: Vec<T>,
}

impl<T> Default for Whole<T> {
    fn default() -> Self {
        Self { tokens: Vec::new(), end: Vec::new() }
    }
}

impl<T: Clone> Whole<T> {
    /// Adds a part. `added` is 1 for each token that the post-processor added.
    fn add(&mut self, part: &[T], added: &[u32]) {
        let before = added.iter().take_while(|own| **own == 1).count();
        let after = added.iter().skip(before).rev().take_while(|own| **own == 1).count();
        let (begin, rest) = part.split_at(before.min(part.len()));
        let (own, end) = rest.split_at(rest.len().saturating_sub(after));
        match (self.tokens.is_empty(), own.is_empty()) {
            (true, true) => self.end = part.to_vec(), // all, if no part has a token of its own
            (false, true) => {}
            (is_first, false) => {
                self.tokens.extend_from_slice(if is_first { begin } else { &[] });
                self.tokens.extend_from_slice(own);
                self.end = end.to_vec();
            }
        }
    }

    fn tokens(mut self) -> Vec<T> {
        self.tokens.append(&mut self.end);
        self.tokens
    }
}

/// The post-processor without `trim_offsets`, by which a token's bytes would lack its spaces, and a
/// token of spaces would have none.
fn untrimmed(own: &PostProcessorWrapper) -> std::result::Result<PostProcessorWrapper, String> {
    fn untrim(value: &mut Value) {
        match value {
            Value::Object(keys) => keys.iter_mut().for_each(|(key, own)| match key.as_str() {
                "trim_offsets" => *own = false.into(),
                _ => untrim(own),
            }),
            Value::Array(all) => all.iter_mut().for_each(untrim),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(own).map_err(|error| error.to_string())?;
    untrim(&mut value);
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn refused(action: &'static str, reason: String) -> Error {
    Error::tokenizer(action)(reason.into())
}

/// The text in parts of about [`PART_BYTES`], cut after line ends. An empty text is one part.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let own = rest?;
        let cut = match own.len() > PART_BYTES {
            true => own.get(..own.floor_char_boundary(PART_BYTES))?.rfind('\n').map(|at| at + 1),
            false => None,
        };
        let (part, after) = match cut {
            Some(cut) => (own.get(..cut)?, own.get(cut..)),
            None if own.len() > PART_BYTES => own
                .split_at_checked(own.floor_char_boundary(PART_BYTES))
                .map(|(a, b)| (a, Some(b)))?,
            None => (own, None),
        };
        rest = after.filter(|after| !after.is_empty());
        Some(part)
    })
}

/// The token that ends a text, as the text of a `tokenizer_config.json` names it; `None` if it
/// names none.
///
/// # Errors
/// The text is not JSON.
pub fn end_in_config(text: &str) -> std::result::Result<Option<String>, String> {
    let config: Value = serde_json::from_str(text).map_err(|error| {
        format!(
            "tokenizer_config.json beside it is not JSON (line {}, column {})",
            error.line(),
            error.column()
        )
    })?;
    let end = config.get("eos_token");
    let text =
        |end: &Value| Some(end.as_str().or_else(|| end.get("content")?.as_str())?.to_owned());
    Ok(end.and_then(text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn property_parts_make_the_text_and_end_with_lines() {
        let lines = "one line\n".repeat(2 * PART_BYTES / 9 + 100);
        let long = "é".repeat(PART_BYTES);
        for text in ["", "a", &lines, &long] {
            let all: Vec<&str> = parts(text).collect();
            assert_eq!(all.concat(), text);
            assert!(all.iter().all(|part| part.len() <= PART_BYTES));
        }
        assert_eq!(parts("").count(), 1);
        assert!(parts(&lines).all(|part| part.ends_with('\n')));
    }

    /// What the post-processor adds at the end came after the first part, in the middle of a long
    /// text.
    #[test]
    fn regression_what_is_added_goes_to_the_ends_of_a_long_text() {
        let special = |id, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        };
        let part = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let own = |id: &str, at: u32| json!({"id": id, "ids": [at], "tokens": [id]});
        let text_itself = json!({"Sequence": {"id": "A", "type_id": 0}});
        let source = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [special(0, "<s>"), special(1, "</s>")],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [part("<s>"), &text_itself, part("</s>")],
                "pair": [&text_itself, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": own("<s>", 0), "</s>": own("</s>", 1)},
            },
            "decoder": null,
            "model": {
                "type": "WordLevel", "unk_token": "<s>",
                "vocab": {"<s>": 0, "</s>": 1, "one": 2, "line": 3},
            },
        });
        let (tokenizer, _) = General::parse(&source.to_string()).unwrap();
        let lines = 2 * PART_BYTES / 9 + 100;
        let text = "one line\n".repeat(lines);
        assert!(parts(&text).count() > 2);
        let whole: Vec<u32> = [2, 3].repeat(lines);
        let ends = |tokens: &[u32]| [&[0], tokens, &[1]].concat();
        assert!(tokenizer.encode(&text).unwrap() == ends(&whole));
        assert_eq!(tokenizer.encode("one").unwrap(), ends(&[2]));
        assert_eq!(tokenizer.encode("").unwrap(), ends(&[]));
        // Parts without a token of their own: at the beginning, at the end, and all of them.
        let blank = " ".repeat(PART_BYTES);
        for (text, own) in [(format!("{blank}one"), &[2][..]), (format!("one{blank}"), &[2])] {
            assert_eq!(tokenizer.encode(&text).unwrap(), ends(own));
        }
        assert_eq!(tokenizer.encode(&blank.repeat(2)).unwrap(), ends(&[]));
        let placed = |adds| tokenizer.encode_with_offsets(&text, adds).unwrap();
        let tokens = |placed: &[PlacedToken]| placed.iter().map(|own| own.0).collect::<Vec<_>>();
        assert!(tokens(&placed(true)) == ends(&whole));
        assert!(tokens(&placed(false)) == whole);
        let last = placed(true).into_iter().rev().nth(1).unwrap();
        assert_eq!(last.1, Some(text.len() - 5..text.len() - 1));
    }

    #[test]
    fn oracle_both_spellings_of_the_end_are_read() {
        let read = |text: &str| end_in_config(text).unwrap();
        assert_eq!(read(r#"{"eos_token": "</s>"}"#).as_deref(), Some("</s>"));
        let object = r#"{"eos_token": {"content": "<|e|>", "lstrip": false}}"#;
        assert_eq!(read(object).as_deref(), Some("<|e|>"));
        for none in ["{}", r#"{"eos_token": null}"#, "[]"] {
            assert_eq!(read(none), None);
        }
        assert!(end_in_config("[").unwrap_err().contains("is not JSON"));
    }
}
