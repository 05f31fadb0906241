//! BLEU (Papineni et al., 2002): the share of a translation's n-grams that occur in a reference,
//! for n = 1 to 4.
//!
//! ```text
//! p_n   = 100 * matches_n / totals_n        an n-gram matches at most as often as in one reference
//! bp    = 1 if the translation is as long as the references, else exp(1 - ref_len / sys_len)
//! score = bp * (p_1 * p_2 * p_3 * p_4)^(1/4)
//! ```
//!
//! A single p_n of 0 makes the score 0, hence smoothing (Chen and Cherry, 2014).

use std::{borrow::Cow, collections::HashMap};

use crate::{
    Error, Result, Tokenizer,
    ngrams::{counts, matches, total},
    references::References,
    text::{cased, words},
};

/// The maximum n-gram length.
pub const BLEU_ORDER: usize = 4;

/// How to smooth the precision of an order without matches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Smoothing {
    /// Count 1/2 of a match for the first such order, 1/4 for the next, and so on. sacreBLEU's
    /// default.
    #[default]
    Exp,
    /// Count this many matches for each such order; usually 0.1.
    Floor(f64),
    /// Add this number to the matches and n-grams of every order except the first; usually 1.
    /// Applies to orders with matches, too.
    AddK(f64),
    /// Do not smooth: the score is 0.
    None,
}

impl Smoothing {
    /// The name in signatures: `exp`, `floor[0.10]`, `add-k[1.00]`, `none`.
    fn signature(self) -> Cow<'static, str> {
        match self {
            Self::Exp => "exp".into(),
            Self::Floor(value) => format!("floor[{value:.2}]").into(),
            Self::AddK(value) => format!("add-k[{value:.2}]").into(),
            Self::None => "none".into(),
        }
    }
}

/// Options of BLEU. The defaults are sacreBLEU's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BleuOptions {
    /// How to split lines into words.
    pub tokenizer: Tokenizer,
    /// Whether to compare in lower case.
    pub lowercase: bool,
    /// How to smooth orders without matches.
    pub smoothing: Smoothing,
    /// Whether to leave out the orders for which all translations are too short. Meant for single
    /// sentences; see [`Bleu::sentence`].
    pub effective_order: bool,
}

/// A BLEU score and its components.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BleuScore {
    /// The score, from 0 to 100.
    pub score: f64,
    /// Smoothed precision of each order, from 0 to 100. All are 0 if no order has a match.
    pub precisions: [f64; BLEU_ORDER],
    /// The brevity penalty, from 0 to 1.
    pub bp: f64,
    /// Number of words in the translations.
    pub sys_len: u64,
    /// Number of words in the references. For each sentence, the reference nearest in length
    /// counts; of two equally near, the shorter.
    pub ref_len: u64,
    /// For each order, the number of the translations' n-grams that match a reference.
    pub matches: [u64; BLEU_ORDER],
    /// For each order, the number of the translations' n-grams.
    pub totals: [u64; BLEU_ORDER],
}

/// An accumulator of BLEU counts over the sentences of a corpus. Its size does not depend on their
/// number.
#[derive(Clone, Debug)]
pub struct Bleu {
    options: BleuOptions,
    sentences: u64,
    references: References,
    sys_len: u64,
    ref_len: u64,
    matches: [u64; BLEU_ORDER],
    totals: [u64; BLEU_ORDER],
}

impl Bleu {
    /// An empty corpus, whose score is 0.
    ///
    /// # Errors
    /// [`Error::Smoothing`] if the smoothing value is negative or not finite.
    pub fn new(options: BleuOptions) -> Result<Self> {
        if let Smoothing::Floor(value) | Smoothing::AddK(value) = options.smoothing
            && !(value.is_finite() && value >= 0.0)
        {
            return Err(Error::Smoothing { value });
        }
        Ok(Self {
            options,
            sentences: 0,
            references: References::Unknown,
            sys_len: 0,
            ref_len: 0,
            matches: [0; BLEU_ORDER],
            totals: [0; BLEU_ORDER],
        })
    }

    /// BLEU of one sentence. Uses the effective order, so that a sentence of fewer than four words
    /// can score above 0.
    ///
    /// # Errors
    /// [`Error::NoReference`], and those of [`Bleu::new`].
    pub fn sentence(
        options: BleuOptions,
        hypothesis: &str,
        references: &[&str],
    ) -> Result<BleuScore> {
        let mut one = Self::new(BleuOptions { effective_order: true, ..options })?;
        one.add(hypothesis, references)?;
        Ok(one.score())
    }

