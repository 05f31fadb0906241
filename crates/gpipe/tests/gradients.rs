//! Family `oracle_gradient_*`: every layer's backward against central differences of the loss in
//! float64, through the whole pipeline (two stages, ragged micro-batches, re-materialization). A
//! layer before the one under test makes that one's input depend on parameters, so input gradients
//! are checked, too.
//!
//! Catches a gradient that is cut (a detached tensor, a kernel without a backward), a wrong sign or
//! factor, a mask that differs between forward, re-materialization and backward, and a skip that
//! loses its gradient.
//!
//! Tolerance: with h = 1e-5, a central difference has a truncation error of h^2 / 6 f''' = 1.7e-11
//! f'''. The rounding of two losses adds 2e-16 / h = 2e-11 of the loss, times the few roundings
//! that do not cancel. Losses here are below 4 and third derivatives below 50, so 1e-9 holds with
//! little to spare. It is 1e-7 of a typical gradient. Each case asserts that no parameter's
//! gradient is so small that 1e-9 would pass anything.

// clippy.toml allows these in test functions, but not in shared helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::common;

use common::{Named, assert_same_bits, bits, uniform};
use gpipe::{
    Balance, CrossEntropy, Layer, MeanSquaredError, Pipeline, Remat, Sequence, Sgd, TensorSpec,
    layers::{
        Activation, Attention, Block, CrossAttention, DecoderBlock, Dropout, Embedding, Head,
        LayerNorm, Linear, Mlp, Pop, SourceEmbedding, Stash, TargetEmbedding, TokenEmbedding,
    },
};
use tch::{Kind, Tensor};

const TOLERANCE: f64 = 1e-9;
/// Number of elements to perturb in each parameter; smaller parameters are perturbed entirely.
const SAMPLED: usize = 20;
const SAMPLES: i64 = 5;
const D: i64 = 6;

/// Moves parameters away from zeros and ones, which would hide many mistakes.
fn move_away(pipeline: &mut Pipeline) -> Named {
    let moved = |(at, (name, value)): (usize, (String, Tensor))| {
        let offset = uniform(&value.size(), 100 + at as u64, Kind::Double) * 0.4;
        (name, value + offset)
    };
    let values: Named = pipeline.parameters().unwrap().into_iter().enumerate().map(moved).collect();
    pipeline.set_parameters(&values).unwrap();
    values
}

/// A model, a mini-batch, and the parameters at which gradients are checked.
struct Case {
    model: Sequence,
    inputs: Vec<Tensor>,
    targets: Tensor,
}

impl Case {
    /// `model` on inputs [samples, 3, D] with mean squared error.
    fn new(model: Sequence) -> Self {
        Self::shaped(model, &[SAMPLES, 3, D])
    }

    fn shaped(model: Sequence, shape: &[i64]) -> Self {
        let (input, targets) = (uniform(shape, 1, Kind::Double), uniform(shape, 2, Kind::Double));
        Self { model, inputs: vec![input], targets }
    }

    /// A linear layer, then the layer under test.
    fn of(layer: impl Layer) -> Self {
        Self::new(Sequence::new().push("before", Linear::new(D, D)).push("layer", layer))
    }

    /// A pipeline with learning rate 0, so that a step changes nothing. Everything is recomputed:
    /// the loss comes from the first forward, the gradient from the second.
    fn pipeline(&self) -> Pipeline {
        let specs: Vec<_> = self.inputs.iter().map(TensorSpec::of).collect();
        let builder = Pipeline::builder(self.model.clone(), specs)
            .stages(self.model.len().min(2))
            .balance(Balance::Uniform)
            .micro_batches(2)
            .remat(Remat::Always)
            .kind(Kind::Double)
            .seed(3)
            .input_gradients()
            .keep_gradients()
            .optimizer(Sgd::new(0.0));
        match self.targets.kind() {
            Kind::Int64 => builder.loss(CrossEntropy::default()).build().unwrap(),
            _ => builder.loss(MeanSquaredError).build().unwrap(),
        }
    }

