//! Mini-batches of rows.

use std::sync::Arc;

use super::{rows::Rows, samples::Samples};
use crate::{
    Batch, Error, IGNORE, Result,
    batches::check_shape,
    order::{Order, Sample},
};

/// What [`PackedBatch::documents`] says of positions that hold no sample.
pub const NO_DOCUMENT: i64 = -1;

/// Sources are mixed in a cycle of this many samples, so shares are exact to a thousandth.
const CYCLE: usize = 1000;

/// Samples and the rows in which they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The samples.
    pub samples: Samples,
    /// Their rows.
    pub rows: Rows,
}

/// A mini-batch of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedBatch {
    /// Inputs and targets. `[samples, sequence]` each; targets that are not in the
    /// loss are [`IGNORE`].
    pub batch: Batch,
    /// For each position, the position in its row at which its sample begins, or [`NO_DOCUMENT`].
    /// Shape: `[samples, sequence]`.
    pub documents: Vec<i64>,
}

/// Mini-batches of rows. [`RowBatches::batch`] is a pure function of (rows, shape, seed, step).
///
/// Each source has its own order, shuffled anew in every epoch. Several sources are mixed by their
/// weights.
#[derive(Debug, Clone)]
pub struct RowBatches {
    sources: Vec<Arc<Source>>,
    sequence: usize,
    /// The order of samples of all sources together: where a step begins.
    order: Order,
    /// The order of each source.
    orders: Vec<Order>,
    /// The source of each sample of a cycle, and how many earlier ones of the cycle have it.
    cycle: Vec<(usize, u64)>,
    /// How many samples of a cycle each source has.
    in_cycle: Vec<u64>,
}

impl RowBatches {
    /// Mini-batches of `mini_batch` rows of `sequence` positions. Each source has a weight: its
    /// share of the samples is the weight by the sum of all.
    ///
    /// # Errors
    /// There is no row, a weight is not positive or below a thousandth of their sum, or the shape
    /// is empty or too large.
    pub fn new(
        sources: Vec<(Arc<Source>, f64)>,
        sequence: usize,
        mini_batch: usize,
        seed: u64,
    ) -> Result<Self> {
        check_shape(mini_batch, sequence)?;
        if sources.is_empty() || sources.iter().any(|(source, _)| source.rows.is_empty()) {
            return Err(Error::NoSamples);
        }
        let weights: Vec<f64> = sources.iter().map(|(_, weight)| *weight).collect();
        let sum: f64 = weights.iter().sum();
        if let Some(&weight) = weights.iter().find(|weight| !is_share(**weight, sum)) {
            return Err(Error::SourceWeight { weight });
        }
        let shares: Vec<f64> = weights.iter().map(|weight| weight / sum).collect();
        let mut in_cycle = vec![0; shares.len()];
        let cycle = (0..CYCLE).map(|at| {
            // The source that is furthest behind its share; of equal ones the first.
            let behind = |own: usize| {
                let share = shares.get(own).copied().unwrap_or(0.0);
                share * (at + 1) as f64 - in_cycle.get(own).copied().unwrap_or(0) as f64
            };
            let own = (1..shares.len()).fold(0, |best, own| match behind(own) > behind(best) {
                true => own,
                false => best,
            });
            let earlier = in_cycle.get(own).copied().unwrap_or(0);
            if let Some(count) = in_cycle.get_mut(own) {
                *count += 1;
            }
            (own, earlier)
        });
        let cycle = cycle.collect();
        let sources: Vec<Arc<Source>> = sources.into_iter().map(|(source, _)| source).collect();
        let own_order = |(number, source): (usize, &Arc<Source>)| {
            Order::new(source.rows.len() as u64, 1, crate::hash::mix(seed ^ number as u64))
        };
        let orders = sources.iter().enumerate().map(own_order).collect();
        let rows: u64 = sources.iter().map(|source| source.rows.len() as u64).sum();
        let order = Order::new(rows, mini_batch, seed);
        Ok(Self { sources, sequence, order, orders, cycle, in_cycle })
    }