    /// Counts one more sentence. Uses memory proportional to its length, and frees it.
    ///
    /// # Errors
    /// [`Error::NoReference`] if `references` is empty; nothing is counted then.
    pub fn add(&mut self, hypothesis: &str, references: &[&str]) -> Result<()> {
        if references.is_empty() {
            return Err(Error::NoReference { sentence: self.sentences + 1 });
        }
        let separated = |line: &str| {
            let BleuOptions { tokenizer, lowercase, .. } = self.options;
            tokenizer.apply(&cased(line, lowercase))
        };
        let hypothesis = separated(hypothesis);
        let references: Vec<String> = references.iter().copied().map(separated).collect();
        let hypothesis: Vec<&str> = words(&hypothesis).collect();
        let references: Vec<Vec<&str>> =
            references.iter().map(|line| words(line).collect()).collect();

        let length = hypothesis.len();
        let nearest = references
            .iter()
            .map(Vec::len)
            .min_by_key(|reference| (reference.abs_diff(length), *reference))
            .unwrap_or_default();
        self.sentences += 1;
        self.references = self.references.and(References::Each(references.len()));
        self.sys_len += length as u64;
        self.ref_len += nearest as u64;
        for ((n, matched), all) in (1..).zip(&mut self.matches).zip(&mut self.totals) {
            // With several references, an n-gram matches as often as the reference that has most of
            // it.
            let mut most = HashMap::new();
            for (ngram, count) in references.iter().flat_map(|reference| counts(reference, n)) {
                let entry = most.entry(ngram).or_default();
                *entry = count.max(*entry);
            }
            *matched += matches(&counts(&hypothesis, n), &most);
            *all += total(&hypothesis, n);
        }
        Ok(())
    }

    /// Adds the counts of `other`, as if its sentences had been added here.
    ///
    /// # Errors
    /// [`Error::Options`] if `other` has other options; nothing is added then.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.options != other.options {
            return Err(Error::Options { ours: self.signature(), theirs: other.signature() });
        }
        self.sentences += other.sentences;
        self.references = self.references.and(other.references);
        self.sys_len += other.sys_len;
        self.ref_len += other.ref_len;
        for (sum, count) in self.matches.iter_mut().zip(other.matches) {
            *sum += count;
        }
        for (sum, count) in self.totals.iter_mut().zip(other.totals) {
            *sum += count;
        }
        Ok(())
    }

    /// The number of sentences counted.
    pub fn sentences(&self) -> u64 {
        self.sentences
    }

    /// BLEU of all sentences so far.
    pub fn score(&self) -> BleuScore {
        let Self { sys_len, ref_len, matches, totals, .. } = *self;
        let bp = if sys_len >= ref_len {
            1.0
        } else {
            (1.0 - ref_len as f64 / sys_len as f64).exp() // without words: exp(-inf), which is 0
        };
        let (precisions, orders) = self.precisions();
        let logarithms: f64 = precisions.iter().take(orders).map(|precision| precision.ln()).sum();
        let score = bp * (logarithms / orders as f64).exp();
        BleuScore { score, precisions, bp, sys_len, ref_len, matches, totals }
    }

    /// Smoothed precisions, and how many of them the mean covers.
    fn precisions(&self) -> ([f64; BLEU_ORDER], usize) {
        let mut precisions = [0.0; BLEU_ORDER];
        let (smoothing, mut orders) = (self.options.smoothing, BLEU_ORDER);
        if self.matches == [0; BLEU_ORDER] {
            return (precisions, orders);
        }
        let mut share = 1.0;
        let of_orders = self.matches.iter().zip(&self.totals).zip(&mut precisions);
        for (n, ((&matches, &total), precision)) in (1..).zip(of_orders) {
            let more = match smoothing {
                Smoothing::AddK(k) if n > 1 => k,
                _ => 0.0,
            };
            let (matches, total) = (matches as f64 + more, total as f64 + more);
            if total == 0.0 {
                break;
            }
            if self.options.effective_order {
                orders = n;
            }
            *precision = match smoothing {
                _ if matches > 0.0 => 100.0 * matches / total,
                Smoothing::Exp => {
                    share /= 2.0;
                    100.0 * share / total
                }
                Smoothing::Floor(value) => 100.0 * value / total,
                Smoothing::AddK(_) | Smoothing::None => 0.0,
            };
        }
        (precisions, orders)
    }

    /// The signature, in sacreBLEU's format without its version. It identifies the options.
    pub fn signature(&self) -> String {
        let BleuOptions { tokenizer, lowercase, smoothing, effective_order } = self.options;
        format!(
            "nrefs:{}|case:{}|eff:{}|tok:{tokenizer}|smooth:{}",
            self.references,
            if lowercase { "lc" } else { "mixed" },
            if effective_order { "yes" } else { "no" },
            smoothing.signature(),
        )
    }
}
