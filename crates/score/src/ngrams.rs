//! Runs of n neighbours, and how many of them two sentences share.

use std::{collections::HashMap, hash::Hash};

/// How often each n-gram occurs. It borrows the sentence: one entry for each place in it at most.
pub(crate) type Counts<'a, T> = HashMap<&'a [T], u64>;

/// The n-grams of a sentence; none if it is shorter than n (which is at least 1).
pub(crate) fn counts<T: Eq + Hash>(sentence: &[T], n: usize) -> Counts<'_, T> {
    let mut counts = Counts::new();
    for ngram in sentence.windows(n) {
        *counts.entry(ngram).or_default() += 1;
    }
    counts
}

/// How many n-grams a sentence has, repeated ones included.
pub(crate) fn total<T>(sentence: &[T], n: usize) -> u64 {
    (sentence.len() + 1).saturating_sub(n) as u64
}

/// How many n-grams of the hypothesis are in the reference, each as often as it is there at most.
pub(crate) fn matches<T: Eq + Hash>(hypothesis: &Counts<T>, reference: &Counts<T>) -> u64 {
    let clipped =
        |(ngram, &count): (&&[T], &u64)| reference.get(*ngram).map_or(0, |&most| count.min(most));
    hypothesis.iter().map(clipped).sum()
}
