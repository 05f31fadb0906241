//! Compares counts with an independent method, and checks properties that hold for any text.
//!
//! Families: `oracle_` (every pair of tiny sentences, matched by striking out n-grams), `property_`
//! (identity, order, sums, range), `fault_` (no reference, invalid smoothing, accumulators with
//! different options).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_score::{Bleu, BleuOptions, BleuScore, Chrf, ChrfOptions, Error, Smoothing, Tokenizer};
use proptest::{prelude::*, test_runner::RngSeed};

const PLAIN: BleuOptions = BleuOptions {
    tokenizer: Tokenizer::None,
    lowercase: false,
    smoothing: Smoothing::None,
    effective_order: false,
};

/// All sequences of at most `most` letters.
fn sequences(letters: &[char], most: usize) -> Vec<Vec<char>> {
    let mut all = vec![vec![]];
    let mut last = all.clone();
    for _ in 0..most {
        let longer = |sequence: &Vec<char>| {
            let sequence = sequence.clone();
            letters.iter().map(move |&letter| [sequence.clone(), vec![letter]].concat())
        };
        last = last.iter().flat_map(longer).collect();
        all.extend(last.clone());
    }
    all
}

fn ngrams(sentence: &[char], n: usize) -> Vec<&[char]> {
    (0..sentence.len()).filter_map(|at| sentence.get(at..at + n)).collect()
}

/// The numbers of n-grams of the hypothesis, of n-grams of the reference, and of matches. Each
/// match is struck out.
fn struck_out(hypothesis: &[char], reference: &[char], n: usize) -> [u64; 3] {
    let (there, mut left) = (ngrams(hypothesis, n), ngrams(reference, n));
    let totals = [there.len() as u64, left.len() as u64];
    let mut matches = 0;
    for ngram in there {
        if let Some(at) = left.iter().position(|other| *other == ngram) {
            left.swap_remove(at);
            matches += 1;
        }
    }
    [totals[0], totals[1], matches]
}

fn spaced(sentence: &[char]) -> String {
    sentence.iter().flat_map(|&letter| [letter, ' ']).collect()
}

#[test]
fn oracle_bleu_counts_by_striking_out() {
    let sentences = sequences(&['x', 'y'], 5);
    for hypothesis in &sentences {
        for reference in &sentences {
            let mut bleu = Bleu::new(PLAIN).unwrap();
            bleu.add(&spaced(hypothesis), &[&spaced(reference)]).unwrap();
            let score = bleu.score();
            let orders = [1, 2, 3, 4].map(|n| struck_out(hypothesis, reference, n));
            assert_eq!(score.totals, orders.map(|order| order[0]));
            assert_eq!(score.matches, orders.map(|order| order[2]), "{hypothesis:?} {reference:?}");

            let mean = orders.map(|[total, _, matches]| matches as f64 / total.max(1) as f64);
            let ratio = reference.len() as f64 / hypothesis.len() as f64;
            let penalty = if ratio > 1.0 { (1.0 - ratio).exp() } else { 1.0 };
            let expected = 100.0 * penalty * mean.into_iter().product::<f64>().powf(0.25);
            assert!((score.score - expected).abs() < 1e-9, "{hypothesis:?} {reference:?}");
        }
    }
}

#[test]
fn oracle_bleu_of_two_references_takes_the_most_of_each_ngram_and_the_nearest_length() {
    let sentences = sequences(&['x', 'y'], 3);
    for hypothesis in &sentences {
        for [one, other] in sentences.iter().flat_map(|one| sentences.iter().map(move |o| [one, o]))
        {
            let mut bleu = Bleu::new(PLAIN).unwrap();
            bleu.add(&spaced(hypothesis), &[&spaced(one), &spaced(other)]).unwrap();
            let BleuScore { matches, ref_len, .. } = bleu.score();
            for (n, matched) in (1..).zip(matches) {
                let mut kinds = ngrams(hypothesis, n);
                kinds.sort_unstable();
                kinds.dedup();
                let often = |sentence: &[char], kind: &[char]| {
                    ngrams(sentence, n).into_iter().filter(|ngram| *ngram == kind).count()
                };
                let clipped = |kind: &[char]| {
                    often(hypothesis, kind).min(often(one, kind).max(often(other, kind)))
                };
                assert_eq!(matched, kinds.into_iter().map(clipped).sum::<usize>() as u64);
            }
            let mut lengths = [one.len(), other.len()];
            lengths.sort_unstable();
            let far = lengths.map(|length| length.abs_diff(hypothesis.len()));
            assert_eq!(ref_len, lengths[usize::from(far[1] < far[0])] as u64);
        }
    }
}

