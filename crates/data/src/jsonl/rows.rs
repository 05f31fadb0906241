//! Packs samples into the rows of mini-batches.
//!
//! A sample of n tokens takes n - 1 positions: its last token is only a target.

use std::collections::BTreeSet;

use super::samples::Samples;

/// A part of a row: positions of one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The sample's number.
    pub sample: usize,
    /// Index of the sample's token at the first position.
    pub from: usize,
    /// Number of positions.
    pub positions: usize,
}

/// Rows of the same length, each with one sample or several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    parts: Vec<Part>,
    /// Index in `parts` of each row's end.
    ends: Vec<usize>,
    /// What happened to samples that are longer than a row.
    pub long: LongSamples,
}

/// What happened to samples that are longer than a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LongSamples {
    /// Number of plain texts that continue in further rows. All their tokens stay in the loss.
    pub continued: usize,
    /// Number of other samples, whose ends are cut off.
    pub cut: usize,
    /// Number of targets that were cut off.
    pub lost: usize,
    /// Number of the `cut` samples without a target left. They are in no row.
    pub left_out: usize,
}

impl Rows {
    /// Places samples in rows of `length` positions.
    ///
    /// With `packed`, several samples share a row. They are placed by best fit in the order of
    /// decreasing length (Ding et al. 2024). Otherwise each row has one sample.
    #[must_use]
    pub fn new(samples: &Samples, length: usize, packed: bool) -> Self {
        let mut rows = Self::default();
        let mut parts = Vec::with_capacity(samples.len());
        for sample in 0..samples.len() {
            parts.extend(rows.long.parts(samples, sample, length));
        }
        if !packed {
            rows.ends = (1..=parts.len()).collect();
            rows.parts = parts;
            return rows;
        }
        parts.sort_by_key(|part| std::cmp::Reverse(part.positions)); // stable
        let mut filled: Vec<Vec<Part>> = Vec::new();
        // Free positions of each row, and its number.
        let mut room: BTreeSet<(usize, usize)> = BTreeSet::new();
        for part in parts {
            let found = room.range((part.positions, 0)..).next().copied();
            let (free, row) = found.unwrap_or_else(|| {
                filled.push(Vec::new());
                (length, filled.len() - 1)
            });
            room.remove(&(free, row));
            if free > part.positions {
                room.insert((free - part.positions, row));
            }
            if let Some(row) = filled.get_mut(row) {
                row.push(part);
            }
        }
        for row in filled {
            rows.parts.extend(row);
            rows.ends.push(rows.parts.len());
        }
        rows
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The number of positions with an input token, in all rows.
    #[must_use]
    pub fn used(&self) -> usize {
        self.parts.iter().map(|part| part.positions).sum()
    }

    pub(super) fn row(&self, number: usize) -> &[Part] {
        let from = number.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let end = self.ends.get(number).copied().unwrap_or(from);
        self.parts.get(from..end).unwrap_or_default()
    }
}

impl LongSamples {
    /// Divides a sample into parts of at most `length` positions, and counts what is cut off.
    fn parts(&mut self, samples: &Samples, sample: usize, length: usize) -> Vec<Part> {
        let view = samples.view(sample);
        let all = view.len().saturating_sub(1);
        if all <= length {
            return vec![Part { sample, from: 0, positions: all }];
        }
        if view.is_text() {
            self.continued += 1;
            let starts = (0..all).step_by(length.max(1));
            let part = |from: usize| Part { sample, from, positions: length.min(all - from) };
            return starts.map(part).collect();
        }
        self.cut += 1;
        self.lost += (length + 1..view.len()).filter(|at| view.is_learned(*at)).count();
        if (1..=length).any(|at| view.is_learned(at)) {
            return vec![Part { sample, from: 0, positions: length }];
        }
        self.left_out += 1;
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, test_runner::RngSeed};

    use super::*;
    use crate::jsonl::{marked::Sample, samples::tests::samples};

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(31),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        /// Every position of every sample that fits is in exactly one row, and no row is too full.
        #[test]
        fn property_packing_loses_and_doubles_nothing(
            lengths in prop::collection::vec(2_usize..40, 1..60),
            length in 39_usize..80,
        ) {
            let all = samples(&lengths);
            for packed in [false, true] {
                let rows = Rows::new(&all, length, packed);
                let mut seen: Vec<usize> = Vec::new();
                for number in 0..rows.len() {
                    let row = rows.row(number);
                    prop_assert!(row.iter().map(|part| part.positions).sum::<usize>() <= length);
                    prop_assert!(!row.is_empty());
                    for part in row {
                        prop_assert_eq!((part.from, part.positions), (0, lengths[part.sample] - 1));
                        seen.push(part.sample);
                    }
                }
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
                // No two rows of a best fit could have been one.
                if packed {
                    let mut used: Vec<usize> = (0..rows.len())
                        .map(|row| rows.row(row).iter().map(|part| part.positions).sum())
                        .collect();
                    used.sort_unstable();
                    if let [least, next, ..] = used[..] {
                        prop_assert!(least + next > length);
                    }
                }
            }
        }
    }

    #[test]
    fn fault_samples_longer_than_a_row_are_continued_or_cut_and_counted() {
        let mut all = samples(&[9, 30]); // the second has its tokens from 15 on in the loss
        let text = Sample { tokens: (500..521).collect(), learned: vec![true; 21] };
        assert!(all.push(&text));
        let rows = Rows::new(&all, 8, true);
        assert_eq!(rows.long, LongSamples { continued: 1, cut: 1, lost: 15, left_out: 1 });
        assert_eq!(rows.used(), 8 + 20, "the text's 20 targets are all there");
        let rows = Rows::new(&all, 20, false);
        assert_eq!(rows.long, LongSamples { continued: 0, cut: 1, lost: 9, left_out: 0 });
        assert_eq!(rows.len(), 3);
    }
}
