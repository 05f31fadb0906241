//! Special tokens: what stands for no text, and what no text can become.
//!
//! A special token's text is one of the vocabulary's, so it must be none that merges could make. A
//! word - what merges never cross - holds letters, or digits, or others, never two of these kinds.
//! A text with `<` and a letter or digit is thus never within a word, and that is all that a
//! special token needs.

use std::collections::HashSet;

/// A name, not a sentence.
const BYTES_MAX: usize = 64;

/// Whether these can be the special tokens of one vocabulary; else the first that cannot, and why.
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

/// Whether no word can contain it. Of ASCII that prints each character also stands for itself in
/// the byte alphabet.
fn is_apart(special: &str) -> bool {
    let inner = special.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
    inner.is_some_and(|inner| {
        inner.bytes().all(|byte| byte.is_ascii_graphic())
            && inner.bytes().any(|byte| byte.is_ascii_alphanumeric())
    })
}
