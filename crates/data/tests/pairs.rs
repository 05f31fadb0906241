//! Tests of mini-batches of pairs: their contents, and that requests have no side effects.
//! Families: `property_`, `oracle_`, `golden_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use gpipe_data::parallel::{
    Language, Pair, PairBatch, PairError, PairSet, ParallelCorpus, Side, TrainPairs,
    TrainPairsOptions, TranslationVocabulary, ValidationPairs, VocabularyOptions, unigram,
};
use gpipe_data::{Error, IGNORE, Loader, LoaderSettings};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const CODES: [&str; 4] = ["cs", "de", "is", "zu"];

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        rng_seed: RngSeed::Fixed(41),
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    }
}

/// A vocabulary of bytes and special tokens only, so that a text has as many tokens as bytes.
fn vocabulary() -> &'static TranslationVocabulary {
    static VOCABULARY: LazyLock<TranslationVocabulary> = LazyLock::new(|| {
        let corpus = corpus(&[vec![(1, 1)], vec![], vec![], vec![]]);
        let options = VocabularyOptions { tokens: 264, ..VocabularyOptions::default() };
        TranslationVocabulary::train(&corpus, &options).unwrap()
    });
    &VOCABULARY
}

/// Pairs of the given lengths in bytes, per language. If long enough, a text begins with a number
/// that is unique within its language.
fn corpus(lengths: &[Vec<(usize, usize)>]) -> ParallelCorpus {
    let text = |number: usize, side: char, bytes: usize| {
        let name = format!("{number}{side}");
        let rest = bytes.saturating_sub(name.len());
        name + &"abcdefghij".repeat(rest / 10 + 1)[..rest]
    };
    let language = |(code, lengths): (&&str, &Vec<(usize, usize)>)| {
        let pair = |(number, (source, target)): (usize, &(usize, usize))| Pair {
            source: text(number, 's', *source),
            target: text(number, 't', *target),
        };
        let pairs: Vec<Pair> = lengths.iter().enumerate().map(pair).collect();
        Language { code: (*code).into(), train: pairs.clone(), validation: pairs }
    };
    ParallelCorpus { languages: CODES.iter().zip(lengths).map(language).collect() }
}

fn set(lengths: &[Vec<(usize, usize)>]) -> PairSet {
    PairSet::encode(vocabulary(), &corpus(lengths), Side::Train, 1000).unwrap()
}

/// Sentence-like lengths: many short and few long ones, with sources about as long as targets.
fn sentences(pairs: usize, seed: u64) -> Vec<(usize, usize)> {
    let mut stream = gpipe_core::splitmix::Stream::new(seed);
    let mut fraction = move || stream.below(1000) as f64 / 1000.0;
    let lengths = |_| {
        let target = 6.0 + 60.0 * fraction() * fraction() * fraction();
        let source = target * (0.7 + 0.6 * fraction());
        (source.round() as usize, target.round() as usize)
    };
    (0..pairs).map(lengths).collect()
}

fn options(target_tokens: usize, temperature: f64, seed: u64) -> TrainPairsOptions {
    TrainPairsOptions { target_tokens, temperature, seed }
}

