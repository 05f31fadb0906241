//! Tests of the encoder-decoder transformer: it is bit-identical at every K and every cut, padding
//! changes nothing, and it learns from the source. `sizes` compares its sizes with the paper's,
//! from shapes alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;
#[path = "translation/sizes.rs"]
mod sizes;

use common::{Named, assert_close, assert_same_bits, bits, matrix::Subject};
use gpipe::{
    Adam, Balance, CrossEntropy, Pipeline, PipelineBuilder, Remat, Schedule, Sequence, Sgd,
    TensorSpec,
    layers::{Attention, SourceEmbedding, TokenEmbedding},
};
use gpipe_core::splitmix::Stream;
use gpipe_models::Translation;
use tch::{Kind, Tensor};

const PAD: i64 = 0;
const BEGIN: i64 = 1;
const END: i64 = 2;
/// The first token that stands for a word.
const WORD: i64 = 3;
const IGNORED: i64 = -100;
/// Lengths of a source and of a target, in tokens.
const LENGTHS: [i64; 2] = [6, 5];

/// A model with two layers per stack, whose attention is narrower than the model.
fn small() -> Translation {
    Translation {
        source_vocabulary: 29,
        target_vocabulary: 23,
        pad: PAD,
        features: 16,
        heads: 2,
        head_size: 6,
        hidden: 24,
        encoder_layers: 2,
        decoder_layers: 2,
        dropout: 0.0,
        attention_dropout: 0.0,
        logit_clip: 0.0,
        tied: true,
        shared: false,
        split_blocks: true,
    }
}

fn specs(lengths: [i64; 2]) -> Vec<TensorSpec> {
    lengths.map(|length| TensorSpec::new([4, length], Kind::Int64)).into()
}

/// Rows of tokens, each padded to `length` with `fill`.
fn rows(rows: &[Vec<i64>], length: i64, fill: i64) -> Tensor {
    let filled = |row: &Vec<i64>| {
        let mut row = row.clone();
        row.resize(length as usize, fill);
        row
    };
    let all: Vec<i64> = rows.iter().flat_map(filled).collect();
    Tensor::from_slice(&all).reshape([rows.len() as i64, length])
}

/// Source, target and loss targets of these pairs of sentences, padded to these lengths.
fn tensors(pairs: &[(Vec<i64>, Vec<i64>)], lengths: [i64; 2]) -> (Vec<Tensor>, Tensor) {
    let sources: Vec<Vec<i64>> = pairs.iter().map(|(source, _)| source.clone()).collect();
    let with = |first: &[i64], sentence: &[i64], last: &[i64]| [first, sentence, last].concat();
    let inputs: Vec<_> = pairs.iter().map(|(_, target)| with(&[BEGIN], target, &[])).collect();
    let outputs: Vec<_> = pairs.iter().map(|(_, target)| with(&[], target, &[END])).collect();
    let given = vec![rows(&sources, lengths[0], PAD), rows(&inputs, lengths[1], PAD)];
    (given, rows(&outputs, lengths[1], IGNORED))
}

/// Pairs of sentences of all lengths, as a function of `seed`.
fn pairs(samples: i64, seed: u64) -> Vec<(Vec<i64>, Vec<i64>)> {
    let mut random = Stream::new(seed);
    let mut sentence = |most: i64, vocabulary: i64, fewest: usize| -> Vec<i64> {
        let length = fewest + random.below(most as usize - fewest + 1);
        (0..length).map(|_| WORD + random.below((vocabulary - WORD) as usize) as i64).collect()
    };
    (0..samples).map(|_| (sentence(LENGTHS[0], 29, 1), sentence(LENGTHS[1] - 1, 23, 0))).collect()
}

fn batch(samples: i64, seed: u64) -> (Vec<Tensor>, Tensor) {
    tensors(&pairs(samples, seed), LENGTHS)
}

fn builder(model: &Translation) -> PipelineBuilder {
    Pipeline::builder(model.build().unwrap(), specs(LENGTHS))
        .seed(5)
        .keep_gradients()
        .loss(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() })
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
}

