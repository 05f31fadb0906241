//! Beam search against brute force, on logits that are a function of the prefix.

use std::collections::BTreeMap;

use tch::Tensor;

use super::{BeamSearch, Continuation, Hypothesis, NextLogits, Sentence};
use crate::error::LayerError;

const VOCABULARY: i64 = 5;
const END: i64 = 1;

/// Logits that are a fixed function of sentence and prefix.
struct Table {
    seed: u64,
    /// Rows of each group, by step.
    steps: Vec<Vec<usize>>,
}

fn logits(seed: u64, sentence: usize, prefix: &[i64]) -> Vec<f64> {
    let mut state = seed ^ (sentence as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for &token in prefix {
        state = (state ^ token as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 29;
    }
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1 << 24) as f64 * 4.0
    };
    (0..VOCABULARY).map(|_| next()).collect()
}

impl NextLogits for Table {
    type Error = LayerError;

    fn next(&mut self, groups: &[Continuation<'_>]) -> Result<Vec<Tensor>, LayerError> {
        self.steps.push(groups.iter().map(|group| group.prefixes.len()).collect());
        let of = |group: &Continuation<'_>| {
            let rows = group.prefixes.iter().zip(group.sentences);
            let rows = rows.flat_map(|(prefix, &sentence)| {
                logits(self.seed, 100 * group.group + sentence, prefix)
            });
            let rows: Vec<f64> = rows.collect();
            Ok(Tensor::f_from_slice(&rows)?.f_reshape([-1, VOCABULARY])?)
        };
        groups.iter().map(of).collect()
    }
}

fn logs(seed: u64, sentence: usize, prefix: &[i64], never: &[i64]) -> Vec<f64> {
    let mut all = logits(seed, sentence, prefix);
    never.iter().for_each(|&token| all[token as usize] = f64::NEG_INFINITY);
    let sum: f64 = all.iter().map(|logit| logit.exp()).sum();
    all.iter().map(|logit| logit - sum.ln()).collect()
}

/// Every output of at most `most` tokens, with its log-probability.
fn all(seed: u64, sentence: usize, most: usize, never: &[i64]) -> BTreeMap<Vec<i64>, f64> {
    let mut found = BTreeMap::new();
    let mut open = vec![(vec![0], 0.0)];
    for made in 1..=most {
        let mut next = Vec::new();
        for (prefix, log) in open {
            for (token, own) in logs(seed, sentence, &prefix, never).into_iter().enumerate() {
                if token as i64 == END {
                    found.insert(prefix[1..].to_vec(), log + own);
                } else if made < most && own > f64::NEG_INFINITY {
                    next.push(([&prefix[..], &[token as i64]].concat(), log + own));
                }
            }
        }
        open = next;
    }
    found
}

fn search(beam: usize, length_penalty: f64, never: &[i64]) -> BeamSearch {
    BeamSearch { beam, length_penalty, end: END, never: never.to_vec() }
}

fn sentences(count: usize, most: usize) -> Vec<Sentence> {
    vec![Sentence { begin: vec![0], most }; count]
}

fn run(search: &BeamSearch, seed: u64, groups: &[Vec<Sentence>]) -> Vec<Vec<Vec<Hypothesis>>> {
    search.run(groups, &mut Table { seed, steps: Vec::new() }).unwrap()
}

#[test]
fn oracle_a_beam_that_is_wide_enough_finds_the_best_of_all() {
    let most = 4;
    for seed in 0..20 {
        for penalty in [0.0, 0.6, 1.5] {
            for never in [&[][..], &[3][..]] {
                // A beam as wide as the number of extensions, so that nothing is ever dropped.
                let search = search(200, penalty, never);
                let found = run(&search, seed, &[sentences(2, most)]);
                for (sentence, found) in found[0].iter().enumerate() {
                    let score = |tokens: &Vec<i64>, log: f64| {
                        log / ((5.0 + tokens.len() as f64 + 1.0) / 6.0).powf(penalty)
                    };
                    let every = all(seed, sentence, most, never);
                    assert_eq!(found.len(), every.len());
                    let best = every.iter().map(|(t, &log)| score(t, log)).fold(f64::MIN, f64::max);
                    assert!((found[0].score - best).abs() < 1e-12, "{} {best}", found[0].score);
                    for own in found {
                        assert!((every[&own.tokens] - own.log_probability).abs() < 1e-12);
                    }
                    assert!(found.windows(2).all(|pair| pair[0].score >= pair[1].score));
                }
            }
        }
    }
}

