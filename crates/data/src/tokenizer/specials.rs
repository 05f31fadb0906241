//! Special tokens, which stand for no text and which no text can become.
//!
//! A special token's text is part of the vocabulary, so merges must not be able to produce it.
//! Merges never cross words, and a word holds letters, or digits, or other characters, never two of
//! these kinds. A text with `<` and a letter or digit thus never lies within a word, which is all
//! that a special token needs.

use std::collections::HashSet;

/// Maximum length of a special token. It is a name, not a sentence.
const BYTES_MAX: usize = 64;

/// Checks that these can be the special tokens of one vocabulary. Returns the first that cannot,
/// and why.
pub(super) fn check(specials: &[String]) -> Result<(), (String, String)> {
    let mut seen = HashSet::new();
    for special in specials {
        let refuse = |reason: String| Err((special.clone(), reason));
        if special.len() > BYTES_MAX {
            return refuse(format!("has {} bytes and the limit is {BYTES_MAX}", special.len()));
        }
        if !is_apart(special) {
            return refuse("is not ASCII between < and > with a letter or digit".to_owned());
        }
        if !seen.insert(special) {
            return refuse("is there twice".to_owned());
        }
    }
    Ok(())
}

/// Whether no word can contain the token. Each printable ASCII character also stands for itself in
/// the byte alphabet.
fn is_apart(special: &str) -> bool {
    let inner = special.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
    inner.is_some_and(|inner| {
        inner.bytes().all(|byte| byte.is_ascii_graphic())
            && inner.bytes().any(|byte| byte.is_ascii_alphanumeric())
    })
}