/// The rows of a mini-batch as (language, pair), each checked against its set.
fn rows(set: &PairSet, batch: &PairBatch) -> Vec<(usize, usize)> {
    let PairBatch { source_length, target_length, samples, .. } = *batch;
    assert_eq!(batch.sources.len(), samples * source_length);
    assert_eq!(batch.inputs.len(), samples * target_length);
    assert_eq!(batch.targets.len(), samples * target_length);
    assert_eq!(batch.languages.len(), samples);
    let (pad, begin) = (i64::from(set.pad()), i64::from(set.begin()));
    let row = |row: usize| {
        let language = batch.languages[row];
        let sources = &batch.sources[row * source_length..][..source_length];
        let inputs = &batch.inputs[row * target_length..][..target_length];
        let targets = &batch.targets[row * target_length..][..target_length];
        let source: Vec<u32> =
            sources.iter().take_while(|t| **t != pad).map(|t| *t as u32).collect();
        let target: Vec<u32> =
            targets.iter().take_while(|t| **t != IGNORE).map(|t| *t as u32).collect();
        let text = vocabulary().decode(&target).unwrap();
        let pair: usize = text.split('t').next().unwrap().parse().unwrap();
        assert_eq!(target, set.target(language, pair));
        assert_eq!(source, set.source(language, pair));
        // Only padding follows, and the inputs are the targets shifted by one.
        assert!(sources[source.len()..].iter().all(|token| *token == pad));
        assert!(targets[target.len()..].iter().all(|token| *token == IGNORE));
        assert!(inputs[target.len()..].iter().all(|token| *token == pad));
        assert_eq!(inputs[0], begin);
        assert_eq!(inputs[1..target.len()], targets[..target.len() - 1]);
        (source.len(), target.len(), language, pair)
    };
    let found: Vec<_> = (0..samples).map(row).collect();
    assert_eq!(
        found.iter().map(|row| row.0).max(),
        Some(source_length),
        "no column is all padding"
    );
    assert_eq!(
        found.iter().map(|row| row.1).max(),
        Some(target_length),
        "no column is all padding"
    );
    assert!(found.is_sorted_by_key(|row| row.0), "in the order of lengths");
    assert_eq!(batch.target_tokens(), found.iter().map(|row| row.1).sum::<usize>());
    found.into_iter().map(|(_, _, language, pair)| (language, pair)).collect()
}

/// How often each pair of each language occurs.
type Counts = BTreeMap<(usize, usize), usize>;

fn count(set: &PairSet, batches: impl Iterator<Item = PairBatch>) -> Counts {
    let mut counts = Counts::new();
    for batch in batches {
        rows(set, &batch).into_iter().for_each(|pair| *counts.entry(pair).or_default() += 1);
    }
    counts
}

