//! Families: `oracle_` (brute force and statistics), `property_`, `fault_`.

use gpipe_core::splitmix::Stream;

use super::*;

const ALL: Sampling =
    Sampling { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

fn settings(temperature: f64, top_k: Option<usize>, top_p: f64) -> Result<Sampling, SamplingError> {
    Sampling::new(Sampling { temperature, top_k, top_p, ..ALL })
}

/// Random logits, about a third of them equal to another one.
fn logits(stream: &mut Stream, count: usize) -> Vec<f32> {
    (0..count).map(|_| stream.below(2 * count) as f32 / 4.0 - 3.0).collect()
}

/// The probability of every token, by definition and without sorting.
///
/// Top-k keeps a token if fewer than k others beat it. Top-p keeps a token if the kept tokens that
/// beat it have a total probability below p.
fn brute_force(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
    let beats = |a: usize, b: usize| logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    let tokens = 0..logits.len();
    let k = sampling.top_k.unwrap_or(usize::MAX);
    let in_k: Vec<usize> =
        tokens.clone().filter(|&t| tokens.clone().filter(|&o| beats(o, t)).count() < k).collect();
    let weight = |t: usize| (f64::from(logits[t]) / sampling.temperature).exp();
    let total: f64 = in_k.iter().map(|&t| weight(t)).sum();
    let before = |t: usize| -> f64 {
        in_k.iter().filter(|&&o| beats(o, t)).map(|&o| weight(o) / total).sum()
    };
    let kept: Vec<usize> =
        in_k.iter().copied().filter(|&t| before(t) < sampling.top_p - 1e-12).collect();
    let most = kept.iter().map(|&t| weight(t)).fold(0.0, f64::max);
    let kept: Vec<usize> =
        kept.into_iter().filter(|&t| weight(t) >= sampling.min_p * most * (1.0 - 1e-12)).collect();
    let total: f64 = kept.iter().map(|&t| weight(t)).sum();
    tokens.map(|t| if kept.contains(&t) { weight(t) / total } else { 0.0 }).collect()
}

/// The probability of each token, to 1 / `steps`, measured over an even grid of `steps` numbers in
/// [0, 1).
fn measured(logits: &[f32], sampling: &Sampling, steps: usize) -> Vec<f64> {
    let mut shares = vec![0.0; logits.len()];
    for step in 0..steps {
        let chosen = sampling.sample(logits, (step as f64 + 0.5) / steps as f64).unwrap();
        shares[chosen] += 1.0 / steps as f64;
    }
    shares
}

#[test]
fn oracle_probabilities_are_those_of_brute_force() {
    let mut stream = Stream::new(17);
    for case in 0..150 {
        let count = 1 + stream.below(12);
        let logits = logits(&mut stream, count);
        let top_k = [None, Some(1 + stream.below(count + 3))][case % 2];
        let top_p = [1.0, 0.05 + 0.9 * uniform(3, 0, case as u64)][case / 2 % 2];
        let min_p = [0.0, 0.9 * uniform(4, 0, case as u64)][case / 4 % 2];
        let sampling = settings(0.2 + case as f64 / 50.0, top_k, top_p).unwrap();
        let sampling = Sampling::new(Sampling { min_p, ..sampling }).unwrap();
        let expected = brute_force(&logits, &sampling);
        for (token, share) in measured(&logits, &sampling, 2000).into_iter().enumerate() {
            let difference = (share - expected[token]).abs();
            assert!(difference <= 1.01 / 2000.0, "{logits:?} {sampling:?}: token {token}");
            assert!(expected[token] > 0.0 || share == 0.0, "{logits:?} {sampling:?}: {token}");
        }
    }
}

#[test]
fn oracle_draws_by_seed_and_position_have_the_right_frequencies() {
    // exp(l) is 8, 4, 2, 1 and 1 of 16. Chi squared with 4 degrees of freedom exceeds 23.5 for one
    // seed in 10,000.
    let logits: Vec<f32> = [8.0_f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln).into();
    for seed in [0, 1, 0xffff_ffff_ffff_ffff] {
        let mut counts = [0.0; 5];
        for position in 0..16_000 {
            counts[ALL.sample(&logits, uniform(seed, 0, position)).unwrap()] += 1.0;
        }
        let expected = [8000.0, 4000.0, 2000.0, 1000.0, 1000.0];
        let chi: f64 =
            counts.iter().zip(expected).map(|(c, e): (&f64, f64)| (c - e) * (c - e) / e).sum();
        assert!(chi < 23.5, "seed {seed}: {counts:?}");
    }
    assert_ne!(uniform(1, 0, 0), uniform(2, 0, 0));
    assert!((0..1000).map(|position| uniform(9, 0, position)).all(|u| (0.0..1.0).contains(&u)));
}

#[test]
fn oracle_greedy_is_the_first_of_the_greatest() {
    let greedy = settings(0.0, None, 1.0).unwrap();
    let one = settings(5.0, Some(1), 1.0).unwrap();
    let nucleus = settings(1.0, None, 1e-9).unwrap();
    for uniform in [0.0, 0.5, 1.0 - f64::EPSILON] {
        for sampling in [greedy, one, nucleus] {
            assert_eq!(sampling.sample(&[1.0, 3.0, -1.0, 3.0], uniform), Ok(1));
            assert_eq!(sampling.sample(&[-0.0, 0.0], uniform), Ok(0), "0 and -0 are equal");
        }
    }
}

#[test]
fn oracle_the_nucleus_is_the_smallest_set_that_reaches_p() {
    let support_of = |logits: &[f32], top_p| -> Vec<usize> {
        let shares = measured(logits, &Sampling { top_p, ..ALL }, 100);
        (0..logits.len()).filter(|&token| shares[token] > 0.0).collect()
    };
    // Exactly 1/4 each: two reach 1/2.
    let even = |top_p| support_of(&[1.0; 4], top_p);
    assert_eq!((even(0.25), even(0.26)), (vec![0], vec![0, 1]));
    assert_eq!((even(0.5), even(0.75), even(0.76)), (vec![0, 1], vec![0, 1, 2], vec![0, 1, 2, 3]));
    // About 1/4, 1/2, 1/4.
    let support = |top_p| support_of(&[0.0, 2.0_f32.ln(), 0.0], top_p);
    assert_eq!(support(0.49), [1]);
    assert_eq!(support(0.51), [0, 1], "of two equals the first");
    assert_eq!(support(0.74), [0, 1]);
    assert_eq!(support(0.76), [0, 1, 2]);
    assert_eq!(support(1.0), [0, 1, 2]);
}

#[test]
fn property_shifts_and_extremes_are_stable() {
    let mut stream = Stream::new(5);
    for case in 0..100 {
        let logits = logits(&mut stream, 8);
        let shifted: Vec<f32> = logits.iter().map(|l| l + 4096.0).collect();
        let u = uniform(1, 0, case);
        assert_eq!(ALL.sample(&logits, u), ALL.sample(&shifted, u), "softmax ignores a shift");
    }
    let far = [f32::MAX, f32::MIN, 0.0];
    assert_eq!(ALL.sample(&far, 1.0 - f64::EPSILON), Ok(0), "the others' probability is 0");
    let cold = settings(f64::MIN_POSITIVE, None, 1.0).unwrap();
    assert_eq!(cold.sample(&[1.0, 1.5, 1.0], 0.99), Ok(1));
    let hot = settings(f64::MAX, None, 1.0).unwrap();
    assert_eq!(hot.sample(&far, 0.99), Ok(1), "hot enough all are equal: least logits come last");
}

#[test]
fn fault_settings_out_of_range_say_what_to_use() {
    for temperature in [-1.0, -f64::MIN_POSITIVE, f64::NAN, f64::INFINITY] {
        let error = settings(temperature, None, 1.0).unwrap_err().to_string();
        assert!(error.contains("--temperature ") && error.contains("use 0"), "{error}");
    }
    for top_p in [0.0, -0.5, 1.0 + f64::EPSILON, f64::NAN] {
        let error = settings(1.0, None, top_p).unwrap_err().to_string();
        assert!(error.contains("above 0 and at most 1"), "{error}");
    }
    assert_eq!(settings(1.0, Some(0), 1.0), Err(SamplingError::TopK));
}

#[test]
fn fault_logits_that_are_not_finite_are_named() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, ..ALL };
            let error = sampling.sample(&[0.0, 1.0, value], 0.5).unwrap_err();
            assert!(error.to_string().contains("output for token 2 is"), "{error}");
        }
    }
    assert_eq!(ALL.sample(&[], 0.5), Err(SamplingError::Empty));
}

