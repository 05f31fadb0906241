//! chrF (Popović, 2015), an F-score of character n-grams, and chrF++ (2017), which adds word
//! unigrams and bigrams.
//!
//! ```text
//! P     = mean over the orders of   matches / n-grams of the translation
//! R     = mean over the orders of   matches / n-grams of the reference
//! score = 100 * (1 + beta^2) * P * R / (beta^2 * P + R)      beta = 2: recall counts twice as much
//! ```
//!
//! The means leave out orders for which the translations or the references are too short. White
//! space is ignored.

use std::hash::Hash;

use crate::{
    Error, Result,
    ngrams::{counts, matches, total},
    references::References,
    text::{cased, is_space, words},
};

/// Options of chrF. The defaults are sacreBLEU's chrF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChrfOptions {
    /// The maximum length of character n-grams.
    pub char_order: u8,
    /// The maximum length of word n-grams; 0 for none.
    pub word_order: u8,
    /// The weight of recall relative to precision.
    pub beta: u8,
    /// Whether to compare in lower case.
    pub lowercase: bool,
}

impl ChrfOptions {
    /// chrF: characters up to order 6, no words.
    pub const CHRF: Self = Self { char_order: 6, word_order: 0, beta: 2, lowercase: false };
    /// chrF++: characters up to order 6 and words up to order 2.
    pub const CHRF_PLUS_PLUS: Self = Self { word_order: 2, ..Self::CHRF };
}

impl Default for ChrfOptions {
    fn default() -> Self {
        Self::CHRF
    }
}

/// The n-gram counts of one order.
#[derive(Clone, Copy, Debug, Default)]
struct Order {
    /// N-grams of translations, counted only if the reference has n-grams of this order, too.
    hypothesis: u64,
    reference: u64,
    matches: u64,
}

/// An accumulator of chrF counts over the sentences of a corpus. Its size does not depend on their
/// number.
#[derive(Clone, Debug)]
pub struct Chrf {
    options: ChrfOptions,
    sentences: u64,
    references: References,
    /// The orders of characters, then those of words.
    orders: Vec<Order>,
}

impl Chrf {
    /// An empty corpus, whose score is 0.
    pub fn new(options: ChrfOptions) -> Self {
        let orders = usize::from(options.char_order) + usize::from(options.word_order);
        Self {
            options,
            sentences: 0,
            references: References::Unknown,
            orders: vec![Order::default(); orders],
        }
    }

    /// chrF of one sentence.
    ///
    /// # Errors
    /// [`Error::NoReference`].
    pub fn sentence(options: ChrfOptions, hypothesis: &str, references: &[&str]) -> Result<f64> {
        let mut one = Self::new(options);
        one.add(hypothesis, references)?;
        Ok(one.score())
    }

    /// Counts one more sentence against the reference with the best score, or the first of equally
    /// good ones. Uses memory proportional to its length, and frees it.
    ///
    /// # Errors
    /// [`Error::NoReference`] if `references` is empty; nothing is counted then.
    pub fn add(&mut self, hypothesis: &str, references: &[&str]) -> Result<()> {
        let hypothesis = cased(hypothesis, self.options.lowercase);
        let hypothesis = Sentence::new(&hypothesis);
        let mut best: Option<(f64, Vec<Order>)> = None;
        for reference in references {
            let reference = cased(reference, self.options.lowercase);
            let orders = self.compare(&hypothesis, &Sentence::new(&reference));
            let score = self.f_score(&orders);
            if best.as_ref().is_none_or(|(best, _)| score > *best) {
                best = Some((score, orders));
            }
        }
        let Some((_, orders)) = best else {
            return Err(Error::NoReference { sentence: self.sentences + 1 });
        };
        self.sentences += 1;
        self.references = self.references.and(References::Each(references.len()));
        self.sum(&orders);
        Ok(())
    }