fn lengths() -> impl Strategy<Value = Vec<Vec<(usize, usize)>>> {
    let pairs = || prop::collection::vec((1usize..30, 4usize..30), 0..40);
    prop::collection::vec(pairs(), 4).prop_filter("pairs", |all| all.iter().any(|l| !l.is_empty()))
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn property_each_pair_once_per_epoch_of_its_language(
        lengths in lengths(), mean_pairs in 2usize..9, temperature in 1.0f64..9.0, seed: u64,
        pools in 1u64..4,
    ) {
        let set = set(&lengths);
        let batches = TrainPairs::new(&set, &options(30 * mean_pairs, temperature, seed)).unwrap();
        let made = (0..pools * 32).map(|number| batches.batch(number).unwrap());
        let counts = count(&set, made);
        let drawn = pools * 32 * batches.pairs_per_batch();
        for (language, share) in batches.shares().into_iter().enumerate() {
            let pairs = set.pairs(language);
            let of = |pair| counts.get(&(language, pair)).copied().unwrap_or(0);
            let all: usize = (0..pairs).map(of).sum();
            prop_assert!((all as f64 - drawn as f64 * share).abs() < 1.0, "{} of {}", all, drawn);
            if pairs == 0 {
                prop_assert_eq!((all, batches.epochs(pools * 32)[language]), (0, 0.0));
                continue;
            }
            // All pairs occur equally often, except for those still to come in the current epoch.
            let (epochs, begun) = (all / pairs, all % pairs);
            prop_assert!((0..pairs).all(|pair| [epochs, epochs + 1].contains(&of(pair))));
            prop_assert_eq!((0..pairs).filter(|pair| of(*pair) > epochs).count(), begun);
            let counted = batches.epochs(pools * 32)[language];
            prop_assert!((counted - all as f64 / pairs as f64).abs() < 1e-9);
        }
    }

    #[test]
    fn property_a_batch_does_not_depend_on_what_was_asked_before(
        lengths in lengths(), numbers in prop::collection::vec(any::<u64>(), 1..6), seed: u64,
    ) {
        let set = set(&lengths);
        let batches = TrainPairs::new(&set, &options(200, 5.0, seed)).unwrap();
        let forwards: Vec<_> =
            numbers.iter().map(|number| batches.batch(*number).unwrap()).collect();
        for (number, batch) in numbers.iter().zip(&forwards).rev() {
            let fresh = TrainPairs::new(Arc::new(set.clone()), &options(200, 5.0, seed)).unwrap();
            prop_assert_eq!(&fresh.batch(*number).unwrap(), batch);
            prop_assert_eq!(&batches.batch(*number).unwrap(), batch);
            prop_assert!(batch.samples > 0);
        }
    }

    #[test]
    fn property_a_resumed_run_goes_on_as_if_it_had_not_stopped(
        lengths in lengths(), seed: u64, first in 0u64..100, second in 0u64..100,
    ) {
        let set = set(&lengths);
        let small = TrainPairs::new(&set, &options(150, 5.0, seed)).unwrap();
        let resumed = small.clone().starting_at(first, small.pairs_seen(first));
        let large = TrainPairs::new(&set, &options(340, 5.0, seed)).unwrap();
        let changed = large.clone().starting_at(first, small.pairs_seen(first));
        let then = first + second;
        let again = large.clone().starting_at(then, changed.pairs_seen(then));
        for number in then..then + 40 {
            prop_assert_eq!(resumed.batch(number).unwrap(), small.batch(number).unwrap());
            prop_assert_eq!(again.batch(number).unwrap(), changed.batch(number).unwrap());
            prop_assert_eq!(again.pairs_seen(number), changed.pairs_seen(number));
        }
        // The following whole pools equal those of a run that always had this size.
        let seen = changed.pairs_seen(then).div_ceil(large.pairs_per_batch());
        prop_assert_eq!(again.batch(then).unwrap(), large.batch(seen).unwrap());
    }

    #[test]
    fn property_validation_has_each_pair_once(
        lengths in lengths(), budget in 0usize..200, most in prop::option::of(1usize..50),
    ) {
        let set = set(&lengths);
        for language in (0..4).filter(|language| set.pairs(*language) > 0) {
            let validation = ValidationPairs::new(&set, language, budget, most).unwrap();
            let (announced, targets) = (validation.len(), validation.targets());
            let batches: Vec<_> = validation.collect();
            prop_assert_eq!(batches.len(), announced);
            prop_assert_eq!(batches.iter().map(PairBatch::target_tokens).sum::<usize>(), targets);
            for batch in &batches {
                prop_assert!(batch.samples == 1 || batch.samples * batch.target_length <= budget);
            }
            prop_assert!(
                batches.is_sorted_by_key(|batch| batch.target_length.max(batch.source_length))
            );
            let counts = count(&set, batches.into_iter());
            let pairs = set.pairs(language).min(most.unwrap_or(usize::MAX));
            prop_assert!(counts.into_iter().eq((0..pairs).map(|pair| ((language, pair), 1))));
        }
    }

    #[test]
    fn property_shuffled_sources_are_those_of_other_pairs(lengths in lengths(), seed: u64) {
        let set = set(&lengths);
        let shuffled = set.with_shuffled_sources(seed);
        prop_assert_eq!(&shuffled, &set.with_shuffled_sources(seed));
        prop_assert_eq!(shuffled.len(), set.len());
        for language in 0..4 {
            let pairs = set.pairs(language);
            let sources = |set: &PairSet| -> Vec<Vec<u32>> {
                (0..pairs).map(|pair| set.source(language, pair).to_vec()).collect()
            };
            let (mut before, mut after) = (sources(&set), sources(&shuffled));
            for pair in 0..pairs {
                prop_assert_eq!(shuffled.target(language, pair), set.target(language, pair));
                // Sources begin with their numbers, so no two are equal.
                prop_assert_eq!(before[pair] == after[pair], pairs == 1);
            }
            before.sort_unstable();
            after.sort_unstable();
            prop_assert_eq!(before, after);
        }
    }
}

#[test]
fn property_mini_batches_have_the_target_tokens_asked_for() {
    let set = set(&[sentences(4000, 1), sentences(700, 2), vec![], sentences(90, 3)]);
    for target_tokens in [400, 1500, 6000] {
        let batches = TrainPairs::new(&set, &options(target_tokens, 5.0, 7)).unwrap();
        let made: Vec<_> = (0..128).map(|number| batches.batch(number).unwrap()).collect();
        let all: usize = made.iter().map(PairBatch::target_tokens).sum();
        let mean = all as f64 / 128.0 / target_tokens as f64;
        assert!((0.95..1.05).contains(&mean), "{mean} of {target_tokens}");
        for batch in made {
            let padded = (batch.samples * batch.target_length) as f64 / target_tokens as f64;
            assert!((0.5..1.5).contains(&padded), "{padded} of {target_tokens}");
        }
    }
}