    fn check(&self) {
        let mut pipeline = self.pipeline();
        let values = move_away(&mut pipeline);
        let loss = pipeline.evaluate(&self.inputs[..], &self.targets).unwrap().loss;
        assert!(loss.abs() < 4.0, "the tolerance is for losses below 4: {loss}");
        let compared = pipeline.finite_differences(&self.inputs[..], &self.targets, SAMPLED);
        let compared = compared.unwrap();
        for (name, value) in &values {
            let own: Vec<_> = compared.iter().filter(|own| own.name == *name).collect();
            assert_eq!(own.len(), SAMPLED.min(value.numel()), "every parameter has a gradient");
            let largest = own.iter().map(|own| own.gradient.abs()).fold(0.0, f64::max);
            assert!(largest > 1e-3, "{name} has next to no gradient");
        }
        let floats = self.inputs.iter().filter(|input| input.kind() == Kind::Double);
        let inputs = compared.iter().filter(|own| own.name.starts_with("input "));
        assert_eq!(inputs.count(), floats.map(|own| SAMPLED.min(own.numel())).sum::<usize>());
        for own in compared {
            assert!(own.error() <= TOLERANCE, "{own:?}");
        }
        assert_same_bits(&pipeline.parameters().unwrap(), &values, "parameters are as before");
    }
}

fn attention(attention_dropout: f64, dropout: f64) -> Attention {
    Attention {
        features: D,
        heads: 2,
        head_size: 3,
        causal: true,
        attention_dropout,
        dropout,
        std: 0.3,
        output_std: 0.3,
    }
}

fn mlp(dropout: f64) -> Mlp {
    Mlp { features: D, hidden: 8, dropout, std: 0.3, output_std: 0.3, gelu: Default::default() }
}

fn embedding(dropout: f64, positions: i64, tie: Option<&str>) -> Embedding {
    let tie = tie.map(Into::into);
    Embedding { vocabulary: 7, features: D, positions, std: 0.5, dropout, tie }
}

/// Tokens [samples, 3]. Each of the 7 tokens occurs, some of them several times in one sample.
fn tokens() -> Tensor {
    Tensor::from_slice(&[0_i64, 1, 1, 2, 3, 4, 5, 6, 0, 3, 3, 3, 6, 1, 2]).reshape([SAMPLES, 3])
}

/// A token embedding, optionally followed by other layers that keep its shape.
fn of_tokens(model: Sequence) -> Case {
    Case { inputs: vec![tokens()], ..Case::new(model) }
}

#[test]
fn oracle_gradient_linear() {
    Case::of(Linear::new(D, D)).check();
    Case::of(Linear { inputs: D, outputs: D, bias: false }).check();
    // Two axes instead of three.
    let model = Sequence::new().push("first", Linear::new(D, 4)).push("second", Linear::new(4, D));
    Case::shaped(model, &[SAMPLES, D]).check();
}

#[test]
fn oracle_gradient_activations() {
    Case::of(Activation::Gelu).check();
    Case::of(Activation::Tanh).check();
}

#[test]
fn oracle_gradient_relu() {
    let case = Case::of(Activation::Relu);
    // All activation inputs are so far from 0 that perturbing by H cannot cross it. Inputs of the
    // model are below 1, so no activation input moves by more than H.
    let linear = Case::new(Sequence::new().push("before", Linear::new(D, D)));
    let mut pipeline = linear.pipeline();
    move_away(&mut pipeline);
    let before = pipeline.predict(&case.inputs[..]).unwrap().remove(0);
    assert!(before.abs().min().double_value(&[]) > 1e-4); // ten steps of a difference
    assert!(
        before.lt(0.0).any().int64_value(&[]) == 1 && before.gt(0.0).any().int64_value(&[]) == 1
    );
    case.check();
}

#[test]
fn oracle_gradient_norm() {
    Case::of(LayerNorm { features: D }).check();
}