/// By the formula of Keskar et al. 2019 with transformers' treatment of negative logits; a token
/// counts once, however often it is in the text.
#[test]
fn oracle_what_is_in_the_text_becomes_less_likely() {
    let sampling = Sampling { repetition_penalty: 2.0, ..ALL };
    let mut logits = [3.0, -1.0, 0.5, -4.0];
    sampling.penalise(&mut logits, &[0, 3, 0, 9]);
    assert_eq!(logits, [1.5, -1.0, 0.5, -8.0]);
    let mut same = [3.0, -1.0];
    ALL.penalise(&mut same, &[0, 1]);
    assert_eq!(same, [3.0, -1.0]);
}

#[test]
fn fault_settings_of_min_p_and_the_penalty_have_ranges() {
    for min_p in [-0.1, 1.0, f64::NAN] {
        let error = Sampling::new(Sampling { min_p, ..ALL }).unwrap_err();
        assert!(matches!(error, SamplingError::MinP(_)), "{error}");
    }
    for repetition_penalty in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Sampling::new(Sampling { repetition_penalty, ..ALL }).unwrap_err();
        assert!(matches!(error, SamplingError::RepetitionPenalty(_)), "{error}");
    }
}

#[test]
fn property_each_text_has_numbers_of_its_own() {
    assert_ne!(uniform(1, 0, 5), uniform(1, 1, 5));
    assert_ne!(uniform(1, 1, 5), uniform(1, 2, 5));
}