#[test]
fn property_there_is_little_padding() {
    // Sources of targets of one length differ by a half, as in a corpus of many languages.
    let apart = |(at, (source, target)): (usize, (usize, usize))| match at % 3 {
        0 => (source * 2 / 3, target),
        1 => (source * 3 / 2, target),
        _ => (source, target),
    };
    let set = [(4000, 1), (700, 2), (0, 0), (90, 3)]
        .map(|(pairs, seed)| sentences(pairs, seed).into_iter().enumerate().map(apart).collect());
    let set = self::set(&set);
    let batches = TrainPairs::new(&set, &options(2000, 5.0, 7)).unwrap();
    let (mut tokens, mut of_batches, mut of_parts) = (0, 0, 0);
    for number in 0..64 {
        let batch = batches.batch(number).unwrap();
        let longest = |side: &[i64], length: usize, none: i64| -> Vec<usize> {
            let real = |row: &[i64]| row.iter().filter(|token| **token != none).count();
            side.chunks(length).map(real).collect()
        };
        let sources = longest(&batch.sources, batch.source_length, i64::from(set.pad()));
        let targets = longest(&batch.targets, batch.target_length, IGNORE);
        tokens += sources.iter().chain(&targets).sum::<usize>();
        of_batches += batch.samples * (batch.source_length + batch.target_length);
        let quarter = batch.samples.div_ceil(4);
        for part in sources.chunks(quarter).chain(targets.chunks(quarter)) {
            of_parts += part.len() * part.iter().max().unwrap();
        }
    }
    let of_batches = of_batches as f64 / tokens as f64;
    let of_parts = of_parts as f64 / tokens as f64;
    assert!(of_batches < 1.22, "mini-batches are {of_batches} of their tokens");
    assert!(of_parts < 1.12, "quarters of mini-batches are {of_parts} of their tokens");
}

#[test]
fn property_pools_and_seeds_differ() {
    let set = set(&[sentences(3000, 1), sentences(500, 2), vec![], vec![]]);
    let pool = |seed, pool: u64| -> Vec<PairBatch> {
        let batches = TrainPairs::new(&set, &options(500, 5.0, seed)).unwrap();
        (pool * 32..(pool + 1) * 32).map(|number| batches.batch(number).unwrap()).collect()
    };
    let lengths =
        |batches: &[PairBatch]| batches.iter().map(|batch| batch.target_length).collect::<Vec<_>>();
    let (first, second, other) = (pool(1, 0), pool(1, 1), pool(2, 0));
    assert_ne!(first, second);
    assert_ne!(first, other);
    for pool in [first, second, other] {
        let steps = lengths(&pool);
        assert!(!steps.is_sorted(), "mini-batches are shuffled: {steps:?}");
        let falls = steps.windows(2).filter(|two| two[0] > two[1]).count();
        assert!((8..24).contains(&falls), "{steps:?}");
    }
}

#[test]
fn oracle_a_loader_makes_the_same() {
    let set = Arc::new(set(&[sentences(300, 1), sentences(50, 2), vec![], vec![]]));
    let batches = TrainPairs::new(set, &options(300, 5.0, 0)).unwrap();
    let ahead = batches.clone();
    let loader = Loader::start(5..9, LoaderSettings::default(), move |number| ahead.batch(number));
    for loaded in loader.unwrap() {
        let loaded = loaded.unwrap();
        assert_eq!(loaded.batch, batches.batch(loaded.step).unwrap());
    }
}

const GOLDEN: &str = "\
<zu>2sabcdefghijabcdefghij</s>__ | <s>2tabcdefghijabcdefghijabc | 2tabcdefghijabcdefghijabc</s>
<cs>35sabcdefghijabcdefghija</s> | <s>35tabcdefghijabcdefghij__ | 35tabcdefghijabcdefghij</s>__
<cs>35sabcdefghijabcdefghija</s> | <s>35tabcdefghijabcdefghij__ | 35tabcdefghijabcdefghij</s>__
<cs>1sabcdefghijabcdefghijab</s> | <s>1tabcdefghijabcdefghijab_ | 1tabcdefghijabcdefghijab</s>_
";