#[test]
fn oracle_gradient_embedding() {
    of_tokens(Sequence::new().push("embedding", embedding(0.0, 0, None))).check();
    of_tokens(Sequence::new().push("embedding", embedding(0.0, 4, None)).layer(Activation::Tanh))
        .check_with_unused_positions();
    of_tokens(Sequence::new().push("embedding", embedding(0.3, 3, None))).check();
}

impl Case {
    /// Positions beyond the tokens' length have gradient 0, and so must their differences.
    fn check_with_unused_positions(&self) {
        self.check();
        let mut pipeline = self.pipeline();
        pipeline.train_step(&self.inputs[..], &self.targets).unwrap();
        let grads = pipeline.gradients().unwrap();
        let (name, positions) = &grads[1];
        assert_eq!(name, "embedding.positions");
        assert!(positions.narrow(0, 3, 1).abs().max().double_value(&[]) == 0.0);
    }
}

#[test]
fn oracle_gradient_attention() {
    Case::of(attention(0.0, 0.0)).check();
}

#[test]
fn oracle_gradient_attention_with_dropout() {
    Case::of(attention(0.3, 0.0)).check();
    Case::of(attention(0.2, 0.2)).check();
}

#[test]
fn oracle_gradient_mlp() {
    Case::of(mlp(0.0)).check();
    Case::of(mlp(0.3)).check();
}

#[test]
fn oracle_gradient_block() {
    Case::of(Block { attention: attention(0.0, 0.0), mlp: mlp(0.0) }).check();
    Case::of(Block { attention: attention(0.2, 0.1), mlp: mlp(0.2) }).check();
}

fn head(tie: Option<&str>) -> Head {
    Head { features: D, vocabulary: 7, std: 0.3, logit_clip: 0.0, tie: tie.map(Into::into) }
}

/// Targets, some of which are ignored.
fn classes() -> Tensor {
    let classes = [1_i64, -100, 3, 4, 0, -100, 6, 5, 2, -100, 1, 1, 0, 6, 3];
    Tensor::from_slice(&classes).reshape([SAMPLES, 3])
}

#[test]
fn oracle_gradient_head_and_cross_entropy() {
    let model = Sequence::new().push("before", Linear::new(D, D)).push("head", head(None));
    Case { targets: classes(), ..Case::new(model) }.check();
}

#[test]
fn oracle_gradient_tied_embedding_and_head() {
    let tie = Some("tokens");
    let model = Sequence::new()
        .push("embedding", embedding(0.0, 3, tie))
        .push("mlp", mlp(0.0))
        .push("head", head(tie));
    Case { inputs: vec![tokens()], targets: classes(), ..Case::new(model) }.check();
}

const PAD: i64 = 6;

/// Sources of 4 tokens, padded in all samples but the first, and targets of 3.
fn sentences() -> Vec<Tensor> {
    let source = [0_i64, 1, 1, 2, 3, 4, 5, 6, 0, 6, 6, 6, 2, 5, 6, 6, 4, 0, 1, 6];
    vec![Tensor::from_slice(&source).reshape([SAMPLES, 4]), tokens()]
}