    /// As [`TrainBatches::starting_at`](crate::TrainBatches::starting_at).
    #[must_use]
    pub fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.order = self.order.starting_at(step, samples);
        self
    }

    /// The number of rows of all sources.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sources.iter().map(|source| source.rows.len()).sum()
    }

    /// The mini-batch of `step`. Steps may be requested in any order.
    #[must_use]
    pub fn batch(&self, step: u64) -> PackedBatch {
        let mut batch = PackedBatch::with_capacity(self.order.mini_batch(), self.sequence);
        for place in self.order.places(step) {
            let (cycle, within) = (place / CYCLE as u128, (place % CYCLE as u128) as usize);
            let (own, earlier) = self.cycle.get(within).copied().unwrap_or_default();
            let of_cycle = self.in_cycle.get(own).copied().unwrap_or_default();
            let number = cycle * u128::from(of_cycle) + u128::from(earlier);
            if let (Some(source), Some(order)) = (self.sources.get(own), self.orders.get(own)) {
                let Sample { index, .. } = order.at(number);
                batch.push(source, index as usize);
            }
        }
        batch
    }
}

/// Whether a source may have `weight`, where all weights add up to `sum`.
#[must_use]
pub fn is_share(weight: f64, sum: f64) -> bool {
    weight.is_finite() && sum.is_finite() && weight > 0.0 && weight * CYCLE as f64 >= sum
}

/// Rows of a source to validate on, in mini-batches of up to `mini_batch` rows: `count` rows,
/// spread evenly over the source, or all if it has no more. They are in the order of the source.
///
/// # Errors
/// There is no row, or the shape is empty or too large.
pub fn in_order(
    source: &Source,
    sequence: usize,
    mini_batch: usize,
    count: usize,
) -> Result<impl Iterator<Item = PackedBatch> + '_> {
    check_shape(mini_batch, sequence)?;
    if source.rows.is_empty() {
        return Err(Error::NoSamples);
    }
    let (all, count) = (source.rows.len(), source.rows.len().min(count));
    Ok((0..count).step_by(mini_batch).map(move |first| {
        let places = first..count.min(first + mini_batch);
        let mut batch = PackedBatch::with_capacity(places.len(), sequence);
        for place in places {
            // In 128 bits, because the product may overflow 64.
            batch.push(source, (place as u128 * all as u128 / count as u128) as usize);
        }
        batch
    }))
}

impl PackedBatch {
    fn with_capacity(samples: usize, sequence: usize) -> Self {
        let documents = Vec::with_capacity(samples * sequence);
        Self { batch: Batch::with_capacity(samples, sequence), documents }
    }

    /// Adds a row.
    fn push(&mut self, source: &Source, row: usize) {
        let Self { batch, documents } = self;
        let first = batch.samples * batch.sequence;
        for part in source.rows.row(row) {
            let view = source.samples.view(part.sample);
            let begins = (batch.inputs.len() - first) as i64;
            for at in part.from..part.from + part.positions {
                batch.inputs.push(view.token(at));
                let is_learned = view.is_learned(at + 1);
                batch.targets.push(if is_learned { view.token(at + 1) } else { IGNORE });
                documents.push(begins);
            }
        }
        batch.samples += 1;
        let all = batch.samples * batch.sequence;
        // Any input works where the target is ignored. Token 0 exists in every vocabulary.
        batch.inputs.resize(all, 0);
        batch.targets.resize(all, IGNORE);
        documents.resize(all, NO_DOCUMENT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::samples::tests::samples;

    fn source(lengths: &[usize], sequence: usize, packed: bool) -> Arc<Source> {
        let samples = samples(lengths);
        let rows = Rows::new(&samples, sequence, packed);
        Arc::new(Source { samples, rows })
    }

    #[test]
    fn golden_a_packed_row() {
        let source = source(&[4, 6], 10, true);
        let all: Vec<PackedBatch> = in_order(&source, 10, 2, usize::MAX).unwrap().collect();
        let [PackedBatch { batch, documents }] = &all[..] else { panic!("{all:?}") };
        // The sample of six tokens comes first: 5 to 10, of which 8 to 10 are in the loss.
        assert_eq!(batch.inputs, [5, 6, 7, 8, 9, 1, 2, 3, 0, 0]);
        let x = IGNORE;
        assert_eq!(batch.targets, [x, x, 8, 9, 10, x, 3, 4, x, x]);
        assert_eq!(*documents, [0, 0, 0, 0, 0, 5, 5, 5, -1, -1]);
        assert_eq!((batch.samples, batch.sequence), (1, 10));
    }

    #[test]
    fn property_an_epoch_has_every_row_once() {
        let source = source(&[3; 7], 4, false);
        let batches = RowBatches::new(vec![(source, 1.0)], 4, 3, 5).unwrap();
        assert_eq!(batches.rows(), 7);
        let firsts = |steps: std::ops::Range<u64>| -> Vec<i64> {
            steps.flat_map(|step| batches.batch(step).batch.inputs).step_by(4).collect()
        };
        let two = firsts(0..7); // 21 rows are three epochs
        for epoch in two.chunks(7) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [1, 4, 7, 10, 13, 16, 19]);
        }
        assert_ne!(two[..7], two[7..14], "each epoch has its own order");
        // The order goes on where mini-batches of another size ended.
        let later = RowBatches::new(
            batches.sources.iter().map(|own| (own.clone(), 1.0)).collect(),
            4,
            2,
            5,
        )
        .unwrap()
        .starting_at(2, 6);
        assert_eq!(later.batch(2).batch.inputs[..4], batches.batch(2).batch.inputs[..4]);
    }