/// The loss and the gradients of one step on all samples at once, in float64.
fn step(model: &Translation, (inputs, targets): &(Vec<Tensor>, Tensor)) -> (f64, Named) {
    let mut pipeline = builder(model).kind(Kind::Double).build().unwrap();
    let loss = pipeline.train_step(&inputs[..], targets).unwrap().loss;
    (loss, pipeline.gradients().unwrap())
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

fn matrix(model: Translation, may_skip: bool, build: &dyn Fn(PipelineBuilder) -> PipelineBuilder) {
    let smoothed = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
    let what = format!("{model:?}");
    Subject {
        model: &|| model.build().unwrap(),
        inputs: specs(LENGTHS),
        batch: &batch,
        build: &|builder| build(builder.loss(smoothed).clip_norm(1.0)),
        may_skip,
        what,
    }
    .matrix(&[(vec![7, 5], 3)]);
}

#[test]
fn transparency_of_a_translation_model() {
    let model = Translation { dropout: 0.1, attention_dropout: 0.1, logit_clip: 1.0, ..small() };
    matrix(model, false, &|builder| builder);
}

#[test]
fn transparency_of_whole_blocks_with_one_embedding_for_all() {
    let (shared, split_blocks) = (true, false);
    let model = Translation {
        source_vocabulary: 29,
        target_vocabulary: 29,
        shared,
        split_blocks,
        ..small()
    };
    matrix(Translation { dropout: 0.2, ..model }, false, &|builder| builder);
}

/// Non-uniform cuts of the 13 layers: between the halves of an encoder layer, before the target's
/// embedding, and on both sides of cross-attention.
#[test]
fn transparency_up_to_five_stages_and_of_evaluation() {
    let cuts: [&[usize]; 5] = [&[13], &[7, 6], &[3, 5, 5], &[2, 3, 2, 3, 3], &[5, 1, 1, 1, 5]];
    let model = Translation { dropout: 0.1, attention_dropout: 0.1, ..small() };
    for kind in [Kind::Float, Kind::BFloat16] {
        let mut expected: Option<(Vec<u64>, Named)> = None;
        for cut in cuts {
            for schedule in Schedule::SEARCHED_EXACTLY {
                for remat in [Remat::Always, Remat::Never, Remat::Segments(2)] {
                    let builder = builder(&model).kind(kind).stages(cut.len()).micro_batches(3);
                    let builder = builder.balance(Balance::Layers(cut.into()));
                    let mut pipeline =
                        builder.schedule(schedule.clone()).remat(remat).build().unwrap();
                    let (mut numbers, mut tensors) = (Vec::new(), Named::new());
                    for step in 0..3 {
                        let (inputs, targets) = batch(7, step);
                        let report = pipeline.train_step(&inputs[..], &targets).unwrap();
                        let evaluated = pipeline.evaluate(&inputs[..], &targets).unwrap();
                        numbers.extend([report.loss.to_bits(), evaluated.loss.to_bits()]);
                        tensors.extend(pipeline.gradients().unwrap());
                        let logits = pipeline.predict(&inputs[..]).unwrap().remove(0);
                        tensors.push(("logits".into(), logits));
                    }
                    let what = format!("{cut:?} {schedule} {remat} {kind:?}");
                    let (losses, all) =
                        expected.get_or_insert_with(|| (numbers.clone(), copies(&tensors)));
                    assert_eq!(numbers, *losses, "{what}");
                    assert_same_bits(&tensors, all, &what);
                }
            }
        }
    }
}

fn copies(named: &Named) -> Named {
    named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
}

#[test]
fn property_more_padding_changes_nothing() {
    let pairs = pairs(9, 3);
    for (model, dropout) in [(small(), 0.0), (Translation { split_blocks: false, ..small() }, 1e-9)]
    {
        // A dropout probability that rounds to 0 takes the unfused path and drops nothing.
        let model = Translation { attention_dropout: dropout, ..model };
        let (loss, gradients) = step(&model, &tensors(&pairs, LENGTHS));
        for lengths in [[LENGTHS[0] + 1, LENGTHS[1]], [LENGTHS[0], LENGTHS[1] + 3], [40, 20]] {
            let (found, others) = step(&model, &tensors(&pairs, lengths));
            assert!((found - loss).abs() <= 1e-13 * loss, "{lengths:?}: {found} {loss}");
            assert_close(&others, &gradients, 1e-11, &format!("{lengths:?}"));
        }
    }
}

#[test]
fn property_the_paddings_vector_is_without_effect_and_gradient() {
    for attention_dropout in [0.0, 0.2] {
        let model = Translation { tied: false, attention_dropout, ..small() };
        let (inputs, targets) = batch(9, 4);
        assert_eq!(inputs[0].eq(PAD).any().int64_value(&[]), 1);
        let train = |offset: f64| {
            let mut pipeline = builder(&model).build().unwrap();
            let mut moved = Named::new();
            for (name, value) in pipeline.parameters().unwrap() {
                if name.ends_with("embedding.tokens") {
                    let _ = value.narrow(0, PAD, 1).g_add_scalar_(offset);
                }
                moved.push((name, value));
            }
            pipeline.set_parameters(&moved).unwrap();
            let loss = pipeline.train_step(&inputs[..], &targets).unwrap().loss;
            (loss.to_bits(), pipeline.gradients().unwrap())
        };
        let (loss, gradients) = train(0.0);
        for offset in [1.0, -1e3] {
            let (found, others) = train(offset);
            assert_eq!(found, loss);
            assert_same_bits(&others, &gradients, &format!("{offset}"));
        }
        for name in ["source_embedding.tokens", "target_embedding.tokens"] {
            let (_, gradient) = gradients.iter().find(|(own, _)| own == name).unwrap();
            assert_eq!(largest(&gradient.narrow(0, PAD, 1)), 0.0, "{name}");
            assert!(largest(&gradient.narrow(0, WORD, 1)) > 0.0, "{name}");
        }
    }
}

#[test]
fn property_each_sentence_is_for_itself_and_sees_its_source_and_what_was_said() {
    let mut pipeline = builder(&small()).stages(2).build().unwrap();
    let (inputs, _) = batch(6, 8);
    let inputs = [inputs[0].clamp_min(WORD), inputs[1].clamp_min(WORD)];
    let mut logits = |source: &Tensor, target: &Tensor| {
        pipeline.predict(&[source.shallow_clone(), target.shallow_clone()][..]).unwrap().remove(0)
    };
    let other = |tokens: &Tensor, at: [i64; 2]| {
        let changed = tokens.copy();
        let mut place = changed.narrow(0, at[0], 1).narrow(1, at[1], 1);
        let _ = place.fill_(WORD + (place.int64_value(&[0, 0]) + 1 - WORD) % 20);
        changed
    };
    let before = logits(&inputs[0], &inputs[1]);
    // Only the fourth sentence changes, at all positions.
    let after = logits(&other(&inputs[0], [3, LENGTHS[0] - 1]), &inputs[1]);
    for sample in 0..6 {
        for position in 0..LENGTHS[1] {
            let at = |t: &Tensor| bits(&t.get(sample).get(position));
            assert_eq!(at(&after) == at(&before), sample != 3, "{sample}, {position}");
        }
    }
    // Only the second sentence changes, from that position on.
    let after = logits(&inputs[0], &other(&inputs[1], [1, 2]));
    for sample in 0..6 {
        for position in 0..LENGTHS[1] {
            let at = |t: &Tensor| bits(&t.get(sample).get(position));
            let same = sample != 1 || position < 2;
            assert_eq!(at(&after) == at(&before), same, "{sample}, {position}");
        }
    }
    // Word order matters.
    let flipped = logits(&inputs[0].flip([1]), &inputs[1]);
    assert!(largest(&(flipped - before)) > 1e-3);
}

/// Changes of the first encoder layer's output when the fourth of six tokens changes. The last
/// token is padding.
#[test]
fn property_the_encoder_sees_both_ways_and_no_padding() {
    let states = |causal: bool, changed: usize| -> Vec<Vec<u64>> {
        let tokens = TokenEmbedding { vocabulary: 29, features: 16, dropout: 0.0, tie: None };
        let attention = Attention {
            features: 16,
            heads: 2,
            head_size: 6,
            causal,
            attention_dropout: 0.0,
            dropout: 0.0,
            std: 0.3,
            output_std: 0.3,
        };
        let model = Sequence::new()
            .push("embedding", SourceEmbedding { tokens, pad: PAD })
            .push("attention", attention);
        let mut source = vec![3, 4, 5, 6, 7, PAD];
        if source[changed] != PAD {
            source[changed] = 8;
        }
        let given = [rows(&[source], 6, PAD), rows(&[vec![BEGIN]], 1, PAD)];
        let specs: Vec<_> = given.iter().map(TensorSpec::of).collect();
        let mut outputs =
            Pipeline::builder(model, specs).build().unwrap().predict(&given[..]).unwrap();
        assert_eq!(
            outputs.iter().map(Tensor::kind).collect::<Vec<_>>(),
            [Kind::Float, Kind::Bool, Kind::Int64]
        );
        let states = outputs.swap_remove(0);
        (0..6).map(|position| bits(&states.get(0).get(position))).collect()
    };
    for (causal, reached) in [(false, [true; 6]), (true, [false, false, false, true, true, true])] {
        let (before, after) = (states(causal, 5), states(causal, 3));
        let changed: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
        assert_eq!(changed, reached, "causal: {causal}");
    }
}

#[test]
fn oracle_clipped_logits() {
    let clipped = |logit_clip: f64| {
        let model = Translation { logit_clip, ..small() };
        let (inputs, targets) = batch(9, 2);
        let mut pipeline = builder(&model).build().unwrap();
        let logits = pipeline.predict(&inputs[..]).unwrap().remove(0);
        let loss = pipeline.train_step(&inputs[..], &targets).unwrap().loss;
        (logits, loss, pipeline.gradients().unwrap())
    };
    let (free, loss, gradients) = clipped(0.0);
    let (logits, found, others) = clipped(1e3);
    assert!(bits(&logits) == bits(&free) && found == loss);
    assert_same_bits(&others, &gradients, "a clip that is never reached");
    let (logits, ..) = clipped(0.5);
    assert!(bits(&logits) == bits(&free.clamp(-0.5, 0.5)) && largest(&free) > 1.0);
    // All logits are clipped, so no gradient is left.
    let (_, loss, gradients) = clipped(1e-9);
    assert!((loss - 23_f64.ln()).abs() < 1e-6, "{loss}");
    assert!(gradients.iter().all(|(_, gradient)| largest(gradient) == 0.0));
}

#[test]
fn fault_a_source_of_padding_alone_and_tokens_of_no_vocabulary() {
    let mut pipeline = builder(&small()).stages(2).micro_batches(2).build().unwrap();
    let (inputs, targets) = batch(5, 1);
    let mut told = |source: &Tensor, target: &Tensor| {
        let inputs = [source.shallow_clone(), target.shallow_clone()];
        pipeline.train_step(&inputs[..], &targets).unwrap_err().to_string()
    };
    let says = |error: String, texts: &[&str]| {
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    };
    let empty = inputs[0].copy();
    let _ = empty.narrow(0, 4, 1).fill_(PAD);
    says(
        told(&empty, &inputs[1]),
        &["layer 'source_embedding'", "sample 4 of the mini-batch", "all padding (token 0)"],
    );
    let foreign = inputs[0].copy();
    let _ = foreign.narrow(0, 2, 1).fill_(29);
    says(told(&foreign, &inputs[1]), &["'source_embedding'", "token 29", "vocabulary 0..29"]);
    let foreign = inputs[1].copy();
    let _ = foreign.narrow(0, 2, 1).fill_(23);
    says(told(&inputs[0], &foreign), &["'target_embedding'", "token 23", "vocabulary 0..23"]);
    // The pipeline still works after these errors.
    pipeline.train_step(&inputs[..], &targets).unwrap();
}

#[test]
fn fault_inputs_that_are_no_source_and_target() {
    let built = |inputs: Vec<TensorSpec>| {
        let builder = Pipeline::builder(small().build().unwrap(), inputs).stages(2);
        let builder = builder.loss(CrossEntropy::default()).optimizer(Sgd::new(0.1));
        builder.build().err().unwrap().to_string()
    };
    let tokens = |shape: &[i64]| TensorSpec::new(shape, Kind::Int64);
    let says = |error: String, text: &str| assert!(error.contains(text), "{error}");
    says(built(vec![tokens(&[4, 6])]), "a source and a target, it got 1 tensors");
    says(built(vec![tokens(&[4, 6]), tokens(&[4])]), "int64 tokens [samples, positions]");
    let floats = TensorSpec::new([4, 6], Kind::Float);
    says(built(vec![floats, tokens(&[4, 5])]), "it got float32 [4, 6]");
    says(built(vec![tokens(&[4, 6]), tokens(&[3, 5])]), "differ in samples");
}

/// Sentences of 10 words whose target is the reversed source.
fn reversed(samples: i64, seed: u64) -> Vec<(Vec<i64>, Vec<i64>)> {
    let mut random = Stream::new(seed);
    let mut one = || {
        let length = 1 + random.below(4);
        let source: Vec<i64> = (0..length).map(|_| WORD + random.below(10) as i64).collect();
        let target = source.iter().rev().copied().collect();
        (source, target)
    };
    (0..samples).map(|_| one()).collect()
}

#[test]
fn oracle_it_learns_to_reverse_its_source() {
    let model = Translation { features: 32, head_size: 16, hidden: 64, ..small() };
    let builder = builder(&model).stages(2).micro_batches(2);
    let builder = builder.optimizer(Adam { lr: 3e-3, ..Adam::default() });
    let mut pipeline = builder.loss(CrossEntropy::default()).build().unwrap();
    for step in 0..400 {
        let (inputs, targets) = tensors(&reversed(32, 1000 + step), LENGTHS);
        pipeline.train_step(&inputs[..], &targets).unwrap();
    }
    let unseen = reversed(200, 1);
    let (inputs, targets) = tensors(&unseen, LENGTHS);
    let loss = pipeline.evaluate(&inputs[..], &targets).unwrap().loss;
    // Each target gets the next pair's source.
    let sources = unseen.iter().cycle().skip(1);
    let shuffled: Vec<_> = unseen
        .iter()
        .zip(sources)
        .map(|((_, target), (s, _))| (s.clone(), target.clone()))
        .collect();
    let (inputs, targets) = tensors(&shuffled, LENGTHS);
    let blind = pipeline.evaluate(&inputs[..], &targets).unwrap().loss;
    assert!(loss < 0.2 && blind > 2.0, "{loss} with its source, {blind} with another");
}

/// At every cut, floats, booleans and integers cross the edge.
#[test]
fn transparency_of_every_cut() {
    let model = Translation { dropout: 0.1, ..small() };
    let (inputs, targets) = batch(5, 0);
    let gradients = |cut: Option<usize>| {
        let balance = cut.map_or(vec![13], |cut| vec![cut, 13 - cut]);
        let builder = builder(&model).kind(Kind::BFloat16).stages(balance.len()).micro_batches(2);
        let mut pipeline = builder.balance(Balance::Layers(balance)).build().unwrap();
        pipeline.train_step(&inputs[..], &targets).unwrap();
        pipeline.gradients().unwrap()
    };
    let expected = gradients(None);
    for cut in 1..13 {
        assert_same_bits(&gradients(Some(cut)), &expected, &format!("cut after {cut} layers"));
    }
}