#[test]
fn golden_a_batch_stays_as_it_is() {
    // A run resumed with a newer release must get the same batches, so do not update these lines
    // lightly.
    let set = set(&[sentences(60, 1), sentences(20, 2), vec![], vec![(9, 8), (5, 6), (22, 25)]]);
    let batches = TrainPairs::new(&set, &options(90, 5.0, 42)).unwrap();
    let batch = batches.batch(53).unwrap();
    let text = |row: &[i64]| {
        let special =
            |id: i64| ["<|end|>", "_", "<s>", "</s>", "<cs>", "<de>", "<is>", "<zu>"][id as usize];
        let show = |token: &i64| match *token {
            IGNORE => "_".to_owned(),
            id @ 0..8 => special(id).to_owned(),
            id => vocabulary().tokenizer().decode(&[id as u32]).unwrap(),
        };
        row.iter().map(show).collect::<String>()
    };
    let mut found = String::new();
    for row in 0..batch.samples {
        let source = text(&batch.sources[row * batch.source_length..][..batch.source_length]);
        let input = text(&batch.inputs[row * batch.target_length..][..batch.target_length]);
        let target = text(&batch.targets[row * batch.target_length..][..batch.target_length]);
        found += &format!("{source} | {input} | {target}\n");
    }
    assert_eq!(found, GOLDEN);
    assert_eq!(batch.languages, [3, 0, 0, 0]);
    let samples: Vec<usize> =
        (0..32).map(|number| batches.batch(number).unwrap().samples).collect();
    assert_eq!(
        samples,
        [
            4, 3, 11, 3, 3, 3, 2, 3, 7, 14, 3, 10, 5, 12, 3, 7, 3, 14, 3, 7, 3, 8, 4, 3, 12, 4, 11,
            8, 4, 2, 9, 3
        ]
    );
}

#[test]
fn oracle_the_least_and_the_greatest() {
    let set = set(&[vec![(4, 5)], vec![], vec![], vec![]]);
    let batches = TrainPairs::new(&set, &options(12, 1.0, 0)).unwrap(); // Two pairs of 6 tokens.
    assert_eq!((batches.pairs_per_batch(), batches.shares()), (2, vec![1.0, 0.0, 0.0, 0.0]));
    for number in [0, 1, u64::MAX] {
        let batch = batches.batch(number).unwrap();
        assert_eq!((batch.samples, batch.source_length, batch.target_length), (2, 6, 6));
        assert_eq!(batch.sources[..6], batch.sources[6..]);
    }
    assert_eq!((batches.pairs_seen(0), batches.pairs_seen(3)), (0, 6));
    assert_eq!(batches.pairs_seen(u64::MAX), u64::MAX);
    let far = batches.clone().starting_at(7, u64::MAX);
    assert_eq!(far.batch(u64::MAX).unwrap().samples, 2);
    assert_eq!(batches.epochs(3)[0], 6.0);
}