    #[test]
    fn property_sources_have_their_shares_and_each_its_epochs() {
        let (small, large) = (source(&[3; 5], 4, false), source(&[4; 50], 4, false));
        let batches = RowBatches::new(vec![(small, 3.0), (large, 1.0)], 4, 4, 9).unwrap();
        let mut counts = [0_u64; 2];
        let mut small_rows = Vec::new();
        for step in 0..500 {
            let batch = batches.batch(step).batch;
            for row in batch.targets.chunks(4).zip(batch.inputs.chunks(4)) {
                let is_large = row.1[2] != 0;
                counts[usize::from(is_large)] += 1;
                if !is_large {
                    small_rows.push(row.1[0]);
                }
            }
            // Nowhere more than a sample away from its share.
            let all = (counts[0] + counts[1]) as f64;
            assert!((counts[0] as f64 - 0.75 * all).abs() <= 1.0, "{counts:?}");
        }
        assert_eq!(counts, [1500, 500]);
        for epoch in small_rows.chunks(5) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [1, 4, 7, 10, 13]);
        }
    }

    /// The first rows were measured: of packed rows, those with the longest samples, and of several
    /// sources, those of the first.
    #[test]
    fn regression_a_part_of_the_rows_is_spread_over_all() {
        let source = source(&[3; 10], 4, false);
        let first_tokens = |count| {
            let batches: Vec<PackedBatch> = in_order(&source, 4, 2, count).unwrap().collect();
            let rows = batches.iter().flat_map(|own| own.batch.inputs.chunks(4));
            rows.map(|row| row[0]).collect::<Vec<i64>>()
        };
        let all = first_tokens(usize::MAX);
        assert_eq!(all.len(), 10);
        assert_eq!(first_tokens(10), all);
        assert_eq!(first_tokens(5), [0, 2, 4, 6, 8].map(|row| all[row]));
        assert_eq!(first_tokens(3), [0, 3, 6].map(|row| all[row]));
        assert_eq!(first_tokens(1), [all[0]]);
    }

    #[test]
    fn fault_what_cannot_be_mixed_is_refused() {
        let one = || source(&[3; 5], 4, false);
        for weights in [[1.0, 0.0], [1.0, -1.0], [f64::NAN, 1.0], [1.0, 1e-6]] {
            let sources = weights.map(|weight| (one(), weight)).to_vec();
            let error = RowBatches::new(sources, 4, 1, 0).unwrap_err();
            assert!(matches!(error, Error::SourceWeight { .. }), "{error}");
        }
        assert!(matches!(RowBatches::new(Vec::new(), 4, 1, 0), Err(Error::NoSamples)));
        let empty = Source { samples: Samples::default(), rows: Rows::default() };
        assert!(matches!(in_order(&empty, 4, 1, 9).err(), Some(Error::NoSamples)));
    }
}