#[test]
fn oracle_chrf_counts_by_striking_out() {
    // Spaces are in no character n-gram.
    let sentences = sequences(&['x', 'y', ' '], 4);
    for options in [ChrfOptions::CHRF, ChrfOptions { beta: 1, ..ChrfOptions::CHRF }] {
        for hypothesis in &sentences {
            for reference in &sentences {
                let strings =
                    [hypothesis, reference].map(|letters| letters.iter().collect::<String>());
                let [h, r] = [hypothesis, reference].map(|sentence| {
                    sentence.iter().copied().filter(|letter| *letter != ' ').collect::<Vec<_>>()
                });
                let orders: Vec<[u64; 3]> = (1..=6)
                    .map(|n| struck_out(&h, &r, n))
                    .filter(|order| order[0] > 0 && order[1] > 0)
                    .collect();
                let mean = |of: usize| {
                    let shares = orders.iter().map(|order| order[2] as f64 / order[of] as f64);
                    shares.sum::<f64>() / orders.len().max(1) as f64
                };
                let (precision, recall) = (mean(0), mean(1));
                // The weighted harmonic mean.
                let weight = f64::from(options.beta).powi(2);
                let expected = match precision > 0.0 {
                    true => 100.0 * (1.0 + weight) / (1.0 / precision + weight / recall),
                    false => 0.0,
                };
                let score = Chrf::sentence(options, &strings[0], &[&strings[1]]).unwrap();
                assert!((score - expected).abs() < 1e-9, "{strings:?}: {score}, not {expected}");
            }
        }
    }
}

/// Any sentence, in which what tokenizers act on is more frequent than by chance.
fn sentence() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "([a-c]{1,3}[ .,-]{0,2}){1,12}",
        "([0-9]{1,3}[.,-]?[ a&;]?){1,8}",
        "((&amp;|&lt;|&quot;|<skipped>|-\n|[a-z])[ ]?){1,8}",
        "\\PC{0,20}",
        "[ -~\u{0}-\u{20}\u{85}\u{a0}\u{3000}áß漢🙂\u{301}]{0,20}",
    ]
}

fn pairs() -> impl Strategy<Value = Vec<(String, Vec<String>)>> {
    prop::collection::vec((sentence(), prop::collection::vec(sentence(), 1..3)), 1..8)
}

fn bleu_options() -> impl Strategy<Value = BleuOptions> {
    let tokenizer = prop::sample::select(vec![Tokenizer::V13a, Tokenizer::None, Tokenizer::Char]);
    let smoothing = prop::sample::select(vec![
        Smoothing::Exp,
        Smoothing::Floor(0.1),
        Smoothing::AddK(1.0),
        Smoothing::None,
    ]);
    (tokenizer, smoothing, any::<bool>(), any::<bool>()).prop_map(
        |(tokenizer, smoothing, lowercase, effective_order)| BleuOptions {
            tokenizer,
            lowercase,
            smoothing,
            effective_order,
        },
    )
}

fn bleu_of<'a>(
    options: BleuOptions,
    pairs: impl IntoIterator<Item = &'a (String, Vec<String>)>,
) -> Bleu {
    let mut bleu = Bleu::new(options).unwrap();
    for (hypothesis, references) in pairs {
        let references: Vec<&str> = references.iter().map(String::as_str).collect();
        bleu.add(hypothesis, &references).unwrap();
    }
    bleu
}