#[test]
fn oracle_a_unigram_model_by_hand() {
    let vocabulary = vocabulary();
    let corpus = |targets: [&[&str]; 2]| {
        let pair = |target: &&str| Pair { source: "x".into(), target: (*target).into() };
        let language = |(code, targets): (&str, &[&str])| {
            let pairs: Vec<Pair> = targets.iter().map(pair).collect();
            Language { code: code.into(), train: pairs.clone(), validation: pairs }
        };
        ParallelCorpus { languages: ["cs", "de"].into_iter().zip(targets).map(language).collect() }
    };
    let set = |targets| PairSet::encode(vocabulary, &corpus(targets), Side::Train, 100).unwrap();
    // Counts are 3 for a, 1 for b and 2 for the end, plus one for each of 264 tokens.
    let train = set([&["aab"], &["a"]]);
    let found = unigram(&train, &set([&["ab", "c"], &[]]), None).unwrap();
    let p = |count: f64| (count / (6.0 + 264.0)).ln();
    let nats = -(p(4.0) + p(2.0) + p(1.0) + 2.0 * p(3.0)) / 5.0;
    assert_eq!(found.languages.len(), 2);
    assert_eq!((found.languages[0].code.as_str(), found.languages[0].target_tokens), ("cs", 5));
    assert!((found.languages[0].nats.unwrap() - nats).abs() < 1e-12);
    assert_eq!((found.languages[1].target_tokens, found.languages[1].perplexity()), (0, None));
    // Each language has the same weight, however many tokens it has.
    let both = unigram(&train, &set([&["ab", "c"], &["a"]]), None).unwrap();
    let first = unigram(&train, &set([&["ab", "c"], &["a"]]), Some(1)).unwrap();
    let only = unigram(&train, &set([&["ab"], &["a"]]), None).unwrap();
    assert_eq!(first, only, "the first pair of each language");
    let other = -(p(4.0) + p(3.0)) / 2.0;
    let of_both: Vec<f64> = both.languages.iter().filter_map(|language| language.nats).collect();
    assert!((of_both[0] - nats).abs() < 1e-12 && (of_both[1] - other).abs() < 1e-12);
}

#[test]
fn fault_sets_without_pairs() {
    let empty = set(&[vec![], vec![], vec![], vec![]]);
    let some = set(&[vec![(4, 5)], vec![], vec![], vec![]]);
    let error = TrainPairs::new(&empty, &options(100, 5.0, 0)).unwrap_err();
    assert!(error.to_string().contains("no pairs to train on"), "{error}");
    for error in [
        ValidationPairs::new(&some, 1, 100, None).unwrap_err(),
        ValidationPairs::new(&some, 0, 100, Some(0)).unwrap_err(),
        unigram(&some, &empty, None).unwrap_err(),
    ] {
        assert!(error.to_string().contains("no pairs to validate on"), "{error}");
    }
    let error = ValidationPairs::new(&some, 4, 100, None).unwrap_err();
    assert!(matches!(error, Error::Pairs(PairError::NoSuchLanguage { language: 4, languages: 4 })));
    assert!(unigram(&empty, &some, None).unwrap_err().to_string().contains("no pairs to train on"));
    let cut = PairSet::encode(vocabulary(), &corpus(&[vec![(4, 5)]]), Side::Train, 4).unwrap();
    let error = TrainPairs::new(&cut, &options(100, 5.0, 0)).unwrap_err().to_string();
    assert!(error.contains("and 1 were left out as too long"), "{error}");
}

#[test]
fn fault_options_out_of_range() {
    let set = set(&[vec![(4, 9)], vec![], vec![], vec![]]);
    let error = TrainPairs::new(&set, &options(14, 5.0, 0)).unwrap_err();
    assert!(matches!(error, Error::Pairs(PairError::FewTargetTokens { least: 15, .. })), "{error}");
    assert!(error.to_string().contains("has 10.0 tokens on average"), "{error}");
    assert!(TrainPairs::new(&set, &options(15, 5.0, 0)).is_ok());
    for target_tokens in [1 << 28, usize::MAX] {
        let error = TrainPairs::new(&set, &options(target_tokens, 5.0, 0)).unwrap_err();
        assert!(matches!(error, Error::Pairs(PairError::BatchShape { .. })), "{error}");
    }
    let error = TrainPairs::new(&set, &options(100, 0.0, 0)).unwrap_err();
    assert!(matches!(error, Error::Pairs(PairError::Temperature { .. })), "{error}");
}

#[test]
fn fault_sets_of_two_vocabularies() {
    let corpus = corpus(&[vec![(4, 5)], vec![(4, 5)], vec![], vec![]]);
    let options = VocabularyOptions { tokens: 300, ..VocabularyOptions::default() };
    let other = TranslationVocabulary::train(&corpus, &options).unwrap();
    let first = PairSet::encode(vocabulary(), &corpus, Side::Train, 100).unwrap();
    let second = PairSet::encode(&other, &corpus, Side::Validation, 100).unwrap();
    let error = unigram(&first, &second, None).unwrap_err().to_string();
    assert!(error.contains("encode both with the same"), "{error}");
}
