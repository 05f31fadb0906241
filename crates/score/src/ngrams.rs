//! N-grams, and how many of them two sentences share.

use std::{collections::HashMap, hash::Hash};

/// How often each n-gram occurs. The keys borrow from the sentence, so there are at most as many
/// entries as positions.
pub(crate) type Counts<'a, T> = HashMap<&'a [T], u64>;

/// Counts the n-grams of a sentence; none if it is shorter than n, which must be at least 1.
pub(crate) fn counts<T: Eq + Hash>(sentence: &[T], n: usize) -> Counts<'_, T> {
    let mut counts = Counts::new();
    for ngram in sentence.windows(n) {
        *counts.entry(ngram).or_default() += 1;
    }
    counts
}

/// The number of n-grams of a sentence, including repeated ones.
pub(crate) fn total<T>(sentence: &[T], n: usize) -> u64 {
    (sentence.len() + 1).saturating_sub(n) as u64
}

/// The number of the hypothesis's n-grams in the reference. Each counts at most as often as it
/// occurs in the reference.
pub(crate) fn matches<T: Eq + Hash>(hypothesis: &Counts<T>, reference: &Counts<T>) -> u64 {
    let clipped =
        |(ngram, &count): (&&[T], &u64)| reference.get(*ngram).map_or(0, |&most| count.min(most));
    hypothesis.iter().map(clipped).sum()
}