fn chrf_of<'a>(pairs: impl IntoIterator<Item = &'a (String, Vec<String>)>) -> Chrf {
    let mut chrf = Chrf::new(ChrfOptions::CHRF_PLUS_PLUS);
    for (hypothesis, references) in pairs {
        let references: Vec<&str> = references.iter().map(String::as_str).collect();
        chrf.add(hypothesis, &references).unwrap();
    }
    chrf
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: RngSeed::Fixed(11),
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    })]

    #[test]
    fn property_a_sentence_equal_to_a_reference_scores_100(
        line in sentence(), other in sentence(), options in bleu_options(),
    ) {
        // The score is 100 at any length, because the effective order leaves out longer n-grams.
        let count =
            options.tokenizer.apply(&line).split(' ').filter(|word| !word.is_empty()).count();
        let alone = Bleu::sentence(options, &line, &[&line]).unwrap();
        let beside = Bleu::sentence(options, &line, &[&other, &line]).unwrap();
        let expected = if count == 0 { 0.0 } else { 100.0 };
        prop_assert!((alone.score - expected).abs() < 1e-9, "{}", alone.score);
        prop_assert!((beside.score - expected).abs() < 1e-9, "{}", beside.score);

        // Without the effective order and smoothing, 100 takes at least four words.
        let plain = bleu_of(PLAIN, [&(line.clone(), vec![line.clone()])]).score();
        let expected =
            if Tokenizer::None.apply(&line).split(' ').count() >= 4 { 100.0 } else { 0.0 };
        prop_assert!((plain.score - expected).abs() < 1e-9, "{}", plain.score);

        let blank = Tokenizer::None.apply(&line).is_empty();
        let chrf = Chrf::sentence(ChrfOptions::CHRF_PLUS_PLUS, &line, &[&other, &line]).unwrap();
        prop_assert!((chrf - if blank { 0.0 } else { 100.0 }).abs() < 1e-9, "{}", chrf);
    }

    #[test]
    fn property_scores_are_within_0_and_100(pairs in pairs(), options in bleu_options()) {
        let within = |value: f64| (0.0..=100.0 + 1e-9).contains(&value);
        let score = bleu_of(options, &pairs).score();
        prop_assert!(
            within(score.score) && score.precisions.into_iter().all(within),
            "{:?}",
            score
        );
        prop_assert!((0.0..=1.0).contains(&score.bp));
        prop_assert!(
            score.matches.iter().zip(&score.totals).all(|(matches, total)| matches <= total)
        );
        prop_assert!(within(chrf_of(&pairs).score()));
    }

    #[test]
    fn property_the_order_of_sentences_does_not_matter(
        pairs in pairs(), options in bleu_options(),
    ) {
        let (there, back) = (bleu_of(options, &pairs), bleu_of(options, pairs.iter().rev()));
        prop_assert_eq!((there.score(), there.signature()), (back.score(), back.signature()));
        prop_assert_eq!(chrf_of(&pairs).score(), chrf_of(pairs.iter().rev()).score());
    }

    #[test]
    fn property_parts_merge_to_the_whole(
        pairs in pairs(), at in any::<prop::sample::Index>(), options in bleu_options(),
    ) {
        let (first, second) = pairs.split_at(at.index(pairs.len()));
        let (whole, mut sum) = (bleu_of(options, &pairs), bleu_of(options, first));
        sum.merge(&bleu_of(options, second)).unwrap();
        prop_assert_eq!((whole.score(), whole.signature()), (sum.score(), sum.signature()));
        prop_assert_eq!(sum.sentences(), pairs.len() as u64);

        let (whole, mut sum) = (chrf_of(&pairs), chrf_of(first));
        sum.merge(&chrf_of(second)).unwrap();
        prop_assert_eq!((whole.score(), whole.signature()), (sum.score(), sum.signature()));
        prop_assert_eq!(sum.sentences(), pairs.len() as u64);
    }
}

#[test]
fn fault_a_sentence_without_reference_is_named_and_not_counted() {
    let mut bleu = Bleu::new(BleuOptions::default()).unwrap();
    let mut chrf = Chrf::new(ChrfOptions::default());
    bleu.add("one", &["one"]).unwrap();
    chrf.add("one", &["one"]).unwrap();
    let missing = Error::NoReference { sentence: 2 };
    assert_eq!(bleu.add("two", &[]), Err(missing.clone()));
    assert_eq!(chrf.add("two", &[]), Err(missing.clone()));
    assert!(missing.to_string().starts_with("sentence 2 has no reference: give it"));
    assert_eq!((bleu.sentences(), chrf.sentences(), bleu.score().sys_len), (1, 1, 1));
    assert_eq!(bleu.signature(), "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp");
}

#[test]
fn fault_smoothing_by_nothing_that_is_a_number_of_matches() {
    for value in [-0.1, f64::NAN, f64::INFINITY] {
        for smoothing in [Smoothing::Floor(value), Smoothing::AddK(value)] {
            let error = Bleu::new(BleuOptions { smoothing, ..PLAIN }).unwrap_err();
            assert!(error.to_string().starts_with("BLEU cannot be smoothed by"), "{error}");
        }
    }
}

#[test]
fn fault_unlike_accumulators_do_not_merge() {
    let mut bleu = bleu_of(PLAIN, &[("one two".into(), vec!["one two".into()])]);
    let before = bleu.score();
    let error = bleu.merge(&Bleu::new(BleuOptions::default()).unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "scores that count differently cannot be merged \
        (nrefs:1|case:mixed|eff:no|tok:none|smooth:none and \
         nrefs:0|case:mixed|eff:no|tok:13a|smooth:exp): make both with the same options"
    );
    assert_eq!(bleu.score(), before);

    let mut chrf = Chrf::new(ChrfOptions::CHRF);
    let error = chrf.merge(&Chrf::new(ChrfOptions { beta: 3, ..ChrfOptions::CHRF })).unwrap_err();
    assert!(
        error.to_string().contains("chrF2 nrefs:0") && error.to_string().contains("chrF3 nrefs:0")
    );
}

#[test]
fn fault_nothing_scores_0() {
    let score = Bleu::new(BleuOptions::default()).unwrap().score();
    assert_eq!((score.score, score.bp, score.precisions), (0.0, 1.0, [0.0; 4]));
    assert_eq!(Chrf::new(ChrfOptions::default()).score(), 0.0);
}