#[test]
fn oracle_a_beam_of_one_takes_the_likeliest_token_each_time() {
    for seed in 0..50 {
        let most = 6;
        let found = &run(&search(1, 0.6, &[2]), seed, &[sentences(3, most)])[0];
        for (sentence, found) in found.iter().enumerate() {
            let (mut prefix, mut log) = (vec![0], 0.0);
            let ended = loop {
                let logs = logs(seed, sentence, &prefix, &[2]);
                let last = prefix.len() == most;
                let best = (0..VOCABULARY)
                    .max_by(|&a, &b| logs[a as usize].total_cmp(&logs[b as usize]).then(b.cmp(&a)));
                let token = if last { END } else { best.unwrap() };
                log += logs[token as usize];
                if token == END {
                    break prefix[1..].to_vec();
                }
                prefix.push(token);
            };
            assert_eq!((found.len(), &found[0].tokens), (1, &ended));
            assert!((found[0].log_probability - log).abs() < 1e-12);
        }
    }
}

#[test]
fn property_a_sentence_does_not_depend_on_those_beside_it() {
    let search = search(3, 0.6, &[]);
    // Sentences of several lengths, so that the group shrinks while it is decoded.
    let lengths = |seed: usize| [3, 7, 1, 5].map(|most| 1 + (most + seed) % 7);
    for seed in 0..30 {
        let all: Vec<Sentence> = lengths(seed).map(|most| Sentence { begin: vec![0], most }).into();
        let together = run(&search, seed as u64, std::slice::from_ref(&all));
        for (sentence, own) in together[0].iter().enumerate() {
            let mut alone = all.clone();
            // The other sentences may generate only one token.
            for (other, one) in alone.iter_mut().enumerate() {
                one.most = if other == sentence { one.most } else { 1 };
            }
            assert_eq!(run(&search, seed as u64, &[alone])[0][sentence], *own);
            assert!(!own.is_empty() && own.len() <= 3);
            assert!(own.iter().all(|one| one.tokens.len() < all[sentence].most));
        }
    }
}

#[test]
fn property_groups_go_side_by_side_and_end_on_their_own() {
    let groups = [sentences(2, 6), sentences(1, 2), sentences(3, 4)];
    let mut table = Table { seed: 7, steps: Vec::new() };
    search(2, 0.0, &[]).run(&groups, &mut table).unwrap();
    assert_eq!(table.steps[0], [2, 1, 3], "one hypothesis of each sentence at first");
    assert_eq!(table.steps[1], [4, 2, 6], "then as many as the beam is wide");
    assert!(table.steps.windows(2).all(|pair| pair[0].len() >= pair[1].len()));
    assert!(table.steps.len() <= 6);
    assert!(run(&search(2, 0.0, &[]), 7, &[]).is_empty());
}

#[test]
fn fault_settings_out_of_range_and_logits_that_are_none_are_refused() {
    let refused = |search: BeamSearch, sentences: Vec<Sentence>| {
        let mut table = Table { seed: 1, steps: Vec::new() };
        search.run(&[sentences], &mut table).unwrap_err().to_string()
    };
    assert!(refused(search(0, 0.6, &[]), sentences(1, 3)).contains("1 to 256"));
    assert!(refused(search(2, f64::NAN, &[]), sentences(1, 3)).contains("length penalty"));
    assert!(refused(search(2, 0.6, &[END]), sentences(1, 3)).contains("never chosen"));
    assert!(refused(search(2, 0.6, &[]), sentences(1, 0)).contains("no token"));
    let end = BeamSearch { end: VOCABULARY, ..search(2, 0.6, &[]) };
    assert!(refused(end, sentences(1, 3)).contains("end is token 5"));
    struct Nan;
    impl NextLogits for Nan {
        type Error = LayerError;
        fn next(&mut self, _: &[Continuation<'_>]) -> Result<Vec<Tensor>, LayerError> {
            Ok(vec![Tensor::f_from_slice(&[f64::NAN; 5])?.f_reshape([1, 5])?])
        }
    }
    let error = search(2, 0.6, &[]).run(&[sentences(1, 3)], &mut Nan).unwrap_err();
    assert!(error.to_string().contains("no numbers"), "{error}");
}

/// A beam that ends early, because nothing else may follow, has its outputs best first. They were
/// in the order in which they were found.
#[test]
fn regression_a_beam_that_dies_out_is_sorted() {
    struct Ends;
    impl NextLogits for Ends {
        type Error = LayerError;

        fn next(&mut self, groups: &[Continuation<'_>]) -> Result<Vec<Tensor>, LayerError> {
            let of = |prefix: &Vec<i64>| {
                let none = f32::NEG_INFINITY;
                match prefix.len() {
                    1 => [none, 0.0, 2.0, none, none],  // the end, or rather 2
                    _ => [none, 0.0, none, none, none], // the end alone
                }
            };
            let rows: Vec<f32> = groups[0].prefixes.iter().flat_map(of).collect();
            Ok(vec![Tensor::from_slice(&rows).reshape([-1, VOCABULARY])])
        }
    }
    let found = search(3, 0.0, &[]).run(&[sentences(1, 9)], &mut Ends).unwrap();
    let tokens: Vec<&[i64]> = found[0][0].iter().map(|own| &own.tokens[..]).collect();
    assert_eq!(tokens, [&[2][..], &[]]);
}
