//! Samples as tokens.

use std::{io, path::Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::marked::Sample;
use crate::{hash::StableHasher, kept};

/// The format of files of samples.
const FORMAT: &str = "gpipe samples 2";

/// The bit of a stored token that holds its loss mask. Vocabularies are far smaller than 2^31.
const LEARNED: u32 = 1 << 31;

/// Samples: sequences of tokens with their loss masks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Samples {
    /// The tokens of all samples, each with its loss mask in the bit [`LEARNED`].
    pub(super) tokens: Vec<u32>,
    /// Index in `tokens` of each sample's end.
    pub(super) ends: Vec<usize>,
}

/// The tokens of one sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a>(&'a [u32]);

impl View<'_> {
    /// Token number `at`, or 0 beyond the end.
    pub fn token(self, at: usize) -> i64 {
        i64::from(self.0.get(at).copied().unwrap_or(0) & !LEARNED)
    }

    /// Whether token number `at` is in the loss. False beyond the end.
    pub fn is_learned(self, at: usize) -> bool {
        self.0.get(at).is_some_and(|token| token & LEARNED != 0)
    }

    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Whether all tokens but the first are in the loss, as in a plain text.
    pub fn is_text(self) -> bool {
        (1..self.len()).all(|at| self.is_learned(at))
    }
}

impl Samples {
    /// Adds a sample and returns true, unless no token after the first is in the loss. The first
    /// token is never a target, because no token precedes it.
    pub(super) fn push(&mut self, sample: &Sample) -> bool {
        let Sample { tokens, learned } = sample;
        if !learned.iter().skip(1).any(|learned| *learned) {
            return false;
        }
        let marked = tokens.iter().zip(learned);
        self.tokens
            .extend(marked.map(|(token, learned)| if *learned { token | LEARNED } else { *token }));
        self.ends.push(self.tokens.len());
        true
    }

    /// The samples that [`Samples::keep`] kept at `path`. `None` if there is no such file, or it is
    /// damaged.
    #[must_use]
    pub fn kept(path: &Path) -> Option<Self> {
        let own: Self = kept::read(path, FORMAT)?;
        let ascend = own.ends.windows(2).all(|pair| pair.first() < pair.last());
        (ascend && own.ends.last().copied().unwrap_or(0) == own.tokens.len()).then_some(own)
    }

    /// Keeps the samples at `path` for later runs.
    ///
    /// # Errors
    /// As [`kept::write`].
    pub fn keep(&self, path: &Path) -> io::Result<()> {
        kept::write(path, FORMAT, self)
    }

    /// Appends all samples of `other`.
    pub fn append(&mut self, other: &Samples) {
        let before = self.tokens.len();
        self.tokens.extend(&other.tokens);
        self.ends.extend(other.ends.iter().map(|end| before + end));
    }

