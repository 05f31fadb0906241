//! Text cut into words: the pieces that merges never cross.

use std::collections::HashMap;

use tokenizers::utils::SysRegex;

use crate::{Document, Error, Result};

/// Maximum amount of text that is counted for training a tokenizer: 32 MiB. The frequencies of the
/// most common pairs change little beyond this. A larger corpus is sampled evenly.
pub const TRAINING_BYTES_MAX: u64 = 32 << 20;

/// Number of lines in a sample. Samples are runs of whole lines, because a line's indentation
/// belongs to the word at the end of the preceding line.
const SAMPLE_LINES: usize = 64;

/// Maximum length of a word to learn from. Longer words, such as base64 and rulers of dashes, cost
/// the square of their length. They are still encoded.
const WORD_BYTES_MAX: usize = 128;

/// GPT-2's word pattern, character for character that of `ByteLevel` in the `tokenizers` crate,
/// which does not export it. A test compares the two.
const WORD: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The words of the documents with their counts, sorted by word, because hash maps have random
/// order and the result must not.
pub(super) fn count(documents: &[Document]) -> Result<Vec<(&str, u64)>> {
    count_within(documents, TRAINING_BYTES_MAX)
}

fn count_within(documents: &[Document], limit_bytes: u64) -> Result<Vec<(&str, u64)>> {
    let words = SysRegex::new(WORD).map_err(Error::tokenizer("compile the pattern of words"))?;
    let every = one_in(documents, limit_bytes);
    let mut counts = HashMap::new();
    for document in documents {
        for sample in samples(&document.text, every) {
            for (start, end) in words.find_iter(sample) {
                if let Some(word) = sample.get(start..end)
                    && word.len() <= WORD_BYTES_MAX
                {
                    *counts.entry(word).or_insert(0) += 1;
                }
            }
        }
    }
    let mut sorted: Vec<(&str, u64)> = counts.into_iter().collect();
    sorted.sort_unstable();
    Ok(sorted)
}

/// The sampling interval in runs of lines that yields about `limit_bytes`. At least 1.
pub(super) fn one_in(documents: &[Document], limit_bytes: u64) -> usize {
    let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
    let every = (bytes as u64).div_ceil(limit_bytes.max(1));
    usize::try_from(every).unwrap_or(usize::MAX).max(1)
}

/// Every `every`-th run of [`SAMPLE_LINES`] lines, or the whole text if `every` is 1.
fn samples(text: &str, every: usize) -> impl Iterator<Item = &str> {
    let whole = (every == 1).then_some(text);
    let sampled = (every > 1).then(|| runs_of_lines(text).step_by(every));
    whole.into_iter().chain(sampled.into_iter().flatten())
}

fn runs_of_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let lines = rest.split_inclusive('\n').take(SAMPLE_LINES);
        let (run, after) = rest.split_at_checked(lines.map(str::len).sum())?;
        rest = after;
        (!run.is_empty()).then_some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn document(text: &str) -> Document {
        Document { name: "d".into(), text: text.into() }
    }

    #[test]
    fn oracle_words_are_the_dependencys() {
        let text =
            "fn main() {\n    let x1 = \"it's\";\t // naïve  \n\n}\u{a0} 漢字 'twas 3.14\r\n";
        let mut theirs = PreTokenizedString::from(text);
        ByteLevel::new(false, false, true).pre_tokenize(&mut theirs).unwrap();
        let splits = theirs.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let theirs: Vec<_> = splits.into_iter().map(|(_, range, _)| range).collect();
        let ours: Vec<_> = SysRegex::new(WORD).unwrap().find_iter(text).collect();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn oracle_counts_are_sorted() {
        let documents = [document("b a b"), document("a")];
        assert_eq!(count(&documents).unwrap(), [(" a", 1), (" b", 1), ("a", 1), ("b", 1)]);
    }

    #[test]
    fn property_a_sample_is_even_and_whole_runs() {
        let text: String = (0..1000).map(|i| format!("line {i}\n")).collect();
        assert_eq!(runs_of_lines(&text).collect::<String>(), text);
        assert_eq!(samples(&text, 1).collect::<Vec<_>>(), [text.as_str()]);
        let sampled: Vec<_> = samples(&text, 4).collect();
        assert_eq!(sampled.len(), 4); // 16 runs in all
        assert!(sampled[1].starts_with("line 256\n"));
        assert!(sampled.iter().all(|run| run.ends_with('\n')));
    }

    #[test]
    fn regression_a_sample_of_a_large_corpus_is_within_the_limit() {
        let documents = [document(&"word\n".repeat(64 * 100))];
        let words = count_within(&documents, 64 * 5 * 10).unwrap();
        let counted: u64 = words.iter().map(|(_, count)| count).sum();
        assert_eq!(counted, 2 * 64 * 10); // A word and a newline for each line of each tenth run.
    }

    #[test]
    fn regression_rulers_are_not_learned() {
        let documents = [document(&"-".repeat(WORD_BYTES_MAX + 1))];
        assert_eq!(count(&documents).unwrap(), []);
    }
}
