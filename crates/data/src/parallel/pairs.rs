//! Decides which two lines form a training pair, and which sentences are near-duplicates.

use super::{Pair, ParallelOptions, Reason};
use crate::hash;

/// Characters added to both lengths before their ratio is taken, because short words may differ by
/// more than sentences.
const RATIO_CHARACTERS: usize = 10;

/// Maximum length of a directive or tag, in characters.
const MARKUP_CHARACTERS_MAX: usize = 64;

/// Two lines as a pair after trimming, or the reason why they are not a pair.
pub(super) fn pair(source: &str, target: &str, options: &ParallelOptions) -> Result<Pair, Reason> {
    let pair = Pair { source: source.trim().to_owned(), target: target.trim().to_owned() };
    if pair.source.is_empty() || pair.target.is_empty() {
        return Err(Reason::Empty);
    }
    if pair.source.len().max(pair.target.len()) > options.bytes_max {
        return Err(Reason::TooLong);
    }
    let (source, target) = (width(&pair.source), width(&pair.target));
    let [longer, shorter] =
        [source.max(target), source.min(target)].map(|width| (width + RATIO_CHARACTERS) as f64);
    if longer > options.ratio_max * shorter { Err(Reason::Ratio) } else { Ok(pair) }
}

/// Number of characters. Those of Chinese, Japanese and Korean count twice, as they do on a
/// terminal and roughly in what they express.
fn width(text: &str) -> usize {
    let is_wide = |character: char| {
        matches!(
            u32::from(character),
            0x1100..=0x115f
                | 0x2e80..=0xa4cf
                | 0xac00..=0xd7a3
                | 0xf900..=0xfaff
                | 0xff00..=0xff60
                | 0x2_0000..=0x3_ffff
        )
    };
    text.chars().map(|character| 1 + usize::from(is_wide(character))).sum()
}

/// A stable hash of a sentence's letters and digits in lower case, without directives (`%s`, `{0}`)
/// and tags (`<b>`). Sentences that differ in nothing else are near-duplicates, and share a hash.
pub(super) fn sentence_key(text: &str) -> u64 {
    let mut said = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = markup(rest).unwrap_or_else(|| {
            said.extend(first.to_lowercase().filter(|character| character.is_alphanumeric()));
            first.len_utf8()
        });
        rest = rest.get(length..).unwrap_or_default();
    }
    hash::stable(if said.is_empty() { text } else { &said })
}

/// Length in bytes of the directive or tag at the start of a text.
fn markup(text: &str) -> Option<usize> {
    let until = |end: char| {
        let found = text.char_indices().take(MARKUP_CHARACTERS_MAX).find(|(_, own)| *own == end);
        found.map(|(at, _)| at + 1)
    };
    match text.chars().next()? {
        '{' => until('}'),
        '<' => until('>'),
        '%' => {
            let rest = text.get(1..)?;
            let width = rest.find(|own: char| !(own.is_ascii_digit() || "$-+#.*".contains(own)))?;
            let is_directive =
                rest.get(width..)?.starts_with(|own: char| own.is_ascii_alphabetic());
            is_directive.then_some(1 + width + 1)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_pairs_that_cannot_be_right_are_left_out() {
        let options = ParallelOptions::default();
        let read = |source: &str, target: &str| {
            pair(source, target, &options).map(|pair| (pair.source, pair.target))
        };
        let kept = read(" _Datei  %s ", "_File %d").unwrap();
        assert_eq!(kept, ("_Datei  %s".into(), "_File %d".into()), "no more than the ends change");
        assert!(read("Linux", "Linux").is_ok());
        let long = "lang ".repeat(200);
        for (source, target, reason) in [
            (" ", "File", Reason::Empty),
            ("Datei", " \n", Reason::Empty),
            ("Ja", "Yes, of course, and many thanks", Reason::Ratio),
            (&long, &long, Reason::TooLong),
        ] {
            assert_eq!(read(source, target), Err(reason), "{source:?} {target:?}");
        }
    }

    #[test]
    fn oracle_wide_characters_say_more() {
        assert_eq!((width("abc"), width("файл"), width("打开文件"), width("파일")), (3, 4, 8, 4));
    }

    #[test]
    fn oracle_near_duplicates_have_one_key() {
        let key = sentence_key("Cannot open the file.");
        for same in [
            "cannot open the file",
            "Cannot open the file…",
            "Cannot open the  File: %s",
            "Cannot open the file %1$-5.2f {0}",
            "<b>Cannot open</b> the file!",
        ] {
            assert_eq!(sentence_key(same), key, "{same}");
        }
        for other in ["Cannot open the files", "", "%s", "…", "cannot open file", "a < b > c"] {
            assert_ne!(sentence_key(other), key, "{other}");
        }
        assert_ne!(sentence_key("%s"), sentence_key("%d"));
        assert_ne!(sentence_key("50 % of"), sentence_key("50"));
    }
}
