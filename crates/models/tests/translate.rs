//! Decoding with cached keys and values, on one stage and on several.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use gpipe::{
    Balance, Pipeline, Schedule, TensorSpec,
    decode::{BeamSearch, GroupStep, Hypothesis, NextLogits, Sentence},
};
use gpipe_models::{CachedLogits, RecomputedLogits, Transformer, Translation};
use tch::{Kind, Tensor};

const PAD: i64 = 1;
const BEGIN: i64 = 2;
const END: i64 = 3;
const VOCABULARY: i64 = 29;

fn model(split_blocks: bool) -> Translation {
    Translation {
        source_vocabulary: VOCABULARY,
        target_vocabulary: VOCABULARY,
        pad: PAD,
        features: 16,
        heads: 2,
        head_size: 6,
        hidden: 24,
        encoder_layers: 2,
        decoder_layers: 2,
        dropout: 0.1,
        attention_dropout: 0.0,
        logit_clip: 20.0,
        tied: true,
        shared: false,
        split_blocks,
    }
}

fn pipeline(split_blocks: bool, balance: &[usize], kind: Kind) -> Pipeline {
    let inputs = vec![TensorSpec::new([2, 9], Kind::Int64); 2];
    Pipeline::builder(model(split_blocks).build().unwrap(), inputs)
        .stages(balance.len())
        .balance(Balance::Layers(balance.to_vec()))
        .micro_batches(2)
        .schedule(Schedule::OneFOneB)
        .kind(kind)
        .seed(5)
        .build()
        .unwrap()
}

/// Padded sources of several lengths, in three groups.
fn sources() -> Vec<Tensor> {
    let row = |seed: i64, length: i64, padded: i64| {
        let tokens = (0..length - 1).map(move |i| 4 + (seed * 31 + i * 17) % (VOCABULARY - 4));
        let rest = std::iter::repeat_n(PAD, (padded - length) as usize);
        tokens.chain([END]).chain(rest).collect::<Vec<i64>>()
    };
    let group = |seed: i64, lengths: &[i64]| {
        let padded = *lengths.iter().max().unwrap();
        let rows = lengths.iter().enumerate();
        let rows: Vec<i64> = rows.flat_map(|(i, &l)| row(seed + i as i64, l, padded)).collect();
        Tensor::from_slice(&rows).reshape([lengths.len() as i64, padded])
    };
    vec![group(1, &[3, 5, 4]), group(10, &[7]), group(20, &[9, 2])]
}

fn sentences() -> Vec<Vec<Sentence>> {
    let sentence = |most| Sentence { begin: vec![BEGIN], most };
    vec![vec![sentence(7), sentence(3), sentence(9)], vec![sentence(8)], vec![sentence(5); 2]]
}

fn search(beam: usize) -> BeamSearch {
    BeamSearch { beam, length_penalty: 0.6, end: END, never: vec![0, PAD, BEGIN] }
}

type Found = Vec<Vec<Vec<Hypothesis>>>;

fn cached(beam: usize, pipeline: &mut Pipeline) -> Found {
    search(beam).run(&sentences(), &mut CachedLogits::new(pipeline, sources())).unwrap()
}

fn recomputed(beam: usize, pipeline: &mut Pipeline) -> Found {
    search(beam).run(&sentences(), &mut RecomputedLogits::new(pipeline, sources())).unwrap()
}

const CUTS: [&[usize]; 4] = [&[13], &[5, 8], &[3, 4, 6], &[1, 2, 3, 4, 3]];

#[test]
fn oracle_beam_search_on_several_stages_equals_one_stage() {
    for beam in [1, 3] {
        let expected = cached(beam, &mut pipeline(true, CUTS[0], Kind::Float));
        assert!(expected.iter().flatten().any(|found| found[0].tokens.len() > 2));
        for balance in &CUTS[1..] {
            assert_eq!(cached(beam, &mut pipeline(true, balance, Kind::Float)), expected);
        }
    }
}

#[test]
fn oracle_cached_equals_recomputed() {
    for (split_blocks, balance) in [(true, CUTS[2]), (false, &[2, 3, 2][..])] {
        for beam in [1, 4] {
            let mut pipeline = pipeline(split_blocks, balance, Kind::Double);
            let (a, b) = (cached(beam, &mut pipeline), recomputed(beam, &mut pipeline));
            for (a, b) in a.iter().flatten().flatten().zip(b.iter().flatten().flatten()) {
                assert_eq!(a.tokens, b.tokens);
                // Products of one row and of several rows round differently.
                assert!((a.log_probability - b.log_probability).abs() < 1e-11);
            }
            assert_eq!(a.iter().flatten().flatten().count(), b.iter().flatten().flatten().count());
        }
    }
}

#[test]
fn oracle_a_beam_of_one_is_greedy() {
    let mut pipeline = pipeline(true, CUTS[1], Kind::Double);
    let found = cached(1, &mut pipeline);
    for (group, (source, sentences)) in sources().iter().zip(sentences()).enumerate() {
        for (row, sentence) in sentences.iter().enumerate() {
            let source = source.narrow(0, row as i64, 1);
            let mut prefix = vec![BEGIN];
            while prefix.len() < sentence.most {
                let target = Tensor::from_slice(&prefix).reshape([1, -1]);
                let outputs = pipeline.predict(vec![source.shallow_clone(), target]).unwrap();
                let logits = outputs[0].select(1, -1).select(0, 0);
                for never in [0, PAD, BEGIN] {
                    let _ = logits.get(never).fill_(f64::NEG_INFINITY);
                }
                let token = logits.argmax(0, false).int64_value(&[]);
                if token == END {
                    break;
                }
                prefix.push(token);
            }
            assert_eq!(found[group][row][0].tokens, prefix[1..], "group {group} sentence {row}");
        }
    }
}

