//! The order of pairs: temperature-based sampling over languages, without a random generator.
//!
//! Language l with n_l pairs has the share q_l of all drawn pairs, proportional to n_l^(1/T)
//! (Arivazhagan et al., "Massively multilingual neural machine translation in the wild", 2019). T =
//! 1 keeps the proportions of the data; a greater T favours small languages.
//!
//! The obvious design draws a language for each pair, and then one of its pairs. Its proportions
//! hold only on average, it repeats pairs before it has visited all of a language, and it has
//! state. Here each language is a separate stream whose pairs are shuffled in each epoch. Of the
//! first `drawn` pairs of the mixture, language l has
//!
//! ```text
//!   place(l, drawn) = floor(drawn q_l + phase_l)      phase_l = (l + 1/2) / languages
//! ```
//!
//! So any range of the mixture can be computed without the preceding ones. It has each language's
//! share to within one pair, and continues each language where the preceding range ended. The
//! phases keep languages of equal size from advancing in step. The places add up to `drawn` only to
//! within one pair per language.

use std::ops::Range;

use gpipe_core::splitmix;

use super::PairError;
use crate::Result;
use crate::hash::stable;
use crate::permutation::Permutation;

/// Stream number that separates the order of pairs from other uses of the seed.
const PAIRS_STREAM: u64 = 4;

/// Shares are multiples of 2^-32, so places are the same on machines whose power functions differ
/// in the last bits.
const ONE: u64 = 1 << 32;

/// The languages' streams.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    streams: Vec<Stream>,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// Number of pairs of the language.
    pairs: u64,
    /// Share of the language, in units of 1 / [`ONE`], like the phase.
    share: u64,
    phase: u64,
    /// Key from the seed and the language's code, so other languages do not change this one's
    /// order.
    key: u64,
}

impl Mixture {
    /// Creates a mixture of languages, each a code and a number of pairs. At least one language
    /// must have pairs.
    ///
    /// # Errors
    /// Fails if the temperature is less than 1.
    pub(super) fn new(languages: &[(&str, usize)], temperature: f64, seed: u64) -> Result<Self> {
        if temperature.is_nan() || temperature < 1.0 {
            return Err(PairError::Temperature { temperature }.into());
        }
        let weight =
            |pairs: usize| if pairs == 0 { 0.0 } else { (pairs as f64).powf(1.0 / temperature) };
        let sum: f64 = languages.iter().map(|(_, pairs)| weight(*pairs)).sum();
        let phases = 2 * languages.len().max(1) as u64;
        let streams = languages.iter().zip(0..).map(|(&(code, pairs), place)| {
            let share = (weight(pairs) / sum * ONE as f64).round() as u64;
            // Every language with pairs gets a nonzero share, however small.
            let share = if pairs == 0 { 0 } else { share.max(1) };
            let phase = (2 * place + 1) * ONE / phases;
            let key = splitmix::key(&[seed, PAIRS_STREAM, stable(code)]);
            Stream { pairs: pairs as u64, share, phase, key }
        });
        Ok(Self { streams: streams.collect() })
    }

    /// Each language's share of all drawn pairs. The shares sum to 1, up to rounding.
    pub(super) fn shares(&self) -> impl ExactSizeIterator<Item = f64> {
        self.streams.iter().map(|stream| stream.share as f64 / ONE as f64)
    }

    /// Number of passes over each language after `drawn` pairs of the mixture.
    pub(super) fn epochs(&self, drawn: u128) -> impl ExactSizeIterator<Item = f64> {
        self.streams.iter().map(move |stream| match stream.pairs {
            0 => 0.0,
            pairs => stream.place(drawn) as f64 / pairs as f64,
        })
    }

    /// The pairs in a range of the mixture, as (language, pair) indices, one language after
    /// another.
    pub(super) fn draw(&self, drawn: Range<u128>) -> impl Iterator<Item = (usize, usize)> {
        self.streams.iter().enumerate().flat_map(move |(language, stream)| {
            let places = stream.place(drawn.start)..stream.place(drawn.end);
            places.map(move |place| (language, stream.pair(place)))
        })
    }
}

impl Stream {
    /// Number of this language's pairs among the first `drawn` pairs of the mixture. `drawn` must
    /// be at most 2^92, so that nothing overflows.
    fn place(&self, drawn: u128) -> u128 {
        (drawn * u128::from(self.share) + u128::from(self.phase)) / u128::from(ONE)
    }