    /// Adds the counts of `other`, as if its sentences had been added here.
    ///
    /// # Errors
    /// [`Error::Options`] if `other` has other options; nothing is added then.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.options != other.options {
            let signature = |chrf: &Self| format!("{} {}", chrf.name(), chrf.signature());
            return Err(Error::Options { ours: signature(self), theirs: signature(other) });
        }
        self.sentences += other.sentences;
        self.references = self.references.and(other.references);
        self.sum(&other.orders);
        Ok(())
    }

    /// The number of sentences counted.
    pub fn sentences(&self) -> u64 {
        self.sentences
    }

    /// chrF of all sentences so far, from 0 to 100.
    pub fn score(&self) -> f64 {
        self.f_score(&self.orders)
    }

    /// sacreBLEU's name for the score, with beta and a `+` for each word order: `chrF2`, `chrF2++`.
    pub fn name(&self) -> String {
        format!("chrF{}{}", self.options.beta, "+".repeat(self.options.word_order.into()))
    }

    /// The signature, in sacreBLEU's format without its version. It identifies the options.
    pub fn signature(&self) -> String {
        let ChrfOptions { char_order, word_order, lowercase, .. } = self.options;
        let case = if lowercase { "lc" } else { "mixed" };
        format!(
            "nrefs:{}|case:{case}|eff:yes|nc:{char_order}|nw:{word_order}|space:no",
            self.references
        )
    }

    fn sum(&mut self, orders: &[Order]) {
        for (sum, order) in self.orders.iter_mut().zip(orders) {
            sum.hypothesis += order.hypothesis;
            sum.reference += order.reference;
            sum.matches += order.matches;
        }
    }

    fn compare(&self, hypothesis: &Sentence, reference: &Sentence) -> Vec<Order> {
        let ChrfOptions { char_order, word_order, .. } = self.options;
        let characters = (1..=char_order.into())
            .map(|n| compare_order(&hypothesis.characters, &reference.characters, n));
        let words =
            (1..=word_order.into()).map(|n| compare_order(&hypothesis.words, &reference.words, n));
        characters.chain(words).collect()
    }

    fn f_score(&self, orders: &[Order]) -> f64 {
        let (mut precision, mut recall, mut effective) = (0.0, 0.0, 0.0);
        // If the translation counts, the reference is not empty.
        for order in orders.iter().filter(|order| order.hypothesis > 0) {
            precision += order.matches as f64 / order.hypothesis as f64;
            recall += order.matches as f64 / order.reference as f64;
            effective += 1.0;
        }
        if precision + recall == 0.0 {
            return 0.0;
        }
        precision /= effective;
        recall /= effective;
        let factor = f64::from(self.options.beta).powi(2);
        100.0 * ((1.0 + factor) * precision * recall / (factor * precision + recall))
    }
}

/// The characters and words of a line, as chrF compares them.
struct Sentence<'a> {
    characters: Vec<char>,
    words: Vec<&'a str>,
}

impl<'a> Sentence<'a> {
    fn new(line: &'a str) -> Self {
        let characters = line.chars().filter(|character| !is_space(*character)).collect();
        Self { characters, words: words(line).flat_map(separate_mark).flatten().collect() }
    }
}

/// Splits at most one punctuation mark off a word: the last character if it is a mark, else the
/// first. So `(so)` becomes `(so` and `)`.
fn separate_mark(word: &str) -> [Option<&str>; 2] {
    let is_mark = |character: char| character.is_ascii_punctuation();
    let at = match (word.strip_suffix(is_mark), word.starts_with(is_mark)) {
        (Some(stem), _) => stem.len(),
        (None, true) => 1,
        (None, false) => 0,
    };
    match word.split_at_checked(at) {
        Some((first, second)) if !first.is_empty() => [Some(first), Some(second)],
        _ => [Some(word), None],
    }
}

fn compare_order<T: Eq + Hash>(hypothesis: &[T], reference: &[T], n: usize) -> Order {
    let in_reference = total(reference, n);
    Order {
        // N-grams for which the reference is too short do not count as wrong.
        hypothesis: if in_reference > 0 { total(hypothesis, n) } else { 0 },
        reference: in_reference,
        matches: matches(&counts(hypothesis, n), &counts(reference, n)),
    }
}

#[cfg(test)]
mod tests {
    use super::separate_mark;

    #[test]
    fn oracle_one_mark_is_taken_off_a_word() {
        for (word, parts) in [
            ("so", [Some("so"), None]),
            ("so.", [Some("so"), Some(".")]),
            ("so).", [Some("so)"), Some(".")]),
            ("(so", [Some("("), Some("so")]),
            ("(so)", [Some("(so"), Some(")")]),
            ("!", [Some("!"), None]),
            ("!!", [Some("!"), Some("!")]),
            ("é.", [Some("é"), Some(".")]),
            ("«so»", [Some("«so»"), None]),
            ("don't", [Some("don't"), None]),
        ] {
            assert_eq!(separate_mark(word), parts);
        }
    }
}