/// A decoder-only model also decodes with its cache: a prefix, then one token at a time.
#[test]
fn oracle_a_language_model_decodes_as_it_predicts() {
    let model = Transformer {
        vocabulary: VOCABULARY,
        positions: 12,
        features: 16,
        heads: 2,
        hidden: 24,
        blocks: 2,
        dropout: 0.1,
        attention_dropout: 0.0,
        tied: true,
        split_blocks: true,
        gelu: Default::default(),
    };
    let tokens = |count: i64, from: i64| -> Vec<i64> {
        (0..count)
            .flat_map(|row| (0..12).map(move |i| (row * 7 + i * 5 + from) % VOCABULARY))
            .collect()
    };
    let all = Tensor::from_slice(&tokens(3, 0)).reshape([3, 12]);
    for balance in [&[6][..], &[2, 4]] {
        let mut pipeline = Pipeline::builder(
            model.clone().build().unwrap(),
            TensorSpec::new([3, 12], Kind::Int64),
        )
        .stages(balance.len())
        .balance(Balance::Layers(balance.to_vec()))
        .kind(Kind::Double)
        .build()
        .unwrap();
        let whole = pipeline.predict(&all).unwrap().remove(0);
        let mut decoding = pipeline.decoding();
        let mut step = |from: i64, count: i64| {
            let inputs = vec![all.narrow(1, from, count)];
            let step = GroupStep { group: 0, inputs, rows: None };
            decoding.step(vec![step]).unwrap().remove(0).remove(0)
        };
        let parts: Vec<Tensor> =
            [(0, 5)].into_iter().chain((5..12).map(|i| (i, 1))).map(|(i, n)| step(i, n)).collect();
        let apart = (Tensor::cat(&parts, 1) - &whole).abs().max().double_value(&[]);
        assert!(apart < 1e-12, "{apart}");
        // No more positions are left.
        let one = || vec![GroupStep { group: 0, inputs: vec![all.narrow(1, 0, 1)], rows: None }];
        assert!(decoding.step(one()).unwrap_err().to_string().contains("12 positions"));
    }
}

#[test]
fn fault_steps_that_do_not_fit_are_refused_and_the_decoding_goes_on() {
    let mut pipeline = pipeline(true, CUTS[1], Kind::Float);
    let source = || Tensor::from_slice(&[5_i64, END, 6, END]).reshape([2, 2]);
    let tokens = |count: i64| Tensor::full([count, 1], BEGIN, (Kind::Int64, tch::Device::Cpu));
    let nothing = |count: i64| Tensor::zeros([count, 0], (Kind::Int64, tch::Device::Cpu));
    let mut decoding = pipeline.decoding();
    let mut step = |source: Tensor, target: Tensor, rows: Option<Vec<i64>>| {
        let step = GroupStep { group: 3, inputs: vec![source, target], rows };
        decoding.step(vec![step]).map_err(|error| error.to_string())
    };
    let refused = |result: Result<Vec<Vec<Tensor>>, String>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.contains(text) && error.contains("group 3"), "{error}");
    };
    refused(step(source(), tokens(2), Some(vec![0, 1])), "no step before its first");
    refused(step(source(), nothing(2), None), "no new positions");
    refused(step(source(), tokens(3), None), "3 samples");
    let first = step(source(), tokens(2), None).unwrap();
    assert_eq!(first[0][0].size(), [2, 1, VOCABULARY]);
    refused(step(nothing(5), tokens(5), None), "say from which");
    refused(step(nothing(2), tokens(2), Some(vec![0])), "1 rows for 2");
    refused(step(nothing(2), tokens(2), Some(vec![0, 2])), "outside of the 2");
    // Takes the second sample twice and the first once.
    let next = step(nothing(3), tokens(3), Some(vec![1, 1, 0])).unwrap();
    let rows: Vec<Tensor> = (0..3).map(|row| next[0][0].select(0, row)).collect();
    assert_eq!(rows[0], rows[1]);
    assert_ne!(rows[0], rows[2]);
    assert!(decoding.step(Vec::new()).unwrap().is_empty());
    // The second would have seen the cache of the first.
    let same = || GroupStep { group: 3, inputs: vec![nothing(3), tokens(3)], rows: None };
    let error = decoding.step(vec![same(), same()]).unwrap_err().to_string();
    assert!(error.contains("group 3 is there twice"), "{error}");
}

/// Any other operation of the pipeline ends a decoding. Its caches are dropped, and the next
/// decoding starts with a first step.
#[test]
fn property_a_decoding_leaves_nothing_behind() {
    let mut pipeline = pipeline(true, CUTS[1], Kind::Float);
    let before = cached(2, &mut pipeline);
    assert_eq!(cached(2, &mut pipeline), before, "a second decoding begins anew");
    recomputed(2, &mut pipeline);
    assert_eq!(cached(2, &mut pipeline), before);
    let mut logits = CachedLogits::new(&mut pipeline, sources());
    assert!(logits.next(&[]).unwrap().is_empty());
}
