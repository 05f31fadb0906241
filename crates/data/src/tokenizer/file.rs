//! Reads a tokenizer that was learned here.
//!
//! The format is the JSON of the `tokenizers` crate, so other tools can read it. The crate's reader
//! is not used, because it accepts tokenizers that are not lossless and panics on some damaged
//! files. Instead, the vocabulary and the merges are extracted and checked, and the tokenizer is
//! assembled as after training.

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;

use super::{END_OF_DOCUMENT, VOCABULARY_MAX, VOCABULARY_MIN, alphabet, specials};

/// Two adjacent token ids.
type Pair = (u32, u32);

/// The content of a tokenizer file.
pub(super) struct Saved {
    /// Every token's text in the byte alphabet, by id.
    pub(super) tokens: Vec<String>,
    /// Pairs in the order in which an encoder merges them.
    pub(super) merges: Vec<Pair>,
    /// The special tokens, which stand for no text.
    pub(super) specials: Vec<String>,
}

/// Extracts the vocabulary and merges from a tokenizer's JSON, or returns what is wrong with it.
/// `None` if gpipe did not learn it.
pub(super) fn parse(json: &str) -> Result<Option<Saved>, String> {
    let root: Value = serde_json::from_str(json).map_err(|error| {
        format!("it is not JSON (line {}, column {})", error.line(), error.column())
    })?;
    if !is_ours(&root) {
        return Ok(None);
    }
    check_kind(&root)?;
    let tokens = tokens(&root)?;
    check_tokens(&tokens)?;
    let specials = specials(&root, &tokens)?;
    let merges = merges(&root, &tokens, &specials)?;
    Ok(Some(Saved { tokens, merges, specials }))
}

/// Whether gpipe learned this tokenizer: its token 0 ends documents.
fn is_ours(root: &Value) -> bool {
    let vocabulary = root.pointer("/model/vocab").and_then(Value::as_object);
    let end = vocabulary.and_then(|vocabulary| vocabulary.get(END_OF_DOCUMENT));
    end.and_then(Value::as_u64) == Some(0)
}

/// Checks that the file sets everything as [`super::Tokenizer::around`] does. Otherwise the
/// tokenizer would encode differently from the one that was saved.
fn check_kind(root: &Value) -> Result<(), String> {
    let expected = [
        ("/model/type", Value::from("BPE")),
        ("/pre_tokenizer/type", Value::from("ByteLevel")),
        ("/pre_tokenizer/add_prefix_space", Value::from(false)),
        ("/pre_tokenizer/use_regex", Value::from(true)),
        ("/decoder/type", Value::from("ByteLevel")),
        ("/normalizer", Value::Null),
        ("/post_processor", Value::Null),
        ("/model/dropout", Value::Null),
        ("/model/unk_token", Value::Null),
        ("/model/continuing_subword_prefix", Value::Null),
        ("/model/end_of_word_suffix", Value::Null),
        ("/model/byte_fallback", Value::from(false)),
        ("/model/ignore_merges", Value::from(false)),
        ("/truncation", Value::Null),
        ("/padding", Value::Null),
    ];
    for (pointer, value) in expected {
        let found = root.pointer(pointer).unwrap_or(&Value::Null);
        if *found != value {
            return Err(format!("{pointer} is {found} and must be {value}"));
        }
    }
    Ok(())
}

/// The special tokens: all that were added to the vocabulary.
fn specials(root: &Value, tokens: &[String]) -> Result<Vec<String>, String> {
    let added = root.get("added_tokens").and_then(Value::as_array);
    let specials: Vec<String> = added
        .into_iter()
        .flatten()
        .map(|token| special(token, tokens))
        .collect::<Result<_, _>>()?;
    if !specials.iter().any(|special| special == END_OF_DOCUMENT) {
        return Err(format!("its added tokens lack {END_OF_DOCUMENT}"));
    }
    specials::check(&specials)
        .map_err(|(special, reason)| format!("its added token {special} {reason}"))?;
    Ok(specials)
}

/// The text of an added token, whose settings must be those of [`super::Tokenizer::around`].
fn special(token: &Value, tokens: &[String]) -> Result<String, String> {
    let content = token.get("content").and_then(Value::as_str);
    let content = content.ok_or("one of its added tokens has no text")?;
    // `normalized` has no meaning without a normalizer.
    let expected =
        [("special", true), ("single_word", false), ("lstrip", false), ("rstrip", false)];
    for (key, value) in expected {
        if token.get(key) != Some(&Value::from(value)) {
            return Err(format!("{key} of its added token {content} must be {value}"));
        }
    }
    let id = token.get("id").and_then(Value::as_u64).and_then(|id| usize::try_from(id).ok());
    if id.and_then(|id| tokens.get(id)).is_none_or(|text| text != content) {
        return Err(format!("the id of its added token {content} is not that of its vocabulary"));
    }
    Ok(content.to_owned())
}

/// The tokens by id. The ids are row indices of a model's embedding, so they must run from 0
/// without gaps.
fn tokens(root: &Value) -> Result<Vec<String>, String> {
    let vocabulary = root.pointer("/model/vocab").and_then(Value::as_object);
    let vocabulary = vocabulary.ok_or("it has no vocabulary")?;
    let by_id: BTreeMap<Option<u64>, &String> =
        vocabulary.iter().map(|(text, id)| (id.as_u64(), text)).collect();
    let ids = by_id.keys().copied();
    if by_id.len() != vocabulary.len() || !ids.eq((0..vocabulary.len() as u64).map(Some)) {
        return Err("the ids of its tokens are not 0, 1, 2, ... without gaps".to_owned());
    }
    Ok(by_id.into_values().cloned().collect())
}

fn check_tokens(tokens: &[String]) -> Result<(), String> {
    let count = tokens.len();
    if !(VOCABULARY_MIN..=VOCABULARY_MAX).contains(&count) {
        return Err(format!("its vocabulary has {count} tokens"));
    }
    let texts: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    let mut byte_texts = alphabet::byte_chars().into_iter().map(String::from);
    if !byte_texts.all(|text| texts.contains(text.as_str())) {
        return Err("its vocabulary lacks some of the 256 bytes".to_owned());
    }
    if !texts.contains(END_OF_DOCUMENT) {
        return Err(format!("its vocabulary lacks {END_OF_DOCUMENT}"));
    }
    Ok(())
}

fn merges(root: &Value, tokens: &[String], specials: &[String]) -> Result<Vec<Pair>, String> {
    let merges = root.pointer("/model/merges").and_then(Value::as_array);
    let ids: BTreeMap<&str, u32> = tokens.iter().map(String::as_str).zip(0..).collect();
    let id = |text: &str| ids.get(text).copied();
    let mut pairs = Vec::new();
    for merge in merges.ok_or("it has no merges")? {
        let (a, b) = halves(merge).ok_or_else(|| format!("{merge} is not a merge"))?;
        let joined = format!("{a}{b}");
        // A text that contains a special token's characters must not become the special token.
        match (id(a), id(b), id(&joined)) {
            (Some(a), Some(b), Some(_)) if !specials.contains(&joined) => pairs.push((a, b)),
            _ => return Err(format!("the merge {merge} does not fit its vocabulary")),
        }
    }
    Ok(pairs)
}

/// The halves of a merge, which is `["a", "b"]`.
fn halves(merge: &Value) -> Option<(&str, &str)> {
    match merge.as_array().map(Vec::as_slice) {
        Some([a, b]) => Some((a.as_str()?, b.as_str()?)),
        _ => None,
    }
}