    /// The pair at a place of the stream. The stream must have pairs.
    fn pair(&self, place: u128) -> usize {
        let pairs = u128::from(self.pairs.max(1));
        let epoch = (place / pairs) as u64; // An epoch beyond 2^64 is truncated to its low bits.
        let order = Permutation::new(self.pairs, splitmix::at(self.key, epoch));
        order.at((place % pairs) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [(&str, usize); 5] =
        [("cs", 1000), ("de", 100_000), ("is", 10), ("ja", 0), ("zu", 1)];

    #[test]
    fn oracle_shares_are_powers() {
        for (temperature, power) in [(1.0, 1.0), (2.0, 0.5), (5.0, 0.2), (f64::INFINITY, 0.0)] {
            let mixture = Mixture::new(&SIZES, temperature, 0).unwrap();
            let weight = |n: usize| if n == 0 { 0.0 } else { (n as f64).powf(power) };
            let sum: f64 = SIZES.iter().map(|(_, n)| weight(*n)).sum();
            for (share, (_, n)) in mixture.shares().zip(SIZES) {
                assert!((share - weight(n) / sum).abs() < 1e-9, "{temperature} {n} {share}");
            }
        }
    }

    #[test]
    fn property_each_run_has_the_shares_to_within_one_pair() {
        for temperature in [1.0, 5.0, f64::INFINITY] {
            let mixture = Mixture::new(&SIZES, temperature, 3).unwrap();
            for run in [1u128, 7, 100, 3001] {
                for number in (0..50).chain([1 << 64]) {
                    let drawn = number * run..(number + 1) * run;
                    let mut counts = [0usize; SIZES.len()];
                    mixture.draw(drawn).for_each(|(language, _)| counts[language] += 1);
                    for (count, share) in counts.iter().zip(mixture.shares()) {
                        let exact = share * run as f64;
                        assert!((*count as f64 - exact).abs() < 1.0, "{count} of {exact}");
                    }
                    let all: usize = counts.iter().sum();
                    assert!(all.abs_diff(run as usize) <= SIZES.len());
                }
            }
        }
    }

    #[test]
    fn property_languages_of_one_size_take_turns() {
        let codes = ["a", "b", "c", "d", "e", "f", "g"];
        let mixture = Mixture::new(&codes.map(|code| (code, 50)), 5.0, 0).unwrap();
        for number in 0..200u128 {
            let all = mixture.draw(number * 10..(number + 1) * 10).count();
            assert!((9..=11).contains(&all), "{all}");
        }
    }

    #[test]
    fn property_each_pair_once_per_epoch_of_its_language() {
        let mixture = Mixture::new(&[("de", 40), ("is", 7)], 5.0, 11).unwrap();
        let mut streams: [Vec<usize>; 2] = Default::default();
        for run in 0..40u128 {
            mixture.draw(run * 9..(run + 1) * 9).for_each(|(language, pair)| {
                streams[language].push(pair);
            });
        }
        for (stream, pairs) in streams.iter().zip([40, 7]) {
            assert!(stream.len() > 3 * pairs);
            let mut orders = std::collections::BTreeSet::new();
            for epoch in stream.chunks_exact(pairs) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..pairs));
                orders.insert(epoch.to_vec());
            }
            assert_eq!(orders.len(), stream.len() / pairs, "another order in each epoch");
        }
    }

    #[test]
    fn oracle_epochs_by_hand() {
        let mixture = Mixture::new(&[("de", 40), ("is", 0), ("zu", 40)], 5.0, 0).unwrap();
        assert_eq!(mixture.epochs(0).collect::<Vec<_>>(), [0.0; 3]);
        assert_eq!(mixture.epochs(120).collect::<Vec<_>>(), [1.5, 0.0, 1.5]);
    }

    #[test]
    fn property_other_languages_do_not_change_an_order() {
        let first = |languages: &[(&str, usize)], at: usize| {
            let mixture = Mixture::new(languages, 1.0, 5).unwrap();
            let all = mixture.draw(0..1000).filter(|(language, _)| *language == at);
            all.map(|(_, pair)| pair).take(100).collect::<Vec<_>>()
        };
        assert_eq!(first(&[("de", 200)], 0), first(&[("cs", 200), ("de", 200)], 1));
        assert_ne!(first(&[("de", 200)], 0), first(&[("cs", 200)], 0));
    }

    #[test]
    fn fault_temperatures_out_of_range() {
        for temperature in [0.0, 0.99, -1.0, f64::NAN] {
            let error = Mixture::new(&SIZES, temperature, 0).unwrap_err().to_string();
            assert!(error.contains("use 1 (as the data are)"), "{error}");
        }
    }
}