    /// The SHA-256 of the tokens, their loss masks and the ends of the samples.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update((self.tokens.len() as u64).to_le_bytes());
        self.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        self.ends.iter().for_each(|end| hash.update((*end as u64).to_le_bytes()));
        hash.finalize().into()
    }

    /// The number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The number of tokens of all samples.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The number of targets of all samples: tokens in the loss, except each sample's first token.
    #[must_use]
    pub fn learned(&self) -> usize {
        (0..self.len()).map(|number| self.learned_in(number)).sum()
    }

    fn learned_in(&self, number: usize) -> usize {
        let view = self.view(number);
        (1..view.len()).filter(|at| view.is_learned(*at)).count()
    }

    pub(super) fn view(&self, number: usize) -> View<'_> {
        let from = number.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let end = self.ends.get(number).copied().unwrap_or(from);
        View(self.tokens.get(from..end).unwrap_or_default())
    }

    /// Splits the samples into those to train on and those held out for validation.
    ///
    /// `share`: the fraction to hold out, rounded up to whole samples. The held-out samples are
    /// those with the lowest hashes, so the split does not depend on the order. Equal samples are
    /// on one side. If there are two different samples, neither side is empty.
    #[must_use]
    pub fn split(&self, share: f64) -> (Samples, Samples) {
        let hash = |number: usize| {
            let mut hasher = StableHasher::new();
            for token in self.view(number).0 {
                hasher.field(&token.to_le_bytes());
            }
            hasher.finish()
        };
        let mut order: Vec<(u64, usize)> = (0..self.len()).map(|own| (hash(own), own)).collect();
        order.sort_unstable();
        let asked = (share * self.len() as f64).ceil() as usize;
        let hash_at = |at: usize| order.get(at).map(|(hash, _)| *hash);
        let is_border = |at: &usize| hash_at(at - 1) != hash_at(*at);
        let mut held_out = (asked.max(1)..self.len()).find(is_border);
        held_out = held_out.or_else(|| (1..self.len()).rev().find(is_border));
        let mut is_held_out = vec![false; self.len()];
        for (_, number) in order.iter().take(held_out.unwrap_or(0)) {
            if let Some(own) = is_held_out.get_mut(*number) {
                *own = true;
            }
        }
        let side = |wanted: bool| {
            let mut side = Samples::default();
            let own = is_held_out.iter().enumerate().filter(|(_, held_out)| **held_out == wanted);
            for (number, _) in own {
                side.tokens.extend(self.view(number).0);
                side.ends.push(side.tokens.len());
            }
            side
        };
        (side(false), side(true))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Samples of these lengths. All tokens differ. The second half of each sample is in the loss.
    pub fn samples(lengths: &[usize]) -> Samples {
        let mut all = Samples::default();
        let mut next = 1;
        for &length in lengths {
            let tokens: Vec<u32> = (next..).take(length).collect();
            next += length as u32;
            let learned = (0..length).map(|at| at >= length / 2).collect();
            assert!(all.push(&Sample { tokens, learned }));
        }
        all
    }

    #[test]
    fn oracle_a_sample_without_anything_to_learn_is_refused() {
        let mut all = Samples::default();
        let sample =
            |learned: &[bool]| Sample { tokens: vec![7; learned.len()], learned: learned.to_vec() };
        assert!(!all.push(&sample(&[])) && !all.push(&sample(&[true])));
        assert!(!all.push(&sample(&[true, false])), "no token precedes the first");
        assert!(all.push(&sample(&[false, true])));
        assert_eq!((all.len(), all.tokens(), all.learned()), (1, 2, 1));
    }

    #[test]
    fn property_a_split_loses_nothing_and_does_not_depend_on_the_order() {
        let lengths: Vec<usize> = (2..42).collect();
        let all = samples(&lengths);
        let (train, held_out) = all.split(0.1);
        assert_eq!((train.len(), held_out.len()), (36, 4));
        assert_eq!(train.tokens() + held_out.tokens(), all.tokens());
        // The same samples in the opposite order.
        let mut backwards = Samples::default();
        for number in (0..all.len()).rev() {
            backwards.tokens.extend(all.view(number).0);
            backwards.ends.push(backwards.tokens.len());
        }
        let sorted = |samples: &Samples| {
            let mut all: Vec<Vec<u32>> =
                (0..samples.len()).map(|number| samples.view(number).0.to_vec()).collect();
            all.sort();
            all
        };
        assert_eq!(sorted(&backwards.split(0.1).1), sorted(&held_out));
    }

    #[test]
    fn fault_equal_samples_are_on_one_side() {
        let mut all = Samples::default();
        for _ in 0..3 {
            all.append(&samples(&[5]));
        }
        let (train, held_out) = all.split(0.5);
        assert_eq!((train.len(), held_out.len()), (3, 0));
        all.append(&samples(&[9]));
        let (train, held_out) = all.split(0.01);
        assert!(train.len() == 3 && held_out.len() == 1 || train.len() == 1);
    }
}