/// An encoder-decoder with one layer each, all possible ties, and attention wider than the model.
fn encoder_decoder(whole: bool, attention_dropout: f64, dropout: f64) -> Case {
    let tie = Some("tokens".to_owned());
    let tokens = TokenEmbedding { vocabulary: 7, features: D, dropout, tie: tie.clone() };
    let (heads, head_size, std, output_std) = (2, 4, 0.3, 0.3);
    let own = Attention { head_size, ..attention(attention_dropout, dropout) };
    let seen = Attention { causal: false, ..own };
    let cross = CrossAttention {
        features: D,
        heads,
        head_size,
        attention_dropout,
        dropout,
        std,
        output_std,
    };
    let mlp = mlp(dropout);
    let source = SourceEmbedding { tokens: tokens.clone(), pad: PAD };
    let mut model = Sequence::new().push("source", source);
    model = match whole {
        true => model.push("encoder", Block { attention: seen, mlp }),
        false => model.push("encoder.attention", seen).push("encoder.mlp", mlp),
    };
    model = model.push("target", TargetEmbedding { tokens });
    model = match whole {
        true => {
            let (self_attention, cross_attention) = (own, cross);
            model.push("decoder", DecoderBlock { self_attention, cross_attention, mlp })
        }
        false => model
            .push("decoder.self_attention", own)
            .push("decoder.cross_attention", cross)
            .push("decoder.mlp", mlp),
    };
    // Some logits are beyond 2, others are not.
    model = model.push("softmax", Head { logit_clip: 2.0, ..head(tie.as_deref()) });
    Case { inputs: sentences(), targets: classes(), ..Case::new(model) }
}

#[test]
fn oracle_gradient_encoder_decoder() {
    encoder_decoder(false, 0.0, 0.0).check();
    encoder_decoder(true, 0.0, 0.0).check();
}

#[test]
fn oracle_gradient_encoder_decoder_with_dropout() {
    encoder_decoder(false, 0.3, 0.1).check();
    encoder_decoder(true, 0.2, 0.2).check();
}

#[test]
fn oracle_gradient_some_logits_are_clipped_in_these_cases() {
    let case = encoder_decoder(false, 0.0, 0.0);
    let mut pipeline = case.pipeline();
    move_away(&mut pipeline);
    let logits = pipeline.predict(&case.inputs[..]).unwrap().remove(0).abs();
    let clipped = logits.eq(2.0).sum(Kind::Int64).int64_value(&[]);
    assert!((3..logits.numel() as i64 / 2).contains(&clipped), "{clipped} of {}", logits.numel());
}

#[test]
fn oracle_gradient_dropout() {
    Case::of(Dropout { p: 0.4 }).check();
}

#[test]
fn oracle_gradient_skip_across_stages_and_within() {
    // Uniform cuts put layers 0..3 on stage 0, so 'far' crosses stages and 'near' does not. Both
    // stash the same value.
    let model = Sequence::new()
        .push("first", Linear::new(D, D))
        .push("far", Stash::new("far"))
        .push("near", Stash::new("near"))
        .push("tanh", Activation::Tanh)
        .push("second", Linear::new(D, D))
        .push("near pop", Pop::new("near"))
        .push("gelu", Activation::Gelu)
        .push("far pop", Pop::new("far"));
    Case::new(model).check();
}

#[test]
fn oracle_gradient_masks_are_of_the_step() {
    for model in [
        Sequence::new().push("before", Linear::new(D, D)).push("layer", Dropout { p: 0.4 }),
        Sequence::new().push("before", Linear::new(D, D)).push("layer", attention(0.3, 0.0)),
        Sequence::new().push("before", Linear::new(D, D)).push("layer", mlp(0.3)),
    ] {
        let case = Case::new(model);
        let losses = |mut pipeline: Pipeline| {
            let step =
                |_| pipeline.train_step(&case.inputs[..], &case.targets).unwrap().loss.to_bits();
            (0..4).map(step).collect::<Vec<_>>()
        };
        let mut first = losses(case.pipeline());
        assert_eq!(first, losses(case.pipeline()), "the same steps of two pipelines");
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 4, "no two steps have the same masks");
    }
}

#[test]
fn oracle_gradient_a_step_with_learning_rate_0_changes_nothing() {
    let case = Case::of(Block { attention: attention(0.2, 0.1), mlp: mlp(0.2) });
    let mut pipeline = case.pipeline();
    let before = pipeline.parameters().unwrap();
    pipeline.train_step(&case.inputs[..], &case.targets).unwrap();
    for ((name, a), (_, b)) in before.iter().zip(&pipeline.parameters().unwrap()) {
        assert!(bits(a) == bits(b), "{name}");
    }
}
